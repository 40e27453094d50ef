"""Paired differences between two paths, with intervals from a block bootstrap.

What is estimated is the difference of two percentiles, path less baseline. What is resampled is *units*: what both
paths did at the same time with the same prompt. Rules here:

* A round (the same request over either path, next to each other in time) is a unit where requests alternate; a pair
  of whole blocks is one where blocks do. Both sides of a unit go together, so that a drift they share cancels.
* Neighbouring units resemble one another (queues, other tenants), so runs of units are resampled, not single ones:
  about the cube root of their number, more where they resemble each other more (Politis and White's rule for a
  first-order dependence).
* Intervals are percentile intervals. With few units (some blocks) the bootstrap says too little of its own error:
  there Student's t over the bootstrap's standard error takes its place. A single pair of blocks has no interval.
* Percentiles are by nearest rank, as everywhere; one that early stopping would not give has no difference either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tapproxy.core import stats
from tapproxy.load.arms import COMPARED, Arm, values_ns

DECIDES: Final = ("ttft_ms", "p50")
PERCENTILES: Final = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
ALPHA: Final = 0.05
LEAST_REPLICATES: Final = 2_000
# With fewer units than this, t.
LEAST_UNITS: Final = 10
# Beyond it neighbours are put together first: the interval of 100,000 requests is that of 2,000 runs of them.
MOST_UNITS: Final = 2_000
# Values beyond which the distribution is taken on a grid of observed values: finer than the interval is wide.
GRID: Final = 4_096
# Cells worked on at once, some tens of MB.
_CELLS: Final = 4_000_000
_NS_PER_MS: Final = 1e6
_RANK_GRAIN: Final = 1e-9

Floats = NDArray[np.float64]
Draws = NDArray[np.float32]
Unit = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Difference:
    """One percentile of one metric: path less baseline, in ms. ``p_value`` is two-sided and of this test alone."""

    difference_ms: float | None
    ci95_ms: tuple[float, float] | None
    p_value: float | None
    units: int
    floor_ms: float | None = None
    significant: bool = False

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero."""
        return self.ci95_ms is not None and (self.ci95_ms[0] > 0 or self.ci95_ms[1] < 0)

    @property
    def above_floor(self) -> bool:
        """Whether it is larger than what the same path shows against itself."""
        return self.floor_ms is None or (self.difference_ms is not None and abs(self.difference_ms) > self.floor_ms)

    def to_dict(self) -> dict[str, Any]:
        """The object of the contract, and what it rests on."""
        return {
            "difference": self.difference_ms,
            "ci95": None if self.ci95_ms is None else list(self.ci95_ms),
            "significant": self.significant,
            "p_value": self.p_value,
            "floor": self.floor_ms,
            "n": self.units,
        }


Differences = dict[str, dict[str, Difference]]


def shown(found: Differences) -> dict[str, dict[str, Any]]:
    """Metric → percentile → the object of the contract."""
    return {metric: {name: each.to_dict() for name, each in by.items()} for metric, by in found.items()}


def units(baseline: Arm, other: Arm, metric: str, *, in_blocks: bool) -> list[Unit]:
    """The values of both arms, unit by unit, in the plan's order; a unit that one side has no value of is left out."""
    groups = _block_groups(baseline, other) if in_blocks else _round_groups(baseline, other)
    found: list[Unit] = []
    for ours, theirs in groups:
        pair = (
            [value for result in ours for value in values_ns(result, metric, baseline.start)],
            [value for result in theirs for value in values_ns(result, metric, other.start)],
        )
        if pair[0] and pair[1]:
            found.append(pair)
    return found


def _round_groups(baseline: Arm, other: Arm) -> list[tuple[list[Any], list[Any]]]:
    by_round: dict[int, tuple[list[Any], list[Any]]] = {}
    for side, arm in enumerate((baseline, other)):
        for result in arm.good:
            by_round.setdefault(result.slot.round, ([], []))[side].append(result)
    return list(by_round.values())


def _block_groups(baseline: Arm, other: Arm) -> list[tuple[list[Any], list[Any]]]:
    """The blocks of one with those of the other. A block is a run of one path in the plan.

    Blocks may be in the order A B B A, where two blocks of one path meet: so a unit is the rounds that lie in one run
    of either path. Rounds that only one path came to (a closed loop on the clock) go with the rounds before them.
    """
    runs: tuple[dict[int, int], dict[int, int]] = ({}, {})
    run, previous = 0, None
    for result in sorted([*baseline.results, *other.results], key=lambda result: result.slot.index):
        run += result.slot.path != previous
        previous = result.slot.path
        runs[previous != baseline.name][result.slot.round] = run
    groups: dict[tuple[int, int], tuple[list[Any], list[Any]]] = {}
    unit_of: dict[int, tuple[int, int]] = {}
    last = None
    for number in sorted({*runs[0], *runs[1]}):
        if number in runs[0] and number in runs[1]:
            last = (runs[0][number], runs[1][number])
        if last is not None:
            unit_of[number] = last
            groups.setdefault(last, ([], []))
    for side, arm in enumerate((baseline, other)):
        for result in arm.good:
            if result.slot.round in unit_of:
                groups[unit_of[result.slot.round]][side].append(result)
    return list(groups.values())


def differences(
    baseline: Arm, other: Arm, *, in_blocks: bool, seed: int, tests: int = len(COMPARED) * len(PERCENTILES)
) -> Differences:
    """Every compared metric at every percentile. ``tests``: how many there are to correct for, over all paths.

    Nothing is called significant yet: ``decide`` does, which sees all paths at once.
    """
    # Enough replicates that the smallest of so many p values can pass Holm's first step.
    replicates = max(LEAST_REPLICATES, 100 * tests)
    return {
        metric: _metric(units(baseline, other, metric, in_blocks=in_blocks), in_blocks, replicates, seed)
        for metric in COMPARED
    }


def one(baseline: Arm, other: Arm, metric: str, percentile: str, *, in_blocks: bool, seed: int) -> Difference:
    """A single percentile of a single metric: what ``differences`` says of it."""
    pairs = units(baseline, other, metric, in_blocks=in_blocks)
    return _metric(pairs, in_blocks, LEAST_REPLICATES, seed, {percentile: PERCENTILES[percentile]})[percentile]


def between_runs(before: Arm, now: Arm, *, seed: int) -> Differences:
    """``now`` less ``before``, of two runs: nothing is paired, each is resampled by itself. None is decided."""
    out: Differences = {}
    for metric in COMPARED:
        sides = [units(arm, arm, metric, in_blocks=False) for arm in (before, now)]
        counts = [sum(len(pair[0]) for pair in side) for side in sides]
        given = {name: p for name, p in PERCENTILES.items() if stats.need(p, min(counts)) == 0}
        out[metric] = dict.fromkeys(PERCENTILES, Difference(None, None, None, min(counts)))
        if not given:
            continue
        chance = np.random.default_rng(seed)
        quantiles, values = [], []
        for side in sides:
            weights = _resample([fmean(pair[0]) for pair in side], False, LEAST_REPLICATES, chance)
            owners, both = _sides(side)
            values.append(both[0])
            quantiles.append(_quantiles(both[0], owners[0], weights, given))
        for index, (name, p) in enumerate(given.items()):
            change = (_observed(values[1], p) - _observed(values[0], p)) / _NS_PER_MS
            drawn = (quantiles[1][index] - quantiles[0][index]) / _NS_PER_MS
            out[metric][name] = _judged(change, drawn, min(counts), small=False)
    return out


def _metric(
    pairs: Sequence[Unit],
    in_blocks: bool,
    replicates: int,
    seed: int,
    wanted: Mapping[str, float] = PERCENTILES,
) -> dict[str, Difference]:
    counts = (sum(len(pair[0]) for pair in pairs), sum(len(pair[1]) for pair in pairs))
    given = {name: p for name, p in wanted.items() if stats.need(p, min(counts)) == 0}
    nothing = Difference(None, None, None, len(pairs))
    if not given:
        return dict.fromkeys(wanted, nothing)
    changes = [fmean(pair[1]) - fmean(pair[0]) for pair in pairs]
    weights = _resample(changes, in_blocks, replicates, np.random.default_rng(seed))
    owner, sides = _sides(pairs)
    quantiles = [_quantiles(values, owner[side], weights, given) for side, values in enumerate(sides)]
    out = dict.fromkeys(wanted, nothing)
    for index, (name, p) in enumerate(given.items()):
        observed = [_observed(values, p) for values in sides]
        change = (observed[1] - observed[0]) / _NS_PER_MS
        drawn = (quantiles[1][index] - quantiles[0][index]) / _NS_PER_MS
        out[name] = _judged(change, drawn, len(pairs), small=in_blocks and len(pairs) < LEAST_UNITS)
    return out


def _observed(values: Floats, p: float) -> float:
    rank = math.ceil(p * len(values) - _RANK_GRAIN)
    return float(np.partition(values, rank - 1)[rank - 1])


def _judged(change_ms: float, drawn_ms: Floats, count: int, *, small: bool) -> Difference:
    """Interval and p value from the replicates."""
    if small and count < 2:
        return Difference(change_ms, None, None, count)
    if small:
        # The bootstrap's variance of k units is that of k less one: put right, then Student's t.
        error = float(drawn_ms.std()) * math.sqrt(count / (count - 1))
        half = student_quantile(count - 1) * error
        p_value = student_two_sided(change_ms / error, count - 1) if error else float(change_ms == 0)
        return Difference(change_ms, (change_ms - half, change_ms + half), p_value, count)
    low, high = np.quantile(drawn_ms, [ALPHA / 2, 1 - ALPHA / 2])
    # Counting the observed one among the replicates keeps it from ever being 0.
    beyond = min(int((drawn_ms <= 0).sum()), int((drawn_ms >= 0).sum()))
    p_value = min(1.0, 2 * (beyond + 1) / (len(drawn_ms) + 1))
    return Difference(change_ms, (float(low), float(high)), p_value, count)


def decide(found: dict[str, Differences], floor: Differences | None, *, allowed: bool = True) -> dict[str, Differences]:
    """Says which are differences. P50 of TTFT decides alone; all the others, of all paths, are corrected by Holm.

    One whose interval holds zero, or that is no larger than the floor, is none. ``allowed`` False: none is.
    """
    with_floor = {
        path: {
            metric: {name: replace(each, floor_ms=_floor_ms(floor, metric, name)) for name, each in percentiles.items()}
            for metric, percentiles in metrics.items()
        }
        for path, metrics in found.items()
    }
    others = [
        (each.p_value, (path, metric, name))
        for path, metrics in with_floor.items()
        for metric, percentiles in metrics.items()
        for name, each in percentiles.items()
        if (metric, name) != DECIDES and each.p_value is not None
    ]
    passed = holm(others)

    def called(path: str, metric: str, name: str, each: Difference) -> bool:
        by_test = (metric, name) == DECIDES or (path, metric, name) in passed
        return allowed and by_test and each.excludes_zero and each.above_floor

    return {
        path: {
            metric: {
                name: replace(each, significant=called(path, metric, name, each)) for name, each in percentiles.items()
            }
            for metric, percentiles in metrics.items()
        }
        for path, metrics in with_floor.items()
    }


def holm(tests: Sequence[tuple[float, Any]], alpha: float = ALPHA) -> set[Any]:
    """The tests that stay significant: the smallest p value against alpha / m, the next against alpha / (m − 1), …"""
    passed = set()
    for rank, (p_value, name) in enumerate(sorted(tests, key=lambda test: test[0])):
        if p_value > alpha / (len(tests) - rank):
            break
        passed.add(name)
    return passed


def _floor_ms(floor: Differences | None, metric: str, name: str) -> float | None:
    """The farther end of the interval that the same path has against itself: less cannot be told from nothing."""
    each = floor[metric][name] if floor is not None else None
    return None if each is None or each.ci95_ms is None else max(abs(end) for end in each.ci95_ms)


def _resample(changes: Sequence[float], in_blocks: bool, replicates: int, chance: np.random.Generator) -> Draws:
    """How often each unit was drawn, one row a replicate; neighbours are put together beyond ``MOST_UNITS``.

    ``changes``: what tells how much neighbours resemble each other.
    """
    count = -(-len(changes) // _together(len(changes)))
    length = 1 if in_blocks else _run_length(changes, count)
    runs = -(-count // length)
    weights = np.zeros((replicates, count), dtype=np.float32)
    starts = chance.integers(0, count, size=(replicates, runs))
    rows = np.arange(replicates)
    for run in range(runs):
        # The last run is cut, so that every replicate has as many units as the run itself.
        for step in range(min(length, count - run * length)):
            weights[rows, (starts[:, run] + step) % count] += 1
    return weights


def _together(count: int) -> int:
    return -(-count // MOST_UNITS)


def _run_length(changes: Sequence[float], count: int) -> int:
    """Units resampled together: n^(1/3), times Politis and White's factor for the correlation of neighbours."""
    # By ranks: one outlier is no correlation, nor does it hide one.
    ranks = np.argsort(np.argsort(np.array(changes))) - (len(changes) - 1) / 2
    whole = float((ranks**2).sum())
    rho = min(0.95, max(0.0, float((ranks[1:] * ranks[:-1]).sum()) / whole)) if whole else 0.0
    factor = (math.sqrt(6) * rho / (1 - rho * rho)) ** (2 / 3)
    # A run of ten neighbours put together is a tenth as many units.
    length = int(0.5 + max(1.0, factor) * math.pow(len(changes), 1 / 3) / _together(len(changes)))
    return max(1, min(length, count // 4))


def _sides(pairs: Sequence[Unit]) -> tuple[list[NDArray[np.int64]], list[Floats]]:
    """Of each side, the unit that every value belongs to, and the values."""
    together = _together(len(pairs))
    owner = []
    sides = []
    for side in (0, 1):
        sizes = [len(pair[side]) for pair in pairs]
        owner.append(np.repeat(np.arange(len(pairs)) // together, sizes))
        sides.append(np.array([value for pair in pairs for value in pair[side]], dtype=np.float64))
    return owner, sides


def _quantiles(values: Floats, owner: NDArray[np.int64], weights: Draws, wanted: Mapping[str, float]) -> list[Floats]:
    """The wanted percentiles of every replicate, by nearest rank of the values weighted with their unit's draws."""
    order = np.argsort(values, kind="stable")
    ordered, owner = values[order], owner[order]
    if len(values) > GRID:
        # How many values each unit has up to every point of the grid; the points are observed values.
        points = np.unique(np.linspace(0, len(values) - 1, GRID // 2).round().astype(np.int64))
        column = np.searchsorted(points, np.arange(len(values)))
        table = np.zeros((weights.shape[1], len(points)), dtype=np.float32)
        np.add.at(table, (owner, column), 1)
        grid = ordered[points]
    else:
        table, grid = None, ordered
    out = [np.empty(len(weights)) for _ in wanted]
    step = max(1, _CELLS // len(grid))
    for begin in range(0, len(weights), step):
        part = weights[begin : begin + step]
        cells = part[:, owner] if table is None else part @ table
        # In whole numbers: a float32 sum is exact to 16 million only.
        reached = np.cumsum(cells, axis=1, dtype=np.float64)
        total = reached[:, -1]
        for index, p in enumerate(wanted.values()):
            rank = np.maximum(1, np.ceil(p * total - _RANK_GRAIN))
            out[index][begin : begin + step] = grid[(reached < rank[:, None]).sum(axis=1).clip(max=len(grid) - 1)]
    return out


def student_two_sided(t: float, df: int) -> float:
    """P[|T| ≥ |t|] of Student's t with whole degrees of freedom, by its finite sum (Abramowitz and Stegun, 26.7)."""
    theta = math.atan2(abs(t), math.sqrt(df))
    cos2 = math.cos(theta) ** 2
    term = math.cos(theta) if df % 2 else 1.0
    total = 0.0
    for k in range(1 if df % 2 else 0, df - 1, 2):
        total += term
        term *= cos2 * (k + 1) / (k + 2)
    inside = 2 / math.pi * (theta + math.sin(theta) * total) if df % 2 else math.sin(theta) * total
    return max(0.0, min(1.0, 1.0 - inside))


def student_quantile(df: int, two_sided: float = ALPHA) -> float:
    """The t that |T| exceeds with that probability."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_two_sided(middle, df) > two_sided else (low, middle)
    return high
