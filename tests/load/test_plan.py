"""The plan: alternating, fair to every path, and the same for the same seed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tapproxy.core.errors import ConfigError
from tapproxy.load.plan import PREFIX_WORDS, interleaved


def prefix(prompt: str) -> str:
    return " ".join(prompt.split()[:PREFIX_WORDS])


def test_every_round_sends_once_over_each_path() -> None:
    slots = interleaved(["direct", "tap", "nginx"], 20, seed=1)
    assert [slot.index for slot in slots] == list(range(60))
    for turn in range(20):
        assert sorted(slot.path for slot in slots if slot.round == turn) == ["direct", "nginx", "tap"]


def test_the_order_within_a_round_is_random() -> None:
    slots = interleaved(["a", "b"], 200, seed=1)
    first = Counter(slots[2 * turn].path for turn in range(200))
    assert 70 <= first["a"] <= 130


def test_one_seed_gives_one_plan_and_another_gives_another() -> None:
    assert interleaved(["a", "b"], 5, seed=7) == interleaved(["a", "b"], 5, seed=7)
    assert interleaved(["a", "b"], 5, seed=7) != interleaved(["a", "b"], 5, seed=8)


def test_the_arms_of_a_round_share_their_prompt_but_for_a_fresh_prefix_of_equal_length() -> None:
    slots = interleaved(["a", "b", "c"], 50, seed=3, prompt_tokens=30)
    prefixes = [prefix(slot.prompt) for slot in slots]
    assert len(set(prefixes)) == len(slots)
    assert {len(each) for each in prefixes} == {8 * 4 + 7}
    for turn in range(50):
        arms = [slot.prompt for slot in slots if slot.round == turn]
        assert len({arm[len(prefix(arm)) :] for arm in arms}) == 1
        assert {len(arm.split()) for arm in arms} == {PREFIX_WORDS + 30}


def test_given_prompts_are_used_in_turn() -> None:
    slots = interleaved(["a"], 3, seed=1, prompts=["one", "two"])
    assert [slot.prompt.split()[-1] for slot in slots] == ["one", "two", "one"]


def test_warm_up_comes_first_and_is_marked() -> None:
    slots = interleaved(["a", "b"], 3, seed=1, warmup=2, gap_ms=5, max_tokens=9)
    assert [slot.warmup for slot in slots] == [True] * 4 + [False] * 6
    assert {(slot.gap_ms, slot.max_tokens) for slot in slots} == {(5, 9)}


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"paths": []}, id="no path"),
        pytest.param({"paths": ["a", "a"]}, id="a name twice"),
        pytest.param({"requests": 0}, id="no requests"),
        pytest.param({"warmup": -1}, id="less than no warm-up"),
        pytest.param({"max_tokens": 0}, id="no tokens"),
        pytest.param({"gap_ms": -1.0}, id="a gap before the start"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        interleaved(**{"paths": ["a"], "requests": 1, "seed": 1, **wrong})
