"""Which records of two taps are one request, which events are one event, and how long each was held between.

Rules here:
* A pair is certain or it is not made: a key that two records share on one side pairs nobody, and two different
  response ids never pair, whatever else agrees.
* Hold = arrival at the nearer tap − departure at the farther one, on one boot's monotonic clock. Across boots, or
  across a clock step, it does not exist: None with the reason, never an estimate.
* The hop's floor is shown beside a hold and never taken out of it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tapproxy.core.counts import TOKEN_KINDS
from tapproxy.core.record import Ended, Record

# The ids that join, strongest first (contract, "Record"); the fingerprint comes last and needs the time as well.
_KEYS: Final[tuple[tuple[str, Callable[[Record], str | None]], ...]] = (
    ("response_id", lambda record: record.response_id),
    ("request_id", lambda record: record.request_id),
    ("trace_id", lambda record: record.trace_id),
)
# The farther tap reads its first byte after the nearer one did. Both stamps are one clock's, so this only covers
# the stamps' own order within a process.
_SAME_CLOCK_SLACK_NS: Final = 1_000_000
# Wall clocks of disciplined hosts agree far better than this; a fingerprint needs no more.
_WALL_CLOCK_SLACK_NS: Final = 1_000_000_000
# Two sends of one prompt are told apart by time only when the rival is clearly farther away than the match.
_RIVAL_FACTOR: Final = 3
_RIVAL_MARGIN_NS: Final = 5_000_000


@dataclass(frozen=True, slots=True)
class Pair:
    """One request as two taps saw it; ``by`` is the key that joined them."""

    outer: Record
    inner: Record
    by: str


@dataclass(frozen=True, slots=True)
class Pairing:
    """``by`` counts the pairs of each key; what could not be paired with certainty is kept, not guessed."""

    pairs: list[Pair] = field(default_factory=list)
    unpaired_outer: list[Record] = field(default_factory=list)
    unpaired_inner: list[Record] = field(default_factory=list)
    by: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EventPairs:
    """(index at the nearer tap, index at the farther one) of each event; ``reason`` where there are none."""

    pairs: list[tuple[int, int]]
    by: str | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """How long each paired event was in the hop. ``values_ns`` is None, with ``reason``, where it cannot be known."""

    values_ns: list[int] | None
    events: list[tuple[int, int]] = field(default_factory=list)
    by: str | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class RequestHold:
    """From the nearer tap's first and last request byte written to the farther tap's first byte read."""

    after_start_ns: int | None
    after_end_ns: int | None


def pair(outer: Sequence[Record], inner: Sequence[Record]) -> Pairing:
    """Joins the records of two taps of one path."""
    free_outer = dict(enumerate(outer))
    free_inner = dict(enumerate(inner))
    found: list[tuple[int, int, str]] = []

    def take(outer_index: int, inner_index: int, by: str) -> None:
        del free_outer[outer_index], free_inner[inner_index]
        found.append((outer_index, inner_index, by))

    for name, key in _KEYS:
        # Counted over all records, not the ones left: the two leftovers of a shared key need not be one request.
        at_outer, at_inner = _grouped(outer, key), _grouped(inner, key)
        for value, outer_indexes in at_outer.items():
            inner_indexes = at_inner.get(value, [])
            if len(outer_indexes) != 1 or len(inner_indexes) != 1:
                continue
            near, far = outer_indexes[0], inner_indexes[0]
            if near not in free_outer or far not in free_inner:
                continue
            if name == "response_id" or _possible(outer[near], inner[far]):
                take(near, far, name)
    for near, far in _by_fingerprint(free_outer, free_inner):
        take(near, far, "fingerprint")
    found.sort()
    return Pairing(
        pairs=[Pair(outer[near], inner[far], by) for near, far, by in found],
        unpaired_outer=list(free_outer.values()),
        unpaired_inner=list(free_inner.values()),
        by=dict(Counter(by for _, _, by in found)),
    )


def pair_events(outer: Record, inner: Record) -> EventPairs:
    """The events of two records of one exchange: by body offset, by order where the body is not the same bytes."""
    if not outer.events.kind or not inner.events.kind:
        return EventPairs(
            [], None, "no events were seen at " + ("the outer" if inner.events.kind else "the inner") + " tap"
        )
    if content_encoding(outer) == content_encoding(inner):
        pairs = _by_offset(outer, inner)
        if pairs is not None:
            return EventPairs(pairs, "end_offset")
    pairs = _by_order(outer, inner)
    if pairs is None:
        return EventPairs([], None, "the two taps saw different events")
    return EventPairs(pairs, "index")


def hold_ns(each: Pair) -> Hold:
    """``outer.arrived − inner.sent`` of every paired event, in ns."""
    reason = incomparable(each.outer, each.inner)
    if reason is not None:
        return Hold(None, reason=reason)
    matched = pair_events(each.outer, each.inner)
    if matched.by is None:
        return Hold(None, reason=matched.reason)
    shift_ns = each.outer.t0_mono_ns - each.inner.t0_mono_ns
    values_ns, events = [], []
    for near, far in matched.pairs:
        sent_ns = each.inner.events.sent[far]
        if sent_ns is not None:
            values_ns.append(each.outer.events.arrived[near] + shift_ns - sent_ns)
            events.append((near, far))
    if not values_ns:
        return Hold(None, reason="the inner tap does not say when its events left")
    return Hold(values_ns, events, matched.by)


def request_hold_ns(each: Pair) -> RequestHold:
    """How long the request was in the hop, after its first and after its last byte was written to it."""
    if incomparable(each.outer, each.inner) is not None:
        return RequestHold(None, None)
    seen_ns = each.inner.t0_mono_ns - each.outer.t0_mono_ns
    start_ns, end_ns = each.outer.upstream.write_start, each.outer.upstream.write_end
    return RequestHold(
        None if start_ns is None else seen_ns - start_ns,
        None if end_ns is None else seen_ns - end_ns,
    )


def floor_ns(holds: Iterable[Hold]) -> int | None:
    """The smallest hold of a run: what the hop takes when it holds nothing. Shown beside, never subtracted.

    A hold below zero is a sender that was put aside between writing and looking at the clock: it says nothing of the
    hop, and counts only where there are no others.
    """
    values = [value for hold in holds for value in hold.values_ns or ()]
    return min((value for value in values if value >= 0), default=min(values, default=None))


def incomparable(outer: Record, inner: Record) -> str | None:
    """Why no time may be taken between these two records, or None."""
    for record in (outer, inner):
        reason = untrusted(record)
        if reason is not None:
            return reason
    if outer.boot_id is None or inner.boot_id is None:
        return "a tap does not say which boot its clock belongs to"
    if outer.boot_id != inner.boot_id:
        return "the taps are on different hosts or boots: no common clock"
    return None


def untrusted(record: Record) -> str | None:
    """Why this record's own times may not be used, or None."""
    if record.void is not None:
        return f"void: {record.void}"
    if record.stamps.clock_step and record.stamps.source == "kernel":
        return "the wall clock stepped under the kernel's stamps"
    return None


def content_encoding(record: Record) -> str | None:
    """The response's content coding, None where there is none (identity included)."""
    value = (record.headers.get("content-encoding") or "").strip().lower()
    return None if value in ("", "identity") else value


def _grouped(records: Sequence[Record], key: Callable[[Record], str | None]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for index, record in enumerate(records):
        value = key(record)
        if value:
            groups[value].append(index)
    return groups


def _possible(outer: Record, inner: Record) -> bool:
    """Whether a weaker key may join them: no contradicting response id, and the times fit."""
    if outer.response_id and inner.response_id and outer.response_id != inner.response_id:
        return False
    return _lag_ns(outer, inner) is not None


def _lag_ns(outer: Record, inner: Record) -> int | None:
    """How much later the inner tap saw the request begin; None where it cannot be this one's."""
    if outer.boot_id is not None and outer.boot_id == inner.boot_id:
        lag_ns, slack_ns = inner.t0_mono_ns - outer.t0_mono_ns, _SAME_CLOCK_SLACK_NS
    else:
        lag_ns, slack_ns = inner.t0_unix_ns - outer.t0_unix_ns, _WALL_CLOCK_SLACK_NS
    last_ns = _last_ns(outer)
    if lag_ns < -slack_ns or (last_ns is not None and lag_ns > last_ns + slack_ns):
        return None
    return lag_ns


def _last_ns(record: Record) -> int | None:
    ends = (record.downstream.end, record.upstream.end, record.events.arrived[-1] if record.events.arrived else None)
    known = [end for end in ends if end is not None]
    return max(known) if known else None


def _by_fingerprint(outer: dict[int, Record], inner: dict[int, Record]) -> list[tuple[int, int]]:
    """Mutually nearest in time, where every other candidate clearly belongs to somebody else."""
    lags = _candidates(outer, inner)
    of_near: dict[int, list[int]] = defaultdict(list)
    of_far: dict[int, list[int]] = defaultdict(list)
    for near, far in lags:
        of_near[near].append(far)
        of_far[far].append(near)
    nearest_far = {near: min(fars, key=lambda far: lags[near, far]) for near, fars in of_near.items()}
    nearest_near = {far: min(nears, key=lambda near: lags[near, far]) for far, nears in of_far.items()}
    found = []
    for near, far in nearest_far.items():
        if nearest_near[far] != near:
            continue
        limit_ns = _RIVAL_FACTOR * lags[near, far] + _RIVAL_MARGIN_NS
        if all(
            other == far or (nearest_near[other] != near and lags[near, other] > limit_ns) for other in of_near[near]
        ) and all(
            other == near or (nearest_far[other] != far and lags[other, far] > limit_ns) for other in of_far[far]
        ):
            found.append((near, far))
    return found


def _candidates(outer: dict[int, Record], inner: dict[int, Record]) -> dict[tuple[int, int], int]:
    """The distance in time of every two records with one fingerprint that may belong together."""
    groups: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for far, record in inner.items():
        if record.request.fingerprint:
            groups[record.request.fingerprint].append((record.t0_unix_ns, far))
    for group in groups.values():
        group.sort()
    lags: dict[tuple[int, int], int] = {}
    for near, record in outer.items():
        group = groups.get(record.request.fingerprint or "", [])
        # The wall clock only narrows the search (one prompt may have been sent ten thousand times); _lag_ns decides.
        first = bisect_left(group, (record.t0_unix_ns - _WALL_CLOCK_SLACK_NS, -1))
        last_ns = _last_ns(record)
        last = len(group)
        if last_ns is not None:
            last = bisect_right(group, (record.t0_unix_ns + last_ns + _WALL_CLOCK_SLACK_NS, 1 << 62))
        for _, far in group[first:last]:
            lag_ns = _lag_ns(record, inner[far])
            if lag_ns is not None and _possible(record, inner[far]):
                lags[near, far] = abs(lag_ns)
    return lags


def _by_offset(outer: Record, inner: Record) -> list[tuple[int, int]] | None:
    """None unless every event of the shorter list is found in the other: then the bodies are the same bytes."""
    near_events, far_events = outer.events, inner.events
    where = {offset: index for index, offset in enumerate(far_events.end_offset)}
    pairs = [(near, where[offset]) for near, offset in enumerate(near_events.end_offset) if offset in where]
    if len(pairs) < min(len(near_events.end_offset), len(where)):
        return None
    if any(near_events.kind[near] != far_events.kind[far] for near, far in pairs):
        return None
    return pairs


def _by_order(outer: Record, inner: Record) -> list[tuple[int, int]] | None:
    """The token events in order; None where their kinds or, of whole answers, their numbers differ."""
    near = [index for index, kind in enumerate(outer.events.kind) if kind in TOKEN_KINDS]
    far = [index for index, kind in enumerate(inner.events.kind) if kind in TOKEN_KINDS]
    whole = outer.ended == Ended.COMPLETE and inner.ended == Ended.COMPLETE
    if whole and len(near) != len(far):
        return None
    pairs = list(zip(near, far, strict=False))
    if not pairs or any(outer.events.kind[a] != inner.events.kind[b] for a, b in pairs):
        return None
    return pairs
