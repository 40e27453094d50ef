"""/metrics: valid exposition, vLLM's names and buckets, values that follow from the engine's state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sim_server import ask, chat, connected, metric, read_until, request, running

from tapproxy.simulate.engine import Engine, EngineConfig, Sequence
from tapproxy.simulate.metrics import HISTOGRAMS, EngineMetrics, Histogram

NAMES = Path(__file__).parent.parent / "data" / "simulate" / "vllm-0.32-metric-names.json"
MS = 1_000_000


@pytest.fixture
def port() -> Iterator[int]:
    with running(max_num_seqs=1, kv_blocks=2000) as number:
        yield number


def page(port: int) -> str:
    head, body = ask(port, None, target="/metrics", method="GET")
    assert b"content-type: text/plain; version=0.0.4; charset=utf-8" in head
    return body.decode()


def test_the_page_is_valid_and_its_names_and_buckets_are_vllms(port: int) -> None:
    ask(port, chat(3))
    real = json.loads(NAMES.read_text())
    for family in text_string_to_metric_families(page(port)):
        if not family.name.startswith("vllm:"):
            continue
        assert real["types"][family.name] == family.type
        buckets = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")]
        assert buckets == real["buckets"].get(family.name, [])


def test_a_bound_belongs_to_its_own_bucket() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]


def test_a_model_name_is_escaped() -> None:
    shown = EngineMetrics('a"b\\c\nd').page(Engine(EngineConfig()), 0).decode()
    (family,) = [f for f in text_string_to_metric_families(shown) if f.name == "vllm:num_requests_running"]
    assert family.samples[0].labels["model_name"] == 'a"b\\c\nd'


def test_gauges_show_who_runs_who_waits_and_the_cache(port: int) -> None:
    with connected(port) as first, connected(port) as second:
        first.sendall(request(chat(500)))
        read_until(first, b"\n\n\r\n")
        second.sendall(request(chat(5)))
        read_until(second, b"\r\n\r\n")  # its head: it is queued
        assert metric(port, "vllm:num_requests_running") == 1
        assert metric(port, "vllm:num_requests_waiting") == 1
        usage = metric(port, "vllm:kv_cache_usage_perc")
        assert usage == pytest.approx(1 / 2000, abs=2 / 2000)
        assert usage > 0


def test_counters_follow_what_was_served(port: int) -> None:
    ask(port, chat(3, n=2))
    ask(port, chat(200, ignore_eos=False), "X-Sim-Itl-Us: 0", "X-Sim-Ttft-Us: 0")
    assert metric(port, "vllm:prompt_tokens_total") == 3 * 6
    assert metric(port, "vllm:generation_tokens_total") == 2 * 3 + 128
    success = 'vllm:request_success_total{engine="0",finished_reason='
    assert metric(port, success + '"length"') == 2
    assert metric(port, success + '"stop"') == 1
    assert metric(port, "vllm:request_params_n_count") == 2
    assert metric(port, "vllm:request_params_n_sum") == 3
    assert metric(port, "vllm:time_to_first_token_seconds_count") == 3
    assert metric(port, "vllm:inter_token_latency_seconds_count") == 2 * 2 + 127
    assert metric(port, 'http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"}') == 2


def test_phases_add_up_to_the_whole_latency(port: int) -> None:
    for _ in range(3):
        ask(port, chat(4))
    seconds = {
        name: metric(port, f"vllm:{name}_sum")
        for name in (
            *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
            *("request_decode_time_seconds", "request_inference_time_seconds", "time_to_first_token_seconds"),
        )
    }
    assert seconds["request_prefill_time_seconds"] == pytest.approx(3 * (0.002 + 6 / 20_000))
    assert seconds["request_decode_time_seconds"] == pytest.approx(3 * 3 * 0.003)
    inference = seconds["request_prefill_time_seconds"] + seconds["request_decode_time_seconds"]
    assert seconds["request_inference_time_seconds"] == pytest.approx(inference)
    assert seconds["e2e_request_latency_seconds"] == pytest.approx(inference + seconds["request_queue_time_seconds"])


def test_a_recomputed_prompt_is_counted_once() -> None:
    engine, metrics = Engine(EngineConfig(kv_blocks=4)), EngineMetrics("m")
    for _ in range(2):
        engine.add(Sequence(32, 10, 0, 0))
    now_ns = 0
    while engine.begin(now_ns) is not None:
        step = engine.complete()
        now_ns = step.end_ns
        metrics.step(step)
    assert engine.preemptions == 1
    assert (metrics.prompt_tokens, metrics.generation_tokens) == (64, 20)
    steps = metrics.histograms["vllm:iteration_tokens_total"]
    assert steps.sum == 64 + 20


def test_every_histogram_is_observed_in_a_plain_run(port: int) -> None:
    ask(port, chat(3))
    text = page(port)
    for name, _, _ in HISTOGRAMS:
        labels = '{engine="0",model_name="sim"}' if name.startswith("vllm:") else ""
        assert f"{name}_count{labels} 0.0" not in text


def test_speculation_has_counters_where_it_is_on() -> None:
    with running(spec_tokens=3, spec_acceptance=1.0) as port:
        ask(port, chat(9))
        assert metric(port, "vllm:spec_decode_num_drafts_total") == 2
        assert metric(port, "vllm:spec_decode_num_draft_tokens_total") == 6
        assert metric(port, "vllm:spec_decode_num_accepted_tokens_total") == 6
