"""Configurations drawn at random: predicted, and measured on every nginx here, as they stand and as --live runs them.

SEEDS=1000-1150 chooses others than the usual ones.

pytest -o addopts= -s tests/full/test_random_configs.py
"""

from __future__ import annotations

import asyncio
import os

import pytest

from tests.nginx.compare import compare_all
from tests.nginx.live import ALL
from tests.nginx.random_configs import draw
from tests.nginx.test_predict_live import ONE, disagreeing

FIRST, _, LAST = os.environ.get("SEEDS", "0-150").partition("-")
SEEDS = range(int(FIRST), int(LAST))
AT_ONCE = 25
# Of what is compared; more that "depends" would be a checker that does not say anything.
_DEPENDS_MOST = 0.1


@pytest.mark.skipif(len(ALL) < 2, reason="not both nginx here")
@pytest.mark.parametrize("first", SEEDS[::AT_ONCE])
def test_what_is_predicted_is_what_is_measured(first: int) -> None:
    drawn = [draw(seed) for seed in SEEDS if first <= seed < first + AT_ONCE]
    verdicts = asyncio.run(compare_all(drawn, ALL, ("generic", "vllm")))
    assert [str(one) for one in verdicts if one.wrong or one.live_differs] == []
    assert sum(one.predicted == "depends" for one in verdicts) <= _DEPENDS_MOST * len(verdicts)
    assert {"streams", "held", "late_header"} <= {one.measured for one in verdicts}


def test_a_seed_gives_the_same_text_for_ever() -> None:
    assert draw(7) == draw(7)
    assert len({draw(seed).text for seed in range(100)}) == 100


@pytest.mark.parametrize("profile", ["generic", "vllm"])
def test_each_mechanism_is_what_happens(profile: str) -> None:
    assert disagreeing(ONE, (profile,)) == []
