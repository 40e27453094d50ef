"""The upstream connection, its pool, and the measuring client, against a scripted server."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from pathlib import Path

import pytest
import trustme
import uvloop

from tapproxy.core.address import parse_upstream
from tapproxy.core.errors import ConfigError
from tapproxy.wire.client import Connection, Pool, connect
from tapproxy.wire.fetch import Client
from tapproxy.wire.origin import authority, tls_context
from tapproxy.wire.stamps import HAS_KERNEL_STAMPS, Clock, bracketed_offset_ns
from tests.harness import DONE, SSE_HEAD, Peer, Upstream


class Collector:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.data = b""
        self.stamps: list[tuple[int, int]] = []
        self.closed: list[Exception | None] = []
        self.event = asyncio.Event()

    def upstream_bytes(self, data: bytes, arrived_ns: int, read_at_ns: int) -> None:
        self.data += data
        self.stamps.append((arrived_ns, read_at_ns))
        self.event.set()

    def upstream_closed(self, error: Exception | None) -> None:
        self.closed.append(error)
        self.event.set()

    def upstream_writable(self) -> None:
        self.event.set()

    async def next(self) -> None:
        async with asyncio.timeout(5):
            await self.event.wait()
        self.event.clear()


LOOPS = [pytest.param(uvloop.new_event_loop, id="uvloop"), pytest.param(asyncio.new_event_loop, id="asyncio")]


@pytest.mark.parametrize("loop_factory", LOOPS)
def test_a_kernel_stamp_lies_between_the_send_and_the_read(loop_factory: object) -> None:
    sent: list[int] = []

    def script(peer: Peer) -> None:
        peer.head()
        time.sleep(0.02)
        sent.append(time.monotonic_ns())
        peer.send(b"x")
        peer.closed_within(5)

    async def run(url: str) -> Collector:
        sink = Collector()
        clock = Clock()
        connection = await connect(parse_upstream(url), clock, timeout_s=5)
        assert connection.kernel_stamps is HAS_KERNEL_STAMPS
        connection.attach(sink)
        assert connection.write(b"GET / HTTP/1.1\r\n\r\n")
        await sink.next()
        connection.close()
        return sink

    with Upstream(script) as upstream, asyncio.Runner(loop_factory=loop_factory) as runner:  # type: ignore[arg-type]
        sink = runner.run(run(upstream.url))
    ((arrived_ns, read_at_ns),) = sink.stamps
    _, bracket_ns = bracketed_offset_ns()
    assert sent[0] - max(bracket_ns, 10_000) <= arrived_ns <= read_at_ns


def test_surplus_bytes_on_an_idle_connection_close_it() -> None:
    """Another client's next answer must never be what an engine sent too much."""

    def script(peer: Peer) -> None:
        peer.head()
        peer.send(b"answer")
        time.sleep(0.05)
        peer.send(b"POISON")
        peer.closed_within(5)

    async def run(url: str) -> None:
        sink = Collector()
        pool = Pool(parse_upstream(url), Clock())
        connection = await pool.open()
        connection.attach(sink)
        connection.write(b"GET / HTTP/1.1\r\n\r\n")
        await sink.next()
        pool.give(connection)
        async with asyncio.timeout(5):
            while not connection.closed:
                await asyncio.sleep(0.005)
        assert pool.take() is None
        assert not pool.open_connections
        assert sink.data == b"answer"

    with Upstream(script) as upstream:
        asyncio.run(run(upstream.url))


def test_an_idle_connection_expires_before_the_engine_closes_it() -> None:
    async def run(url: str) -> None:
        pool = Pool(parse_upstream(url), Clock(), keepalive_s=0.05)
        connection = await pool.open()
        connection.attach(Collector())
        pool.give(connection)
        taken = pool.take()
        assert taken is connection
        pool.give(connection)
        await asyncio.sleep(0.08)
        pool.expire()
        assert connection.closed
        assert pool.take() is None

    with Upstream(lambda peer: peer.head() and None) as upstream:
        asyncio.run(run(upstream.url))


def test_an_end_that_waits_to_be_read_spoils_an_idle_connection() -> None:
    def script(peer: Peer) -> None:
        peer.sock.close()

    async def run(url: str) -> None:
        pool = Pool(parse_upstream(url), Clock())
        connection = await pool.open()
        connection.attach(Collector())
        connection.pause_reading()  # as if the loop had not come round to it yet
        pool._idle.append(connection)
        connection.idle_since_ns = time.monotonic_ns()
        time.sleep(0.05)  # noqa: ASYNC251  # the loop must not read in between
        assert pool.take() is None

    with Upstream(script) as upstream:
        asyncio.run(run(upstream.url))


def test_what_the_kernel_does_not_take_waits_and_is_sent_later() -> None:
    got: list[int] = []

    def script(peer: Peer) -> None:
        time.sleep(0.1)
        total = 0
        while total < 30_000_000:
            total += len(peer.sock.recv(1 << 20))
        got.append(total)
        peer.send(b"ok")

    async def run(url: str) -> None:
        sink = Collector()
        connection = await connect(parse_upstream(url), Clock())
        connection.attach(sink)
        assert not connection.write(b"x" * 15_000_000)
        assert connection.unsent_bytes > 0
        connection.write(b"y" * 15_000_000)
        while sink.data != b"ok":
            await sink.next()
        assert connection.unsent_bytes == 0
        connection.close()

    with Upstream(script) as upstream:
        asyncio.run(run(upstream.url))
    assert got == [30_000_000]


def test_a_refused_connection_and_an_unresolved_name_raise_in_words() -> None:
    with Upstream(lambda peer: None) as upstream:
        port = upstream.port

    async def run() -> None:
        with pytest.raises(ConnectionRefusedError):
            await connect(parse_upstream(f"http://127.0.0.1:{port}"), Clock())
        with pytest.raises(OSError, match=r".+"):
            await connect(parse_upstream("http://no-such-host.invalid:1"), Clock(), timeout_s=5)

    asyncio.run(run())


def test_a_unix_socket_is_reached_with_user_stamps(tmp_path: Path) -> None:
    path = tmp_path / "s"

    async def run() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        server = await asyncio.start_unix_server(handle, path)
        client = Client(f"unix:{path}")
        fetched = await client.fetch("GET", "/")
        await client.close()
        server.close()
        assert (fetched.error, fetched.status, fetched.body, fetched.stamps) == (None, 200, b"ok", "user")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://engine:8000", "engine:8000"),
        ("http://engine", "engine"),
        ("https://[::1]:443", "[::1]"),
        ("unix:/run/x", "localhost"),
    ],
)
def test_the_authority_leaves_out_a_default_port(url: str, expected: str) -> None:
    assert authority(parse_upstream(url)) == expected


class TlsUpstream(Upstream):
    """The scripted upstream behind TLS."""

    context: ssl.SSLContext

    def _serve(self, sock: socket.socket) -> None:
        try:
            secured = self.context.wrap_socket(sock, server_side=True)
        except OSError:
            return
        super()._serve(secured)


def stream(peer: Peer) -> None:
    while True:
        peer.request()
        peer.send(SSE_HEAD)
        for _ in range(3):
            peer.event(b"{}")
            time.sleep(0.005)
        peer.send(DONE)


def test_tls_is_verified_and_keeps_stamps_and_connections(tmp_path: Path) -> None:
    authority_ = trustme.CA()
    certificate = authority_.issue_cert("127.0.0.1")
    ca_file = tmp_path / "ca.pem"
    authority_.cert_pem.write_to_path(str(ca_file))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)

    async def run(url: str) -> None:
        client = Client(url, ca_file=ca_file)
        first = await client.fetch("GET", "/")
        again = await client.fetch("GET", "/")
        await client.close()
        assert (first.error, first.reused, again.reused) == (None, False, True)
        assert first.tls_ns is not None
        assert again.tls_ns is None
        assert first.stamps == ("kernel" if HAS_KERNEL_STAMPS else "user")
        assert first.body == b"data: {}\n\n" * 3
        unverified = Client(url)
        refused = await unverified.fetch("GET", "/")
        await unverified.close()
        assert refused.error is not None
        assert refused.error.startswith("connect: the certificate is not trusted: ")
        careless = Client(url, insecure=True)
        assert (await careless.fetch("GET", "/")).error is None
        await careless.close()

    upstream = TlsUpstream(stream)
    upstream.context = context
    with upstream:
        asyncio.run(run(upstream.url.replace("http:", "https:")))


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        pytest.param(b"", "closed: no answer", id="nothing"),
        pytest.param(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "truncated: ", id="short"),
        pytest.param(b"nonsense\r\n\r\n", "malformed: ", id="malformed"),
        pytest.param(SSE_HEAD + b"zz\r\n", "malformed: ", id="bad_chunk"),
    ],
)
def test_the_measuring_client_says_what_went_wrong(reply: bytes, error: str) -> None:
    def script(peer: Peer) -> None:
        peer.head()
        peer.send(reply)
        time.sleep(0.05)

    async def run(url: str) -> None:
        client = Client(url)
        fetched = await client.fetch("GET", "/")
        await client.close()
        assert fetched.error is not None
        assert fetched.error.startswith(error)

    with Upstream(script) as upstream:
        asyncio.run(run(upstream.url))


def test_the_measuring_client_stops_at_its_time_limit() -> None:
    async def run(url: str) -> None:
        client = Client(url, timeout_s=0.1)
        fetched = await client.fetch("GET", "/")
        await client.close()
        assert fetched.error == "timeout: no complete answer within 0.1 s"

    with Upstream(lambda peer: peer.closed_within(5) and None) as upstream:
        asyncio.run(run(upstream.url))


def test_an_unreadable_ca_file_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read certificates"):
        tls_context(parse_upstream("https://a"), ca_file=tmp_path / "none.pem")


def test_a_wall_clock_step_is_remembered() -> None:
    clock = Clock()
    clock.sample()
    assert clock.stepped_at_ns is None
    clock.offset_ns -= 5_000_000_000
    clock.sample()
    assert clock.stepped_at_ns is not None


def test_closing_twice_is_harmless() -> None:
    async def run(url: str) -> None:
        connection: Connection = await connect(parse_upstream(url), Clock())
        connection.close()
        connection.close()
        assert connection.facts() is None
        assert not connection.write(b"x")

    with Upstream(lambda peer: peer.head() and None) as upstream:
        asyncio.run(run(upstream.url))
