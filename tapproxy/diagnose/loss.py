"""Segments lost on the way: the kernel's own count of what it sent again, and the tail that this makes.

Rules here: both are needed. A few segments sent again without a tail cost nobody anything, and a tail without them is
somebody else's. Each line is judged by its sender's count, by its receiver's (segments that came out of their order),
or, where neither saw it, by the host's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Final

from tapproxy.core.metrics import icl_ns
from tapproxy.core.record import Record
from tapproxy.diagnose import hop
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.facts import Fact, Named, median_ns, ms, percent, text_ms
from tapproxy.diagnose.measures import e2e_ns, known
from tapproxy.diagnose.pairing import Pair, hold_ns
from tapproxy.diagnose.rivals import LOSS_SHARE, SEGMENT_BYTES
from tapproxy.diagnose.view import View

# A single lost segment is no rate.
LOST_LEAST: Final = 3
# latency_tree: the 99th percentile above five times the median …
TAIL: Final = 5.0
# … and late as a held event is (shapes.HELD_NS): a segment sent again comes a round trip late, or 200 ms.
TAIL_NS: Final = 10_000_000
SENDER: Final = "the sender's count"


@dataclass(frozen=True, slots=True)
class Leg:
    """One TCP line or two in a row. ``delays_ns``: per stream, each event's time across above the fastest one's
    (from the engine: the gap before it).

    ``lost`` of ``segments``: the higher rate of the sender's and the receiver's count. ``answer_ns``: how long an
    answer takes, median.
    """

    where: str
    stage: str
    lost: int
    segments: int
    by: str
    delays_ns: list[list[int]] = field(default_factory=list)
    answer_ns: int | None = None

    @property
    def share(self) -> float:
        return self.lost / self.segments if self.segments else 0.0

    @property
    def pooled_ns(self) -> list[int]:
        return sorted(delay for stream in self.delays_ns for delay in stream)

    @property
    def has_tail(self) -> bool:
        pooled = self.pooled_ns
        if not pooled:
            return False
        p99 = pooled[min(len(pooled) - 1, 99 * len(pooled) // 100)]
        return p99 > TAIL * max(0, median(pooled)) and p99 - median(pooled) >= TAIL_NS

    @property
    def is_lossy(self) -> bool:
        return self.lost >= LOST_LEAST and self.share >= LOSS_SHARE


def network_loss(view: View, evidence: Evidence) -> Named | None:
    """Segments sent again, and the events behind them late."""
    host = _host(evidence)
    found = [leg for leg in legs(view, quiet_too=host is not None) if leg.has_tail]
    lossy = [leg for leg in found if leg.is_lossy]
    if lossy:
        return _named(max(lossy, key=lambda leg: leg.pooled_ns[-1]), 0.85)
    # The host counts for all of its lines: it can only mean one whose own two ends are not both counted.
    hidden = [leg for leg in found if leg.by == "" or leg.stage == "proxy"]
    if host is None or not hidden:
        return None
    lost, segments = host
    leg = max(hidden, key=lambda each: each.pooled_ns[-1])
    return _named(replace(leg, lost=lost, segments=segments, by="all of this host's"), 0.5)


def lossy_hop(view: View) -> Leg | None:
    """The line of the proxy hop, where segments were lost on it."""
    return next((leg for leg in legs(view) if leg.stage == "proxy"), None)


def _named(leg: Leg, confidence: float) -> Named:
    pooled = leg.pooled_ns
    middle = round(median(pooled))
    late = [max(stream) - round(median(stream)) for stream in leg.delays_ns if max(stream) > TAIL * max(1, middle)]
    p99 = pooled[min(len(pooled) - 1, 99 * len(pooled) // 100)]
    facts = [
        Fact(f"segments lost, {leg.where} ({leg.by})", percent(leg.share), "%", leg.segments, percent(LOSS_SHARE)),
        Fact("segments sent again, or come out of their order", leg.lost, "segments", leg.segments, LOST_LEAST),
        Fact(
            "time of an event above the fastest, P99",
            ms(p99),
            "ms",
            len(pooled),
            ms(max(TAIL_NS + middle, TAIL * middle)),
        ),
        Fact("time of an event above the fastest, P50", ms(middle), "ms", len(pooled)),
        Fact("streams with such a pause", percent(len(late) / len(leg.delays_ns)), "%", len(leg.delays_ns)),
    ]
    because = f"the median event takes {text_ms(middle)} more than the fastest: single segments are late, not all"
    # The tap behind the proxy sent, or the one before it received.
    across = "network.upstream" if leg.by == SENDER else "network.downstream"
    stage = across if leg.stage == "proxy" else leg.stage
    return Named(
        facts,
        metric="e2e",
        confidence=confidence,
        severity="warning",
        effects_ns=late or [p99 - middle],
        whole_ns=leg.answer_ns,
        rejected=[
            (stage, because),
            ("proxy.response_buffering", "what is late was sent again by TCP, and what came after it waited in order"),
        ],
        stage=stage,
    )


def legs(view: View, *, quiet_too: bool = False) -> list[Leg]:
    """The lines of the path that lost segments, outermost first; ``quiet_too``: those that did not as well.

    Nothing is computed of the events of a line that lost nothing, which is nearly every one.
    """
    found: list[Leg | None] = []
    first = [(chain.client, tap) for chain in view.usable if chain.client and (tap := chain.outer)]
    direct = [(chain.client, chain.inner) for chain in view.usable if chain.client and not chain.outer and chain.inner]
    crossed = [(chain.outer, chain.inner) for chain in view.usable if chain.outer and chain.inner]
    for where, stage, pairs in (
        ("between the client and the tap", "network.downstream", first or direct),
        ("between the two taps, through the proxy", "proxy", crossed),
    ):
        found.append(_between(where, stage, pairs, quiet_too) if pairs else None)
    engine_side = view.engine_side
    leg = Leg("between the tap and the engine", "network.upstream", *_received(engine_side))
    if engine_side and (quiet_too or leg.is_lossy):
        gaps = [gaps for record in engine_side if (gaps := icl_ns(record))]
        found.append(replace(leg, delays_ns=gaps, answer_ns=median_ns([e2e_ns(record) for record in engine_side])))
    return [leg for leg in found if leg is not None]


def _between(where: str, stage: str, pairs: Sequence[tuple[Record, Record]], quiet_too: bool) -> Leg | None:
    sent, received = _sent([far for _, far in pairs]), _received([near for near, _ in pairs])
    counted = max(sent, received, key=lambda each: each[0] / each[1] if each[1] else 0.0)
    leg = Leg(where, stage, *counted)
    if not quiet_too and not leg.is_lossy:
        return None
    holds = (hold_ns(Pair(near, far, "chain")) for near, far in pairs)
    streams = [hop.stream(near, far, hold) for (near, far), hold in zip(pairs, holds, strict=True)]
    delays = [stream.hold_ns for stream in streams if stream is not None]
    floor = min((delay for stream in delays for delay in stream), default=0)
    above = [[delay - floor for delay in stream] for stream in delays]
    return replace(leg, delays_ns=above, answer_ns=median_ns([e2e_ns(near) for near, _ in pairs]))


def _sent(records: Sequence[Record]) -> tuple[int, int, str]:
    counted = [record for record in records if record.downstream.retransmits is not None]
    lost = sum(known(record.downstream.retransmits for record in counted))
    return lost, sum(_segments(record.downstream.segments, record) for record in counted), SENDER


def _received(records: Sequence[Record]) -> tuple[int, int, str]:
    counted = [record for record in records if record.upstream.disordered is not None]
    lost = sum(known(record.upstream.disordered for record in counted))
    text = "the receiver's count" if counted else ""
    return lost, sum(_segments(record.upstream.segments, record) for record in counted), text


def _segments(counted: int | None, record: Record) -> int:
    """As the kernel counted, else at the least what the bytes and the events were."""
    if counted is not None:
        return counted
    return max(len(record.events.kind), record.upstream.bytes // SEGMENT_BYTES, 1)


def _host(evidence: Evidence) -> tuple[int, int] | None:
    """(sent again, sent) of the host that lost most, where that is a rate."""
    found = []
    for series in evidence.hosts.values():
        lost, segments = series.rise("tcp_retransmits"), series.rise("tcp_out_segments")
        if lost is not None and segments and lost >= LOST_LEAST and lost / segments >= LOSS_SHARE:
            found.append((round(lost), round(segments)))
    return max(found, key=lambda each: each[0] / each[1], default=None)
