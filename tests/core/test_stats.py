"""Nearest rank by hand, and the early-stopping table of the definitions to the number."""

from __future__ import annotations

import math

import pytest

from tapproxy.core import stats

# p: h(t) + t for t = 0, 1, 2, 5, 10, 20, 50
TABLE = {
    0.50: (7, 11, 14, 22, 35, 59, 128),
    0.75: (17, 24, 31, 49, 76, 126, 267),
    0.90: (44, 64, 81, 127, 197, 325, 681),
    0.95: (90, 130, 165, 259, 398, 656, 1372),
    0.97: (152, 219, 277, 433, 667, 1097, 2293),
    0.99: (459, 662, 838, 1307, 2010, 3304, 6898),
    0.999: (4603, 6636, 8403, 13105, 20140, 33097, 69058),
}
OVER = (0, 1, 2, 5, 10, 20, 50)


@pytest.mark.parametrize("p", TABLE)
def test_the_early_stopping_table_is_reproduced_to_the_number(p: float) -> None:
    assert tuple(stats.least_n(p, t) for t in OVER) == TABLE[p]


@pytest.mark.parametrize("p", TABLE)
@pytest.mark.parametrize("t", OVER)
def test_one_request_fewer_would_not_do(p: float, t: int) -> None:
    h = stats.least_n(p, t) - t
    assert stats.incomplete_beta(p, h, t) <= 0.01 < stats.incomplete_beta(p, h - 1, t)


@pytest.mark.parametrize(
    ("p", "h", "t", "value"),
    [
        # No failure in 7 at even odds: 1/128. At most one in 3 at even odds: (1 + 3)/8.
        (0.5, 7, 0, 1 / 128),
        (0.5, 2, 1, 0.5),
        (0.9, 1, 0, 0.9),
        (0.9, 1, 1, 1 - 0.01),
    ],
)
def test_the_incomplete_beta_of_small_numbers(p: float, h: int, t: int, value: float) -> None:
    assert stats.incomplete_beta(p, h, t) == pytest.approx(value, rel=1e-12)


def test_the_incomplete_beta_agrees_with_whole_number_arithmetic() -> None:
    for h, t in ((30, 5), (300, 20), (1000, 50)):
        n = h + t
        exact = sum(math.comb(n, k) * 95 ** (n - k) * 5**k for k in range(t + 1))
        assert stats.incomplete_beta(0.95, h, t) == pytest.approx(exact / 100**n, rel=1e-9)


@pytest.mark.parametrize(("p", "t"), [(0, 1), (1, 1), (-0.5, 1), (0.5, -1)])
def test_a_percentile_that_is_none_is_refused(p: float, t: int) -> None:
    with pytest.raises(ValueError, match="expected 0 < p < 1"):
        stats.least_n(p, t)


@pytest.mark.parametrize(
    ("values", "p", "value"),
    [
        ([], 0.5, None),
        ([7], 0.01, 7),
        ([7], 1, 7),
        ([4, 1, 3, 2], 0.5, 2),
        ([4, 1, 3, 2], 0.51, 3),
        ([4, 1, 3, 2], 0.75, 3),
        ([4, 1, 3, 2], 1, 4),
        (list(range(1, 101)), 0.07, 7),
        (list(range(1, 101)), 0.29, 29),
        (list(range(1, 101)), 0.99, 99),
        (list(range(1, 1001)), 0.999, 999),
        ([5, 15, 20, 35, 40, 50], 0.3, 15),
    ],
)
def test_percentiles_are_observed_values_by_nearest_rank(values: list[int], p: float, value: int | None) -> None:
    assert stats.percentile(values, p) == value


def test_need_says_how_many_more() -> None:
    assert stats.need(0.99, 100) == 562
    assert stats.need(0.99, 662) == 0
    assert stats.need(0.99, 5000) == 0
    assert stats.need(0.5, 0) == 11


def test_a_server_run_passes_with_few_enough_over_target() -> None:
    assert stats.passes(0.99, 459, 0)
    assert not stats.passes(0.99, 458, 0)
    assert stats.passes(0.99, 2010, 10)
    assert not stats.passes(0.99, 2010, 11)


def test_the_single_stream_estimate_is_above_the_percentile() -> None:
    values = list(range(100))
    # t = 1: 64, t = 2: 81, t = 3: 97 and t = 4: 113 requests for p90. So t = 3, and sorted[97].
    assert [stats.least_n(0.9, t) for t in (3, 4)] == [97, 113]
    assert stats.estimate(values, 0.9) == 97
    assert stats.estimate(values[:64], 0.9) == 63
    assert stats.estimate(values[:63], 0.9) is None
    assert stats.estimate([], 0.5) is None


def test_a_summary_is_in_ms_and_leaves_out_what_it_has_too_few_for() -> None:
    values = [milliseconds * 1_000_000 for milliseconds in range(100, 0, -1)]
    assert stats.summary(values) == {
        "p50": 50.0,
        "p90": 90.0,
        "p95": None,
        "p99": None,
        "mean": 50.5,
        "n": 100,
        "need": {"p95": 30, "p99": 562},
    }


def test_a_summary_of_nothing_is_all_unknown() -> None:
    assert stats.summary([]) == {
        "p50": None,
        "p90": None,
        "p95": None,
        "p99": None,
        "mean": None,
        "n": 0,
        "need": {"p50": 11, "p90": 64, "p95": 130, "p99": 662},
    }


def test_a_summary_of_many_needs_nothing() -> None:
    assert stats.summary([1_500_000] * 662)["need"] == {}
    assert stats.summary([1_500_000] * 662)["p99"] == 1.5


@pytest.mark.parametrize(("p", "n"), [(0.5, 11), (0.5, 128), (0.9, 63), (0.9, 681), (0.99, 662), (0.99, 5000)])
def test_the_estimate_takes_the_largest_t_that_the_table_allows(p: float, n: int) -> None:
    allowed = [t for t in range(1, 60) if stats.least_n(p, t) <= n]
    assert stats.estimate(range(n), p) == (n - max(allowed) if allowed else None)
    assert all(stats.passes(p, n, t) == (stats.least_n(p, t) <= n) for t in range(12))


def test_for_p90_the_table_is_that_of_a_brute_force_binomial() -> None:
    def at_most(t: int, n: int) -> int:
        """P[at most t of n over latency | rate 0.1], times 10^n: in whole numbers."""
        return sum(math.comb(n, k) * 9 ** (n - k) for k in range(t + 1))

    for t in range(51):
        # One by one from the bottom, as the definition reads: the smallest h is the first that does.
        n = next(n for n in range(t + 1, 1000) if 100 * at_most(t, n) <= 10**n)
        assert stats.least_n(0.9, t) == n, t
