"""``serve --self-test``: it measures a worker before it serves, shows what it found, and refuses to serve blind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tapproxy.commands.self_test import figures, text
from tapproxy.core.errors import MeasureError
from tapproxy.core.record import AckedEvents, Events, Record, StampsPart
from tapproxy.nginx.sandbox import make_certificate
from tapproxy.wire.fetch import Fetched, Read
from tapproxy.wire.stamps import HAS_KERNEL_STAMPS
from tests.harness import DONE, SSE_HEAD, Peer, Upstream, tap

US = 1000


@contextlib.contextmanager
def serving(
    directory: Path, upstream: str, *flags: str, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """``serve --self-test`` on free ports, with its standard output and error to be read."""
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tapproxy.cli", "serve", "--upstream", upstream, "--self-test"),
            *("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data", str(directory), *flags),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1", **(environment or {})},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        _, stderr = process.communicate(timeout=20)
        assert environment is not None or "Traceback" not in stderr, stderr


def until_ready(process: subprocess.Popen[str]) -> tuple[list[str], str, str]:
    """The lines before the ready line; the data and the admin address."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        if line.startswith("tapproxy: data on "):
            words = line.split()
            return lines, words[3].rstrip(","), words[6]
        lines.append(line)
    raise AssertionError(f"it ended before it was ready: {lines}")


def answer_once(peer: Peer) -> None:
    peer.request()
    peer.send(SSE_HEAD)
    peer.event(b"[DONE]")
    peer.send(DONE)


def assert_sound(result: dict[str, Any]) -> None:
    """What must hold on any machine; how small the figures are depends on what else it does."""
    assert result["streams"] == 16
    for key in ("arrived_error", "read_at_error", "event_direct", "event_added"):
        assert result[key]["n"] == 800
        assert result[key]["p50_ns"] is not None
        assert result[key]["p99_ns"] is not None
    assert result["ttft_added"]["n"] >= 100
    if HAS_KERNEL_STAMPS:
        assert result["stamps"] == "kernel"
    assert 0 <= result["arrived_error"]["p50_ns"] <= result["read_at_error"]["p50_ns"] < 100_000 * US
    assert result["forward_delay"]["p50_ns"] > 0
    assert result["ttft_added"]["p50_ns"] > 0
    assert result["event_added"]["p50_ns"] > 0


def test_a_tap_measures_itself_prints_it_shows_it_and_then_serves(tmp_path: Path) -> None:
    with (
        Upstream(answer_once) as upstream,
        serving(tmp_path, upstream.url, "--workers", "2", "--ack-stamps") as process,
    ):
        lines, data, admin = until_ready(process)
        assert lines[0].startswith("tapproxy: self-test: 16 calibrated streams, ")
        assert [line.split("p50")[0].strip() for line in lines[1:8]] == [
            "added to TTFT",
            "added to an event",
            "tap queueing",
            "forward delay",
            "error of arrived",
            "error of read_at",
            "acknowledged after",
        ]
        with urllib.request.urlopen(f"http://{admin}/api/status", timeout=10) as page:
            status = json.loads(page.read())
        assert_sound(status["self_test"])
        assert status["self_test"]["acked_after"]["n"] == 800
        assert status["workers_alive"] == 2
        # 1.1 s on two quiet cores; the limit is for a machine that has other things to do.
        assert status["self_test"]["took_ns"] < 8e9
        assert upstream.connections == 0
        request = urllib.request.Request(f"http://{data}/x", data=b"{}", method="POST")
        with urllib.request.urlopen(request, timeout=10) as page:
            assert page.read() == b"data: [DONE]\n\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    stored = [line for file in tmp_path.glob("records-*.jsonl") for line in file.read_text().splitlines()]
    assert [json.loads(line)["path"] for line in stored] == ["/x"]


def test_tls_on_the_listener_is_measured_with_it(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    flags = ("--tls-cert", str(certificate), "--tls-key", str(key))
    with serving(tmp_path / "data", "http://127.0.0.1:9", *flags) as process:
        _, _, admin = until_ready(process)
        with urllib.request.urlopen(f"http://{admin}/api/status", timeout=10) as page:
            assert_sound(json.loads(page.read())["self_test"])


def test_a_self_test_that_cannot_run_ends_with_3_and_a_sentence(tmp_path: Path) -> None:
    """Its worker dies as it starts."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif 'tapproxy.tap.worker' in sys.orig_argv:\n    os._exit(7)\n"
    )
    environment = {"PYTHONPATH": str(tmp_path)}
    with serving(tmp_path / "data", "http://127.0.0.1:9", environment=environment) as process:
        stdout, stderr = process.communicate(timeout=20)
    assert process.returncode == 3
    assert stdout == ""
    assert stderr == "tapproxy: the self-test's worker ended by itself; what it said stands above\n"


def test_a_signal_ends_the_self_test(tmp_path: Path) -> None:
    """Its worker never gets ready."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\nif 'tapproxy.tap.worker' in sys.orig_argv:\n    time.sleep(60)\n"
    )
    environment = {"PYTHONPATH": str(tmp_path)}
    with serving(tmp_path / "data", "http://127.0.0.1:9", environment=environment) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        deadline = time.monotonic() + 10
        while not children.read_text() and time.monotonic() < deadline:
            time.sleep(0.02)
        (worker,) = children.read_text().split()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert not Path(f"/proc/{worker}").exists()


def test_without_the_flag_the_status_says_that_there_was_none(tmp_path: Path) -> None:
    with tap(tmp_path, "http://127.0.0.1:9") as running:
        assert json.loads(running.admin_get("/api/status"))["self_test"] is None


# --- the figures, from plain numbers


def fetched(number: int, *, late_us: int, events: int = 50) -> Fetched:
    """An answer whose event i was sent at i ms and arrived ``late_us`` later; it was asked for at 0."""
    one = Fetched(0, write_start_ns=0)
    for index in range(events):
        body = b'data: {"id":"calibrated-%d","sent_ns":%19d}\n\n' % (number, index * 1000 * US)
        at_ns = (index * 1000 + late_us) * US
        one.reads.append(Read(at_ns, at_ns, body))
    return one


def recorded(one: Fetched, number: int, *, arrived_us: int, read_us: int, acks: bool = False) -> Record:
    ends, end = [], 0
    for read in one.reads:
        end += len(read.body)
        ends.append(end)
    count = len(ends)
    return Record(
        id=str(number),
        tap="t",
        response_id=f"calibrated-{number}",
        t0_mono_ns=0,
        events=(AckedEvents if acks else Events)(
            kind=["token"] * count,
            end_offset=ends,
            arrived=[(index * 1000 + arrived_us) * US for index in range(count)],
            read_at=[(index * 1000 + read_us) * US for index in range(count)],
            sent=[(index * 1000 + read_us + 7) * US for index in range(count)],
            **({"acked": [(index * 1000 + 90) * US for index in range(count)]} if acks else {}),
        ),
        stamps=StampsPart(source="kernel", acks=acks),
    )


def found(*, acks: bool = False) -> dict[str, Any]:
    short = ([fetched(0, late_us=20, events=1)] * 700, [fetched(0, late_us=170, events=1)] * 700)
    streams = ([fetched(n, late_us=10) for n in range(14)], [fetched(n, late_us=60) for n in range(14)])
    records = [recorded(one, n, arrived_us=3, read_us=23, acks=acks) for n, one in enumerate(streams[1])]
    return figures(short, streams, records)


def test_the_figures_are_differences_of_stamps_and_of_percentiles() -> None:
    def both(value_us: int, n: int) -> dict[str, int]:
        return {"p50_ns": value_us * US, "p99_ns": value_us * US, "n": n}

    assert found(acks=True) == {
        "stamps": "kernel",
        "ttft_direct": both(20, 700),
        "ttft_added": both(150, 700),
        "event_direct": both(10, 700),
        "event_added": both(50, 700),
        "queueing": both(20, 700),
        "forward_delay": both(7, 700),
        "arrived_error": both(3, 700),
        "read_at_error": both(23, 700),
        "acked_after": both(90, 700),
        "void": 0,
        "streams": 14,
    }


def test_a_percentile_of_too_few_is_not_given() -> None:
    short = ([fetched(0, late_us=20, events=1)] * 100, [fetched(0, late_us=170, events=1)] * 100)
    one = fetched(1, late_us=60)
    result = figures(short, ([one], [one]), [recorded(one, 1, arrived_us=3, read_us=23)])
    assert result["ttft_added"] == {"p50_ns": 150 * US, "p99_ns": None, "n": 100}
    assert result["acked_after"] is None
    assert "added to TTFT      p50    150 µs   p99 too few    n  100" in text(result | {"took_ns": 10**9})


def test_events_that_lie_elsewhere_are_not_compared() -> None:
    one = fetched(1, late_us=60)
    other = recorded(one, 1, arrived_us=3, read_us=23)
    other.events.end_offset[7] += 1
    with pytest.raises(MeasureError, match="its events lie elsewhere"):
        figures(([one], [one]), ([one], [one]), [other])


def test_what_is_printed() -> None:
    result = found(acks=True) | {"took_ns": 1_234_567_890, "void": 2}
    assert text(result) == (
        "tapproxy: self-test: 14 calibrated streams, 1.2 s\n"
        "  added to TTFT      p50    150 µs   p99    150 µs   n  700   through the tap less without it\n"
        "  added to an event  p50     50 µs   p99     50 µs   n  700   one way, through the tap less without it\n"
        "  tap queueing       p50     20 µs   p99     20 µs   n  700   read_at − arrived\n"
        "  forward delay      p50      7 µs   p99      7 µs   n  700   sent − read_at\n"
        "  error of arrived   p50      3 µs   p99      3 µs   n  700   kernel stamps; less the event's own send stamp\n"
        "  error of read_at   p50     23 µs   p99     23 µs   n  700   what it would be without kernel stamps\n"
        "  acknowledged after p50     90 µs   p99     90 µs   n  700   acked less the event's own send stamp\n"
        "  2 of 14 streams would be void: this machine is not quiet\n"
    )
