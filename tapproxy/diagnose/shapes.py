"""What the holds of one stream look like, and how many streams of a run look so.

Rules here:
* The floor (the fastest event of the run) stands for what the network takes at its best; it is part of the threshold,
  never taken out of a number.
* Late alone is not buffered: a long line delays every event alike and puts none together. Held events that came
  out together, though they went in apart, are what only a buffer does.
* A run is accused when a part of its streams is, not when one is.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from tapproxy.diagnose import ackwait, hop
from tapproxy.diagnose.view import Crossed, View, compressed_in_hop

# A busy two-core machine delays single events by some ms; a buffer holds them for hundreds.
HELD_NS: Final = 10_000_000
# One late event of a stream of forty is 2.5 %, a machine's hiccup of 30 ms in a fast stream some 8 %.
HELD_SHARE: Final = 0.10
COALESCED_SHARE: Final = 0.10
# A buffer touches most events of a stream (all but the last of each release); a machine that stops for 30 ms now and
# then touches those it stopped, however many tokens come in that time.
TOUCHED_SHARE: Final = 0.5
# With tokens every ms all of that happens by chance as well; but then half of the events wait next to nothing.
MEDIAN_NS: Final = 5_000_000
# Of a hop that is one event late nearly every event waits for the next.
ONE_LATE_SHARE: Final = 0.5
# Streams that must show it: a fifth (a proxy may compress or hold for some clients only), and never fewer than three.
STREAMS_SHARE: Final = 0.2
STREAMS_LEAST: Final = 3
# A buffer lets everything go when the answer ends; a limited rate still lags then, by half of its longest lag or more,
# the answer takes longer behind the hop than before it, and each release comes when the one before is paid for.
TAIL_SHARE: Final = 0.5
STRETCH: Final = 1.1
# It falls behind ever further; of a timer's releases, which come at a constant rate too, the lag does not grow.
GROWTH: Final = 1.1
RATE_SPREAD: Final = 0.25
RATE_AGREES: Final = 0.8

STREAMS, DELAYED = "streams", "delayed"
BUFFERED, COMPRESSED, RATE_LIMITED, SLOW_CLIENT = "buffered", "compressed", "rate_limited", "slow_client"
NAGLE = "nagle"


@dataclass(frozen=True, slots=True)
class Shapes:
    """The streams of a run by what their holds look like."""

    threshold_ns: int
    by_shape: dict[str, list[Crossed]]

    def guilty(self, shape: str) -> list[Crossed]:
        """The streams of that shape, if they are enough to accuse somebody."""
        found = self.by_shape.get(shape, [])
        total = sum(len(streams) for streams in self.by_shape.values())
        return found if len(found) >= max(STREAMS_LEAST, STREAMS_SHARE * total) else []


def sort_streams(view: View) -> Shapes:
    limit_ns = threshold_ns(view.floor_ns, view.hold_bound_ns)
    by_shape: dict[str, list[Crossed]] = defaultdict(list)
    for crossed in view.crossed:
        waits = ackwait.looks_so(crossed, view.floor_ns) and compressed_in_hop(crossed.near, crossed.far) is None
        by_shape[NAGLE if waits else shape_of(crossed, limit_ns)].append(crossed)
    return Shapes(limit_ns, by_shape)


def threshold_ns(floor_ns: int | None, bound_ns: int = 0) -> int:
    """Held longer than this is held: the floor and 10 ms, or twice the floor where that is more (a line's jitter grows
    with its length). ``bound_ns``: how much longer than it seems the line may be, since two clocks are compared."""
    least_ns = max(0, floor_ns or 0)
    return least_ns + max(HELD_NS, least_ns + bound_ns)


def shape_of(crossed: Crossed, limit_ns: int) -> str:
    """What one stream's holds look like."""
    holds = crossed.hop.hold_ns
    if sum(hold > limit_ns for hold in holds) < HELD_SHARE * len(holds):
        return STREAMS
    if crossed.near.downstream.stalled_ns >= max(holds) / 2:
        return SLOW_CLIENT
    if compressed_in_hop(crossed.near, crossed.far):
        return COMPRESSED
    if _rate_is_limited(crossed.hop, limit_ns):
        return RATE_LIMITED
    if (hop.released_by_next_share(crossed.hop) or 0) >= ONE_LATE_SHARE:
        return BUFFERED
    together = hop.coalesced_share(crossed.hop) or 0
    waits = median(holds) >= limit_ns - HELD_NS + MEDIAN_NS
    if waits and together >= COALESCED_SHARE and touched_share(crossed.hop, limit_ns) >= TOUCHED_SHARE:
        return BUFFERED
    return DELAYED


def touched_share(stream: hop.HopStream, limit_ns: int) -> float:
    """Share of the events that were held, or came out with the one before."""
    together = [False, *hop.together(stream)]
    touched = [hold > limit_ns or flag for hold, flag in zip(stream.hold_ns, together, strict=True)]
    return sum(touched) / len(touched)


def _rate_is_limited(stream: hop.HopStream, limit_ns: int) -> bool:
    holds = stream.hold_ns
    if holds[-1] <= limit_ns or holds[-1] < TAIL_SHARE * max(holds):
        return False
    if holds[-1] < GROWTH * max(holds[: len(holds) // 2], default=0):
        return False
    if stream.near_ns[-1] - stream.near_ns[0] < STRETCH * (stream.far_ns[-1] - stream.far_ns[0]):
        return False
    # The first release carries the response head as well, whose size is not known here.
    rates = [a.size_bytes / (b.at_ns - a.at_ns) for a, b in pairwise(hop.bursts(stream)[1:])]
    if len(rates) < 2:
        return False
    middle = median(rates)
    return sum(abs(rate - middle) <= RATE_SPREAD * middle for rate in rates) >= RATE_AGREES * len(rates)
