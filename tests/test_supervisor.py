"""The parent process: restarts a dead worker, serves the admin port, says findings once."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.request
from pathlib import Path

from tests.harness import DONE, SSE_HEAD, Peer, Tap, Upstream, read_until, tap

REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nContent-Length: 2\r\n\r\n{}"


def stream(peer: Peer) -> None:
    while True:
        peer.request()
        peer.send(SSE_HEAD)
        peer.event(b'{"id":"chatcmpl-1","choices":[]}')
        peer.send(DONE)


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def wait_for_status(running: Tap, key: str, value: object) -> dict[str, object]:
    deadline = time.monotonic() + 15
    status: dict[str, object] = {}
    while time.monotonic() < deadline:
        status = json.loads(running.admin_get("/api/status"))
        if status[key] == value:
            return status
        time.sleep(0.05)
    raise AssertionError(f"{key} is {status.get(key)}, expected {value}")


def test_a_worker_that_dies_is_started_again(tmp_path: Path) -> None:
    with Upstream(stream) as upstream, tap(tmp_path, upstream.url, "--workers", "2") as running:
        pids = children(running.process.pid)
        assert len(pids) == 2
        os.kill(pids[0], signal.SIGKILL)
        wait_for_status(running, "worker_restarts", 1)
        wait_for_status(running, "workers_alive", 2)
        with running.connect() as sock:
            sock.sendall(REQUEST)
            read_until(sock, DONE)
        assert running.record()["ended"] == "complete"


def test_the_open_exchanges_of_a_dead_worker_are_recorded(tmp_path: Path) -> None:
    def one_event(peer: Peer) -> None:
        peer.request()
        peer.send(SSE_HEAD)
        peer.event(b"{}")
        peer.closed_within(10)

    with Upstream(one_event) as upstream, tap(tmp_path, upstream.url) as running, running.connect() as sock:
        sock.sendall(REQUEST.replace(b"Host: e", b"Host: e\r\nX-Request-Id: lost-1"))
        read_until(sock, b"{}\n\n\r\n")
        time.sleep(1)  # exchanges are announced a few times a second
        os.kill(children(running.process.pid)[0], signal.SIGKILL)
        record = running.record()
        assert (record["ended"], record["request_id"], record["status"]) == ("shutdown", "lost-1", 200)
        assert "died" in record["reason"]


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    with Upstream(stream) as upstream, tap(tmp_path, upstream.url) as running:
        (pid,) = children(running.process.pid)
        running.process.kill()
        running.process.wait(5)
        deadline = time.monotonic() + 10
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.kill(pid, 0)
                time.sleep(0.05)
            raise AssertionError("the worker outlived its parent")


def test_the_admin_port_shows_records_metrics_and_status(tmp_path: Path) -> None:
    with Upstream(stream) as upstream, tap(tmp_path, upstream.url, "--name", "inner") as running:
        assert running.admin_get("/healthz") == "ok\n"
        with running.connect() as sock:
            for _ in range(2):
                sock.sendall(REQUEST)
                read_until(sock, DONE)
        stored = running.records(2)
        wait_for_status(running, "handled", 2)
        shown = json.loads(running.admin_get("/api/records"))["records"]
        assert [record["id"] for record in shown] == [record["id"] for record in reversed(stored)]
        assert json.loads(running.admin_get(f"/api/records/{stored[0]['id']}"))["response_id"] == "chatcmpl-1"
        assert "tapproxy_requests_total{" in running.admin_get("/metrics")
        with urllib.request.urlopen(f"http://{running.admin[0]}:{running.admin[1]}/", timeout=5) as page:
            assert page.status == 200


def test_a_finding_is_said_once_with_what_it_means(tmp_path: Path) -> None:
    with Upstream(stream) as upstream, tap(tmp_path, upstream.url) as running:
        with running.connect() as sock:
            for _ in range(3):
                sock.sendall(REQUEST)
                read_until(sock, DONE)
        assert [record["findings"] for record in running.records(3)] == [["x-accel-buffering-missing"]] * 3
        running.process.send_signal(signal.SIGTERM)
        assert running.process.stderr is not None
        said = running.process.stderr.read()
        assert said.count("x-accel-buffering-missing") == 1
        assert "It matters where an nginx in front buffers" in said


def test_sighup_reopens_the_record_file(tmp_path: Path) -> None:
    with Upstream(stream) as upstream, tap(tmp_path, upstream.url) as running, running.connect() as sock:
        sock.sendall(REQUEST)
        read_until(sock, DONE)
        running.record()
        (file,) = tmp_path.glob("records-*.jsonl")
        file.rename(tmp_path / "moved.jsonl")
        running.process.send_signal(signal.SIGHUP)
        sock.sendall(REQUEST)
        read_until(sock, DONE)
        running.record()
        assert len((tmp_path / "moved.jsonl").read_text().splitlines()) == 1
