"""The shape of a judgement: numbers with unit, count and threshold, the rivals rejected, and what it costs.

Rules here: nothing is measured and nothing blamed; ns become ms here, once, and a percentile that too few values back
is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tapproxy.core import stats

# Of a percentile's name, the share of values below it.
PERCENTILES: Final = {"p50": 0.5, "p95": 0.95}

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Fact:
    """One number. ``threshold`` is what it was held against, where it was; ``n`` is how many values stand behind it."""

    what: str
    value: float | int | None
    unit: str
    n: int | None = None
    threshold: float | int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"what": self.what, "value": self.value, "unit": self.unit, "n": self.n, "threshold": self.threshold}


@dataclass(frozen=True, slots=True)
class Named:
    """A rule's yes. ``effects_ns``: what it cost each affected request; ``whole_ns``: the median it is a share of."""

    facts: list[Fact]
    metric: str | None
    confidence: float
    severity: Severity = "error"
    effects_ns: Sequence[int] = ()
    whole_ns: int | None = None
    rejected: list[tuple[str, str]] = field(default_factory=list)
    # Where the rule's own advice, or its stage, does not fit what was found.
    advice: str | None = None
    # Where the cause costs one stage here and another there.
    stage: str | None = None
    # Where the effects come less often than the whole: their sum's share of it.
    share: float | None = None

    def to_dict(self, cause: str, stage: str | None, advice: str) -> dict[str, Any]:
        """The cause object of the contract."""
        middle = median_ns(self.effects_ns)
        share = self.share
        if share is None and middle is not None and self.whole_ns:
            share = middle / self.whole_ns
        return {
            "cause": cause,
            "stage": self.stage or stage,
            "severity": self.severity,
            "confidence": round(self.confidence, 2),
            "metric": self.metric,
            "effect_ms": {name: ms(percentile_ns(self.effects_ns, p)) for name, p in PERCENTILES.items()},
            "share": None if share is None else round(max(0.0, min(1.0, share)), 3),
            "evidence": [fact.to_dict() for fact in self.facts],
            "rejected": [{"cause": rival, "because": because} for rival, because in self.rejected],
            "advice": self.advice or advice,
            "fix": None,
        }


def ms(value_ns: float | None) -> float | None:
    """To a µs: finer than the stamps are true."""
    return None if value_ns is None else round(value_ns / 1e6, 3)


def percent(share: float | None) -> float | None:
    return None if share is None else round(100 * share, 1)


def percentile_ns(values_ns: Sequence[int], share: float) -> int | None:
    """Nearest rank; None where there are too few values for an estimate of it."""
    if stats.need(share, len(values_ns)):
        return None
    return _whole(stats.percentile(values_ns, share))


def median_ns(values_ns: Sequence[int]) -> int | None:
    """Nearest rank, of however many: inside a rule, whose own count of requests decides."""
    return _whole(stats.percentile(values_ns, 0.5))


def _whole(value: float | None) -> int | None:
    """An observed one of whole values is whole."""
    return None if value is None else int(value)


def text_ms(value_ns: float | None) -> str:
    """For sentences: three figures or so."""
    if value_ns is None:
        return "unknown"
    value = value_ns / 1e6
    return f"{value:.0f} ms" if abs(value) >= 100 else f"{value:.1f} ms" if abs(value) >= 10 else f"{value:.2f} ms"
