"""One joined request from both sides: what the client measured, the same by our definitions, and what the tap saw.

Rules here: the tool's own number is never changed; the aligned one stands beside it, with how it was had. The tap's
``sent`` side is what the client could see at the earliest, so client − tap is the way between them and the client
itself. On one monotonic clock the client's times are also counted from the tap's start, and then what was before the
tap's first byte is not in the difference; without one only durations are compared, each from its own start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tapproxy.core import metrics, stats
from tapproxy.core.counts import TOKEN_KINDS
from tapproxy.core.metrics import LAST_KINDS
from tapproxy.core.record import Record
from tapproxy.load.importers.imported import ClientRequest, Clock, Tool
from tapproxy.load.importers.join import Join, Sure

_NS_PER_MS: Final = 1e6
# Which of the tap's events a tool made a chunk of: tried in this order, the one whose number agrees is it.
ROLE_COUNTED: Final = "every event with choices, the role event too"
_COUNTED: Final[tuple[tuple[str, frozenset[str]], ...]] = (
    (ROLE_COUNTED, LAST_KINDS | {"role"}),
    ("every event with choices, without a role event", LAST_KINDS),
    ("the token events", TOKEN_KINDS),
)
METRICS: Final = ("ttft_ms", "tpot_ms", "e2e_ms")


@dataclass(frozen=True, slots=True)
class Aligned:
    """The client's times by our definitions, from its own start; ``how`` says what they rest on."""

    ttft_ns: float | None
    tpot_ns: float | None
    e2e_ns: float | None
    how: str
    counted: str | None = None


def align(request: ClientRequest, record: Record, tool: Tool) -> Aligned:
    """Puts the tool's times by our definitions, with the help of what the tap knows of the same stream."""
    events = record.events
    ways = _COUNTED if "role" in events.kind else _COUNTED[1:]
    for counted, kinds in ways if request.stamps_ns else ():
        indexes = [index for index, kind in enumerate(events.kind) if kind in kinds]
        if len(indexes) != len(request.stamps_ns):
            continue
        at = dict(zip(indexes, request.stamps_ns, strict=True))
        first = next((index for index in indexes if events.kind[index] in TOKEN_KINDS), None)
        last = [at[index] for index in indexes if events.kind[index] in LAST_KINDS]
        if first is None or not last:
            break
        how = f"its {len(indexes)} chunks are {counted}"
        return _by_formula(request, record, at[first], max(last), how, counted)
    if tool is Tool.VLLM_BENCH:
        seen = len(request.stamps_ns)
        why = f"it counted {seen} chunks, and that is no set of the tap's events" if seen else "it tells no chunk times"
        return Aligned(None, None, None, why)
    how = "its TTFT and last chunk with text as they are: it tells no chunk times that fit the tap's events"
    return _by_formula(request, record, request.ttft_ns, request.last_token_ns, how, None)


def _by_formula(
    request: ClientRequest, record: Record, first: float | None, last: float | None, how: str, counted: str | None
) -> Aligned:
    n = record.usage.completion_tokens
    n = request.output_tokens if n is None else n
    k1 = metrics.first_tokens(record)
    after_first = None if n is None else n - (1 if k1 is None else k1)
    tpot = None
    if first is not None and last is not None and after_first is not None and after_first > 0:
        tpot = (last - first) / after_first
    return Aligned(first, tpot, last, how, counted)


def both(joined: Join, tool: Tool) -> dict[str, Any]:
    """The client's view beside the tap's."""
    request, record = joined.request, joined.record
    aligned = align(request, record, tool)
    ours = _tap(record)
    client = {
        "ttft_ms": _ms(aligned.ttft_ns),
        "tpot_ms": _ms(aligned.tpot_ns),
        "e2e_ms": _ms(aligned.e2e_ns),
    }
    lag_ns = _lag_ns(request, record)
    gap_ms = _minus(client["ttft_ms"], ours["ttft_ms"])
    before_ms = None if lag_ns is None else lag_ns / _NS_PER_MS
    one_clock = before_ms is not None and request.clock is Clock.MONOTONIC
    from_tap = {name: _minus(client[name], before_ms) for name in ("ttft_ms", "e2e_ms")} if one_clock else {}
    return {
        "record": record.id,
        "by": joined.by.value,
        "sure": joined.sure.value,
        "why": joined.why,
        "client_aligned": {
            **client,
            "ttft_from_tap_ms": from_tap.get("ttft_ms"),
            "e2e_from_tap_ms": from_tap.get("e2e_ms"),
            "how": aligned.how,
            "counted": aligned.counted,
        },
        "tap": ours,
        "difference_ms": {
            name.removesuffix("_ms"): _minus(from_tap.get(name, client[name]), ours[name]) for name in METRICS
        },
        "difference_from": "counted from the tap's start" if one_clock else "each from its own start",
        # Of TTFT@client: before the first byte reached the tap, and after the tap had sent the first token on.
        "before_tap_ms": before_ms,
        "after_tap_ms": None if before_ms is None or gap_ms is None else gap_ms - before_ms,
    }


def _tap(record: Record) -> dict[str, Any]:
    return {
        "ttft_ms": _ms(metrics.ttft_ns(record, "sent")),
        "tpot_ms": _ms(metrics.tpot_ns(record, "sent")),
        "e2e_ms": _ms(metrics.e2e_ns(record, "sent")),
        "ttft_arrived_ms": _ms(metrics.ttft_ns(record)),
        "overhead_ms": _ms(metrics.tap_overhead_ns(record)),
        "tpot_flag": metrics.tpot_flag(record),
        "tokens": record.usage.completion_tokens,
        "failure": _failure(record),
        "void": record.void,
    }


def _failure(record: Record) -> str | None:
    """The class of error. A client that leaves on [DONE], before the end of the framing, has had the whole answer."""
    failure = metrics.failure(record)
    return None if failure == "client_abort" and record.events.kind[-1:] == ["done"] else failure


def _lag_ns(request: ClientRequest, record: Record) -> int | None:
    """How long after the client's start the tap saw the first byte; None where the clocks are not one."""
    if request.start_ns is None:
        return None
    if request.clock is Clock.WALL:
        return record.t0_unix_ns - request.start_ns
    lag_ns = record.t0_mono_ns - request.start_ns
    # Another host's monotonic clock is hours or days off.
    return lag_ns if -1_000_000 <= lag_ns <= 60_000_000_000 else None


def usable(view: dict[str, Any], request: ClientRequest) -> bool:
    """Whether it counts in a sum: sure enough, whole on both sides, and not spoilt."""
    tap = view["tap"]
    sure = view["sure"] != Sure.UNSURE.value
    return sure and not request.warmup and request.error is None and tap["failure"] is None and tap["void"] is None


def summary(views: Sequence[tuple[ClientRequest, dict[str, Any]]]) -> dict[str, Any]:
    """Percentiles over the usable requests: the tool's own, aligned, the tap's, and how far they are apart."""
    counted = [(request, view) for request, view in views if usable(view, request)]
    told = {"ttft_ms": "ttft_ns", "tpot_ms": "tpot_ns", "e2e_ms": "e2e_ns"}
    out: dict[str, Any] = {
        "requests": len(counted),
        # Joined, but their times at the tap are not to be trusted.
        "void": sum(view["tap"]["void"] is not None for _, view in views),
    }
    for name in METRICS:
        apart = [view["difference_ms"][name.removesuffix("_ms")] for _, view in counted]
        out[name] = {
            "told": _spread([_ms(getattr(request, told[name])) for request, _ in counted]),
            "aligned": _spread([view["client_aligned"][name] for _, view in counted]),
            "tap": _spread([view["tap"][name] for _, view in counted]),
            "difference": _spread(apart),
            "absolute_difference": _spread([None if each is None else abs(each) for each in apart]),
        }
    out["difference_from"] = sorted({view["difference_from"] for _, view in counted})
    out["before_tap_ms"] = _spread([view["before_tap_ms"] for _, view in counted])
    out["after_tap_ms"] = _spread([view["after_tap_ms"] for _, view in counted])
    return out


def _spread(values: Sequence[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    # The observed percentiles of this file, not estimates of what would be seen again: no early stopping here.
    return {"p50": stats.percentile(known, 0.5), "p99": stats.percentile(known, 0.99), "n": len(known)}


def _ms(value_ns: float | None) -> float | None:
    return None if value_ns is None else value_ns / _NS_PER_MS


def _minus(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one - other
