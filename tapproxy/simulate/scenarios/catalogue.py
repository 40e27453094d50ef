"""What can be staged, and the load that goes over it. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tapproxy.nginx.sandbox import Kind

# The paths of every scenario, in the order they are shown; ``nginx`` is the one that the scenario is about.
ROUTES: Final[Mapping[str, str]] = {
    "direct": "client → engine",
    "tap": "client → inner tap → engine",
    "nginx": "client → outer tap → {nginx} → inner tap → engine",
    "fixed": "client → outer tap → nginx as recommended, TLS → inner tap → engine",
}


@dataclass(frozen=True, slots=True)
class Scenario:
    """One staged path. ``staged`` is the cause a verdict must name, or ``healthy``."""

    name: str
    title: str
    staged: str
    nginx: Kind
    route: str


SCENARIOS: Final[Mapping[str, Scenario]] = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "buffering",
            "nginx with TLS, proxy_pass and nothing else, in front of an engine that streams",
            "proxy.response_buffering",
            "default",
            "nginx by default, TLS",
        ),
        Scenario(
            "healthy",
            "nginx with TLS and the recommended settings, in front of an engine that streams",
            "healthy",
            "fixed",
            "nginx as recommended, TLS",
        ),
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
    tokens: int = 100
    ttft_ms: int = 40
    interval_ms: int = 15
    gap_ms: float = 25.0
    concurrency: int = 96
    prompt_tokens: int = 32
    seed: int = 1
