"""How often a whole judgement is wrong: some 200 of them, each over all metrics."""

from __future__ import annotations

import pytest

from tapproxy.load.compare import Comparison, judge
from tests.load.standin import drifting, trial

SEEDS = range(1000, 1100)


def judged(seed: int, **what: float) -> Comparison:
    return judge(trial(drifting(200, seed, **what), seed=seed))


def significant(found: Comparison) -> bool:
    return found.differences["other"]["ttft_ms"]["p50"].significant


@pytest.mark.parametrize("shared", [0.0, 0.5, 0.9])
def test_direct_against_direct_is_healthy(shared: float) -> None:
    found = [judged(seed, shared=shared) for seed in SEEDS]
    assert sum(map(significant, found)) <= 11
    # And no path is called ill for it, nor the run incomparable.
    assert {each.verdict["verdict"] for each in found} == {"healthy"}
    # All the other metrics and percentiles together are wrong as seldom as one test.
    others = [
        any(
            each.significant
            for metric, by in one.differences["other"].items()
            for name, each in by.items()
            if (metric, name) != ("ttft_ms", "p50")
        )
        for one in found
    ]
    assert sum(others) <= 11


# Where nothing is shared and each path remembers by 0.2, a fifth fewer requests stand behind the median, and no test
# of medians finds it in more than some 94 of 100; so there every request is for itself.
@pytest.mark.parametrize(("shared", "own_memory"), [(0.0, 0.0), (0.5, 0.2), (0.9, 0.2)])
def test_five_ms_on_forty_are_found(shared: float, own_memory: float) -> None:
    found = [judged(seed, shared=shared, own_memory=own_memory, added_ms=5) for seed in SEEDS]
    assert sum(map(significant, found)) >= 95
