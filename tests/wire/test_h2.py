"""The HTTP/2 client, against a small server of the same library: stamps, flow control, uploads, ends."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import h2.config
import h2.connection
import h2.events
import pytest

from tapproxy.core.errors import ConfigError
from tapproxy.nginx.sandbox import make_certificate
from tapproxy.wire.fetch import Fetched
from tapproxy.wire.h2 import NOT_OFFERED, H2Client

Script = Callable[["Server", int], None]


class Server(asyncio.Protocol):
    """One connection; ``script`` answers each request when it is complete."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.state = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
        self.bodies: dict[int, bytes] = {}
        self.heads: dict[int, dict[bytes, bytes]] = {}
        self.resets: list[int] = []
        self.lost = asyncio.Event()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.state.initiate_connection()
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()

    def data_received(self, data: bytes) -> None:
        for event in self.state.receive_data(data):
            if isinstance(event, h2.events.RequestReceived):
                self.heads[event.stream_id] = {bytes(n): bytes(v) for n, v in event.headers or []}
                self.bodies[event.stream_id] = b""
            elif isinstance(event, h2.events.DataReceived):
                self.bodies[event.stream_id] += event.data or b""
                self.state.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                self.script(self, event.stream_id)
            elif isinstance(event, h2.events.StreamReset):
                self.resets.append(event.stream_id)
        self.flush()

    def head(self, stream: int, *, status: bytes = b"200", end: bool = False) -> None:
        self.state.send_headers(stream, [(b":status", status), (b"x-from", b"server")], end_stream=end)
        self.flush()

    def data(self, stream: int, data: bytes, *, end: bool = False) -> None:
        self.state.send_data(stream, data, end_stream=end)
        self.flush()

    def flush(self) -> None:
        assert self.transport is not None
        self.transport.write(self.state.data_to_send())


@contextlib.asynccontextmanager
async def serving(
    directory: Path, script: Script, *, alpn: str = "h2"
) -> AsyncIterator[tuple[str, Path, list[Server]]]:
    certificate, key = make_certificate(directory)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols([alpn])
    made: list[Server] = []

    def make() -> Server:
        made.append(Server(script))
        return made[-1]

    server = await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0, ssl=context)
    try:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}", certificate, made
    finally:
        server.close()
        for one in made:
            if one.transport is not None:
                one.transport.abort()
        await asyncio.sleep(0)


def test_an_answer_comes_read_by_read_with_stamps(tmp_path: Path) -> None:
    def script(server: Server, stream: int) -> None:
        server.head(stream)
        loop = asyncio.get_running_loop()
        loop.call_later(0.05, server.data, stream, b"one")
        loop.call_later(0.10, lambda: server.data(stream, b"two", end=True))

    async def run() -> None:
        async with serving(tmp_path, script) as (url, ca, made):
            client = H2Client(url, ca_file=ca, timeout_s=5)
            fetched = await client.fetch("POST", "/x?y=1", [(b"X-Kept", b"v"), (b"Connection", b"close")], b"body")
            again = await client.fetch("GET", "/")
            await client.close()
            assert (fetched.error, fetched.status, fetched.http_version, fetched.body) == (None, 200, "2", b"onetwo")
            assert dict(fetched.headers) == {b"x-from": b"server"}
            assert [read.body for read in fetched.reads] == [b"one", b"two"]
            assert fetched.head_ns is not None
            assert fetched.reads[0].arrived_ns - fetched.head_ns > 30_000_000
            assert (fetched.reused, again.reused) == (False, True)
            assert len(made) == 1
            assert made[0].heads[1][b":path"] == b"/x?y=1"
            assert made[0].heads[1][b"x-kept"] == b"v"
            assert b"connection" not in made[0].heads[1]
            assert made[0].bodies == {1: b"body", 3: b""}

    asyncio.run(run())


def test_a_slow_upload_and_one_larger_than_the_window(tmp_path: Path) -> None:
    def script(server: Server, stream: int) -> None:
        server.head(stream, end=True)

    async def run() -> None:
        async with serving(tmp_path, script) as (url, ca, made):
            client = H2Client(url, ca_file=ca, timeout_s=10)
            slow = await client.fetch("POST", "/", body=b"a", slowly=[(0.05, b"b"), (0.05, b"c")])
            assert slow.error is None
            assert made[0].bodies[1] == b"abc"
            assert slow.write_start_ns is not None
            assert slow.write_end_ns is not None
            assert slow.write_end_ns - slow.write_start_ns > 80_000_000
            large = bytes(range(256)) * 1200
            assert (await client.fetch("POST", "/", body=large)).error is None
            assert made[0].bodies[3] == large
            await client.close()

    asyncio.run(run())


def test_leaving_resets_the_stream(tmp_path: Path) -> None:
    def script(server: Server, stream: int) -> None:
        server.head(stream)
        server.data(stream, b"first")

    def enough(fetched: Fetched) -> bool:
        return fetched.body == b"first"

    async def run() -> None:
        async with serving(tmp_path, script) as (url, ca, made):
            client = H2Client(url, ca_file=ca, timeout_s=5)
            fetched = await client.fetch("GET", "/", enough=enough)
            assert fetched.error is None
            assert fetched.left_ns is not None
            async with asyncio.timeout(5):
                await made[0].lost.wait()
            assert made[0].resets == [1]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("end", "error"),
    [
        pytest.param(
            lambda s, n: (s.head(n), s.state.reset_stream(n, 2), s.flush()), "truncated: the server reset", id="reset"
        ),
        pytest.param(lambda s, n: (s.head(n), s.transport.abort()), "truncated: ", id="broken_off"),
        pytest.param(lambda s, n: s.transport.abort(), "closed: ", id="no_answer"),
        pytest.param(lambda s, n: s.transport.write(b"\0" * 64), "", id="no_http2"),
        pytest.param(lambda s, n: s.head(n), "timeout: no complete answer within 0.3 s", id="too_late"),
    ],
)
def test_every_end_is_a_word_and_no_exception(tmp_path: Path, end: Script, error: str) -> None:
    async def run() -> None:
        async with serving(tmp_path, end) as (url, ca, _):
            client = H2Client(url, ca_file=ca, timeout_s=0.3)
            fetched = await client.fetch("GET", "/")
            await client.close()
            assert fetched.error is not None
            assert fetched.error.startswith(error)

    asyncio.run(run())


def test_a_server_without_http2_is_said_to_be_one(tmp_path: Path) -> None:
    async def run() -> None:
        async with serving(tmp_path, lambda s, n: None, alpn="http/1.1") as (url, ca, _):
            client = H2Client(url, ca_file=ca, timeout_s=2)
            assert (await client.fetch("GET", "/")).error == NOT_OFFERED
            await client.close()

    asyncio.run(run())


def test_plain_http_has_none() -> None:
    with pytest.raises(ConfigError, match="HTTP/2 is agreed on in TLS"):
        H2Client("http://127.0.0.1:1")
