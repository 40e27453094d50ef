"""Limits of time and size: each ends what went over it, says so, and costs nobody else anything."""

from __future__ import annotations

import resource
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tapproxy.config import load_serve_config
from tests.faults.lab import deaf_address, keepalive_of_peers, reset, taken_by_peer, wait_until, worker_of, written
from tests.harness import DONE, SSE_HEAD, Peer, Tap, Upstream, answer, read_until, tap

KIB = 1024
GET = b"GET /x HTTP/1.1\r\nHost: e\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CLOSE_DELIMITED = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


MEGABYTE = bytes(1_000_000)


def ok(peer: Peer) -> None:
    while True:
        peer.request()
        peer.send(OK)


def by_path(peer: Peer) -> None:
    """What the upstream does where its limits are not the matter."""
    while True:
        head, _ = peer.request()
        path = head.split(b" ")[1]
        if path == b"/silent":
            peer.closed_within(15)
            return
        if path == b"/cut":
            peer.send(SSE_HEAD)
            peer.event(b"a")
            time.sleep(0.05)
            return
        if path == b"/large":
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(MEGABYTE), MEGABYTE))
        elif path == b"/x":
            peer.send(OK)
        else:
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(path), path))


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tap]:
    """A tap that waits half a second for a head."""
    flags = ("--header-timeout", "500ms")
    with Upstream(by_path) as upstream, tap(tmp_path_factory.mktemp("tap"), upstream.url, *flags) as running:
        yield running
    assert not upstream.failures


# -- the request head


def test_a_slow_head_is_answered_408_and_closed(hasty: Tap) -> None:
    with hasty.connect() as sock:
        started = time.monotonic()
        for byte in b"GET /slow HTTP/1.1\r\nHo":
            sock.sendall(bytes([byte]))
            time.sleep(0.01)
        got = answer(sock)
    assert got.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert 0.5 <= time.monotonic() - started < 3
    wait_until(lambda: [record["ended"] for record in written(hasty.directory)] == ["rejected"], "its record")


def test_a_client_that_says_nothing_is_no_slow_head(hasty: Tap) -> None:
    # It may open its connection ahead of its first request, as browsers and pools do.
    with hasty.connect() as sock:
        time.sleep(0.8)
        sock.sendall(GET)
        assert read_until(sock, b"ok").startswith(b"HTTP/1.1 200 ")


def test_slow_heads_starve_nobody(hasty: Tap) -> None:
    slow = [hasty.connect() for _ in range(200)]
    for sock in slow:
        sock.sendall(b"POST /slow HTTP/1.1\r\nHost: e\r\nX-")
    with hasty.connect() as sock:
        for _ in range(20):
            started = time.monotonic()
            sock.sendall(GET)
            read_until(sock, b"ok")
            assert time.monotonic() - started < 0.5
    for sock in slow:
        assert answer(sock).startswith(b"HTTP/1.1 408 ")
        sock.close()


def head_of(size: int) -> bytes:
    start = b"GET /x HTTP/1.1\r\nHost: e\r\nX-Long: "
    return start + b"a" * (size - len(start) - 4) + b"\r\n\r\n"


def fields(count: int) -> bytes:
    return b"GET /x HTTP/1.1\r\nHost: e\r\n" + b"".join(b"X-%d: a\r\n" % n for n in range(count - 1)) + b"\r\n"


SIZES = [
    pytest.param(head_of(64 * KIB), b"200", id="64_KiB"),
    pytest.param(head_of(64 * KIB + 1), b"431", id="64_KiB_and_one_byte"),
    pytest.param(b"GET /" + b"a" * 70 * KIB, b"431", id="a_line_without_end"),
    pytest.param(b"GET /x HTTP/1.1\r\nHost: e\r\n" + b"X-A: b\r\n" * 9 * KIB, b"431", id="fields_without_end"),
    pytest.param(fields(256), b"200", id="256_fields"),
    pytest.param(fields(257), b"431", id="257_fields"),
]


@pytest.mark.parametrize(("request_bytes", "status"), SIZES)
def test_a_head_may_have_64_kib_and_256_fields(hasty: Tap, request_bytes: bytes, status: bytes) -> None:
    with hasty.connect() as sock:
        sock.sendall(request_bytes)
        got = read_until(sock, b"\r\n\r\n")
        assert got.startswith(b"HTTP/1.1 " + status)
        if status == b"431":
            assert b"<RST>" not in answer(sock)


# -- reading ahead


def test_no_more_than_64_kib_are_read_ahead(hasty: Tap) -> None:
    first = b"GET /silent HTTP/1.1\r\nHost: e\r\n\r\n"
    with hasty.connect() as sock:
        sock.sendall(first)
        time.sleep(0.1)
        sock.setblocking(False)
        sent = len(first)
        while True:
            try:
                sent += sock.send(GET * 20_000)
            except BlockingIOError:
                break
        time.sleep(0.2)
        ahead = taken_by_peer(sock, sent) - len(first)
        # A plain close would stand behind what was sent, which nobody reads.
        reset(sock)
        assert ahead <= 64 * KIB


def test_many_pipelined_requests_are_answered_in_order(hasty: Tap) -> None:
    """More of them than are read ahead, by a client that reads only then."""
    count = 3000
    requests = b"".join(b"GET /%04d HTTP/1.1\r\nHost: e\r\nX-Fill: %s\r\n\r\n" % (n, b"a" * 60) for n in range(count))
    with hasty.connect() as sock:
        sock.sendall(requests)
        got = b""
        while not got.endswith(b"/%04d" % (count - 1)):
            data = sock.recv(65536)
            assert data
            got += data
    assert got == b"".join(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n/%04d" % n for n in range(count))


def test_what_a_client_sends_after_its_last_request_does_not_cost_it_the_answer(hasty: Tap) -> None:
    # Once the connection was closed over unread bytes, and the reset took the answer away.
    with hasty.connect() as sock:
        sock.sendall(b"GET /large HTTP/1.1\r\nHost: e\r\nConnection: close\r\n\r\n" + bytes(400_000))
        time.sleep(0.2)
        assert answer(sock).endswith(b"\r\n\r\n" + MEGABYTE)


def test_a_cut_answer_is_seen_to_be_cut_by_a_client_that_knows_no_chunks(hasty: Tap) -> None:
    with hasty.connect() as sock:
        sock.sendall(b"GET /cut HTTP/1.0\r\n\r\n")
        assert answer(sock).endswith(b"data: a\n\n\r\n<RST>")


# -- time limits towards the upstream

LIMITS = ("--connect-timeout", "300ms", "--head-timeout", "400ms", "--idle-timeout", "400ms")


def steady(peer: Peer) -> None:
    """An event every 150 ms, longer than both limits."""
    peer.request()
    peer.send(SSE_HEAD)
    for _ in range(6):
        time.sleep(0.15)
        peer.event(b"a")
    peer.send(DONE)


def much(peer: Peer) -> None:
    """6 MB at once."""
    peer.request()
    peer.send(SSE_HEAD)
    for _ in range(800):
        peer.event(b"x" * 8000)
    peer.send(DONE)


SCRIPTS = {b"/steady": steady, b"/much": much, b"/upload": ok}


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tap]:
    """A tap with short limits before an upstream that does by the path."""

    def script(peer: Peer) -> None:
        peer.buffer = head = peer.head()
        SCRIPTS[head.split(b" ")[1]](peer)

    with Upstream(script) as upstream, tap(tmp_path_factory.mktemp("tap"), upstream.url, *LIMITS) as running:
        yield running
    assert not upstream.failures


def test_connecting_ends_at_its_limit(tmp_path: Path) -> None:
    with (
        deaf_address() as (host, port),
        tap(tmp_path, f"http://{host}:{port}", *LIMITS) as running,
    ):
        with running.connect() as sock:
            started = time.monotonic()
            sock.sendall(GET)
            got = read_until(sock, b"}}\n")
        assert 0.3 <= time.monotonic() - started < 3
        assert got.startswith(b"HTTP/1.1 504 ")
        assert f"no connection to {host}:{port} within 0.3 s".encode() in got
        record = running.record()
        assert (record["ended"], record["status"]) == ("timeout", 504)


def test_a_stream_that_goes_on_is_never_idle(limited: Tap) -> None:
    with limited.connect() as sock:
        sock.sendall(b"GET /steady HTTP/1.1\r\nHost: e\r\n\r\n")
        assert read_until(sock, DONE)
    assert limited.record(path="/steady")["ended"] == "complete"


def test_a_client_that_does_not_read_makes_no_idle_upstream(limited: Tap) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
        sock.connect(limited.data)
        sock.sendall(b"GET /much HTTP/1.1\r\nHost: e\r\n\r\n")
        time.sleep(1.0)
        got = b""
        while not got.endswith(DONE):
            data = sock.recv(1 << 20)
            assert data
            got = got[-8:] + data
    assert limited.record(path="/much")["ended"] == "complete"


def test_the_heads_limit_begins_when_the_request_is_complete(limited: Tap) -> None:
    with limited.connect() as sock:
        sock.sendall(b"POST /upload HTTP/1.1\r\nHost: e\r\nContent-Length: 6\r\n\r\n")
        for byte in b"upload":
            time.sleep(0.1)
            sock.sendall(bytes([byte]))
        assert read_until(sock, b"\r\n\r\n").startswith(b"HTTP/1.1 200 ")


def test_idle_connections_end_at_their_limits_on_both_sides(tmp_path: Path) -> None:
    upstream_closed: list[float | None] = []

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(OK)
        upstream_closed.append(peer.closed_within(10))

    flags = ("--client-keepalive", "600ms", "--upstream-keepalive", "300ms")
    with Upstream(script) as upstream, tap(tmp_path, upstream.url, *flags) as running, running.connect() as sock:
        sock.sendall(GET)
        read_until(sock, b"ok")
        started = time.monotonic()
        assert answer(sock) == b""
        assert 0.5 < time.monotonic() - started < 3
        assert upstream_closed[0] is not None
        assert 0.2 < upstream_closed[0] < 1.5


def test_the_limits_of_idle_connections_suit_vllm_and_nginx_by_default() -> None:
    # vLLM closes after 5 s: ours to it end before. nginx keeps its own for 60 s: ours from it end after.
    config = load_serve_config(None, {"upstream": "http://127.0.0.1:1"})
    assert config.upstream_keepalive_s < 5
    assert config.client_keepalive_s > 60
    assert (config.connect_timeout_s, config.shutdown_grace_s) == (10, 30)
    assert (config.head_timeout_s, config.idle_timeout_s) == (None, None)


def test_a_host_that_vanishes_is_found_out_although_nothing_is_sent(hasty: Tap) -> None:
    """No FIN comes from a host that lost its power; waiting for a head has no limit by default. TCP itself must ask."""
    with hasty.connect() as sock:
        sock.sendall(b"GET /silent HTTP/1.1\r\nHost: e\r\n\r\n")
        time.sleep(0.2)
        assert keepalive_of_peers(worker_of(hasty)) == {True}


def test_a_worker_may_have_as_many_sockets_as_the_system_allows(tmp_path: Path) -> None:
    """Past the limit clients are turned away without an answer, and a 502 blames the engine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, hard), hard))
    try:
        with Upstream(ok) as upstream, tap(tmp_path, upstream.url) as running:
            assert resource.prlimit(worker_of(running), resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- the end of the grace period


def test_the_end_of_the_grace_period_cuts_a_chunked_answer_visibly(tmp_path: Path) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(SSE_HEAD)
        peer.event(b"a")
        peer.closed_within(15)

    with Upstream(script) as upstream, tap(tmp_path, upstream.url, "--shutdown-grace", "1s") as running:
        with running.connect() as sock:
            sock.sendall(GET)
            read_until(sock, b"data: a\n\n\r\n")
            started = time.monotonic()
            running.process.send_signal(signal.SIGTERM)
            assert not answer(sock).endswith(DONE)
            assert 0.8 < time.monotonic() - started < 5
        assert running.process.wait(10) == 0
        assert running.record()["ended"] == "shutdown"


CUT_BY = [pytest.param(1, id="grace_is_over"), pytest.param(2, id="second_signal")]


@pytest.mark.parametrize("signals", CUT_BY)
def test_a_close_delimited_answer_that_is_cut_does_not_look_whole(tmp_path: Path, signals: int) -> None:
    """Its client reads slowly, so that much is still on its way when the tap ends: only a reset can say "not all"."""

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(CLOSE_DELIMITED)
        while True:
            peer.send(b"data: " + b"x" * 8000 + b"\n\n")

    with Upstream(script) as upstream, tap(tmp_path, upstream.url, "--shutdown-grace", "1s") as running:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
            sock.connect(running.data)
            sock.sendall(b"GET /x HTTP/1.0\r\n\r\n")
            time.sleep(0.3)
            for _ in range(signals):
                running.process.send_signal(signal.SIGTERM)
                time.sleep(0.2)
            assert running.process.wait(10) == 0
            assert answer(sock).endswith(b"<RST>")
        assert running.record()["reason"] == "the tap was stopped before the answer was complete"
