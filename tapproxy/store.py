"""Records and samples on disk: ``DIR/records-<utc>-<pid>.jsonl`` and ``samples-…``, one JSON object a line.

Rules here. Appending never waits: a bounded queue, an own thread, and what does not fit is lost and counted
with its reason. A line is in the kernel's hands moments after it was appended, so a killed process loses at
most what was queued (well under a second). Files are 0600, named by us alone, and never opened through a link.
The oldest files go when the directory is over its limit, which is one for both kinds. Whoever writes or rewrites a
file holds its flock, so several taps and a purge may share a directory. Samples have a queue of their own: a flood of
them costs no record.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import orjson

from tapproxy.core import shape
from tapproxy.core.errors import ConfigError
from tapproxy.core.record import Record
from tapproxy.core.sample import Sample


class Kind(StrEnum):
    """What the lines of a file are; how its name begins."""

    RECORDS = "records"
    SAMPLES = "samples"


_NAMES = {kind: re.compile(rf"{kind}-[0-9TZ.]+-[0-9]+\.jsonl\Z") for kind in Kind}
_FILE_BYTES = 64 << 20
_BATCH_BYTES = 1 << 20
# Between two rounds of the thread: enough to gather a batch under load, too short to matter otherwise.
_PAUSE_S = 0.02
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


# --- writing -----------------------------------------------------------------------------------------------


class RecordStore:
    """Appends lines of one kind. ``written``, ``lost``, ``removed`` and ``last_error`` may be read any time."""

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        file_bytes: int | None = None,
        queue_bytes: int = 64 << 20,
        queue_lines: int = 100_000,
        kind: Kind = Kind.RECORDS,
        beside: RecordStore | None = None,
    ) -> None:
        """Creates the directory where it is missing. Raises ConfigError where it can't be written.

        ``beside``: the store of the other kind, with which this one shares directory and limit; this one makes its file
        when there is something to write.
        """
        self.kind = kind
        self.written = 0
        self.lost = 0
        self.last_error: str | None = None
        self._queue_bytes_max = queue_bytes
        self._queue_lines_max = queue_lines
        self._lock = threading.Lock()  # guards the queue, its size, `lost` and `last_error`
        self._queue: deque[bytes] = deque()
        self._queue_bytes = 0
        self._wake = threading.Event()
        self._idle = threading.Event()  # everything appended is written or lost
        self._idle.set()
        self._closing = threading.Event()
        self._reopen = False
        # An eighth: removing the oldest file then costs an eighth of the records, not all of them.
        file_bytes = file_bytes or max(1, min(_FILE_BYTES, max_bytes // 8))
        space = _Space() if beside is None else beside._disk.space
        self._disk: _Disk = _Disk(directory, kind, space, max_bytes=max_bytes, file_bytes=file_bytes)
        self._batch_bytes = min(_BATCH_BYTES, file_bytes)
        try:
            if beside is None:
                self._disk.open()
            self._disk.make_room(0)
        except OSError as error:
            raise ConfigError(
                f"the data directory {str(directory)!r} cannot be written: {_why(error)}; "
                "give --data a directory this user can write"
            ) from None
        self._thread = threading.Thread(target=self._run, name=f"tapproxy-{kind}", daemon=True)
        self._thread.start()

    @property
    def removed(self) -> int:
        """Lines of this kind removed to stay within the limit, by whichever store removed them."""
        return self._disk.space.removed[self.kind]

    def append(self, line: bytes) -> None:
        """Queues one line, with or without its line feed. Never waits: lost and counted where there is no room."""
        size_bytes = len(line)
        with self._lock:
            if self._closing.is_set():
                self._lose(1, "the store is closed")
                return
            full = len(self._queue) >= self._queue_lines_max
            if full or self._queue_bytes + size_bytes > self._queue_bytes_max:
                self._lose(1, "the queue to the disk is full: the disk is slower than the traffic")
                return
            self._queue.append(line)
            self._queue_bytes += size_bytes
            self._idle.clear()
        if not self._wake.is_set():
            self._wake.set()

    def reopen(self) -> None:
        """For SIGHUP: the file's name is opened anew, since log rotation may have moved the file away."""
        self._reopen = True
        self._wake.set()

    def flush(self, timeout_s: float = 5.0) -> bool:
        """Waits until everything appended so far is written or lost; False where that took too long."""
        self._wake.set()
        return self._idle.wait(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Writes what is queued and ends the thread; what a stuck disk keeps it from writing is counted lost."""
        self._closing.set()
        self._wake.set()
        self._thread.join(timeout_s)
        with self._lock:
            self._lose(len(self._queue), "the disk did not take the last records in time")
            self._queue.clear()

    def stats(self) -> dict[str, Any]:
        """For /api/status."""
        return {
            "directory": str(self._disk.directory),
            "file": self._disk.name,
            "written": self.written,
            "lost": self.lost,
            "removed": self.removed,
            "queued": len(self._queue),
            "last_error": self.last_error,
        }

    def _run(self) -> None:
        last = False
        while not last:
            self._wake.wait()
            self._wake.clear()
            last = self._closing.is_set()
            with self._lock:
                lines, self._queue = self._queue, deque()
                self._queue_bytes = 0
            if self._reopen:
                self._reopen = False
                self._try(self._disk.reopen)
            for batch in _batches(lines, self._batch_bytes):
                self._write(batch)
            with self._lock:
                if not self._queue:
                    self._idle.set()
            if not last:
                self._closing.wait(_PAUSE_S)
        self._try(self._disk.close)

    def _write(self, batch: list[bytes]) -> None:
        """What can't be written now is lost: kept, it would only push out what comes after it."""
        try:
            kept, problem = self._disk.write(batch)
        except OSError as error:
            kept, problem = 0, _why(error)
        self.written += kept
        if problem is not None:
            with self._lock:
                self._lose(len(batch) - kept, problem)

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except OSError as error:
            self.last_error = _why(error)

    def _lose(self, records: int, why: str) -> None:
        if records:
            self.lost += records
            self.last_error = why


@dataclass(slots=True)
class _Space:
    """What the stores of one directory share. Whoever writes holds the lock: one disk, one limit."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    total_bytes: int = 0  # of all files of both kinds, as far as we know; a scan corrects it
    removed: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    names: dict[Kind, str] = field(default_factory=dict)  # the files that are being written, which no store removes


class _Disk:
    """The directory and its one open file. Any call may raise OSError; the next one starts over."""

    def __init__(self, directory: Path, kind: Kind, space: _Space, *, max_bytes: int, file_bytes: int) -> None:
        self.directory = directory
        self.kind = kind
        self.space = space
        self._max_bytes = max_bytes
        self._file_bytes = file_bytes
        self._set_name()
        self._fd: int | None = None
        self._torn = False  # our file ends in the middle of a line

    def _set_name(self) -> None:
        self.name = self.space.names[self.kind] = _new_name(self.kind)

    def write(self, batch: list[bytes]) -> tuple[int, str | None]:
        """Appends whole lines; (how many got there, what kept the rest from it)."""
        with self.space.lock:
            return self._write(batch)

    def _write(self, batch: list[bytes]) -> tuple[int, str | None]:
        data = b"\n".join(batch) + b"\n"
        if len(data) > self._max_bytes:
            return 0, f"a {self.kind[:-1]} is larger than --max-disk"
        if self.space.total_bytes + len(data) > self._max_bytes:
            self.make_room(len(data))
            if self.space.total_bytes + len(data) > self._max_bytes:
                self._rotate()
                self.make_room(len(data))
        fd = self._lock_file()
        if self._torn:
            data = b"\n" + data
        done, problem = _write_all(fd, data)
        kept = len(batch) if problem is None else max(0, data[:done].count(b"\n") - self._torn)
        self._torn = not data[:done].endswith(b"\n") if done else self._torn
        self.space.total_bytes += done
        fcntl.flock(fd, fcntl.LOCK_UN)
        if problem is not None:
            # A full disk may have room again; a file that fails otherwise is better opened anew.
            if problem.errno not in (errno.ENOSPC, errno.EDQUOT):
                self._close_file()
            return kept, _why(problem)
        if os.fstat(fd).st_size >= self._file_bytes:
            self._rotate()
        return kept, None

    def open(self) -> None:
        os.makedirs(self.directory, mode=0o700, exist_ok=True)
        fd = os.open(self.directory / self.name, _FLAGS, 0o600)
        found = os.fstat(fd)
        # In a directory that others can write, somebody may have made our name beforehand.
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            os.close(fd)
            raise OSError(errno.EPERM, f"{self.name} is there and is not a file of this user")
        self._fd = fd
        self._torn = found.st_size > 0 and os.pread(fd, 1, found.st_size - 1) != b"\n"

    def reopen(self) -> None:
        if self._fd is not None:
            self._close_file()
            self.open()

    def close(self) -> None:
        """A file that never got a record is not left behind."""
        if self._fd is not None and os.fstat(self._fd).st_size == 0:
            (self.directory / self.name).unlink(missing_ok=True)
        self._close_file()

    def make_room(self, wanted_bytes: int) -> None:
        """Removes whole files, the longest unwritten first, until ``wanted_bytes`` more fit."""
        with self.space.lock:
            files = [(file, kind) for kind in Kind for file in scan(self.directory, kind)]
            self.space.total_bytes = sum(file.size_bytes for file, _ in files)
            for file, kind in sorted(files, key=lambda each: (each[0].mtime_ns, each[0].path.name)):
                if self.space.total_bytes + wanted_bytes <= self._max_bytes:
                    break
                if file.path.name not in self.space.names.values():
                    self.space.removed[kind] += _count_lines(file.path)
                    file.path.unlink(missing_ok=True)
                    self.space.total_bytes -= file.size_bytes

    def _lock_file(self) -> int:
        """The open file with its flock held. One that a purge or a user removed is created anew."""
        for _ in range(100):
            if self._fd is None:
                self.open()
            fd = self._fd
            assert fd is not None
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink > 0:
                return fd
            self._close_file()
        raise OSError(errno.EBUSY, "the file is removed over and over")

    def _rotate(self) -> None:
        self._close_file()
        self._set_name()
        self.open()
        self.make_room(0)

    def _close_file(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)


def _write_all(fd: int, data: bytes) -> tuple[int, OSError | None]:
    """How many bytes the file took, and what stopped it short of all of them."""
    view, done = memoryview(data), 0
    try:
        while done < len(data):
            done += os.write(fd, view[done:])
    except OSError as error:
        return done, error
    return done, None


def _new_name(kind: Kind) -> str:
    return f"{kind}-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{os.getpid()}.jsonl"


def _batches(lines: Iterable[bytes], limit_bytes: int) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size_bytes = 0
    for line in lines:
        if batch and size_bytes + len(line) >= limit_bytes:
            yield batch
            batch, size_bytes = [], 0
        batch.append(line[:-1] if line.endswith(b"\n") else line)
        size_bytes += len(line) + 1
    if batch:
        yield batch


def _count_lines(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0


def _why(error: OSError) -> str:
    return error.strerror or str(error)


# --- reading -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordFile:
    """One file of records or samples."""

    path: Path
    size_bytes: int
    mtime_ns: int


def scan(directory: Path, kind: Kind = Kind.RECORDS) -> list[RecordFile]:
    """The files of that kind in the order in which they were begun. A link is none of ours."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if _NAMES[kind].match(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # a purge or another tap was faster
                    info = entry.stat(follow_symlinks=False)
                    found.append(RecordFile(Path(entry.path), info.st_size, info.st_mtime_ns))
    return sorted(found, key=lambda file: file.path.name)


Line = TypeVar("Line", Record, Sample)


class LineReader(Generic[Line]):
    """Iterates over records or samples, file by file.

    ``skipped`` lines could not be read; ``torn`` of them were the unfinished last line of a file, which a
    running tap may be writing and a killed one leaves.
    """

    def __init__(self, paths: list[Path], since_unix_ns: int, make: Callable[[Any], tuple[Line, int]]) -> None:
        """``make``: from a line's JSON object what it is and its wall-clock time; it raises where it is none."""
        self._paths = paths
        self._since_unix_ns = since_unix_ns
        self._make: Callable[[Any], tuple[Line, int]] = make
        self.skipped = 0
        self.torn = 0

    def __iter__(self) -> Iterator[Line]:
        for path in self._paths:
            try:
                file = path.open("rb")
            except FileNotFoundError:  # removed since it was listed
                continue
            except OSError as error:
                raise ConfigError(f"{str(path)!r} cannot be read: {_why(error)}") from None
            with file:
                for line in file:
                    made = self._read(line)
                    if made is not None and made[1] >= self._since_unix_ns:
                        yield made[0]

    def _read(self, line: bytes) -> tuple[Line, int] | None:
        if line.isspace():
            return None
        try:
            made = self._make(orjson.loads(line))
            if type(made[1]) is not int:
                raise TypeError("its time is not an integer")
            return made
        except (ValueError, TypeError, AttributeError):
            self.skipped += 1
            self.torn += not line.endswith(b"\n")
            return None


def read_records(path: Path, since_unix_ns: int | None = None) -> LineReader[Record]:
    """Records of a data directory, or of one file, that began at ``since_unix_ns`` or later.

    Raises ConfigError where the path can't be read. A broken line is skipped and counted.
    """
    return LineReader(_files(path, Kind.RECORDS), since_unix_ns or 0, _record)


def read_samples(path: Path, since_unix_ns: int | None = None) -> LineReader[Sample]:
    """Samples of a data directory, or of one file, that were taken at ``since_unix_ns`` or later.

    Raises ConfigError where the path can't be read. A broken line is skipped and counted.
    """
    return LineReader(_files(path, Kind.SAMPLES), since_unix_ns or 0, _sample)


def _files(path: Path, kind: Kind) -> list[Path]:
    if path.is_file():
        return [path]
    try:
        return [file.path for file in scan(path, kind)]
    except OSError as error:
        raise ConfigError(
            f"the data directory {str(path)!r} cannot be read: {_why(error)}; give the --data of the tap"
        ) from None


_SAMPLE: Final = shape.table(Sample)


def _record(data: Any) -> tuple[Record, int]:
    record = Record.from_dict(data)
    return record, record.t0_unix_ns


def _sample(data: Any) -> tuple[Sample, int]:
    sample = Sample.from_dict(data)
    for wrong in shape.repair(sample, _SAMPLE):
        raise TypeError(f"not a sample: its {wrong} is of another type")
    return sample, sample.t_unix_ns
