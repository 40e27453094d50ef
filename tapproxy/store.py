"""Records on disk: ``DIR/records-<utc>-<pid>.jsonl``, one JSON object a line.

Rules here. Appending never waits: a bounded queue, an own thread, and what does not fit is lost and counted
with its reason. A line is in the kernel's hands moments after it was appended, so a killed process loses at
most what was queued (well under a second). Files are 0600, named by us alone, and never opened through a link.
The oldest files go when the directory is over its limit. Whoever writes or rewrites a file holds its flock, so
several taps and a purge may share a directory.
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
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from tapproxy.core.errors import ConfigError
from tapproxy.core.record import Record

_NAME = re.compile(r"records-[0-9TZ.]+-[0-9]+\.jsonl\Z")
_FILE_BYTES = 64 << 20
_BATCH_BYTES = 1 << 20
# Between two rounds of the thread: enough to gather a batch under load, too short to matter otherwise.
_PAUSE_S = 0.02
_FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


# --- writing -----------------------------------------------------------------------------------------------


class RecordStore:
    """Appends lines to a directory. ``written``, ``lost``, ``removed`` and ``last_error`` may be read any time."""

    def __init__(
        self,
        directory: Path,
        *,
        max_bytes: int,
        file_bytes: int | None = None,
        queue_bytes: int = 64 << 20,
        queue_lines: int = 100_000,
    ) -> None:
        """Creates the directory where it is missing. Raises ConfigError where it can't be written."""
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
        self._disk = _Disk(directory, max_bytes=max_bytes, file_bytes=file_bytes)
        self._batch_bytes = min(_BATCH_BYTES, file_bytes)
        try:
            self._disk.open()
            self._disk.make_room(0)
        except OSError as error:
            raise ConfigError(
                f"the data directory {str(directory)!r} cannot be written: {_why(error)}; "
                "give --data a directory this user can write"
            ) from None
        self._thread = threading.Thread(target=self._run, name="tapproxy-store", daemon=True)
        self._thread.start()

    @property
    def removed(self) -> int:
        """Records removed to stay within the limit."""
        return self._disk.removed

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


class _Disk:
    """The directory and its one open file. Any call may raise OSError; the next one starts over."""

    def __init__(self, directory: Path, *, max_bytes: int, file_bytes: int) -> None:
        self.directory = directory
        self.name = _new_name()
        self.removed = 0
        self._max_bytes = max_bytes
        self._file_bytes = file_bytes
        self._total_bytes = 0  # of all record files, as far as we know; a scan corrects it
        self._fd: int | None = None
        self._torn = False  # our file ends in the middle of a line

    def write(self, batch: list[bytes]) -> tuple[int, str | None]:
        """Appends whole lines; (how many got there, what kept the rest from it)."""
        data = b"\n".join(batch) + b"\n"
        if len(data) > self._max_bytes:
            return 0, "a record is larger than --max-disk"
        if self._total_bytes + len(data) > self._max_bytes:
            self.make_room(len(data))
            if self._total_bytes + len(data) > self._max_bytes:
                self._rotate()
                self.make_room(len(data))
        fd = self._lock_file()
        if self._torn:
            data = b"\n" + data
        done, problem = _write_all(fd, data)
        kept = len(batch) if problem is None else max(0, data[:done].count(b"\n") - self._torn)
        self._torn = not data[:done].endswith(b"\n") if done else self._torn
        self._total_bytes += done
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
        self._close_file()
        self.open()

    def close(self) -> None:
        """A file that never got a record is not left behind."""
        if self._fd is not None and os.fstat(self._fd).st_size == 0:
            (self.directory / self.name).unlink(missing_ok=True)
        self._close_file()

    def make_room(self, wanted_bytes: int) -> None:
        """Removes whole files, the longest unwritten first, until ``wanted_bytes`` more fit."""
        files = scan(self.directory)
        self._total_bytes = sum(file.size_bytes for file in files)
        for file in sorted(files, key=lambda file: (file.mtime_ns, file.path.name)):
            if self._total_bytes + wanted_bytes <= self._max_bytes:
                break
            if file.path.name != self.name:
                self.removed += _count_lines(file.path)
                file.path.unlink(missing_ok=True)
                self._total_bytes -= file.size_bytes

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
        self.name = _new_name()
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


def _new_name() -> str:
    return f"records-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{os.getpid()}.jsonl"


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
    """One file of records."""

    path: Path
    size_bytes: int
    mtime_ns: int


def scan(directory: Path) -> list[RecordFile]:
    """The record files of a directory in the order in which they were begun. A link is none of ours."""
    found = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if _NAME.match(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # a purge or another tap was faster
                    info = entry.stat(follow_symlinks=False)
                    found.append(RecordFile(Path(entry.path), info.st_size, info.st_mtime_ns))
    return sorted(found, key=lambda file: file.path.name)


class RecordReader:
    """Iterates over records, file by file.

    ``skipped`` lines could not be read; ``torn`` of them were the unfinished last line of a file, which a
    running tap may be writing and a killed one leaves.
    """

    def __init__(self, paths: list[Path], since_unix_ns: int) -> None:
        self._paths = paths
        self._since_unix_ns = since_unix_ns
        self.skipped = 0
        self.torn = 0

    def __iter__(self) -> Iterator[Record]:
        for path in self._paths:
            try:
                file = path.open("rb")
            except FileNotFoundError:  # removed since it was listed
                continue
            except OSError as error:
                raise ConfigError(f"the records {str(path)!r} cannot be read: {_why(error)}") from None
            with file:
                for line in file:
                    record = self._read(line)
                    if record is not None and record.t0_unix_ns >= self._since_unix_ns:
                        yield record

    def _read(self, line: bytes) -> Record | None:
        if line.isspace():
            return None
        try:
            record = Record.from_dict(orjson.loads(line))
            if type(record.t0_unix_ns) is not int:
                raise TypeError("t0_unix_ns is not an integer")
            return record
        except (ValueError, TypeError, AttributeError):
            self.skipped += 1
            self.torn += not line.endswith(b"\n")
            return None


def read_records(path: Path, since_unix_ns: int | None = None) -> RecordReader:
    """Records of a data directory, or of one file, that began at ``since_unix_ns`` or later.

    Raises ConfigError where the path can't be read. A broken line is skipped and counted.
    """
    if path.is_file():
        return RecordReader([path], since_unix_ns or 0)
    try:
        files = scan(path)
    except OSError as error:
        raise ConfigError(
            f"the data directory {str(path)!r} cannot be read: {_why(error)}; give the --data of the tap"
        ) from None
    return RecordReader([file.path for file in files], since_unix_ns or 0)
