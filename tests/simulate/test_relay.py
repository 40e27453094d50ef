"""The relay with faults: when bytes come out, that all of them do, and that it pushes back."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tapproxy.simulate.relay import Line, RelayConfig, RelayError, lines_of

MS = 1_000_000
CHANCE = random.Random(1)


def due(line: Line, now_ms: float, size: int = 100, last_ms: float = 0, *, first: bool = False) -> float:
    return line.due_ns(round(now_ms * MS), size, round(last_ms * MS), CHANCE, first=first) / MS


@pytest.mark.parametrize(
    ("line", "now_ms", "last_ms", "first", "expected_ms"),
    [
        pytest.param(Line(), 100, 0, False, 100, id="nothing"),
        pytest.param(Line(delay_ns=80 * MS), 100, 0, False, 180, id="delay"),
        pytest.param(Line(delay_ns=80 * MS), 100, 200, False, 200, id="never before the bytes ahead"),
        pytest.param(Line(first_ns=120 * MS), 100, 0, True, 220, id="first bytes"),
        pytest.param(Line(first_ns=120 * MS), 300, 220, False, 300, id="not the later ones"),
        pytest.param(Line(bytes_per_s=1000), 100, 0, False, 200, id="100 bytes at 1000 a second"),
        pytest.param(Line(bytes_per_s=1000), 100, 150, False, 250, id="behind those ahead"),
        pytest.param(Line(flush_ns=50 * MS), 101, 0, False, 150, id="the next full 50 ms"),
        pytest.param(Line(stall_every_ns=1000 * MS, stall_ns=200 * MS), 3050, 0, False, 3200, id="in a stall"),
        pytest.param(Line(stall_every_ns=1000 * MS, stall_ns=200 * MS), 3250, 0, False, 3250, id="past a stall"),
    ],
)
def test_when_bytes_are_due(line: Line, now_ms: float, last_ms: float, first: bool, expected_ms: float) -> None:
    assert due(line, now_ms, 100, last_ms, first=first) == expected_ms


def test_jitter_is_bounded_and_keeps_order() -> None:
    line = Line(jitter_ns=10 * MS)
    last = 0.0
    for now in range(0, 200, 2):
        at = due(line, now, 10, last)
        assert max(now, last) <= at <= max(now + 10, last)
        last = at


def test_each_way_has_its_own_line() -> None:
    request, response = lines_of(RelayConfig(request_delay_ms=5, response_delay_ms=7, response_first_ms=9))
    assert (request.delay_ns, request.first_ns) == (5 * MS, 0)
    assert (response.delay_ns, response.first_ns) == (7 * MS, 9 * MS)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"request_delay_ms": -1}, "--request-delay-ms is -1; it must be at least 0."),
        ({"window_bytes": 0}, "--window-bytes is 0"),
        ({"stall_ms": 5, "stall_every_ms": 5}, "--stall-ms is 5; it must be less than --stall-every-ms"),
        ({"to": "nowhere"}, "--to is 'nowhere'; it must be HOST:PORT"),
    ],
)
def test_a_setting_that_cannot_be_is_one_sentence(settings: dict[str, float], words: str) -> None:
    with pytest.raises(RelayError, match=words):
        RelayConfig(**settings)  # type: ignore[arg-type]


@contextmanager
def relay(*flags: str) -> Iterator[tuple[int, socket.socket]]:
    """A relay as a program to a listener of ours: its port, the listener."""
    with socket.create_server(("127.0.0.1", 0)) as upstream:
        upstream.settimeout(5)
        process = subprocess.Popen(
            [sys.executable, "-m", "tapproxy.simulate.relay", "--to", f"127.0.0.1:{upstream.getsockname()[1]}", *flags],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("listening on 127.0.0.1:"), process.stderr
            yield int(line.rpartition(":")[2]), upstream
        finally:
            process.terminate()
            out, err = process.communicate(timeout=5)
            assert (process.returncode, out, err) == (0, "", "")


@contextmanager
def pair(port: int, upstream: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as near:
        far, _ = upstream.accept()
        with far:
            far.settimeout(5)
            yield near, far


def read(sock: socket.socket, size: int) -> bytes:
    out = b""
    while len(out) < size and (more := sock.recv(65536)):
        out += more
    return out


def test_bytes_come_late_and_whole_both_ways_and_ends_pass() -> None:
    with (
        relay("--request-delay-ms", "30", "--response-delay-ms", "60") as (port, up),
        pair(port, up) as (near, far),
    ):
        began = time.monotonic()
        near.sendall(b"question")
        assert read(far, 8) == b"question"
        there = time.monotonic()
        far.sendall(b"answer")
        assert read(near, 6) == b"answer"
        back = time.monotonic()
        assert 0.029 < there - began < 0.1
        assert 0.059 < back - there < 0.13
        near.shutdown(socket.SHUT_WR)
        assert far.recv(10) == b""
        far.sendall(b"last words")
        far.shutdown(socket.SHUT_WR)
        assert read(near, 10) == b"last words"
        assert near.recv(10) == b""


def test_a_limited_line_takes_its_time_and_loses_nothing() -> None:
    sent = random.Random(1).randbytes(100_000)
    with relay("--response-bytes-per-s", "400000") as (port, up), pair(port, up) as (near, far):
        began = time.monotonic()
        far.sendall(sent)
        assert read(near, len(sent)) == sent
        assert 0.24 < time.monotonic() - began < 0.4


def test_a_full_window_pushes_back_on_the_sender() -> None:
    flags = ("--response-bytes-per-s", "10000", "--window-bytes", "4096", "--receive-bytes", "4096")
    with relay(*flags) as (port, up), pair(port, up) as (_, far):
        far.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        far.settimeout(0.3)
        with pytest.raises(TimeoutError):
            far.sendall(b"x" * 1_000_000)


def test_a_reset_reaches_both_sides() -> None:
    with relay("--reset-after-ms", "50") as (port, up), pair(port, up) as (near, far):
        near.sendall(b"question")
        began = time.monotonic()
        for sock in (near, far):
            with pytest.raises(ConnectionResetError):
                read(sock, 100)
        assert 0.03 < time.monotonic() - began < 0.3


def test_nobody_there_ends_the_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        number = gone.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "tapproxy.simulate.relay", "--to", f"127.0.0.1:{number}"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=5) as near, pytest.raises(ConnectionResetError):
            read(near, 10)
    finally:
        process.terminate()
        process.communicate(timeout=5)


def test_many_connections_stand_beside_each_other() -> None:
    with relay("--response-delay-ms", "20") as (port, up):

        def echo() -> None:
            for _ in range(20):
                far, _ = up.accept()
                with far:
                    far.sendall(far.recv(10))

        thread = threading.Thread(target=echo)
        thread.start()
        for number in range(20):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as near:
                near.sendall(b"%d" % number)
                assert near.recv(10) == b"%d" % number
        thread.join(5)


def test_a_bad_flag_is_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tapproxy.simulate.relay", "--to", "x"],
        capture_output=True, text=True, timeout=10, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "--to is 'x'; it must be HOST:PORT, like 127.0.0.1:8000.\n")
