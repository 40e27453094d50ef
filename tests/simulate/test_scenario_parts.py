"""What scenarios are made of, without running any: the catalogue, the order of the load, edits, the truth put in."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from tapproxy.commands.demo import group, listed
from tapproxy.core.record import Record
from tapproxy.diagnose.causes import RULES
from tapproxy.nginx import sandbox
from tapproxy.simulate.config import SimConfig
from tapproxy.simulate.relay import RelayConfig
from tapproxy.simulate.scenarios import SCENARIOS, batches, disturb, edit, effects, evidence, truths
from tapproxy.simulate.scenarios.parts import (
    HEALTHY,
    NOT_MEASURED,
    Card,
    Engine,
    Known,
    Load,
    Nginx,
    Part,
    Relay,
    Scenario,
    Truth,
)
from tapproxy.simulate.scenarios.play import route, slots_of

MS = 1_000_000
SET = [scenario for scenario in SCENARIOS.values() if scenario.setting is not None]


def parts(scenario: Scenario) -> list[Part]:
    assert scenario.setting is not None
    found: list[Part] = [*scenario.setting.path, *scenario.setting.clean]
    return [*found, *(part for each in found if isinstance(each, Nginx) for part in each.backup)]


def test_every_cause_that_a_rule_can_name_is_staged() -> None:
    staged = {scenario.staged for scenario in SCENARIOS.values()}
    assert {rule.cause for rule in RULES} <= staged
    assert {"measurement.not_comparable", "measurement.too_few_samples", HEALTHY, NOT_MEASURED} <= staged
    assert sum(scenario.staged not in (HEALTHY, NOT_MEASURED) for scenario in SCENARIOS.values()) >= 30


@pytest.mark.parametrize("scenario", SET, ids=lambda one: one.name)
def test_every_part_can_be_what_it_is_told(scenario: Scenario) -> None:
    assert scenario.setting is not None
    assert isinstance(scenario.setting.path[-1], Engine)
    assert not scenario.setting.clean or scenario.setting.clean[-1] == scenario.setting.path[-1]
    for part in parts(scenario):
        if isinstance(part, Engine):
            SimConfig(**part.flags)  # type: ignore[arg-type]
        elif isinstance(part, Relay):
            RelayConfig(**part.settings)  # type: ignore[arg-type]
    truth = scenario.setting.truth
    if truth is not None:
        assert (truth.ms is not None) == (truth.known is Known.GIVEN)
        assert bool(scenario.setting.clean) == (truth.known is Known.CLEAN)
        assert truth.known is not Known.ENGINE or (truth.of or truth.metric) in truths.COLUMNS


def test_the_list_has_each_scenario_once_under_its_kind() -> None:
    lines = listed().splitlines()
    assert [line.split()[0] for line in lines if line.startswith(" ")].sort() == list(SCENARIOS).sort()
    heads = [line for line in lines if not line.startswith(" ")]
    assert heads == list(dict.fromkeys(group(scenario.staged) for scenario in SCENARIOS.values()))
    assert len(heads) == len(set(heads))
    assert any(line.endswith("→ engine.queue + proxy.response_buffering") for line in lines)


def test_each_round_has_the_same_request_on_every_path_and_lengths_take_turns() -> None:
    load = Load(3, warmup=1, gap_ms=100, prompts=(10, 20), tokens=(5, 6, 7))
    slots = slots_of(load, ["a", "b"])
    assert [slot.index for slot in slots] == list(range(8))
    for turn in range(4):
        pair = [slot for slot in slots if slot.round == turn]
        assert sorted(slot.path for slot in pair) == ["a", "b"]
        assert pair[0].prompt == pair[1].prompt
        assert pair[0].prefix != pair[1].prefix
        assert len(f"{pair[0].prefix} {pair[0].prompt}".split()) == (10, 20)[turn % 2]
        assert {slot.max_tokens for slot in pair} == {(5, 6, 7)[turn % 3]}
        assert {slot.warmup for slot in pair} == {turn == 0}
    assert all(25 <= slot.gap_ms <= 75 for slot in slots)


def test_a_line_of_nginx_takes_the_place_of_its_name_or_comes_first_or_goes(tmp_path: Path) -> None:
    text = sandbox.render_demo(
        "recommended",
        listen_port=8080,
        upstream_port=9000,
        cert=tmp_path,
        key=tmp_path,
        directory=tmp_path,
        tls=False,
    )
    text = edit.with_addresses(text, "10.77.0.2", 8080, "10.77.0.1:9000", "127.0.0.1:9001")
    lines = ("proxy_read_timeout 400ms;", "limit_rate 6k;", '-proxy_set_header Connection "";')
    found = [line.strip() for line in edit.with_lines(text, ("tcp_nodelay off;",), lines).splitlines()]
    assert "listen 10.77.0.2:8080;" in found
    assert found[found.index("http {") + 1] == "tcp_nodelay off;"
    assert found[found.index("location / {") + 1] == "limit_rate 6k;"
    at = found.index("server 127.0.0.1:9001 max_fails=0;")
    assert found[at + 1] == "server 10.77.0.1:9000 backup;"
    assert [line for line in found if line.startswith("proxy_read_timeout")] == ["proxy_read_timeout 400ms;"]
    assert not [line for line in found if "Connection" in line]
    assert "proxy_set_header Host $host;" in found


def record(name: str, ttft_ms: float) -> Record:
    found = Record(id=name, tap="client", response_id=name)
    found.events.kind, found.events.arrived = ["token"], [round(ttft_ms * MS)]
    found.events.tokens, found.events.read = [1], [0]
    return found


def row(name: str, queued: int, scheduled: int, first: int, last: int, arrival: int = 0, prompt: int = 10) -> bytes:
    times = {"queued_ns": queued, "scheduled_ns": scheduled, "first_ns": first, "last_ns": last}
    line: dict[str, Any] = {key: value * MS for key, value in times.items()}
    line |= {"arrival_ns": arrival * MS, "response_id": name, "prompt_tokens": prompt, "output_tokens": 5}
    return json.dumps(line).encode() + b"\n"


@pytest.mark.parametrize(
    ("column", "expected_ms"),
    [("frontend", 10), ("queue", 30), ("prefill", 60), ("engine", 100), ("decode", 40), ("tpot", 10)],
)
def test_the_simulators_log_gives_the_truth_of_the_counted_requests(
    column: str, expected_ms: float, tmp_path: Path
) -> None:
    log = tmp_path / "truth.jsonl"
    log.write_bytes(row("a", 10, 40, 100, 140) + row("warm-up", 0, 900, 950, 999) + b'{"cut')
    truth = Truth(Known.ENGINE, "ttft", "", of=column, less_ms=2.0)
    assert truths.staged_ms(truth, log, [record("a", 1)], []) == expected_ms - 2


def test_short_prompts_that_came_while_a_long_one_was_read_are_held_against_the_others(tmp_path: Path) -> None:
    log = tmp_path / "truth.jsonl"
    log.write_bytes(
        row("long", 0, 0, 400, 400, arrival=1000, prompt=2000)
        + row("met", 0, 0, 260, 300, arrival=1150)
        + row("free", 0, 0, 10, 50, arrival=500)
        + row("later", 0, 0, 12, 50, arrival=1400)
    )
    truth = Truth(Known.ENGINE, "ttft", "", of="blocked")
    everybody = [record(name, 1) for name in ("long", "met", "free", "later")]
    assert truths.staged_ms(truth, log, everybody, []) == 250


def test_the_truth_may_be_given_or_what_the_clean_path_lacks(tmp_path: Path) -> None:
    log = tmp_path / "none.jsonl"
    assert truths.staged_ms(None, log, [], []) is None
    assert truths.staged_ms(Truth(Known.GIVEN, "ttft", "", ms=80.0), log, [], []) == 80.0
    against = Truth(Known.CLEAN, "ttft", "")
    assert truths.staged_ms(against, log, [record("a", 250)], [record("b", 30)]) == 220
    assert truths.staged_ms(against, log, [record("a", 250)], []) is None
    assert truths.staged_ms(Truth(Known.ENGINE, "ttft", "", of="queue"), log, [record("a", 1)], []) is None


def verdict(effect_ms: float | None, metric: str = "ttft", also: tuple[str, ...] = ()) -> dict[str, Any]:
    names = ("engine.queue", *also)
    causes = [{"cause": n, "severity": "error", "metric": metric, "effect_ms": {"p50": effect_ms}} for n in names]
    scenario = {
        "name": "x",
        "staged": "engine.queue",
        "also": ["engine.stall"],
        "effect": {"metric": "ttft", "ms": 100},
    }
    return {"verdict": "degraded", "causes": causes, "scenario": scenario, "paths": {}}


@pytest.mark.parametrize(
    ("result", "ok"),
    [
        pytest.param(verdict(104.0, also=("engine.stall",)), True, id="all agrees"),
        pytest.param(verdict(94.9, also=("engine.stall",)), False, id="effect too small"),
        pytest.param(verdict(None, also=("engine.stall",)), False, id="no effect"),
        pytest.param(verdict(104.0, "icl", ("engine.stall",)), False, id="of something else"),
        pytest.param(verdict(104.0), False, id="the second is not named"),
    ],
)
def test_a_scenario_agrees_when_cause_effect_and_the_second_cause_do(result: dict[str, Any], ok: bool) -> None:
    assert effects(result)["ok"] is ok


def test_what_is_only_worth_knowing_is_no_cause_of_a_healthy_scenario() -> None:
    note = {"cause": "engine.prefill", "severity": "info", "metric": "ttft", "effect_ms": {"p50": 700.0}}
    scenario = {"name": "x", "staged": "healthy", "also": [], "effect": None}
    found = effects({"verdict": "healthy", "causes": [note], "scenario": scenario, "paths": {}})
    assert (found["named"], found["also"], found["ok"]) == ("healthy", [], True)


def test_quiet_scenarios_run_two_at_a_time_and_the_rest_alone() -> None:
    names = ["queue", "gzip", "stall", "host-cpu", "decode", "saturated-client", "dns"]
    found = [[one.name for one in batch] for batch in batches([SCENARIOS[name] for name in names])]
    assert found == [["queue", "stall"], ["gzip"], ["host-cpu"], ["decode"], ["saturated-client"], ["dns"]]
    assert sorted(one.name for batch in batches(list(SCENARIOS.values())) for one in batch) == sorted(SCENARIOS)


def test_a_route_is_told_in_words() -> None:
    setting = SCENARIOS["retry"].setting
    assert setting is not None
    assert route(setting.path) == "client → outer tap → nginx → inner tap → engine"


@pytest.mark.parametrize("kind", [1, 28], ids=["A", "AAAA"])
def test_the_slow_name_server_answers_every_name_with_loopback(kind: int) -> None:
    question = b"\6engine\4test\0" + struct.pack(">HH", kind, 1)
    answer = disturb.answered(b"\x12\x34\1\0\0\1\0\0\0\0\0\1" + question + b"\0\0\x29more")
    assert answer is not None
    assert answer[:2] == b"\x12\x34"
    assert answer[12:].startswith(question)
    assert answer.endswith(socket.inet_aton("127.0.0.1")) == (kind == 1)
    assert disturb.answered(b"short") is None
    assert disturb.answered(b"\0" * 12 + b"\x3fcut off") is None


def test_what_stands_still_goes_on_in_the_end() -> None:
    async def main() -> tuple[set[str], str]:
        process = await asyncio.create_subprocess_exec("sh", "-c", "sleep 60 & wait", start_new_session=True)
        while not (found := disturb.children(process.pid)):
            await asyncio.sleep(0.01)
        try:
            disturb.stand_still(process.pid, 20, 40)
            states: set[str] = set()
            until_s = time.monotonic() + 0.3
            while time.monotonic() < until_s:
                states.add(state(found[0]))
                await asyncio.sleep(0.002)
            disturb.let_go()
            await asyncio.sleep(0.05)
            return states, state(found[0])
        finally:
            os.killpg(process.pid, 9)
            await process.wait()

    def state(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    states, after = asyncio.run(main())
    assert {"S", "T"} <= states
    assert after == "S"


@pytest.mark.parametrize("card", list(Card))
def test_what_is_said_of_a_card_changes_in_the_slow_window(card: Card, tmp_path: Path) -> None:
    now_ns = time.monotonic_ns()
    slow = (now_ns, now_ns + 2000 * MS)
    samples = evidence.of_card(card, slow, now_ns + 4000 * MS, tmp_path)
    assert [sample.problem for sample in samples if sample.problem is not None] == []
    assert len(samples) > 20
    for sample in samples:
        if min(abs(sample.t_mono_ns - edge_ns) for edge_ns in slow) < 2 * MS:
            continue  # a log has whole ms
        inside = slow[0] <= sample.t_mono_ns < slow[1]
        if card is Card.HOT:
            assert (sample.values["sm_clock_mhz"] < 0.8 * sample.values["sm_clock_max_mhz"]) == inside
            assert sample.values["throttled_thermal"] == inside
        else:
            assert sample.values["other_processes"] == inside


def test_a_start_up_log_of_ours_is_read(tmp_path: Path) -> None:
    setting = SCENARIOS["batching"].setting
    assert setting is not None
    assert setting.startup is not None
    assert evidence.of_startup(setting.startup, tmp_path).values["max_num_seqs"] == 2
