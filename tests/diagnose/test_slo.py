"""Objectives: for whom, within what, and whether so many requests show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapproxy.config import load_objectives, load_serve_config
from tapproxy.core.errors import ConfigError
from tapproxy.core.objectives import Judgement, Objective, Span, State, judge
from tapproxy.core.record import Ended, Record
from tapproxy.diagnose.slo import judge_all
from tests.diagnose.make import MS, SECOND, even, record


@pytest.mark.parametrize(
    ("share", "n", "over", "expected"),
    [
        (0.5, 7, 0, Judgement(State.MET, 0)),
        (0.5, 6, 0, Judgement(State.TOO_FEW, 1)),
        (0.5, 11, 1, Judgement(State.MET, 0)),
        (0.5, 0, 0, Judgement(State.TOO_FEW, 7)),
        (0.5, 11, 6, Judgement(State.TOO_FEW, 14)),
        (0.5, 11, 11, Judgement(State.MISSED, None)),
        # However bad, ten requests are no verdict.
        (0.5, 10, 10, Judgement(State.TOO_FEW, 25)),
        (0.99, 459, 0, Judgement(State.MET, 0)),
        (0.99, 458, 0, Judgement(State.TOO_FEW, 1)),
        (0.99, 100, 50, Judgement(State.MISSED, None)),
        (0.99, 1, 1, Judgement(State.TOO_FEW, 661)),
    ],
)
def test_met_and_missed_are_said_where_the_counts_show_it(share: float, n: int, over: int, expected: Judgement) -> None:
    assert judge(share, n, over) == expected


def answer(number: int, first_ms: float = 100, tokens: int = 10) -> Record:
    made = record("tap", even(tokens, first_ms), number=number, t0=number * SECOND)
    made.model = "m"
    return made


def judged(records: list[Record], share: float = 0.5, **limits: float) -> dict[str, Any]:
    return judge_all([Objective(limits, share=share)], records)[0]


def test_a_limit_that_is_kept_and_one_that_is_not() -> None:
    found = judged([answer(n) for n in range(20)], ttft=150, tpot=10)
    assert found["state"] == "missed"
    assert [(limit["metric"], limit["state"], limit["over"]) for limit in found["limits"]] == [
        ("ttft", "met", 0),
        ("tpot", "missed", 20),
    ]


@pytest.mark.parametrize(
    ("change", "over", "n"),
    [
        ({"ended": Ended.UPSTREAM_ABORTED}, 1, 1),
        ({"ended": Ended.TIMEOUT}, 1, 1),
        ({"status": 503}, 1, 1),
        ({"status": 429}, 1, 1),
        # The request's own fault shows nothing of the service.
        ({"status": 400}, 0, 0),
        ({"void": "loop_lag"}, 0, 0),
    ],
)
def test_failures_of_the_service_are_over_any_limit(change: dict[str, Any], over: int, n: int) -> None:
    each = answer(0)
    for name, value in change.items():
        setattr(each, name, value)
    limit = judged([each], ttft=1e6)["limits"][0]
    assert (limit["over"], limit["n"]) == (over, n)


@pytest.mark.parametrize(
    ("left_ms", "first", "expected"), [(50, False, (0, 0)), (900, False, (1, 1)), (900, True, (0, 1))]
)
def test_a_client_that_leaves_counts_only_where_the_limit_had_passed(
    left_ms: int, first: bool, expected: tuple[int, int]
) -> None:
    each = answer(0) if first else record("tap", [])
    each.ended, each.downstream.end, each.upstream.end = Ended.CLIENT_ABORTED, left_ms * MS, left_ms * MS
    limit = judged([each], ttft=500)["limits"][0]
    assert (limit["over"], limit["n"]) == expected


def test_what_has_no_number_is_left_out_and_counted() -> None:
    records = [answer(n) for n in range(20)]
    for each in records[:5]:
        each.usage.completion_tokens = None
    limit = judged(records, tpot=50)["limits"][0]
    assert (limit["n"], limit["unknown"], limit["state"]) == (15, 5, "met")


def test_one_token_is_within_any_time_per_further_token() -> None:
    limit = judged([answer(n, tokens=1) for n in range(8)], tpot=1)["limits"][0]
    assert (limit["n"], limit["over"]) == (8, 0)


def test_an_objective_is_for_its_model_path_and_lengths_only() -> None:
    records = [answer(n) for n in range(20)]
    records[0].model, records[1].path = "other", "/v1/completions?x=1"
    records[2].usage.prompt_tokens, records[3].usage.prompt_tokens = 5000, None
    objective = Objective(
        {"ttft": 150}, model="m", path="/v1/chat/completions", prompt_tokens=Span(0, 1023), output_tokens=Span(5)
    )
    found = judge_all([objective], records)[0]
    assert (found["requests"], found["unsorted"]) == (16, 1)
    assert found["for"] == (
        "model m, path /v1/chat/completions, prompts of 0 to 1023 tokens, answers of 5 and more tokens"
    )


def test_an_answer_that_is_no_stream_begins_when_it_is_there() -> None:
    each = record("tap", [])
    each.stream, each.upstream.first_byte, each.upstream.end = False, 700 * MS, 700 * MS
    assert [limit["over"] for limit in judged([each], ttft=500, e2e=800)["limits"]] == [1, 0]


# --- the file


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "t.toml"
    path.write_text(text)
    return path


def test_objectives_stand_in_the_taps_own_file(tmp_path: Path) -> None:
    file = toml(
        tmp_path,
        'upstream = "http://127.0.0.1:8000"\n'
        '[[slo]]\nttft = "500ms"\npercentile = 95\nmodel = "m"\nprompt-tokens = "0-1023"\n'
        '[[slo]]\nname = "long"\ntpot = "0.05s"\ne2e = 20\nshare = 0.9\n'
        'prompt_tokens = "1024-"\noutput-tokens = [5, 9]\n',
    )
    first, second = load_objectives(file)
    assert first == Objective({"ttft": 500.0}, share=0.95, model="m", prompt_tokens=Span(0, 1023))
    assert second.limits_ms == {"tpot": 50.0, "e2e": 20000.0}
    assert (second.prompt_tokens, second.output_tokens, second.title()) == (Span(1024), Span(5, 9), "long")
    assert load_serve_config(file, {}).slo == (first, second)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no objective"),
        ('slo = "x"', "no list of tables"),
        ("slo = [1]", "no list of tables"),
        ("[[slo]]\n", "number 1 .* has no limit"),
        ('[[slo]]\nttft = "500"\n[[slo]]\nttfb = "1s"', "number 2 .* unknown key 'ttfb'"),
        ('[[slo]]\nttft = "0ms"', "expected a limit above 0"),
        ('[[slo]]\nttft = "soon"', "ttft of .*soon"),
        ('[[slo]]\nttft = "1s"\nshare = 95', "share of .* between 0 and 1"),
        ('[[slo]]\nttft = "1s"\npercentile = 100', "percentile of .* between 0 and 100"),
        ('[[slo]]\nttft = "1s"\nshare = true', "share of"),
        ('[[slo]]\nttft = "1s"\nshare = 0.9\npercentile = 90', "keep one"),
        ('[[slo]]\nttft = "1s"\nmodel = 3', "expected a text"),
        ('[[slo]]\nttft = "1s"\nprompt-tokens = "9-5"', "expected a range"),
        ('[[slo]]\nttft = "1s"\nprompt-tokens = "a-b"', "expected a range"),
        ('[[slo]]\nttft = "1s"\nprompt-tokens = 5', "expected a range"),
        ('nonsense = 1\n[[slo]]\nttft = "1s"', "unknown key"),
    ],
)
def test_a_wrong_objective_is_refused_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_objectives(toml(tmp_path, text))
