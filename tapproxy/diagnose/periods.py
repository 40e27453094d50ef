"""Times in which something beside the streams was so, and what the tokens of these times took beyond those of others.

Rules here: a reading stands for the time until the next one. Tokens are compared within the run, the same engine and
load; where all of the run was so, or none, there is nothing to compare and nothing is claimed.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Final

from tapproxy.core.sample import SIGNALS, Sample, Shape
from tapproxy.diagnose.facts import Fact, Named, median_ns, ms
from tapproxy.diagnose.reference import SAME_LOAD, is_same_rate
from tapproxy.diagnose.rule import Case
from tapproxy.diagnose.series import Series

# So many tokens, and first tokens, on either side give a median.
GAPS_LEAST: Final = 50
FIRSTS_LEAST: Final = 11
# Slower by so much is more than the mix of a batch makes.
SLOWER: Final = 1.3
TTFT_SLOWER: Final = 1.5
# And more than a busy machine's wake-ups.
GAP_NS: Final = 2_000_000
TTFT_NS: Final = 20_000_000

_UNITS: Final = {"_mhz": "MHz", "_c": "°C", "_w": "W", "_bytes": "bytes", "_share": "share", "_s": "s"}


@dataclass(frozen=True, slots=True)
class Cost:
    """What one metric took beyond its median of the other times."""

    metric: str
    stage: str
    effects_ns: Sequence[int]
    bad_ns: int
    good_ns: int
    good: int

    def named(self, facts: list[Fact], confidence: float, rejected: list[tuple[str, str]]) -> Named:
        name = self.metric.upper()
        shown = [
            Fact(f"{name} in these times, P50", ms(self.bad_ns), "ms", len(self.effects_ns)),
            Fact(f"{name} at the other times, P50", ms(self.good_ns), "ms", self.good),
        ]
        return Named(
            [*facts, *shown], self.metric, confidence, "error", self.effects_ns, self.bad_ns, rejected, stage=self.stage
        )


def compare(case: Case, series: Series, holds: Callable[[Sample], bool]) -> Cost | None:
    """What tokens, else first tokens, took while it held; None where they took no longer or cannot be compared."""
    return compare_marks(case, [(sample.t_mono_ns, holds(sample)) for sample in series.samples])


def compare_marks(case: Case, marks: Sequence[tuple[int, bool]]) -> Cost | None:
    """The same for (from when, whether it held) in time order."""
    if not case.view.engine_side or len({held for _, held in marks}) < 2:
        return None
    times = [at_ns for at_ns, _ in marks]

    def held(at_ns: int) -> bool:
        index = bisect_right(times, at_ns) - 1
        return marks[max(0, index)][1]

    gaps: dict[bool, list[int]] = {True: [], False: []}
    firsts: dict[bool, list[int]] = {True: [], False: []}
    loads: dict[bool, list[int]] = {True: [], False: []}
    for one in case.requests:
        firsts[held(one.asked_ns)].append(one.ttft_ns)
        loads[held(one.asked_ns)].append(one.in_flight)
        for from_ns, to_ns in pairwise(one.tokens_ns):
            # Its middle: a change is noticed a reading late at most.
            gaps[held((from_ns + to_ns) // 2)].append(to_ns - from_ns)
    for metric, stage, values, least, ratio, least_ns in (
        ("icl", "engine.decode", gaps, GAPS_LEAST, SLOWER, GAP_NS),
        ("ttft", "engine.prefill", firsts, FIRSTS_LEAST, TTFT_SLOWER, TTFT_NS),
    ):
        cost = _cost(metric, stage, values, least, ratio, least_ns)
        if cost is not None and _is_no_busier(cost, loads, _seconds(case, marks)):
            return cost
    return None


def _seconds(case: Case, marks: Sequence[tuple[int, bool]]) -> dict[bool, float]:
    """How long it held, and did not, while requests came."""
    from_ns, to_ns = case.requests[0].asked_ns, case.requests[-1].asked_ns
    found = {True: 0.0, False: 0.0}
    ends = [at_ns for at_ns, _ in marks[1:]] + [to_ns]
    for index, ((at_ns, held), end_ns) in enumerate(zip(marks, ends, strict=True)):
        start_ns = from_ns if index == 0 else at_ns
        found[held] += max(0, min(end_ns, to_ns) - max(start_ns, from_ns)) / 1e9
    return found


def _is_no_busier(cost: Cost, loads: dict[bool, list[int]], seconds: dict[bool, float]) -> bool:
    """More in flight makes tokens slower, cards hot and cores busy by itself. What slowness alone piles up is no more
    load: then as many come as before."""
    if not loads[True] or not loads[False]:
        return False
    there, before = fmean(loads[True]), fmean(loads[False])
    if there <= SAME_LOAD * before + 1:
        return True
    rates = [len(loads[held]) / seconds[held] if seconds[held] else 0.0 for held in (True, False)]
    same = is_same_rate(rates[0], rates[1], min(len(loads[True]), len(loads[False])))
    return same and there <= SAME_LOAD * before * cost.bad_ns / max(1, cost.good_ns) + 1


def medians(samples: Sequence[Sample], signals: Sequence[str]) -> list[Fact]:
    """The median of each gauge that was read, as evidence."""
    facts = []
    for signal in signals:
        values = [sample.values[signal] for sample in samples if signal in sample.values]
        if values and SIGNALS[signal][1] is Shape.GAUGE:
            unit = next((unit for end, unit in _UNITS.items() if signal.endswith(end)), "")
            facts.append(Fact(f"{signal}, P50", round(median(values), 3), unit, len(values)))
    return facts


def _cost(
    metric: str, stage: str, values: dict[bool, list[int]], least: int, ratio: float, least_ns: int
) -> Cost | None:
    bad, good = values[True], values[False]
    if len(bad) < least or len(good) < least:
        return None
    bad_ns, good_ns = median_ns(bad) or 0, median_ns(good) or 0
    if bad_ns < max(ratio * good_ns, good_ns + least_ns):
        return None
    return Cost(metric, stage, [value - good_ns for value in bad], bad_ns, good_ns, len(good))
