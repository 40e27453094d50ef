"""A real tap as a process, and a scripted upstream: what the end-to-end tests share. Loopback only, bounded waits."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tapproxy.tap import relay

WAIT_S = 20.0
# For tests that put a fault into the data path: a compiled one calls its own functions without asking.
interpreted = pytest.mark.skipif(not str(relay.__file__).endswith(".py"), reason="the data path is compiled")


@dataclass
class Tap:
    """A running ``tapproxy serve``."""

    process: subprocess.Popen[str]
    data: tuple[str, int]
    admin: tuple[str, int]
    directory: Path

    @property
    def url(self) -> str:
        return f"http://{self.data[0]}:{self.data[1]}"

    def connect(self) -> socket.socket:
        sock = socket.create_connection(self.data, WAIT_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock

    def admin_get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://{self.admin[0]}:{self.admin[1]}{path}", timeout=WAIT_S) as answer:
            return str(answer.read().decode())

    def records(self, count: int, *, path: str | None = None) -> list[dict[str, Any]]:
        """Waits until ``count`` records (of ``path``) are written, oldest first; fails on more, or when time is out."""
        found: list[dict[str, Any]] = []
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            found = [
                record
                for file in sorted(self.directory.glob("records-*.jsonl"))
                for line in file.read_text().splitlines()
                if line.strip()
                for record in [json.loads(line)]
                if path is None or record["path"] == path
            ]
            if len(found) >= count:
                break
            time.sleep(0.02)
        assert len(found) == count, f"{len(found)} records, expected {count}: {[r['ended'] for r in found]}"
        return found

    def record(self, *, path: str | None = None) -> dict[str, Any]:
        return self.records(1, path=path)[0]


@contextlib.contextmanager
def tap(directory: Path, upstream: str, *flags: str) -> Iterator[Tap]:
    """Starts a tap on free ports; stops it and checks that it ended in good order."""
    directory.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tapproxy.cli", "serve", "--upstream", upstream),
            *("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--data", str(directory), *flags),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "NO_COLOR": "1"},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        match = re.search(r"data on (\S+):(\d+), admin on (\S+):(\d+)", line)
        if match is None:
            process.kill()
            raise AssertionError(f"the tap did not start: {line!r} {process.communicate()[1]!r}")
        host, port, admin_host, admin_port = match.groups()
        yield Tap(process, (host, int(port)), (admin_host, int(admin_port)), directory)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
        process.wait(WAIT_S)
        stdout, stderr = process.communicate()
        assert "Traceback" not in stderr, stderr
        del stdout


class Peer:
    """One upstream connection in a script's hands."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.buffer = b""

    def head(self) -> bytes:
        """The next request head with its empty line; EOFError where none comes."""
        while b"\r\n\r\n" not in self.buffer:
            self._fill()
        head, _, self.buffer = self.buffer.partition(b"\r\n\r\n")
        return head + b"\r\n\r\n"

    def request(self) -> tuple[bytes, bytes]:
        """The next request: head and body (by Content-Length)."""
        head = self.head()
        match = re.search(rb"(?i)\r\ncontent-length: *(\d+)\r\n", head)
        size = int(match.group(1)) if match else 0
        while len(self.buffer) < size:
            self._fill()
        body, self.buffer = self.buffer[:size], self.buffer[size:]
        return head, body

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def event(self, data: bytes) -> None:
        """One SSE event as one chunk and one write."""
        block = b"data: " + data + b"\n\n"
        self.send(b"%x\r\n%s\r\n" % (len(block), block))

    def closed_within(self, seconds: float) -> float | None:
        """How long until the other side closed, or None where it did not."""
        started = time.monotonic()
        self.sock.settimeout(seconds)
        try:
            while self.sock.recv(65536):
                pass
        except TimeoutError:
            return None
        except OSError:
            pass
        return time.monotonic() - started

    def reset(self) -> None:
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.sock.close()

    def _fill(self) -> None:
        data = self.sock.recv(65536)
        if not data:
            raise EOFError
        self.buffer += data


@dataclass
class Upstream:
    """A scripted upstream: ``script`` runs for each connection, in a thread of its own."""

    script: Callable[[Peer], None]
    seen: list[bytes] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    connections: int = 0
    port: int = 0
    host: str = "127.0.0.1"
    _sock: socket.socket | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def __enter__(self) -> Upstream:
        self._sock = socket.create_server((self.host, self.port), backlog=128)
        self.port = self._sock.getsockname()[1]
        threading.Thread(target=self._accept, args=(self._sock,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._sock is not None
        # shutdown wakes the accept that close alone would leave waiting.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            sock.settimeout(WAIT_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                self.script(Peer(sock))
            except (EOFError, OSError):
                pass
            except BaseException as error:
                self.failures.append(error)


SSE_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"0\r\n\r\n"


def answer(sock: socket.socket, *, timeout_s: float = WAIT_S) -> bytes:
    """All bytes until the other side closes. A reset ends it too, with ``b'<RST>'`` appended."""
    sock.settimeout(timeout_s)
    out = b""
    try:
        while data := sock.recv(65536):
            out += data
    except ConnectionResetError:
        out += b"<RST>"
    return out


def read_until(sock: socket.socket, end: bytes, *, timeout_s: float = WAIT_S) -> bytes:
    """Bytes up to and with ``end``; AssertionError where they do not come."""
    sock.settimeout(timeout_s)
    out = b""
    while not out.endswith(end):
        data = sock.recv(1)
        assert data, f"closed after {out[-200:]!r}"
        out += data
    return out
