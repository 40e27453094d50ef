"""Storage never hurts traffic: whatever the disk or the parent does, requests go on, and what is lost is counted."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest

from tapproxy.core import frames
from tapproxy.core.record import Events, Record
from tapproxy.core.tally import Tally
from tapproxy.store import read_records
from tapproxy.tap.outbox import MAX_WAITING_BYTES, Outbox
from tests.faults.lab import lost_records, status, wait_for_lost, wait_until, worker_of, written
from tests.harness import Peer, Tap, Upstream, read_until, tap

BURST = 20
# A request that waits for the disk would take as long as the disk.
SLOW_S = 0.8


def ok(peer: Peer) -> None:
    while True:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 2\r\n\r\nok")


@pytest.fixture(scope="module")
def engine() -> Iterator[Upstream]:
    with Upstream(ok) as upstream:
        yield upstream


class Numbered:
    """Requests with running numbers as their ids, one after the other on one connection."""

    def __init__(self, running: Tap) -> None:
        self.running = running
        self.sent = 0
        self.longest_s = 0.0
        self._sock = running.connect()

    def __call__(self, count: int = BURST) -> None:
        for _ in range(count):
            started = time.monotonic()
            self._sock.sendall(b"GET /x HTTP/1.1\r\nHost: e\r\nX-Request-Id: %d\r\n\r\n" % self.sent)
            read_until(self._sock, b"\r\n\r\nok")
            self.sent += 1
            self.longest_s = max(self.longest_s, time.monotonic() - started)

    def close(self) -> None:
        self._sock.close()


@contextlib.contextmanager
def traffic(running: Tap) -> Iterator[Numbered]:
    """Requests that must all be answered at once, whatever happens to the records meanwhile."""
    requests = Numbered(running)
    try:
        yield requests
        assert requests.longest_s < SLOW_S
    finally:
        requests.close()


def stored(directory: Path) -> list[int]:
    """The numbers of the requests whose records can be read."""
    return [int(record["request_id"]) for record in written(directory)]


def stays(running: Tap, numbers: list[int]) -> None:
    """Until exactly these are stored."""
    wait_until(lambda: stored(running.directory) == numbers, f"{numbers} stored, found {stored(running.directory)}")


# -- the disk


def test_a_full_file_size_limit_loses_records_and_nothing_else(engine: Upstream, tmp_path: Path) -> None:
    with tap(tmp_path, engine.url) as running, traffic(running) as requests:
        requests()
        stays(running, list(range(BURST)))
        (file,) = tmp_path.glob("records-*.jsonl")
        _, hard = resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (file.stat().st_size + 100, hard))
        requests()
        wait_for_lost(running, "disk", BURST)
        assert lost_records(running) == {"worker": 0, "disk": BURST}
        shown = status(running)["store"]
        assert (shown["written"], shown["lost"], shown["last_error"]) == (BURST, BURST, "File too large")
        resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        requests()
        stays(running, [*range(BURST), *range(2 * BURST, 3 * BURST)])
        # The torn line is skipped, with a count.
        reader = read_records(tmp_path)
        assert len(list(reader)) == 2 * BURST
        assert reader.skipped == 1


@contextlib.contextmanager
def mounted(directory: Path, *arguments: str) -> Iterator[None]:
    """A mount for the time of a test; skips where it is not allowed."""
    directory.mkdir(exist_ok=True)
    done = subprocess.run(["mount", *arguments, str(directory)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"mounting is not allowed here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def test_a_full_disk_loses_records_and_takes_them_again_when_there_is_room(engine: Upstream, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    room = mounted(disk, "-t", "tmpfs", "-o", "size=256k,mode=0700", "tmpfs")
    with room, tap(disk, engine.url) as running, traffic(running) as requests:
        requests()
        stays(running, list(range(BURST)))
        hog = disk / "hog"
        with hog.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        requests(100)
        wait_until(lambda: lost_records(running)["disk"] > 50, "records are lost")
        assert status(running)["store"]["last_error"] == "No space left on device"
        hog.unlink()
        kept = stored(disk)
        requests()
        wait_until(lambda: stored(disk)[-1] == requests.sent - 1, "records are kept again")
        # Every one of them is either there or counted.
        wait_until(lambda: len(stored(disk)) + lost_records(running)["disk"] == requests.sent, "the sum is right")
        # Records on their way while room was made may be among them.
        assert len(stored(disk)) >= len(kept) + BURST


def test_a_directory_turned_read_only_loses_records_and_nothing_else(engine: Upstream, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with tap(disk, engine.url) as running, traffic(running) as requests:
        requests()
        stays(running, list(range(BURST)))
        with read_only(disk):
            # The open file is still good. Told to open it anew, the tap finds that it can't.
            (file,) = disk.glob("records-*.jsonl")
            running.process.send_signal(signal.SIGHUP)
            time.sleep(0.1)
            requests()
            wait_for_lost(running, "disk", BURST)
            assert status(running)["store"]["last_error"] in ("Read-only file system", "Permission denied")
        requests()
        stays(running, [*range(BURST), *range(2 * BURST, 3 * BURST)])
        assert [file] == list(disk.glob("records-*.jsonl"))


@contextlib.contextmanager
def read_only(directory: Path) -> Iterator[None]:
    """Root may write everywhere but on what is mounted read-only; for all others taking the permission will do."""
    if os.geteuid() == 0:
        with mounted(directory, "--bind", str(directory)):
            subprocess.run(["mount", "-o", "remount,bind,ro", str(directory)], check=True)
            yield
        return
    files = list(directory.iterdir())
    for place in (*files, directory):
        place.chmod(0o500)
    try:
        yield
    finally:
        directory.chmod(0o700)
        for file in files:
            file.chmod(0o600)


def test_a_deleted_file_and_a_deleted_directory_are_made_anew(engine: Upstream, tmp_path: Path) -> None:
    data = tmp_path / "data"
    with tap(data, engine.url) as running, traffic(running) as requests:
        requests()
        stays(running, list(range(BURST)))
        for file in data.iterdir():
            file.unlink()
        requests()
        stays(running, list(range(BURST, 2 * BURST)))
        for file in data.iterdir():
            file.unlink()
        data.rmdir()
        requests()
        stays(running, list(range(2 * BURST, 3 * BURST)))
        assert lost_records(running) == {"worker": 0, "disk": 0}
        assert data.stat().st_mode & 0o777 == 0o700


def test_a_disk_that_hangs_delays_records_and_nothing_else(engine: Upstream, tmp_path: Path) -> None:
    """Whoever holds the file's lock keeps the store from writing, as a disk does that takes its time."""
    with tap(tmp_path, engine.url) as running, traffic(running) as requests:
        requests()
        stays(running, list(range(BURST)))
        (place,) = tmp_path.glob("records-*.jsonl")
        with place.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                requests()
            assert stored(tmp_path) == list(range(BURST))
            assert status(running)["store"]["lost"] == 0
        stays(running, list(range(requests.sent)))


# -- the parent


def test_a_parent_that_hangs_delays_records_and_nothing_else(engine: Upstream, tmp_path: Path) -> None:
    with tap(tmp_path, engine.url) as running, traffic(running) as requests:
        os.kill(running.process.pid, signal.SIGSTOP)
        try:
            requests(200)
            assert stored(tmp_path) == []
        finally:
            os.kill(running.process.pid, signal.SIGCONT)
        stays(running, list(range(200)))
        assert lost_records(running) == {"worker": 0, "disk": 0}


def test_what_a_hanging_parent_does_not_take_in_time_is_counted() -> None:
    """The worker's end alone, since it takes 32 MiB of records before the first is lost."""
    many = 20_000
    stamps = [10**12] * many
    events = Events(["token"] * many, stamps, stamps, stamps, list(stamps), [0] * many, [1] * many)

    async def main() -> tuple[int, int, list[bytes], int]:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        outbox = Outbox(asyncio.get_running_loop(), ours)
        given = 0

        def hand_over(name: str) -> None:
            record = Record(id=name, tap="tap", events=events)
            outbox.count(record)
            outbox.record(record)

        while not outbox.lost:
            hand_over(str(given))
            given += 1
            await asyncio.sleep(0)
        lost = outbox.lost
        reader, got = frames.FrameReader(), []

        def read() -> None:
            theirs.settimeout(2)
            with contextlib.suppress(TimeoutError):
                while data := theirs.recv(1 << 20):
                    got.extend(reader.feed(data))

        reading = asyncio.create_task(asyncio.to_thread(read))
        # Once there is room again, the next one is taken.
        while outbox.lost == lost:
            hand_over("later")
            if outbox.lost == lost:
                break
            lost = outbox.lost
            given += 1
            await asyncio.sleep(0.05)
        await outbox.flush(5)
        ours.close()
        await reading
        theirs.close()
        counted = Tally()
        for kind, body in got:
            if kind == frames.TALLY:
                counted.add(orjson.loads(body))
        records = [body for kind, body in got if kind == frames.RECORD]
        return given, outbox.lost, records, counted.counters["tapproxy_requests", "none", "complete", "unknown"]

    given, lost, records, counted = asyncio.run(main())
    assert len(records) == given + 1 - lost
    assert counted == given + 1, "what is lost is counted all the same"
    size_bytes = len(records[0])
    assert MAX_WAITING_BYTES // size_bytes <= given


def test_a_killed_parent_loses_at_most_the_last_second(engine: Upstream, tmp_path: Path) -> None:
    done_at: dict[int, float] = {}
    with tap(tmp_path, engine.url) as running:
        stop = threading.Event()

        def load() -> None:
            requests = Numbered(running)
            with contextlib.suppress(OSError, AssertionError):
                while not stop.is_set():
                    requests(1)
                    done_at[requests.sent - 1] = time.monotonic()
                    time.sleep(0.002)
            requests.close()

        thread = threading.Thread(target=load)
        thread.start()
        time.sleep(1.2)
        killed_at = time.monotonic()
        running.process.kill()
        running.process.wait(10)
        stop.set()
        thread.join(10)
    kept = set(stored(tmp_path))
    lost_s = [killed_at - at for number, at in done_at.items() if number not in kept and at < killed_at]
    assert len(done_at) > 50
    assert max(lost_s, default=0.0) < 1.0
    sys.stdout.write(
        f"killed: {len(kept)} records kept; the oldest lost one ended {max(lost_s, default=0):.3f} s before\n"
    )
    # What was being written may be torn; it is skipped and counted, and the next run is not hurt by it.
    (file,) = tmp_path.glob("records-*.jsonl")
    with file.open("ab") as tail:
        tail.write(b'{"schema":"tapproxy.record/1","id":"01')
    reader = read_records(tmp_path)
    assert len(list(reader)) == len(kept)
    assert (reader.skipped, reader.torn) == (1, 1)
    with tap(tmp_path, engine.url) as again, traffic(again) as requests:
        requests(1)
        wait_until(lambda: len(stored(tmp_path)) == len(kept) + 1, "a record of the second run")


def test_a_killed_worker_costs_the_exchanges_it_had_and_the_parent_says_so(tmp_path: Path) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.closed_within(10)

    with Upstream(script) as upstream, tap(tmp_path, upstream.url) as running:
        clients = [running.connect() for _ in range(5)]
        for client in clients:
            client.sendall(b"GET /open HTTP/1.1\r\nHost: e\r\n\r\n")
        wait_until(lambda: status(running)["in_flight"] == 5, "five open exchanges")
        os.kill(worker_of(running), signal.SIGKILL)
        wait_until(lambda: status(running)["workers_alive"] == 1 and status(running)["worker_restarts"], "a new worker")
        # The store writes some milliseconds after the worker's end was noticed.
        wait_until(
            lambda: status(running)["store"]["written"] + lost_records(running)["worker"] == 5,
            "what became of the five",
        )
        known = len(running.records(5)) if status(running)["store"]["written"] else 0
        assert known + lost_records(running)["worker"] == 5
        for client in clients:
            client.close()


def test_a_killed_worker_leaves_no_second_record_of_what_had_ended(engine: Upstream, tmp_path: Path) -> None:
    """What the parent is told of open exchanges, for the case that their worker dies, ends with their records."""
    with tap(tmp_path, engine.url) as running:
        with traffic(running) as requests:
            until = time.monotonic() + 0.8
            while time.monotonic() < until:
                requests(1)
            stays(running, list(range(requests.sent)))
        os.kill(worker_of(running), signal.SIGKILL)
        wait_until(lambda: status(running)["workers_alive"] == 1 and status(running)["worker_restarts"], "a new worker")
        with traffic(running) as later:
            later(1)
            wait_until(lambda: stored(tmp_path)[-1] == 0, "its record")
        assert len(stored(tmp_path)) == requests.sent + 1


def test_a_closed_stderr_costs_no_record(engine: Upstream, tmp_path: Path) -> None:
    """``tapproxy serve 2>&1 | head -1``: the first finding is said to a pipe that nobody reads."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tapproxy.cli", "serve", "--upstream", engine.url, "--data", str(tmp_path)),
            *("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"),
        ],
        stdout=subprocess.PIPE,
        stderr=writing,
        text=True,
    )
    os.close(writing)
    with process:
        try:
            assert process.stdout is not None
            match = re.search(r"data on (\S+):(\d+), admin on (\S+):(\d+)", process.stdout.readline())
            assert match is not None
            os.close(reading)
            running = Tap(process, (match[1], int(match[2])), (match[3], int(match[4])), tmp_path)
            with traffic(running) as requests:
                requests()
                wait_until(lambda: len(stored(tmp_path)) == BURST, "all records", 2)
        finally:
            process.terminate()
            process.wait(20)


WHO = [
    "worker",
    "parent",
]


@pytest.mark.parametrize("who", WHO)
def test_a_closing_terminal_cuts_nobody(who: str, engine: Upstream, tmp_path: Path) -> None:
    """Its SIGHUP goes to the whole process group, and to the parent it means: open the files anew."""
    with tap(tmp_path, engine.url) as running, traffic(running) as requests:
        requests(1)
        os.kill(worker_of(running) if who == "worker" else running.process.pid, signal.SIGHUP)
        time.sleep(0.1)
        requests(1)
        assert status(running)["worker_restarts"] == 0
