"""Objectives judged on the requests that came: met, missed, or too few to say.

Rules here: a request that the service failed is over any limit; one that its client cut short is over a limit only
when that had already passed, else it shows nothing. What has no number (no usage, so no TPOT; no token count, so no
length class) is neither good nor bad: it is left out and counted. Start: the request's first byte at the outermost tap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from tapproxy.core import metrics
from tapproxy.core.objectives import Objective, State, judge
from tapproxy.core.record import Record
from tapproxy.diagnose.measures import e2e_ns

# Statuses below 500 that are the service's doing: too slow, too many.
_SERVICES: Final = frozenset((408, 429))
# In the order in which one decides for all limits of an objective.
_WORST: Final = (State.MISSED, State.TOO_FEW, State.MET)


def judge_all(objectives: Iterable[Objective], records: Sequence[Record]) -> list[dict[str, Any]]:
    """An entry for each objective: ``for``, ``state``, ``limits`` with n, over, state and need; what is left out."""
    good = [record for record in records if record.void is None]
    return [_entry(objective, good) for objective in objectives]


def _entry(objective: Objective, records: Sequence[Record]) -> dict[str, Any]:
    mine, unsorted = [], 0
    for record in records:
        fits = _is_for(objective, record)
        unsorted += fits is None
        if fits:
            mine.append(record)
    limits = [_limit(objective, metric, limit, mine) for metric, limit in objective.limits_ms.items()]
    states = {State(limit["state"]) for limit in limits}
    return {
        "for": objective.title(),
        "state": str(next(state for state in _WORST if state in states)),
        "requests": len(mine),
        "unsorted": unsorted,
        "limits": limits,
    }


def _is_for(objective: Objective, record: Record) -> bool | None:
    """None where a length that would decide is unknown."""
    if objective.model is not None and record.model != objective.model:
        return False
    if objective.path is not None and (record.path or "").partition("?")[0] != objective.path:
        return False
    unknown = False
    for span, tokens in (
        (objective.prompt_tokens, record.usage.prompt_tokens),
        (objective.output_tokens, record.usage.completion_tokens),
    ):
        if span is None:
            continue
        if tokens is None:
            unknown = True
        elif not span.holds(tokens):
            return False
    return None if unknown else True


def _limit(objective: Objective, metric: str, limit_ms: float, records: Sequence[Record]) -> dict[str, Any]:
    answers = Counter(_over(record, metric, limit_ms * 1e6) for record in records)
    n, over = answers[True] + answers[False], answers[True]
    found = judge(objective.share, n, over)
    return {
        "metric": metric,
        "limit_ms": limit_ms,
        "share": objective.share,
        "n": n,
        "over": over,
        "within_share": round(1 - over / n, 4) if n else None,
        "unknown": answers[None],
        "state": str(found.state),
        "need": found.need,
    }


def _over(record: Record, metric: str, limit_ns: float) -> bool | None:
    """Whether the request was over the limit; None where it shows nothing."""
    failure = metrics.failure(record)
    if failure is None:
        value = _value(record, metric)
        if value is None:
            one_token = metric == "tpot" and metrics.tpot_flag(record) == metrics.TOO_FEW_TOKENS
            return False if one_token else None
        return value > limit_ns
    if failure == "client_abort":
        return _cut_short(record, metric, limit_ns)
    own_fault = failure == "status" and (record.status or 500) < 500 and record.status not in _SERVICES
    return None if own_fault else True


def _value(record: Record, metric: str) -> float | None:
    if metric == "ttft":
        # An answer that is no stream begins when all of it is there.
        return metrics.ttft_ns(record) if record.events.kind else record.upstream.first_byte
    return metrics.tpot_ns(record) if metric == "tpot" else e2e_ns(record)


def _cut_short(record: Record, metric: str, limit_ns: float) -> bool | None:
    first_ns, left_ns = metrics.ttft_ns(record), record.downstream.end or record.upstream.end
    if metric == "ttft" and first_ns is not None:
        return first_ns > limit_ns
    if metric != "tpot" and left_ns is not None and left_ns > limit_ns:
        return True
    return None
