"""``tapproxy demo`` as a program: what it prints, writes, returns, and leaves behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tapproxy.core.errors import MeasureError
from tapproxy.nginx.sandbox import find_nginx

MARK = "TAPPROXY_TEST_MARK"
# Enough for a verdict, small enough for a test.
QUICK = ("--requests", "16")


def _has_nginx() -> bool:
    try:
        find_nginx()
    except MeasureError:
        return False
    return True


pytestmark = pytest.mark.skipif(not _has_nginx(), reason="needs an nginx")


@dataclass
class Place:
    """A directory for one demo's temporary files, open to nginx's user, and a mark on every process of it."""

    directory: Path
    mark: str

    def environment(self) -> dict[str, str]:
        return os.environ | {"TMPDIR": str(self.directory), MARK: self.mark, "COLUMNS": "100"}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tapproxy.cli", "demo", *arguments],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environment(),
        )  # fmt: skip

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tapproxy.cli", "demo", *arguments],
            capture_output=True, text=True, timeout=120, check=False, env=self.environment(),
        )  # fmt: skip

    def processes(self) -> list[str]:
        """What still runs of it: by the mark in the environment, or (nginx) by the directory in its arguments."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_bytes()
                arguments = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if f"{MARK}={self.mark}".encode() in environment or str(self.directory).encode() in arguments:
                found.append(arguments.replace(b"\0", b" ").decode())
        return found

    def files(self) -> list[str]:
        return sorted(path.name for path in self.directory.iterdir())


@pytest.fixture
def place() -> Iterator[Place]:
    # With a space: TMPDIR is what its owner called it, and nginx's language has another idea of a word.
    directory = Path(tempfile.mkdtemp(prefix="tp test-"))
    directory.chmod(0o755)
    yield Place(directory, uuid.uuid4().hex)
    shutil.rmtree(directory)


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def buffering() -> Iterator[tuple[subprocess.CompletedProcess[str], dict[str, Any], str, float, list[str], list[str]]]:
    """The default scenario, run once: process, JSON, page, seconds, files and processes it left."""
    directory = Path(tempfile.mkdtemp(prefix="tp-test-"))
    directory.chmod(0o755)
    out = Path(tempfile.mkdtemp(prefix="tp-out-"))
    here = Place(directory, uuid.uuid4().hex)
    began = time.monotonic()
    done = here.run("--json", str(out / "verdict.json"), "--html", str(out / "page.html"))
    took_s = time.monotonic() - began
    verdict = json.loads((out / "verdict.json").read_text())
    page = (out / "page.html").read_text()
    yield done, verdict, page, took_s, here.files(), here.processes()
    shutil.rmtree(directory)
    shutil.rmtree(out)


def test_the_default_scenario_names_its_cause_and_exits_1(buffering: Any) -> None:
    done, verdict, *_ = buffering
    assert done.returncode == 1, done.stderr
    assert verdict["schema"] == "tapproxy.verdict/1"
    assert verdict["verdict"] == "degraded"
    assert verdict["causes"][0]["cause"] == "proxy.response_buffering"


def test_the_engine_was_sampled_meanwhile(buffering: Any) -> None:
    (page,) = buffering[1]["sampled"]
    assert (page["kind"], page["engine"], page["version"], page["failed"]) == ("engine", "vLLM", "0.32.0", 0)
    # Before the load, after it, and in between.
    assert page["samples"] >= 3


def test_it_is_done_within_thirty_seconds(buffering: Any) -> None:
    assert buffering[3] < 30


def test_every_path_answered_every_request(buffering: Any) -> None:
    paths = buffering[1]["paths"]
    assert list(paths) == ["direct", "tap", "nginx", "fixed"]
    assert {name: sum(path["errors"].values()) for name, path in paths.items()} == dict.fromkeys(paths, 0)
    assert len({path["requests"] for path in paths.values()}) == 1


def test_only_the_default_nginx_holds_the_stream(buffering: Any) -> None:
    paths = buffering[1]["paths"]
    assert paths["nginx"]["ttft_ms"]["p50"] > 10 * paths["fixed"]["ttft_ms"]["p50"]
    assert paths["nginx"]["hold_ms"]["p50"] > 100
    assert paths["fixed"]["hold_ms"]["p50"] < 10
    assert paths["direct"]["hold_ms"] is None


def test_the_budget_adds_up(buffering: Any) -> None:
    for bands in buffering[1]["budget"].values():
        for band in bands.values():
            if band["total_ms"] is not None:
                parts = [stage["ms"] for stage in band["stages"].values() if stage is not None]
                assert sum(parts) + band["unexplained_ms"] == band["total_ms"]


def test_the_fix_is_the_line_to_change(buffering: Any) -> None:
    fix = buffering[1]["causes"][0]["fix"]
    assert fix["file"] == "demo-default.conf"
    before, after, hunk, *lines = fix["diff"].splitlines()
    assert (before, after) == ("--- a/demo-default.conf", "+++ b/demo-default.conf")
    changed = lines.index("+            proxy_buffering off;")
    assert fix["line"] == int(hunk.split("+")[1].split(",")[0]) + changed
    assert f"demo-default.conf:{fix['line']}" in buffering[0].stdout


def test_the_fix_comes_with_what_was_measured_with_it(buffering: Any) -> None:
    done, verdict, page, *_ = buffering
    measured = verdict["causes"][0]["fix"]["measured"]
    paths = verdict["paths"]
    assert measured["path"] == "fixed"
    for when, path in (("before", "nginx"), ("after", "fixed")):
        for metric in ("ttft_ms", "hold_ms"):
            assert measured[metric][when] == {each: paths[path][metric][each] for each in ("p50", "p95")}
    assert "Measured with this change (path fixed), P50: TTFT " in " ".join(done.stdout.split())
    assert "Measured with this change (path fixed), P50: TTFT " in page


def test_a_stage_that_nobody_saw_is_named(buffering: Any) -> None:
    bands = [band for metric in buffering[1]["budget"].values() for band in metric.values()]
    nulls = {stage for band in bands for stage, part in band["stages"].items() if part is None}
    assert nulls <= set(buffering[1]["not_observable"])
    # The simulated engine tells its parts.
    assert "engine" not in nulls


def test_the_tap_says_what_it_added(buffering: Any) -> None:
    tap = buffering[1]["tap"]
    assert tap["added_ttft_ms"]["p50"] is not None
    assert tap["forward_delay_ms"]["n"] > 100
    assert tap["within_limit"] in (True, False)


def test_the_screen_shows_table_picture_verdict_and_fix(buffering: Any) -> None:
    screen = buffering[0].stdout
    for words in (
        "TTFT",
        "then ",
        " at once",
        "✗ DEGRADED",
        "proxy.response_buffering",
        "proxy_buffering off;",
        "own cost",
    ):
        assert words in screen
    assert max(len(line) for line in screen.splitlines()) <= 100


def test_piped_it_is_plain_and_quiet(buffering: Any) -> None:
    assert "\x1b" not in buffering[0].stdout
    assert buffering[0].stderr == ""


def test_the_page_has_the_same_verdict(buffering: Any) -> None:
    assert "proxy.response_buffering" in buffering[2]
    assert len(buffering[2].encode()) < 6_000_000


def test_nothing_is_left_behind(buffering: Any) -> None:
    assert buffering[4] == []
    assert buffering[5] == []


def test_the_healthy_scenario_exits_0_with_json_alone_on_stdout(place: Place) -> None:
    done = place.run("--scenario", "healthy", *QUICK, "--json", "-")
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["verdict"] == "healthy"
    assert verdict["causes"] == []


def test_compression_is_told_from_buffering(place: Place) -> None:
    done = place.run("--scenario", "gzip", *QUICK, "--json", "-")
    assert done.returncode == 1, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["causes"][0]["cause"] == "proxy.compression"
    assert verdict["causes"][0]["fix"]["file"] == "demo-default.conf"
    # The body is encoded where the tap stands; the client, who decoded it, shows the hold.
    assert verdict["paths"]["nginx"]["hold_ms"]["p50"] > 100


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, id="ctrl-c"), pytest.param(signal.SIGTERM, id="sigterm", marks=pytest.mark.long)],
)
def test_interrupted_under_load_it_says_what_it_has_and_leaves_nothing(place: Place, number: signal.Signals) -> None:
    process = place.start("--requests", "500")
    # A record is written when a request has ended; 36 are of the warm-up over three paths.
    wait_for(lambda: sum(p.read_bytes().count(b"\n") for p in place.directory.glob("*/inner/records-*")) > 80)
    process.send_signal(number)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130, out + err
    assert "Interrupted: " in out
    assert "TTFT" in out
    assert place.files() == []
    assert place.processes() == []


def test_interrupted_at_the_start_it_leaves_nothing(place: Place) -> None:
    process = place.start()
    wait_for(lambda: place.files() != [])
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out == ""
    assert err == "tapproxy: interrupted before anything was measured\n"
    assert place.files() == []
    assert place.processes() == []


def test_killed_it_takes_its_processes_along(place: Place) -> None:
    process = place.start()
    wait_for(lambda: len(place.processes()) > 6)
    process.kill()
    process.communicate(timeout=20)
    wait_for(lambda: place.processes() == [], 15.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(
            ("--scenario", "nonsense"), "'nonsense' is unknown; there are buffering, gzip, healthy", id="scenario"
        ),
        pytest.param(("--json", "/nowhere/at/all.json"), "--json '/nowhere/at/all.json' cannot be written", id="json"),
        pytest.param(("--html", "/nowhere/at/all.html"), "--html '/nowhere/at/all.html' cannot be written", id="html"),
        pytest.param(("--scenario", "all", "--html", "x.html"), "--html shows one scenario", id="all as a page"),
        pytest.param(("--html", "-"), "--html does not write to stdout", id="page to stdout"),
    ],
)
def test_wrong_usage_is_one_sentence_before_anything_starts(
    place: Place, arguments: tuple[str, ...], words: str
) -> None:
    done = place.run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_the_list_names_each_scenario_and_what_it_stages(place: Place) -> None:
    done = place.run("--list")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "proxy"
    assert [line.split()[0] for line in lines[1:3]] == ["buffering", "gzip"]
    assert lines[1].endswith("→ proxy.response_buffering")
