"""When requests are due: a constant rate is constant, an exponential gap is exponential; both from a seed.

Pure numbers. Each path gets the same gaps, so that a burst that one has to take the other has to take too, but in an
order of its own, or both would send at the same instants and be in each other's way. Gaps of a Poisson process in
another order are one again, and together the paths are Poisson to all that can be seen.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

_NS: Final = 1_000_000_000
_TRIES: Final = 50


def poisson(paths: Sequence[str], count: int, rate: float, seed: int) -> dict[str, list[int]]:
    """``count`` arrivals for each path, ns from the start, in order; gaps are exponential with mean 1 / ``rate``.

    So many arrivals in their expected time: the rate is the one that was asked for, not one that a seed happens upon.
    """
    chance = random.Random(f"poisson:{seed}:{rate!r}:{count}")
    # The last gap is what lies between the last arrival and the end.
    gaps = [chance.expovariate(1) for _ in range(count + 1)]
    scale = (count + 1) / rate / sum(gaps)
    return _shuffled(paths, [gap * scale for gap in gaps], chance)


def poisson_for(paths: Sequence[str], duration_s: float, rate: float, seed: int) -> dict[str, list[int]]:
    """The arrivals of ``duration_s`` seconds, as many as they happen to be, the same number for each path."""
    chance = random.Random(f"poisson:{seed}:{rate!r}:{duration_s!r}s")
    times: list[float] = [0.0]
    while (at := times[-1] + chance.expovariate(rate)) < duration_s:
        times.append(at)
    if len(times) == 1:  # too short for one: there has to be something to measure
        times.append(duration_s / 2)
    return _shuffled(paths, [later - earlier for earlier, later in pairwise([*times, duration_s])], chance)


def _shuffled(paths: Sequence[str], gaps: Sequence[float], chance: random.Random) -> dict[str, list[int]]:
    out: dict[str, list[int]] = {}
    taken: set[int] = set()
    for path in paths:
        for _ in range(_TRIES):
            own = chance.sample(gaps, len(gaps))
            out[path] = [round(at * _NS) for at in accumulate(own)][:-1]
            # Two that begin with the same gap would begin together.
            if taken.isdisjoint(out[path]):
                break
        taken.update(out[path])
    return out


def constant(paths: Sequence[str], count: int, rate: float, seed: int) -> dict[str, list[int]]:
    """``count`` arrivals for each path, 1 / ``rate`` apart, the paths evenly in between one another."""
    order = random.Random(f"constant:{seed}").sample(range(len(paths)), len(paths))
    return {
        path: [round((turn + place / len(paths)) / rate * _NS) for turn in range(count)]
        for path, place in zip(paths, order, strict=True)
    }
