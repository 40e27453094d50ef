"""The desk for traces: takes OTLP over HTTP at ``POST /v1/traces``, and keeps a flood of it from hurting anybody.

Rules here: a body is bounded before and after it is unpacked; bodies that wait are bounded together; reading happens
in one thread, one body at a time, and takes no more than a share of a core. What is not taken is counted, said in the
answer, and shown at /metrics and /api/status. A refusal is one sentence of plain text.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from tapproxy.core.sample import Sample

MOST_BODY_BYTES: Final = 4 << 20
MOST_INFLATED_BYTES: Final = 16 << 20
# Python's objects take some twenty times the text of JSON; what protobuf takes is walked through in place.
MOST_JSON_BYTES: Final = 4 << 20
# Bodies that wait or are being received, together.
MOST_WAITING_BYTES: Final = 32 << 20
# An engine finishes some hundred requests a second; exporters send what gathered over five seconds at once.
SPANS_PER_S: Final = 2_000
SPANS_AT_ONCE: Final = 20_000
# Of one core, for reading spans; the traffic has the rest. At once: what a few large bodies take.
CPU_SHARE: Final = 0.2
CPU_AT_ONCE_S: Final = 2.0
RECEIVE_S: Final = 30.0
# A client that is refused within its body reads the answer only when it has sent the rest.
_MOST_DRAINED_BYTES: Final = 64 << 20
# Exporters write one; each costs a copy of what follows it.
_MOST_MEMBERS: Final = 16
_RETRY: Final = {"retry-after": "1"}

TYPES: Final = {"application/x-protobuf": False, "application/json": True}


class TakenSpans(Protocol):
    """What reading a body gave."""

    @property
    def samples(self) -> list[Sample]: ...
    @property
    def foreign(self) -> int: ...
    @property
    def beyond(self) -> int: ...


class Reply(NamedTuple):
    """What a request for /v1/traces is answered with."""

    status: int
    body: bytes
    headers: dict[str, str]


@dataclass(slots=True)
class TraceCounts:
    """Since the start. Spans: ``taken``, ``foreign`` (of services that tell no engine's times), ``over_rate`` (more
    than are taken a second). Bodies: ``bodies``, ``refused`` by the word for why."""

    bodies: int = 0
    taken: int = 0
    foreign: int = 0
    over_rate: int = 0
    refused: dict[str, int] = field(default_factory=dict)


class _Bucket:
    """Fills by ``rate`` a second up to ``most``."""

    def __init__(self, rate: float, most: float, now: Callable[[], float]) -> None:
        self._rate, self._most, self._now = rate, most, now
        self._level, self._at = most, now()

    def level(self) -> float:
        now = self._now()
        self._level = min(self._most, self._level + self._rate * (now - self._at))
        self._at = now
        return self._level

    def take(self, amount: float) -> None:
        """May leave a debt, which is filled up first."""
        self._level = self.level() - amount


class _Refused(Exception):
    """``word`` for the count, one sentence for the client."""

    def __init__(self, status: int, word: str, why: str) -> None:
        super().__init__(why)
        self.status, self.word = status, word


class TraceDesk:
    """The admin port's side of OTLP.

    ``read(body, json, most)`` reads spans and raises ValueError, in one sentence, where they are none; ``answer(count,
    why, json)`` makes the response for so many that were not taken; ``on_samples`` gets what was read, in the loop.
    """

    def __init__(
        self,
        read: Callable[[bytes, bool, int], TakenSpans],
        answer: Callable[[int, str, bool], bytes],
        on_samples: Callable[[list[Sample]], None],
        now: Callable[[], float] = time.monotonic,
        cpu_at_once_s: float = CPU_AT_ONCE_S,
    ) -> None:
        self.counts = TraceCounts()
        self._read, self._answer, self._on_samples = read, answer, on_samples
        self._spans = _Bucket(SPANS_PER_S, SPANS_AT_ONCE, now)
        self._cpu = _Bucket(CPU_SHARE, cpu_at_once_s, now)
        self._waiting_bytes = 0
        self._thread = ThreadPoolExecutor(1, "tapproxy-traces")

    def close(self) -> None:
        """What waits is not read any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def status(self) -> dict[str, object]:
        """For /api/status."""
        counts = self.counts
        return {
            "bodies": counts.bodies,
            "taken": counts.taken,
            "foreign": counts.foreign,
            "over_rate": counts.over_rate,
            "refused": dict(counts.refused),
        }

    async def take(self, headers: Mapping[str, str], chunks: AsyncIterator[bytes]) -> Reply:
        """Answers one request. ``headers`` by lower-case name."""
        self.counts.bodies += 1
        try:
            json = _is_json(headers)
            unpack = _is_packed(headers)
            return await self._receive(headers, chunks, json=json, unpack=unpack)
        except _Refused as refused:
            self.counts.refused[refused.word] = self.counts.refused.get(refused.word, 0) + 1
            await _drain(chunks)
            retry = _RETRY if refused.status in (429, 503) else {}
            text = f"{refused}\n".encode()
            return Reply(refused.status, text, {"content-type": "text/plain; charset=utf-8", **retry})

    async def _receive(
        self, headers: Mapping[str, str], chunks: AsyncIterator[bytes], *, json: bool, unpack: bool
    ) -> Reply:
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:12]) > MOST_BODY_BYTES:
            raise _too_long(MOST_BODY_BYTES)
        if self._cpu.level() <= 0:
            raise _Refused(429, "busy", "reading spans takes more than its share of the CPU: send them again later")
        body = bytearray()
        try:
            async with asyncio.timeout(RECEIVE_S):
                async for chunk in chunks:
                    self._waiting_bytes += len(chunk)
                    body += chunk
                    if len(body) > MOST_BODY_BYTES:
                        raise _too_long(MOST_BODY_BYTES)
                    if self._waiting_bytes > MOST_WAITING_BYTES:
                        raise _Refused(503, "busy", "too many spans wait to be read: send them again later")
            return await self._take(bytes(body), json=json, unpack=unpack)
        except TimeoutError:
            raise _Refused(408, "slow", f"the body did not come within {RECEIVE_S:g} s") from None
        finally:
            self._waiting_bytes -= len(body)

    async def _take(self, body: bytes, *, json: bool, unpack: bool) -> Reply:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._thread, self._in_thread, body, json, unpack)
        counts = self.counts
        counts.taken += len(found.samples)
        counts.foreign += found.foreign
        counts.over_rate += found.beyond
        if found.samples:
            self._on_samples(found.samples)
        why = f"more than {SPANS_PER_S} spans a second are not kept" if found.beyond else ""
        media = "application/json" if json else "application/x-protobuf"
        return Reply(200, self._answer(found.beyond, why, json), {"content-type": media})

    def _in_thread(self, body: bytes, json: bool, unpack: bool) -> TakenSpans:
        """Reads a body, at the expense of both buckets, which nobody else takes from."""
        began_s = time.thread_time()
        try:
            if unpack:
                body = _inflate(body, MOST_INFLATED_BYTES)
            if json and len(body) > MOST_JSON_BYTES:
                raise _too_long(MOST_JSON_BYTES, " for JSON")
            found = self._read(body, json, max(0, int(self._spans.level())))
            self._spans.take(len(found.samples))
            return found
        except ValueError as error:
            raise _Refused(400, "unreadable", str(error)) from None
        finally:
            self._cpu.take(time.thread_time() - began_s)


def _is_json(headers: Mapping[str, str]) -> bool:
    given = headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in TYPES:
        raise _Refused(415, "type", f"content-type is {given[:80]!r}: expected {' or '.join(TYPES)}")
    return TYPES[given]


def _is_packed(headers: Mapping[str, str]) -> bool:
    given = headers.get("content-encoding", "").strip().lower()
    if given not in ("", "identity", "gzip"):
        raise _Refused(415, "type", f"content-encoding is {given[:80]!r}: expected gzip or none")
    return given == "gzip"


def _too_long(most_bytes: int, what: str = "") -> _Refused:
    why = f"the body is longer than {most_bytes >> 20} MiB{what}: let the exporter send smaller batches"
    return _Refused(413, "too_long", why)


def _inflate(body: bytes, most_bytes: int) -> bytes:
    """Unpacks gzip, never more than ``most_bytes`` of it."""
    out = bytearray()
    rest = body
    for _ in range(_MOST_MEMBERS):
        unpacker = zlib.decompressobj(wbits=31)
        try:
            out += unpacker.decompress(rest, most_bytes + 1 - len(out))
        except zlib.error:
            raise _Refused(400, "unreadable", "the body is no gzip, though content-encoding says so") from None
        if len(out) > most_bytes:
            raise _too_long(most_bytes, " unpacked")
        if not unpacker.eof:
            raise _Refused(400, "unreadable", "the gzip of the body is cut short")
        rest = unpacker.unused_data
        if not rest:
            return bytes(out)
    raise _Refused(400, "unreadable", f"the gzip of the body has more than {_MOST_MEMBERS} members")


async def _drain(chunks: AsyncIterator[bytes]) -> None:
    left = _MOST_DRAINED_BYTES
    try:
        async with asyncio.timeout(RECEIVE_S):
            async for chunk in chunks:
                left -= len(chunk)
                if left < 0:
                    return
    except TimeoutError:
        pass
