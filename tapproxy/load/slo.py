"""Objectives (stands in until the judging part is merged)."""

from __future__ import annotations

from dataclasses import dataclass

from tapproxy.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Objective:
    """One limit."""

    metric: str
    limit_ms: float
    percentile: float = 0.99


@dataclass(frozen=True, slots=True)
class Slo:
    """The objectives."""

    objectives: tuple[Objective, ...]


def parse_slo(text: str) -> Slo:
    """Raises ConfigError for no objective."""
    if "=" not in text:
        raise ConfigError(f"--slo {text!r} is no objective: expected METRIC=LIMIT")
    return Slo((Objective("ttft", float(text.rpartition("=")[2].removesuffix("ms")), 0.9 if ":p90" in text else 0.99),))
