"""What a comparison shows of itself while it runs: one line on stderr, on a terminal only.

Written by the load's own loop, a few times a second, without a thread: a drawing thread would take the interpreter
from the sends for milliseconds.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TextIO

from tapproxy.core import metrics
from tapproxy.load.sender import Result
from tapproxy.report import console

_EVERY_S: Final = 0.5
_BAR: Final = 12


@dataclass(slots=True)
class Tally:
    """What has come so far of one run."""

    label: str
    total: int | None
    # Of a run that the clock ends: how long it takes in all.
    duration_s: float | None = None
    started_ns: int = field(default_factory=time.monotonic_ns)
    done: int = 0
    errors: int = 0
    ttft_ns: dict[str, list[int]] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        """One more."""
        self.done += 1
        if result.failure is not None:
            self.errors += 1
            return
        ttft = metrics.ttft_ns(result.record)
        if ttft is not None and not result.slot.warmup:
            insort(self.ttft_ns.setdefault(result.slot.path, []), ttft)

    def text(self, now_ns: int) -> str:
        """Bar, count, rate, time left, errors, P50 of TTFT on each path so far."""
        elapsed_s = max(1e-9, (now_ns - self.started_ns) / 1e9)
        share = self._share(elapsed_s)
        parts = [self.label] if self.label else []
        if share is not None:
            filled = round(_BAR * share)
            parts.append("[" + "#" * filled + "-" * (_BAR - filled) + "]")
        parts.append(f"{self.done}/{self.total}" if self.total else f"{self.done} requests")
        parts.append(f"{self.done / elapsed_s:.1f}/s")
        if share:
            parts.append(f"ETA {_clock(elapsed_s / share - elapsed_s)}")
        # Before what grows with the number of paths: a narrow terminal cuts the end off.
        parts.append(f"{self.errors} error{'' if self.errors == 1 else 's'}")
        middles = [f"{path} {found[(len(found) - 1) // 2] / 1e6:.1f}" for path, found in self.ttft_ns.items() if found]
        if middles:
            parts.append(f"TTFT P50 {', '.join(middles)} ms")
        return "  ".join(parts)

    def _share(self, elapsed_s: float) -> float | None:
        if self.total:
            return min(1.0, self.done / self.total)
        return min(1.0, elapsed_s / self.duration_s) if self.duration_s else None


def _clock(seconds: float) -> str:
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes}:{rest:02}"


class ProgressLine:
    """The line. Use as a context manager, on a running loop; nothing is shown where stderr is no terminal."""

    def __init__(self, stream: TextIO | None = None, columns: Callable[[], int] | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._columns = columns or (lambda: shutil.get_terminal_size().columns)
        self._shown = False
        self._handle: asyncio.TimerHandle | None = None
        self.tally: Tally | None = None

    def __enter__(self) -> ProgressLine:
        if self._stream is not None and self._stream.isatty():
            self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handle.cancel()
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def add(self, result: Result) -> None:
        """One more request has ended."""
        if self.tally is not None:
            self.tally.add(result)

    def _draw(self) -> None:
        self._handle = asyncio.get_running_loop().call_later(_EVERY_S, self._draw)
        if self.tally is None:
            return
        text = console.clean(self.tally.text(time.monotonic_ns()))[: max(20, self._columns() - 1)]
        self._shown = True
        self._stream.write(f"\r{text}\x1b[K")
        self._stream.flush()
