"""A link with a round-trip time: two network namespaces, a TUN device in each, and a process that carries packets
between them after a delay, and loses some where told to. It stands in for "veth and tc netem", which many kernels do
not have. What loopback cannot show (Nagle waits for an acknowledgement, and there it is immediate) shows over it.

Rules here: Python and Linux alone, no compiler and no ip(8). The namespaces have no name: each lives as long as the
process that holds it, which ends with its standard input, so nothing is left behind however the test ends.

    with link(delay_ms=20) as (a, b):
        with a.inside():          # this thread's new sockets and new processes are in namespace a
            ...                   # a.address is reachable from b, and each has its own loopback

As a program (it starts itself): ``link.py hold FD ADDRESS`` and ``link.py forward FD FD DELAY_US LOST_PPM``.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import random
import select
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")
_NETMASK = "255.255.255.0"
_MTU = 1500
_DEVICE = b"delayed0"
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCSIFADDR, _SIOCSIFNETMASK, _SIOCSIFMTU = 0x8913, 0x8914, 0x8916, 0x891C, 0x8922
_IFF_UP = 0x1
# A packet is put in its queue and not lost: the link has a delay and no limit of its own.
_READ_BYTES = 65536


class Unavailable(Exception):
    """This host lets us have no such link; the text says why."""


@dataclass(frozen=True, slots=True)
class End:
    """One end: the namespace of the process ``pid``, reachable from the other end at ``address``."""

    pid: int
    address: str

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Sockets made and processes started meanwhile, by this thread, belong to this end. They stay there."""
        with open("/proc/thread-self/ns/net", "rb") as before:
            with open(f"/proc/{self.pid}/ns/net", "rb") as there:
                _libc("setns", there.fileno(), _CLONE_NEWNET)
            try:
                yield
            finally:
                _libc("setns", before.fileno(), _CLONE_NEWNET)


@contextlib.contextmanager
def link(delay_ms: float = 20.0, lost_share: float = 0.0) -> Iterator[tuple[End, End]]:
    """Both ends of a fresh link that delays every packet by ``delay_ms``, in each direction, and loses so many of them.

    Raises Unavailable where namespaces or TUN devices are not allowed.
    """
    if sys.platform != "linux":
        raise Unavailable("network namespaces are Linux's")
    with contextlib.ExitStack() as stack:
        ends, tuns = [], []
        for address in ADDRESSES:
            process, tun = stack.enter_context(_held(address))
            stack.callback(os.close, tun)
            ends.append(End(process.pid, address))
            tuns.append(tun)
        numbers = [str(tun) for tun in tuns]
        told = [str(round(delay_ms * 1000)), str(round(lost_share * 1_000_000))]
        with _child(["forward", *numbers, *told], tuns) as forwarder:
            assert forwarder.stdout is not None
            if forwarder.stdout.readline() != b"up\n":
                raise Unavailable("the process that carries the packets did not start")
            yield ends[0], ends[1]


@contextlib.contextmanager
def _held(address: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A process in a namespace of its own, and its TUN device."""
    ours, theirs = socket.socketpair()
    with ours, theirs, _child(["hold", str(theirs.fileno()), address], [theirs.fileno()]) as process:
        theirs.close()
        text, fds, _, _ = socket.recv_fds(ours, 4096, 1)
        if not fds:
            raise Unavailable(text.decode() or "a process in a network namespace of its own did not start")
        yield process, fds[0]


@contextlib.contextmanager
def _child(arguments: list[str], fds: list[int]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(Path(__file__).resolve()), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=fds,
        start_new_session=True,  # a Ctrl-C at the terminal is ours to handle; they end with their standard input
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin, process.stdout:
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def _libc(name: str, *arguments: int) -> None:
    """os.setns and os.unshare, which Python has from 3.12 on."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*(ctypes.c_int(argument) for argument in arguments)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


# --- the processes


def _hold(control: socket.socket, address: str) -> None:
    """Makes the namespace and its device, hands the device over, keeps the namespace until nobody needs it."""
    try:
        _libc("unshare", _CLONE_NEWNET)
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", _DEVICE, _IFF_TUN | _IFF_NO_PI))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for request, value in ((_SIOCSIFADDR, address), (_SIOCSIFNETMASK, _NETMASK)):
                packed = struct.pack("16sHH4s16x", _DEVICE, socket.AF_INET, 0, socket.inet_aton(value))
                fcntl.ioctl(sock, request, packed)
            fcntl.ioctl(sock, _SIOCSIFMTU, struct.pack("16si20x", _DEVICE, _MTU))
            for device in (_DEVICE, b"lo"):
                now = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sH22x", device, 0))
                flags = struct.unpack_from("16xH", now)[0] | _IFF_UP
                fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sH22x", device, flags))
    except OSError as error:
        control.send(f"{error.filename or 'ioctl'}: {error.strerror}".encode())
        return
    socket.send_fds(control, [b"up"], [tun])
    os.close(tun)
    control.close()
    sys.stdin.buffer.read()


def _forward(first: int, second: int, delay_ns: int, lost_ppm: int) -> None:
    """Carries packets both ways until standard input ends."""
    # The same losses, packet for packet, each time.
    chance = random.Random(lost_ppm)
    other = {first: second, second: first}
    waiting: dict[int, deque[tuple[int, bytes]]] = {first: deque(), second: deque()}
    sys.stdout.write("up\n")
    sys.stdout.flush()
    while True:
        due_ns = [queue[0][0] for queue in waiting.values() if queue]
        timeout_s = max(0, min(due_ns) - time.monotonic_ns()) / 1e9 if due_ns else None
        readable, _, _ = select.select([first, second, 0], [], [], timeout_s)
        if 0 in readable:
            return
        now_ns = time.monotonic_ns()
        for number in (first, second):
            if number in readable:
                waiting[number].extend(
                    (now_ns + delay_ns, packet)
                    for packet in _packets(number)
                    if not lost_ppm or chance.randrange(1_000_000) >= lost_ppm
                )
            queue = waiting[number]
            while queue and queue[0][0] <= now_ns:
                try:
                    os.write(other[number], queue.popleft()[1])
                except OSError as error:
                    if error.errno not in (errno.EIO, errno.EAGAIN, errno.EINVAL):
                        raise


def _packets(number: int) -> Iterator[bytes]:
    while True:
        try:
            yield os.read(number, _READ_BYTES)
        except BlockingIOError:
            return


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        _hold(socket.socket(fileno=int(sys.argv[2])), sys.argv[3])
    else:
        _forward(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) * 1000, int(sys.argv[5]))
