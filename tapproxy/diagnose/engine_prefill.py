"""Prefill: of long prompts that others wait for, in batches with decodes, and against what was asked of it.

Rules here: long prompts take long by design, and that alone is no fault: it is told as worth knowing. Prefill is
blamed where others pay for it, where a target is missed, or where the same tokens took longer than before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from tapproxy.diagnose import engine_start, engine_steps, host
from tapproxy.diagnose.engine import LEAST_TOKENS
from tapproxy.diagnose.facts import Fact, Named, median_ns, ms, percent, text_ms
from tapproxy.diagnose.reference import FIT_LEAST, SLOWER, correlation, drift, slope
from tapproxy.diagnose.rule import Case
from tapproxy.diagnose.served import Prefills, Served

# latency_tree, engine.prefill: share of TTFT, and linear in uncached prompt tokens.
PREFILL_SHARE: Final = 0.3
LINEAR: Final = 0.8
# Worth knowing where prefill is most of a TTFT that people notice.
NOTABLE_SHARE: Final = 0.5
NOTABLE_NS: Final = 500_000_000
# A prompt is long for the others when it is so many times their median, and takes a step of its own; and those are few.
LONG_RATIO: Final = 4.0
LONG_TOKENS: Final = 1000
LONG_SHARE: Final = 0.3
LONG_LEAST: Final = 3
# Others that came meanwhile take twice the time of those that did not, and more than people notice.
BLOCKED_RATIO: Final = 2.0
BLOCKED_NS: Final = 100_000_000
BLOCKED_SHARE: Final = 0.05
BLOCKED_LEAST: Final = 5
FREE_LEAST: Final = 11
MANY_SHARE: Final = 0.2
# A token's prefill is some µs to a ms; below this a change is a matter of what else was in the step.
DRIFT_TOKEN_NS: Final = 10_000
# vLLM's smaller usual setting, which keeps ICL even; gaps by prefill are the setting's doing above it.
BATCHED_TOKENS: Final = 2048
MIXED_RATIO: Final = 5.0
MIXED_SHARE: Final = 0.2


@dataclass(frozen=True, slots=True)
class Blocked:
    """Short requests that came while a long prompt was computed, and what the others of them take."""

    waited: Sequence[Served]
    free_ns: int
    longs: Sequence[Served]
    shorts: int

    @property
    def effects_ns(self) -> list[int]:
        return [max(0, one.ttft_ns - self.free_ns) for one in self.waited]


def prefill(case: Case) -> Named | None:
    """Long prompts that block others, a target that prefill misses, or prefill that became slower."""
    cold = engine_start.cold_ids(case)
    told = [one for one in case.requests if one.prefill_ns is not None and id(one.record) not in cold]
    if len(told) <= len(case.requests) / 2:
        # The page tells what prefill takes, if not whose: enough for who waits for whom, no more.
        counted = any(series.count_of("prefill_s") for series in case.evidence.engines.values())
        return _blocking(case, 0.7) if counted else None
    found = _blocking(case, 0.85) or _against_target(case, told) or _slower(told)
    if found is not None:
        return found
    held_up = engine_steps.dragged(case, cold)
    if held_up is not None:
        # Length is not what took so long; and an engine that waits for cores has its own cause.
        return None if host.is_starving(case) else _held_up(held_up, told)
    return _notable(told)


def blocked(requests: Sequence[Served]) -> Blocked | None:
    """Who waited for a long prompt, where they are enough to speak of."""
    sizes = [one.prompt_tokens for one in requests if one.prompt_tokens is not None]
    if not sizes:
        return None
    least = max(LONG_RATIO * median(sizes), LONG_TOKENS)
    longs = [one for one in requests if (one.prompt_tokens or 0) >= least]
    shorts = [one for one in requests if one.prompt_tokens is not None and one.prompt_tokens < least]
    if not LONG_LEAST <= len(longs) <= LONG_SHARE * len(requests):
        return None
    # Judged by when they came, not by how long they took: who waits long overlaps with everything.
    waited = [one for one in shorts if any(long.prefill_from_ns <= one.asked_ns < long.first_ns for long in longs)]
    met = {id(one.record) for one in waited}
    free_ns = median_ns([one.ttft_ns for one in shorts if id(one.record) not in met])
    if free_ns is None or len(shorts) - len(waited) < FREE_LEAST:
        return None
    if len(waited) < max(BLOCKED_LEAST, BLOCKED_SHARE * len(shorts)):
        return None
    middle = median_ns([one.ttft_ns for one in waited]) or 0
    if middle < max(BLOCKED_RATIO * free_ns, free_ns + BLOCKED_NS):
        return None
    return Blocked(waited, free_ns, longs, len(shorts))


def mixed_batches(case: Case) -> Named | None:
    """Decodes wait in one step with many prefill tokens, more of them than the setting need allow."""
    most, chunked = case.evidence.launched("max_num_batched_tokens"), case.evidence.launched("chunked_prefill")
    allowed = (most is not None and most > BATCHED_TOKENS) or chunked == 0
    streams = [one for one in case.requests if len(one.tokens_ns) >= LEAST_TOKENS and one.prefill_ns is not None]
    if not allowed or not case.view.engine_side or not streams:
        return None
    lost_ns, decode_ns, excess = 0, 0, []
    prefills = Prefills(case.requests)
    for stream in streams:
        middle_ns = median(stream.gaps_ns)
        decode_ns += stream.last_ns - stream.first_ns
        for from_ns, gap_ns in zip(stream.tokens_ns, stream.gaps_ns, strict=False):
            if not middle_ns or gap_ns < MIXED_RATIO * middle_ns:
                continue
            if prefills.within(from_ns, from_ns + gap_ns):
                lost_ns += round(gap_ns - middle_ns)
                excess.append(round(gap_ns - middle_ns))
    share = lost_ns / decode_ns if decode_ns else 0.0
    if share < MIXED_SHARE or len(excess) < FREE_LEAST:
        return None
    facts = [
        Fact("decode time lost in steps with others' prefill", percent(share), "%", len(streams), percent(MIXED_SHARE)),
        Fact("such a gap beyond the median ICL, P50", ms(median_ns(excess)), "ms", len(excess)),
    ]
    if most is not None:
        facts.append(Fact("tokens a step may hold (start-up log)", int(most), "tokens", 1, BATCHED_TOKENS))
    if chunked is not None:
        facts.append(Fact("chunked prefill (1 on, 0 off)", int(chunked), "", 1))
    return Named(
        facts,
        "icl",
        0.8,
        "warning",
        effects_ns=excess,
        whole_ns=median_ns([one.last_ns - one.first_ns for one in streams]),
        rejected=[("engine.stall", f"each of the {len(excess)} gaps ends with another request's prefill")],
        advice=_SMALLER_STEPS,
        stage="engine.decode",
        share=share,
    )


def _blocking(case: Case, confidence: float) -> Named | None:
    found = blocked(case.requests)
    if found is None:
        return None
    effects = found.effects_ns
    share = len(found.waited) / found.shorts
    sizes = [one.prompt_tokens or 0 for one in found.longs]
    facts = [
        Fact("short requests that came while a long prompt was computed", percent(share), "%", found.shorts, 5.0),
        Fact("their TTFT, P50", ms(median_ns([one.ttft_ns for one in found.waited])), "ms", len(found.waited)),
        Fact("TTFT of the other short ones, P50", ms(found.free_ns), "ms", found.shorts - len(found.waited)),
        Fact("long prompts, P50", median_ns(sizes), "tokens", len(found.longs), LONG_TOKENS),
        Fact(
            "prefill of a long prompt, P50",
            ms(median_ns([one.prefill_ns for one in found.longs if one.prefill_ns is not None])),
            "ms",
            len(found.longs),
        ),
    ]
    because = f"short requests that came at other times take {text_ms(found.free_ns)}"
    return Named(
        facts,
        "ttft",
        confidence,
        "error" if share >= MANY_SHARE else "warning",
        effects_ns=effects,
        whole_ns=median_ns([one.ttft_ns for one in found.waited]),
        rejected=[("engine.queue", because), ("engine.tokenizer", because)],
    )


def _against_target(case: Case, told: Sequence[Served]) -> Named | None:
    target_ns = case.target.ttft_ns
    ttft_ns = median_ns([one.ttft_ns for one in told]) or 0
    share = _share(told)
    if target_ns is None or ttft_ns <= target_ns or share < PREFILL_SHARE or not _is_linear(told):
        return None
    effects = [one.prefill_ns or 0 for one in told]
    facts = [Fact("TTFT, P50", ms(ttft_ns), "ms", len(told), ms(target_ns)), *_share_facts(told, share)]
    return Named(facts, "ttft", 0.85, "error", effects, ttft_ns, _rivals(told))


def _slower(told: Sequence[Served]) -> Named | None:
    alone = [one for one, shared in zip(told, _shares_steps(told), strict=True) if not shared]
    values = [(one, one.prefill_ns / one.prompt_tokens) for one in alone if one.prefill_ns and one.prompt_tokens]
    found = drift(values, DRIFT_TOKEN_NS)
    if found is None:
        return None
    effects = [round(excess * (one.prompt_tokens or 0)) for one, excess in found.slow]
    whole_ns = median_ns([one.ttft_ns for one, _ in found.slow]) or 0
    if (median_ns(effects) or 0) < max(BLOCKED_NS, PREFILL_SHARE * whole_ns):
        return None
    facts = [
        Fact(
            "prefill a token in the slower part, P50",
            _micro(found.middle),
            "µs",
            len(found.slow),
            _micro(SLOWER * found.best),
        ),
        Fact("prefill a token in the better parts, P50", _micro(found.best), "µs", len(values)),
    ]
    return Named(facts, "ttft", 0.7, "error", effects, whole_ns, _rivals(told), advice=_WHAT_CHANGED)


def _shares_steps(told: Sequence[Served]) -> list[bool]:
    """Of each request, whether another's prefill was computed with it: prompts that share steps take longer."""
    spans = sorted((one.prefill_from_ns, one.first_ns, index) for index, one in enumerate(told))
    shared = [False] * len(told)
    latest_ns, latest = None, 0
    for start_ns, end_ns, index in spans:
        if latest_ns is not None and start_ns < latest_ns:
            shared[index] = shared[latest] = True
        if latest_ns is None or end_ns > latest_ns:
            latest_ns, latest = end_ns, index
    return shared


def _held_up(found: engine_steps.Dragged, told: Sequence[Served]) -> Named:
    rivals = [rival for rival in _rivals(told) if rival[0] != "engine.prefill"]
    rivals.append(("host.cpu", "nothing shows that the engine waited for processors (serve --engine-pid PID)"))
    return Named(found.facts(), "ttft", 0.6, "warning", found.excess_ns, found.whole_ns, rivals, advice=_WHAT_ELSE_RAN)


def _notable(told: Sequence[Served]) -> Named | None:
    ttft_ns, share = median_ns([one.ttft_ns for one in told]) or 0, _share(told)
    if ttft_ns < NOTABLE_NS or share < NOTABLE_SHARE or not _is_linear(told):
        return None
    effects = [one.prefill_ns or 0 for one in told]
    facts = [Fact("TTFT, P50", ms(ttft_ns), "ms", len(told), ms(NOTABLE_NS)), *_share_facts(told, share)]
    return Named(facts, "ttft", 0.6, "info", effects, ttft_ns, _rivals(told), advice=_BY_DESIGN)


def _share(told: Sequence[Served]) -> float:
    return sum(one.prefill_ns or 0 for one in told) / max(1, sum(one.ttft_ns for one in told))


def _pairs(told: Sequence[Served]) -> list[tuple[float, float]]:
    """(computed prompt tokens, prefill); of those that shared no step with another's, where they are enough."""
    alone = [one for one, shared in zip(told, _shares_steps(told), strict=True) if not shared]
    chosen = alone if len(alone) >= FIT_LEAST else told
    return [(float(one.prompt_tokens), float(one.prefill_ns or 0)) for one in chosen if one.prompt_tokens is not None]


def _is_linear(told: Sequence[Served]) -> bool:
    """Not contradicted: prompts of one length show no slope."""
    found = correlation(_pairs(told))
    return found is None or found >= LINEAR


def _share_facts(told: Sequence[Served], share: float) -> list[Fact]:
    pairs = _pairs(told)
    facts = [
        Fact("prefill, P50 (told by the engine)", ms(median_ns([o.prefill_ns or 0 for o in told])), "ms", len(told)),
        Fact("prefill, of TTFT", percent(share), "%", len(told), percent(PREFILL_SHARE)),
        Fact("computed prompt tokens, P50", median_ns([round(x) for x, _ in pairs]), "tokens", len(pairs)),
    ]
    found = correlation(pairs)
    if found is not None:
        facts.append(Fact("prefill against prompt tokens, r", round(found, 2), "", len(pairs), LINEAR))
        facts.append(Fact("prefill a token", round((slope(pairs) or 0.0) / 1e3, 1), "µs", len(pairs)))
    return facts


def _rivals(told: Sequence[Served]) -> list[tuple[str, str]]:
    prefill_ns = median_ns([one.prefill_ns or 0 for one in told])
    found = []
    for cause, times in (
        ("engine.queue", [one.queue_ns for one in told if one.queue_ns is not None]),
        ("engine.tokenizer", [one.frontend_ns for one in told if one.frontend_ns is not None]),
    ):
        middle = median_ns(times)
        if middle is not None and prefill_ns is not None and middle < prefill_ns:
            found.append((cause, f"it takes {text_ms(middle)} at P50, prefill {text_ms(prefill_ns)}"))
    return found


def _micro(value_ns: float) -> float:
    return round(value_ns / 1e3, 1)


_WHAT_CHANGED: Final = (
    "The same tokens take longer to compute than in the better part of this run: look at what changed then (another "
    "process on the card, its clock, a reload, a lower prefix-cache hit share). Take the run's --timeline beside "
    "deployments. Verify: prefill a token, at the same load, after each change taken back."
)
_WHAT_ELSE_RAN: Final = (
    "The same prompt tokens took many times longer in some steps than in others of this run, and neither length nor "
    "batch explains it: look at what else was in these steps or on that host (speculation, a large decode batch, "
    "compilation at a new shape, another process on card or cores). Take one of them away and repeat the load. "
    "Verify: prefill a token, in the slow and in the fast steps."
)
_SMALLER_STEPS: Final = (
    "Let a step hold fewer prefill tokens: halve max_num_batched_tokens (vLLM --max-num-batched-tokens; SGLang "
    "--chunked-prefill-size), with chunked prefill on. Expect even token pace while prompts come; TTFT of long prompts "
    "rises somewhat. Verify with the same load: ICL P95 and TTFT P95, both."
)
_BY_DESIGN: Final = (
    "TTFT is mostly the prefill of what the prompts hold: that is their length, not a fault. Where it is too long, "
    "raise prefix-cache hits (constant text first), shorten prompts, or add prefill capacity; set a target ([[slo]]) "
    "to have it judged. Verify: TTFT against computed prompt tokens, before and after."
)
