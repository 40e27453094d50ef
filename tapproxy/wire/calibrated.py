"""The calibrated stream: events that say themselves when they were sent, so that every stamp's error is known.

Rules here: the stamp is CLOCK_MONOTONIC, read immediately before the event's own write, one write and one HTTP chunk an
event; all events of a stream are of one size. The schedule travels in the request's body, which no proxy rewrites.
The events look like an OpenAI stream, so that whoever measures streams measures these. Stamps of two hosts cannot be
compared, those of two processes of one host can.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import Final, NamedTuple, cast

import orjson

from tapproxy.core.http1 import BodyReader, Refusal, head_end, parse_request
from tapproxy.wire.fetch import Client, Fetched

TARGET: Final = "/v1/chat/completions"
MODEL: Final = "calibrated"
_MAX_REQUEST_BYTES: Final = 64 * 1024
_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
END: Final = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_BAD_REQUEST: Final = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
_STAMPED: Final = re.compile(rb'"sent_ns": *(\d+)[^\n]*\n\n')


@dataclass(frozen=True, slots=True)
class Schedule:
    """When one stream's events are sent: the first ``first_ns`` after the request is complete."""

    events: int = 50
    interval_ns: int = 10_000_000
    first_ns: int = 0
    event_bytes: int = 230

    def body(self) -> bytes:
        """The request's body that asks for it."""
        return orjson.dumps({"model": MODEL, "stream": True, "calibrated": asdict(self)})

    @classmethod
    def of_body(cls, body: bytes) -> Schedule:
        """Raises ValueError where the body asks for no calibrated stream, or for one beyond reason."""
        document = orjson.loads(body)
        asked = document.get("calibrated") if isinstance(document, dict) else None
        if not isinstance(asked, dict):
            raise ValueError("the body asks for no calibrated stream")
        values = {item.name: asked.get(item.name, item.default) for item in fields(cls)}
        for name, most in (("events", 100_000), ("interval_ns", 10**10), ("first_ns", 10**10), ("event_bytes", 65536)):
            if not isinstance(values[name], int) or not 0 <= values[name] <= most:
                raise ValueError(f"{name} is {values[name]!r}: expected 0 to {most}")
        return cls(**values)


class Timed(NamedTuple):
    """One calibrated event as a client had it. Absolute CLOCK_MONOTONIC ns; ``end_offset``: in the body."""

    end_offset: int
    sent_ns: int
    arrived_ns: int
    read_at_ns: int


async def ask(client: Client, schedule: Schedule, target: str = TARGET) -> Fetched:
    """Asks for one stream and reads it to its end."""
    return await client.fetch("POST", target, [(b"Content-Type", b"application/json")], schedule.body())


def timed_events(fetched: Fetched) -> list[Timed]:
    """The stamped events of an answer, each with the stamps of the read that brought its end."""
    out, reads, end = [], iter(fetched.reads), 0
    read = None
    for match in _STAMPED.finditer(fetched.body):
        while read is None or end < match.end():
            read = next(reads)
            end += len(read.body)
        out.append(Timed(match.end(), int(match[1]), read.arrived_ns, read.read_at_ns))
    return out


class CalibratedServer:
    """An upstream of one's own, on loopback, that answers every request with the stream it asks for."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.port = 0
        self.now_ns = now_ns
        self._server: asyncio.Server | None = None
        self.connections: set[_Connection] = set()
        self.streams = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listens on a free port. Raises OSError where there is none."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Ends every stream."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.transport.abort()
        await asyncio.sleep(0)


class _Connection(asyncio.Protocol):
    """One connection: a request, its stream, the next request."""

    def __init__(self, server: CalibratedServer) -> None:
        self._server = server
        self._buffer = b""
        self._body = b""
        self._reader: BodyReader | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # Every event is written at once and alone, or its stamp would be early.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) + len(self._body) > _MAX_REQUEST_BYTES:
            self._refuse()
        elif self._timer is None:
            self._take()

    def _take(self) -> None:
        if self._reader is None:
            end = head_end(self._buffer)
            if end < 0:
                return
            head = parse_request(self._buffer[:end])
            if isinstance(head, Refusal):
                self._refuse()
                return
            self._buffer, self._reader, self._body = self._buffer[end:], BodyReader.of(head), b""
        _, payload, self._buffer = self._reader.feed(self._buffer)
        self._body += payload
        if self._reader.error is not None:
            self._refuse()
        elif self._reader.done:
            self._reader = None
            self._answer(self._body)

    def _refuse(self) -> None:
        self.transport.write(_BAD_REQUEST)
        self.transport.close()

    def _answer(self, body: bytes) -> None:
        try:
            schedule = Schedule.of_body(body)
        except ValueError:
            self._refuse()
            return
        self._server.streams += 1
        before, after = event_parts(f"calibrated-{self._server.streams}", schedule.event_bytes)
        self.transport.write(_HEAD)
        self._next(schedule, before, after, 0, self._server.now_ns() + schedule.first_ns)

    def _next(self, schedule: Schedule, before: bytes, after: bytes, number: int, due_ns: int) -> None:
        """Sends what is due, waits for the rest."""
        now_ns = self._server.now_ns
        write = self.transport.write
        while number < schedule.events and due_ns <= now_ns():
            write(b"%s%19d%s" % (before, now_ns(), after))
            number += 1
            due_ns += schedule.interval_ns
        if number < schedule.events:
            wait_s = max(0.0, (due_ns - now_ns()) / 1e9)
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(wait_s, self._next, schedule, before, after, number, due_ns)
            return
        self._timer = None
        write(END)
        if self._buffer:
            self._take()


def event_parts(stream_id: str, event_bytes: int) -> tuple[bytes, bytes]:
    """The chunk of one event around its stamp of nineteen places; the event has ``event_bytes`` bytes, if it can."""
    start = (
        f'data: {{"id":"{stream_id}","object":"chat.completion.chunk","model":"{MODEL}",'
        '"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}],"sent_ns":'
    ).encode()
    pad = b"." * max(0, event_bytes - len(start) - 19 - len(b',"pad":""}\n\n'))
    end = b',"pad":"%s"}\n\n' % pad
    return b"%x\r\n%s" % (len(start) + 19 + len(end), start), end + b"\r\n"
