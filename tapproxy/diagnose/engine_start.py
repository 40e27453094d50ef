"""The first requests after an engine's start: weights, compilation and caches that were still warming.

Rules here: a start is told by the process's start time, by a counter that fell, or by counters that stood at nothing
when the first requests came; slow first requests alone are no proof of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tapproxy.diagnose.facts import Fact, Named, median_ns, ms, text_ms
from tapproxy.diagnose.rule import Case
from tapproxy.diagnose.series import Series
from tapproxy.diagnose.served import Served

# latency_tree, engine.cold_start: first requests against the later median.
COLD_RATIO: Final = 3.0
# And more than a person notices.
COLD_NS: Final = 100_000_000
# One slow request is an accident.
COLD_LEAST: Final = 2
# They are the first ones: no more than half of what came, and the rest must give a median.
COLD_MOST_SHARE: Final = 0.5
LATER_LEAST: Final = 11
# A large model takes minutes from process start to its first request.
START_S: Final = 900.0


def cold_start(case: Case) -> Named | None:
    """First requests slower than the later ones, after a start that is proven."""
    start = _start(case)
    if start is None:
        return None
    start_ns, proof = start
    requests = [one for one in case.requests if one.asked_ns >= start_ns]
    slow, later_ns = first_slow(requests)
    if later_ns is None or len(slow) < COLD_LEAST:
        return None
    effects = [one.ttft_ns - round(later_ns * _size(one, requests[len(slow) :])) for one in slow]
    middle = median_ns([one.ttft_ns for one in slow])
    facts = [
        proof,
        Fact("first requests that were slow", len(slow), "requests", len(case.requests), COLD_LEAST),
        Fact("their TTFT, P50", ms(middle), "ms", len(slow), ms(COLD_RATIO * later_ns)),
        Fact("TTFT of the later ones, P50", ms(later_ns), "ms", len(case.requests) - len(slow)),
    ]
    queues = [one.queue_ns for one in slow if one.queue_ns is not None]
    prefills = [one.prefill_ns for one in slow if one.prefill_ns is not None]
    in_queue = bool(queues and prefills) and (median_ns(queues) or 0) > (median_ns(prefills) or 0)
    because = f"only the first {len(slow)} of {len(case.requests)} are slow; the later median is {text_ms(later_ns)}"
    return Named(
        facts,
        metric="ttft",
        confidence=0.85,
        severity="warning",
        effects_ns=effects,
        whole_ns=middle,
        rejected=[("engine.queue", because), ("engine.prefill", because)],
        stage="engine.queue" if in_queue else "engine.prefill",
    )


def first_slow(requests: Sequence[Served]) -> tuple[list[Served], float | None]:
    """The run of slow requests at the beginning, and the median TTFT of those after it; ([], None) where the rest is
    too few. Of the kind that came first only: a first request to a slower model is no cold one."""
    requests = [one for one in requests if one.kind == requests[0].kind]
    most = min(int(COLD_MOST_SHARE * len(requests)), len(requests) - LATER_LEAST)
    if most < 1:
        return [], None
    later_ns = median_ns([one.ttft_ns for one in requests[most:]])
    if later_ns is None:
        return [], None
    limit_ns = max(COLD_RATIO * later_ns, later_ns + COLD_NS)
    count = 0
    while count < most and requests[count].ttft_ns > limit_ns * _size(requests[count], requests):
        count += 1
    return list(requests[:count]), median_ns([one.ttft_ns for one in requests[count:]])


def cold_ids(case: Case) -> set[int]:
    """The records of the first requests that a start made slow, by identity."""
    start = _start(case)
    if start is None:
        return set()
    slow, _ = first_slow([one for one in case.requests if one.asked_ns >= start[0]])
    return {id(one.record) for one in slow} if len(slow) >= COLD_LEAST else set()


def _size(one: Served, others: Sequence[Served]) -> float:
    """How much longer its prompt is than theirs: a long first prompt is not a cold engine."""
    sizes = [other.prompt_tokens for other in others if other.prompt_tokens is not None]
    middle = median_ns(sizes)
    return max(1.0, one.prompt_tokens / middle) if middle and one.prompt_tokens is not None else 1.0


def _start(case: Case) -> tuple[int, Fact] | None:
    """(monotonic time, proof) of the latest start that requests of the run came after."""
    if not case.requests:
        return None
    first_ns, last_ns = case.requests[0].asked_ns, case.requests[-1].asked_ns
    for series in case.evidence.engines.values():
        restarts = [at_ns for at_ns in series.restarts() if first_ns < at_ns <= last_ns]
        if restarts:
            before_ns = max(
                (sample.t_mono_ns for sample in series.samples if sample.t_mono_ns < restarts[-1]), default=first_ns
            )
            return before_ns, Fact("counters fell within the run", len(restarts), "restarts", len(series.samples), 1)
        age_s = _age_s(series, first_ns)
        if age_s is not None and age_s <= START_S:
            return first_ns, Fact(
                "engine started before the first request", round(age_s, 1), "s", len(series.samples), START_S
            )
        if _served_nothing_before(series, case.requests):
            return first_ns, Fact("requests that the engine had served before", 0, "requests", 1, 0)
    return None


def _age_s(series: Series, at_ns: int) -> float | None:
    for sample in series.samples:
        started_s = sample.values.get("process_start_s")
        if started_s is not None:
            return (sample.t_unix_ns - (sample.t_mono_ns - at_ns)) / 1e9 - started_s
    return None


def _served_nothing_before(series: Series, requests: Sequence[Served]) -> bool:
    """Whether its first reading counts no more requests than ours that had ended by then."""
    first = next((sample for sample in series.samples if "finished" in sample.values), None)
    if first is None:
        return False
    return first.values["finished"] <= sum(one.last_ns < first.t_mono_ns for one in requests)
