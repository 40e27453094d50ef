"""The rules against the corpus (what was measured), against their own samples, and against the healthy files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tapproxy.nginx.checker import DEFAULT_PATHS, check, examine
from tapproxy.nginx.fix import apply
from tapproxy.nginx.predict import upstream_of
from tapproxy.nginx.rules import SUMMARIES
from tapproxy.nginx.sandbox import Nginx, data_dir, make_certificate
from tests.nginx.corpus import CASES, VERSIONS, Case
from tests.nginx.live import ALL, TEMPORARY, label, refusal

# True of nearly every short configuration: what its defaults are.
DEFAULTS = {
    "upstream-no-keepalive", "read-timeout-default", "body-size-default-1m", "request-buffering-large-body",
}  # fmt: skip
# The prompt has 2 MB, which no configuration tells: the same text serves 100 kB in another case.
BEYOND = {("g01_body_default_413", "body-size-limit")}
# What one of the two versions has no such fault in, or refuses.
ONLY_ON = {"keepalive-before-balancer": "1.22.1", "http2-upstream-unsupported": "1.31.3"}
SAMPLES = sorted((data_dir() / "bad").glob("*.conf"))
HEALTHY = ("streaming.conf", "insert-tap.conf", "demo-recommended.conf")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_corpus_case_gets_its_findings_and_no_forbidden_one(case: Case, version: str, tmp_path: Path) -> None:
    found = {(one.rule, one.severity, one.line) for one in case.examine(case.write(tmp_path), version).findings}
    expected = {
        (slug, one["severity"], one["line"])
        for slug, one in case.expected(version).items()
        if (case.name, slug) not in BEYOND
    }
    assert expected <= found
    assert not case.forbidden(version) & {rule for rule, _, _ in found}
    errors = {rule for rule, severity, _ in found if severity == "error"}
    assert errors <= {slug for slug, severity, _ in expected if severity == "error"}


def test_precision_and_recall_over_the_corpus_are_what_they_were(tmp_path: Path) -> None:
    # Where a case expects no finding of a rule but forbids none either, ours was looked at: each such is true of the
    # file (HTTP/1.0 where the corpus names only its consequence; buffering on where the cache is the graver fault).
    right, missed, wrong, unlabelled = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for case in CASES:
        directory = tmp_path / case.name
        directory.mkdir()
        file = case.write(directory)
        for version in VERSIONS:
            found = {one.rule for one in case.examine(file, version).findings} - DEFAULTS
            expected = {slug for slug in case.expected(version) if (case.name, slug) not in BEYOND} - DEFAULTS
            right.update(found & expected)
            missed.update(expected - found)
            wrong.update(found & case.forbidden(version))
            unlabelled.update(found - expected - case.forbidden(version))
    assert (missed, wrong) == (Counter(), Counter())
    assert right == {
        "accept-encoding-forwarded": 2,
        "add-header-xab-noop": 2,
        "addition-sse": 1,
        "buffering-on": 58,
        "buffering-on-latent": 14,
        "cache-disabled-by-buffering-off": 2,
        "cache-post-ignores-body": 2,
        "cache-sse": 2,
        "chunked-off": 6,
        "client-keepalive-off": 2,
        "config-invalid": 12,
        "connection-upgrade-static": 2,
        "gunzip-sse": 1,
        "gzip-buffers-sse": 8,
        "gzip-sse": 2,
        "http10-upstream": 15,
        "ignore-client-abort": 2,
        "include-matches-nothing": 2,
        "keepalive-ineffective": 3,
        "keepalive-race-502": 2,
        "limit-rate-ignored": 2,
        "limit-rate-throttles": 2,
        "limit-req-delays": 2,
        "max-conns-502": 2,
        "mirror-doubles-inference": 4,
        "noop-directive": 2,
        "proxy-method-override": 2,
        "read-timeout-too-short": 8,
        "relies-on-xab": 8,
        "request-body-dropped": 2,
        "request-buffering-off-disables-retry": 2,
        "request-vs-response-buffering": 2,
        "retry-doubles-post": 2,
        "send-timeout-too-short": 2,
        "set-header-inheritance-lost": 1,
        "ssi-sse": 2,
        "store-sse": 2,
        "streaming-path-not-covered": 4,
        "sub-filter-sse": 1,
        "tcp-nodelay-off": 4,
        "trailing-slash-redirect": 2,
        "variable-proxy-pass": 4,
        "worker-connections-low": 2,
        "wrong-module-directive": 6,
        "xab-ignored": 2,
        "xab-request-header-noop": 2,
        "xab-stripped-by-inner-hop": 2,
        "xab-yes-overrides-off": 2,
    }
    assert unlabelled == {
        "buffering-on-latent": 6,
        "http10-upstream": 5,
        "keepalive-race-502": 9,
        "noop-directive": 6,
        "proxy-buffer-size-small": 2,
        "relies-on-xab": 6,
        "rewrite-changes-location": 4,
        "ssl_buffer_size": 2,
    }


def test_every_rule_has_a_sample_that_names_it() -> None:
    assert {file.read_text().splitlines()[0].removeprefix("# ") for file in SAMPLES} == SUMMARIES.keys()
    assert {file.stem for file in SAMPLES} == SUMMARIES.keys()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", SAMPLES, ids=lambda file: file.stem)
def test_the_rule_of_the_first_line_fires_with_all_its_facts(file: Path, version: str) -> None:
    if version != ONLY_ON.get(file.stem, version):
        pytest.skip("not a fault of this version, or refused by it")
    found = [one for one in check([file], nginx_version=version, path=None) if one.rule == file.stem]
    assert len(found) == 1  # once, though seven paths lead there
    (one,) = found
    assert one.file == str(file)
    assert one.line is not None
    assert one.directive is not None
    assert one.directive in " ".join(file.read_text().splitlines()[one.line - 1].split())
    assert all((one.summary, one.evidence, one.advice))


@pytest.mark.parametrize("profile", ["vllm", "sglang", "tgi", "llama.cpp", "ray-serve", "generic"])
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", HEALTHY)
def test_the_recommended_files_have_nothing_to_report(name: str, version: str, profile: str) -> None:
    assert check([data_dir() / name], nginx_version=version, path=None, upstream_profile=profile) == []


def test_the_default_demo_is_held_on_both_versions() -> None:
    for version in VERSIONS:
        found = check([data_dir() / "demo-default.conf"], nginx_version=version)
        assert ("buffering-on", "error") in {(one.rule, one.severity) for one in found}


BARE = """events {}
http {
    server {
        listen 8080;
        location / { proxy_pass http://127.0.0.1:8000; }
    }
}
"""


@pytest.mark.parametrize(
    ("profile", "version", "rules"),
    [
        ("generic", "1.22.1", {"buffering-on", "http10-upstream"}),
        ("generic", "1.29.6", {"buffering-on", "http10-upstream"}),
        ("generic", "1.29.7", {"buffering-on-latent"}),
        ("vllm", "1.22.1", {"buffering-on-latent", "http10-upstream"}),
        ("ray-serve", "1.22.1", {"buffering-on-latent", "http10-upstream"}),
        ("tgi", "1.22.1", {"relies-on-xab", "http10-upstream"}),
        ("tgi", "1.31.3", {"relies-on-xab"}),
    ],
)
def test_the_same_file_differs_by_version_and_engine(
    profile: str, version: str, rules: set[str], tmp_path: Path
) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(BARE)
    found = check([file], nginx_version=version, upstream_profile=profile)
    assert {one.rule for one in found} == rules | DEFAULTS


def test_an_engine_whose_framing_is_not_known_is_said_to_decide(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(BARE)
    found = check([file], nginx_version="1.22.1", upstream_profile="ray-serve")
    (latent,) = [one for one in found if one.rule == "buffering-on-latent"]
    assert "held if ray-serve answers HTTP/1.0 close-delimited" in latent.evidence


def test_the_patches_of_the_corpus_leave_nothing_they_were_for(tmp_path: Path) -> None:
    healed = {"buffering-on", "buffering-on-latent", "gzip-buffers-sse", "http10-upstream", "relies-on-xab"}
    patched = 0
    for case in CASES:
        directory = tmp_path / case.name
        directory.mkdir()
        file = case.write(directory)
        for version in VERSIONS:
            before = case.examine(file, version)
            edits = [edit for flaw in before.flaws for edit in flaw.edits if edit.file == str(file)]
            if not edits or any(one.rule == "config-invalid" for one in before.findings):
                continue
            original = file.read_text()
            file.write_text(apply(original, edits))
            after = case.examine(file, version)
            assert not {one.rule for one in after.findings} & healed, case.name
            assert not any(one.severity == "error" for one in after.findings), case.name
            file.write_text(original)
            patched += 1
    assert patched == 137


def test_http11_is_added_where_the_headers_are_so_that_none_is_lost(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(
        "events {}\nhttp {\n  server {\n    listen 80;\n    proxy_buffering off;\n"
        "    proxy_set_header Host $host;\n    location / {\n      proxy_pass http://127.0.0.1:8000;\n    }\n  }\n}\n"
    )
    found = check([file], nginx_version="1.22.1")
    assert {one.rule for one in found} == {"http10-upstream"} | DEFAULTS
    one = found[0]
    assert one.patch is not None
    added = [line for line in one.patch.splitlines() if line.startswith("+ ")]
    assert added == ['+    proxy_set_header Connection "";', "+      proxy_http_version 1.1;"]


def test_a_shared_snippet_is_not_touched_where_the_location_can_be(tmp_path: Path) -> None:
    (tmp_path / "proxy.conf").write_text("proxy_pass http://127.0.0.1:8000;\nproxy_http_version 1.1;\n")
    file = tmp_path / "nginx.conf"
    file.write_text(
        "events {}\nhttp {\n  server {\n    listen 443 ssl;\n    location /v1/ {\n      include proxy.conf;\n"
        "    }\n  }\n}\n"
    )
    result = examine([file], nginx_version="1.31.3", paths=["/v1/x"])
    (one,) = [one for one in result.findings if one.severity == "error"]
    assert (one.rule, one.file, one.line) == ("buffering-on", str(tmp_path / "proxy.conf"), 1)
    assert {edit.file for flaw in result.flaws for edit in flaw.edits} == {str(file)}
    assert "+      proxy_buffering off;\n" in (result.patch or "")


def test_an_inner_nginx_is_checked_where_the_outer_one_leads(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(
        "events {}\nhttp {\n  server { listen 80; location /llm/ {\n    proxy_buffering off; proxy_http_version 1.1;\n"
        "    proxy_pass http://127.0.0.1:81/; } }\n"
        "  server { listen 81; location /v1/ { proxy_http_version 1.1; proxy_pass http://127.0.0.1:8000; } }\n}\n"
    )
    result = examine([file], nginx_version="1.31.3", paths=["/llm/v1/chat/completions"])
    found = [(one.rule, one.line) for one in result.findings if one.rule not in DEFAULTS]
    assert found == [("buffering-on-latent", 6)]
    outer = result.paths[0]
    assert outer.clients["http1"].streaming == "late_header"
    assert "behind this one" in outer.clients["http1"].why


def test_every_default_path_is_followed(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(
        "events {}\nhttp {\n  server {\n    listen 443 ssl;\n    proxy_http_version 1.1;\n"
        "    location /v1/ { proxy_buffering off; proxy_pass http://127.0.0.1:8000; }\n"
        "    location /api/ { proxy_pass http://127.0.0.1:8000; }\n  }\n}\n"
    )
    result = examine([file], nginx_version="1.31.3", upstream=upstream_of("vllm"))
    seen = {one.path: one.clients["tls_http1"].streaming for one in result.paths}
    assert seen == dict.fromkeys(DEFAULT_PATHS[:4], "streams") | {
        "/api/chat": "held",
        "/api/generate": "held",
        "/generate_stream": "fails",
    }
    # Of the location that covers some API paths it is said that it does not cover this one.
    found = [(one.rule, one.line) for one in result.findings if one.rule not in DEFAULTS]
    assert found == [("streaming-path-not-covered", 6), ("buffering-on", 7)]


@pytest.mark.skipif(not ALL, reason="no nginx here")
@pytest.mark.parametrize("nginx", ALL, ids=label)
def test_nginx_takes_each_sample_and_each_patched_one_and_no_error_is_left(nginx: Nginx, tmp_path: Path) -> None:
    make_certificate(tmp_path)
    file = tmp_path / "nginx.conf"
    wrong: list[tuple[str, object]] = []
    for sample in SAMPLES:
        text = sample.read_text().replace("http {", f"http {{ {TEMPORARY}", 1)
        for name, here in (("llm.example.com.pem", "cert.pem"), ("llm.example.com.key", "key.pem")):
            text = text.replace(f"/etc/nginx/tls/{name}", str(tmp_path / here))
        text = text.replace("/var/cache/nginx/", f"{tmp_path}/")
        file.write_text(text)
        before = examine([file], nginx_version=nginx.version, build=nginx.build)
        refused = any(one.rule == "config-invalid" for one in before.findings)
        if (refusal(nginx, text, tmp_path) is not None) != refused:
            wrong.append((sample.stem, "sample"))
        if refused:
            continue
        fixed = apply(text, before.edits)
        file.write_text(fixed)
        after = examine([file], nginx_version=nginx.version, build=nginx.build)
        left = [one.rule for one in after.findings if one.severity == "error"]
        if left or refusal(nginx, fixed, tmp_path) is not None:
            wrong.append((sample.stem, left or "patched"))
    assert wrong == []
