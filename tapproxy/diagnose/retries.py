"""Requests that the proxy sent more than once.

Rules here: one request before the proxy and several tries of it behind (module tries). Two before it are the client's
own retry, and nobody's fault here.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from tapproxy.core.metrics import ttft_ns
from tapproxy.core.record import Ended, Record
from tapproxy.diagnose.facts import Fact, Named, median_ns, ms, percent
from tapproxy.diagnose.measures import known, token_events
from tapproxy.diagnose.view import View

# One in a hundred, and three: a single retry is what retries are for.
RETRIED_SHARE: Final = 0.01
RETRIED_LEAST: Final = 3


def proxy_retry(view: View) -> Named | None:
    """One outer exchange, two inner ones."""
    near, behind = view.outer or view.client, {id(record) for record in view.inner}
    found = [(request, sends) for request, sends in view.retried if id(sends[0]) in behind]
    if len(found) < max(RETRIED_LEAST, RETRIED_SHARE * len(near)):
        return None
    first = Counter(_how(sends[0]) for _, sends in found)
    twice = sum(sum(bool(token_events(send)) for send in sends) > 1 for _, sends in found)
    # What sending again costs: from the first one's arrival behind the proxy to the last one's.
    lost = [sends[-1].t0_mono_ns - sends[0].t0_mono_ns for _, sends in found]
    facts = [
        Fact("requests sent more than once", percent(len(found) / len(near)), "%", len(near), percent(RETRIED_SHARE)),
        Fact("sends of such a request, most", max(len(sends) for _, sends in found), "sends", len(found)),
        Fact("first send to last, P50", ms(median_ns(lost)), "ms", len(lost)),
        Fact("of them with tokens in more than one answer", twice, "requests", len(found)),
    ]
    facts += [Fact(f"first send ended: {how}", count, "requests", len(found)) for how, count in first.most_common()]
    because = (
        f"before the proxy each of the {len(found)} was one exchange, which a client's own retry is not; what failed "
        "first is the engine's where it failed, the time between the sends is what sending again costs"
    )
    return Named(
        facts,
        metric="ttft",
        confidence=0.9,
        effects_ns=lost,
        whole_ns=median_ns(known(ttft_ns(request) for request, _ in found)),
        rejected=[("engine.errors", because)],
    )


def _how(send: Record) -> str:
    if send.status is not None and send.status >= 400 and send.ended == Ended.COMPLETE:
        return f"status {send.status}"
    return str(send.ended)
