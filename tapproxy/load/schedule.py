"""When requests are due: a constant rate is constant, an exponential gap is exponential; both from a seed.

Pure numbers. Each path gets the same gaps, so that a burst that one has to take the other has to take too; the
schedules are turned against one another, or both would send at the same instants and be in each other's way. Turning
a Poisson process on its circle leaves it one, and the sum of the turned ones is Poisson to all that can be seen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

_NS: Final = 1_000_000_000


def poisson(paths: Sequence[str], count: int, rate: float, seed: int) -> dict[str, list[int]]:
    """``count`` arrivals for each path, ns from the start, in order; gaps are exponential with mean 1 / ``rate``."""
    chance = random.Random(f"poisson:{seed}:{rate!r}:{count}")
    # The last gap closes the circle: what lies between the last arrival and the end.
    gaps = [chance.expovariate(rate) for _ in range(count + 1)]
    times = list(accumulate(gaps))
    return _turned(paths, times[:-1], times[-1], chance)


def poisson_for(paths: Sequence[str], duration_s: float, rate: float, seed: int) -> dict[str, list[int]]:
    """The arrivals of ``duration_s`` seconds, as many as they happen to be, the same number for each path."""
    chance = random.Random(f"poisson:{seed}:{rate!r}:{duration_s!r}s")
    times: list[float] = []
    at = chance.expovariate(rate)
    while at < duration_s:
        times.append(at)
        at += chance.expovariate(rate)
    return _turned(paths, times or [duration_s / 2], duration_s, chance)


def _turned(
    paths: Sequence[str], times: Sequence[float], circle_s: float, chance: random.Random
) -> dict[str, list[int]]:
    # Evenly spread, from a place that chance gives: no two paths come near to one another.
    order = chance.sample(range(len(paths)), len(paths))
    start = chance.random()
    return {
        path: sorted(round((at + circle_s * (start + place / len(paths))) % circle_s * _NS) for at in times)
        for path, place in zip(paths, order, strict=True)
    }


def constant(paths: Sequence[str], count: int, rate: float, seed: int) -> dict[str, list[int]]:
    """``count`` arrivals for each path, 1 / ``rate`` apart, the paths evenly in between one another."""
    order = random.Random(f"constant:{seed}").sample(range(len(paths)), len(paths))
    return {
        path: [round((turn + place / len(paths)) / rate * _NS) for turn in range(count)]
        for path, place in zip(paths, order, strict=True)
    }
