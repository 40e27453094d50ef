"""What two clocks may be to one another, as the region of all lines that contradict no stamp; and the lower hull.

Rules here:
* A line is (offset, skew): ``offset + skew · x``, with x in ns from a reference and the skew without unit. Each stamp
  pair is a limit: the line is at least, or at most, so much at x. The lines that keep every limit form a convex polygon
  (the dual of the hulls of Zhang, Liu and Xia, INFOCOM 2002): its width at x is what nobody can know better at x.
* No estimate is made here and nothing is assumed of how delays are distributed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

# Each of two disciplined clocks is slewed by at most 500 ppm; undisciplined quartz is off by under 200.
MAX_SKEW: Final = 1_100e-6
# Beyond what any offset, once a reference is taken out, can be: 28 hours.
_FAR_NS: Final = 1e14


class Limit(NamedTuple):
    """At ``x_ns`` the line is at least (``is_least``) or at most ``value_ns``. ``pair`` is the exchange it is of."""

    x_ns: int
    value_ns: int
    is_least: bool
    pair: int


Vertex = tuple[float, float]  # (offset in ns, skew)


def whole() -> list[Vertex]:
    """Every line there is."""
    return [(-_FAR_NS, -MAX_SKEW), (_FAR_NS, -MAX_SKEW), (_FAR_NS, MAX_SKEW), (-_FAR_NS, MAX_SKEW)]


def cut(region: list[Vertex], limit: Limit) -> list[Vertex]:
    """The lines of the region that keep the limit; empty where none does."""
    x, value = limit.x_ns, limit.value_ns
    if limit.is_least:
        room = [offset + skew * x - value for offset, skew in region]
    else:
        room = [value - offset - skew * x for offset, skew in region]
    if min(room, default=0.0) >= 0:
        return region
    out: list[Vertex] = []
    for index, (vertex, here) in enumerate(zip(region, room, strict=True)):
        before, there = region[index - 1], room[index - 1]
        if (here < 0) != (there < 0):
            share = there / (there - here)
            out.append(
                (before[0] + share * (vertex[0] - before[0]), before[1] + share * (vertex[1] - before[1])),
            )
        if here >= 0:
            out.append(vertex)
    return out


def runs(limits: Sequence[Limit]) -> list[int]:
    """Where each longest stretch of limits that some line keeps ends (exclusive indexes), taken greedily from the
    first: the fewest stretches there can be."""
    ends: list[int] = []
    region = whole()
    for index, limit in enumerate(limits):
        left = cut(region, limit)
        if not left:
            ends.append(index)
            left = cut(whole(), limit)
        region = left
    if limits:
        ends.append(len(limits))
    return ends


def width(region: Sequence[Vertex], x_ns: float) -> tuple[float, float]:
    """The least and the most that a line of the region is at x."""
    values = [offset + skew * x_ns for offset, skew in region]
    return min(values), max(values)


def skews(region: Sequence[Vertex]) -> tuple[float, float]:
    """The least and the greatest skew of the region."""
    return min(skew for _, skew in region), max(skew for _, skew in region)


def is_bounded(region: Sequence[Vertex]) -> bool:
    """Whether limits of both kinds made it."""
    return bool(region) and all(abs(offset) < 0.9 * _FAR_NS for offset, _ in region)


def lower_hull(points: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The lower convex hull of points sorted by x."""
    hull: list[tuple[int, int]] = []
    for point in points:
        while len(hull) > 1 and _turn(hull[-2], hull[-1], point) <= 0:
            hull.pop()
        hull.append(point)
    return hull


def least_slope(points: Sequence[tuple[int, int]]) -> float | None:
    """The slope of the line below all points that is nearest to them on the whole (Moon's linear program): that of the
    hull's edge over the mean x. None where the points span no time."""
    if not points:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    hull = lower_hull(points)
    for (x0, y0), (x1, y1) in pairwise(hull):
        if x0 <= mean_x <= x1 and x1 > x0:
            return (y1 - y0) / (x1 - x0)
    return None


def _turn(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> int:
    """Positive where a → b → c turns left. Exact: these are whole numbers of ns."""
    return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
