"""Exchanges that ended and whose records are still to be made: they are, a few at a time, when that stands in no way.

Making a record costs a third of a short request. Done at the end of each, it would stand between the requests; done in
one go, it would hold up every stream. So they wait for some milliseconds and are then made in short turns of the loop,
which costs less, too: the same code runs many times in a row. A turn ends between two steps of one record as well:
that of a long stream takes longer than any event should wait.
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
TURN_NS: Final = 100_000
# So many that wait make a turn longer by as much again: at full load what comes in a turn of the loop must go in one.
CROWD: Final = 16


class Ledger:
    """Takes what makes a record, and hands the record through ``steps``. ``failed``: how many could not be made."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *steps: Callable[[Record], None]) -> None:
        self.failed = 0
        self._loop = loop
        self._steps = steps
        self._waiting: deque[Callable[[], Record]] = deque()
        # The record in hand, and the steps it has behind it.
        self._record: Record | None = None
        self._step = 0
        self._armed = False

    def add(self, make: Callable[[], Record]) -> None:
        """``make`` is called once, soon."""
        self._waiting.append(make)
        if not self._armed:
            self._armed = True
            self._loop.call_later(WAIT_S, self._turn)

    def _turn(self) -> None:
        until_ns = time.monotonic_ns() + TURN_NS * (1 + len(self._waiting) // CROWD)
        while self._go_on():
            if time.monotonic_ns() > until_ns:
                self._loop.call_soon(self._turn)
                return
        self._armed = False

    def settle(self) -> None:
        """Makes all that wait now."""
        while self._go_on():
            pass

    def _go_on(self) -> bool:
        """Takes one step; False where there is none to take."""
        record = self._record
        try:
            if record is None:
                if not self._waiting:
                    return False
                self._step = 0
                self._record = self._waiting.popleft()()
            else:
                self._steps[self._step](record)
                self._step += 1
                if self._step == len(self._steps):
                    self._record = None
        except Exception:  # a fault of ours costs this record, which is counted as lost, and no other
            self.failed += 1
            self._record = None
        return True
