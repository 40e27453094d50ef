"""One run of a comparison as data: what was asked for, what every path answered, and what is known beside it.

Data only, so that sending, judging and keeping a run need not know one another: the sender fills it, ``load.compare``
reads it, the register stores it. Times are CLOCK_MONOTONIC ns of the client unless a name says otherwise; None is
unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tapproxy.core.sample import Sample
from tapproxy.load.sender import Result


class Scenario(StrEnum):
    """When requests are sent, as MLPerf LoadGen names it; ``concurrency`` is a closed loop of N clients."""

    SINGLE_STREAM = "single-stream"
    SERVER = "server"
    OFFLINE = "offline"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True)
class Asked:
    """The settings of the run that decide whether two runs compare; counts and rates are per path."""

    scenario: Scenario
    api: str  # "chat" or "completions"
    requests: int | None
    duration_s: float | None
    rate: float | None
    concurrency: int | None
    warmup: int
    max_tokens: int
    seed: int
    ignore_eos: bool
    fresh_connections: bool
    prompts: str  # where they come from: "synthetic:64 tokens (tokenizer …)", "file:NAME sha256:…"
    stream: bool = True
    swept: dict[str, float] = field(default_factory=dict)  # of a sweep: the setting of this point


@dataclass(slots=True)
class ClientFacts:
    """How the client itself fared: what spoils its numbers is said here. Durations in ns."""

    loop_lag_max_ns: int | None = None
    loop_lag_p99_ns: int | None = None
    cpu_share: float | None = None
    # Actual send less scheduled send, where there is a schedule.
    late_p50_ns: int | None = None
    late_p99_ns: int | None = None
    processes: int = 1
    saturated: bool = False
    why: str | None = None


@dataclass(slots=True)
class PathFacts:
    """What is known of one path beside its answers; None where it could not be had."""

    url: str  # without userinfo and query
    models: list[str] | None = None  # GET /v1/models
    engine: str | None = None  # "vLLM"
    engine_version: str | None = None
    prefix_cache_hits: float | None = None  # of the run: counters after less before
    prefix_cache_queries: float | None = None
    # The first request of all over this path, which may have warmed it up.
    cold_ttft_ns: int | None = None


@dataclass(slots=True)
class Trial:
    """One run. ``results``: of all paths, in the plan's order, warm-up included (``slot.warmup``)."""

    id: str
    started_unix_ns: int
    asked: Asked
    paths: dict[str, PathFacts]  # the first is the baseline
    results: list[Result]
    client: ClientFacts
    # Under --floor: the same load over the baseline's URL twice, as path "A" and path "B".
    floor: list[Result] | None = None
    interrupted: bool = False
    notes: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    # What the engines' pages said meanwhile, where they were named.
    samples: list[Sample] = field(default_factory=list)
