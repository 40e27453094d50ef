"""An upstream connection on its own non-blocking socket, and the pool of idle ones.

Rules here:
* Transports of asyncio and uvloop read with plain recv and throw kernel stamps away; so the socket is ours:
  ``add_reader`` and ``recvmsg_into``. TLS runs over memory buffers for the same reason.
* A connection knows nothing of HTTP: it hands bytes with two stamps to its sink. The sink is bound last and unbound
  first: a pooled connection with a stale sink would pour one client's answer into another's.
* While idle, anything readable (an end, surplus bytes) closes the connection: it must never answer the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from tapproxy.core.address import Upstream, is_loopback
from tapproxy.wire.stamps import SO_TIMESTAMPNS, Clock, TcpFacts, enable_kernel_stamps, tcp_facts, timespec_ns

_READ_BYTES: Final = 64 * 1024
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(16)
# One buffer for all connections of the process: a read is copied out of it before the next one starts.
_BUFFER: Final = bytearray(_READ_BYTES)
_VIEWS: Final = [memoryview(_BUFFER)]


class Sink(Protocol):
    """Who receives what a connection reads. Called on the event loop, never after ``detach`` or ``close``."""

    def upstream_bytes(self, data: bytes, arrived_ns: int, read_at_ns: int) -> None:
        """Some bytes; ``arrived_ns`` is the kernel's stamp where there is one, else ``read_at_ns``."""

    def upstream_closed(self, error: Exception | None) -> None:
        """The peer ended (None) or the connection failed. The connection is closed already."""

    def upstream_writable(self) -> None:
        """All that was written has been taken by the kernel."""


class Connection:
    """One open upstream connection. Durations are None where that step did not take place."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, clock: Clock, kernel_stamps: bool) -> None:
        self.loop = loop
        self.sock = sock
        self.clock = clock
        self.kernel_stamps = kernel_stamps
        self.peer = _peer(sock)
        self.dns_ns: int | None = None
        self.connect_ns: int | None = None
        self.tls_ns: int | None = None
        # What TLS agreed on (ALPN), where it did.
        self.protocol: str | None = None
        self.exchanges = 0
        # TCP counts for the connection; an exchange wants its own.
        self.facts_before: TcpFacts | None = None
        self.idle_since_ns = 0
        self.closed = False
        self.on_idle_end: Callable[[Connection], None] | None = None
        # Told of the end, whoever made it: a mirrored connection is closed by its client's.
        self.on_close: Callable[[Connection], object] | None = None
        self._sink: Sink | None = None
        self._tls: _Tls | None = None
        self._out: deque[memoryview] = deque()
        self._reading = False
        self._writing = False
        self._hung_up = False
        self._poll: select.poll | None = None

    # -- reading

    def attach(self, sink: Sink) -> None:
        """Binds the one who receives from now on, and reads."""
        self.exchanges += 1
        self._sink = sink
        self.resume_reading()

    def detach(self) -> None:
        """Unbinds the sink. From here on anything readable ends the connection."""
        self._sink = None
        self.resume_reading()

    def pause_reading(self) -> None:
        if self._reading:
            self._reading = False
            self.loop.remove_reader(self.sock.fileno())

    def resume_reading(self) -> None:
        if not self._reading and not self.closed:
            self._reading = True
            if self._hung_up:
                self.loop.call_soon(self._readable)
            else:
                self.loop.add_reader(self.sock.fileno(), self._readable)

    def _readable(self) -> None:
        if self._hung_up:
            if self.closed or not self._reading:
                return
            # Nobody will say again that there is something: look until the end is met.
            self.loop.call_soon(self._readable)
        try:
            size, ancillary, _flags, _address = self.sock.recvmsg_into(_VIEWS, _ANCILLARY_BYTES)
        except (BlockingIOError, InterruptedError):
            if self._hung_up:
                self._end(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))
            return
        except OSError as error:
            self._end(error)
            return
        read_at_ns = time.monotonic_ns()
        if not size:
            # RFC 9112 9.8: over TLS only its own notice ends a stream; anybody on the way can send a FIN.
            self._end(None if self._tls is None else ConnectionAbortedError("TLS was cut without a close_notify"))
            return
        arrived_ns = read_at_ns
        if ancillary and ancillary[0][1] == SO_TIMESTAMPNS:
            stamp_ns = timespec_ns(ancillary[0][2]) - self.clock.offset_ns
            # A stamp after the read is the offset's error.
            if stamp_ns < arrived_ns:
                arrived_ns = stamp_ns
        sink = self._sink
        if sink is None:
            self._end(None)
            return
        data = bytes(_VIEWS[0][:size])
        if self._tls is None:
            sink.upstream_bytes(data, arrived_ns, read_at_ns)
            return
        try:
            plain, ended = self._tls.read(data)
        except ssl.SSLError as error:
            self._end(error)
            return
        if plain:
            sink.upstream_bytes(plain, arrived_ns, read_at_ns)
        if ended and not self.closed:
            self._end(None)
        elif not self.closed:
            self._flush_tls()

    def hung_up(self) -> None:
        """The connection broke: what is left is read, then its end."""
        if not self._hung_up and not self.closed:
            self._hung_up = True
            self.loop.call_soon(self._readable)

    # -- writing

    def write(self, data: bytes) -> bool:
        """Hands bytes over, at once where the kernel takes them. True when nothing waits in user space."""
        if self.closed:
            return False
        if self._tls is not None:
            data = self._tls.write(data)
        return self._send(data)

    @property
    def unsent_bytes(self) -> int:
        """What waits in user space."""
        return sum(len(view) for view in self._out)

    def _send(self, data: bytes) -> bool:
        if not self._out:
            try:
                taken = self.sock.send(data)
            except (BlockingIOError, InterruptedError):
                taken = 0
            except OSError as error:
                # The reader finds what the peer said before it closed; without one, end here.
                self.loop.call_soon(self._write_failed, error)
                return False
            if taken == len(data):
                return True
            self._out.append(memoryview(data)[taken:])
        elif data:
            self._out.append(memoryview(data))
        if not self._writing:
            self._writing = True
            self.loop.add_writer(self.sock.fileno(), self._writable)
        return False

    def _write_failed(self, error: OSError) -> None:
        """A failed write is not the end of the answer: an early one may lie in the receive buffer."""
        if self.closed:
            return
        if not self._reading:
            self._end(error)
            return
        self._out.clear()
        self._readable()

    def _writable(self) -> None:
        while self._out:
            view = self._out[0]
            try:
                taken = self.sock.send(view)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._stop_writing()
                self._write_failed(error)
                return
            if taken < len(view):
                self._out[0] = view[taken:]
                return
            self._out.popleft()
        self._stop_writing()
        if self._sink is not None:
            self._sink.upstream_writable()

    def _stop_writing(self) -> None:
        if self._writing:
            self._writing = False
            self.loop.remove_writer(self.sock.fileno())

    def _flush_tls(self) -> None:
        if self._tls is not None:
            pending = self._tls.pending_out()
            if pending:
                self._send(pending)

    # -- ending

    def readable_now(self) -> bool:
        """Whether bytes or an end wait to be read: such an idle connection must not be used again."""
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(self.sock, select.POLLIN)
        return bool(self._poll.poll(0))

    def facts(self) -> TcpFacts | None:
        """TCP_INFO, None where it cannot be had."""
        return None if self.closed else tcp_facts(self.sock)

    def close(self) -> None:
        """Closes at once."""
        if self.closed:
            return
        self.closed = True
        self._sink = None
        self.pause_reading()
        self._stop_writing()
        self._out.clear()
        self.sock.close()
        if self.on_close is not None:
            self.on_close(self)

    def _end(self, error: Exception | None) -> None:
        sink, idle_end = self._sink, self.on_idle_end
        self.close()
        if sink is not None:
            sink.upstream_closed(error)
        elif idle_end is not None:
            idle_end(self)


class _Tls:
    """TLS over memory buffers."""

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self._object = context.wrap_bio(self._in, self._out, server_hostname=host)

    @property
    def protocol(self) -> str | None:
        """What ALPN chose, None where nothing was offered or nothing fits."""
        return self._object.selected_alpn_protocol()

    async def handshake(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        """Raises OSError or ssl.SSLError where the peer refuses or cannot be verified."""
        while True:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                if pending := self._out.read():
                    await loop.sock_sendall(sock, pending)
                data = await loop.sock_recv(sock, _READ_BYTES)
                if not data:
                    raise ConnectionResetError("the peer closed the connection during the TLS handshake") from None
                self._in.write(data)
                continue
            if pending := self._out.read():
                await loop.sock_sendall(sock, pending)
            return

    def read(self, data: bytes) -> tuple[bytes, bool]:
        """Plain bytes in these wire bytes, and whether the peer ended the TLS stream."""
        self._in.write(data)
        parts: list[bytes] = []
        try:
            while part := self._object.read(_READ_BYTES):
                parts.append(part)
        except ssl.SSLWantReadError:
            return b"".join(parts), False
        except ssl.SSLZeroReturnError:
            pass
        return b"".join(parts), True

    def write(self, data: bytes) -> bytes:
        self._object.write(data)
        return self._out.read()

    def pending_out(self) -> bytes:
        return self._out.read()


def connect_now(upstream: Upstream, clock: Clock) -> Connection | None:
    """Opens a connection within this call, where that can be: to this host, by number, without TLS.

    On loopback the handshake is over when ``connect`` returns; waiting for the event loop to say so costs a new
    connection half a millisecond on a busy machine. None: take ``connect``. Raises OSError where it is refused.
    """
    if upstream.scheme == "https" or upstream.host is None or upstream.port is None:
        return None
    literal = _literal(upstream.host, upstream.port)
    if literal is None or not is_loopback(upstream.host):
        return None
    family, address = literal
    sock, stamped = _new_socket(family)
    try:
        started_ns = time.monotonic_ns()
        code = sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            waiting = select.poll()
            waiting.register(sock, select.POLLOUT)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if waiting.poll(0) else -1
        if code > 0:
            raise OSError(code, os.strerror(code))
    except BaseException:
        sock.close()
        raise
    if code < 0:
        sock.close()
        return None
    connection = Connection(asyncio.get_running_loop(), sock, clock, stamped)
    connection.connect_ns = time.monotonic_ns() - started_ns
    return connection


def keep_alive(sock: socket.socket) -> None:
    """Has TCP ask a silent peer after a minute whether it is still there: a host that lost its power says no end."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4)):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _new_socket(family: int) -> tuple[socket.socket, bool]:
    """A socket ready to connect, and whether the kernel stamps what it receives."""
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setblocking(False)
    if family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(sock)
    # Before connect: data that arrives before the option is on carries no stamp.
    return sock, enable_kernel_stamps(sock)


async def connect(
    upstream: Upstream, clock: Clock, *, tls: ssl.SSLContext | None = None, timeout_s: float | None = None
) -> Connection:
    """Opens a connection. Raises OSError, ssl.SSLError or TimeoutError; a sentence is in the exception's text."""
    async with asyncio.timeout(timeout_s):
        return await _connect(upstream, clock, tls)


async def _connect(upstream: Upstream, clock: Clock, tls: ssl.SSLContext | None) -> Connection:
    loop = asyncio.get_running_loop()
    if upstream.host is None or upstream.port is None:
        return await _connect_one(loop, clock, socket.AF_UNIX, upstream.path, None)
    started_ns = time.monotonic_ns()
    literal = _literal(upstream.host, upstream.port)
    addresses: list[tuple[int, object]]
    if literal is None:
        found = await loop.getaddrinfo(upstream.host, upstream.port, type=socket.SOCK_STREAM)
        addresses = [(family, address) for family, _, _, _, address in found]
    else:
        addresses = [literal]
    dns_ns = None if literal else time.monotonic_ns() - started_ns
    failure: OSError | None = None
    for family, address in addresses:
        try:
            connection = await _connect_one(loop, clock, family, address, (tls, upstream.host) if tls else None)
        except ssl.SSLError:
            raise
        except OSError as error:
            failure = error
            continue
        connection.dns_ns = dns_ns
        return connection
    raise failure or OSError(f"{upstream.host} has no address")


async def _connect_one(
    loop: asyncio.AbstractEventLoop,
    clock: Clock,
    family: int,
    address: object,
    tls: tuple[ssl.SSLContext, str] | None,
) -> Connection:
    sock, stamped = _new_socket(family)
    try:
        started_ns = time.monotonic_ns()
        await loop.sock_connect(sock, address)  # type: ignore[arg-type]  # a path or an address tuple, as the family wants
        connection = Connection(loop, sock, clock, stamped)
        connection.connect_ns = time.monotonic_ns() - started_ns
        if tls is not None:
            started_ns = time.monotonic_ns()
            layer = _Tls(*tls)
            await layer.handshake(loop, sock)
            connection.tls_ns = time.monotonic_ns() - started_ns
            connection._tls = layer
            connection.protocol = layer.protocol
    except BaseException:
        sock.close()
        raise
    return connection


def _literal(host: str, port: int) -> tuple[int, tuple[str, int]] | None:
    """The address where the host is an IP literal: no resolver is asked, and none is timed."""
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, host)
        except OSError:
            continue
        return family, (host, port)
    return None


def _peer(sock: socket.socket) -> str:
    try:
        address = sock.getpeername()
    except OSError:
        return "?"
    if isinstance(address, tuple):
        host = f"[{address[0]}]" if ":" in address[0] else address[0]
        return f"{host}:{address[1]}"
    return f"unix:{address}"


class HangUps:
    """Tells connections that they broke.

    Of data and a reset that arrive together libuv tells once, and polls no more (``uv__poll_io`` stops at POLLERR): a
    reader that takes the data then waits for ever. This epoll asks for nothing, so it is told of errors and hang-ups
    only, once each.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        # A descriptor that was closed leaves the epoll by itself; its entry here goes when the number is used again.
        self._by_fd: dict[int, Connection] = {}
        loop.add_reader(self._epoll.fileno(), self._ready)

    def watch(self, connection: Connection) -> None:
        fd = connection.sock.fileno()
        self._by_fd[fd] = connection
        self._epoll.register(fd, select.EPOLLET)

    def _ready(self) -> None:
        for fd, _events in self._epoll.poll(0):
            connection = self._by_fd.get(fd)
            if connection is not None:
                connection.hung_up()

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()


class Pool:
    """Idle connections to one origin, the youngest first. No limit: a limit would be a queue of our own making."""

    def __init__(
        self,
        upstream: Upstream,
        clock: Clock,
        *,
        tls: ssl.SSLContext | None = None,
        keepalive_s: float = 3.0,
        connect_timeout_s: float | None = 10.0,
    ) -> None:
        self.upstream = upstream
        self.clock = clock
        self.open_connections: set[Connection] = set()
        self._tls = tls
        self._keepalive_ns = int(keepalive_s * 1e9)
        self.connect_timeout_s = connect_timeout_s
        self._idle: deque[Connection] = deque()
        self._hang_ups: HangUps | None = None

    def take(self) -> Connection | None:
        """An idle connection that is still good, or None."""
        while self._idle:
            connection = self._idle.pop()
            connection.on_idle_end = None
            expired = time.monotonic_ns() - connection.idle_since_ns >= self._keepalive_ns
            if expired or connection.closed or connection.readable_now():
                connection.close()
                continue
            return connection
        return None

    def open_now(self) -> Connection | None:
        """A new connection without waiting, where ``connect_now`` can; raises as it does."""
        connection = connect_now(self.upstream, self.clock)
        if connection is not None:
            self._opened(connection)
        return connection

    async def open(self) -> Connection:
        """A new connection; raises as ``connect`` does."""
        connection = await connect(self.upstream, self.clock, tls=self._tls, timeout_s=self.connect_timeout_s)
        self._opened(connection)
        return connection

    def _opened(self, connection: Connection) -> None:
        self.open_connections.add(connection)
        connection.on_close = self.open_connections.discard
        if self._hang_ups is None:
            self._hang_ups = HangUps(connection.loop)
        self._hang_ups.watch(connection)

    def give(self, connection: Connection) -> None:
        """Takes back a connection whose exchange ended cleanly."""
        if connection.closed or connection.unsent_bytes:
            connection.close()
            return
        connection.detach()
        connection.idle_since_ns = time.monotonic_ns()
        connection.on_idle_end = self._idle_ended
        self._idle.append(connection)

    def _idle_ended(self, connection: Connection) -> None:
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def expire(self) -> None:
        """Closes what has been idle too long. Call now and then."""
        oldest_ns = time.monotonic_ns() - self._keepalive_ns
        while self._idle and self._idle[0].idle_since_ns <= oldest_ns:
            self._idle.popleft().close()

    def close(self) -> None:
        """Closes every connection, idle or not."""
        self._idle.clear()
        for connection in list(self.open_connections):
            connection.close()
        if self._hang_ups is not None:
            self._hang_ups.close()
            self._hang_ups = None
