"""``serve --ack-stamps`` on loopback: every event's acknowledgement, and nothing else changes for the client."""

from __future__ import annotations

import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tapproxy.nginx.sandbox import make_certificate
from tapproxy.wire.stamps import HAS_KERNEL_STAMPS
from tests.harness import DONE, SSE_HEAD, Peer, Tap, Upstream, answer, read_until, tap

pytestmark = pytest.mark.skipif(not HAS_KERNEL_STAMPS, reason="acknowledgement stamps are Linux's")

MS = 1_000_000


def request(path: str = "/three", *fields: bytes) -> bytes:
    lines = [b"POST %s HTTP/1.1" % path.encode(), b"Host: e", b"Content-Length: 2", *fields, b"", b"{}"]
    return b"\r\n".join(lines)


CLOSE = b"Connection: close"


def serve(peer: Peer) -> None:
    while True:
        head, _ = peer.request()
        path = head.split(b" ")[1]
        if path == b"/plain":
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            continue
        peer.send(SSE_HEAD)
        if path == b"/large":
            for _ in range(200):
                peer.event(b"x" * 20_000)
        else:
            for text in (b"a", b"b", b"[DONE]"):
                peer.event(text)
                time.sleep(0.01)
        if path == b"/cut":
            peer.sock.close()
            return
        peer.send(DONE)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tap]:
    with Upstream(serve) as upstream, tap(tmp_path_factory.mktemp("acked"), upstream.url, "--ack-stamps") as running:
        yield running


def events_of(record: dict[str, Any]) -> dict[str, Any]:
    events: dict[str, Any] = record["events"]
    assert record["void"] is None or record["void"] in ("loop_lag", "gc_pause", "steal")
    return events


def assert_acked_when_sent(record: dict[str, Any], count: int) -> None:
    """On loopback the client's kernel has it within the call that hands it over, and says so within 40 ms."""
    events = events_of(record)
    assert record["stamps"]["acks"] is True
    assert len(events["acked"]) == len(events["kind"]) == count
    for read_at, sent, acked in zip(events["read_at"], events["sent"], events["acked"], strict=True):
        assert read_at - MS // 10 <= acked <= sent + 200 * MS


def test_every_event_has_the_stamp_of_its_acknowledgement_also_on_a_kept_connection(running: Tap) -> None:
    with running.connect() as sock:
        for _ in range(2):
            sock.sendall(request("/kept"))
            read_until(sock, DONE)
    for record in running.records(2, path="/kept"):
        assert_acked_when_sent(record, 3)


def test_an_answer_that_closes_ends_at_once_and_its_last_event_is_stamped(running: Tap) -> None:
    with running.connect() as sock:
        sock.sendall(request("/closing", CLOSE))
        read_until(sock, DONE)
        began = time.monotonic()
        assert answer(sock) == b""
        assert time.monotonic() - began < 0.5
    assert_acked_when_sent(running.record(path="/closing"), 3)


def test_pipelined_requests_share_a_connection_and_keep_their_stamps_apart(running: Tap) -> None:
    with running.connect() as sock:
        sock.sendall(request("/piped") + request("/piped", CLOSE))
        assert answer(sock).count(b"[DONE]") == 2
    for record in running.records(2, path="/piped"):
        assert_acked_when_sent(record, 3)


def test_a_plain_answer_has_nothing_to_wait_for(running: Tap) -> None:
    with running.connect() as sock:
        sock.sendall(request("/plain"))
        read_until(sock, b"ok")
    record = running.record(path="/plain")
    assert record["stamps"]["acks"] is True
    assert record["events"]["acked"] == []


def test_an_answer_that_is_cut_is_cut_at_once_and_what_was_had_is_stamped(running: Tap) -> None:
    with running.connect() as sock:
        sock.sendall(request("/cut"))
        seen = answer(sock)
        assert seen.endswith(b"[DONE]\n\n\r\n")
    record = running.record(path="/cut")
    assert record["ended"] == "upstream_aborted"
    assert_acked_when_sent(record, 3)


def test_a_client_that_reads_late_is_seen_in_its_acknowledgements(running: Tap) -> None:
    """What its kernel has no room for is not acknowledged, however soon it was sent."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        sock.connect(running.data)
        sock.sendall(request("/large", CLOSE))
        time.sleep(0.5)
        answer(sock)
    record = running.record(path="/large")
    events = events_of(record)
    assert None not in events["acked"]
    assert events["acked"] == sorted(events["acked"])
    waited_ns = [acked - sent for acked, sent in zip(events["acked"], events["sent"], strict=True)]
    assert max(waited_ns) > 300 * MS


def test_a_client_that_leaves_in_the_middle_ends_the_exchange_at_once(running: Tap) -> None:
    with running.connect() as sock:
        sock.sendall(request("/left"))
        read_until(sock, b"data: a\n\n\r\n")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    record = running.record(path="/left")
    assert record["ended"] == "client_aborted"
    assert record["events"]["acked"][0] is not None


def test_no_descriptor_is_left_however_connections_end(running: Tap) -> None:
    (worker,) = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()

    def descriptors() -> int:
        return len(list(Path(f"/proc/{worker}/fd").iterdir()))

    def ended(path: str, *fields: bytes, reset: bool = False) -> None:
        with running.connect() as sock:
            sock.sendall(request(path, *fields))
            read_until(sock, b"data: a\n\n\r\n" if reset else DONE)
            if reset:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    ended("/ends")
    before = descriptors()
    for _ in range(5):
        ended("/ends")
        ended("/ends", CLOSE)
        ended("/ends", reset=True)
    deadline = time.monotonic() + 10
    # Two of what remains may be an idle connection to the engine that was not there before.
    while descriptors() > before + 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert descriptors() <= before + 2


def test_a_worker_with_idle_stamped_connections_rests(running: Tap) -> None:
    (worker,) = (
        int(pid) for pid in Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
    )

    def ticks() -> int:
        fields = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    with running.connect() as sock:
        sock.sendall(request("/idle"))
        read_until(sock, DONE)
        before = ticks()
        time.sleep(0.5)
        assert ticks() - before < 20  # of 50


def test_on_a_fresh_connection_the_stamp_is_within_the_call_that_hands_over(running: Tap) -> None:
    """Later the client's kernel may hold its acknowledgements back; it does not at the start of a connection."""
    for _ in range(3):
        with running.connect() as sock:
            sock.sendall(request("/fresh"))
            read_until(sock, DONE)
    apart_ns = []
    for record in running.records(3, path="/fresh"):
        events = record["events"]
        apart_ns += [abs(acked - sent) for acked, sent in zip(events["acked"], events["sent"], strict=True)]
    assert sorted(apart_ns)[len(apart_ns) // 2] < MS


@pytest.mark.parametrize("acks", [("--ack-stamps",), ()], ids=["stamped", "not stamped"])
def test_a_stream_flows_through_tls_on_the_listener(tmp_path: Path, acks: tuple[str, ...]) -> None:
    """A write-buffer limit of zero paused TLS transports for good: they compare otherwise than plain ones."""
    certificate, key = make_certificate(tmp_path)
    flags = (*acks, "--tls-cert", str(certificate), "--tls-key", str(key))
    context = ssl.create_default_context(cafile=str(certificate))
    with Upstream(serve) as upstream, tap(tmp_path / "data", upstream.url, *flags) as running:
        with context.wrap_socket(running.connect(), server_hostname="localhost") as sock:
            sock.sendall(request("/kept"))
            read_until(sock, DONE)
            sock.sendall(request("/closing", CLOSE))
            assert answer(sock).endswith(DONE)
        records = running.records(2)
    for record in records:
        assert None not in record["events"]["sent"]
        assert record["downstream"]["stalled_ns"] == 0
        if acks:
            assert_acked_when_sent(record, 3)


def test_a_tap_that_is_stopped_writes_the_records_that_wait(tmp_path: Path) -> None:
    """The client's kernel has no room for the rest of the answer: its acknowledgement will not come."""
    with Upstream(serve) as upstream, tap(tmp_path, upstream.url, "--ack-stamps") as running, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(running.data)
        sock.sendall(request("/three"))
        read_until(sock, DONE)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(10) == 0
        assert_acked_when_sent(running.record(), 3)


def test_without_the_flag_nothing_is_stamped(tmp_path: Path) -> None:
    with Upstream(serve) as upstream, tap(tmp_path, upstream.url) as running:
        with running.connect() as sock:
            sock.sendall(request())
            read_until(sock, DONE)
        record = running.record()
    assert "acked" not in record["events"]
    assert record["stamps"]["acks"] is False
