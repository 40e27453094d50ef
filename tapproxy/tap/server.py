"""The client's side of the tap: one HTTP/1.1 connection under ``uvicorn.Server``.

uvicorn's own protocols lose what a transparent relay must keep (reason phrases, name case, ``?``, trailers, 1xx,
HTTP/1.0 framing, early answers), so this is our own, an ``asyncio.BufferedProtocol``. uvicorn runs the sockets, the
tasks and the shutdown; of a protocol it uses ``connections``, ``tasks`` and ``shutdown()``.

Rules here:
* One request at a time; what a client sends ahead waits, at most ``READ_AHEAD_BYTES``.
* The application finds the connection in ``scope["extensions"]["tapproxy"]`` and moves wire bytes through it. The
  plain ASGI ``receive`` and ``send`` are refused: an application that used them would lose what this class keeps.
* The write-buffer limit is zero, so that pause and resume tell exactly when bytes wait in user space.
* A client that leaves is noticed at once, also while reading is paused: by an edge-triggered epoll of our own.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import select
import socket
import struct
import time
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

import orjson
from uvicorn.server import ServerState

from tapproxy.core.http1 import MAX_HEAD_BYTES, BodyReader, Refusal, RequestHead, head_end, parse_request
from tapproxy.wire.acks import AckWatcher
from tapproxy.wire.client import Connection
from tapproxy.wire.stamps import SIOCOUTQ, TcpFacts, tcp_facts

READ_AHEAD_BYTES: Final = 64 * 1024
# One read brings at most this: with what was there before, no more than READ_AHEAD_BYTES are ever held.
_READ_BYTES: Final = READ_AHEAD_BYTES // 2
# One buffer for all connections of the process: a read is copied out of it before the next one starts.
_BUFFER: Final = memoryview(bytearray(_READ_BYTES))
# How long a cut answer waits for its last bytes to be acknowledged before the reset that says "incomplete".
ABORT_WAIT_S: Final = 1.0
# How long a client may go on sending a body nobody wants, after its early answer, before the connection is closed.
LINGER_S: Final = 2.0
# How long an idle TLS client may take to say goodbye when the tap stops.
GOODBYE_S: Final = 0.5
_FIONREAD: Final = 0x541B  # bytes that came and were not read
_SIOCOUTQNSD: Final = 0x894B  # bytes not yet sent to it
_RESET: Final = struct.pack("ii", 1, 0)

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]


class Exchange(Protocol):
    """What a connection calls on the exchange in progress."""

    def request_wire(self, wire: bytes, payload: bytes, done: bool) -> None:
        """Bytes of the request body to pass on; ``done`` with the last of them."""

    def request_broken(self, refusal: Refusal) -> None:
        """The request body broke its framing."""

    def client_lost(self) -> None:
        """The client left."""

    def client_writable(self) -> None:
        """All that was written has been taken by the kernel."""


class Acknowledgements(Protocol):
    """When the client's kernel had each read of one answer (``tap.acked``)."""

    def wrote(self) -> None:
        """The bytes of the next read were handed over just now."""

    async def all_acked(self) -> None:
        """The answer is complete: waits for its last acknowledgement, not for ever."""

    def settle(self) -> None:
        """Waits no longer."""

    def of_events(self, reads: Sequence[int], t0_ns: int) -> list[int | None]:
        """When the events that came in these reads were acknowledged, relative to t0; None where unknown."""


@dataclass(slots=True)
class ServerContext:
    """What all connections of one worker share.

    ``refused`` is told of requests that never reached the application: why, the bytes of the head, when they began.
    ``abandoned`` is told of heads that never became whole: the bytes, when they began, whether it was the tap that
    stopped. ``acks``: under --ack-stamps.
    """

    app: App
    header_timeout_s: float
    keepalive_s: float
    watcher: LeaveWatcher
    refused: Callable[[Refusal, bytes, int], None]
    abandoned: Callable[[bytes, int, bool], None]
    connections: set[ClientConnection] = field(default_factory=set)
    acks: AckWatcher | None = None


class LeaveWatcher:
    """Tells of clients that left while nobody reads their socket (``EPOLLRDHUP``, edge-triggered)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._epoll = select.epoll()
        self._by_fd: dict[int, ClientConnection] = {}
        self._loop = loop
        loop.add_reader(self._epoll.fileno(), self._ready)

    def watch(self, fd: int, connection: ClientConnection) -> None:
        self._by_fd[fd] = connection
        self._epoll.register(fd, select.EPOLLRDHUP | select.EPOLLET)

    def forget(self, fd: int) -> None:
        if self._by_fd.pop(fd, None) is not None:
            # The kernel forgets a closed descriptor by itself.
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def _ready(self) -> None:
        for fd, events in self._epoll.poll(0):
            connection = self._by_fd.get(fd)
            if connection is not None and events & (select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR):
                connection.watched_leave()

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()


class ClientConnection(asyncio.BufferedProtocol):
    """One connection from a client."""

    __slots__ = (
        "_body",
        "_buffer",
        "_exchange",
        "_left",
        "_lingering",
        "_looked",
        "_plain",
        "_reading",
        "body_end_ns",
        "closing",
        "context",
        "draining",
        "facts_before",
        "fd",
        "head",
        "head_at_ns",
        "idle_since_ns",
        "loop",
        "lost",
        "mirror",
        "requests",
        "sock",
        "state",
        "t0_ns",
        "transport",
        "writable",
    )

    def __init__(
        self,
        context: ServerContext,
        *,
        config: Any,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: Any = None,
    ) -> None:
        self.context = context
        self.state = server_state
        self.loop: asyncio.AbstractEventLoop = _loop or asyncio.get_running_loop()
        self.transport: asyncio.Transport = cast(asyncio.Transport, None)
        self.sock: socket.socket | None = None
        # The same, where bytes go through it as they are: no TLS.
        self._plain: socket.socket | None = None
        self.fd = -1
        self.head: RequestHead | None = None
        self.t0_ns = 0
        self.head_at_ns = 0
        self.body_end_ns: int | None = None
        self.writable = True
        self.lost = False
        self.closing = False
        self.draining = False
        # Under --mirror-connections: the upstream connection that belongs to this client connection.
        self.mirror: Connection | None = None
        self.idle_since_ns = time.monotonic_ns()
        # Whole request heads so far; and what TCP had counted when the exchange before ended.
        self.requests = 0
        self.facts_before: TcpFacts | None = None
        self._buffer = bytearray()
        self._looked = 0
        self._body: BodyReader | None = None
        self._exchange: Exchange | None = None
        self._reading = True
        self._lingering = False
        self._left = False

    # -- asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # TLS transports pause at "as much as", plain ones at "more than" the limit: 0 there would pause on nothing.
        encrypted = transport.get_extra_info("ssl_object") is not None
        self.transport.set_write_buffer_limits(high=int(encrypted), low=0)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            self.fd = sock.fileno()
            # The transport's stand-in for a socket makes a real one for each call; this one lends the descriptor, and
            # gives it back by detach when the transport has closed it.
            self.sock = socket.socket(sock.family, sock.type, sock.proto, fileno=self.fd)
            self._plain = None if encrypted else self.sock
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                with contextlib.suppress(OSError):
                    self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.watch(self.sock)
        # uvicorn's set is typed for its own protocols; it calls nothing but shutdown() on the members.
        self.state.connections.add(cast(Any, self))
        self.context.connections.add(self)

    def watch(self, _sock: socket.socket) -> None:
        """Has the client's leaving told."""
        self.context.watcher.watch(self.fd, self)

    def ack_log(self) -> Acknowledgements | None:
        """The acknowledgements of the answer that begins; None where nobody asked for them."""
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self.sock is not None:
            self.sock.detach()
            self.sock = self._plain = None
        self.context.watcher.forget(self.fd)
        self.state.connections.discard(cast(Any, self))
        self.context.connections.discard(self)
        self._leave()
        if self.mirror is not None:
            self.mirror.close()

    def eof_received(self) -> bool:
        """A client that half-closes is taken to have left, as nginx and uvicorn take it: no abort looks different."""
        self.peer_left()
        return False

    def pause_writing(self) -> None:
        self.writable = False

    def resume_writing(self) -> None:
        self.writable = True
        if self._exchange is not None:
            self._exchange.client_writable()

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(_BUFFER[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Some bytes from the client."""
        now_ns = time.monotonic_ns()
        if self._lingering:
            return
        if self.head is None:
            if not self._buffer:
                self.t0_ns = now_ns
            self._buffer += data
            self._take_head(now_ns)
        elif self._body is not None and not self._body.done and self._exchange is not None:
            self._feed_body(data, now_ns)
        else:
            self._buffer += data
            if len(self._buffer) > READ_AHEAD_BYTES - _READ_BYTES:
                self.pause_body()

    # -- heads

    def _take_head(self, now_ns: int) -> None:
        buffer = self._buffer
        # RFC 9112 2.2: an empty line before the request line is skipped. One is a courtesy, many are an attack.
        if buffer.startswith(b"\r\n"):
            del buffer[:2]
            self._looked = 0
        end = head_end(buffer, self._looked)
        if end < 0:
            self._looked = len(buffer)
            if self._looked > MAX_HEAD_BYTES:
                self.refuse(Refusal(431, f"the request head is longer than {MAX_HEAD_BYTES} bytes"))
            elif not _may_be_head(buffer):
                self.refuse(Refusal(400, "this is no HTTP/1.1 request"))
            return
        if end > MAX_HEAD_BYTES:
            self.refuse(Refusal(431, f"the request head is longer than {MAX_HEAD_BYTES} bytes"))
            return
        head = parse_request(bytes(buffer[:end]))
        if isinstance(head, Refusal):
            self.refuse(head)
            return
        if head.upgrade is not None and b"websocket" in head.upgrade and b"upgrade" in head.connection:
            self.refuse(Refusal(501, "WebSocket is not relayed: tapproxy relays HTTP requests and their answers"))
            return
        del buffer[:end]
        self._looked = 0
        self._start(head, now_ns)

    def _start(self, head: RequestHead, now_ns: int) -> None:
        self.head = head
        self.head_at_ns = now_ns
        self.body_end_ns = None
        self._body = BodyReader.of(head)
        self.state.total_requests += 1
        self.requests += 1
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": f"1.{head.version}",
            # Method, target and fields are in the connection's head, raw.
            "extensions": {"tapproxy": self},
        }
        # Up to its first wait the application runs here and now: as a task it would begin a round of the loop later,
        # behind whatever else is ready, and the request would leave that much later.
        running = cast(Coroutine[Any, Any, None], self.context.app(scope, _no_receive, _no_send))
        try:
            waiting = running.send(None)
        except StopIteration:
            return
        task = self.loop.create_task(_rest(running, waiting))
        self.state.tasks.add(task)
        task.add_done_callback(self.state.tasks.discard)

    def refuse(self, refusal: Refusal) -> None:
        """Answers a request that goes no further, and closes."""
        if self.lost or self.closing:
            return
        self.context.refused(refusal, bytes(self._buffer[:MAX_HEAD_BYTES]), self.t0_ns)
        self.transport.write(error_response(refusal))
        self._buffer.clear()
        self.linger()

    # -- the application's side

    def start_body(self, exchange: Exchange) -> None:
        """Binds the exchange and gives it the request body, from what is already there on."""
        self._exchange = exchange
        if self.lost:
            exchange.client_lost()
            return
        body = self._body
        if body is None or body.done:
            self.body_end_ns = self.head_at_ns
            exchange.request_wire(b"", b"", True)
            return
        data = bytes(self._buffer)
        self._buffer.clear()
        if data:
            self._feed_body(data, self.head_at_ns)

    def _feed_body(self, data: bytes, now_ns: int) -> None:
        body, exchange = self._body, self._exchange
        if body is None or exchange is None:
            return
        wire, payload, rest = body.feed(data)
        if rest:
            self._buffer += rest
        if body.done:
            self.body_end_ns = now_ns
        if wire or body.done:
            exchange.request_wire(wire, payload, body.done)
        if body.error is not None:
            exchange.request_broken(Refusal(400, body.error))

    def pause_body(self) -> None:
        """Stops reading from the client."""
        if self._reading and not self.lost:
            self._reading = False
            self.transport.pause_reading()
            if self._left:
                # Its end was told before there was an exchange to end, and no read will meet it now.
                self.loop.call_soon(self.peer_left)

    def resume_body(self) -> None:
        """Reads from the client again."""
        if not self._reading and not self.lost:
            self._reading = True
            self.transport.resume_reading()

    @property
    def body_done(self) -> bool:
        """Whether the whole request body has been read."""
        return self._body is None or self._body.done

    def write_wire(self, data: bytes) -> bool:
        """Hands bytes to the kernel, as they are. False: (some of) them wait in user space, or the client is gone."""
        if self.lost or self.transport.is_closing():
            return False
        if self._plain is not None and self.writable:
            # Nothing waits before it. The transport does the same, for a microsecond more; what is not taken, and an
            # error, are its own again.
            try:
                taken = self._plain.send(data)
            except OSError:
                taken = 0
            if taken == len(data):
                return True
            data = data[taken:]
        self.transport.write(data)
        return self.writable

    def unsent_bytes(self) -> int:
        """Bytes that wait here or in the kernel and have not been sent to the client."""
        if self.lost:
            return 0
        waiting = self.transport.get_write_buffer_size()
        return waiting + self._ioctl(_SIOCOUTQNSD)

    def peer_ip(self) -> str | None:
        """The client's address, None of a UNIX socket or a client that is gone."""
        name = self.transport.get_extra_info("peername")
        return str(name[0]) if isinstance(name, tuple) else None

    def facts(self) -> TcpFacts | None:
        """TCP_INFO of the client's connection, None where it cannot be had."""
        return None if self.sock is None or self.transport.is_closing() else tcp_facts(self.sock)

    def _ioctl(self, request: int) -> int:
        try:
            raw = fcntl.ioctl(self.fd, request, b"\0\0\0\0")
        except OSError:
            return 0
        return int(struct.unpack("i", raw)[0])

    def finish(self, *, keep_alive: bool) -> None:
        """The answer is complete: on to the next request, or close."""
        self._exchange = None
        if self.lost:
            return
        if not keep_alive or self.draining or self.closing or not self.body_done:
            self.linger()
            return
        self.head = None
        self._body = None
        self.idle_since_ns = time.monotonic_ns()
        self.resume_body()
        if self._buffer:
            # Not from within the caller's stack: a long pipeline would nest.
            self.loop.call_soon(self._next_pipelined)

    def _next_pipelined(self) -> None:
        if self.head is None and self._buffer and not self.lost and not self.closing:
            self.t0_ns = time.monotonic_ns()
            self._take_head(self.t0_ns)

    def linger(self) -> None:
        """Closes so that the answer arrives: a close with unread bytes would reset it out of the client's buffer."""
        if self.lost or self._lingering:
            return
        self._exchange = None
        self.closing = True
        # TLS has bytes of its own to read, so only a plain socket can be asked what waits unread.
        waiting = self._buffer or not self._reading or self._ioctl(_FIONREAD)
        if self.body_done and self.head is not None and not waiting:
            self.transport.close()
            return
        self._lingering = True
        self.resume_body()
        with contextlib.suppress(OSError, RuntimeError, NotImplementedError):
            self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.abort)

    def abort(self, *, by_reset: bool) -> None:
        """Ends a cut answer so that it can be seen to be cut.

        In chunked and content-length framing a close before the end shows it. A close-delimited body needs a reset,
        sent once what was written has been acknowledged, since a reset throws away what has not.
        """
        self._exchange = None
        if self.lost or self.closing:
            return
        self.closing = True
        self._abort_step(self.loop.time() + ABORT_WAIT_S, by_reset)

    def _abort_step(self, deadline: float, by_reset: bool) -> None:
        if self.lost:
            return
        waiting = self.transport.get_write_buffer_size() or (by_reset and self._ioctl(SIOCOUTQ))
        if waiting and self.loop.time() < deadline:
            self.loop.call_later(0.002, self._abort_step, deadline, by_reset)
            return
        if by_reset and self.sock is not None:
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    # -- the ends

    def peer_left(self) -> None:
        """The client closed its side, or the connection broke."""
        if self.lost:
            return
        if self._lingering:
            self.transport.abort()
            return
        self._leave()
        if not self.closing:
            self.closing = True
            self.transport.close()

    def _abandon(self, *, stopped: bool) -> None:
        """A request head that began and will not end leaves a record too."""
        if self.head is None and not self.closing and self._buffer.strip(b"\r\n"):
            self.context.abandoned(bytes(self._buffer), self.t0_ns, stopped)
            self._buffer.clear()

    def _leave(self) -> None:
        self._abandon(stopped=False)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.client_lost()

    def shutdown(self) -> None:
        """uvicorn stops: an idle connection closes now, a busy one after its answer."""
        self.draining = True
        if self.head is None and not self.closing:
            self._abandon(stopped=True)
            self.closing = True
            self.transport.close()
            # TLS waits for the client's goodbye, which an idle one may never say.
            self.loop.call_later(GOODBYE_S, self.transport.abort)

    def watched_leave(self) -> None:
        """The watcher saw the client's end. Without an exchange the ordinary reader will meet it, after the data."""
        self._left = True
        if self._exchange is not None or self._lingering:
            self.peer_left()

    def sweep(self, now_ns: int) -> None:
        """Time limits: called a few times a second."""
        if self.head is not None or self.closing or self.lost:
            return
        if self._buffer:
            if now_ns - self.t0_ns > self.context.header_timeout_s * 1e9:
                self.refuse(Refusal(408, "the request head took too long"))
        elif now_ns - self.idle_since_ns > self.context.keepalive_s * 1e9:
            self.closing = True
            self.transport.close()


_REASONS: Final = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    501: "Not Implemented",
    502: "Bad Gateway",
    503: "Service Unavailable",
    504: "Gateway Timeout",
    505: "HTTP Version Not Supported",
}


def error_response(refusal: Refusal, *, keep_alive: bool = False, head_only: bool = False) -> bytes:
    """An answer of our own, in the shape OpenAI clients read, naming who says it."""
    reason = refusal.reason.encode("ascii", "replace").decode("ascii")
    error = {"message": f"tapproxy: {reason}", "type": "tapproxy_error", "param": None, "code": refusal.status}
    body = orjson.dumps({"error": error}, option=orjson.OPT_APPEND_NEWLINE)
    connection = b"" if keep_alive else b"connection: close\r\n"
    head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n%s\r\n" % (
        refusal.status,
        _REASONS.get(refusal.status, "Error").encode(),
        len(body),
        connection,
    )
    return head if head_only else head + body


def _may_be_head(buffer: bytearray) -> bool:
    """Whether these first bytes can still become a request line: a method is a token of letters and signs."""
    first = bytes(buffer[:64])
    line, newline, _ = first.partition(b"\n")
    if newline and not line.endswith(b"\r"):
        return False
    word = first.split(b" ", 1)[0]
    return all(33 <= byte < 127 for byte in word.rstrip(b"\r\n"))


async def _rest(running: Coroutine[Any, Any, None], waiting: Any) -> None:
    """The rest of a coroutine whose first step was taken by hand and waits for ``waiting``."""
    await _steps(running, waiting)


@types.coroutine
def _steps(running: Coroutine[Any, Any, None], waiting: Any) -> Generator[Any, Any, None]:
    while True:
        try:
            value = yield waiting
        except BaseException as error:  # a cancellation, for the coroutine to see
            step = functools.partial(running.throw, error)
        else:
            step = functools.partial(running.send, value)
        try:
            waiting = step()
        except StopIteration:
            return


async def _no_receive() -> Any:
    raise RuntimeError("this server moves wire bytes: use scope['extensions']['tapproxy']")


async def _no_send(_message: Any) -> None:
    raise RuntimeError("this server moves wire bytes: use scope['extensions']['tapproxy']")
