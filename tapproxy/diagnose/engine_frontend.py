"""The engine's API process: request parsing, chat template, tokenising.

Rules here: its time is what the engine told, or when the response head came, or what queue and prefill leave of TTFT;
stamps alone are no proof, since servers differ in when they send their head: the engine's own times or its page must
agree. It is blamed only where it is a part of TTFT that anybody notices.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Final

from tapproxy.diagnose.facts import Fact, Named, median_ns, ms, percent, text_ms
from tapproxy.diagnose.reference import correlation, slope
from tapproxy.diagnose.rule import Case
from tapproxy.diagnose.served import Served

# A part of TTFT like those of its siblings queue and prefill; and more than a busy machine's wake-ups.
FRONTEND_SHARE: Final = 0.3
FRONTEND_NS: Final = 20_000_000
REQUESTS_SHARE: Final = 0.2
REQUESTS_LEAST: Final = 5
# As for host.cpu: a fifth of the time.
CORE_WAIT_SHARE: Final = 0.2
# What is left over of TTFT may be anything; that it grows with the prompt is what a tokenizer does.
GROWS: Final = 0.7
# The page's mean must show half of what the stamps say.
AGREES: Final = 0.5


def tokenizer(case: Case) -> Named | None:
    """Much of TTFT goes before the request is in the scheduler's queue."""
    # What its thread stood ready without a core is the host's doing; the tokenizer's is the rest.
    own = 1 - core_wait_share(case)
    bad = slow_frontend(case.requests, own)
    slow = {id(one) for one in bad}
    if not bad:
        return None
    known = [(one, round(own * one.frontend_ns)) for one in case.requests if one.frontend_ns is not None]
    pairs = [(float(one.prompt_tokens), float(ns)) for one, ns in known if one.prompt_tokens is not None]
    grows = correlation(pairs)
    told = sum(one.record.engine.frontend_ns is not None for one in case.requests) > len(case.requests) / 2
    timed = sum(one.queue_ns is not None and one.prefill_ns is not None for one in case.requests)
    page_ns = _page_ns(case)
    mean_ns = fmean(ns for _, ns in known)
    agrees = page_ns is not None and page_ns >= AGREES * mean_ns
    # Behind a proxy the engine's own times leave the proxy's time as well, and the head is the proxy's.
    beside = bool(case.view.engine_side) and timed > len(case.requests) / 2
    if not (told or agrees or beside):
        return None
    from_head = sum(one.frontend_from is not None and one.frontend_from.startswith("response head") for one, _ in known)
    if not told and from_head <= len(known) / 2 and (grows is None or grows < GROWS):
        return None
    effects = [ns for one, ns in known if 2 * len(bad) >= len(known) or id(one) in slow]
    whole_ns = median_ns([one.ttft_ns for one, _ in known] if 2 * len(bad) >= len(known) else [o.ttft_ns for o in bad])
    share = sum(ns for _, ns in known) / max(1, sum(one.ttft_ns for one, _ in known))
    facts = [
        Fact(f"frontend time, P50 ({known[0][0].frontend_from})", ms(median_ns(effects)), "ms", len(effects), 20.0),
        Fact("frontend time, of TTFT", percent(share), "%", len(known), percent(FRONTEND_SHARE)),
        Fact("requests with a slow frontend", percent(len(bad) / len(known)), "%", len(known), percent(REQUESTS_SHARE)),
    ]
    if grows is not None:
        token_ns = slope(pairs) or 0.0
        facts.append(Fact("frontend time against prompt tokens, r", round(grows, 2), "", len(pairs), GROWS))
        facts.append(Fact("frontend time a prompt token", round(token_ns / 1e3, 2), "µs", len(pairs)))
    if page_ns is not None:
        facts.append(Fact("frontend time, mean (page: TTFT − queue − prefill)", ms(page_ns), "ms"))
    return Named(
        facts,
        metric="ttft",
        confidence=0.9 if told or (timed and grows is not None and grows >= GROWS) else 0.75,
        effects_ns=effects,
        whole_ns=whole_ns,
        rejected=_rivals(case, median_ns(effects) or 0),
    )


def core_wait_share(case: Case) -> float:
    """Of the time, that in which the engine's thread that waited most was ready without a core; 0 where that is no
    more than a busy machine's, or not told."""
    shares = [
        series.rate("engine_longest_thread_wait_s") or 0.0
        for series in case.evidence.hosts.values()
        if series.fact("engine_here") == "yes"
    ]
    most = min(1.0, max(shares, default=0.0))
    return most if most >= CORE_WAIT_SHARE else 0.0


def slow_frontend(requests: Sequence[Served], part: float = 1.0) -> list[Served]:
    """The requests whose frontend took a noticeable time, where they are enough to speak of; else none. ``part``: the
    share of its time that counts."""
    known = [one for one in requests if one.frontend_ns is not None]
    bad = [one for one in known if part * (one.frontend_ns or 0) >= max(FRONTEND_NS, FRONTEND_SHARE * one.ttft_ns)]
    return bad if len(bad) >= max(REQUESTS_LEAST, REQUESTS_SHARE * len(known)) else []


def _page_ns(case: Case) -> float | None:
    """TTFT − queue − prefill of the page's means, or the time it tells itself."""
    for series in case.evidence.engines.values():
        tokenize_s = series.mean_of("tokenize_s")
        if tokenize_s is not None:
            return tokenize_s * 1e9
        parts = [series.mean_of(name) for name in ("ttft_s", "queue_s", "prefill_s")]
        if all(part is not None for part in parts):
            ttft_s, queue_s, prefill_s = (part or 0.0 for part in parts)
            return max(0.0, ttft_s - queue_s - prefill_s) * 1e9
    return None


def _rivals(case: Case, frontend_ns: float) -> list[tuple[str, str]]:
    found = []
    for cause, times in (
        ("engine.prefill", [one.prefill_ns for one in case.requests if one.prefill_ns is not None]),
        ("engine.queue", [one.queue_ns for one in case.requests if one.queue_ns is not None]),
    ):
        middle = median_ns(times)
        if middle is not None and middle < frontend_ns:
            found.append((cause, f"it takes {text_ms(middle)} at P50, the frontend {text_ms(frontend_ns)}"))
    return found
