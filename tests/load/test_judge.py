"""The whole judgement of a run: the traps, what spoils a run, the verdict and its exit code."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from tapproxy.load.compare import Comparison, judge
from tapproxy.load.slo import parse_slo
from tapproxy.load.trial import ClientFacts, PathFacts
from tests.load.standin import answer, drifting, rounds, trial


def judged(change: Any = lambda path, turn: {}, count: int = 40, seed: int = 1, **more: Any) -> Comparison:
    """direct against other, alike but for what ``change`` says."""
    known = {key: more.pop(key) for key in ("added_ms",) if key in more}
    return judge(trial(drifting(count, seed, change=change, **known), **more))


def other(**what: Any) -> Any:
    return lambda path, turn: what if path == "other" else {}


def causes(comparison: Comparison) -> list[str]:
    return [cause["cause"] for cause in comparison.verdict["causes"]]


def test_two_paths_alike_are_healthy_and_no_difference_is_called() -> None:
    found = judged(count=200)
    assert (found.verdict["verdict"], found.exit_code, found.comparable, causes(found)) == ("healthy", 0, True, [])
    assert not any(each.significant for by in found.differences["other"].values() for each in by.values())


def test_the_result_has_the_keys_of_the_contract_and_is_json() -> None:
    result = orjson.loads(orjson.dumps(judged(count=70).to_dict()))
    assert result["schema"] == "tapproxy.comparison/1"
    assert result["run"] == "run"
    assert result["scenario"]["name"] == result["scenario"]["scenario"] == "single-stream"
    assert {"paths", "differences", "floor_ms", "comparable", "incomparable_because", "verdict"} <= result.keys()
    path = result["paths"]["direct"]
    assert path["requests"] == 70
    assert path["ttft_ms"]["need"] == {"p95": 60, "p99": 592}
    assert path["ttft_ms"]["p95"] is None
    assert path["connect_ms"] == {"dns": None, "tcp": None, "tls": None, "reused_share": 1.0}
    assert path["early_stopping"]["upper_estimate"]["ttft_ms"]["p90"] >= path["ttft_ms"]["p90"]
    difference = result["differences"]["other"]["ttft_ms"]
    assert difference["p50"].keys() >= {"difference", "ci95", "significant"}
    assert difference["p50"]["difference"] == pytest.approx(
        result["paths"]["other"]["ttft_ms"]["p50"] - path["ttft_ms"]["p50"]
    )
    assert (difference["p99"]["difference"], difference["p99"]["ci95"]) == (None, None)
    assert result["verdict"]["schema"] == "tapproxy.verdict/1"
    assert result["floor_ms"] is None


def test_a_slower_path_is_called_so_and_is_degraded_when_somebody_would_notice() -> None:
    found = judged(count=200, added_ms=30)
    assert found.differences["other"]["ttft_ms"]["p50"].significant
    assert (found.verdict["verdict"], found.exit_code) == ("degraded", 1)
    assert "other is" in found.verdict["trust"]["warnings"][0]
    small = judged(count=200, added_ms=5)
    assert small.differences["other"]["ttft_ms"]["p50"].significant
    assert (small.verdict["verdict"], small.exit_code) == ("healthy", 0)


# The usual traps.


def test_a_first_arm_that_warms_the_cache_for_the_second_is_not_a_fast_second_arm() -> None:
    """The same prompts one after the other, always in the same order: the second finds the first's in the cache."""
    results = [
        answer(index, path, turn, ttft_ms=40 if path == "direct" else 15, cached=0 if path == "direct" else 60)
        for index, path, turn in rounds(40, 1, order="fixed")
    ]
    found = judge(trial(results))
    assert (found.comparable, found.exit_code) == (False, 1)
    assert causes(found) == ["measurement.not_comparable"]
    assert found.incomparable_because == [
        "prefix-cache hits: 94% of the prompt tokens of other were cached, 0% of direct (usage); one warmed the cache "
        "for the other"
    ]
    assert not found.differences["other"]["ttft_ms"]["p50"].significant


def test_a_first_arm_that_is_sent_whole_before_the_second_cannot_be_told_from_a_drift() -> None:
    results = [
        answer(index, path, turn, ttft_ms=40 if path == "direct" else 15)
        for index, (path, turn) in enumerate((path, turn) for path in ("direct", "other") for turn in range(30))
    ]
    found = judge(trial(results))
    assert [reason.partition(":")[0] for reason in found.incomparable_because] == ["order"]
    assert found.exit_code == 1
    assert not found.differences["other"]["ttft_ms"]["p50"].significant


def test_an_arm_whose_responses_are_shorter_does_not_compare() -> None:
    found = judged(other(tokens=4, finish="stop"))
    assert found.exit_code == 1
    assert causes(found) == ["measurement.not_comparable"]
    names = [reason.partition(":")[0] for reason in found.incomparable_because]
    assert names == ["completion tokens", "max tokens", "finish reasons"]
    assert "4.0 completion tokens a request on other, 6.0 on direct" in found.incomparable_because[0]


@pytest.mark.parametrize(("tokens", "comparable"), [(98, True), (97, False)])
def test_two_percent_of_the_tokens_are_allowed(tokens: int, comparable: bool) -> None:
    assert judged(lambda p, t: {"completion_tokens": tokens if p == "other" else 100}).comparable is comparable


def test_without_usage_the_number_of_events_tells_a_shorter_answer() -> None:
    shorter = lambda path, turn: {"tokens": 4 if path == "other" else 6, "completion_tokens": None}  # noqa: E731
    assert "token events (the engine gives no usage)" in judged(shorter).incomparable_because[0]


def test_a_path_that_answers_with_errors_quickly_is_not_a_fast_one() -> None:
    found = judged(
        lambda path, turn: {"failure": "status", "status": 503, "ttft_ms": 1} if path == "other" and turn % 2 else {}
    )
    assert (found.comparable, found.exit_code) == (False, 1)
    assert found.incomparable_because[0].startswith("error rate: 20 of 40 requests failed on other, 0 of 40 on direct")
    # And none of the quick ones is in its latency.
    assert found.paths["other"]["ttft_ms"]["n"] == 20
    assert found.paths["other"]["errors"]["status"] == 20


def test_one_error_in_a_run_is_not_an_error_rate() -> None:
    one = judged(lambda path, turn: {"failure": "truncated"} if path == "other" and turn == 7 else {}, count=200)
    assert (one.comparable, one.exit_code) == (True, 0)


def test_a_path_that_does_not_stream_at_all_is_not_streaming() -> None:
    found = judged(other(streamed=False))
    assert causes(found) == ["client.not_streaming", "measurement.not_comparable"]
    assert found.exit_code == 1
    assert found.incomparable_because[0].startswith("streaming: 0 of 40 answers of other came as a stream")
    assert "application/json" in found.verdict["causes"][0]["evidence"][1]["what"]


def test_an_engine_that_streams_only_when_it_is_done_is_a_synthetic_stream_on_every_path() -> None:
    found = judged(lambda path, turn: {"ttft_ms": 400, "gap_ms": 0.01, "tokens": 20})
    assert causes(found) == ["engine.synthetic_stream"]
    assert (found.comparable, found.exit_code) == (True, 1)


def one_read(path: str, turn: int) -> dict[str, Any]:
    return {"tokens": 20} if path == "direct" else {"tokens": 20, "reads": [0] * 20}


def test_a_proxy_that_returns_the_whole_answer_in_one_read_is_buffering() -> None:
    """It leaves no other trace, so that a path of its own making could look the same: said second, and less sure."""
    found = judged(one_read)
    assert causes(found) == ["proxy.response_buffering", "engine.synthetic_stream"]
    first = found.verdict["causes"][0]
    assert (first["stage"], first["path"], found.exit_code) == ("proxy", "other", 1)
    assert first["effect_ms"]["p50"] == pytest.approx(190, abs=5)


def test_where_the_headers_show_a_hop_only_the_proxy_is_named() -> None:
    stream = {"content-type": "text/event-stream"}

    def change(path: str, turn: int) -> dict[str, Any]:
        server = "uvicorn" if path == "direct" else "nginx/1.31.3"
        return {**one_read(path, turn), "headers": {**stream, "server": server}}

    found = judged(change)
    assert causes(found) == ["proxy.response_buffering"]
    assert found.verdict["causes"][0]["rejected"][0]["cause"] == "engine.synthetic_stream"


def test_a_path_that_gives_the_stream_in_lumps_is_buffering() -> None:
    def change(path: str, turn: int) -> dict[str, Any]:
        return {"tokens": 40} if path == "direct" else {"tokens": 40, "reads": [step // 10 for step in range(40)]}

    assert causes(judged(change)) == ["proxy.response_buffering"]


def test_a_path_that_compresses_the_stream_into_lumps_is_named_for_that() -> None:
    def change(path: str, turn: int) -> dict[str, Any]:
        headers = {"content-type": "text/event-stream", "content-encoding": None if path == "direct" else "gzip"}
        return {**one_read(path, turn), "headers": headers}

    assert causes(judged(change)) == ["proxy.compression"]


def test_tokens_faster_than_reads_are_in_lumps_by_chance() -> None:
    def change(path: str, turn: int) -> dict[str, Any]:
        reads = None if path == "direct" else [step // 3 for step in range(40)]
        return {"tokens": 40, "gap_ms": 1.5, "reads": reads}

    assert judged(change).verdict["verdict"] == "healthy"


# Everything else that stands against comparing.


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (other(model="another"), "models: other answers as another, direct as m"),
        (other(request_bytes=900), "prompts: 900.0 bytes a request on other, 500.0 on direct (more than 5% apart)"),
        (other(prompt_tokens=80), "prompts: 80.0 tokens a request on other, 64.0 on direct (more than 5% apart)"),
        (other(finish="stop"), "finish reasons: 0 of 40 answers of other ended with 'length', 40 of 40 of direct"),
    ],
)
def test_what_differs_between_arms_is_said_with_its_numbers(change: Any, reason: str) -> None:
    found = judged(change)
    assert found.incomparable_because == [reason]
    assert causes(found) == ["measurement.not_comparable"]
    assert found.verdict["causes"][0]["evidence"][0]["what"] == reason


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"engine": "vLLM"}, "engine: other is SGLang, direct vLLM"),
        ({"engine": "SGLang", "engine_version": "0.5"}, "engine version: other has 0.6, direct 0.5"),
        ({"models": ["a"]}, "models: other offers b, direct a"),
    ],
)
def test_what_the_engines_say_of_themselves_must_agree(facts: dict[str, Any], reason: str) -> None:
    theirs = {"engine": "SGLang", "engine_version": "0.6", "models": ["b"]}
    paths = {"direct": PathFacts("http://a", **facts), "other": PathFacts("http://b", **theirs)}
    assert judged(paths=paths).incomparable_because == [reason]


def test_a_cold_start_that_one_arm_paid_and_is_counted_does_not_compare() -> None:
    def paths(direct_ms: float, other_ms: float) -> dict[str, PathFacts]:
        return {
            name: PathFacts(f"http://{name}", cold_ttft_ns=round(ms * 1e6))
            for name, ms in (("direct", direct_ms), ("other", other_ms))
        }

    found = judged(paths=paths(3000, 41), warmup=0)
    assert found.incomparable_because[0].startswith("cold start: the first request of direct took 3000 ms")
    # With a warm-up it is apart, and reported so.
    warmed = judged(paths=paths(3000, 41), warmup=2)
    assert warmed.comparable
    assert warmed.paths["direct"]["cold_start_ttft_ms"] == 3000
    assert judged(paths=paths(60, 41), warmup=0).comparable


# What spoils a run.


def test_a_saturated_client_voids_the_run() -> None:
    client = ClientFacts(loop_lag_p99_ns=80_000_000, cpu_share=0.99, saturated=True, why="the loop was 80 ms late")
    found = judged(client=client, added_ms=50)
    assert (found.verdict["verdict"], found.exit_code, causes(found)) == ("not_measured", 3, ["client.saturated"])
    assert not found.differences["other"]["ttft_ms"]["p50"].significant
    assert [fact["value"] for fact in found.verdict["causes"][0]["evidence"]] == [None, 80, 99]


def test_too_few_requests_are_not_measured_and_say_how_many_more() -> None:
    found = judged(count=10)
    assert (found.verdict["verdict"], found.exit_code) == ("not_measured", 3)
    assert causes(found) == ["measurement.too_few_samples"]
    assert "Send 1 more request over" in found.verdict["causes"][0]["advice"]


def test_nothing_answered_is_not_measured() -> None:
    found = judged(lambda path, turn: {"failure": "connect"})
    assert (found.verdict["verdict"], found.exit_code) == ("not_measured", 3)
    assert found.verdict["trust"]["warnings"][0] == "no request was answered on any path"
    empty = judge(trial([], paths={"direct": PathFacts("http://a"), "other": PathFacts("http://b")}))
    assert empty.exit_code == 3


def test_one_path_that_is_down_does_not_compare() -> None:
    found = judged(other(failure="connect"))
    assert (found.exit_code, causes(found)) == (1, ["measurement.not_comparable"])


def test_an_engine_that_fails_on_every_path_is_named() -> None:
    found = judged(lambda path, turn: {"failure": "status", "status": 500} if turn % 5 == 0 else {})
    assert (found.comparable, causes(found), found.exit_code) == (True, ["engine.errors"], 1)


def test_void_records_are_counted_and_have_no_latency() -> None:
    found = judged(lambda path, turn: {"void": "clock_step"} if turn < 3 else {})
    assert (found.paths["other"]["void"], found.paths["other"]["ttft_ms"]["n"]) == (3, 37)


def test_one_block_each_was_not_compared() -> None:
    results = [
        answer(index, path, turn)
        for index, (path, turn) in enumerate((path, turn) for path in ("direct", "other") for turn in range(30))
    ]
    found = judge(trial(results, scenario="offline"))
    assert (found.comparable, causes(found), found.exit_code) == (True, ["measurement.too_few_samples"], 3)


# The server scenario, the floor, and other findings.


def test_under_server_latency_is_from_the_schedule_and_the_sendings_stands_beside_it() -> None:
    """A client frozen for a second: latency grows by exactly that, and the sending's does not."""
    results = [
        answer(index, path, turn, start_ms=100 * index + 1000, due_ms=100 * index)
        for index, path, turn in rounds(40, 1)
    ]
    path = judge(trial(results, scenario="server", rate=5.0)).paths["direct"]
    assert (path["latency_from"], path["ttft_ms"]["p50"], path["e2e_ms"]["p50"]) == ("scheduled", 1040, 1090)
    assert (path["from_sent"]["ttft_ms"]["p50"], path["from_sent"]["e2e_ms"]["p50"]) == (40, 90)
    assert path["late_ms"]["p50"] == 1000
    assert path["tpot_ms"]["p50"] == 10


def test_a_difference_below_the_floor_is_not_called_one_and_said_so() -> None:
    floor = drifting(40, 9, shared=0, paths=("A", "B"))
    found = judge(trial(drifting(200, 1, added_ms=2, spread_ms=2, shared=0.9), floor=floor))
    assert found.floor_ms is not None
    assert found.floor_ms > 2
    each = found.differences["other"]["ttft_ms"]["p50"]
    assert (each.excludes_zero, each.significant) == (True, False)
    assert "lies below the floor" in " ".join(found.verdict["trust"]["warnings"])


def test_a_path_that_connects_anew_for_each_request_is_named() -> None:
    change = other(reused=False, connect=2_000_000, tls=8_000_000)
    found = judged(change)
    assert causes(found) == ["proxy.connection_reuse"]
    assert found.paths["other"]["connect_ms"] == {"dns": None, "tcp": 2, "tls": 8, "reused_share": 0}
    assert judged(change, fresh_connections=True).verdict["verdict"] == "healthy"


def test_a_round_trip_that_explains_the_difference_is_the_network() -> None:
    found = judged(
        lambda path, turn: {"min_rtt_ns": 60_000_000 if path == "other" else 100_000}, count=100, added_ms=60
    )
    assert causes(found) == ["network.downstream"]
    assert found.verdict["causes"][0]["effect_ms"]["p50"] == pytest.approx(59.9)


def test_objectives_are_judged_for_each_path() -> None:
    found = judge(trial(drifting(40, 1)), parse_slo("ttft=1s,tpot=50ms"))
    assert found.paths["direct"]["attainment"] == 1
    assert found.paths["direct"]["goodput"] > 0
    assert found.to_dict()["slo"] == {
        "ttft": {"limit_ms": 1000, "percentile": "p99"},
        "tpot": {"limit_ms": 50, "percentile": "p99"},
    }


# Beside an earlier run.


def test_an_improvement_that_cost_throughput_and_errors_is_called_that() -> None:
    def slow_decode(path: str, turn: int) -> dict[str, Any]:
        return {"gap_ms": 20, "failure": "timeout" if turn % 4 == 0 else None}

    before = trial(drifting(80, 1), id="before")
    now = trial(drifting(80, 2, mean_ms=25, change=slow_decode))
    beside = judge(now, baseline=before).to_dict()["baseline"]
    assert [reason.partition(":")[0] for reason in beside["incomparable_because"]] == ["error rate"] * 2
    called = beside["paths"]["direct"]["called"]
    assert "improved" in called
    assert called.endswith("and failures rose from 0 of 80 to 20 of 80")
    without = trial(drifting(80, 2, mean_ms=25, change=lambda path, turn: {"gap_ms": 20}))
    called = judge(without, baseline=before).to_dict()["baseline"]["paths"]["direct"]["called"]
    assert called.startswith("TTFT at P50 improved by 1")
    assert "at a cost: throughput fell from" in called


def test_offline_is_never_compared_with_server() -> None:
    before = trial(drifting(40, 1), id="before", scenario="offline")
    results = [replace(result, due_ns=result.record.t0_mono_ns) for result in drifting(40, 1)]
    found = judge(trial(results, scenario="server", rate=1.0), baseline=before)
    assert found.incomparable_because == ["against run before: scenario: server now, offline then"]
    assert (found.exit_code, causes(found)) == (1, ["measurement.not_comparable"])
    assert found.to_dict()["baseline"]["paths"] == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"api": "completions"}, "API: completions now, chat then"),
        ({"scenario": "concurrency", "concurrency": 8}, "concurrency: 8 now, 4 then"),
        ({"max_tokens": 7}, "max tokens: 7 now, 6 then"),
        ({"prompts": "file:x"}, "prompts: file:x now, synthetic:64 tokens then"),
        ({"ignore_eos": False}, "ignore_eos: False now, True then"),
    ],
)
def test_settings_that_changed_between_runs_are_said(change: dict[str, Any], reason: str) -> None:
    usual = {"scenario": "concurrency", "concurrency": 4} if "concurrency" in change else {}
    before = trial(drifting(40, 1), id="before", **usual)
    found = judge(trial(drifting(40, 1), **change), baseline=before)
    assert f"against run before: {reason}" in found.incomparable_because
