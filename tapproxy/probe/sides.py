"""What a proxy does beside the stream: fields it rewrites, bodies it buffers, clients it forgets, silence it cuts.

Rules here: each is a comparison of what the client did with what the tap saw of it. Durations are taken on one side or
are round trips, so that nothing hangs on a common clock; where one side's word is missing the answer is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tapproxy.core.probing import ANSWER_FIELD, ANSWER_FIELDS, HIDDEN, KEY_FIELD, StreamEnd, shown
from tapproxy.probe.asking import Clocks
from tapproxy.probe.observe import Observed

_MS: Final = 1_000_000
_SHOWN_CHARACTERS: Final = 200
# Of an upload's duration, what the tap's part may be before the proxy counts as having kept it.
_KEPT: Final = 0.25
# Head and first event so much closer together than they were sent: the head waited.
HEADER_LATE_MS: Final = 50.0
# An abort that takes longer is tokens computed for nobody.
ABORT_LATE_MS: Final = 500.0

Fields = list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Rewriting:
    """How one direction's fields were rewritten; names in lower case, as fields have no case."""

    http_sent: str
    http_received: str
    added: dict[str, str]
    removed: tuple[str, ...]
    changed: dict[str, tuple[str, str]]

    def to_dict(self) -> dict[str, Any]:
        """For the result."""
        return {
            "http": {"sent": self.http_sent, "received": self.http_received},
            "added": self.added,
            "removed": list(self.removed),
            "changed": {name: {"sent": one, "received": other} for name, (one, other) in self.changed.items()},
        }


def request_rewriting(
    observed: Observed, sent: Sequence[tuple[bytes, bytes]], host: str, size: int, secret: Sequence[tuple[bytes, bytes]]
) -> Rewriting | None:
    """What became of the request's fields on its way to the tap. The values of ``secret`` fields are not shown."""
    if observed.tap is None:
        return None
    given = [("host", host), *((name.decode().lower(), value.decode("latin-1")) for name, value in sent)]
    given.append(("content-length", str(size)))
    hidden = {name.decode().lower() for name, _ in secret}
    received = [(name.lower(), HIDDEN if name.lower() in hidden else value) for name, value in observed.tap["fields"]]
    http = observed.fetched.http_version or "?"
    return _compared(given, received, "2" if http == "2" else "1.1", observed.tap["http"])


def answer_rewriting(observed: Observed) -> Rewriting | None:
    """What became of the answer's fields on their way to the client."""
    fetched = observed.fetched
    if observed.tap is None or fetched.status is None:
        return None
    given = [
        *((name.decode(), value.decode()) for name, value in ANSWER_FIELDS),
        (ANSWER_FIELD.decode(), observed.plan.id),
        *([("transfer-encoding", "chunked")] if observed.plan.chunked(observed.tap["http"]) else []),
    ]
    received = [(name.decode("latin-1").lower(), shown(name, value)) for name, value in fetched.headers]
    return _compared(given, received, "1.1", fetched.http_version or "?")


def _compared(given: Fields, received: Fields, http_sent: str, http_received: str) -> Rewriting:
    before, after = dict(given), dict(received)
    hidden = {name for name, value in after.items() if value == HIDDEN} | {KEY_FIELD.decode()}
    return Rewriting(
        http_sent,
        http_received,
        {name: value[:_SHOWN_CHARACTERS] for name, value in after.items() if name not in before},
        tuple(name for name in before if name not in after),
        {
            name: (before[name][:_SHOWN_CHARACTERS], value[:_SHOWN_CHARACTERS])
            for name, value in after.items()
            if name in before and value != before[name] and name not in hidden
        },
    )


def upload(observed: Observed) -> dict[str, Any] | None:
    """Whether the request's body was kept until it was whole. By durations, each on its own side's clock."""
    fetched, tap = observed.fetched, observed.tap
    if tap is None or fetched.write_start_ns is None or fetched.write_end_ns is None or tap["body_end_ns"] is None:
        return None
    if tap["body_first_ns"] is None:
        return None
    took_ns = fetched.write_end_ns - fetched.write_start_ns
    seen_ns = tap["body_end_ns"] - tap["body_first_ns"]
    return {
        "buffered": seen_ns < _KEPT * took_ns,
        "upload_ms": round(took_ns / _MS, 3),
        "tap_saw_it_take_ms": round(seen_ns / _MS, 3),
        "reads_at_tap": len(tap["body_reads"]),
        "bytes": tap["body_bytes"],
        "threshold_share": _KEPT,
    }


def abort(observed: Observed, clocks: Clocks) -> dict[str, Any] | None:
    """How long the tap went on after the client had left; None where it never began or ended before that."""
    fetched, tap = observed.fetched, observed.tap
    if tap is None or fetched.left_ns is None or not tap["sent_ns"]:
        return None
    if clocks.common:
        left_ns, how = fetched.left_ns, "one clock"
    elif observed.events:
        # When the tap's clock stood where the client left: an event's send, and what passed since it came.
        last = observed.events[-1]
        left_ns, how = last.sent_ns + fetched.left_ns - last.arrived_ns, "a round trip, from the last event that came"
    else:
        return None
    sent_after = sum(sent_ns > left_ns for sent_ns in tap["sent_ns"])
    reached = tap["ended"] == StreamEnd.LEFT
    if tap["end_ns"] < left_ns and not reached:
        return None
    return {
        "reached": reached,
        "after_ms": round(max(0, tap["end_ns"] - left_ns) / _MS, 3) if reached else None,
        "events_sent_for_nobody": sent_after,
        "how": how,
        "threshold_ms": ABORT_LATE_MS,
    }


def abort_first(observed: Observed, clocks: Clocks) -> dict[str, Any] | None:
    """The same for a client that left before the first event. None where the tap was not asked, or an event came."""
    fetched, tap = observed.fetched, observed.tap
    if tap is None or fetched.left_ns is None or tap["head_sent_ns"] is None or observed.events:
        return None
    if clocks.common:
        left_ns, how = fetched.left_ns, "one clock"
    elif fetched.write_end_ns is not None:
        # The tap began to answer after the request was out: what lay between is left out, so it took this or longer.
        left_ns = tap["head_sent_ns"] + fetched.left_ns - fetched.write_end_ns
        how = "durations on both sides, at least"
    else:
        return None
    reached = tap["ended"] == StreamEnd.LEFT
    if (tap["end_ns"] < left_ns and not reached) or (tap["sent_ns"] and tap["sent_ns"][0] < left_ns):
        return None
    return {
        "reached": reached,
        "after_ms": round(max(0, tap["end_ns"] - left_ns) / _MS, 3) if reached else None,
        "events_sent_for_nobody": len(tap["sent_ns"]),
        "how": how,
        "threshold_ms": ABORT_LATE_MS,
    }


def deaf(found: dict[str, Any] | None) -> bool:
    """Whether a client's leaving was noticed late or never; False where that is not known."""
    return found is not None and (not found["reached"] or found["after_ms"] > ABORT_LATE_MS)


def silence(observed: Observed, quiet_ns: int) -> dict[str, Any] | None:
    """Whether a silent stream was cut, and after how long: by the tap's clock where the proxy left the tap."""
    fetched, tap = observed.fetched, observed.tap
    if tap is None or tap["head_sent_ns"] is None:
        return None
    waited_s = round(quiet_ns / 1e9, 3)
    if observed.complete:
        return {"cut": False, "after_s": None, "waited_s": waited_s, "side": None}
    since_ns = tap["sent_ns"][-1] if tap["sent_ns"] else tap["head_sent_ns"]
    if tap["ended"] == StreamEnd.LEFT and len(tap["sent_ns"]) < observed.plan.events:
        side, cut_ns = "tap", tap["end_ns"] - since_ns
        ended = fetched.error or f"status {fetched.status}"
    elif fetched.error is not None and fetched.end_ns is None and fetched.left_ns is None and fetched.reads:
        # The client was cut and the tap not told.
        side, cut_ns, ended = "client", None, fetched.error
    else:
        return None
    return {
        "cut": True,
        "after_s": None if cut_ns is None else round(cut_ns / 1e9, 3),
        "waited_s": waited_s,
        "side": side,
        "client_saw": ended,
        # A chunked answer that ends as if it were whole, without its [DONE].
        "silent": fetched.error is None and fetched.status == 200,
    }


def reuse(requests: Sequence[Observed]) -> dict[str, Any] | None:
    """Whether connections were used again, on both sides of the proxy."""
    taps = [one.tap for one in requests if one.tap is not None]
    if len(taps) < 2 or len(taps) != len(requests) or any(one.fetched.error for one in requests):
        return None
    connections = [tap["connection"] for tap in taps]
    return {
        "requests": len(requests),
        "client_reused": all(one.fetched.reused for one in requests[1:]),
        "upstream_connections": len(set(connections)),
        "upstream_reused": len(set(connections)) < len(connections),
    }


def header_delay_ms(cells: Sequence[Observed]) -> float | None:
    """By how much the head waited for the first event: the median of the streams; None where none tells."""
    delays = sorted(delay for one in cells if (delay := one.header_delay_ns()) is not None)
    return round(delays[len(delays) // 2] / _MS, 3) if delays else None
