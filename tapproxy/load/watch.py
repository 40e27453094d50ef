"""How the load client itself fares: loop lag, share of a core, lateness of sends; and whether that spoils the numbers.

Rules here: latencies rest on the kernel's stamps, so a client that reads late is not yet wrong; one that is always
late merges reads and sends at the wrong times, and says so. A standstill from outside (the process was stopped, or
got no processor for a quarter of a second) is no load of its own: it is told apart, and the latency from the
scheduled time shows it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tapproxy.core import stats
from tapproxy.load.sender import Result
from tapproxy.load.trial import ClientFacts
from tapproxy.wire.alarms import Alarms

TICK_NS: Final = 10_000_000
# Beyond these the numbers are the client's own.
LAG_LIMIT_NS: Final = 10_000_000
LATE_LIMIT_NS: Final = 10_000_000
CPU_LIMIT: Final = 0.95
# A 99th percentile of fewer is the largest of them: one bad moment on a busy machine, and no verdict.
_LEAST_COUNT: Final = 100
# A tick this late while the process used hardly any processor time: it was not let run.
STANDSTILL_NS: Final = 250_000_000
_STANDSTILL_CPU: Final = 0.2
# Some start-up or a burst of a few requests says nothing of a core's load.
_LEAST_WALL_NS: Final = 1_000_000_000


@dataclass(slots=True)
class Vitals:
    """What one process saw of itself. Times are CLOCK_MONOTONIC ns."""

    lags_ns: list[int] = field(default_factory=list)
    # (from, to) of every standstill.
    stood_still: list[tuple[int, int]] = field(default_factory=list)
    wall_ns: int = 0
    cpu_ns: int = 0


class Watch:
    """Ticks while the load runs. Use as a context manager around it."""

    def __init__(self, alarms: Alarms) -> None:
        self.vitals = Vitals()
        self._alarms = alarms
        self._task: asyncio.Task[None] | None = None
        self._began = (0, 0)

    def __enter__(self) -> Watch:
        self._began = time.monotonic_ns(), time.process_time_ns()
        self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
        self.vitals.wall_ns += time.monotonic_ns() - self._began[0]
        self.vitals.cpu_ns += time.process_time_ns() - self._began[1]

    async def _run(self) -> None:
        due_ns = time.monotonic_ns() + TICK_NS
        before_ns = time.process_time_ns()
        while True:
            await self._alarms.until(due_ns)
            now_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
            lag_ns = now_ns - due_ns
            if lag_ns >= STANDSTILL_NS and cpu_ns - before_ns < _STANDSTILL_CPU * lag_ns:
                self.vitals.stood_still.append((due_ns - TICK_NS, now_ns))
            else:
                self.vitals.lags_ns.append(lag_ns)
            before_ns = cpu_ns
            due_ns = now_ns + TICK_NS


def facts(vitals: Sequence[Vitals], results: Iterable[Result]) -> ClientFacts:
    """The client's state over all its processes. Only sends with a schedule can be late."""
    lags = sorted(lag for each in vitals for lag in each.lags_ns)
    still = [span for each in vitals for span in each.stood_still]
    late = sorted(
        late_ns
        for result in results
        if not result.slot.warmup and (late_ns := _late_ns(result)) is not None and not _within(result.due_ns, still)
    )
    shares = [each.cpu_ns / each.wall_ns for each in vitals if each.wall_ns >= _LEAST_WALL_NS]
    longest = max((end - start for start, end in still), default=0)
    out = ClientFacts(
        loop_lag_max_ns=max(lags[-1] if lags else 0, longest) if lags or longest else None,
        loop_lag_p99_ns=_rank(lags, 0.99),
        # The busiest of them: one that is full spoils its part.
        cpu_share=max(shares, default=None),
        late_p50_ns=_rank(late, 0.5),
        late_p99_ns=_rank(late, 0.99),
        processes=len(vitals),
    )
    out.why = _why(out, enough_lags=len(lags) >= _LEAST_COUNT, enough_sends=len(late) >= _LEAST_COUNT)
    out.saturated = out.why is not None
    return out


def standstills(vitals: Sequence[Vitals]) -> list[str]:
    """A sentence for what stood still from outside."""
    spans = [end - start for each in vitals for start, end in each.stood_still]
    if not spans:
        return []
    return [
        f"The client was not let run {len(spans)} time{'s' if len(spans) > 1 else ''}, for {max(spans) / 1e9:.2f} s at"
        " most (stopped, or no processor to be had): latency from the scheduled time holds it, from the send does not."
    ]


def _late_ns(result: Result) -> int | None:
    """How long after its time a slot's sending began; opening a connection comes after that and is latency."""
    wanted = result.record.upstream.wanted
    if result.due_ns is None or wanted is None:
        return None
    return max(0, result.record.t0_mono_ns + wanted - result.due_ns)


def _within(at_ns: int | None, spans: Sequence[tuple[int, int]]) -> bool:
    return at_ns is not None and any(start <= at_ns <= end for start, end in spans)


def _rank(ordered: Sequence[int], p: float) -> int | None:
    found = stats.nearest_rank(ordered, p)
    return None if found is None else int(found)


def _why(found: ClientFacts, *, enough_lags: bool, enough_sends: bool) -> str | None:
    advice = "send less, or from more processes (--processes) on a machine with cores to spare"
    if found.cpu_share is not None and found.cpu_share >= CPU_LIMIT:
        return f"the client used {found.cpu_share:.0%} of a core: {advice}"
    if enough_lags and found.loop_lag_p99_ns is not None and found.loop_lag_p99_ns >= LAG_LIMIT_NS:
        return f"the client was {found.loop_lag_p99_ns / 1e6:.0f} ms late to look at its sockets (P99): {advice}"
    late_ns, which = (found.late_p99_ns, "P99") if enough_sends else (found.late_p50_ns, "P50")
    if late_ns is not None and late_ns >= LATE_LIMIT_NS:
        return f"requests went out {late_ns / 1e6:.0f} ms after their time ({which}): {advice}"
    return None
