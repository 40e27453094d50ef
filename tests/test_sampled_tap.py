"""A running tap that samples: what it stores and shows, and that bad pages cost neither traffic nor the admin port."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tapproxy.core.sample import Sample
from tapproxy.store import Kind, read_samples, scan
from tests.harness import DONE, SSE_HEAD, Peer, Tap, Upstream, read_until, tap

REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: e\r\nContent-Length: 2\r\n\r\n{}"
WAIT_S = 15.0


class Engine:
    """Streams, and has pages: of a good engine, a huge one, one that hangs, and one that redirects elsewhere."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        filler = b"".join(b'other_metric{series="%d"} 1\n' % number for number in range(170_000))
        self.huge = filler[: 5 << 20].rpartition(b"\n")[0] + b"\n"

    def __call__(self, peer: Peer) -> None:
        while True:
            head, _ = peer.request()
            target = head.split(b" ", 2)[1].decode()
            self.asked.append(target)
            if target == "/v1/chat/completions":
                peer.send(SSE_HEAD)
                peer.event(b'{"id":"chatcmpl-1","choices":[]}')
                peer.send(DONE)
            elif target == "/hangs":
                peer.closed_within(30)
                return
            elif target == "/elsewhere":
                peer.send(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Length: 0\r\n\r\n")
            elif target in ("/metrics", "/huge"):
                self._page(peer, self.huge if target == "/huge" else b"")
            else:
                peer.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    def _page(self, peer: Peer, before: bytes) -> None:
        body = before + b'vllm:num_requests_running{engine="0",model_name="m"} %d\n' % len(self.asked)
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


def samples_of(running: Tap, enough: Callable[[list[Sample]], bool]) -> list[Sample]:
    deadline = time.monotonic() + WAIT_S
    found: list[Sample] = []
    while time.monotonic() < deadline:
        found = list(read_samples(running.directory))
        if enough(found):
            return found
        time.sleep(0.05)
    raise AssertionError(f"these samples came: {[(each.source, each.problem) for each in found]}")


def status_of(running: Tap) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(running.admin_get("/api/status"))["samples"]
    return shown


def test_what_was_asked_for_is_sampled_stored_and_shown(tmp_path: Path) -> None:
    engine = Engine()
    with Upstream(engine) as upstream:
        flags = ["--engine-metrics", upstream.url, "--engine-pid", str(os.getpid()), "--sample-interval", "100ms"]
        with tap(tmp_path, upstream.url, *flags, "--name", "inner") as running:
            found = samples_of(running, lambda each: [one.kind for one in each].count("engine") >= 3)
            shown = status_of(running)
            assert {one["kind"] for one in shown["sources"]} == {"engine", "host"}
            assert shown["kept"]["engine"] >= 3
            assert 'tapproxy_samples_total{kind="engine"}' in running.admin_get("/metrics")
        engines = [each for each in found if each.kind == "engine"]
        assert {(each.source, each.tap, each.problem) for each in engines} == {
            (f"{upstream.url}/metrics", "inner", None)
        }
        assert engines[0].facts["engine"] == "vLLM"
        assert "ttft_s" in engines[0].absent
        # Monotonic, and comparable with the records' own time.
        times = [each.t_mono_ns for each in engines]
        assert times == sorted(times)
        assert abs(times[-1] - time.monotonic_ns()) < 60e9
        hosts = [each for each in found if each.kind == "host"]
        assert hosts[0].values["cores"] >= 1
        assert hosts[0].facts["engine_here"] == "yes"
        (file,) = scan(tmp_path, Kind.SAMPLES)
        assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_pages_that_hang_redirect_or_are_huge_cost_neither_traffic_nor_the_admin_port(tmp_path: Path) -> None:
    engine = Engine()
    with Upstream(engine) as upstream:
        pages = [
            word for name in ("hangs", "elsewhere", "huge") for word in ("--engine-metrics", f"{upstream.url}/{name}")
        ]
        with tap(tmp_path, upstream.url, *pages, "--sample-interval", "200ms") as running:
            slowest_s = 0.0
            with running.connect() as sock:
                for _ in range(40):
                    started = time.monotonic()
                    sock.sendall(REQUEST)
                    read_until(sock, DONE)
                    slowest_s = max(slowest_s, time.monotonic() - started)
                    running.admin_get("/healthz")
                    time.sleep(0.05)
            assert slowest_s < 1.0
            found = samples_of(running, lambda each: len({one.source for one in each if one.kind == "engine"}) == 3)
            failed = {each.source.rpartition("/")[2]: each.problem for each in found if each.problem is not None}
            assert failed["hangs"] == "no whole page came within 2 s"
            assert "redirects to another address (127.0.0.1), which was not named" in str(failed["elsewhere"])
            assert any(each.values["running"] > 0 for each in found if each.source.endswith("/huge"))
            assert "huge" not in failed
            assert len(running.records(40)) == 40
            assert status_of(running)["failed"]["engine"] >= 2
            running.process.terminate()
            assert running.process.stderr is not None
            said = running.process.stderr.read()
            # Each once, however often it was tried.
            assert said.count("no sample of") == 2


def test_without_being_asked_nothing_is_contacted_and_nothing_is_kept(tmp_path: Path) -> None:
    engine = Engine()
    with Upstream(engine) as upstream, tap(tmp_path, upstream.url) as running:
        assert status_of(running)["sources"] == []
        assert engine.asked == []
    assert scan(tmp_path, Kind.SAMPLES) == []
