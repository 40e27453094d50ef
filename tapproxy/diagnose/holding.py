"""Rules for the proxy hop: who is to blame for the holds of a run.

Rules here: numbers of the accused streams only; the advice fits the mechanism that their bursts point to; each rival
that the numbers leave standing costs confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final

from tapproxy.core.metrics import ttft_ns
from tapproxy.core.record import Record
from tapproxy.diagnose import hop, rivals
from tapproxy.diagnose.clock import sure
from tapproxy.diagnose.facts import Fact, Named, median_ns, ms, percent, text_ms
from tapproxy.diagnose.links import Links
from tapproxy.diagnose.loss import lossy_hop
from tapproxy.diagnose.measures import e2e_ns, events_per_read, known, span_ns, token_events
from tapproxy.diagnose.pairing import incomparable
from tapproxy.diagnose.shapes import (
    BUFFERED,
    COALESCED_SHARE,
    COMPRESSED,
    HELD_SHARE,
    RATE_LIMITED,
    STREAMS_LEAST,
    STREAMS_SHARE,
    TOUCHED_SHARE,
    Shapes,
    touched_share,
)
from tapproxy.diagnose.view import Crossed, View, compressed_in_hop

# So many segments lost for each lump of events, and no buffer is needed to explain them.
LOST_A_LUMP: Final = 0.5
# As the finding slow-reader has it: a pause worth naming.
SLOW_STALL_NS: Final = 100_000_000
SLOW_UNSENT_BYTES: Final = 64 * 1024
SLOW_UNSENT_SHARE: Final = 0.1

_NGINX_OFF = (
    "In nginx set `proxy_buffering off;` in the location that serves this path, or let what answers send "
    "`X-Accel-Buffering: no`; other proxies have a flush interval or a streaming mode. Tokens then come as the engine "
    "sends them (0.3 ms through nginx); a client that stops reading holds its answer back in the engine instead of in "
    "the proxy, which at a token's pace the sockets' buffers take. Verify: the same load, and time to the first token "
    "before and after the hop agree."
)
# By the mechanism that the bursts point to (module hop).
ADVICE: Final = {
    "full_buffer": "The proxy passes a buffer on only when it is full. " + _NGINX_OFF,
    "tls_buffer": "The proxy fills its TLS write buffer before it sends. " + _NGINX_OFF + " A smaller ssl_buffer_size "
    "only shortens the hold.",
    "whole_answer": "The proxy passes the answer on when it is complete. " + _NGINX_OFF,
    "one_event_late": "The proxy waits for the next event before it passes one on (events larger than what is left of "
    "a buffer). " + _NGINX_OFF,
    "timer": "The proxy collects events and releases them by the clock: look for its batch or flush interval.",
    "irregular": _NGINX_OFF,
}


def response_buffering(view: View, shapes: Shapes, links: Links) -> Named | None:
    """Held, put together, and released in lumps."""
    guilty = shapes.guilty(BUFFERED)
    if not guilty:
        return None
    how = hop.mechanism([crossed.hop for crossed in guilty])
    lumps = sum(burst.events > 1 for crossed in guilty for burst in hop.bursts(crossed.hop))
    leg = lossy_hop(view)
    if leg is not None and leg.has_tail and leg.lost >= LOST_A_LUMP * lumps:
        # What TCP sends again holds what is behind it, and puts it together as a buffer would.
        return None
    first_holds = [crossed.hop.hold_ns[0] for crossed in guilty]
    holds = [hold for crossed in guilty for hold in crossed.hop.hold_ns]
    rise_ns = median_ns(first_holds) or 0
    on_ttft = rise_ns > shapes.threshold_ns
    icl_far, icl_near = _pooled(guilty, "far"), _pooled(guilty, "near")
    icl_falls = bool(icl_far) and (median_ns(icl_near) or 0) < (median_ns(icl_far) or 0) / 2
    rejected, open_rivals = rivals.of_buffering(guilty, links, median_ns(holds) or 0, view.floor_ns)
    # Held and put together is half of a proof; the tell, a known buffer's size and a tap instead of the client on the
    # near side are the rest; each rival that the numbers leave standing costs a tenth.
    confidence = 0.5 + 0.2 * (on_ttft and icl_falls) + 0.15 * (how.name != "irregular")
    confidence += 0.1 * (guilty[0].near.tap == (view.outer[0].tap if view.outer else None)) - 0.1 * len(open_rivals)
    facts = _hold_facts(view, shapes, guilty, holds)
    facts += [
        Fact("TTFT before the hop, P50", ms(median_ns(known(ttft_ns(c.far) for c in guilty))), "ms", len(guilty)),
        Fact("first token held in the hop, P50", ms(rise_ns), "ms", len(guilty), ms(shapes.threshold_ns)),
        Fact("ICL before the hop, P50", ms(median_ns(icl_far)), "ms", len(icl_far)),
        Fact("ICL after the hop, P50", ms(median_ns(icl_near)), "ms", len(icl_near)),
        Fact("token events a read, before", events_per_read([c.far for c in guilty]), "", len(guilty)),
        Fact("token events a read, after", events_per_read([c.near for c in guilty]), "", len(guilty)),
        Fact(how.text, how.value, how.unit, how.n),
    ]
    return Named(
        facts,
        metric="ttft" if on_ttft else "icl",
        confidence=max(0.1, min(0.95, confidence)),
        effects_ns=first_holds if on_ttft else [median_ns(crossed.hop.hold_ns) or 0 for crossed in guilty],
        whole_ns=median_ns(known(ttft_ns(crossed.near) for crossed in guilty)) if on_ttft else None,
        rejected=rejected,
        advice=ADVICE[how.name],
    )


def compression(view: View, shapes: Shapes, links: Links) -> Named | None:
    """Held by what compresses: the coding appears in the hop, and so does the hold."""
    seen = shapes.guilty(COMPRESSED)
    blind = _blind(view, shapes.threshold_ns)
    if not seen and len(blind) < max(STREAMS_LEAST, STREAMS_SHARE * len(view.usable)):
        return None
    pairs = [(crossed.near, crossed.far) for crossed in seen] + [(near, far) for near, far, _ in blind]
    first_holds = [crossed.hop.hold_ns[0] for crossed in seen] + [hold_ns for _, _, hold_ns in blind]
    coding = compressed_in_hop(*pairs[0]) or "unknown"
    facts = [
        Fact(f"streams compressed ({coding}) in the hop", percent(1.0), "%", len(pairs)),
        Fact("first byte or token held, P50", ms(median_ns(first_holds)), "ms", len(pairs), ms(shapes.threshold_ns)),
        *_floor(view),
        Fact("answer's span before the hop, P50", ms(median_ns([span_ns(far) for _, far in pairs])), "ms", len(pairs)),
        Fact("answer's span after the hop, P50", ms(median_ns([span_ns(near) for near, _ in pairs])), "ms", len(pairs)),
    ]
    because = (
        f"the held streams are those that became {coding} in the hop; a compressor that is not flushed holds them "
        "whatever the buffer's size"
    )
    return Named(
        facts,
        metric="ttft",
        confidence=0.85,
        effects_ns=first_holds,
        whole_ns=median_ns([near.upstream.first_byte or 0 for near, _ in pairs]) or None,
        rejected=[
            ("proxy.response_buffering", because),
            *rivals.of_lines(links, median_ns(first_holds) or 0, view),
        ],
    )


def rate_limit(view: View, shapes: Shapes) -> Named | None:
    """Ever further behind at one rate."""
    guilty = shapes.guilty(RATE_LIMITED)
    if not guilty:
        return None
    tails = [crossed.hop.hold_ns[-1] for crossed in guilty]
    rates = [rate for crossed in guilty if (rate := _bytes_per_s(crossed.hop)) is not None]
    facts = [
        Fact("last token held, P50", ms(median_ns(tails)), "ms", len(tails), ms(shapes.threshold_ns)),
        Fact("bytes a second after the hop, P50", median_ns(rates), "B/s", len(rates)),
        Fact("answer's span before the hop, P50", ms(median_ns([span_ns(c.far) for c in guilty])), "ms", len(guilty)),
        Fact("answer's span after the hop, P50", ms(median_ns([span_ns(c.near) for c in guilty])), "ms", len(guilty)),
    ]
    because = "the answer still lags when it has ended before the hop; a buffer lets everything go at the end"
    return Named(
        facts,
        metric="e2e",
        confidence=0.7,
        effects_ns=tails,
        whole_ns=median_ns([e2e_ns(crossed.near) for crossed in guilty]),
        rejected=[("proxy.response_buffering", because)],
    )


def slow_reader(view: View) -> Named | None:
    """The client's buffer was full at the outermost tap: reading upstream paused for it, or much waited there."""
    chains = [(chain.client, tap) for chain in view.usable if (tap := chain.outer or chain.inner) is not None]
    slow = [(client, tap) for client, tap in chains if _waited_for_client(tap)]
    if len(slow) < max(STREAMS_LEAST, STREAMS_SHARE * len(chains)):
        return None
    delays = [max(tap.downstream.stalled_ns, _last_late_ns(client, tap) or 0) for client, tap in slow]
    stalls = [tap.downstream.stalled_ns for _, tap in slow]
    unsent = [tap.downstream.unsent_max_bytes for _, tap in slow]
    trips = known(tap.downstream.min_rtt_ns for _, tap in slow)
    facts = [
        Fact(
            "reading upstream paused for the client, P50", ms(median_ns(stalls)), "ms", len(stalls), ms(SLOW_STALL_NS)
        ),
        Fact("most bytes that waited for the client, P50", median_ns(unsent), "B", len(unsent), SLOW_UNSENT_BYTES),
        Fact("streams so", percent(len(slow) / len(chains)), "%", len(chains), percent(STREAMS_SHARE)),
        Fact("answer later at the client than sent to it, P50", ms(median_ns(delays)), "ms", len(delays)),
        Fact("least round trip to the client", ms(min(trips, default=None)), "ms", len(trips)),
    ]
    because = "the tap waited for its client's full buffer; what stands before the tap was ready to send"
    rejected = [("proxy.response_buffering", because)]
    if trips and min(trips) < (median_ns(delays) or 0) / 10:
        line = f"a round trip takes {text_ms(min(trips))}, which holds no answer for {text_ms(median_ns(delays))}"
        rejected.append(("network.downstream", line))
    return Named(
        facts,
        metric="e2e",
        confidence=0.8,
        severity="warning",
        # What waited in the kernel's buffers alone shows only where the client says when it had it.
        effects_ns=[delay for delay in delays if delay],
        whole_ns=median_ns([e2e_ns(client or tap) for client, tap in slow]),
        rejected=rejected,
    )


def _waited_for_client(tap: Record) -> bool:
    part = tap.downstream
    # A large event is there as a whole for a moment: what waits is more than a tenth of the answer.
    much = part.unsent_max_bytes >= max(SLOW_UNSENT_BYTES, SLOW_UNSENT_SHARE * tap.upstream.bytes)
    return part.stalled_ns >= SLOW_STALL_NS or much


def _last_late_ns(client: Record | None, tap: Record) -> int | None:
    """The client's last token − the tap's sending of it."""
    if client is None or incomparable(client, tap) is not None:
        return None
    nears, fars = token_events(client), token_events(tap)
    sent_ns = tap.events.sent[fars[-1]] if fars else None
    if not nears or len(nears) != len(fars) or sent_ns is None:
        return None
    return max(0, client.t0_mono_ns + client.events.arrived[nears[-1]] - tap.t0_mono_ns - sent_ns)


def _hold_facts(view: View, shapes: Shapes, guilty: Sequence[Crossed], holds: Sequence[int]) -> list[Fact]:
    limit_ns = shapes.threshold_ns
    together = [flag for crossed in guilty for flag in hop.together(crossed.hop)]
    held = sum(hold > limit_ns for hold in holds) / len(holds)
    return [
        Fact("hold of an event, P50", ms(median_ns(holds)), "ms", len(holds), ms(limit_ns)),
        Fact("hold of an event, largest", ms(max(holds)), "ms", len(holds)),
        *_floor(view, sum(len(c.hop.near_ns) for c in view.crossed)),
        Fact("events held", percent(held), "%", len(holds), percent(HELD_SHARE)),
        Fact(
            "events put together by the hop",
            percent(sum(together) / len(together)) if together else None,
            "%",
            len(together),
            percent(COALESCED_SHARE),
        ),
        Fact(
            "held or put together, median of the streams",
            percent(median([touched_share(crossed.hop, limit_ns) for crossed in guilty])),
            "%",
            len(guilty),
            percent(TOUCHED_SHARE),
        ),
        Fact("streams held", percent(len(guilty) / len(view.crossed)), "%", len(view.crossed), percent(STREAMS_SHARE)),
    ]


def _floor(view: View, count: int | None = None) -> list[Fact]:
    """The hop's floor; with it, across hosts, how far every hold may be off."""
    facts = [Fact("floor of the hop, smallest hold", ms(sure(view.floor_ns, view.hold_bound_ns)), "ms", count)]
    if view.clock is not None and view.hold_bound_ns:
        text = "how far all holds may be off, since two hosts' clocks are compared"
        facts.append(Fact(text, ms(view.hold_bound_ns), "ms", view.clock.pairs))
    return facts


def blind_chains(view: View) -> list[tuple[Record, Record, int]]:
    """Streams whose body was encoded in the hop, so that the near side saw no events: (near, far, first byte held)."""
    found = []
    for chain in view.usable:
        near, far = chain.near(), chain.inner
        if near is None or far is None or near.events.kind or compressed_in_hop(near, far) is None:
            continue
        if near.upstream.first_byte is None or far.downstream.first_byte is None or incomparable(near, far):
            continue
        held_ns = near.t0_mono_ns + near.upstream.first_byte - far.t0_mono_ns - far.downstream.first_byte
        found.append((near, far, held_ns))
    return found


def _blind(view: View, limit_ns: int) -> list[tuple[Record, Record, int]]:
    """Those of them whose body came out late and all at once."""
    return [
        (near, far, held_ns)
        for near, far, held_ns in blind_chains(view)
        if held_ns > limit_ns and span_ns(near) <= span_ns(far) / 2
    ]


def _bytes_per_s(stream: hop.HopStream) -> int | None:
    span_ns = stream.near_ns[-1] - stream.near_ns[0]
    return (stream.near_end_bytes[-1] - stream.near_end_bytes[0]) * 1_000_000_000 // span_ns if span_ns > 0 else None


def _pooled(streams: Sequence[Crossed], side: str) -> list[int]:
    return [gap for s in streams for gap in (s.hop.far_icl_ns if side == "far" else s.hop.near_icl_ns)]
