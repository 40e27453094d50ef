"""Every case of the bad-input suite against a running tap: 429 of them, by raw sockets, both sides scripted.

What fails is in `known_failures.json` with its reason, and that list only shrinks: a new failure fails here, and so
does a known one that has stopped failing. A case that comes out otherwise than expected is tried again, alone with
its like on a fresh tap, since the suite measures times and memory.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harness import tap

SUITE = Path(__file__).resolve().parent.parent / "badinput" / "badinput.py"
KNOWN_FAILURES: dict[str, str] = json.loads((SUITE.parent / "known_failures.json").read_text())
CASES = 429
# Most of a case is waiting: several taps side by side share the time.
SHARDS = 4
LIMIT_S = 300
TRIES = 3


@dataclass(frozen=True)
class Outcome:
    """All cases as they came out at last, and how often a worker had to be started again."""

    failures: dict[str, str]
    ran: set[str]
    restarts: int


def case_ids() -> list[str]:
    done = subprocess.run([sys.executable, SUITE, "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in done.stdout.splitlines()[:-1]]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def run(directory: Path, ids: Sequence[str], *flags: str) -> tuple[list[dict[str, Any]], int]:
    """These cases against a tap of their own: the suite's results, and the tap's worker restarts."""
    upstream, control, canary = (f"127.0.0.1:{port}" for port in free_ports(3))
    with tap(directory / "data", f"http://{upstream}", *flags) as running:
        arguments = [
            *("--proxy", f"127.0.0.1:{running.data[1]}", "--proxy-pid", str(running.process.pid)),
            *("--spawn-upstream", upstream, "--control", control, "--canary", canary.rpartition(":")[2]),
            *("--only", f"^({'|'.join(map(re.escape, ids))})$", "--out", str(directory / "out.json"), "-q"),
        ]
        done = subprocess.run(
            [sys.executable, SUITE, "run", *arguments], capture_output=True, text=True, timeout=LIMIT_S
        )
        # 1 also for a crash of its own, which leaves no results.
        assert (directory / "out.json").exists(), done.stdout + done.stderr
        restarts = json.loads(running.admin_get("/api/status"))["worker_restarts"]
    results: list[dict[str, Any]] = json.loads((directory / "out.json").read_text())["results"]
    return results, restarts


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    ids = case_ids()
    shards = [ids[number::SHARDS] for number in range(SHARDS)]
    with ThreadPoolExecutor(SHARDS) as pool:
        parts = list(pool.map(run, [tmp_path_factory.mktemp("shard") for _ in shards], shards))
    results = {result["id"]: result for part, _ in parts for result in part}
    restarts = sum(count for _, count in parts)
    for _ in range(TRIES - 1):
        unexpected = [i for i in ids if i in results and (results[i]["verdict"] == "FAIL") != (i in KNOWN_FAILURES)]
        if not unexpected:
            break
        again, more = run(tmp_path_factory.mktemp("again"), unexpected)
        results |= {result["id"]: result for result in again}
        restarts += more
    failures = {i: "; ".join(result["fail"]) for i, result in results.items() if result["verdict"] == "FAIL"}
    return Outcome(failures, set(results), restarts)


def test_every_case_ran(outcome: Outcome) -> None:
    assert (len(outcome.ran), outcome.ran) == (CASES, set(case_ids()))


def test_no_case_fails_that_did_not_before(outcome: Outcome) -> None:
    assert {i: why for i, why in outcome.failures.items() if i not in KNOWN_FAILURES} == {}


def test_every_known_failure_still_fails(outcome: Outcome) -> None:
    mended = [i for i in KNOWN_FAILURES if i not in outcome.failures]
    assert mended == [], "remove these from the list of known failures"


def test_no_case_ends_a_worker(outcome: Outcome) -> None:
    assert outcome.restarts == 0


@pytest.mark.parametrize(
    ("flag", "case"),
    [("--strict-http", "resp.http10_client_chunked"), ("--rewrite-host", "req.good_http10")],
)
def test_what_fails_by_design_passes_where_the_operator_asks_for_it(tmp_path: Path, flag: str, case: str) -> None:
    results, _ = run(tmp_path, [case], flag)
    assert [(result["id"], result["fail"]) for result in results] == [(case, [])]
