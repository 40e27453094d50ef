"""Rules for what carries the bytes: the network on both sides of the proxy, and the taps themselves.

Rules here: a network is blamed for round trips that the kernel measured, and for no more than the fastest crossing of
the run; a tap for its own handling, never for waiting on client, connection or a full client buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tapproxy.core.metrics import icl_ns, tap_overhead_ns, ttft_ns
from tapproxy.core.record import Record
from tapproxy.diagnose.facts import Fact, Named, median_ns, ms
from tapproxy.diagnose.links import Links
from tapproxy.diagnose.measures import known, tap_delays_ns
from tapproxy.diagnose.view import View, usable_records

# A fifth of TTFT, and more than a person notices: below that distance is not what makes a path slow.
NETWORK_SHARE: Final = 0.2
NETWORK_NS: Final = 10_000_000
# latency_tree, tap.overhead: 5 % of TTFT or ICL; but a machine of two busy cores takes a ms to wake a tap for a request
# (one event in two is taken in under 0.1), and below that nobody gains by removing it.
OVERHEAD_SHARE: Final = 0.05
OVERHEAD_TTFT_NS: Final = 2_000_000
OVERHEAD_EVENT_NS: Final = 1_000_000


def downstream(view: View, links: Links, lossy: Named | None) -> Named | None:
    """``lossy``: what network.loss says. A line that loses segments is judged there, and its length not blamed."""
    if lossy is not None and lossy.stage == "network.downstream":
        return None
    return _network(view, links.client_side_ns, links.near_rtt_ns, "before the proxy")


def upstream(view: View, links: Links, lossy: Named | None) -> Named | None:
    """``lossy``: as above."""
    if lossy is not None and lossy.stage == "network.upstream":
        return None
    return _network(view, links.engine_side_ns, links.engine_rtt_ns, "behind the proxy")


def tap_overhead(view: View) -> Named | None:
    """The taps' own delay, each for itself: of the first token (with the request's handling), and of every token."""
    outermost = [chain.seen()[0] for chain in view.usable]
    ttft, icl = median_ns(known(map(ttft_ns, outermost))), median_ns(_icls(view))
    facts: list[Fact] = []
    on_ttft = on_icl = False
    for taps in ([chain.outer for chain in view.usable], [chain.inner for chain in view.usable]):
        there = [tap for tap in taps if tap is not None]
        first = known(map(_overhead_ns, there))
        each = [delay for tap in there for delay in tap_delays_ns(tap)]
        if not there:
            continue
        on_ttft |= _matters(median_ns(first), ttft, OVERHEAD_TTFT_NS)
        on_icl |= _matters(median_ns(each), icl, OVERHEAD_EVENT_NS)
        name = there[0].tap
        facts += [
            Fact(
                f"{name}'s own part of TTFT, P50",
                ms(median_ns(first)),
                "ms",
                len(first),
                _limit(ttft, OVERHEAD_TTFT_NS),
            ),
            Fact(
                f"{name}'s delay of an event, P50", ms(median_ns(each)), "ms", len(each), _limit(icl, OVERHEAD_EVENT_NS)
            ),
        ]
    if not on_ttft and not on_icl:
        return None
    chains = [[tap for tap in (chain.outer, chain.inner) if tap is not None] for chain in view.usable]
    if on_ttft:
        first = [sum(known(map(_overhead_ns, taps))) for taps in chains]
        return Named(facts, "ttft", 0.9, "warning", effects_ns=first, whole_ns=ttft)
    delays = [sum(known(median_ns(tap_delays_ns(tap)) for tap in taps)) for taps in chains]
    return Named(facts, "icl", 0.9, "warning", effects_ns=delays, whole_ns=icl)


def _overhead_ns(tap: Record) -> int | None:
    """None where the client's full buffer, not the tap, held the first token."""
    return None if tap.downstream.stalled_ns else tap_overhead_ns(tap)


def _network(view: View, trips_ns: int | None, rtt_ns: int | None, where: str) -> Named | None:
    whole = known(ttft_ns(chain.seen()[0]) for chain in view.usable)
    middle = median_ns(whole)
    if trips_ns is None or middle is None:
        return None
    # What a proxy adds beside it makes a line no shorter: it is held against TTFT without that.
    least = min(middle, (median_ns(known(ttft_ns(chain.seen()[-1]) for chain in view.usable)) or middle) + trips_ns)
    if trips_ns < max(NETWORK_NS, NETWORK_SHARE * least):
        return None
    facts = [
        Fact(
            f"network {where}, to and fro", ms(trips_ns), "ms", len(whole), ms(max(NETWORK_NS, NETWORK_SHARE * least))
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


def _matters(part_ns: int | None, whole_ns: int | None, least_ns: int) -> bool:
    return part_ns is not None and whole_ns is not None and part_ns >= max(least_ns, OVERHEAD_SHARE * whole_ns)


def _limit(whole_ns: int | None, least_ns: int) -> float | None:
    return None if whole_ns is None else ms(max(least_ns, OVERHEAD_SHARE * whole_ns))
