"""A fault in the tap itself: the exchange ends visibly, the record says whose fault it was, nobody else notices."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import DONE, SSE_HEAD, Peer, Tap, Upstream, interpreted, read_until, tap

# Loaded by every Python process of the tap before its own code.
FAULTS = """
import tapproxy.core.http1 as http1
whole = http1.BodyReader.feed
def feed(self, data):
    if b"MINE" in data:
        raise RuntimeError("a prompt nobody may see")
    return whole(self, data)
http1.BodyReader.feed = feed
find = http1.ResponseHeads.take
def take(self):
    if b"X-Mine" in self.rest:
        raise KeyError("a prompt nobody may see")
    return find(self)
http1.ResponseHeads.take = take
"""

pytestmark = interpreted


def engine_script(peer: Peer) -> None:
    while True:
        head, _ = peer.request()
        if b"/head" in head:
            peer.send(b"HTTP/1.1 200 OK\r\nX-Mine: 1\r\nContent-Length: 0\r\n\r\n")
            continue
        peer.send(SSE_HEAD)
        peer.event(b"a")
        time.sleep(0.05)
        peer.event(b"MINE" if b"/body" in head else b"b")
        peer.send(DONE)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tap]:
    (tmp_path / "sitecustomize.py").write_text(FAULTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with Upstream(engine_script) as engine, tap(tmp_path / "records", engine.url) as started:
        yield started


def get(running: Tap, path: bytes) -> bytes:
    with running.connect() as sock:
        sock.sendall(b"GET %s HTTP/1.1\r\nHost: a\r\n\r\n" % path)
        out = b""
        while data := sock.recv(65536):
            out += data
        return out


def test_a_fault_in_the_middle_of_an_answer_cuts_it_and_blames_nobody_else(running: Tap) -> None:
    cut = get(running, b"/body")
    assert b"data: a" in cut
    assert not cut.endswith(DONE)
    record = running.record(path="/body")
    assert (record["ended"], record["void"]) == ("shutdown", "measuring_failed")
    assert re.fullmatch(r"tapproxy failed \(RuntimeError at sitecustomize.py:\d+\); please report it", record["reason"])
    # The tap goes on.
    with running.connect() as sock:
        sock.sendall(b"GET /fine HTTP/1.1\r\nHost: a\r\n\r\n")
        assert read_until(sock, DONE).count(b"data: ") == 2
    assert running.record(path="/fine")["ended"] == "complete"


def test_a_fault_before_the_answer_is_a_503_in_our_name(running: Tap) -> None:
    answer = get(running, b"/head")
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"tapproxy failed (KeyError at " in answer
    assert b"a prompt" not in answer
    record = running.record(path="/head")
    assert (record["ended"], record["status"], record["void"]) == ("shutdown", 503, "measuring_failed")
