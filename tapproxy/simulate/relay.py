"""A byte relay with faults: a slow line, a slow reader, a middlebox. ``python -m tapproxy.simulate.relay``.

Rules here: imports nothing of ours outside ``simulate``, and knows nothing of HTTP. Order is kept and no byte is lost;
what is due is counted from when the bytes were read, so lateness never adds up. What waits is bounded: past
``window_bytes`` the side it came from is not read, and its sender feels it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import dataclasses
import random
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import uvloop

from tapproxy.simulate.clock import AlarmClock

_CLONE_NEWNET = 0x40000000
_READ_BYTES = 65536


class RelayError(ValueError):
    """A setting that cannot be; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class RelayConfig:
    """``request_*`` is what goes from who connects to ``to``, ``response_*`` the way back."""

    listen: str = "127.0.0.1:0"
    to: str = "127.0.0.1:8000"
    # Each byte is this much later; the jitter is drawn evenly from 0 to it, and order is kept.
    request_delay_ms: float = 0.0
    response_delay_ms: float = 0.0
    request_jitter_ms: float = 0.0
    response_jitter_ms: float = 0.0
    # The first bytes of a connection alone: a handshake that waits for a busy terminator.
    response_first_ms: float = 0.0
    # 0: no limit.
    request_bytes_per_s: int = 0
    response_bytes_per_s: int = 0
    # Nothing passes in the first ``stall_ms`` of every ``stall_every_ms``, in either direction.
    stall_every_ms: float = 0.0
    stall_ms: float = 0.0
    # Answers are collected and let go by the clock, so often.
    response_flush_ms: float = 0.0
    # So long after a connection's first request byte it is reset on both sides; 0: never.
    reset_after_ms: float = 0.0
    # What may wait in here in each direction, and the receive buffers of the sockets (0: the kernel's own choice).
    window_bytes: int = 1 << 20
    receive_bytes: int = 0
    # Send with Nagle's algorithm.
    nagle: bool = False
    # Connections to ``to`` are made in the network namespace of this process.
    enter: int = 0
    seed: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < 0:
                raise RelayError(f"{_flag(field.name)} is {value}; it must be at least 0.")
        if self.window_bytes < 1:
            raise RelayError("--window-bytes is 0; it must be at least 1.")
        if self.stall_ms and self.stall_ms >= self.stall_every_ms:
            raise RelayError(f"--stall-ms is {self.stall_ms:g}; it must be less than --stall-every-ms.")
        _address("--listen", self.listen)
        _address("--to", self.to)


@dataclass(frozen=True, slots=True)
class Line:
    """One direction: what happens to bytes that are read at a time."""

    delay_ns: int = 0
    jitter_ns: int = 0
    first_ns: int = 0
    bytes_per_s: int = 0
    flush_ns: int = 0
    stall_every_ns: int = 0
    stall_ns: int = 0

    def due_ns(self, now_ns: int, size_bytes: int, last_ns: int, chance: random.Random, *, first: bool) -> int:
        """When ``size_bytes`` read now are passed on; ``last_ns`` is when those before them are."""
        due_ns = now_ns + self.delay_ns + (self.first_ns if first else 0)
        if self.jitter_ns:
            due_ns += chance.randrange(self.jitter_ns)
        due_ns = max(due_ns, last_ns)
        if self.bytes_per_s:
            due_ns += size_bytes * 1_000_000_000 // self.bytes_per_s
        if self.flush_ns:
            due_ns = -(-due_ns // self.flush_ns) * self.flush_ns
        if self.stall_every_ns and due_ns % self.stall_every_ns < self.stall_ns:
            due_ns += self.stall_ns - due_ns % self.stall_every_ns
        return due_ns

    @property
    def slice_bytes(self) -> int:
        """Bytes that a limited line passes on at once: what 5 ms carry, so that a large read trickles."""
        return max(1, min(_READ_BYTES, self.bytes_per_s // 200)) if self.bytes_per_s else _READ_BYTES


def lines_of(config: RelayConfig) -> tuple[Line, Line]:
    """The request's line and the answer's."""
    stall = {"stall_every_ns": _ns(config.stall_every_ms), "stall_ns": _ns(config.stall_ms)}
    request = Line(
        _ns(config.request_delay_ms), _ns(config.request_jitter_ms), 0, config.request_bytes_per_s, 0, **stall
    )
    response = Line(
        _ns(config.response_delay_ms),
        _ns(config.response_jitter_ms),
        _ns(config.response_first_ms),
        config.response_bytes_per_s,
        _ns(config.response_flush_ms),
        **stall,
    )
    return request, response


class _Side(asyncio.Protocol):
    """One connection of a pair: what it reads goes through its line to the other."""

    def __init__(self, relay: Relay, line: Line) -> None:
        self._relay = relay
        self._line = line
        self.transport: asyncio.Transport | None = None
        self.other: _Side | None = None
        self._waiting: deque[tuple[int, bytes]] = deque()  # due, bytes; b"" is the end
        self._waiting_bytes = 0
        self._last_ns = 0
        self._read_any = False
        self._paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # ``is_full`` and the transport's own signals must agree, or nothing would say that there is room again.
        self.transport.set_write_buffer_limits(high=self._relay.config.window_bytes)
        self._relay.sides.add(self)
        if self._relay.config.nagle:
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._relay.sides.discard(self)
        if exc is not None:
            self.abort()

    def abort(self) -> None:
        """Resets both connections; nothing that waits is passed on."""
        for side in (self, self.other):
            if side is not None:
                side._waiting.clear()
                if side.transport is not None and not side.transport.is_closing():
                    _linger_not(side.transport)
                    side.transport.abort()

    def data_received(self, data: bytes) -> None:
        now_ns = time.monotonic_ns()
        if not self._read_any:
            self._read_any = True
            self.on_first(now_ns)
        size = self._line.slice_bytes
        first = self._last_ns == 0
        for start in range(0, len(data), size):
            self._put(now_ns, data[start : start + size], first=first)
        self._throttle()

    def on_first(self, now_ns: int) -> None:
        """The connection's first bytes were read."""

    def eof_received(self) -> bool:
        self._put(time.monotonic_ns(), b"", first=False)
        return True  # the other direction may go on

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other._throttle()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.pump()

    def _put(self, now_ns: int, data: bytes, *, first: bool) -> None:
        self._last_ns = self._line.due_ns(now_ns, len(data), self._last_ns, self._relay.chance, first=first)
        self._waiting.append((self._last_ns, data))
        self._waiting_bytes += len(data)
        if self._last_ns <= now_ns:
            self.pump()
        else:
            self._relay.clock.at(self._last_ns, self.pump)

    def pump(self) -> None:
        """Passes on what is due and what the other side takes."""
        other = self.other
        if other is None or other.transport is None:
            return  # not connected yet; ``connected`` pumps
        now_ns = time.monotonic_ns()
        while self._waiting and self._waiting[0][0] <= now_ns and not other.is_full():
            data = self._waiting.popleft()[1]
            if other.transport.is_closing():
                continue
            if data:
                self._waiting_bytes -= len(data)
                other.transport.write(data)
            elif other.transport.can_write_eof():
                other.transport.write_eof()
        self._throttle()

    def is_full(self) -> bool:
        """Its peer does not take what was written."""
        return self.transport is not None and self.transport.get_write_buffer_size() > self._relay.config.window_bytes

    def _throttle(self) -> None:
        if self.transport is None or self.transport.is_closing():
            return
        full = self._waiting_bytes >= self._relay.config.window_bytes
        if full and not self._paused:
            self._paused = True
            self.transport.pause_reading()
        elif self._paused and not full:
            self._paused = False
            self.transport.resume_reading()


class _Client(_Side):
    """Who connected to us; its line is the request's."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._relay.connect(self)

    def on_first(self, now_ns: int) -> None:
        reset_ns = _ns(self._relay.config.reset_after_ms)
        if reset_ns:
            self._relay.clock.at(now_ns + reset_ns, self.abort)


class Relay:
    """All connections of one relay."""

    def __init__(self, config: RelayConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.config = config
        self.request, self.response = lines_of(config)
        self.clock = AlarmClock(loop)
        self.chance = random.Random(config.seed)
        self.sides: set[_Side] = set()
        self._loop = loop
        self._tasks: set[asyncio.Task[None]] = set()

    def accepted(self) -> _Side:
        return _Client(self, self.request)

    def connect(self, client: _Side) -> None:
        """Opens the other half of a pair; where that fails, the client's is closed."""
        task = self._loop.create_task(self._connect(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, client: _Side) -> None:
        host, port = _address("--to", self.config.to)
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        sock.setblocking(False)
        _receive_buffer(sock, self.config)
        server = _Side(self, self.response)
        try:
            await self._loop.sock_connect(sock, (host, port))
            await self._loop.create_connection(lambda: server, sock=sock)
        except OSError:
            sock.close()
            client.abort()
            return
        client.other, server.other = server, client
        if client.transport is None or client.transport.is_closing():
            client.abort()
            return
        client.pump()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for side in list(self.sides):
            if side.transport is not None:
                side.transport.abort()
        self.clock.close()


async def serve(config: RelayConfig, ready: asyncio.Future[int] | None = None) -> None:
    """Relays until it is cancelled; ``ready`` gets the port. Raises OSError where it cannot listen or enter."""
    loop = asyncio.get_running_loop()
    host, port = _address("--listen", config.listen)
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    relay = Relay(config, loop)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _receive_buffer(listener, config)
        listener.bind((host, port))
        if config.enter:
            # What listens stays where it was made; what is made from here on is there.
            enter(config.enter)
        server = await loop.create_server(relay.accepted, sock=listener, backlog=1024)
        try:
            if ready is not None:
                ready.set_result(listener.getsockname()[1])
            await loop.create_future()
        finally:
            server.close()
    finally:
        relay.close()
        listener.close()


def enter(pid: int) -> None:
    """This thread's new sockets belong to the network namespace of that process. Raises OSError."""
    with open(f"/proc/{pid}/ns/net", "rb") as there:
        if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")


def _receive_buffer(sock: socket.socket, config: RelayConfig) -> None:
    if config.receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, config.receive_bytes)


def _linger_not(transport: asyncio.Transport) -> None:
    """The end is a reset: ``abort`` alone sends FIN."""
    with contextlib.suppress(OSError):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


def _ns(ms: float) -> int:
    return round(ms * 1e6)


def _address(name: str, text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise RelayError(f"{name} is {text!r}; it must be HOST:PORT, like 127.0.0.1:8000.")
    return host, int(port)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{message}\n")
        raise SystemExit(2)


def _config(arguments: Sequence[str] | None) -> RelayConfig:
    parser = _Parser(prog="python -m tapproxy.simulate.relay", allow_abbrev=False)
    kinds = {"str": str, "int": int, "float": float}
    for field in dataclasses.fields(RelayConfig):
        if field.type == "bool":
            parser.add_argument(_flag(field.name), dest=field.name, action="store_true")
        else:
            parser.add_argument(_flag(field.name), dest=field.name, type=kinds[str(field.type)], default=field.default)
    return RelayConfig(**vars(parser.parse_args(arguments)))


async def _until_told(config: RelayConfig) -> int:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[int] = loop.create_future()
    task = asyncio.ensure_future(serve(config, ready))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        either: set[asyncio.Future[Any]] = {task, ready}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            sys.stdout.write(f"listening on {_address('--listen', config.listen)[0]}:{ready.result()}\n")
            sys.stdout.flush()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    except OSError as error:
        sys.stderr.write(f"cannot relay on {config.listen}: {error.strerror or error}.\n")
        return 3
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 ended by a signal, 2 a bad flag, 3 it cannot listen or enter the namespace."""
    try:
        config = _config(arguments)
    except RelayError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_until_told(config))


if __name__ == "__main__":
    sys.exit(main())
