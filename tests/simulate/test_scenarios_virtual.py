"""The catalogue's healthy engines on virtual time, twenty seeds each: no seed makes a false alarm."""

from __future__ import annotations

import random

import pytest

from tapproxy.diagnose import causes
from tapproxy.diagnose.evidence import Evidence
from tapproxy.simulate.scenarios import SCENARIOS
from tapproxy.simulate.scenarios.parts import HEALTHY, Engine, Scenario, Setting, Tap
from tests.diagnose import virtual

SEEDS = range(20)
DIRECT = [
    scenario
    for scenario in SCENARIOS.values()
    if scenario.staged == HEALTHY and scenario.setting is not None and isinstance(scenario.setting.path[0], Tap)
    if len(scenario.setting.path) == 2
]


def load_of(setting: Setting, seed: int) -> virtual.Load:
    """The scenario's load with this seed's arrivals. A word is 1.25 tokens to the simulator."""
    chance = random.Random(seed)
    load, at_ms, asked = setting.load, 0.0, []
    for turn in range(load.requests):
        at_ms += load.gap_ms * chance.uniform(0.5, 1.5)
        prompt, tokens = load.prompts[turn % len(load.prompts)], load.tokens[turn % len(load.tokens)]
        asked.append(virtual.Asked(at_ms, round(1.25 * prompt), tokens))
    return virtual.Load(asked)


def test_there_are_healthy_engines_to_try() -> None:
    assert len(DIRECT) >= 4


@pytest.mark.parametrize("scenario", DIRECT, ids=lambda one: one.name)
def test_no_seed_makes_a_false_alarm(scenario: Scenario) -> None:
    assert scenario.setting is not None
    engine = scenario.setting.path[-1]
    assert isinstance(engine, Engine)
    for seed in SEEDS:
        run = virtual.serve(load_of(scenario.setting, seed), seed=seed, **engine.flags)
        found = causes.verdict(outer=run.records, direct=True, evidence=Evidence.of(run.samples))
        serious = [cause["cause"] for cause in found["causes"]]
        assert (found["verdict"], serious) == ("healthy", []), seed
