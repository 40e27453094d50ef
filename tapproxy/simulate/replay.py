"""A captured raw answer, served again with its own framing: the bytes on the wire are the file's bytes.

The head is one write, each chunk another. A capture that ends early is served as a connection that is closed
early. Pure but for ``Player``.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from tapproxy.simulate.clock import Clock
from tapproxy.simulate.http import Connection
from tapproxy.simulate.request import parse_chunk_size


@dataclass(frozen=True, slots=True)
class Recording:
    writes: tuple[bytes, ...]  # joined, they are the file
    complete: bool  # the answer ended as it was framed, and the connection may be used again


def read_recording(data: bytes) -> Recording:
    """Raises ValueError with a sentence where the bytes are no HTTP answer."""
    head, body = _split_heads(data)
    lines = head.split(b"\r\n\r\n")[-2].split(b"\r\n")  # the last head; those before it are 1xx
    fields = [line.partition(b":")[::2] for line in lines[1:]]
    values = {name.strip().lower(): value.strip().lower() for name, value in fields}
    closes = values.get(b"connection") == b"close" or lines[0].startswith(b"HTTP/1.0")
    if b"transfer-encoding" in values:
        chunks, complete = _split_chunks(body)
        return Recording((head, *chunks), complete and not closes)
    length = values.get(b"content-length", b"")
    complete = length.isdigit() and int(length) == len(body)
    bodiless = lines[0].split(b" ")[1] in (b"204", b"304")
    return Recording((head, body) if body else (head,), (complete or (bodiless and not body)) and not closes)


def _split_heads(data: bytes) -> tuple[bytes, bytes]:
    at = 0
    while True:
        end = data.find(b"\r\n\r\n", at)
        first = data[at:end].split(b"\r\n")[0].split(b" ")
        if end < 0 or not first[0].startswith(b"HTTP/1.") or len(first) < 2 or not first[1].isdigit():
            raise ValueError("it holds no HTTP/1 response head")
        at = end + 4
        if not 100 <= int(first[1]) < 200:
            return data[:at], data[at:]


def _split_chunks(body: bytes) -> tuple[list[bytes], bool]:
    """Each chunk with its size line and CRLF; what cannot be read as one is the last piece."""
    chunks: list[bytes] = []
    at = 0
    while at < len(body):
        line_end = body.find(b"\r\n", at)
        size_bytes = parse_chunk_size(body[at:line_end]) if line_end >= 0 else None
        if size_bytes is None:
            break
        if size_bytes == 0:
            end = body.find(b"\r\n\r\n", line_end)  # after the trailers, if any
            if end >= 0:
                chunks.append(body[at : end + 4])
                at = end + 4
            rest = body[at:]
            return ([*chunks, rest], False) if rest else (chunks, True)
        end = line_end + 2 + size_bytes
        if body[end : end + 2] != b"\r\n":
            break
        chunks.append(body[at : end + 2])
        at = end + 2
    rest = body[at:]
    return ([*chunks, rest] if rest else chunks), False


class Player:
    """One serving of a recording: a write each ``gap_ns``, at absolute times."""

    def __init__(self, recording: Recording, gap_ns: int, clock: Clock, connection: Connection) -> None:
        self._left = deque(recording.writes)
        self._complete = recording.complete
        self._gap_ns = gap_ns
        self._clock = clock
        self._connection = connection
        self._lost = False

    def start(self) -> None:
        self._next(time.monotonic_ns())

    def on_lost(self) -> None:
        self._lost = True

    def _next(self, due_ns: int) -> None:
        if self._lost:
            return
        self._connection.write(self._left.popleft())
        if not self._left:
            self._connection.finish(keep_alive=self._complete)
            return
        due_ns += self._gap_ns
        self._clock.at(due_ns, lambda: self._next(due_ns))
