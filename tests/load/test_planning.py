"""The plan of a comparison: who sends what, when, in which order; and the same again from its file."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pytest

from tapproxy.core.errors import ConfigError
from tapproxy.load import planfile, planning
from tapproxy.load.plan import PREFIX_WORDS, SALTS, Slot, salted
from tapproxy.load.planning import Arrivals, Kind, Load, Phase, Plan, make
from tapproxy.load.prompts import Prompt
from tapproxy.load.trial import Scenario

PROMPTS = [Prompt("one"), Prompt("two"), Prompt("three", max_tokens=3)]
PATHS = ["direct", "nginx"]
LOADS = {
    "single-stream": Load(Scenario.SINGLE_STREAM, 20, warmup=3),
    "server": Load(Scenario.SERVER, 20, rate=10.0, warmup=3),
    "offline": Load(Scenario.OFFLINE, 20, warmup=3),
    "concurrency": Load(Scenario.CONCURRENCY, 20, concurrency=4, warmup=3),
}
every_load = pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)


def slots(plan: Plan) -> list[Slot]:
    return [slot for phase in plan.phases for slot in phase.slots]


def blocks(plan: Plan) -> list[Phase]:
    return [phase for phase in plan.phases if any(not slot.warmup for slot in phase.slots)]


@every_load
def test_every_path_gets_the_same_rounds_with_the_same_prompts(load: Load) -> None:
    plan = make(load, PATHS, PROMPTS)
    assert plan.count == 2 * 23
    by_path = {path: sorted((s for s in slots(plan) if s.path == path), key=lambda s: s.round) for path in PATHS}
    for one, other in zip(*by_path.values(), strict=True):
        assert (one.round, one.prompt, one.max_tokens, one.warmup) == (
            other.round,
            other.prompt,
            other.max_tokens,
            other.warmup,
        )
    assert [slot.round for slot in by_path["direct"]] == list(range(23))
    assert Counter(slot.warmup for slot in slots(plan)) == {True: 6, False: 40}


@every_load
def test_every_request_has_a_prefix_of_its_own_of_one_length(load: Load) -> None:
    prefixes = [slot.prefix for slot in slots(make(load, PATHS, PROMPTS))]
    assert len(set(prefixes)) == len(prefixes)
    assert {len(prefix) for prefix in prefixes} == {PREFIX_WORDS * 5 - 1}


@every_load
def test_the_first_request_over_each_path_goes_alone(load: Load) -> None:
    first = make(load, PATHS, PROMPTS).phases[0]
    assert (first.kind, first.width) == (Kind.CLOSED, 1)
    assert sorted(slot.path for slot in first.slots) == PATHS
    assert all(slot.warmup and slot.round == 0 for slot in first.slots)
    # Where every request has a time, these have theirs when their turn comes.
    assert {slot.due_ns for slot in first.slots} == ({0} if load.scenario is Scenario.SERVER else {None})


@every_load
def test_indexes_count_in_the_order_of_sending(load: Load) -> None:
    assert [slot.index for slot in slots(make(load, PATHS, PROMPTS))] == list(range(46))


@every_load
def test_one_seed_gives_one_plan_to_the_byte(load: Load) -> None:
    def written(load: Load) -> bytes:
        return orjson.dumps(planfile.to_dict(make(load, PATHS, PROMPTS)))

    assert written(load) == written(load)
    assert written(load) != written(replace(load, seed=2))


@every_load
def test_a_plan_read_again_is_the_plan(load: Load, tmp_path: Path) -> None:
    plan = make(load, PATHS, [Prompt("hi there", (("system", "hi"), ("user", "there")))])
    file = tmp_path / "plan.json"
    file.write_bytes(orjson.dumps(planfile.to_dict(plan)))
    again = planfile.read(file)
    assert again.phases == plan.phases
    assert (again.scenario, again.paths, again.about["seed"]) == (plan.scenario, plan.paths, 1)


def test_single_stream_alternates_in_random_order_one_at_a_time() -> None:
    plan = make(Load(Scenario.SINGLE_STREAM, 200, warmup=1), PATHS, PROMPTS)
    assert {(phase.kind, phase.width) for phase in plan.phases} == {(Kind.CLOSED, 1)}
    measured = [slot for slot in slots(plan) if not slot.warmup]
    firsts = Counter(measured[2 * turn].path for turn in range(200))
    assert all(measured[2 * turn].round == measured[2 * turn + 1].round for turn in range(200))
    assert 70 <= firsts["direct"] <= 130


def test_server_sends_by_the_clock_with_the_warm_up_in_front_and_no_break() -> None:
    plan = make(Load(Scenario.SERVER, 100, rate=10.0, warmup=11), PATHS, PROMPTS)
    _, phase = plan.phases
    assert phase.kind is Kind.OPEN
    due = [slot.due_ns for slot in phase.slots]
    assert None not in due
    assert due == sorted(due)  # type: ignore[type-var]
    for path in PATHS:
        own = [slot for slot in phase.slots if slot.path == path]
        assert [slot.warmup for slot in own] == [True] * 10 + [False] * 100
        assert [slot.round for slot in own] == list(range(1, 111))


def test_constant_arrivals_are_constant() -> None:
    plan = make(Load(Scenario.SERVER, 5, rate=2.0, warmup=0, arrivals=Arrivals.CONSTANT), ["a"], PROMPTS)
    assert [slot.due_ns for slot in slots(plan)] == [0, 500_000_000, 1_000_000_000, 1_500_000_000, 2_000_000_000]


@pytest.mark.parametrize(("name", "count"), [("offline", 2), ("concurrency", 4)])
def test_blocks_are_whole_and_their_order_turns_round(name: str, count: int) -> None:
    found = blocks(make(LOADS[name], PATHS, PROMPTS))
    assert len(found) == 2 * count
    order = []
    for phase in found:
        (path,) = {slot.path for slot in phase.slots}
        order.append(path)
        assert sum(not slot.warmup for slot in phase.slots) == 20 // count
    assert order[1] == order[2] != order[0]
    assert Counter(order) == {"direct": count, "nginx": count}
    assert {phase.kind for phase in found} == {Kind.BURST if name == "offline" else Kind.CLOSED}


def test_fewer_requests_than_blocks_make_fewer_blocks() -> None:
    assert len(blocks(make(Load(Scenario.CONCURRENCY, 2, concurrency=4, warmup=0), PATHS, PROMPTS))) == 4


def test_a_duration_has_rounds_without_end_that_all_paths_share() -> None:
    plan = make(Load(Scenario.CONCURRENCY, None, 8.0, concurrency=4, warmup=0), PATHS, PROMPTS)
    assert plan.count is None
    assert [phase.duration_s for phase in plan.phases] == [2.0] * 8
    first, second = (list(islice(phase.take(), 3)) for phase in plan.phases[:2])
    assert [slot.prompt for slot in first] == [slot.prompt for slot in second]
    assert len({slot.index for phase in plan.phases for slot in islice(phase.take(), 50)}) == 400


def test_what_the_clock_ended_is_saved_as_what_was_sent() -> None:
    plan = make(Load(Scenario.SINGLE_STREAM, None, 5.0, warmup=2), PATHS, PROMPTS)
    sent = [slot for phase in plan.phases for slot in islice(phase.take(), 6)]
    again = planfile.from_dict(orjson.loads(orjson.dumps(planfile.to_dict(plan, sent))), "it")
    assert slots(again) == sorted(sent, key=lambda slot: slot.index)
    assert again.count == len(sent)


@pytest.mark.parametrize("of", [1, 2, 3, 7])
@every_load
def test_several_processes_share_a_phase_without_rest(load: Load, of: int) -> None:
    for phase in make(load, PATHS, PROMPTS).phases:
        parts = [list(phase.take(part, of)) for part in range(of)]
        assert sorted(s.index for part in parts for s in part) == [slot.index for slot in phase.slots]
        if phase.kind is Kind.CLOSED:
            widths = [phase.part_width(part, of) for part in range(of)]
            assert sum(widths) == phase.width
            # Whoever has slots has a client to send them.
            assert all(width for width, part in zip(widths, parts, strict=True) if part)


def test_the_floor_is_the_same_load_over_two_arms() -> None:
    plan = make(LOADS["server"], ["direct", "nginx", "tap"], PROMPTS)
    floor = planning.twice(plan)
    assert floor.paths == ("A", "B")
    renamed = [s.due_ns for s in slots(floor) if s.path == "A"]
    assert renamed == [s.due_ns for s in slots(plan) if s.path == "direct"]
    assert [slot.index for slot in slots(floor)] == list(range(46))


def test_a_salt_changes_every_prefix_and_keeps_them_apart_and_as_long() -> None:
    prefixes = [slot.prefix for slot in slots(make(LOADS["server"], PATHS, PROMPTS))]
    other = [salted(prefix, SALTS // 3) for prefix in prefixes]
    assert not set(prefixes) & set(other)
    assert len(set(other)) == len(prefixes)
    assert {len(prefix) for prefix in other} == {len(prefixes[0])}
    assert salted(prefixes[0], 0) == prefixes[0]


def test_without_texts_a_plan_tells_no_prompt() -> None:
    text = orjson.dumps(planfile.to_dict(make(LOADS["server"], PATHS, [Prompt("my secret")]), texts=False)).decode()
    assert "secret" not in text
    assert '"prompt_chars":9' in text


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        pytest.param({"paths": []}, "different names", id="no path"),
        pytest.param({"paths": ["a", "a"]}, "different names", id="a name twice"),
        pytest.param({"requests": 0}, "--requests is 0", id="no requests"),
        pytest.param({"requests": None}, "one of them", id="no end"),
        pytest.param({"duration_s": 5.0}, "one of them", id="two ends"),
        pytest.param({"scenario": Scenario.SERVER}, "wants --rate", id="no rate"),
        pytest.param({"rate": 3.0}, "belongs to --scenario server", id="a rate too many"),
        pytest.param({"scenario": Scenario.CONCURRENCY}, "wants --concurrency", id="no concurrency"),
        pytest.param({"concurrency": 3}, "belongs to --scenario concurrency", id="a concurrency too many"),
        pytest.param(
            {"scenario": Scenario.OFFLINE, "requests": None, "duration_s": 3.0}, "a duration means", id="offline"
        ),
        pytest.param({"scenario": Scenario.SERVER, "rate": float("nan")}, "above 0", id="no number"),
        pytest.param({"warmup": -1}, "--warmup is -1", id="less than no warm-up"),
        pytest.param({"blocks": 0}, "--blocks is 0", id="no blocks"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, Any], said: str) -> None:
    settings = {"scenario": Scenario.SINGLE_STREAM, "requests": 5, **wrong}
    paths = settings.pop("paths", ["a"])
    with pytest.raises(ConfigError, match=said):
        make(Load(**settings), paths, PROMPTS)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param(b"", "no JSON", id="empty"),
        pytest.param(b"[]", "no plan", id="another JSON"),
        pytest.param(b'{"schema": "tapproxy.plan/1"}', "cannot be read", id="nothing in it"),
        pytest.param(
            b'{"schema": "tapproxy.plan/1", "scenario": "server", "paths": ["a"], "phases": []}',
            "sends nothing",
            id="no slots",
        ),
    ],
)
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        planfile.read(file)
