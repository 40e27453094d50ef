"""What the proxy's kernel does with small writes: Nagle's algorithm, and a corked socket. Both let whole segments go.

Rules here: they are told from a proxy's own waiting by what they spare: events larger than a segment, events further
apart than the wait, and, with nginx, the second request on a connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tapproxy.probe import plans
from tapproxy.probe.naming import Mechanism, Named, fact
from tapproxy.probe.shape import HELD_P50_MS, Shape, period

# Linux sends what was written with MSG_MORE or TCP_CORK after 200 ms; delayed acknowledgements come after 40 ms.
CORK_MS: Final = (185.0, 235.0)
_DELAYED_ACK_MS: Final = (36.0, 48.0)
# Below this a round trip explains nothing that is felt.
_LEAST_RTT_MS: Final = 6.0
# A segment on most networks; what is larger never waits for an acknowledgement.
_SEGMENT_BYTES: Final = 1460
# What one event may wait beyond the timer.
_OVER: Final = 1.3


def acknowledged(held: Sequence[Shape], streaming: Sequence[Shape], reused: Shape | None) -> Named | None:
    """Nagle's algorithm: what is small waits until what was sent before it is acknowledged, or fills a segment."""
    rtts = [one.min_rtt_ms for one in held if one.min_rtt_ms is not None]
    rtt_ms = min(rtts, default=0.0)
    far = rtt_ms >= _LEAST_RTT_MS
    # Large events have waits of their own: a look-ahead, which is told apart.
    small = [one for one in held if one.event_bytes < _SEGMENT_BYTES]
    bound_ms = 1.15 * rtt_ms + 5.0 if far else _DELAYED_ACK_MS[1] + 5.0
    # Also those whose middle event is on time: one that waits longer than an acknowledgement takes waits for another.
    every = [*small, *(one for one in streaming if one.event_bytes < _SEGMENT_BYTES)]
    if not small or (not far and not _agrees_with_delayed_acks(every)):
        return None
    longest_ms = max(one.p95_ms for one in every)
    slower = [one for one in every if not one.held and one.interval_ms > 1.2 * bound_ms]
    large_flows = any(one.event_bytes >= 2 * _SEGMENT_BYTES for one in streaming)
    # The same events at the same rate, on a fresh connection and on one that was used before.
    fresh = next((one for one in every if one.name == plans.SMALL.name), None)
    reused_flows = (
        reused is not None
        and fresh is not None
        and not reused.held
        and fresh.p50_ms >= HELD_P50_MS / 2
        and reused.p50_ms <= fresh.p50_ms / 2
    )
    if longest_ms > bound_ms or not (large_flows or reused_flows):
        return None
    shown = [
        text
        for text, true in (
            ("a second request on the connection streams", reused_flows),
            ("events larger than a segment stream", large_flows),
            ("events further apart than that stream", bool(slower)),
        )
        if true
    ]
    what = f"the round trip, {rtt_ms:.0f} ms" if far else "the delay of acknowledgements, 40 ms"
    return Named(
        Mechanism.NAGLE if far else Mechanism.DELAYED_ACK,
        "nagle" if far else "delayed_ack",
        f"small events wait for an acknowledgement: up to {longest_ms:.0f} ms, {what}; {'; '.join(shown)}",
        (
            *(fact(f"{one.name}: hold P95", one.p95_ms, "ms", one.events, round(bound_ms, 3)) for one in small),
            *((fact("hold P50 on a reused connection", reused.p50_ms, "ms", reused.events, HELD_P50_MS),)
              if reused is not None and reused_flows else ()),
            fact("least round trip", rtt_ms, "ms", len(rtts), _LEAST_RTT_MS),
        ),
        (("timer", "a timer would hold " + ("a reused connection" if reused_flows else "large events") + " as well"),
         ("proxy.response_buffering", "no event waits longer than an acknowledgement takes"),
         ("network.loss", f"{sum(one.retransmits for one in small)} segments sent again")),
    )  # fmt: skip


def _agrees_with_delayed_acks(small: Sequence[Shape]) -> bool:
    """Near by, bursts come as far apart as acknowledgements are delayed, in two streams at least."""
    periods = [apart for one in small if one.events_per_burst >= 1.5 and (apart := period(one)) is not None]
    return len(periods) >= 2 and all(_DELAYED_ACK_MS[0] <= apart <= _DELAYED_ACK_MS[1] for apart in periods)


def corked(held: Sequence[Shape], streaming: Sequence[Shape], _: Shape | None) -> Named | None:
    """A cork with real segments: whole ones leave, and only what fills none waits for the kernel's timer."""
    rtt_ms = min((one.min_rtt_ms for one in held if one.min_rtt_ms is not None), default=0.0)
    low, high = CORK_MS[0] + 0.8 * rtt_ms, CORK_MS[1] + 1.4 * rtt_ms
    slowest, fastest = min(held, key=lambda one: one.sent_rate), max(held, key=lambda one: one.sent_rate)
    wait_ms = slowest.p95_ms
    if not low <= wait_ms <= high or not any(one.event_bytes >= _SEGMENT_BYTES for one in streaming):
        return None
    if any(one.max_ms > _OVER * wait_ms for one in held) or fastest.p50_ms > 0.7 * slowest.p50_ms:
        return None
    return Named(
        Mechanism.CORK,
        "timer",
        f"what fills no segment is passed on {wait_ms:.0f} ms after it came: the time (200 ms and a round trip) after "
        "which Linux sends what was written with MSG_MORE or TCP_CORK; what fills one leaves at once",
        (
            fact(f"{slowest.name}, the slowest stream: hold P95", wait_ms, "ms", slowest.events, round(low, 1)),
            fact(f"{fastest.name}, the fastest stream: hold P50", fastest.p50_ms, "ms", fastest.events,
                 round(0.7 * slowest.p50_ms, 1)),
            fact("least round trip", rtt_ms, "ms", len(held), None),
        ),
        (("network.nagle", "events wait longer than an acknowledgement takes"),
         ("quanta", "streams that are slow wait no longer than the timer"),
         ("rate_limit", "the last event is no later than the others")),
    )  # fmt: skip
