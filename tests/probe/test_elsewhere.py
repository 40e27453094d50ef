"""An answer that is not the tap's: what is said depends on what the proxy answered."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tapproxy.core.errors import MeasureError
from tapproxy.nginx.sandbox import make_certificate, server_tls
from tapproxy.probe.asking import Asker, Desk, Via
from tapproxy.probe.run import _check


class Admin(Desk):
    """A desk whose tap has seen nothing of the requests."""

    async def attach(self, found: object) -> None:
        """No report."""


@asynccontextmanager
async def proxy(answer: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Answers every request so."""

    class Serve(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            assert isinstance(transport, asyncio.Transport)
            self.transport = transport
            self.seen = b""

        def data_received(self, data: bytes) -> None:
            self.seen += data
            if b"\r\n\r\n" in self.seen or not self.seen.startswith(b"POST "):
                self.transport.write(answer)
                self.transport.close()

    server = await asyncio.get_running_loop().create_server(Serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.sleep(0.01)  # the closed connections go


def said(answer: bytes, *, scheme: str = "http", tls: ssl.SSLContext | None = None) -> str:
    async def run() -> str:
        async with proxy(answer, tls) as plain:
            url = plain.replace("http", scheme)
            desk = Admin("http://127.0.0.1:9", None)
            desk.key = "a-key"
            with pytest.raises(MeasureError) as caught:
                await _check(Asker(Via(url, "/v1/x"), desk, "http1", h2=False), desk)
            return str(caught.value).removeprefix(f"{url}/v1/x ")

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "words"),
    [
        pytest.param("301 Moved\r\nLocation: https://h/v1/x", "it redirects to https://h/v1/x: give", id="redirect"),
        pytest.param("302 Found", "the request went elsewhere", id="redirect_to_nowhere"),
        pytest.param("400 No", "does it speak TLS on this port", id="plain_to_tls"),
        pytest.param("401 No", "give what its clients send, with --header", id="no_credential"),
        pytest.param("403 No", "it is refused: give what its clients send", id="refused"),
        pytest.param("404 No", "does --path lead to it?", id="no_path"),
        pytest.param("405 No", "takes no POST on this path", id="no_post"),
        pytest.param("429 No", "limits how often it is asked", id="limited"),
        pytest.param("502 No", "is the tap running, and does the proxy lead to its data port?", id="no_tap"),
        pytest.param("200 OK", "the proxy took the field x-tapproxy-probe out", id="an_engine"),
    ],
)
def test_each_answer_says_what_to_do(status: str, words: str) -> None:
    told = said(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
    assert told.startswith(f"answers {status[:3]}, and not from this tap: ")
    assert words in told
    assert "a-key" not in told


def test_no_answer_is_said_as_such() -> None:
    assert said(b"") == "does not answer: closed: no answer (the server closed the connection)"


def test_tls_that_fails_says_what_to_do(tmp_path: Path) -> None:
    plain = said(b"HTTP/1.1 400 No\r\nContent-Length: 0\r\n\r\n", scheme="https")
    assert plain.startswith("does not answer: connect: ")
    assert plain.endswith("it speaks no TLS on this port: --via http://?")
    unknown = said(b"", scheme="https", tls=server_tls(*make_certificate(tmp_path)))
    assert unknown.endswith("give its certificate, or that of its authority, with --ca, or say --insecure")
