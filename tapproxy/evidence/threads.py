"""The threads of the engine's processes: how long they ran, how long they waited for a core, how often they lost it.

Rules here: ``/proc/PID/schedstat`` and the switches of ``/proc/PID/status`` are those of the first thread alone, so
every thread's own is read. What a process with a thousand threads costs is bounded: first threads and those that ran
last time are read each time, the sleeping ones by turns; a sum then misses the sleepers' rise for some turns, no more.
The first reading takes them all, so that nobody's past is counted as something new later.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable
from typing import Final

from tapproxy.evidence import procfs
from tapproxy.evidence.procfs import Stat
from tapproxy.evidence.rising import Rising

# A thread's file costs about 10 µs, so this is 2 to 3 ms a reading.
_MOST_A_TURN: Final = 256

_Thread = tuple[int, int, int]  # process, its start, thread


class Threads:
    """Counts over all threads that were ever seen. ``wait_told``: whether the kernel tells waiting at all."""

    def __init__(self, root: str, most_a_turn: int = _MOST_A_TURN) -> None:
        """``most_a_turn``: the files read at a reading, after the first."""
        self._root = root
        self._most = most_a_turn
        self.run_s = Rising()
        self.wait_s = Rising()
        self.switches = Rising()
        self.involuntary = Rising()
        self.wait_told = False
        self._slices: dict[_Thread, int] = {}  # of each, when it was read last
        self._awake: set[_Thread] = set()
        self._turns = 0
        self._read_at: dict[_Thread, int] = {}  # the turn of each one's last reading

    def read(self, members: Iterable[Stat]) -> None:
        """Raises nothing: a thread that ended meanwhile is left out."""
        alive = [thread for each in members for thread in self._of(each)]
        self._read_at = {thread: self._read_at.get(thread, 0) for thread in alive}
        run: dict[Hashable, float] = {}
        wait: dict[Hashable, float] = {}
        switches: dict[Hashable, float] = {}
        involuntary: dict[Hashable, float] = {}
        awake: set[_Thread] = set()
        for thread in self._turn(alive):
            times = self._times(thread)
            if times is not None:
                run[thread], wait[thread], slices = times
                self.wait_told = True
                if self._slices.get(thread) == slices:
                    continue  # it did not run, so it lost no core either
                self._slices[thread] = slices
            awake.add(thread)
            found = self._switches(thread)
            if found is not None:
                switches[thread], involuntary[thread] = found
        # At the first reading every thread is new, which is no sign that it runs.
        self._awake = awake if self._turns > 1 else set()
        there = set(alive)
        self._slices = {thread: each for thread, each in self._slices.items() if thread in there}
        for rising, readings in (
            (self.run_s, run),
            (self.wait_s, wait),
            (self.switches, switches),
            (self.involuntary, involuntary),
        ):
            rising.add(readings, there)

    def _of(self, process: Stat) -> list[_Thread]:
        try:
            names = os.listdir(f"{self._root}/proc/{process.pid}/task")
        except OSError:
            return []
        return [(process.pid, process.start_ticks, int(name)) for name in names if name.isdecimal()]

    def _turn(self, alive: list[_Thread]) -> list[_Thread]:
        """Which of them are read now."""
        self._turns += 1
        chosen = alive
        if len(alive) > self._most and self._turns > 1:
            first = [thread for thread in alive if thread[0] == thread[2]]
            # However many run, the others have a part of every turn.
            ran = [thread for thread in alive if thread in self._awake and thread[0] != thread[2]]
            first = (first + ran)[: self._most * 3 // 4]
            taken = set(first)
            others = sorted((thread for thread in alive if thread not in taken), key=self._read_at.__getitem__)
            chosen = first + others[: self._most - len(first)]
        for thread in chosen:
            self._read_at[thread] = self._turns
        return chosen

    def _times(self, thread: _Thread) -> tuple[float, float, int] | None:
        pid, _, tid = thread
        try:
            run_ns, wait_ns, slices = procfs.read(f"{self._root}/proc/{pid}/task/{tid}/schedstat").split()
            return int(run_ns) / 1e9, int(wait_ns) / 1e9, int(slices)
        except (OSError, ValueError):
            return None

    def _switches(self, thread: _Thread) -> tuple[int, int] | None:
        pid, _, tid = thread
        try:
            text = procfs.read(f"{self._root}/proc/{pid}/task/{tid}/status")
            voluntary = _field(text, "\nvoluntary_ctxt_switches:")
            involuntary = _field(text, "\nnonvoluntary_ctxt_switches:")
        except (OSError, ValueError):
            return None
        return voluntary + involuntary, involuntary


def _field(text: str, name: str) -> int:
    """The number after a name of ``status``. Raises ValueError where the name is not there."""
    start = text.index(name) + len(name)
    end = text.find("\n", start)
    return int(text[start : end if end >= 0 else len(text)])
