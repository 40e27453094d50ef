"""Hostile files: what a live check generates from them holds none of it, and what it runs touches nothing of theirs."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tapproxy.core.errors import ConfigError
from tapproxy.nginx import sandbox
from tapproxy.nginx.checker import Examination, examine
from tapproxy.nginx.live import LIMITS, prove
from tapproxy.nginx.live_config import Plan, plan
from tapproxy.nginx.live_settings import ROWS
from tapproxy.nginx.ports import HeldPorts
from tapproxy.nginx.sandbox import RunningNginx
from tapproxy.nginx.source import Directive, parse
from tests.nginx.hostile import HOSTILE, whole
from tests.nginx.live import ALL

PATH = "/v1/chat/completions"
FRAME = {
    "worker_processes", "error_log", "events", "worker_connections", "http", "access_log", "client_body_temp_path",
    "proxy_temp_path", "fastcgi_temp_path", "uwsgi_temp_path", "scgi_temp_path", "upstream", "server", "listen",
    "ssl_certificate", "ssl_certificate_key", "location", "proxy_pass",
}  # fmt: skip
PLAIN = re.compile(r"[\w./:@*-]*|\$http_accept_encoding")
# Run in the ordinary suite, one of each kind; all are in tests/full.
RUN = (
    "load-module", "log-paths", "root-alias", "temp-paths", "listen-everywhere", "upstream-elsewhere", "certificates",
    "break-out-time", "memory",
)  # fmt: skip
IN_OPEN, IN_CREATE, IN_MODIFY, IN_DELETE, IN_MOVED, IN_NONBLOCK = 0x20, 0x100, 0x2, 0x200, 0xC0, 0o4000


def placed(text: str, directory: Path) -> tuple[Path, Path]:
    """The file, and the directory outside with the secrets that it is after."""
    outside = directory / "outside"
    outside.mkdir()
    for name in ("CANARY", "CANARY.pem", "CANARY.so", "CANARY.lua", "CANARY.js", "CANARY.dat"):
        (outside / name).write_text("CANARY secret\n")
    file = directory / "nginx.conf"
    file.write_text(text.replace("OUTSIDE", str(outside)))
    return file, outside


def examined(file: Path) -> Examination:
    return examine([file], nginx_version="1.31.3", paths=[PATH])


def plans(found: Examination) -> list[Plan]:
    """What would be run, of every server that serves the path."""
    (tree,) = found.trees
    return [
        plan(tree, one.hop, tuple(one.clients)) for one in found.paths if one.hop.route.failure is None and one.clients
    ]


def statements(block: tuple[Directive, ...]) -> Iterator[Directive]:
    for one in block:
        yield one
        yield from statements(one.block or ())


@contextmanager
def touched(*directories: Path) -> Iterator[list[str]]:
    """Everything that is opened, made, changed or removed in these directories meanwhile, by whomever."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.inotify_init1(IN_NONBLOCK)
    assert fd >= 0
    names: list[str] = []
    try:
        for directory in directories:
            mask = IN_OPEN | IN_CREATE | IN_MODIFY | IN_DELETE | IN_MOVED
            assert libc.inotify_add_watch(fd, os.fsencode(directory), mask) >= 0
        yield names
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            data = b""
        while data:
            _, mask, _, size = struct.unpack_from("iIII", data)
            names.append(f"{data[16 : 16 + size].rstrip(bytes(1)).decode()} {mask:#x}")
            data = data[16 + size :]
    finally:
        os.close(fd)


def test_the_watch_sees_a_file_that_is_opened(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    with touched(tmp_path) as names:
        (tmp_path / "x").read_text()
    assert names == ["x 0x20"]


def test_there_are_more_than_thirty_and_most_have_something_that_can_be_run(tmp_path: Path) -> None:
    runnable = []
    for name, text in HOSTILE.items():
        (tmp_path / name).mkdir()
        file, _ = placed(text, tmp_path / name)
        runnable += [name] if plans(examined(file)) else []
    assert len(HOSTILE) >= 30
    # A program that answers in place of proxy_pass is not run, and so there is nothing to generate.
    assert len(HOSTILE) - len(runnable) <= 3, HOSTILE.keys() - set(runnable)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_is_generated_holds_nothing_of_a_hostile_file(text: str, tmp_path: Path) -> None:
    file, outside = placed(text, tmp_path)
    for made in plans(examined(file)):
        generated = made.filled({place: 40000 + index for index, place in enumerate(made.places)})
        assert "canary" not in generated.lower()
        assert str(tmp_path) not in generated
        assert "198.51.100" not in generated
        for one in statements(parse(generated, "generated")):
            assert one.name in FRAME | ROWS.keys(), one.text
            assert all(PLAIN.fullmatch(argument) for argument in one.args), one.text
            assert not any(argument.startswith("/") for argument in one.args if one.name != "location"), one.text
            if one.name == "listen":
                assert re.fullmatch(r"127\.0\.0\.1:4\d{4}", one.args[0])
                assert set(one.args[1:]) <= {"ssl", "http2"}
            if one.name == "proxy_pass":
                assert re.fullmatch(r"https?://(127\.0\.0\.1:4\d{4}|pool\d)", one.args[0])
            if one.name == "server" and one.block is None:
                assert re.fullmatch(r"127\.0\.0\.1:4\d{4}", one.args[0])
    assert sorted(one.name for one in outside.iterdir()) == [
        "CANARY", "CANARY.dat", "CANARY.js", "CANARY.lua", "CANARY.pem", "CANARY.so",
    ]  # fmt: skip


@pytest.mark.skipif(not ALL, reason="no nginx here")
@pytest.mark.parametrize("name", RUN)
def test_what_runs_opens_nothing_of_a_hostile_file_and_listens_on_loopback_only(name: str, tmp_path: Path) -> None:
    opens_nothing(HOSTILE[name], tmp_path)


def opens_nothing(text: str, tmp_path: Path) -> None:
    """What is generated from a hostile file, run and looked at from outside."""
    file, outside = placed(text, tmp_path)
    for made in plans(examined(file))[:1]:
        with touched(tmp_path, outside) as names:
            opened, listening, owner, directory = asyncio.run(running(made))
        assert names == []
        assert [name for name in opened if "CANARY" in name or str(tmp_path) in name] == []
        assert all(name.startswith("127.0.0.1:") for name in listening)
        assert len(listening) == sum(place != "ENGINE" for place in made.places)
        assert owner != 0 or os.geteuid() != 0
        assert not directory.exists()


async def running(made: Plan) -> tuple[list[str], list[str], int, Path]:
    """What the generated nginx has open, where it listens, as whom it runs, and in which directory."""
    one = RunningNginx()
    directory = sandbox.private_directory()
    sandbox.make_certificate(directory)
    with HeldPorts(len(made.places)) as held:
        text = made.filled(dict(zip(made.places, held.numbers, strict=True)))
        await one.start(ALL[0], text, directory, limits=LIMITS)
        try:
            assert one.pid is not None
            return *seen_of(one.pid, directory), directory
        finally:
            await one.stop()


def seen_of(pid: int, directory: Path) -> tuple[list[str], list[str], int]:
    """What a process has open and where it listens; that it is held to its limits."""
    links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {name[8:-1] for name in links if name.startswith("socket:[")}
    assert [name for name in links if name.startswith("/") and not name.startswith(("/dev/null", str(directory)))] == []
    limits = Path(f"/proc/{pid}/limits").read_text()
    assert re.search(r"Max open files\s+1024\s+1024", limits)
    assert re.search(rf"Max address space\s+{1 << 30}\s", limits)
    return links, listeners(inodes), Path(f"/proc/{pid}").stat().st_uid


def listeners(inodes: set[str]) -> list[str]:
    """The addresses of these sockets that listen, or are bound for datagrams."""
    found = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in inodes and (words[3] == "0A" or table.startswith("udp")):
                address, port = words[1].split(":")
                number = ".".join(str(byte) for byte in bytes.fromhex(address)[::-1]) if table == "tcp" else address
                found.append(f"{number}:{int(port, 16)}")
    return found


@pytest.mark.parametrize(
    "name",
    ["load-module", "lua-block", "njs", "mirror", "auth-request", "store", "cache", "password-file", "break-out-time",
     "break-out-flag", "break-out-method", "break-out-map", "memory", "plugin", "set-body", "perl"],
)  # fmt: skip
def test_what_might_change_a_stream_and_is_not_run_is_said(name: str, tmp_path: Path) -> None:
    file, _ = placed(HOSTILE[name], tmp_path)
    made = plans(examined(file))
    assert made[0].not_run
    assert all(one.file == str(file) and one.line > 0 and one.because for one in made[0].not_run)


def test_fifty_megabytes_and_deep_blocks_are_not_even_read(tmp_path: Path) -> None:
    big = tmp_path / "big.conf"
    with big.open("wb") as stream:
        stream.write(whole().encode())
        stream.truncate(50 << 20)
    deep = tmp_path / "deep.conf"
    deep.write_text("http { " + "location / { " * 50_000)
    for file in (big, deep):
        with pytest.raises(ConfigError):
            examined(file)


def test_a_device_or_a_pipe_is_no_configuration(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(ConfigError, match="not a regular file"):
            examined(tmp_path / name)


@pytest.mark.skipif(not ALL, reason="no nginx here")
def test_a_file_that_nginx_would_refuse_is_not_run(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(whole(server=f"include {tmp_path}/missing; ", location="proxy_buffering perhaps;"))
    found = examined(file)
    with touched(tmp_path) as names:
        live = asyncio.run(prove(found, ALL[0], far=False))
    assert names == []
    assert [trial.clients for trial in live.paths] == [{}]
    assert "nginx does not start with this file" in str(live.paths[0].because)
    assert not live.measured
