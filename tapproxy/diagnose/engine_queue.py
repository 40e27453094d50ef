"""Requests that wait in the engine: for a place among those that run, for room in the KV cache, or for a limit.

Rules here: how long a request waited is what the engine told of it; else the mean that its page counted; else Little's
law on those seen waiting. Who is guilty is told by what was full while they waited. A request that waits for the step
under way to end is not queueing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Final

from tapproxy.diagnose import engine_start
from tapproxy.diagnose.facts import Fact, Named, median_ns, ms, percent, text_ms
from tapproxy.diagnose.pressure import Pressure, pressures
from tapproxy.diagnose.rule import Case
from tapproxy.diagnose.served import Served, pace_ns

# latency_tree, engine.queue: share of TTFT.
QUEUE_SHARE: Final = 0.3
# A request that comes within a step waits for its end, and one after a prefill for that: no queue, and nobody notices.
QUEUE_NS: Final = 20_000_000
QUEUE_STEPS: Final = 3
# Of the requests, and never fewer than: shares decide, not the one that met a peak.
REQUESTS_SHARE: Final = 0.2
REQUESTS_LEAST: Final = 5
# latency_tree: waiting > 0 through the window: in half of the readings where as many run as may (a place is taken again
# at once), in four of five where nothing shows to be full.
WAITING_SHARE: Final = 0.5
WAITING_ALWAYS: Final = 0.8
WAITING_MEAN: Final = 2.0
# latency_tree: KV below 0.8 with requests waiting is a limit that is too low; at 0.95 it is full. A whole prompt must
# fit, so it is full for the next one sooner than that.
KV_ROOM: Final = 0.8
KV_FULL: Final = 0.95
# Room for less than a prompt is no lack of memory while half of it is free.
KV_LEAST: Final = 0.5
# Without a page nothing says that it waited for capacity: then it must be most of TTFT, of most requests.
BLIND_SHARE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Wait:
    """Who waited how long. ``all_ns``: of every request measured, ``bad``: of those that queued."""

    all_ns: Sequence[int]
    bad: Sequence[tuple[Served, int]]
    whole_ns: int
    share: float
    source: str
    confidence: float

    @property
    def effects_ns(self) -> list[int]:
        """Of all requests where half of them queued, else of those that did."""
        bad_ns = [ns for _, ns in self.bad]
        return list(self.all_ns) if 2 * len(bad_ns) >= len(self.all_ns) else bad_ns


def queue(case: Case) -> Named | None:
    """Demand above capacity."""
    wait = _waited(case)
    if wait is None:
        return None
    pressure = _pressure(case, wait)
    if pressure is None:
        return _blind(case, wait)
    if not _waits_through(pressure) or kv_is_full(pressure, wait.bad):
        return None
    facts = [*_wait_facts(wait), *_pressure_facts(pressure)]
    kv = percent(pressure.kv_then)
    rejected = (
        [("engine.kv_cache", f"KV usage is {kv} % while requests wait, below {percent(KV_FULL)} %")] if kv else []
    )
    if not pressure.limit_told:
        rejected.append(
            (
                "engine.batching",
                f"nothing tells the limit of running requests (start-up log); at most {_whole(pressure.limit)} ran. "
                "If that is the limit and the KV cache has room, raise it",
            )
        )
    elif not _limit_is_low(pressure):
        rejected.append(("engine.batching", f"KV usage is {kv} %: a higher limit would find no room"))
    rejected += _not_prefill(case, wait)
    confidence = wait.confidence if pressure.at_limit else wait.confidence - 0.15
    advice = None if pressure.at_limit else _PREFILL_BOUND
    return _named(wait, facts, confidence, rejected, advice)


def kv_cache(case: Case) -> Named | None:
    """Requests wait for room in the KV cache."""
    wait = _waited(case)
    pressure = None if wait is None else _pressure(case, wait)
    if wait is None or pressure is None or pressure.waiting_share < WAITING_SHARE:
        return None
    if not kv_is_full(pressure, wait.bad):
        return None
    facts = [*_wait_facts(wait), *_pressure_facts(pressure)]
    if pressure.capacity_tokens:
        facts.append(Fact("KV cache", _whole(pressure.capacity_tokens), "tokens"))
    limit = f"{_whole(pressure.limit)}, its limit" if pressure.limit_told else "no limit that anything tells"
    ran = f"{_whole(pressure.running_then)} ran while {pressure.waiting_mean:.1f} waited"
    because = f"the KV cache is {percent(pressure.kv_then)} % full while they wait; {ran}; {limit}"
    rejected = [("engine.queue", because), ("engine.batching", because)]
    return _named(wait, facts, wait.confidence, [*rejected, *_not_prefill(case, wait)])


def limit_too_low(case: Case) -> Named | None:
    """Requests wait for a place that the KV cache has room for; only where the limit itself is told."""
    wait = _waited(case)
    pressure = None if wait is None else _pressure(case, wait)
    if wait is None or pressure is None or not _waits_through(pressure) or not _limit_is_low(pressure):
        return None
    facts = [
        Fact("requests that may run", _whole(pressure.limit), "requests"),
        *_pressure_facts(pressure, kv_threshold=KV_ROOM),
        *_wait_facts(wait),
    ]
    room = f"KV usage is {percent(pressure.kv_then)} % at the limit"
    rejected = [
        ("engine.kv_cache", room),
        ("engine.preemption", room),
        *_not_prefill(case, wait),
    ]
    return _named(wait, facts, wait.confidence, rejected)


def kv_is_full(pressure: Pressure, waiting: Sequence[tuple[Served, int]]) -> bool:
    """Whether room in the KV cache is what they waited for."""
    if pressure.kv_then is None or (pressure.limit_told and pressure.at_limit):
        return False
    prompts = [one.record.usage.prompt_tokens for one, _ in waiting]
    known = [tokens for tokens in prompts if tokens is not None]
    if pressure.capacity_tokens and known:
        # The next prompt must fit as a whole; and a prompt under way takes its room only as it is computed.
        need = median(known) / pressure.capacity_tokens
        crowded = pressure.kv_then >= KV_ROOM and ((pressure.running_then or 0) + 1) * need >= 1
        return crowded or pressure.kv_then >= min(KV_FULL, max(KV_LEAST, 1 - need))
    return pressure.kv_then >= KV_FULL


def _waited(case: Case) -> Wait | None:
    cold = engine_start.cold_ids(case)
    requests = [one for one in case.requests if id(one.record) not in cold]
    if not requests:
        return None
    step_ns = pace_ns(requests) or 0
    least_ns = max(QUEUE_NS, QUEUE_STEPS * step_ns)
    whole_ns = median_ns([one.ttft_ns for one in requests]) or 0
    told = [(one, one.queue_ns) for one in requests if one.queue_ns is not None]
    if len(told) > len(requests) / 2:
        source = f"told of each request ({told[0][0].record.engine.source})"
        bad = [(one, ns) for one, ns in told if ns >= max(least_ns, QUEUE_SHARE * one.ttft_ns)]
        share = sum(ns for _, ns in told) / max(1, sum(one.ttft_ns for one, _ in told))
        if len(bad) < max(REQUESTS_LEAST, REQUESTS_SHARE * len(told)):
            return None
        return Wait([ns for _, ns in told], bad, whole_ns, share, source, 0.9)
    return _counted(case, requests, least_ns, whole_ns)


def _counted(case: Case, requests: list[Served], least_ns: float, whole_ns: int) -> Wait | None:
    """From the page's means; of what else goes through the engine as well, then."""
    mean_ttft_ns = fmean(one.ttft_ns for one in requests)
    found = []
    for series in case.evidence.engines.values():
        queue_s, ttft_s = series.mean_of("queue_s"), series.mean_of("ttft_s")
        if queue_s is not None:
            whole_s = ttft_s or mean_ttft_ns / 1e9
            found.append((queue_s, whole_s, f"mean of {series.source}", 0.7))
            continue
        waiting, rate = series.mean("waiting"), series.rate("finished")
        seconds = (requests[-1].last_ns - requests[0].asked_ns) / 1e9
        rate = rate or (len(requests) / seconds if seconds > 0 else None)
        if waiting is not None and rate:
            found.append((waiting / rate, mean_ttft_ns / 1e9, f"waiting ÷ requests a second, of {series.source}", 0.5))
    if not found:
        return None
    queue_s, whole_s, source, confidence = max(found)
    queue_ns = round(queue_s * 1e9)
    share = queue_s / whole_s if whole_s else 0.0
    if queue_ns < least_ns or share < QUEUE_SHARE:
        return None
    each = [queue_ns] * len(requests)
    return Wait(each, list(zip(requests, each, strict=True)), whole_ns, min(1.0, share), source, confidence)


def _pressure(case: Case, wait: Wait) -> Pressure | None:
    from_ns = min(one.asked_ns for one, _ in wait.bad)
    to_ns = max(one.first_ns for one, _ in wait.bad)
    return next(iter(pressures(case.evidence, from_ns, to_ns)), None)


def _waits_through(pressure: Pressure) -> bool:
    if pressure.at_limit and pressure.waiting_share >= WAITING_SHARE:
        return True
    return pressure.waiting_share >= WAITING_ALWAYS and pressure.waiting_mean >= WAITING_MEAN


def _limit_is_low(pressure: Pressure) -> bool:
    return pressure.limit_told and pressure.at_limit and (pressure.kv_then is None or pressure.kv_then < KV_ROOM)


def _blind(case: Case, wait: Wait) -> Named | None:
    """The engine tells the wait of each request, and nobody read its page."""
    if case.evidence.engines and any(series.values("waiting") for series in case.evidence.engines.values()):
        return None  # it was read, but too seldom while they waited
    if wait.share < BLIND_SHARE or 2 * len(wait.bad) < len(wait.all_ns):
        return None
    because = "nothing tells: its metrics page was not read (serve --engine-metrics URL)"
    rivals = [("engine.kv_cache", because), ("engine.batching", because)]
    return _named(wait, _wait_facts(wait), 0.6, rivals)


def _not_prefill(case: Case, wait: Wait) -> list[tuple[str, str]]:
    told = [one.prefill_ns for one in case.requests if one.prefill_ns is not None]
    if not told:
        return []
    return [("engine.prefill", f"prefill takes {text_ms(median_ns(told))} at P50, the queue {_middle(wait)}")]


def _middle(wait: Wait) -> str:
    return text_ms(median_ns(wait.effects_ns))


def _wait_facts(wait: Wait) -> list[Fact]:
    count = len(wait.all_ns)
    return [
        Fact(f"queue time, P50 ({wait.source})", ms(median_ns(wait.effects_ns)), "ms", len(wait.effects_ns)),
        Fact("queue time, of TTFT", percent(wait.share), "%", count, percent(QUEUE_SHARE)),
        Fact("requests that queued", percent(len(wait.bad) / max(1, count)), "%", count, percent(REQUESTS_SHARE)),
    ]


def _pressure_facts(pressure: Pressure, kv_threshold: float = KV_FULL) -> list[Fact]:
    count = pressure.readings
    least = WAITING_SHARE if pressure.at_limit else WAITING_ALWAYS
    what = "told" if pressure.limit_told else "the most that ran while others waited"
    facts = [
        Fact("readings with requests waiting", percent(pressure.waiting_share), "%", count, percent(least)),
        Fact("requests waiting, mean", round(pressure.waiting_mean, 2), "requests", count),
        Fact(
            f"requests running while others wait, P50 (limit: {what})",
            _whole(pressure.running_then),
            "requests",
            count,
            _whole(pressure.limit),
        ),
    ]
    if pressure.kv_then is not None:
        facts.append(
            Fact("KV usage while requests wait, P50", percent(pressure.kv_then), "%", count, percent(kv_threshold))
        )
    return facts


def _named(
    wait: Wait, facts: list[Fact], confidence: float, rejected: list[tuple[str, str]], advice: str | None = None
) -> Named:
    return Named(
        facts,
        metric="ttft",
        confidence=confidence,
        effects_ns=wait.effects_ns,
        whole_ns=median_ns([one.ttft_ns for one, _ in wait.bad]) if wait.effects_ns != wait.all_ns else wait.whole_ns,
        rejected=rejected,
        advice=advice,
    )


def _whole(value: float | None) -> float | int | None:
    return int(value) if value is not None and value == int(value) else value


_PREFILL_BOUND: Final = (
    "Requests wait although fewer run than have run and the KV cache has room: the tokens a step may hold are what is "
    "short, so prefill is the bottleneck. Add a replica, or shorten prompts and raise prefix-cache hits; raising "
    "max_num_batched_tokens by a step (2048 → 4096) may lower TTFT and costs even token pace. Verify with the same "
    "load: queue time and ICL P95, before and after."
)
