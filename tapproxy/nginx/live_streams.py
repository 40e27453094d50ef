"""The streams that a live check sends through nginx, and what each of them showed.

Rules here: the standard load, and the thresholds by which a stream counts as held, are those of the measurements that
the predictions rest on (40 events of 210 B, 20 ms apart, the first after 100 ms). Both sides' stamps are of one clock:
the engine's just before its write, the client's of the read that brought an event's end (the kernel's where it gives
one). The clients ask for gzip, as those of the usual libraries do. Unknown is None.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from tapproxy.nginx.live_engine import DONE, TARGET, Answer, Engine, Seen, steady
from tapproxy.wire.fetch import Client, Fetched
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

HELD_MAX_MS: Final = 12.0
HELD_P50_MS: Final = 8.0
HELD_COALESCED: Final = 0.1
LATE_HEADER_SHARE: Final = 0.5
_NUMBER: Final = re.compile(rb'"n":(\d{7}),"pad":"[^"]*"\}\n\n')


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


@dataclass(frozen=True, slots=True)
class Stream:
    """What came of one stream."""

    status: int | None
    error: str | None
    complete: bool
    hold_ms: tuple[float, ...]
    coalesced: float | None
    header_delay_ms: float | None
    ttft_added_ms: float | None
    encoding: str | None
    client_reused: bool
    seen: Seen

    @property
    def hold_p50_ms(self) -> float | None:
        """The median hold."""
        return median(self.hold_ms) if self.hold_ms else None

    @property
    def hold_max_ms(self) -> float | None:
        """The longest hold."""
        return max(self.hold_ms, default=None)

    @property
    def cut(self) -> bool:
        """Whether an answer began and was broken off."""
        return self.status == 200 and not self.complete and not self.timed_out

    @property
    def timed_out(self) -> bool:
        """Whether we gave up waiting, long after the engine had sent all."""
        return self.error is not None and self.error.startswith("timeout")

    @property
    def held(self) -> bool:
        """The corpus' criterion."""
        if not self.hold_ms or self.coalesced is None:
            return False
        return max(self.hold_ms) >= HELD_MAX_MS and (
            self.coalesced >= HELD_COALESCED or median(self.hold_ms) >= HELD_P50_MS
        )

    @property
    def streaming(self) -> str:
        """The contract's word for it."""
        if self.status == 200 and self.timed_out and self.seen.finished:
            return "held"
        if self.status != 200 or not self.complete or self.seen.method != "POST":
            return "fails"
        if self.held:
            return "held"
        # A header that is not sent at once leaves with the first event.
        first_ms = self.seen.answer.events[0][0]
        late = self.header_delay_ms is not None and self.header_delay_ms >= first_ms * LATE_HEADER_SHARE
        return "late_header" if late else "streams"

    def to_dict(self) -> dict[str, Any]:
        """The keys that every stream of the result has."""
        return {
            "streaming": self.streaming,
            "hold_ms": {"p50": rounded(self.hold_p50_ms), "max": rounded(self.hold_max_ms)},
            "header_delay_ms": rounded(self.header_delay_ms),
            "ttft_added_ms": rounded(self.ttft_added_ms),
            "coalesced": rounded(self.coalesced),
            "content_encoding": self.encoding,
            "status": self.status,
            "error": self.error,
        }


def rounded(value: float | None) -> float | None:
    """To the microsecond, where the value is in ms."""
    return None if value is None else round(value, 3)


def _arrivals(fetched: Fetched, gzip: bool) -> Iterator[tuple[int, int, int]]:
    """(event, when its end arrived, in which read), with what compressed it undone; and -1 for the end's mark."""
    unzip = zlib.decompressobj(wbits=47) if gzip else None
    text = b""
    at = 0
    done = False
    for index, read in enumerate(fetched.reads):
        try:
            text += read.body if unzip is None else unzip.decompress(read.body)
        except zlib.error:
            return
        for match in _NUMBER.finditer(text, at):
            at = match.end()
            yield int(match[1]), read.arrived_ns, index
        if not done and text.find(DONE, at) >= 0:
            done = True
            yield -1, read.arrived_ns, index


def stream_of(fetched: Fetched, seen: Seen, *, one_way_ms: float = 0.0) -> Stream:
    """The stream from both sides' stamps. ``one_way_ms``: the link's share of each hold."""
    encoding = next((value for name, value in fetched.headers if name.lower() == b"content-encoding"), None)
    arrivals = list(_arrivals(fetched, encoding == b"gzip"))
    complete = fetched.error is None and any(number == -1 for number, _, _ in arrivals)
    events = [one for one in arrivals if 0 <= one[0] < len(seen.sent_ns)]
    # A kernel stamp is converted wall time: of two stamps within a microsecond either may come first.
    hold_ms = [max(0.0, (at_ns - seen.sent_ns[number]) / 1e6 - one_way_ms) for number, at_ns, _ in events]
    first = next((hold for hold, one in zip(hold_ms, events, strict=True) if one[0] == 0), None)
    upload_end_ns = fetched.write_end_ns or fetched.write_start_ns
    lag_ms = _between_ms(upload_end_ns, seen.complete_ns)
    header_ms = _between_ms(seen.header_ns, fetched.head_ns)
    reads = len({index for _, _, index in events})
    return Stream(
        status=fetched.status,
        error=fetched.error,
        complete=complete,
        hold_ms=tuple(hold_ms),
        coalesced=(len(events) - reads) / (len(events) - 1) if len(events) > 1 else None,
        header_delay_ms=None if header_ms is None else max(0.0, header_ms - one_way_ms),
        ttft_added_ms=None if lag_ms is None or first is None else max(0.0, lag_ms - one_way_ms) + first,
        encoding=None if encoding is None else encoding.decode("latin-1"),
        client_reused=fetched.reused,
        seen=seen,
    )


def _between_ms(before_ns: int | None, after_ns: int | None) -> float | None:
    return None if before_ns is None or after_ns is None else (after_ns - before_ns) / 1e6


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

    after_events: int
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
        return Abort(after_events, None if seen.closed_ns is None else max(0.0, (seen.closed_ns - left_ns) / 1e6))
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
