"""Recorded traffic as a plan."""

from __future__ import annotations

import pytest

from tapproxy.core.errors import MeasureError
from tapproxy.core.record import Record, RequestPart, UsagePart
from tapproxy.load import replay
from tapproxy.load.planning import Kind

S = 1_000_000_000


def record(
    at_s: float, *, tap: str = "inner", prompt: int | None = 40, answer: int | None = 7, path: str = ""
) -> Record:
    return Record(
        id="x",
        tap=tap,
        t0_unix_ns=int((1000 + at_s) * S),
        method="POST",
        path=path or "/v1/chat/completions",
        request=RequestPart(bytes=400),
        usage=UsagePart(prompt_tokens=prompt, completion_tokens=answer),
    )


def test_arrivals_and_lengths_are_the_recorded_ones() -> None:
    found = replay.arrivals([record(2.5), record(0, prompt=None, answer=None), record(1)], 128)
    assert [(each.at_ns, each.prompt_tokens, each.max_tokens) for each in found] == [
        (0, 100, 128),
        (1 * S, 40, 7),
        (int(2.5 * S), 40, 7),
    ]
    assert replay.rate(found) == 0.8


def test_two_taps_on_one_path_saw_the_same_requests() -> None:
    found = replay.arrivals([record(0), record(1), record(0.001, tap="outer"), record(1.001, tap="outer")], 128)
    assert [each.at_ns for each in found] == [0, S]


def test_what_asked_for_no_completion_is_left_out() -> None:
    with pytest.raises(MeasureError, match="no recorded completion"):
        replay.arrivals([record(0, path="/v1/models")], 128)


def test_each_path_gets_all_of_it_in_turn_after_a_warm_up() -> None:
    recorded = replay.arrivals([record(at) for at in (0, 0.5, 3)], 128)
    plan = replay.plan(recorded, ["a", "b"], 1, 2)
    assert [(phase.kind, len(phase.slots)) for phase in plan.phases] == [
        (Kind.CLOSED, 2),
        (Kind.CLOSED, 2),
        (Kind.OPEN, 3),
        (Kind.OPEN, 3),
    ]
    for phase in plan.phases[2:]:
        assert [slot.due_ns for slot in phase.slots] == [0, S // 2, 3 * S]
        assert {slot.max_tokens for slot in phase.slots} == {7}
        # The prefix counts: 40 words with it.
        assert {len(f"{slot.prefix} {slot.prompt}".split()) for slot in phase.slots} == {40}
    first, second = (phase.slots for phase in plan.phases[2:])
    assert [slot.prompt for slot in first] == [slot.prompt for slot in second]
    assert {slot.prefix for slot in first}.isdisjoint(slot.prefix for slot in second)
