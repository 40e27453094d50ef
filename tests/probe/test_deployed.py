"""`tapproxy probe` on real proxies: some healthy and some ill ones, at the same time, each named for what it does.

Where a proxy is not installed its case is skipped, and says so. All cases, ten times each, are in tests/full.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import Tap, tap
from tests.probe import watched
from tests.probe.cases import CASES, Case, Outcome, available, probe, run_all, wrongs
from tests.probe.proxies import free_port
from tests.probe.watched import Watched

QUICK = (
    "nginx-keepalive",
    "nginx-default-tls",
    "nginx-deaf",
    "nginx-gzip",
    "nginx-cut",
    "haproxy",
    "haproxy-no-delay",
    "apache-deflate",
    "caddy-gzip",
    "relay-full",
)
CHOSEN = [case for case in CASES if case.name in QUICK]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tap]:
    directory = tmp_path_factory.mktemp("tap")
    with tap(directory, "http://127.0.0.1:9", "--allow-probe", "--workers", "2") as one:
        yield one


@dataclass(frozen=True, slots=True)
class Everything:
    """What takes its time, measured at the same time."""

    outcomes: dict[str, Outcome]
    interrupted: Watched
    broken_off: Watched
    elsewhere: list[Outcome]


@pytest.fixture(scope="module")
def everything(running: Tap, tmp_path_factory: pytest.TempPathFactory) -> Everything:
    directory = tmp_path_factory.mktemp("proxies")
    for parent in [directory, *directory.parents[:2]]:
        # nginx's and Apache's workers are nobody and www-data.
        parent.chmod(0o755)
    with (
        tap(tmp_path_factory.mktemp("ended"), "http://127.0.0.1:9", "--allow-probe", "--shutdown-grace", "1s") as ended,
        ThreadPoolExecutor(3) as pool,
    ):
        interrupted = pool.submit(watched.probe, running, lambda process: process.send_signal(signal.SIGINT))
        broken_off = pool.submit(watched.probe, ended, lambda _: ended.process.kill())
        elsewhere = pool.submit(lead_elsewhere, running, directory)
        found = run_all([case for case in CHOSEN if available(case)], running, directory, at_once=len(CHOSEN))
        return Everything(found, interrupted.result(), broken_off.result(), elsewhere.result())


def lead_elsewhere(running: Tap, directory: Path) -> list[Outcome]:
    """Nobody's address, another tap's, a tap's whose token is another, and an admin port that gives no keys."""
    with (
        # It does not know the key: a request goes to its upstream, which is down.
        tap(directory / "other", "http://127.0.0.1:9") as other,
        tap(directory / "guarded", "http://127.0.0.1:9", "--allow-probe", "--admin-token", "t") as guarded,
    ):
        return [
            probe(f"http://127.0.0.1:{free_port()}", running, "--idle", "0"),
            probe(other.url, running, "--idle", "0"),
            probe(guarded.url, guarded, "--idle", "0", "--token", "wrong"),
            probe(running.url, other, "--idle", "0"),
        ]


@pytest.fixture(scope="module")
def outcomes(everything: Everything) -> dict[str, Outcome]:
    return everything.outcomes


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
    assert client["abort_before_first_event"]["reached"] is True
    assert client["abort_before_first_event"]["events_sent_for_nobody"] == 0
    cut = outcomes["nginx-cut"].document["clients"]["http1"]["silence"]["quiet-middle"]
    assert 1.8 < cut["after_s"] < 2.9


def test_an_nginx_that_ignores_aborts_is_named_by_the_abort_before_the_first_event(
    outcomes: dict[str, Outcome],
) -> None:
    """In the middle its next write fails and ends the request; in the silence before there is nothing to write."""
    document = outcomes["nginx-deaf"].document
    client = document["clients"]["http1"]
    assert client["abort"]["after_ms"] < 500
    assert client["abort_before_first_event"]["events_sent_for_nobody"] > 0
    (finding,) = [one for one in document["findings"] if one["rule"] == "ignore-client-abort"]
    assert finding["severity"] == "warning"
    assert finding["summary"].startswith(
        "http1: a client that leaves before the first event is noticed upstream only when"
    )
    assert "proxy_ignore_client_abort" in finding["advice"]


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


def test_an_interrupted_probe_keeps_what_it_measured(everything: Everything) -> None:
    interrupted = everything.interrupted
    assert interrupted.code == 130
    assert interrupted.said == ["tapproxy: interrupted"]
    result = json.loads(interrupted.out)
    assert result["clients"]["http1"]["streaming"] == "streams"
    assert result["causes"] == []
    assert any(warning.startswith("interrupted: ") for warning in result["trust"]["warnings"])


def test_a_tap_that_ends_in_between_does_not_take_along_what_was_measured(everything: Everything) -> None:
    """What was measured by then is shown, and is no bill of health."""
    broken_off = everything.broken_off
    assert broken_off.code == 3
    result = json.loads(broken_off.out)
    assert result["clients"]["http1"]["streaming"] == "streams"
    (warning,) = [one for one in result["trust"]["warnings"] if one.startswith("broken off, ")]
    assert "cannot be asked: connect: " in warning
    assert warning.endswith("has the tap ended meanwhile?")
    (said,) = broken_off.said
    assert said.startswith("tapproxy: the tap's admin port")


def test_an_address_that_leads_elsewhere_is_no_measurement(everything: Everything) -> None:
    nowhere, elsewhere, unknown, refused = everything.elsewhere
    assert nowhere.code == 3
    assert "does not answer: connect:" in nowhere.stderr
    assert elsewhere.code == 3
    assert "answers 502, and not from this tap" in elsewhere.stderr
    assert unknown.code == 3
    assert "it wants its token: give --token, or TAPPROXY_ADMIN_TOKEN" in unknown.stderr
    assert refused.code == 3
    assert "start it with `tapproxy serve --allow-probe`" in refused.stderr
