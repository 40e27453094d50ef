"""Joining by the request's body alone: what two taps call the same bytes, told apart by time.

Rules here:
* Never guessed. A request whose body was sent again near enough in time is left out and counted; so is one whose lag
  is not what the hop takes with the others, since its own partner may be what was lost.
* Nothing arrives before it was sent: an answer that the near tap had before the far one is another request's.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from tapproxy.core.counts import TOKEN_KINDS
from tapproxy.core.record import Ended, Record

# Two sends of one prompt are told apart by time only when the rival is clearly farther away than the match …
_RIVAL_FACTOR: Final = 3
_RIVAL_MARGIN_NS: Final = 5_000_000
# … and the match itself is as near as the hop's matches are, where it begins and where it ends: nearer still where
# records are missing, since those that lost their partners then look like pairs. (factor, margin)
_USUAL: Final = (10, 10_000_000)
_USUAL_OF_LOSSES: Final = (3, 2_000_000)
# An answer that a busy machine stamped late at its sender may seem to come before itself, by so much at most.
_EARLY_NS: Final = 5_000_000

Lag = Callable[[Record, Record], int | None]


@dataclass(frozen=True, slots=True)
class Found:
    """``pairs`` of indexes; ``ambiguous``: how many of the near side had candidates, none of them certain."""

    pairs: list[tuple[int, int]]
    ambiguous: int


@dataclass(frozen=True, slots=True)
class Time:
    """How the two sides' times compare: ``of`` a record, and how far two of them may disagree. Without a common clock
    order decides nothing, so whatever has a rival is ambiguous."""

    near: Callable[[Record], int]
    far: Callable[[Record], int]
    slack_ns: int
    common: bool


def by_fingerprint(
    outer: Mapping[int, Record], inner: Mapping[int, Record], lag: Lag, time: Time, known_lags_ns: Sequence[int]
) -> Found:
    """Mutually nearest in time, where every other candidate clearly belongs to somebody else.

    ``lag``: how much later the inner tap saw the request begin, None where they cannot be one. ``known_lags_ns``: those
    of requests that ids joined, on the same clocks.
    """
    matches: list[tuple[int, int, int]] = []
    ambiguous = 0
    outer_groups, inner_groups = _grouped(outer), _grouped(inner)
    for fingerprint, nears in outer_groups.items():
        fars = inner_groups.get(fingerprint, [])
        if fars:
            found, seen = _match(nears, fars, outer, inner, lag, time)
            matches += found
            ambiguous += seen - len(found)
    if not matches:
        return Found([], ambiguous)
    counts = [{name: len(group) for name, group in groups.items()} for groups in (outer_groups, inner_groups)]
    factor, margin_ns = _USUAL if counts[0] == counts[1] else _USUAL_OF_LOSSES
    lags = [abs(ns) for ns in (*known_lags_ns, *(ns for _, _, ns in matches))]
    ends = [_end_lag_ns(outer[near], inner[far], time) for near, far, _ in matches]
    most_ns = factor * median(lags) + margin_ns + time.slack_ns
    most_end_ns = factor * median([ns for ns in ends if ns is not None] or [0]) + margin_ns + time.slack_ns
    pairs = [
        (near, far)
        for (near, far, lag_ns), end_ns in zip(matches, ends, strict=True)
        if not time.common or (lag_ns <= most_ns and (end_ns is None or end_ns <= most_end_ns))
        if _fits(outer[near], inner[far], time)
    ]
    return Found(pairs, ambiguous + len(matches) - len(pairs))


def _end_lag_ns(near: Record, far: Record, time: Time) -> int | None:
    """How much later the near tap saw the answer end; None where one of them saw no end."""
    a, b = near.upstream.end, far.upstream.end
    if a is None or b is None or not near.ended == far.ended == Ended.COMPLETE:
        return None
    return abs(time.near(near) + a - time.far(far) - b)


def _grouped(records: Mapping[int, Record]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for index, record in records.items():
        if record.request.fingerprint:
            groups[record.request.fingerprint].append(index)
    return groups


def _match(
    nears: list[int],
    fars: list[int],
    outer: Mapping[int, Record],
    inner: Mapping[int, Record],
    lag: Lag,
    time: Time,
) -> tuple[list[tuple[int, int, int]], int]:
    """(near, far, lag) of the certain matches of one body, and how many near records had any candidate."""
    near_at = sorted((time.near(outer[index]), index) for index in nears)
    far_at = sorted((time.far(inner[index]), index) for index in fars)
    longest_ns = max((length_ns(outer[index]) for index in nears), default=0) + time.slack_ns

    def later(at_ns: int) -> Iterator[int]:
        """Far records that began from then on, while any near record that began then could still last."""
        for place in range(bisect_left(far_at, (at_ns - time.slack_ns, -1)), len(far_at)):
            far_ns, far = far_at[place]
            if far_ns > at_ns + longest_ns:
                return
            yield far

    of_near = {n: _two((f, lag(outer[n], inner[f])) for f in later(at)) for at, n in near_at}
    of_far = {
        f: _two((n, lag(outer[n], inner[f])) for n in earlier(near_at, at, longest_ns, time.slack_ns))
        for at, f in far_at
    }
    wanted_far = Counter(two[0][0] for two in of_near.values() if two)
    wanted_near = Counter(two[0][0] for two in of_far.values() if two)
    found = []
    for near, two in of_near.items():
        if not two:
            continue
        far, lag_ns = two[0]
        back = of_far[far]
        if not back or back[0][0] != near or wanted_far[far] > 1 or wanted_near[near] > 1:
            continue
        limit_ns = _RIVAL_FACTOR * abs(lag_ns) + _RIVAL_MARGIN_NS + 2 * time.slack_ns
        rivals = [ns for _, ns in (*two[1:], *back[1:])]
        if not rivals or (time.common and min(map(abs, rivals)) > limit_ns):
            found.append((near, far, lag_ns))
    return found, sum(bool(two) for two in of_near.values())


def earlier(begun: Sequence[tuple[int, int]], at_ns: int, longest_ns: int, slack_ns: int) -> Iterator[int]:
    """Of (time, index) in order, the indexes that began before ``at_ns`` and may still last, the latest first."""
    for place in range(bisect_right(begun, (at_ns + slack_ns, 1 << 62)) - 1, -1, -1):
        begun_ns, index = begun[place]
        if begun_ns < at_ns - longest_ns:
            return
        yield index


def _two(candidates: Iterator[tuple[int, int | None]]) -> list[tuple[int, int]]:
    """The first two that are possible: the rest are farther away still."""
    out: list[tuple[int, int]] = []
    for index, lag_ns in candidates:
        if lag_ns is not None:
            out.append((index, lag_ns))
            if len(out) == 2:
                break
    return out


def _fits(near: Record, far: Record, time: Time) -> bool:
    """Whether the answer that the near tap read can be the one that the far tap passed on."""
    if near.ended == far.ended == Ended.COMPLETE and near.events.kind and far.events.kind:
        tokens = [sum(kind in TOKEN_KINDS for kind in each.events.kind) for each in (near, far)]
        if tokens[0] != tokens[1]:
            return False
    counts = near.usage.completion_tokens, far.usage.completion_tokens
    if counts[0] is not None and counts[1] is not None and counts[0] != counts[1]:
        return False
    if not time.common:
        return True
    # From the near record's t0 to the far one's.
    shift_ns = time.far(far) - time.near(near) - time.slack_ns - _EARLY_NS
    stamps: list[tuple[int | None, int | None]] = []
    if near.status == far.status:
        # Else the proxy may have answered by itself, without waiting.
        stamps += [(near.upstream.head, far.upstream.head), (near.upstream.first_byte, far.upstream.first_byte)]
    if len(near.events.kind) == len(far.events.kind):
        stamps += zip(near.events.arrived, far.events.read_at, strict=False)
    return all(a is None or b is None or a >= b + shift_ns for a, b in stamps)


def length_ns(record: Record) -> int:
    """How long the exchange lasted, as far as its tap could see."""
    known = (record.downstream.end, record.upstream.end, *record.events.arrived[-1:])
    return max((at for at in known if at is not None), default=0)
