"""The host that the engine runs on: processors that it waits for.

Rules here: a busy processor is no trouble; that the engine waits for one is. What counts is time: that its processes
stood ready without a core, that its CPU limit ran out, that tokens came later while it was so, or that much of TTFT
goes in its frontend. What is only tight is worth knowing.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil
from typing import Final

from tapproxy.core.sample import Sample
from tapproxy.diagnose import engine_frontend, engine_start, engine_steps, periods
from tapproxy.diagnose.facts import Fact, Named, median_ns, percent
from tapproxy.diagnose.rule import Case
from tapproxy.diagnose.series import Series

# latency_tree, host.cpu: a process at 90 % of a core; of a Python process one thread, since it has one core at a time.
BUSIEST_CORES: Final = 0.9
# More ready than there are cores, in half of the readings.
LASTING_SHARE: Final = 0.5
READINGS_LEAST: Final = 3
# A part of the run is enough where the streams show what it cost.
PART_SHARE: Final = 0.1
# Of the time: ready without a core, stolen by the hypervisor, stalled as the kernel counts it.
WAIT_SHARE: Final = 0.2
STEAL_SHARE: Final = 0.1
PRESSURE_SHARE: Final = 0.4
# Of the periods of a CPU limit, those in which it ran out: Kubernetes' own alarm (CPUThrottlingHigh) rings at a
# quarter. The time that a group was stopped tells less: it adds up over cores, and kernels count it differently.
LIMITED_SHARE: Final = 0.25
# So many periods (of 100 ms, unless told otherwise) give a share.
PERIODS_LEAST: Final = 10
# vLLM: 2 + N physical cores for N GPUs.
CORES_BESIDE: Final = 2
HERE: Final = "yes"
# Alone it is the sign of a process that has much to do, not of a host that is short.
_BUSIEST: Final = "busiest engine"
_LIMITED: Final = "periods in which the engine's CPU limit ran out"


def cpu(case: Case) -> Named | None:
    """The engine waits for processors. A host on which no engine runs, or none is known to, slows nobody's engine."""
    for source, series in case.evidence.hosts.items():
        if len(series.samples) < READINGS_LEAST or series.fact("engine_here") != HERE:
            continue
        signs = _signs(case, series)
        firing = [fact for fact, fires, _ in signs if fires]
        starving = [fact for fact in firing if not fact.what.startswith(_BUSIEST)]
        marks = _starved(series)
        starved = sum(held for _, held in marks) / len(marks)
        cost = periods.compare_marks(case, marks) if starved >= PART_SHARE else None
        facts = [fact for fact, _, _ in signs]
        rejected = _rivals(case)
        if cost is not None:
            what = "readings between which the engine was held back"
            facts.insert(0, Fact(what, percent(starved), "%", len(marks), percent(PART_SHARE)))
            return cost.named(facts, 0.85, rejected)
        if not firing:
            continue
        waits = max((wait for _, fires, wait in signs if fires), default=0.0)
        held_up = engine_steps.dragged(case, engine_start.cold_ids(case)) if starving else None
        if held_up is not None:
            facts += held_up.facts()
            slower, of_ns = held_up.excess_ns, held_up.whole_ns
            return Named(facts, "ttft", 0.7, "warning", slower, of_ns, rejected, stage="engine.prefill")
        slow = engine_frontend.slow_frontend(case.requests)
        if slow and starving and case.view.engine_side:
            # Of the same requests as engine.tokenizer has them, which this explains.
            known = [one for one in case.requests if one.frontend_ns is not None]
            about = known if 2 * len(slow) >= len(known) else slow
            effects = [one.frontend_ns or 0 for one in about]
            whole_ns = median_ns([one.ttft_ns for one in about])
            return Named(facts, "ttft", 0.6, "warning", effects, whole_ns, rejected, stage="engine.frontend")
        if waits:
            # Stopped for a share of the time, everything takes that much longer: an estimate, not a measurement.
            gaps = [gap for one in case.requests for gap in one.gaps_ns if gap > 0]
            whole_ns = median_ns(gaps)
            effects = [round(gap * min(waits, 1.0)) for gap in gaps]
            facts.append(Fact("estimated: that share of every gap between tokens", percent(waits), "%", len(gaps)))
            return Named(facts, "icl", 0.6, "warning", effects, whole_ns, rejected, stage="engine.decode")
        if any(fact.what == _LIMITED for fact in firing):
            # Stopped in each of these periods, for how long nothing tells.
            return Named(facts, None, 0.6, "warning", rejected=rejected, stage="engine.decode")
        advice = f"{source}: processors are tight, and nothing measured shows that it matters yet."
        return Named(facts, None, 0.4, "info", rejected=rejected, advice=advice, stage="engine.frontend")
    return None


def is_starving(case: Case) -> bool:
    """Whether a host of the engine shows that more stood ready than it had cores for."""
    return any(
        fires and not fact.what.startswith(_BUSIEST)
        for series in case.evidence.hosts.values()
        if len(series.samples) >= READINGS_LEAST and series.fact("engine_here") == HERE
        for fact, fires, _ in _signs(case, series)
    )


def _signs(case: Case, series: Series) -> list[tuple[Fact, bool, float]]:
    """(fact, whether it is over its threshold, the share of time that it says was lost)."""
    count = len(series.samples)
    found: list[tuple[Fact, bool, float]] = []

    def share(what: str, value: float | None, limit: float, lost: bool = False, n: int = count) -> None:
        if value is not None:
            found.append((Fact(what, percent(value), "%", n, percent(limit)), value >= limit, value * lost))

    waited = series.rate("engine_longest_thread_wait_s")
    # One thread's waiting is time lost. Added up over threads, most of which nobody waits for, it is only a sign.
    share("time in which the engine's thread that waited most was ready without a core", waited, WAIT_SHARE, True)
    if waited is None:
        what = "time in which engine processes were ready without a core, over all threads"
        share(what, series.rate("engine_runqueue_wait_s"), WAIT_SHARE)
    periods_passed = series.rise("cgroup_periods")
    if periods_passed is not None and periods_passed >= PERIODS_LEAST:
        ran_out = (series.rise("cgroup_throttled_periods") or 0.0) / periods_passed
        share(_LIMITED, ran_out, LIMITED_SHARE, n=int(periods_passed))
    stolen, total = series.rate("cpu_steal_s"), series.rate("cpu_total_s") or series.latest("cores") or 1
    what = "processor time stolen by the hypervisor"
    share(what, None if stolen is None else stolen / total, STEAL_SHARE, True)
    share("time in which something waited for a core (PSI)", series.rate("psi_cpu_some_s"), PRESSURE_SHARE)
    thread = series.rate("engine_busiest_thread_cpu_s")
    if thread is not None:
        share(f"{_BUSIEST} thread, of a core", thread, BUSIEST_CORES)
    else:
        share(f"{_BUSIEST} process, of a core", series.rate("engine_busiest_cpu_s"), BUSIEST_CORES)
    cores, queues = series.latest("cores"), series.values("run_queue")
    if cores and queues:
        over = sum(length > cores for length in queues) / len(queues)
        fact = Fact(
            f"readings with more ready than the {int(cores)} cores",
            percent(over),
            "%",
            len(queues),
            percent(LASTING_SHARE),
        )
        found.append((fact, over >= LASTING_SHARE, 0.0))
    physical, cards = _physical_cores(series), _cards(case)
    if physical is not None and cards:
        least = CORES_BESIDE + cards
        fact = Fact(f"physical cores, for {cards} GPUs", int(physical), "cores", 1, least)
        found.append((fact, physical < least, 0.0))
    return found


def _physical_cores(series: Series) -> float | None:
    """Those it may run on, and no more than its CPU limit; else all of the host."""
    own = series.latest("engine_physical_cores")
    cores = own if own is not None else series.latest("physical_cores")
    limit = series.latest("cpu_limit_cores")
    return cores if cores is None or limit is None else min(cores, limit)


def _cards(case: Case) -> int:
    """The cards that the engine uses on this host, as its log says; else those of the host; else those sampled."""
    used, nodes = case.evidence.launched("gpus_used"), case.evidence.launched("nodes") or 1
    if used is not None:
        return ceil(used / nodes)
    return int(case.evidence.launched("gpus") or len(case.evidence.gpus))


def _starved(series: Series) -> list[tuple[int, bool]]:
    """From when to when the engine waited for cores, by the readings' differences."""
    marks = []
    for before, after in pairwise(series.samples):
        seconds = (after.t_mono_ns - before.t_mono_ns) / 1e9
        marks.append((before.t_mono_ns, seconds > 0 and _waits(before, after, seconds)))
    return marks


def _waits(before: Sample, after: Sample, seconds: float) -> bool:
    """The engine's own waiting decides where it is told; else what the host waited for; else a moment's queue."""

    def rise(counter: str) -> float | None:
        if counter not in before.values or counter not in after.values:
            return None
        return after.values[counter] - before.values[counter]

    passed, ran_out = rise("cgroup_periods"), rise("cgroup_throttled_periods")
    if passed and ran_out is not None and ran_out >= LIMITED_SHARE * passed:
        return True
    for counter, limit in (
        ("engine_longest_thread_wait_s", WAIT_SHARE),
        ("engine_runqueue_wait_s", WAIT_SHARE),
        ("psi_cpu_some_s", PRESSURE_SHARE),
    ):
        waited = rise(counter)
        if waited is not None:
            return waited >= limit * seconds
    cores, queue = after.values.get("cores"), after.values.get("run_queue")
    # With a limit that did not run out the engine was not held back; without one nothing better is known.
    return not passed and cores is not None and queue is not None and queue > cores


def _rivals(case: Case) -> list[tuple[str, str]]:
    waiting = [mean for each in case.evidence.engines.values() if (mean := each.mean("waiting")) is not None]
    if not waiting or max(waiting) >= 1:
        return []
    return [("engine.queue", f"{max(waiting):.2f} requests wait in its queue on the mean")]
