"""The live check on the whole corpus, both nginx: what is measured is the stored truth, before the patch and after it.

pytest -o addopts= tests/full/test_live_corpus.py        (some ten minutes)
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tapproxy.nginx import fix
from tapproxy.nginx.checker import Examination, examine
from tapproxy.nginx.live import prove
from tapproxy.nginx.sandbox import Nginx
from tests.nginx.corpus import CASES, Case, build
from tests.nginx.hostile import HOSTILE, whole
from tests.nginx.live import ALL, label

MEANING = {"streams": "streams", "streams-header-late": "late_header", "held": "held"}
# What does not lie in a setting: the engine or the client of that measurement did something of its own.
BEYOND = {
    "b16_error_page_fallback_loses": "the primary answers 503: the fallback has its own measurement",
    "d23_upstream_gzip_nosync": "the engine's own compressor holds",
    "f06_send_timeout_slow_client": "the client stops reading",
    "f11_retry_post_non_idempotent": "the first replica hangs; what is not run is said",
    "f15_retry_request_buffering_off": "the first replica answers 503; what is not run is said",
    "f23_upstream_dies_http11": "the engine dies",
    "f25_upstream_dies_default": "the engine dies",
    "g01_body_default_413": "the prompt has 2 MB",
}
HELD = [case for case in CASES if "held" in case.truth["verdict"].values() and case.name not in BEYOND]


def client(found: Examination, nginx: Nginx, kind: str) -> dict[str, Any]:
    live = asyncio.run(prove(found, nginx, far=False, kinds=(kind,)))
    document = found.to_dict()
    live.add_to(document, found)
    return {**document["paths"][0]["clients"][kind], "not_run": document["live"]["not_run"]}


@pytest.mark.parametrize("nginx", ALL, ids=label)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_measured_is_the_stored_truth(case: Case, nginx: Nginx, tmp_path: Path) -> None:
    truth = case.truth["measured"][nginx.version]
    verdict = case.truth["verdict"][nginx.version]
    found = case.examine(case.write(tmp_path), nginx.version)
    if found.trees[0].http is None:
        live = asyncio.run(prove(found, nginx, far=False))
        assert [one.directive for one in live.not_run] == ["stream {"]
        assert all("only http is run" in (trial.because or "") and not trial.clients for trial in live.paths)
        return
    shown = client(found, nginx, case.kind)
    measured = shown["measured"]
    if measured is None:
        assert verdict == "config-invalid" or shown["not_run"]
        assert MEANING.get(verdict, "fails") == "fails"
        return
    if case.name in BEYOND:
        special(case.name, measured)
        return
    assert measured["streaming"] == MEANING.get(verdict, "fails"), measured
    assert measured["agrees"] in (True, None)
    if not shown["not_run"] and truth.get("keepalive_reused") is not None:
        assert measured["upstream_reused"] == truth["keepalive_reused"]
    if truth.get("abort_reaches_upstream") is not None and measured["abort"]["decode"] is not None:
        assert measured["abort"]["decode"]["reached_upstream"] == truth["abort_reaches_upstream"]


def special(name: str, measured: dict[str, Any]) -> None:
    """The stream that shows what the case is about."""
    if name.startswith("g01"):
        assert measured["streams"]["large_prompt"]["status"] == 413
    if name.startswith("f23"):
        assert measured["streams"]["engine_dies"]["client_is_told"] is True
    if name.startswith("f25"):
        assert measured["streams"]["engine_dies"]["client_is_told"] is (measured["upstream_http"] == "1.1")


@pytest.mark.parametrize("nginx", ALL, ids=label)
@pytest.mark.parametrize("case", HELD, ids=lambda case: case.name)
def test_what_was_held_streams_once_patched(case: Case, nginx: Nginx, tmp_path: Path) -> None:
    file = case.write(tmp_path)
    found = case.examine(file, nginx.version)
    if case.truth["verdict"][nginx.version] != "held":
        pytest.skip("not held on this nginx")
    patched = examine(
        [file],
        nginx_version=nginx.version,
        paths=[case.truth["request"]["path"]],
        upstream=case.upstream,
        build=build(nginx.version),
        texts=fix.applied(found.texts, found.edits),
    )
    measured = client(patched, nginx, case.kind)["measured"]
    assert measured is not None
    assert measured["streaming"] in ("streams", "late_header"), measured
    assert file.read_text() == found.texts[str(file)]  # nothing but memory was patched


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_measured_as_what_is_left_of_it(text: str, tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(text.replace("OUTSIDE", str(tmp_path)))
    before = sorted(tmp_path.iterdir())
    found = examine([file], nginx_version=ALL[0].version, paths=["/v1/x"])
    live = asyncio.run(prove(found, ALL[0], far=False))
    assert sorted(tmp_path.iterdir()) == before
    for trial in live.paths:
        assert trial.clients or trial.because


def test_an_engine_that_waits_for_a_prompt_that_never_comes_is_not_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(whole(location="proxy_pass_request_body off;"))
    shown = client(examine([file], nginx_version=ALL[0].version, paths=["/v1/x"]), ALL[0], "http1")["measured"]
    assert shown["streaming"] == "fails"
    assert shown["error"].startswith("timeout")


def test_a_rate_at_which_nothing_arrives_in_time_is_a_hold(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(whole(location="limit_rate 40;"))
    shown = client(examine([file], nginx_version=ALL[0].version, paths=["/v1/x"]), ALL[0], "http1")["measured"]
    assert (shown["streaming"], shown["agrees"], shown["cut"]) == ("held", True, False)
