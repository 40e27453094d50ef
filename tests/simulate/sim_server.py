"""A simulator in a thread, and a client that is nothing but a socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

from tapproxy.simulate.app import SimConfig, serve

FAST = {"decode_base_us": 3000, "decode_per_seq_us": 0, "prefill_overhead_us": 2000}


@contextmanager
def running(**changes: Any) -> Iterator[int]:
    """The port of a simulator with these settings."""
    config = SimConfig(**({"listen": "127.0.0.1:0"} | FAST | changes))
    listening = threading.Event()
    found: dict[str, Any] = {}

    async def main() -> None:
        found["loop"], found["task"] = asyncio.get_running_loop(), asyncio.current_task()

        def ready(port: int) -> None:
            found["port"] = port
            listening.set()

        try:
            await serve(config, ready)
        except asyncio.CancelledError:
            pass

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run)
    thread.start()
    assert listening.wait(5)
    try:
        yield found["port"]
    finally:
        found["loop"].call_soon_threadsafe(found["task"].cancel)
        thread.join(5)


@contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield sock


def request(
    body: dict[str, Any] | bytes | None = None,
    *fields: str,
    target: str = "/v1/chat/completions",
    method: str = "POST",
    version: str = "1.1",
) -> bytes:
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {target} HTTP/{version}", "host: x", *fields]
    if method == "POST":
        lines += ["content-type: application/json", f"content-length: {len(data)}"]
    return "\r\n".join([*lines, "", ""]).encode() + data


def chat(tokens: int = 3, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "Please say something."}
    return {"messages": [message], "stream": True, "max_tokens": tokens, "ignore_eos": True} | more


def read_until(sock: socket.socket, end: bytes) -> bytes:
    data = b""
    while not data.endswith(end):
        more = sock.recv(65536)
        if not more:
            break
        data += more
    return data


def read_all(sock: socket.socket) -> bytes:
    """Everything up to the end of file."""
    return read_until(sock, b"\0never")


def read_answer(sock: socket.socket) -> tuple[bytes, bytes]:
    """Head and body of an answer with Content-Length, or of a chunked one (framing kept)."""
    data = b""
    while b"\r\n\r\n" not in data:
        more = sock.recv(65536)
        assert more, data
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head:
        return head, body if body.endswith(b"\r\n0\r\n\r\n") else body + read_until(sock, b"\r\n0\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while len(body) < length:
        more = sock.recv(65536)
        assert more, data
        body += more
    return head, body


def ask(port: int, body: dict[str, Any] | bytes | None = None, *fields: str, **more: Any) -> tuple[bytes, bytes]:
    with connected(port) as sock:
        sock.sendall(request(body, *fields, **more))
        return read_answer(sock)


def blocks(body: bytes) -> list[bytes]:
    """The data of the events of a chunked or plain SSE body, by the crudest means."""
    return [part.partition(b"\n\n")[0] for part in body.split(b"data: ")[1:]]


def events(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(block) for block in blocks(body) if block != b"[DONE]"]


def metric(port: int, name: str) -> float:
    """The value of the sample whose line starts so."""
    _, page = ask(port, None, target="/metrics", method="GET")
    for line in page.decode().splitlines():
        if line.startswith(name):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no {name} on the page")


def wait_for(condition: Any, seconds: float = 3.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)
