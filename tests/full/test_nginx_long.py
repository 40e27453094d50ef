"""nginx with and without a tap behind it, twenty streams a case: what CI tries once, with its spread.

pytest -o addopts= -s tests/full
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tapproxy.nginx.sandbox import Nginx, make_certificate
from tests.e2e.helpers import engine
from tests.e2e.test_nginx_same import ENGINES, VERSIONS, Shape, before, different, expected_to_stream, shape
from tests.harness import tap

STREAMS = 20
Place = tuple[str, int, int, Path]


@pytest.fixture(scope="module", params=ENGINES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The kind of engine, its port, the tap's, and where the certificate is."""
    kind = str(request.param)
    directory = tmp_path_factory.mktemp("nginx")
    make_certificate(directory)
    with ExitStack() as stack:
        running = stack.enter_context(engine(*ENGINES[kind]))
        between = stack.enter_context(tap(directory / "tap", running.url))
        yield kind, running.port, between.data[1], directory


async def many(nginx: Nginx, direct: int, tapped: int, *, tls: bool, certificates: Path) -> list[tuple[Shape, Shape]]:
    async with (
        before(nginx, direct, tls=tls, certificates=certificates) as one,
        before(nginx, tapped, tls=tls, certificates=certificates) as other,
    ):
        return [(await shape(one, tls=tls), await shape(other, tls=tls)) for _ in range(STREAMS)]


def middle(shapes: list[Shape]) -> Shape:
    def median(name: str) -> float:
        return float(sorted(getattr(one, name) for one in shapes)[len(shapes) // 2])

    return Shape(
        reads=int(median("reads")),
        most_in_one_read=int(median("most_in_one_read")),
        head_ms=median("head_ms"),
        first_event_ms=median("first_event_ms"),
        hold_p50_ms=median("hold_p50_ms"),
        hold_max_ms=median("hold_max_ms"),
    )


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("nginx", VERSIONS, ids=[nginx.version for nginx in VERSIONS])
def test_nginx_does_the_same_in_the_median(nginx: Nginx, tls: bool, place: Place) -> None:
    kind, direct, tapped, certificates = place
    pairs = asyncio.run(many(nginx, direct, tapped, tls=tls, certificates=certificates))
    one, other = middle([pair[0] for pair in pairs]), middle([pair[1] for pair in pairs])
    for name, found in (("directly", one), ("with a tap", other)):
        sys.stdout.write(
            f"\n{kind:8} {nginx.version:7} {'tls' if tls else 'plain':6} {name:11} reads {found.reads:4d}"
            f"  head {found.head_ms:6.1f}  first {found.first_event_ms:6.1f}"
            f"  hold {found.hold_p50_ms:7.2f} / {found.hold_max_ms:7.2f} ms"
        )
    assert one.streams == other.streams == expected_to_stream(nginx, tls, kind)
    assert different(one, other) is None
