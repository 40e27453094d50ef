"""Each cause of an engine, a card or a host, staged on the simulated engine's virtual time, and engines that are well.

Two seeds here; twenty in tests/full/test_engine_seeds.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tapproxy.diagnose.causes import verdict
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.rules_engine import RULES as ENGINE_RULES
from tapproxy.diagnose.rules_host import RULES as HOST_RULES
from tapproxy.diagnose.served import served
from tapproxy.diagnose.view import look
from tests.diagnose import staged
from tests.diagnose.staged import HEALTHY, STAGED, Stage, Staged, card, host, untold
from tests.diagnose.virtual import launch, readings

SEEDS = (1, 2)
# Told by the records alone, in test_causes.py.
ELSEWHERE = {"engine.errors", "engine.synthetic_stream"}


def names(found: dict[str, Any]) -> list[str]:
    return [cause["cause"] for cause in all_of(found)]


def all_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The causes, and after them what is only worth knowing."""
    return [*found["causes"], *found["worth_knowing"]]


def serious(found: dict[str, Any]) -> list[str]:
    return [cause["cause"] for cause in found["causes"]]


def facts_of(cause: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {fact["what"]: fact for fact in cause["evidence"]}


def fact(cause: dict[str, Any], start: str) -> dict[str, Any]:
    (found,) = (each for each in cause["evidence"] if each["what"].startswith(start))
    assert isinstance(found, dict)
    return found


def rejected(cause: dict[str, Any]) -> dict[str, str]:
    return {rival["cause"]: rival["because"] for rival in cause["rejected"]}


def check_named(cause: str, stage: Stage, seed: int) -> dict[str, Any]:
    """The staged cause comes first, its effect is that injected, and it is a whole cause."""
    case = stage(seed)
    found = case.verdict()
    assert (found["verdict"], serious(found)[:1]) == ("degraded", [cause]), (seed, found["causes"])
    first = found["causes"][0]
    if case.effect_ms is not None:
        assert first["effect_ms"]["p50"] == pytest.approx(case.effect_ms, rel=0.05, abs=3), (seed, first)
    assert first["stage"].startswith("engine")
    assert 0 < first["confidence"] <= 1
    assert any(fact["threshold"] is not None and fact["n"] for fact in first["evidence"])
    assert all(fact["value"] is not None for fact in first["evidence"])
    assert any(word in first["advice"] for word in ("erify", "easure")), first["advice"]
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("cause", "stage"), STAGED, ids=[f"{cause} {stage.__name__}" for cause, stage in STAGED])
def test_what_was_staged_is_named_first_with_its_effect(cause: str, stage: Stage, seed: int) -> None:
    check_named(cause, stage, seed)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stage", HEALTHY, ids=lambda stage: stage.__name__)
def test_an_engine_that_is_well_is_not_accused(stage: Stage, seed: int) -> None:
    case = stage(seed)
    assert (case.verdict()["verdict"], serious(case.verdict())) == ("healthy", [])
    blind = untold(case).verdict()
    assert (blind["verdict"], blind["causes"]) == ("healthy", [])


def test_every_cause_of_engine_cards_and_host_is_staged() -> None:
    rules = {rule.cause for rule in (*ENGINE_RULES, *HOST_RULES)}
    assert rules - {cause for cause, _ in STAGED} == ELSEWHERE


# -- what stands beside a name -----------------------------------------------------------------------------


def test_queueing_says_how_many_waited_what_ran_and_why_it_is_not_the_cache() -> None:
    found = staged.queue_closed(1).verdict()
    assert names(found) == ["engine.queue"]
    cause = found["causes"][0]
    assert (cause["stage"], cause["metric"], cause["severity"]) == ("engine.queue", "ttft", "error")
    # Sixteen at once and four run: twelve wait.
    assert fact(cause, "requests waiting, mean")["value"] == pytest.approx(12, abs=1.5)
    running = fact(cause, "requests running while others wait")
    assert (running["value"], running["threshold"]) == (4, 4)
    assert fact(cause, "queue time, of TTFT")["threshold"] == 30.0
    assert "below 95.0 %" in rejected(cause)["engine.kv_cache"]
    assert "start-up log" in rejected(cause)["engine.batching"]
    assert cause["share"] > 0.9


def test_with_means_alone_the_queue_is_named_with_less_confidence() -> None:
    case = staged.queue_closed(1)
    sure = case.verdict()["causes"][0]["confidence"]
    for record in case.run.records:
        record.engine = type(record.engine)()
    cause = case.verdict()["causes"][0]
    assert cause["cause"] == "engine.queue"
    assert cause["confidence"] < sure
    assert fact(cause, "queue time, P50 (mean of")


def test_with_gauges_alone_littles_law_gives_the_wait() -> None:
    """llama.cpp tells how many wait, and no times."""
    case = staged.queue_closed(1)
    for record in case.run.records:
        record.engine = type(record.engine)()
    for sample in case.run.samples:
        sample.values = {name: sample.values[name] for name in ("running", "waiting")}
    cause = case.verdict()["causes"][0]
    assert cause["cause"] == "engine.queue"
    assert cause["effect_ms"]["p50"] == pytest.approx(staged.queue_closed(1).effect_ms, rel=0.15)
    assert cause["confidence"] <= 0.5


def test_a_limit_is_blamed_only_where_it_is_told() -> None:
    assert "engine.batching" not in names(staged.queue_closed(1).verdict())
    found = staged.limit_low(1).verdict()
    assert names(found) == ["engine.batching", "engine.queue"]
    assert fact(found["causes"][0], "requests that may run")["value"] == 4


def test_a_full_cache_is_no_queue_at_the_limit_and_the_other_way_round() -> None:
    found = staged.kv_full(1).verdict()
    cause = found["causes"][0]
    assert "engine.queue" in rejected(cause)
    assert "engine.queue" not in names(found)
    assert fact(cause, "KV cache")["value"] == 600 * 16


def test_a_preemption_is_no_stall_since_the_others_went_on() -> None:
    case = staged.preempted(1)
    found = case.verdict()
    cause = found["causes"][0]
    assert "engine.stall" not in names(found)
    assert "the others got tokens meanwhile" in rejected(cause)["engine.stall"]
    counted = fact(cause, "preemptions counted")["value"]
    assert counted == pytest.approx(sum(one.preemptions for one in case.run.truth), abs=3)


def test_a_stall_is_no_preemption_since_none_was_counted() -> None:
    cause = staged.stalls(1).verdict()["causes"][0]
    assert rejected(cause)["engine.preemption"] == "no preemption was counted around the gaps"
    assert fact(cause, "gaps in which no stream got a token")["value"] > 90
    assert cause["stage"] == "engine.decode"


def test_one_stop_of_the_machine_is_no_stall() -> None:
    """All streams stand for 400 ms, once."""
    case = staged.high_load(1)
    middle_ns = (case.run.from_ns + case.run.to_ns) // 2
    for record in case.run.records:
        for times in (record.events.arrived, record.events.read_at):
            times[:] = [at + 400_000_000 * (record.t0_mono_ns + at > middle_ns) for at in times]
        record.events.sent = [at + 50_000 for at in record.events.arrived]
    assert serious(case.verdict()) == []


def test_a_slow_client_is_no_stall_of_the_engine() -> None:
    """While its buffer is full the tap does not read: the events come late for that."""
    case = staged.stalls(1)
    for record in case.run.records:
        record.downstream.stalled_ns = 400_000_000
    assert "engine.stall" not in names(case.verdict())


def test_first_requests_are_cold_only_after_a_start() -> None:
    case = staged.cold(1)
    assert fact(case.verdict()["causes"][0], "engine started before")["value"] == pytest.approx(60, abs=1)
    for sample in case.run.samples:
        sample.values["process_start_s"] -= 7200
        sample.values["finished"] += 5000
    assert "engine.cold_start" not in names(case.verdict())


def test_a_restart_within_the_run_is_a_start() -> None:
    warm, cold = staged.one_by_one(1), staged.cold(2)
    shift_ns = warm.run.to_ns + 1_000_000_000 - cold.run.from_ns
    for number, record in enumerate(cold.run.records):
        record.t0_mono_ns += shift_ns
        record.t0_unix_ns += shift_ns
        record.id, record.response_id = f"again-{number}", f"chatcmpl-again-{number}"
    for sample in cold.run.samples:
        sample.t_mono_ns += shift_ns
        sample.t_unix_ns += shift_ns
    for sample in (*warm.run.samples, *cold.run.samples):
        del sample.values["process_start_s"]
    warm.run.records += cold.run.records
    warm.run.samples += cold.run.samples
    found = warm.verdict()
    assert names(found) == ["engine.cold_start"]
    assert fact(found["causes"][0], "counters fell")["value"] == 1


def test_long_prompts_are_worth_knowing_and_no_fault() -> None:
    case = staged.prefill_over_target(1)
    case.target = type(case.target)()
    found = case.verdict()
    assert (found["verdict"], names(found)) == ("healthy", ["engine.prefill"])
    cause = all_of(found)[0]
    assert cause["severity"] == "info"
    assert fact(cause, "prefill against prompt tokens, r")["value"] >= 0.8
    assert "not a fault" in cause["advice"]


def test_a_slow_pace_without_a_target_is_the_engines_way() -> None:
    case = staged.decode_over_target(1)
    case.target = type(case.target)()
    assert (case.verdict()["verdict"], case.verdict()["causes"]) == ("healthy", [])


@pytest.mark.parametrize("seed", SEEDS)
def test_decodes_that_wait_for_prompts_in_their_steps_are_no_slower_decode(seed: int) -> None:
    """Few prompts at first, then as many as the engine can compute: each decode shares its step with one of them."""
    quiet, busy = staged.poisson(0.3, 40, seed, prompt=4000, output=32), staged.poisson(4, 120, seed, 4000, 32)
    last_ms = quiet.requests[-1].at_ms
    later = [type(one)(one.at_ms + last_ms, one.prompt, one.output) for one in busy.requests]
    case = Staged(staged.serve(type(quiet)([*quiet.requests, *later]), seed=seed, kv_blocks=64_000))
    paces = [pace for one in served(look([], [], case.run.records)) if (pace := one.pace_ns) is not None]
    assert max(paces) > 3 * min(paces)
    assert "engine.decode" not in names(case.verdict())


def test_the_tokenizer_is_told_by_its_slope() -> None:
    cause = staged.tokenizer(1).verdict()["causes"][0]
    assert cause["stage"] == "engine.frontend"
    assert fact(cause, "frontend time a prompt token")["value"] == pytest.approx(100, rel=0.1)
    assert {"engine.prefill", "engine.queue"} <= set(rejected(cause))


def test_drafts_that_pay_are_no_bundles() -> None:
    assert names(staged.good_drafts(1).verdict()) == []
    cause = staged.drafts_in_vain(1).verdict()["causes"][0]
    kept = fact(cause, "drafted tokens kept")
    # Of four drafts the first is kept by a chance of 0.2, the second only after it, and so on: some 6 %.
    assert kept["value"] == pytest.approx(6.2, abs=1.5)
    assert cause["effect_ms"] == {"p50": None, "p95": None}


# -- cards and hosts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "values", "cause", "severity"),
    [
        pytest.param("gpu", lambda _: card(hot=True), "gpu.throttled", "warning", id="hot all along"),
        pytest.param("gpu", lambda _: card(others=1), "gpu.contention", "info", id="shared, and nobody pays"),
        pytest.param(
            "gpu", lambda _: card() | {"throttled_power": 1.0}, "gpu.throttled", "info", id="at its power limit"
        ),
        pytest.param("host", lambda ms: host(at_ms=ms, run_queue=20), "host.cpu", "info", id="tight"),
        pytest.param("host", lambda ms: host(at_ms=ms, stopped_ms=0.3 * ms), "host.cpu", "warning", id="stopped"),
    ],
)
def test_what_lasts_all_along_has_nothing_to_be_compared_with(
    kind: str, values: Any, cause: str, severity: str
) -> None:
    case = staged.chatty_mix(1)
    case.beside = readings(kind, case.run, values)
    (found,) = all_of(case.verdict())
    assert (found["cause"], found["severity"]) == (cause, severity)
    assert case.verdict()["verdict"] == ("healthy" if severity == "info" else "degraded")


def test_a_card_that_idles_is_not_throttled() -> None:
    case = staged.low_load(1)
    case.beside = readings("gpu", case.run, lambda _: card(hot=True) | {"gpu_busy_share": 0.1})
    assert names(case.verdict()) == []


def test_a_card_at_work_for_others_while_the_engine_runs_nothing_is_shared() -> None:
    case = staged.low_load(1)
    case.beside = readings("gpu", case.run, lambda _: card(others=1))
    cause = case.verdict()["causes"][0]
    assert (cause["cause"], cause["severity"]) == ("gpu.contention", "warning")
    assert fact(cause, "card at work while the engine had nothing to run")["value"] == 100.0


def test_a_slow_frontend_on_a_short_host_names_both() -> None:
    case = staged.tokenizer(1)
    case.beside = readings("host", case.run, lambda ms: host(at_ms=ms, run_queue=20, cores_used=0.97))
    assert serious(case.verdict()) == ["engine.tokenizer", "host.cpu"]


def test_steps_that_were_held_up_are_the_hosts_where_the_engine_waited_for_cores() -> None:
    """As a real vLLM did it on two cores: a prompt of 330 tokens took 7 ms, and 500 in bad moments. Prompts of one
    length do not tell that their length is to blame."""
    case = staged.steps_held_up(1)
    found = case.verdict()
    assert serious(found) == ["engine.prefill"]
    assert "host.cpu" in rejected(found["causes"][0])
    case.beside = readings("host", case.run, lambda ms: host(at_ms=ms, run_queue=20))
    found = case.verdict()
    assert serious(found) == ["host.cpu"]
    (cause,) = (each for each in found["causes"] if each["cause"] == "host.cpu")
    assert cause["stage"] == "engine.prefill"
    assert cause["effect_ms"]["p50"] == pytest.approx(case.effect_ms, rel=0.05)


def test_fewer_cores_than_vllm_wants_are_said() -> None:
    case = staged.chatty_mix(1)
    case.beside = [*readings("host", case.run, lambda ms: host(at_ms=ms) | {"physical_cores": 4.0}), launch(gpus=4)]
    (cause,) = all_of(case.verdict())
    assert (cause["cause"], cause["severity"]) == ("host.cpu", "info")
    cores = fact(cause, "physical cores, for 4 GPUs")
    assert (cores["value"], cores["threshold"]) == (4, 6)


# -- settings ----------------------------------------------------------------------------------------------


WELL = {"chunked_prefill": 1, "max_num_batched_tokens": 2048, "max_model_len": 8192}


@pytest.mark.parametrize(
    ("told", "cause", "severity"),
    [
        pytest.param(
            {"chunked_prefill": 1, "max_num_batched_tokens": 2048, "max_model_len": 8192}, None, None, id="well"
        ),
        pytest.param(
            {"chunked_prefill": 0, "max_num_batched_tokens": 16384, "max_model_len": 8192},
            "engine.batching",
            "info",
            id="no chunks",
        ),
        pytest.param(
            WELL | {"chunked_prefill": 0},
            "engine.batching",
            "warning",
            id="no chunks, and a step smaller than a prompt",
        ),
        pytest.param({"tensor_parallel": 8, "gpus": 4}, "engine.decode", "warning", id="parallel over hosts"),
        pytest.param({"tensor_parallel": 4, "gpus": 4, "nvlink": 0}, "engine.decode", "info", id="parallel over PCIe"),
        pytest.param({"tensor_parallel": 4, "gpus": 4, "nvlink": 1}, None, None, id="parallel over NVLink"),
        pytest.param({"mig_enabled": 1}, "gpu.contention", "info", id="a slice of a card"),
        pytest.param({"kv_cache_tokens": 400}, "engine.kv_cache", "info", id="a cache for one or two"),
        pytest.param({"kv_cache_tokens": 400_000}, None, None, id="a large cache"),
    ],
)
def test_a_setting_that_can_hurt_is_worth_knowing(
    told: dict[str, float], cause: str | None, severity: str | None
) -> None:
    case = staged.chatty_mix(1)
    case.beside = [launch(**told)]
    found = [(each["cause"], each["severity"]) for each in all_of(case.verdict())]
    assert found == ([] if cause is None else [(cause, severity)])


# -- without evidence --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stage",
    [
        staged.queue_closed,
        staged.queue_open,
        staged.kv_full,
        staged.preempted,
        staged.cold,
        staged.long_blocks_short,
        staged.tokenizer,
        staged.prefill_slower,
        staged.prefill_over_target,
    ],
    ids=lambda stage: stage.__name__,
)
def test_without_evidence_no_part_is_blamed_and_the_flag_is_named(stage: Stage) -> None:
    found = untold(stage(1)).verdict()
    assert (found["verdict"], names(found)) == ("degraded", ["engine.unattributed"])
    cause = found["causes"][0]
    assert "--enable-per-request-metrics" in cause["advice"]
    assert "--engine-metrics" in cause["advice"]
    assert cause["effect_ms"]["p50"] > 100


def test_a_page_that_lacks_a_signal_says_how_to_get_it() -> None:
    case = untold(staged.queue_closed(1))
    case.run.samples = readings("engine", case.run, lambda _: {"running": 4.0}, source="http://127.0.0.1:8000/metrics")
    for sample in case.run.samples:
        sample.absent = {"queue_s": "start the engine with --collect-more"}
    cause = case.verdict()["causes"][0]
    assert (cause["cause"], cause["advice"][:37]) == ("engine.unattributed", "start the engine with --collect-more.")


def test_two_faults_are_both_named_the_larger_first() -> None:
    """Stalls of 400 ms in answers that queue for seconds."""
    queue, stall = staged.queue_closed(3), staged.stalls(3)
    assert names(queue.verdict()) == ["engine.queue"]
    assert names(stall.verdict()) == ["engine.stall"]
    both = Staged(staged.serve(staged.closed(16, 150, 3), seed=3, max_num_seqs=4, stall_every=60, stall_ms=400))
    assert serious(both.verdict()) == ["engine.queue", "engine.stall"]


def test_evidence_of_another_boot_is_not_read() -> None:
    case = staged.queue_closed(1)
    for record in case.run.records:
        record.engine = type(record.engine)()
    for sample in case.run.samples:
        sample.boot_id = "another"
    assert names(case.verdict()) == ["engine.unattributed"]


def test_from_before_the_proxy_the_engine_is_judged_by_its_own_words_alone() -> None:
    """An outer tap sees events as the proxy sends them: what the engine told counts, how they came does not."""
    queue, stall = staged.queue_closed(1), staged.stalls(1)
    assert names(verdict(outer=queue.run.records, evidence=Evidence.of(queue.run.samples))) == ["engine.queue"]
    assert names(verdict(outer=stall.run.records, evidence=Evidence.of(stall.run.samples))) == []
    # What the proxy holds of the request is none of the tokenizer's: the page's own mean must agree.
    slow = staged.long_and_varied(1)
    for record in slow.run.records:
        held_ns = 200_000 * (record.usage.prompt_tokens or 0)
        record.upstream.head = (record.upstream.head or 0) + held_ns
        for times in (record.events.arrived, record.events.read_at):
            times[:] = [at + held_ns for at in times]
        record.events.sent = [at + 50_000 for at in record.events.arrived]
    found = verdict(outer=slow.run.records, evidence=Evidence.of(slow.run.samples))
    assert "engine.tokenizer" not in names(found)
