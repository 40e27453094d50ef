"""Requests that came out of a hop more than once, one try after the other.

Rules here:
* Every try but the last must have failed, and ended, before the next began: a copy that a proxy sends elsewhere at the
  same time is no retry. A client that asks again makes a request of its own, with a record of its own before the hop.
* By the client's id, else by the trace, else by the body; and only tries that no other request can have made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import islice, pairwise
from typing import Final

from tapproxy.core.record import Ended, Record
from tapproxy.diagnose.fingerprints import Lag, Time, earlier, length_ns

# Answers after which a proxy tries another server, where it is told to (nginx: proxy_next_upstream).
_TRIED_AGAIN: Final = frozenset({403, 404, 429})
# The proxy gives a try up and begins the next; the tap that is left notices it a little later, but not by half of what
# the try took: that is a copy.
_OVERLAP_NS: Final = 100_000_000
_KEYS: Final[tuple[Callable[[Record], str | None], ...]] = (
    lambda record: record.request_id,
    lambda record: record.trace_id,
    lambda record: record.request.fingerprint,
)


def tries(outer: Sequence[Record], inner: Sequence[Record], lag: Lag, time: Time) -> list[tuple[Record, list[Record]]]:
    """(request before the hop, its tries behind it in order). ``lag``: as in ``by_fingerprint``."""
    found: dict[int, tuple[Record, list[Record]]] = {}
    for key in _KEYS:
        values = {value for record in inner if failed(record) and (value := key(record))}
        nears, fars = _grouped(outer, key, values), _grouped(inner, key, values)
        for value, behind in fars.items():
            for near, several in _several(nears.get(value, []), behind, lag, time):
                found.setdefault(id(near), (near, several))
    return list(found.values())


def failed(record: Record) -> bool:
    """Whether a proxy may have tried elsewhere after this."""
    status = record.status
    return record.ended != Ended.COMPLETE or status is None or status >= 500 or status in _TRIED_AGAIN


def _several(
    nears: Sequence[Record], fars: Sequence[Record], lag: Lag, time: Time
) -> list[tuple[Record, list[Record]]]:
    if not nears or len(fars) < 2:
        return []
    begun = sorted((time.near(record), index) for index, record in enumerate(nears))
    longest_ns = max(length_ns(record) for record in nears) + time.slack_ns
    mine: dict[int, list[Record]] = defaultdict(list)
    for far in fars:
        may_be = (
            index
            for index in earlier(begun, time.far(far), longest_ns, time.slack_ns)
            if lag(nears[index], far) is not None
        )
        # Two that may have made it are as bad as many.
        owners = list(islice(may_be, 2))
        if len(owners) == 1:
            mine[owners[0]].append(far)
    ordered = [(nears[index], sorted(several, key=time.far)) for index, several in mine.items() if len(several) > 1]
    return [(near, several) for near, several in ordered if _one_after_the_other(several, time)]


def _one_after_the_other(several: Sequence[Record], time: Time) -> bool:
    def ended_by(record: Record) -> int:
        length = length_ns(record)
        return time.far(record) + length - min(_OVERLAP_NS, length // 2)

    return all(failed(a) and time.far(b) >= ended_by(a) for a, b in pairwise(several))


def _grouped(
    records: Sequence[Record], key: Callable[[Record], str | None], values: set[str]
) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        value = key(record)
        if value in values:
            groups[value or ""].append(record)
    return groups
