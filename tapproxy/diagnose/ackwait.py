"""Streams whose releases are those of a sender that waits for an acknowledgement before the next small segment.

Rules here: the engine is even, and behind the hop the events come in bursts at the distance of one round trip, or of
one delayed acknowledgement. A buffer lets go when it is full, so that the event that filled it did not wait; here the
last of a burst waits as it happens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Final

from tapproxy.diagnose import hop
from tapproxy.diagnose.view import Crossed

# Linux holds an acknowledgement back for 40 ms, and by up to one tick of 4 ms more; load adds some.
DELAYED_ACK_NS: Final = 40_000_000
DELAYED_ACK_EARLY_NS: Final = 3_000_000
DELAYED_ACK_LATE_NS: Final = 8_000_000
# A round trip that is measured lies this near to the distance of the bursts; below 5 ms it is a machine's own jitter.
RTT_SPREAD: Final = 0.25
RTT_LEAST_NS: Final = 5_000_000
# Bursts at one distance: seven of ten within a fifth of the median, at least five of them, of two events or so.
ALIKE: Final = 0.7
SPREAD: Final = 0.2
BURSTS_LEAST: Final = 5
EVENTS_A_BURST: Final = 1.5
# The engine is even where its slow gaps lie within three times the median (as for engine.bundling).
EVEN_PACE: Final = 3.0
# A full buffer releases with an event's arrival, so that its last event is not held; an acknowledgement comes when it
# comes. With tokens closer than 8 ms the two are not told apart, and a buffer is named.
LAST_HELD: Final = 0.25
LAST_HELD_NS: Final = 2_000_000


def looks_so(crossed: Crossed, floor_ns: int | None) -> bool:
    """Whether this stream's releases are those of a sender that waits for acknowledgements."""
    found = distance_ns(crossed, max(0, floor_ns or 0))
    return found is not None


def distance_ns(crossed: Crossed, floor_ns: int) -> float | None:
    """The distance of the bursts where it is a round trip's or a delayed acknowledgement's, else None."""
    stream = crossed.hop
    released = hop.bursts(stream)
    if len(released) <= BURSTS_LEAST or len(stream.near_ns) < EVENTS_A_BURST * len(released):
        return None
    gaps = sorted(stream.far_icl_ns)
    gap = median(gaps)
    if gap < hop.SMALLEST_GAP_NS or gaps[9 * len(gaps) // 10] > EVEN_PACE * gap:
        return None
    # The last burst is cut by the answer's end.
    distances = [b.at_ns - a.at_ns for a, b in pairwise(released[:-1])]
    middle = median(distances)
    if middle < EVENTS_A_BURST * gap:
        return None
    if sum(abs(each - middle) <= SPREAD * middle for each in distances) < ALIKE * len(distances):
        return None
    rtt = rtt_ns(crossed)
    if is_round_trip(middle, rtt):
        return middle
    late = middle - rtt - DELAYED_ACK_NS
    if not -DELAYED_ACK_EARLY_NS <= late <= DELAYED_ACK_LATE_NS:
        return None
    return middle if _last_is_held(stream, released, gap, floor_ns) else None


def rtt_ns(crossed: Crossed) -> int:
    """The least round trip of the line between the proxy and the nearer side."""
    part = crossed.near.upstream
    return part.min_rtt_ns if part.min_rtt_ns is not None else part.rtt_ns or 0


def is_round_trip(distance: float, rtt: int) -> bool:
    return rtt >= RTT_LEAST_NS and abs(distance - rtt) <= RTT_SPREAD * rtt


def _last_is_held(stream: hop.HopStream, released: Sequence[hop.Burst], gap: float, floor_ns: int) -> bool:
    index, last_holds = -1, []
    for burst in released[:-1]:
        index += burst.events
        # Until the burst's first arrival: what comes later of it is this side's own noise.
        last_holds.append(burst.at_ns - stream.far_ns[index] - floor_ns)
    return bool(last_holds) and median(last_holds) >= max(LAST_HELD_NS, LAST_HELD * gap)
