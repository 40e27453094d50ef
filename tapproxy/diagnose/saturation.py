"""A measuring process that was not there in time: the load client, or a tap.

Rules here: with its own lag above a tenth of what was measured, a run says nothing of anybody else: it is void, and no
other cause is named beside it. A tap weighs that for each record (tap.health) and declares it void itself; a load
client does not, and its lag is judged here. With the kernel's stamps a tap that only reads late still measures right,
and what it costs is tap.overhead, until it is so late that the next event is there as well: then one stamp is for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from tapproxy.core.counts import TOKEN_KINDS
from tapproxy.core.metrics import icl_ns, ttft_ns
from tapproxy.core.record import Record
from tapproxy.diagnose.facts import Fact, Named, median_ns, ms, percent
from tapproxy.diagnose.measures import known
from tapproxy.diagnose.view import View

# latency_tree: own loop lag or scheduling delay above a tenth of the quantity measured.
LAG_SHARE: Final = 0.1
# Below this a process of a busy machine of two cores is late whoever it is.
LAG_NS: Final = 1_000_000
TAP_LAG_SHARE: Final = 1.0
# With half of a vantage's records void there is no run left; below that the rest is used, and the void ones counted.
VOID_SHARE: Final = 0.5
# What a process says of itself when it was away (tap.health); a clock step or a failed measurement is something else.
AWAY: Final = frozenset(("loop_lag", "gc_pause", "steal"))


def client_saturated(view: View) -> Named | None:
    return _saturated(view.client, LAG_SHARE)


def tap_saturated(view: View) -> Named | None:
    """The worse of the taps."""
    found = [named for records in (view.outer, view.inner) if (named := _saturated(records, TAP_LAG_SHARE)) is not None]
    return max(found, key=lambda named: median_ns(named.effects_ns) or 0, default=None)


def _saturated(records: Sequence[Record], lag_share: float) -> Named | None:
    if not records:
        return None
    void = Counter(record.void for record in records if record.void in AWAY)
    lags = [lag for record in records for lag in _lags_ns(record)]
    gaps = [gap for record in records for gap in icl_ns(record)]
    lag, gap = median_ns(lags), median_ns(gaps)
    limit_ns = None if gap is None else max(LAG_NS, lag_share * gap)
    is_late = lag is not None and limit_ns is not None and lag >= limit_ns
    is_void = void.total() >= VOID_SHARE * len(records)
    if not is_late and not is_void:
        return None
    name = records[0].tap
    facts = [
        Fact(f"{name}: records void since it was away", percent(void.total() / len(records)), "%", len(records), 50.0),
        Fact(f"{name}: arrival of an event to its reading, P50", ms(lag), "ms", len(lags), ms(limit_ns)),
        Fact(f"{name}: ICL, P50", ms(gap), "ms", len(gaps)),
    ]
    facts += [Fact(f"{name}: void for {reason}", count, "records", len(records)) for reason, count in void.items()]
    middles = known(median_ns(_lags_ns(record)) for record in records)
    return Named(
        facts,
        metric="icl" if is_late else "ttft",
        confidence=0.9,
        effects_ns=middles,
        whole_ns=gap if is_late else median_ns(known(map(ttft_ns, records))),
    )


def _lags_ns(record: Record) -> list[int]:
    """Only the kernel's stamps tell when an event was there to be read."""
    if record.stamps.source != "kernel":
        return []
    events = record.events
    return [
        read_at - arrived
        for kind, arrived, read_at in zip(events.kind, events.arrived, events.read_at, strict=False)
        if kind in TOKEN_KINDS
    ]
