"""How latency grows with length: TTFT with the prompt, the whole answer with its tokens, and which stage carries it.

Rules here: the slope is Theil and Sen's (the median of the slopes between all pairs), which a few slow requests do not
move, with Sen's interval; it is said to be there only where the interval leaves 0 out. Lengths that are all alike fit
nothing. Requests that queue behind each other are not independent, so the interval is narrower than it should be.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from tapproxy.core import metrics, stats
from tapproxy.core.record import Record
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.figures import FRONTEND, PREFILL, QUEUE
from tapproxy.diagnose.links import Links
from tapproxy.diagnose.told import told
from tapproxy.diagnose.view import View

# 80,000 pairs: a tenth of a second. More requests than that are thinned out evenly in time.
POINTS_MOST: Final = 400
# Fewer, and the interval of a slope is as wide as anything.
POINTS_LEAST: Final = 20
# The long ones are this much longer than the short ones, else there is nothing to fit along.
SPREAD_LEAST: Final = 1.5
_Z95: Final = 1.96
# A stage carries a slope that is mostly its own.
CARRIES_SHARE: Final = 0.5
# Latency is bound by a length where that accounts for so much of it at the middle.
BOUND_SHARE: Final = 0.5
_BOUND_BY: Final = {PREFILL: "prefill", FRONTEND: "tokenizer", QUEUE: "queue"}


@dataclass(frozen=True, slots=True)
class Fit:
    """ns a token, its 95 % interval, and ns at no tokens."""

    n: int
    slope: float
    low: float
    high: float
    intercept: float

    @property
    def is_there(self) -> bool:
        """Whether latency grows with the length at all."""
        return self.low > 0


def theil_sen(points: Sequence[tuple[float, float]]) -> Fit | None:
    """The robust line through (x, y). None where points or lengths are too few to say."""
    if len(points) < POINTS_LEAST:
        return None
    thin = _thinned(points)
    xs = sorted(x for x, _ in thin)
    short, long = stats.nearest_rank(xs, 0.1) or 0.0, stats.nearest_rank(xs, 0.9) or 0.0
    if long <= 0 or long < SPREAD_LEAST * max(1.0, short):
        return None
    slopes = sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(thin, 2) if a[0] != b[0])
    n, pairs = len(thin), len(slopes)
    # Sen 1968; pairs of one length say nothing and are left out of the count.
    half = _Z95 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18) * pairs / (n * (n - 1) / 2) / 2
    low = slopes[max(0, math.floor(pairs / 2 - half))]
    high = slopes[min(pairs - 1, math.ceil(pairs / 2 + half))]
    slope = slopes[pairs // 2]
    rests = sorted(y - slope * x for x, y in thin)
    return Fit(len(points), slope, low, high, rests[len(rests) // 2])


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    step = len(points) / POINTS_MOST
    return list(points) if step <= 1 else [points[int(index * step)] for index in range(POINTS_MOST)]


def fits(view: View, links: Links, evidence: Evidence) -> dict[str, Any]:
    """``ttft_on_prompt_tokens`` and ``e2e_on_output_tokens``, each None where nothing can be fitted."""
    return {
        "ttft_on_prompt_tokens": _on_prompt(view, links, evidence),
        "e2e_on_output_tokens": _on_output(view),
    }


def uncached(record: Record) -> int | None:
    """The tokens of its prompt that had to be computed."""
    usage = record.usage
    return None if usage.prompt_tokens is None else max(0, usage.prompt_tokens - (usage.cached_tokens or 0))


def _on_prompt(view: View, links: Links, evidence: Evidence) -> dict[str, Any] | None:
    known = told(view, links, evidence)
    points: list[tuple[float, float]] = []
    parts: dict[str, list[tuple[float, float]]] = {}
    for chain in view.usable:
        seen = chain.seen()
        tokens, ttft = uncached(seen[-1]), metrics.ttft_ns(seen[0])
        if tokens is None or ttft is None:
            continue
        points.append((tokens, ttft))
        for part, figure in known.of(seen[-1], estimated=False).items():
            parts.setdefault(part, []).append((tokens, figure.ns))
    whole = theil_sen(points)
    if whole is None:
        return None
    carried = _carried(whole, {part: own for part, own in parts.items() if len(own) >= CARRIES_SHARE * len(points)})
    middle_x, middle_y = _middle(points)
    share = _share(whole, middle_x, middle_y)
    bound = next((_BOUND_BY[part] for part, own in carried.items() if (own["share"] or 0) >= CARRIES_SHARE), None)
    return {
        **_shown(whole),
        "x": "uncached prompt tokens",
        "y": f"TTFT@{view.outermost}",
        "share_at_p50": share,
        "carried_by": carried,
        "bound_by": bound if whole.is_there else None,
        "says": _says_prompt(whole, bound, carried, share),
    }


def _carried(whole: Fit, parts: Mapping[str, Sequence[tuple[float, float]]]) -> dict[str, dict[str, Any]]:
    """The stages' own slopes, and their share of the whole one; the largest first."""
    found = {}
    for part, points in parts.items():
        own = theil_sen(points)
        if own is not None:
            share = round(own.slope / whole.slope, 3) if whole.is_there else None
            found[part] = {**_shown(own), "share": share}
    return dict(sorted(found.items(), key=lambda each: -each[1]["us_per_token"]))


def _on_output(view: View) -> dict[str, Any] | None:
    points: list[tuple[float, float]] = []
    for chain in view.usable:
        first = chain.seen()[0]
        tokens, whole_ns = first.usage.completion_tokens, metrics.e2e_ns(first)
        if tokens is not None and whole_ns is not None:
            points.append((tokens, whole_ns))
    whole = theil_sen(points)
    if whole is None:
        return None
    share = _share(whole, *_middle(points))
    bound = "decode" if whole.is_there and (share or 0) >= BOUND_SHARE else None
    return {
        **_shown(whole),
        "x": "output tokens",
        "y": f"E2E@{view.outermost}",
        "share_at_p50": share,
        "bound_by": bound,
        "says": _says_output(whole, share, bound),
    }


def _middle(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    x, y = (stats.percentile([each[axis] for each in points], 0.5) or 0.0 for axis in (0, 1))
    return x, y


def _share(fit: Fit, x: float, y: float) -> float | None:
    """What the slope accounts for at the middle request."""
    return round(max(0.0, min(1.0, fit.slope * x / y)), 3) if fit.is_there and y > 0 else None


def _shown(fit: Fit) -> dict[str, Any]:
    return {
        "n": fit.n,
        "us_per_token": round(fit.slope / 1e3, 3),
        "ci95": [round(fit.low / 1e3, 3), round(fit.high / 1e3, 3)],
        "intercept_ms": round(fit.intercept / 1e6, 3),
    }


def _says_prompt(whole: Fit, bound: str | None, carried: Mapping[str, Mapping[str, Any]], share: float | None) -> str:
    if not whole.is_there:
        return f"TTFT does not grow with the prompt (n={whole.n}): neither prefill nor tokenizer bounds it"
    text = f"TTFT grows by {_us(whole)} per uncached prompt token (n={whole.n}), {_percent(share)} of it at P50"
    if bound is not None:
        part = next(name for name, word in _BOUND_BY.items() if word == bound)
        return f"{text}: {bound}-bound, {part} carries {_percent(carried[part]['share'])} of that growth"
    if not carried:
        return f"{text}; nothing tells which stage of the engine carries that"
    return f"{text}; no stage carries half of that growth"


def _says_output(whole: Fit, share: float | None, bound: str | None) -> str:
    if not whole.is_there:
        return f"the whole answer's time does not grow with its tokens (n={whole.n})"
    text = f"the whole answer takes {_us(whole)} more per output token (n={whole.n}), {_percent(share)} of it at P50"
    return f"{text}: decode-bound" if bound else f"{text}: not decode-bound"


def _us(fit: Fit) -> str:
    values = [value / 1e3 for value in (fit.slope, fit.low, fit.high)]
    if abs(values[0]) >= 1000:
        return "{:.2f} ms ({:.2f} to {:.2f})".format(*(value / 1000 for value in values))
    return "{:.1f} µs ({:.1f} to {:.1f})".format(*values)


def _percent(share: float | None) -> str:
    return "an unknown part" if share is None else f"{100 * share:.0f} %"
