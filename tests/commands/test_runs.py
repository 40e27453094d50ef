"""`tapproxy runs` from outside."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from tapproxy.cli import run
from tapproxy.load.runs import Register
from tests.load.kept import comparison, trial


@pytest.fixture
def data(tmp_path: Path) -> Path:
    register = Register(tmp_path)
    flags = {"paths": {"direct": {"engine": {"flags": {"--max-num-seqs": "8"}}}}}
    register.keep(trial("20260101-a", [40.0], environment=flags), comparison(ttft_p50=40.0), {})
    flags["paths"]["direct"]["engine"]["flags"] = {"--max-num-seqs": "16"}
    later = trial("20260102-b", [30.0], environment=flags, started_unix_ns=1_700_000_100 * 10**9, seed=2)
    register.keep(later, comparison(ttft_p50=30.0), {})
    return tmp_path


def test_the_list(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "list", "--data", str(data)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "run                       began (UTC)          scenario       requests  verdict       paths",
        "20260101-a                2023-11-14 22:13:20  single-stream        40  healthy       direct",
        "20260102-b                2023-11-14 22:15:00  single-stream        40  healthy       direct",
    ]


def test_an_empty_register_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "list", "--data", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("no runs are kept there")


def test_one_run(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "show", "20260101", "--data", str(data)]) == 0
    text = capsys.readouterr().out
    for said in ("20260101-a", "single-stream", "engine.flags.--max-num-seqs", "p50 40.00", "output tokens/s"):
        assert said in text
    assert run(["runs", "show", "20260101-a", "--data", str(data), "--json", "-"]) == 0
    assert orjson.loads(capsys.readouterr().out)["comparison"] == comparison(ttft_p50=40.0)


def test_the_difference_says_what_changed_and_that_it_was_too_much(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["runs", "diff", "20260101-a", "20260102-b", "--data", str(data)]) == 0
    text = capsys.readouterr().out
    for said in (
        "2 settings changed (seed, engine.flags.--max-num-seqs)",
        "change one thing at a time",
        "engine.flags.--max-num-seqs (direct): 8 → 16",
        "TTFT p50 (ms)                40.00       30.00      -10.00  -25.0 %",
    ):
        assert said in " ".join(text.split()) or said in text, said
    assert run(["runs", "diff", "20260101-a", "20260102-b", "--data", str(data), "--json", "-"]) == 0
    assert orjson.loads(capsys.readouterr().out)["schema"] == "tapproxy.rundiff/1"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param(["show", "x"], "no run 'x'", id="no such run"),
        pytest.param(["diff", "20260101", "2026"], "is the beginning of 2 runs", id="two runs"),
        pytest.param(
            ["list", "--data", "/nonexistent"], "the data directory '/nonexistent' is not there", id="no data"
        ),
    ],
)
def test_wrong_usage_is_exit_2(words: list[str], said: str, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = words if "--data" in words else [*words, "--data", str(data)]
    assert run(["runs", *given]) == 2
    assert said in capsys.readouterr().err


def test_purge_removes_runs_too(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["purge", "--data", str(data), "--older-than", "1d"]) == 0
    assert "removed 2 runs (" in capsys.readouterr().out
    assert Register(data).list() == []
