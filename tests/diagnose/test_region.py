"""Lines that keep limits: numbers one can check in the head."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapproxy.diagnose.region import (
    MAX_SKEW,
    Limit,
    cut,
    is_bounded,
    least_slope,
    lower_hull,
    runs,
    skews,
    whole,
    width,
)


def at_least(x: int, value: int) -> Limit:
    return Limit(x, value, True, 0)


def at_most(x: int, value: int) -> Limit:
    return Limit(x, value, False, 0)


def test_two_limits_at_one_place_leave_the_span_between_them() -> None:
    region = cut(cut(whole(), at_least(0, 10)), at_most(0, 30))
    assert width(region, 0) == pytest.approx((10, 30), abs=0.1)
    # Farther away any skew widens it.
    assert width(region, 1_000_000) == pytest.approx((10 - 1_000_000 * MAX_SKEW, 30 + 1_000_000 * MAX_SKEW), abs=0.1)


def test_limits_far_apart_pin_the_skew() -> None:
    region = whole()
    for x in (0, 1_000_000):
        region = cut(cut(region, at_least(x, 100 + x // 10_000 - 5)), at_most(x, 100 + x // 10_000 + 5))
    assert width(region, 500_000) == pytest.approx((145, 155), abs=0.1)
    assert skews(region) == pytest.approx((90e-6, 110e-6), rel=1e-3)
    assert is_bounded(region)
    assert not is_bounded(cut(whole(), at_least(0, 0)))


def test_limits_that_no_line_keeps_leave_nothing_and_begin_a_new_run() -> None:
    limits = [at_least(0, 0), at_most(10, 5), at_least(20, 50), at_most(30, 55), at_least(40, 51)]
    assert cut(cut(whole(), limits[1]), limits[2]) == []
    assert runs(limits) == [2, 5]
    assert runs(limits[::-1]) == [3, 5]
    assert runs([]) == []


@given(
    st.floats(-1e9, 1e9),
    st.floats(-1e-3, 1e-3),
    st.lists(st.tuples(st.integers(0, 10**13), st.integers(0, 10**9), st.booleans()), max_size=40),
)
def test_the_true_line_is_never_cut_away(offset: float, skew: float, delays: list[tuple[int, int, bool]]) -> None:
    region = whole()
    for x, delay, is_least in delays:
        true = offset + skew * x
        region = cut(region, Limit(x, round(true - delay - 1) if is_least else round(true + delay + 1), is_least, 0))
    assert region
    for x in (0, 10**12, 10**13):
        low, high = width(region, x)
        assert low - 1 <= offset + skew * x <= high + 1


@pytest.mark.parametrize(
    ("points", "hull", "slope"),
    [
        pytest.param([(0, 0), (1, 5), (2, 0)], [(0, 0), (2, 0)], 0.0, id="what lies above is not of it"),
        pytest.param([(0, 4), (1, 1), (2, 0)], [(0, 4), (1, 1), (2, 0)], -3.0, id="the edge over the mean"),
        pytest.param([(5, 1)], [(5, 1)], None, id="one point has no slope"),
        pytest.param([], [], None, id="none"),
    ],
)
def test_the_lower_hull(points: list[tuple[int, int]], hull: list[tuple[int, int]], slope: float | None) -> None:
    assert lower_hull(points) == hull
    assert least_slope(points) == slope
