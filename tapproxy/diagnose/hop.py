"""What a hop did to one stream: holds, coalescing, bursts, and the mechanism their size points to.

Rules here: numbers only, no blame (causes.py blames). Everything compares the same events at two vantages, so an
engine that sends in lumps looks the same on both sides and counts for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final, NamedTuple

from tapproxy.core.counts import TOKEN_KINDS
from tapproxy.core.record import Record
from tapproxy.diagnose.pairing import Hold

# Two events are together when their distance shrank to a tenth of what it was before the hop (or one read held
# both): less is the ordinary jitter of two processes.
TOGETHER_SHARE: Final = 0.1
# Distances below this are not told apart: two writes of a sender, or the jitter of a stamp.
SMALLEST_GAP_NS: Final = 500_000
# What chunked framing adds to an event of 16 to 4095 bytes: two or three digits, two line ends.
_CHUNK_FRAME_BYTES: Final = 7
# Buffer sizes of reference nginx builds, as bytes on the wire. Bursts are whole events, so a burst is up to one
# event smaller than the buffer, and the first one shares it with the response head.
_QUANTA: Final[tuple[tuple[int, int, str, str], ...]] = (
    (3_100, 4_500, "full_buffer", "about 4 kB a burst: nginx's read buffer (proxy_buffers), or a TLS buffer set so"),
    (6_900, 8_700, "full_buffer", "about 8 kB a burst: nginx's read buffer (proxy_buffers), or a TLS buffer set so"),
    (13_500, 17_500, "tls_buffer", "about 16 kB a burst: nginx's TLS write buffer (ssl_buffer_size)"),
)
# A timer's bursts come at one distance; a tenth is what scheduling adds to 50 ms.
_TIMER_SPREAD: Final = 0.1
_TIMER_BURSTS: Final = 5


class Burst(NamedTuple):
    """Events that the hop released together. ``size_bytes`` of body, from the end of the burst before."""

    at_ns: int
    events: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class HopStream:
    """The token events of one stream on both sides of a hop; times are the nearer record's, from its t0."""

    near_ns: list[int]
    far_ns: list[int]
    near_read: list[int]
    near_end_bytes: list[int]

    @property
    def hold_ns(self) -> list[int]:
        return [near - far for near, far in zip(self.near_ns, self.far_ns, strict=True)]

    @property
    def near_icl_ns(self) -> list[int]:
        return [b - a for a, b in pairwise(self.near_ns)]

    @property
    def far_icl_ns(self) -> list[int]:
        return [b - a for a, b in pairwise(self.far_ns)]


@dataclass(frozen=True, slots=True)
class Mechanism:
    """What the releases look like; ``value`` and ``unit`` are the number that says so, over ``n`` of them."""

    name: str
    text: str
    value: float
    unit: str
    n: int


def stream(near: Record, far: Record, hold: Hold) -> HopStream | None:
    """None where the hold is unknown or no token event is paired."""
    if hold.values_ns is None:
        return None
    events = near.events
    kinds, arrived = events.kind, events.arrived
    rows = zip(hold.events, hold.values_ns, strict=True)
    chosen = [(index, value) for (index, _), value in rows if kinds[index] in TOKEN_KINDS]
    if not chosen:
        return None
    return HopStream(
        [arrived[index] for index, _ in chosen],
        [arrived[index] - value for index, value in chosen],
        [events.read[index] for index, _ in chosen],
        [events.end_offset[index] for index, _ in chosen],
    )


def together(each: HopStream) -> list[bool]:
    """For every event but the first: whether it came out with the one before it, though it did not go in with it."""
    return [
        far_gap >= SMALLEST_GAP_NS and (same_read or near_gap <= far_gap * TOGETHER_SHARE)
        for near_gap, far_gap, same_read in _gaps(each)
    ]


def coalesced_share(each: HopStream) -> float | None:
    """Share of the events that the hop put together; None for a single event."""
    flags = together(each)
    return sum(flags) / len(flags) if flags else None


def released_by_next_share(each: HopStream) -> float | None:
    """Share of the events that came out just as the next one went in: a hop that is one event late."""
    pairs = list(zip(each.near_ns, each.far_ns[1:], strict=False))
    gaps = each.far_icl_ns
    if not pairs:
        return None
    late = [
        gap >= SMALLEST_GAP_NS and 0 <= near - next_far <= max(SMALLEST_GAP_NS, gap * TOGETHER_SHARE)
        for (near, next_far), gap in zip(pairs, gaps, strict=True)
    ]
    return sum(late) / len(late)


def bursts(each: HopStream) -> list[Burst]:
    """The releases of a stream, in order."""
    near, far, reads, ends = each.near_ns, each.far_ns, each.near_read, each.near_end_bytes
    found: list[Burst] = []
    done_bytes = start = 0
    for index in range(1, len(near)):
        far_gap = far[index] - far[index - 1]
        least_ns = max(SMALLEST_GAP_NS, far_gap * TOGETHER_SHARE)
        if reads[index] == reads[index - 1] or near[index] - near[index - 1] <= least_ns:
            continue
        found.append(Burst(near[start], index - start, ends[index - 1] - done_bytes))
        start, done_bytes = index, ends[index - 1]
    found.append(Burst(near[start], len(near) - start, ends[-1] - done_bytes))
    return found


def mechanism(streams: Sequence[HopStream]) -> Mechanism:
    """What kind of hold these streams show. Only ever a pointer: the hold itself is the proof."""
    per_stream = [bursts(each) for each in streams]
    inner = [burst for found in per_stream for burst in found[:-1] if burst.events > 1]
    late = [share for each in streams if (share := released_by_next_share(each)) is not None]
    if late and median(late) >= 0.5:
        share = round(100 * median(late))
        return Mechanism("one_event_late", "each event waits for the next one", share, "% of events", len(late))
    if per_stream and median([_largest_share(found) for found in per_stream]) >= 0.95:
        size = median([found[-1].size_bytes for found in per_stream])
        text = "one burst at the end: a compressor that is not flushed, or a buffer larger than the answer"
        return Mechanism("whole_answer", text, round(size / 1000, 1), "kB", len(per_stream))
    if (sized := known_size(inner)) is not None:
        return sized
    distances = [b.at_ns - a.at_ns for found in per_stream for a, b in pairwise(found[:-1])]
    if len(distances) >= _TIMER_BURSTS:
        middle = median(distances)
        near_middle = [d for d in distances if abs(d - middle) <= _TIMER_SPREAD * middle]
        if len(near_middle) >= 0.8 * len(distances):
            text = "bursts at a constant distance: a batch timer"
            return Mechanism("timer", text, round(middle / 1e6, 1), "ms", len(distances))
    size = median([burst.size_bytes for burst in inner]) if inner else 0
    return Mechanism("irregular", "bursts of no known size", round(size / 1000, 1), "kB", len(inner))


def known_size(found: Sequence[Burst]) -> Mechanism | None:
    """The buffer whose size these bursts have, by their median; None where it is no buffer's."""
    if not found:
        return None
    wire = median([burst.size_bytes + burst.events * _CHUNK_FRAME_BYTES for burst in found])
    for low, high, name, text in _QUANTA:
        if low <= wire <= high:
            return Mechanism(name, text, round(wire / 1000, 1), "kB", len(found))
    return None


def _gaps(each: HopStream) -> list[tuple[int, int, bool]]:
    """(distance at the nearer side, at the farther side, one read) of every two neighbours."""
    same = [a == b for a, b in pairwise(each.near_read)]
    return list(zip(each.near_icl_ns, each.far_icl_ns, same, strict=True))


def _largest_share(found: Sequence[Burst]) -> float:
    return max(burst.events for burst in found) / sum(burst.events for burst in found)
