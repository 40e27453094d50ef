"""Reads HTTP/1 requests off the front of a buffer: heads, bodies by length, chunked bodies. No I/O."""

from __future__ import annotations

import time
from dataclasses import dataclass

_MAX_HEAD_BYTES = 64 * 1024
_MAX_BODY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    target: str
    http10: bool
    keep_alive: bool
    headers: dict[bytes, bytes]  # lower-case names
    body: bytes
    arrival_ns: int  # the read that held its last byte

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]


class Malformed(Exception):
    """The request cannot be read; the message is the body of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RequestReader:
    """Takes one request after another off the front of a buffer."""

    def __init__(self) -> None:
        self.expects_continue = False
        self._head: tuple[str, str, bool, dict[bytes, bytes]] | None = None
        self._body = bytearray()

    def read(self, buffer: bytearray) -> Request | None:
        """The next request once it is complete. Raises Malformed."""
        if self._head is None:
            while buffer.startswith(b"\r\n"):
                del buffer[:2]
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                if len(buffer) > _MAX_HEAD_BYTES:
                    raise Malformed(400, "Invalid HTTP request received.")
                return None
            self._head = _parse_head(bytes(buffer[:end]))
            del buffer[: end + 4]
        method, target, http10, headers = self._head
        body = self._read_body(buffer, headers)
        if body is None:
            self.expects_continue = headers.get(b"expect", b"").lower() == b"100-continue" and not http10
            return None
        self._head = None
        self.expects_continue = False
        keep_alive = not http10 and b"close" not in headers.get(b"connection", b"").lower()
        return Request(method, target, http10, keep_alive, headers, body, time.monotonic_ns())

    def _read_body(self, buffer: bytearray, headers: dict[bytes, bytes]) -> bytes | None:
        if b"transfer-encoding" in headers:
            return self._read_chunks(buffer)
        length = headers.get(b"content-length", b"0")
        if not length.isdigit():
            raise Malformed(400, "Invalid HTTP request received.")
        size_bytes = int(length)
        if size_bytes > _MAX_BODY_BYTES:
            raise Malformed(413, "Request body is too large.")
        if len(buffer) < size_bytes:
            return None
        body = bytes(buffer[:size_bytes])
        del buffer[:size_bytes]
        return body

    def _read_chunks(self, buffer: bytearray) -> bytes | None:
        """Chunks as they are complete; trailers are skipped."""
        while True:
            line_end = buffer.find(b"\r\n")
            if line_end < 0:
                if len(buffer) > _MAX_HEAD_BYTES:
                    raise Malformed(400, "Invalid HTTP request received.")
                return None
            size_bytes = parse_chunk_size(bytes(buffer[:line_end]))
            if size_bytes is None:
                raise Malformed(400, "Invalid HTTP request received.")
            if size_bytes == 0:
                end = buffer.find(b"\r\n\r\n", line_end)
                if end < 0:
                    return None
                del buffer[: end + 4]
                body = bytes(self._body)
                self._body.clear()
                return body
            if len(self._body) + size_bytes > _MAX_BODY_BYTES:
                raise Malformed(413, "Request body is too large.")
            start = line_end + 2
            if len(buffer) < start + size_bytes + 2:
                return None
            self._body += buffer[start : start + size_bytes]
            del buffer[: start + size_bytes + 2]


def parse_chunk_size(line: bytes) -> int | None:
    digits = line.partition(b";")[0].strip()
    if not 0 < len(digits) <= 8 or digits.strip(b"0123456789abcdefABCDEF"):
        return None
    return int(digits, 16)


def _parse_head(head: bytes) -> tuple[str, str, bool, dict[bytes, bytes]]:
    first, *lines = head.split(b"\r\n")
    words = first.split(b" ")
    if len(words) != 3 or words[2] not in (b"HTTP/1.1", b"HTTP/1.0") or not words[1]:
        raise Malformed(400, "Invalid HTTP request received.")
    headers: dict[bytes, bytes] = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or name != name.strip():
            raise Malformed(400, "Invalid HTTP request received.")
        headers[name.lower()] = value.strip(b" \t")
    return words[0].decode("latin-1"), words[1].decode("latin-1"), words[2] == b"HTTP/1.0", headers


UNREADABLE = Request("?", "?", False, False, {}, b"", 0)
