"""Differences that are there are found, and those that are not are not called so."""

from __future__ import annotations

import pytest

from tapproxy.load.arms import arms
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
        pytest.param(0.5, 0.2, id="half of it a drift that both paths share", marks=pytest.mark.long),
        pytest.param(0.0, 0.0, id="every request for itself", marks=pytest.mark.long),
        pytest.param(0.3, 0.6, id="each path remembers"),
    ],
)
def test_direct_against_direct_is_called_different_in_at_most_11_of_100(shared: float, own_memory: float) -> None:
    found = [p50_ttft(drifting(200, seed, shared=shared, own_memory=own_memory), seed) for seed in SEEDS]
    assert sum(each.excludes_zero for each in found) <= 11


@pytest.mark.parametrize(
    ("shared", "own_memory"),
    [
        pytest.param(0.5, 0.2, id="half of it a drift that both paths share", marks=pytest.mark.long),
        pytest.param(0.0, 0.0, id="every request for itself"),
    ],
)
def test_five_ms_on_forty_are_found_with_200_requests_in_at_least_95_of_100(shared: float, own_memory: float) -> None:
    found = [p50_ttft(drifting(200, seed, added_ms=5, shared=shared, own_memory=own_memory), seed) for seed in SEEDS]
    assert sum(each.excludes_zero and (each.difference_ms or 0) > 0 for each in found) >= 95


def test_a_difference_is_of_the_two_percentiles_and_the_same_for_the_same_seed() -> None:
    # 40 and 47 ms for everybody: no interval could be narrower.
    results = [
        answer(2 * turn + side, path, turn, ttft_ms=40 + 7 * side)
        for turn in range(20)
        for side, path in enumerate(("direct", "other"))
    ]
    found = p50_ttft(results)
    assert (found.difference_ms, found.ci95_ms, found.units) == (7, (7, 7), 20)
    noisy = drifting(60, 3, added_ms=5)
    assert p50_ttft(noisy, seed=4) == p50_ttft(noisy, seed=4)
    assert p50_ttft(noisy, seed=4).ci95_ms != p50_ttft(noisy, seed=5).ci95_ms


def test_a_drift_that_both_paths_share_does_not_widen_the_interval() -> None:
    def width(shared: float) -> float:
        low, high = p50_ttft(drifting(200, 11, shared=shared)).ci95_ms or (0, 0)
        return high - low

    assert width(0.95) < 0.6 * width(0.0)


def test_a_round_that_one_path_failed_is_no_pair() -> None:
    results = drifting(30, 2, change=lambda path, turn: {"failure": "status"} if path == "other" and turn < 5 else {})
    assert p50_ttft(results).units == 25


def test_percentiles_with_too_few_pairs_have_no_difference() -> None:
    found = arms(trial(drifting(70, 1)))
    by = differences(found["direct"], found["other"], in_blocks=False, seed=1)["ttft_ms"]
    assert [name for name, each in by.items() if each.difference_ms is not None] == ["p50", "p90"]


def test_many_gaps_are_resampled_by_request_on_a_grid_of_observed_values() -> None:
    # 2 × 150 requests of 40 gaps: 6,000 values an arm, more than are kept one by one.
    results = drifting(150, 5, change=lambda path, turn: {"tokens": 41, "gap_ms": 12.0 if path == "other" else 10.0})
    found = arms(trial(results))
    each = one(found["direct"], found["other"], "icl_ms", "p50", in_blocks=False, seed=1)
    assert (each.difference_ms, each.ci95_ms) == (2, (2, 2))


def blocks(order: str, size: int, times: dict[str, list[float]]) -> list[Result]:
    """Whole blocks in that order of A and B; ``times``: the TTFT of every block of a path."""
    results: list[Result] = []
    done = {"A": 0, "B": 0}
    for letter in order:
        block = done[letter]
        done[letter] += 1
        for step in range(size):
            results.append(answer(len(results), letter, block * size + step, ttft_ms=times[letter][block]))
    return results


def test_blocks_are_compared_whole_whatever_their_order() -> None:
    times = {"A": [40.0, 42, 44, 46], "B": [50.0, 53, 54, 57]}
    found = arms(trial(blocks("ABBAABBA", 10, times), scenario="concurrency"))
    each = one(found["A"], found["B"], "ttft_ms", "p50", in_blocks=True, seed=1)
    # Ten requests of a block are one observation: four pairs of blocks, and Student's t with three degrees of freedom.
    assert (each.units, each.difference_ms) == (4, 11)
    assert each.ci95_ms is not None
    assert each.ci95_ms[1] - each.ci95_ms[0] > 1


def test_one_block_each_has_no_interval() -> None:
    found = arms(trial(blocks("AB", 30, {"A": [40.0], "B": [60.0]}), scenario="offline"))
    each = one(found["A"], found["B"], "ttft_ms", "p50", in_blocks=True, seed=1)
    assert (each.difference_ms, each.ci95_ms, each.excludes_zero) == (20, None, False)


def test_blocks_that_differ_by_themselves_are_no_difference_of_the_paths() -> None:
    # Each block has its own level; requests of a block agree to the µs, and 200 of them prove nothing.
    wrong = 0
    for seed in range(40):
        results = drifting(6, seed, shared=0.0, own_memory=0.0)
        level = {(r.slot.path, r.slot.round): r.record.events.arrived[0] / 1e6 for r in results}
        times = {name: [level[path, turn] for turn in range(6)] for name, path in (("A", "direct"), ("B", "other"))}
        found = arms(trial(blocks("ABBAABABBABA", 30, times), scenario="concurrency"))
        wrong += one(found["A"], found["B"], "ttft_ms", "p50", in_blocks=True, seed=seed).excludes_zero
    assert wrong <= 5


def made(difference_ms: float, p_value: float, half_ms: float = 1.0) -> Difference:
    return Difference(difference_ms, (difference_ms - half_ms, difference_ms + half_ms), p_value, 50)


def test_p50_of_ttft_decides_alone_and_the_others_are_corrected_for_their_number() -> None:
    none = Difference(None, None, None, 50)
    found = {
        "other": {
            "ttft_ms": {"p50": made(3, 0.04), "p90": made(3, 0.04)},
            "e2e_ms": {"p50": made(3, 0.001), "p90": none},
        }
    }
    decided = decide(found, None)["other"]
    assert decided["ttft_ms"]["p50"].significant
    # 0.001 ≤ 0.05 / 2, then 0.04 ≤ 0.05 / 1.
    assert decided["e2e_ms"]["p50"].significant
    assert decided["ttft_ms"]["p90"].significant
    found["other"]["e2e_ms"]["p50"] = made(3, 0.03)
    decided = decide(found, None)["other"]
    assert decided["ttft_ms"]["p50"].significant
    # 0.03 > 0.05 / 2: neither it nor what follows.
    assert not decided["e2e_ms"]["p50"].significant
    assert not decided["ttft_ms"]["p90"].significant
    assert not any(
        each.significant for by in decide(found, None, allowed=False)["other"].values() for each in by.values()
    )


def test_below_the_floor_or_with_zero_in_the_interval_nothing_is_a_difference() -> None:
    floor = {"ttft_ms": {"p50": made(1, 0.2, half_ms=2.0)}}  # −1 … 3: the floor is 3

    def called(each: Difference) -> bool:
        return decide({"other": {"ttft_ms": {"p50": each}}}, floor)["other"]["ttft_ms"]["p50"].significant

    assert called(made(3.5, 0.01))
    assert not called(made(2.5, 0.01))
    assert called(made(-3.5, 0.01))
    assert not called(made(4, 0.01, half_ms=5.0))


@pytest.mark.parametrize(
    ("p_values", "passed"),
    [
        ([], set()),
        ([0.05], {0}),
        ([0.051], set()),
        # The textbook's: 0.01 ≤ 0.0125, 0.02 > 0.0167.
        ([0.01, 0.04, 0.03, 0.005], {3, 0}),
        ([0.02, 0.02, 0.02], set()),
    ],
)
def test_holm_steps_down(p_values: list[float], passed: set[int]) -> None:
    assert holm([(p, index) for index, p in enumerate(p_values)]) == passed


@pytest.mark.parametrize(("df", "quantile"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (9, 2.2622)])
def test_students_t_is_that_of_the_tables(df: int, quantile: float) -> None:
    assert student_quantile(df) == pytest.approx(quantile, abs=1e-4)
    assert student_two_sided(-quantile, df) == pytest.approx(0.05, abs=1e-5)
    assert student_two_sided(0, df) == 1
