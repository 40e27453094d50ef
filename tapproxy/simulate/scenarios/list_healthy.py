"""Scenarios in which nothing is wrong. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tapproxy.simulate.scenarios.parts import HEALTHY, Engine, Load, Nginx, Scenario, Setting, Tap, Value


def _direct(name: str, title: str, flags: Mapping[str, Value], load: Load) -> Scenario:
    return Scenario(name, title, HEALTHY, setting=Setting((Tap("tap"), Engine(flags)), load))


def _proxied(name: str, title: str, nginx: Nginx, load: Load) -> Scenario:
    setting = Setting((Tap("outer"), nginx, Tap("inner"), Engine()), load)
    return Scenario(name, title, HEALTHY, setting=setting)


SCENARIOS: Final = (
    _direct("healthy-direct", "an engine with little to do", {}, Load(40, gap_ms=120)),
    _direct(
        "healthy-busy",
        "an engine with much to do, and enough places",
        {"prefill_tokens_per_s": 60_000, "decode_per_seq_us": 50},
        Load(120, gap_ms=40, tokens=(48,), prompts=(64,)),
    ),
    _direct(
        "healthy-slow",
        "a large model: slow, and steady",
        {"decode_base_us": 60_000, "prefill_tokens_per_s": 6000, "prefill_overhead_us": 20_000},
        Load(30, gap_ms=200, tokens=(16,), prompts=(64,)),
    ),
    _direct(
        "healthy-long-prompts",
        "long prompts by design, read as fast as they are elsewhere",
        {"max_num_batched_tokens": 8192},
        Load(25, gap_ms=300, tokens=(24,), prompts=(1500, 2500, 3500)),
    ),
    _proxied("healthy-nginx", "nginx as recommended", Nginx(), Load(40, gap_ms=120)),
    _proxied("healthy-nginx-busy", "nginx as recommended, with much to do", Nginx(), Load(100, gap_ms=40)),
)
