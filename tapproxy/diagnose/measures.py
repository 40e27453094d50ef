"""Numbers of records that several rules ask for, beside those of core.metrics. Times are ns from the record's t0."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tapproxy.core import metrics
from tapproxy.core.counts import TOKEN_KINDS
from tapproxy.core.record import Record


def token_events(record: Record) -> list[int]:
    """The indexes of its token events."""
    return [index for index, kind in enumerate(record.events.kind) if kind in TOKEN_KINDS]


def first_token(record: Record) -> int | None:
    """The index of the first token event."""
    return next((index for index, kind in enumerate(record.events.kind) if kind in TOKEN_KINDS), None)


def e2e_ns(record: Record) -> int:
    """t_last, or the body's end where no token was seen (an encoded body)."""
    last_ns = metrics.e2e_ns(record)
    return last_ns if last_ns is not None else record.upstream.end or 0


def span_ns(record: Record) -> int:
    """First body byte to the end of the body."""
    start, end = record.upstream.first_byte, record.upstream.end
    if start is not None and end is not None:
        return end - start
    arrived = record.events.arrived
    return arrived[-1] - arrived[0] if arrived else 0


def spread_percent(record: Record) -> int | None:
    """Of the time from the request to the last token, the part in which tokens came."""
    tokens = token_events(record)
    last_ns = record.events.arrived[tokens[-1]] if tokens else 0
    return round(100 * (last_ns - record.events.arrived[tokens[0]]) / last_ns) if last_ns > 0 else None


def events_per_read(records: Sequence[Record]) -> float:
    """Token events / the reads that brought them, over all the records."""
    events = reads = 0
    for record in records:
        tokens = token_events(record)
        events += len(tokens)
        reads += len({record.events.read[index] for index in tokens})
    return round(events / reads, 2) if reads else 0.0


def tap_delays_ns(tap: Record) -> list[int]:
    """What the tap itself added to each token event: arrival to sending. Empty where its client held it up."""
    if tap.downstream.stalled_ns or tap.downstream.unsent_max_bytes:
        return []
    events = tap.events
    return [sent - events.arrived[i] for i in token_events(tap) if (sent := events.sent[i]) is not None]


def known(values: Iterable[int | None]) -> list[int]:
    """Those that are not None."""
    return [value for value in values if value is not None]
