"""Which mechanism holds the streams of one client: a rule each, over several streams of different size and rate.

Rules here:
* A mechanism is what stays the same when size and rate change: bytes (a buffer that is passed on when full), time (a
  timer), throughput (a limit), "until the end" (everything buffered), "until the next one" (a look-ahead).
* One stream alone names nothing, since at one rate so many bytes are so much time; where two rules fit, neither is
  claimed. Each answer says what it compared with which threshold, and why the rivals do not fit.
* The thresholds are ratios between streams; a busy machine moves single events and not these.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Final

from tapproxy.probe import segments
from tapproxy.probe.naming import Mechanism, Named, fact
from tapproxy.probe.shape import AGREE, Shape, period

# How far apart what is "the same" may lie between streams, and what may go beyond it in one of them.
_SAME: Final = 1.35
_OVER: Final = 1.3
_QUANTA: Final = {1024 * size: f"{size}k" for size in (1, 2, 4, 8, 16, 32, 64)}
# A limit's last event is its latest, or nearly; what empties a buffer at the end has a last event that is early.
_LAST_OF_MAX: Final = 0.8
_LEAST_LAG_MS: Final = 150.0


def name(held: Sequence[Shape], streaming: Sequence[Shape], reused: Shape | None = None) -> Named:
    """The mechanism behind the held streams; UNCLEAR where none fits, or more than one does."""
    rules: tuple[Callable[[Sequence[Shape], Sequence[Shape], Shape | None], Named | None], ...] = (
        _rate_limit,
        _full,
        _next_event,
        segments.acknowledged,
        _bytes_or_time,
        segments.corked,
    )
    for rule in rules:
        found = rule(held, streaming, reused)
        if found is not None:
            return found
    return Named(
        Mechanism.UNCLEAR,
        "unclear",
        "events come late, in no pattern that names a mechanism",
        tuple(fact(f"hold P50 of {one.name}", one.p50_ms, "ms", one.events, None) for one in held),
    )


def _rate_limit(held: Sequence[Shape], streaming: Sequence[Shape], _: Shape | None) -> Named | None:
    grown = [
        one
        for one in held
        if one.last_ms >= _LEAST_LAG_MS and one.last_ms >= _LAST_OF_MAX * one.max_ms and one.arrived_rate > 0
    ]
    grown = [one for one in grown if one.sent_rate >= 1.15 * one.arrived_rate]
    if len(grown) < 2:
        return None
    rates = [one.arrived_rate for one in grown]
    if max(rates) > _SAME * min(rates):
        return None
    limit = statistics.median(rates)
    # Whoever was sent much faster than the limit and came unhindered disproves it.
    if any(one.sent_rate > 1.6 * limit for one in streaming):
        return None
    network = _network_trouble(grown)
    return Named(
        Mechanism.RATE_LIMIT,
        "rate_limit",
        f"bytes come at about {limit / 1e3:.1f} kB/s however fast they are sent, and lag ever further behind"
        + (f"; {network}" if network else ""),
        (
            *(
                fact(f"rate of {one.name}, sent at {one.sent_rate:.0f} B/s", one.arrived_rate, "B/s", one.events, None)
                for one in grown
            ),
            fact("greatest by least of these rates", max(rates) / min(rates), "ratio", len(rates), _SAME),
        ),
        (
            ("buffer", "a buffer empties at the end, and the last event comes on time; here it is the latest"),
            *((("network.downstream", f"{_calm(grown)}"),) if not network else ()),
        ),
        network_trouble=network is not None,
    )


def _full(held: Sequence[Shape], streaming: Sequence[Shape], _: Shape | None) -> Named | None:
    whole = [one for one in held if len(one.bursts) == 1 and one.bursts[0].first_hold_ms >= 0.85 * one.sent_span_ms]
    if len(whole) < len(held) or streaming:
        return None
    most = max(one.size_bytes for one in whole)
    return Named(
        Mechanism.FULL,
        "full",
        f"every answer came whole after its last event, up to {most / 1e3:.0f} kB",
        tuple(
            fact(f"{one.name}: wait of the first event, by the length of the stream",
                 one.bursts[0].first_hold_ms / one.sent_span_ms, "share", one.events, 0.85)
            for one in whole
        ),
        (
            ("quanta", f"a buffer of up to {most / 1e3:.0f} kB would have been passed on before the end"),
            ("timer", f"a timer of up to {max(one.sent_span_ms for one in whole) / 1e3:.1f} s would have, too"),
        ),
    )  # fmt: skip


def _next_event(held: Sequence[Shape], streaming: Sequence[Shape], _: Shape | None) -> Named | None:
    late = [one for one in held if one.one_late_share >= 0.8 and one.events_per_burst < 1.5]
    if len(late) < len(held):
        return None
    least = min(one.event_bytes for one in late)
    only = bool(streaming) and least > max(one.event_bytes for one in streaming)
    text = f"an event of {least} B or more comes only when the next one is sent" if only else (
        "an event comes only when the next one is sent"
    )  # fmt: skip
    return Named(
        Mechanism.NEXT_EVENT,
        "one_event_late",
        text,
        tuple(fact(f"{one.name}: events that came with the next one", one.one_late_share, "share", one.events, 0.8)
              for one in late),
        (("timer", "the wait is the stream's own interval"),
         ("network.downstream", "a distance would delay every event, not until the next one")),
    )  # fmt: skip


def _bytes_or_time(held: Sequence[Shape], streaming: Sequence[Shape], _: Shape | None) -> Named | None:
    by_bytes = {one.name: (size, one.event_bytes) for one in held if (size := _quantum(one)) is not None}
    by_time = {one.name: wait for one in held if (wait := _wait(one)) is not None}
    by_period = {one.name: apart for one in held if one.events_per_burst >= 2 and (apart := period(one)) is not None}
    bytes_ratio = _spread_bytes(list(by_bytes.values()))
    wait_ratio, period_ratio = _spread(list(by_time.values())), _spread(list(by_period.values()))
    one_shot = wait_ratio is not None and wait_ratio <= _SAME
    times, time_ratio = (by_time, wait_ratio) if one_shot else (by_period, period_ratio)
    # No burst is larger than the buffer it comes from, and no event waits longer than the timer; also in the streams
    # that have too few bursts to show a size or a time of their own.
    is_bytes = (
        bytes_ratio is not None
        and bytes_ratio <= _SAME
        and _greatest_burst(held) <= _OVER * max(size for size, _ in by_bytes.values()) + 1
    )
    is_time = (
        time_ratio is not None
        and time_ratio <= _SAME
        and max(one.max_ms for one in held) <= _OVER * max(times.values()) + 5.0
    )
    if is_bytes and not is_time:
        return _quanta_named(held, by_bytes, bytes_ratio, wait_ratio)
    if is_time and not is_bytes:
        return _timer_named(held, times, time_ratio, bytes_ratio, one_shot)
    return None


def _greatest_burst(held: Sequence[Shape]) -> float:
    """In bytes, less an event that stood on the edge, and one that came with it at the answer's end."""
    return max(max(burst.size_bytes for burst in one.bursts) - 2 * one.event_bytes for one in held)


def _quanta_named(
    held: Sequence[Shape], sizes: dict[str, tuple[float, int]], ratio: float | None, time_ratio: float | None
) -> Named:
    counts = {one.name: len(one.bursts) for one in held}
    # Streams of small events say the size best: a burst is whole events.
    finest = min(grain for _, grain in sizes.values())
    size = statistics.median([size for size, grain in sizes.values() if grain == finest])
    slug = next((text for quantum, text in _QUANTA.items() if 0.8 * quantum <= size <= 1.08 * quantum), None)
    about = f"{slug[:-1]} KiB" if slug else f"{size / 1e3:.1f} kB"
    return Named(
        Mechanism.QUANTA,
        f"quanta_{slug or 'other'}",
        f"bytes are passed on when about {about} have come together, at every rate",
        (
            *(fact(f"{one}: bytes of a burst", value, "B", counts[one], None) for one, (value, _) in sizes.items()),
            fact("greatest by least of these, event size allowed for", ratio or 1.0, "ratio", len(sizes), _SAME),
        ),
        (
            (
                "timer",
                f"events waited up to {max(one.max_ms for one in held):.0f} ms; the wait of a burst's first differs"
                + ("" if time_ratio is None else f" by a factor of {time_ratio:.1f}"),
            ),
            ("full", "bytes came before the answer's end"),
            ("rate_limit", "the last event is no later than the others"),
            ("network.downstream", _calm(held)),
        ),
    )


def _timer_named(
    held: Sequence[Shape], times: dict[str, float], ratio: float | None, bytes_ratio: float | None, one_shot: bool
) -> Named:
    counts = {one.name: len(one.bursts) for one in held}
    wait_ms = statistics.median(times.values())
    low, high = segments.CORK_MS
    cork = one_shot and low <= wait_ms <= high
    text = f"bytes are passed on {wait_ms:.0f} ms after the first of them came" if one_shot else (
        f"bytes are passed on every {wait_ms:.0f} ms"
    )  # fmt: skip
    if cork:
        text += ": the time after which Linux sends what was written with MSG_MORE or TCP_CORK"
    what = "longest wait of a burst" if one_shot else "time between bursts"
    return Named(
        Mechanism.CORK if cork else Mechanism.TIMER,
        "timer",
        text,
        (
            *(fact(f"{one}: {what}", value, "ms", counts[one], None) for one, value in times.items()),
            fact("greatest by least of these", ratio or 1.0, "ratio", len(times), _SAME),
        ),
        (
            (
                "quanta",
                "the bytes of a burst differ between streams"
                + ("" if bytes_ratio is None else f" by a factor of {bytes_ratio:.1f}, a buffer's would not"),
            ),
            ("full", "bytes came before the answer's end"),
            ("rate_limit", "the last event is no later than the others"),
        ),
    )


def _quantum(one: Shape) -> float | None:
    """The bytes of a burst, where the bursts of the stream agree; the last is what was left."""
    sizes = [burst.size_bytes for burst in one.bursts[:-1]]
    # Several events have to make one burst, or the size is the event's.
    if not sizes or one.events_per_burst < 2:
        return None
    middle = statistics.median(sizes)
    near = sum(abs(size - middle) <= one.event_bytes + 0.12 * middle for size in sizes)
    return middle if near >= AGREE * len(sizes) else None


def _wait(one: Shape) -> float | None:
    """How long the first event of a burst waits, where the bursts agree."""
    waits = [burst.first_hold_ms for burst in one.bursts[:-1]]
    if not waits or one.events_per_burst < 1.5:
        return None
    middle = statistics.median(waits)
    near = sum(abs(wait - middle) <= 0.2 * middle + 2.0 for wait in waits)
    return middle if middle > 0 and near >= AGREE * len(waits) else None


def _spread(values: list[float]) -> float | None:
    """The greatest by the least of at least two."""
    return max(values) / min(values) if len(values) >= 2 and min(values) > 0 else None


def _spread_bytes(sizes: list[tuple[float, int]]) -> float | None:
    """The same of bursts' sizes, each known to within half an event either way."""
    if len(sizes) < 2:
        return None
    greatest = max(size - grain / 2 for size, grain in sizes)
    least = min(size + grain / 2 for size, grain in sizes)
    return max(1.0, greatest / least)


def _network_trouble(shapes: Sequence[Shape]) -> str | None:
    again = sum(one.retransmits for one in shapes)
    if again > 3:
        return f"{again} segments were sent again: it may be the network"
    for one in shapes:
        if one.rtt_ms is not None and one.min_rtt_ms is not None and one.rtt_ms > max(50.0, 4 * one.min_rtt_ms):
            return f"the round trip grew from {one.min_rtt_ms:.0f} to {one.rtt_ms:.0f} ms: it may be the network"
    return None


def _calm(shapes: Sequence[Shape]) -> str:
    rtts = [one.rtt_ms for one in shapes if one.rtt_ms is not None]
    again = sum(one.retransmits for one in shapes)
    shown = f"round trip {max(rtts):.1f} ms at most, " if rtts else ""
    return f"{shown}{again} segments sent again: no network makes this pattern"
