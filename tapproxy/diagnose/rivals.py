"""The other explanations of a hold, each with the number that rejects it or leaves it standing.

Rules here: a rival is rejected only by a number, and the number is in the sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tapproxy.diagnose.facts import median_ns, text_ms
from tapproxy.diagnose.links import Links
from tapproxy.diagnose.measures import events_per_read, known, spread_percent, tap_delays_ns
from tapproxy.diagnose.shapes import TAIL_SHARE
from tapproxy.diagnose.view import Crossed, View, compressed_in_hop

# TCP_INFO counts only what this side sent again; from here a line is called lossy (reference: 0.5 % of segments).
LOSS_SHARE: Final = 0.005
SEGMENT_BYTES: Final = 1448


def of_buffering(
    guilty: Sequence[Crossed], links: Links, hold_ns: int, floor_ns: int | None
) -> tuple[list[tuple[str, str]], list[str]]:
    """The other explanations of a hold: (rejected, with the numbers), (left standing)."""
    rejected: list[tuple[str, str]] = []
    standing: list[str] = []

    def judge(cause: str, is_rejected: bool, because: str) -> None:
        if is_rejected:
            rejected.append((cause, because))
        else:
            standing.append(cause)

    for cause, is_rejected, because in _line_judgements(guilty, links, hold_ns, floor_ns):
        judge(cause, is_rejected, because)
    coding = next((c for crossed in guilty if (c := compressed_in_hop(crossed.near, crossed.far))), None)
    judge("proxy.compression", coding is None, "Content-Encoding is the same on both sides of the hop")
    tails = median_ns([crossed.hop.hold_ns[-1] for crossed in guilty]) or 0
    peaks = median_ns([max(crossed.hop.hold_ns) for crossed in guilty]) or 0
    judge(
        "proxy.rate_limit",
        tails < TAIL_SHARE * peaks,
        f"the last token is held {text_ms(tails)} of at most {text_ms(peaks)}; at a limited rate it lags to the end",
    )
    stalls = median_ns([crossed.near.downstream.stalled_ns for crossed in guilty]) or 0
    judge(
        "client.slow_reader",
        stalls < hold_ns / 10,
        f"reading the hop was paused for the client {text_ms(stalls)}; holds end when bytes reach the socket of "
        f"{guilty[0].near.tap}, before any client of it",
    )
    spread = median_ns(known(spread_percent(crossed.far) for crossed in guilty)) or 0
    judge(
        "engine.synthetic_stream",
        spread >= 10,
        f"before the hop the tokens are spread over {spread} % of the answer's time",
    )
    per_read = events_per_read([crossed.far for crossed in guilty])
    judge("engine.bundling", per_read < 1.5, f"before the hop {per_read:.2f} token events come in a read")
    forwards = median_ns([ns for crossed in guilty for ns in tap_delays_ns(crossed.far)]) or 0
    judge(
        "tap.overhead",
        forwards < hold_ns / 10,
        f"a tap takes {text_ms(forwards)} (P50) from an event's arrival to its sending; the hold is {text_ms(hold_ns)}",
    )
    return rejected, standing


def of_lines(links: Links, hold_ns: int, view: View) -> list[tuple[str, str]]:
    judged = _line_judgements(view.crossed, links, hold_ns, view.floor_ns)
    return [(cause, because) for cause, is_rejected, because in judged if is_rejected]


def _line_judgements(
    streams: Sequence[Crossed], links: Links, hold_ns: int, floor_ns: int | None
) -> list[tuple[str, bool, str]]:
    """Could the lines do it? (cause, rejected, why)."""
    floor = max(0, floor_ns) if floor_ns is not None else None
    fast = floor is not None and floor < hold_ns / 2
    found = [
        (
            "network.downstream",
            fast,
            f"the fastest event crossed the hop in {text_ms(floor)}, round trip {text_ms(links.near_rtt_ns)}; a line "
            f"delays every event, and the hold is {text_ms(hold_ns)} at P50",
        ),
        (
            "network.upstream",
            fast,
            f"holds begin when the tap next to the engine sends; from there to the proxy the round trip is "
            f"{text_ms(links.far_rtt_ns)}",
        ),
    ]
    lost = [s.near.upstream.retransmits for s in streams if s.near.upstream.retransmits is not None]
    if lost:
        segments = sum(max(len(s.hop.near_ns), s.near.upstream.bytes // SEGMENT_BYTES) for s in streams)
        share = sum(lost) / max(1, segments)
        found.append(
            ("network.loss", share < LOSS_SHARE, f"{sum(lost)} retransmits beside some {segments} segments of answers")
        )
    return found
