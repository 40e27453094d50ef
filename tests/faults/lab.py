"""What the fault tests share: a tap's processes and what they hold, waiting, an upstream in the test's own loop.

Rules here: every wait is bounded; a leak is a plain count of the kernel's (descriptors, resident pages), not the tap's
word alone; upstream and client share one clock and one process, so that "closed within" needs no second opinion.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from tests.harness import SSE_HEAD, Tap

WAIT_S: Final = 20.0
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
RESET: Final = b"\1\0\0\0\0\0\0\0"  # SO_LINGER: on, 0 seconds


# -- the tap's processes


def children(pid: int) -> list[int]:
    """The processes that this one started."""
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def worker_of(running: Tap) -> int:
    """The process id of the only worker."""
    (pid,) = children(running.process.pid)
    return pid


@dataclass(frozen=True, slots=True)
class Holding:
    """What a process holds."""

    resident_bytes: int
    descriptors: int

    @classmethod
    def of(cls, pid: int) -> Holding:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return cls(pages * _PAGE_BYTES, len(os.listdir(f"/proc/{pid}/fd")))


def sockets_of(pid: int) -> int:
    """How many sockets a process has open."""
    count = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:")
    return count


def status(running: Tap) -> dict[str, Any]:
    """/api/status."""
    found: dict[str, Any] = json.loads(running.admin_get("/api/status"))
    return found


def lost_records(running: Tap) -> dict[str, int]:
    """``tapproxy_records_lost_total`` of /metrics, by where they were lost."""
    lines = re.findall(r'^tapproxy_records_lost_total\{where="(\w+)"\} ([0-9.]+)$', running.admin_get("/metrics"), re.M)
    return {where: int(float(value)) for where, value in lines}


def wait_until(done: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Polls ``done`` until it is true. AssertionError with ``what`` when the time is up."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain: {what}"
        time.sleep(0.01)


def wait_for_rest(running: Tap) -> None:
    """Until nothing is open: no exchange, no client, no pooled connection."""
    keys = ("in_flight", "connections", "upstream_connections")
    wait_until(lambda: not any(status(running)[key] for key in keys), f"the tap at rest: {status(running)}")


def wait_for_lost(running: Tap, where: str, least: int) -> None:
    """Until so many records are counted as lost there."""
    wait_until(lambda: lost_records(running)[where] >= least, f"{least} records lost: {lost_records(running)}")


def written(directory: Path) -> list[dict[str, Any]]:
    """The whole records of a data directory; a torn line is left out."""
    found = []
    for file in sorted(directory.glob("records-*.jsonl")):
        for line in file.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found


# -- sockets


def reset(sock: socket.socket) -> None:
    """Closes by RST."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    sock.close()


def listener(*, receive_bytes: int | None = None) -> socket.socket:
    """A listening, non-blocking socket of 127.0.0.1; ``receive_bytes`` is what its connections may hold unread."""
    sock = socket.socket()
    if receive_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    sock.listen(1024)
    sock.setblocking(False)
    return sock


@contextlib.contextmanager
def deaf_address() -> Iterator[tuple[str, int]]:
    """An address on loopback where connecting never ends: its backlog is full and nobody accepts."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.socket())
        listening.bind(("127.0.0.1", 0))
        listening.listen(0)
        address = listening.getsockname()
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(address)
        yield address


def client_tls(ca_file: Path) -> ssl.SSLContext:
    """A verifying client's context."""
    return ssl.create_default_context(cafile=str(ca_file))


# -- an upstream in the test's loop


class Engine(asyncio.Protocol):
    """One connection of the scripted upstream: answers by the path, tells when it was reached and when it was left.

    ``/upload`` reads and never answers, ``/full`` stops reading, ``/head`` is silent, ``/events`` sends one event,
    ``/flood`` sends as much as is taken.
    """

    def __init__(self, site: EngineSite) -> None:
        self.site = site
        self.transport = cast(asyncio.Transport, None)
        self.name = ""
        self._head = b""
        self._full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.site.connections += 1

    def data_received(self, data: bytes) -> None:
        if self.name:
            return
        self._head += data
        if b"\r\n\r\n" not in self._head:
            return
        path = self._head.split(b" ", 2)[1].decode()
        match = re.search(rb"(?i)\r\nx-request-id: *(\S+)\r\n", self._head)
        assert match is not None
        self.name = match[1].decode()
        visit = self.site.visit(self.name)
        visit.engine = self
        if path == "/full":
            self.transport.pause_reading()
        elif path == "/events":
            self.transport.write(SSE_HEAD + b"9\r\ndata: a\n\n\r\n")
        elif path == "/flood":
            self.transport.write(SSE_HEAD)
            self._flood()
        visit.reached.set()

    def _flood(self) -> None:
        block = b"data: " + b"x" * 8000 + b"\n\n"
        chunk = b"%x\r\n%s\r\n" % (len(block), block)
        self._full = False
        while not self._full and not self.transport.is_closing():
            self.transport.write(chunk)

    def pause_writing(self) -> None:
        self._full = True
        if self.name:
            self.site.visit(self.name).full += 1

    def resume_writing(self) -> None:
        if self.name:
            self._flood()

    def eof_received(self) -> None:
        self._left()

    def connection_lost(self, exc: Exception | None) -> None:
        self._left()
        self.site.connections -= 1

    def _left(self) -> None:
        if self.name:
            visit = self.site.visit(self.name)
            if not visit.left.done():
                visit.left.set_result(time.monotonic_ns())


class Visit:
    """One request at the upstream."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.reached = asyncio.Event()
        self.left: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # How often the upstream could write no more.
        self.full = 0


class EngineSite:
    """All connections of a scripted upstream. Made before the tap, which wants to know the address."""

    def __init__(self) -> None:
        # Little room, so that an upstream that does not read is felt soon.
        self._listener = listener(receive_bytes=65536)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._visits: dict[str, Visit] = {}

    def visit(self, name: str) -> Visit:
        return self._visits.setdefault(name, Visit())

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        server = await asyncio.get_running_loop().create_server(lambda: Engine(self), sock=self._listener)
        try:
            yield
        finally:
            server.close()


# -- what the kernel holds


def taken_by_peer(sock: socket.socket, sent_bytes: int) -> int:
    """Of ``sent_bytes`` written to this loopback connection, how many the program at the other end has read."""
    (_, ours), (_, theirs) = sock.getsockname(), sock.getpeername()
    waiting = 0
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        ports = [int(word.rpartition(":")[2], 16) for word in words[1:3]]
        sending, receiving = (int(number, 16) for number in words[4].split(":"))
        if ports == [ours, theirs]:
            waiting += sending
        elif ports == [theirs, ours]:
            waiting += receiving
    return sent_bytes - waiting


def keepalive_of_peers(pid: int) -> set[bool]:
    """Of the process's established TCP connections: whether a keep-alive timer runs on them."""
    inodes = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(f"/proc/{pid}/fd/{name}")))
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[9] in inodes and words[3] == "01":
            found.add(words[5].startswith("02:"))
    return found
