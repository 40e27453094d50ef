"""Alarms at absolute monotonic times.

The loops' own timers tick in milliseconds: uvloop's fire up to 1 ms early or late, asyncio's up to 1 ms late,
which is as large as what the tap is asked to measure. A timerfd armed with an absolute time is late by the
scheduler's wake-up only (tens of microseconds) and never early. Python has it from 3.13, hence ctypes.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import os
import time
from collections.abc import Callable
from typing import Protocol

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Alarm:
    """One callback at one time. ``cancel`` may be called at any time, also after it rang."""

    __slots__ = ("callback", "deadline_ns")

    def __init__(self, deadline_ns: int, callback: Callable[[], None]) -> None:
        self.deadline_ns = deadline_ns
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class Clock(Protocol):
    """Who rings; a test has one whose time stands still."""

    def at(self, deadline_ns: int, callback: Callable[[], None]) -> Alarm: ...


class AlarmClock:
    """Rings alarms in order of their deadlines, on the running event loop.

    ``precise=False`` uses the loop's own timers, as is done where there is no timerfd.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, precise: bool = True) -> None:
        self._loop = loop
        self._heap: list[tuple[int, int, Alarm]] = []
        self._count = 0
        self._armed_ns: int | None = None
        self.late_observed: Callable[[int], None] | None = None  # called with each alarm's lateness
        self._timer: asyncio.TimerHandle | None = None
        self._libc, self._descriptor = _timerfd() if precise else (None, None)
        if self._descriptor is not None:
            loop.add_reader(self._descriptor, self._ring)

    def close(self) -> None:
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def at(self, deadline_ns: int, callback: Callable[[], None]) -> Alarm:
        alarm = Alarm(deadline_ns, callback)
        self._count += 1
        heapq.heappush(self._heap, (deadline_ns, self._count, alarm))
        if self._armed_ns is None or deadline_ns < self._armed_ns:
            self._arm(deadline_ns)
        return alarm

    def _arm(self, deadline_ns: int) -> None:
        self._armed_ns = deadline_ns
        if self._descriptor is not None and self._libc is not None:
            # Zero would disarm it; a time gone by rings at once.
            seconds, nanoseconds = divmod(max(deadline_ns, 1), 1_000_000_000)
            spec = _Itimerspec(_Timespec(0, 0), _Timespec(seconds, nanoseconds))
            self._libc.timerfd_settime(self._descriptor, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None)
            return
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0, deadline_ns - time.monotonic_ns()) / 1e9
        self._timer = self._loop.call_later(delay_s, self._ring)

    def _ring(self) -> None:
        if self._descriptor is not None:
            try:
                os.read(self._descriptor, 8)
            except BlockingIOError:
                pass  # re-armed for later between the wake-up and this call
        self._armed_ns = None
        heap = self._heap
        # What is due at the entry only: an engine that is behind must not keep the sockets from being read.
        now_ns = time.monotonic_ns()
        while heap and heap[0][0] <= now_ns:
            deadline_ns, _, alarm = heapq.heappop(heap)
            if alarm.callback is not None:
                if self.late_observed is not None:
                    self.late_observed(time.monotonic_ns() - deadline_ns)
                callback, alarm.callback = alarm.callback, None
                callback()
        # A callback may have armed it, but perhaps not for the earliest.
        if heap:
            self._arm(heap[0][0])


def _timerfd() -> tuple[ctypes.CDLL | None, int | None]:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "timerfd_create"):
        return None, None  # not Linux
    descriptor = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    return (libc, descriptor) if descriptor >= 0 else (None, None)
