"""A case of the corpus on a real nginx: its engine, its client, and how long each event was held.

The files are ours (no user's text is ever run). The engine answers as ``generic`` does: chunked to HTTP/1.1,
close-delimited to HTTP/1.0, one write an event, with the headers and the failure that the case names.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapproxy.nginx.fix import apply
from tapproxy.nginx.sandbox import Nginx, make_certificate
from tests.nginx.corpus import PORTS, Case
from tests.nginx.live import free_ports

EVENTS = 30
INTERVAL_S = 0.02
FIRST_S = 0.1
EVENT_BYTES = 210
TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Seen:
    """What the client got: the status, and for each event how long it was held (ms)."""

    status: int
    holds_ms: list[float]

    @property
    def streams(self) -> bool:
        """The corpus's own bound: hold_max below 12 ms, or neither many events together nor a median of 8 ms."""
        if self.status != 200 or len(self.holds_ms) < EVENTS:
            return False
        median = sorted(self.holds_ms)[len(self.holds_ms) // 2]
        return median < 8.0 and sum(one > INTERVAL_S * 1000 for one in self.holds_ms) < 0.1 * len(self.holds_ms)


# -- the engine -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def engine(port: int, sent: dict[str, Any], *, failing: str | None = None) -> Iterator[None]:
    """Answers on ``port`` until the block ends; ``failing`` is the status it refuses with instead."""
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(0.1)
        over = threading.Event()

        def serve() -> None:
            while not over.is_set():
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    threading.Thread(target=_answer, args=(connection, sent, failing), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(2)


def _answer(connection: socket.socket, sent: dict[str, Any], failing: str | None) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = _request(connection)
        if not head:
            return
        if failing is not None:
            connection.sendall(f"HTTP/1.1 {failing} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
            return
        chunked = b" HTTP/1.1\r\n" in head
        lines = [
            "HTTP/1.1 200 OK" if chunked else "HTTP/1.0 200 OK",
            f"Content-Type: {sent.get('ctype', 'text/event-stream')}",
        ]
        lines += [f"{name}: {value}" for name, value in sent.get("headers", [])]
        if sent.get("gzip") == "nosync-accept" and b"gzip" in head.lower():
            lines.append("Content-Encoding: gzip")
        lines.append("Transfer-Encoding: chunked" if chunked else "Connection: close")
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        time.sleep(FIRST_S)
        # The engine's own compressor, without a flush: nothing leaves it before the end.
        packs = sent.get("gzip") == "nosync-accept" and b"gzip" in head.lower()
        packer = zlib.compressobj(wbits=31) if packs else None
        for _ in range(EVENTS):
            event = f"data: {time.monotonic_ns()} ".encode()
            event += b"x" * (EVENT_BYTES - len(event) - 2) + b"\n\n"
            if packer is not None:
                event = packer.compress(event)
            if event:
                connection.sendall(b"%x\r\n%b\r\n" % (len(event), event) if chunked else event)
            time.sleep(INTERVAL_S)
        if packer is not None:
            rest = packer.flush()
            connection.sendall(b"%x\r\n%b\r\n" % (len(rest), rest) if chunked else rest)
        if chunked:
            connection.sendall(b"0\r\n\r\n")


def _request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")), 0
    )
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n"


# -- the client -------------------------------------------------------------------------------------------------


def ask(case: Case, port: int) -> Seen:
    """One request of the case's client, over HTTP/1.1."""
    wanted = case.truth["request"]
    plain = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
    if wanted["client"] == "tls":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        plain = context.wrap_socket(plain)
    body = b"x" * min(wanted.get("body", 100), 4000)
    lines = [f"{wanted['method']} {wanted['path']} HTTP/1.1", f"Host: {wanted.get('host', '127.0.0.1')}"]
    if wanted.get("ae"):
        lines.append(f"Accept-Encoding: {wanted['ae']}")
    lines += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
    with plain:
        plain.sendall("\r\n".join(lines).encode() + body)
        return _read(plain)


def _read(connection: socket.socket) -> Seen:
    data, holds = b"", []
    head: bytes | None = None
    unpack = None
    text = b""
    with contextlib.suppress(TimeoutError):
        while more := connection.recv(65536):
            now = time.monotonic_ns()
            data += more
            if head is None and b"\r\n\r\n" in data:
                head, _, data = data.partition(b"\r\n\r\n")
                unpack = zlib.decompressobj(31) if b"content-encoding: gzip" in head.lower() else None
            if head is None:
                continue
            chunked = b"transfer-encoding: chunked" in head.lower()
            body, data = _unchunked(data) if chunked else (data, b"")
            text += unpack.decompress(body) if unpack else body
            while b"\n\n" in text:
                event, _, text = text.partition(b"\n\n")
                if event.startswith(b"data: "):
                    holds.append((now - int(event.split(b" ")[1])) / 1e6)
    status = int(head.split(b" ")[1]) if head else 0
    return Seen(status, holds)


def _unchunked(data: bytes) -> tuple[bytes, bytes]:
    """The whole chunks at the front, and what is left."""
    body = b""
    while b"\r\n" in data:
        line, _, rest = data.partition(b"\r\n")
        size = int(line, 16)
        if size == 0 or len(rest) < size + 2:
            break
        body, data = body + rest[:size], rest[size + 2 :]
    return body, data


def patched(case: Case, version: str, directory: Path) -> tuple[str, str]:
    """The case's file as it is and with its patch; it is written into ``directory`` with its includes."""
    file = case.write(directory)
    result = case.examine(file, version)
    text = file.read_text()
    assert {edit.file for edit in result.edits} == {str(file)}
    return text, apply(text, result.edits)


# -- nginx ------------------------------------------------------------------------------------------------------


def measure(nginx: Nginx, case: Case, text: str, directory: Path) -> Seen:
    """One request through this text, with ports and paths of its own; ``directory`` has the case's includes."""
    listen, listen2, upstream, upstream2 = free_ports(4)
    mapping = {
        PORTS["__LISTEN_PORT__"]: listen,
        PORTS["__LISTEN2_PORT__"]: listen2,
        PORTS["__UPSTREAM_PORT__"]: upstream,
        PORTS["__UPSTREAM2_PORT__"]: upstream2,
    }
    for old, new in mapping.items():
        text = text.replace(f":{old}", f":{new}")
    for name in ("tmp", "logs"):
        (directory / name).mkdir(exist_ok=True)
    if not (directory / "cert.pem").exists():
        make_certificate(directory)
    (directory / "run.conf").write_text(text)
    sent = case.truth["upstream"]
    fail = sent.get("fail") or {}
    failing = fail.get("mode") if "A" in fail.get("ports", ()) else None
    with engine(upstream, sent, failing=failing), engine(upstream2, sent), _running(nginx, directory, listen):
        return ask(case, listen)


@contextlib.contextmanager
def _running(nginx: Nginx, directory: Path, port: int) -> Iterator[None]:
    process = subprocess.Popen(
        [str(nginx.path), "-p", str(directory), "-c", str(directory / "run.conf"), "-e", str(directory / "run.log"),
         "-g", "daemon off; master_process off;"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.01)
        yield
    finally:
        process.terminate()
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(3)
        if process.stderr:
            process.stderr.close()
