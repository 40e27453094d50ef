"""Which records of two taps are one request, which events are one event, and how long each was held between.

Rules here:
* A pair is certain or it is not made: a key that two records share on one side pairs nobody, and two different
  response ids never pair, whatever else agrees. A proxy's second try is no pair of its own: it is told as a retry.
* Hold = arrival at the nearer tap − departure at the farther one, on one boot's monotonic clock. Across boots it is
  known once the clocks are (module moved), within a bound; without them, or across a clock step, it does not exist:
  None with the reason, never an estimate.
* The hop's floor is shown beside a hold and never taken out of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from tapproxy.core.counts import TOKEN_KINDS
from tapproxy.core.record import Ended, Record
from tapproxy.diagnose.fingerprints import Time, by_fingerprint
from tapproxy.diagnose.tries import tries

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
# What two hosts' wall clocks are apart is taken from so many joined requests, if so large a part of them agrees.
_WALL_VOTES: Final = 5
_WALL_AGREE: Final = 0.8


@dataclass(frozen=True, slots=True)
class Pair:
    """One request as two taps saw it; ``by`` is the key that joined them."""

    outer: Record
    inner: Record
    by: str


@dataclass(frozen=True, slots=True)
class Pairing:
    """``by`` counts the pairs of each key; what could not be paired with certainty is kept, not guessed.

    ``ambiguous``: nearer records whose body was seen at the farther tap, but not for certain as theirs. ``retried``:
    requests that came out of the hop more than once, one try after the other, with all their tries in order.
    """

    pairs: list[Pair] = field(default_factory=list)
    unpaired_outer: list[Record] = field(default_factory=list)
    unpaired_inner: list[Record] = field(default_factory=list)
    by: dict[str, int] = field(default_factory=dict)
    ambiguous: int = 0
    retried: list[tuple[Record, list[Record]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class EventPairs:
    """(index at the nearer tap, index at the farther one) of each event; ``reason`` where there are none."""

    pairs: list[tuple[int, int]]
    by: str | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """How long each paired event was in the hop. ``values_ns`` is None, with ``reason``, where it cannot be known.

    ``bound_ns``: how far all of them may be off, by one amount, since two hosts' clocks are involved.
    """

    values_ns: list[int] | None
    events: list[tuple[int, int]] = field(default_factory=list)
    by: str | None = None
    reason: str | None = None
    bound_ns: int = 0


@dataclass(frozen=True, slots=True)
class RequestHold:
    """From the nearer tap's first and last request byte written to the farther tap's first byte read."""

    after_start_ns: int | None
    after_end_ns: int | None
    bound_ns: int = 0


def pair(outer: Sequence[Record], inner: Sequence[Record], *, slack_ns: int = 0) -> Pairing:
    """Joins the records of two taps of one path. ``slack_ns``: how far the two clocks may disagree, where records of
    two hosts were put on one."""
    free_outer = dict(enumerate(outer))
    free_inner = dict(enumerate(inner))
    found: list[tuple[int, int, str]] = []
    uniques = {name: _unique(outer, inner, key) for name, key in _KEYS}
    wall_ns = _wall_offset_ns(outer, inner, uniques)

    def lag(near: Record, far: Record) -> int | None:
        if near.response_id and far.response_id and near.response_id != far.response_id:
            return None
        return _lag_ns(near, far, slack_ns, wall_ns)

    for name, _ in _KEYS:
        for near, far in uniques[name]:
            if near not in free_outer or far not in free_inner:
                continue
            if name == "response_id" or lag(outer[near], inner[far]) is not None:
                del free_outer[near], free_inner[far]
                found.append((near, far, name))
    lags = [ns for near, far, _ in found if (ns := _lag_ns(outer[near], inner[far], slack_ns, wall_ns)) is not None]
    time = _time(outer, inner, slack_ns, wall_ns)
    rest = by_fingerprint(free_outer, free_inner, lag, time, lags if time.common else ())
    retried = tries(outer, inner, lambda near, far: _lag_ns(near, far, slack_ns, wall_ns), time)
    # A request that was tried twice has a partner of which only an id can tell.
    tried = {id(each) for near, several in retried for each in (near, *several)}
    for near, far in rest.pairs:
        if id(outer[near]) not in tried and id(inner[far]) not in tried:
            del free_outer[near], free_inner[far]
            found.append((near, far, "fingerprint"))
    found.sort()
    return Pairing(
        pairs=[Pair(outer[near], inner[far], by) for near, far, by in found],
        unpaired_outer=list(free_outer.values()),
        unpaired_inner=list(free_inner.values()),
        by=dict(Counter(by for _, _, by in found)),
        ambiguous=rest.ambiguous,
        retried=retried,
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


def hold_ns(each: Pair, bound_ns: int = 0) -> Hold:
    """``outer.arrived − inner.sent`` of every paired event, in ns. ``bound_ns``: what the two clocks may be apart."""
    reason = incomparable(each.outer, each.inner)
    if reason is not None:
        return Hold(None, reason=reason)
    matched = pair_events(each.outer, each.inner)
    if matched.by is None:
        return Hold(None, reason=matched.reason)
    shift_ns = each.outer.t0_mono_ns - each.inner.t0_mono_ns
    arrived, sent = each.outer.events.arrived, each.inner.events.sent
    events = [indexes for indexes in matched.pairs if sent[indexes[1]] is not None]
    values_ns = [arrived[near] + shift_ns - (sent[far] or 0) for near, far in events]
    if not values_ns:
        return Hold(None, reason="the inner tap does not say when its events left")
    return Hold(values_ns, events, matched.by, bound_ns=bound_ns)


def request_hold_ns(each: Pair, bound_ns: int = 0) -> RequestHold:
    """How long the request was in the hop, after its first and after its last byte was written to it.

    ``bound_ns``: what the two clocks may be apart."""
    if incomparable(each.outer, each.inner) is not None:
        return RequestHold(None, None)
    seen_ns = each.inner.t0_mono_ns - each.outer.t0_mono_ns
    start_ns, end_ns = each.outer.upstream.write_start, each.outer.upstream.write_end
    return RequestHold(
        None if start_ns is None else seen_ns - start_ns,
        None if end_ns is None else seen_ns - end_ns,
        bound_ns,
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


def _unique(
    outer: Sequence[Record], inner: Sequence[Record], key: Callable[[Record], str | None]
) -> list[tuple[int, int]]:
    """Those that a key names once on either side. Counted over all records, not the ones left: the two leftovers of a
    shared key need not be one request."""
    at_outer, at_inner = _grouped(outer, key), _grouped(inner, key)
    return [
        (nears[0], fars[0])
        for value, nears in at_outer.items()
        if len(nears) == 1 and len(fars := at_inner.get(value, [])) == 1
    ]


def _wall_offset_ns(outer: Sequence[Record], inner: Sequence[Record], uniques: dict[str, list[tuple[int, int]]]) -> int:
    """What the wall clocks of two hosts are apart, as most of the requests say that a key names once; 0 where too few
    do. It only narrows the joining."""
    fingerprints = _unique(outer, inner, lambda record: record.request.fingerprint)
    for matches in (uniques["response_id"], uniques["request_id"], fingerprints):
        lags = [
            inner[far].t0_unix_ns - outer[near].t0_unix_ns
            for near, far in matches
            if not _same_boot(outer[near], inner[far])
        ]
        if len(lags) < _WALL_VOTES:
            continue
        middle = int(median(lags))
        if sum(abs(lag - middle) <= _WALL_CLOCK_SLACK_NS for lag in lags) >= _WALL_AGREE * len(lags):
            return middle
    return 0


def _same_boot(outer: Record, inner: Record) -> bool:
    return outer.boot_id is not None and outer.boot_id == inner.boot_id


def _lag_ns(outer: Record, inner: Record, slack_ns: int, wall_ns: int) -> int | None:
    """How much later the inner tap saw the request begin; None where it cannot be this one's."""
    if _same_boot(outer, inner):
        lag_ns, least_ns = inner.t0_mono_ns - outer.t0_mono_ns, _SAME_CLOCK_SLACK_NS + slack_ns
    else:
        lag_ns, least_ns = inner.t0_unix_ns - outer.t0_unix_ns - wall_ns, _WALL_CLOCK_SLACK_NS
    last_ns = _last_ns(outer)
    if lag_ns < -least_ns or (last_ns is not None and lag_ns > last_ns + least_ns):
        return None
    return lag_ns


def _time(outer: Sequence[Record], inner: Sequence[Record], slack_ns: int, wall_ns: int) -> Time:
    boots = {record.boot_id for records in (outer, inner) for record in records}
    if len(boots) == 1 and None not in boots:
        return Time(_mono, _mono, _SAME_CLOCK_SLACK_NS + slack_ns, common=True)
    return Time(_unix, lambda record: record.t0_unix_ns - wall_ns, _WALL_CLOCK_SLACK_NS, common=False)


def _mono(record: Record) -> int:
    return record.t0_mono_ns


def _unix(record: Record) -> int:
    return record.t0_unix_ns


def _last_ns(record: Record) -> int | None:
    ends = (record.downstream.end, record.upstream.end, record.events.arrived[-1] if record.events.arrived else None)
    known = [end for end in ends if end is not None]
    return max(known) if known else None


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
