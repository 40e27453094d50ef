"""Reads what stands beside the stream at an interval, while it happens: engines' pages, the host, its cards.

Rules here: a source that fails, hangs or floods costs nobody anything: its reading is bounded in time, it is never
read twice at once, what went wrong is a sample with a problem, and is said when it begins and at most once a minute.
What blocks runs in a thread of its own. A counter that fell is kept as it was read. On disk names, absences and a
lasting problem are kept when they change, and as a reminder every ten seconds: they are most of a sample, and hardly
ever change.

This is told which sources there are and where their samples go; it knows none of them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import orjson

from tapproxy.core.sample import Sample

# A reading of the host or of a card takes milliseconds; a driver that takes longer is stuck.
BLOCKED_S: Final = 5.0
# Of one reading (cards, processes): more is no reading but a flood.
MOST_AT_ONCE: Final = 256
REMIND_S: Final = 10.0
SAY_AGAIN_S: Final = 60.0
MOST_PROBLEM: Final = 300
# A line of a sample beyond this is dropped: a page's text is bounded, and a reading is a few kB.
MOST_LINE_BYTES: Final = 256 << 10

Read = Sample | list[Sample]


class Source(Protocol):
    """What can be read again and again. ``kind`` and ``source`` are those of its samples."""

    @property
    def kind(self) -> str: ...

    @property
    def source(self) -> str: ...

    async def read(self) -> Read: ...

    async def close(self) -> None: ...


class Blocking:
    """A source whose ``read`` blocks: it runs in a thread, and is given up on when it hangs.

    A thread that hangs is not joined by a second one: the source has a problem until it comes back.
    """

    def __init__(self, kind: str, source: str, read: Callable[[], Read], *, limit_s: float = BLOCKED_S) -> None:
        self.kind, self.source = kind, source
        self._read = read
        self._limit_s = limit_s
        self._running: threading.Thread | None = None

    async def read(self) -> Read:
        """Raises TimeoutError where it hangs, and whatever the reader raises."""
        if self._running is not None and self._running.is_alive():
            raise TimeoutError("the last reading has not ended yet")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Read] = loop.create_future()
        self._running = threading.Thread(target=self._run, args=(loop, answer), daemon=True)
        self._running.start()
        return await asyncio.wait_for(answer, self._limit_s)

    async def close(self) -> None:
        """A thread that hangs ends with the process."""

    def _run(self, loop: asyncio.AbstractEventLoop, answer: asyncio.Future[Read]) -> None:
        try:
            found: Read | Exception = self._read()
        except Exception as error:
            found = error
        try:
            loop.call_soon_threadsafe(_settle, answer, found)
        except RuntimeError:
            # The loop has ended meanwhile.
            pass


def _settle(answer: asyncio.Future[Read], found: Read | Exception) -> None:
    if answer.done():
        return
    if isinstance(found, Exception):
        answer.set_exception(found)
    else:
        answer.set_result(found)


class Keeper:
    """Takes samples and hands their lines on; counts them by kind. For spans as well as for what is sampled.

    ``append``: where a line goes; it must not wait.
    """

    def __init__(self, append: Callable[[bytes], None], *, tap: str | None = None, boot_id: str | None = None) -> None:
        self._append = append
        self._tap, self._boot_id = tap, boot_id
        self.kept: dict[str, int] = {}
        self.failed: dict[str, int] = {}
        self.dropped = 0

    def keep(self, sample: Sample) -> None:
        """Keeps one. Names this tap and this boot in it where it names none."""
        if sample.tap is None:
            sample.tap = self._tap
        if sample.boot_id is None:
            sample.boot_id = self._boot_id
        line = orjson.dumps(sample.to_dict())
        if len(line) > MOST_LINE_BYTES:
            self.dropped += 1
            return
        self._append(line)
        if sample.problem is None:
            self.kept[str(sample.kind)] = self.kept.get(str(sample.kind), 0) + 1

    def count_failed(self, kind: str) -> None:
        """A reading that gave nothing."""
        self.failed[kind] = self.failed.get(kind, 0) + 1


class Held:
    """A keeper for a run of its own: the samples whole, in memory, at most ``most`` of them."""

    def __init__(self, *, boot_id: str | None = None, most: int = 20_000) -> None:
        self.samples: list[Sample] = []
        self.kept: dict[str, int] = {}
        self.failed: dict[str, int] = {}
        self.dropped = 0
        self._boot_id = boot_id
        self._most = most

    def keep(self, sample: Sample) -> None:
        """Keeps one, as long as there is room."""
        if sample.boot_id is None:
            sample.boot_id = self._boot_id
        if len(self.samples) >= self._most:
            self.dropped += 1
            return
        self.samples.append(sample)
        if sample.problem is None:
            self.kept[str(sample.kind)] = self.kept.get(str(sample.kind), 0) + 1

    def count_failed(self, kind: str) -> None:
        """A reading that gave nothing."""
        self.failed[kind] = self.failed.get(kind, 0) + 1


@dataclass(slots=True)
class _Seen:
    """How one source fares."""

    read: int = 0
    failed: int = 0
    skipped: int = 0
    problem: str | None = None
    last_problem: str | None = None
    last_unix_ns: int | None = None
    said_s: float | None = None
    facts: dict[str, str] = field(default_factory=dict)
    # What was said of the engine's process not being there.
    lost: str | None = None
    # Series of the source (its cards) → its names and absences, or its problem, as last kept, and when.
    told: dict[str, tuple[Any, float]] = field(default_factory=dict)


class Sampler:
    """Reads every source at the interval until it is stopped.

    ``say``: one line for the operator, without its end. ``sparing``: what repeats itself is left out, for a disk.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        keeper: Keeper | Held,
        interval_s: float,
        say: Callable[[str], None],
        *,
        sparing: bool = True,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keeper = keeper
        self._sources = list(sources)
        self._interval_s = interval_s
        self._say = say
        self._sparing = sparing
        self._now_s = now_s
        self._seen = {id(source): _Seen() for source in sources}
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to read, each source on its own."""
        self._tasks = [asyncio.ensure_future(self._loop(source)) for source in self._sources]

    async def stop(self) -> None:
        """Ends the reading; what hangs is left behind. Safe to call twice."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(source.close() for source in self._sources), return_exceptions=True)

    async def once(self) -> None:
        """One reading of every source, at the same time."""
        await asyncio.gather(*map(self._one, self._sources))

    def status(self) -> dict[str, Any]:
        """For /api/status."""
        return {
            "interval_s": self._interval_s,
            "sources": [self._shown(source, self._seen[id(source)]) for source in self._sources],
            "kept": dict(self.keeper.kept),
            "failed": dict(self.keeper.failed),
            "dropped": self.keeper.dropped,
        }

    def _shown(self, source: Source, seen: _Seen) -> dict[str, Any]:
        return {
            "kind": str(source.kind),
            "source": source.source,
            "read": seen.read,
            "failed": seen.failed,
            # Beats that fell out since a reading took longer than the interval.
            "skipped": seen.skipped,
            "problem": seen.problem,
            "last_problem": seen.last_problem,
            "last_unix_ns": seen.last_unix_ns,
            "facts": seen.facts,
        }

    async def _loop(self, source: Source) -> None:
        due_s = self._now_s()
        while True:
            await self._one(source)
            # On the beat, whatever a reading took; beats that have passed meanwhile are not made up for.
            now_s = self._now_s()
            missed = max(0, int((now_s - due_s) / self._interval_s))
            self._seen[id(source)].skipped += missed
            due_s += (missed + 1) * self._interval_s
            await asyncio.sleep(max(0.0, due_s - now_s))

    async def _one(self, source: Source) -> None:
        seen = self._seen[id(source)]
        samples = await _samples(source, source.read)
        problem = next((sample.problem for sample in samples if sample.problem is not None), None)
        for sample in samples:
            seen.last_unix_ns = sample.t_unix_ns
            if sample.problem is None:
                seen.facts = dict(sample.facts)
            else:
                self.keeper.count_failed(str(source.kind))
            if self._is_news(sample, seen) or not self._sparing:
                self.keeper.keep(sample)
            elif sample.problem is None:
                sample.names, sample.absent = {}, {}
                self.keeper.keep(sample)
        seen.read += problem is None
        seen.failed += problem is not None
        self._tell(source, seen, problem)
        self._tell_lost(source, seen)

    def _is_news(self, sample: Sample, seen: _Seen) -> bool:
        """Whether its names, absences or problem are others than those kept lately."""
        now_s = self._now_s()
        words = (sample.names, sample.absent, sample.problem)
        kept = seen.told.get(sample.source)
        if kept is not None and kept[0] == words and now_s - kept[1] < REMIND_S:
            return False
        seen.told[sample.source] = (words, now_s)
        return True

    def _tell(self, source: Source, seen: _Seen, problem: str | None) -> None:
        began = problem is not None and seen.problem is None
        seen.problem = problem
        if problem is None:
            return
        seen.last_problem = problem
        now_s = self._now_s()
        if began and (seen.said_s is None or now_s - seen.said_s >= SAY_AGAIN_S):
            seen.said_s = now_s
            self._say(f"no sample of {source.source}: {problem}; traffic goes on, and it is tried again")

    def _tell_lost(self, source: Source, seen: _Seen) -> None:
        lost, before = seen.facts.get("engine_lost"), seen.lost
        seen.lost = lost
        now_s = self._now_s()
        if lost is not None and before is None and (seen.said_s is None or now_s - seen.said_s >= SAY_AGAIN_S):
            seen.said_s = now_s
            self._say(f"{source.source}: {lost}; the rest of the host is sampled all the same")


async def _samples(source: Source, read: Callable[[], Awaitable[Read]]) -> list[Sample]:
    """What was read; one sample with a problem where that failed, whatever the reason."""
    try:
        found = await read()
        samples = found if isinstance(found, list) else [found]
        if len(samples) <= MOST_AT_ONCE:
            for sample in samples:
                if sample.problem is not None:
                    sample.problem = sample.problem[:MOST_PROBLEM]
            return samples
        problem = f"{len(samples)} samples came at once: expected at most {MOST_AT_ONCE}"
    except TimeoutError as error:
        problem = str(error) or "it took too long to read"
    except Exception as error:
        # A reader's own fault is a problem of its samples and of nothing else.
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}"
    now = time.monotonic_ns(), time.time_ns()
    return [Sample(str(source.kind), source.source, *now, problem=problem[:MOST_PROBLEM])]
