"""A measuring HTTP/1.1 client on the tap's own connection: the load generator's, and the tests'.

It never raises for what the network or the server does: ``Fetched.error`` says it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tapproxy.core.address import parse_upstream
from tapproxy.core.http1 import BodyReader, Refusal, ResponseHead, ResponseHeads
from tapproxy.wire.client import Connection, Pool
from tapproxy.wire.origin import authority, tls_context
from tapproxy.wire.reasons import os_reason
from tapproxy.wire.stamps import Clock

# Below uvicorn's and vLLM's 5 s: a connection is never used in the moment the server closes it.
KEEPALIVE_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class Read:
    """The body bytes of one socket read. Stamps are absolute CLOCK_MONOTONIC ns."""

    arrived_ns: int
    read_at_ns: int
    body: bytes


@dataclass(slots=True)
class Fetched:
    """One request and what came of it. Times are absolute CLOCK_MONOTONIC ns, durations ns; None: did not happen."""

    start_ns: int
    dns_ns: int | None = None
    connect_ns: int | None = None
    tls_ns: int | None = None
    reused: bool = False
    write_start_ns: int | None = None
    write_end_ns: int | None = None
    head_ns: int | None = None
    end_ns: int | None = None
    http_version: str | None = None
    status: int | None = None
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    error: str | None = None
    stamps: str = "user"
    rtt_ns: int | None = None
    min_rtt_ns: int | None = None
    retransmits: int | None = None
    segments: int | None = None
    disordered: int | None = None
    clock_step: bool = False
    # When it was left in the middle, by ``enough`` or because it took too long.
    left_ns: int | None = None

    @property
    def body(self) -> bytes:
        """The whole body, framing removed."""
        return b"".join(read.body for read in self.reads)

    def add_connect(self, connection: Connection) -> None:
        """How long the parts of opening a connection took."""
        self.dns_ns, self.connect_ns, self.tls_ns = connection.dns_ns, connection.connect_ns, connection.tls_ns

    def add_facts(self, connection: Connection, clock: Clock) -> None:
        """Whether the wall clock stepped since the start, and what the kernel knows of the connection.

        Of segments sent again for requests at the same time, the first that ends has them all.
        """
        clock.sample()
        self.clock_step = clock.stepped_at_ns is not None and clock.stepped_at_ns >= self.start_ns
        facts = connection.facts()
        if facts is not None:
            self.rtt_ns, self.min_rtt_ns = facts.rtt_ns, facts.min_rtt_ns
            own = facts.since(connection.facts_before)
            self.retransmits, self.segments, self.disordered = own.retransmits, own.segments_in, own.disordered
            connection.facts_before = facts


class Client:
    """Requests to one origin over a pool of kept-alive connections."""

    def __init__(
        self,
        url: str,
        *,
        insecure: bool = False,
        ca_file: Path | str | None = None,
        timeout_s: float | None = None,
        connect_timeout_s: float | None = 10.0,
        fresh: bool = False,
    ) -> None:
        """``fresh``: a new connection for every request.

        Raises ConfigError for a URL that is no origin, or a CA file that cannot be read.
        """
        upstream = parse_upstream(url, "the URL")
        self.clock = Clock()
        self.timeout_s = timeout_s
        self.fresh = fresh
        self.authority = authority(upstream).encode("ascii")
        self._pool = Pool(
            upstream,
            self.clock,
            tls=tls_context(upstream, insecure=insecure, ca_file=ca_file),
            keepalive_s=KEEPALIVE_S,
            connect_timeout_s=connect_timeout_s,
        )

    async def fetch(
        self,
        method: str,
        target: str,
        headers: list[tuple[bytes, bytes]] | None = None,
        body: bytes = b"",
        *,
        slowly: Sequence[tuple[float, bytes]] = (),
        enough: Callable[[Fetched], bool] | None = None,
    ) -> Fetched:
        """Sends one request and reads its answer to the end. Host and Content-Length are added where missing.

        ``slowly``: the rest of the body, each piece so many seconds after the one before it. ``enough``: asked after
        each read of the body; True leaves the answer there, by closing the connection.
        """
        self.clock.sample()
        fetched = Fetched(time.monotonic_ns())
        connection = self._pool.take()
        fetched.reused = connection is not None
        if connection is None:
            try:
                connection = self._pool.open_now() or await self._pool.open()
            except (OSError, ssl.SSLError, TimeoutError) as error:
                fetched.error = f"connect: {os_reason(error)}"
                return fetched
            fetched.add_connect(connection)
        fetched.stamps = "kernel" if connection.kernel_stamps else "user"
        call = _Call(connection, fetched, method.encode("ascii"), enough)
        fetched.write_start_ns = time.monotonic_ns()
        connection.attach(call)
        size = len(body) + sum(len(piece) for _, piece in slowly)
        if connection.write(self._request(method, target, headers or [], body, size)):
            fetched.write_end_ns = time.monotonic_ns()
        try:
            async with asyncio.timeout(self.timeout_s):
                for pause_s, piece in slowly:
                    await asyncio.wait({call.done}, timeout=pause_s)
                    if call.done.done():
                        break
                    if connection.write(piece):
                        fetched.write_end_ns = time.monotonic_ns()
                await call.done
        except TimeoutError:
            fetched.error = f"timeout: no complete answer within {self.timeout_s:g} s"
            connection.close()
            fetched.left_ns = time.monotonic_ns()
            return fetched
        except asyncio.CancelledError:
            connection.close()
            raise
        fetched.add_facts(connection, self.clock)
        if call.reusable and not self.fresh:
            self._pool.give(connection)
        else:
            connection.close()
        if call.left:
            fetched.left_ns = time.monotonic_ns()
        return fetched

    def _request(self, method: str, target: str, headers: list[tuple[bytes, bytes]], body: bytes, size: int) -> bytes:
        names = {name.lower() for name, _ in headers}
        lines = [f"{method} {target} HTTP/1.1".encode("ascii")]
        if b"host" not in names:
            lines.append(b"Host: " + self.authority)
        lines += [name + b": " + value for name, value in headers]
        if b"content-length" not in names and (size or method in ("POST", "PUT", "PATCH")):
            lines.append(b"Content-Length: %d" % size)
        lines.append(b"\r\n" + body)
        return b"\r\n".join(lines)

    async def close(self) -> None:
        """Closes every connection."""
        self._pool.close()


class _Call:
    """One answer being read: the sink of its connection."""

    def __init__(
        self, connection: Connection, fetched: Fetched, method: bytes, enough: Callable[[Fetched], bool] | None = None
    ) -> None:
        self.done: asyncio.Future[None] = connection.loop.create_future()
        self.reusable = False
        self.left = False
        self._enough = enough
        self._fetched = fetched
        self._heads = ResponseHeads(method)
        self._head: ResponseHead | None = None
        self._body: BodyReader | None = None

    def upstream_bytes(self, data: bytes, arrived_ns: int, read_at_ns: int) -> None:
        fetched = self._fetched
        body = self._body
        if body is None:
            found = self._read_head(data, arrived_ns)
            if found is None:
                return
            body, data = found
        _, payload, rest = body.feed(data)
        if payload:
            fetched.reads.append(Read(arrived_ns, read_at_ns, payload))
        if body.done:
            fetched.end_ns = arrived_ns
            self.reusable = not rest and self._head is not None and self._head.keep_alive
            self._finish(None)
        elif body.error is not None:
            self._finish("malformed: " + body.error)
        elif payload and self._enough is not None and self._enough(fetched):
            self.left = True
            self._finish(None)

    def _read_head(self, data: bytes, arrived_ns: int) -> tuple[BodyReader, bytes] | None:
        heads = self._heads
        heads.feed(data)
        while (head := heads.take()) is not None:
            if isinstance(head, Refusal):
                self._finish("malformed: " + head.reason)
                return None
            if head.status >= 200:
                break
        else:
            return None
        body = BodyReader.of(head)
        self._head, self._body = head, body
        fetched = self._fetched
        fetched.head_ns = arrived_ns
        fetched.status = head.status
        fetched.http_version = f"1.{head.version}"
        fetched.headers = [(name, value) for name, value, _ in head.fields]
        return body, heads.rest

    def upstream_closed(self, error: Exception | None) -> None:
        if self._body is not None and error is None and self._body.eof():
            self._fetched.end_ns = time.monotonic_ns()
            self._finish(None)
        elif self._body is None:
            self._finish(f"closed: no answer ({error or 'the server closed the connection'})")
        else:
            self._finish(f"truncated: {error or 'the server closed before the end of the answer'}")

    def upstream_writable(self) -> None:
        self._fetched.write_end_ns = time.monotonic_ns()

    def _finish(self, error: str | None) -> None:
        self._fetched.error = error
        if not self.done.done():
            self.done.set_result(None)
