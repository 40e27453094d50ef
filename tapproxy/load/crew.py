"""The load from several processes: each sends its part of every phase, and all begin a phase at one instant.

Rules here: a worker is ``python -m tapproxy.load.worker``; what goes to it and comes from it are pickles with their
length before them, over pipes that nobody else has. One that dies takes the run with it: its share would be missing.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tapproxy.core.errors import MeasureError
from tapproxy.load.driver import OnResult
from tapproxy.load.path import Path, Transport
from tapproxy.load.planning import Phase
from tapproxy.load.sender import Ask, Result
from tapproxy.load.watch import Vitals

LENGTH: Final = struct.Struct("<I")
# Enough for every worker to have read its phase.
_HEAD_START_NS: Final = 100_000_000
_STOP_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is, for the whole run."""

    part: int
    of: int
    transport: Transport
    paths: tuple[Path, ...]


class Crew:
    """Workers that send phases together. ``start`` it, ``run`` the phases, ``close`` it."""

    def __init__(self, size: int, transport: Transport, paths: tuple[Path, ...], on_result: OnResult) -> None:
        self._jobs = [Job(part, size, transport, paths) for part in range(size)]
        self._on_result = on_result
        self._workers: list[Process] = []
        self._vitals: dict[int, Vitals] = {}

    @property
    def vitals(self) -> list[Vitals]:
        return list(self._vitals.values())

    async def start(self) -> None:
        """Starts the workers."""
        for job in self._jobs:
            # A session of its own: Ctrl-C at the terminal is the parent's to handle.
            worker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tapproxy.load.worker"),
                stdin=PIPE,
                stdout=PIPE,
                start_new_session=True,
            )
            self._workers.append(worker)
            self._tell(worker, job)

    async def run(self, phase: Phase, asks: Mapping[str, Ask]) -> None:
        """One phase to its end. Raises MeasureError where a worker dies."""
        start_ns = time.monotonic_ns() + _HEAD_START_NS
        for worker in self._workers:
            self._tell(worker, (phase, dict(asks), start_ns))
        listening = [asyncio.create_task(self._listen(part, worker)) for part, worker in enumerate(self._workers)]
        try:
            done, _ = await asyncio.wait(listening, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            # Told to stop: they read what has ended, hand it over and go. A listener is never cut in a message.
            for worker in self._workers:
                if worker.stdin is not None:
                    worker.stdin.close()
            await asyncio.wait(listening, timeout=_STOP_S)
            raise
        finally:
            for task in listening:
                task.cancel()
        for task in done:
            task.result()

    async def close(self) -> None:
        """Ends every worker that is left."""
        for worker in self._workers:
            if worker.stdin is not None:
                worker.stdin.close()
        for worker in self._workers:
            try:
                await asyncio.wait_for(worker.wait(), _STOP_S)
            except TimeoutError:
                worker.kill()
                await worker.wait()
        self._workers.clear()

    def _tell(self, worker: Process, what: object) -> None:
        data = pickle.dumps(what, protocol=pickle.HIGHEST_PROTOCOL)
        assert worker.stdin is not None
        worker.stdin.write(LENGTH.pack(len(data)) + data)

    async def _listen(self, part: int, worker: Process) -> None:
        assert worker.stdout is not None
        while True:
            try:
                size = LENGTH.unpack(await worker.stdout.readexactly(LENGTH.size))[0]
                news: Any = pickle.loads(await worker.stdout.readexactly(size))
            except asyncio.IncompleteReadError:
                status = await worker.wait()
                raise MeasureError(
                    f"a load process ended on its own (exit status {status}): its part is missing"
                ) from None
            if isinstance(news, Vitals):
                self._vitals[part] = news
                return
            assert isinstance(news, Result)
            self._on_result(news)
