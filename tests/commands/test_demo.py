"""What `tapproxy demo` does with a result it has: files first, stdout last; the runs are in tests/e2e/test_demo.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.report.conftest import make_result

PROGRAM = """
import json, sys, typer
from pathlib import Path
from tapproxy import cli
from tapproxy.commands import demo
result, json_file, html_file = json.load(sys.stdin)
try:
    code = demo._one([result], json_file, html_file and Path(html_file))
except BaseException as error:
    code = cli._ended(error)
sys.exit(code)
"""


def concluded(
    stdout: str, json_file: str | None = None, html_file: str | None = None, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    """The end of a run, with its stdout redirected as a shell does it."""
    result: dict[str, Any] = make_result() | {"interrupted": False}
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {stdout}', "sh", sys.executable, "-c", PROGRAM],
        input=json.dumps([result, json_file, html_file]).encode(),
        capture_output=True, check=False, timeout=60, env=os.environ | environment,
    )  # fmt: skip


def test_a_result_is_in_its_files_though_stdout_is_full(tmp_path: Path) -> None:
    verdict, page = tmp_path / "v.json", tmp_path / "p.html"
    done = concluded(">/dev/full", str(verdict), str(page))
    assert done.returncode == 3
    words = f"tapproxy: stdout cannot be written: No space left on device; the result is in {page} and {verdict}\n"
    assert done.stderr.decode() == words
    assert json.loads(verdict.read_text())["verdict"] == "degraded"
    assert page.read_text().rstrip().endswith("</html>")


@pytest.mark.parametrize("json_file", [None, "-"], ids=["screen", "json"])
def test_a_full_stdout_alone_is_one_sentence_that_says_what_to_do(json_file: str | None) -> None:
    done = concluded(">/dev/full", json_file)
    assert done.returncode == 3
    assert done.stderr == (
        b"tapproxy: stdout cannot be written: No space left on device; with --json FILE it would be kept\n"
    )


def test_a_file_that_cannot_be_written_takes_neither_the_other_nor_the_screen_along(tmp_path: Path) -> None:
    page = tmp_path / "p.html"
    done = concluded("", "/dev/full", str(page))
    assert done.returncode == 3
    assert done.stderr == b"tapproxy: measured, but '/dev/full' cannot be written: No space left on device\n"
    assert page.exists()
    assert b"DEGRADED" in done.stdout


@pytest.mark.parametrize("json_file", [None, "-"], ids=["screen", "json"])
def test_a_closed_stdout_leaves_the_verdict_to_the_exit_code(json_file: str | None) -> None:
    done = concluded(">&-", json_file)
    assert (done.returncode, done.stderr) == (1, b"")


def test_json_is_utf8_whatever_the_encoding_of_the_terminal() -> None:
    done = concluded("", "-", PYTHONIOENCODING="ascii")
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout.decode("utf-8"))["paths"]["nginx"]["route"].startswith("client → outer tap")


def test_the_screen_in_ascii_has_the_same_verdict() -> None:
    done = concluded("", PYTHONIOENCODING="ascii")
    assert done.returncode == 1, done.stderr
    assert "x DEGRADED  proxy.response_buffering" in done.stdout.decode("ascii")
