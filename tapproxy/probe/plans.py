"""The matrix: which streams a probe asks for, and why each of them.

Rules here: a mechanism shows in how several streams differ. A quantum of bytes takes the same bytes at every rate, a
timer the same time; a rate limit grows without end; what is done to large events only, or to compressed answers only,
needs one of each. A stream is short where it can be: the deployed proxy has other work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tapproxy.core.probing import Framing, Part, Plan

_MS: Final = 1_000_000
# The first event comes after the head by so much, or a late head could not be told from an early event.
FIRST_NS: Final = 300 * _MS


@dataclass(frozen=True, slots=True)
class Cell:
    """One stream of the matrix."""

    name: str
    events: int
    event_bytes: int
    interval_ms: float
    gzip: bool = False
    framing: Framing = Framing.CHUNKED
    unbuffered: bool = False

    def plan(self, prefix: str) -> Plan:
        """What the tap is asked for."""
        part = Part(self.events, self.event_bytes, round(self.interval_ms * _MS))
        return Plan(f"{prefix}-{self.name}", (part,), FIRST_NS, self.framing, self.unbuffered)


# 69 kB at 46 kB/s, 28 kB at 11.5 kB/s, 7 kB at 2.3 kB/s; 80 kB at 55 kB/s in mid-size events; and events over 4 kB.
SMALL_FAST: Final = Cell("small-fast", 300, 230, 5)
SMALL: Final = Cell("small", 120, 230, 20)
SMALL_SLOW: Final = Cell("small-slow", 30, 230, 80)
MIDDLE: Final = Cell("middle", 75, 1_100, 20)
LARGE: Final = Cell("large", 20, 5_000, 100)
IDENTITY: Final = (SMALL_FAST, SMALL, SMALL_SLOW, MIDDLE, LARGE)
GZIP_SMALL: Final = Cell("gzip-small", 120, 230, 20, gzip=True)
GZIP_MIDDLE: Final = Cell("gzip-middle", 75, 1_100, 20, gzip=True)
GZIP: Final = (GZIP_SMALL, GZIP_MIDDLE)
# With X-Accel-Buffering: no, where something was held: says whether that header is the way out.
UNBUFFERED: Final = Cell("unbuffered", 120, 230, 20, unbuffered=True)
# For a proxy that asks in HTTP/1.0: an engine that keeps to that version answers it without chunks.
CLOSE: Final = (
    Cell("close-fast", 300, 230, 5, framing=Framing.AS_ASKED),
    Cell("close-small", 120, 230, 20, framing=Framing.AS_ASKED),
    Cell("close-middle", 75, 1_100, 20, framing=Framing.AS_ASKED),
)
# The last of three requests on one connection, beside SMALL on a fresh one: Nagle's algorithm tells them apart.
REUSED: Final = Cell("reused", 120, 230, 20)

# An answer that goes on for three seconds, left after a few events.
ABORT: Final = Plan("abort", (Part(150, 230, 20 * _MS),))
ABORT_AFTER: Final = 5
# One that says nothing for a while, as in queue and prefill, left in that silence: the tap has long to be told.
ABORT_FIRST: Final = Plan("abort-first", (Part(30, 230, 20 * _MS),), 2_500 * _MS)
SHORT: Final = Plan("short", (Part(3, 230, 5 * _MS),))
# 24 pieces of 2 kB, 40 ms apart: an upload of about a second.
UPLOAD_PIECES: Final = 24
UPLOAD_PIECE_BYTES: Final = 2_048
UPLOAD_PAUSE_S: Final = 0.04


def silence(name: str, seconds: float, *, after: int) -> Plan:
    """``after`` events, then silence, then two more."""
    pause = Part(1, 230, round(seconds * 1e9))
    if not after:
        return Plan(name, (Part(2, 230, 5 * _MS),), round(seconds * 1e9))
    return Plan(name, (Part(after, 230, 5 * _MS), pause, Part(1, 230, 5 * _MS)), 0)
