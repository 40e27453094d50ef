"""The screen of a comparison: what is on it, and that it fits."""

from __future__ import annotations

from typing import Any

import pytest

from tapproxy.core.sample import Sample
from tapproxy.load.compare import judge
from tapproxy.load.slo import parse_slo
from tapproxy.load.trial import PathFacts
from tapproxy.report.comparison import WIDTH, lines
from tests.load.standin import answer, drifting, rounds, trial


def screen(comparison: Any) -> str:
    found = lines(comparison)
    assert all(len(line) <= WIDTH for line in found), max(found, key=len)
    assert not any(line != line.rstrip() or "\n" in line for line in found)
    return "\n".join(found)


def test_a_small_comparison_is_these_lines() -> None:
    results = [answer(index, path, turn, ttft_ms=40 if path == "direct" else 47) for index, path, turn in rounds(20, 1)]
    assert screen(judge(trial(results))) == (
        "tapproxy compare · single-stream, run run\n"
        "\n"
        "in ms          requests failed    TTFT                    TPOT     ICL             E2E         tok/s\n"
        "path                               P50     P95     P99     P50     P50     P99     P50     P95\n"
        "direct               20      0    40.0       –       –    10.0    10.0       –    90.0       –    67\n"
        "other                20      0    47.0       –       –    10.0    10.0       –    97.0       –    62\n"
        "\n"
        "other less direct, in ms [95 % interval]\n"
        "                          P50                    P90                    P95                    P99\n"
        "TTFT        +7.0 [7.0, 7.0] *                    –                      –                      –\n"
        "TTFVT       +7.0 [7.0, 7.0] *                    –                      –                      –\n"
        "ICL       0.00 [0.00, 0.00]      0.00 [0.00, 0.00]                      –                      –\n"
        "TPOT      0.00 [0.00, 0.00]                      –                      –                      –\n"
        "E2E         +7.0 [7.0, 7.0] *                    –                      –                      –\n"
        "* a difference: P50 of TTFT decides by itself, the rest is corrected for its number (Holm)\n"
        "\n"
        "verdict: healthy\n"
        "\n"
        "– under P95: too few requests; 110 more on each path would give it\n"
        "– under P99: too few requests; 642 more on each path would give it"
    )


def test_the_pages_that_were_sampled_are_named_with_whose_they_are() -> None:
    results = [answer(index, path, turn) for index, path, turn in rounds(20, 1)]
    run = trial(results)
    facts = {"engine": "vLLM", "version": "0.32.0"}
    run.samples = [Sample("engine", "http://e/metrics", at, at, facts=facts) for at in (1, 2)]
    run.samples.append(Sample("engine", "http://gone/metrics", 1, 1, problem="it hangs"))
    shown = screen(judge(run))
    assert "\nsampled http://e/metrics: 2 readings of vLLM 0.32.0\n" in shown
    assert "gone" not in shown


def test_everything_at_once_fits_a_hundred_columns() -> None:
    long, other = "a-path-with-a-very-long-name-indeed", "another\x1b[31m-one"
    results = [
        answer(
            index,
            path,
            turn,
            ttft_ms=12345.678 if path == long else 98765.4321,
            due_ms=1000 * index - 5,
            tokens=6 if path == long else 3,
            model=path * 4,
            connect=3_000_000,
            reused=False,
        )
        for index, path, turn in rounds(700, 1, paths=(long, other))
    ]
    paths = {long: PathFacts("http://a"), other: PathFacts("http://b")}
    run = trial(results, paths=paths, scenario="server", rate=4.0, notes=["word " * 60])
    text = screen(judge(run, parse_slo("ttft=20s,tpot=50ms"), baseline=trial(results, id="before", paths=paths)))
    assert "\x1b" not in text
    assert "these do not compare:" in text
    assert "TTFT and E2E from the scheduled time" in text
    assert "attainment 100 %" in text
    assert "TTFT p99 ≤ 20000 ms: 0 of 700 over, shown (99 % sure)" in text
    assert "verdict: degraded" in text


def test_a_cause_is_told_with_its_evidence_and_what_to_do() -> None:
    held = drifting(40, 1, change=lambda path, turn: {"tokens": 20, "reads": [0] * 20 if path == "other" else None})
    text = screen(judge(trial(held)))
    assert "proxy.response_buffering on other: TTFT +" in text
    assert "whose tokens came all at the end: 100 % (n=40)" in text
    assert "proxy_buffering off" in text


@pytest.mark.parametrize("result", [{}, {"paths": {}}, {"paths": {"a": {}}, "differences": {"b": {}}}])
def test_half_a_result_prints_too(result: dict[str, Any]) -> None:
    assert "verdict: not measured" in screen(result)
