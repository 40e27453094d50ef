"""Every captured stream once more, through a real tap, cut where the engine never cut it.

    pytest -o addopts= tests/full

Whole in one write, or in pieces that end anywhere (within a chunk's size line, a CRLF, a UTF-8 letter): the client
gets the same bytes, and the record tells the same events. Only when each arrived may differ.
"""

from __future__ import annotations

import random
import re
import time
from typing import Any

import pytest

from tests import captures
from tests.e2e.test_replay import STREAMS, asked, relayed
from tests.harness import Peer, Upstream, answer, tap

# (name, most bytes in a piece): each piece is a write of its own.
CUTS = [("whole", 1 << 30), ("in halves of chunks", 150), ("in crumbs", 7)]
# Beyond this a capture in crumbs takes minutes and shows nothing new.
MOST_BYTES = 20_000


def pieces(wire: bytes, most: int, name: str) -> list[bytes]:
    """The same every time, and another for every capture."""
    drawn = random.Random(name)
    out, at = [], 0
    while at < len(wire):
        size = min(most, len(wire)) if most > len(wire) else drawn.randint(1, most)
        out.append(wire[at : at + size])
        at += size
    return out


def told(record: dict[str, Any]) -> dict[str, Any]:
    """What a cut must not change."""
    events = record["events"]
    return {
        "events": {key: events[key] for key in ("kind", "end_offset", "tokens")},
        **{key: record[key] for key in ("ended", "status", "response_id", "model", "usage", "engine", "unread_events")},
    }


@pytest.mark.parametrize("most", [cut[1] for cut in CUTS], ids=[cut[0] for cut in CUTS])
def test_streams_read_the_same_wherever_they_are_cut(most: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    names = [name for name in STREAMS if most > 1000 or len(captures.raw(name)) <= MOST_BYTES]

    def play(cut: int) -> Any:
        def script(peer: Peer) -> None:
            head, _ = peer.request()
            match = re.search(rb"X-Capture: (\S+)", head)
            assert match is not None
            name = match[1].decode()
            for piece in pieces(captures.raw(name), cut, name):
                peer.send(piece)
                if cut < 1000:
                    time.sleep(0)  # lets the tap read between two pieces, now and then
            # Each answer ends the connection, complete or not: how it was framed has to tell the two apart.

        return script

    def replay(cut: int, label: str) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
        got = {}
        with Upstream(play(cut)) as upstream, tap(tmp_path_factory.mktemp(label), upstream.url) as running:
            for name in names:
                with running.connect() as sock:
                    request = asked(name)
                    sock.sendall(request.head + request.body)
                    got[name] = answer(sock, timeout_s=60)
            records = sorted(running.records(len(names)), key=lambda record: record["t0_mono_ns"])
            assert upstream.failures == []
        return got, records

    plain, plain_records = replay(1 << 30, "plain")
    cut, cut_records = replay(most, "cut")
    for name, one, other in zip(names, plain_records, cut_records, strict=True):
        assert relayed(name, cut[name]).body == captures.load(name).body == relayed(name, plain[name]).body, name
        assert told(other) == told(one), name
        assert one["ended"] == ("complete" if captures.load(name).complete else "upstream_aborted"), name
