"""Acknowledgement stamps: what they say, that their queue never makes a loop spin, and how their keys are read."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest
import uvloop

from tapproxy.wire.acks import AckTrack, AckWatcher, read_stamp, unwrapped
from tapproxy.wire.stamps import HAS_KERNEL_STAMPS, Clock

pytestmark = pytest.mark.skipif(not HAS_KERNEL_STAMPS, reason="acknowledgement stamps are Linux's")

LOOPS = [pytest.param(uvloop.new_event_loop, id="uvloop"), pytest.param(asyncio.new_event_loop, id="asyncio")]
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


class Watched(asyncio.Protocol):
    """The server's end of one connection, watched."""

    def __init__(self, watcher: AckWatcher) -> None:
        self.watcher = watcher
        self.acks: list[tuple[int, int]] = []
        self.hangups = 0
        self.news = asyncio.Event()
        self.track: AckTrack | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=0)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.track = self.watcher.watch(sock, self.acked, self.hung_up)
        self.news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.track is not None:
            self.watcher.forget(self.track)

    def acked(self, acked_bytes: int, at_ns: int) -> None:
        self.acks.append((acked_bytes, at_ns))
        self.news.set()

    def hung_up(self) -> None:
        self.hangups += 1
        self.news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self.news.clear()
                await self.news.wait()


@contextlib.asynccontextmanager
async def connected(
    protocol: type[Watched] = Watched, *, receive_bytes: int | None = None
) -> AsyncIterator[tuple[Watched, socket.socket]]:
    """A watched connection and the client's socket, on loopback."""
    loop = asyncio.get_running_loop()
    watcher = AckWatcher(loop, Clock())
    made: list[Watched] = []
    ready = asyncio.Event()

    def make() -> Watched:
        made.append(protocol(watcher))
        ready.set()
        return made[-1]

    server = await loop.create_server(make, "127.0.0.1", 0)
    with socket.socket() as client:
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.connect(server.sockets[0].getsockname())
        await ready.wait()
        await made[0].until(lambda: made[0].track is not None)
        try:
            yield made[0], client
        finally:
            made[0].transport.abort()
            server.close()
            await asyncio.sleep(0.01)
            watcher.close()


@pytest.mark.parametrize("factory", LOOPS)
def test_each_write_is_stamped_when_the_peers_kernel_had_it(factory: LoopFactory) -> None:
    async def run() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        sent = []
        async with connected() as (server, _client):
            for number in range(1, 6):
                before_ns = time.monotonic_ns()
                server.transport.write(b"x" * 100)
                await server.until(lambda number=number: len(server.acks) == number)  # type: ignore[misc]  # bound now
                sent.append((before_ns, time.monotonic_ns()))
        return sent, server.acks

    with asyncio.Runner(loop_factory=factory) as runner:
        sent, acks = runner.run(run())
    assert [acked_bytes for acked_bytes, _ in acks] == [100, 200, 300, 400, 500]
    bracket_ns = 20_000
    for (before_ns, after_ns), (_, at_ns) in zip(sent, acks, strict=True):
        assert before_ns - bracket_ns <= at_ns <= after_ns + bracket_ns


@pytest.mark.parametrize("factory", LOOPS)
def test_a_loop_with_stamped_sockets_rests_when_nothing_happens(factory: LoopFactory) -> None:
    """An error queue that is not drained keeps EPOLLERR set, and the loop never sleeps again."""

    async def run() -> float:
        async with connected() as (server, _client):
            for _ in range(200):  # more than one poll's worth, faster than they are drained
                server.transport.write(b"x")
            await server.until(lambda: bool(server.acks) and server.acks[-1][0] == 200)
            began = time.process_time()
            await asyncio.sleep(0.3)
            return time.process_time() - began

    with asyncio.Runner(loop_factory=factory) as runner:
        assert runner.run(run()) < 0.1


@pytest.mark.parametrize("factory", LOOPS)
def test_a_callback_that_fails_leaves_no_queue_undrained(factory: LoopFactory) -> None:
    class Failing(Watched):
        def acked(self, acked_bytes: int, at_ns: int) -> None:
            super().acked(acked_bytes, at_ns)
            raise RuntimeError("a fault of the callback's own")

    async def run() -> tuple[float, list[object]]:
        told: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context.get("exception")))
        async with connected(Failing) as (server, _client):
            server.transport.write(b"x")
            await server.until(lambda: bool(server.acks))
            began = time.process_time()
            await asyncio.sleep(0.2)
            used = time.process_time() - began
            server.transport.write(b"y")
            await server.until(lambda: len(server.acks) == 2)
        return used, told

    with asyncio.Runner(loop_factory=factory) as runner:
        used, told = runner.run(run())
    assert used < 0.1
    assert [type(error) for error in told] == [RuntimeError, RuntimeError]


@pytest.mark.parametrize("factory", LOOPS)
def test_what_the_peers_kernel_has_no_room_for_is_stamped_once_it_has(factory: LoopFactory) -> None:
    async def run() -> tuple[int, int, int]:
        async with connected(receive_bytes=4096) as (server, client):
            server.transport.write(b"x" * 300_000)
            await asyncio.sleep(0.05)
            early = server.acks[-1][0] if server.acks else 0
            began_ns = time.monotonic_ns()
            taken = 0
            client.setblocking(False)
            while taken < 300_000:
                try:
                    taken += len(client.recv(65536))
                except BlockingIOError:
                    await asyncio.sleep(0.001)
            await server.until(lambda: bool(server.acks) and server.acks[-1][0] == 300_000)
            assert server.track is not None
            assert server.track.written() == 300_000
            return early, began_ns, server.acks[-1][1]

    with asyncio.Runner(loop_factory=factory) as runner:
        early, began_ns, at_ns = runner.run(run())
    assert early < 300_000
    assert at_ns > began_ns


@pytest.mark.parametrize("factory", LOOPS)
def test_a_peer_that_leaves_is_told_of_after_its_last_acknowledgement(factory: LoopFactory) -> None:
    async def run() -> Watched:
        async with connected() as (server, client):
            server.transport.write(b"x" * 10)
            client.shutdown(socket.SHUT_WR)
            await server.until(lambda: server.hangups > 0)
            assert server.acks[-1][0] == 10
        return server

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())


@pytest.mark.parametrize("factory", LOOPS)
def test_a_finished_track_sends_the_end_and_still_tells_the_last_stamp(factory: LoopFactory) -> None:
    class Finishing(Watched):
        def connection_lost(self, exc: Exception | None) -> None:
            assert self.track is not None
            self.watcher.finish(self.track)

    async def run() -> tuple[Watched, bytes]:
        loop = asyncio.get_running_loop()
        async with connected(Finishing) as (server, client):
            server.transport.write(b"last")
            server.transport.close()
            client.setblocking(False)
            got = b""
            async with asyncio.timeout(0.5):  # the end comes at once, although a duplicate is open
                while data := await loop.sock_recv(client, 100):
                    got += data
            await server.until(lambda: bool(server.acks))
            assert server.track is not None
            server.watcher.forget(server.track)
            server.watcher.forget(server.track)  # again: nothing
        return server, got

    with asyncio.Runner(loop_factory=factory) as runner:
        server, got = runner.run(run())
    assert got == b"last"
    assert [acked_bytes for acked_bytes, _ in server.acks] == [4]


def test_forgetting_tells_what_lies_in_the_queue() -> None:
    async def run() -> Watched:
        async with connected() as (server, _client):
            server.transport.write(b"x" * 7)  # on loopback acknowledged within the call
            assert server.acks == []
            assert server.track is not None
            server.watcher.forget(server.track)
        return server

    server = asyncio.run(run())
    assert [acked_bytes for acked_bytes, _ in server.acks] == [7]


def test_a_socket_that_is_no_tcp_socket_has_no_stamps() -> None:
    async def run() -> None:
        watcher = AckWatcher(asyncio.get_running_loop(), Clock())
        one, other = socket.socketpair()
        with one, other:
            assert watcher.watch(one, lambda _bytes, _at_ns: None) is None
        watcher.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("acked_bytes", "key", "expected"),
    [
        pytest.param(0, 99, 100, id="first"),
        pytest.param(100, 199, 200, id="next"),
        pytest.param(100, 99, 100, id="the same again"),
        pytest.param(2**32 - 10, 2**32 - 1, 2**32, id="last before the wrap"),
        pytest.param(2**32 - 10, 4, 2**32 + 5, id="across the wrap"),
        pytest.param(2**32, 0, 2**32 + 1, id="first after the wrap"),
        pytest.param(5 * 2**32 + 7, 99, 5 * 2**32 + 100, id="after five wraps"),
    ],
)
def test_a_key_counts_on_past_its_32_bits(acked_bytes: int, key: int, expected: int) -> None:
    assert unwrapped(acked_bytes, key) == expected


TIMES = struct.pack("@qqqqqq", 1_700_000_000, 123, 0, 0, 0, 0)


def error(*, number: int = errno.ENOMSG, origin: int = 4, info: int = 2, key: int = 41) -> bytes:
    return struct.pack("=IBBBBII", number, origin, 0, 0, 0, info, key) + bytes(16)


@pytest.mark.parametrize(
    ("ancillary", "expected"),
    [
        pytest.param([(1, 37, TIMES), (0, 11, error())], (41, 1_700_000_000_000_000_123), id="IPv4"),
        pytest.param([(1, 37, TIMES), (41, 25, error())], (41, 1_700_000_000_000_000_123), id="IPv6"),
        pytest.param([(0, 11, error())], None, id="no time"),
        pytest.param([(1, 37, TIMES)], None, id="no key"),
        pytest.param([(1, 37, TIMES), (0, 11, error(info=0))], None, id="sent, not acknowledged"),
        pytest.param([(1, 37, TIMES), (0, 11, error(origin=2, number=errno.ECONNREFUSED))], None, id="an ICMP error"),
        pytest.param([], None, id="nothing"),
    ],
)
def test_only_an_acknowledgement_is_read_as_one(
    ancillary: list[tuple[int, int, bytes]], expected: tuple[int, int] | None
) -> None:
    assert read_stamp(ancillary) == expected
