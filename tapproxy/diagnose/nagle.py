"""Nagle's algorithm on the hop: small segments that wait for the acknowledgement of the one before.

Rules here: accused are only the streams that ``ackwait`` knows by their bursts; the line's own time is not part of the
effect. A batch timer of just that length looks the same, and that is said.
"""

from __future__ import annotations

from statistics import median

from tapproxy.diagnose import hop
from tapproxy.diagnose.ackwait import DELAYED_ACK_NS, EVENTS_A_BURST, distance_ns, is_round_trip, rtt_ns
from tapproxy.diagnose.facts import Fact, Named, median_ns, ms, percent, text_ms
from tapproxy.diagnose.shapes import NAGLE, STREAMS_SHARE, Shapes
from tapproxy.diagnose.view import View


def nagle(view: View, shapes: Shapes) -> Named | None:
    """Bursts a round trip or a delayed acknowledgement apart."""
    guilty = shapes.guilty(NAGLE)
    if not guilty:
        return None
    floor_ns = max(0, view.floor_ns or 0)
    distances = [round(found) for each in guilty if (found := distance_ns(each, floor_ns)) is not None]
    distance, rtt = median_ns(distances) or 0, median_ns([rtt_ns(each) for each in guilty]) or 0
    by_trip = is_round_trip(distance, rtt)
    even = median_ns([gap for each in guilty for gap in each.hop.far_icl_ns])
    held = [max(0, round(median(each.hop.hold_ns)) - floor_ns) for each in guilty]
    sizes = [burst.events for each in guilty for burst in hop.bursts(each.hop)]
    wait = "one round trip" if by_trip else "one delayed acknowledgement"
    expected = rtt if by_trip else DELAYED_ACK_NS
    facts = [
        Fact(f"distance of the bursts, P50 ({wait})", ms(distance), "ms", len(distances), ms(expected)),
        Fact("least round trip of that line", ms(rtt), "ms", len(guilty)),
        Fact("ICL before the hop, P50", ms(even), "ms", sum(len(each.hop.far_icl_ns) for each in guilty)),
        Fact("events a burst", round(sum(sizes) / len(sizes), 2), "", len(sizes), EVENTS_A_BURST),
        Fact("hold of an event above the floor, P50", ms(median_ns(held)), "ms", len(held)),
        Fact("floor of the hop, smallest hold", ms(view.floor_ns), "ms", sum(len(c.hop.near_ns) for c in view.crossed)),
        Fact("streams so", percent(len(guilty) / len(view.crossed)), "%", len(view.crossed), percent(STREAMS_SHARE)),
    ]
    because = (
        f"releases come {text_ms(distance)} apart, {wait}, whatever was waiting; a buffer lets go when it is full"
        + ("" if by_trip else " (a batch timer of 40 ms would look the same)")
    )
    line = f"the line takes {text_ms(floor_ns)} for the fastest event; the rest is waited for before sending"
    return Named(
        facts,
        metric="icl",
        confidence=0.75 if by_trip else 0.6,
        severity="warning",
        effects_ns=held,
        whole_ns=even,
        rejected=[("proxy.response_buffering", because), ("network.downstream", line)],
    )
