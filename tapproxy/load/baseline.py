"""A run against an earlier one of the register: better, worse, the same, or bought.

Rules here: an improvement in latency that cost throughput, goodput or errors is called that, and not an improvement.
Two runs that did not ask the same are not compared. The two were not interleaved: whatever drifted between them is in
the difference as well, so the interval only speaks for the requests' own spread, and that is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from tapproxy.core import metrics
from tapproxy.core.record import Record
from tapproxy.load import rundiff
from tapproxy.load.runs import Kept

_Z: Final = 1.959964  # 95 %
# The share by which throughput or goodput may fall before it counts as lost: runs of one setting differ by less.
LOST_SHARE: Final = 0.05
# definitions.md: completion tokens beyond 2 % apart are other answers.
TOKENS_SHARE: Final = 0.02
# Runs that were not interleaved drift by about a percent: less than this is no difference between them.
DRIFT_SHARE: Final = 0.02
ERRORS_P: Final = 0.05
# Fewer than these, and a median's interval means nothing.
_LEAST: Final = 11
# Of what is asked, what makes it another load. Counts of requests and seeds do not.
_LOAD: Final = (
    "scenario",
    "api",
    "rate",
    "concurrency",
    "max_tokens",
    "ignore_eos",
    "fresh_connections",
    "prompts",
    "stream",
    "swept",
)
NOT_INTERLEAVED: Final = (
    "the two runs were made one after the other: what drifted between them (load, clocks, temperature) is in the "
    "difference as well"
)


class Call(StrEnum):
    """What a run is against its baseline."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    MIXED = "mixed"
    BOUGHT = "latency_bought"
    NOT_COMPARABLE = "not_comparable"


# The worst of the paths is the run's.
_ORDER: Final = (Call.NOT_COMPARABLE, Call.WORSE, Call.BOUGHT, Call.MIXED, Call.BETTER, Call.SAME)


@dataclass(frozen=True, slots=True)
class Against:
    """The judgement. ``exit_code``: 1 where the run is worse, bought or not comparable."""

    baseline: str
    call: Call
    said: str
    incomparable_because: list[str] = field(default_factory=list)
    changed: list[dict[str, Any]] = field(default_factory=list)
    changed_said: str = ""
    paths: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 where nothing got worse."""
        return int(self.call in (Call.NOT_COMPARABLE, Call.WORSE, Call.BOUGHT))

    def to_dict(self) -> dict[str, Any]:
        """For the comparison's JSON."""
        return {
            "baseline": self.baseline,
            "call": self.call.value,
            "said": self.said,
            "comparable": self.call is not Call.NOT_COMPARABLE,
            "incomparable_because": self.incomparable_because,
            "settings": self.changed,
            "settings_said": self.changed_said,
            "paths": self.paths,
            "notes": self.notes,
        }


def against(baseline: Kept, now: Kept) -> Against:
    """Judges ``now``, path by path of the same name, against ``baseline``.

    ``now`` is a run of the register or ``Register.preview`` of one that is about to be kept.
    """
    changed = rundiff.settings(baseline, now).changed
    shared = [name for name in baseline.paths if name in now.paths]
    before, after = _measured(baseline), _measured(now)
    because = _incomparable(baseline, now, shared, before, after)
    if because:
        said = f"not comparable with {baseline.id}: {because[0]}"
        return Against(baseline.id, Call.NOT_COMPARABLE, said, because, changed, rundiff.said(changed))
    paths = {name: _path(baseline, now, name, before.get(name), after.get(name)) for name in shared}
    call = min((Call(each["call"]) for each in paths.values()), key=_ORDER.index)
    said = "; ".join(f"{name}: {each['said']}" for name, each in paths.items())
    return Against(baseline.id, call, said, [], changed, rundiff.said(changed), paths, [NOT_INTERLEAVED])


@dataclass(slots=True)
class _Measured:
    """Of one path, over its whole answers: latencies in ms, tokens."""

    values_ms: dict[str, list[float]] = field(default_factory=lambda: {"ttft_ms": [], "tpot_ms": [], "e2e_ms": []})
    tokens: list[int] = field(default_factory=list)


def _measured(run: Kept) -> dict[str, _Measured]:
    found: dict[str, _Measured] = {}
    for line in run.requests():
        try:
            slot, record = line["slot"], Record.from_dict(line["record"])
            if slot["warmup"] or line["floor"] or line["failure"] is not None:
                continue
            path = found.setdefault(str(slot["path"]), _Measured())
        except (KeyError, ValueError, TypeError):
            continue
        # In the server scenario time counts from when it was due, as in the comparison itself.
        due_ns = line.get("due_ns")
        start_ns = due_ns - record.t0_mono_ns if isinstance(due_ns, int) else 0
        for name, value in (
            ("ttft_ms", metrics.ttft_ns(record, start_ns=start_ns)),
            ("tpot_ms", metrics.tpot_ns(record)),
            ("e2e_ms", metrics.e2e_ns(record, start_ns=start_ns)),
        ):
            if value is not None:
                path.values_ms[name].append(value / 1e6)
        if record.usage.completion_tokens is not None:
            path.tokens.append(record.usage.completion_tokens)
    return found


def _incomparable(
    baseline: Kept, now: Kept, shared: list[str], before: Mapping[str, _Measured], after: Mapping[str, _Measured]
) -> list[str]:
    because = []
    if not shared:
        because.append(
            f"they have no path in common ({', '.join(baseline.paths) or 'none'} and {', '.join(now.paths) or 'none'})"
        )
    for name in _LOAD:
        a, b = baseline.asked.get(name), now.asked.get(name)
        if a != b:
            because.append(f"{name.replace('_', ' ')}: {a} then, {b} now")
    for path in shared:
        models = [run.paths[path].get("models") for run in (baseline, now)]
        if models[0] is not None and models[1] is not None and models[0] != models[1]:
            because.append(f"{path}: the model was {', '.join(models[0])}, it is {', '.join(models[1])}")
        a_tokens, b_tokens = (_mean(side[path].tokens) if path in side else None for side in (before, after))
        if a_tokens and b_tokens and abs(b_tokens - a_tokens) > TOKENS_SHARE * a_tokens:
            because.append(f"{path}: answers had {a_tokens:.1f} tokens on average, they have {b_tokens:.1f}")
    for run, when in ((baseline, "then"), (now, "now")):
        if run.client.get("saturated"):
            because.append(f"the client was the bottleneck {when}: {run.client.get('why') or 'saturated'}")
    return because


def _path(baseline: Kept, now: Kept, name: str, before: _Measured | None, after: _Measured | None) -> dict[str, Any]:
    results = [rundiff.of_path(run, name) for run in (baseline, now)]
    floors = [run.comparison.get("floor_ms") for run in (baseline, now)]
    floor_ms = max((each for each in floors if isinstance(each, int | float)), default=0.0)
    latencies = {
        metric: median_change(
            before.values_ms[metric] if before else [],
            after.values_ms[metric] if after else [],
            floor_ms,
            DRIFT_SHARE,
        )
        for metric in ("ttft_ms", "tpot_ms", "e2e_ms")
    }
    lower = [metric for metric, each in latencies.items() if each["significant"] and each["change"] < 0]
    higher = [metric for metric, each in latencies.items() if each["significant"] and each["change"] > 0]
    costs = _costs(*results)
    call = _call(bool(lower), bool(higher), bool(costs))
    return {
        "call": call.value,
        "said": _said(call, lower, higher, costs, latencies),
        "latencies": latencies,
        "costs": costs,
        "output_tokens_per_s": rundiff.change(*(each.get("output_tokens_per_s") for each in results)),
        "goodput": rundiff.change(*(each.get("goodput") for each in results)),
        "error_share": rundiff.change(*map(rundiff.error_share, results)),
    }


def _call(lower: bool, higher: bool, cost: bool) -> Call:
    if cost:
        return Call.BOUGHT if lower else Call.WORSE
    if lower and higher:
        return Call.MIXED
    return Call.BETTER if lower else Call.WORSE if higher else Call.SAME


def _said(
    call: Call, lower: Sequence[str], higher: Sequence[str], costs: Sequence[str], latencies: Mapping[str, Any]
) -> str:
    def moved(names: Sequence[str]) -> str:
        return ", ".join(
            f"{name.removesuffix('_ms').upper()} p50 {latencies[name]['a']:.2f} → {latencies[name]['b']:.2f} ms"
            for name in names
        )

    if call is Call.BOUGHT:
        return f"{moved(lower)}, but it cost {' and '.join(costs)}: not an improvement"
    if call is Call.WORSE:
        return "worse: " + ", ".join(filter(None, (moved(higher), *costs)))
    if call is Call.MIXED:
        return f"{moved(lower)}; but {moved(higher)}"
    return f"better: {moved(lower)}" if call is Call.BETTER else "no difference beyond the requests' own spread"


def _costs(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    costs = []
    for key, words in (("output_tokens_per_s", "throughput"), ("goodput", "goodput")):
        a, b = before.get(key), after.get(key)
        if isinstance(a, int | float) and isinstance(b, int | float) and a > 0 and b < a * (1 - LOST_SHARE):
            costs.append(f"{words} ({a:.1f} → {b:.1f}, {100 * (b - a) / a:.0f} %)")
    errors = [_error_counts(each) for each in (before, after)]
    if errors[0] is not None and errors[1] is not None:
        (a_lost, a_asked), (b_lost, b_asked) = errors[0], errors[1]
        if b_lost and more_errors_p(a_lost, a_asked, b_lost, b_asked) <= ERRORS_P:
            costs.append(f"errors ({a_lost} of {a_asked} → {b_lost} of {b_asked})")
    return costs


def _error_counts(result: Mapping[str, Any]) -> tuple[int, int] | None:
    lost, asked = rundiff.failed(result), result.get("requests")
    return (lost, asked) if lost is not None and isinstance(asked, int) else None


def median_change(
    before: Sequence[float], after: Sequence[float], floor: float = 0.0, share: float = 0.0
) -> dict[str, Any]:
    """Medians, their difference, a 95 % interval, and whether it is one.

    It is where it is beyond ``floor`` and that ``share`` of the median before, and its interval is without zero.

    The interval is that of McKean and Schrader: each median's standard error from the order statistics around it.
    """
    a, b = _median(before), _median(after)
    errors = [_standard_error(each) for each in (before, after)]
    out: dict[str, Any] = {"a": a, "b": b, "change": None, "ci95": None, "significant": False}
    if a is None or b is None:
        return out
    out["change"] = b - a
    if errors[0] is None or errors[1] is None:
        return out
    half = _Z * math.hypot(errors[0], errors[1])
    out["ci95"] = [b - a - half, b - a + half]
    out["significant"] = abs(b - a) > max(floor, share * a) and abs(b - a) > half
    return out


def _median(values: Sequence[float]) -> float | None:
    ordered = sorted(values)
    n = len(ordered)
    return None if not n else (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def _standard_error(values: Sequence[float]) -> float | None:
    n = len(values)
    if n < _LEAST:
        return None
    ordered = sorted(values)
    k = max(1, round((n + 1) / 2 - 2.575829 * math.sqrt(n / 4)))
    return (ordered[n - k] - ordered[k - 1]) / (2 * 2.575829)


def more_errors_p(a_lost: int, a_asked: int, b_lost: int, b_asked: int) -> float:
    """Fisher's exact test, one-sided: how likely so many of the errors fall on the second by chance alone."""
    lost, asked = a_lost + b_lost, a_asked + b_asked
    ways = math.comb(asked, lost)
    return (
        sum(math.comb(b_asked, k) * math.comb(a_asked, lost - k) for k in range(b_lost, min(lost, b_asked) + 1)) / ways
        if ways
        else 1.0
    )


def _mean(values: Sequence[int]) -> float | None:
    return sum(values) / len(values) if values else None
