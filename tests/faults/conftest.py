"""The soak runs beside the other tests of this folder: it is half a minute of waiting for them to share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOAK = "test_soak.py"
SOAK_ARGUMENTS = ("--seconds", "30", "--clients", "24", "--restart-s", "8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of this folder's tests the soak's, which waits for it to end, comes last."""
    places = [place for place, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    ours = sorted((items[place] for place in places), key=lambda item: item.path.name == SOAK)
    for place, item in zip(places, ours, strict=True):
        items[place] = item


@pytest.fixture(scope="session", autouse=True)
def soaking(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str] | None]:
    """The soak, begun with the first test of this folder; None where nobody asked for its test."""
    if all(item.path.name != SOAK for item in request.session.items):
        yield None
        return
    with subprocess.Popen(
        [sys.executable, "-m", "tests.bench.soak", *SOAK_ARGUMENTS],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.terminate()
