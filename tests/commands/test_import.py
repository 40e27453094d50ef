"""`tapproxy import` from outside: its text, its JSON, its exit codes."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson
import pytest

from tapproxy.cli import run

DATA = Path(__file__).parent.parent / "data/import"
CHAT = DATA / "vllm-bench-0.32-chat.json"


def test_the_text_says_what_differs_how_sure_it_is_and_both_views(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", str(CHAT), "--data", str(DATA), "--rows", "1"]) == 0
    text = capsys.readouterr().out
    for said in (
        "vllm bench serve: 8 requests",
        "Where its numbers differ from ours",
        "that is the role event",
        "in 8 of 8 joined requests its TTFT ends at the role event",
        "At tap tap (21 records): joined 8 certain (8 by request id)",
        "5 of them are void at the tap",
        "counted from the tap's start",
        "7 more: --rows",
    ):
        assert said in " ".join(text.split()), said
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("file", ["vllm-bench-0.32-chat.json", "aiperf-0.13.jsonl", "guidellm-0.8.json"])
def test_the_json_has_each_request_from_both_sides(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", str(DATA / file), "--data", str(DATA), "--json", "-"]) == 0
    found = orjson.loads(capsys.readouterr().out)
    assert (found["schema"], found["file"]) == ("tapproxy.import/1", str(DATA / file))
    for request in found["requests"]:
        view = request["taps"]["tap"]
        assert view["sure"] == "certain"
        assert request["client"]["ttft_ms"] > 0
        assert view["tap"]["ttft_ms"] > 0


def test_bodies_that_the_tool_saved_are_never_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = DATA / "guidellm-0.8.json", tmp_path / "out.json"
    assert "apple river stone" in file.read_text()
    assert run(["import", str(file), "--data", str(DATA), "--pair-key", "secret-pair", "--json", str(out)]) == 0
    assert "apple" not in capsys.readouterr().out + out.read_text()


def test_aiperfs_inputs_beside_its_file_give_the_bodies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [orjson.loads(line) for line in (DATA / "aiperf-0.13.jsonl").read_bytes().splitlines()]
    for line in lines:
        del line["metadata"]["x_request_id"]
    (tmp_path / "profile_export.jsonl").write_bytes(b"\n".join(map(orjson.dumps, lines)))
    shutil.copy(DATA / "inputs.json", tmp_path)
    words = ["import", str(tmp_path / "profile_export.jsonl"), "--data", str(DATA), "--pair-key", "secret-pair"]
    assert run([*words, "--json", "-"]) == 0
    assert set(orjson.loads(capsys.readouterr().out)["taps"]["tap"]["by"]) == {"fingerprint"}


def test_without_a_tap_the_file_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["import", str(CHAT)]) == 0
    assert "No records to join: give the directory of a tap" in capsys.readouterr().out


def test_records_of_other_requests_are_exit_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (DATA / "records-20261129T183928.218143Z-1.jsonl").read_bytes().splitlines()
    others = [line for line in lines if b'"bench-' not in line]
    (tmp_path / "records-20261129T183928.218143Z-1.jsonl").write_bytes(b"\n".join(others) + b"\n")
    assert run(["import", str(CHAT), "--data", str(tmp_path)]) == 3
    assert capsys.readouterr().err.startswith(
        f"tapproxy: none of the 8 requests could be joined to the {len(others)} records: the load went another way"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param([str(DATA / "inputs.json")], "are those of no tool known here", id="another file"),
        pytest.param(["/nonexistent.json"], "cannot be read: No such file or directory", id="no file"),
        pytest.param([str(CHAT), "--data", "/nonexistent"], "cannot be read", id="no data directory"),
        pytest.param([str(CHAT), "--data", str(DATA), "--tap", "x"], "there are those of tap", id="no such tap"),
        pytest.param([str(CHAT), "--data", str(DATA), "--json", "/nonexistent/x"], "cannot be written", id="no target"),
    ],
)
def test_wrong_usage_is_exit_2_and_a_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tapproxy: ")
    assert said in error
