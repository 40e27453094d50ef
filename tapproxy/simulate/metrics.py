"""The /metrics page: vLLM 0.32's names, buckets and exposition, from the model's own state.

Rules, as in vLLM: TTFT and E2E count from the arrival in the API process, before tokenising; queue, prefill and
decode from the scheduler's times; prompt tokens are counted when the prefill is done, so recomputed ones are not
counted twice. Unlike vLLM a client that leaves is counted (``finished_reason="abort"``). ``sim:`` is ours.
"""

from __future__ import annotations

import bisect
import resource
import time
from collections import Counter
from collections.abc import Iterable

from tapproxy.simulate.engine import BLOCK_TOKENS, Engine, Output, Sequence, Step

_TTFT = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_ITL = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_PHASE = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0)
_STEP_TOKENS = (1.0, *(float(8 << i) for i in range(12)))
_LATE = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.1)

HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("vllm:request_prompt_tokens", "Number of prefill tokens processed.", _TOKENS),
    ("vllm:request_generation_tokens", "Number of generation tokens processed.", _TOKENS),
    ("vllm:iteration_tokens_total", "Histogram of number of tokens per engine_step.", _STEP_TOKENS),
    ("vllm:request_params_n", "Histogram of the n request parameter.", (1.0, 2.0, 5.0, 10.0, 20.0)),
    ("vllm:request_params_max_tokens", "Histogram of the max_tokens request parameter.", _TOKENS),
    ("vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", _TTFT),
    ("vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", _ITL),
    (
        "vllm:request_time_per_output_token_seconds",
        "Histogram of time_per_output_token_seconds per request.",
        _ITL,
    ),
    ("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", _PHASE),
    ("vllm:request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", _PHASE),
    ("vllm:request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", _PHASE),
    ("vllm:request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", _PHASE),
    ("vllm:request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", _PHASE),
    (
        "vllm:request_num_preemptions",
        "Histogram of the number of times a request was preempted.",
        (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0),
    ),
    ("sim:timer_late_seconds", "How late the simulator's timers rang: the error of its truth.", _LATE),
)
REASONS = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1  # le: a bound belongs to its own bucket
        self.sum += value


class EngineMetrics:
    def __init__(self, model: str, *, created_s: float | None = None) -> None:
        self.model = model
        self.created_s = time.time() if created_s is None else created_s
        self.histograms = {name: Histogram(bounds) for name, _, bounds in HISTOGRAMS}
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.http: Counter[tuple[str, str, str]] = Counter()  # handler, method, status class
        self.drafts = self.draft_tokens = self.accepted_tokens = 0
        self._late = self.histograms["sim:timer_late_seconds"]

    def asked(self, n: int, max_tokens: int | None) -> None:
        self.histograms["vllm:request_params_n"].observe(n)
        if max_tokens is not None:
            self.histograms["vllm:request_params_max_tokens"].observe(max_tokens)

    def late(self, late_ns: int) -> None:
        self._late.observe(late_ns / 1e9)

    def step(self, step: Step) -> None:
        tokens = sum(self.output(output) for output in step.outputs)
        if tokens:
            self.histograms["vllm:iteration_tokens_total"].observe(tokens)
        self.drafts += step.drafts
        self.draft_tokens += step.draft_tokens
        self.accepted_tokens += step.accepted_tokens

    def output(self, output: Output) -> int:
        """Count what one sequence gained; the prompt's tokens with its first."""
        sequence = output.sequence
        assert sequence.last_ns is not None
        tokens = output.gained
        self.generation_tokens += tokens
        if output.previous_ns is None:
            self._seconds("vllm:time_to_first_token_seconds", sequence.last_ns - sequence.arrival_ns)
            self.prompt_tokens += sequence.prompt_tokens
            tokens += sequence.prompt_tokens
        else:
            self._seconds("vllm:inter_token_latency_seconds", sequence.last_ns - output.previous_ns)
        return tokens

    def ended(self, sequence: Sequence, reason: str) -> None:
        """One sequence left the engine. Latencies are only those of sequences that were completed."""
        self.finished[reason] += 1
        first_ns, last_ns, scheduled_ns = sequence.first_ns, sequence.last_ns, sequence.scheduled_ns
        if reason not in ("stop", "length") or first_ns is None or last_ns is None or scheduled_ns is None:
            return
        for name, elapsed_ns in (
            ("vllm:e2e_request_latency_seconds", last_ns - sequence.arrival_ns),
            ("vllm:request_queue_time_seconds", scheduled_ns - sequence.queued_ns),
            ("vllm:request_inference_time_seconds", last_ns - scheduled_ns),
            ("vllm:request_prefill_time_seconds", first_ns - scheduled_ns),
            ("vllm:request_decode_time_seconds", last_ns - first_ns),
        ):
            self._seconds(name, elapsed_ns)
        if sequence.generated > 1:
            per_token_s = (last_ns - first_ns) / (sequence.generated - 1) / 1e9
            self.histograms["vllm:request_time_per_output_token_seconds"].observe(per_token_s)
        self.histograms["vllm:request_prompt_tokens"].observe(sequence.prompt_tokens)
        self.histograms["vllm:request_generation_tokens"].observe(sequence.generated)
        self.histograms["vllm:request_num_preemptions"].observe(sequence.preemptions)

    def _seconds(self, name: str, elapsed_ns: int) -> None:
        self.histograms[name].observe(elapsed_ns / 1e9)

    # -- exposition ----------------------------------------------------------------------------------------

    def page(self, engine: Engine, running_fixed: int) -> bytes:
        """The text format; ``running_fixed`` are sequences with a schedule of their own."""
        labels = f'engine="0",model_name="{_escape(self.model)}"'
        lines: list[str] = []
        for name, text, value in self._gauges(engine, running_fixed):
            lines += _family(name, "gauge", text, [f"{name}{{{labels}}} {value!r}"])
        for name, text, number in self._counters(engine):
            lines += self._counter(name, text, [(labels, float(number))])
        lines += self._counter(
            "vllm:request_success_total",
            "Count of successfully processed requests.",
            [
                (f'engine="0",finished_reason="{r}",model_name="{_escape(self.model)}"', self.finished[r])
                for r in REASONS
            ],
        )
        for name, text, _ in HISTOGRAMS:
            own = labels if name.startswith("vllm:") else ""
            lines += self._histogram(name, text, own)
        lines += _cache_config(engine)
        lines += self._process()
        return ("\n".join(lines) + "\n").encode()

    def _gauges(self, engine: Engine, running_fixed: int) -> Iterable[tuple[str, str, float]]:
        running = float(len(engine.running) + running_fixed)
        yield "vllm:num_requests_running", "Number of requests in model execution batches.", running
        waiting = float(len(engine.waiting))
        yield "vllm:num_requests_waiting", "Number of requests waiting to be processed.", waiting
        yield "vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", engine.kv_usage

    def _counters(self, engine: Engine) -> Iterable[tuple[str, str, int]]:
        yield (
            "vllm:num_preemptions_total",
            "Cumulative number of preemption from the engine.",
            engine.preemptions,
        )
        yield "vllm:prompt_tokens_total", "Number of prefill tokens processed.", self.prompt_tokens
        yield "vllm:generation_tokens_total", "Number of generation tokens processed.", self.generation_tokens
        yield "vllm:prefix_cache_queries_total", "Prefix cache queries, in tokens (prefix caching is off).", 0
        yield "vllm:prefix_cache_hits_total", "Prefix cache hits, in tokens (prefix caching is off).", 0
        if engine.config.spec_tokens:
            yield "vllm:spec_decode_num_drafts_total", "Number of spec decoding drafts.", self.drafts
            yield "vllm:spec_decode_num_draft_tokens_total", "Number of draft tokens.", self.draft_tokens
            yield (
                "vllm:spec_decode_num_accepted_tokens_total",
                "Number of accepted tokens.",
                self.accepted_tokens,
            )

    def _counter(self, name: str, text: str, samples: list[tuple[str, float]]) -> list[str]:
        created = name.removesuffix("_total") + "_created"
        return [
            *_family(name, "counter", text, [f"{name}{{{own}}} {float(v)!r}" for own, v in samples]),
            *_family(created, "gauge", text, [f"{created}{{{own}}} {self.created_s!r}" for own, _ in samples]),
        ]

    def _histogram(self, name: str, text: str, labels: str) -> list[str]:
        histogram = self.histograms[name]
        comma = "," if labels else ""
        samples, total = [], 0
        for bound, count in zip((*histogram.bounds, None), histogram.counts, strict=True):
            total += count
            le = "+Inf" if bound is None else repr(bound)
            samples.append(f'{name}_bucket{{{labels}{comma}le="{le}"}} {float(total)!r}')
        braces = f"{{{labels}}}" if labels else ""
        samples.append(f"{name}_count{braces} {float(total)!r}")
        samples.append(f"{name}_sum{braces} {histogram.sum!r}")
        created = f"{name}_created"
        return [
            *_family(name, "histogram", text, samples),
            *_family(created, "gauge", text, [f"{created}{braces} {self.created_s!r}"]),
        ]

    def _process(self) -> list[str]:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = usage.ru_utime + usage.ru_stime
        http = [
            f'http_requests_total{{handler="{_escape(h)}",method="{_escape(m)}",status="{s}"}} {float(n)!r}'
            for (h, m, s), n in self.http.items()
        ]
        start, cpu = "process_start_time_seconds", "process_cpu_seconds_total"
        return [
            *_family(start, "gauge", "Start time of the process.", [f"{start} {self.created_s!r}"]),
            *_family(cpu, "counter", "Total user and system CPU time.", [f"{cpu} {cpu_s!r}"]),
            *_family("http_requests_total", "counter", "Total number of requests.", http),
        ]


def _cache_config(engine: Engine) -> list[str]:
    name = "vllm:cache_config_info"
    labels = (
        f'block_size="{BLOCK_TOKENS}",cache_dtype="auto",enable_prefix_caching="False",engine="0",'
        f'gpu_memory_utilization="0.92",num_gpu_blocks="{engine.config.kv_blocks}"'
    )
    return _family(name, "gauge", "Information of the LLMEngine CacheConfig", [f"{name}{{{labels}}} 1.0"])


def _family(name: str, kind: str, text: str, samples: list[str]) -> list[str]:
    return [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples]


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
