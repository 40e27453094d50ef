"""A probe of the tap itself at a terminal, up to the moment in which only its silence is left."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tests.harness import Tap
from tests.probe.cases import PROBE_S, ROOT

_IN_SILENCE = "waiting for the end"
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SPINNER = re.compile("[\u2800-\u28ff]")


@dataclass(frozen=True, slots=True)
class Watched:
    """How it ended. ``said``: the lines of stderr, without those of the progress."""

    code: int
    out: str
    said: list[str]


def probe(running: Tap, then: Callable[[subprocess.Popen[str]], None]) -> Watched:
    """Starts it, does ``then`` while only the silence is still going on, waits for its end."""
    command = [sys.executable, "-m", "tapproxy.cli", "probe", "--via", running.url, "--idle", "60", "--json", "-"]
    command += ["--tap", f"http://{running.admin[0]}:{running.admin[1]}"]
    ours, theirs = pty.openpty()
    said = bytearray()
    silent = threading.Event()

    def listen() -> None:
        try:
            while piece := os.read(ours, 4096):
                said.extend(piece)
                if _IN_SILENCE.encode() in said:
                    silent.set()
        except OSError:
            pass  # the other end is closed

    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True, cwd=ROOT, env=environment)
    os.close(theirs)
    listener = threading.Thread(target=listen)
    listener.start()
    try:
        assert silent.wait(PROBE_S), bytes(said)
        then(process)
        out, _ = process.communicate(timeout=40)
    finally:
        process.kill()
        process.wait()
        listener.join(40)
        os.close(ours)
    lines = [line.strip() for line in re.split(r"[\r\n]+", _CODES.sub("", said.decode()))]
    return Watched(process.returncode, out, [line for line in lines if line and not _SPINNER.match(line)])
