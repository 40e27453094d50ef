"""What a tap before a proxy, alone, can tell of what lies behind it.

Rules here: it sees neither when the engine sent a token nor what the proxy did with it. The engine's own times stand
against what arrived: what they leave of TTFT, and tokens that came closer together than they were made, were spent on
the way, by whom is open. The proxy is named only where the tokens came in lumps of a buffer's size, which no engine
makes. Where neither shows, the way behind took nothing that anybody notices, and that may be called healthy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any, Final

from tapproxy.core.record import Record
from tapproxy.diagnose import hop
from tapproxy.diagnose.facts import Fact, Named, median_ns, ms, percent, text_ms
from tapproxy.diagnose.holding import ADVICE
from tapproxy.diagnose.hop import Burst, HopStream, Mechanism
from tapproxy.diagnose.measures import first_token, token_events
from tapproxy.diagnose.shapes import HELD_NS, STREAMS_LEAST, STREAMS_SHARE
from tapproxy.diagnose.view import View

# Below this, or below a tenth of the whole, nobody notices; the engine's frontend alone takes some ms.
REST_MS: Final = 10.0
REST_SHARE: Final = 0.1
# The time of generation and the tokens' span agree far better, at an even pace.
KEPT_SHARE: Final = 0.2
# Fewer tokens make no lumps; and a lump is more than two writes that a busy machine read at once.
LEAST_TOKENS: Final = 8
LUMP_EVENTS: Final = 3
LUMPS_LEAST: Final = 2
# Lumps of one buffer are of one size but for an event.
ONE_SIZE_SHARE: Final = 0.8
TOGETHER_SHARE: Final = 0.5
SIZES: Final = frozenset(("full_buffer", "tls_buffer"))


def unseen(view: View, budget: dict[str, Any]) -> list[str]:
    """Why nothing may be called healthy, where the engine's own words leave something of what arrived unexplained."""
    records = _records(view)
    if not records:
        return []
    found = []
    band = budget["ttft"]["p50"]
    total_ms, rest_ms = band["total_ms"], band["unexplained_ms"]
    if total_ms is not None and rest_ms >= max(REST_MS, REST_SHARE * total_ms):
        found.append(
            f"{rest_ms:.1f} of {total_ms:.1f} ms of TTFT at P50 were spent behind {records[0].tap} and not in what the "
            "engine told: the proxy, the lines and the engine's frontend are not told apart from here; a tap next to "
            "the engine would"
        )
    streams = [record for record in records if len(token_events(record)) >= LEAST_TOKENS]
    closer = [ns for record in streams if (ns := _kept_ns(record)) is not None]
    if _many(len(closer), len(streams)):
        found.append(
            f"in {len(closer)} of {len(streams)} answers the tokens came closer together than the engine made them: "
            f"the first was kept {text_ms(median_ns(closer))} (P50), by the engine's server or by the proxy; a tap "
            "next to the engine would tell"
        )
    elif _many(sum(map(_in_lumps, streams)), len(streams)):
        found.append(
            "tokens come several at a time, with pauses between: from before a proxy alone nothing tells whether the "
            "engine makes them so"
        )
    return found


def response_buffering(view: View) -> Named | None:
    """Tokens in lumps of the size of a proxy's buffer, seen from before it alone."""
    streams = [record for record in _records(view) if len(token_events(record)) >= LEAST_TOKENS]
    lumps = [(record, found) for record in streams if (found := _lumps(record))]
    if not _many(len(lumps), len(streams)):
        return None
    how = hop.known_size([burst for _, found in lumps for burst in found])
    if how is None or not _one_size(how, lumps):
        return None
    holds = [(record, _first_held_ns(record, found)) for record, found in lumps]
    waits = [b.at_ns - a.at_ns for _, found in lumps for a, b in pairwise(found)]
    facts = [
        Fact("answers whose tokens come in lumps", percent(len(lumps) / len(streams)), "%", len(streams), 20.0),
        Fact(how.text, how.value, how.unit, how.n),
        Fact("events a lump, P50", median_ns([b.events for _, found in lumps for b in found]), "events", how.n),
        Fact("between two lumps, P50", ms(median_ns(waits)), "ms", len(waits), ms(HELD_NS)),
        Fact("first token kept until the first lump was full, P50", ms(median_ns([ns for _, ns in holds])), "ms"),
    ]
    because = (
        "the lumps are of one size in bytes, that of a buffer; an engine's steps are of tokens, whatever their size"
    )
    return Named(
        facts,
        metric="ttft",
        confidence=0.65,
        effects_ns=[ns for _, ns in holds],
        whole_ns=median_ns([record.events.arrived[first_token(record) or 0] for record, _ in holds]),
        rejected=[("engine.bundling", because), ("engine.synthetic_stream", because)],
        advice=ADVICE[how.name],
    )


def _records(view: View) -> list[Record]:
    """Of the innermost vantage, where that does not stand next to the engine."""
    if view.inner or view.direct:
        return []
    return [chain.seen()[-1] for chain in view.usable]


def _many(count: int, total: int) -> bool:
    return count >= max(STREAMS_LEAST, STREAMS_SHARE * total)


def _kept_ns(record: Record) -> int | None:
    """How much closer together the tokens came than the engine, by its word, made them; None where not noticeably."""
    made_ns, tokens = record.engine.decode_ns, token_events(record)
    if made_ns is None:
        return None
    came_ns = record.events.arrived[tokens[-1]] - record.events.arrived[tokens[0]]
    kept_ns = made_ns - came_ns
    return kept_ns if kept_ns >= max(HELD_NS, KEPT_SHARE * made_ns) else None


def _releases(record: Record) -> list[Burst]:
    """The token events as they came, those of one moment together."""
    tokens, events = token_events(record), record.events
    # Made evenly, for all that is known here: only what came at once is put together.
    arrived = [events.arrived[index] for index in tokens]
    reads, ends = [events.read[index] for index in tokens], [events.end_offset[index] for index in tokens]
    return hop.bursts(HopStream(arrived, arrived[:1] * len(arrived), reads, ends))


def _in_lumps(record: Record) -> bool:
    """Half of the events came with others, and whoever followed came noticeably later."""
    found = _releases(record)
    together = sum(burst.events for burst in found if burst.events > 1)
    waits = [b.at_ns - a.at_ns for a, b in pairwise(found)]
    many = together >= TOGETHER_SHARE * sum(burst.events for burst in found)
    return many and (not waits or median(waits) >= HELD_NS)


def _lumps(record: Record) -> list[Burst]:
    """The releases but the last, which ends with the answer; none where they are no lumps."""
    found = _releases(record)[:-1]
    if len(found) < LUMPS_LEAST or median(burst.events for burst in found) < LUMP_EVENTS:
        return []
    waits = [b.at_ns - a.at_ns for a, b in pairwise(found)]
    return found if median(waits) >= HELD_NS else []


def _one_size(how: Mechanism, lumps: Sequence[tuple[Record, list[Burst]]]) -> bool:
    """The first lump shares its buffer with the answer's head."""
    sizes = [hop.known_size([burst]) for _, found in lumps for burst in found[1:]]
    same = [size for size in sizes if size is not None and size.name == how.name]
    return how.name in SIZES and len(same) >= ONE_SIZE_SHARE * len(sizes)


def _first_held_ns(record: Record, lumps: Sequence[Burst]) -> int:
    """By the pace at which the lumps were filled, the time from the first token's making to the first lump."""
    waits = sum(b.at_ns - a.at_ns for a, b in pairwise(lumps))
    filled = sum(burst.events for burst in lumps[1:])
    return round(waits / max(1, filled) * (lumps[0].events - 1))
