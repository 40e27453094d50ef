"""What of a scenario can be told without running one; the runs are in tests/e2e/test_demo.py."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tapproxy.core.findings import Finding
from tapproxy.core.record import Events, Record
from tapproxy.nginx import sandbox
from tapproxy.nginx.checker import examine
from tapproxy.nginx.directives import Build
from tapproxy.nginx.ports import HeldPorts
from tapproxy.simulate.scenarios import SCENARIOS, Interrupted, conclusion, effects, stage
from tapproxy.simulate.scenarios.catalogue import DEFAULT, ROUTES, Workload
from tapproxy.simulate.scenarios.interrupt import unless
from tapproxy.simulate.scenarios.parts import Scenario

ADDED = "--- a/n.conf\n+++ b/n.conf\n@@ -23,3 +23,4 @@\n \n     location / {\n+        proxy_buffering off;\n     }\n"


def finding(rule: str, patch: str | None = ADDED, file: str = "/tmp/d/x.conf") -> Finding:
    return Finding(rule, "error", "s", "e", "a", file=file, line=7, patch=patch)


def test_the_default_scenario_is_a_misconfigured_nginx() -> None:
    assert SCENARIOS[DEFAULT].staged == "proxy.response_buffering"
    assert list(ROUTES) == ["direct", "tap", "nginx", "fixed"]


def test_the_load_is_enough_for_a_p95() -> None:
    assert Workload().requests >= 130


def test_more_lines_go_to_the_start_of_the_http_block() -> None:
    text = "events {}\nhttp {\n    server {\n    }\n}\n"
    assert stage._with_lines(text, ("gzip on;",)) == "events {}\nhttp {\n    gzip on;\n    server {\n    }\n}\n"
    assert stage._with_lines(text, ()) == text


def test_a_reserved_port_goes_to_nobody_else_and_can_be_taken_by_its_owner() -> None:
    with HeldPorts(2) as ports:
        assert len(set(ports.numbers)) == 2
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", ports.numbers[0]))
        with socket.socket() as owner:
            owner.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            owner.bind(("127.0.0.1", ports.numbers[0]))
            owner.listen()


def test_the_fix_is_the_first_finding_that_explains_the_cause() -> None:
    found = [finding("http10-upstream"), finding("buffering-on"), finding("buffering-on", file="other")]
    fix = conclusion._fix("proxy.response_buffering", found, ADDED, {})
    assert fix is not None
    assert (fix["file"], fix["diff"]) == ("/tmp/d/x.conf", ADDED)


def test_the_fix_names_the_line_that_it_changes_and_where_the_fault_stands() -> None:
    fix = conclusion._fix("proxy.compression", [finding("gzip-buffers-sse")], ADDED, {})
    assert fix is not None
    assert (fix["line"], fix["finding"]["line"]) == (25, 7)


@pytest.mark.parametrize(
    ("hunk", "line"),
    [
        pytest.param("@@ -23,3 +23,4 @@\n a\n b\n+c\n d\n", 25, id="added"),
        pytest.param("@@ -23,3 +23,3 @@\n a\n-b\n+c\n d\n", 24, id="replaced"),
        pytest.param("@@ -23,3 +23,2 @@\n a\n b\n-c\n", 25, id="removed"),
        pytest.param("@@ -23,0 +24 @@\n+c\n", 24, id="added without context"),
        pytest.param("@@ -24 +23,0 @@\n-c\n", 24, id="removed without context"),
        pytest.param("@@ -1,2 +1,2 @@\n---x;\n+y\n z\n", 1, id="a line that looks like a head"),
        pytest.param("", None, id="nothing"),
    ],
)
def test_the_first_line_of_a_change(hunk: str, line: int | None) -> None:
    assert conclusion._first_changed_line(f"--- a/n.conf\n+++ b/n.conf\n{hunk}") == line


def test_a_cause_that_no_finding_explains_has_no_fix() -> None:
    assert conclusion._fix("engine.queue", [finding("buffering-on")], ADDED, {}) is None
    assert conclusion._fix("proxy.response_buffering", [finding("buffering-on", None)], ADDED, {}) is None


def test_the_fix_tells_what_was_measured_with_it() -> None:
    paths = {
        "nginx": {"ttft_ms": {"p50": 1342.0, "p95": 1370.0}, "hold_ms": {"p50": 460.0, "p95": None}},
        "fixed": {"ttft_ms": {"p50": 41.9, "p95": None}, "hold_ms": None},
    }
    fix = conclusion._fix("proxy.response_buffering", [finding("buffering-on")], ADDED, paths)
    assert fix is not None
    assert fix["measured"] == {
        "path": "fixed",
        "ttft_ms": {"before": {"p50": 1342.0, "p95": 1370.0}, "after": {"p50": 41.9, "p95": None}},
        "hold_ms": {"before": {"p50": 460.0, "p95": None}, "after": {"p50": None, "p95": None}},
    }
    unmeasured = conclusion._fix(
        "proxy.response_buffering", [finding("buffering-on")], ADDED, {"nginx": paths["nginx"]}
    )
    assert unmeasured is not None
    assert unmeasured["measured"] is None


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch(1)")
@pytest.mark.parametrize("version", ["1.22.1", "1.31.3"])
@pytest.mark.parametrize(
    "scenario", [one for one in SCENARIOS.values() if one.setting is None], ids=lambda one: one.name
)
def test_the_fixed_path_runs_what_the_printed_patch_makes(scenario: Scenario, version: str, tmp_path: Path) -> None:
    """patch -p1 with the patch that is printed turns what path ``nginx`` runs into what path ``fixed`` runs."""
    here = stage.Stage(tmp_path, sandbox.Nginx(Path("nginx"), version, Build(frozenset({"http_ssl"}), frozenset())))
    (tmp_path / "home").mkdir()
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    text = sandbox.render_demo(
        scenario.nginx, listen_port=8443, upstream_port=8000, cert=cert, key=key, directory=tmp_path / "home"
    )
    text = stage._with_lines(text, scenario.http_lines)
    name = f"demo-{scenario.nginx}.conf"
    patched = stage._patched(here, text, name)
    assert here.examined is not None
    if scenario.staged == "healthy":
        assert (here.examined.patch, patched) == (None, text)
        return
    patch = here.examined.patch
    assert patch is not None
    assert patch.startswith(f"--- a/{name}\n+++ b/{name}\n")
    assert "+            proxy_buffering off;" in patch.splitlines()
    (tmp_path / name).write_text(text)
    subprocess.run(["patch", "-p1", "-s"], input=patch, text=True, cwd=tmp_path, check=True, timeout=10)
    assert (tmp_path / name).read_text() == patched
    left = examine([name], nginx_version=version, texts={name: patched})
    assert [one.rule for one in left.findings if one.severity == "error"] == []


def record(arrived_ns: list[int]) -> Record:
    kinds = ["role", *["token"] * (len(arrived_ns) - 1)]
    many = len(arrived_ns)
    events = Events(kinds, list(range(many)), arrived_ns, arrived_ns, [None] * many, list(range(many)), [1] * many)
    return Record(id="x", tap="client", events=events)


def test_the_typical_request_is_the_one_with_the_median_ttft() -> None:
    records = [record([0, ms * 1_000_000]) for ms in (50, 40, 90)]
    found = conclusion.timelines(records)
    assert [each["typical"] for each in found] == [True, False, False]
    assert found[0]["t_ms"] == [0.0, 50.0]


def test_a_request_without_a_token_has_no_timeline() -> None:
    assert conclusion.timelines([record([0])]) == []


def summary(p50: float | None) -> dict[str, Any]:
    return {"ttft_ms": {"p50": p50, "n": 130}}


def test_the_tap_is_within_its_limit_or_says_so() -> None:
    forwarded = Record(id="x", tap="inner", events=Events(["token"] * 20, [0] * 20, [0] * 20, [0] * 20, [90_000] * 20))
    cost = conclusion._tap_cost({"tap": summary(45.5), "direct": summary(45.0)}, [forwarded])
    assert cost["added_ttft_ms"] == {"p50": 0.5, "n": 130}
    assert cost["forward_delay_ms"]["p50"] == 0.09
    assert cost["within_limit"] is True
    slow = conclusion._tap_cost({"tap": summary(47.5), "direct": summary(45.0)}, [forwarded])
    assert slow["within_limit"] is False


def test_a_cost_that_is_not_known_is_within_no_limit() -> None:
    assert conclusion._tap_cost({"tap": summary(None)}, [])["within_limit"] is None


def result(causes: list[dict[str, Any]], verdict: str) -> dict[str, Any]:
    return {
        "verdict": verdict,
        "causes": causes,
        "scenario": {"name": "buffering", "staged": "proxy.response_buffering"},
        "paths": {"nginx": summary(1018.0), "direct": summary(40.0)},
    }


def test_effects_stand_beside_what_the_clients_felt() -> None:
    names = ("proxy.response_buffering", "tap.overhead")
    causes = [{"cause": n, "severity": "error", "metric": "ttft", "effect_ms": {"p50": 975.0}} for n in names]
    assert effects(result(causes, "degraded")) == {
        "scenario": "buffering",
        "staged": "proxy.response_buffering",
        "named": "proxy.response_buffering",
        "effect_staged_ms": 978.0,
        "effect_measured_ms": 975.0,
        "also": ["tap.overhead"],
        "metric": "ttft",
        "metric_measured": "ttft",
        "also_staged": [],
        "unexplained_ms": None,
        "ok": True,
    }


def test_a_verdict_without_a_cause_is_named_itself() -> None:
    found = effects(result([], "healthy"))
    assert (found["named"], found["effect_measured_ms"], found["also"]) == ("healthy", None, [])


def test_what_is_under_way_is_cleaned_up_before_it_is_interrupted() -> None:
    cleaned = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    async def main() -> None:
        enough = asyncio.Event()
        asyncio.get_running_loop().call_soon(enough.set)
        await unless(enough, work())

    with pytest.raises(Interrupted):
        asyncio.run(main())
    assert cleaned == [True]


def test_what_is_done_is_kept_though_it_is_enough() -> None:
    async def work() -> int:
        return 7

    async def main() -> int:
        return await unless(asyncio.Event(), work())

    assert asyncio.run(main()) == 7
