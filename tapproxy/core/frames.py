"""Frames between a worker and its parent: a length, a kind, a JSON body. Bytes in, frames out, no I/O."""

from __future__ import annotations

import struct
from typing import Final

# Kinds of frame, worker to parent: a record (after its id, so that it need not be parsed to be known), what the records
# since the last such frame add up to, a finding seen for the first time, how the worker is, that it takes requests, and
# what concerns a probe.
RECORD: Final = b"R"
TALLY: Final = b"T"
FOUND: Final = b"F"
STATUS: Final = b"S"
READY: Final = b"U"
PROBE: Final = b"P"
# Of the records that a tap makes.
ID_BYTES: Final = 26

_HEADER: Final = struct.Struct("!Ic")
MAX_FRAME_BYTES: Final = 256 * 1024 * 1024


def pack(kind: bytes, body: bytes) -> bytes:
    """One frame on the wire."""
    return _HEADER.pack(len(body), kind) + body


class FrameReader:
    """Cuts a byte stream into frames."""

    __slots__ = ("_buffer",)

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """(kind, body) of the frames completed by these bytes.

        Raises ValueError where the stream is no stream of frames.
        """
        buffer = self._buffer
        buffer += data
        out: list[tuple[bytes, bytes]] = []
        start = 0
        while len(buffer) - start >= _HEADER.size:
            size, kind = _HEADER.unpack_from(buffer, start)
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            end = start + _HEADER.size + size
            if len(buffer) < end:
                break
            out.append((kind, bytes(buffer[start + _HEADER.size : end])))
            start = end
        if start:
            del buffer[:start]
        return out
