"""Files of ``/proc`` and ``/sys`` under a root directory, read whole in one go.

Rules here: every reader takes paths below one root, so that a directory stands in for a machine. What is not there
raises OSError, what is no such file raises ValueError; who asked says which signals that leaves absent.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

# A process may bear any name, brackets and spaces too: the fields count from the last bracket.
_STATE, _PPID, _MAJFLT, _UTIME, _STIME, _THREADS, _START, _RSS = 0, 1, 9, 11, 12, 17, 19, 21
_TICKS_A_SECOND: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
# More than /proc/stat of the largest machines (an interrupt is a number each).
_MOST_BYTES: Final = 1 << 20
# Ended, and only not collected by its parent yet.
_ENDED_STATES: Final = ("Z", "X", "x")


def read(path: str) -> str:
    """The text of a file, at most 1 MiB of it. Raises OSError.

    Without a file object: these are read by the hundred every second.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        data = os.read(handle, 16384)
        if len(data) >= 4096:  # a file of /proc comes in pieces of its own choice, so a full page may not be all
            pieces, size = [data], len(data)
            while size < _MOST_BYTES and (more := os.read(handle, 65536)):
                pieces.append(more)
                size += len(more)
            data = b"".join(pieces)
    finally:
        os.close(handle)
    return data.decode("utf-8", "replace")


def boot_id(root: str = "") -> str | None:
    """Which boot of which machine: monotonic times of one boot compare. None where it is not told."""
    try:
        return read(f"{root}/proc/sys/kernel/random/boot_id").strip() or None
    except OSError:
        return None


def seconds(ticks: int) -> float:
    """The kernel's clock ticks as seconds."""
    return ticks / _TICKS_A_SECOND


@dataclass(frozen=True, slots=True)
class Stat:
    """``/proc/PID/stat``. ``start_ticks``, from the boot on, tells two processes that had one number apart."""

    pid: int
    name: str
    ppid: int
    start_ticks: int
    cpu_s: float
    threads: int
    rss_bytes: int
    major_faults: int
    ended: bool


def stat(root: str, pid: int) -> Stat:
    """Reads one process. Raises OSError where there is none, ValueError where the file is no such thing."""
    text = read(f"{root}/proc/{pid}/stat")
    opening, closing = text.find("("), text.rfind(")")
    fields = text[closing + 1 :].split()
    if opening < 0 or closing < opening or len(fields) <= _RSS:
        raise ValueError(f"/proc/{pid}/stat is no process's")
    return Stat(
        pid=pid,
        name=text[opening + 1 : closing],
        ppid=int(fields[_PPID]),
        start_ticks=int(fields[_START]),
        cpu_s=seconds(int(fields[_UTIME]) + int(fields[_STIME])),
        threads=int(fields[_THREADS]),
        rss_bytes=max(0, int(fields[_RSS])) * _PAGE_BYTES,
        major_faults=int(fields[_MAJFLT]),
        ended=fields[_STATE] in _ENDED_STATES,
    )


def pids(root: str) -> list[int]:
    """Every process that can be seen here. Raises OSError."""
    return [int(name) for name in os.listdir(f"{root}/proc") if name.isdecimal()]


def cpu_list(text: str) -> set[int]:
    """``0-3,8`` as numbers. Raises ValueError."""
    found: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found
