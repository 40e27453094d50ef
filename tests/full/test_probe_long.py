"""All deployed proxies, ten probes each: the right mechanism every time, and none on a healthy one.

Takes some quarter of an hour on two cores. The figures of a run are printed; PROBE_RUNS=3 makes it shorter.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.harness import tap
from tests.probe.cases import CASES, available, run_all, wrongs

RUNS = int(os.environ.get("PROBE_RUNS", "10"))


def test_the_right_mechanism_every_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for parent in [tmp_path, *tmp_path.parents[:2]]:
        parent.chmod(0o755)
    cases = [case for case in CASES if available(case)]
    wrong: dict[str, list[list[str]]] = {case.name: [] for case in cases}
    with tap(tmp_path / "tap", "http://127.0.0.1:9", "--allow-probe", "--workers", "2") as running:
        for number in range(RUNS):
            outcomes = run_all(cases, running, tmp_path / str(number), at_once=4)
            for case in cases:
                found = wrongs(case, outcomes[case.name])
                if found:
                    wrong[case.name].append(found)
            with capsys.disabled():
                so_far = ", ".join(f"{name} {len(found)} wrong" for name, found in wrong.items() if found)
                sys.stderr.write(f"\nrun {number + 1}: {so_far or 'all right'}")
        assert running.records(0) == []
    with capsys.disabled():
        for name, found in wrong.items():
            sys.stderr.write(f"\n{name:24} {RUNS - len(found)} of {RUNS} right")
    assert {name: found for name, found in wrong.items() if found} == {}
