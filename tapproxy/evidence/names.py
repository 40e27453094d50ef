"""The table of what engines call their metrics: canonical signal → names, by engine and version.

Rules here: a new engine is an entry of ``ENGINES``, its rows, and a saved page in the tests. The first row of a signal
that is on the page wins. Names stand without what the format appends: a counter's ``_total``, a histogram's ``_sum``
and ``_count``. ``since`` and ``until`` are the first and last version in whose source the name was found, among those
that were looked at, so a boundary may be off by the gap between two of them. Units become those of the signal by
``scale``. Buckets are never used: vLLM's first of a phase is 0.3 s, so a median below cannot be had from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from tapproxy.core.sample import SIGNALS, SampleKind, Shape


class Engine(StrEnum):
    """Whose page it is."""

    VLLM = "vLLM"
    SGLANG = "SGLang"
    TGI = "TGI"
    LLAMA_CPP = "llama.cpp"
    TRT_LLM = "TensorRT-LLM"
    TRITON = "Triton"
    RAY_SERVE = "Ray Serve"
    NIM = "NIM"


class Fold(StrEnum):
    """How several label sets of one name (engines of one server, its models, its reasons) become one value."""

    SUM = "sum"  # requests, tokens, seconds
    MAX = "max"  # a share of something full: the fullest decides
    MIN = "min"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class Row:
    """One name of one signal.

    ``only``, ``but``: label → the values it must have, or must not. ``least``: below it the value says that the thing
    is off. ``count``: where a mean's count has a name of its own, and ``name`` is that of its sum. ``label``: the
    value stands in this label. ``always``: shown from ``since`` on without any flag, so its absence dates the page.
    """

    signal: str
    engine: Engine
    name: str
    since: str = ""
    until: str = ""
    fold: Fold = Fold.SUM
    scale: float = 1.0
    only: Mapping[str, frozenset[str]] | None = None
    but: Mapping[str, frozenset[str]] | None = None
    least: float | None = None
    count: str | None = None
    label: str | None = None
    always: bool = False

    @property
    def shape(self) -> Shape:
        """How the signal combines over time."""
        return SIGNALS[self.signal][1]

    def parts(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """(suffix of the value's key, names it may have on the page, factor)."""
        if self.shape is Shape.MEAN and self.count is not None:
            yield "_sum", _either(self.name), self.scale
            yield "_count", _either(self.count), 1.0
        elif self.shape is Shape.MEAN:
            yield "_sum", (f"{self.name}_sum",), self.scale
            yield "_count", (f"{self.name}_count",), 1.0
        else:
            yield "", _either(self.name) if self.shape is Shape.COUNTER else (self.name,), self.scale


def _either(name: str) -> tuple[str, ...]:
    """With what the client library appends to a counter, and without."""
    return (name,) if name.endswith(("_total", "_sum")) else (f"{name}_total", name)


@dataclass(frozen=True, slots=True)
class About:
    """What is known of an engine beside its names.

    ``begins``: how its names begin; empty where they have no prefix, and ``marks`` tell it. ``told_at``: (path, JSON
    key) of its version, on the same address, the first that answers. ``page``: how it comes to have a metrics page.
    ``default``: why a signal that it has may be missing.
    """

    begins: tuple[str, ...]
    page: str
    default: str
    told_at: tuple[tuple[str, str], ...] = ()
    marks: tuple[str, ...] = ()


# In the order in which they are looked for: a server around an engine (Triton, Ray Serve) comes after it.
ENGINES: Final[Mapping[Engine, About]] = {
    Engine.VLLM: About(
        ("vllm:", "ray_vllm_"),
        "vLLM has its page at /metrics",
        "start vLLM without --disable-log-stats",
        (("/version", "version"),),
    ),
    Engine.SGLANG: About(
        ("sglang:",),
        "start SGLang with --enable-metrics",
        "start SGLang with --enable-metrics",
        (("/get_server_info", "version"), ("/server_info", "version")),
    ),
    Engine.TGI: About(
        ("tgi_",), "TGI has its page at /metrics", "it appears with the first request", (("/info", "version"),)
    ),
    Engine.LLAMA_CPP: About(
        ("llamacpp:",),
        "start llama-server with --metrics",
        "start llama-server with --metrics",
        (("/props", "build_info"),),
    ),
    Engine.TRT_LLM: About(
        ("trtllm_",),
        "TensorRT-LLM has its page at /prometheus/metrics, with return_perf_metrics",
        "start trtllm-serve with return_perf_metrics: true",
        (("/version", "version"),),
    ),
    Engine.TRITON: About(
        ("nv_inference_",), "Triton has its page at :8002/metrics", "start Triton with --allow-metrics=true"
    ),
    Engine.RAY_SERVE: About(
        ("ray_serve_",), "Ray has its page at each node's --metrics-export-port", "start Ray with --metrics-export-port"
    ),
    # vLLM's names of old, without a prefix. Others may use one of these words; nobody else has these.
    Engine.NIM: About(
        (),
        "NIM has its page at /v1/metrics",
        "NIM has no such metric in this version",
        (("/v1/version", "release"),),
        marks=("num_requests_running", "num_requests_waiting", "num_request_max", "gpu_cache_usage_perc"),
    ),
}
# Labels that number copies of one thing: every rank of a tensor-parallel engine counts the same requests.
COPIES: Final = frozenset(("tp_rank", "pp_rank", "moe_ep_rank", "ep_rank", "pid"))
# Labels that name the model.
MODELS: Final = ("model_name", "model")
_UNDONE: Final = frozenset(("abort", "error"))


def _vllm() -> Iterator[Row]:
    """With ``vllm:``; inside Ray the same names begin with ``ray_vllm_``. V0 and V1 engines."""

    def row(signal: str, name: str, since: str = "", until: str = "", **more: object) -> Row:
        return Row(signal, Engine.VLLM, f"vllm:{name}", since, until, **more)  # type: ignore[arg-type]  # a table's rest

    yield row("running", "num_requests_running")
    yield row("waiting", "num_requests_waiting")
    yield row("swapped", "num_requests_swapped", until="0.9.0")
    yield row("kv_usage_share", "kv_cache_usage_perc", "0.9.2", always=True, fold=Fold.MAX)
    yield row("kv_usage_share", "gpu_cache_usage_perc", until="0.11.2", fold=Fold.MAX)
    yield row("preemptions", "num_preemptions", "0.4.3")
    yield row("prefix_hit_tokens", "prefix_cache_hits", "0.9.2")
    yield row("prefix_hit_tokens", "gpu_prefix_cache_hits", "0.7.3", "0.11.2")
    yield row("prefix_query_tokens", "prefix_cache_queries", "0.9.2")
    yield row("prefix_query_tokens", "gpu_prefix_cache_queries", "0.7.3", "0.11.2")
    # -1 where the cache is off.
    yield row("prefix_hit_share", "gpu_prefix_cache_hit_rate", "0.6.0", "0.9.0", fold=Fold.MEAN, least=0.0)
    yield row("ttft_s", "time_to_first_token_seconds", "0.4.2")
    yield row("itl_s", "inter_token_latency_seconds", "0.10.2", always=True)
    yield row("itl_s", "time_per_output_token_seconds", "0.4.2", "0.14.1")
    yield row("tpot_s", "request_time_per_output_token_seconds", "0.11.0", always=True)
    yield row("e2e_s", "e2e_request_latency_seconds", "0.4.2")
    yield row("queue_s", "request_queue_time_seconds", "0.6.4")
    yield row("queue_s", "time_in_queue_requests", "0.6.4", "0.9.0")
    yield row("prefill_s", "request_prefill_time_seconds", "0.6.4")
    yield row("decode_s", "request_decode_time_seconds", "0.6.4")
    yield row("inference_s", "request_inference_time_seconds", "0.6.4")
    yield row("prompt_tokens", "prompt_tokens")
    yield row("output_tokens", "generation_tokens")
    yield row("step_tokens", "iteration_tokens_total", "0.6.4")
    yield row("prompt_length_tokens", "request_prompt_tokens")
    yield row("output_length_tokens", "request_generation_tokens")
    yield row("finished", "request_success", but={"finished_reason": _UNDONE})
    yield row("aborted", "request_success", only={"finished_reason": frozenset(("abort",))})
    yield row("failed", "request_success", only={"finished_reason": frozenset(("error",))})
    yield row("spec_accepted_tokens", "spec_decode_num_accepted_tokens", "0.5.4")
    yield row("spec_draft_tokens", "spec_decode_num_draft_tokens", "0.5.4")
    yield row("spec_drafts", "spec_decode_num_drafts", "0.8.3")
    yield row("spec_accept_share", "spec_decode_draft_acceptance_rate", "0.5.4", "0.9.2", fold=Fold.MEAN, least=0.0)
    for name, since, until in (("cache_config_info", "0.6.0", ""), ("cache_config", "0.4.2", "0.5.4")):
        yield row("kv_blocks", name, since, until, label="num_gpu_blocks")
        yield row("block_tokens", name, since, until, label="block_size", fold=Fold.MAX)


def _sglang() -> Iterator[Row]:
    def row(signal: str, name: str, since: str = "", until: str = "", **more: object) -> Row:
        return Row(signal, Engine.SGLANG, f"sglang:{name}", since, until, **more)  # type: ignore[arg-type]  # as above

    yield row("running", "num_running_reqs")
    yield row("waiting", "num_queue_reqs")
    yield row("kv_usage_share", "token_usage", fold=Fold.MAX)
    yield row("preemptions", "num_retracted_requests", "0.5.10")
    # A histogram of retractions per request: its sum counts them.
    yield row("preemptions", "num_retractions_sum", "0.5.6", "0.5.10")
    yield row("preemptions", "total_retracted_reqs", "0.4.10", "0.4.10")
    yield row("prefix_hit_tokens", "cached_tokens", "0.4.6")
    yield row("prefix_query_tokens", "prompt_tokens")
    yield row("prefix_hit_share", "cache_hit_rate", fold=Fold.MEAN)
    yield row("ttft_s", "time_to_first_token_seconds")
    yield row("itl_s", "inter_token_latency_seconds", "0.4.6", always=True)
    yield row("itl_s", "time_per_output_token_seconds", until="0.4.3")
    yield row("tpot_s", "request_time_per_output_token_seconds", "0.5.23")
    yield row("e2e_s", "e2e_request_latency_seconds")
    yield row("queue_s", "queue_time_seconds", "0.5.3", always=True)
    yield row("prefill_s", "per_stage_req_latency_seconds", "0.5.3", only={"stage": frozenset(("prefill_forward",))})
    yield row("prompt_tokens", "prompt_tokens")
    yield row("output_tokens", "generation_tokens")
    yield row("prompt_length_tokens", "prompt_tokens_histogram")
    yield row("output_length_tokens", "generation_tokens_histogram")
    yield row("finished", "num_requests")
    yield row("aborted", "num_aborted_requests", "0.4.9")
    # 0 while it does not speculate.
    yield row("spec_accept_length", "spec_accept_length", "0.4.3", fold=Fold.MEAN, least=1e-9)
    yield row("spec_accept_share", "spec_accept_rate", "0.5.6", fold=Fold.MEAN, least=1e-9)
    yield row("process_cpu_s", "process_cpu_seconds", "0.5.10")
    # Of several ranks the busiest decides.
    yield row("scheduler_cpu_s", "scheduler_process_cpu_seconds", "0.5.23", fold=Fold.MAX)
    yield row("scheduler_idle_s", "scheduler_idle_seconds", "0.5.23", fold=Fold.MIN)
    yield row("kv_blocks", "num_pages", "0.5.23")
    yield row("block_tokens", "page_size", "0.5.23", fold=Fold.MAX)


def _others() -> Iterator[Row]:
    def tgi(signal: str, name: str, **more: object) -> Row:
        return Row(signal, Engine.TGI, f"tgi_{name}", **more)  # type: ignore[arg-type]  # as above

    yield tgi("running", "batch_current_size")
    yield tgi("waiting", "queue_size")
    yield tgi("queue_s", "request_queue_duration")
    yield tgi("tokenize_s", "request_validation_duration")
    yield tgi("inference_s", "request_inference_duration")
    yield tgi("e2e_s", "request_duration")
    yield tgi("tpot_s", "request_mean_time_per_token_duration")
    # Of a batch and its step: a request's own prefill, and the gap between two of its tokens.
    yield tgi("prefill_s", "batch_inference_duration", only={"method": frozenset(("prefill",))})
    yield tgi("itl_s", "batch_inference_duration", only={"method": frozenset(("decode",))})
    yield tgi("prompt_length_tokens", "request_input_length")
    yield tgi("output_length_tokens", "request_generated_tokens")
    yield tgi("prompt_tokens", "request_input_length_sum")
    yield tgi("output_tokens", "request_generated_tokens_sum")
    yield tgi("finished", "request_success")
    yield tgi("failed", "request_failure")

    def llama(signal: str, name: str, **more: object) -> Row:
        return Row(signal, Engine.LLAMA_CPP, f"llamacpp:{name}", **more)  # type: ignore[arg-type]  # as above

    yield llama("running", "requests_processing")
    yield llama("waiting", "requests_deferred")
    yield llama("kv_usage_share", "kv_cache_usage_ratio", fold=Fold.MAX)
    yield llama("prompt_tokens", "prompt_tokens")
    yield llama("output_tokens", "tokens_predicted")
    yield llama("itl_s", "tokens_predicted_seconds", count="llamacpp:tokens_predicted")

    def trtllm(signal: str, name: str, **more: object) -> Row:
        return Row(signal, Engine.TRT_LLM, f"trtllm_{name}", **more)  # type: ignore[arg-type]  # as above

    yield trtllm("ttft_s", "time_to_first_token_seconds")
    yield trtllm("tpot_s", "time_per_output_token_seconds")
    yield trtllm("e2e_s", "e2e_request_latency_seconds")
    yield trtllm("queue_s", "request_queue_time_seconds")
    yield trtllm("finished", "request_success", but={"finished_reason": _UNDONE})
    yield trtllm("kv_usage_share", "kv_cache_utilization", fold=Fold.MAX)
    yield trtllm("prefix_hit_share", "kv_cache_hit_rate", fold=Fold.MEAN)

    def triton(signal: str, name: str, scale: float = 1.0, count: str | None = None) -> Row:
        many = None if count is None else f"nv_inference_{count}"
        return Row(signal, Engine.TRITON, f"nv_inference_{name}", scale=scale, count=many)

    # Cumulative microseconds, over the requests that succeeded.
    yield triton("waiting", "pending_request_count")
    yield triton("queue_s", "queue_duration_us", 1e-6, "request_success")
    yield triton("e2e_s", "request_duration_us", 1e-6, "request_success")
    yield triton("inference_s", "compute_infer_duration_us", 1e-6, "request_success")
    yield triton("ttft_s", "first_response_histogram_ms", 1e-3)
    yield triton("finished", "request_success")
    yield triton("failed", "request_failure")

    def ray(signal: str, name: str, scale: float = 1.0, **more: object) -> Row:
        return Row(signal, Engine.RAY_SERVE, f"ray_serve_{name}", scale=scale, **more)  # type: ignore[arg-type]  # as above

    # Milliseconds. Of the replica, where it tells; the proxy's come after.
    yield ray("running", "replica_processing_queries")
    yield ray("running", "num_ongoing_requests_at_replicas")
    yield ray("waiting", "deployment_queued_queries")
    yield ray("waiting", "request_router_queue_len")
    yield ray("queue_s", "request_router_fulfillment_time_ms", 1e-3)
    yield ray("e2e_s", "deployment_processing_latency_ms", 1e-3)
    yield ray("e2e_s", "http_request_latency_ms", 1e-3)
    yield ray("finished", "deployment_request_counter")
    yield ray("failed", "deployment_error_counter")
    # A replica's own loop stands in every stream's way, the controller's in none.
    yield ray("loop_lag_s", "event_loop_scheduling_latency_ms", 1e-3, only={"component": frozenset(("replica",))})

    def nim(signal: str, name: str, **more: object) -> Row:
        return Row(signal, Engine.NIM, name, **more)  # type: ignore[arg-type]  # as above

    yield nim("running", "num_requests_running")
    yield nim("waiting", "num_requests_waiting")
    yield nim("running_limit", "num_request_max")
    yield nim("kv_usage_share", "gpu_cache_usage_perc", fold=Fold.MAX)
    yield nim("ttft_s", "time_to_first_token_seconds")
    yield nim("itl_s", "time_per_output_token_seconds")
    yield nim("e2e_s", "e2e_request_latency_seconds")
    yield nim("prompt_tokens", "prompt_tokens")
    yield nim("output_tokens", "generation_tokens")
    yield nim("prompt_length_tokens", "request_prompt_tokens")
    yield nim("output_length_tokens", "request_generation_tokens")
    yield nim("finished", "request_success", but={"finished_reason": _UNDONE})
    yield nim("failed", "request_failure")


def _every_process() -> Iterator[Row]:
    """What the client library of Python tells of its own process: of the engine's API server, not of its workers."""
    for engine in (Engine.VLLM, Engine.SGLANG, Engine.NIM, Engine.TRT_LLM):
        yield Row("process_cpu_s", engine, "process_cpu_seconds")
        yield Row("process_start_s", engine, "process_start_time_seconds", fold=Fold.MAX)


def _within_ray(rows: Iterator[Row]) -> Iterator[Row]:
    for row in rows:
        if row.engine is Engine.VLLM and row.name.startswith("vllm:"):
            yield replace(row, name="ray_vllm_" + row.name.removeprefix("vllm:"))


ROWS: Final[tuple[Row, ...]] = (*_vllm(), *_within_ray(_vllm()), *_sglang(), *_others(), *_every_process())


@dataclass(frozen=True, slots=True)
class Marker:
    """A name that dates a page and is no signal: shown from ``since`` on, without any flag where ``always``."""

    engine: Engine
    name: str
    since: str
    always: bool = False


MARKERS: Final = (
    Marker(Engine.VLLM, "vllm:request_prefill_kv_computed_tokens_count", "0.13.0"),
    Marker(Engine.VLLM, "vllm:prompt_tokens_by_source_total", "0.16.0"),
    Marker(Engine.VLLM, "vllm:estimated_flops_per_gpu_total", "0.17.0"),
    Marker(Engine.VLLM, "vllm:num_requests_waiting_by_reason", "0.20.0", always=True),
    # Between 0.27, which has it not, and 0.30, which does, nobody looked.
    Marker(Engine.VLLM, "vllm:request_num_preemptions_count", "0.28.0"),
    Marker(Engine.SGLANG, "sglang:kv_available_tokens", "0.5.15"),
)
# Only a router that re-uses vLLM's names has these.
ROUTER: Final = ("vllm:current_qps", "vllm:avg_itl", "vllm:avg_latency", "vllm:healthy_pods_total")

# Signal → why this engine may not show it, and what to do. The rest have their engine's ``default``.
MISSING: Final[Mapping[tuple[Engine, str], str]] = {
    (Engine.VLLM, "tokenize_s"): "vLLM has no such metric; from 0.17 on its TTFT less queue and prefill holds it",
    (Engine.VLLM, "scheduler_cpu_s"): "vLLM has no such metric; give its process with --engine-pid",
    (Engine.VLLM, "running_limit"): "the page does not tell --max-num-seqs; give the start-up log with --engine-log",
    (Engine.VLLM, "prefix_hit_tokens"): "start vLLM with --enable-prefix-caching",
    (Engine.VLLM, "aborted"): "it appears with the first request that is aborted",
    (Engine.VLLM, "failed"): "it appears with the first request that fails",
    (Engine.VLLM, "finished"): "it appears with the first request that is finished",
    (Engine.SGLANG, "preemptions"): "it appears with the first request that is retracted",
    (Engine.SGLANG, "aborted"): "it appears with the first request that is aborted",
    (Engine.SGLANG, "prefix_hit_tokens"): "it appears with the first hit; start SGLang without --disable-radix-cache",
    (Engine.SGLANG, "running_limit"): "the page does not tell --max-running-requests; give --engine-log",
    (Engine.TGI, "ttft_s"): "TGI has no such metric; the tap's own TTFT less queue and validation stands for it",
    (Engine.TGI, "failed"): "it appears with the first request that fails",
    (Engine.LLAMA_CPP, "kv_usage_share"): "llama.cpp has dropped it; its /slots page tells it, with --slots",
    (Engine.RAY_SERVE, "failed"): "it appears with the first request that fails",
    (Engine.TRITON, "queue_s"): "start Triton with --allow-metrics=true",
    (Engine.TRITON, "ttft_s"): "start Triton with --metrics-config histogram_latencies=true",
    (Engine.TRITON, "waiting"): "start Triton with --allow-metrics=true",
    **{
        (Engine.RAY_SERVE, signal): "Ray tells nothing of the engine inside: set log_engine_metrics in its LLMConfig"
        for signal in ("kv_usage_share", "preemptions", "ttft_s", "itl_s", "prefill_s", "decode_s", "output_tokens")
    },
    **{
        (row.engine, row.signal): f"the engine drafts no tokens; it has this when started with {flag}"
        for engine, flag in ((Engine.VLLM, "--speculative-config"), (Engine.SGLANG, "--speculative-algorithm"))
        for row in ROWS
        if row.engine is engine and row.signal.startswith("spec_")
    },
    **{
        (row.engine, row.signal): "the page does not show the engine's process; give it with --engine-pid"
        for row in _every_process()
    },
}
# (engine, signal, first and last version) → the flag that brings back what these versions hide.
HIDDEN: Final = (
    (Engine.VLLM, "kv_usage_share", "0.11.0", "0.11.2", "start vLLM with --show-hidden-metrics-for-version=0.10"),
    (Engine.VLLM, "itl_s", "0.12.0", "0.14.1", "start vLLM with --show-hidden-metrics-for-version=0.11"),
)
SIGNALS_OF_ENGINES: Final = tuple(name for name, (kind, _) in SIGNALS.items() if kind is SampleKind.ENGINE)
# Every name of the table as bytes: what the reader of pages keeps.
WANTED: Final = frozenset(name.encode() for row in ROWS for _, names, _ in row.parts() for name in names) | frozenset(
    name.replace("vllm:", begins).encode()
    for begins in ENGINES[Engine.VLLM].begins
    for name in (*(marker.name for marker in MARKERS), *ROUTER)
)
