"""The link as a fixture."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tapproxy.wire.link import End, Unavailable, link

DELAY_MS = 20.0


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[End, End]]:
    """Two namespaces, 20 ms apart each way; the test is skipped where the host allows none (it takes root)."""
    with contextlib.ExitStack() as stack:
        try:
            both = stack.enter_context(link(DELAY_MS))
        except Unavailable as why:
            pytest.skip(f"no link between network namespaces: {why}")
        yield both
