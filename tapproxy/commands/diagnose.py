"""``tapproxy diagnose``: records and what was sampled beside them → where the time went, and what to change.

Rules here: nothing is measured but, with --engine, the engine's page of now, and then it is said that it is of now. A
result that a file asked for cannot take does not take the others along.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Annotated, Final

import typer

from tapproxy.commands import diagnose_data, diagnose_evidence, output
from tapproxy.commands.diagnose_result import conclude
from tapproxy.core.errors import ConfigError
from tapproxy.core.objectives import State
from tapproxy.diagnose.roles import Roles, Upstream, assign
from tapproxy.report import console, diagnosis, html

_EXIT_CODES: Final = {"healthy": 0, "degraded": 1}
_COULD_NOT_MEASURE: Final = 3
_DEFAULT_DATA: Final = Path("tapproxy-data")


def diagnose(
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Data directory of a tap; again for a second tap. [default: tapproxy-data]"),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="AGE|TIME", help="From then on: 10m, 2h, 2026-11-29T20:15.")
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="AGE|TIME", help="Until then.")] = None,
    model: Annotated[str | None, typer.Option(help="Only requests for this model.")] = None,
    path: Annotated[str | None, typer.Option(metavar="URI", help="Only requests of this path.")] = None,
    newest: Annotated[int, typer.Option(min=1, help="At most so many records, the newest.")] = diagnose_data.NEWEST,
    outer: Annotated[str | None, typer.Option(metavar="NAME", help="The tap before the proxy.")] = None,
    inner: Annotated[str | None, typer.Option(metavar="NAME", help="The tap next to the engine.")] = None,
    upstream_is: Annotated[
        Upstream | None, typer.Option(help="What stands behind a single tap; else its answers tell.")
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRICS_URL",
            help="Read this metrics page now, twice: where nothing was sampled then (serve --engine-metrics).",
        ),
    ] = None,
    engine_log: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="What the engine logged when it started.")
    ] = None,
    gpu_log: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="nvidia-smi --query-gpu=… --format=csv -l 1.")
    ] = None,
    gpu_topo: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="What nvidia-smi topo -m printed on the engine's host.")
    ] = None,
    nginx_log: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="nginx's access log.")] = None,
    nginx_log_format: Annotated[
        str | None,
        typer.Option(metavar="FORMAT", help="Its log_format, as in nginx's configuration; else its lines are JSON."),
    ] = None,
    sample_interval: Annotated[str, typer.Option(metavar="TIME", help="Between the two readings of --engine.")] = "1s",
    config: Annotated[Path | None, typer.Option(help="A TOML file with [[slo]] tables: objectives to judge.")] = None,
    timeline: Annotated[bool, typer.Option("--timeline", help="Latency over time, with what changed when.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout.")
    ] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write it as one self-contained page.")
    ] = None,
) -> None:
    """Where the time went, which cause it has, and what to change: from a tap's records and what stood beside them.

    Exits 0 where the path is healthy, 1 where it is degraded or misses an objective, 3 where nothing could be
    measured.
    """
    if str(html_file) == "-":
        raise ConfigError("--html does not write to stdout: the page is a file of some MB, so give it a name")
    if html_file is not None and str(html_file) == json_file:
        raise ConfigError(f"--json and --html are both {json_file!r}: the one would overwrite the other")
    console.refuse_unwritable("--json", json_file)
    console.refuse_unwritable("--html", html_file)
    wanted = diagnose_data.Wanted(
        since_ns=None if since is None else diagnose_data.moment_ns(since, "--since"),
        until_ns=None if until is None else diagnose_data.moment_ns(until, "--until"),
        model=model,
        path=path,
        newest=newest,
    )
    if None not in (wanted.since_ns, wanted.until_ns) and wanted.since_ns >= wanted.until_ns:  # type: ignore[operator]  # neither is None
        raise ConfigError(f"--since {since} is not before --until {until}")
    objectives = diagnose_evidence.objectives(config)
    logs = diagnose_evidence.access_logs(nginx_log or (), nginx_log_format)
    with console.Progress() as progress:
        progress.show("reading the records", 0, 0)
        loaded = diagnose_data.load(data or [_DEFAULT_DATA], wanted)
        beside = diagnose_evidence.gather(
            loaded.samples,
            diagnose_evidence.Asked(engine or (), engine_log or (), gpu_log or (), gpu_topo or (), sample_interval),
            [record for records in loaded.taps.values() for record in records[-1:]],
        )
        # Millions of stamps that stay to the end: looking through them for garbage again and again takes a fifth.
        gc.freeze()
        roles = _roles(loaded, outer, inner, upstream_is, beside)
        progress.show(f"{loaded.records} records: looking for the cause", 0, 0)
        result = conclude(
            loaded,
            wanted,
            roles,
            beside,
            objectives=objectives,
            with_timeline=timeline,
            logs=logs,
        )
    shown = {key: value for key, value in result.items() if key not in ("scenario", "tables")}
    output.write(
        shown,
        json_file,
        {str(html_file): lambda target: html.write(result, target)} if html_file is not None else {},
        lambda: diagnosis.show(result, console.stdout()),
    )
    code = _EXIT_CODES.get(result["verdict"], _COULD_NOT_MEASURE)
    missed = any(entry["state"] == State.MISSED for entry in result["slo"])
    raise typer.Exit(code or int(missed))


def _roles(
    loaded: diagnose_data.Loaded,
    outer: str | None,
    inner: str | None,
    upstream_is: Upstream | None,
    beside: diagnose_evidence.Beside,
) -> Roles:
    if not loaded.taps:
        return Roles(None, None, "there are no records")
    return assign(loaded.taps, outer=outer, inner=inner, upstream_is=upstream_is, engines=beside.engine_addresses())
