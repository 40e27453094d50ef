"""Streams as a proxy of known behaviour would have delivered them: no socket, no clock, plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tapproxy.core.probing import ANSWER_FIELD, StreamEnd
from tapproxy.probe.observe import Observed, observe
from tapproxy.probe.plans import Cell
from tapproxy.probe.shape import Shape, shape
from tapproxy.wire.calibrated import event_parts
from tapproxy.wire.fetch import Fetched, Read

MS = 1_000_000
START_NS = 1_000_000 * MS

# What a proxy does with events: (bytes, sent ms) of each → when each arrived, in ms.
Proxy = Callable[[Sequence[tuple[int, float]]], list[float]]


def direct(events: Sequence[tuple[int, float]]) -> list[float]:
    return [sent + 0.2 for _, sent in events]


def quanta(size: int) -> Proxy:
    """Passes bytes on when so many have come together, and the rest at the end."""

    def proxy(events: Sequence[tuple[int, float]]) -> list[float]:
        out: list[float] = []
        waiting = 0
        passed = 0
        total = 0
        ends: list[int] = []
        for event_bytes, sent in events:
            total += event_bytes
            ends.append(total)
            waiting = total - passed
            if waiting >= size:
                passed += waiting // size * size
                while len(out) < len(ends) and ends[len(out)] <= passed:
                    out.append(sent + 0.3)
        return out + [events[-1][1] + 0.3] * (len(events) - len(out))

    return proxy


def timer(period_ms: float, *, one_shot: bool) -> Proxy:
    """Passes on what has come: at every tick, or so long after the first of it came."""

    def proxy(events: Sequence[tuple[int, float]]) -> list[float]:
        out: list[float] = []
        due = 0.0
        for _, sent in events:
            if one_shot:
                due = due if sent <= due and out else sent + period_ms
            else:
                due = (sent // period_ms + 1) * period_ms
            out.append(due)
        return [min(due, events[-1][1] + 0.3) for due in out]

    return proxy


def full(events: Sequence[tuple[int, float]]) -> list[float]:
    return [events[-1][1] + 0.5] * len(events)


def limited(bytes_per_s: float) -> Proxy:
    def proxy(events: Sequence[tuple[int, float]]) -> list[float]:
        free = 0.0
        out = []
        for event_bytes, sent in events:
            free = max(free, sent) + event_bytes / bytes_per_s * 1e3
            out.append(free)
        return out

    return proxy


def one_late(least_bytes: int = 0) -> Proxy:
    def proxy(events: Sequence[tuple[int, float]]) -> list[float]:
        times = [sent for _, sent in events]
        nexts = [*times[1:], times[-1]]
        return [
            (later if size >= least_bytes else sent) + 0.3 for (size, sent), later in zip(events, nexts, strict=True)
        ]

    return proxy


def nagle(rtt_ms: float, segment_bytes: int = 1448) -> Proxy:
    """Small events wait for the acknowledgement of what was sent before; whole segments do not."""

    def proxy(events: Sequence[tuple[int, float]]) -> list[float]:
        out: list[float] = []
        acked = 0.0
        for size, sent in events:
            leaves = sent if size >= segment_bytes or sent >= acked else acked
            out.append(leaves + rtt_ms / 2)
            # What leaves next is acknowledged a round trip after this; all that waits goes with it.
            if sent >= acked:
                acked = sent + rtt_ms
        return out

    return proxy


def delivered(cell: Cell, proxy: Proxy, *, events: int | None = None, **facts: Any) -> Observed:
    """The stream of this cell through that proxy, as a client on the tap's host would have seen it."""
    plan = cell.plan("m")
    before, after = event_parts(plan.id, cell.event_bytes)
    sizes = plan.sizes_bytes()[:events]
    sent_ms = [due / MS for due in plan.due_ns()][:events]
    arrived = proxy(list(zip(sizes, sent_ms, strict=True)))
    fetched = Fetched(START_NS, head_ns=START_NS, status=200, http_version="1.1", rtt_ns=50_000, min_rtt_ns=40_000)
    fetched.headers = [(b"Content-Type", b"text/event-stream"), (ANSWER_FIELD, plan.id.encode())]
    fetched.retransmits = 0
    for key, value in facts.items():
        setattr(fetched, key, value)
    last: int | None = None
    for sent, came in zip(sent_ms, arrived, strict=True):
        body = (before + b"%19d" % (START_NS + round(sent * MS)) + after).partition(b"\r\n")[2][:-2]
        at_ns = START_NS + round(came * MS)
        if at_ns == last:
            read = fetched.reads[-1]
            fetched.reads[-1] = Read(at_ns, at_ns, read.body + body)
        else:
            fetched.reads.append(Read(at_ns, at_ns, body))
        last = at_ns
    fetched.end_ns = last
    found = observe(cell.name, plan, fetched)
    found.tap = report(plan.id, [START_NS + round(sent * MS) for sent in sent_ms])
    return found


def report(plan_id: str, sent_ns: list[int], **more: Any) -> dict[str, Any]:
    """What a tap tells of a stream."""
    return {
        "id": plan_id,
        "http": "1.1",
        "connection": "0/a",
        "fields": [],
        "t0_ns": START_NS,
        "head_sent_ns": START_NS,
        "body_first_ns": START_NS,
        "body_end_ns": START_NS,
        "body_bytes": 100,
        "body_reads": [[START_NS, 100]],
        "sent_ns": sent_ns,
        "late_ns": [0] * len(sent_ns),
        "stalled_ns": 0,
        "ended": StreamEnd.COMPLETE,
        "end_ns": sent_ns[-1] if sent_ns else START_NS,
    } | more


def shapes(cells: Sequence[Cell], proxy: Proxy, **facts: Any) -> list[Shape]:
    out = [shape(delivered(cell, proxy, **facts)) for cell in cells]
    assert all(one is not None for one in out)
    return [one for one in out if one is not None]
