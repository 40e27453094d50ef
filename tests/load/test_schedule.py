"""Arrivals: exponential gaps are exponential, constant ones constant, and every path gets the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest

from tapproxy.load import schedule

# Kolmogorov–Smirnov, two-sided, α = 0.01, large n: √n · D. A right schedule exceeds it once in a hundred seeds.
KS_CRITICAL = 1.628
SEEDS = range(1, 41)


def ks(gaps_ns: Sequence[int], rate: float) -> float:
    """√n times the largest distance between the gaps' distribution and the exponential one."""
    ordered, n = sorted(gap / 1e9 for gap in gaps_ns), len(gaps_ns)
    cdf = [1 - math.exp(-rate * gap) for gap in ordered]
    return math.sqrt(n) * max(max(abs(at - i / n), abs(at - (i + 1) / n)) for i, at in enumerate(cdf))


def gaps(times_ns: Sequence[int]) -> list[int]:
    return [later - earlier for earlier, later in pairwise(times_ns)]


@pytest.mark.parametrize("paths", [["a"], ["a", "b"], ["a", "b", "c"]], ids=len)
def test_poisson_gaps_are_exponential_on_each_path_and_over_all_of_them(paths: list[str]) -> None:
    failed_alone = failed_together = 0
    for seed in SEEDS:
        times = schedule.poisson(paths, 400, 5.0, seed)
        failed_alone += any(ks(gaps(times[path]), 5.0) > KS_CRITICAL for path in paths)
        together = sorted(at for path in paths for at in times[path])
        failed_together += ks(gaps(together), 5.0 * len(paths)) > KS_CRITICAL
    # Of 40 seeds less than one is expected; four would be a chance of one in a thousand.
    assert failed_alone <= 4
    assert failed_together <= 4


def test_a_schedule_that_is_not_poisson_fails_the_same_test() -> None:
    # The test above can fail: even turns between two paths leave gaps that are too even.
    merged = schedule.poisson(["a"], 800, 10.0, 1)["a"]
    assert ks(gaps(merged[::2]), 5.0) > KS_CRITICAL
    assert ks(gaps(schedule.constant(["a"], 400, 5.0, 1)["a"]), 5.0) > KS_CRITICAL


def test_every_path_has_as_many_at_the_rate_that_was_asked_for() -> None:
    times = schedule.poisson(["a", "b"], 1000, 50.0, 3)
    assert {path: len(at) for path, at in times.items()} == {"a": 1000, "b": 1000}
    for at in times.values():
        assert at == sorted(at)
        assert 1000 / (at[-1] / 1e9) == pytest.approx(50, rel=0.01)


def test_every_path_gets_the_same_gaps_in_an_order_of_its_own() -> None:
    times = schedule.poisson(["a", "b"], 50, 5.0, 3)
    first, second = (gaps(times[path]) for path in ("a", "b"))
    assert first != second
    # All but those that one has before its first or behind its last arrival, to the rounding of a nanosecond.
    common = sum(any(abs(one - other) <= 2 for other in second) for one in first)
    assert common >= 47


def test_two_paths_never_send_at_one_instant() -> None:
    times = schedule.poisson(["a", "b", "c"], 200, 5.0, 1)
    together = sorted(at for path in times for at in times[path])
    assert min(gaps(together)) > 0


def test_a_constant_rate_is_constant() -> None:
    times = schedule.constant(["a", "b"], 10, 4.0, 1)
    for at in times.values():
        assert set(gaps(at)) == {250_000_000}
    # The other path sends just between.
    assert abs(times["a"][0] - times["b"][0]) == 125_000_000


def test_a_duration_ends_the_schedule_and_is_the_same_for_each() -> None:
    times = schedule.poisson_for(["a", "b"], 10.0, 20.0, 5)
    assert len(times["a"]) == len(times["b"])
    assert 150 <= len(times["a"]) <= 250
    assert all(0 <= at <= 10_000_000_000 for at in (*times["a"], *times["b"]))


def test_one_seed_gives_one_schedule() -> None:
    assert schedule.poisson(["a", "b"], 20, 5.0, 7) == schedule.poisson(["a", "b"], 20, 5.0, 7)
    assert schedule.poisson(["a", "b"], 20, 5.0, 7) != schedule.poisson(["a", "b"], 20, 5.0, 8)
