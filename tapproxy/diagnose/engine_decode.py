"""Decode: an even token pace that is too slow, and drafts that are guessed in vain.

Rules here: a steady engine is slow by design; its pace is blamed only against a target, or against the run's own
better part under the same load. Speculation is judged by how many drafted tokens were kept, which its page counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import Final

from tapproxy.core.counts import TOKEN_KINDS
from tapproxy.diagnose.engine import LEAST_TOKENS
from tapproxy.diagnose.facts import Fact, Named, ms, percent
from tapproxy.diagnose.reference import SLOWER, drift
from tapproxy.diagnose.rule import Case
from tapproxy.diagnose.served import Prefills, Served

# Even: what lies beyond five medians of ICL is no more than a fifth of the time; else it is gaps, not pace.
EVEN_RATIO: Final = 5.0
EVEN_SHARE: Final = 0.2
# Below this a change of pace is a matter of the machine.
DRIFT_NS: Final = 5_000_000
# latency_tree, engine.spec_decode: kept of those drafted; and so many drafted before anything is said.
ACCEPTED_SHARE: Final = 0.5
DRAFTED_LEAST: Final = 200.0


def decode(case: Case) -> Named | None:
    """An even pace that misses its target, or that became slower."""
    if not case.view.engine_side:
        return None
    paced = [(one, pace) for one in case.requests if (pace := one.pace_ns) is not None]
    if not paced:
        return None
    uneven = _uneven_share([one for one, _ in paced])
    if uneven > EVEN_SHARE:
        return None
    even = Fact("decode time in gaps beyond five medians", percent(uneven), "%", len(paced), percent(EVEN_SHARE))
    rejected = [("engine.stall", f"gaps beyond {EVEN_RATIO:.0f} medians are {percent(uneven)} % of the decode time")]
    kept = kept_share(case)
    if kept is not None:
        rejected.append(("engine.spec_decode", f"{percent(kept[0])} % of the drafted tokens were kept"))
    preempted = [rise for each in case.evidence.engines.values() if (rise := each.rise("preemptions")) is not None]
    if preempted:
        rejected.append(("engine.preemption", f"{round(sum(preempted))} preemptions were counted"))
    middle = median(pace for _, pace in paced)
    target_ns = case.target.tpot_ns
    if target_ns is not None and middle > target_ns:
        effects = [round(pace - target_ns) for _, pace in paced if pace > target_ns]
        facts = [Fact("time a token, P50", ms(middle), "ms", len(paced), ms(target_ns)), even]
        return Named(facts, "tpot", 0.85, "error", effects, round(middle), rejected)
    # Cheap first; then without the steps in which prompts were computed, which take longer for whoever decodes.
    if drift(paced, DRIFT_NS) is None:
        return None
    prefills = Prefills(case.requests)
    clean = [(one, own) for one, pace in paced if (own := _pace_alone_ns(one, pace, prefills)) is not None]
    found = drift(clean, DRIFT_NS)
    if found is None:
        return None
    load = median([one.in_flight for one, _ in found.slow])
    facts = [
        Fact("time a token in the slower part, P50", ms(found.middle), "ms", len(found.slow), ms(SLOWER * found.best)),
        Fact("time a token in the better parts, P50", ms(found.best), "ms", len(paced)),
        Fact("others in flight in the slower part, P50", load, "requests", len(found.slow)),
        even,
    ]
    rejected.append(("engine.queue", f"the slower part is no busier: {load:g} others in flight at P50"))
    return Named(
        facts, "tpot", 0.75, "error", [round(excess) for _, excess in found.slow], round(found.middle), rejected
    )


def spec_decode(case: Case) -> Named | None:
    """Most drafted tokens are thrown away."""
    kept = kept_share(case)
    if kept is None or kept[0] >= ACCEPTED_SHARE:
        return None
    share, drafted, source = kept
    facts = [
        Fact(f"drafted tokens kept ({source})", percent(share), "%", round(drafted), percent(ACCEPTED_SHARE)),
        *_token_facts(case.requests),
    ]
    tokens = sum(one.record.usage.completion_tokens or 0 for one in case.requests)
    if tokens and case.evidence.engines:
        facts.append(Fact("tokens drafted for each token answered", round(drafted / tokens, 2), "", round(drafted)))
    paces = [pace for one in case.requests if (pace := one.pace_ns) is not None]
    if paces:
        facts.append(Fact("time a token with it, P50", ms(median(paces)), "ms", len(paces)))
    rejected = []
    vary = _varying_share(case.requests)
    if vary is not None:
        because = f"{percent(vary)} % of the events hold another number of tokens than most; bundles are of one size"
        rejected.append(("engine.bundling", because))
    # What it costs shows only with it off, under the same load: no effect is claimed.
    return Named(facts, "tpot", 0.8, "warning", rejected=rejected)


def kept_share(case: Case) -> tuple[float, float, str] | None:
    """(kept of the drafted tokens, drafted, source) over the requests' time; None without speculation."""
    for series in case.evidence.engines.values():
        drafted, kept = series.rise("spec_draft_tokens"), series.rise("spec_accepted_tokens")
        if drafted is not None and kept is not None and drafted >= DRAFTED_LEAST:
            return kept / drafted, drafted, series.source
        share = series.mean("spec_accept_share")
        if drafted is None and share is not None and share > 0:
            return share, len(series.values("spec_accept_share")), series.source
    return None


def _pace_alone_ns(one: Served, pace: float, prefills: Prefills) -> float | None:
    """Time a token in steps without anybody's prefill; None where these are too few."""
    alone = [b - a for a, b in pairwise(one.tokens_ns) if b > a and not prefills.within(a, b)]
    if len(alone) < LEAST_TOKENS:
        return None
    tokens_a_gap = fmean(one.gaps_ns) / pace if pace else 1.0
    return fmean(alone) / tokens_a_gap if tokens_a_gap else None


def _token_facts(requests: Sequence[Served]) -> list[Fact]:
    vary = _varying_share(requests)
    if vary is None:
        return []
    return [Fact("events that hold another number of tokens than most", percent(vary), "%", len(requests))]


def _varying_share(requests: Sequence[Served]) -> float | None:
    """Share of token events whose number of tokens is not the usual one; the last of a stream may be cut short."""
    counts: Counter[int] = Counter()
    for one in requests:
        events = one.record.events
        known = [
            tokens
            for kind, tokens in zip(events.kind, events.tokens, strict=False)
            if kind in TOKEN_KINDS and tokens is not None
        ]
        counts.update(known[1:-1])
    total = counts.total()
    return 1 - counts.most_common(1)[0][1] / total if total else None


def _uneven_share(requests: Sequence[Served]) -> float:
    """The part of the decode time that lies in long gaps."""
    long_ns = whole_ns = 0.0
    for one in requests:
        gaps = [gap for gap in one.gaps_ns if gap > 0]
        if len(gaps) + 1 < LEAST_TOKENS:
            continue
        middle = median(gaps)
        whole_ns += sum(gaps)
        long_ns += sum(gap - middle for gap in gaps if gap > EVEN_RATIO * middle)
    return long_ns / whole_ns if whole_ns else 0.0
