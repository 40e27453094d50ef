"""`tapproxy probe` on real proxies: some healthy and some ill ones, at the same time, each named for what it does.

Where a proxy is not installed its case is skipped, and says so. All cases, ten times each, are in tests/full.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import Tap, tap
from tests.probe.cases import CASES, Case, Outcome, available, probe, run_all, wrongs
from tests.probe.proxies import free_port

QUICK = (
    "nginx-keepalive",
    "nginx-default-tls",
    "nginx-gzip",
    "nginx-cut",
    "haproxy",
    "haproxy-no-delay",
    "apache-deflate",
    "caddy-gzip",
)
CHOSEN = [case for case in CASES if case.name in QUICK]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tap]:
    directory = tmp_path_factory.mktemp("tap")
    with tap(directory, "http://127.0.0.1:9", "--allow-probe", "--workers", "2") as one:
        yield one


@pytest.fixture(scope="module")
def outcomes(running: Tap, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    directory = tmp_path_factory.mktemp("proxies")
    for parent in [directory, *directory.parents[:2]]:
        # nginx's and Apache's workers are nobody and www-data.
        parent.chmod(0o755)
    return run_all([case for case in CHOSEN if available(case)], running, directory, at_once=len(CHOSEN))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CHOSEN])
def test_a_real_proxy_is_named_for_what_it_does(case: Case, outcomes: dict[str, Outcome]) -> None:
    if not available(case):
        pytest.skip(f"{case.needs} is not installed")
    assert wrongs(case, outcomes[case.name]) == []


def test_the_result_says_what_the_proxy_rewrites_and_reuses(outcomes: dict[str, Outcome]) -> None:
    client = outcomes["nginx-keepalive"].document["clients"]["http1"]
    assert client["http_to_tap"] == "1.1"
    assert client["rewriting"]["request"]["changed"]["host"]["received"] == "tap"
    assert client["rewriting"]["answer"]["changed"]["server"]["received"].startswith("nginx/")
    assert client["reuse"]["upstream_reused"] is True
    assert client["request_buffering"]["buffered"] is True
    assert client["abort"]["reached"] is True
    assert client["abort"]["after_ms"] < 500
    assert client["silence"]["quiet-middle"] == {"cut": False, "after_s": None, "waited_s": 3.0, "side": None}
    cut = outcomes["nginx-cut"].document["clients"]["http1"]["silence"]["quiet-middle"]
    assert 1.8 < cut["after_s"] < 2.9


def test_a_cause_has_evidence_a_threshold_rivals_and_advice(outcomes: dict[str, Outcome]) -> None:
    (cause,) = outcomes["nginx-default-tls"].document["causes"]
    assert cause["stage"] == "proxy"
    assert cause["effect_ms"]["p50"] > 100
    assert any(item["threshold"] is not None for item in cause["evidence"])
    assert {one["cause"] for one in cause["rejected"]} >= {"timer", "network.downstream"}
    assert "proxy_buffering off" in cause["advice"]
    assert "X-Accel-Buffering: no lets it through" in cause["advice"]


def test_no_probe_leaves_a_record(running: Tap, outcomes: dict[str, Outcome]) -> None:
    assert outcomes
    assert running.records(0) == []


def test_an_address_that_leads_elsewhere_is_no_measurement(running: Tap, tmp_path: Path) -> None:
    nowhere = probe(f"http://127.0.0.1:{free_port()}", running, "--idle", "0")
    assert nowhere.code == 3
    assert "does not answer: connect:" in nowhere.stderr
    with tap(tmp_path, "http://127.0.0.1:9") as other:
        # Another tap, which does not know the key, in the proxy's place: a request goes to its upstream, which is down.
        elsewhere = probe(other.url, running, "--idle", "0")
        assert elsewhere.code == 3
        assert "answers 502, and not from this tap" in elsewhere.stderr
        refused = probe(running.url, other, "--idle", "0")
        assert refused.code == 3
        assert "start it with `tapproxy serve --allow-probe`" in refused.stderr
