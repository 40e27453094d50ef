"""What is known of the engine's own stages, request by request: told of each, seen at the tap, or a mean of many.

Rules here:
* Of one request the response or its span tells queue, prefill and generation. The frontend is told by the span, or
  seen: an engine that answers its head before it queues (vLLM) shows, by when that comes, how long its frontend took.
* A head says nothing of what the API process does behind it: handing the request on, and writing what comes back. The
  page's TTFT does, from when the engine calls the request its own until it has the first token; the rest, HTTP and JSON
  in and out, is what the tap saw of whole answers beyond the engine's E2E of the same.
* A metrics page tells sums over all requests. They are laid on the requests that ended between the same two readings,
  by the time each took in the engine; a bound says how far that may be off, and one request alone is exact. What the
  sums do not cover stays uncovered: it is not spread.
* Nothing is taken as what the other parts leave.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from tapproxy.core.record import Record
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.figures import DECODE, FRONTEND, PARTS, PREFILL, QUEUE, Figure, Inside, after_head_ns, inside
from tapproxy.diagnose.laid import HEAD_ROOM, Laid
from tapproxy.diagnose.links import Links
from tapproxy.diagnose.view import View

# A head that is so little before the token came with it, whatever the engine told.
HEAD_APART_NS: Final = 200_000
# So sure, of the engine's time or absolutely, that a figure may stand for the requests of any band.
SURE_SHARE: Final = 0.1
SURE_NS: Final = 1_000_000


@dataclass(slots=True)
class Told:
    """Of each record, by its identity. ``estimates``: from sums over several requests."""

    figures: dict[int, dict[str, Figure]] = field(default_factory=dict)
    estimates: dict[int, dict[str, Figure]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def of(self, record: Record, *, estimated: bool) -> dict[str, Figure]:
        """The parts known of it. Without ``estimated``: only what is sure of this one request."""
        own = self.figures.get(id(record), {})
        guess = self.estimates.get(id(record), {})
        laid = {part: figure for part, figure in guess.items() if part != FRONTEND}
        # Half of a division would make the other half unexplained.
        kept = guess if estimated else laid if all(map(_sure, laid.values())) else {}
        found = {**kept, **own}
        if FRONTEND in own and FRONTEND in kept:
            # Each may leave out what the other holds: the head what comes behind it, the mean what came before it.
            found[FRONTEND] = max(own[FRONTEND], kept[FRONTEND], key=lambda figure: figure.ns)
        return {part: found[part] for part in (*PARTS, DECODE) if part in found}


def _sure(figure: Figure) -> bool:
    return figure.bound_ns is not None and figure.bound_ns <= max(SURE_NS, SURE_SHARE * figure.ns)


def told(view: View, links: Links, evidence: Evidence) -> Told:
    """What is known of the engine's stages, for the records next to the engine, or the innermost there are."""
    found = Told()
    at_engine = bool(view.inner) or view.direct
    records = view.inner or view.outer or view.client
    is_client = not view.inner and not view.outer
    spent = {id(r): each for r in records if (each := inside(r, links, is_client=is_client)) is not None}
    for record in records:
        found.figures[id(record)] = _own(record)
    laid = Laid(records, spent, evidence, found.notes, at_engine=at_engine)
    if at_engine:
        for record in records:
            own_parts = found.figures[id(record)]
            if {QUEUE, PREFILL} & own_parts.keys():
                room_ns: float | None = sum(own_parts[p].ns for p in (QUEUE, PREFILL) if p in own_parts)
            else:
                room_ns = 0 if laid.heads_came_first(record) else None
            seen = None if room_ns is None else _frontend_seen(record, spent.get(id(record)), room_ns)
            own = found.figures[id(record)].get(FRONTEND)
            # What is told may leave out HTTP and JSON, what is seen a tokenizer that runs after the head went out.
            if seen is not None and (own is None or seen.ns > own.ns):
                found.figures[id(record)][FRONTEND] = seen
    found.estimates = laid.out(found.figures)
    return found


def _own(record: Record) -> dict[str, Figure]:
    """What the response or its span told of this request."""
    engine = record.engine
    source = f"told by the engine ({engine.source or 'source unknown'})"
    parts = ((FRONTEND, engine.frontend_ns), (QUEUE, engine.queue_ns), (PREFILL, engine.prefill_ns))
    return {part: Figure(ns, source) for part, ns in parts if ns is not None}


def _frontend_seen(record: Record, spent: Inside | None, room_ns: float) -> Figure | None:
    """The time to the response's head, where the head did not wait: ``room_ns`` is what has to lie behind it."""
    head_ns, start_ns, after_ns = record.upstream.head, record.upstream.write_start, after_head_ns(record)
    if spent is None or head_ns is None or start_ns is None or after_ns is None:
        return None
    if after_ns < max(HEAD_APART_NS, HEAD_ROOM * room_ns):
        return None
    ns = max(0, head_ns - start_ns - spent.upload_ns - (spent.trip_ns or 0))
    return Figure(ns, "request out to response head in, less the round trip", spent.trip_ns)


def mean_tpot_ns(evidence: Evidence) -> tuple[float, str] | None:
    """The mean time of an output token by the engine's own figures, and their source; None where none tells."""
    found = []
    for page in evidence.engines.values():
        value, count = page.mean_of("tpot_s"), page.count_of("tpot_s")
        if value is not None and count:
            found.append((value, count))
    if not found:
        return None
    total = sum(count for _, count in found)
    mean = sum(value * count for value, count in found) / total
    return 1e9 * mean, f"engine /metrics, mean over the window, n={total:g}"
