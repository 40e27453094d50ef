"""The engine of a live check: a server on loopback that answers as a profile says, and knows when it sent what.

Rules here: every event is one write and one chunk, stamped (CLOCK_MONOTONIC) immediately before the write; events bear
a number, so that an answer that was compressed or cut on its way can still be paired. Which answer a request gets is in
its query, the one thing that all of nginx's settings leave alone. What arrives is counted and not kept.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import time
import zlib
from dataclasses import dataclass, field
from typing import Final, cast

from tapproxy.core.http1 import BodyReader, Refusal, head_end, parse_request
from tapproxy.nginx.predict import Framing, Upstream

TARGET: Final = "/v1/chat/completions"
DONE: Final = b"data: [DONE]\n\n"
_MAX_HEAD_BYTES: Final = 64 * 1024
_RUN: Final = re.compile(rb"[?&]run=(\d+)")
_BAD: Final = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """One stream: the wait before each event in ms, and its size in bytes. The header is sent at once.

    ``dies``: the connection is closed after the last event, as that of an engine that crashed.
    """

    events: tuple[tuple[float, int], ...]
    dies: bool = False


def steady(events: int, interval_ms: float, *, first_ms: float = 100, event_bytes: int = 210) -> Answer:
    """Events of one size at one distance."""
    waits = [first_ms, *[interval_ms] * (events - 1)]
    return Answer(tuple((wait_ms, event_bytes) for wait_ms in waits))


@dataclass(slots=True)
class Seen:
    """What the engine saw of one request. Absolute CLOCK_MONOTONIC ns; None: did not happen."""

    answer: Answer
    connection: int | None = None
    method: str | None = None
    http_version: str | None = None
    body_bytes: int = 0
    complete_ns: int | None = None
    header_ns: int | None = None
    sent_ns: list[int] = field(default_factory=list)
    closed_ns: int | None = None
    finished: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class Engine:
    """Answers requests of the form ``?run=N`` with the answer that ``expect`` was given for N."""

    def __init__(self, profile: Upstream) -> None:
        self.profile = profile
        self.seen: dict[int, Seen] = {}
        self.connections = 0
        self.open: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self, sock: socket.socket, tls: ssl.SSLContext | None = None) -> None:
        """Serves on a bound socket."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), sock=sock, ssl=tls)

    def expect(self, answer: Answer) -> int:
        """The number under which a request gets this answer."""
        number = len(self.seen) + 1
        self.seen[number] = Seen(answer)
        return number

    async def close(self) -> None:
        """Ends every stream."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.open):
            connection.transport.abort()
        await asyncio.sleep(0)


def event_of(number: int, event_bytes: int) -> bytes:
    """The event with this number, of this size (28 bytes and more)."""
    start = b'data: {"n":%07d,"pad":"' % number
    return start + b"." * max(0, event_bytes - len(start) - 4) + b'"}\n\n'


def _header(profile: Upstream, framing: Framing, length: int) -> bytes:
    lines = [b"HTTP/1.1 200 OK", b"Content-Type: " + profile.content_type.encode("ascii") + b"; charset=utf-8"]
    if profile.x_accel_buffering is not None:
        lines.append(b"X-Accel-Buffering: " + _plain(profile.x_accel_buffering))
    if profile.content_encoding is not None:
        lines.append(b"Content-Encoding: " + _plain(profile.content_encoding))
    lines += {
        "chunked": [b"Transfer-Encoding: chunked"],
        "length": [b"Content-Length: %d" % length],
        "close": [b"Connection: close"],
    }[framing]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _plain(value: str) -> bytes:
    return re.sub(r"[^\x21-\x7e]", "", value).encode("ascii")


class _Connection(asyncio.Protocol):
    """One connection from nginx: a request, its answer, the next request."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.connections += 1
        self._number = engine.connections
        self._buffer = b""
        self._reader: BodyReader | None = None
        self._seen: Seen | None = None
        self._version = 1
        self._keep_alive = True
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._engine.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._engine.open.discard(self)
        if self._seen is not None and not self._seen.finished:
            self._seen.closed_ns = time.monotonic_ns()
            self._seen.changed.set()
        if self._task is not None:
            self._task.cancel()

    def eof_received(self) -> bool:
        return False  # nginx closes, it does not half-close

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._task is None or self._task.done():
            self._take()

    def _take(self) -> None:
        if self._reader is None:
            end = head_end(self._buffer)
            if end < 0:
                if len(self._buffer) > _MAX_HEAD_BYTES:
                    self._refuse()
                return
            head = parse_request(self._buffer[:end])
            run = None if isinstance(head, Refusal) else _RUN.search(head.target)
            seen = self._engine.seen.get(int(run[1])) if run else None
            if isinstance(head, Refusal) or seen is None:
                self._refuse()
                return
            self._buffer, self._reader, self._seen = self._buffer[end:], BodyReader.of(head), seen
            self._version, self._keep_alive = head.version, head.keep_alive
            seen.connection, seen.body_bytes = self._number, 0
            seen.method, seen.http_version = head.method.decode("latin-1"), f"1.{head.version}"
        _, payload, self._buffer = self._reader.feed(self._buffer)
        seen = self._seen
        if seen is None or self._reader.error is not None:
            self._refuse()
            return
        seen.body_bytes += len(payload)
        if self._reader.done:
            self._reader = None
            seen.complete_ns = time.monotonic_ns()
            self._task = asyncio.get_running_loop().create_task(self._stream(seen))

    def _refuse(self) -> None:
        self.transport.write(_BAD)
        self.transport.close()

    async def _stream(self, seen: Seen) -> None:
        profile = self._engine.profile
        # Unknown: an HTTP/1.0 request is answered by the book.
        framing: Framing = profile.http11 if self._version else profile.http10 or "close"
        encoder = _Encoder(profile.content_encoding)
        bodies = [encoder.event(event_of(number, size)) for number, (_, size) in enumerate(seen.answer.events)]
        last = encoder.end(DONE)
        write = self.transport.write
        seen.header_ns = time.monotonic_ns()
        write(_header(profile, framing, sum(map(len, bodies)) + len(last)))
        seen.changed.set()
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        for (wait_ms, _), body in zip(seen.answer.events, bodies, strict=True):
            due_s += wait_ms / 1000
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            chunk = b"%x\r\n%s\r\n" % (len(body), body) if framing == "chunked" else body
            seen.sent_ns.append(time.monotonic_ns())
            write(chunk)
            seen.changed.set()
        if seen.answer.dies:
            seen.finished = True
            self.transport.close()
            return
        write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(last), last) if framing == "chunked" else last)
        seen.finished = True
        seen.changed.set()
        self._seen = None
        if framing == "close" or not self._keep_alive:
            self.transport.close()
        else:
            # Not within this task: the next request starts one of its own.
            loop.call_soon(self._next)

    def _next(self) -> None:
        if self._buffer and not self.transport.is_closing():
            self._take()


class _Encoder:
    """The engine's own compression, flushed after each event; none for any other coding."""

    def __init__(self, coding: str | None) -> None:
        self._gzip = zlib.compressobj(wbits=31) if coding == "gzip" else None

    def event(self, body: bytes) -> bytes:
        return body if self._gzip is None else self._gzip.compress(body) + self._gzip.flush(zlib.Z_SYNC_FLUSH)

    def end(self, body: bytes) -> bytes:
        return body if self._gzip is None else self._gzip.compress(body) + self._gzip.flush(zlib.Z_FINISH)
