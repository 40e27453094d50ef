"""The host that the engine runs on: processors that it waits for.

Rules here: a busy processor is no trouble; that the engine waits for one is. What counts is time: that its processes
stood ready without a core, that its group was stopped, that tokens came later while it was so, or that much of TTFT
goes in its frontend. What is only tight is worth knowing.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

from tapproxy.core.sample import Sample
from tapproxy.diagnose import engine_frontend, engine_start, engine_steps, periods
from tapproxy.diagnose.facts import Fact, Named, median_ns, percent
from tapproxy.diagnose.rule import Case
from tapproxy.diagnose.series import Series

# latency_tree, host.cpu: a process at 90 % of a core.
PROCESS_CORES: Final = 0.9
# More ready than there are cores, in half of the readings.
LASTING_SHARE: Final = 0.5
READINGS_LEAST: Final = 3
# Of the time: ready without a core, stopped by its quota, stolen by the hypervisor, stalled as the kernel counts it.
WAIT_SHARE: Final = 0.2
THROTTLED_SHARE: Final = 0.1
STEAL_SHARE: Final = 0.1
PRESSURE_SHARE: Final = 0.4
# vLLM: 2 + N physical cores for N GPUs.
CORES_BESIDE: Final = 2
# Alone it is the sign of a process that has much to do, not of a host that is short.
_BUSIEST: Final = "busiest engine process, of a core"


def cpu(case: Case) -> Named | None:
    """The engine waits for processors."""
    for source, series in case.evidence.hosts.items():
        if len(series.samples) < READINGS_LEAST:
            continue
        signs = _signs(case, series)
        firing = [fact for fact, fires, _ in signs if fires]
        starving = [fact for fact in firing if not fact.what.startswith(_BUSIEST)]
        if not firing:
            continue
        facts = [fact for fact, _, _ in signs]
        waits = max((wait for _, fires, wait in signs if fires), default=0.0)
        rejected = _rivals(case)
        cost = periods.compare_marks(case, _starved(series))
        if cost is not None:
            return cost.named(facts, 0.85, rejected)
        held_up = engine_steps.dragged(case, engine_start.cold_ids(case)) if starving else None
        if held_up is not None:
            facts += held_up.facts()
            slower, of_ns = held_up.excess_ns, held_up.whole_ns
            return Named(facts, "ttft", 0.7, "warning", slower, of_ns, rejected, stage="engine.prefill")
        slow = engine_frontend.slow_frontend(case.requests)
        if slow and starving and case.view.engine_side:
            effects = [one.frontend_ns or 0 for one in slow]
            whole_ns = median_ns([one.ttft_ns for one in slow])
            return Named(facts, "ttft", 0.6, "warning", effects, whole_ns, rejected, stage="engine.frontend")
        if waits:
            # Stopped for a share of the time, everything takes that much longer: an estimate, not a measurement.
            gaps = [gap for one in case.requests for gap in one.gaps_ns if gap > 0]
            whole_ns = median_ns(gaps)
            effects = [round(gap * min(waits, 1.0)) for gap in gaps]
            facts.append(Fact("estimated: that share of every gap between tokens", percent(waits), "%", len(gaps)))
            return Named(facts, "icl", 0.6, "warning", effects, whole_ns, rejected, stage="engine.decode")
        advice = f"{source}: processors are tight, and nothing measured shows that it matters yet."
        return Named(facts, None, 0.4, "info", rejected=rejected, advice=advice, stage="engine.frontend")
    return None


def is_starving(case: Case) -> bool:
    """Whether any host shows that more stood ready than it had cores for."""
    return any(
        fires and not fact.what.startswith(_BUSIEST)
        for series in case.evidence.hosts.values()
        if len(series.samples) >= READINGS_LEAST
        for fact, fires, _ in _signs(case, series)
    )


def _signs(case: Case, series: Series) -> list[tuple[Fact, bool, float]]:
    """(fact, whether it is over its threshold, the share of time that it says was lost)."""
    count = len(series.samples)
    found: list[tuple[Fact, bool, float]] = []

    def share(what: str, counter: str, limit: float, lost: bool, of: float = 1.0) -> None:
        rate = series.rate(counter)
        if rate is not None:
            value = rate / of
            found.append((Fact(what, percent(value), "%", count, percent(limit)), value >= limit, value * lost))

    # Added up over threads, most of which nobody waits for: a sign, not a measure of what was lost.
    share("time in which engine processes were ready without a core", "engine_runqueue_wait_s", WAIT_SHARE, False)
    share("time in which the engine's group was stopped by its CPU limit", "cgroup_throttled_s", THROTTLED_SHARE, True)
    total = series.rate("cpu_total_s")
    share(
        "processor time stolen by the hypervisor",
        "cpu_steal_s",
        STEAL_SHARE,
        True,
        total or series.latest("cores") or 1,
    )
    share("time in which something waited for a core (PSI)", "psi_cpu_some_s", PRESSURE_SHARE, False)
    share(_BUSIEST, "engine_busiest_cpu_s", PROCESS_CORES, False)
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
    physical, cards = series.latest("physical_cores"), case.evidence.launched("gpus") or len(case.evidence.gpus)
    if physical is not None and cards:
        least = CORES_BESIDE + int(cards)
        fact = Fact(f"physical cores, for {int(cards)} GPUs", int(physical), "cores", 1, least)
        found.append((fact, physical < least, 0.0))
    return found


def _starved(series: Series) -> list[tuple[int, bool]]:
    """From when to when the engine waited for cores, by the readings' differences."""
    marks = []
    for before, after in pairwise(series.samples):
        seconds = (after.t_mono_ns - before.t_mono_ns) / 1e9
        marks.append((before.t_mono_ns, seconds > 0 and _waits(before, after, seconds)))
    return marks


def _waits(before: Sample, after: Sample, seconds: float) -> bool:
    known = False
    limits = {
        "engine_runqueue_wait_s": WAIT_SHARE,
        "cgroup_throttled_s": THROTTLED_SHARE,
        "psi_cpu_some_s": PRESSURE_SHARE,
    }
    for counter, limit in limits.items():
        if counter in before.values and counter in after.values:
            known = True
            rise = after.values[counter] - before.values[counter]
            if rise >= limit * seconds:
                return True
    cores, queue = after.values.get("cores"), after.values.get("run_queue")
    # A moment's queue; where the time itself is told it says nothing more.
    return not known and cores is not None and queue is not None and queue > cores


def _rivals(case: Case) -> list[tuple[str, str]]:
    waiting = [mean for each in case.evidence.engines.values() if (mean := each.mean("waiting")) is not None]
    if not waiting or max(waiting) >= 1:
        return []
    return [("engine.queue", f"{max(waiting):.2f} requests wait in its queue on the mean")]
