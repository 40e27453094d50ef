"""Objectives by hand: good requests a second, their share, and whether a server run shows it."""

from __future__ import annotations

import pytest

from tapproxy.core.errors import ConfigError
from tapproxy.load.arms import Arm, Start
from tapproxy.load.compare import judge
from tapproxy.load.slo import Objective, Slo, attainment, parse_slo, server_test
from tests.load.standin import answer, trial


@pytest.mark.parametrize(
    ("text", "objectives"),
    [
        ("ttft=500ms,tpot=50ms", (Objective("ttft", 500), Objective("tpot", 50))),
        (" e2e=1.5s , ttfvt=200us", (Objective("e2e", 1500), Objective("ttfvt", 0.2))),
        ("ttft:p95=.5s", (Objective("ttft", 500, 0.95),)),
        ("ttft:p99.9=1s", (Objective("ttft", 1000, 0.9990000000000001),)),
    ],
)
def test_objectives_are_read(text: str, objectives: tuple[Objective, ...]) -> None:
    found = parse_slo(text).objectives
    assert [(each.metric, each.limit_ms) for each in found] == [(each.metric, each.limit_ms) for each in objectives]
    assert [each.percentile for each in found] == pytest.approx([each.percentile for each in objectives])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no objective"),
        ("ttft", "is no objective"),
        ("ttft=500", "with a unit"),
        ("ttft=-5ms", "is no objective"),
        ("ttft=0ms", "above 0"),
        ("ttft:p0=5ms", "above 0"),
        ("ttft:p100=5ms", "is no objective"),
        ("speed=5ms", "there are ttft, ttfvt, tpot, e2e"),
        ("ttft=5ms,ttft=6ms", "twice"),
        ("ttft=5ms,", "is no objective"),
    ],
)
def test_what_is_no_objective_is_refused_with_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_slo(text)


def test_a_failed_request_is_over_and_an_unknown_one_makes_the_share_unknown() -> None:
    slo = parse_slo("ttft=50ms,tpot=15ms")
    good = answer(0, "a", 0, ttft_ms=50)
    late = answer(1, "a", 1, ttft_ms=51)
    slow = answer(2, "a", 2, gap_ms=16)
    failed = answer(3, "a", 3, failure="status", ttft_ms=1)
    one_token = answer(4, "a", 4, tokens=1)
    assert attainment(Arm("a", [good, late, slow, failed, one_token]), slo) == (2, 5)
    without_usage = answer(5, "a", 5, completion_tokens=None)
    assert attainment(Arm("a", [good, without_usage]), slo) is None
    # It misses its TTFT, whatever its TPOT was.
    assert attainment(Arm("a", [good, answer(5, "a", 5, ttft_ms=60, completion_tokens=None)]), slo) == (1, 2)
    assert attainment(Arm("a", []), slo) is None


def test_goodput_under_server_is_over_the_whole_window_and_from_the_schedule() -> None:
    # One a second for ten; sent on time but for the last, which is late by 100 ms and so over 50 ms. The window goes
    # from the first due time to the last token: 9 s + 100 ms late + 40 ms + 5 gaps of 10 ms.
    results = [answer(i, "a", i, start_ms=1000 * i + (100 if i == 9 else 0), due_ms=1000 * i) for i in range(10)]
    path = judge(trial(results, scenario="server", rate=1.0), parse_slo("ttft=50ms")).paths["a"]
    assert path["attainment"] == 0.9
    assert path["goodput"] == pytest.approx(9 / 9.19)
    assert path["latency_from"] == "scheduled"


def test_a_server_run_shows_its_objective_by_early_stopping() -> None:
    slo = Slo((Objective("ttft", 50, 0.9),))
    arm = Arm("a", [answer(i, "a", i) for i in range(64)], Start.SENT)
    assert server_test(arm, slo)["ttft"] == {
        "percentile": "p90",
        "target_ms": 50,
        "n": 64,
        "over": 0,
        "passes": True,
        "need": 0,
    }
    over = Arm("a", [*arm.results[:62], *(answer(i, "a", i, ttft_ms=90) for i in (62, 63))])
    shown = server_test(over, slo)["ttft"]
    # t = 2 wants 81.
    assert (shown["over"], shown["passes"], shown["need"]) == (2, False, 17)
