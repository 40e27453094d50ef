"""Every stream of the SSE corpus through a running tap, byte for byte, however the upstream frames it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_badinput import free_ports
from tests.harness import tap

TESTS = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("framing", ["chunked", "cl", "close"])
def test_every_stream_of_the_corpus_is_relayed_unchanged(tmp_path: Path, framing: str) -> None:
    (port,) = free_ports(1)
    with tap(tmp_path, f"http://127.0.0.1:{port}") as running:
        done = subprocess.run(
            [
                *(sys.executable, str(TESTS / "badinput" / "sse_run.py"), "relay", "--framing", framing),
                *("--corpus", str(TESTS / "data" / "sse" / "cases.json")),
                *("--proxy", f"127.0.0.1:{running.data[1]}", "--listen", f"127.0.0.1:{port}"),
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stdout + done.stderr
