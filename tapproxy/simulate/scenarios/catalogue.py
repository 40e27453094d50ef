"""What can be staged, and the load that goes over it. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tapproxy.simulate.scenarios import list_engine, list_healthy, list_line, list_proxy
from tapproxy.simulate.scenarios.parts import Scenario

# The paths of every scenario, in the order they are shown; ``nginx`` is the one that the scenario is about.
ROUTES: Final[Mapping[str, str]] = {
    "direct": "client → engine",
    "tap": "client → inner tap → engine",
    "nginx": "client → outer tap → {nginx} → inner tap → engine",
    "fixed": "client → outer tap → {nginx}, with the patch of `check --fix` → inner tap → engine",
}


SCENARIOS: Final[Mapping[str, Scenario]] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "buffering",
            "nginx with TLS, proxy_pass and nothing else",
            "proxy.response_buffering",
            "default",
            "nginx by default, TLS",
        ),
        Scenario(
            "gzip",
            "nginx with TLS that compresses the stream",
            "proxy.compression",
            "default",
            "nginx with gzip, TLS",
            ("gzip on;", "gzip_types text/event-stream application/json;"),
        ),
        Scenario(
            "healthy",
            "nginx with TLS and the recommended settings",
            "healthy",
            "recommended",
            "nginx as recommended, TLS",
        ),
        *list_proxy.SCENARIOS,
        *list_line.SCENARIOS,
        *list_engine.SCENARIOS,
        *list_healthy.SCENARIOS,
    )
}
DEFAULT: Final = "buffering"


@dataclass(frozen=True, slots=True)
class Workload:
    """The same load for every path. ``tokens`` of some 240 bytes each fill nginx's 16 kB TLS buffer once and more.

    130 requests are the least that give a P95 (early stopping). They start one by one, ``gap_ms`` apart: started
    together, they would wait for each other in every queue on the way, and that would be measured.
    """

    requests: int = 130
    tokens: int = 84
    ttft_ms: int = 40
    interval_ms: int = 20
    gap_ms: float = 27.0
    concurrency: int = 96
    # Fill the pools of connections, so that none is opened on the clock of a counted request.
    warmup: int = 12
    prompt_tokens: int = 32
    seed: int = 1
