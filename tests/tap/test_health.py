"""Which records are void: pauses of the loop and the collector against what they move, and stolen CPU time."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from pathlib import Path

import pytest

from tapproxy.core.record import DownstreamPart, Events, Record, StampsPart
from tapproxy.tap.health import Health, Pauses
from tests.harness import DONE, SSE_HEAD, Peer, Upstream, read_until, tap

MS = 1_000_000
S = 1000 * MS
T0 = 100 * S


def stream(*, events: int = 40, gap_ms: int = 25, ttft_ms: int = 100, source: str = "kernel") -> Record:
    """An answer of tokens, evenly spaced, that began at T0. With the defaults: from 100 ms to 1,075 ms."""
    arrived = [(ttft_ms + number * gap_ms) * MS for number in range(events)]
    return Record(
        id="r",
        tap="t",
        t0_mono_ns=T0,
        downstream=DownstreamPart(end=(arrived[-1] if arrived else ttft_ms * MS) + MS),
        events=Events(kind=["token"] * events, arrived=arrived, read_at=arrived, sent=list(arrived)),
        stamps=StampsPart(source=source),
    )


def paused(*spans_ms: tuple[float, float]) -> Pauses:
    """Pauses at times relative to T0."""
    pauses = Pauses()
    for start_ms, end_ms in spans_ms:
        pauses.add(T0 + round(start_ms * MS), T0 + round(end_ms * MS))
    return pauses


def every(period_ms: int, length_ms: int, *, until_ms: int = 1075) -> Pauses:
    return paused(*((start, start + length_ms) for start in range(100, until_ms, period_ms)))


@pytest.mark.parametrize(
    ("pauses", "record"),
    [
        pytest.param(paused((300, 401)), stream(), id="long, in the middle"),
        pytest.param(paused((-50, 60)), stream(events=200), id="long, across the start"),
        pytest.param(paused((300, 401)), stream(events=0, ttft_ms=5000), id="long, in a plain answer"),
        pytest.param(paused((-20, 0)), stream(), id="the request waited for the loop, a fifth of its TTFT"),
        pytest.param(paused((-20, -5)), stream(), id="the request was read soon after a pause"),
        pytest.param(paused((-7, 3)), stream(ttft_ms=50), id="the request was read within a pause"),
        pytest.param(paused((-6, 0)), stream(events=0, ttft_ms=40), id="a short plain answer"),
        pytest.param(every(250, 30), stream(), id="an eighth of the time, longer than the gaps"),
        pytest.param(every(100, 11), stream(source="user"), id="user stamps, a ninth of the time"),
    ],
)
def test_a_record_whose_numbers_they_move_is_spoilt(pauses: Pauses, record: Record) -> None:
    assert pauses.spoil(record)


@pytest.mark.parametrize(
    ("pauses", "record"),
    [
        pytest.param(paused(), stream(), id="none"),
        pytest.param(paused((300, 399)), stream(events=200), id="one of 99 ms in five seconds"),
        pytest.param(paused((-400, -200)), stream(), id="over before the start"),
        pytest.param(paused((1080, 1300)), stream(), id="after the end"),
        pytest.param(paused((-30, -21)), stream(), id="the request came well after it"),
        pytest.param(paused((-9, 0)), stream(), id="late by less than a tenth of its TTFT"),
        pytest.param(paused((-4, 0)), stream(ttft_ms=10), id="too short to count"),
        pytest.param(every(100, 20), stream(), id="kernel stamps and pauses shorter than the gaps"),
        pytest.param(every(20, 4), stream(source="user"), id="a fifth of the time, each too short to count"),
        pytest.param(every(100, 9), stream(source="user"), id="user stamps, less than a tenth of the time"),
        pytest.param(paused((20, 90)), stream(source="user"), id="before the first event"),
        pytest.param(paused((20, 90)), stream(events=1, source="user"), id="a single event"),
    ],
)
def test_a_record_they_move_little_is_not(pauses: Pauses, record: Record) -> None:
    assert not pauses.spoil(record)


def test_a_machine_with_a_short_pause_each_second_voids_no_stream() -> None:
    """What two noisy cores do to a healthy tap."""
    pauses = Pauses()
    for second in range(3600):
        pauses.add(T0 - 1800 * S + second * S, T0 - 1800 * S + second * S + 8 * MS)
    void = 0
    for offset_ms in range(0, 1000, 5):
        record = stream(ttft_ms=200)
        record.t0_mono_ns = T0 + offset_ms * MS
        void += pauses.spoil(record)
    assert void == 0


def test_old_pauses_are_forgotten_and_new_ones_are_not() -> None:
    pauses = Pauses()
    for number in range(10_000):
        pauses.add(number * S, number * S + 200 * MS)
    record = stream()
    record.t0_mono_ns = 9_999 * S - 100 * MS
    assert pauses.spoil(record)
    assert pauses.last_end_ns == 9_999 * S + 200 * MS


class Host:
    """A /proc, a clock and the process's own CPU time."""

    def __init__(self, directory: Path) -> None:
        self.proc = directory
        self.now_ns = T0
        self.own_ns = 0
        self.busy = 0
        self.stolen = 0
        self.write()

    def write(self) -> None:
        (self.proc / "stat").write_text(f"cpu  {self.busy} 0 0 99 7 0 0 {self.stolen} 3 0\ncpu0 1 2 3\n")

    def second(self, *, busy: int = 50, stolen: int = 0, own_ms: int = 0) -> None:
        """A second passes; CPU times in hundredths of a second."""
        self.now_ns += S
        self.busy += busy
        self.stolen += stolen
        self.own_ns += own_ms * MS
        self.write()

    def health(self) -> Health:
        return Health(proc=self.proc, now_ns=lambda: self.now_ns, cpu_ns=lambda: self.own_ns)


@pytest.mark.parametrize(
    ("busy", "stolen", "expected"),
    [
        pytest.param(50, 0, None, id="none"),
        pytest.param(100, 20, "steal", id="a sixth of what was wanted"),
        pytest.param(190, 10, None, id="a twentieth of what was wanted"),
        pytest.param(4, 4, None, id="half of nearly nothing"),
        pytest.param(5, 5, "steal", id="half of a twentieth of a CPU"),
    ],
)
def test_stolen_time_voids_what_was_going_on(tmp_path: Path, busy: int, stolen: int, expected: str | None) -> None:
    host = Host(tmp_path)
    health = host.health()
    host.second(busy=busy, stolen=stolen)
    health.sample()
    record = stream()
    assert health.void_reason(record) == expected
    # The second that is not over is taken to be as the last one was; later ones are not.
    record.t0_mono_ns = T0 + S + 500 * MS
    assert health.void_reason(record) == expected
    host.second()
    health.sample()
    record.t0_mono_ns = T0 + 2 * S
    assert health.void_reason(record) is None


def test_a_stream_of_which_less_than_a_tenth_was_robbed_stays(tmp_path: Path) -> None:
    host = Host(tmp_path)
    health = host.health()
    host.second(stolen=50)
    health.sample()
    for _ in range(29):
        host.second()
        health.sample()
    assert health.void_reason(stream(events=1200)) is None  # 30 s, 2 of them robbed
    assert health.void_reason(stream(events=600)) == "steal"  # 15 s


def test_shares_are_of_the_last_second(tmp_path: Path) -> None:
    host = Host(tmp_path)
    health = host.health()
    assert health.status()["steal_share"] is None
    assert health.status()["cpu_share"] is None
    host.second(busy=90, stolen=10, own_ms=250)
    health.sample()
    assert health.status()["steal_share"] == pytest.approx(0.1)
    assert health.status()["cpu_share"] == pytest.approx(0.25)


def test_without_proc_stolen_time_is_unknown(tmp_path: Path) -> None:
    health = Health(proc=tmp_path / "absent")
    health.sample()
    assert health.steal_share is None
    assert health.cpu_share is not None
    assert health.void_reason(stream()) is None


def test_a_late_timer_is_a_pause_and_the_greatest_is_shown_once(tmp_path: Path) -> None:
    host = Host(tmp_path)
    health = host.health()
    for late_ms in (1, 150, 3):
        due_ns = host.now_ns + 20 * MS
        host.now_ns = due_ns + late_ms * MS
        health.ticked(due_ns)
    assert health.void_reason(stream()) == "loop_lag"
    assert health.status()["loop_lag_max_ns"] == 150 * MS
    assert health.status()["loop_lag_max_ns"] == 0


def test_the_collectors_pauses_are_seen_and_named_before_the_loops(tmp_path: Path) -> None:
    host = Host(tmp_path)
    health = host.health()
    health._collected("start", {})
    host.now_ns += 120 * MS
    health._collected("stop", {})
    health.ticked(T0)
    assert health.void_reason(stream()) == "gc_pause"
    assert health.status()["gc_pause_max_ns"] == 120 * MS


def stream_with_pauses(peer: Peer) -> None:
    while True:
        peer.request()
        peer.send(SSE_HEAD)
        for _ in range(20):
            peer.event(b'{"choices":[{"index":0,"delta":{"content":"x"}}]}')
            time.sleep(0.02)
        peer.send(DONE)


def test_a_worker_that_was_stopped_for_a_while_voids_what_was_open_and_counts_it(tmp_path: Path) -> None:
    with Upstream(stream_with_pauses) as upstream, tap(tmp_path, upstream.url) as running:
        (worker,) = Path(f"/proc/{running.process.pid}/task/{running.process.pid}/children").read_text().split()
        with running.connect() as sock:
            sock.sendall(b"POST /x HTTP/1.1\r\nHost: e\r\nContent-Length: 2\r\n\r\n{}")
            read_until(sock, b"data: ")
            os.kill(int(worker), signal.SIGSTOP)
            time.sleep(0.25)
            os.kill(int(worker), signal.SIGCONT)
            read_until(sock, DONE)
        record = running.record()
        assert record["void"] == "loop_lag"
        # The kernel stamps bear it out: one read for all that came meanwhile.
        assert len(set(record["events"]["read"])) < 15
        deadline = time.monotonic() + 10
        counted = 'tapproxy_records_void_total{reason="loop_lag"} 1.0'
        while counted not in running.admin_get("/metrics") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert counted in running.admin_get("/metrics")
        status = json.loads(running.admin_get("/api/status"))
        assert {"gc_pause_ns", "steal_share", "cpu_share", "loop_lag_ns"} <= status.keys()


def test_a_real_collection_is_noticed() -> None:
    health = Health()
    health.start()
    try:
        gc.collect()
    finally:
        health.stop()
    assert health.collector.max_ns > 0
    health.stop()  # again: nothing
