"""Records on disk: what is appended can be read, and what can't be kept is counted."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tapproxy.core.errors import ConfigError
from tapproxy.core.record import Record
from tapproxy.core.sample import Sample
from tapproxy.store import Kind, RecordStore, read_records, read_samples, scan

LIMIT = 1 << 20


def line(record_id: str, t0_unix_ns: int = 0) -> bytes:
    return orjson.dumps(Record(id=record_id, tap="tap", t0_unix_ns=t0_unix_ns).to_dict())


SIZE = len(line("a")) + 1


def ids(path: Path) -> list[str]:
    return [record.id for record in read_records(path)]


def only_file(directory: Path) -> Path:
    (file,) = scan(directory)
    return file.path


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., RecordStore]]:
    """Stores in DIR/data, closed at the end."""
    stores = []

    def make(**arguments: Any) -> RecordStore:
        stores.append(RecordStore(tmp_path / "data", **{"max_bytes": LIMIT, **arguments}))
        return stores[-1]

    yield make
    for store in stores:
        store.close()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def test_what_is_appended_is_read_back_in_order(open_store: Callable[..., RecordStore], data: Path) -> None:
    store = open_store()
    for name in ("a", "b", "c"):
        store.append(line(name))
    assert store.flush()
    assert ids(data) == ["a", "b", "c"]
    assert (store.written, store.lost, store.last_error) == (3, 0, None)


def test_a_line_feed_at_the_end_is_not_doubled(open_store: Callable[..., RecordStore], data: Path) -> None:
    store = open_store()
    store.append(line("a") + b"\n")
    store.flush()
    assert only_file(data).read_bytes() == line("a") + b"\n"


def test_the_directory_and_its_files_are_the_users_alone(open_store: Callable[..., RecordStore], data: Path) -> None:
    open_store()
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(data).stat().st_mode) == 0o600


def test_closing_writes_what_is_queued(open_store: Callable[..., RecordStore], data: Path) -> None:
    store = open_store()
    for number in range(100):
        store.append(line(str(number)))
    store.close()
    assert ids(data) == [str(number) for number in range(100)]


def test_a_store_that_got_nothing_leaves_no_file(open_store: Callable[..., RecordStore], data: Path) -> None:
    open_store().close()
    assert scan(data) == []


def test_what_comes_after_closing_is_lost_and_counted(open_store: Callable[..., RecordStore]) -> None:
    store = open_store()
    store.close()
    store.append(line("a"))
    assert (store.lost, store.last_error) == (1, "the store is closed")


@pytest.mark.parametrize(
    "limits", [pytest.param({"queue_lines": 2}, id="lines"), pytest.param({"queue_bytes": 2 * SIZE}, id="bytes")]
)
def test_a_full_queue_loses_the_newest_and_never_waits(
    open_store: Callable[..., RecordStore], data: Path, limits: dict[str, int]
) -> None:
    store = open_store(**limits)
    # A held lock is a disk that takes its time: the first line is stuck in the thread, two more fit in the queue.
    with only_file(data).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        store.append(line("a"))
        while store.stats()["queued"]:
            time.sleep(0.001)
        for name in ("b", "c", "d", "e"):
            store.append(line(name))
        assert store.lost == 2
        assert store.last_error == "the queue to the disk is full: the disk is slower than the traffic"
    assert store.flush()
    assert ids(data) == ["a", "b", "c"]


def test_a_disk_that_stays_stuck_does_not_hold_up_the_end(open_store: Callable[..., RecordStore], data: Path) -> None:
    store = open_store()
    with only_file(data).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        store.append(line("a"))
        while store.stats()["queued"]:
            time.sleep(0.001)
        store.append(line("b"))
        store.close(timeout_s=0.05)
        assert store.lost == 1
        assert store.last_error == "the disk did not take the last records in time"


def test_a_deleted_file_is_made_anew(open_store: Callable[..., RecordStore], data: Path) -> None:
    store = open_store()
    store.append(line("a"))
    store.flush()
    only_file(data).unlink()
    store.append(line("b"))
    store.flush()
    assert ids(data) == ["b"]


def test_a_deleted_directory_is_made_anew(open_store: Callable[..., RecordStore], data: Path) -> None:
    store = open_store()
    only_file(data).unlink()
    data.rmdir()
    store.append(line("a"))
    store.flush()
    assert ids(data) == ["a"]


def test_after_a_reopen_a_moved_file_gets_no_more_lines(open_store: Callable[..., RecordStore], data: Path) -> None:
    store = open_store()
    store.append(line("a"))
    store.flush()
    moved = data / "moved"
    only_file(data).rename(moved)
    store.reopen()
    store.append(line("b"))
    store.flush()
    assert (ids(moved), ids(data)) == (["a"], ["b"])


def test_a_file_that_is_full_is_followed_by_another(open_store: Callable[..., RecordStore], data: Path) -> None:
    store = open_store(file_bytes=2 * SIZE)
    for name in ("a", "b", "c"):
        store.append(line(name))
        store.flush()
    assert [ids(file.path) for file in scan(data)] == [["a", "b"], ["c"]]
    assert ids(data) == ["a", "b", "c"]


def test_over_the_limit_the_oldest_file_goes_and_is_counted(open_store: Callable[..., RecordStore], data: Path) -> None:
    store = open_store(max_bytes=5 * SIZE, file_bytes=2 * SIZE)
    for name in "abcdefgh":
        store.append(line(name))
        store.flush()
    assert ids(data) == ["e", "f", "g", "h"]
    assert (store.written, store.removed, store.lost) == (8, 4, 0)


def test_an_older_run_is_removed_before_the_new_one(open_store: Callable[..., RecordStore], data: Path) -> None:
    data.mkdir()
    old = data / "records-20200101T000000.000000Z-1.jsonl"
    old.write_bytes((line("old") + b"\n") * 4)
    os.utime(old, (1, 1))
    store = open_store(max_bytes=5 * SIZE, file_bytes=4 * SIZE)
    for name in ("a", "b"):
        store.append(line(name))
        store.flush()
    assert (ids(data), store.removed) == (["a", "b"], 4)


def test_only_our_own_files_are_ever_removed(open_store: Callable[..., RecordStore], data: Path) -> None:
    data.mkdir()
    others = [data / "notes.txt", data / "records-mine.jsonl"]
    for path in others:
        path.write_bytes(b"x" * LIMIT)
    store = open_store(max_bytes=3 * SIZE, file_bytes=SIZE)
    for name in ("a", "b", "c", "d"):
        store.append(line(name))
        store.flush()
    assert [path.stat().st_size for path in others] == [LIMIT, LIMIT]


def test_a_record_larger_than_the_disk_limit_is_lost_alone(open_store: Callable[..., RecordStore], data: Path) -> None:
    store = open_store(max_bytes=3 * SIZE)
    for one in (line("a"), line("x" * 4 * SIZE), line("b")):
        store.append(one)
    store.flush()
    assert ids(data) == ["a", "b"]
    assert (store.lost, store.last_error) == (1, "a record is larger than --max-disk")


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from tapproxy.store import RecordStore
store = RecordStore(Path(sys.argv[1]), max_bytes=1 << 20)
def put(*names):
    for name in names:
        store.append(b'{"schema":"tapproxy.record/1","id":"' + name.encode() + b'"}')
    store.flush()
put("a")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # room for the second record and half of the third
put("b", "c", "d")
print(store.written, store.lost, store.last_error)
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
put("e")
print(store.written, store.lost)
store.close()
"""


def test_on_a_full_disk_records_are_lost_and_the_rest_stays_readable(data: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_DISK, data], capture_output=True, text=True, check=True)
    assert done.stdout == "2 2 File too large\n3 2\n"
    reader = read_records(data)
    assert [record.id for record in reader] == ["a", "b", "e"]
    assert (reader.skipped, reader.torn) == (1, 0)


KILLED = """
import sys, time
from pathlib import Path
from tapproxy.store import RecordStore
store = RecordStore(Path(sys.argv[1]), max_bytes=1 << 20)
store.append(b'{"schema":"tapproxy.record/1","id":"a"}')
print("appended", flush=True)
time.sleep(60)
"""


def test_a_killed_process_loses_no_more_than_the_last_second(data: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, data], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process:
        process.stdout.readline()
        deadline_s = time.monotonic() + 1
        while time.monotonic() < deadline_s and not scan(data)[0].size_bytes:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert ids(data) == ["a"]


def test_a_directory_that_cannot_be_made_is_refused() -> None:
    # /proc takes no directory from anyone, root included.
    with pytest.raises(ConfigError) as caught:
        RecordStore(Path("/proc/tapproxy-data"), max_bytes=LIMIT)
    assert str(caught.value) == (
        "the data directory '/proc/tapproxy-data' cannot be written: No such file or directory; "
        "give --data a directory this user can write"
    )


def test_a_file_in_the_directorys_place_is_refused(data: Path) -> None:
    data.write_text("")
    with pytest.raises(ConfigError) as caught:
        RecordStore(data, max_bytes=LIMIT)
    assert str(caught.value) == (
        f"the data directory {str(data)!r} cannot be written: File exists; give --data a directory this user can write"
    )


def test_a_link_in_our_files_place_is_not_followed(open_store: Callable[..., RecordStore], data: Path) -> None:
    store = open_store()
    target = data / "target"
    target.write_bytes(b"")
    file = only_file(data)
    file.unlink()
    file.symlink_to(target)
    store.append(line("a"))
    store.flush()
    assert target.read_bytes() == b""
    assert (store.lost, store.last_error) == (1, "Too many levels of symbolic links")


def test_two_stores_share_a_directory(open_store: Callable[..., RecordStore], data: Path) -> None:
    one, other = open_store(), open_store()
    one.append(line("a"))
    other.append(line("b"))
    one.flush()
    other.flush()
    assert sorted(ids(data)) == ["a", "b"]
    assert len(scan(data)) == 2


@pytest.mark.parametrize(
    ("text", "expected", "skipped", "torn"),
    [
        pytest.param(line("a") + b"\n" + line("b")[:40], ["a"], 1, 1, id="torn_last_line"),
        pytest.param(line("a") + b"\n" + line("b"), ["a", "b"], 0, 0, id="last_line_without_its_line_feed"),
        pytest.param(line("a")[:40] + b"\n" + line("b") + b"\n", ["b"], 1, 0, id="broken_line"),
        pytest.param(b"\n\n" + line("a") + b"\n", ["a"], 0, 0, id="empty_lines"),
        pytest.param(b'{"schema":"other/1","id":"x"}\n', [], 1, 0, id="not_a_record"),
        pytest.param(b'{"schema":"tapproxy.record/1"}\n', [], 1, 0, id="no_id"),
        pytest.param(b'{"schema":"tapproxy.record/1","id":"x","events":7}\n', [], 1, 0, id="no_object"),
        pytest.param(b'{"schema":"tapproxy.record/1","id":"x","t0_unix_ns":"7"}\n', [], 1, 0, id="time_is_text"),
        pytest.param(b"[]\n\xff\n", [], 2, 0, id="no_json"),
        pytest.param(b"[" * 100_000 + b"\n", [], 1, 0, id="deep"),
        pytest.param(b"", [], 0, 0, id="empty_file"),
    ],
)
def test_broken_lines_are_skipped_and_counted(
    tmp_path: Path, text: bytes, expected: list[str], skipped: int, torn: int
) -> None:
    file = tmp_path / "records-20250101T000000.000000Z-1.jsonl"
    file.write_bytes(text)
    for path in (tmp_path, file):
        reader = read_records(path)
        assert [record.id for record in reader] == expected
        assert (reader.skipped, reader.torn) == (skipped, torn)


def test_older_records_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "any.jsonl"
    file.write_bytes(line("a", 99) + b"\n" + line("b", 100) + b"\n")
    assert [record.id for record in read_records(file, since_unix_ns=100)] == ["b"]


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_records(tmp_path / "none")
    assert str(caught.value) == (
        f"the data directory '{tmp_path}/none' cannot be read: No such file or directory; give the --data of the tap"
    )


def test_appending_is_cheap(open_store: Callable[..., RecordStore]) -> None:
    store = open_store(max_bytes=1 << 30)
    one = line("a")
    began_ns = time.perf_counter_ns()
    for _ in range(10_000):
        store.append(one)
    # A few µs each; the bound only tells a queue from a disk.
    assert (time.perf_counter_ns() - began_ns) / 10_000 < 100_000
    assert store.flush()
    assert store.written == 10_000


# --- samples beside records ----------------------------------------------------------------------------------------


def sample_line(source: str, t_unix_ns: int = 0) -> bytes:
    return orjson.dumps(Sample("engine", source, 1, t_unix_ns, values={"running": 1.0}).to_dict())


@pytest.fixture
def both(open_store: Callable[..., RecordStore], data: Path) -> Callable[..., tuple[RecordStore, RecordStore]]:
    def make(**arguments: int) -> tuple[RecordStore, RecordStore]:
        records = open_store(**arguments)
        return records, open_store(**arguments, kind=Kind.SAMPLES, beside=records)

    return make


def total_bytes(data: Path) -> int:
    return sum(file.size_bytes for kind in Kind for file in scan(data, kind))


def test_samples_lie_beside_records_in_files_of_their_own(
    both: Callable[..., tuple[RecordStore, RecordStore]], data: Path
) -> None:
    records, samples = both()
    records.append(line("a"))
    samples.append(sample_line("page"))
    assert records.flush()
    assert samples.flush()
    assert ids(data) == ["a"]
    assert [sample.source for sample in read_samples(data)] == ["page"]
    (file,) = scan(data, Kind.SAMPLES)
    assert file.path.name.startswith("samples-")
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600


def test_samples_are_read_from_a_time_on_and_broken_lines_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "samples-20250101T000000.000000Z-1.jsonl"
    wrong = sample_line("x").replace(b'"values":{"running":1.0}', b'"values":{"running":"1"}')
    file.write_bytes(b"\n".join([sample_line("old", 5), b"{", wrong, line("record"), sample_line("new", 9), b'{"sch']))
    reader = read_samples(tmp_path, 9)
    assert [sample.source for sample in reader] == ["new"]
    assert (reader.skipped, reader.torn) == (4, 1)


def test_one_limit_holds_for_both_kinds_and_each_counts_its_own(
    both: Callable[..., tuple[RecordStore, RecordStore]], data: Path
) -> None:
    limit = 16 * SIZE
    records, samples = both(max_bytes=limit)
    for number in range(200):
        records.append(line(str(number)))
        samples.append(sample_line("page"))
        assert records.flush()
        assert samples.flush()
        assert total_bytes(data) <= limit
    assert (records.lost, samples.lost) == (0, 0)
    assert records.removed == 200 - len(ids(data)) > 0
    assert samples.removed == 200 - len(list(read_samples(data))) > 0


def test_a_flood_of_samples_costs_no_record(both: Callable[..., tuple[RecordStore, RecordStore]], data: Path) -> None:
    records, samples = both(queue_lines=50)
    with only_file(data).open() as file:
        # The disk takes nothing for a while.
        fcntl.flock(file, fcntl.LOCK_EX)
        records.append(line("a"))
        for _ in range(10_000):
            samples.append(sample_line("page"))
        records.append(line("b"))
    assert records.flush()
    assert (ids(data), records.lost) == (["a", "b"], 0)
    assert samples.flush()
    assert samples.lost + samples.written == 10_000
