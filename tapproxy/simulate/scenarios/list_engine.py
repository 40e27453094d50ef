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

# What an engine is slowed to, and what its card's log then says, in the columns that people have.
_THERMAL: Final = {
    "clocks.sm": "1005 MHz",
    "temperature.gpu": "91",
    "clocks_event_reasons.active": "0x0000000000000020",
    "clocks_event_reasons.sw_thermal_slowdown": "Active",
}


def _of_engine(metric: str, column: str, how: str) -> Truth:
    return Truth(Known.ENGINE, metric, how, of=column)


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
        "an engine told to run two at a time, with its cache nearly empty",
        "engine.batching",
        {"max_num_seqs": 2, "decode_base_us": 15_000},
        Load(40, gap_ms=150, tokens=(24,)),
        _QUEUE,
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
        "long prompts on an engine that takes long to read them",
        "engine.prefill",
        {"prefill_tokens_per_s": 3000, "max_num_batched_tokens": 4096},
        Load(15, warmup=1, gap_ms=850, tokens=(6,), prompts=(1500, 900, 2100, 1200, 1800)),
        _PREFILL,
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
        _of_engine("tpot", "tpot", "the engine's own log: from its first to its last token, over the tokens between"),
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
        "an engine that is slow to begin, and says nothing of itself",
        "engine.unattributed",
        {"prefill_tokens_per_s": 5000, "max_num_batched_tokens": 4096, "frontend_us_per_token": 300.0},
        Load(25, gap_ms=700, tokens=(6,), prompts=(1000,)),
        _of_engine("ttft", "engine", "the engine's own log: from the request's arrival to its first token"),
        sampled=False,
        told=False,
    ),
    _scenario(
        "unattributed-queue",
        "a full engine that says nothing of itself: nobody can tell the queue from the rest",
        "engine.unattributed",
        {"max_num_seqs": 4, "decode_base_us": 20_000},
        Load(40, gap_ms=150, tokens=(40,)),
        _of_engine("ttft", "engine", "the engine's own log: from the request's arrival to its first token"),
        sampled=False,
        told=False,
    ),
    _scenario(
        "gpu-throttled",
        "an engine slowed threefold for 4 s, and a log of nvidia-smi (written by this program) of a card too hot then",
        "gpu.throttled",
        {"decode_base_us": 20_000, "slow_after_ms": 2500, "slow_for_ms": 4000, "slow_percent": 300},
        Load(50, gap_ms=140, tokens=(20,)),
        card=Card(_THERMAL),
    ),
    _scenario(
        "gpu-contention",
        "an engine slowed threefold for 4 s, and a log of nvidia-smi (written by this program) of another process on "
        "the card then",
        "gpu.contention",
        {"decode_base_us": 20_000, "slow_after_ms": 2500, "slow_for_ms": 4000, "slow_percent": 300},
        Load(50, gap_ms=140, tokens=(20,)),
        card=Card({"utilization.gpu": "100 %"}, processes=2),
    ),
    _scenario(
        "host-cpu",
        "an engine that shares one core with three programs that never rest",
        "host.cpu",
        {"decode_base_us": 8_000},
        Load(40, gap_ms=90, tokens=(20,)),
        cores=(1,),
        hogs=(1, 1, 1),
        host=True,
    ),
    _scenario(
        "queue-and-tokenizer",
        "two at once: a full engine, and before its queue a slow tokenizer",
        "engine.queue",
        {
            "max_num_seqs": 4,
            "decode_base_us": 20_000,
            "kv_blocks": 96,
            "max_model_len": 1024,
            "frontend_us_per_token": 400.0,
        },
        Load(40, gap_ms=150, tokens=(40,), prompts=(280, 300, 320)),
        _QUEUE,
        also=("engine.tokenizer",),
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
