"""A tap that ends in the middle of a probe: what was measured by then is shown, and is no bill of health."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path

from tests.harness import tap

WAIT_S = 40


def test_a_tap_that_ends_in_between_does_not_take_along_what_was_measured(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    said = bytearray()
    waiting = threading.Event()

    def listen() -> None:
        try:
            while piece := os.read(ours, 4096):
                said.extend(piece)
                if b"waiting for the end" in said:
                    waiting.set()
        except OSError:
            pass  # the other end is closed

    with tap(tmp_path, "http://127.0.0.1:9", "--allow-probe") as running:
        via, admin = running.url, f"http://{running.admin[0]}:{running.admin[1]}"
        command = [sys.executable, "-m", "tapproxy.cli", "probe", "--via", via, "--tap", admin]
        process = subprocess.Popen(
            [*command, "--idle", "9", "--json", "-"],
            stdout=subprocess.PIPE,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "200"},
        )
        os.close(theirs)
        listener = threading.Thread(target=listen)
        listener.start()
        try:
            assert waiting.wait(WAIT_S), bytes(said)
            running.process.kill()
            out, _ = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
            process.wait()
            listener.join(WAIT_S)
            os.close(ours)
    assert process.returncode == 3
    result = json.loads(out)
    assert result["clients"]["http1"]["streaming"] == "streams"
    (warning,) = [one for one in result["trust"]["warnings"] if one.startswith("broken off, ")]
    assert "cannot be asked: connect: " in warning
    assert warning.endswith("has the tap ended meanwhile?")
    assert b"tapproxy: the tap's admin port" in said
