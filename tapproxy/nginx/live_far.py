"""What a round-trip time adds: the same nginx at the far end of a link of 80 ms, between two network namespaces.

Rules here: only plain HTTP/1.1 is measured so. Nagle's algorithm holds small writes until the last one is acknowledged;
on loopback that is at once, and TLS and HTTP/2 set TCP_NODELAY with their handshake. nginx and the engine are in one
namespace, the client in the other; nothing else is in either.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from tapproxy.nginx import sandbox
from tapproxy.nginx.live_config import Plan
from tapproxy.nginx.live_engine import TARGET, Engine
from tapproxy.nginx.live_stream import Stream, stream_of
from tapproxy.nginx.live_streams import STANDARD, request_headers
from tapproxy.nginx.ports import bound
from tapproxy.nginx.predict import Upstream
from tapproxy.nginx.sandbox import Limits, Nginx, RunningNginx
from tapproxy.wire.fetch import Client, Fetched
from tapproxy.wire.link import End, Unavailable, link

RTT_MS = 80
# A namespace of our own has all of its ports free.
_FIRST_PORT = 20_000
_TIMEOUT_S = 12.0


@dataclass(frozen=True, slots=True)
class Far:
    """The first and the second request of one connection over the link; no second where the first failed."""

    first: Stream
    second: Stream | None


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
        with there.inside():
            sock = bound(ports["ENGINE"])
        await engine.start(sock, tls)
        text = made.filled(ports, there.address)
        await running.start(nginx, text, directory, limits=limits, end=there)
        runs = [engine.expect(STANDARD), engine.expect(STANDARD)]
        url = f"http://{there.address}:{ports[made.listens['http1']]}"
        fetched = await _Fetching(here, url, runs).run()
    finally:
        await engine.close()
        running.directory = running.directory or directory
        await running.stop()
    streams = [stream_of(one, engine.seen[run], one_way_ms=RTT_MS / 2) for one, run in zip(fetched, runs, strict=False)]
    return Far(streams[0], streams[1] if len(streams) > 1 else None)


class _Fetching:
    """Requests from one end, in a thread of its own: all of its sockets are there. It can be stopped from outside."""

    def __init__(self, end: End, url: str, runs: list[int]) -> None:
        self._end = end
        self._url = url
        self._runs = runs
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[list[Fetched]] | None = None
        self._stopped = False

    async def run(self) -> list[Fetched]:
        """What was fetched; when cancelled, not before the thread has ended."""
        working = asyncio.ensure_future(asyncio.to_thread(self._work))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            self._stopped = True
            if self._loop is not None and self._task is not None:
                with contextlib.suppress(RuntimeError):  # its loop has just ended
                    self._loop.call_soon_threadsafe(self._task.cancel)
            await asyncio.gather(working, return_exceptions=True)
            raise

    def _work(self) -> list[Fetched]:
        with self._end.inside():
            return asyncio.run(self._fetch_all())

    async def _fetch_all(self) -> list[Fetched]:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self._stopped:
            raise asyncio.CancelledError
        client = Client(self._url, timeout_s=_TIMEOUT_S)
        try:
            fetched: list[Fetched] = []
            for run in self._runs:
                target = f"{TARGET}?run={run}"
                fetched.append(await client.fetch("POST", target, request_headers(gzip=True), b'{"stream": true}'))
                if fetched[-1].error is not None:
                    break  # the next would only take as long again
            return fetched
        finally:
            await client.close()
