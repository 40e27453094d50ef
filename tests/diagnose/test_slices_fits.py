"""Parts of the requests, and lines through them, with plain numbers."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tapproxy.core.record import Ended, Record
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.fits import POINTS_LEAST, POINTS_MOST, fits, theil_sen
from tapproxy.diagnose.links import measure_links
from tapproxy.diagnose.slices import OUTPUT_TOKENS, PROMPT_TOKENS, length_class, slices
from tapproxy.diagnose.view import look
from tests.diagnose.make import MS, SECOND, even, record


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (None, "unknown"),
        (0, "0 to 255"),
        (255, "0 to 255"),
        (256, "256 to 1023"),
        (65535, "16384 to 65535"),
        (65536, "65536 and more"),
        (10**6, "65536 and more"),
    ],
)
def test_every_length_has_one_class(tokens: int | None, expected: str) -> None:
    assert length_class(tokens, PROMPT_TOKENS) == expected


def of(number: int, *, prompt: int = 64, first_ms: float = 100, tokens: int = 10) -> Record:
    made = record("tap", even(tokens, first_ms), number=number, t0=number * SECOND)
    made.usage.prompt_tokens = prompt
    return made


def test_a_dimension_that_all_share_is_left_out() -> None:
    assert slices([of(number) for number in range(20)]) == {}


def test_classes_have_their_own_percentiles_and_say_what_they_want() -> None:
    records = [of(n, prompt=100, first_ms=50) for n in range(12)] + [of(n, prompt=5000, first_ms=900) for n in range(3)]
    short, long = slices(records)["prompt_tokens"]
    assert (short["class"], short["n"], short["ttft_ms"]["p50"]) == ("0 to 255", 12, 50.0)
    assert (long["class"], long["ttft_ms"]["p50"], long["ttft_ms"]["need"]["p50"]) == ("4096 to 16383", None, 8)
    assert (short["tpot_ms"]["p50"], short["e2e_ms"]["p50"]) == (20.0, 230.0)


def test_failed_requests_are_counted_and_have_no_latency() -> None:
    records = [of(n) for n in range(24)]
    for each in records[12:]:
        each.ended, each.model = Ended.UPSTREAM_ABORTED, "b"
    entry = next(entry for entry in slices(records)["model"] if entry["class"] == "b")
    assert (entry["n"], entry["failed"], entry["ttft_ms"]["n"]) == (12, 12, 0)


def test_a_hundred_models_are_twelve_and_the_others() -> None:
    records = [of(n) for n in range(300)]
    for number, each in enumerate(records):
        each.model = f"m{min(number, 99)}"
    classes = slices(records)["model"]
    assert (len(classes), classes[0]["class"], classes[-1]["class"]) == (13, "m99", "88 others")
    assert sum(entry["n"] for entry in classes) == 300


def test_classes_of_length_come_in_order_with_the_unknown_last() -> None:
    records = [of(0, tokens=600), of(1, tokens=5), of(2)]
    records[2].usage.completion_tokens = None
    assert [e["class"] for e in slices(records)["output_tokens"]] == ["0 to 31", "512 to 2047", "unknown"]
    assert OUTPUT_TOKENS[0] == 0


# --- lines


def test_a_straight_line_is_found_exactly() -> None:
    found = theil_sen([(x, 7.0 + 3 * x) for x in range(1, 41)])
    assert found is not None
    assert (found.slope, found.low, found.high, found.intercept) == (3, 3, 3, 7)


def test_a_fifth_of_outliers_moves_nothing_much() -> None:
    chance = random.Random(1)
    points = [(x, 100 + 3 * x + (5000 if x % 5 == 0 else chance.random())) for x in range(1, 101)]
    found = theil_sen(points)
    assert found is not None
    assert abs(found.slope - 3) < 0.1
    assert found.low <= 3 <= found.high


def test_no_slope_is_claimed_of_noise() -> None:
    missed = 0
    for seed in range(40):
        chance = random.Random(seed)
        found = theil_sen([(x, chance.gauss(0, 1)) for x in range(1, 61)])
        assert found is not None
        missed += found.is_there
    # One interval in forty lies above 0 by chance.
    assert missed <= 4


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(float(x), 1.0) for x in range(1, POINTS_LEAST)],
        [(64.0, float(y)) for y in range(100)],
        [(100.0 + x / 10, float(x)) for x in range(100)],
        [(0.0, float(y)) for y in range(100)],
    ],
    ids=["none", "too few", "one length", "lengths alike", "no tokens"],
)
def test_nothing_to_fit_along_is_no_line(points: list[tuple[float, float]]) -> None:
    assert theil_sen(points) is None


def test_many_points_are_thinned_out_and_counted() -> None:
    found = theil_sen([(x, 2.0 * x) for x in range(1, 20 * POINTS_MOST)])
    assert found is not None
    assert (found.slope, found.n) == (2, 20 * POINTS_MOST - 1)


def fitted(**per_token_us: float) -> dict[str, Any]:
    """Prompts of 100 to 4000 tokens, whose stages take so much a token; 5 ms beside."""
    records = []
    for number in range(40):
        prompt = 100 * (number + 1)
        ms = {stage: prompt * us / 1000 for stage, us in per_token_us.items()}
        each = of(number, prompt=prompt, first_ms=5.15 + sum(ms.values()), tokens=5 + number)
        each.upstream.head = round((0.15 + ms.get("frontend", 0)) * MS)
        each.engine.source = "response.metrics"
        each.engine.queue_ns, each.engine.prefill_ns = 4 * MS, round(ms.get("prefill", 0) * MS) + MS
        records.append(each)
    view = look([], [], records)
    return fits(view, measure_links(view), Evidence())


def test_ttft_that_grows_with_prefill_is_prefill_bound() -> None:
    found = fitted(prefill=50)["ttft_on_prompt_tokens"]
    assert (found["bound_by"], round(found["us_per_token"], 1)) == ("prefill", 50.0)
    assert found["carried_by"]["engine.prefill"]["share"] == pytest.approx(1, abs=0.01)
    assert found["says"].startswith("TTFT grows by 50.0 µs")
    assert "prefill-bound" in found["says"]


def test_ttft_that_grows_with_the_frontend_is_tokenizer_bound() -> None:
    found = fitted(prefill=5, frontend=60)["ttft_on_prompt_tokens"]
    assert (found["bound_by"], round(found["us_per_token"], 1)) == ("tokenizer", 65.0)


def test_ttft_that_does_not_grow_is_said_to() -> None:
    found = fitted(prefill=0)["ttft_on_prompt_tokens"]
    assert (found["bound_by"], found["share_at_p50"]) == (None, None)
    assert found["says"] == "TTFT does not grow with the prompt (n=40): neither prefill nor tokenizer bounds it"


def test_an_engine_that_tells_nothing_leaves_the_growth_unassigned() -> None:
    records = [of(n, prompt=100 * (n + 1), first_ms=5 + 5 * (n + 1)) for n in range(40)]
    view = look([], [], records)
    found = fits(view, measure_links(view), Evidence())["ttft_on_prompt_tokens"]
    assert (found["bound_by"], found["carried_by"]) == (None, {})
    assert found["says"].endswith("nothing tells which stage of the engine carries that")


def test_the_cached_part_of_a_prompt_is_not_prefilled() -> None:
    records = [of(n, prompt=100 * (n + 1), first_ms=105) for n in range(40)]
    for each in records:
        each.usage.cached_tokens = (each.usage.prompt_tokens or 0) - 10
    view = look([], [], records)
    assert fits(view, measure_links(view), Evidence())["ttft_on_prompt_tokens"] is None


def test_answers_that_take_their_time_for_tokens_are_decode_bound() -> None:
    found = fitted(prefill=1)["e2e_on_output_tokens"]
    assert found["bound_by"] == "decode"
    assert "decode-bound" in found["says"]
