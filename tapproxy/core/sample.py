"""One reading of something beside the stream: an engine's metrics page, the host, a GPU, a span, a start-up log.

Rules here: a sample holds what was read, under the names of ``SIGNALS``, and nothing computed from two readings.
Counters and histograms' sums stay cumulative, as they were read: who reads the samples takes the differences. What
was not there is absent from ``values``, never 0, and ``absent`` says how to get it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

SCHEMA: Final = "tapproxy.sample/1"
# The fact "engine" of a metrics page that is no engine's: a router answers there under an engine's names.
ROUTER_NAME: Final = "production-stack router"


class SampleKind(StrEnum):
    """What was read."""

    ENGINE = "engine"  # a metrics page
    HOST = "host"  # the machine, and the engine's processes on it
    GPU = "gpu"  # one card
    SPAN = "span"  # what a trace says of one request
    LAUNCH = "launch"  # what an engine said when it started


class Shape(StrEnum):
    """How a signal's readings combine over time."""

    GAUGE = "gauge"  # holds at the moment it was read
    COUNTER = "counter"  # rises; falls only when its process starts anew
    MEAN = "mean"  # a histogram's: values NAME_sum and NAME_count, both counters
    ONCE = "once"  # of one request, or for as long as the process runs


def _of(kind: SampleKind, shape: Shape, names: str) -> dict[str, tuple[SampleKind, Shape]]:
    return dict.fromkeys(names.split(), (kind, shape))


# Canonical signal → where it is read, and how it combines. Units are in the names: s, ns, bytes, share (0 to 1),
# tokens; the rest are counts.
SIGNALS: Final[Mapping[str, tuple[SampleKind, Shape]]] = {
    **_of(SampleKind.ENGINE, Shape.GAUGE, "running waiting swapped kv_usage_share prefix_hit_share running_limit"),
    **_of(SampleKind.ENGINE, Shape.GAUGE, "spec_accept_share spec_accept_length process_start_s"),
    **_of(SampleKind.ENGINE, Shape.COUNTER, "preemptions prefix_hit_tokens prefix_query_tokens prompt_tokens"),
    **_of(SampleKind.ENGINE, Shape.COUNTER, "output_tokens finished aborted failed process_cpu_s scheduler_cpu_s"),
    **_of(SampleKind.ENGINE, Shape.COUNTER, "spec_accepted_tokens spec_draft_tokens spec_drafts scheduler_idle_s"),
    **_of(SampleKind.ENGINE, Shape.MEAN, "ttft_s itl_s tpot_s e2e_s queue_s prefill_s decode_s inference_s"),
    **_of(SampleKind.ENGINE, Shape.MEAN, "tokenize_s step_tokens prompt_length_tokens output_length_tokens loop_lag_s"),
    # Of the engine's configuration, where its page tells it.
    **_of(SampleKind.ENGINE, Shape.ONCE, "kv_blocks block_tokens"),
    **_of(SampleKind.HOST, Shape.GAUGE, "cores physical_cores run_queue cpu_limit_cores engine_threads"),
    **_of(SampleKind.HOST, Shape.GAUGE, "engine_rss_bytes memory_available_bytes"),
    **_of(SampleKind.HOST, Shape.COUNTER, "cpu_busy_s cpu_steal_s cpu_total_s busiest_core_busy_s context_switches"),
    **_of(SampleKind.HOST, Shape.COUNTER, "psi_cpu_some_s psi_memory_some_s psi_io_some_s cgroup_throttled_s"),
    **_of(SampleKind.HOST, Shape.COUNTER, "tcp_out_segments tcp_retransmits tcp_listen_drops"),
    # Over all processes of the engine; of the one of them that used most; and how long they waited for a core.
    **_of(SampleKind.HOST, Shape.COUNTER, "engine_cpu_s engine_busiest_cpu_s engine_runqueue_wait_s"),
    **_of(SampleKind.HOST, Shape.COUNTER, "engine_context_switches engine_involuntary_switches engine_major_faults"),
    # The same of one thread, since a Python process that holds its lock has one core, however many threads; the wait
    # for a core of the one thread that waited most, which is time lost where the sum need not be; of the process that
    # speaks HTTP, of the one that schedules, and of those that compute, where their names tell them.
    **_of(SampleKind.HOST, Shape.COUNTER, "engine_busiest_thread_cpu_s engine_api_cpu_s engine_core_cpu_s"),
    **_of(SampleKind.HOST, Shape.COUNTER, "engine_worker_cpu_s engine_longest_thread_wait_s"),
    # Which cores the engine may run on at all, and how many physical ones those are; how many processes it has.
    **_of(SampleKind.HOST, Shape.GAUGE, "engine_affinity_cores engine_physical_cores engine_processes"),
    # Of the quota of the engine's control group: periods, and those in which it ran out (a share of the time, as
    # cgroup_throttled_s is not: that adds up over cores, and newer kernels count it otherwise); tasks of it waiting.
    **_of(SampleKind.HOST, Shape.COUNTER, "cgroup_periods cgroup_throttled_periods cgroup_psi_cpu_some_s"),
    **_of(SampleKind.HOST, Shape.COUNTER, "cpu_iowait_s tcp_listen_overflows tcp_timeouts"),
    **_of(SampleKind.GPU, Shape.GAUGE, "gpu_busy_share gpu_memory_used_bytes gpu_memory_total_bytes sm_clock_mhz"),
    **_of(SampleKind.GPU, Shape.GAUGE, "sm_clock_max_mhz power_w power_limit_w temperature_c other_processes"),
    # 1 while the driver says so, else 0: a thermal or power brake, or none that is anybody's fault (idle).
    **_of(SampleKind.GPU, Shape.GAUGE, "throttled throttled_thermal throttled_power mig"),
    # The engine's processes on the card; of the others, how busy they keep it and what memory they have; links that
    # are up. Then how long the driver has braked the card so far, which sees what came and went between two readings.
    **_of(SampleKind.GPU, Shape.GAUGE, "own_processes other_busy_share other_memory_bytes gpu_memory_busy_share"),
    **_of(SampleKind.GPU, Shape.GAUGE, "nvlink_links"),
    **_of(SampleKind.GPU, Shape.COUNTER, "throttled_power_s throttled_thermal_s"),
    **_of(SampleKind.SPAN, Shape.ONCE, "queue_ns prefill_ns decode_ns ttft_ns e2e_ns inference_ns start_unix_ns"),
    **_of(SampleKind.SPAN, Shape.ONCE, "usage_prompt_tokens usage_completion_tokens usage_cached_tokens"),
    # What vLLM's first engine told beside (time in its scheduler; in the model, without and with its own overhead).
    **_of(SampleKind.SPAN, Shape.ONCE, "scheduler_ns forward_ns execute_ns"),
    **_of(SampleKind.LAUNCH, Shape.ONCE, "kv_cache_tokens max_model_len max_num_seqs max_num_batched_tokens"),
    **_of(SampleKind.LAUNCH, Shape.ONCE, "tensor_parallel pipeline_parallel data_parallel gpus stream_interval"),
    # 1 where the log says on, 0 where it says off.
    **_of(SampleKind.LAUNCH, Shape.ONCE, "chunked_prefill prefix_caching cuda_graphs nvlink mig_enabled"),
    **_of(SampleKind.LAUNCH, Shape.ONCE, "gpu_memory_utilization load_s capture_s"),
    # Beside "gpus", the cards that the host has: those that the engine runs on, over all its hosts.
    **_of(SampleKind.LAUNCH, Shape.ONCE, "gpus_used"),
    # How many requests of max_model_len fit in the KV cache, by the engine's own sum; what its start took besides.
    **_of(SampleKind.LAUNCH, Shape.ONCE, "kv_cache_requests compile_s init_s nodes api_servers speculative_tokens"),
    **_of(SampleKind.LAUNCH, Shape.ONCE, "scheduler_steps nvlink_weakest"),
}


@dataclass(slots=True)
class Sample:
    """One reading.

    ``source``: the page, process, card or file, without credentials. ``values``: canonical signal → value; a histogram
    has two, ``NAME_sum`` and ``NAME_count``. ``facts``: words (``engine``, ``version``, ``model``, ``request_id``,
    ``trace_id``, …). ``names``: signal → the name it was read under. ``absent``: signal → how to turn it on.
    ``problem``: why nothing could be read, else None. Times are those of the reading's end.
    """

    kind: str
    source: str
    t_mono_ns: int
    t_unix_ns: int
    boot_id: str | None = None
    tap: str | None = None
    values: dict[str, float] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    problem: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of one line of ``samples-*.jsonl``, ``schema`` first."""
        return {"schema": SCHEMA, **{name: getattr(self, name) for name in _FIELDS}}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """Reads a stored object; unknown keys are skipped. Raises ValueError where it is no sample."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"not a sample: schema is {data.get('schema')!r}, expected {SCHEMA!r}")
        try:
            return cls(**{name: data[name] for name in _FIELDS if name in data})
        except TypeError:
            raise ValueError("not a sample: kind, source, t_mono_ns and t_unix_ns are needed") from None


def taken(samples: Iterable[Sample]) -> list[dict[str, Any]]:
    """What was sampled, source by source: how often, how often in vain, and whose it is. For results as JSON."""
    grouped: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        grouped.setdefault((str(sample.kind), sample.source), []).append(sample)
    out = []
    for (kind, source), group in sorted(grouped.items()):
        good = [sample for sample in group if sample.problem is None]
        bad = [sample.problem for sample in group if sample.problem is not None]
        facts = good[-1].facts if good else {}
        shown = {name: facts.get(name) for name in ("engine", "version", "model")}
        counts = {"samples": len(good), "failed": len(bad), "problem": bad[-1] if bad else None}
        out.append({"kind": kind, "source": source, **counts, **(shown if kind == SampleKind.ENGINE else {})})
    return out


_FIELDS: Final = tuple(Sample.__dataclass_fields__)
