"""Objectives: which requests are good ones, how many a second, and whether a server run shows it.

Rules here: a request that failed is over any target; one whose number is unknown makes the share unknown, and is
never counted as good or bad; one token has no time per further token, which no limit on it forbids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tapproxy.core import metrics, stats
from tapproxy.core.errors import ConfigError
from tapproxy.load.arms import Arm, values_ns
from tapproxy.load.sender import Result

# What a limit can be put on: numbers of which a request has one.
METRICS: Final = ("ttft", "ttfvt", "tpot", "e2e")
# MLPerf's server scenario: 99 of 100 requests are within target.
DEFAULT_PERCENTILE: Final = 0.99
_UNITS_MS: Final = {"us": 0.001, "µs": 0.001, "ms": 1.0, "s": 1000.0}
_TERM: Final = re.compile(
    r"(?P<metric>\w+)(?::p(?P<percentile>\d{1,2}(?:\.\d+)?))?=(?P<number>\d+(?:\.\d+)?|\.\d+)(?P<unit>us|µs|ms|s)"
)


@dataclass(frozen=True, slots=True)
class Objective:
    """At least a share ``percentile`` of the requests stays within ``limit_ms``."""

    metric: str
    limit_ms: float
    percentile: float = DEFAULT_PERCENTILE

    def met_by(self, result: Result, arm: Arm) -> bool | None:
        """Whether the request is within the limit; None where its number is unknown."""
        if result.failure is not None:
            return False
        if result.record.void is not None:
            return None
        values = values_ns(result, f"{self.metric}_ms", arm.start)
        if not values:
            one_token = self.metric == "tpot" and metrics.tpot_flag(result.record) == metrics.TOO_FEW_TOKENS
            return True if one_token else None
        return values[0] <= self.limit_ms * 1e6


@dataclass(frozen=True, slots=True)
class Slo:
    """All objectives; a request is good when it meets every one of them."""

    objectives: tuple[Objective, ...]

    def met_by(self, result: Result, arm: Arm) -> bool | None:
        """False as soon as one is missed, None where that hangs on an unknown number."""
        answers = [objective.met_by(result, arm) for objective in self.objectives]
        return False if False in answers else None if None in answers else True

    def to_dict(self) -> dict[str, Any]:
        """The limits as they were asked for."""
        return {
            each.metric: {"limit_ms": each.limit_ms, "percentile": percentile_name(each.percentile)}
            for each in self.objectives
        }


def percentile_name(p: float) -> str:
    """``p99``, ``p99.9``."""
    return f"p{round(100 * p, 6):g}"


def parse_slo(text: str) -> Slo:
    """``ttft=500ms,tpot=50ms``: metric, limit, unit; ``ttft:p95=0.5s`` for another share than 99 of 100.

    Raises ConfigError for anything else.
    """
    found: dict[str, Objective] = {}
    for term in (part.strip() for part in text.split(",")):
        match = _TERM.fullmatch(term)
        if match is None:
            raise ConfigError(
                f"--slo {term!r} is no objective: expected METRIC=LIMIT with a unit, as in ttft=500ms,tpot=50ms "
                "(or ttft:p95=0.5s for 95 requests of 100)"
            )
        metric = match["metric"]
        if metric not in METRICS:
            raise ConfigError(f"--slo {metric!r} is no metric of a request: there are {', '.join(METRICS)}")
        if metric in found:
            raise ConfigError(f"--slo names {metric} twice: give one limit for it")
        percentile = float(match["percentile"]) / 100 if match["percentile"] else DEFAULT_PERCENTILE
        limit_ms = float(match["number"]) * _UNITS_MS[match["unit"]]
        if limit_ms <= 0 or percentile <= 0:
            raise ConfigError(f"--slo {term!r}: the limit and the percentile must be above 0")
        found[metric] = Objective(metric, limit_ms, percentile)
    return Slo(tuple(found.values()))


def attainment(arm: Arm, slo: Slo) -> tuple[int, int] | None:
    """(good requests, all scheduled); None where a request's number is unknown, or none was sent."""
    answers = [slo.met_by(result, arm) for result in arm.results]
    return None if not answers or None in answers else (answers.count(True), len(answers))


def server_test(arm: Arm, slo: Slo) -> dict[str, Any]:
    """MLPerf's early stopping for each objective: enough requests, and few enough of them over target.

    ``need``: how many more within target it takes to show it, where no further one is over.
    """
    return {each.metric: _shown(each, arm.results, arm) for each in slo.objectives}


def _shown(objective: Objective, results: Sequence[Result], arm: Arm) -> dict[str, Any]:
    answers = [objective.met_by(result, arm) for result in results]
    n = len(answers)
    out: dict[str, Any] = {
        "percentile": percentile_name(objective.percentile),
        "target_ms": objective.limit_ms,
        "n": n,
        "over": None,
        "passes": None,
        "need": None,
    }
    if None in answers:
        return out
    over = answers.count(False)
    out["over"] = over
    out["passes"] = stats.passes(objective.percentile, n, over)
    # Far over target nothing further helps; the search of the table is bounded by that.
    likely = over <= (1 - objective.percentile) * 100_000
    out["need"] = max(0, stats.least_n(objective.percentile, over) - n) if likely else None
    return out
