"""``tapproxy serve``: the tap."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from tapproxy.commands.self_test import self_test, text
from tapproxy.config import ServeConfig, load_serve_config
from tapproxy.sampling import Source
from tapproxy.supervisor import Supervisor


def serve(
    upstream: Annotated[
        str | None, typer.Option(help="Where requests go: http://HOST:PORT, https://HOST:PORT or unix:/PATH.")
    ] = None,
    listen: Annotated[str | None, typer.Option(help="The data port, HOST:PORT; port 0 takes a free one.")] = None,
    admin: Annotated[
        str | None, typer.Option(help="The admin port: /metrics, /healthz, /readyz, /api/records, /api/status.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="This tap's name in its records.")] = None,
    data: Annotated[Path | None, typer.Option(help="Directory of the records.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML file; flags win over it.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that carry traffic.")] = None,
    max_disk: Annotated[str | None, typer.Option(help="Most disk the records may take, such as 1GiB.")] = None,
    pair_key: Annotated[
        str | None, typer.Option(help="Key shared by paired taps, for the fingerprints of request bodies.")
    ] = None,
    admin_token: Annotated[
        str | None, typer.Option(help="Bearer token of the admin port; needed to bind it beyond loopback.")
    ] = None,
    connect_timeout: Annotated[str | None, typer.Option(help="Limit for connecting upstream (10s).")] = None,
    head_timeout: Annotated[str | None, typer.Option(help="Limit for the response head (off).")] = None,
    idle_timeout: Annotated[str | None, typer.Option(help="Limit for silence within an answer (off).")] = None,
    header_timeout: Annotated[str | None, typer.Option(help="Limit for a client's request head (30s).")] = None,
    client_keepalive: Annotated[str | None, typer.Option(help="How long an idle client may stay (75s).")] = None,
    upstream_keepalive: Annotated[
        str | None, typer.Option(help="How long an idle upstream connection is kept (3s; vLLM closes at 5s).")
    ] = None,
    shutdown_grace: Annotated[str | None, typer.Option(help="How long streams may finish after SIGTERM (30s).")] = None,
    upstream_ca: Annotated[Path | None, typer.Option(help="CA certificates that verify an https upstream.")] = None,
    insecure: Annotated[bool | None, typer.Option("--insecure", help="Do not verify an https upstream.")] = None,
    rewrite_host: Annotated[
        bool | None, typer.Option("--rewrite-host", help="Send the upstream's own name as Host. Alters traffic.")
    ] = None,
    strict_http: Annotated[
        bool | None,
        typer.Option(
            "--strict-http", help="No chunked answer to an HTTP/1.0 client, as the RFC has it. Alters traffic."
        ),
    ] = None,
    mirror_connections: Annotated[
        bool | None, typer.Option("--mirror-connections", help="One upstream connection a client connection, no pool.")
    ] = None,
    ack_stamps: Annotated[
        bool | None,
        typer.Option("--ack-stamps", help="Stamp when the client's kernel had each event (some 9 µs more an event)."),
    ] = None,
    self_test: Annotated[
        bool | None,
        typer.Option("--self-test", help="First measure a calibrated stream through a worker, and print the errors."),
    ] = None,
    allow_probe: Annotated[
        bool | None,
        typer.Option(
            "--allow-probe", help="Let `tapproxy probe` ask the admin port for a key, and answer what bears it here."
        ),
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain: TLS on the data port.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    engine_metrics: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Sample the engine's metrics page meanwhile; repeatable. For `diagnose`."),
    ] = None,
    engine_pid: Annotated[
        list[int] | None,
        typer.Option(metavar="PID", help="Sample this host and the engine's process on it; repeatable."),
    ] = None,
    gpu: Annotated[bool | None, typer.Option("--gpu", help="Sample this host and its NVIDIA cards.")] = None,
    sample_interval: Annotated[str | None, typer.Option(metavar="TIME", help="How often (1s).")] = None,
) -> None:
    """Relay requests unchanged, stamp every event on both sides, write one record a request.

    Runs until SIGTERM or Ctrl-C; then streams finish, and a second signal cuts them.
    """
    given: dict[str, Any] = {
        key: value for key, value in locals().items() if key != "config" and value not in (None, [])
    }
    asyncio_run(load_serve_config(config, given))


def _watched(config: ServeConfig) -> Sequence[Source]:
    """What is sampled beside the traffic. Its readers (an HTTP client, NVML) take a tenth of a second to load."""
    if not (config.engine_metrics or config.engine_pid or config.gpu):
        return ()
    from tapproxy import sources

    return sources.of(config)


def asyncio_run(config: ServeConfig) -> None:
    """Runs a tap in this process until it is stopped."""
    if config.insecure:
        sys.stderr.write("tapproxy: --insecure: the upstream's certificate is NOT verified; anyone may answer for it\n")

    def announce(data: str, admin: str) -> None:
        sys.stdout.write(f"tapproxy: data on {data}, admin on {admin}\n")
        sys.stdout.flush()

    async def tested(supervisor: Supervisor) -> dict[str, Any]:
        result = await self_test(supervisor)
        sys.stdout.write(text(result))
        sys.stdout.flush()
        return result

    # A core dump would hold prompts and keys. The workers inherit this.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # A stream takes two descriptors, and the usual soft limit of 1024 is reached before anything else is.
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))

    watched = _watched(config)

    async def run() -> Supervisor:
        supervisor = Supervisor(config, announce, tested if config.self_test else None, watched)
        await supervisor.run()
        return supervisor

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        supervisor = runner.run(run())
    store = supervisor.store
    lost = f", {store.lost} lost ({store.last_error})" if store.lost else ""
    sys.stderr.write(f"tapproxy: stopped; {store.written} records written to {config.data}{lost}\n")
    samples = supervisor.sample_store
    if samples.written or samples.lost:
        lost = f", {samples.lost} lost ({samples.last_error})" if samples.lost else ""
        sys.stderr.write(f"tapproxy: {samples.written} samples beside them{lost}\n")
    if supervisor.interrupted:
        raise typer.Exit(130)
