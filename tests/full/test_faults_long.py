"""The long halves of tests/faults: ten minutes of soak, ten thousand disconnects, thousands of pipelines, memory.

``pytest tests/full/test_faults_long.py -s`` shows the figures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bench.soak import soak
from tests.e2e.helpers import percentile
from tests.e2e.test_badinput import KNOWN_FAILURES, SUITE, free_ports
from tests.faults import pipelines
from tests.faults.leaving import disconnects
from tests.faults.pipelines import Request, bad_endings, mutations
from tests.faults.test_pipelines import Bench, benches, check_mutated, check_valid
from tests.harness import tap

SOAK_S = 600.0
SOAK_GROWTH_BYTES = 4 << 20
DISCONNECTS = 10_000
DISCONNECTS_GROWTH_BYTES = 4 << 20
MEMORY_MIB = 16
chance = settings(max_examples=5000, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def test_ten_minutes_of_faults(tmp_path: Path) -> None:
    outcome = soak(SOAK_S, tmp_path, clients=24, restart_s=30.0)
    sys.stdout.write(outcome.line() + "\n")
    assert outcome.problems(growth_bytes=SOAK_GROWTH_BYTES) == []


def test_ten_thousand_disconnects(tmp_path: Path) -> None:
    outcome = disconnects(tmp_path, DISCONNECTS, 40)
    sys.stdout.write(outcome.line() + "\n")
    for (path, how), delays in sorted(outcome.delays_ms.items()):
        shown = ", ".join(f"p{p} {percentile(delays, p):.1f} ms" for p in (50, 99, 100))
        sys.stdout.write(f"  {path[1:]:8} {how}: {len(delays)} clients, {shown}\n")
    assert {name: ended for name, ended in outcome.ended.items() if ended != ["client_aborted"]} == {}
    assert len(outcome.ended) == DISCONNECTS
    assert outcome.left_open == 0
    assert outcome.after.descriptors == outcome.before.descriptors
    assert outcome.after.resident_bytes - outcome.before.resident_bytes < DISCONNECTS_GROWTH_BYTES
    assert percentile(outcome.all_ms, 99) <= 100


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    yield from benches(tmp_path)


def test_thousands_of_valid_pipelines(bench: Bench) -> None:
    @chance
    @given(sent=pipelines.pipelines, ending=st.one_of(st.just(b""), bad_endings), cuts=pipelines.cuts)
    def holds(sent: list[Request], ending: bytes, cuts: list[int]) -> None:
        check_valid(bench, sent, ending, cuts)

    holds()


def test_thousands_of_mutated_pipelines(bench: Bench) -> None:
    @chance
    @given(data=st.data(), sent=pipelines.pipelines, cuts=pipelines.cuts)
    def holds(data: st.DataObject, sent: list[Request], cuts: list[int]) -> None:
        check_mutated(bench, data.draw(mutations(b"".join(request.wire for request in sent))), cuts)

    holds()


def test_no_bad_input_makes_a_worker_grow_by_more_than_16_mib(tmp_path: Path) -> None:
    """One worker, case after case, so that the growth of each is its own; descriptors are back at the end."""
    upstream, control, canary = (f"127.0.0.1:{port}" for port in free_ports(3))
    with tap(tmp_path / "data", f"http://{upstream}") as running:
        (worker,) = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
        arguments = [
            *("--proxy", f"127.0.0.1:{running.data[1]}", "--proxy-pid", worker, "--spawn-upstream", upstream),
            *("--control", control, "--canary", canary.rpartition(":")[2], "--mem-limit-mb", str(MEMORY_MIB)),
            *("--out", str(tmp_path / "out.json"), "-q"),
        ]
        subprocess.run([sys.executable, SUITE, "run", *arguments], capture_output=True, timeout=900, check=False)
    found = json.loads((tmp_path / "out.json").read_text())
    summary, results = found["summary"], found["results"]
    most = max(results, key=lambda result: result["rss_peak_growth_kb"])
    sys.stdout.write(
        f"{len(results)} cases; most growth {most['rss_peak_growth_kb'] / 1024:.1f} MiB in {most['id']}; "
        f"worker {summary['rss_start_kb'] / 1024:.1f} -> {summary['rss_end_kb'] / 1024:.1f} MiB, "
        f"descriptors {summary['fds_start']} -> {summary['fds_end']}\n"
    )
    grown = {result["id"]: result["rss_peak_growth_kb"] for result in results if "memory grew" in str(result["fail"])}
    assert grown == {}
    failed = {result["id"]: result["fail"] for result in results if result["verdict"] == "FAIL"}
    assert {case: why for case, why in failed.items() if case not in KNOWN_FAILURES} == {}
    # The pool's last connections close within its keep-alive.
    assert summary["fds_end"] <= summary["fds_start"] + 1
