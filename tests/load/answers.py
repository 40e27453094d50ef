"""A client at the edge that answers as told, in plain numbers: it writes at 100, pieces come every 50."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import orjson

from tapproxy.wire.fetch import Fetched, Read

SSE = [(b"Content-Type", b"text/event-stream")]


def chunk(content: str | None = None, **more: object) -> bytes:
    delta = {"role": "assistant", "content": ""} if content is None else {"content": content}
    choice: dict[str, object] = {"index": 0, "delta": delta, "finish_reason": None}
    return b"data: " + orjson.dumps({"id": "chatcmpl-1", "model": "m", "choices": [choice], **more}) + b"\n\n"


def finish() -> bytes:
    choice = {"index": 0, "delta": {"content": ""}, "finish_reason": "length", "stop_reason": None}
    return b"data: " + orjson.dumps({"id": "chatcmpl-1", "model": "m", "choices": [choice]}) + b"\n\n"


def usage(tokens: int) -> bytes:
    counts = {"prompt_tokens": 72, "completion_tokens": tokens}
    return b"data: " + orjson.dumps({"id": "chatcmpl-1", "model": "m", "choices": [], "usage": counts}) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def pieces(tokens: int = 3) -> list[bytes]:
    """Role, tokens, finish with the last token, usage, [DONE]: one write each."""
    return [chunk(), *(chunk("a") for _ in range(tokens)), usage(tokens), DONE]


def answer(
    body: list[bytes],
    *,
    start_ns: int = 0,
    status: int | None = 200,
    headers: list[tuple[bytes, bytes]] | None = None,
    error: str | None = None,
) -> Fetched:
    """Asked at ``start_ns``, connected 90 later, written 100 later; each piece of the body 50 after the one before."""
    reads = [Read(start_ns + 200 + 50 * i, start_ns + 203 + 50 * i, piece) for i, piece in enumerate(body)]
    return Fetched(
        start_ns=start_ns,
        dns_ns=None,
        connect_ns=40,
        tls_ns=50,
        reused=False,
        write_start_ns=start_ns + 100,
        write_end_ns=start_ns + 110,
        head_ns=start_ns + 150,
        end_ns=reads[-1].arrived_ns if reads and error is None else None,
        http_version="1.1",
        status=status,
        headers=SSE if headers is None else headers,
        reads=reads,
        error=error,
        stamps="kernel",
        rtt_ns=7,
        retransmits=0,
    )


class FakeClient:
    """Keeps what it was asked, and answers when ``hold`` lets it."""

    def __init__(self, reply: Callable[[int], Fetched], log: list[str] | None = None, name: str = "") -> None:
        self.reply = reply
        self.name = name
        self.log = [] if log is None else log
        self.asked: list[tuple[str, str, dict[bytes, bytes], bytes]] = []
        self.hold: asyncio.Event | None = None
        self.under_way = 0
        self.most_under_way = 0

    async def fetch(
        self, method: str, target: str, headers: list[tuple[bytes, bytes]] | None = None, body: bytes = b""
    ) -> Fetched:
        self.log.append(self.name)
        self.asked.append((method, target, dict(headers or []), body))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            if self.hold is not None:
                await self.hold.wait()
            return self.reply(len(self.asked) - 1)
        finally:
            self.under_way -= 1
