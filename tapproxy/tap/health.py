"""Whether this process was there when it should have been: pauses of the loop and of the collector, stolen CPU time.

A stamp taken by a process that was away is late, and a record full of late stamps blames the engine for it. Here it is
decided which records are void, and why. The rules, each with its reason:

* long: a pause of more than 100 ms while the exchange was open. What came meanwhile was read as one, and one read has
  one stamp, up to 100 ms wrong. That is more than the thresholds of a verdict.
* start: the first byte of the request was read in a pause or right after it. t0 has no kernel stamp and may be as late
  as the pause was long. Void when that is more than a tenth of the record's first number (TTFT; where there is no
  token, the whole exchange).
* share: pauses that could displace events took more than a tenth of the time from the first event to the last. With
  user stamps every pause displaces what came in it; with kernel stamps only one that is longer than the median gap
  between events (ICL), which merges two of them into one read.
* steal: in a tenth of the exchange others had more than a tenth of the CPU time that this host wanted, and at least 5 %
  of a CPU. Then the kernel itself was late, and its stamps with it. Sampled once a second: the second that is not over
  yet is taken to be as the last one was.

Pauses below 5 ms do not count: on a shared machine they come all the time, and they move no median. What a busy tap
adds to an event is no reason: kernel stamps show it as queueing and forward delay, which is a finding and not an error.
The loop's pauses are seen by a timer, so one that is shorter than a tick may be missed, and shows shorter than it was.
"""

from __future__ import annotations

import gc
import statistics
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tapproxy.core import metrics
from tapproxy.core.record import Record

TICK_NS: Final = 20_000_000
PAUSE_NS: Final = 5_000_000
LONG_NS: Final = 100_000_000
SPOILED_SHARE: Final = 0.1
STEAL_SHARE: Final = 0.1
STEAL_LEAST_OF_CPU: Final = 0.05
# Pauses that are remembered; an hour of a pause a second.
_PAUSES: Final = 4096
_ROBBERIES: Final = 1024
# /proc/stat counts in hundredths of a second on every platform Python knows of as Linux.
_JIFFY_NS: Final = 10_000_000


class Pauses:
    """Pauses of one kind, oldest first; they do not overlap."""

    __slots__ = ("_ends", "_starts", "max_ns")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.max_ns = 0  # since it was last set to 0

    def add(self, start_ns: int, end_ns: int) -> None:
        """Notes a pause, where it is long enough to matter."""
        self.max_ns = max(self.max_ns, end_ns - start_ns)
        if end_ns - start_ns < PAUSE_NS:
            return
        if len(self._ends) >= _PAUSES:
            del self._starts[: _PAUSES // 2], self._ends[: _PAUSES // 2]
        self._starts.append(start_ns)
        self._ends.append(end_ns)

    @property
    def last_end_ns(self) -> int:
        """0 where there was none."""
        return self._ends[-1] if self._ends else 0

    def spoil(self, record: Record) -> bool:
        """Whether they move a number of this record by more than they may."""
        t0_ns = record.t0_mono_ns
        end_ns = t0_ns + (record.downstream.end or 0)
        first = bisect_left(self._ends, t0_ns - TICK_NS)
        if first == len(self._ends):
            return False
        late_ns, lengths_ns = 0, []
        events = record.events.arrived
        from_ns, to_ns = (t0_ns + events[0], t0_ns + events[-1]) if events else (t0_ns, end_ns)
        for start_ns, stop_ns in zip(self._starts[first:], self._ends[first:], strict=True):
            if start_ns >= end_ns:
                break
            if stop_ns >= t0_ns and stop_ns - start_ns > LONG_NS:
                return True
            if start_ns < t0_ns <= stop_ns + min(stop_ns - start_ns, TICK_NS):
                late_ns = max(late_ns, min(stop_ns - start_ns, t0_ns - start_ns))
            within_ns = min(stop_ns, to_ns) - max(start_ns, from_ns)
            if within_ns > 0:
                lengths_ns.append(within_ns)
        if late_ns > SPOILED_SHARE * _first_number_ns(record):
            return True
        return self._displaced(record, lengths_ns, to_ns - from_ns)

    @staticmethod
    def _displaced(record: Record, lengths_ns: list[int], span_ns: int) -> bool:
        if len(record.events.arrived) < 2 or sum(lengths_ns) <= SPOILED_SHARE * span_ns:
            return False
        if record.stamps.source == "kernel":
            gaps_ns = metrics.icl_ns(record)
            least_ns = statistics.median(gaps_ns) if gaps_ns else 0
            lengths_ns = [length_ns for length_ns in lengths_ns if length_ns > least_ns]
        return sum(lengths_ns) > SPOILED_SHARE * span_ns


def _first_number_ns(record: Record) -> int:
    ttft_ns = metrics.ttft_ns(record)
    return (record.downstream.end or 0) if ttft_ns is None else ttft_ns


@dataclass(frozen=True, slots=True)
class _Counters:
    """The host's CPU time so far: what it wanted (used, and stolen from it), and what was stolen."""

    at_ns: int
    wanted_ns: int
    stolen_ns: int
    own_ns: int


class Health:
    """What one process knows of its own absences. Everything is CLOCK_MONOTONIC ns."""

    def __init__(
        self,
        *,
        proc: Path = Path("/proc"),
        now_ns: Callable[[], int] = time.monotonic_ns,
        cpu_ns: Callable[[], int] = time.process_time_ns,
    ) -> None:
        self.loop = Pauses()
        self.collector = Pauses()
        self.steal_share: float | None = None
        self.cpu_share: float | None = None
        self._stat = proc / "stat"
        self._now_ns = now_ns
        self._cpu_ns = cpu_ns
        self._collecting_ns = 0
        # (from, to) in which too much was stolen.
        self._stolen: deque[tuple[int, int]] = deque(maxlen=_ROBBERIES)
        self._before = self._counters()

    # -- the collector

    def start(self) -> None:
        """Watches the collector."""
        gc.callbacks.append(self._collected)

    def stop(self) -> None:
        if self._collected in gc.callbacks:
            gc.callbacks.remove(self._collected)

    def _collected(self, phase: str, _info: dict[str, int]) -> None:
        now_ns = self._now_ns()
        if phase == "start":
            self._collecting_ns = now_ns
        else:
            self.collector.add(self._collecting_ns, now_ns)

    # -- the loop

    def ticked(self, due_ns: int) -> None:
        """A timer that was due then runs now."""
        now_ns = self._now_ns()
        if now_ns > due_ns:
            self.loop.add(due_ns, now_ns)

    # -- the host

    def sample(self) -> None:
        """Call about once a second."""
        before, now = self._before, self._counters()
        took_ns = now.at_ns - before.at_ns
        if took_ns <= 0:
            return
        self._before = now
        self.cpu_share = (now.own_ns - before.own_ns) / took_ns
        wanted_ns, stolen_ns = now.wanted_ns - before.wanted_ns, now.stolen_ns - before.stolen_ns
        if now.wanted_ns == 0:
            self.steal_share = None
            return
        self.steal_share = stolen_ns / wanted_ns if wanted_ns > 0 else 0.0
        if self.steal_share > STEAL_SHARE and stolen_ns >= STEAL_LEAST_OF_CPU * took_ns:
            from_ns = before.at_ns
            if self._stolen and self._stolen[-1][1] >= from_ns:
                from_ns = self._stolen.pop()[0]
            self._stolen.append((from_ns, now.at_ns + took_ns))

    def _counters(self) -> _Counters:
        wanted, stolen = _cpu_jiffies(self._stat)
        return _Counters(self._now_ns(), wanted * _JIFFY_NS, stolen * _JIFFY_NS, self._cpu_ns())

    # -- what comes of it

    def void_reason(self, record: Record) -> str | None:
        """Why this record's numbers can't be trusted; None where they can. Call when the exchange has ended."""
        t0_ns = record.t0_mono_ns
        if self.collector.last_end_ns >= t0_ns - TICK_NS and self.collector.spoil(record):
            return "gc_pause"
        if self._stolen and self._stolen[-1][1] >= t0_ns and self._robbed(t0_ns, t0_ns + (record.downstream.end or 0)):
            return "steal"
        if self.loop.last_end_ns >= t0_ns - TICK_NS and self.loop.spoil(record):
            return "loop_lag"
        return None

    def _robbed(self, t0_ns: int, end_ns: int) -> bool:
        """Whether a tenth of the exchange lies in seconds in which too much was stolen."""
        covered_ns = sum(max(0, min(to_ns, end_ns) - max(from_ns, t0_ns)) for from_ns, to_ns in self._stolen)
        return covered_ns > SPOILED_SHARE * (end_ns - t0_ns)

    def status(self) -> dict[str, Any]:
        """For the status frame; the maxima begin anew."""
        out = {
            "loop_lag_max_ns": self.loop.max_ns,
            "gc_pause_max_ns": self.collector.max_ns,
            "steal_share": self.steal_share,
            "cpu_share": self.cpu_share,
        }
        self.loop.max_ns = self.collector.max_ns = 0
        return out


def _cpu_jiffies(stat: Path) -> tuple[int, int]:
    """(wanted, stolen) of all CPUs together since boot; zeros where the platform does not tell."""
    try:
        with stat.open("rb") as file:
            words = file.readline().split()
        # proc_stat(5): user nice system idle iowait irq softirq steal …; guest time is in user already.
        user, nice, system, _idle, _iowait, irq, softirq, steal = (int(word) for word in words[1:9])
    except (OSError, ValueError):
        return 0, 0
    return user + nice + system + irq + softirq + steal, steal
