"""Answers that the proxy gave up on: at one constant age, or after one constant silence.

Rules here: the proxy is accused only where the engine's side was still at work when it was left, and where the limit
shows as a number: clients leave when they have read enough, at any age. Where the near side did not see it too, a
client's own limit is left standing beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final

from tapproxy.core.record import Ended, Record
from tapproxy.diagnose.facts import Fact, Named, ms, percent, text_ms
from tapproxy.diagnose.view import Chain, View

# As for engine.errors: one in a hundred. Three that agree are no coincidence, two may be.
CUT_SHARE: Final = 0.01
CUT_LEAST: Final = 3
# A limit is one number: nine cuts of ten lie within a tenth of the median, or 150 ms around it: nginx does not set a
# timer anew for less than 300 ms (NGX_TIMER_LAZY_DELAY), and gives up that much early.
AGREE: Final = 0.9
SPREAD_SHARE: Final = 0.1
SPREAD_NS: Final = 150_000_000
# Nobody sets a limit below this; what is cut earlier failed.
LEAST_LIMIT_NS: Final = 200_000_000

_CUT_SHORT: Final = (Ended.UPSTREAM_ABORTED, Ended.UPSTREAM_MALFORMED)


def proxy_timeout(view: View) -> Named | None:
    """One constant age or silence, the engine not done, and the nearer side cut off or told 504."""
    seen = [chain for chain in view.chains if _left_by_proxy(chain)]
    sure = len(seen) >= CUT_LEAST
    far = [chain.inner for chain in seen if chain.inner is not None] if sure else _left_of_lone_tap(view)
    total = len(view.chains) or 1
    if len(far) < max(CUT_LEAST, CUT_SHARE * total):
        return None
    by = {
        "silence when the answer was cut, P50": [_silence_ns(record) for record in far],
        "age of the answer when it was cut, P50": [record.downstream.end or 0 for record in far],
    }
    constant = {what: values for what, values in by.items() if _one_number(values)}
    if not constant:
        return None
    what = next(iter(constant))
    limits = constant[what]
    middle = median(limits)
    facts = [
        Fact(what, ms(middle), "ms", len(limits), ms(LEAST_LIMIT_NS)),
        Fact("cuts within a tenth of it", percent(_near_share(limits)), "%", len(limits), percent(AGREE)),
        Fact("answers cut while the engine was at work", percent(len(far) / total), "%", total, percent(CUT_SHARE)),
        Fact("of them without a first byte", sum(record.upstream.first_byte is None for record in far), "answers"),
    ]
    facts += [Fact(other, ms(median(values)), "ms", len(values)) for other, values in by.items() if other != what]
    spread = f"all of them within {text_ms(max(limits) - min(limits))}"
    because = f"the engine's side was left in the middle, {text_ms(middle)} each time ({spread}); the engine ended none"
    if sure:
        facts.append(Fact("of them broken off, or a 504, before the proxy: no client left them", len(seen), "answers"))
    return Named(
        facts,
        metric="e2e",
        confidence=0.9 if sure else 0.5,
        effects_ns=limits,
        whole_ns=round(median([record.downstream.end or 0 for record in far])),
        rejected=[("engine.errors", because)],
        advice=_advice(middle, silence=what.startswith("silence"), sure=sure),
    )


def cut_by_proxy(view: View) -> int:
    """How many answers the proxy gave up on."""
    return sum(_left_by_proxy(chain) for chain in view.chains)


def _left_by_proxy(chain: Chain) -> bool:
    near, far = chain.outer or chain.client, chain.inner
    if near is None or far is None or far.ended != Ended.CLIENT_ABORTED:
        return False
    return near.status == 504 or near.ended in _CUT_SHORT


def _left_of_lone_tap(view: View) -> list[Record]:
    """Of a tap behind a proxy that nobody looks at from the other side: all that were left."""
    if view.outer or view.client:
        return []
    return [
        record for record in view.inner if record.ended == Ended.CLIENT_ABORTED and (record.request.proxy_marks or None)
    ]


def _silence_ns(record: Record) -> int:
    """From the last byte to the end; from the request's last byte where none came."""
    end_ns = record.downstream.end or 0
    last = record.events.arrived[-1:] or [
        at
        for at in (record.upstream.first_byte, record.upstream.head, record.upstream.write_end)
        if at is not None and at <= end_ns
    ]
    return end_ns - (last[0] if last else 0)


def _one_number(values: Sequence[int]) -> bool:
    return median(values) >= LEAST_LIMIT_NS and _near_share(values) >= AGREE


def _near_share(values: Sequence[int]) -> float:
    middle = median(values)
    room = max(SPREAD_NS, SPREAD_SHARE * middle)
    return sum(abs(value - middle) <= room for value in values) / len(values)


def _advice(limit_ns: float, *, silence: bool, sure: bool) -> str:
    limit = text_ms(limit_ns)
    what = f"after {limit} without a byte" if silence else f"at an age of {limit}"
    who = "The proxy gives an answer up" if sure else "The proxy, or a client's own limit, gives an answer up"
    return (
        f"{who} {what}. Set its read timeout above the longest silence of the engine, prefill and queueing included "
        "(nginx: `proxy_read_timeout 600s;` in the streaming location; it counts between two reads, not the whole "
        "answer). Answers then end as the engine ends them; a dead engine is noticed that much later, so keep a "
        "health check beside it. Verify: send the same requests again, none may end early; the engine's own limit on "
        "the queue is the place to shed load."
    )
