"""The streams that a live check sends through nginx for one kind of client.

Rules here: the standard load is that of the measurements that the predictions rest on (40 events of 210 B, 20 ms apart,
the first after 100 ms). The clients ask for gzip, as those of the usual libraries do. What is doubtful is measured
again, alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tapproxy.nginx.live_engine import TARGET, Answer, Engine, Seen, steady
from tapproxy.nginx.live_stream import HELD_MAX_MS, Stream, stream_of
from tapproxy.wire.fetch import Client
from tapproxy.wire.fetch_h2 import H2Client

STANDARD: Final = steady(40, 20)
_SHORT: Final = steady(5, 8, first_ms=20)
_OVER_16_KB: Final = steady(90, 9, first_ms=20)
_LARGE_EVENT_BYTES: Final = 5000
_PAUSE_MS: Final = 400.0
# Three small events, a large one, a pause, a small one: a large event that waits does so as long as the pause.
_LARGE: Final = Answer(((20, 210), (20, 210), (20, 210), (20, _LARGE_EVENT_BYTES), (_PAUSE_MS, 210), (20, 210)))
_DIES: Final = Answer(steady(8, 10, first_ms=20).events, dies=True)
_ABORT_AFTER: Final = 5
_ABORT_WAIT_S: Final = 1.0
_PROMPT: Final = b'{"stream": true}'
_LARGE_PROMPT_BYTES: Final = 2 << 20
_SILENCE_MOST_MS: Final = 10_000
_AHEAD_S: Final = 0.04
_PROBE_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Door:
    """How one kind of client comes in."""

    kind: str
    url: str
    ca_file: Path
    timeout_s: float = 20.0

    def client(self) -> Client | H2Client:
        """A client with no connection yet."""
        make = H2Client if self.kind in ("h2", "h2c") else Client
        return make(self.url, ca_file=self.ca_file, timeout_s=self.timeout_s)


def request_headers(*, gzip: bool) -> list[tuple[bytes, bytes]]:
    """What an API client sends."""
    accepted = b"gzip, deflate" if gzip else b"identity"
    return [
        (b"Content-Type", b"application/json"),
        (b"Accept", b"text/event-stream"),
        (b"Accept-Encoding", accepted),
        (b"User-Agent", b"tapproxy-live"),
    ]


async def ask(
    engine: Engine, client: Client | H2Client, answer: Answer, *, gzip: bool = True, body: bytes = _PROMPT
) -> Stream:
    """One stream over this client."""
    run = engine.expect(answer)
    fetched = await client.fetch("POST", f"{TARGET}?run={run}", request_headers(gzip=gzip), body)
    return stream_of(fetched, engine.seen[run])


async def fresh(engine: Engine, door: Door, answer: Answer, *, gzip: bool = True, body: bytes = _PROMPT) -> Stream:
    """One stream over a connection of its own."""
    client = door.client()
    try:
        return await ask(engine, client, answer, gzip=gzip, body=body)
    finally:
        await client.close()


@dataclass(frozen=True, slots=True)
class Abort:
    """Whether the engine learns that the client has left, and how fast; None: not within a second."""

    reached_ms: float | None


async def abort(engine: Engine, door: Door, *, after_events: int) -> Abort | None:
    """Leaves a stream after some events, or (0) before the first; None where none began."""
    run = engine.expect(steady(60, 20, first_ms=100 if after_events else 1500))
    seen = engine.seen[run]
    client = door.client()
    request = asyncio.create_task(client.fetch("POST", f"{TARGET}?run={run}", request_headers(gzip=True), _PROMPT))
    try:
        began = await _until(
            seen, lambda: seen.header_ns is not None and len(seen.sent_ns) >= after_events, 5.0, request
        )
        if not began:
            return None
        await asyncio.sleep(0.02)  # the last event is on its way
        left_ns = time.monotonic_ns()
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
        await client.close()
        await _until(seen, lambda: seen.closed_ns is not None, _ABORT_WAIT_S)
        return Abort(None if seen.closed_ns is None else max(0.0, (seen.closed_ns - left_ns) / 1e6))
    finally:
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
        await client.close()


async def _until(
    seen: Seen, reached: Callable[[], bool], timeout_s: float, unless: asyncio.Task[Any] | None = None
) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            while not reached():
                seen.changed.clear()
                waits = [asyncio.create_task(seen.changed.wait())]
                done, _ = await asyncio.wait([*waits, *([unless] if unless else [])], return_when="FIRST_COMPLETED")
                waits[0].cancel()
                if unless in done and not reached():
                    return False
    except TimeoutError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Measured:
    """All that was measured for one kind of client."""

    main: Stream
    runs: int
    without_gzip: Stream
    short: Stream
    over_16_kb: Stream
    large_event: Stream
    reused_connection: Stream
    engine_dies: Stream
    silence: Stream | None
    silence_ms: int | None
    large_prompt: Stream
    upstream_reused: bool | None
    abort_decode: Abort | None
    abort_prefill: Abort | None

    @property
    def cut(self) -> bool:
        """Whether the stream, or one with a pause in it, was cut."""
        return self.main.cut or (self.silence is not None and not self.silence.complete and not self.silence.timed_out)


async def measure(engine: Engine, door: Door, *, read_timeout_ms: int | None, expected: str | None) -> Measured:
    """Every stream for one kind of client. ``expected``: the prediction; what differs from it is measured again."""
    reused_client = door.client()
    try:
        reused_client.timeout_s = _PROBE_S
        shorts = [await ask(engine, reused_client, _SHORT)]
        if shorts[0].timed_out:
            return _same(shorts[0])  # so would the others, at their leisure
        reused_client.timeout_s = door.timeout_s
        for _ in range(2):
            await asyncio.sleep(0.02)  # nginx puts its connection to the engine back after the answer has gone
            shorts.append(await ask(engine, reused_client, _SHORT))
        silence_ms = None
        if read_timeout_ms is not None and read_timeout_ms < _SILENCE_MOST_MS:
            silence_ms = read_timeout_ms + 500
        silent = Answer(((50, 210), (20, 210), (float(silence_ms or 0), 210), (20, 210)))
        prompt = b'{"stream": true, "pad": "' + b"." * _LARGE_PROMPT_BYTES + b'"}'
        # Apart from the others: two megabytes through our own loop would delay their events.
        upload = await fresh(engine, door, _SHORT, body=prompt)
        main, reused, plain, long, large, dies, decode, prefill, silence = await _together(
            fresh(engine, door, STANDARD),
            # The others come once the first has been asked: their handshakes would be in its time to first token.
            ask(engine, reused_client, STANDARD),
            fresh(engine, door, STANDARD, gzip=False),
            fresh(engine, door, _OVER_16_KB),
            fresh(engine, door, _LARGE),
            fresh(engine, door, _DIES),
            abort(engine, door, after_events=_ABORT_AFTER),
            abort(engine, door, after_events=0),
            fresh(engine, door, silent) if silence_ms is not None else _none(),
        )
    finally:
        await reused_client.close()
    mains = [main]
    if doubtful(main, expected):
        # Alone on the machine, and the middle one of three: a noisy machine delays, it never speeds up.
        for _ in range(2):
            mains.append(await fresh(engine, door, STANDARD))
    connections = [one.seen.connection for one in shorts]
    return Measured(
        main=sorted(mains, key=lambda one: one.hold_p50_ms if one.hold_p50_ms is not None else -1.0)[len(mains) // 2],
        runs=len(mains),
        without_gzip=plain,
        short=shorts[0],
        over_16_kb=long,
        large_event=large,
        reused_connection=reused,
        engine_dies=dies,
        silence=silence,
        silence_ms=silence_ms,
        large_prompt=upload,
        upstream_reused=None if None in connections else len(set(connections)) < len(connections),
        abort_decode=decode,
        abort_prefill=prefill,
    )


def _same(stream: Stream) -> Measured:
    return Measured(
        main=stream, runs=1, without_gzip=stream, short=stream, over_16_kb=stream, large_event=stream,
        reused_connection=stream, engine_dies=stream, silence=None, silence_ms=None, large_prompt=stream,
        upstream_reused=None, abort_decode=None, abort_prefill=None,
    )  # fmt: skip


async def _together(first: Coroutine[Any, Any, Any], *others: Coroutine[Any, Any, Any]) -> Sequence[Any]:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(first)]
        await asyncio.sleep(_AHEAD_S)
        tasks += [group.create_task(work) for work in others]
    return [task.result() for task in tasks]


async def _none() -> None:
    return None


def doubtful(main: Stream, expected: str | None) -> bool:
    """Whether a stream says other than was predicted, or lies near a threshold."""
    if expected not in (None, "depends") and main.streaming != expected:
        return True
    return not main.held and (main.hold_max_ms or 0.0) >= HELD_MAX_MS
