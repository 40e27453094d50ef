"""A run beside an earlier one: what changed for each path, and whether a gain was paid for elsewhere.

Rules here: two runs share no rounds, so nothing is paired; between them everything may have changed, which is why an
earlier run tells less than a second path of the same one. A latency that improved while throughput fell or errors
rose is called just that.
"""

from __future__ import annotations

from typing import Any, Final

from tapproxy.load.arms import Arm, arms
from tapproxy.load.comparability import SURE, fisher
from tapproxy.load.comparability import between_runs as why_not
from tapproxy.load.differences import DECIDES, Differences, between_runs, decide, shown
from tapproxy.load.slo import Slo, attainment
from tapproxy.load.summary import output_tokens_per_s
from tapproxy.load.trial import Trial

# Throughput that fell by less is the run's own noise.
THROUGHPUT_SHARE: Final = 0.05


def beside(now: Trial, before: Trial, arms_now: dict[str, Arm], slo: Slo | None = None) -> dict[str, Any]:
    """The ``baseline`` object: why the runs do not compare, and per path of the same name what changed."""
    arms_before = arms(before)
    reasons = why_not(now, before, arms_now, arms_before)
    shared = [name for name in arms_now if name in arms_before]
    drawn = {
        name: between_runs(arms_before[name], arms_now[name], seed=now.asked.seed)
        for name in shared
        if now.asked.scenario == before.asked.scenario
    }
    void = now.client.saturated or before.client.saturated
    decided = decide(drawn, None, allowed=not reasons and not void)
    return {
        "run": before.id,
        "comparable": not reasons,
        "incomparable_because": reasons,
        "paths": {name: _path(decided[name], arms_before[name], arms_now[name], slo) for name in decided},
    }


def _path(found: Differences, before: Arm, now: Arm, slo: Slo | None) -> dict[str, Any]:
    rates = [output_tokens_per_s(arm) for arm in (before, now)]
    out: dict[str, Any] = {
        "differences": shown(found),
        "output_tokens_per_s": {"before": rates[0], "now": rates[1]},
        "error_share": {"before": before.failure_share, "now": now.failure_share},
        "called": _called(found, before, now, rates),
    }
    if slo is not None:
        out["attainment"] = {
            "before": None if (then := attainment(before, slo)) is None else then[0] / then[1],
            "now": None if (met := attainment(now, slo)) is None else met[0] / met[1],
        }
    return out


def _called(found: Differences, before: Arm, now: Arm, rates: list[float | None]) -> str:
    """In words, what became of the path."""
    each = found[DECIDES[0]][DECIDES[1]]
    # Also where the runs do not compare: what was gained, and what for, are to be read together.
    if not each.excludes_zero or each.difference_ms is None:
        word = "no difference in TTFT at P50"
    else:
        word = f"TTFT at P50 {'improved' if each.difference_ms < 0 else 'grew'} by {abs(each.difference_ms):.1f} ms"
    costs = []
    if rates[0] and rates[1] is not None and rates[1] < rates[0] * (1 - THROUGHPUT_SHARE):
        costs.append(f"throughput fell from {rates[0]:.0f} to {rates[1]:.0f} tokens/s")
    a, b = (before.failures, len(before.results)), (now.failures, len(now.results))
    if a[1] and b[1] and b[0] / b[1] > a[0] / a[1] and fisher(*a, *b) < SURE:
        costs.append(f"failures rose from {a[0]} of {a[1]} to {b[0]} of {b[1]}")
    if not costs:
        return word
    joint = ", at a cost: " if "improved" in word else "; "
    return word + joint + " and ".join(costs)
