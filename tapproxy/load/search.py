"""The highest rate that still meets the objectives: doubling until it does not, then halving the ratio in between.

Pure: it is asked for the next rate and told what came of it. Rates are tried on a scale of ratios, since a rate of
100 is found as well as one of 0.1.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt
from typing import Final

# The answer is known to within this ratio.
RESOLUTION: Final = 1.05
_MOST_TRIES: Final = 30
_LEAST_RATE: Final = 1e-3
_MOST_RATE: Final = 1e5


@dataclass(slots=True)
class RateSearch:
    """``next_rate`` until it is None; ``best`` is the highest that was met, None where none was."""

    start: float
    resolution: float = RESOLUTION
    best: float | None = None
    # The lowest that was not met.
    worst: float | None = None
    tried: list[tuple[float, bool]] = field(default_factory=list)

    def next_rate(self) -> float | None:
        """The rate to try next, None where the answer is known well enough."""
        if len(self.tried) >= _MOST_TRIES:
            return None
        if not self.tried:
            return self.start
        if self.worst is None:
            assert self.best is not None
            return None if self.best * 2 > _MOST_RATE else self.best * 2
        if self.best is None:
            return None if self.worst / 2 < _LEAST_RATE else self.worst / 2
        if self.worst / self.best <= self.resolution:
            return None
        return sqrt(self.worst * self.best)

    def tell(self, rate: float, met: bool) -> None:
        """What came of it. A rate met above one that was not (chance) does not count."""
        self.tried.append((rate, met))
        if met:
            if self.worst is None or rate < self.worst:
                self.best = rate if self.best is None else max(self.best, rate)
        else:
            self.worst = rate if self.worst is None else min(self.worst, rate)
            if self.best is not None and self.best >= self.worst:
                self.best = max((each for each, ok in self.tried if ok and each < self.worst), default=None)
