"""What the taps themselves changed of the path they measured.

Rules here: only what follows from how a tap was run, or what its records say; each line with the number of requests
it is true of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from tapproxy.core.record import Record

# What a record's ``altered`` names → what it means for who reads the numbers.
ALTERATIONS: Final = {
    "set-x-accel-buffering": "the answers were given X-Accel-Buffering: no, which turns nginx's buffering off for them",
    "randomize x-accel-buffering": "a random half of the answers was given X-Accel-Buffering: no",
    "server-timing": "a Server-Timing field was added to the answers",
    "correlate": "traceparent and X-Request-Id were added where they were absent",
    "include-usage": "the engine was asked for usage, which its clients had not asked for",
    "forward-client-ip": "the client's address was appended to X-Forwarded-For",
    "mirror-connections": "each client connection had one of its own upstream, and no pool",
    "rewrite-host": "the engine saw its own name as Host",
    "strict-http": "an HTTP/1.0 client got no chunked answer",
}


def presence(outer: Sequence[Record], inner: Sequence[Record]) -> list[dict[str, Any]]:
    """One entry each: ``what`` the taps changed, for how many ``requests``, and at which ``tap``."""
    found: list[dict[str, Any]] = []
    for place, records in (("outer", outer), ("inner", inner)):
        if not records:
            continue
        name, answered = records[0].tap, [record for record in records if record.upstream.reused is not None]
        behind = "the proxy" if place == "outer" else "its upstream"
        if place == "outer":
            text = "clients speak HTTP/1.1 to the tap and so to the proxy: what HTTP/2 would change does not show here"
            found.append(_entry(name, text, len(records)))
        # Whoever stands behind a proxy sees the proxy's address, with a tap and without.
        alone = [record for record in answered if place == "outer" and "forward-client-ip" not in record.altered]
        if alone:
            text = "the proxy sees one client address, the tap's: limits and hashes by address take all clients for one"
            found.append(_entry(name, text, len(alone)))
        pooled = [record for record in answered if "mirror-connections" not in record.altered]
        reused = sum(bool(record.upstream.reused) for record in pooled)
        if reused:
            text = (
                "the tap has connections of its own, a pool for all clients: faults of connection reuse between client "
                f"and {behind} do not show as they would"
            )
            found.append(_entry(name, text, reused))
        altered = Counter(change for record in records for change in record.altered)
        for change, count in altered.most_common():
            found.append(_entry(name, ALTERATIONS.get(change, f"traffic was altered: {change}"), count))
    return found


def _entry(tap: str, what: str, requests: int) -> dict[str, Any]:
    return {"tap": tap, "what": what, "requests": requests}
