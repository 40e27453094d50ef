"""The loop around sources: what a source does badly costs a sample and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from tapproxy.core.sample import Sample
from tapproxy.sampling import MOST_AT_ONCE, REMIND_S, SAY_AGAIN_S, Blocking, Held, Keeper, Sampler, Source


class Scripted:
    """Answers what it is given next: samples, an exception, or what a function makes."""

    kind = "engine"

    def __init__(self, *answers: Any, source: str = "page") -> None:
        self.source = source
        self.answers = list(answers)
        self.closed = 0

    async def read(self) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer

    async def close(self) -> None:
        self.closed += 1


def sample(problem: str | None = None, source: str = "page", **values: float) -> Sample:
    absent = {} if problem else {"spec_drafts": "absent: start it with --flag"}
    names = dict.fromkeys(values, "vllm:x")
    return Sample("engine", source, 1, 2, values=values, names=names, absent=absent, problem=problem)


class Run:
    """A sampler with a clock of its own; what it kept, as lines, and what it said."""

    def __init__(self, *sources: Source) -> None:
        self.now_s = 0.0
        self.lines: list[bytes] = []
        self.said: list[str] = []
        self.keeper = Keeper(self.lines.append, tap="inner", boot_id="boot")
        self.sampler = Sampler(sources, self.keeper, 1.0, self.said.append, now_s=lambda: self.now_s)

    def turns(self, count: int, step_s: float = 1.0) -> list[Sample]:
        """So many readings, a step apart; what they kept."""
        before = len(self.lines)

        async def all_of_them() -> None:
            for _ in range(count):
                await self.sampler.once()
                self.now_s += step_s

        asyncio.run(all_of_them())
        return [Sample.from_dict(orjson.loads(line)) for line in self.lines[before:]]

    def source(self, number: int = 0) -> dict[str, Any]:
        shown: dict[str, Any] = self.sampler.status()["sources"][number]
        return shown


def test_a_sample_is_kept_with_the_taps_name_and_boot() -> None:
    (kept,) = Run(Scripted(sample(running=3.0))).turns(1)
    assert (kept.tap, kept.boot_id, kept.values) == ("inner", "boot", {"running": 3.0})


def test_a_counter_that_fell_is_kept_as_it_was_read() -> None:
    run = Run(Scripted(sample(finished=10.0), sample(finished=2.0)))
    assert [each.values["finished"] for each in run.turns(2)] == [10.0, 2.0]


def test_names_and_absences_are_kept_when_they_change_and_as_a_reminder() -> None:
    run = Run(Scripted(lambda: sample(running=1.0)))
    kept = run.turns(int(REMIND_S) + 1)
    assert len(kept) == int(REMIND_S) + 1
    assert [bool(each.names or each.absent) for each in kept] == [True, *[False] * (int(REMIND_S) - 1), True]
    changed = Run(Scripted(lambda: sample(running=1.0), lambda: sample(waiting=1.0))).turns(2)
    assert [list(each.names) for each in changed] == [["running"], ["waiting"]]


def test_a_lasting_problem_is_kept_and_said_once_and_counted_every_time() -> None:
    run = Run(Scripted(lambda: sample("it cannot be connected to")))
    assert len(run.turns(int(REMIND_S))) == 1
    assert run.said == ["no sample of page: it cannot be connected to; traffic goes on, and it is tried again"]
    assert run.keeper.failed == {"engine": int(REMIND_S)}
    assert (run.source()["failed"], run.source()["problem"]) == (int(REMIND_S), "it cannot be connected to")
    assert len(run.turns(1)) == 1  # the reminder


def test_a_problem_that_comes_and_goes_is_said_once_a_minute() -> None:
    bad, good = (lambda: sample("gone")), (lambda: sample(running=1.0))
    run = Run(Scripted(*[bad, good] * 100, good))
    run.turns(40, step_s=1.0)
    assert len(run.said) == 1
    run.now_s += SAY_AGAIN_S
    run.turns(4)
    assert len(run.said) == 2
    assert run.source()["last_problem"] == "gone"


def test_a_process_that_is_not_there_is_said_once_and_the_host_sampled() -> None:
    lost, there = sample(source="host", cores=2.0), sample(source="host", cores=2.0)
    lost.facts["engine_lost"] = "process 7 is not to be seen here"
    run = Run(Scripted(*[lambda: lost, lambda: lost, lambda: there] * 10, lambda: there))
    assert len(run.turns(30)) == 30
    assert len(run.said) == 1
    assert "process 7 is not to be seen here; the rest of the host is sampled" in run.said[0]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        pytest.param(ValueError("no\nsuch file"), "ValueError: no such file", id="a_fault_of_the_reader"),
        pytest.param(TimeoutError(), "it took too long to read", id="too_long"),
        pytest.param(
            [sample(running=1.0)] * (MOST_AT_ONCE + 1),
            f"{MOST_AT_ONCE + 1} samples came at once: expected at most {MOST_AT_ONCE}",
            id="a_flood",
        ),
    ],
)
def test_a_reader_that_fails_is_a_problem_of_its_samples_alone(answer: Any, problem: str) -> None:
    run = Run(Scripted(answer, source="bad"), Scripted(sample(source="good", running=1.0), source="good"))
    kept = {each.source: each for each in run.turns(1)}
    assert (kept["bad"].problem, kept["bad"].values) == (problem, {})
    assert kept["good"].values == {"running": 1.0}


def test_each_card_of_a_source_is_a_series_of_its_own() -> None:
    run = Run(Scripted(lambda: [sample(source="gpu 0", power_w=100.0), sample(source="gpu 1", power_w=90.0)]))
    kept = run.turns(2)
    assert [(each.source, bool(each.names)) for each in kept] == [
        ("gpu 0", True),
        ("gpu 1", True),
        ("gpu 0", False),
        ("gpu 1", False),
    ]


def test_a_line_beyond_any_use_is_dropped_and_counted() -> None:
    huge = Sample("engine", "page", 1, 2, facts={"model": "x" * 300_000})
    run = Run(Scripted(huge))
    assert run.turns(1) == []
    assert run.sampler.status()["dropped"] == 1


def test_a_run_holds_its_samples_whole_and_not_without_end() -> None:
    held = Held(boot_id="boot", most=3)
    sampler = Sampler([Scripted(lambda: sample(running=1.0))], held, 1.0, lambda _: None, sparing=False)

    async def five() -> None:
        for _ in range(5):
            await sampler.once()

    asyncio.run(five())
    assert [(bool(each.absent), each.boot_id) for each in held.samples] == [(True, "boot")] * 3
    assert held.dropped == 2


# --- with a real clock -----------------------------------------------------------------------------------------


def looped(sources: list[Source], until: Callable[[Held], bool], interval_s: float = 0.01) -> tuple[Held, Sampler]:
    """Runs a sampler until something holds, five seconds at most."""
    held = Held()
    sampler = Sampler(sources, held, interval_s, lambda _: None, sparing=False)

    async def run() -> None:
        sampler.start()
        async with asyncio.timeout(5):
            while not until(held):
                await asyncio.sleep(0.005)
        await sampler.stop()

    asyncio.run(run())
    return held, sampler


def test_sources_are_read_at_the_interval_until_it_is_stopped() -> None:
    source = Scripted(lambda: sample(running=1.0))
    _, sampler = looped([source], lambda held: len(held.samples) >= 5)
    assert sampler.status()["sources"][0]["read"] >= 5
    assert source.closed == 1


def test_a_blocking_reader_that_hangs_holds_up_nobody_and_is_not_started_twice() -> None:
    release, begun = threading.Event(), []

    def hangs() -> Sample:
        begun.append(1)
        release.wait(10)
        return sample(running=1.0)

    def both(held: Held) -> bool:
        done = {each.source for each in held.samples if each.problem is None}
        return done == {"other"} and held.failed.get("gpu", 0) >= 3

    try:
        held, _ = looped([Blocking("gpu", "card", hangs, limit_s=0.05), Scripted(sample(source="other"))], both)
    finally:
        release.set()
    problems = {each.problem for each in held.samples if each.source == "card"}
    assert problems == {"it took too long to read", "the last reading has not ended yet"}
    assert len(begun) == 1


def test_a_blocking_reader_runs_off_the_loops_thread() -> None:
    threads = []

    def read() -> list[Sample]:
        threads.append(threading.current_thread())
        return [sample(source="card", running=1.0)]

    held, _ = looped([Blocking("gpu", "card", read)], lambda held: len(held.samples) >= 2)
    assert threading.main_thread() not in threads
    assert {each.source for each in held.samples} == {"card"}


def test_beats_that_a_long_reading_took_are_not_made_up_for() -> None:
    class Slow(Scripted):
        async def read(self) -> Any:
            await asyncio.sleep(0.1)
            return sample(running=1.0)

    _, sampler = looped([Slow(None)], lambda held: len(held.samples) >= 3, interval_s=0.03)
    shown = sampler.status()["sources"][0]
    assert shown["skipped"] >= 2 * (shown["read"] - 1)
