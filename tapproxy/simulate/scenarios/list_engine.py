"""Scenarios of the engine, of its cards and its host. Data only: client → tap → engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tapproxy.simulate.scenarios.parts import (
    NOT_MEASURED,
    Card,
    Engine,
    Known,
    Load,
    Nginx,
    Scenario,
    Setting,
    Tap,
    Truth,
    Value,
)


def _of_engine(metric: str, column: str, how: str, less_ms: float = 0.0) -> Truth:
    return Truth(Known.ENGINE, metric, how, of=column, less_ms=less_ms)


def _scenario(
    name: str,
    title: str,
    staged: str,
    flags: Mapping[str, Value],
    load: Load,
    truth: Truth | None = None,
    also: tuple[str, ...] = (),
    cores: tuple[int, ...] = (),
    **more: Any,
) -> Scenario:
    setting = Setting((Tap("tap"), Engine(flags, cores=cores)), load, truth, **more)
    return Scenario(name, title, staged, also=also, setting=setting)


# All that a step takes is its 20 ms, or 60.
_SLOWED: Final[Mapping[str, Value]] = {
    "decode_base_us": 20_000,
    "decode_per_seq_us": 0,
    "prefill_overhead_us": 0,
    "prefill_tokens_per_s": 1_000_000,
    "slow_after_ms": 2500,
    "slow_for_ms": 4000,
    "slow_percent": 300,
}
_QUEUE: Final = _of_engine("ttft", "queue", "the engine's own log: from its queue to its first step")
_PREFILL: Final = _of_engine("ttft", "prefill", "the engine's own log: prompt tokens / prefill rate")
# Lengths that let a slope be seen.
_LONG: Final = (300, 1500, 900, 2100, 600)

SCENARIOS: Final = (
    _scenario(
        "queue",
        "an engine with more to do than it can: half a cache of long answers, and the rest wait",
        "engine.queue",
        {"max_num_seqs": 4, "decode_base_us": 20_000, "kv_blocks": 96, "max_model_len": 1024},
        Load(32, gap_ms=150, tokens=(30,), prompts=(200,)),
        _QUEUE,
    ),
    _scenario(
        "batching",
        "an engine told to run two at a time, with its cache nearly empty; its start-up log (made up) says so",
        "engine.batching",
        {"max_num_seqs": 2, "decode_base_us": 15_000},
        Load(40, gap_ms=150, tokens=(24,)),
        _QUEUE,
        startup="INFO vLLM API server version 0.32.0\nINFO non-default args: {'max_num_seqs': 2}\n",
    ),
    _scenario(
        "kv-cache",
        "an engine whose KV cache holds four of the requests, and lets no more in",
        "engine.kv_cache",
        {"kv_blocks": 128, "max_model_len": 2048, "decode_base_us": 20_000},
        Load(40, gap_ms=120, tokens=(30,), prompts=(480,)),
        _QUEUE,
    ),
    _scenario(
        "preemption",
        "an engine whose KV cache fills up while it decodes: requests are thrown out and computed again",
        "engine.preemption",
        {"kv_blocks": 72, "max_model_len": 1024, "decode_base_us": 8_000},
        Load(48, gap_ms=40, concurrency=8, tokens=(110,), prompts=(50,)),
    ),
    _scenario(
        "prefill",
        "long prompts in between, and the short ones wait until they are read",
        "engine.prefill",
        {"prefill_tokens_per_s": 5000, "max_num_batched_tokens": 8192},
        Load(70, gap_ms=130, tokens=(4,), prompts=(30, 40, 50, 60, 40, 30, 1500)),
        _of_engine("ttft", "blocked", "the engine's own log: who came while a long prompt was read, less the rest"),
    ),
    _scenario(
        "prefill-target",
        "long prompts, and a target for the first token that reading them misses",
        "engine.prefill",
        {"prefill_tokens_per_s": 5000, "max_num_batched_tokens": 4096},
        Load(18, warmup=2, gap_ms=500, tokens=(4,), prompts=(1500, 900, 1800, 1200, 600)),
        _PREFILL,
        ttft_target_ms=150.0,
    ),
    _scenario(
        "tokenizer",
        "long prompts on an engine whose tokenizer takes long, before its queue",
        "engine.tokenizer",
        {"frontend_us_per_token": 200.0, "prefill_tokens_per_s": 200_000},
        Load(22, gap_ms=400, tokens=(6,), prompts=_LONG),
        _of_engine("ttft", "frontend", "the engine's own log: prompt tokens × 200 µs"),
    ),
    _scenario(
        "decode",
        "an engine that takes a quarter of a second for each token",
        "engine.decode",
        {"decode_base_us": 250_000, "max_num_batched_tokens": 4096},
        Load(24, gap_ms=150, tokens=(10,)),
        _of_engine("tpot", "tpot", "the engine's own log: tokens' pace, less the target", 100.0),
        tpot_target_ms=100.0,
    ),
    _scenario(
        "bundling",
        "an engine that sends four tokens at a time (--stream-interval 4)",
        "engine.bundling",
        {"bundle": 4},
        Load(30, gap_ms=80, tokens=(41,)),
        # 12.1 ms a token: four are sent together, so the time between two events is four times that; three of the four
        # gaps are what streaming each would have saved.
        Truth(Known.GIVEN, "icl", "3 of 4 gaps of 12.1 ms", ms=3 * 12.1),
    ),
    _scenario(
        "spec-decode",
        "speculative decoding whose drafts are nearly all thrown away",
        "engine.spec_decode",
        {"spec_tokens": 5, "spec_acceptance": 0.15, "decode_base_us": 40_000},
        Load(30, gap_ms=150, tokens=(40,)),
    ),
    _scenario(
        "cold-start",
        "the first twelve requests after the engine's start take 150 ms more",
        "engine.cold_start",
        {"cold_requests": 12, "cold_ms": 150},
        Load(28, warmup=0, gap_ms=260, tokens=(6,)),
        Truth(Known.GIVEN, "ttft", "the 150 ms", ms=150.0),
    ),
    _scenario(
        "stall",
        "an engine that stands still for 600 ms now and then",
        "engine.stall",
        {"stall_every": 60, "stall_ms": 600},
        Load(40, gap_ms=140, tokens=(30,)),
        Truth(Known.GIVEN, "icl", "the 600 ms", ms=600.0),
    ),
    _scenario(
        "errors",
        "an engine that answers every fifth request with 500",
        "engine.errors",
        {"fault": "status=500", "fault_every": 5},
        Load(50, gap_ms=60, tokens=(12,)),
    ),
    _scenario(
        "synthetic-stream",
        "an engine that makes its answer first and streams it afterwards",
        "engine.synthetic_stream",
        {"synthetic_stream": True},
        Load(30, gap_ms=100, tokens=(60,)),
        _of_engine("ttft", "decode", "the engine's own log: from its first to its last token"),
    ),
    _scenario(
        "unattributed",
        "an engine that misses its target for the first token, and says nothing of itself",
        "engine.unattributed",
        {"prefill_tokens_per_s": 5000, "max_num_batched_tokens": 4096, "frontend_us_per_token": 300.0},
        Load(16, warmup=2, gap_ms=420, tokens=(6,), prompts=(500,)),
        _of_engine("ttft", "engine", "the engine's own log: from arrival to first token, less the target", 100.0),
        ttft_target_ms=100.0,
        sampled=False,
        told=False,
    ),
    _scenario(
        "unattributed-queue",
        "a full engine that says nothing of itself: nobody can tell the queue from the rest",
        "engine.unattributed",
        {"max_num_seqs": 4, "decode_base_us": 20_000},
        Load(40, gap_ms=150, tokens=(40,)),
        sampled=False,
        told=False,
    ),
    _scenario(
        "gpu-throttled",
        "an engine slowed threefold for 4 s, and a log of nvidia-smi (written by this program) of a card too hot then",
        "gpu.throttled",
        _SLOWED,
        Load(50, gap_ms=140, tokens=(20,)),
        Truth(Known.GIVEN, "icl", "steps of 60 ms instead of 20", ms=40.0),
        card=Card.HOT,
    ),
    _scenario(
        "gpu-contention",
        "an engine slowed threefold for 4 s, and readings of NVML (made up by this program) of another process on the "
        "card then",
        "gpu.contention",
        _SLOWED,
        Load(50, gap_ms=140, tokens=(20,)),
        Truth(Known.GIVEN, "icl", "steps of 60 ms instead of 20", ms=40.0),
        card=Card.SHARED,
    ),
    _scenario(
        "host-cpu",
        "an engine that shares one core with three programs that never rest",
        "host.cpu",
        {"decode_base_us": 8_000, "step_cpu_us": 3_000},
        Load(30, gap_ms=150, tokens=(20,)),
        cores=(1,),
        hogs=(1, 1, 1),
        host=True,
    ),
    _scenario(
        "tokenizer-and-bundling",
        "two at once: a slow tokenizer, and an engine that sends four tokens at a time",
        "engine.tokenizer",
        {"frontend_us_per_token": 200.0, "prefill_tokens_per_s": 200_000, "bundle": 4},
        Load(22, gap_ms=400, tokens=(25,), prompts=_LONG),
        _of_engine("ttft", "frontend", "the engine's own log: prompt tokens × 200 µs"),
        also=("engine.bundling",),
    ),
    Scenario(
        "buffering-and-queue",
        "two at once: nginx that holds the answers, before a full engine",
        "engine.queue",
        also=("proxy.response_buffering",),
        setting=Setting(
            (
                Tap("outer"),
                Nginx("default", tls=True),
                Tap("inner"),
                Engine({"max_num_seqs": 4, "decode_base_us": 20_000, "kv_blocks": 96, "max_model_len": 1024}),
            ),
            Load(32, gap_ms=150, tokens=(30,), prompts=(200,)),
            _QUEUE,
        ),
    ),
    Scenario(
        "single-tap",
        "one tap behind an nginx that holds the answers: what it cannot see, it must not call healthy",
        NOT_MEASURED,
        setting=Setting((Nginx("default", tls=True), Tap("inner"), Engine()), Load(30, gap_ms=60), client=False),
    ),
)
