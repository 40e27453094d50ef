"""What a client saw of one calibrated stream, event by event, beside what the tap says it did.

Rules here: an event's arrival is that of the read that held its last byte; the send time is in the event itself. Client
stamps and tap stamps are on one clock only where that is known (``Clocks``); ``relative_hold`` needs none: it is how
much later than the least delayed event of its stream an event came, which is a lower bound of its delay.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from typing import Any, Final

from tapproxy.core.probing import ANSWER_FIELD, Plan
from tapproxy.wire.calibrated import Timed
from tapproxy.wire.fetch import Fetched

_EVENT: Final = re.compile(rb'data: [^\n]*"sent_ns": *(\d+)[^\n]*\n\n')
_MOST_DECODED_BYTES: Final = 16 * 1024 * 1024


@dataclass(slots=True)
class Observed:
    """One stream, both sides. ``events``: with offsets in the decoded body. ``tap``: its report, None without one."""

    name: str
    plan: Plan
    fetched: Fetched
    events: list[Timed] = field(default_factory=list)
    encoding: str | None = None
    trouble: str | None = None
    tap: dict[str, Any] | None = None

    @property
    def answered_by_tap(self) -> bool:
        """Whether the answer says that the tap wrote it."""
        return self.header(ANSWER_FIELD) == self.plan.id

    @property
    def complete(self) -> bool:
        """Whether every event came and the answer ended as it should."""
        return self.fetched.error is None and len(self.events) == self.plan.events

    def header(self, name: bytes) -> str | None:
        """The first value of a field of the answer."""
        for found, value in self.fetched.headers:
            if found.lower() == name:
                return value.decode("latin-1")
        return None

    def relative_hold_ns(self) -> list[int]:
        """Of each event, how much longer it took than the fastest of this stream."""
        delays = [event.arrived_ns - event.sent_ns for event in self.events]
        least = min(delays, default=0)
        return [delay - least for delay in delays]

    def header_delay_ns(self) -> int | None:
        """How much closer head and first event came together than they were sent. None where one of them is missing."""
        fetched, tap = self.fetched, self.tap
        if fetched.head_ns is None or not self.events or tap is None or tap["head_sent_ns"] is None:
            return None
        apart_ns = self.events[0].sent_ns - int(tap["head_sent_ns"])
        return apart_ns - (self.events[0].arrived_ns - fetched.head_ns)


def observe(name: str, plan: Plan, fetched: Fetched) -> Observed:
    """Finds the events in an answer, undoing gzip where it was used."""
    out = Observed(name, plan, fetched)
    out.encoding = out.header(b"content-encoding")
    decoder = None
    if out.encoding is not None and out.encoding.lower() not in ("identity", ""):
        if out.encoding.lower() not in ("gzip", "x-gzip", "deflate"):
            out.trouble = f"the answer came as {out.encoding}, which nobody asked for"
            return out
        decoder = zlib.decompressobj(wbits=47)
    body = bytearray()
    looked = 0
    for read in fetched.reads:
        data = read.body
        if decoder is not None:
            try:
                data = decoder.decompress(data, _MOST_DECODED_BYTES - len(body))
            except zlib.error as error:
                out.trouble = f"the compressed answer cannot be read: {error}"
                return out
        body += data
        for match in _EVENT.finditer(body, looked):
            out.events.append(Timed(match.end(), int(match[1]), read.arrived_ns, read.read_at_ns))
            looked = match.end()
    return out
