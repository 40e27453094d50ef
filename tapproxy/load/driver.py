"""Sends the phases of a plan from this process and keeps what came back.

Rules here: what is due is sent when it is due, whatever else there is to do; answers are read into records when
nothing waits for it, since parsing one costs the time of many sends; the collector of garbage is quiet meanwhile. A
run that is told to stop keeps what has ended by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tapproxy.load.plan import Slot
from tapproxy.load.planning import Kind, Phase
from tapproxy.load.sender import Ask, Fetches, Result, result_of, send
from tapproxy.load.watch import Vitals, Watch
from tapproxy.wire.alarms import Alarms
from tapproxy.wire.fetch import Fetched
from tapproxy.wire.stamps import boot_id

# Between two answers that are read: other streams get their turn.
_PAUSE_S: Final = 0.0005
# So much of answers that wait to be read, then they are read at once: memory has an end.
_MOST_WAITING_BYTES: Final = 256 * 1024 * 1024
_AFTER_FAILURE_S: Final = 0.05
OnResult = Callable[[Result], None]


@dataclass(frozen=True, slots=True)
class Lane:
    """One path as it is sent over."""

    client: Fetches
    ask: Ask


@dataclass(frozen=True, slots=True)
class _Answer:
    slot: Slot
    ask: Ask
    request_id: str
    body_bytes: int
    fetched: Fetched
    due_ns: int | None
    wall_offset_ns: int


class Driver:
    """Sends phases, one after the other. Make it on the running loop; ``close`` it."""

    def __init__(self, lanes: Mapping[str, Lane], on_result: OnResult, *, part: int = 0, of: int = 1) -> None:
        self._lanes = lanes
        self._on_result = on_result
        self._part, self._of = part, of
        self._alarms = Alarms()
        self._watch = Watch(self._alarms)
        self._boot = boot_id()
        self._waiting: deque[_Answer] = deque()
        self._waiting_bytes = 0
        self._news = asyncio.Event()

    @property
    def vitals(self) -> Vitals:
        return self._watch.vitals

    def close(self) -> None:
        """Ends the clockwork; the clients are their maker's."""
        self._alarms.close()

    async def run(self, phase: Phase, start_ns: int | None = None) -> None:
        """Sends one phase and returns when all of its answers are read into results.

        ``start_ns``: when it begins, where several processes share it. Cancel it to stop: what has ended is read.
        """
        with _quiet_collector():
            reader = asyncio.get_running_loop().create_task(self._read_answers())
            try:
                if start_ns is not None:
                    await self._alarms.until(start_ns)
                # What happens in a cold start or a warm-up is no measure of the load.
                watched = any(not slot.warmup for slot in phase.slots) or phase.endless is not None
                with self._watch if watched else contextlib.nullcontext():
                    await self._send(phase, start_ns)
            finally:
                reader.cancel()
                while self._waiting:
                    self._read_one()

    async def _send(self, phase: Phase, start_ns: int | None) -> None:
        slots = phase.take(self._part, self._of)
        if phase.kind is Kind.CLOSED:
            await self._closed(phase, slots)
            return
        start_ns = time.monotonic_ns() if start_ns is None else start_ns
        async with asyncio.TaskGroup() as group:
            for slot in slots:
                due_ns = None
                if phase.kind is Kind.OPEN and slot.due_ns is not None:
                    due_ns = start_ns + slot.due_ns
                    await self._alarms.until(due_ns)
                group.create_task(self._one(slot, due_ns))
                if phase.kind is Kind.BURST:
                    # Hundreds in one turn of the loop would keep it from the first answers.
                    await asyncio.sleep(0)

    async def _closed(self, phase: Phase, slots: Iterator[Slot]) -> None:
        ends_ns: int | None = None
        begun: int | None = None

        first_ns = time.monotonic_ns()

        async def client(number: int) -> None:
            nonlocal ends_ns, begun
            await self._alarms.until(first_ns + (self._part + number * self._of) * phase.spacing_ns)
            for slot in slots:
                # A round that was begun is sent over every path: each has as many.
                if phase.duration_s is not None and not slot.warmup and slot.round != begun:
                    begun = slot.round
                    now_ns = time.monotonic_ns()
                    if ends_ns is None:
                        ends_ns = now_ns + int(phase.duration_s * 1e9)
                    elif now_ns >= ends_ns:
                        return
                whole = await self._one(slot, None if slot.due_ns is None else time.monotonic_ns())
                if not whole and phase.endless is not None:
                    # Where only the clock ends it, a path that refuses at once would be asked without pause.
                    await asyncio.sleep(_AFTER_FAILURE_S)

        async with asyncio.TaskGroup() as group:
            for number in range(phase.part_width(self._part, self._of)):
                group.create_task(client(number))

    async def _one(self, slot: Slot, due_ns: int | None) -> bool:
        """Sends one; whether an answer came, its content aside."""
        lane = self._lanes[slot.path]
        request_id, body, fetched = await send(slot, lane.client, lane.ask)
        offset_ns = time.time_ns() - time.monotonic_ns()
        self._waiting.append(_Answer(slot, lane.ask, request_id, len(body), fetched, due_ns, offset_ns))
        self._waiting_bytes += sum(len(read.body) for read in fetched.reads)
        self._news.set()
        while self._waiting_bytes > _MOST_WAITING_BYTES:
            self._read_one()
        return fetched.error is None and fetched.status is not None and fetched.status < 400

    async def _read_answers(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            while self._waiting:
                await asyncio.sleep(_PAUSE_S)
                if self._waiting:
                    self._read_one()

    def _read_one(self) -> None:
        answer = self._waiting.popleft()
        self._waiting_bytes -= sum(len(read.body) for read in answer.fetched.reads)
        result = result_of(
            answer.slot,
            answer.fetched,
            answer.ask,
            answer.request_id,
            answer.body_bytes,
            self._boot,
            answer.wall_offset_ns,
            answer.due_ns,
        )
        self._on_result(result)


@contextlib.contextmanager
def _quiet_collector() -> Iterator[None]:
    """A collection of everything alive would stop the sends for milliseconds; a request leaves no cycles behind."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
