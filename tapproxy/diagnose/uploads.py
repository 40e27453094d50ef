"""Requests that the proxy collects whole before it passes them on.

Rules here: an engine needs the whole prompt anyway, so that collecting costs no more than sending it on a second time:
that, and not the upload, is the effect. A request that came through while it was still being written was not collected,
however long the rest of it took.
"""

from __future__ import annotations

from typing import Final

from tapproxy.core.metrics import ttft_ns
from tapproxy.core.record import Record
from tapproxy.diagnose.facts import Fact, Named, Severity, median_ns, ms, percent, text_ms
from tapproxy.diagnose.links import Links
from tapproxy.diagnose.measures import known
from tapproxy.diagnose.pairing import incomparable
from tapproxy.diagnose.shapes import HELD_NS, STREAMS_LEAST, STREAMS_SHARE
from tapproxy.diagnose.view import View

# What is written faster, of the usual small prompt, looks the same collected or not.
UPLOAD_NS: Final = 10_000_000
LARGE_BYTES: Final = 64 * 1024
# The farther tap's first byte stamped before the nearer side's last one by more than this was no collected request.
ORDER_NS: Final = 500_000
# Measured with nginx: 3 to 6 ms for 2 MB on loopback. From here it is worth knowing …
INFO_NS: Final = 2_000_000
# … and from here, and a twentieth of TTFT, worth a change.
WARNING_NS: Final = 10_000_000
WARNING_SHARE: Final = 0.05


def request_buffering(view: View, links: Links) -> Named | None:
    """The request stood behind the proxy only after its last byte had gone in, and came through late."""
    large = [pair for pair in _crossings(view) if _is_large(pair[0])]
    collected = [(near, far) for near, far in large if _after_end_ns(near, far, 0) >= -ORDER_NS]
    if len(collected) < max(STREAMS_LEAST, STREAMS_SHARE * len(large)):
        return None
    # What the hop takes at its least for a first byte is not what collecting costs; a hold is never taken for that.
    floor_ns = min(max(0, _after_end_ns(near, far, 0)) for near, far in collected)
    floor_ns = floor_ns if floor_ns <= HELD_NS else 0
    costs = [_after_end_ns(near, far, far.request.body_end or 0) - floor_ns for near, far in collected]
    cost, whole = median_ns(costs) or 0, median_ns(known(ttft_ns(near) for near, _ in collected))
    if cost < INFO_NS:
        return None
    warned = cost >= max(WARNING_NS, WARNING_SHARE * (whole or 0))
    severity: Severity = "warning" if warned else "info"
    limit_ns = max(WARNING_NS, WARNING_SHARE * (whole or 0)) if warned else INFO_NS
    uploads = [_upload_ns(near) for near, _ in collected]
    trips = (links.near_request_ns or 0) + (links.far_request_ns or 0)
    facts = [
        Fact("last byte into the proxy to last byte out of it, P50", ms(cost), "ms", len(costs), ms(limit_ns)),
        Fact("of that taken out: the least for a first byte", ms(floor_ns), "ms", len(costs), ms(HELD_NS)),
        Fact("request written to the proxy for, P50", ms(median_ns(uploads)), "ms", len(uploads), ms(UPLOAD_NS)),
        Fact("size of the request, P50", median_ns([near.request.bytes for near, _ in collected]), "B", len(collected)),
        Fact("large or slow requests that were collected", percent(len(collected) / len(large)), "%", len(large)),
        Fact("network of the hop, one way", ms(trips), "ms", len(costs)),
    ]
    because = f"the way itself takes {text_ms(trips)}; requests are {text_ms(cost)} late after their last byte"
    return Named(
        facts,
        metric="ttft",
        confidence=0.7,
        severity=severity,
        effects_ns=costs,
        whole_ns=whole,
        rejected=[("network.upstream", because)] if trips < cost / 2 else [],
    )


def _crossings(view: View) -> list[tuple[Record, Record]]:
    return [
        (near, chain.inner)
        for chain in view.usable
        if (near := chain.outer or chain.client) is not None
        and chain.inner is not None
        and near.upstream.write_end is not None
        and incomparable(near, chain.inner) is None
    ]


def _is_large(near: Record) -> bool:
    return _upload_ns(near) >= UPLOAD_NS or near.request.bytes >= LARGE_BYTES


def _upload_ns(near: Record) -> int:
    return (near.upstream.write_end or 0) - (near.upstream.write_start or 0)


def _after_end_ns(near: Record, far: Record, far_at_ns: int) -> int:
    """From the nearer side's last byte written to a time at the farther one."""
    return far.t0_mono_ns + far_at_ns - near.t0_mono_ns - (near.upstream.write_end or 0)
