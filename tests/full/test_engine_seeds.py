"""Every cause of an engine, a card or a host on twenty seeds of virtual time: each named first, and no false alarm.

Takes five minutes on two busy cores.
"""

from __future__ import annotations

import pytest

from tests.diagnose.staged import HEALTHY, STAGED, Stage, untold
from tests.diagnose.test_engine_causes import check_named, serious

SEEDS = range(20)


@pytest.mark.parametrize(("cause", "stage"), STAGED, ids=[f"{cause} {stage.__name__}" for cause, stage in STAGED])
def test_what_was_staged_is_named_first_on_every_seed(cause: str, stage: Stage) -> None:
    for seed in SEEDS:
        check_named(cause, stage, seed)


@pytest.mark.parametrize("stage", HEALTHY, ids=lambda stage: stage.__name__)
def test_no_seed_makes_a_false_alarm(stage: Stage) -> None:
    for seed in SEEDS:
        case = stage(seed)
        found = case.verdict()
        assert (found["verdict"], serious(found)) == ("healthy", []), seed
        blind = untold(case).verdict()
        assert (blind["verdict"], blind["causes"]) == ("healthy", []), seed
