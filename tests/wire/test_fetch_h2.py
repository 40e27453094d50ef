"""Requests over HTTP/2, against a server made of h2 itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset

from tapproxy.wire.fetch import Fetched
from tapproxy.wire.fetch_h2 import H2Client

Handler = Callable[["Server", int], None]


class Server(asyncio.Protocol):
    """One connection: it counts what it gets and lets ``handler`` answer each request when it is complete."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.h2 = H2Connection(H2Configuration(client_side=False))
        self.bodies: dict[int, int] = {}
        self.headers: dict[int, dict[bytes, bytes]] = {}
        self.reset: list[int] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.h2.initiate_connection()
        self.flush()

    def flush(self) -> None:
        self.transport.write(self.h2.data_to_send())

    def data_received(self, data: bytes) -> None:
        for event in self.h2.receive_data(data):
            if isinstance(event, RequestReceived):
                self.headers[event.stream_id] = dict(event.headers)
                self.bodies[event.stream_id] = 0
            elif isinstance(event, DataReceived):
                self.bodies[event.stream_id] += len(event.data)
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                self.handler(self, event.stream_id)
            elif isinstance(event, StreamReset):
                self.reset.append(event.stream_id)
        self.flush()

    def answer(self, stream: int, *parts: bytes, end: bool = True) -> None:
        self.h2.send_headers(stream, [(":status", "200"), ("content-type", "text/event-stream")])
        for part in parts:
            self.h2.send_data(stream, part)
        if end:
            self.h2.end_stream(stream)


def asked(handler: Handler, ask: Callable[[H2Client], Awaitable[Fetched]]) -> tuple[Fetched, list[Server]]:
    async def both() -> tuple[Fetched, list[Server]]:
        servers: list[Server] = []

        def made() -> Server:
            servers.append(Server(handler))
            return servers[-1]

        listener = await asyncio.get_running_loop().create_server(made, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        client = H2Client(f"http://127.0.0.1:{port}", timeout_s=5)
        try:
            return await ask(client), servers
        finally:
            await client.close()
            listener.close()
            for server in servers:
                server.transport.abort()

    return asyncio.run(both())


def test_an_answer_is_read_with_its_stamps() -> None:
    fetched, servers = asked(
        lambda server, stream: server.answer(stream, b"data: 1\n\n", b"data: 2\n\n"),
        lambda client: client.fetch("POST", "/x?y=1", [(b"Accept", b"*/*")], b"{}"),
    )
    assert (fetched.error, fetched.status, fetched.http_version) == (None, 200, "2")
    assert fetched.body == b"data: 1\n\ndata: 2\n\n"
    assert dict(fetched.headers)[b"content-type"] == b"text/event-stream"
    assert fetched.write_start_ns is not None
    assert fetched.head_ns is not None
    assert fetched.end_ns is not None
    assert fetched.write_start_ns <= fetched.head_ns <= fetched.reads[0].arrived_ns <= fetched.end_ns
    (headers,) = servers[0].headers.values()
    assert (headers[b":path"], headers[b"content-length"], headers[b"accept"]) == (b"/x?y=1", b"2", b"*/*")


def test_a_body_larger_than_every_window_is_sent_as_the_windows_open() -> None:
    fetched, servers = asked(
        lambda server, stream: server.answer(stream, b"ok"),
        lambda client: client.fetch("POST", "/", [], b"x" * 300_000),
    )
    assert (fetched.error, fetched.body) == (None, b"ok")
    assert list(servers[0].bodies.values()) == [300_000]


def test_two_requests_share_one_connection() -> None:
    async def twice(client: H2Client) -> Fetched:
        first, second = await asyncio.gather(client.fetch("POST", "/", [], b"1"), client.fetch("POST", "/", [], b"22"))
        assert (first.error, second.error) == (None, None)
        assert first.reused != second.reused
        return second

    _, servers = asked(lambda server, stream: server.answer(stream, b"ok"), twice)
    assert [sorted(server.bodies.values()) for server in servers] == [[1, 2]]


def test_a_stream_that_the_peer_resets_is_truncated() -> None:
    def half(server: Server, stream: int) -> None:
        server.answer(stream, b"data: 1\n\n", end=False)
        server.h2.reset_stream(stream, 2)

    fetched, _ = asked(half, lambda client: client.fetch("POST", "/", [], b"{}"))
    assert fetched.error == "truncated: the stream was reset (INTERNAL_ERROR)"
    assert fetched.body == b"data: 1\n\n"


def test_a_connection_that_ends_is_said_and_not_used_again() -> None:
    async def twice(client: H2Client) -> Fetched:
        first = await client.fetch("POST", "/", [], b"{}")
        assert first.error == "truncated: the server closed the connection"
        return await client.fetch("POST", "/", [], b"{}")

    fetched, servers = asked(lambda server, stream: server.transport.close(), twice)
    assert fetched.error == "truncated: the server closed the connection"
    assert len(servers) == 2


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


def test_nobody_who_listens_and_a_broken_frame_are_errors() -> None:
    async def nowhere() -> Fetched:
        client = H2Client("http://127.0.0.1:1", timeout_s=2)
        return await client.fetch("GET", "/")

    assert str(asyncio.run(nowhere()).error).startswith("connect: ")
    fetched, _ = asked(
        lambda server, stream: server.transport.write(b"\0\0\1\0\0\0\0\0\0x"),  # DATA on stream 0
        lambda client: client.fetch("POST", "/", [], b"{}"),
    )
    assert str(fetched.error).startswith("malformed: ")
