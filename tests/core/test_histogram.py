"""Values in buckets, one by one or many at once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapproxy.core.histogram import Histogram

BOUNDS = (10, 20, 50)


@pytest.mark.parametrize(
    ("values", "counts"),
    [
        pytest.param([], [0, 0, 0, 0], id="none"),
        pytest.param([10], [1, 0, 0, 0], id="a_bound_is_inclusive"),
        pytest.param([11], [0, 1, 0, 0], id="just_above_a_bound"),
        pytest.param([0, 10, 15, 20, 50, 51], [2, 2, 1, 1], id="each_bucket"),
        pytest.param([60, 70, 80, 90], [0, 0, 0, 4], id="all_above"),
        pytest.param([-1, -2, -3, -4], [4, 0, 0, 0], id="negative"),
    ],
)
def test_each_value_is_counted_in_its_bucket(values: list[int], counts: list[int]) -> None:
    histogram = Histogram(BOUNDS)
    histogram.add_many(values)
    assert (histogram.counts, histogram.count, histogram.total) == (counts, len(values), sum(values))


@given(st.lists(st.integers(-5, 60)))
def test_many_at_once_count_as_one_by_one(values: list[int]) -> None:
    together, alone = Histogram(BOUNDS), Histogram(BOUNDS)
    together.add_many(values)
    for value in values:
        alone.add(value)
    assert (together.counts, together.count, together.total) == (alone.counts, alone.count, alone.total)
