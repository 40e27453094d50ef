"""What each path did with the same load: the ``paths`` object of a comparison.

Rules here: a request that failed has no latency and is counted under its class; warm-up is left out; a number that
not every counted request can back is null, never an average over those that happened to have it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tapproxy.core import metrics, stats
from tapproxy.load.sender import FAILURES, Result
from tapproxy.load.slo import Slo
from tapproxy.load.trial import Trial


def summarise(
    results: Iterable[Result], *, holds_ns: Mapping[str, Sequence[int] | None] | None = None
) -> dict[str, dict[str, Any]]:
    """One object for each path, in the order the paths first appear in the plan.

    ``holds_ns``: per path the hold of every event, where a tap behind the hop let it be paired.
    """
    by_path: dict[str, list[Result]] = {}
    for result in sorted(results, key=lambda result: result.slot.index):
        if not result.slot.warmup:
            by_path.setdefault(result.slot.path, []).append(result)
    return {path: _path(found, (holds_ns or {}).get(path)) for path, found in by_path.items()}


def _path(results: Sequence[Result], holds_ns: Sequence[int] | None) -> dict[str, Any]:
    records = [result.record for result in results if result.failure is None]
    failed = Counter(result.failure for result in results if result.failure is not None)
    return {
        "requests": len(results),
        "errors": {name: failed[name] for name in FAILURES},
        "ttft_ms": _summary([metrics.ttft_ns(record) for record in records]),
        "ttfvt_ms": _summary([metrics.ttfvt_ns(record) for record in records]),
        "tpot_ms": _summary([metrics.tpot_ns(record) for record in records]),
        "icl_ms": stats.summary([gap for record in records for gap in metrics.icl_ns(record)]),
        "itl_ms": _gaps([metrics.itl_ns(record) for record in records]),
        "e2e_ms": _summary([metrics.e2e_ns(record) for record in records]),
        "hold_ms": None if holds_ns is None else stats.summary(list(holds_ns)),
        "connect_ms": _connect(results),
        "output_tokens_per_s": _output_tokens_per_s(results),
        "goodput": None,
        "early_stopping": None,
    }


def _summary(values: Iterable[float | None]) -> dict[str, Any]:
    """Over the requests that have the number; ``n`` says how many those are."""
    return stats.summary([value for value in values if value is not None])


def _gaps(per_request: Sequence[Sequence[float] | None]) -> dict[str, Any] | None:
    """None where one request's token counts are unknown: ITL of the rest would be another load's."""
    known = [gaps for gaps in per_request if gaps is not None]
    if not known or len(known) < len(per_request):
        return None
    return stats.summary([gap for gaps in known for gap in gaps])


def _connect(results: Sequence[Result]) -> dict[str, float | None]:
    """Medians over the requests that paid for the step; ``reused_share`` over those that got a connection."""
    parts = [result.record.upstream for result in results if result.failure != "connect"]
    reused = [part.reused for part in parts if part.reused is not None]
    return {
        "dns": _median_ms([part.dns for part in parts]),
        "tcp": _median_ms([part.connect for part in parts]),
        "tls": _median_ms([part.tls for part in parts]),
        "reused_share": sum(reused) / len(reused) if reused else None,
    }


def _median_ms(values: Iterable[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    middle = stats.percentile(known, 0.5) if known else None
    return None if middle is None else middle / 1e6


def _output_tokens_per_s(results: Sequence[Result]) -> float | None:
    """Tokens of whole answers / the time in which this path had a request under way.

    The paths take turns, so a window of wall time would divide each by the others' time as well.
    """
    whole = [result.record for result in results if result.failure is None]
    tokens = [record.usage.completion_tokens for record in whole]
    known = [count for count in tokens if count is not None]
    if not known or len(known) < len(tokens):
        return None
    busy_ns = _covered_ns(
        (record.t0_mono_ns, record.t0_mono_ns + end_ns)
        for record in (result.record for result in results)
        if (end_ns := _last_ns(record.upstream.end, record.events.arrived)) is not None
    )
    return sum(known) / (busy_ns / 1e9) if busy_ns else None


def _last_ns(end_ns: int | None, arrived_ns: Sequence[int]) -> int | None:
    return end_ns if end_ns is not None else (arrived_ns[-1] if arrived_ns else None)


def _covered_ns(spans: Iterable[tuple[int, int]]) -> int:
    """The length of the union of the spans."""
    total = 0
    upto: int | None = None
    for start, end in sorted(spans):
        if upto is None or start > upto:
            total += end - start
            upto = end
        elif end > upto:
            total += end - upto
            upto = end
    return total


class Comparison:
    """Stands in until the judging part is merged."""

    def __init__(self, trial: Trial, slo: Slo | None) -> None:
        self._trial = trial
        self._slo = slo
        self.verdict = "not_measured" if trial.client.saturated else "healthy"
        self.exit_code = 3 if trial.client.saturated else 0

    def to_dict(self) -> dict[str, Any]:
        """Some of the contract's keys."""
        paths = summarise(self._trial.results)
        for path in paths if self._slo is not None else ():
            limit = self._slo.objectives[0] if self._slo else None
            own = [r for r in self._trial.results if r.slot.path == path and not r.slot.warmup]
            over = sum((metrics.ttft_ns(r.record) or 1e18) > limit.limit_ms * 1e6 for r in own) if limit else 0
            passes = stats.passes(limit.percentile if limit else 0.9, len(own), over)
            paths[path]["early_stopping"] = {"server": {"ttft": {"passes": passes}}}
        return {
            "schema": "tapproxy.comparison/1",
            "run": self._trial.id,
            "paths": paths,
            "client": asdict(self._trial.client),
            "verdict": {"verdict": self.verdict},
        }


def judge(trial: Trial, slo: Slo | None = None, baseline: Trial | None = None) -> Comparison:
    """Stands in."""
    return Comparison(trial, slo)
