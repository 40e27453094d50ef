"""What one path did with its load: its object under ``paths`` of a comparison.

Rules here: a request that failed has no latency and is counted under its class; warm-up is left out; a number that
not every counted request can back is null, never an average over those that happened to have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tapproxy.core import metrics, stats
from tapproxy.load.arms import FROM_START, Arm, Start, late_ns, median
from tapproxy.load.sender import FAILURES, Result
from tapproxy.load.slo import Slo, attainment, percentile_name, server_test
from tapproxy.load.trial import Scenario

# Of what an upper estimate is given, where there are enough requests for it.
ESTIMATED: Final = ("ttft_ms", "ttfvt_ms", "tpot_ms", "e2e_ms")
ASSUMES: Final = "independent requests, which queueing breaks"


def path_object(arm: Arm, holds_ns: Sequence[int] | None = None) -> dict[str, Any]:
    """The path's numbers that need nothing but its results."""
    records = [result.record for result in arm.good]
    return {
        "requests": len(arm.results),
        "errors": {name: arm.failed.get(name, 0) for name in FAILURES},
        "ttft_ms": stats.summary(arm.values("ttft_ms")),
        "ttfvt_ms": stats.summary(arm.values("ttfvt_ms")),
        "tpot_ms": stats.summary(arm.values("tpot_ms")),
        "icl_ms": stats.summary(arm.values("icl_ms")),
        "itl_ms": _gaps([metrics.itl_ns(record) for record in records]),
        "e2e_ms": stats.summary(arm.values("e2e_ms")),
        "hold_ms": None if holds_ns is None else stats.summary(list(holds_ns)),
        "connect_ms": _connect(arm.results),
        "output_tokens_per_s": output_tokens_per_s(arm),
        "goodput": None,
        "early_stopping": None,
    }


def compared_object(arm: Arm, scenario: Scenario, slo: Slo | None) -> dict[str, Any]:
    """The path's object in a comparison: also where latency starts, objectives, early stopping and the cold start."""
    facts = arm.facts
    out = {
        **path_object(arm),
        "void": arm.void,
        "latency_from": str(arm.start),
        "early_stopping": _early_stopping(arm, scenario, slo),
        "cold_start_ttft_ms": None if facts is None or facts.cold_ttft_ns is None else facts.cold_ttft_ns / 1e6,
        "output_tokens": _whole_sum(_tokens(arm)),
    }
    if arm.start is Start.SCHEDULED:
        out["from_sent"] = {metric: stats.summary(arm.values(metric, Start.SENT)) for metric in FROM_START}
        out["late_ms"] = stats.summary([late_ns(result) for result in arm.results])
    if slo is not None:
        met = attainment(arm, slo)
        window_ns = busy_ns(arm)
        out["goodput"] = None if met is None or not window_ns else met[0] / (window_ns / 1e9)
        out["attainment"] = None if met is None else met[0] / met[1]
    if facts is not None:
        out["url"], out["models"] = facts.url, facts.models
        out["engine"], out["engine_version"] = facts.engine, facts.engine_version
    return out


def _early_stopping(arm: Arm, scenario: Scenario, slo: Slo | None) -> dict[str, Any]:
    """Upper estimates at confidence c of every percentile; under ``server`` with objectives, whether they are shown."""
    estimates = {}
    for metric in ESTIMATED:
        values = arm.values(metric)
        estimates[metric] = {
            percentile_name(p): None if (value := stats.estimate(values, p)) is None else value / 1e6
            for p in stats.SUMMARY_PERCENTILES
        }
    shown = server_test(arm, slo) if slo is not None and scenario == Scenario.SERVER else None
    return {
        "confidence": stats.CONFIDENCE,
        "tolerance": 0,
        "assumes": ASSUMES,
        "upper_estimate": estimates,
        "server": shown,
    }


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
    middle = median([value for value in values if value is not None])
    return None if middle is None else middle / 1e6


def _tokens(arm: Arm) -> list[int | None]:
    return [result.record.usage.completion_tokens for result in arm.results if result.failure is None]


def _whole_sum(counts: Sequence[int | None]) -> int | None:
    """None where one is unknown, or none is there."""
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def output_tokens_per_s(arm: Arm) -> float | None:
    """Tokens of whole answers / the time in which this path had a request under way, or under ``server`` all of it.

    The paths take turns, so a window of wall time would divide each by the others' time as well; a schedule's pauses
    are the load's own.
    """
    tokens, window_ns = _whole_sum(_tokens(arm)), busy_ns(arm)
    return tokens / (window_ns / 1e9) if tokens is not None and window_ns else None


def busy_ns(arm: Arm) -> int:
    """The window of this path's rates."""
    spans = [
        (result.record.t0_mono_ns - (late_ns(result) if arm.start is Start.SCHEDULED else 0), ended)
        for result in arm.results
        if (ended := _ended_ns(result)) is not None
    ]
    if arm.start is Start.SCHEDULED:
        return max(end for _, end in spans) - min(start for start, _ in spans) if spans else 0
    return _covered_ns(spans)


def _ended_ns(result: Result) -> int | None:
    record = result.record
    last = record.upstream.end
    if last is None:
        last = record.events.arrived[-1] if record.events.arrived else None
    return None if last is None else record.t0_mono_ns + last


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


def summarise(
    by_path: Mapping[str, Sequence[Result]], holds_ns: Mapping[str, Sequence[int] | None] | None = None
) -> dict[str, dict[str, Any]]:
    """One object for each path, latency from the sending."""
    return {path: path_object(Arm(path, found), (holds_ns or {}).get(path)) for path, found in by_path.items()}
