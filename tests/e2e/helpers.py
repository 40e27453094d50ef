"""A client that is nothing but a socket, and the simulated engine as a process: what the end-to-end proofs share.

Rules here: nothing of the package reads what the client sees (sockets, HTTP framing and events are taken apart by
the crudest means), so that a fault of ours can't hide in the expectation. Loopback only. All times are
CLOCK_MONOTONIC ns, as the tap's are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import ssl
import subprocess
import sys
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

WAIT_S = 20.0
PROMPT = "Please say something."


@dataclass(frozen=True, slots=True)
class Engine:
    """A running simulated engine."""

    port: int
    process: subprocess.Popen[str]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextlib.contextmanager
def engine(*flags: str) -> Iterator[Engine]:
    """Starts ``python -m tapproxy.simulate`` on a free port, and stops it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tapproxy.simulate", "--listen", "127.0.0.1:0", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.fullmatch(r"listening on 127\.0\.0\.1:(\d+)\n", line)
        if match is None:
            process.kill()
            raise AssertionError(f"the engine did not start: {line!r} {process.communicate()[1]!r}")
        yield Engine(int(match[1]), process)
    finally:
        process.terminate()
        try:
            _, stderr = process.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        assert "Traceback" not in stderr, stderr


@dataclass(slots=True)
class Seen:
    """One answer as its client saw it. ``reads``: what each read of the socket returned, and when."""

    start_ns: int
    reads: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def raw(self) -> bytes:
        return b"".join(data for _, data in self.reads)

    @property
    def head(self) -> bytes:
        return self.raw.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"

    @property
    def status(self) -> int:
        return int(self.raw.split(b" ", 2)[1])

    @property
    def chunked(self) -> bool:
        return re.search(rb"(?i)\r\ntransfer-encoding: *chunked\r\n", self.head) is not None

    def events(self) -> list[Event]:
        """The ``data:`` events in order, each with the time and number of the read that held its last byte."""
        raw, found, ends = self.raw, [], []
        total = 0
        for _, data in self.reads:
            total += len(data)
            ends.append(total)
        at, offset = len(self.head), 0
        # (raw position, body position) where each stretch of body begins.
        stretches: list[tuple[int, bytes]] = []
        if self.chunked:
            while True:
                line_end = raw.find(b"\r\n", at)
                size = int(raw[at:line_end], 16) if line_end > 0 else 0
                if size == 0:
                    break
                stretches.append((line_end + 2, raw[line_end + 2 : line_end + 2 + size]))
                at = line_end + 2 + size + 2
        else:
            stretches.append((at, raw[at:]))
        body, places = b"", []
        for place, stretch in stretches:
            places.append((len(body), place))
            body += stretch
        for match in re.finditer(rb"data: ([^\n]*)\n\n", body):
            offset = match.end()  # just past the event
            start, place = places[bisect_left(places, (offset, 0)) - 1]
            read = bisect_left(ends, place + offset - start)
            found.append(Event(match[1], self.reads[read][0], read, offset))
        return found

    def head_ns(self) -> int:
        """When the head was complete."""
        seen = b""
        for at_ns, data in self.reads:
            seen += data
            if b"\r\n\r\n" in seen:
                return at_ns
        raise AssertionError(f"no head in {seen[:200]!r}")


@dataclass(frozen=True, slots=True)
class Event:
    """One ``data:`` event at the client. ``end_offset``: the body offset just past it."""

    data: bytes
    at_ns: int
    read: int
    end_offset: int

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = {} if self.data == b"[DONE]" else json.loads(self.data)
        return value

    @property
    def sent_ns(self) -> int | None:
        """When the engine sent it, as it says itself (``X-Sim-Stamps``)."""
        value: int | None = self.json.get("sim_sent_ns")
        return value

    @property
    def is_token(self) -> bool:
        """Whether it carries text (a finish event of the simulated engine does too, unless it is the end token)."""
        choices = self.json.get("choices") or [{}]
        delta = choices[0].get("delta") or {}
        return bool(delta.get("content") or delta.get("reasoning") or delta.get("tool_calls") or choices[0].get("text"))


def chat(*fields: str, keep: bool = False) -> bytes:
    """A streamed chat request that closes its connection, unless told to keep it; ``fields`` are header lines."""
    document = {
        "model": "sim",
        "messages": [{"role": "user", "content": PROMPT}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    data = json.dumps(document).encode()
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: 127.0.0.1",
        f"Connection: {'keep-alive' if keep else 'close'}",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *fields,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + data


def scheduled(tokens: int, itl_us: int, ttft_us: int) -> tuple[str, ...]:
    """Header lines that make the simulated engine send on a fixed schedule, each event stamped."""
    return (
        "X-Sim-Stamps: 1",
        f"X-Sim-Tokens: {tokens}",
        f"X-Sim-Itl-Us: {itl_us}",
        f"X-Sim-Ttft-Us: {ttft_us}",
    )


async def ask(port: int, request: bytes, *, tls: bool = False) -> Seen:
    """Sends one request on a connection of its own; reads to the end of file. The start is after connecting."""
    async with asyncio.timeout(WAIT_S), Session(port, tls=tls) as session:
        return await session.ask(request)


class Session:
    """One connection, kept for as many requests as one likes."""

    def __init__(self, port: int, *, tls: bool = False) -> None:
        self.port = port
        self.context: ssl.SSLContext | None = None
        if tls:
            self.context = ssl.create_default_context()
            self.context.check_hostname = False
            self.context.verify_mode = ssl.CERT_NONE

    async def __aenter__(self) -> Session:
        self.reader, self.writer = await asyncio.open_connection(
            "127.0.0.1", self.port, ssl=self.context, limit=1 << 20
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()

    async def ask(self, request: bytes) -> Seen:
        """To the last chunk where the request keeps the connection, else to the end of file."""
        keeps = b"\r\nConnection: close\r\n" not in request
        seen = Seen(time.monotonic_ns())
        self.writer.write(request)
        while data := await self.reader.read(1 << 18):
            seen.reads.append((time.monotonic_ns(), data))
            if keeps and data.endswith(b"0\r\n\r\n"):
                break
        return seen


async def crowd(count: int, at_once: int, one: Callable[[int], Awaitable[Seen]]) -> list[Seen]:
    """``count`` requests, ``at_once`` at a time; the answers in the order of their numbers."""
    gate = asyncio.Semaphore(at_once)

    async def gated(number: int) -> Seen:
        async with gate:
            return await one(number)

    return list(await asyncio.gather(*(gated(number) for number in range(count))))


def percentile(values: Sequence[float], p: float) -> float:
    """Nearest rank."""
    ordered = sorted(values)
    return ordered[max(1, math.ceil(len(ordered) * p / 100)) - 1]


def until_quiet(attempt: Callable[[], str | None], tries: int = 3) -> None:
    """Runs ``attempt`` until it has nothing to complain of.

    Accuracy is measured on machines that others use too: a run that was disturbed proves nothing against us, one
    that was not is proof enough. Whatever must hold always is asserted inside the attempt.
    """
    complaints = []
    for _ in range(tries):
        complaint = attempt()
        if complaint is None:
            return
        complaints.append(complaint)
    raise AssertionError(f"none of {tries} runs was good enough: " + "; ".join(complaints))


def tapproxy(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs one command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tapproxy.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "NO_COLOR": "1", "TERM": "dumb", **(environment or {})},
    )
