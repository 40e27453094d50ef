"""A server of metrics pages on loopback that behaves as it is told, well or badly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


class Pages:
    """``url`` of a page; ``asked``: the request heads that came."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/metrics"
        self.asked: list[bytes] = []

    def targets(self) -> list[str]:
        return [head.split(b" ", 2)[1].decode() for head in self.asked]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[Pages]:
    """Answers every request with ``answer(target, writer)`` until it returns, then closes the connection."""
    pages: Pages
    open_: set[asyncio.Task[None]] = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open_.add(task)
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            pages.asked.append(head)
            await answer(head.split(b" ", 2)[1], writer)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            open_.discard(task)
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    pages = Pages(server.sockets[0].getsockname()[1])
    try:
        yield pages
    finally:
        server.close()
        for task in open_:
            task.cancel()
        await asyncio.sleep(0)


def raw(data: bytes) -> Answer:
    """The same bytes to everyone."""

    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return answer


def page(body: bytes, *fields: str, status: str = "200 OK") -> Answer:
    """A whole answer."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *fields]
    return raw("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
