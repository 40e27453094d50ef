"""A small raw HTTP/1.1 server with uvicorn's wire habits, because the habits are what is measured.

Rules. One ``write`` is one ``send`` on the socket, at once and with TCP_NODELAY; only what the kernel does not
take waits in a queue. An event's stamp is read in the instant before its ``send``. Field names are lower case,
the status line says HTTP/1.1 also to HTTP/1.0. End of file from the client means that it left.
"""

from __future__ import annotations

import asyncio
import http
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from typing import Protocol

from tapproxy.simulate.request import UNREADABLE, Malformed, Request, RequestReader

_RECV_BYTES = 256 * 1024
_MAX_AHEAD_BYTES = 1024 * 1024  # of pipelined requests, read while one is answered
_LINGER_S = 1.0
DONE = b"[DONE]"


class Responder(Protocol):
    def on_lost(self) -> None:
        """The client left, or the connection broke, before the answer was complete."""


@dataclass(frozen=True, slots=True)
class _Event:
    open_json: bytes  # without its last brace
    stamp: bool


class Connection:
    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        handle: Callable[[Connection, Request], None],
        on_closed: Callable[[Connection], None],
        keep_alive_timeout_s: float,
    ) -> None:
        self.request: Request | None = None  # being answered
        self.responder: Responder | None = None
        self._sock = sock
        self._loop = loop
        self._handle = handle
        self._on_closed = on_closed
        self._keep_alive_timeout_s = keep_alive_timeout_s
        self._input = bytearray()
        self._reader = RequestReader()
        self._continued = False  # 100 Continue was sent for the request being read
        self._queue: deque[bytes | _Event] = deque()
        self._framing = ""  # of the stream being sent: chunked or close
        self._closing = False  # as soon as the queue is empty
        self._reading = True
        self._timer: asyncio.TimerHandle | None = None
        self.open = True
        loop.add_reader(sock, self._readable)

    # -- reading -------------------------------------------------------------------------------------------

    def _readable(self) -> None:
        try:
            data = self._sock.recv(_RECV_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.abort()
            return
        if self._closing:
            return  # what comes after the last answer is not read
        self._stop_timer()
        self._input += data
        if self.request is None:
            self._next_request()
        elif len(self._input) > _MAX_AHEAD_BYTES:
            self._reading = False
            self._loop.remove_reader(self._sock)

    def _next_request(self) -> None:
        try:
            request = self._reader.read(self._input)
        except Malformed as error:
            self.request = UNREADABLE
            self.answer(error.status, str(error).encode(), content_type=b"text/plain; charset=utf-8")
            return
        if request is not None:
            self._continued = False
            self.request = request
            self._handle(self, request)
        elif self._reader.expects_continue and not self._continued:
            self._continued = True
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    # -- answering -----------------------------------------------------------------------------------------

    def answer(
        self,
        status: int,
        body: bytes,
        *,
        content_type: bytes | None = b"application/json",
        fields: tuple[tuple[bytes, bytes], ...] = (),
        cut: int | None = None,
    ) -> None:
        """A whole answer with Content-Length, in one write, and on to the next request.

        ``cut``: a fault; the connection is closed after so many bytes of the body.
        """
        request = self.request
        assert request is not None
        before = [(b"allow", value) for name, value in fields if name == b"allow"]
        after = [field for field in fields if field[0] != b"allow"]
        own = [*before, (b"content-length", b"%d" % len(body))]
        if content_type is not None:
            own.append((b"content-type", content_type))
        head = _head(status, [*own, (b"vary", b"Origin"), *after, *_connection(request)])
        self.write(head if request.method == "HEAD" else head + body[:cut])
        self.finish(keep_alive=cut is None)

    def start_stream(self, fields: tuple[tuple[bytes, bytes], ...], framing: str) -> None:
        request = self.request
        assert request is not None
        self._framing = framing
        own = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"vary", b"Origin"), *fields]
        if framing == "close":
            own.append((b"connection", b"close"))
        else:
            own += [*_connection(request), (b"transfer-encoding", b"chunked")]
        self.write(_head(200, own))

    def write_event(self, open_json: bytes, stamp: bool) -> None:
        """One event, one write. DONE is not JSON and never stamped."""
        event = _Event(open_json, stamp and open_json is not DONE)
        if self._queue:
            self._queue.append(event)
        else:
            self._send(self._render(event))

    def end_stream(self) -> None:
        if self._framing == "chunked":
            self.write(b"0\r\n\r\n")
        self.finish(keep_alive=self._framing == "chunked")

    def write(self, data: bytes) -> None:
        if self._queue:
            self._queue.append(data)
        else:
            self._send(data)

    def finish(self, keep_alive: bool = True) -> None:
        """The answer is complete: wait for the next request, or close when all is sent."""
        request, self.request, self.responder = self.request, None, None
        if not self.open:
            return
        if request is None or not request.keep_alive or not keep_alive:
            self.close()
            return
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self._sock, self._readable)
        self._timer = self._loop.call_later(self._keep_alive_timeout_s, self.close)
        if self._input:
            # Not in this call: a client that pipelines would pile up frames.
            self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        if self.open and self.request is None and not self._closing:
            self._stop_timer()
            self._next_request()

    def _render(self, event: _Event) -> bytes:
        json = event.open_json
        if json is DONE:
            block = b"data: [DONE]\n\n"
        elif event.stamp:
            block = b'data: %b,"sim_sent_ns":%d}\n\n' % (json, time.monotonic_ns())
        else:
            block = b"data: %b}\n\n" % json
        return b"%x\r\n%b\r\n" % (len(block), block) if self._framing == "chunked" else block

    def _send(self, data: bytes) -> None:
        if not self.open:
            return
        try:
            sent = self._sock.send(data)
        except BlockingIOError:
            sent = 0
        except OSError:
            self.abort()
            return
        if sent < len(data):
            self._queue.append(data[sent:])
            self._loop.add_writer(self._sock, self._writable)

    def _writable(self) -> None:
        while self._queue:
            item = self._queue.popleft()
            data = item if isinstance(item, bytes) else self._render(item)
            try:
                sent = self._sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self.abort()
                return
            if sent < len(data):
                self._queue.appendleft(data[sent:])
                return
        self._loop.remove_writer(self._sock)
        if self._closing:
            self._shut()

    # -- ending --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close once everything written is sent."""
        self._stop_timer()
        if self.open and not self._closing:
            self._closing = True
            if not self._queue:
                self._shut()

    def reset(self) -> None:
        """Close with RST; what the kernel has not sent is lost."""
        if self.open:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.abort()

    def abort(self) -> None:
        """Close now. Tells the responder, if an answer was not complete."""
        if not self.open:
            return
        self.open = False
        self._stop_timer()
        if self._reading:
            self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._queue.clear()
        self._sock.close()
        self._on_closed(self)
        responder, self.responder = self.responder, None
        if responder is not None:
            responder.on_lost()

    def _shut(self) -> None:
        # FIN first, and read on for a moment: closing with unread input would send RST and take the answer
        # out of the client's hands.
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        self._timer = self._loop.call_later(_LINGER_S, self.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_date = (0, b"")


def _head(status: int, fields: list[tuple[bytes, bytes]]) -> bytes:
    global _date
    now_s = int(time.time())
    if _date[0] != now_s:
        _date = (now_s, formatdate(now_s, usegmt=True).encode())
    try:
        reason = http.HTTPStatus(status).phrase.encode()
    except ValueError:
        reason = b""
    lines = [b"HTTP/1.1 %d %b" % (status, reason), b"date: " + _date[1], b"server: uvicorn"]
    lines += [b"%b: %b" % field for field in fields]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _connection(request: Request) -> list[tuple[bytes, bytes]]:
    return [] if request.keep_alive else [(b"connection", b"close")]
