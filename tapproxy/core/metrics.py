"""The metrics of one record, by the formulas of definitions.md.

Rules here: pure functions of a Record; integers of nanoseconds in and out; unknown is None, never 0. ``side`` says at
which face the stamps are taken: ``arrived`` (from upstream) or ``sent`` (to the client); an event that never left has
no stamp there and is left out. ``start_ns`` is the start point, relative to t0 as all times of a record: 0 is the
first byte of the request at this tap, and a metric's name says which was taken (TTFT@tap, TTFT@client, …). A failed
request has no latency: ask ``failure`` first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final, Literal, NamedTuple

from tapproxy.core.counts import TOKEN_KINDS
from tapproxy.core.record import Ended, Record

Side = Literal["arrived", "sent"]

VISIBLE_KINDS: Final = frozenset(("token", "tool"))
# The later of the last of these is t_last.
LAST_KINDS: Final = TOKEN_KINDS | {"finish"}

NO_USAGE: Final = "no usage: ask for stream_options.include_usage"
K1_ASSUMED: Final = "tokens of the first event unknown, taken as 1"
TOO_FEW_TOKENS: Final = "no token after the first event"


class Metric(NamedTuple):
    """What is printed beside a number."""

    name: str
    formula: str
    unit: str


METRICS: Final[dict[str, Metric]] = {
    metric.name: metric
    for metric in (
        Metric("ttfb", "first response body byte − start", "ms"),
        Metric("ttfc", "first data event of any kind − start", "ms"),
        Metric("ttft", "first token event (token, reasoning, tool) − start", "ms"),
        Metric("ttfvt", "first visible token event (token, tool) − start", "ms"),
        Metric("icl", "token event i − token event i−1 (0 when one read held both)", "ms"),
        Metric("itl", "ICL / tokens gained, where the count of every event is known", "ms"),
        Metric(
            "tpot",
            "(t_last − t_first) / (n − k1); n = usage.completion_tokens, k1 = tokens of the first token event, "
            "t_last = the later of the last token event and the finish event",
            "ms",
        ),
        Metric("tpot_legacy", "(E2E − TTFT) / (n − 1)", "ms"),
        Metric("e2e", "the later of the last token event and the finish event − start", "ms"),
        Metric("queueing", "read_at − arrived, per event", "ms"),
        Metric("forward_delay", "sent − read_at, per event", "ms"),
        Metric(
            "tap_overhead",
            "(write_start − head, waiting for the client or a connection left out) + queueing + forward delay "
            "of the first token event",
            "ms",
        ),
        Metric("coalescing_events", "token events / reads that held one", "events per read"),
        Metric("coalescing_tokens", "tokens / token events", "tokens per event"),
    )
}


def _stamps(record: Record, side: Side, kinds: frozenset[str]) -> Iterator[tuple[int, int]]:
    """(index, stamp) of the events of those kinds that have a stamp on that side."""
    for index, (kind, stamp) in enumerate(zip(record.events.kind, _side(record, side), strict=False)):
        if kind in kinds and stamp is not None:
            yield index, stamp


def _times(record: Record, side: Side, kinds: frozenset[str]) -> list[int]:
    """The stamps alone, in one pass: a run has millions of them."""
    rows = zip(record.events.kind, _side(record, side), strict=False)
    return [stamp for kind, stamp in rows if kind in kinds and stamp is not None]


def _side(record: Record, side: Side) -> list[int] | list[int | None]:
    return record.events.arrived if side == "arrived" else record.events.sent


def _first(record: Record, side: Side, kinds: frozenset[str], start_ns: int) -> int | None:
    found = next(_stamps(record, side, kinds), None)
    return None if found is None else found[1] - start_ns


def ttfb_ns(record: Record, side: Side = "arrived", start_ns: int = 0) -> int | None:
    """First response body byte − start."""
    at = record.upstream.first_byte if side == "arrived" else record.downstream.first_byte
    return None if at is None else at - start_ns


def ttfc_ns(record: Record, side: Side = "arrived", start_ns: int = 0) -> int | None:
    """First ``data:`` event of any kind − start; a comment is none."""
    return _first(record, side, frozenset(record.events.kind) - {"comment"}, start_ns)


def ttft_ns(record: Record, side: Side = "arrived", start_ns: int = 0) -> int | None:
    """First token event on any channel − start."""
    return _first(record, side, TOKEN_KINDS, start_ns)


def ttfvt_ns(record: Record, side: Side = "arrived", start_ns: int = 0) -> int | None:
    """First token event that a user sees − start: reasoning is not counted."""
    return _first(record, side, VISIBLE_KINDS, start_ns)


def icl_ns(record: Record, side: Side = "arrived") -> list[int]:
    """Gaps between token events i−1 and i; 0 where one read held both."""
    stamps = _times(record, side, TOKEN_KINDS)
    return [later - earlier for earlier, later in pairwise(stamps)]


def itl_ns(record: Record, side: Side = "arrived") -> list[int] | None:
    """ICL_i / tokens gained, rounded; None where any token event's count is unknown.

    The gap before an event without a token of its own is added to the next gap.
    """
    gaps: list[int] = []
    last_ns: int | None = None
    for index, stamp in _stamps(record, side, TOKEN_KINDS):
        tokens = record.events.tokens[index]
        if tokens is None:
            return None
        if last_ns is None:
            last_ns = stamp
        elif tokens > 0:
            gaps.append(round((stamp - last_ns) / tokens))
            last_ns = stamp
    return gaps


def last_ns(record: Record, side: Side = "arrived") -> int | None:
    """t_last: the later of the last token event and the finish event."""
    return max(_times(record, side, LAST_KINDS), default=None)


def first_tokens(record: Record, side: Side = "arrived") -> int | None:
    """k1: the tokens of the first token event, None where unknown."""
    found = next(_stamps(record, side, TOKEN_KINDS), None)
    return None if found is None else record.events.tokens[found[0]]


def tpot_ns(record: Record, side: Side = "arrived") -> float | None:
    """(t_last − t_first) / (n − k1). ``tpot_flag`` says what it rests on, or why there is none."""
    n = record.usage.completion_tokens
    first, last = _first(record, side, TOKEN_KINDS, 0), last_ns(record, side)
    if n is None or first is None or last is None:
        return None
    k1 = first_tokens(record, side)
    after_first = n - (1 if k1 is None else k1)
    return (last - first) / after_first if after_first > 0 else None


def tpot_flag(record: Record, side: Side = "arrived") -> str | None:
    """What to say beside TPOT; None where it rests on known counts, or where no token came at all."""
    if next(_stamps(record, side, TOKEN_KINDS), None) is None:
        return None
    n, k1 = record.usage.completion_tokens, first_tokens(record, side)
    if n is None:
        return NO_USAGE
    if n - (1 if k1 is None else k1) <= 0:
        return TOO_FEW_TOKENS
    return K1_ASSUMED if k1 is None else None


def tpot_legacy_ns(record: Record, side: Side = "arrived") -> float | None:
    """(E2E − TTFT) / (n − 1), as vLLM bench, SGLang and MLPerf have it; the start cancels out."""
    n = record.usage.completion_tokens
    first, last = _first(record, side, TOKEN_KINDS, 0), last_ns(record, side)
    if n is None or n < 2 or first is None or last is None:
        return None
    return (last - first) / (n - 1)


def e2e_ns(record: Record, side: Side = "arrived", start_ns: int = 0) -> int | None:
    """t_last − start. When the stream was closed is apart: upstream.end, downstream.end."""
    last = last_ns(record, side)
    return None if last is None else last - start_ns


def queueing_ns(record: Record) -> list[int]:
    """read_i − u_i of every event: how late user space was. With user stamps there is nothing to see: all 0."""
    events = record.events
    return [read_at - arrived for arrived, read_at in zip(events.arrived, events.read_at, strict=False)]


def forward_delay_ns(record: Record) -> list[int]:
    """d_i − read_i of every event that left."""
    events = record.events
    return [sent - read_at for read_at, sent in zip(events.read_at, events.sent, strict=False) if sent is not None]


def tap_overhead_ns(record: Record) -> int | None:
    """What the tap itself added to TTFT: on the request's way in, and holding the first token event on its way out.

    On the way in the time until the head (or, where the tap waited for it, the body) was there is the client's, and
    wanted..acquired is the connection's.
    """
    request, upstream = record.request, record.upstream
    found = next(_stamps(record, "sent", TOKEN_KINDS), None)
    if request.head is None or upstream.wanted is None or found is None:
        return None
    if upstream.acquired is None or upstream.write_start is None:
        return None
    ready = request.head
    if request.body_end is not None and request.body_end <= upstream.wanted:
        ready = max(ready, request.body_end)
    inward = upstream.wanted - ready + upstream.write_start - upstream.acquired
    index, sent = found
    return inward + sent - record.events.arrived[index]


def events_per_read(record: Record) -> float | None:
    """Coalescing: token events per read that held one."""
    events = record.events
    reads = [read for kind, read in zip(events.kind, events.read, strict=False) if kind in TOKEN_KINDS]
    return len(reads) / len(set(reads)) if reads else None


def tokens_per_event(record: Record) -> float | None:
    """Coalescing: tokens per token event, by the events' own counts, else by the engine's total."""
    events = record.events
    counts = [tokens for kind, tokens in zip(events.kind, events.tokens, strict=False) if kind in TOKEN_KINDS]
    if not counts:
        return None
    known = [count for count in counts if count is not None]
    total = sum(known) if len(known) == len(counts) else record.usage.completion_tokens
    return None if total is None else total / len(counts)


# The error classes of definitions.md.
_FAILURES: Final[dict[str, str]] = {
    Ended.UPSTREAM_UNREACHABLE: "connect",
    Ended.UPSTREAM_MALFORMED: "status",
    Ended.REJECTED: "status",
    Ended.UPSTREAM_ABORTED: "truncated",
    Ended.SHUTDOWN: "truncated",
    Ended.TIMEOUT: "timeout",
    Ended.CLIENT_ABORTED: "client_abort",
}


def failure(record: Record) -> str | None:
    """The class of error, None where the request succeeded.

    ``connect``, ``status`` (≥ 400), ``error_event``, ``truncated``, ``timeout`` or ``client_abort``.
    """
    by_end = _FAILURES.get(record.ended)
    if by_end is not None:
        return by_end
    if record.status is not None and record.status >= 400:
        return "status"
    return "error_event" if "error" in record.events.kind else None


def ended_ok(record: Record) -> bool:
    """Whether its latencies count."""
    return failure(record) is None
