"""The shape of one stream: how late its events came, and in what bursts.

Rules here: everything is relative to the least delayed event of the stream, so no common clock is needed. Events whose
arrivals lie closer together than their sends are a burst.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, Final

from tapproxy.core.stats import nearest_rank
from tapproxy.probe.observe import Observed

_MS: Final = 1_000_000
# What a client feels, and what a healthy proxy on a busy machine stays well below (nginx that streams: 0.3 ms).
HELD_P50_MS: Final = 8.0
# Of the bursts of one stream, how many have to agree with their median.
AGREE: Final = 0.7
# Fewer events make no shape.
LEAST_EVENTS: Final = 8
# The tap's own sends may be late by so much (P50, P95) before a stream is no longer the one that was asked for. Each is
# stamped when it is made, so lateness alone makes no hold.
_LATE_P50_MS: Final = 8.0
_LATE_P95_MS: Final = 50.0


@dataclass(frozen=True, slots=True)
class Burst:
    """Events that came together. ``first_hold_ms``: how late the one that waited longest was."""

    events: int
    size_bytes: int
    arrived_ms: float
    first_hold_ms: float


@dataclass(frozen=True, slots=True)
class Shape:
    """One stream. Holds in ms, relative to its least delayed event."""

    name: str
    events: int
    expected: int
    size_bytes: int
    event_bytes: int
    interval_ms: float
    p50_ms: float
    p95_ms: float
    max_ms: float
    last_ms: float
    bursts: tuple[Burst, ...]
    sent_span_ms: float
    arrived_span_ms: float
    one_late_share: float
    rtt_ms: float | None
    min_rtt_ms: float | None
    retransmits: int

    @property
    def held(self) -> bool:
        """Whether half of its events came late enough to be felt."""
        return self.p50_ms >= HELD_P50_MS

    @property
    def sent_rate(self) -> float:
        """Bytes a second, as the tap sent them."""
        return self.size_bytes / self.sent_span_ms * 1e3 if self.sent_span_ms else 0.0

    @property
    def arrived_rate(self) -> float:
        """Bytes a second, as they came."""
        return self.size_bytes / self.arrived_span_ms * 1e3 if self.arrived_span_ms else 0.0

    @property
    def events_per_burst(self) -> float:
        """Mean number of events that came together."""
        return self.events / len(self.bursts)


def shape(observed: Observed) -> Shape | None:
    """None where too few events came to say anything."""
    events = observed.events
    if len(events) < LEAST_EVENTS:
        return None
    holds = observed.relative_hold_ns()
    ordered = sorted(holds)
    intervals = [after.sent_ns - before.sent_ns for before, after in pairwise(events)]
    interval_ns = sorted(intervals)[len(intervals) // 2]
    offsets = [0, *(event.end_offset for event in events)]
    fetched = observed.fetched
    size = offsets[-1] - offsets[1]
    return Shape(
        name=observed.name,
        events=len(events),
        expected=observed.plan.events,
        size_bytes=size,
        event_bytes=observed.plan.sizes_bytes()[0],
        interval_ms=interval_ns / _MS,
        p50_ms=_ms(nearest_rank(ordered, 0.5)),
        p95_ms=_ms(nearest_rank(ordered, 0.95)),
        max_ms=ordered[-1] / _MS,
        last_ms=holds[-1] / _MS,
        bursts=_bursts(observed, holds, interval_ns),
        sent_span_ms=(events[-1].sent_ns - events[0].sent_ns) / _MS,
        arrived_span_ms=(events[-1].arrived_ns - events[0].arrived_ns) / _MS,
        one_late_share=_one_late(holds, intervals),
        rtt_ms=None if fetched.rtt_ns is None else fetched.rtt_ns / _MS,
        min_rtt_ms=None if fetched.min_rtt_ns is None else fetched.min_rtt_ns / _MS,
        retransmits=fetched.retransmits or 0,
    )


def _ms(value: float | None) -> float:
    return (value or 0.0) / _MS


def _bursts(observed: Observed, holds: list[int], interval_ns: int) -> tuple[Burst, ...]:
    events = observed.events
    apart_ns = min(max(_MS, interval_ns // 4), 5 * _MS)
    starts = [0]
    for number in range(1, len(events)):
        if events[number].arrived_ns - events[number - 1].arrived_ns > apart_ns:
            starts.append(number)
    out = []
    for start, end in zip(starts, [*starts[1:], len(events)], strict=True):
        before = events[start - 1].end_offset if start else 0
        out.append(
            Burst(
                end - start,
                events[end - 1].end_offset - before,
                (events[start].arrived_ns - events[0].arrived_ns) / _MS,
                holds[start] / _MS,
            )
        )
    return tuple(out)


def _one_late(holds: list[int], intervals: list[int]) -> float:
    """The share of events that came when the next one was sent; the last has no next."""
    late = sum(
        abs(hold - interval) <= max(4 * _MS, interval // 5) for hold, interval in zip(holds, intervals, strict=False)
    )
    return late / len(intervals)


def period(one: Shape) -> float | None:
    """The time between bursts, where they agree; the last comes when the stream ends."""
    times = [burst.arrived_ms for burst in one.bursts[:-1]]
    gaps = [after - before for before, after in pairwise(times)]
    if len(gaps) < 3:
        return None
    middle = median(gaps)
    near = sum(abs(gap - middle) <= 0.25 * middle + one.interval_ms / 2 for gap in gaps)
    return middle if middle > 0 and near >= AGREE * len(gaps) else None


def void_reason(observed: Observed) -> str | None:
    """Why a stream says nothing about the proxy, or None."""
    if observed.trouble is not None:
        return observed.trouble
    if observed.tap is None:
        return "the tap has no report of it"
    late = sorted(observed.tap["late_ns"])
    p50_ms, p95_ms = _ms(nearest_rank(late, 0.5)), _ms(nearest_rank(late, 0.95))
    if p50_ms > _LATE_P50_MS or p95_ms > _LATE_P95_MS:
        return f"the tap itself sent late (P50 {p50_ms:.1f}, P95 {p95_ms:.1f} ms): its host is busy"
    if observed.fetched.clock_step:
        return "the wall clock stepped meanwhile, and kernel stamps with it"
    return None


def sound(observed: Observed | None) -> Shape | None:
    """The shape of a stream that says something about the proxy, else None."""
    return None if observed is None or void_reason(observed) is not None else shape(observed)


def shape_json(one: Shape) -> dict[str, Any]:
    """What the result shows of a stream."""
    return {
        "name": one.name,
        "event_bytes": one.event_bytes,
        "interval_ms": round(one.interval_ms, 3),
        "events": one.events,
        "expected": one.expected,
        "held": one.held,
        "hold_ms": {"p50": _round(one.p50_ms), "p95": _round(one.p95_ms), "max": _round(one.max_ms)},
        "last_hold_ms": _round(one.last_ms),
        "bursts": len(one.bursts),
        "burst_bytes_p50": sorted(burst.size_bytes for burst in one.bursts)[len(one.bursts) // 2],
        "bytes_per_s": {"sent": round(one.sent_rate), "arrived": round(one.arrived_rate)},
        "rtt_ms": None if one.rtt_ms is None else _round(one.rtt_ms),
        "retransmits": one.retransmits,
    }


def _round(value: float) -> float:
    return round(value, 3)
