"""The register: what of a run is kept, how it is found again, and what is never kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tapproxy import __version__
from tapproxy.core import metrics
from tapproxy.core.errors import ConfigError
from tapproxy.core.record import Record
from tapproxy.load.runs import Register, RemovedRuns
from tapproxy.load.trial import PathFacts
from tests.load.kept import PROMPT, comparison, results, trial

KEY = "sk-live-0123456789abcdef"
PLAN = {"schema": "tapproxy.plan/1", "seed": 1, "slots": [{"index": 0, "prompt": PROMPT, "max_tokens": 16}]}


def everything(directory: Path) -> str:
    return "\n".join(file.read_text() for file in directory.rglob("*") if file.is_file() and file.name != ".key")


def test_a_run_comes_back_as_it_was_kept(tmp_path: Path) -> None:
    register = Register(tmp_path / "data")
    told = trial("run-1", [40.0, 50.0], environment={"gpu": {"driver": "570.1"}}, max_tokens=9)
    directory = register.keep(told, comparison(), PLAN)
    assert directory == tmp_path / "data/runs/run-1"
    kept = register.load("run-1")
    assert (kept.id, kept.version, kept.started_unix_ns) == ("run-1", __version__, told.started_unix_ns)
    assert (kept.asked["scenario"], kept.asked["max_tokens"]) == ("single-stream", 9)
    assert kept.paths["direct"]["engine_version"] == "0.32"
    assert kept.environment == {"gpu": {"driver": "570.1"}}
    assert kept.comparison == comparison()
    assert kept.plan["slots"][0]["max_tokens"] == 16
    lines = list(kept.requests())
    assert [metrics.ttft_ns(Record.from_dict(line["record"])) for line in lines] == [40_000_000, 50_000_000]
    assert [(line["slot"]["path"], line["failure"], line["floor"]) for line in lines] == [("direct", None, False)] * 2


def test_only_its_user_can_read_it(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        directory = Register(tmp_path / "data").keep(trial("a", [1.0]), comparison(), PLAN)
    finally:
        os.umask(old)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (directory.parent, directory, *directory.iterdir())}
    assert modes == {
        "runs": 0o700,
        "a": 0o700,
        **dict.fromkeys(("run.json", "plan.json", "comparison.json", "environment.json", "requests.jsonl"), 0o600),
    }
    assert (directory.parent / ".key").stat().st_mode & 0o777 == 0o600


def test_neither_prompts_nor_answers_nor_keys_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "an-unusual-key-of-a-private-gateway")
    told = trial(
        "a",
        [1.0],
        facts=PathFacts(f"http://user:{KEY}@engine:8000/v1?api_key={KEY}", models=["m"]),
        environment={
            "paths": {
                "direct": {"engine": {"flags": {"--api-key": KEY, "--max-num-seqs": "8", "--hf-token": "hf_abc"}}}
            },
            "note": "asked with an-unusual-key-of-a-private-gateway",
        },
    )
    told.results += results([2.0], failed=1)
    told.notes.append(f"Authorization: Bearer {KEY}")
    plan = {
        "headers": {"Authorization": f"Bearer {KEY}", "X-Trace": "yes"},
        "slots": [
            {"prompt": PROMPT, "max_tokens": 4},
            {"messages": [{"role": "user", "content": PROMPT}]},
        ],
        "prompts": [PROMPT],
    }
    result = comparison() | {"answers": [{"completion": "an answer that nobody may keep"}]}
    text = everything(Register(tmp_path).keep(told, result, plan))
    for secret in (PROMPT, KEY, "an-unusual-key", "hf_abc", "an answer that nobody", "user:"):
        assert secret not in text
    for kept in ('"--max-num-seqs": "8"', '"X-Trace": "yes"', "http://engine:8000/v1?", '"left_out": 31'):
        assert kept in text


def test_a_prompt_is_left_out_under_whatever_key(tmp_path: Path) -> None:
    kept = Register(tmp_path).keep(trial("a", [1.0]), comparison(), {"arms": [{"q": PROMPT, "n": 1}], "input": [1, 2]})
    assert PROMPT not in everything(kept)
    assert Register(tmp_path).load("a").plan == {
        "arms": [{"q": {"left_out": len(PROMPT), "unit": "characters"}, "n": 1}],
        "input": [1, 2],
    }


def test_what_is_no_text_stays(tmp_path: Path) -> None:
    plan = {
        "paths": ["direct", "nginx"],
        "slots": [{"path": "direct", "messages": [["user", PROMPT]], "prompts": "file"}],
    }
    Register(tmp_path).keep(trial("a", [1.0]), comparison(), plan)
    kept = Register(tmp_path).load("a").plan
    assert kept["paths"] == ["direct", "nginx"]
    assert kept["slots"] == [
        {"path": "direct", "messages": {"left_out": len(PROMPT) + 4, "unit": "characters"}, "prompts": "file"}
    ]


def test_a_kept_run_is_data_again_but_for_its_prompts(tmp_path: Path) -> None:
    register = Register(tmp_path)
    told = trial("a", [40.0, 50.0], failed=1)
    told.floor = results([1.0], path="A")
    told.notes.append("a note")
    register.keep(told, comparison(), PLAN)
    again = register.load("a").trial()
    for result in (*told.results, *told.floor):
        object.__setattr__(result.slot, "prompt", "")
    assert again == told


def test_the_digest_tells_whether_two_runs_asked_the_same(tmp_path: Path) -> None:
    register = Register(tmp_path)
    register.keep(trial("a", [1.0]), comparison(), PLAN)
    register.keep(trial("b", [1.0]), comparison(), PLAN)
    register.keep(trial("c", [1.0]), comparison(), {"slots": [{"prompt": "another"}]})
    Register(tmp_path / "other").keep(trial("a", [1.0]), comparison(), PLAN)
    a, b, c = (register.load(name).prompts_digest for name in "abc")
    assert a == b != c
    # Keyed: the same prompts elsewhere have another digest, so that a guess cannot be tried.
    assert Register(tmp_path / "other").load("a").prompts_digest != a


def test_a_run_is_found_by_the_beginning_of_its_id(tmp_path: Path) -> None:
    register = Register(tmp_path)
    for name in ("20260101-aaaa", "20260101-bbbb", "20260102"):
        register.keep(trial(name), comparison(), {})
    assert register.load("20260101-b").id == "20260101-bbbb"
    with pytest.raises(ConfigError, match=r"^'20260101' is the beginning of 2 runs \(20260101-aaaa, 20260101-bbbb\)"):
        register.load("20260101")
    with pytest.raises(ConfigError, match=r"^no run 'x' in '.*runs': there are 20260101-aaaa, .*`tapproxy runs list`"):
        register.load("x")
    with pytest.raises(ConfigError, match="none are kept there"):
        Register(tmp_path / "empty").load("x")


def test_the_list_is_by_age_and_names_what_is_broken(tmp_path: Path) -> None:
    register = Register(tmp_path)
    register.keep(trial("later", [1.0], started_unix_ns=2_000), comparison(), {})
    register.keep(trial("earlier", [1.0], started_unix_ns=1_000), comparison(), {})
    register.keep(trial("broken", [1.0]), comparison(), {})
    (register.directory / "broken/comparison.json").write_text("{")
    (register.directory / "no-run").mkdir()
    broken, earlier, later = register.list()
    assert (earlier.id, later.id, later.requests, later.verdict) == ("earlier", "later", 40, "healthy")
    assert broken.problem is not None
    assert "is not JSON: the run is broken" in broken.problem
    assert Register(tmp_path / "nothing").list() == []


@pytest.mark.parametrize("name", ["", "..", "../x", "a/b", ".hidden", "a" * 81, "a\n"])
def test_an_id_that_is_no_directory_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^the run's id is "):
        Register(tmp_path / "data").keep(trial(name), comparison(), {})
    assert not (tmp_path / "data").exists()


def test_a_run_is_never_written_over(tmp_path: Path) -> None:
    register = Register(tmp_path)
    register.keep(trial("a", [1.0]), comparison(), {})
    with pytest.raises(ConfigError, match=r"^the run 'a' is kept already"):
        register.keep(trial("a", [2.0]), comparison(), {})
    assert sorted(path.name for path in register.directory.iterdir()) == [".key", "a"]


def test_a_link_in_place_of_the_register_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/runs").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is not a directory of this user: move it away"):
        Register(tmp_path / "data").keep(trial("a"), comparison(), {})
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_what_fails_halfway_leaves_nothing(tmp_path: Path) -> None:
    register = Register(tmp_path)
    with pytest.raises(TypeError):
        register.keep(trial("a"), {"not": object()}, {})
    assert [path.name for path in register.directory.iterdir()] == [".key"]


def test_runs_are_removed_by_age_or_all(tmp_path: Path) -> None:
    register = Register(tmp_path)
    register.keep(trial("old", started_unix_ns=99), comparison(), {})
    register.keep(trial("new", started_unix_ns=100), comparison(), {})
    (register.directory / "mine").mkdir()
    (register.directory / "mine/notes.txt").write_text("not a run")
    size = sum(file.stat().st_size for file in (register.directory / "old").iterdir())
    assert register.remove(100) == RemovedRuns(1, size, 1)
    assert [run.id for run in register.list()] == ["new"]
    assert register.remove(None).runs == 1
    assert [path.name for path in register.directory.iterdir()] == ["mine"]
