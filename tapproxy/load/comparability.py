"""Why a comparison does not compare: every reason there is, in words that carry their numbers.

Rules here: each check is a row of a table and says nothing where it cannot know; what is unknown differs from
nothing. A check compares an arm with the baseline of its run, or a whole run with an earlier one. The tolerances are
constants with their reasons.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tapproxy.core.counts import TOKEN_KINDS
from tapproxy.load.arms import IN_BLOCKS, Arm, median, values_ns
from tapproxy.load.trial import Asked, Scenario, Trial

# Longer answers take longer: beyond this the load is another one.
TOKENS_SHARE: Final = 0.02
# Prompts differ by their unique prefixes, a token or so in some ten.
PROMPTS_SHARE: Final = 0.05
# Points of a hundred by which the shares of a kind of answer may differ by chance in what is asked.
FINISH_SHARE: Final = 0.02
# One in a hundred failed, and two at least: as much as makes an engine ill (latency_tree, engine.errors).
ERRORS_SHARE: Final = 0.01
ERRORS_LEAST: Final = 2
# How sure it must be that two shares differ.
SURE: Final = 0.05
# An engine skips the prefill of what it has cached: five points of the prompt's tokens are some percent of TTFT.
CACHE_POINTS: Final = 0.05
# latency_tree, engine.cold_start: three times the later median; and more than a person notices.
COLD_TIMES: Final = 3.0
COLD_LEAST_NS: Final = 50_000_000
# Two percent more load is another queue.
RATE_SHARE: Final = 0.02


@dataclass(frozen=True, slots=True)
class Pair:
    """An arm beside what it is compared with, and the settings of either's run."""

    arm: Arm
    base: Arm
    asked: Asked
    base_asked: Asked
    label: str  # how a sentence calls the arm
    base_label: str


def between_arms(trial: Trial, found: dict[str, Arm]) -> list[str]:
    """Why the paths of one run do not compare; empty where they do."""
    baseline, *others = found.values()
    reasons: list[str] = []
    for arm in others:
        pair = Pair(arm, baseline, trial.asked, trial.asked, arm.name, baseline.name)
        reasons += _reasons(pair, ARM_CHECKS)
    return list(dict.fromkeys(reasons))


def between_runs(now: Trial, before: Trial, arms_now: dict[str, Arm], arms_before: dict[str, Arm]) -> list[str]:
    """Why this run does not compare with an earlier one, path by path of the same name."""
    reasons = [f"{what}: {a} now, {b} then" for what, a, b in _settings(now.asked, before.asked) if a != b]
    shared = [name for name in arms_now if name in arms_before]
    if not shared:
        names = f"{', '.join(arms_now)} now, {', '.join(arms_before)} then"
        reasons.append(f"paths: none has the same name ({names})")
    for name in shared:
        pair = Pair(
            arms_now[name], arms_before[name], now.asked, before.asked, f"{name} now", f"{name} in run {before.id}"
        )
        reasons += _reasons(pair, ARM_CHECKS)
    return list(dict.fromkeys(reasons))


def _reasons(pair: Pair, checks: Sequence[Callable[[Pair], Iterator[str]]]) -> list[str]:
    return [reason for check in checks for reason in check(pair)]


def _settings(now: Asked, before: Asked) -> Iterator[tuple[str, object, object]]:
    """What must be the same in two runs. Offline is never compared with server, nor any other pair."""
    yield "scenario", str(now.scenario), str(before.scenario)
    yield "API", now.api, before.api
    yield "streaming", now.stream, before.stream
    yield "prompts", now.prompts, before.prompts
    yield "max tokens", now.max_tokens, before.max_tokens
    yield "ignore_eos", now.ignore_eos, before.ignore_eos
    yield "fresh connections", now.fresh_connections, before.fresh_connections
    if now.scenario == before.scenario == Scenario.CONCURRENCY:
        yield "concurrency", now.concurrency, before.concurrency
    if now.scenario == before.scenario == Scenario.SERVER and not _near(now.rate, before.rate, RATE_SHARE):
        yield "rate", _per_second(now.rate), _per_second(before.rate)
    yield "sweep", now.swept or None, before.swept or None


def _per_second(rate: float | None) -> str:
    return "unknown" if rate is None else f"{rate:g} requests/s"


def _models(pair: Pair) -> Iterator[str]:
    ours, theirs = (sorted({r.record.model for r in arm.good if r.record.model}) for arm in (pair.arm, pair.base))
    if ours and theirs and ours != theirs:
        yield f"models: {pair.label} answers as {', '.join(ours)}, {pair.base_label} as {', '.join(theirs)}"
        return
    offered = [arm.facts.models if arm.facts else None for arm in (pair.arm, pair.base)]
    if offered[0] and offered[1] and not set(offered[0]) & set(offered[1]):
        yield (
            f"models: {pair.label} offers {', '.join(sorted(offered[0]))}, "
            f"{pair.base_label} {', '.join(sorted(offered[1]))}"
        )


def _api(pair: Pair) -> Iterator[str]:
    ours, theirs = (sorted({r.record.path for r in arm.results if r.record.path}) for arm in (pair.arm, pair.base))
    if ours and theirs and ours != theirs:
        yield f"API: {pair.label} was asked at {', '.join(ours)}, {pair.base_label} at {', '.join(theirs)}"


def _engine(pair: Pair) -> Iterator[str]:
    a, b = pair.arm.facts, pair.base.facts
    if a is None or b is None:
        return
    if a.engine and b.engine and a.engine != b.engine:
        yield f"engine: {pair.label} is {a.engine}, {pair.base_label} {b.engine}"
    elif a.engine_version and b.engine_version and a.engine_version != b.engine_version:
        yield f"engine version: {pair.label} has {a.engine_version}, {pair.base_label} {b.engine_version}"


def _errors(pair: Pair) -> Iterator[str]:
    a, b = (pair.arm.failures, len(pair.arm.results)), (pair.base.failures, len(pair.base.results))
    if not a[1] or not b[1] or not _shares_differ(a, b):
        return
    classes = ", ".join(f"{name} {count}" for name, count in sorted((pair.arm.failed or pair.base.failed).items()))
    yield (
        f"error rate: {a[0]} of {a[1]} requests failed on {pair.label}, {b[0]} of {b[1]} on {pair.base_label} "
        f"({classes}); a path that fails quickly is not a fast one"
    )


def _shares_differ(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """By Fisher's test; or none on one side and on the other as many as make an engine ill."""
    if fisher(*a, *b) < SURE:
        return True
    (low, _), (high, of) = sorted((a, b), key=lambda side: side[0] / side[1])
    return low == 0 and high >= max(ERRORS_LEAST, ERRORS_SHARE * of)


def _streaming(pair: Pair) -> Iterator[str]:
    a, b = (len(pair.arm.streams), len(pair.arm.good)), (len(pair.base.streams), len(pair.base.good))
    if a[1] and b[1] and abs(a[0] / a[1] - b[0] / b[1]) > FINISH_SHARE and fisher(*a, *b) < SURE:
        yield (
            f"streaming: {a[0]} of {a[1]} answers of {pair.label} came as a stream of tokens, "
            f"{b[0]} of {b[1]} of {pair.base_label}"
        )


def _prompt_lengths(pair: Pair) -> Iterator[str]:
    for what, of in (
        ("tokens", lambda result: result.record.usage.prompt_tokens),
        ("bytes", lambda result: result.record.request.bytes or None),
    ):
        means = _means(pair, of)
        if means is not None and not _near(*means, PROMPTS_SHARE):
            yield (
                f"prompts: {means[0]:.1f} {what} a request on {pair.label}, {means[1]:.1f} on {pair.base_label} "
                f"(more than {PROMPTS_SHARE:.0%} apart)"
            )
            return


def _answer_lengths(pair: Pair) -> Iterator[str]:
    means = _means(pair, lambda result: result.record.usage.completion_tokens)
    what = "completion tokens"
    if means is None:
        # Events are no tokens; but the same answers come in as many of them, and nothing else is known.
        means = _means(pair, lambda result: sum(kind in TOKEN_KINDS for kind in result.record.events.kind) or None)
        what = "token events (the engine gives no usage)"
    if means is not None and not _near(*means, TOKENS_SHARE):
        yield (
            f"completion tokens: {means[0]:.1f} {what} a request on {pair.label}, {means[1]:.1f} on "
            f"{pair.base_label} (more than {TOKENS_SHARE:.0%} apart)"
        )
    asked = _means(pair, lambda result: result.slot.max_tokens)
    if asked is not None and asked[0] != asked[1]:
        yield f"max tokens: {asked[0]:.1f} asked for on {pair.label}, {asked[1]:.1f} on {pair.base_label}"


def _finish_reasons(pair: Pair) -> Iterator[str]:
    a, b = (Counter(r.finish_reason for r in arm.good if r.finish_reason) for arm in (pair.arm, pair.base))
    n, m = a.total(), b.total()
    if not n or not m:
        return
    for reason in sorted({*a, *b}):
        apart = abs(a[reason] / n - b[reason] / m)
        if apart > FINISH_SHARE and fisher(a[reason], n, b[reason], m) < SURE / len({*a, *b}):
            yield (
                f"finish reasons: {a[reason]} of {n} answers of {pair.label} ended with {reason!r}, "
                f"{b[reason]} of {m} of {pair.base_label}"
            )
            return


def _cache(pair: Pair) -> Iterator[str]:
    told = [_cached_share(arm) for arm in (pair.arm, pair.base)]
    if any(share is not None for share in told):
        # vLLM leaves the field out where nothing was cached: where one side has it, its absence on the other says so.
        told = [0.0 if share is None else share for share in told]
    counted = [_counted_share(arm) for arm in (pair.arm, pair.base)]
    for what, (a, b) in (("usage", told), ("the engine's counters", counted)):
        if a is not None and b is not None:
            if abs(a - b) > CACHE_POINTS:
                yield (
                    f"prefix-cache hits: {a:.0%} of the prompt tokens of {pair.label} were cached, {b:.0%} of "
                    f"{pair.base_label} ({what}); one warmed the cache for the other"
                )
            return


def _cached_share(arm: Arm) -> float | None:
    usages = [result.record.usage for result in arm.good]
    known = [
        (usage.cached_tokens, usage.prompt_tokens)
        for usage in usages
        if usage.cached_tokens is not None and usage.prompt_tokens
    ]
    total = sum(usage.prompt_tokens for usage in usages if usage.prompt_tokens)
    return sum(cached for cached, _ in known) / total if known and total else None


def _counted_share(arm: Arm) -> float | None:
    facts = arm.facts
    if facts is None or facts.prefix_cache_hits is None or not facts.prefix_cache_queries:
        return None
    return facts.prefix_cache_hits / facts.prefix_cache_queries


def _cold_start(pair: Pair) -> Iterator[str]:
    """A first request that warmed the path up and is among those that count."""
    cold = [_cold_ns(arm, asked) for arm, asked in ((pair.arm, pair.asked), (pair.base, pair.base_asked))]
    if (cold[0] is None) == (cold[1] is None):
        return
    label, value = (pair.label, cold[0]) if cold[0] is not None else (pair.base_label, cold[1])
    yield (
        f"cold start: the first request of {label} took {(value or 0) / 1e6:.0f} ms, more than {COLD_TIMES:g} times "
        "the median of the rest, and is counted: give --warmup"
    )


def _cold_ns(arm: Arm, asked: Asked) -> float | None:
    values = [value for result in arm.good for value in values_ns(result, "ttft_ms", arm.start)]
    middle = median(values)
    if asked.warmup or middle is None or arm.facts is None or arm.facts.cold_ttft_ns is None:
        return None
    cold = arm.facts.cold_ttft_ns
    return cold if cold > COLD_TIMES * middle and cold - middle > COLD_LEAST_NS else None


def _order(pair: Pair) -> Iterator[str]:
    """All of one path before all of the other: what changed in between cannot be told from the path."""
    first, second = (
        (min(r.slot.index for r in arm.results), max(r.slot.index for r in arm.results)) if arm.results else None
        for arm in (pair.arm, pair.base)
    )
    if first is None or second is None or pair.arm.name == pair.base.name or pair.asked.scenario in IN_BLOCKS:
        # One block each has no interval, which says the same.
        return
    if first[1] < second[0] or second[1] < first[0]:
        yield (
            f"order: every request of one path was sent before any of the other ({pair.label}, {pair.base_label}): "
            "a cache that one warmed, or a drift, cannot be told from the path"
        )


ARM_CHECKS: Final = (
    _models,
    _api,
    _engine,
    _streaming,
    _errors,
    _prompt_lengths,
    _answer_lengths,
    _finish_reasons,
    _cache,
    _cold_start,
    _order,
)


def _means(pair: Pair, of: Callable[..., float | None]) -> tuple[float, float] | None:
    """The mean a request of both, over the rounds that both answered; None where one request does not tell.

    Between runs rounds are not the same requests, yet the same plan.
    """
    sides = [{result.slot.round: of(result) for result in arm.good} for arm in (pair.arm, pair.base)]
    shared = sides[0].keys() & sides[1].keys() or None
    known = [[value for turn, value in side.items() if shared is None or turn in shared] for side in sides]
    if not known[0] or not known[1] or None in known[0] or None in known[1]:
        return None
    a, b = (math.fsum(value for value in side if value is not None) / len(side) for side in known)
    return a, b


def _near(a: float | None, b: float | None, share: float) -> bool:
    """Within that share of the larger; an unknown is near to everything."""
    return a is None or b is None or abs(a - b) <= share * max(abs(a), abs(b))


def fisher(a: int, n: int, b: int, m: int) -> float:
    """Fisher's exact test, two-sided: how likely ``a`` of ``n`` and ``b`` of ``m``, or less likely, are by chance."""
    total = a + b
    low, high = max(0, total - m), min(n, total)

    def log_weight(k: int) -> float:
        return _log_choose(n, k) + _log_choose(m, total - k) - _log_choose(n + m, total)

    seen = log_weight(a)
    # A tie must count in spite of rounding.
    return min(1.0, math.fsum(math.exp(w) for k in range(low, high + 1) if (w := log_weight(k)) <= seen + 1e-7))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
