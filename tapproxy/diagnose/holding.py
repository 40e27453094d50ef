"""Rules for the proxy hop: what kind of hold each stream shows, and who is to blame for the holds of a run.

Rules here:
* A hold is an event's time between the taps beyond the hop's floor. The floor (the fastest event of the run) stands
  for what the network takes at its best; it is part of the threshold, never taken out of a number.
* Late alone is not buffered: a long line delays every event alike and puts none together. Held events that came
  out together, though they went in apart, are what only a buffer does.
* A run is accused when a part of its streams is, not when one is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from tapproxy.core.record import Record
from tapproxy.diagnose import hop
from tapproxy.diagnose.budget import Links
from tapproxy.diagnose.facts import Fact, Named, median_ns, ms, percent, text_ms
from tapproxy.diagnose.view import Crossed, View, compressed_in_hop, first_token, icl_ns, token_events, ttft_ns

# A busy two-core machine delays single events by some ms; a buffer holds them for hundreds.
HELD_NS: Final = 10_000_000
# One late event of a stream of forty is 2.5 %, a machine's hiccup of 30 ms in a fast stream some 8 %.
HELD_SHARE: Final = 0.10
COALESCED_SHARE: Final = 0.10
# Of a hop that is one event late nearly every event waits for the next.
ONE_LATE_SHARE: Final = 0.5
# Streams that must show it: a fifth (a proxy may compress or hold for some clients only), and never fewer than three.
STREAMS_SHARE: Final = 0.2
STREAMS_LEAST: Final = 3
# A limited rate falls ever further behind: the last token waits about as long as the longest wait there was, and both
# halves of the stream come at one rate.
TAIL_SHARE: Final = 0.8
RATE_SPREAD: Final = 1.25
# TCP_INFO counts only what this side sent again; from here a line is called lossy (reference: 0.5 % of segments).
LOSS_SHARE: Final = 0.005
_SEGMENT_BYTES: Final = 1448

STREAMS, DELAYED = "streams", "delayed"
BUFFERED, COMPRESSED, RATE_LIMITED, SLOW_CLIENT = "buffered", "compressed", "rate_limited", "slow_client"

_NGINX_OFF = (
    "In nginx set `proxy_buffering off;` in the location that serves this path, or let what answers send "
    "`X-Accel-Buffering: no`; other proxies have a flush interval or a streaming mode."
)
_ADVICE: Final = {
    "nginx_read_buffer": "The proxy passes its read buffer on only when it is full. " + _NGINX_OFF,
    "tls_buffer": "The proxy fills its TLS write buffer before it sends. " + _NGINX_OFF + " A smaller ssl_buffer_size "
    "only shortens the hold.",
    "whole_answer": "The proxy passes the answer on when it is complete. " + _NGINX_OFF,
    "one_event_late": "The proxy waits for the next event before it passes one on (events larger than what is left of "
    "a buffer). " + _NGINX_OFF,
    "timer": "The proxy collects events and releases them by the clock: look for its batch or flush interval.",
    "irregular": _NGINX_OFF,
}


@dataclass(frozen=True, slots=True)
class Shapes:
    """The streams of a run by what their holds look like."""

    threshold_ns: int
    by_shape: dict[str, list[Crossed]]

    def guilty(self, shape: str) -> list[Crossed]:
        """The streams of that shape, if they are enough to accuse somebody."""
        found = self.by_shape.get(shape, [])
        total = sum(len(streams) for streams in self.by_shape.values())
        return found if len(found) >= max(STREAMS_LEAST, STREAMS_SHARE * total) else []


def sort_streams(view: View) -> Shapes:
    limit_ns = threshold_ns(view.floor_ns)
    by_shape: dict[str, list[Crossed]] = defaultdict(list)
    for crossed in view.crossed:
        by_shape[shape_of(crossed, limit_ns)].append(crossed)
    return Shapes(limit_ns, by_shape)


def threshold_ns(floor_ns: int | None) -> int:
    """Held longer than this is held: the floor and 10 ms, or twice the floor where that is more (a line's jitter grows
    with its length)."""
    least_ns = max(0, floor_ns or 0)
    return least_ns + max(HELD_NS, least_ns)


def shape_of(crossed: Crossed, limit_ns: int) -> str:
    """What one stream's holds look like."""
    holds = crossed.hop.hold_ns
    if sum(hold > limit_ns for hold in holds) < HELD_SHARE * len(holds):
        return STREAMS
    if crossed.near.downstream.stalled_ns >= max(holds) / 2:
        return SLOW_CLIENT
    if compressed_in_hop(crossed.near, crossed.far):
        return COMPRESSED
    if _rate_is_limited(crossed.hop, limit_ns):
        return RATE_LIMITED
    together, late = hop.coalesced_share(crossed.hop), hop.released_by_next_share(crossed.hop)
    if (together or 0) >= COALESCED_SHARE or (late or 0) >= ONE_LATE_SHARE:
        return BUFFERED
    return DELAYED


def response_buffering(view: View, shapes: Shapes, links: Links) -> Named | None:
    """Held, put together, and released in lumps."""
    guilty = shapes.guilty(BUFFERED)
    if not guilty:
        return None
    how = hop.mechanism([crossed.hop for crossed in guilty])
    first_holds = [crossed.hop.hold_ns[0] for crossed in guilty]
    holds = [hold for crossed in guilty for hold in crossed.hop.hold_ns]
    rise_ns = median_ns(first_holds) or 0
    on_ttft = rise_ns > shapes.threshold_ns
    icl_far, icl_near = _pooled(guilty, "far"), _pooled(guilty, "near")
    icl_falls = bool(icl_far) and (median_ns(icl_near) or 0) < (median_ns(icl_far) or 0) / 2
    rejected, open_rivals = _rivals(guilty, shapes, links, median_ns(holds) or 0, view.floor_ns)
    # Held and put together is half of a proof; the tell, a known buffer's size and a tap instead of the client on the
    # near side are the rest; each rival that the numbers leave standing costs a tenth.
    confidence = 0.5 + 0.2 * (on_ttft and icl_falls) + 0.15 * (how.name != "irregular")
    confidence += 0.1 * (guilty[0].near.tap == view_tap(view)) - 0.1 * len(open_rivals)
    facts = _hold_facts(view, shapes, guilty, holds)
    facts += [
        Fact("TTFT before the hop, P50", ms(median_ns(_known(ttft_ns(c.far) for c in guilty))), "ms", len(guilty)),
        Fact("first token held in the hop, P50", ms(rise_ns), "ms", len(guilty), ms(shapes.threshold_ns)),
        Fact("ICL before the hop, P50", ms(median_ns(icl_far)), "ms", len(icl_far)),
        Fact("ICL after the hop, P50", ms(median_ns(icl_near)), "ms", len(icl_near)),
        Fact("token events a read, before", _events_per_read([c.far for c in guilty]), "", len(guilty)),
        Fact("token events a read, after", _events_per_read([c.near for c in guilty]), "", len(guilty)),
        Fact(how.text, how.value, how.unit, how.n),
    ]
    effects = first_holds if on_ttft else [median_ns(crossed.hop.hold_ns) or 0 for crossed in guilty]
    whole = [ttft_ns(c.near) for c in guilty] if on_ttft else [_e2e_ns(c.near) for c in guilty]
    return Named(
        facts,
        metric="ttft" if on_ttft else "icl",
        confidence=max(0.1, min(0.95, confidence)),
        effects_ns=effects,
        whole_ns=median_ns(_known(whole)),
        rejected=rejected,
        advice=_ADVICE[how.name],
    )


def view_tap(view: View) -> str | None:
    """The outer tap's name, None where the near side is the client itself."""
    return view.outer[0].tap if view.outer else None
