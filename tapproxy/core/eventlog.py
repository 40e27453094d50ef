"""The events of one response body with the stamps of the reads that brought them.

Rules here: adding a read only appends, so that nothing stands between a read and its sending; parsing follows in
batches; an event has the stamps of the read that held its last byte (SseItem.end_offset); bytes are dropped once
parsed, and numbers are kept in arrays, some fifty bytes an event that came alone; nothing is raised for any body.
"""

from __future__ import annotations

from array import array
from typing import Final

from tapproxy.core.deltas import KINDS, DeltaReader
from tapproxy.core.record import Events
from tapproxy.core.sse import SseParser

# A batch: large enough to spread the cost of a call, small enough to hold up no other stream (some 60 µs).
_BATCH_BYTES: Final = 8 * 1024
_MAX_BODY_BYTES: Final = 1024 * 1024
# An endless stream of two-byte comments must not fill the memory: what comes after is counted in ``unlogged``.
_MAX_EVENTS: Final = 1_000_000
_MAY_BE_JSON: Final = (bytearray(b"{"), bytearray(b"["), bytearray())
_NEVER: Final = -(1 << 63)
_UNKNOWN: Final = -1
_CODES: Final = {kind: code for code, kind in enumerate(KINDS)}


class EventLog:
    """One response body. Times are the caller's: absolute, or relative to anything, as long as they are of one clock.

    ``sse`` False: a body that is no event stream. If it looks like JSON, up to 1 MiB is kept for its numbers; with
    ``lines``, one JSON object a line (Ollama), its last object.
    """

    __slots__ = (
        "_arrived",
        "_body",
        "_codes",
        "_ends",
        "_finished",
        "_lines",
        "_max_events",
        "_offsets",
        "_parser",
        "_pending",
        "_pending_bytes",
        "_read_at",
        "_read_of",
        "_sent",
        "_tokens",
        "body_bytes",
        "deltas",
        "reads",
        "unlogged",
    )

    def __init__(
        self,
        max_event_bytes: int = 4 * 1024 * 1024,
        *,
        sse: bool = True,
        lines: bool = False,
        max_events: int = _MAX_EVENTS,
    ) -> None:
        self.deltas = DeltaReader()
        self.body_bytes = 0
        self.reads = 0
        self.unlogged = 0  # events beyond the limit: seen by ``deltas``, not kept
        self._parser = SseParser(max_event_bytes) if sse else None
        self._max_events = max_events
        self._lines = lines
        self._finished = False
        # The body itself, while it may be JSON and not a stream; None: it is not, or is too long.
        self._body: bytearray | None = bytearray()
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        # Per read.
        self._arrived = array("q")
        self._read_at = array("q")
        self._sent = array("q")
        self._ends = array("q")
        # Per event.
        self._codes = bytearray()
        self._offsets = array("q")
        self._read_of = array("i")
        self._tokens = array("i")

    @property
    def reads_events(self) -> bool:
        """Whether the body is an event stream."""
        return self._parser is not None

    def add_read(self, body: bytes, arrived_ns: int, read_at_ns: int, sent_ns: int | None) -> int:
        """The body bytes of one read; ``sent_ns`` None while they wait. Returns the read's index."""
        index = self.reads
        self.reads = index + 1
        self.body_bytes += len(body)
        if self._parser is not None and index < self._max_events:
            self._arrived.append(arrived_ns)
            self._read_at.append(read_at_ns)
            self._sent.append(_NEVER if sent_ns is None else sent_ns)
            self._ends.append(self.body_bytes)
        self._pending.append(body)
        self._pending_bytes += len(body)
        if self._pending_bytes >= _BATCH_BYTES:
            self.flush()
        return index

    def set_sent(self, read_index: int, sent_ns: int) -> None:
        """The bytes of that read have been taken by the kernel."""
        if 0 <= read_index < len(self._sent):
            self._sent[read_index] = sent_ns

    def flush(self) -> None:
        """Parses what is pending."""
        if not self._pending:
            return
        data = b"".join(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        if self._body is not None:
            self._keep_body(data)
        if self._parser is not None:
            self._read_events(self._parser, data)

    def _read_events(self, parser: SseParser, data: bytes) -> None:
        items = parser.feed(data)
        feed = self.deltas.feed
        readings = [feed(item) for item in items]
        room = self._max_events - len(self._codes)
        if self.reads > self._max_events:
            last_end = self._ends[-1] if self._ends else 0
            room = min(room, sum(item[0] <= last_end for item in items))
        if room < len(items):
            self.unlogged += len(items) - room
            del items[room:], readings[room:]
        ends, read_of = self._ends, self._read_of
        offsets = [item[0] for item in items]
        self._offsets.extend(offsets)
        self._codes += bytes([_CODES[kind] for kind, _ in readings])
        self._tokens.extend([_UNKNOWN if tokens is None else tokens for _, tokens in readings])
        read = read_of[-1] if read_of else 0
        for offset in offsets:
            while ends[read] < offset:
                read += 1
            read_of.append(read)

    def _keep_body(self, data: bytes) -> None:
        body = self._body
        if body is None:
            return
        body += data
        if self._lines:
            del body[: _last_line(body)]
        # Pages, pictures and event streams do not begin with a bracket.
        if len(body) > _MAX_BODY_BYTES or body[:64].lstrip()[:1] not in _MAY_BE_JSON:
            self._body = None

    def finish(self, t0_ns: int = 0) -> Events:
        """The events, times relative to ``t0_ns``, counts resolved as far as the whole stream allows."""
        self.flush()
        if not self._finished:
            self._finished = True
            if self._body and not self._codes:
                # An answer that was not streamed, whatever its content type says.
                self.deltas.read_body(bytes(self._body))
            self._body = None
        kinds = [KINDS[code] for code in bytes(self._codes)]
        tokens = [None if tokens == _UNKNOWN else tokens for tokens in self._tokens]
        reads = self._read_of.tolist()
        arrived = [at - t0_ns for at in self._arrived]
        read_at = [at - t0_ns for at in self._read_at]
        sent = [None if at == _NEVER else at - t0_ns for at in self._sent]
        return Events(
            kind=kinds,
            end_offset=self._offsets.tolist(),
            arrived=[arrived[read] for read in reads],
            read_at=[read_at[read] for read in reads],
            sent=[sent[read] for read in reads],
            read=reads,
            tokens=self.deltas.resolve_tokens(kinds, tokens),
        )


def _last_line(body: bytearray) -> int:
    """Where the last line begins, whole or not: the numbers stand in it, and the first names the model as well."""
    end = len(body)
    while end and body[end - 1] in b"\r\n":
        end -= 1
    return body.rfind(b"\n", 0, end) + 1
