"""The arms of a comparison: the results of each path that count, and the numbers of each request.

Rules here:
* Warm-up is left out. A request that failed has no latency; a void record (its stamps cannot be trusted) has none
  either, and is counted.
* Under ``server`` latency starts when the request was due, so that a client that stalls hides nothing; from the
  sending it is kept beside it. TPOT and the gaps have no start point.
* Unknown is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Final

from tapproxy.core import metrics, stats
from tapproxy.core.counts import TOKEN_KINDS
from tapproxy.core.record import Record
from tapproxy.load.sender import Result
from tapproxy.load.trial import PathFacts, Scenario, Trial


class Start(StrEnum):
    """Where latency starts: definitions.md's ``s`` and ``c0``."""

    SCHEDULED = "scheduled"
    SENT = "sent"


# The metrics that are compared, in the order they are shown; ICL has many values a request.
COMPARED: Final = ("ttft_ms", "ttfvt_ms", "icl_ms", "tpot_ms", "e2e_ms")
# Those that have a start point.
FROM_START: Final = ("ttft_ms", "ttfvt_ms", "e2e_ms")
# These alternate in whole blocks: a block has its own load, so one request of it says nothing by itself.
IN_BLOCKS: Final = (Scenario.OFFLINE, Scenario.CONCURRENCY)


@dataclass(frozen=True)
class Arm:
    """The requests of one path that count, in the plan's order."""

    name: str
    results: Sequence[Result]
    start: Start = Start.SENT
    facts: PathFacts | None = None
    failed: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "failed", Counter(r.failure for r in self.results if r.failure is not None))

    @cached_property
    def good(self) -> Sequence[Result]:
        """Whole answers with stamps that can be trusted."""
        return [result for result in self.results if result.failure is None and result.record.void is None]

    @property
    def void(self) -> int:
        """Whole answers whose stamps cannot be trusted."""
        return sum(result.failure is None and result.record.void is not None for result in self.results)

    @property
    def failures(self) -> int:
        """Requests that failed, of whatever class."""
        return sum(self.failed.values())

    @property
    def failure_share(self) -> float | None:
        """Of all requests that count; None where there is none."""
        return self.failures / len(self.results) if self.results else None

    @cached_property
    def streams(self) -> Sequence[Record]:
        """The good answers that came as events with tokens."""
        return [r.record for r in self.good if any(kind in TOKEN_KINDS for kind in r.record.events.kind)]

    def values(self, metric: str, start: Start | None = None) -> list[float]:
        """All values of a metric in ns, of the requests that have it."""
        return [value for result in self.good for value in values_ns(result, metric, start or self.start)]


def values_ns(result: Result, metric: str, start: Start) -> Sequence[float]:
    """The values of one request: none, one, or the many gaps of ``icl_ms``."""
    record = result.record
    if metric == "icl_ms":
        return metrics.icl_ns(record)
    value = metrics.tpot_ns(record) if metric == "tpot_ms" else _LATENCIES[metric](record, "arrived", 0)
    if value is None:
        return ()
    return (value + late_ns(result),) if start is Start.SCHEDULED and metric in FROM_START else (value,)


_LATENCIES: Final = {"ttft_ms": metrics.ttft_ns, "ttfvt_ms": metrics.ttfvt_ns, "e2e_ms": metrics.e2e_ns}


def late_ns(result: Result) -> int:
    """How long after it was due the request was sent; 0 where it had no time of its own."""
    return 0 if result.due_ns is None else result.record.t0_mono_ns - result.due_ns


def arms(trial: Trial) -> dict[str, Arm]:
    """One arm for each path of the trial, in its order, also for one that nothing came back of."""
    found = split(trial.results, trial.paths)
    start = start_of(trial.asked.scenario, trial.results)
    return {name: Arm(name, found[name], start, trial.paths[name]) for name in trial.paths}


def split(results: Iterable[Result], names: Iterable[str]) -> dict[str, list[Result]]:
    """The results that count by their path, each in the plan's order."""
    out: dict[str, list[Result]] = {name: [] for name in names}
    for result in sorted(results, key=lambda result: result.slot.index):
        if not result.slot.warmup:
            out.setdefault(result.slot.path, []).append(result)
    return out


def start_of(scenario: Scenario, results: Sequence[Result]) -> Start:
    """From the schedule under ``server``, where every request has its time."""
    scheduled = scenario == Scenario.SERVER and bool(results) and all(r.due_ns is not None for r in results)
    return Start.SCHEDULED if scheduled else Start.SENT


def median(values: Sequence[float]) -> float | None:
    """Nearest rank, of however many: for sentences and rules, whose own counts decide."""
    return stats.percentile(values, 0.5)
