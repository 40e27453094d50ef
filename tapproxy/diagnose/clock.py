"""Two hosts' clocks, from the exchanges that both saw: offset, skew, and how far they may be off.

Rules here:
* Only what must have come before what is used: no byte arrives before it was sent. The way in gives what the offset is
  at least, the way out what it is at most; in between nothing on two hosts can tell it. So every bound is half a
  round trip, never a guess at how that round trip divides, and a hop that holds everything widens it.
* Stamps are those that stand on the safe side: taken before a write, after a read. ``sent`` is taken after its write,
  so a sender that was put aside would date its event too late; what was read just before it is used instead.
* A skew is told only where the stamps prove it, or both ways agree on it; the bound allows for any that fits.
* Where no line fits, the clocks stepped or were slewed: the run is split, and what lies on a step has no times.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, Final, NamedTuple

from tapproxy.core.record import Ended, Record
from tapproxy.diagnose.pairing import Pair, pair_events, untrusted
from tapproxy.diagnose.region import Limit, Vertex, cut, is_bounded, least_slope, runs, skews, whole, width

METHOD: Final = "lower hulls of the one-way delays in both directions, bounded by their sum (causality, no symmetry)"
# Kernel stamps are turned into monotonic ones by an offset sampled now and then: good to some µs.
_STAMP_NS: Final = 20_000
# Two disciplined clocks drift apart evenly but for this much (a tenth of a ppm, temperature and corrections).
_WANDER: Final = 0.1e-6
# Of one stream so many stretches give a limit each: enough to follow the clocks through a long answer.
_STRETCHES: Final = 16
# A stretch between steps wants this many exchanges; with more steps than that nothing is known of the clocks.
_PAIRS_PER_PIECE: Final = 5
_PIECES_MOST: Final = 64
# Windows whose own limits a line must leave room for: a clock that wanders squeezes the whole, not its parts.
_WINDOWS_MOST: Final = 10
_WINDOW_PAIRS: Final = 3
# Both ways confirm a skew when they differ by no more than half of it, and minima of windows keep going one way.
_SKEWS_AGREE: Final = 0.5
_TREND_WINDOWS: Final = 8
_TREND_SHARE: Final = 0.75


class Reading(NamedTuple):
    """The offset at a moment (near clock − far clock), its change per ns, and how far both may be off in that span."""

    offset_ns: int
    skew: float
    bound_ns: int
    skew_bound: float


@dataclass(frozen=True, slots=True)
class Piece:
    """A span of the far clock over which one line fits. Offsets are relative to ``base_ns``, times to ``at_ns``."""

    from_ns: int
    to_ns: int
    at_ns: int
    base_ns: int
    offset_ns: float
    skew: float
    region: tuple[Vertex, ...]
    least_bound_ns: float = 0.0
    limits: int = 0

    def line(self, far_ns: int) -> float:
        """Near clock − far clock."""
        return self.base_ns + self.offset_ns + self.skew * (far_ns - self.at_ns)

    def bound(self, far_ns: int) -> float:
        """How far any clock that the stamps allow is from ``line``, with an allowance for wander."""
        x = far_ns - self.at_ns
        here = self.offset_ns + self.skew * x
        low, high = width(self.region, x)
        wander = _WANDER * (self.to_ns - self.from_ns) / 2
        return max(high - here, here - low, self.least_bound_ns) + wander


@dataclass(frozen=True, slots=True)
class Step:
    """The near clock jumped against the far one by so much, between these two moments of the far one."""

    from_ns: int
    to_ns: int
    size_ns: int

    def to_dict(self) -> dict[str, Any]:
        return {"within_s": (self.to_ns - self.from_ns) / 1e9, "size_ms": round(self.size_ns / 1e6, 3)}


@dataclass(frozen=True, slots=True)
class Clock:
    """What the far boot's clock is on the near one. No ``pieces``: it is unknown, and ``reason`` says why."""

    near_boot: str
    far_boot: str
    pieces: list[Piece] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    pairs: int = 0
    forward: int = 0
    backward: int = 0
    reason: str | None = None

    def over(self, from_ns: int, to_ns: int) -> Reading | None:
        """The clock over a span of the far one; None where it is unknown or jumped."""
        if not self.pieces:
            return None
        first = max(0, bisect_right(self.pieces, from_ns, key=lambda piece: piece.from_ns) - 1)
        last = max(first, bisect_right(self.pieces, to_ns, key=lambda piece: piece.from_ns) - 1)
        if last + 1 < len(self.pieces) and to_ns > self.pieces[last].to_ns:
            last += 1
        if first > 0 and from_ns < self.pieces[first].from_ns:
            first -= 1
        if first == last:
            piece = self.pieces[first]
            # A convex function is greatest at an end.
            bound = max(piece.bound(from_ns), piece.bound(to_ns))
            low, high = skews(piece.region)
            rate = max(high - piece.skew, piece.skew - low)
            return Reading(round(piece.line(from_ns)), piece.skew, -int(-bound // 1), rate)
        if any(step.from_ns < to_ns and from_ns < step.to_ns for step in self.steps):
            return None
        return _across(self.pieces[first : last + 1], from_ns, to_ns)

    def to_dict(self) -> dict[str, Any]:
        """For showing: offset and bound in the middle of the longest piece, the largest bound, skew, counts, steps."""
        out: dict[str, Any] = {
            "near_boot": self.near_boot,
            "far_boot": self.far_boot,
            "method": METHOD,
            "pairs": self.pairs,
            "forward": self.forward,
            "backward": self.backward,
            "reason": self.reason,
        }
        if not self.pieces:
            return {**out, "offset_ms": None, "bound_ms": None, "bound_most_ms": None, "skew_ppm": None, "steps": []}
        main = self.main
        middle = (main.from_ns + main.to_ns) // 2
        most = max(max(piece.bound(piece.from_ns), piece.bound(piece.to_ns)) for piece in self.pieces)
        low, high = skews(main.region)
        return {
            **out,
            "offset_ms": round(main.line(middle) / 1e6, 6),
            "bound_ms": round(main.bound(middle) / 1e6, 3),
            "bound_most_ms": round(most / 1e6, 3),
            "skew_ppm": round(main.skew * 1e6, 3) if main.skew else None,
            "skew_ppm_between": [round(low * 1e6, 3), round(high * 1e6, 3)],
            "pieces": len(self.pieces),
            "steps": [step.to_dict() for step in self.steps],
        }

    def sentence(self) -> str:
        """What a reader must know of it."""
        if not self.pieces:
            return f"the clocks of two hosts could not be compared: {self.reason}"
        shown = self.to_dict()
        skew = f", running apart by {shown['skew_ppm']:.1f} ppm" if shown["skew_ppm"] else ""
        jumps = len(self.steps)
        times = "once" if jumps == 1 else f"{jumps} times"
        jumped = f"; they jumped {times}, and requests across that have no times between the hosts" if jumps else ""
        return (
            f"two hosts' clocks were put on one by {self.pairs} requests: {shown['offset_ms']:.3f} ms apart{skew}; a "
            f"time from one host to the other is good to ± {shown['bound_most_ms']:.3f} ms{jumped}"
        )

    @property
    def main(self) -> Piece:
        """The piece that most stamps stand behind."""
        return max(self.pieces, key=lambda piece: piece.limits)


def fit(near_boot: str, far_boot: str, pairs: Sequence[Pair]) -> Clock:
    """The clocks of two boots from exchanges that both saw (``outer`` on the near one, ``inner`` on the far one)."""
    limits = sorted(limit for number, each in enumerate(pairs) for limit in limits_of(each, number))
    forward = sum(limit.is_least for limit in limits)
    none = Clock(near_boot, far_boot, pairs=len(pairs), forward=forward, backward=len(limits) - forward)
    if not forward or forward == len(limits):
        way = "way in" if not forward else "way out"
        reason = f"no exchange shows the {way} on both hosts: the offset of their clocks is unknown"
        return replace(none, reason=reason)
    at_ns = limits[len(limits) // 2].x_ns
    base_ns = int(median(limit.value_ns for limit in limits))
    relative = [limit._replace(x_ns=limit.x_ns - at_ns, value_ns=limit.value_ns - base_ns) for limit in limits]
    found = _pieces(relative, len(pairs))
    if found is None:
        reason = "no clock fits: the hosts' clocks jump again and again, or the requests were mixed up"
        return replace(none, reason=reason)
    pieces = [piece for core in found if (piece := _piece(core, at_ns, base_ns)) is not None]
    if not pieces:
        reason = "too few exchanges between two steps of the clocks"
        return replace(none, reason=reason)
    return replace(none, pieces=pieces, steps=_steps(pieces))


def limits_of(each: Pair, number: int = 0) -> Iterator[Limit]:
    """What one exchange says of near clock − far clock, at moments of the far one."""
    near, far = each.outer, each.inner
    if untrusted(near) is not None or untrusted(far) is not None:
        return

    def limit(near_ns: int | None, far_ns: int | None, is_least: bool) -> Iterator[Limit]:
        if near_ns is None or far_ns is None:
            return
        x_ns = far.t0_mono_ns + far_ns
        slack_ns = -_STAMP_NS if is_least else _STAMP_NS
        yield Limit(x_ns, near.t0_mono_ns + near_ns - x_ns + slack_ns, is_least, number)

    yield from limit(near.upstream.write_start, 0, True)
    if far.request.bytes > 0 and near.request.bytes == far.request.bytes:
        # The last byte of a slow upload left the near tap after it had read it.
        yield from limit(near.request.body_end, far.request.body_end, True)
    matched = pair_events(near, far)
    if matched.by is not None:
        arrived, read_at = near.events.arrived, far.events.read_at
        size = max(1, -(-len(matched.pairs) // _STRETCHES))
        for start in range(0, len(matched.pairs), size):
            a, b = min(matched.pairs[start : start + size], key=lambda pair: arrived[pair[0]] - read_at[pair[1]])
            yield from limit(arrived[a], read_at[b], False)
    if not _same_answer(near, far):
        return
    yield from limit(near.upstream.head, far.upstream.head, False)
    if matched.by is None:
        # An encoded body has no events on one side; its first byte and its end are still the other's, later.
        yield from limit(near.upstream.first_byte, far.upstream.first_byte, False)
        yield from limit(near.upstream.end, far.upstream.end, False)


def sure(value_ns: int | None, bound_ns: int) -> int | None:
    """A number that hangs on two clocks, or None where it may as well be its own error."""
    return value_ns if value_ns is not None and abs(value_ns) >= bound_ns else None


def _same_answer(near: Record, far: Record) -> bool:
    """Whether what the near tap read is the far tap's answer and not one the proxy made before it had that."""
    whole = near.ended == far.ended == Ended.COMPLETE
    return whole and near.status is not None and near.status == far.status and near.status < 500


def _pieces(limits: Sequence[Limit], pairs: int) -> list[Sequence[Limit]] | None:
    """The limits of each stretch that one line fits, without those that may lie on either side of a break."""
    count = len(limits)
    ends = runs(limits)
    if len(ends) > min(_PIECES_MOST, 1 + pairs // _PAIRS_PER_PIECE):
        return None
    # Taken from the first on, a break is found at its latest; from the last back, at its earliest.
    starts = [count - end for end in reversed(runs(limits[::-1]))]
    after = [0, *ends[:-1]]
    before = [*starts[1:], count]
    return [limits[a:b] for a, b in zip(after, before, strict=True) if a < b]


def _piece(limits: Sequence[Limit], at_ns: int, base_ns: int) -> Piece | None:
    region = whole()
    for limit in limits:
        region = cut(region, limit)
    if not is_bounded(region):
        return None
    start, end = limits[0].x_ns, limits[-1].x_ns
    offset, skew = _line(region, limits, start, end)
    return Piece(
        from_ns=at_ns + start,
        to_ns=at_ns + end,
        at_ns=at_ns,
        base_ns=base_ns,
        offset_ns=offset,
        skew=skew,
        region=tuple(region),
        least_bound_ns=_room(limits, offset, skew) / 2,
        limits=len(limits),
    )


def _line(region: Sequence[Vertex], limits: Sequence[Limit], start: int, end: int) -> Vertex:
    """In the middle of what fits: with the skew where it is shown, else constant."""
    at_start, at_end = width(region, start), width(region, end)
    if start < end and _has_skew(region, limits):
        first, last = sum(at_start) / 2, sum(at_end) / 2
        skew = (last - first) / (end - start)
        return first - skew * start, skew
    return (max(at_start[1], at_end[1]) + min(at_start[0], at_end[0])) / 2, 0.0


def _has_skew(region: Sequence[Vertex], limits: Sequence[Limit]) -> bool:
    low, high = skews(region)
    if low > 0 or high < 0:
        return True
    least = [(limit.x_ns, -limit.value_ns) for limit in limits if limit.is_least]
    most = [(limit.x_ns, limit.value_ns) for limit in limits if not limit.is_least]
    one, other = least_slope(least), least_slope(most)
    if one is None or other is None or (one < 0) == (other < 0):
        return False
    # The way in shows the offset from below: its slope is turned round.
    if abs(-one - other) > _SKEWS_AGREE * min(abs(one), abs(other)):
        return False
    return _keeps_going(least, one) and _keeps_going(most, other)


def _keeps_going(points: Sequence[tuple[int, int]], slope: float) -> bool:
    """Whether the minima of windows follow the slope's sign nearly always (Paxson's test for a trend)."""
    size = len(points) // _TREND_WINDOWS
    if size == 0:
        return False
    minima = [min(y for _, y in points[n * size : (n + 1) * size]) for n in range(_TREND_WINDOWS)]
    follows = sum((b - a) * slope > 0 for a, b in pairwise(minima))
    return follows >= _TREND_SHARE * (_TREND_WINDOWS - 1)


def _room(limits: Sequence[Limit], offset: float, skew: float) -> float:
    """The least that the exchanges of any one window leave: a clock that wanders squeezes the line between windows that
    are far apart, and would have it look truer than it is."""
    # By exchange, since one shows its way in when it begins and, held, its way out only when it ends.
    of_pair: dict[int, list[Limit]] = defaultdict(list)
    for limit in limits:
        of_pair[limit.pair].append(limit)
    exchanges = list(of_pair.values())
    windows = min(_WINDOWS_MOST, len(exchanges) // _WINDOW_PAIRS)
    if windows < 2:
        return 0.0
    size = -(-len(exchanges) // windows)
    rooms = []
    for start in range(0, len(exchanges), size):
        window = [limit for exchange in exchanges[start : start + size] for limit in exchange]
        least = [offset + skew * n.x_ns - n.value_ns for n in window if n.is_least]
        most = [n.value_ns - offset - skew * n.x_ns for n in window if not n.is_least]
        if least and most:
            rooms.append(min(least) + min(most))
    return max(0.0, min(rooms, default=0.0))


def _steps(pieces: Sequence[Piece]) -> list[Step]:
    """The breaks at which the lines of both sides are truly apart; elsewhere the clock only bent."""
    found = []
    for a, b in pairwise(pieces):
        middle = (a.to_ns + b.from_ns) // 2
        size = b.line(middle) - a.line(middle)
        if abs(size) > a.bound(middle) + b.bound(middle):
            found.append(Step(a.to_ns, b.from_ns, round(size)))
    return found


def _across(pieces: Sequence[Piece], from_ns: int, to_ns: int) -> Reading:
    """Over a bend: all that either side allows."""
    ends = []
    for at_ns in (from_ns, to_ns):
        low = min(piece.line(at_ns) - piece.bound(at_ns) for piece in pieces)
        high = max(piece.line(at_ns) + piece.bound(at_ns) for piece in pieces)
        ends.append(((low + high) / 2, (high - low) / 2))
    (first, bound_first), (last, bound_last) = ends
    bound, length = max(bound_first, bound_last), max(1, to_ns - from_ns)
    return Reading(round(first), (last - first) / length, -int(-bound // 1), 2 * bound / length)
