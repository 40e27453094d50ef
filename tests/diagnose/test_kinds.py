"""Several models and routes behind one tap: the slower of two is slow by design, and no measure for the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tapproxy.core.record import Events, Record
from tapproxy.diagnose.causes import verdict
from tests.diagnose.make import MS, SECOND, even, record

REQUESTS = 60


def run(slow: Callable[[int], bool], of_slow: dict[str, str], *, gap_ms: int = 20, every_ms: int = 1000) -> Any:
    """Answers with 0.1 s to the first token, and ``slow`` ones, of another kind, with 1.6 s and ``gap_ms`` a token."""
    records: list[Record] = []
    for number in range(REQUESTS):
        times = even(20, 1600, gap_ms) if slow(number) else even(20)
        one = record("tap", times, number=number, t0=SECOND + number * every_ms * MS)
        one.model, one.request.proxy_marks = "small", []
        for name, value in of_slow.items() if slow(number) else ():
            setattr(one, name, value)
        records.append(one)
    return verdict(inner=records)


@pytest.mark.parametrize(
    "slow",
    [
        pytest.param(lambda n: n >= 30, id="after_it"),
        pytest.param(lambda n: n < 30, id="before_it"),
        pytest.param(lambda n: n < 4, id="its_first_ones"),
        pytest.param(lambda n: n % 2 == 1, id="in_turn"),
        pytest.param(lambda n: 20 <= n < 40, id="between"),
    ],
)
@pytest.mark.parametrize("of_slow", [{"model": "large"}, {"path": "/v1/completions"}], ids=["model", "route"])
@pytest.mark.parametrize("every_ms", [1000, 150])
def test_a_slower_model_or_route_beside_a_fast_one_is_healthy(
    slow: Callable[[int], bool], of_slow: dict[str, str], every_ms: int
) -> None:
    found = run(slow, of_slow, every_ms=every_ms)
    assert (found["verdict"], found["causes"]) == ("healthy", [])


def test_a_model_that_decodes_slower_than_another_is_healthy() -> None:
    found = run(lambda n: n >= 30, {"model": "large"}, gap_ms=80, every_ms=4000)
    assert (found["verdict"], found["causes"]) == ("healthy", [])


@pytest.mark.parametrize("every_ms", [1000, 8000])
def test_short_and_long_requests_in_turn_are_no_engine_that_became_slower(every_ms: int) -> None:
    """Of fifteen in a row eight are long, of the next fifteen seven: the median of a part says nothing there."""
    found = run(lambda n: n % 2 == 1, {}, every_ms=every_ms)
    assert (found["verdict"], found["causes"]) == ("healthy", [])


def test_the_same_model_that_became_slower_is_not() -> None:
    """The same numbers, of one kind: the test above can fail."""
    found = run(lambda n: n >= 30, {})
    assert (found["verdict"], found["causes"][0]["cause"]) == ("degraded", "engine.unattributed")
    assert run(lambda n: n >= 30, {}, gap_ms=80, every_ms=4000)["causes"][0]["cause"] == "engine.decode"


@pytest.mark.parametrize(("refused", "said"), [(1, False), (20, True), (REQUESTS, True)])
def test_requests_that_were_refused_are_told_and_blamed_on_nobody(refused: int, said: bool) -> None:
    records = [record("tap", even(20), number=number, t0=number * SECOND) for number in range(REQUESTS)]
    for number, one in enumerate(records):
        one.request.proxy_marks = []
        if number < refused:
            one.status, one.events = 429, Events()
    found = verdict(inner=records)
    assert found["verdict"] == ("healthy" if refused < REQUESTS else "not_measured")
    assert not [cause for cause in found["causes"] if cause["cause"] != "measurement.too_few_samples"]
    told = f"{refused} of {REQUESTS} requests were refused (status 429: {refused})"
    assert any(told in warning for warning in found["trust"]["warnings"]) == said
