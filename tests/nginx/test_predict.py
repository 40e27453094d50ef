"""The prediction per kind of client against the measured verdicts of the corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapproxy.core.errors import ConfigError
from tapproxy.nginx.checker import examine
from tapproxy.nginx.predict import upstream_of
from tests.nginx.corpus import CASES, VERSIONS, Case

MEANING = {"streams": "streams", "streams-header-late": "late_header", "held": "held"}

# What a static check of the configuration cannot know, and what was measured there.
BEYOND = {
    "b16_error_page_fallback_loses": "the primary answers 503: measured is the fallback (see its own finding)",
    "d23_upstream_gzip_nosync": "the engine's own compressor holds",
    "f06_send_timeout_slow_client": "the client stops reading",
    "f15_retry_request_buffering_off": "the engine answers 503",
    "f23_upstream_dies_http11": "the engine dies",
    "f25_upstream_dies_default": "the engine dies",
    "g01_body_default_413": "the prompt has 2 MB",
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", [case for case in CASES if case.name not in BEYOND], ids=lambda case: case.name)
def test_the_prediction_is_what_was_measured(case: Case, version: str, tmp_path: Path) -> None:
    result = case.examine(case.write(tmp_path), version)
    predicted = result.paths[0].clients[case.kind]
    verdict = case.truth["verdict"][version]
    expected = MEANING.get(verdict, "fails")
    assert predicted.streaming == expected, predicted.why
    assert predicted.why


def test_most_of_the_corpus_is_predicted() -> None:
    assert len(CASES) == 117
    assert len(BEYOND) == 7


def test_one_listener_streams_to_browsers_and_holds_scripts() -> None:
    # a05: the same port, HTTP/2 measured as streaming and HTTP/1.1 over TLS as held.
    (case,) = [one for one in CASES if one.name == "a05_default_h2"]
    directory = Path(__file__).parents[1] / "data" / "nginx"
    result = examine([directory / f"{case.name}.conf"], nginx_version="1.31.3", paths=["/v1/chat/completions"])
    clients = result.paths[0].clients
    assert {kind: (one.streaming, one.mechanism) for kind, one in clients.items()} == {
        "tls_http1": ("held", "tls_buffer"),
        "h2": ("late_header", None),
    }


@pytest.mark.parametrize(
    ("facts", "streaming", "mechanism"),
    [
        ([], "held", "upstream_not_chunked"),
        (["framing=chunked"], "late_header", None),
        (["framing=length"], "held", "upstream_not_chunked"),
        (["x-accel-buffering=no"], "streams", None),
        (["X-Accel-Buffering=No"], "streams", None),
        (["x-accel-buffering=off"], "held", "upstream_not_chunked"),
    ],
    ids=["generic", "chunked", "length", "xab-no", "xab-case", "xab-bad-value"],
)
def test_facts_about_the_engine_settle_it(
    facts: list[str], streaming: str, mechanism: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text("events {}\nhttp { server { listen 80; location / { proxy_pass http://127.0.0.1:8000; } } }\n")
    upstream = upstream_of("generic", facts)
    result = examine([file], nginx_version="1.22.1", paths=["/v1/x"], upstream=upstream)
    outcome = result.paths[0].clients["http1"]
    assert (outcome.streaming, outcome.mechanism) == (streaming, mechanism)


@pytest.mark.parametrize(
    ("profile", "facts", "message"),
    [
        ("vlm", [], "unknown upstream profile 'vlm'"),
        ("vllm", ["framing"], "not of the form NAME=VALUE"),
        ("vllm", ["framing=weird"], "known are framing="),
        ("vllm", ["server=x"], "known are framing="),
    ],
)
def test_a_wrong_fact_is_refused(profile: str, facts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        upstream_of(profile, facts)


@pytest.mark.parametrize(
    ("inside", "streaming", "why"),
    [
        ("return 403;", "fails", "answered here: return 403"),
        ("proxy_pass http://e; proxy_method GET;", "fails", "POST into GET"),
        ("proxy_pass http://e; proxy_http_version 2;", "fails", "vllm speaks HTTP/1.1 only"),
        ("root /srv;", "fails", "no proxy_pass in the location"),
        ("grpc_pass grpc://e;", "fails", "served by grpc_pass"),
        ("proxy_pass http://e; limit_rate 2k;", "held", "limit_rate 2k is slower"),
        ("proxy_pass http://e; limit_rate $arg_rate;", "depends", "value of limit_rate"),
        ("proxy_pass http://e; proxy_read_timeout 500ms;", "fails", "proxy_read_timeout 500ms cuts"),
        ("if ($arg_x) { return 503; } proxy_pass http://e;", "depends", "whether if ($arg_x) holds"),
    ],
    ids=["return", "method", "http2", "file", "grpc", "limit", "limit-variable", "read-timeout", "if"],
)
def test_other_ends_of_a_path(inside: str, streaming: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(
        "events {}\nhttp { upstream e { server 127.0.0.1:8000; }\n"
        f"server {{ listen 80; location / {{ {inside} }} }} }}\n"
    )
    result = examine([file], nginx_version="1.31.3", paths=["/v1/x"])
    outcome = result.paths[0].clients["http1"]
    assert (outcome.streaming, why in outcome.why) == (streaming, True), outcome.why
