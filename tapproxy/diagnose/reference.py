"""Slow against what: the run's own better part, since a slow engine that is steady is slow by design.

Rules here: only requests of one model and route are compared with each other; parts are compared at the same load and,
where lengths are known, the same lengths; a part that was merely busier proves nothing. Medians of parts, never single
requests.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Final

from tapproxy.diagnose.served import Served

# So many requests give a part its median; and a run is cut into no more parts than these.
PART_LEAST: Final = 15
PARTS_MOST: Final = 6
# Slower by half, at a load and at lengths no more than so far above the better part's.
SLOWER: Final = 1.5
SAME_LOAD: Final = 1.25
# Under this many values a correlation is a matter of luck; and lengths that hardly vary show no slope.
FIT_LEAST: Final = 11
VARIES: Final = 0.1


# Requests in time order, each with the value that is compared.
Part = Sequence[tuple[Served, float]]


@dataclass(frozen=True, slots=True)
class Drift:
    """``slow``: the requests of the slower parts, with what they took beyond ``best``, the better parts' median."""

    slow: Sequence[tuple[Served, float]]
    best: float
    middle: float


def drift(values: Sequence[tuple[Served, float]], least_ns: float) -> Drift | None:
    """Whether parts of the run are slower than its better ones under the same load, by ``least_ns`` and ``SLOWER``; of
    several kinds of request, the one of which most were slower."""
    kinds: dict[object, list[tuple[Served, float]]] = defaultdict(list)
    for one, value in values:
        kinds[one.kind].append((one, value))
    found = [each for kind in kinds.values() if (each := _drift(kind, least_ns)) is not None]
    return max(found, key=lambda each: len(each.slow), default=None)


def _drift(values: Part, least_ns: float) -> Drift | None:
    if len(values) < 2 * PART_LEAST:
        return None
    count = min(PARTS_MOST, len(values) // PART_LEAST)
    cuts = [len(values) * i // count for i in range(count + 1)]
    parts = [values[a:b] for a, b in pairwise(cuts)]
    least = min(map(_median, parts))
    limit = max(SLOWER * least, least + least_ns)
    # Of short and long requests in equal numbers, one more of the long ones moves a part's median to theirs, and not
    # its lower quartile: what became slower did so for most.
    least_quick = SLOWER * min(map(_quick, parts))
    good: list[Part] = []
    slow: list[Part] = []
    for part in parts:
        (slow if _median(part) >= limit and _quick(part) >= least_quick else good).append(part)
    taken = [pair for part in slow if _is_no_busier(part, good) for pair in part]
    if not taken:
        return None
    best = median(value for part in good for _, value in part)
    return Drift([(one, value - best) for one, value in taken], best, _median(taken))


def correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Pearson's r; None with too few pairs, or where the first of them hardly varies."""
    if len(pairs) < FIT_LEAST:
        return None
    xs, ys = [x for x, _ in pairs], [y for _, y in pairs]
    x_mean, y_mean = fmean(xs), fmean(ys)
    x_square = sum((x - x_mean) ** 2 for x in xs)
    y_square = sum((y - y_mean) ** 2 for y in ys)
    if y_square == 0 or (x_square / len(xs)) ** 0.5 < VARIES * abs(x_mean):
        return None
    both = sum((x - x_mean) * (y - y_mean) for x, y in pairs)
    return float(both / (x_square * y_square) ** 0.5)


def slope(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Least squares: how much the second rises with one more of the first."""
    x_mean, y_mean = fmean(x for x, _ in pairs), fmean(y for _, y in pairs)
    square = sum((x - x_mean) ** 2 for x, _ in pairs)
    return sum((x - x_mean) * (y - y_mean) for x, y in pairs) / square if square else None


def _median(part: Part) -> float:
    return median(value for _, value in part)


def _quick(part: Part) -> float:
    """The lower quartile."""
    return sorted(value for _, value in part)[len(part) // 4]


def _is_no_busier(part: Part, good: Sequence[Part]) -> bool:
    """With arrivals of their own, slow requests pile up: then the arrivals must be no denser, and no more of them in
    flight than their slowness explains. With a set number at once, that number must be no higher."""
    together = [pair for each in good for pair in each]
    if _mean(part, _length) > SAME_LOAD * _mean(together, _length) + 1:
        return False
    in_flight, before = _mean(part, _in_flight), _mean(together, _in_flight)
    if in_flight <= SAME_LOAD * before + 1:
        return True
    slower = _median(part) / _median(together) if _median(together) else 1.0
    same = is_same_rate(_rate(part), fmean(map(_rate, good)), len(part))
    return same and in_flight <= SAME_LOAD * slower * before + 1


def is_same_rate(rate: float, before: float, count: int) -> bool:
    """Whether arrivals were no denser, as far as ``count`` random ones tell: two standard deviations are no change."""
    return rate <= SAME_LOAD * (1 + 2 / math.sqrt(max(1, count))) * before


def _mean(part: Part, of: Callable[[Served], float]) -> float:
    return fmean(of(one) for one, _ in part)


def _in_flight(one: Served) -> float:
    return one.in_flight


def _length(one: Served) -> float:
    return one.prompt_tokens or 0


def _rate(part: Part) -> float:
    span_ns = part[-1][0].asked_ns - part[0][0].asked_ns
    return (len(part) - 1) / span_ns if span_ns > 0 else float("inf")
