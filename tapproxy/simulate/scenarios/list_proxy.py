"""Scenarios of the proxy: client → outer tap → nginx → inner tap → engine. Data only."""

from __future__ import annotations

from typing import Final

from tapproxy.simulate.scenarios.parts import (
    End,
    Engine,
    Known,
    Link,
    Load,
    Nginx,
    Part,
    Relay,
    Scenario,
    Setting,
    Tap,
    Truth,
)


def _path(nginx: Nginx, *behind: Part) -> tuple[Part, ...]:
    return (Tap("outer"), nginx, *behind, Tap("inner"), Engine())


def _against(metric: str) -> Truth:
    return Truth(Known.CLEAN, metric, "the client's figures − those through nginx as recommended, to the same engine")


# A body of some 150 kB at 1 MB/s takes 150 ms; sent on while it comes, the two legs overlap.
_WORDS: Final = 30_000
_SLOW_LEG: Final = Relay({"request_bytes_per_s": 1_000_000})
_BIG: Final = Engine({"max_model_len": 200_000, "kv_blocks": 50_000, "prefill_tokens_per_s": 10_000_000})

SCENARIOS: Final = (
    Scenario(
        "flush-timer",
        "a middlebox that collects what comes and lets it go every 250 ms",
        "proxy.response_buffering",
        setting=Setting(
            _path(Nginx(), Relay({"response_flush_ms": 250.0})),
            Load(30, gap_ms=100, tokens=(60,)),
            _against("ttft"),
            clean=_path(Nginx()),
        ),
    ),
    Scenario(
        "request-buffering",
        "nginx that takes a large prompt whole before it sends any of it on, over lines of 1 MB/s",
        "proxy.request_buffering",
        setting=Setting(
            (_SLOW_LEG, Tap("outer"), Nginx(), _SLOW_LEG, Tap("inner"), _BIG),
            Load(16, gap_ms=500, tokens=(6,), prompts=(_WORDS,)),
            Truth(Known.GIVEN, "ttft", "150 kB at 1 MB/s, once more", ms=150.0),
        ),
    ),
    Scenario(
        "rate-limit",
        "a middlebox that lets 8 kB a second through",
        "proxy.rate_limit",
        setting=Setting(
            _path(Nginx(), Relay({"response_bytes_per_s": 8000})),
            Load(30, gap_ms=100, tokens=(60,)),
            _against("e2e"),
            clean=_path(Nginx()),
        ),
    ),
    Scenario(
        "timeout",
        "nginx that gives up after 400 ms of silence, before an engine that now and then is silent for a second",
        "proxy.timeout",
        setting=Setting(
            (
                Tap("outer"),
                Nginx(location=("proxy_read_timeout 400ms;",)),
                Tap("inner"),
                Engine({"fault": "stall-after=8:1.5", "fault_every": 3}),
            ),
            Load(45, gap_ms=80, tokens=(24,)),
        ),
    ),
    Scenario(
        "connection-reuse",
        "nginx that connects anew for every request, 50 ms away from what it connects to",
        "proxy.connection_reuse",
        setting=Setting(
            (
                Relay(leads_to=End.NEAR),
                Tap("outer", end=End.NEAR),
                Nginx("default", location=("proxy_buffering off;",), end=End.NEAR),
                Tap("inner", end=End.FAR),
                Engine(end=End.FAR),
            ),
            Load(30, gap_ms=100, tokens=(12,)),
            Truth(Known.GIVEN, "ttft", "a connect is one round trip: 2 × 50 ms", ms=100.0),
            link=Link(50.0),
        ),
        also=("network.upstream",),
    ),
    Scenario(
        "retry",
        "nginx that asks a second upstream after the first has failed for 150 ms",
        "proxy.retry",
        setting=Setting(
            (
                Tap("outer"),
                Nginx(
                    location=("proxy_next_upstream error timeout http_502 non_idempotent;",),
                    backup=(Tap("inner"), Relay({"request_delay_ms": 60_000.0, "reset_after_ms": 150.0})),
                ),
                Tap("inner"),
                Engine(),
            ),
            Load(30, gap_ms=100, tokens=(12,)),
            Truth(Known.GIVEN, "ttft", "the first upstream resets after 150 ms", ms=150.0),
        ),
    ),
)
