"""What an engine's own page says of demand: who waits, how many run, how full the KV cache is.

Rules here: nothing is judged; every number is of the readings that lie in the span asked for. The limit of running
requests is what the engine was told at its start or tells on its page; where neither says it, the highest number that
ran while others waited stands for it, and ``limit_told`` says which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from tapproxy.core.sample import Sample
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.series import Series

# Fewer readings say nothing of "through the window".
LEAST_READINGS: Final = 3
# One finished request leaves its place for the length of a step.
AT_LIMIT: Final = 0.9


@dataclass(frozen=True, slots=True)
class Pressure:
    """One engine's readings in a span. The ``_then`` are medians over the readings in which somebody waited."""

    source: str
    readings: int
    waiting_share: float
    waiting_mean: float
    running_then: float | None
    running_most: float | None
    kv_then: float | None
    limit: float | None
    limit_told: bool
    capacity_tokens: float | None

    @property
    def at_limit(self) -> bool:
        """Whether as many ran as may, in half of the readings in which somebody waited."""
        if self.limit is None or self.running_then is None:
            return False
        return self.running_then >= AT_LIMIT * self.limit


def pressures(evidence: Evidence, from_ns: int, to_ns: int) -> list[Pressure]:
    """Of each engine that was read often enough in this span, the one with most waiting first."""
    found = [
        pressure
        for series in evidence.engines.values()
        if (pressure := _of(series, evidence, from_ns, to_ns)) is not None
    ]
    return sorted(found, key=lambda one: -one.waiting_mean)


def launched_capacity(evidence: Evidence) -> float | None:
    """The same by the start-up log alone, which tells the cache of one engine: data parallelism has several."""
    told = [sample.values for sample in evidence.launches if "kv_cache_tokens" in sample.values]
    return told[-1]["kv_cache_tokens"] * max(1.0, told[-1].get("data_parallel", 1.0)) if told else None


def capacity_tokens(series: Series, evidence: Evidence) -> float | None:
    """How many tokens the KV cache holds: as the start-up log says, else as the page does."""
    told = launched_capacity(evidence)
    blocks, size = series.latest("kv_blocks"), series.latest("block_tokens")
    if told is not None:
        return told
    return blocks * size if blocks is not None and size is not None else None


def _of(series: Series, evidence: Evidence, from_ns: int, to_ns: int) -> Pressure | None:
    readings = [sample for sample in series.inside(from_ns, to_ns) if "waiting" in sample.values]
    if len(readings) < LEAST_READINGS:
        return None
    waiting = [sample.values["waiting"] for sample in readings]
    pressed = [sample for sample in readings if sample.values["waiting"] > 0]
    told = series.latest("running_limit") or evidence.launched("max_num_seqs")
    most = max(_values(pressed, "running"), default=None)
    running = _values(pressed, "running")
    kv = _values(pressed, "kv_usage_share")
    return Pressure(
        source=series.source,
        readings=len(readings),
        waiting_share=len(pressed) / len(readings),
        waiting_mean=fmean(waiting),
        running_then=median(running) if running else None,
        running_most=most,
        kv_then=median(kv) if kv else None,
        limit=told if told is not None else most,
        limit_told=told is not None,
        capacity_tokens=capacity_tokens(series, evidence),
    )


def _values(samples: Sequence[Sample], signal: str) -> list[float]:
    return [sample.values[signal] for sample in samples if signal in sample.values]
