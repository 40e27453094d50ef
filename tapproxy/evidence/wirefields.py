"""The fields of a protobuf message, without making objects of what is inside them.

Rules here: a parser makes some hundred bytes of an empty message of two, so that a body of a few MiB may fill the
memory; here nothing is made, every step is counted against a limit, and what is not protobuf raises ValueError.
"""

from __future__ import annotations

from collections.abc import Iterator

# From where to where a message goes in its body.
Part = tuple[int, int]
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_MOST_VARINT_BYTES = 10


class Walk:
    """One body, and how many more of its fields may be looked at."""

    __slots__ = ("_data", "_left")

    def __init__(self, data: bytes, most_fields: int) -> None:
        self._data = data
        self._left = most_fields

    def whole(self) -> Part:
        """The outermost message."""
        return 0, len(self._data)

    def bytes_of(self, part: Part) -> bytes:
        return self._data[part[0] : part[1]]

    def holds(self, part: Part, word: bytes) -> bool:
        """Whether these bytes occur in the part."""
        return self._data.find(word, *part) >= 0

    def parts(self, message: Part) -> Iterator[tuple[int, Part]]:
        """(field number, from where to where) of each string, bytes or message field; others are stepped over."""
        position, end = message
        while position < end:
            self._left -= 1
            if self._left < 0:
                raise ValueError("the body holds too many fields")
            tag, position = self._varint(position, end)
            kind = tag & 7
            if kind == _BYTES:
                size, position = self._varint(position, end)
                if position + size > end:
                    raise ValueError("the body is cut short")
                yield tag >> 3, (position, position + size)
                position += size
            elif kind == _VARINT:
                _, position = self._varint(position, end)
            elif kind in (_FIXED64, _FIXED32):
                position += 8 if kind == _FIXED64 else 4
            else:
                raise ValueError("the body is no protobuf")
        if position > end:
            raise ValueError("the body is cut short")

    def _varint(self, position: int, end: int) -> tuple[int, int]:
        value = shift = 0
        for at in range(position, min(end, position + _MOST_VARINT_BYTES)):
            byte = self._data[at]
            value |= (byte & 127) << shift
            if byte < 128:
                return value, at + 1
            shift += 7
        raise ValueError("the body is no protobuf, or is cut short")
