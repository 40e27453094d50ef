"""The search for the highest rate, against an engine that meets its objectives up to a rate it keeps to itself."""

from __future__ import annotations

import pytest

from tapproxy.load.search import RateSearch


def found(limit: float, start: float) -> RateSearch:
    search = RateSearch(start)
    while (rate := search.next_rate()) is not None:
        search.tell(rate, rate <= limit)
    return search


@pytest.mark.parametrize("limit", [0.013, 0.9, 1.0, 7.3, 31.0, 4000.0])
@pytest.mark.parametrize("start", [0.1, 1.0, 50.0])
def test_the_limit_is_found_to_within_five_percent(limit: float, start: float) -> None:
    search = found(limit, start)
    assert search.best is not None
    assert search.worst is not None
    assert search.best <= limit < search.worst <= search.best * 1.05
    assert len(search.tried) <= 30


def test_an_engine_that_never_meets_them_has_no_rate() -> None:
    assert found(0.0, 1.0).best is None


def test_one_that_always_does_has_no_limit() -> None:
    search = found(1e9, 1.0)
    assert search.worst is None
    assert search.best is not None
    assert search.best > 10_000


def test_chance_above_a_missed_rate_does_not_count() -> None:
    search = RateSearch(4.0)
    for rate, met in ((4.0, True), (8.0, True), (16.0, False), (6.0, False)):
        search.tell(rate, met)
    assert (search.best, search.worst) == (4.0, 6.0)
