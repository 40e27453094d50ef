"""The proxy's own access log beside two taps: which line is which request, and whether the three agree.

Rules here:
* A line is joined for certain or not at all: by an id that is one request's on either side, else by path, status, size
  and time where only one line and one request fit; the rest are counted.
* Only durations are compared, each by its own clock: no offset of a clock can make them disagree. What they may differ
  by (the log's milliseconds, the round trips in between, a turn of a busy worker) is the bound.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from tapproxy.core.record import DownstreamPart, Record, UpstreamPart
from tapproxy.core.witness import RESOLUTION_NS, AccessRow
from tapproxy.diagnose.facts import ms, text_ms
from tapproxy.diagnose.view import Chain, View

# Wall clocks of disciplined hosts agree far better than this.
_WALL_SLACK_NS: Final = 1_000_000_000
# A worker with many streams to serve reads its clock once a turn, and may write its line a turn late; of a long answer
# the clocks' own rates differ.
_TURN_NS: Final = 5_000_000
_RATE_SHARE: Final = 1_000e-6
# What a chunk's frame adds at most to each of the pieces a body is sent in, and how small those are: an event.
_FRAME_SHARE: Final = 2
# As for holds: one in twenty is what a busy machine does; and never fewer than three.
DISAGREE_SHARE: Final = 0.05
DISAGREE_LEAST: Final = 3


@dataclass(slots=True)
class Agreement:
    """One duration as the proxy logged it and as a tap saw it: ``differences_ns`` (tap − proxy), and of them how many
    lie beyond their bound. ``bounds_ns``: what each may differ by."""

    what: str
    differences_ns: list[int] = field(default_factory=list)
    bounds_ns: list[int] = field(default_factory=list)

    def add(self, difference_ns: int, bound_ns: int) -> None:
        self.differences_ns.append(difference_ns)
        self.bounds_ns.append(bound_ns)

    @property
    def disagree(self) -> int:
        pairs = zip(self.differences_ns, self.bounds_ns, strict=True)
        return sum(abs(difference) > bound for difference, bound in pairs)

    @property
    def holds(self) -> bool | None:
        """Whether tap and proxy tell the same. None where nothing was compared."""
        count = len(self.differences_ns)
        return None if not count else self.disagree < max(DISAGREE_LEAST, DISAGREE_SHARE * count)

    def to_dict(self) -> dict[str, Any]:
        known = bool(self.differences_ns)
        return {
            "what": self.what,
            "n": len(self.differences_ns),
            "difference_ms": ms(median(self.differences_ns)) if known else None,
            "bound_ms": ms(median(self.bounds_ns)) if known else None,
            "disagree": self.disagree,
        }


@dataclass(frozen=True, slots=True)
class Joined:
    """One line and the request it is of; ``by``: ``request_id``, ``trace_id`` or ``time``."""

    row: AccessRow
    chain: Chain
    by: str


@dataclass(slots=True)
class Witnessed:
    """What the log adds. ``around_ns``: of each request, what the proxy took besides its upstreams (taking the request
    in, passing the answer out). ``connects_ns``: of each new connection to an upstream."""

    rows: int = 0
    joined: list[Joined] = field(default_factory=list)
    by: dict[str, int] = field(default_factory=dict)
    ambiguous: int = 0
    unjoined: int = 0
    retried: list[AccessRow] = field(default_factory=list)
    retry_ns: list[int] = field(default_factory=list)
    connects_ns: list[int] = field(default_factory=list)
    headers_ns: list[int] = field(default_factory=list)
    around_ns: list[int] = field(default_factory=list)
    agreements: list[Agreement] = field(default_factory=list)

    @property
    def warnings(self) -> list[str]:
        """Where proxy and tap contradict each other."""
        return [
            f"the proxy's log and the tap disagree on {each.what}: {each.disagree} of {len(each.differences_ns)} "
            f"requests by more than {text_ms(median(each.bounds_ns))} (median {text_ms(median(each.differences_ns))}): "
            "another request's line, a clock that stepped, or a worker that stood still"
            for each in self.agreements
            if each.holds is False
        ]

    def to_dict(self) -> dict[str, Any]:
        """Counts, and medians in ms."""

        def middle(values: Sequence[int]) -> float | None:
            return ms(median(values)) if values else None

        return {
            "rows": self.rows,
            "joined": len(self.joined),
            "by": self.by,
            "ambiguous": self.ambiguous,
            "unjoined": self.unjoined,
            "retried": len(self.retried),
            "retry_ms": middle(self.retry_ns),
            "connect_ms": middle(self.connects_ns),
            "header_ms": middle(self.headers_ns),
            "around_ms": middle(self.around_ns),
            "agreements": [each.to_dict() for each in self.agreements],
        }


def witness(rows: Iterable[AccessRow], view: View) -> Witnessed:
    """The rows of the proxy's log beside the requests of a run."""
    lines = list(rows)
    out = Witnessed(rows=len(lines))
    out.joined, out.ambiguous = _join(lines, [chain for chain in view.chains if chain.near() or chain.inner])
    out.by = dict(Counter(each.by for each in out.joined))
    out.unjoined = len(lines) - len(out.joined) - out.ambiguous
    request = Agreement("a request's whole time")
    upstream = Agreement("the time of its upstream")
    header = Agreement("the time to its upstream's response head")
    for each in out.joined:
        _compare(each, request, upstream, header)
    out.agreements = [request, upstream, header]
    for row in lines:
        _own(row, out)
    return out


def _own(row: AccessRow, out: Witnessed) -> None:
    """What the line tells by itself."""
    if row.retried:
        out.retried.append(row)
        lost = [each.response_ns for each in row.tries[:-1]]
        if all(ns is not None for ns in lost):
            out.retry_ns.append(sum(ns for ns in lost if ns is not None))
    # 0 is a connection that was kept from before.
    out.connects_ns += [each.connect_ns for each in row.tries if each.connect_ns]
    if row.tries and row.tries[-1].header_ns is not None:
        out.headers_ns.append(row.tries[-1].header_ns)
    times = [each.response_ns for each in row.tries]
    if row.request_ns is not None and times and all(ns is not None for ns in times):
        out.around_ns.append(row.request_ns - sum(ns for ns in times if ns is not None))


def _compare(each: Joined, request: Agreement, upstream: Agreement, header: Agreement) -> None:
    row, near, far = each.row, each.chain.near(), each.chain.inner
    if near is not None and row.request_ns is not None:
        start_ns, end_ns = near.upstream.write_start, near.upstream.end
        if start_ns is not None and end_ns is not None:
            request.add(end_ns - start_ns - row.request_ns, _bound_ns(row.request_ns, near.upstream))
    last = row.tries[-1] if row.tries else None
    if far is None or last is None:
        return
    # The tap's first byte comes when the connection stands.
    connected_ns = last.connect_ns or 0
    for agreement, logged_ns, seen_ns in (
        (upstream, last.response_ns, far.downstream.end),
        (header, last.header_ns, far.downstream.head),
    ):
        if logged_ns is not None and seen_ns is not None:
            agreement.add(seen_ns - (logged_ns - connected_ns), _bound_ns(logged_ns, far.downstream))


def _bound_ns(duration_ns: int, part: UpstreamPart | DownstreamPart) -> int:
    """Two cut milliseconds, a turn of the worker, the way there and back, and what two clocks' rates may differ by."""
    trip_ns = part.min_rtt_ns if part.min_rtt_ns is not None else part.rtt_ns or 0
    return 2 * RESOLUTION_NS + _TURN_NS + 2 * trip_ns + round(duration_ns * _RATE_SHARE)


def _join(rows: Sequence[AccessRow], chains: Sequence[Chain]) -> tuple[list[Joined], int]:
    """(what was joined, how many rows had several requests that fit or shared one)."""
    free_rows, free_chains = dict(enumerate(rows)), dict(enumerate(chains))
    found: list[tuple[int, int, str]] = []
    for by, of_row, of_chain in _KEYS:
        at_rows, at_chains = _grouped(rows, of_row), _grouped(chains, of_chain)
        # An id that several lines or requests bear names none of them.
        candidates: dict[int, set[int]] = defaultdict(set)
        for value, numbers in at_rows.items():
            if len(numbers) == 1 and len(at_chains.get(value, ())) == 1:
                candidates[numbers[0]].add(at_chains[value][0])
        for number, wanted in candidates.items():
            place = next(iter(wanted))
            if len(wanted) == 1 and number in free_rows and place in free_chains:
                del free_rows[number], free_chains[place]
                found.append((number, place, by))
    pairs, ambiguous = _by_time(free_rows, free_chains)
    found += [(number, place, "time") for number, place in pairs]
    return [Joined(rows[number], chains[place], by) for number, place, by in sorted(found)], ambiguous


def _chain_ids(chain: Chain) -> Iterable[str]:
    return {record.request_id for record in chain.seen() if record.request_id}


def _chain_traces(chain: Chain) -> Iterable[str]:
    return {record.trace_id for record in chain.seen() if record.trace_id}


def _row_traces(row: AccessRow) -> Iterable[str]:
    return (row.trace_id,) if row.trace_id else ()


def _row_ids(row: AccessRow) -> Iterable[str]:
    return row.ids


_KEYS: Final = (("request_id", _row_ids, _chain_ids), ("trace_id", _row_traces, _chain_traces))


def _grouped(items: Sequence[Any], keys: Callable[[Any], Iterable[str]]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for index, item in enumerate(items):
        for key in keys(item):
            groups[key].append(index)
    return groups


def _by_time(rows: dict[int, AccessRow], chains: dict[int, Chain]) -> tuple[list[tuple[int, int]], int]:
    """Line and request where each is the only one that fits the other, and how many lines fit but not so."""
    by_path: dict[str | None, list[tuple[int, int, Record]]] = defaultdict(list)
    for place, chain in chains.items():
        # A proxy may rewrite the path: what it was asked is what stands before it.
        record = chain.near() or chain.inner
        if record is not None:
            by_path[record.path].append((record.t0_unix_ns, place, record))
    for group in by_path.values():
        group.sort(key=lambda each: each[:2])
    fits: dict[int, list[int]] = {}
    taken: Counter[int] = Counter()
    for number, row in rows.items():
        started_ns, group = row.started_unix_ns, by_path.get(row.path, [])
        if started_ns is None:
            continue
        slack_ns = _WALL_SLACK_NS + (row.ended_bound_ns or 0)
        first = bisect_left(group, started_ns - slack_ns, key=_begun)
        last = bisect_right(group, started_ns + slack_ns, key=_begun)
        fitting = [place for _, place, record in group[first:last] if _fits(row, record, slack_ns)]
        if fitting:
            fits[number] = fitting
            taken.update(fitting)
    pairs = [(number, found[0]) for number, found in fits.items() if len(found) == 1 and taken[found[0]] == 1]
    return pairs, len(fits) - len(pairs)


def _begun(each: tuple[int, int, Record]) -> int:
    return each[0]


def _fits(row: AccessRow, record: Record, slack_ns: int) -> bool:
    """Whether end, status and size agree as well."""
    ended_ns, length_ns = row.ended_unix_ns, record.upstream.end
    if ended_ns is None or length_ns is None or abs(ended_ns - record.t0_unix_ns - length_ns) > slack_ns:
        return False
    if row.status is not None and record.status is not None and row.status != record.status:
        return False
    size = record.upstream.bytes
    return row.body_bytes is None or size <= row.body_bytes <= _FRAME_SHARE * size + 64
