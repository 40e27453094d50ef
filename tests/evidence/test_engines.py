"""Saved and hand-made metrics pages: what each engine calls its signals, in each version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapproxy.core.sample import SIGNALS, Sample, SampleKind, Shape
from tapproxy.evidence import engines, versions
from tapproxy.evidence.names import ENGINES, MISSING, ROWS, Engine, Fold, Row

PAGES = Path(__file__).parent.parent / "data" / "metrics_pages"


def sample_of(page: str, told: str | None = None) -> Sample:
    return engines.read((PAGES / f"{page}.txt").read_bytes(), "http://engine/metrics", 5, 7, told=told)


def text_sample(text: str) -> Sample:
    return engines.read(text.encode(), "page", 1, 2)


def mean(sample: Sample, signal: str) -> float:
    return sample.values[f"{signal}_sum"] / sample.values[f"{signal}_count"]


CASES: dict[str, tuple[dict[str, str], dict[str, float], dict[str, str]]] = {
    # page: facts, values, names it was read under
    "vllm-0.32": (
        {"engine": "vLLM", "version": "0.28.0 or later", "model": "tiny", "generation": "V1"}
        | {"ttft_from": "before tokenising", "prefix_caching": "True", "version_from": "its metric names"},
        {"prompt_tokens": 30774, "finished": 444, "aborted": 0, "ttft_s_count": 444, "kv_blocks": 8192}
        | {"block_tokens": 128, "itl_s_count": 26547, "step_tokens_count": 2065, "process_cpu_s": 13.33},
        {"kv_usage_share": "vllm:kv_cache_usage_perc", "itl_s": "vllm:inter_token_latency_seconds"}
        | {"finished": "vllm:request_success_total (sum of 3)", "step_tokens": "vllm:iteration_tokens_total"},
    ),
    # With n-gram speculation, cut down to some of its names.
    "vllm-0.32-ngram": (
        {"engine": "vLLM", "model": "tiny", "generation": "V1"},
        {"spec_drafts": 26, "spec_draft_tokens": 97, "spec_accepted_tokens": 20},
        {"spec_drafts": "vllm:spec_decode_num_drafts_total"},
    ),
    "vllm-0.4.3-v0": (
        {"engine": "vLLM", "version": "0.4.3 to 0.5.4", "generation": "V0", "ttft_from": "after tokenising"}
        | {"model": "facebook/opt-125m"},
        {"running": 3, "waiting": 7, "swapped": 1, "kv_usage_share": 0.93, "preemptions": 12, "finished": 10}
        | {"ttft_s_sum": 5.0, "ttft_s_count": 10, "itl_s_count": 490, "kv_blocks": 2048, "block_tokens": 16},
        {"kv_usage_share": "vllm:gpu_cache_usage_perc", "itl_s": "vllm:time_per_output_token_seconds"},
    ),
    "vllm-0.6.4-v0": (
        {"engine": "vLLM", "version": "0.6.4 to 0.9.0", "generation": "V0", "ttft_from": "after tokenising"},
        {"queue_s_sum": 1.0, "queue_s_count": 4, "prefill_s_sum": 0.5, "swapped": 0},
        {"queue_s": "vllm:request_queue_time_seconds"},
    ),
    "vllm-0.8.5-v1": (
        {
            "engine": "vLLM",
            "version": "0.8.3 or later, before 0.9.2",
            "generation": "V1",
            "ttft_from": "after tokenising",
        },
        {"preemptions": 3, "prefix_hit_tokens": 40, "prefix_query_tokens": 100, "prompt_tokens": 100}
        | {"spec_drafts": 10, "spec_draft_tokens": 50, "spec_accepted_tokens": 20},
        {"prefix_hit_tokens": "vllm:gpu_prefix_cache_hits"},
    ),
    "vllm-0.9.2-v1": (
        {"engine": "vLLM", "version": "0.9.2 or later, before 0.10.2", "generation": "V1"},
        {"prefix_hit_tokens": 41, "prefix_query_tokens": 101, "kv_usage_share": 0.5},
        {"kv_usage_share": "vllm:kv_cache_usage_perc", "prefix_hit_tokens": "vllm:prefix_cache_hits_total"},
    ),
    "vllm-0.11.0-v0": (
        {"engine": "vLLM", "version": "0.11.0 to 0.14.1", "generation": "V0", "ttft_from": "after tokenising"},
        {"itl_s_sum": 0.8, "tpot_s_count": 4},
        {"itl_s": "vllm:inter_token_latency_seconds"},
    ),
    "vllm-0.16-v1-two-engines": (
        {"engine": "vLLM", "version": "0.16.0 or later, before 0.20.0", "ttft_from": "unknown"}
        | {"prefix_caching": "False", "kv_dtype": "fp8"},
        # Requests, tokens and seconds of both; of the caches the fuller.
        {"running": 8, "waiting": 9, "kv_usage_share": 0.97, "preemptions": 3, "itl_s_sum": 2.0, "itl_s_count": 100}
        | {"kv_blocks": 2000, "block_tokens": 16},
        {"running": "vllm:num_requests_running (sum of 2)", "kv_usage_share": "vllm:kv_cache_usage_perc (max of 2)"},
    ),
    "ray-vllm-0.20": (
        {"engine": "vLLM", "within": "Ray Serve", "version": "0.20.0 or later", "ttft_from": "before tokenising"},
        # The engine's own count goes before the count of the server around it.
        {
            "running": 5,
            "waiting": 1,
            "kv_usage_share": 0.75,
            "preemptions": 4,
            "ttft_s_sum": 2.0,
            "loop_lag_s_sum": 0.025,
        },
        {"running": "ray_vllm_num_requests_running (sum of 2)", "preemptions": "ray_vllm_num_preemptions_total"}
        | {"loop_lag_s": "ray_serve_event_loop_scheduling_latency_ms"},
    ),
    "ray-serve-2.60": (
        {"engine": "Ray Serve", "ttft_from": "unknown"},
        {"finished": 17, "e2e_s_sum": 12.75, "e2e_s_count": 17, "running": 0, "waiting": 0, "loop_lag_s_count": 2},
        {"e2e_s": "ray_serve_deployment_processing_latency_ms"},
    ),
    "sglang-0.5.23": (
        {"engine": "SGLang", "version": "0.5.23 or later", "model": "tiny", "ttft_from": "unknown"},
        {"prompt_tokens": 2494, "output_tokens": 6069, "finished": 88, "aborted": 1, "queue_s_count": 90}
        | {"prefill_s_count": 90, "kv_blocks": 20000, "block_tokens": 1, "itl_s_count": 5960},
        {"waiting": "sglang:num_queue_reqs", "prefill_s": "sglang:per_stage_req_latency_seconds"},
    ),
    "sglang-0.4.3": (
        {"engine": "SGLang", "version": "0.4.3 or earlier", "model": "meta-llama/Llama-3.1-8B-Instruct"},
        {"running": 162, "waiting": 2826, "kv_usage_share": 0.28, "itl_s_count": 7559, "prefix_hit_share": 0.0075},
        {"itl_s": "sglang:time_per_output_token_seconds"},
    ),
    "sglang-0.5.12-tp2": (
        {"engine": "SGLang", "version": "0.5.10 or later"},
        # Both ranks of a tensor-parallel engine count the same requests; another data-parallel one counts its own.
        {"running": 12, "waiting": 1, "preemptions": 6, "prefix_hit_tokens": 40, "prefix_query_tokens": 100}
        | {"spec_accept_length": 2.5, "queue_s_count": 12},
        {"preemptions": "sglang:num_retracted_requests_total"},
    ),
    "tgi-3.3.7": (
        {"engine": "TGI"},
        {"running": 16, "waiting": 4, "queue_s_sum": 10.5, "queue_s_count": 20, "tokenize_s_sum": 0.2}
        | {"prefill_s_sum": 1.5, "itl_s_sum": 50, "itl_s_count": 2000, "tpot_s_count": 20, "finished": 20, "failed": 3}
        | {"prompt_tokens": 2000, "output_tokens": 2400, "e2e_s_sum": 71},
        {"tokenize_s": "tgi_request_validation_duration"},
    ),
    "llama.cpp-b6000": (
        {"engine": "llama.cpp"},
        {"running": 2, "waiting": 5, "prompt_tokens": 900, "output_tokens": 400, "itl_s_sum": 8, "itl_s_count": 400},
        {"waiting": "llamacpp:requests_deferred", "itl_s": "llamacpp:tokens_predicted_seconds_total"},
    ),
    "nim-1.3": (
        {"engine": "NIM", "model": "meta/llama-3.1-8b-instruct"},
        {"running": 6, "waiting": 2, "running_limit": 64, "kv_usage_share": 0.4, "ttft_s_sum": 1.5, "finished": 9}
        | {"failed": 1, "itl_s_count": 290},
        {"ttft_s": "time_to_first_token_seconds"},
    ),
    "triton-2.50": (
        {"engine": "Triton", "model": "ensemble, tensorrt_llm"},
        # Microseconds.
        {"queue_s_sum": 2.0, "queue_s_count": 8, "e2e_s_sum": 14.0, "inference_s_sum": 3.5, "waiting": 3, "failed": 1}
        | {"ttft_s_sum": 0.9},
        {"queue_s": "nv_inference_queue_duration_us (sum of 2)"},
    ),
    "tensorrt-llm-1.0": (
        {"engine": "TensorRT-LLM", "model": "m"},
        {"finished": 5, "e2e_s_sum": 10, "ttft_s_sum": 2, "queue_s_count": 5},
        {"queue_s": "trtllm_request_queue_time_seconds"},
    ),
}


@pytest.mark.parametrize("page", CASES)
def test_a_page_is_read_under_its_engines_names(page: str) -> None:
    facts, values, names = CASES[page]
    sample = sample_of(page)
    assert sample.problem is None
    assert (sample.kind, sample.source, sample.t_mono_ns, sample.t_unix_ns) == ("engine", "http://engine/metrics", 5, 7)
    assert {name: sample.facts.get(name) for name in facts} == facts
    assert {name: sample.values.get(name) for name in values} == pytest.approx(values)
    assert {name: sample.names.get(name) for name in names} == names


def test_every_saved_page_is_a_case_and_every_engine_has_one() -> None:
    saved = {path.stem for path in PAGES.glob("*.txt")}
    assert saved == {*CASES, "production-stack-router"}
    assert {facts["engine"] for facts, _, _ in CASES.values()} == {str(engine) for engine in Engine}


@pytest.mark.parametrize("page", CASES)
def test_a_signal_has_a_value_or_a_word_on_its_absence_and_never_both(page: str) -> None:
    sample = sample_of(page)
    of_engines = {name: shape for name, (kind, shape) in SIGNALS.items() if kind is SampleKind.ENGINE}
    assert set(sample.names) | set(sample.absent) == set(of_engines)
    assert not set(sample.names) & set(sample.absent)
    expected = {
        f"{name}{suffix}"
        for name in sample.names
        for suffix in (("_sum", "_count") if of_engines[name] is Shape.MEAN else ("",))
    }
    assert set(sample.values) == expected
    assert all(why.startswith("absent: ") and len(why) > 12 for why in sample.absent.values())
    assert Sample.from_dict(sample.to_dict()) == sample


@pytest.mark.parametrize(
    ("page", "signal", "says"),
    [
        ("vllm-0.32", "spec_drafts", "--speculative-config"),
        ("vllm-0.32", "swapped", "no such metric since 0.9.0"),
        ("vllm-0.32", "tokenize_s", "from 0.17 on its TTFT less queue and prefill"),
        ("vllm-0.11.0-v0", "kv_usage_share", "--show-hidden-metrics-for-version=0.10"),
        ("vllm-0.11.0-v0", "ttft_s", "--disable-log-stats"),
        ("vllm-0.4.3-v0", "queue_s", "vLLM has it from 0.6.4 on"),
        ("vllm-0.6.4-v0", "spec_accept_share", "spec_decode_draft_acceptance_rate is there and is not a number"),
        # -1 says that the cache is off.
        ("vllm-0.6.4-v0", "prefix_hit_share", "--disable-log-stats"),
        ("vllm-0.9.2-v1", "tpot_s", "vLLM has it from 0.11.0 on"),
        # 0 says that it does not speculate.
        ("sglang-0.5.23", "spec_accept_length", "--speculative-algorithm"),
        ("sglang-0.5.23", "preemptions", "first request that is retracted"),
        ("ray-serve-2.60", "kv_usage_share", "log_engine_metrics"),
        ("tgi-3.3.7", "ttft_s", "TGI has no such metric"),
        ("tgi-3.3.7", "kv_usage_share", "TGI has no such metric"),
        ("llama.cpp-b6000", "kv_usage_share", "/slots"),
        ("nim-1.3", "process_cpu_s", "--engine-pid"),
    ],
)
def test_what_is_absent_says_how_to_get_it(page: str, signal: str, says: str) -> None:
    sample = sample_of(page)
    assert signal not in sample.values
    assert says in sample.absent[signal]


def test_a_router_that_re_uses_vllms_names_is_no_engine() -> None:
    sample = sample_of("production-stack-router")
    assert (sample.problem, sample.values, sample.names) == (None, {}, {})
    assert sample.facts == {"engine": "production-stack router"}
    assert "give the engine's own page" in sample.absent["running"]


def test_an_engines_own_lines_count_where_a_router_shares_the_page() -> None:
    sample = text_sample(
        'vllm:num_requests_running{server="http://a:8000"} 50\n'
        'vllm:current_qps{server="http://a:8000"} 3\n'
        'vllm:num_requests_running{engine="0",model_name="m"} 2\n'
    )
    assert (sample.facts["engine"], sample.values["running"]) == ("vLLM", 2)


def test_the_version_that_an_engine_says_counts_more_than_its_names() -> None:
    sample = sample_of("vllm-0.16-v1-two-engines", told="0.18.1")
    assert (sample.facts["version"], sample.facts["version_from"]) == ("0.18.1", "the engine")
    assert sample.facts["ttft_from"] == "before tokenising"
    assert sample_of("vllm-0.16-v1-two-engines", told="v0.16.0+cpu").facts["ttft_from"] == "after tokenising"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param(["vllm:num_requests_running"], "before 0.9.2", id="nothing_that_dates_it"),
        pytest.param(
            ["vllm:num_requests_running", "vllm:kv_cache_usage_perc"], "0.9.2 or later, before 0.10.2", id="kv"
        ),
        # It shows what only 0.28 has, so what it leaves out (a fork, a stand-in) dates nothing.
        pytest.param(["vllm:request_num_preemptions_count"], "0.28.0 or later", id="contradicted"),
    ],
)
def test_names_date_a_page(names: list[str], expected: str) -> None:
    assert str(versions.guess(Engine.VLLM, frozenset(names))) == expected


def test_an_idle_engine_inside_ray_is_not_dated_by_what_it_has_not_shown_yet() -> None:
    sample = text_sample('ray_vllm_num_requests_running{engine="0",model_name="m"} 0\n')
    assert (sample.facts.get("version"), sample.facts["ttft_from"]) == (None, "unknown")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.32.0", (0, 32, 0)), ("v0.9.2.dev3+g1", (0, 9, 2)), ("1.10", (1, 10)), ("main", None), ("", None)],
)
def test_a_version_is_its_numbers(text: str, expected: tuple[int, ...] | None) -> None:
    assert versions.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param(
            "node_cpu_seconds_total 1\nnode_load1 2\n", "names are such as node_cpu_seconds_total, node_load1"
        ),
        pytest.param("process_cpu_seconds_total 1\n", "names are such as process_cpu_seconds_total"),
        # One word that vLLM, and therefore NIM, uses is not NIM's page.
        pytest.param("prompt_tokens_total 5\n", "expected the metrics page of vLLM, SGLang"),
    ],
)
def test_another_programs_page_is_a_problem(text: str, says: str) -> None:
    sample = text_sample(text)
    assert sample.problem is not None
    assert says in sample.problem
    assert sample.values == {}


def test_the_table_of_rows_is_sound() -> None:
    seen: set[Any] = set()
    for row in ROWS:
        kind, _ = SIGNALS[row.signal]
        assert kind is SampleKind.ENGINE
        key = (row.signal, row.engine, row.name, *map(str, (row.only, row.but)))
        assert key not in seen, f"{row.name} stands twice for {row.signal}"
        seen.add(key)
        if ENGINES[row.engine].begins and not row.name.startswith("process_"):
            assert row.name.startswith(ENGINES[row.engine].begins)
        for version in (row.since, row.until):
            assert not version or versions.parse(version) is not None
    assert all(signal in SIGNALS for _, signal in MISSING)


def test_every_row_is_read_from_a_page_that_has_only_it() -> None:
    """Each name, with and without what the format appends, leads to its signal: a row that can't match is none."""
    for row in ROWS:
        mark = _mark_of(row.engine)
        for which in range(max(len(names) for _, names, _ in row.parts())):
            labels = _labels_of(row)
            parts = [(names[min(which, len(names) - 1)], factor) for _, names, factor in row.parts()]
            page = "".join(f"{name}{labels} 5\n" for name, _ in parts)
            sample = text_sample(mark + page)
            value = 5.0 if row.label is None else 7.0
            got = [sample.values.get(f"{row.signal}{suffix}") for suffix, _, _ in row.parts()]
            assert got == pytest.approx([value * factor for _, factor in parts]), row.name


def _mark_of(engine: Engine) -> str:
    """A line that says whose page it is, and is no signal that a row is tried for."""
    marks = {
        Engine.VLLM: "vllm:request_prefill_kv_computed_tokens_count 1\n",
        Engine.SGLANG: "sglang:kv_available_tokens 1\n",
        Engine.TRT_LLM: "trtllm_kv_cache_hit_rate 1\n",
        Engine.NIM: "num_request_max 1\n",
    }
    return marks.get(engine, "")


def _labels_of(row: Row) -> str:
    labels = {name: sorted(values)[0] for name, values in (row.only or {}).items()}
    if row.label is not None:
        labels[row.label] = "7"
    return "{" + ",".join(f'{name}="{value}"' for name, value in labels.items()) + "}" if labels else ""


def test_folds_have_a_word_each() -> None:
    assert {row.fold for row in ROWS} == set(Fold)
