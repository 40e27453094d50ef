"""Percentiles that were observed, and how many samples one wants: MLPerf's early stopping (definitions.md).

Rules here: nearest rank on observed values, nothing interpolated; a percentile with too few samples is None and
``need`` says how many more requests it wants; c = 0.99, d = 0. Early stopping assumes independent requests, and
queueing breaks that: whoever prints these numbers says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

CONFIDENCE: Final = 0.99
SUMMARY_PERCENTILES: Final = (0.50, 0.90, 0.95, 0.99)
_NS_PER_MS: Final = 1_000_000
# p·n of a p such as 0.07 lies a hair above the whole number that is meant.
_RANK_GRAIN: Final = 1e-9


def percentile(values: Sequence[float], p: float) -> float | None:
    """The smallest observed value with at least a share ``p`` (0 < p ≤ 1) of the values at or below it."""
    return nearest_rank(sorted(values), p)


def nearest_rank(ordered: Sequence[float], p: float) -> float | None:
    """``percentile`` of values that are sorted already."""
    if not ordered:
        return None
    rank = math.ceil(p * len(ordered) - _RANK_GRAIN)
    return ordered[min(max(rank, 1), len(ordered)) - 1]


def incomplete_beta(p: float, h: int, t: int) -> float:
    """I_p(h, t + 1), the regularised incomplete beta function: P[at most t failures in h + t | failure rate 1 − p].

    With whole parameters it is a sum of binomial terms; in logarithms, since the terms underflow.
    """
    n = h + t
    log_p, log_q = math.log(p), math.log1p(-p)
    head = math.lgamma(n + 1)
    logs = [
        head - math.lgamma(k + 1) - math.lgamma(n - k + 1) + k * log_q + (n - k) * log_p for k in range(min(t, n) + 1)
    ]
    largest = max(logs)
    return math.exp(largest) * math.fsum(math.exp(log - largest) for log in logs)


@lru_cache(maxsize=4096)
def least_n(p: float, t: int) -> int:
    """h(t) + t: the least number of requests of which ``t`` may be over target.

    h(t) is the smallest h with I_p(h, t + 1) ≤ 1 − c.
    """
    if not 0 < p < 1 or t < 0:
        raise ValueError(f"p is {p} and t {t}, expected 0 < p < 1 and t >= 0")
    low, high = 0, 1
    while not _enough(p, high, t):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _enough(p, middle, t):
            high = middle
        else:
            low = middle
    return high + t


def _enough(p: float, h: int, t: int) -> bool:
    return incomplete_beta(p, h, t) <= 1 - CONFIDENCE


def need(p: float, n: int) -> int:
    """How many more requests an estimate of that percentile wants (t = 1), 0 where there are enough."""
    return max(0, least_n(p, 1) - n)


def passes(p: float, n: int, over: int) -> bool:
    """``server``: whether ``n`` requests with ``over`` of them over target show the percentile within target."""
    return over < n and _enough(p, n - over, over)


def estimate(values: Sequence[float], p: float) -> float | None:
    """``single-stream``: an upper estimate of the percentile at confidence c; None with too few values.

    The largest t ≥ 1 with n ≥ h(t) + t gives ``sorted[n − t]``, counted from 0.
    """
    n = len(values)
    if n < least_n(p, 1):
        return None
    # n ≥ h(t) + t means that n − t is enough; t beyond the mean number over target never is.
    low, high = 1, int(n * (1 - p)) + 2
    while high - low > 1:
        middle = (low + high) // 2
        if _enough(p, n - middle, middle):
            low = middle
        else:
            high = middle
    return sorted(values)[n - low]


def summary(values_ns: Sequence[float]) -> dict[str, Any]:
    """Percentiles and mean in ms, n, and ``need`` per percentile that has too few samples and so is None."""
    ordered = sorted(values_ns)
    n = len(ordered)
    out: dict[str, Any] = {}
    missing: dict[str, int] = {}
    for p in SUMMARY_PERCENTILES:
        name = f"p{round(p * 100)}"
        more = need(p, n)
        value = None if more else nearest_rank(ordered, p)
        out[name] = None if value is None else value / _NS_PER_MS
        if more:
            missing[name] = more
    out["mean"] = math.fsum(ordered) / n / _NS_PER_MS if n else None
    out["n"] = n
    out["need"] = missing
    return out
