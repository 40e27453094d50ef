"""A run against its baseline: an improvement in latency that was bought is called that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tapproxy.load.baseline import Against, Call, against, median_change, more_errors_p
from tapproxy.load.runs import Register
from tapproxy.load.trial import ClientFacts, PathFacts
from tests.load.kept import comparison, trial


def around(middle_ms: float, n: int = 40) -> list[float]:
    """Evenly spread over ± 2 ms, in no order."""
    values = [middle_ms - 2 + 4 * i / (n - 1) for i in range(n)]
    Random(1).shuffle(values)
    return values


def judge(directory: Path, then: dict[str, Any], now: dict[str, Any]) -> Against:
    register = Register(directory)
    for name, given in (("then", dict(then)), ("now", dict(now))):
        result = {key: given.pop(key) for key in ("tokens_per_s",) if key in given}
        ttfts = given.pop("ttfts", around(40.0))
        register.keep(trial(name, ttfts, **given), comparison(len(ttfts), failed=given.get("failed", 0), **result), {})
    return against(register.load("then"), register.load("now"))


@pytest.mark.parametrize(
    ("now", "call", "said"),
    [
        pytest.param({}, Call.SAME, "no difference beyond the requests' own spread", id="the same"),
        pytest.param({"ttfts": around(30.0)}, Call.BETTER, "better: TTFT p50 40.00 → 30.00 ms", id="faster"),
        pytest.param({"ttfts": around(50.0)}, Call.WORSE, "worse: TTFT p50 40.00 → 50.00 ms", id="slower"),
        pytest.param({"ttfts": around(40.3)}, Call.SAME, "no difference", id="below the floor"),
        pytest.param({"ttfts": around(40.7)}, Call.SAME, "no difference", id="what runs drift by"),
        pytest.param(
            {"ttfts": around(30.0), "tokens_per_s": 80.0},
            Call.BOUGHT,
            "TTFT p50 40.00 → 30.00 ms, E2E p50 70.00 → 60.00 ms, but it cost throughput (100.0 → 80.0, -20 %): "
            "not an improvement",
            id="latency for throughput",
        ),
        pytest.param(
            {"ttfts": around(30.0, 50), "failed": 10},
            Call.BOUGHT,
            "but it cost errors (0 of 40 → 10 of 50): not an improvement",
            id="latency for errors",
        ),
        pytest.param(
            {"ttfts": around(30.0), "failed": 1}, Call.BETTER, "better: TTFT p50", id="one error is chance, not a price"
        ),
        pytest.param({"tokens_per_s": 80.0}, Call.WORSE, "worse: throughput (100.0 → 80.0", id="slower for nothing"),
        pytest.param({"tokens_per_s": 97.0}, Call.SAME, "no difference", id="a throughput within the usual spread"),
    ],
)
def test_what_a_run_is_against_its_baseline(now: dict[str, Any], call: Call, said: str, tmp_path: Path) -> None:
    found = judge(tmp_path, {}, now)
    assert found.call is call
    assert said in found.said
    assert found.exit_code == int(call in (Call.BOUGHT, Call.WORSE))
    assert found.to_dict()["comparable"] is True


@pytest.mark.parametrize(
    ("now", "because"),
    [
        pytest.param({"max_tokens": 32}, "max tokens: 16 then, 32 now", id="other lengths"),
        pytest.param({"scenario": "offline"}, "scenario: single-stream then, offline now", id="another scenario"),
        pytest.param({"rate": 4.0}, "rate: None then, 4.0 now", id="another rate"),
        pytest.param({"tokens": 5}, "direct: answers had 4.0 tokens on average, they have 5.0", id="longer answers"),
        pytest.param(
            {"facts": PathFacts("http://127.0.0.1:8000", models=["n"])}, "direct: the model was m, it is n", id="model"
        ),
        pytest.param(
            {"client": ClientFacts(saturated=True, why="loop lag 80 ms")},
            "the client was the bottleneck now: loop lag 80 ms",
            id="a client that was too slow",
        ),
    ],
)
def test_another_load_is_not_compared(now: dict[str, Any], because: str, tmp_path: Path) -> None:
    found = judge(tmp_path, {}, now | {"ttfts": around(10.0)})
    assert (found.call, found.exit_code, found.paths) == (Call.NOT_COMPARABLE, 1, {})
    assert because in found.incomparable_because


def test_what_changed_in_the_settings_is_said_with_it(tmp_path: Path) -> None:
    found = judge(
        tmp_path,
        {"environment": {"gpu": {"driver": "550"}, "host": {"kernel": "6.1"}}},
        {"environment": {"gpu": {"driver": "570"}, "host": {"kernel": "6.2"}}, "ttfts": around(30.0)},
    )
    assert [entry["setting"] for entry in found.changed] == ["gpu.driver", "host.kernel"]
    assert "change one thing at a time" in found.changed_said
    assert any("one after the other" in note for note in found.notes)


def test_runs_without_a_path_in_common_are_not_compared(tmp_path: Path) -> None:
    register = Register(tmp_path)
    for name in ("a", "b"):
        told = trial(name, [1.0])
        told.paths = {name: PathFacts("http://x")}
        register.keep(told, comparison(), {})
    assert against(register.load("a"), register.load("b")).incomparable_because == [
        "they have no path in common (a and b)"
    ]


@pytest.mark.parametrize(
    ("before", "after", "significant"),
    [
        ([], [], False),
        ([1.0] * 10, [2.0] * 10, False),  # too few
        ([1.0] * 11, [2.0] * 11, True),
        (around(40), around(40.5), False),
        (around(40, 400), around(40.5, 400), True),
    ],
)
def test_the_interval_decides(before: Sequence[float], after: Sequence[float], significant: bool) -> None:
    assert median_change(before, after)["significant"] is significant


def test_two_runs_of_one_thing_seldom_differ() -> None:
    chance = Random(3)
    found = sum(
        median_change([chance.gauss(40, 10) for _ in range(100)], [chance.gauss(40, 10) for _ in range(100)])[
            "significant"
        ]
        for _ in range(200)
    )
    assert found <= 20
    missed = sum(
        not median_change([chance.gauss(40, 10) for _ in range(200)], [chance.gauss(45, 10) for _ in range(200)])[
            "significant"
        ]
        for _ in range(100)
    )
    assert missed <= 10


def test_fishers_test_against_numbers_by_hand() -> None:
    # 0 of 2 and 2 of 2: one of the six ways to place two errors on four requests.
    assert more_errors_p(0, 2, 2, 2) == pytest.approx(1 / 6)
    assert more_errors_p(3, 10, 0, 10) == 1.0
    assert more_errors_p(0, 40, 10, 50) == pytest.approx(0.0018, abs=0.0002)
