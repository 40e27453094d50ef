"""Bounds for a program that is somebody else's: a chat template may loop for hours, or ask for all memory.

Rules here: a clock that ticks once a second looks whether one rendering has lasted too long, and ends it; what it may
take of memory is bounded by the kernel. Neither costs the rendering anything that is measured. Outside the main thread,
and where there are no such timers, nothing is bounded.
"""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

# Real templates take a ms, of the longest conversations some tens.
MOST_S: Final = 10.0
# What is rendered of a million tokens is some MB.
MOST_BYTES: Final = 2 << 30
_TICK_S: Final = 1.0


class TooLongError(Exception):
    """One rendering lasted more than ``MOST_S``."""


class Running:
    """When what is bounded began (monotonic s); None while it does not run."""

    def __init__(self, most_s: float = MOST_S) -> None:
        self.most_s = most_s
        self.began_s: float | None = None

    def check(self, *_: Any) -> None:
        """Raises TooLongError, in whatever runs, where it has lasted too long."""
        if self.began_s is not None and time.monotonic() - self.began_s > self.most_s:
            self.began_s = None
            raise TooLongError(f"it took longer than {self.most_s:g} s")


@contextmanager
def bounded(running: Running, most_bytes: int = MOST_BYTES, tick_s: float = _TICK_S) -> Iterator[None]:
    """Within it ``running`` is looked after, and the process gets no more than ``most_bytes`` beside what it has."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, running.check)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        signal.setitimer(signal.ITIMER_REAL, tick_s, tick_s)
        most = _address_space_bytes() + most_bytes
        if soft == resource.RLIM_INFINITY or most < soft:
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space_bytes() -> int:
    """Of this process as it is."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return MOST_BYTES
