"""Half a minute of the soak, at a moderate load; ``python -m tests.bench.soak --seconds 600`` is the whole."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.bench.soak import soak

SECONDS = 30.0
GROWTH_BYTES = 4 << 20


def test_half_a_minute_of_faults_leaves_one_true_record_a_request_and_nothing_else(tmp_path: Path) -> None:
    outcome = soak(SECONDS, tmp_path, clients=24, restart_s=8.0)
    sys.stdout.write(outcome.line() + "\n")
    # Else it proved little.
    assert len(outcome.asked) > 500
    assert len(outcome.down) >= 2
    assert outcome.problems(growth_bytes=GROWTH_BYTES) == []
