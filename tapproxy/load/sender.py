"""Sends a plan over its paths and keeps what came back as records.

Rules here:
* Slots start in the plan's order. Each path has an equal part of the concurrency, so that a slow path neither crowds
  out nor trails behind the others.
* Parsing comes after the answer has ended; while it runs, bytes are only stamped.
* A request that failed keeps its class and its record, and no latency is ever taken from it.
* Prompts and answers are not kept.
"""

from __future__ import annotations

import asyncio
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import orjson

from tapproxy.core.eventlog import EventLog
from tapproxy.core.record import STORED_HEADERS, Ended, Record, RequestPart, StampsPart, UpstreamPart
from tapproxy.load.plan import Slot, salted
from tapproxy.wire.fetch import Fetched, Read
from tapproxy.wire.stamps import boot_id

# The classes of definitions.md, in the order they are told apart.
FAILURES: Final = ("connect", "status", "error_event", "truncated", "malformed", "timeout")
# How wire.fetch begins its sentence about what went wrong.
_ERROR_CLASSES: Final = {
    "connect": "connect",
    "timeout": "timeout",
    "malformed": "malformed",
    "closed": "truncated",
    "truncated": "truncated",
}
_ENDED: Final = {
    "connect": Ended.UPSTREAM_UNREACHABLE,
    "timeout": Ended.TIMEOUT,
    "malformed": Ended.UPSTREAM_MALFORMED,
    "truncated": Ended.UPSTREAM_ABORTED,
}
# zlib's window sizes: 31 reads gzip, 15 the zlib format that HTTP calls deflate.
_DECODERS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
# Far above any answer of a load test; a compression bomb stops here.
_MAX_BODY_BYTES: Final = 256 * 1024 * 1024


class Fetches(Protocol):
    """What is needed of ``wire.fetch.Client``."""

    async def fetch(
        self, method: str, target: str, headers: list[tuple[bytes, bytes]] | None = None, body: bytes = b""
    ) -> Fetched: ...


@dataclass(frozen=True, slots=True)
class Ask:
    """How every request of a run is put.

    ``accept_encoding`` is what the usual client libraries offer: a proxy that compresses only for those who offer it
    must meet the load as it meets the users.
    """

    model: str | None = None
    target: str = "/v1/chat/completions"
    headers: tuple[tuple[bytes, bytes], ...] = ()
    accept_encoding: str | None = "gzip, deflate"
    ignore_eos: bool = False
    tap_prefix: str = "client:"
    api: str = "chat"
    # Put in the place of a slot's own prefix, word by word (``plan.salted``); None: the prefix as it is.
    salt: int | None = None
    # Merged into every body, over what is there; as items, so that an Ask can be a key.
    extra: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """One sent slot. ``failure`` is None for a whole answer; ``error`` says in words what went wrong.

    ``due_ns``: when it was to be sent (CLOCK_MONOTONIC), where there is a schedule; the record's ``t0_mono_ns`` is when
    it was sent.
    """

    slot: Slot
    record: Record
    failure: str | None
    error: str | None = None
    due_ns: int | None = None
    # The engine's own word on why the answer ended ("length", "stop"); of several choices, all of them.
    finish_reason: str | None = None


async def run(
    plan: Sequence[Slot],
    clients: Mapping[str, Fetches],
    *,
    concurrency: int = 1,
    ask: Ask | None = None,
    on_progress: Callable[[Result], None] | None = None,
    into: list[Result] | None = None,
) -> list[Result]:
    """Sends every slot, at most ``concurrency`` at once, and returns the results in the plan's order.

    ``into`` receives each result as it comes, so that an interrupted run keeps what it measured.
    """
    ask = ask or Ask()
    results: list[Result] = [] if into is None else into
    gate = _Gate(concurrency, {slot.path for slot in plan})
    boot = boot_id()

    async def one(slot: Slot, key: str) -> None:
        try:
            result = await _send(slot, clients[slot.path], ask, key, boot)
        finally:
            gate.leave(slot.path)
        results.append(result)
        if on_progress is not None:
            on_progress(result)

    async with asyncio.TaskGroup() as group:
        for slot in plan:
            await gate.enter(slot.path)
            if slot.gap_ms:
                await asyncio.sleep(slot.gap_ms / 1000)
            group.create_task(one(slot, str(uuid.uuid4())))
    return sorted(results, key=lambda result: result.slot.index)


class _Gate:
    """Lets slots through in order: ``size`` at once, and of each path its equal part."""

    def __init__(self, size: int, paths: set[str]) -> None:
        size = max(1, size)
        self._all = asyncio.Semaphore(size)
        part = -(-size // max(1, len(paths)))
        self._of_path = {path: asyncio.Semaphore(part) for path in paths}

    async def enter(self, path: str) -> None:
        await self._all.acquire()
        await self._of_path[path].acquire()

    def leave(self, path: str) -> None:
        self._of_path[path].release()
        self._all.release()


def request_body(slot: Slot, ask: Ask) -> bytes:
    """The request of a slot, as chat or as completion."""
    body: dict[str, object] = {
        **_prompt(slot, ask),
        "max_tokens": slot.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    if ask.model is not None:
        body["model"] = ask.model
    if ask.ignore_eos:
        body["ignore_eos"] = True
    body.update(ask.extra)
    return orjson.dumps(body)


def _prompt(slot: Slot, ask: Ask) -> dict[str, object]:
    lead = ""
    if slot.prefix:
        lead = (slot.prefix if ask.salt is None else salted(slot.prefix, ask.salt)) + " "
    if ask.api == "completions":
        return {"prompt": lead + slot.prompt}
    messages = [{"role": role, "content": text} for role, text in slot.messages or (("user", slot.prompt),)]
    # A prefix cache reads from the very beginning, a system message included.
    messages[0]["content"] = lead + messages[0]["content"]
    return {"messages": messages}


async def send(slot: Slot, client: Fetches, ask: Ask) -> tuple[str, bytes, Fetched]:
    """Sends one slot: its request id, its body and what came back. ``result_of`` reads it, later if one likes."""
    body = request_body(slot, ask)
    request_id = str(uuid.uuid4())
    return request_id, body, await client.fetch("POST", ask.target, _fields(ask, request_id), body)


def _fields(ask: Ask, request_id: str) -> list[tuple[bytes, bytes]]:
    headers = [(b"Content-Type", b"application/json"), (b"Accept", b"text/event-stream, application/json")]
    if ask.accept_encoding is not None:
        headers.append((b"Accept-Encoding", ask.accept_encoding.encode("ascii")))
    headers.append((b"X-Request-Id", request_id.encode("ascii")))
    return [*headers, *ask.headers]


async def _send(slot: Slot, client: Fetches, ask: Ask, request_id: str, boot: str | None) -> Result:
    body = request_body(slot, ask)
    fetched = await client.fetch("POST", ask.target, _fields(ask, request_id), body)
    unix_ns, mono_ns = time.time_ns(), time.monotonic_ns()
    return result_of(slot, fetched, ask, request_id, len(body), boot, unix_ns - mono_ns)


def result_of(
    slot: Slot,
    fetched: Fetched,
    ask: Ask,
    request_id: str,
    body_bytes: int,
    boot: str | None,
    wall_offset_ns: int,
    due_ns: int | None = None,
) -> Result:
    """The record of one answer: t0 is the first byte written (c0), or the start where none was written.

    ``due_ns``: when it was to be sent, on the same clock.
    """
    t0_ns = fetched.start_ns if fetched.write_start_ns is None else fetched.write_start_ns

    def since(at_ns: int | None) -> int | None:
        return None if at_ns is None else at_ns - t0_ns

    headers = _headers(fetched)
    log = EventLog(sse=_is_event_stream(headers))
    undecoded = _fill(log, fetched.reads, headers["content-encoding"])
    events = log.finish(t0_ns)
    deltas = log.deltas
    failure, error = _failure(fetched, undecoded, deltas.error, deltas.done or bool(deltas.finish_reasons))
    first = fetched.reads[0].arrived_ns if fetched.reads else None
    record = Record(
        id=uuid.uuid4().hex,
        tap=ask.tap_prefix + slot.path,
        request_id=request_id,
        response_id=deltas.response_id,
        t0_unix_ns=t0_ns + wall_offset_ns,
        t0_mono_ns=t0_ns,
        boot_id=boot,
        client_http=fetched.http_version,
        method="POST",
        path=ask.target.partition("?")[0],
        model=ask.model or deltas.model,
        stream=True,
        status=fetched.status,
        ended=str(_ENDED.get(failure or "", Ended.COMPLETE)),
        request=RequestPart(bytes=body_bytes),
        upstream=UpstreamPart(
            reused=fetched.reused,
            wanted=since(fetched.start_ns),
            dns=fetched.dns_ns,
            connect=fetched.connect_ns,
            tls=fetched.tls_ns,
            write_start=since(fetched.write_start_ns),
            write_end=since(fetched.write_end_ns),
            head=since(fetched.head_ns),
            first_byte=since(first),
            end=since(fetched.end_ns),
            bytes=sum(len(read.body) for read in fetched.reads),
            rtt_ns=fetched.rtt_ns,
            min_rtt_ns=fetched.min_rtt_ns,
            retransmits=fetched.retransmits,
            segments=fetched.segments,
            disordered=fetched.disordered,
        ),
        events=events,
        stamps=StampsPart(source=fetched.stamps, clock_step=fetched.clock_step),
        usage=deltas.usage,
        engine=deltas.engine,
        headers=headers,
        void="clock_step" if fetched.clock_step else None,
        reason=error,
        unread_events=deltas.unread,
        unlogged_events=log.unlogged,
    )
    reasons = sorted(set(deltas.finish_reasons.values()))
    return Result(slot, record, failure, error, due_ns, finish_reason="+".join(reasons) or None)


def _failure(
    fetched: Fetched, undecoded: str | None, error_event: bool, finished: bool
) -> tuple[str | None, str | None]:
    """(class, sentence) of what went wrong, the first thing first."""
    if fetched.error is not None:
        return _ERROR_CLASSES.get(fetched.error.partition(":")[0], "truncated"), fetched.error
    if fetched.status is None or not 200 <= fetched.status < 300:
        return "status", f"status {fetched.status}"
    if error_event:
        return "error_event", "the stream carried an error event"
    if undecoded is not None:
        return "malformed", undecoded
    if not finished:
        # A proxy that turns a broken answer into a cleanly ended one: the engine never said that it was done.
        return "truncated", "the answer ended cleanly, without a finish reason and without [DONE]"
    return None, None


def _headers(fetched: Fetched) -> dict[str, str | None]:
    found = {name.lower().decode("ascii", "replace"): value for name, value in reversed(fetched.headers)}
    return {name: found[name].decode("ascii", "replace") if name in found else None for name in STORED_HEADERS}


def _is_event_stream(headers: Mapping[str, str | None]) -> bool:
    return (headers.get("content-type") or "").partition(";")[0].strip().lower() == "text/event-stream"


def _fill(log: EventLog, reads: Sequence[Read], coding: str | None) -> str | None:
    """Adds the reads, decoded, each with its own stamps. The reason where the body cannot be decoded."""
    coding = (coding or "identity").strip().lower()
    if coding == "identity":
        for read in reads:
            log.add_read(read.body, read.arrived_ns, read.read_at_ns, None)
        return None
    if coding not in _DECODERS:
        return f"the body is encoded as {coding}, which was not offered"
    inflate = zlib.decompressobj(_DECODERS[coding])
    room = _MAX_BODY_BYTES
    try:
        for read in reads:
            body = inflate.decompress(read.body, room)
            room -= len(body)
            if inflate.unconsumed_tail or room <= 0:
                return f"the decoded body is larger than {_MAX_BODY_BYTES} bytes"
            if body:
                log.add_read(body, read.arrived_ns, read.read_at_ns, None)
    except zlib.error as error:
        return f"the body is not {coding}: {error}"
    return None
