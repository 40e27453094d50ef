"""What a round-trip time adds: the same nginx at the far end of a link of 80 ms, between two network namespaces.

Rules here: only plain HTTP/1.1 is measured so. Nagle's algorithm holds small writes until the last one is acknowledged;
on loopback that is at once, and TLS and HTTP/2 set TCP_NODELAY with their handshake. nginx and the engine are in one
namespace, the client in the other; nothing else is in either.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from tapproxy.nginx import sandbox
from tapproxy.nginx.live_config import Plan
from tapproxy.nginx.live_engine import TARGET, Engine
from tapproxy.nginx.live_streams import STANDARD, Stream, request_headers, stream_of
from tapproxy.nginx.predict import Upstream
from tapproxy.nginx.sandbox import Limits, Nginx, RunningNginx
from tapproxy.wire.fetch import Client, Fetched
from tapproxy.wire.link import End, Unavailable, link

RTT_MS = 80
# A namespace of our own has all of its ports free.
_FIRST_PORT = 20_000
_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Far:
    """The first and the second request of one connection over the link."""

    first: Stream
    second: Stream


@contextlib.contextmanager
def far_link() -> Iterator[tuple[End, End] | str]:
    """Both ends of a link of ``RTT_MS``, or why this host has none."""
    with contextlib.ExitStack() as stack:
        try:
            found: tuple[End, End] | str = stack.enter_context(link(RTT_MS / 2))
        except (Unavailable, OSError) as why:
            found = str(why)
        yield found


async def measure_far(nginx: Nginx, made: Plan, profile: Upstream, ends: tuple[End, End], limits: Limits) -> Far:
    """Two standard streams, one after the other on one connection. Raises MeasureError where nginx does not start."""
    here, there = ends
    ports = {place: _FIRST_PORT + index for index, place in enumerate(made.places)}
    engine = Engine(profile)
    running = RunningNginx()
    directory = sandbox.private_directory()
    try:
        cert, key = sandbox.make_certificate(directory)
        tls = sandbox.server_tls(cert, key) if made.engine_tls else None
        await engine.start(_listening(there, ports["ENGINE"]), tls)
        text = made.filled(ports, there.address)
        await running.start(nginx, text, directory, limits=limits, end=there)
        runs = [engine.expect(STANDARD), engine.expect(STANDARD)]
        url = f"http://{there.address}:{ports[made.listens['http1']]}"
        fetched = await asyncio.to_thread(_fetch_all, here, url, runs)
    finally:
        await engine.close()
        running.directory = running.directory or directory
        await running.stop()
    first, second = (
        stream_of(one, engine.seen[run], one_way_ms=RTT_MS / 2) for one, run in zip(fetched, runs, strict=True)
    )
    return Far(first, second)


def _listening(end: End, port: int) -> socket.socket:
    with end.inside():
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    return sock


def _fetch_all(end: End, url: str, runs: list[int]) -> list[Fetched]:
    """In a thread of its own: all of its sockets are at this end."""

    async def fetch_all() -> list[Fetched]:
        client = Client(url, timeout_s=_TIMEOUT_S)
        try:
            return [
                await client.fetch("POST", f"{TARGET}?run={run}", request_headers(gzip=True), b'{"stream": true}')
                for run in runs
            ]
        finally:
            await client.close()

    with end.inside():
        return asyncio.run(fetch_all())
