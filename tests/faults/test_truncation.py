"""An upstream that dies leaves an answer that is seen to be cut, in every framing, however its end arrives.

The worst way is that the last data and the end come together: the worker is stopped while the upstream sends both, so
that it finds both in one look. The loop's own polling (libuv) tells of a reset once; where that once is spent on
the data before it, nobody hears of the reset again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.faults.lab import status, wait_until, worker_of
from tests.harness import DONE, SSE_HEAD, Peer, Tap, Upstream, answer, read_until, tap

# %s: a path that is the test's own, to tell its records by.
GET = b"GET %s HTTP/1.1\r\nHost: e\r\n\r\n"
GET_10 = b"GET %s HTTP/1.0\r\n\r\n"
POST = b"POST %s HTTP/1.1\r\nHost: e\r\nContent-Length: 2\r\n\r\n{}"
EVENT = b"9\r\ndata: a\n\n\r\n"
WAIT_S = 3.0


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process stands still meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "it stands")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Bench:
    """One tap for all tests here, and an upstream whose script each test gives."""

    def __init__(self, running: Tap, upstream: Upstream) -> None:
        self.running = running
        self.worker = worker_of(running)
        self.path = b"/0"
        self._upstream = upstream
        self._number = 0
        self._connections_before = 0

    def stage(self, script: Callable[[Peer], None]) -> None:
        """From here on the upstream does this, and the requests have a new path."""
        self._number += 1
        self.path = b"/%d" % self._number
        self._upstream.script = script
        self._connections_before = self._upstream.connections

    @property
    def connections(self) -> int:
        """How many the upstream got since then."""
        return self._upstream.connections - self._connections_before

    def records(self, count: int) -> list[dict[str, Any]]:
        return self.running.records(count, path=self.path.decode())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with Upstream(lambda _: None) as upstream, tap(tmp_path_factory.mktemp("tap"), upstream.url) as running:
        yield Bench(running, upstream)
    assert not upstream.failures


@pytest.fixture
def bench(shared: Bench) -> Bench:
    # A connection that an earlier test left in the pool would take the request to its script.
    wait_until(lambda: status(shared.running)["upstream_connections"] == 0, "an empty pool")
    return shared


@dataclass(frozen=True)
class Way:
    """What the upstream sends first, what together with its end, and what the client must see."""

    request: bytes
    first: bytes
    last: bytes
    ended: str
    got: bytes  # all that the client gets; of a 502 its beginning


LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"
CLOSING = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
CLOSING_SEEN = CLOSING.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
BAD_GATEWAY = b"HTTP/1.1 502 Bad Gateway\r\n"
WAYS = {
    "chunked": Way(GET, SSE_HEAD + EVENT, EVENT, "upstream_aborted", SSE_HEAD + EVENT + EVENT),
    "within_a_chunk": Way(POST, SSE_HEAD, b"ff\r\ndata: a", "upstream_aborted", SSE_HEAD + b"ff\r\ndata: a"),
    "content_length": Way(GET, LENGTH + b"half", b"half", "upstream_aborted", LENGTH + b"halfhalf"),
    "in_the_head": Way(POST, b"HTTP/1.1 200 OK\r\nContent-", b"Type: a\r\n", "upstream_malformed", BAD_GATEWAY),
    "head_alone": Way(
        GET, b"HTTP/1.1 2", b"00 OK\r\nContent-Length: 9\r\n\r\n", "upstream_aborted", b"HTTP/1.1 200 OK\r\n"
    ),
}


@pytest.mark.parametrize("by_reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_last_data_and_the_end_arrive_together(way: Way, by_reset: bool, bench: Bench) -> None:
    stands = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(way.first)
        assert stands.wait(WAIT_S)
        peer.send(way.last)
        if by_reset:
            peer.reset()

    bench.stage(script)
    with bench.running.connect() as sock:
        sock.sendall(way.request % bench.path)
        wait_until(lambda: bench.connections, "the request at the upstream")
        time.sleep(0.05)
        with stopped(bench.worker):
            stands.set()
            time.sleep(0.1)
        sock.settimeout(WAIT_S)
        got = b""
        while data := sock.recv(65536):
            got += data
            if b"502" in got[:12] and got.endswith(b"}}\n"):
                break
        assert got == way.got or (len(way.got) < 30 and got.startswith(way.got))
        record = bench.records(1)[0]
        assert record["ended"] == way.ended
        assert record["reason"]


@pytest.mark.parametrize("by_reset", [False, True], ids=["fin", "rst"])
def test_a_whole_answer_is_whole_though_its_connection_ends_with_it(by_reset: bool, bench: Bench) -> None:
    """And the next request goes elsewhere: the connection that came back to the pool is dead."""
    stands = threading.Event()
    body = b"x" * 60_000

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body[:10])
        assert stands.wait(WAIT_S)
        peer.send(body[10:])
        if by_reset:
            peer.reset()

    bench.stage(script)
    with bench.running.connect() as sock:
        for _ in range(2):
            sock.sendall(POST % bench.path)
            read_until(sock, b"\r\n\r\n" + body[:10])
            with stopped(bench.worker):
                stands.set()
                time.sleep(0.1)
            sock.settimeout(WAIT_S)
            got = 10
            while got < len(body):
                data = sock.recv(65536)
                assert data
                got += len(data)
        assert [record["ended"] for record in bench.records(2)] == ["complete", "complete"]
        assert bench.connections == 2


def test_a_close_delimited_answer_is_whole_when_its_connection_is_closed(bench: Bench) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(CLOSING + b"data: a\n\n")

    bench.stage(script)
    with bench.running.connect() as sock:
        sock.sendall(GET_10 % bench.path)
        assert answer(sock) == CLOSING_SEEN + b"data: a\n\n"
        assert bench.records(1)[0]["ended"] == "complete"


def test_a_close_delimited_answer_that_is_reset_is_reset(bench: Bench) -> None:
    stands = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(CLOSING + b"data: a\n\n")
        assert stands.wait(WAIT_S)
        peer.send(b"data: b\n\n")
        peer.reset()

    bench.stage(script)
    with bench.running.connect() as sock:
        sock.sendall(GET_10 % bench.path)
        read_until(sock, b"data: a\n\n")
        with stopped(bench.worker):
            stands.set()
            time.sleep(0.1)
        # What was sent arrives; then the client is told that it is not all.
        assert answer(sock, timeout_s=WAIT_S) == b"data: b\n\n<RST>"
        assert bench.records(1)[0]["ended"] == "upstream_aborted"


@pytest.mark.parametrize("by_reset", [False, True], ids=["fin", "rst"])
def test_an_upstream_that_dies_before_a_client_that_does_not_read_is_seen(by_reset: bool, bench: Bench) -> None:
    dead = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(SSE_HEAD)
        peer.sock.settimeout(0.3)
        # As much as goes; then the end.
        with contextlib.suppress(TimeoutError):
            while True:
                peer.event(b"x" * 8000)
        if by_reset:
            peer.reset()
        else:
            peer.sock.close()
        dead.set()

    bench.stage(script)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        sock.connect(bench.running.data)
        sock.sendall(GET % bench.path)
        assert dead.wait(10)
        time.sleep(0.2)
        sock.settimeout(WAIT_S)
        got = b""
        while data := sock.recv(1 << 20):
            got = got[-8:] + data
        assert not got.endswith(DONE)
        assert bench.records(1)[0]["ended"] == "upstream_aborted"


@pytest.mark.parametrize("by_reset", [False, True], ids=["fin", "rst"])
def test_an_upstream_that_dies_in_the_upload_is_a_502(by_reset: bool, bench: Bench) -> None:
    def script(peer: Peer) -> None:
        peer.head()
        if by_reset:
            peer.reset()

    bench.stage(script)
    with bench.running.connect() as sock:
        sock.sendall(b"POST %s HTTP/1.1\r\nHost: e\r\nContent-Length: 10000000\r\n\r\n" % bench.path + bytes(1000))
        assert read_until(sock, b"\r\n\r\n").startswith(BAD_GATEWAY)
        record = bench.records(1)[0]
        assert (record["ended"], record["request"]["body_end"]) == ("upstream_malformed", None)


def test_an_upstream_that_dies_between_requests_is_forgotten(bench: Bench) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        time.sleep(0.05)
        peer.reset()

    bench.stage(script)
    for _ in range(5):
        with bench.running.connect() as sock:
            sock.sendall(POST % bench.path)
            read_until(sock, b"ok")
        time.sleep(0.1)
    assert [record["ended"] for record in bench.records(5)] == ["complete"] * 5
    # Sooner than after the 3 s for which an idle one is kept.
    wait_until(lambda: status(bench.running)["upstream_connections"] == 0, "no dead connection is kept", 1.0)
