"""Rules for what carries the bytes: the network on both sides of the proxy, and the taps themselves.

Rules here: a network is blamed for round trips that the kernel measured, and for no more than the fastest crossing of
the run; a tap for its own handling, never for waiting on client, connection or a full client buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tapproxy.core.record import Record
from tapproxy.diagnose.facts import Fact, Named, median_ns, ms
from tapproxy.diagnose.links import Links
from tapproxy.diagnose.measures import first_token, icl_ns, known, tap_delays_ns, ttft_ns
from tapproxy.diagnose.view import View, usable_records

# A fifth of TTFT, and more than a person notices: below that distance is not what makes a path slow.
NETWORK_SHARE: Final = 0.2
NETWORK_NS: Final = 10_000_000
# latency_tree, tap.overhead: 5 % of TTFT or ICL; but under a ms nobody gains by removing it, and on a busy machine
# that much is scheduling.
OVERHEAD_SHARE: Final = 0.05
OVERHEAD_NS: Final = 1_000_000


def downstream(view: View, links: Links) -> Named | None:
    return _network(view, links.client_side_ns, links.near_rtt_ns, "before the proxy")


def upstream(view: View, links: Links) -> Named | None:
    return _network(view, links.engine_side_ns, links.engine_rtt_ns, "behind the proxy")


def tap_overhead(view: View) -> Named | None:
    """The taps' own delay, of the first token (with the request's handling) and of the following ones."""
    chains = [[tap for tap in (chain.outer, chain.inner) if tap is not None] for chain in view.usable]
    first = [sum(known(first_token_overhead_ns(tap) for tap in taps)) for taps in chains if taps]
    each = [delay for taps in chains for tap in taps for delay in tap_delays_ns(tap)]
    outermost = [chain.seen()[0] for chain in view.usable]
    ttft, icl = median_ns(known(map(ttft_ns, outermost))), median_ns(_icls(view))
    on_ttft, on_icl = _matters(median_ns(first), ttft), _matters(median_ns(each), icl)
    if not on_ttft and not on_icl:
        return None
    facts = [
        Fact("taps' own part of TTFT, P50", ms(median_ns(first)), "ms", len(first), _limit_ms(ttft)),
        Fact("a tap's delay of an event, P50", ms(median_ns(each)), "ms", len(each), _limit_ms(icl)),
    ]
    effects, whole = (first, ttft) if on_ttft else (each, icl)
    metric = "ttft" if on_ttft else "icl"
    return Named(facts, metric, 0.9, "warning", effects_ns=effects, whole_ns=whole)


def first_token_overhead_ns(tap: Record) -> int | None:
    """Request handling while waiting for neither client nor connection, and the first token's way through the tap."""
    index, part = first_token(tap), tap.upstream
    sent_ns = None if index is None else tap.events.sent[index]
    if index is None or sent_ns is None or part.write_start is None or tap.downstream.stalled_ns:
        return None
    waiting_ns = min(tap.request.head or 0, part.write_start)
    if part.wanted is not None and part.acquired is not None:
        waiting_ns += part.acquired - part.wanted
    return part.write_start - waiting_ns + sent_ns - tap.events.arrived[index]


def _network(view: View, trips_ns: int | None, rtt_ns: int | None, where: str) -> Named | None:
    whole = known(ttft_ns(chain.seen()[0]) for chain in view.usable)
    middle = median_ns(whole)
    if trips_ns is None or middle is None or trips_ns < NETWORK_NS or trips_ns < NETWORK_SHARE * middle:
        return None
    facts = [
        Fact(
            f"network {where}, to and fro", ms(trips_ns), "ms", len(whole), ms(max(NETWORK_NS, NETWORK_SHARE * middle))
        ),
        Fact("least round trip (TCP_INFO)", ms(rtt_ns), "ms", len(whole)),
        Fact("TTFT, P50", ms(middle), "ms", len(whole)),
    ]
    because = "even the fastest event takes it: the delay is the same for all, and puts none together"
    rejected = [("proxy.response_buffering", because)] if view.crossed else []
    effects = [trips_ns] * len(whole)
    return Named(facts, "ttft", 0.8, "warning", effects_ns=effects, whole_ns=middle, rejected=rejected)


def _icls(view: View) -> list[int]:
    records: Sequence[Record] = view.inner or view.outer or view.client
    return [gap for record in usable_records(records) for gap in icl_ns(record)]


def _matters(part_ns: int | None, whole_ns: int | None) -> bool:
    return part_ns is not None and whole_ns is not None and part_ns >= max(OVERHEAD_NS, OVERHEAD_SHARE * whole_ns)


def _limit_ms(whole_ns: int | None) -> float | None:
    return None if whole_ns is None else ms(max(OVERHEAD_NS, OVERHEAD_SHARE * whole_ns))
