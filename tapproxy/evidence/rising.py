"""A sum of counters of things that come and go, which never falls.

Rules here: what a thing had counted when it went stays in the sum: a sum over those alive would fall when a worker
ends, and whoever takes differences would read that as a new start.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import Any


class Rising:
    """``total``: everything counted so far. ``most``: between every two readings, the largest rise of one of them.

    ``most`` is a counter as well: its rise over a time is what a core (or a process) that was the busiest in each
    interval did, also where that was not always the same one.
    """

    def __init__(self) -> None:
        self.total = 0.0
        self.most = 0.0
        self._last: dict[Hashable, tuple[float, int]] = {}
        self._turn = 0

    def add(self, readings: Mapping[Any, float], alive: Collection[Hashable] | None = None) -> None:
        """Takes the readings of this turn. ``alive``: those that are there, where not all of them were read.

        One that is new was born since the last turn (at the first turn: some time before), so all of its count is
        of the sum. One that was left out for some turns spreads its rise over them in ``most``.
        """
        first = self._turn == 0
        self._turn += 1
        most = 0.0
        for key, value in readings.items():
            last, turn = self._last.get(key, (0.0, self._turn - 1))
            rise = max(0.0, value - last)
            self.total += rise
            most = max(most, rise / (self._turn - turn))
            self._last[key] = (value, self._turn)
        if not first:
            self.most += most
        kept = readings.keys() if alive is None else alive
        if len(self._last) > len(kept):
            stay = set(kept)
            self._last = {key: each for key, each in self._last.items() if key in stay}
