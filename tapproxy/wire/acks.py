"""When the peer's kernel had what was written: acknowledgement stamps of TCP (``SO_TIMESTAMPING``, TX_ACK).

Rules here:
* A watched socket's stamps land in its error queue, and a queue that is not empty sets EPOLLERR for whoever polls the
  socket: undrained, it makes the event loop spin (measured: ten times the CPU a write). So the queue is always drained
  to its end, at every edge, by one nested edge-triggered epoll a loop, before any callback of ours can raise.
* The stamp says which byte it is about: the kernel's key is the offset of a write's last byte since the option was set,
  modulo 2^32. Callers get it whole, as the number of bytes acknowledged.
* A stamp is an upper bound: one acknowledgement may cover several writes, and peers delay theirs by up to 40 ms.
* We read through a duplicate of the descriptor, since transports give out no socket that can be read. The duplicate
  keeps the connection open: whoever closes the socket calls ``forget`` (or ``finish``) as well.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import Final

from tapproxy.wire.stamps import HAS_KERNEL_STAMPS, SIOCOUTQ, TCP_INFO, Clock, timespec_ns

# linux/net_tstamp.h and asm-generic/socket.h. The control message has the number of the option.
_SO_TIMESTAMPING: Final = 37
_SOFTWARE: Final = 1 << 4
_OPT_ID: Final = 1 << 7
_TX_ACK: Final = 1 << 9
_OPT_TSONLY: Final = 1 << 11
# Linux 6.2: keys count from what was written when the option was set, not from what was acknowledged by then.
_OPT_ID_TCP: Final = 1 << 16
_FLAGS: Final = _TX_ACK | _SOFTWARE | _OPT_ID | _OPT_TSONLY
_MSG_ERRQUEUE: Final = 0x2000
_ANCILLARY_BYTES: Final = 256
_ERROR_LEVELS: Final = frozenset(((socket.IPPROTO_IP, 11), (socket.IPPROTO_IPV6, 25)))  # IP_RECVERR, IPV6_RECVERR
_EXTENDED_ERROR: Final = struct.Struct("=IBBBBII")  # errno, origin, type, code, padding, info, data
_ORIGIN_TIMESTAMPING: Final = 4
_STAMP_ACK: Final = 2
_BYTES_ACKED: Final = struct.Struct("=120xQ")  # tcpi_bytes_acked of struct tcp_info (linux/tcp.h)
_WRAP: Final = 1 << 32

Stamp = tuple[int, int]


class AckTrack:
    """One watched socket. ``acked_bytes``: acknowledged since it is watched, by the last stamp."""

    __slots__ = ("_base", "_on_ack", "_on_hangup", "acked_bytes", "sock")

    def __init__(
        self, sock: socket.socket, on_ack: Callable[[int, int], None], on_hangup: Callable[[], None] | None
    ) -> None:
        self.sock = sock
        self.acked_bytes = 0
        self._on_ack = on_ack
        self._on_hangup = on_hangup
        self._base = _bytes_written(sock)

    def written(self) -> int | None:
        """Bytes the kernel took since the socket is watched; None where it cannot be told.

        Three calls into the kernel: who knows what it wrote (there is no TLS in between) counts for itself.
        """
        now = _bytes_written(self.sock)
        return None if now is None or self._base is None else now - self._base

    def drain(self, offset_ns: int) -> list[Stamp]:
        """Empties the error queue: (bytes acknowledged, CLOCK_MONOTONIC ns), oldest first."""
        out: list[Stamp] = []
        receive = self.sock.recvmsg
        while True:
            try:
                _, ancillary, _, _ = receive(0, _ANCILLARY_BYTES, _MSG_ERRQUEUE)
            except InterruptedError:
                continue
            except OSError:  # empty, as a rule
                return out
            found = read_stamp(ancillary)
            if found is not None:
                key, wall_ns = found
                self.acked_bytes = unwrapped(self.acked_bytes, key)
                out.append((self.acked_bytes, wall_ns - offset_ns))

    def tell(self, stamps: list[Stamp], hung_up: bool) -> None:
        """Hands on what was drained."""
        on_ack = self._on_ack
        for acked_bytes, at_ns in stamps:
            on_ack(acked_bytes, at_ns)
        if hung_up and self._on_hangup is not None:
            self._on_hangup()


def read_stamp(ancillary: list[tuple[int, int, bytes]]) -> tuple[int, int] | None:
    """(key, CLOCK_REALTIME ns) of one message of the error queue; None where it is no acknowledgement's."""
    key = wall_ns = None
    for level, kind, data in ancillary:
        if kind == _SO_TIMESTAMPING and level == socket.SOL_SOCKET:
            wall_ns = timespec_ns(data)
        elif (level, kind) in _ERROR_LEVELS:
            number, origin, _, _, _, info, value = _EXTENDED_ERROR.unpack_from(data)
            if origin == _ORIGIN_TIMESTAMPING and number == errno.ENOMSG and info == _STAMP_ACK:
                key = value
    return None if key is None or wall_ns is None else (key, wall_ns)


def unwrapped(acked_bytes: int, key: int) -> int:
    """Bytes acknowledged by the stamp with this key, ``acked_bytes`` having been so before it.

    Stamps come in the order of their bytes, and less than 2 GiB are ever in flight.
    """
    return acked_bytes + (key + 1 - acked_bytes) % _WRAP


def _bytes_written(sock: socket.socket) -> int | None:
    """Bytes the kernel ever took for this connection: those acknowledged and those not yet."""
    try:
        for _ in range(8):
            acked = _bytes_acked(sock)
            waiting = _bytes_waiting(sock)
            # An acknowledgement in between would be counted on both sides, or on none.
            if acked == _bytes_acked(sock):
                return acked + waiting
    except (OSError, struct.error):  # gone, or a kernel that tells less
        pass
    return None


def _bytes_acked(sock: socket.socket) -> int:
    (count,) = _BYTES_ACKED.unpack(sock.getsockopt(socket.IPPROTO_TCP, TCP_INFO, _BYTES_ACKED.size))
    return int(count)


def _bytes_waiting(sock: socket.socket) -> int:
    return int(struct.unpack("i", fcntl.ioctl(sock.fileno(), SIOCOUTQ, b"\0\0\0\0"))[0])


class AckWatcher:
    """The stamps of all watched sockets of one loop. ``clock`` turns them into monotonic time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._tracks: dict[int, AckTrack] = {}
        self._epoll = select.epoll()
        loop.add_reader(self._epoll.fileno(), self._ready)

    def watch(
        self,
        sock: socket.socket,
        on_ack: Callable[[int, int], None],
        on_hangup: Callable[[], None] | None = None,
    ) -> AckTrack | None:
        """Asks for stamps of all that is written from now on; None where there are none to be had.

        ``on_ack(bytes, at_ns)``: the peer's kernel had that many bytes, counted from now, at that time at the latest.
        ``on_hangup()``: the peer closed its side, or the connection broke; noticed here since a second epoll for it
        would wake at every stamp too.
        """
        if not HAS_KERNEL_STAMPS or sock.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        try:
            own = socket.socket(sock.family, socket.SOCK_STREAM, 0, fileno=os.dup(sock.fileno()))
        except OSError:  # no descriptor left
            return None
        if not _enable(own):
            own.close()
            return None
        track = AckTrack(own, on_ack, on_hangup)
        try:
            self._epoll.register(own.fileno(), select.EPOLLERR | select.EPOLLRDHUP | select.EPOLLET)
        except OSError:
            own.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, 0)
            own.close()
            return None
        self._tracks[own.fileno()] = track
        return track

    def finish(self, track: AckTrack) -> None:
        """Says that nothing more will be written, once the owner has closed its own descriptor; stamps go on coming.

        The end of the stream goes out now, as a close would have sent it. ``forget`` closes.
        """
        try:
            track.sock.shutdown(socket.SHUT_WR)
        except OSError:  # broken already
            pass

    def forget(self, track: AckTrack) -> None:
        """Tells what is there, stops watching. For a socket that is being closed: an open one whose written bytes are
        still on their way would have their stamps queued, and nobody to drain them."""
        number = track.sock.fileno()
        if self._tracks.pop(number, None) is None:
            return
        stamps = track.drain(self._clock.offset_ns)
        try:
            # By hand: the kernel forgets a descriptor only when the last of its duplicates is closed.
            self._epoll.unregister(number)
            track.sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, 0)
        except OSError:
            pass
        track.sock.close()
        track.tell(stamps, False)

    def _ready(self) -> None:
        offset_ns = self._clock.offset_ns
        drained = []
        # First all queues, then the callbacks: whatever these do, no queue is left standing.
        for number, events in self._epoll.poll(0):
            track = self._tracks.get(number)
            if track is not None:
                hung_up = bool(events & (select.EPOLLRDHUP | select.EPOLLHUP))
                drained.append((track, track.drain(offset_ns), hung_up))
        for track, stamps, hung_up in drained:
            track.tell(stamps, hung_up)

    def close(self) -> None:
        """Forgets all."""
        for track in list(self._tracks.values()):
            self.forget(track)
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()


def _enable(sock: socket.socket) -> bool:
    """Whether the kernel stamps acknowledgements from here on, with keys that count from here on."""
    for flags in (_FLAGS | _OPT_ID_TCP, _FLAGS):
        try:
            if flags == _FLAGS and _bytes_waiting(sock):
                return False  # such a kernel would count from the first byte that is not acknowledged yet
            sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPING, flags)
        except OSError:
            continue
        return True
    return False
