"""The process: what it prints, how it ends, what it says to bad flags. And what it may import."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sim_server import chat, connected, read_until, request

import tapproxy.simulate
from tapproxy.commands.simulate import simulate
from tapproxy.core.errors import ConfigError, MeasureError
from tapproxy.simulate.config import SimConfig, SimConfigError, flag

COMMAND = [sys.executable, "-m", "tapproxy.simulate", "--listen"]


@contextmanager
def started(*flags: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    with subprocess.Popen([*COMMAND, "127.0.0.1:0", *flags], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("listening on 127.0.0.1:")
        try:
            yield process, int(line.rpartition(":")[2])
        finally:
            process.kill()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["TERM", "INT"])
def test_a_signal_ends_it_at_once_and_cleanly_also_in_a_stream(number: signal.Signals, status: int) -> None:
    with started() as (process, port), connected(port) as sock:
        sock.sendall(request(chat(5000)))
        read_until(sock, b"\n\n\r\n")
        start = time.monotonic()
        process.send_signal(number)
        output, errors = process.communicate(timeout=3)
        assert time.monotonic() - start < 1.5
        assert (process.returncode, output, errors) == (status, "", "")


def test_a_port_in_use_is_one_sentence_and_exit_3() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = subprocess.run([*COMMAND, address], capture_output=True, text=True, timeout=10)
        assert result.returncode == 3
        assert result.stderr == f"cannot listen on {address}: Address already in use.\n"
        with pytest.raises(MeasureError, match="Address already in use"):
            simulate(listen=address)


def test_a_bad_flag_is_one_sentence_and_exit_2() -> None:
    result = subprocess.run([*COMMAND, "nowhere"], capture_output=True, text=True, timeout=10)
    assert result.returncode == 2
    assert result.stderr == "--listen is 'nowhere'; it must be HOST:PORT, like 127.0.0.1:8000.\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param({"listen": "::1:80"}, "--listen is '::1:80'", id="IPv6 without brackets"),
        pytest.param({"listen": "127.0.0.1:65536"}, "--listen", id="port"),
        pytest.param({"bundle": 0}, "--bundle is 0; it must be at least 1.", id="bundle"),
        pytest.param({"keep_alive_timeout_s": -1.0}, "--keep-alive-timeout is -1.0", id="timeout"),
        pytest.param({"http10": "yes"}, "--http10 is 'yes'", id="http10"),
        pytest.param({"x_accel_buffering": "no\r\nx: y"}, "--x-accel-buffering", id="a field with a line break"),
        pytest.param({"kv_blocks": 10}, "--kv-blocks 10 holds 160 tokens", id="a cache too small"),
        pytest.param({"spec_acceptance": 1.5}, "--spec-acceptance", id="acceptance"),
        pytest.param({"fault": "x"}, "--fault: found 'x'; expected reset-after=N", id="fault"),
        pytest.param({"model": ""}, "--model is empty", id="model"),
    ],
)
def test_a_setting_that_cannot_be_is_said_before_anything_listens(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SimConfigError) as caught:
        SimConfig(**changes)
    assert message in str(caught.value)


def test_a_replay_that_is_not_there_is_the_operators_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        simulate(replay=tmp_path / "none.http")


def test_the_command_has_every_setting_with_the_same_default() -> None:
    flags = {name: one.default for name, one in inspect.signature(simulate).parameters.items()}
    settings = {flag(f.name)[2:].replace("-", "_"): f.default for f in dataclasses.fields(SimConfig)}
    assert flags == settings


def test_the_module_takes_the_flags_of_the_command() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "tapproxy.simulate", "--help"], capture_output=True, text=True, check=True, timeout=30
    ).stdout
    for name in inspect.signature(simulate).parameters:
        assert f"--{name.replace('_', '-')}" in help_text


def test_ipv6_is_listened_on_in_brackets() -> None:
    assert SimConfig(listen="[::1]:80").address() == ("::1", 80)


def test_the_simulator_imports_nothing_of_ours_and_little_else() -> None:
    folder = Path(tapproxy.simulate.__file__).parent
    files = [file for file in folder.glob("*.py") if file.name != "scenarios.py"]  # it puts parts together
    allowed = {*sys.stdlib_module_names, "orjson", "uvloop"}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                ours = name == "tapproxy.simulate" or name.startswith("tapproxy.simulate.")
                assert ours or name.partition(".")[0] in allowed, (file.name, name)
    assert len(files) >= 15


def test_one_line_is_printed_and_then_it_answers() -> None:
    with started() as (process, port), connected(port) as sock:
        sock.sendall(request(target="/health", method="GET"))
        assert sock.recv(100).startswith(b"HTTP/1.1 200 OK")
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 0)[0] == []
