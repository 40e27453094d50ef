"""Differences that are there are found, and those that are not are not called so."""

from __future__ import annotations

import random

import pytest

from tapproxy.load.arms import Arm, arms
from tapproxy.load.differences import (
    Difference,
    decide,
    differences,
    holm,
    one,
    student_quantile,
    student_two_sided,
)
from tapproxy.load.sender import Result
from tests.load.standin import answer, drifting, trial

SEEDS = range(100)


def p50_ttft(results: list[Result], seed: int = 1) -> Difference:
    found = arms(trial(results))
    return one(found["direct"], found["other"], "ttft_ms", "p50", in_blocks=False, seed=seed)


@pytest.mark.parametrize(
    ("shared", "own_memory"),
    [
        pytest.param(0.5, 0.2, id="half of it a drift that both paths share"),
        pytest.param(0.0, 0.0, id="every request for itself"),
        pytest.param(0.3, 0.6, id="each path remembers"),
    ],
)
def test_direct_against_direct_is_called_different_in_at_most_11_of_100(shared: float, own_memory: float) -> None:
    found = [p50_ttft(drifting(200, seed, shared=shared, own_memory=own_memory), seed) for seed in SEEDS]
    assert sum(each.excludes_zero for each in found) <= 11


@pytest.mark.parametrize(
    ("shared", "own_memory"),
    [
        pytest.param(0.5, 0.2, id="half of it a drift that both paths share"),
        pytest.param(0.0, 0.0, id="every request for itself"),
    ],
)
def test_five_ms_on_forty_are_found_with_200_requests_in_at_least_95_of_100(shared: float, own_memory: float) -> None:
    found = [p50_ttft(drifting(200, seed, added_ms=5, shared=shared, own_memory=own_memory), seed) for seed in SEEDS]
    assert sum(each.excludes_zero and (each.difference_ms or 0) > 0 for each in found) >= 95
