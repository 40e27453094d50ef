"""A tap on a link of 20 ms each way: what it says of the network, and that it blames nobody else for it.

The link is made of network namespaces and takes root; without it these tests are skipped and say so.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tapproxy.core import metrics
from tapproxy.core.record import Record
from tapproxy.wire.link import End
from tests.e2e.helpers import until_quiet
from tests.harness import DONE, SSE_HEAD, Peer, Tap, Upstream, read_until, tap

ROOT = Path(__file__).resolve().parents[2]
MS = 1_000_000
EVENTS, GAP_S = 20, 0.025
RTT_NS = 40 * MS
REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nContent-Length: 2\r\n\r\n{}"


def stream(peer: Peer) -> None:
    while True:
        peer.request()
        peer.send(SSE_HEAD)
        for _ in range(EVENTS):
            time.sleep(GAP_S)
            peer.event(b'{"id":"1","choices":[{"index":0,"delta":{"content":"x"}}]}')
        peer.send(DONE)


def ask(running: Tap, end: End) -> None:
    """One answer read to its end, on a connection of its own, from that end of the link."""
    with end.inside():
        sock = running.connect()
    with sock:
        sock.sendall(REQUEST)
        read_until(sock, DONE)


def record_of(stored: dict[str, Any]) -> Record:
    record = Record.from_dict(stored)
    assert record.ended == "complete"
    assert len(record.events.kind) == EVENTS
    return record


def own_delay_ns(record: Record) -> float:
    """What the tap added to an event, in the median."""
    pairs = zip(metrics.queueing_ns(record), metrics.forward_delay_ns(record), strict=True)
    return statistics.median(queued + forward for queued, forward in pairs)


def test_the_link_takes_its_time_and_nothing_more(ends: tuple[End, End]) -> None:
    a, b = ends
    with b.inside():
        listener = socket.create_server((b.address, 0))
    with listener, a.inside():
        began_ns = time.monotonic_ns()
        with socket.create_connection(listener.getsockname(), 5):
            took_ns = time.monotonic_ns() - began_ns
    assert RTT_NS <= took_ns < 4 * RTT_NS


def test_each_end_has_a_loopback_of_its_own(ends: tuple[End, End]) -> None:
    a, b = ends
    with a.inside():
        listener = socket.create_server(("127.0.0.1", 0))
        socket.create_connection(listener.getsockname(), 5).close()
    with listener, b.inside(), pytest.raises(ConnectionRefusedError):
        socket.create_connection(listener.getsockname(), 5)


def test_acknowledgements_tell_when_a_distant_client_had_each_event(ends: tuple[End, End], tmp_path: Path) -> None:
    """An acknowledgement comes a round trip after the bytes were sent; the events themselves are not slower for it."""
    a, b = ends
    asked = 0
    with (
        a.inside(),
        Upstream(stream) as upstream,
        tap(tmp_path, upstream.url, "--listen", f"{a.address}:0", "--ack-stamps") as running,
    ):

        def attempt() -> str | None:
            nonlocal asked
            ask(running, b)
            asked += 1
            record = record_of(running.records(asked)[-1])
            acked, sent = record.events.acked, record.events.sent
            assert acked is not None
            took_ns = [at - gone for at, gone in zip(acked, sent, strict=True) if at is not None and gone is not None]
            assert len(took_ns) == EVENTS
            # ``sent`` is read after the write returns: a process that was put aside in between stamps it late.
            assert min(took_ns) >= 30 * MS
            least_ns, p50_ns, own_ns = record.downstream.min_rtt_ns, statistics.median(took_ns), own_delay_ns(record)
            assert least_ns is not None
            assert least_ns >= RTT_NS
            if max(p50_ns, least_ns) < RTT_NS + 5 * MS and own_ns < MS:
                return None
            figures = [f"{value_ns / MS:.2f} ms" for value_ns in (p50_ns, least_ns, own_ns)]
            return "acknowledged after {}, least round trip {}, {} in the tap".format(*figures)

        until_quiet(attempt)


def test_a_distant_engine_is_a_round_trip_of_the_upstream_connection(ends: tuple[End, End], tmp_path: Path) -> None:
    a, b = ends
    asked = 0
    upstream = Upstream(stream, host=b.address)
    with b.inside():
        upstream.__enter__()
    try:
        with a.inside(), tap(tmp_path, upstream.url) as running:

            def attempt() -> str | None:
                nonlocal asked
                ask(running, a)
                asked += 1
                record = record_of(running.records(asked)[-1])
                assert record.upstream.min_rtt_ns is not None
                assert record.upstream.min_rtt_ns >= RTT_NS
                assert record.downstream.min_rtt_ns is not None
                assert record.downstream.min_rtt_ns < MS
                if record.upstream.min_rtt_ns < RTT_NS + 5 * MS and own_delay_ns(record) < MS:
                    return None
                return f"{record.upstream.min_rtt_ns / MS:.1f} ms, {own_delay_ns(record) / MS:.2f} ms in the tap"

            until_quiet(attempt)
    finally:
        upstream.__exit__(None, None, None)


HOLDER = """
import sys, time
from tapproxy.wire.link import link
with link(1) as (a, b):
    print(a.pid, b.pid, flush=True)
    time.sleep(60)
"""


def test_namespaces_go_with_whoever_made_them_even_when_it_is_killed(ends: tuple[End, End]) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        process.send_signal(signal.SIGKILL)
        process.wait()
    deadline = time.monotonic() + 5
    while any(_runs(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in pids if _runs(pid)] == []


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        # A zombie whose parent is gone may wait for a careless init; its namespace is gone.
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
