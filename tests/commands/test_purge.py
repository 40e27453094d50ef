"""`tapproxy purge`: what is removed, what stays, and that a running tap is not disturbed."""

from __future__ import annotations

import os
from pathlib import Path

import orjson
import pytest

from tapproxy.cli import run
from tapproxy.commands.purge import Removed, parse_age_ns, remove_records
from tapproxy.core.errors import ConfigError
from tapproxy.core.record import Record
from tapproxy.core.sample import Sample
from tapproxy.store import RecordStore, read_records, read_samples, scan


def line(record_id: str, t0_unix_ns: int = 0) -> bytes:
    return orjson.dumps(Record(id=record_id, tap="tap", t0_unix_ns=t0_unix_ns).to_dict()) + b"\n"


def put(directory: Path, number: int, *lines: bytes, mtime_s: int = 10**9) -> Path:
    file = directory / f"records-2025010{number}T000000.000000Z-1.jsonl"
    file.write_bytes(b"".join(lines))
    os.utime(file, (mtime_s, mtime_s))
    return file


def ids(path: Path) -> list[str]:
    return [record.id for record in read_records(path)]


def test_all_removes_every_record_and_nothing_else(tmp_path: Path) -> None:
    put(tmp_path, 1, line("a"), line("b"))
    put(tmp_path, 2, line("c"))
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    size = 2 * len(line("a")) + len(line("c"))
    assert remove_records(tmp_path, None) == Removed(records=3, files=2, size_bytes=size, kept_records=0)
    assert list(tmp_path.iterdir()) == [other]


def test_by_age_only_the_older_records_of_a_file_go(tmp_path: Path) -> None:
    file = put(tmp_path, 1, line("a", 99), line("b", 100), line("c", 98))
    assert remove_records(tmp_path, 100) == Removed(
        records=2, files=0, size_bytes=len(line("a", 99)) + len(line("c", 98)), kept_records=1
    )
    assert (ids(tmp_path), file.stat().st_mode & 0o777) == (["b"], 0o600)
    assert list(tmp_path.iterdir()) == [file]


def test_a_broken_line_stays_until_its_file_is_older(tmp_path: Path) -> None:
    put(tmp_path, 1, b"{broken\n", line("a", 100 * 10**9), mtime_s=100)
    assert remove_records(tmp_path, 100 * 10**9).records == 0
    assert remove_records(tmp_path, 101 * 10**9) == Removed(
        records=2, files=1, size_bytes=8 + len(line("a", 100 * 10**9)), kept_records=0
    )


@pytest.mark.parametrize("before_unix_ns", [pytest.param(None, id="all"), pytest.param(100, id="by_age")])
def test_a_running_tap_goes_on_writing(tmp_path: Path, before_unix_ns: int | None) -> None:
    store = RecordStore(tmp_path, max_bytes=1 << 20)
    store.append(line("old", 99))
    store.append(line("new", 100))
    store.flush()
    remove_records(tmp_path, before_unix_ns)
    store.append(line("after", 101))
    store.close()
    assert ids(tmp_path) == (["after"] if before_unix_ns is None else ["new", "after"])
    assert (store.written, store.lost) == (3, 0)


def test_a_torn_line_that_is_kept_does_not_spoil_the_next(tmp_path: Path) -> None:
    put(tmp_path, 1, line("old", 99), line("new", 100), b'{"schema"')
    remove_records(tmp_path, 100)
    assert scan(tmp_path)[0].path.read_bytes() == line("new", 100) + b'{"schema"\n'


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(line("a"))
    (tmp_path / "records-20250101T000000.000000Z-1.jsonl").symlink_to(target)
    assert remove_records(tmp_path, None) == Removed(0, 0, 0, 0)
    assert target.exists()


@pytest.mark.parametrize(("text", "expected"), [("90s", 90), ("15m", 900), ("12h", 43_200), ("30d", 2_592_000)])
def test_ages(text: str, expected: int) -> None:
    assert parse_age_ns(text) == expected * 10**9


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1.5d", "1 d"])
def test_an_age_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--older-than is '.*': expected a number and a unit"):
        parse_age_ns(text)


def test_the_command_says_what_it_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, 1, line("a"))
    put(tmp_path, 2, line("b", 2**62), mtime_s=2**33)
    assert run(["purge", "--data", str(tmp_path), "--older-than", "1d"]) == 0
    assert capsys.readouterr().out == (
        f"removed 1 record ({len(line('a'))} bytes, 1 whole file) from {tmp_path}; 1 record kept\n"
    )


def test_the_result_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, 1, line("a"))
    assert run(["purge", "--data", str(tmp_path), "--all", "--json", "-"]) == 0
    assert orjson.loads(capsys.readouterr().out) == {
        "schema": "tapproxy.purge/1",
        "records": 1,
        "files": 1,
        "size_bytes": len(line("a")),
        "kept_records": 0,
        "samples": 0,
        "samples_size_bytes": 0,
        "kept_samples": 0,
        "runs": 0,
        "runs_size_bytes": 0,
        "kept_runs": 0,
    }


@pytest.mark.parametrize("arguments", [[], ["--all", "--older-than", "1d"]])
def test_what_to_remove_must_be_said_once(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["purge", *arguments]) == 2
    assert capsys.readouterr().err == ("tapproxy: say what to remove: either --older-than AGE (as 30d) or --all\n")


def test_samples_go_with_the_records_and_are_counted_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, 1, line("a", 99), line("b", 100))
    samples = [orjson.dumps(Sample("host", name, 1, at).to_dict()) + b"\n" for name, at in (("old", 99), ("new", 100))]
    file = tmp_path / "samples-20250101T000000.000000Z-1.jsonl"
    file.write_bytes(b"".join(samples))
    gone = remove_records(tmp_path, 100)
    assert (gone.records, gone.samples, gone.samples_size_bytes, gone.kept_samples) == (1, 1, len(samples[0]), 1)
    assert [sample.source for sample in read_samples(tmp_path)] == ["new"]
    assert run(["purge", "--data", str(tmp_path), "--all"]) == 0
    assert f"removed 1 sample ({len(samples[1])} bytes) from {tmp_path}; 0 samples kept" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
