"""``tapproxy serve --self-test``: what this tap adds and how wrong its stamps are, measured before it takes traffic.

A calibrated stream, whose events say when they were sent, goes through a worker process and, at the same time, past it.
The worker is a temporary one, started by the supervisor's own means with the tap's own settings; only its upstream is
another, since a worker's upstream is fixed: the calibrated server of this process. So what is measured is the process
that will carry traffic (its loop, its sockets, TLS on the listener, --ack-stamps), on this machine, as it is now. One
worker stands for all of ``--workers``: they share a listening socket and nothing else. What the way to a real upstream
costs (TLS, a distance) is not in it. No record of it is stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson

from tapproxy.core import frames, metrics, stats
from tapproxy.core.errors import MeasureError
from tapproxy.core.record import Record
from tapproxy.supervisor import Supervisor, WorkerProcess, start_worker
from tapproxy.wire.calibrated import CalibratedServer, Schedule, Timed, ask, timed_events
from tapproxy.wire.fetch import Client, Fetched

# A P99 needs 662 values (core.stats); where the machine is so slow that time runs out, TTFT has none.
STREAMS: Final = 16
EVENTS: Final = 50
REQUESTS: Final = 670
REQUESTS_S: Final = 1.2
INTERVAL_NS: Final = 10_000_000
_WARM_UP: Final = 10
_START_S: Final = 20.0
_ANSWER_S: Final = 5.0
_RECORDS_S: Final = 5.0
_STOP_S: Final = 5.0
_SHORT: Final = Schedule(events=1)


class _TemporaryWorker:
    """The worker that is measured, as its parent has it."""

    def __init__(self, started: WorkerProcess) -> None:
        self.records: list[Record] = []
        self._process, self._sock = started
        self._reader = frames.FrameReader()
        self._ready = False
        self._ended = False
        self._news = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._sock.fileno(), self._read)

    def _read(self) -> None:
        try:
            data = self._sock.recv(1 << 18)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._ended = True
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
        for kind, body in self._reader.feed(data):
            if kind == frames.RECORD:
                self.records.append(Record.from_dict(orjson.loads(body[frames.ID_BYTES :])))
            elif kind == frames.READY:
                self._ready = True
        self._news.set()

    async def ready(self) -> None:
        """Raises MeasureError where it ends instead."""
        await self._until(lambda: self._ready, _START_S, "did not start")

    async def recorded(self, count: int) -> None:
        """Waits for that many records in all. Raises MeasureError where they do not come."""
        await self._until(lambda: len(self.records) >= count, _RECORDS_S, f"did not write {count} records")

    async def _until(self, condition: Callable[[], bool], limit_s: float, failure: str) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    if self._ended:
                        raise MeasureError("the self-test's worker ended by itself; what it said stands above")
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise MeasureError(f"the self-test's worker {failure} within {limit_s:g} s") from None

    async def stop(self) -> None:
        """Ends the process, whatever state it is in."""
        if not self._ended:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
        self._sock.close()
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, _STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


async def self_test(supervisor: Supervisor) -> dict[str, Any]:
    """The figures, in ns; see ``figures``. Raises MeasureError where nothing can be measured."""
    began_ns = time.monotonic_ns()
    async with contextlib.AsyncExitStack() as stack:
        server, listener = CalibratedServer(), socket.socket()
        stack.callback(listener.close)
        stack.push_async_callback(server.close)
        try:
            await server.start()
            listener.bind(("127.0.0.1", 0))
            listener.listen(256)
            listener.setblocking(False)
            # The limits are for real upstreams.
            own = {"upstream": server.url, "head_timeout_s": None, "idle_timeout_s": None}
            worker = _TemporaryWorker(start_worker(listener, supervisor.settings(0) | own))
        except OSError as error:
            raise MeasureError(f"the self-test cannot start: {error.strerror or error}") from None
        stack.push_async_callback(worker.stop)
        await worker.ready()
        scheme = "http" if supervisor.config.tls_cert is None else "https"
        urls = (server.url, f"{scheme}://127.0.0.1:{listener.getsockname()[1]}")
        direct, tapped = (Client(url, insecure=True, timeout_s=_ANSWER_S) for url in urls)
        for client in (direct, tapped):
            stack.push_async_callback(client.close)
        short = await _alternating(direct, tapped)
        streams = await _streams(direct, tapped)
        await worker.recorded(len(short[1]) + len(streams[1]) + _WARM_UP)
        return figures(short, streams, worker.records) | {"took_ns": time.monotonic_ns() - began_ns}


async def _alternating(direct: Client, tapped: Client) -> tuple[list[Fetched], list[Fetched]]:
    """Requests for one event, one at a time, by turns: without the tap and through it."""
    for _ in range(_WARM_UP):
        for client in (direct, tapped):
            _checked(await ask(client, _SHORT))
    out: tuple[list[Fetched], list[Fetched]] = ([], [])
    until = time.monotonic() + REQUESTS_S
    for number in range(REQUESTS):
        pairs = ((direct, out[0]), (tapped, out[1]))
        for client, fetched in pairs if number % 2 else reversed(pairs):
            fetched.append(_checked(await ask(client, _SHORT)))
        if time.monotonic() > until:
            break
    return out


async def _streams(direct: Client, tapped: Client) -> tuple[list[Fetched], list[Fetched]]:
    """Streams without the tap and through it, all at the same time, their events spread evenly."""
    apart_ns = INTERVAL_NS // (2 * STREAMS)

    def schedule(number: int) -> Schedule:
        return Schedule(EVENTS, INTERVAL_NS, INTERVAL_NS + number * apart_ns)

    fetched = await asyncio.gather(
        *(ask((direct, tapped)[number % 2], schedule(number)) for number in range(2 * STREAMS))
    )
    for one in fetched:
        _checked(one)
    return list(fetched[::2]), list(fetched[1::2])


def _checked(fetched: Fetched) -> Fetched:
    if fetched.error is not None or fetched.status != 200:
        what = fetched.error or f"status {fetched.status}"
        raise MeasureError(f"the self-test's stream did not come through: {what}")
    return fetched


def figures(
    short: tuple[Sequence[Fetched], Sequence[Fetched]],
    streams: tuple[Sequence[Fetched], Sequence[Fetched]],
    records: Sequence[Record],
) -> dict[str, Any]:
    """What the fetches (without the tap, through it) and the tap's records of them come to.

    Each figure has ``p50_ns`` and ``p99_ns`` (nearest rank; None where there are too few, see core.stats) and ``n``.
    What is added is a difference of percentiles: of the fetches through the tap less of those without it.
    """
    by_id = {record.response_id: record for record in records}
    pairs = [(by_id[_response_id(one)], timed_events(one)) for one in streams[1]]
    kernel = all(record.stamps.source == "kernel" for record, _ in pairs)
    arrived, read_at, acked = _errors(pairs)
    ttft = [[_ttft_ns(one) for one in side] for side in short]
    one_way = [[event.arrived_ns - event.sent_ns for one in side for event in timed_events(one)] for side in streams]
    own = [record for record, _ in pairs]
    return {
        "stamps": "kernel" if kernel else "user",
        "ttft_direct": _percentiles(ttft[0]),
        "ttft_added": _added(*ttft),
        "event_direct": _percentiles(one_way[0]),
        "event_added": _added(*one_way),
        "queueing": _percentiles([at for record in own for at in metrics.queueing_ns(record)]),
        "forward_delay": _percentiles([at for record in own for at in metrics.forward_delay_ns(record)]),
        "arrived_error": _percentiles(arrived),
        "read_at_error": _percentiles(read_at),
        "acked_after": _percentiles(acked) if acked else None,
        "void": sum(record.void is not None for record in own),
        "streams": len(streams[1]),
    }


def _response_id(fetched: Fetched) -> str:
    """The id in the body, which both sides read."""
    return fetched.body.partition(b'"id":"')[2].partition(b'"')[0].decode("ascii", "replace")


def _ttft_ns(fetched: Fetched) -> int:
    assert fetched.write_start_ns is not None
    return timed_events(fetched)[0].arrived_ns - fetched.write_start_ns


def _errors(pairs: Sequence[tuple[Record, list[Timed]]]) -> tuple[list[int], list[int], list[int]]:
    """Stamp less send stamp, for ``arrived``, ``read_at`` and (where there are any) ``acked``."""
    arrived, read_at, acked = [], [], []
    for record, sent in pairs:
        events, t0_ns = record.events, record.t0_mono_ns
        for index, event in enumerate(sent):
            if events.end_offset[index] != event.end_offset:
                raise MeasureError("the self-test's stream is not what was sent: its events lie elsewhere")
            arrived.append(t0_ns + events.arrived[index] - event.sent_ns)
            read_at.append(t0_ns + events.read_at[index] - event.sent_ns)
            at_ns = None if events.acked is None else events.acked[index]
            if at_ns is not None:
                acked.append(t0_ns + at_ns - event.sent_ns)
    return arrived, read_at, acked


def _percentiles(values: Sequence[int]) -> dict[str, Any]:
    ordered = sorted(values)
    out: dict[str, Any] = {}
    for p in (0.5, 0.99):
        enough = not stats.need(p, len(ordered))
        out[f"p{round(p * 100)}_ns"] = stats.nearest_rank(ordered, p) if enough else None
    return out | {"n": len(ordered)}


def _added(without: Sequence[int], through: Sequence[int]) -> dict[str, Any]:
    base, more = _percentiles(without), _percentiles(through)
    out: dict[str, Any] = {
        key: None if base[key] is None or more[key] is None else more[key] - base[key] for key in ("p50_ns", "p99_ns")
    }
    return out | {"n": more["n"]}


def text(result: dict[str, Any]) -> str:
    """What is printed."""
    stamps = f"{result['stamps']} stamps"
    rows = [
        ("added to TTFT", "ttft_added", "through the tap less without it"),
        ("added to an event", "event_added", "one way, through the tap less without it"),
        ("tap queueing", "queueing", "read_at − arrived"),
        ("forward delay", "forward_delay", "sent − read_at"),
        ("error of arrived", "arrived_error", f"{stamps}; less the event's own send stamp"),
        ("error of read_at", "read_at_error", "what it would be without kernel stamps"),
        ("acknowledged after", "acked_after", "acked less the event's own send stamp"),
    ]
    lines = [f"tapproxy: self-test: {result['streams']} calibrated streams, {result['took_ns'] / 1e9:.1f} s"]
    for label, key, meaning in rows:
        if result[key] is not None:
            found = result[key]
            lines.append(
                f"  {label:18} p50 {_us(found['p50_ns'])}   p99 {_us(found['p99_ns'])}   n {found['n']:4}   {meaning}"
            )
    if result["void"]:
        lines.append(f"  {result['void']} of {result['streams']} streams would be void: this machine is not quiet")
    return "\n".join(lines) + "\n"


def _us(value_ns: int | None) -> str:
    return "too few " if value_ns is None else f"{value_ns / 1000:6.0f} µs"
