"""Waiting until an absolute monotonic time, to tens of microseconds.

The loops' own timers tick in milliseconds, which is as large as what a load client wants to say of its own lateness.
A timerfd armed with an absolute time is late by the scheduler's wake-up only and never early. Python has it from
3.13, hence ctypes; where there is none, the loop's timers serve.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import os
import time
from collections.abc import Callable
from typing import Final

_CLOCK_MONOTONIC: Final = 1
_TFD_TIMER_ABSTIME: Final = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarms:
    """Wakes whoever waits, in the order of their times, on the running loop. ``close`` wakes nobody."""

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns, *, precise: bool = True) -> None:
        self._loop = asyncio.get_running_loop()
        self._now_ns = now_ns
        self._heap: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = 0
        self._armed_ns: int | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._libc, self._fd = _timerfd() if precise else (None, None)
        if self._fd is not None:
            self._loop.add_reader(self._fd, self._ring)

    async def until(self, at_ns: int) -> None:
        """Returns at ``at_ns`` of CLOCK_MONOTONIC, at once where that is past."""
        if at_ns <= self._now_ns():
            return
        future = self._loop.create_future()
        self._count += 1
        heapq.heappush(self._heap, (at_ns, self._count, future))
        if self._armed_ns is None or at_ns < self._armed_ns:
            self._arm(at_ns)
        await future

    def close(self) -> None:
        """Forgets everybody."""
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._fd is not None:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _arm(self, at_ns: int) -> None:
        self._armed_ns = at_ns
        if self._fd is not None and self._libc is not None:
            seconds, nanoseconds = divmod(max(at_ns, 1), 1_000_000_000)  # zero would disarm it
            spec = _Itimerspec(_Timespec(0, 0), _Timespec(seconds, nanoseconds))
            self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None)
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0, at_ns - self._now_ns()) / 1e9, self._ring)

    def _ring(self) -> None:
        if self._fd is not None:
            try:
                os.read(self._fd, 8)
            except BlockingIOError:
                pass  # armed anew between the wake-up and this call
        self._armed_ns = None
        now_ns = self._now_ns()
        while self._heap and (self._heap[0][0] <= now_ns or self._heap[0][2].done()):
            future = heapq.heappop(self._heap)[2]
            if not future.done():
                future.set_result(None)
        if self._heap:
            self._arm(self._heap[0][0])


def _timerfd() -> tuple[ctypes.CDLL | None, int | None]:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "timerfd_create"):
        return None, None  # not Linux
    fd = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    return (libc, fd) if fd >= 0 else (None, None)
