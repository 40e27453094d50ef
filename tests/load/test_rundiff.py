"""What changed between two runs: settings told apart from outcomes, and more than one said aloud."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapproxy.load.runs import Register
from tapproxy.load.trial import PathFacts
from tests.load.kept import comparison, trial


def flags(**given: str) -> dict[str, Any]:
    named = {"--" + name.replace("_", "-"): value for name, value in given.items()}
    return {"paths": {"direct": {"engine": {"name": "vLLM", "version": "0.32", "flags": named}}}}


def diff(directory: Path, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    register = Register(directory)
    for name, given in (("a", a), ("b", b)):
        register.keep(trial(name, [1.0], **given), comparison(), {})
    return register.diff("a", "b")


def names(found: dict[str, Any]) -> list[str]:
    return [entry["setting"] for entry in found["settings"]]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        pytest.param({}, {}, [], id="nothing"),
        pytest.param({}, {"max_tokens": 32}, ["max_tokens"], id="what was asked"),
        pytest.param({}, {"rate": 4.0, "seed": 2}, ["rate", "seed"], id="two"),
        pytest.param(
            {"environment": flags(max_num_seqs="8")},
            {"environment": flags(max_num_seqs="16")},
            ["engine.flags.--max-num-seqs"],
            id="a flag of the engine",
        ),
        pytest.param(
            {"environment": flags(a="1")},
            {"environment": flags(a="1", enforce_eager="True")},
            ["engine.flags.--enforce-eager"],
            id="a flag that was not given before",
        ),
        pytest.param(
            {"environment": {"gpu": {"driver": "550"}}},
            {"environment": {"gpu": {"driver": "570"}}},
            ["gpu.driver"],
            id="the driver",
        ),
        pytest.param(
            {"facts": PathFacts("http://a", cold_ttft_ns=1, prefix_cache_hits=1.0)},
            {"facts": PathFacts("http://a", cold_ttft_ns=2, prefix_cache_hits=9.0)},
            [],
            id="an outcome is no setting",
        ),
    ],
)
def test_settings_that_changed(a: dict[str, Any], b: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    assert names(diff(tmp_path, a, b)) == expected


def test_more_than_one_change_is_said_aloud(tmp_path: Path) -> None:
    assert diff(tmp_path / "1", {}, {"max_tokens": 32})["said"] == "one setting changed: max_tokens"
    assert diff(tmp_path / "2", {}, {"max_tokens": 32, "seed": 2})["said"] == (
        "2 settings changed (max_tokens, seed): which of them did it cannot be told; change one thing at a time"
    )
    assert diff(tmp_path / "3", {}, {})["said"].startswith("no setting that is known changed")


def test_what_one_run_does_not_know_is_no_change(tmp_path: Path) -> None:
    found = diff(tmp_path, {"environment": {}}, {"environment": flags(a="1")})
    assert names(found) == []
    assert [entry["setting"] for entry in found["known_in_one_only"]] == ["engine.flags.--a"]


def test_what_the_engine_reports_after_a_flag_changed_is_not_counted_twice(tmp_path: Path) -> None:
    before, after = flags(block_size="16"), flags(block_size="32")
    before["paths"]["direct"]["engine"]["settings"] = {"cache.block_size": "16"}
    after["paths"]["direct"]["engine"]["settings"] = {"cache.block_size": "32"}
    found = diff(tmp_path, {"environment": before}, {"environment": after})
    assert names(found) == ["engine.flags.--block-size"]
    assert [entry["setting"] for entry in found["may_follow"]] == ["engine.settings.cache.block_size"]


def test_other_prompts_of_another_seed_are_one_change(tmp_path: Path) -> None:
    register = Register(tmp_path)
    register.keep(trial("a", [1.0]), comparison(), {"slots": [{"prompt": "one"}]})
    register.keep(trial("b", [1.0], seed=2), comparison(), {"slots": [{"prompt": "two"}]})
    register.keep(trial("c", [1.0]), comparison(), {"slots": [{"prompt": "three"}]})
    assert names(register.diff("a", "b")) == ["seed"]
    assert [entry["setting"] for entry in register.diff("a", "b")["may_follow"]] == ["prompts (digest)"]
    assert names(register.diff("a", "c")) == ["prompts (digest)"]


def test_one_change_behind_two_paths_is_one(tmp_path: Path) -> None:
    register = Register(tmp_path)
    for name, version in (("a", "0.32"), ("b", "0.33")):
        told = trial(name, [1.0])
        told.paths = {path: PathFacts(f"http://{path}", engine_version=version) for path in ("direct", "nginx")}
        register.keep(told, comparison(), {})
    (entry,) = register.diff("a", "b")["settings"]
    assert (entry["setting"], entry["paths"]) == ("engine.version", ["direct", "nginx"])


def test_a_changed_nginx_configuration_is_seen_by_its_hash(tmp_path: Path) -> None:
    def nginx(digest: str) -> dict[str, Any]:
        return {"environment": {"paths": {"direct": {"nginx": {"version": "1.22.1", "config_sha256": digest}}}}}

    assert names(diff(tmp_path, nginx("aa"), nginx("bb"))) == ["nginx.config_sha256"]


def test_numbers_stand_beside_each_other_and_unknown_stays_unknown(tmp_path: Path) -> None:
    register = Register(tmp_path)
    register.keep(trial("a", [1.0]), comparison(ttft_p50=40.0, tokens_per_s=None), {})
    register.keep(trial("b", [1.0]), comparison(ttft_p50=30.0, failed=4), {})
    numbers = register.diff("a", "b")["numbers"]["direct"]
    assert numbers["ttft_ms"]["p50"] == {"a": 40.0, "b": 30.0, "change": -10.0, "percent": -25.0}
    assert numbers["ttft_ms"]["p99"] == {"a": None, "b": None, "change": None, "percent": None}
    assert numbers["output_tokens_per_s"] == {"a": None, "b": 100.0, "change": None, "percent": None}
    assert numbers["error_share"] == {"a": 0.0, "b": 0.1, "change": 0.1, "percent": None}


def test_paths_that_came_and_went_are_named(tmp_path: Path) -> None:
    register = Register(tmp_path)
    for name, path in (("a", "nginx"), ("b", "haproxy")):
        told = trial(name, [1.0])
        told.paths = {path: PathFacts("http://x")}
        register.keep(told, comparison(), {})
    found = register.diff("a", "b")
    assert (found["paths_in_a_only"], found["paths_in_b_only"], found["settings"]) == (["nginx"], ["haproxy"], [])
