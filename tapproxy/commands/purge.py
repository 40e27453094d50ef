"""`tapproxy purge`: remove records, samples and runs, by age or all, and say what was removed.

A tap may be writing into the directory meanwhile. A file of which only some records go is rewritten under its
lock, so no record that a tap writes in between is lost.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import orjson
import typer

from tapproxy.commands import output
from tapproxy.core.errors import ConfigError
from tapproxy.load.runs import Register
from tapproxy.store import Kind, scan

_TIMES = {Kind.RECORDS: "t0_unix_ns", Kind.SAMPLES: "t_unix_ns"}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def purge(
    data: Annotated[Path, typer.Option(help="The data directory of the tap.")] = Path("tapproxy-data"),
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Remove what began longer ago: 90s, 12h, 30d, 2w.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Remove everything.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout.")
    ] = None,
) -> None:
    """Remove records, samples and kept runs, by age or all, saying what was removed."""
    if (older_than is None) == (not all_):
        raise ConfigError("say what to remove: either --older-than AGE (as 30d) or --all")
    before_unix_ns = None if older_than is None else time.time_ns() - parse_age_ns(older_than)
    removed = replace(remove_records(data, before_unix_ns), **_remove_runs(data, before_unix_ns))
    shown = {"schema": "tapproxy.purge/1", **asdict(removed)}
    output.show(shown, json_file, lambda: typer.echo("\n".join(_lines(removed, data))))


def _lines(removed: Removed, data: Path) -> Iterator[str]:
    yield (
        f"removed {_count(removed.records, 'record')} ({removed.size_bytes} bytes, "
        f"{_count(removed.files, 'whole file')}) from {data}; {_count(removed.kept_records, 'record')} kept"
    )
    if removed.samples or removed.kept_samples:
        yield (
            f"removed {_count(removed.samples, 'sample')} ({removed.samples_size_bytes} bytes) from {data}; "
            f"{_count(removed.kept_samples, 'sample')} kept"
        )
    if removed.runs or removed.kept_runs:
        yield (
            f"removed {_count(removed.runs, 'run')} ({removed.runs_size_bytes} bytes) from {data / 'runs'}; "
            f"{_count(removed.kept_runs, 'run')} kept"
        )


def parse_age_ns(text: str) -> int:
    """``90s``, ``12h``, ``30d``, ``2w`` → ns."""
    match = re.fullmatch(r"([0-9]{1,9})([smhdw])", text)
    if match is None:
        raise ConfigError(f"--older-than is {text!r}: expected a number and a unit, such as 90s, 12h, 30d or 2w")
    return int(match[1]) * _SECONDS[match[2]] * 10**9


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


@dataclass(frozen=True, slots=True)
class Removed:
    """What went and what stayed. ``size_bytes`` and ``files`` are those of the records."""

    records: int
    files: int
    size_bytes: int
    kept_records: int
    samples: int = 0
    samples_size_bytes: int = 0
    kept_samples: int = 0
    runs: int = 0
    runs_size_bytes: int = 0
    kept_runs: int = 0


@dataclass(slots=True)
class _Gone:
    """Of one kind: lines that went, whole files, bytes, lines that stayed."""

    lines: int = 0
    files: int = 0
    size_bytes: int = 0
    kept: int = 0


def remove_records(directory: Path, before_unix_ns: int | None) -> Removed:
    """Removes the records and samples from before the time given, or all of them (None)."""
    records, samples = _Gone(), _Gone()
    try:
        for kind, gone in ((Kind.RECORDS, records), (Kind.SAMPLES, samples)):
            _remove(directory, kind, before_unix_ns, gone)
    except OSError as error:
        until_then = f", after {_count(records.lines, 'record')} had been removed" if records.lines else ""
        raise ConfigError(
            f"the data directory {str(directory)!r} cannot be purged: {error.strerror or error}{until_then}; "
            "give the --data of the tap"
        ) from None
    return Removed(
        records.lines,
        records.files,
        records.size_bytes,
        records.kept,
        samples=samples.lines,
        samples_size_bytes=samples.size_bytes,
        kept_samples=samples.kept,
    )


def _remove(directory: Path, kind: Kind, before_unix_ns: int | None, gone: _Gone) -> None:
    """Counts in ``gone`` what went, also where it ends with an OSError."""
    for found in scan(directory, kind):
        with _locked(found.path) as fd:
            if fd is None:
                continue
            info = os.fstat(fd)
            # Last written before then: all of it is older, whether it can be read or not.
            everything = before_unix_ns is None or info.st_mtime_ns < before_unix_ns
            keep, lines = _sort(fd, None if everything else before_unix_ns, _TIMES[kind])
            if not keep:
                found.path.unlink(missing_ok=True)
                gone.files += 1
                gone.size_bytes += info.st_size
            elif lines:
                gone.size_bytes += info.st_size - _replace(found.path, keep)
            gone.lines += lines
            gone.kept += len(keep)


def _remove_runs(directory: Path, before_unix_ns: int | None) -> dict[str, int]:
    try:
        removed = Register(directory).remove(before_unix_ns)
    except OSError as error:
        raise ConfigError(f"the runs in {str(directory / 'runs')!r} cannot be removed: {error.strerror}") from None
    return {"runs": removed.runs, "runs_size_bytes": removed.size_bytes, "kept_runs": removed.kept}


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """The file with the lock its tap takes for every write; None where it has gone or was replaced."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield None
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd if os.fstat(fd).st_nlink else None
    finally:
        os.close(fd)


def _sort(fd: int, before_unix_ns: int | None, time_key: str) -> tuple[list[bytes], int]:
    """The lines to keep, and how many are not."""
    keep: list[bytes] = []
    gone = 0
    with open(fd, "rb", closefd=False) as file:
        for line in file:
            if before_unix_ns is None or _began_before(line, before_unix_ns, time_key):
                gone += 1
            else:
                keep.append(line if line.endswith(b"\n") else line + b"\n")
    return keep, gone


def _began_before(line: bytes, unix_ns: int, time_key: str) -> bool:
    try:
        return bool(orjson.loads(line)[time_key] < unix_ns)
    except (ValueError, TypeError, KeyError):
        return False


def _replace(path: Path, lines: list[bytes]) -> int:
    """Puts a file of these lines in the place of the old one at once; returns its size."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(fd, "wb") as file:
            file.writelines(lines)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
    return sum(map(len, lines))
