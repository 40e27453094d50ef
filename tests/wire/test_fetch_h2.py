"""Requests over HTTP/2, against a server made of h2 itself: stamps, flow control, uploads, ends."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset
from h2.settings import SettingCodes

from tapproxy.core.errors import ConfigError
from tapproxy.nginx.sandbox import make_certificate
from tapproxy.wire.fetch import Fetched
from tapproxy.wire.fetch_h2 import NOT_OFFERED, H2Client

Handler = Callable[["Server", int], None]


class Server(asyncio.Protocol):
    """One connection; ``handler`` answers each request when it is complete, ``on_head`` before that."""

    def __init__(self, handler: Handler, on_head: Handler | None = None) -> None:
        self.handler = handler
        self.on_head = on_head
        self.h2 = H2Connection(H2Configuration(client_side=False, header_encoding=None))
        self.bodies: dict[int, bytes] = {}
        self.headers: dict[int, dict[bytes, bytes]] = {}
        self.reset: list[int] = []
        self.lost = asyncio.Event()
        self.transport: asyncio.Transport  # once connected, which a refused handshake never is

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.h2.initiate_connection()
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

    def flush(self) -> None:
        self.transport.write(self.h2.data_to_send())

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            if isinstance(event, RequestReceived):
                self.headers[event.stream_id] = dict(event.headers)
                self.bodies[event.stream_id] = b""
                if self.on_head is not None:
                    self.on_head(self, event.stream_id)
            elif isinstance(event, DataReceived):
                self.bodies[event.stream_id] += event.data
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                self.handler(self, event.stream_id)
            elif isinstance(event, StreamReset):
                self.reset.append(event.stream_id)
        self.flush()

    def head(self, stream: int, *, end: bool = False) -> None:
        self.h2.send_headers(stream, [(":status", "200"), ("content-type", "text/event-stream")], end_stream=end)
        self.flush()

    def data(self, stream: int, data: bytes, *, end: bool = False) -> None:
        self.h2.send_data(stream, data, end_stream=end)
        self.flush()

    def answer(self, stream: int, *parts: bytes, end: bool = True) -> None:
        self.h2.send_headers(stream, [(":status", "200"), ("content-type", "text/event-stream")])
        for part in parts:
            self.h2.send_data(stream, part)
        if end:
            self.h2.end_stream(stream)


def answered(server: Server, stream: int) -> None:
    server.answer(stream, b"ok")


@contextlib.asynccontextmanager
async def serving(
    handler: Handler, *, tls: Path | None = None, alpn: str = "h2", on_head: Handler | None = None, timeout_s: float = 5
) -> AsyncIterator[tuple[H2Client, list[Server]]]:
    """A server, and a client of it. ``tls``: the directory of its certificate; None: h2c."""
    made: list[Server] = []
    context, certificate = None, None
    if tls is not None:
        certificate, key = make_certificate(tls)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        context.set_alpn_protocols([alpn])

    def make() -> Server:
        made.append(Server(handler, on_head))
        return made[-1]

    listener = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0, ssl=context)
    port = listener.sockets[0].getsockname()[1]
    scheme = "http" if tls is None else "https"
    client = H2Client(f"{scheme}://127.0.0.1:{port}", ca_file=certificate, timeout_s=timeout_s)
    try:
        yield client, made
    finally:
        await client.close()
        listener.close()
        for server in made:
            if hasattr(server, "transport"):
                server.transport.abort()
        await asyncio.sleep(0)


def asked(handler: Handler, ask: Callable[[H2Client], Awaitable[Fetched]]) -> tuple[Fetched, list[Server]]:
    async def both() -> tuple[Fetched, list[Server]]:
        async with serving(handler) as (client, servers):
            return await ask(client), servers

    return asyncio.run(both())


@pytest.mark.parametrize("tls", [False, True], ids=["h2c", "tls"])
def test_an_answer_comes_read_by_read_with_stamps(tmp_path: Path, tls: bool) -> None:
    def handler(server: Server, stream: int) -> None:
        server.head(stream)
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, server.data, stream, b"one")
        loop.call_later(0.10, lambda: server.data(stream, b"two", end=True))

    async def run() -> None:
        async with serving(handler, tls=tmp_path if tls else None) as (client, made):
            fetched = await client.fetch("POST", "/x?y=1", [(b"X-Kept", b"v"), (b"Connection", b"close")], b"body")
            again = await client.fetch("GET", "/")
            assert (fetched.error, fetched.status, fetched.http_version, fetched.body) == (None, 200, "2", b"onetwo")
            assert dict(fetched.headers) == {b"content-type": b"text/event-stream"}
            assert [read.body for read in fetched.reads] == [b"one", b"two"]
            assert fetched.write_start_ns is not None
            assert fetched.write_end_ns is not None
            assert fetched.head_ns is not None
            assert fetched.end_ns is not None
            assert fetched.write_start_ns <= fetched.write_end_ns <= fetched.head_ns
            assert fetched.head_ns <= fetched.reads[0].arrived_ns <= fetched.end_ns
            assert fetched.reads[0].arrived_ns - fetched.head_ns > 30_000_000
            assert (fetched.connect_ns is not None, fetched.tls_ns is not None) == (True, tls)
            assert fetched.rtt_ns is not None
            assert (fetched.reused, again.reused) == (False, True)
            assert len(made) == 1
            head = made[0].headers[1]
            assert (head[b":path"], head[b"content-length"], head[b"x-kept"]) == (b"/x?y=1", b"4", b"v")
            assert head[b":scheme"] == (b"https" if tls else b"http")
            assert b"connection" not in head
            assert b"content-length" not in made[0].headers[3]
            assert made[0].bodies == {1: b"body", 3: b""}

    asyncio.run(run())


def test_two_frames_of_one_read_are_one_read() -> None:
    fetched, servers = asked(
        lambda server, stream: server.answer(stream, b"data: 1\n\n", b"data: 2\n\n"),
        lambda client: client.fetch("POST", "/", [(b"Host", b"engine.test")], b"{}"),
    )
    assert [read.body for read in fetched.reads] == [b"data: 1\n\ndata: 2\n\n"]
    assert servers[0].headers[1][b":authority"] == b"engine.test"


def test_a_body_larger_than_every_window_is_sent_as_the_windows_open(tmp_path: Path) -> None:
    large = bytes(range(256)) * 1200

    async def run(tls: Path | None) -> None:
        async with serving(answered, tls=tls) as (client, made):
            fetched = await client.fetch("POST", "/", [], large)
            assert (fetched.error, fetched.body) == (None, b"ok")
            assert list(made[0].bodies.values()) == [large]
            assert fetched.write_end_ns is not None
            assert fetched.head_ns is not None
            assert fetched.write_end_ns <= fetched.head_ns

    asyncio.run(run(None))
    asyncio.run(run(tmp_path))


def test_a_slow_upload_takes_its_time() -> None:
    async def run() -> None:
        async with serving(lambda server, stream: server.head(stream, end=True)) as (client, made):
            slow = await client.fetch("POST", "/", body=b"a", slowly=[(0.05, b"b"), (0.05, b"c")])
            assert slow.error is None
            assert made[0].bodies[1] == b"abc"
            assert made[0].headers[1][b"content-length"] == b"3"
            assert slow.write_start_ns is not None
            assert slow.write_end_ns is not None
            assert slow.write_end_ns - slow.write_start_ns > 80_000_000

    asyncio.run(run())


def test_an_answer_to_half_a_request_ends_the_upload() -> None:
    """A 413 before the body has gone: the answer counts, the rest is not sent, the connection serves the next."""

    async def run() -> None:
        async with serving(answered, on_head=lambda s, n: s.head(n, end=True) if n == 1 else None) as (client, made):
            early = await client.fetch("POST", "/", body=b"a", slowly=[(0.05, b"b"), (10.0, b"c")])
            assert (early.error, early.status) == (None, 200)
            again = await client.fetch("POST", "/", body=b"x")
            assert (again.error, again.body, again.reused) == (None, b"ok", True)
            assert made[0].reset == [1]

    asyncio.run(run())


def test_two_requests_share_one_connection() -> None:
    async def twice(client: H2Client) -> Fetched:
        first, second = await asyncio.gather(client.fetch("POST", "/", [], b"1"), client.fetch("POST", "/", [], b"22"))
        assert (first.error, second.error) == (None, None)
        assert first.reused != second.reused
        return second

    _, servers = asked(answered, twice)
    assert [sorted(server.bodies.values()) for server in servers] == [[b"1", b"22"]]


def test_leaving_resets_the_stream_and_closes_the_connection(tmp_path: Path) -> None:
    def handler(server: Server, stream: int) -> None:
        server.head(stream)
        server.data(stream, b"first")

    async def run() -> None:
        async with serving(handler, tls=tmp_path) as (client, made):
            fetched = await client.fetch("GET", "/", enough=lambda fetched: fetched.body == b"first")
            assert fetched.error is None
            assert fetched.left_ns is not None
            async with asyncio.timeout(5):
                await made[0].lost.wait()
            assert made[0].reset == [1]

    asyncio.run(run())


def test_leaving_one_answer_leaves_the_others_alone() -> None:
    def handler(server: Server, stream: int) -> None:
        server.head(stream)
        server.data(stream, b"first")
        if server.headers[stream][b":path"] == b"/kept":
            asyncio.get_running_loop().call_later(0.1, lambda: server.data(stream, b"last", end=True))

    async def run() -> None:
        async with serving(handler) as (client, made):
            kept, left = await asyncio.gather(
                client.fetch("GET", "/kept"), client.fetch("GET", "/left", enough=lambda fetched: True)
            )
            assert (kept.error, kept.body, kept.left_ns) == (None, b"firstlast", None)
            assert (left.error, left.body, left.left_ns is not None) == (None, b"first", True)
            assert (len(made), made[0].reset) == (1, [3])

    asyncio.run(run())


@pytest.mark.parametrize("tls", [False, True], ids=["h2c", "tls"])
@pytest.mark.parametrize(
    ("end", "error"),
    [
        pytest.param(
            lambda s, n: (s.answer(n, b"data: 1\n\n", end=False), s.h2.reset_stream(n, 2)),
            "truncated: the stream was reset (INTERNAL_ERROR)",
            id="reset",
        ),
        pytest.param(
            lambda s, n: s.h2.reset_stream(n, 7), "closed: the stream was reset (REFUSED_STREAM)", id="refused"
        ),
        pytest.param(
            lambda s, n: (s.head(n), s.transport.close()), "truncated: the server closed the connection", id="half"
        ),
        pytest.param(lambda s, n: (s.head(n), s.transport.abort()), "truncated: ", id="broken_off"),
        pytest.param(
            lambda s, n: s.transport.close(), "closed: no answer (the server closed the connection)", id="no_answer"
        ),
        pytest.param(
            lambda s, n: s.h2.close_connection(last_stream_id=0),
            "closed: the server takes no more requests on this connection (GOAWAY, NO_ERROR)",
            id="goaway",
        ),
        pytest.param(lambda s, n: s.transport.write(b"\0" * 64), "malformed: ", id="no_http2"),
        # DATA on stream 0
        pytest.param(lambda s, n: s.transport.write(b"\0\0\1\0\0\0\0\0\0x"), "malformed: ", id="broken_frame"),
        pytest.param(lambda s, n: s.head(n), "timeout: no complete answer within 0.3 s", id="too_late"),
    ],
)
def test_every_end_is_a_word_and_no_exception(tmp_path: Path, end: Handler, error: str, tls: bool) -> None:
    """And what has ended in this way is not used again."""

    async def run() -> None:
        async with serving(end, tls=tmp_path if tls else None, timeout_s=0.3) as (client, made):
            fetched = await client.fetch("GET", "/")
            assert fetched.error is not None
            assert fetched.error.startswith(error)
            if "reset" in error:
                assert fetched.body == (b"data: 1\n\n" if "truncated" in error else b"")
                return
            again = await client.fetch("GET", "/")
            assert again.error == fetched.error
            assert (again.reused, len(made)) == (False, 2)

    asyncio.run(run())


def test_an_answer_goes_on_after_a_polite_farewell() -> None:
    """GOAWAY without an error says what is the last stream: its answer still comes, a new request asks anew."""
    farewell = b"\0\0\x08\x07\0\0\0\0\0" + b"\0\0\0\1" + b"\0\0\0\0"
    rest = [b"\0\0\5\0\0\0\0\0\1first", b"\0\0\4\0\1\0\0\0\1last"]

    def handler(server: Server, stream: int) -> None:
        server.head(stream)
        server.transport.write(farewell)
        for number, frame in enumerate(rest):
            asyncio.get_running_loop().call_later(0.05 * (number + 1), server.transport.write, frame)

    async def run() -> None:
        async with serving(handler) as (client, made):
            for number in (1, 2):
                fetched = await client.fetch("GET", "/")
                assert (fetched.error, fetched.body, fetched.reused) == (None, b"firstlast", False)
                assert len(made) == number

    asyncio.run(run())


def test_an_abandoned_request_is_reset() -> None:
    async def leave(client: H2Client) -> Fetched:
        request = asyncio.create_task(client.fetch("POST", "/", [], b"{}"))
        await asyncio.sleep(0.05)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        return await client.fetch("POST", "/2", [], b"{}")

    def only_second(server: Server, stream: int) -> None:
        if server.headers[stream][b":path"] == b"/2":
            server.answer(stream, b"ok")

    fetched, servers = asked(only_second, leave)
    assert (fetched.error, fetched.reused) == (None, True)
    assert servers[0].reset == [1]


def test_a_server_that_allows_no_stream_is_told_in_words() -> None:
    """It says so in its settings, after the first request; the second is refused by the protocol's rules."""

    async def run() -> None:
        def none_more(server: Server, stream: int) -> None:
            server.answer(stream, b"ok")
            server.h2.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 0})

        async with serving(none_more) as (client, _):
            assert (await client.fetch("GET", "/")).error is None
            await asyncio.sleep(0.05)
            assert str((await client.fetch("GET", "/")).error).startswith("malformed: ")

    asyncio.run(run())


def test_a_server_without_http2_is_said_to_be_one(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(answered, tls=tmp_path, alpn="http/1.1") as (client, _):
            assert (await client.fetch("GET", "/")).error == NOT_OFFERED

    asyncio.run(run())


def test_nobody_who_listens_is_an_error_and_a_wrong_url_is_refused() -> None:
    async def nowhere() -> Fetched:
        client = H2Client("http://127.0.0.1:1", timeout_s=2)
        return await client.fetch("GET", "/")

    assert str(asyncio.run(nowhere()).error).startswith("connect: ")
    with pytest.raises(ConfigError):
        H2Client("ftp://127.0.0.1:1")
