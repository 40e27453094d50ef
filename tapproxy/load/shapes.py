"""How the answers of a path came, as the client alone can see it: streamed, in lumps, at the end, or not as a stream.

Rules here: a path is judged by what half of its answers or more look like; answers of fewer than five tokens look
like nothing. A path is accused of holding a stream only where another path shows that the engine sends one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Final

from tapproxy.core import metrics, stats
from tapproxy.core.counts import TOKEN_KINDS
from tapproxy.core.record import Record
from tapproxy.load.arms import Arm, median

# latency_tree, engine.synthetic_stream: nine events of ten in the last twentieth of the answer's time …
LAST_EVENTS_SHARE: Final = 0.9
LAST_TIME_SHARE: Final = 0.05
# … and faster than any engine decodes.
DECODE_LEAST_NS: Final = 1_000_000
LEAST_TOKENS: Final = 5
# Of all answers of the path.
ANSWERS_SHARE: Final = 0.5
# Token events that came with others in one read: half of them on a path that lumps, a quarter on one that does not.
LUMPED_SHARE: Final = 0.5
SINGLE_SHARE: Final = 0.25
# Tokens closer than this are read together by chance.
APART_NS: Final = 5_000_000


class Shape(StrEnum):
    """What most of a path's answers look like."""

    STREAMED = "streamed"
    LUMPED = "lumped"
    AT_THE_END = "at_the_end"
    NOT_A_STREAM = "not_a_stream"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Seen:
    """A path's shape, of how many answers, and the numbers behind it."""

    shape: Shape
    answers: int
    share: float  # of the answers that look so
    lumped: float | None  # median share of token events that came with another in one read


def look(arm: Arm) -> Seen:
    """The shape of most answers of a path."""
    answers = len(arm.good)
    whole = [result.record for result in arm.good if not result.record.events.kind]
    streams = [record for record in arm.streams if len(token_reads(record)) >= LEAST_TOKENS]
    lumped = median([lumped_share(record) for record in streams])
    if answers < stats.least_n(0.5, 1):
        return Seen(Shape.UNKNOWN, answers, 0.0, lumped)
    if len(whole) >= ANSWERS_SHARE * answers:
        return Seen(Shape.NOT_A_STREAM, answers, len(whole) / answers, lumped)
    tests: tuple[tuple[Shape, Callable[[Record], bool]], ...] = (
        (Shape.AT_THE_END, at_the_end),
        (Shape.LUMPED, lambda record: lumped_share(record) >= LUMPED_SHARE),
        (Shape.STREAMED, lambda record: lumped_share(record) <= SINGLE_SHARE),
    )
    for shape, is_so in tests:
        count = sum(map(is_so, streams))
        if streams and count >= ANSWERS_SHARE * answers:
            return Seen(shape, answers, count / answers, lumped)
    return Seen(Shape.UNKNOWN, answers, 0.0, lumped)


def token_reads(record: Record) -> list[int]:
    """The read of every token event."""
    events = record.events
    return [read for kind, read in zip(events.kind, events.read, strict=False) if kind in TOKEN_KINDS]


def lumped_share(record: Record) -> float:
    """Of the token events after the first, those that came in the same read as the one before."""
    reads = token_reads(record)
    return sum(a == b for a, b in pairwise(reads)) / (len(reads) - 1) if len(reads) > 1 else 0.0


def at_the_end(record: Record) -> bool:
    """All tokens at once when the answer was done."""
    events = record.events
    tokens = [at for kind, at in zip(events.kind, events.arrived, strict=False) if kind in TOKEN_KINDS]
    if len(tokens) < LEAST_TOKENS:
        return False
    late = sum(at >= tokens[-1] * (1 - LAST_TIME_SHARE) for at in tokens)
    return late >= LAST_EVENTS_SHARE * len(tokens) and (median(metrics.icl_ns(record)) or 0) < DECODE_LEAST_NS


def tokens_apart(arm: Arm) -> bool:
    """Whether the path's tokens come far enough apart that a lump of them is no chance."""
    gaps = arm.values("icl_ms")
    middle = median([gap for gap in gaps if gap > 0])
    return middle is not None and middle >= APART_NS


def shows_a_hop(records: Sequence[Record], reference: Sequence[Record]) -> str | None:
    """What tells that something stands in this path that does not in the other, or None where nothing does."""
    for name, words in (("via", "a Via header"), ("server", "another Server header"), ("content-encoding", "encoding")):
        ours = {record.headers.get(name) for record in records}
        theirs = {record.headers.get(name) for record in reference}
        if ours and None not in ours and not ours & theirs:
            return f"{words} ({', '.join(sorted(str(value) for value in ours))})"
    chunked = [
        {(record.headers.get("transfer-encoding") or "").lower() for record in rs} for rs in (records, reference)
    ]
    if chunked == [{""}, {"chunked"}]:
        return "the answer is not chunked, as it is where one collected it"
    return None
