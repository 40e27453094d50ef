"""What the engine takes without saying why: time is lost behind the vantage next to it, and nothing tells its parts.

Rules here: it is the last word, where no rule with evidence found anything. Slow is always slow against something: a
target, the run at low concurrency, its better part, its later requests, the other streams. A steady engine without a
reference is not accused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Final

from tapproxy.diagnose import engine_frontend, engine_gaps, engine_prefill, engine_start
from tapproxy.diagnose.facts import Fact, Named, median_ns, ms, percent
from tapproxy.diagnose.pressure import LEAST_READINGS
from tapproxy.diagnose.reference import drift
from tapproxy.diagnose.rule import Case
from tapproxy.diagnose.served import Served, by_kind

# Batching alone lets TTFT rise two- or threefold with concurrency.
BUSY_RATIO: Final = 5.0
BUSY_NS: Final = 200_000_000
QUIET_LEAST: Final = 3
QUIET_LOAD: Final = 0.25
# The first requests without a start that is proven; and parts of a run.
FIRST_LEAST: Final = 3
PART_NS: Final = 100_000_000
PART_RATIO: Final = 3.0
# Of one model and route: as many as a median wants.
KIND_LEAST: Final = 11
GAPS_STREAMS_LEAST: Final = 3
GAPS_SHARE: Final = 0.05

Signs = tuple[list[Fact], list[int], str, int]


def unattributed(case: Case) -> Named | None:
    """The engine is slow against something, and nothing tells which part of it."""
    if not case.view.engine_side or not case.requests:
        return None
    tests: list[tuple[Callable[[Case], Signs | None], Case]] = [(_target, case)]
    if not is_told(case):
        # Requests of one kind against each other: another model may stand on another engine.
        kinds = [replace(case, requests=kind) for kind in by_kind(case.requests) if len(kind) >= KIND_LEAST]
        tests += product((_when_busy, _first, _part, _behind_long, _frontend, _gaps), kinds)
    for test, each in tests:
        found = test(each)
        if found is not None:
            facts, effects, metric, whole_ns = found
            missing = _missing(case)
            facts.append(Fact("requests whose queue and prefill the engine told", _told_count(case), "requests"))
            return Named(
                facts, metric, 0.5, "warning", effects, whole_ns, advice=_ADVICE.format(missing), stage=_stage(metric)
            )
    return None


def is_told(case: Case) -> bool:
    """Whether anything tells the engine's parts: of most requests, or its page over the run."""
    if 2 * _told_count(case) > len(case.requests):
        return True
    return any(
        len(series.values("waiting")) >= LEAST_READINGS or series.count_of("queue_s")
        for series in case.evidence.engines.values()
    )


def _told_count(case: Case) -> int:
    return sum(one.queue_ns is not None or one.prefill_ns is not None for one in case.requests)


def _target(case: Case) -> Signs | None:
    ttft_ns = median_ns([one.ttft_ns for one in case.requests]) or 0
    target_ns = case.target.ttft_ns
    if target_ns is None or ttft_ns <= target_ns:
        return None
    effects = [one.ttft_ns - target_ns for one in case.requests if one.ttft_ns > target_ns]
    return (
        [Fact("TTFT behind the tap, P50", ms(ttft_ns), "ms", len(case.requests), ms(target_ns))],
        effects,
        "ttft",
        ttft_ns,
    )


def _when_busy(case: Case) -> Signs | None:
    """Requests that came while many were in flight against those that came while few were."""
    loads = sorted(one.in_flight for one in case.requests)
    usual = median(loads)
    quiet = [one for one in case.requests if one.in_flight <= QUIET_LOAD * usual]
    busy = [one for one in case.requests if one.in_flight >= usual]
    if usual < 2 or len(quiet) < QUIET_LEAST or not _alike(quiet, busy):
        return None
    middle_ns, busy_ns = (median_ns([one.ttft_ns for one in group]) or 0 for group in (quiet, busy))
    limit_ns = max(BUSY_RATIO * middle_ns, middle_ns + BUSY_NS)
    if busy_ns < limit_ns or max(one.ttft_ns for one in quiet) > busy_ns / 2:
        return None
    facts = [
        Fact(
            f"TTFT with {usual:g} or more others in flight, P50",
            ms(busy_ns),
            "ms",
            len(busy),
            ms(limit_ns),
        ),
        Fact(f"TTFT with at most {QUIET_LOAD * usual:g} in flight, P50", ms(middle_ns), "ms", len(quiet)),
    ]
    return facts, [one.ttft_ns - middle_ns for one in busy], "ttft", busy_ns


def _alike(quiet: list[Served], busy: list[Served]) -> bool:
    lengths = [median([one.prompt_tokens or 0 for one in group]) for group in (quiet, busy)]
    return lengths[1] <= 1.5 * lengths[0] + 1


def _first(case: Case) -> Signs | None:
    slow, later_ns = engine_start.first_slow(case.requests)
    if later_ns is None or len(slow) < FIRST_LEAST:
        return None
    middle = median_ns([one.ttft_ns for one in slow]) or 0
    facts = [
        Fact("first requests that were slow", len(slow), "requests", len(case.requests), FIRST_LEAST),
        Fact("their TTFT, P50", ms(middle), "ms", len(slow), ms(engine_start.COLD_RATIO * later_ns)),
    ]
    return facts, [one.ttft_ns - round(later_ns) for one in slow], "ttft", middle


def _part(case: Case) -> Signs | None:
    found = drift([(one, float(one.ttft_ns)) for one in case.requests], PART_NS)
    if found is None or found.middle < PART_RATIO * found.best:
        return None
    facts = [
        Fact("TTFT in the slower part, P50", ms(found.middle), "ms", len(found.slow), ms(PART_RATIO * found.best)),
        Fact("TTFT in the better parts, P50", ms(found.best), "ms", len(case.requests)),
    ]
    return facts, [round(excess) for _, excess in found.slow], "ttft", round(found.middle)


def _behind_long(case: Case) -> Signs | None:
    found = engine_prefill.blocked(case.requests)
    if found is None:
        return None
    waited = median_ns([one.ttft_ns for one in found.waited]) or 0
    facts = [
        Fact("TTFT of short requests that came after a long one, P50", ms(waited), "ms", len(found.waited)),
        Fact("TTFT of the other short ones, P50", ms(found.free_ns), "ms", found.shorts - len(found.waited)),
    ]
    return facts, found.effects_ns, "ttft", waited


def _frontend(case: Case) -> Signs | None:
    bad = engine_frontend.slow_frontend(case.requests)
    if not bad:
        return None
    times = [one.frontend_ns or 0 for one in bad]
    facts = [
        Fact("until the response head came, P50", ms(median_ns(times)), "ms", len(bad), ms(engine_frontend.FRONTEND_NS))
    ]
    return facts, times, "ttft", median_ns([one.ttft_ns for one in bad]) or 0


def _gaps(case: Case) -> Signs | None:
    gaps = engine_gaps.unexplained_gaps(case)
    streams = {id(gap.stream.record) for gap in gaps}
    if len(streams) < max(GAPS_STREAMS_LEAST, GAPS_SHARE * len(case.requests)):
        return None
    effects = [gap.excess_ns for gap in gaps]
    facts = [
        Fact(
            "streams that got no token while others did",
            percent(len(streams) / len(case.requests)),
            "%",
            len(case.requests),
            percent(GAPS_SHARE),
        ),
        Fact("gap beyond the stream's median ICL, P50", ms(median_ns(effects)), "ms", len(gaps)),
    ]
    return facts, effects, "icl", median_ns([gap.stream.last_ns - gap.stream.first_ns for gap in gaps]) or 0


def _missing(case: Case) -> str:
    """How to have it told next time: as the page's reader said, else as the engines call it."""
    for series in case.evidence.engines.values():
        flags = {flag for signal in ("queue_s", "prefill_s", "waiting") if (flag := series.how_to_get(signal))}
        if flags:
            return "; ".join(sorted(flags)) + ". Or h"
    return "H"


def _stage(metric: str) -> str:
    return "engine.decode" if metric == "icl" else "engine"


_ADVICE: Final = (
    "{}ave the engine tell its parts, and measure again: vLLM --enable-per-request-metrics (with usage in the "
    "stream), or its page (tapproxy serve --engine-metrics URL), or spans (--otlp-traces-endpoint to this tap's "
    "/v1/traces). It costs a few counters; then queue, prefill and frontend have their own numbers and one of them "
    "can be named."
)
