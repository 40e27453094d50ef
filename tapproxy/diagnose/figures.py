"""The engine's stages within one request: their names, what one figure holds, and what the tap's stamps bound them by.

Rules here: a figure is told or seen, with its source; nothing is what others leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tapproxy.core.record import Record
from tapproxy.diagnose.links import Links
from tapproxy.diagnose.measures import first_token, token_events

# Tokens that come within so small a part of the time that they took to generate were kept until the last was made.
AT_THE_END: Final = 0.05
FRONTEND, QUEUE, PREFILL, DECODE = "engine.frontend", "engine.queue", "engine.prefill", "engine.decode"
PARTS: Final = (FRONTEND, QUEUE, PREFILL)


@dataclass(frozen=True, slots=True)
class Figure:
    """One stage of one request. ``bound_ns``: how far it may be off, None where that is not known."""

    ns: int
    source: str
    bound_ns: int | None = 0


@dataclass(frozen=True, slots=True)
class Inside:
    """From the innermost vantage's first request byte out to its first token in: the upload that is still the client's,
    the round trip, and the engine's own time."""

    upload_ns: int
    trip_ns: int | None
    rest_ns: int


def kept_to_the_end(record: Record, decode_ns: float | None) -> bool:
    """Whether its tokens came within next to nothing of the time in which, by the engine's word, they were made."""
    indexes = token_events(record)
    if decode_ns is None or len(indexes) < 2:
        return False
    arrived = record.events.arrived
    return arrived[indexes[0]] > decode_ns and arrived[indexes[-1]] - arrived[indexes[0]] < AT_THE_END * decode_ns


def inside(record: Record, links: Links, *, is_client: bool) -> Inside | None:
    """None where no token came, or no request left."""
    index, start_ns = first_token(record), record.upstream.write_start
    if index is None or start_ns is None:
        return None
    whole_ns = record.events.arrived[index] - start_ns
    given_ns = record.upstream.write_end if is_client else record.request.body_end
    upload_ns = 0 if given_ns is None else max(0, min(given_ns - start_ns, whole_ns))
    trip_ns = None if links.engine_ns is None else max(0, min(links.engine_ns, whole_ns - upload_ns))
    return Inside(upload_ns, trip_ns, whole_ns - upload_ns - (trip_ns or 0))


def to_last_token_ns(record: Record, spent: Inside | None) -> int | None:
    """From the request out to its last token in, less upload and round trip."""
    index, start_ns = first_token(record), record.upstream.write_start
    if spent is None or index is None or start_ns is None:
        return None
    last_ns = record.events.arrived[token_events(record)[-1]]
    return last_ns - start_ns - spent.upload_ns - (spent.trip_ns or 0)


def after_head_ns(record: Record) -> int | None:
    """From the response's head to the first token."""
    index = first_token(record)
    return (
        None if index is None or record.upstream.head is None else record.events.arrived[index] - record.upstream.head
    )
