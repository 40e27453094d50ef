"""Exchanges that ended and whose records are still to be made: they are, a few at a time, when that stands in no way.

Making a record costs a third of a short request. Done at the end of each, it would stand between the requests; done in
one go, it would hold up every stream. So they wait for some milliseconds and are then made in short turns of the loop,
which costs less, too: the same code runs many times in a row.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from tapproxy.core.record import Record

WAIT_S: Final = 0.02
# How long one turn may take before the streams have theirs.
TURN_NS: Final = 200_000


class Ledger:
    """Takes what makes a record, and hands on the record. ``failed``: how many could not be made."""

    def __init__(self, loop: asyncio.AbstractEventLoop, hand_on: Callable[[Record], None]) -> None:
        self.failed = 0
        self._loop = loop
        self._hand_on = hand_on
        self._waiting: deque[Callable[[], Record]] = deque()
        self._armed = False

    def add(self, make: Callable[[], Record]) -> None:
        """``make`` is called once, soon."""
        self._waiting.append(make)
        if not self._armed:
            self._armed = True
            self._loop.call_later(WAIT_S, self._turn)

    def _turn(self) -> None:
        waiting = self._waiting
        until_ns = time.monotonic_ns() + TURN_NS
        while waiting:
            self._make(waiting.popleft())
            if time.monotonic_ns() > until_ns:
                break
        if waiting:
            self._loop.call_soon(self._turn)
        else:
            self._armed = False

    def settle(self) -> None:
        """Makes all that wait now."""
        while self._waiting:
            self._make(self._waiting.popleft())

    def _make(self, make: Callable[[], Record]) -> None:
        try:
            self._hand_on(make())
        except Exception:  # a fault of ours costs this record, which is counted as lost, and no other
            self.failed += 1
