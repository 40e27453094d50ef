"""The simulated engine on virtual time: the records that a tap next to it would write, and its metrics page sampled.

Rules here: nothing sleeps and nothing listens; the batching model and its driver are the real ones, on a clock that
jumps from alarm to alarm. What the engine knows of each request (its ``Sequence``) is kept beside the record as the
truth. A seed gives the arrivals and the small delays of a loopback, so that a case can be run over many of them.
"""

from __future__ import annotations

import heapq
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tapproxy.core.record import (
    DownstreamPart,
    EnginePart,
    Events,
    Record,
    RequestPart,
    StampsPart,
    UpstreamPart,
    UsagePart,
)
from tapproxy.core.sample import Sample
from tapproxy.simulate import engine as sim
from tapproxy.simulate.clock import Alarm
from tapproxy.simulate.config import SimConfig
from tapproxy.simulate.driver import Driver
from tapproxy.simulate.metrics import EngineMetrics
from tapproxy.simulate.shape import request_metrics

MS: Final = 1_000_000
BOOT: Final = "boot-virtual"
PAGE: Final = "http://127.0.0.1:8000/metrics"
# The run begins at this monotonic and this wall time; the engine was started ``started_s`` before.
START_NS: Final = 1_000_000 * MS
UNIX_NS: Final = 1_800_000_000_000_000_000
_EVENT_BYTES: Final = 230

# Exposed name → canonical signal; histograms give NAME_sum and NAME_count.
_VALUES: Final = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage_share",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "output_tokens",
    "vllm:request_success_total": "finished",
    "vllm:spec_decode_num_drafts_total": "spec_drafts",
    "vllm:spec_decode_num_draft_tokens_total": "spec_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "spec_accepted_tokens",
    "process_start_time_seconds": "process_start_s",
}
_MEANS: Final = {
    "vllm:time_to_first_token_seconds": "ttft_s",
    "vllm:inter_token_latency_seconds": "itl_s",
    "vllm:request_time_per_output_token_seconds": "tpot_s",
    "vllm:e2e_request_latency_seconds": "e2e_s",
    "vllm:request_queue_time_seconds": "queue_s",
    "vllm:request_prefill_time_seconds": "prefill_s",
    "vllm:request_decode_time_seconds": "decode_s",
    "vllm:request_inference_time_seconds": "inference_s",
    "vllm:iteration_tokens_total": "step_tokens",
    "vllm:request_prompt_tokens": "prompt_length_tokens",
    "vllm:request_generation_tokens": "output_length_tokens",
}
_PARTS: Final = ("sum", "count")
_NAMES: Final = _VALUES | {f"{name}_{part}": f"{own}_{part}" for name, own in _MEANS.items() for part in _PARTS}
_LINE: Final = re.compile(r"^([a-z_:]+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: when it comes (from the run's start), and its tokens."""

    at_ms: float
    prompt: int = 64
    output: int = 64


@dataclass(frozen=True, slots=True)
class Load:
    """What comes. ``concurrency``: a closed loop; the first so many come at their time, then one for each that ends."""

    requests: Sequence[Asked]
    concurrency: int | None = None


@dataclass(slots=True)
class Run:
    """``truth[i]`` is what the engine knows of ``records[i]``."""

    records: list[Record] = field(default_factory=list)
    truth: list[sim.Sequence] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def from_ns(self) -> int:
        return START_NS

    @property
    def to_ns(self) -> int:
        return max(record.t0_mono_ns + (record.upstream.end or 0) for record in self.records)

    def queue_ns(self) -> list[int]:
        """How long each request stood in the scheduler's queue, in truth."""
        return [one.scheduled_ns - one.queued_ns for one in self.truth if one.scheduled_ns is not None]

    def frontend_ns(self) -> list[int]:
        """How long each request was in the API process, in truth."""
        return [one.queued_ns - one.arrival_ns for one in self.truth]


Length = int | Callable[[random.Random], int]


def poisson(rate: float, count: int, seed: int = 1, prompt: Length = 64, output: Length = 64) -> Load:
    """``count`` requests at random times, ``rate`` a second."""
    chance = random.Random(seed)
    at_ms, found = 0.0, []
    for _ in range(count):
        at_ms += chance.expovariate(rate) * 1000
        found.append(Asked(at_ms, _length(prompt, chance), _length(output, chance)))
    return Load(found)


def closed(concurrency: int, count: int, seed: int = 1, prompt: Length = 64, output: Length = 64) -> Load:
    """``count`` requests, so many of them at any time; the first come 50 ms apart."""
    chance = random.Random(seed)
    return Load([Asked(50.0 * i, _length(prompt, chance), _length(output, chance)) for i in range(count)], concurrency)


def serve(
    load: Load,
    *,
    seed: int = 1,
    told: bool = True,
    page: bool = True,
    every_ms: float = 500,
    started_s: float = 3600,
    noise_ms: float = 0.3,
    changes: Iterable[tuple[float, dict[str, Any]]] = (),
    **settings: Any,
) -> Run:
    """The load on an engine with these settings (fields of ``SimConfig``).

    ``told``: the response's ``metrics`` are on. ``page``: the metrics page is sampled every ``every_ms``.
    ``changes``: [(ms, {field of EngineConfig: value})]: from then on the engine behaves otherwise.
    """
    config = SimConfig(**({"per_request_metrics": told, "seed": seed} | settings))
    clock = _Clock(START_NS)
    engine = sim.Engine(config.engine())
    metrics = EngineMetrics(config.model, created_s=UNIX_NS / 1e9 - started_s)
    frontend = sim.Frontend(round(config.frontend_us_per_token * 1000))
    driver = Driver(engine, frontend, clock, metrics, lambda: clock.now_ns)
    run, chance = Run(), random.Random(seed)
    left = list(enumerate(load.requests))
    done = 0

    def submit(number: int, asked: Asked) -> None:
        sequence = sim.Sequence(asked.prompt, asked.output, clock.now_ns, clock.now_ns)
        sink = _Sink(clock, config.bundle)

        def finish() -> None:
            nonlocal done
            done += 1
            run.records.append(_record(number, sequence, sink, config.per_request_metrics, chance, noise_ms))
            run.truth.append(sequence)
            if load.concurrency is not None and left:
                submit(*left.pop(0))

        sink.finish = finish
        driver.submit([sequence], sink)

    def sample() -> None:
        run.samples.append(read_page(metrics.page(engine, 0), clock.now_ns))
        if done < len(load.requests):
            clock.at(clock.now_ns + round(every_ms * MS), sample)

    def change(values: dict[str, Any]) -> None:
        engine.config = replace(engine.config, **values)

    first = left[: load.concurrency] if load.concurrency is not None else left
    left = left[len(first) :]
    for number, asked in first:
        clock.at(START_NS + round(asked.at_ms * MS), _bound(submit, number, asked))
    for at_ms, values in changes:
        clock.at(START_NS + round(at_ms * MS), _bound(change, values))
    if page:
        clock.at(START_NS, sample)
    clock.run()
    order = sorted(range(len(run.records)), key=lambda i: run.records[i].t0_mono_ns)
    run.records = [run.records[i] for i in order]
    run.truth = [run.truth[i] for i in order]
    return run


def read_page(page: bytes, now_ns: int) -> Sample:
    """The signals of a metrics page; labels are added up."""
    values: dict[str, float] = {}
    facts = {"engine": "vllm"}
    for name, labels, number in _LINE.findall(page.decode()):
        signal = _NAMES.get(name)
        if signal is not None:
            values[signal] = values.get(signal, 0.0) + float(number)
        elif name == "vllm:cache_config_info":
            told = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            values["kv_blocks"], values["block_tokens"] = float(told["num_gpu_blocks"]), float(told["block_size"])
    return sample_of("engine", PAGE, now_ns, values, facts)


def sample_of(
    kind: str, source: str, at_ns: int, values: dict[str, float], facts: dict[str, str] | None = None
) -> Sample:
    """One reading at a monotonic time of the run."""
    return Sample(kind, source, at_ns, UNIX_NS + at_ns - START_NS, BOOT, None, values, facts or {})


def launch(**values: float) -> Sample:
    """What the engine said when it started."""
    return sample_of("launch", "engine.log", START_NS - 60_000 * MS, values)


def readings(
    kind: str, run: Run, values: Callable[[float], dict[str, float]], every_ms: float = 500, source: str = "0"
) -> list[Sample]:
    """A card's samples over the run, or those of the host that the engine runs on; ``values`` of the ms since its
    start."""
    count = int((run.to_ns - START_NS) / (every_ms * MS)) + 2
    facts = {"engine_here": "yes"} if kind == "host" else {}
    return [
        sample_of(kind, source, START_NS + round(i * every_ms * MS), values(i * every_ms), dict(facts))
        for i in range(count)
    ]


class _Clock:
    """Rings alarms in order."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self._heap: list[tuple[int, int, Alarm]] = []
        self._count = 0

    def at(self, deadline_ns: int, callback: Callable[[], None]) -> Alarm:
        self._count += 1
        alarm = Alarm(deadline_ns, callback)
        heapq.heappush(self._heap, (deadline_ns, self._count, alarm))
        return alarm

    def run(self) -> None:
        while self._heap:
            deadline_ns, _, alarm = heapq.heappop(self._heap)
            self.now_ns = max(self.now_ns, deadline_ns)
            if alarm.callback is not None:
                alarm.callback()


class _Sink:
    """One answer as it leaves the engine: (when, tokens of the event)."""

    def __init__(self, clock: _Clock, bundle: int) -> None:
        self.clock = clock
        self.bundle = bundle
        self.ready_ns: int | None = None
        self.events: list[tuple[int, int]] = []
        self.finish: Callable[[], None] = lambda: None
        self._held = 0

    def on_ready(self) -> None:
        self.ready_ns = self.clock.now_ns

    def on_tokens(self, sequence: sim.Sequence, gained: int) -> None:
        self._held += gained
        if not self.events or sequence.finished or self._held >= self.bundle:
            self.events.append((self.clock.now_ns, self._held))
            self._held = 0
        if sequence.finished:
            self.finish()


def _record(
    number: int, sequence: sim.Sequence, sink: _Sink, told: bool, chance: random.Random, noise_ms: float
) -> Record:
    t0_ns = sequence.arrival_ns - MS // 5
    arrived: list[int] = []
    for at_ns, _ in sink.events:
        late_ns = MS // 10 + round(chance.expovariate(1) * noise_ms * MS)
        arrived.append(max(at_ns - t0_ns + late_ns, arrived[-1] if arrived else 0))
    # vLLM's order: the role event with the first token, then the tokens, usage, [DONE].
    kinds = ["role", *["token"] * len(arrived), "usage", "done"]
    times = [arrived[0], *arrived, arrived[-1], arrived[-1]]
    reads = [0, *range(len(arrived)), len(arrived) - 1, len(arrived) - 1]
    head_ns = (sink.ready_ns or sequence.queued_ns) - t0_ns + MS // 10
    engine = EnginePart()
    if told:
        metrics = request_metrics(sequence)
        engine = EnginePart(
            "response.metrics",
            queue_ns=_ns(metrics["queue_time_ms"]),
            prefill_ns=_ns(metrics["time_to_first_token_ms"]),
            decode_ns=_ns(metrics["generation_time_ms"]),
        )
    return Record(
        id=f"inner-{number}",
        tap="inner",
        response_id=f"chatcmpl-{number}",
        t0_unix_ns=UNIX_NS + t0_ns - START_NS,
        t0_mono_ns=t0_ns,
        boot_id=BOOT,
        method="POST",
        path="/v1/chat/completions",
        model="sim",
        stream=True,
        status=200,
        request=RequestPart(
            proxy_marks=[], bytes=4 * sequence.prompt_tokens, head=0, body_end=0, fingerprint=f"hmac-sha256:{number}"
        ),
        upstream=UpstreamPart(
            reused=True,
            wanted=0,
            acquired=0,
            write_start=MS // 10,
            write_end=MS // 10,
            head=head_ns,
            first_byte=times[0],
            end=times[-1],
            bytes=_EVENT_BYTES * len(times),
            rtt_ns=MS // 20,
            min_rtt_ns=MS // 50,
            retransmits=0,
        ),
        downstream=DownstreamPart(
            head=head_ns, first_byte=times[0], end=times[-1], bytes=_EVENT_BYTES * len(times), rtt_ns=MS // 20
        ),
        events=Events(
            kind=kinds,
            end_offset=[_EVENT_BYTES * (index + 1) for index in range(len(times))],
            arrived=times,
            read_at=list(times),
            sent=[at + MS // 20 for at in times],
            read=reads,
            tokens=[0, *[gained for _, gained in sink.events], 0, 0],
        ),
        stamps=StampsPart(source="kernel"),
        usage=UsagePart(prompt_tokens=sequence.prompt_tokens, completion_tokens=sequence.generated),
        engine=engine,
        headers={"content-type": "text/event-stream", "content-encoding": None},
    )


def _ns(value_ms: float | None) -> int | None:
    return None if value_ms is None else round(value_ms * MS)


def _length(length: Length, chance: random.Random) -> int:
    return length if isinstance(length, int) else length(chance)


def _bound(call: Callable[..., None], *values: Any) -> Callable[[], None]:
    return lambda: call(*values)
