"""Server-Sent Events out of bytes, incrementally, as the WHATWG algorithm dispatches them.

Rules here: any cut of the same bytes gives the same items with the same offsets; CR, LF and CRLF end a line; time is
linear in the bytes and memory bounded by ``max_event_bytes``; data stays bytes (whoever decodes replaces what is
invalid); nothing is raised for any input.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_BOM: Final = b"\xef\xbb\xbf"
_LF: Final = 10
# What is kept of a line that is too long: enough to tell ``data:`` and a comment from everything else.
_PREFIX_BYTES: Final = 5
_MIN_EVENT_BYTES: Final = 16
# A wait time of more digits than this is nobody's: int() of it would cost more than it tells.
_MAX_RETRY_DIGITS: Final = 18
# An item made without the detour through its own __new__: half the price, and there is one per event.
_new: Final = tuple.__new__


class SseItem(NamedTuple):
    """One dispatched event, or one comment line.

    ``end_offset``: the body offset just past the first byte of the line end that completed the item, so that an
    event ended by a CRLF that was cut in two belongs to the read that ended it. ``data`` of a comment is the text
    after the colon, unchanged. ``oversize``: longer than the limit; its data was dropped and is empty.
    """

    end_offset: int
    type: str
    data: bytes
    comment: bool
    oversize: bool
    last_event_id: str


class SseParser:
    """Feed it the body's bytes in order, in any pieces."""

    __slots__ = (
        "_after_cr",
        "_clean",
        "_data",
        "_head",
        "_id",
        "_limit",
        "_line",
        "_line_over",
        "_over",
        "_type",
        "last_event_id",
        "offset",
        "retry",
    )

    def __init__(self, max_event_bytes: int = 16 * 1024 * 1024) -> None:
        self._limit = max(max_event_bytes, _MIN_EVENT_BYTES)
        self._clean = False  # nothing is pending, the start of the stream is over
        self._head: bytes | None = b""  # the first bytes, until it is known whether they are a byte order mark
        self._line = bytearray()  # the line that has not ended yet
        self._line_over = False
        self._after_cr = False  # the last byte was a CR: an LF that follows belongs to it
        self._type = ""
        self._data: bytes | bytearray | None = None  # None: no data line yet, which differs from an empty one
        self._over = False
        self._id = ""
        self.last_event_id = ""
        self.retry: int | None = None
        self.offset = 0

    @property
    def undispatched_tail(self) -> bool:
        """Whether the bytes so far end inside an event: with a line cut short, or with data not dispatched."""
        return bool(self._line) or self._line_over or self._data is not None or bool(self._head)

    def feed(self, data: bytes) -> list[SseItem]:
        """The items that these bytes complete, in order."""
        base = self.offset
        length = len(data)
        self.offset = base + length
        # One event by itself is what an engine sends and what a read most often holds.
        if (
            self._clean
            and data.find(b"\n") == length - 2
            and data.startswith(b"data: ")
            and data[-1] == _LF
            and length <= self._limit
            and b"\r" not in data
        ):
            event_id = self.last_event_id = self._id
            return [_new(SseItem, (base + length, "message", data[6:-2], False, False, event_id))]
        items: list[SseItem] = []
        position = 0
        if not self._clean:
            if self._head is not None:
                data = self._head + data
                base = 0
                if data.startswith(_BOM):
                    position = len(_BOM)
                elif _BOM.startswith(data):
                    self._head = data
                    return items
                self._head = None
            if self._after_cr and position < len(data):
                self._after_cr = False
                if data[position] == _LF:
                    position += 1
            if self._line or self._line_over or self._data is not None or self._type:
                position = self._lines(data, position, base, items, stop_when_clean=True)
        if position < len(data):
            # Once per call, so that a feed it cannot take is not scanned again and again.
            position = self._plain(data, position, base, items)
            if position < len(data):
                self._lines(data, position, base, items, stop_when_clean=False)
        self._clean = not (self._line or self._line_over or self._after_cr or self._data is not None or self._type)
        return items

    def _plain(self, data: bytes, start: int, base: int, items: list[SseItem]) -> int:
        """Takes a run of one-line ``data:`` events, which is what engines send; returns its end.

        All or nothing: the counts show whether any byte would need the line-by-line reader.
        """
        blank = b"\n\n"
        end = data.rfind(blank, start)
        if end < 0:
            blank = b"\r\n\r\n"
            end = data.rfind(blank, start)
        field = b"data: " if data.startswith(b"data: ", start) else b"data:"
        if end < 0 or end - start > self._limit or not data.startswith(field, start):
            return start
        pieces = data[start + len(field) : end].split(blank + field)
        breaks = 2 * len(pieces) - 2
        if data.count(b"\n", start, end) != breaks:
            return start
        if data.count(b"\r", start, end) != (breaks if len(blank) == 4 else 0):
            return start
        spaced = len(field) == 5
        extra = len(field) + len(blank)
        past_cr = 1 if len(blank) == 4 else 0
        offset = base + start - past_cr
        event_id = self.last_event_id = self._id
        for piece in pieces:
            offset += len(piece) + extra
            if spaced and piece[:1] == b" ":
                piece = piece[1:]
            items.append(_new(SseItem, (offset, "message", piece, False, False, event_id)))
        return end + len(blank)

    def _lines(self, data: bytes, position: int, base: int, items: list[SseItem], stop_when_clean: bool) -> int:
        """Takes line by line; ``stop_when_clean`` returns as soon as an event has ended and nothing is pending."""
        length = len(data)
        far = length + 1
        # Both are looked up once and again only when passed, or a stream of one kind would be searched in O(n²).
        next_lf = next_cr = -1
        while position < length:
            if next_lf < position:
                next_lf = data.find(b"\n", position)
                next_lf = far if next_lf < 0 else next_lf
            if next_cr < position:
                next_cr = data.find(b"\r", position)
                next_cr = far if next_cr < 0 else next_cr
            end = next_lf if next_lf < next_cr else next_cr
            if end == far:
                self._keep_part(data[position:])
                return length
            over = self._line_over or len(self._line) + end - position > self._limit
            if over:
                line = bytes(self._line[:_PREFIX_BYTES]) + data[position : min(end, position + _PREFIX_BYTES)]
            elif self._line:
                line = bytes(self._line) + data[position:end]
            else:
                line = data[position:end]
            self._line.clear()
            self._line_over = False
            position = end + 1
            offset = base + position
            if end == next_cr:
                # CR ends a line at once; waiting for an LF would date its event one read late.
                if position == length:
                    self._after_cr = True
                elif data[position] == _LF:
                    position += 1
            if line:
                self._field(line, over, offset, items)
                continue
            self._dispatch(offset, items)
            if stop_when_clean:
                return position
        return position

    def _keep_part(self, part: bytes) -> None:
        if self._line_over:
            return
        line = self._line
        line += part
        if len(line) > self._limit:
            self._line_over = True
            del line[_PREFIX_BYTES:]

    def _field(self, line: bytes, over: bool, offset: int, items: list[SseItem]) -> None:
        if line.startswith(b"data:"):
            self._add_data(b"" if over else line[6:] if line[5:6] == b" " else line[5:], over)
            return
        if line[0] == 58:  # a colon: a comment
            text = b"" if over else line[1:]
            items.append(SseItem(offset, "message", text, True, over, self.last_event_id))
            return
        if over:
            return
        name, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if name == b"event":
            self._type = value.decode("utf-8", "replace")
        elif name == b"data":
            self._add_data(b"", False)
        elif name == b"id":
            if b"\0" not in value:
                self._id = value.decode("utf-8", "replace")
        elif name == b"retry" and value.isdigit():
            digits = value.lstrip(b"0") or b"0"
            if len(digits) <= _MAX_RETRY_DIGITS:
                self.retry = int(digits)

    def _add_data(self, value: bytes, over: bool) -> None:
        kept = self._data
        if over or self._over or (kept is not None and len(kept) + 1 + len(value) > self._limit):
            self._over = True
            self._data = b""
        elif kept is None:
            self._data = value
        else:
            if type(kept) is bytes:
                kept = self._data = bytearray(kept)
            kept += b"\n"
            kept += value

    def _dispatch(self, offset: int, items: list[SseItem]) -> None:
        self.last_event_id = self._id
        data = self._data
        if data is not None:
            items.append(SseItem(offset, self._type or "message", bytes(data), False, self._over, self.last_event_id))
            self._data = None
            self._over = False
        self._type = ""
