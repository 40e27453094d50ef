"""Half a minute of the soak, at a moderate load; ``python -m tests.bench.soak --seconds 600`` is the whole."""

from __future__ import annotations

import re
import subprocess
import sys

LIMIT_S = 120.0


def test_half_a_minute_of_faults_leaves_one_true_record_a_request_and_nothing_else(
    soaking: subprocess.Popen[str],
) -> None:
    said, _ = soaking.communicate(timeout=LIMIT_S)
    sys.stdout.write(said)
    assert soaking.returncode == 0, said
    match = re.match(r"soak: 30 s, (\d+) requests, (\d+) engine restarts; (\d+) records ", said)
    assert match is not None, said
    requests, restarts, records = map(int, match.groups())
    assert requests == records
    # Else it proved little.
    assert requests > 500
    assert restarts >= 2
