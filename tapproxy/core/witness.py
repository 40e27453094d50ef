"""One request as a proxy's own access log tells it: a third witness beside two taps.

Rules here: what the line does not say is None. Durations are the proxy's own, by its own clock, so they may be set
against a tap's durations with no common clock; only ``ended_unix_ns`` and ``started_unix_ns`` are wall-clock times.
nginx counts in whole milliseconds of a clock it reads once a turn of its loop, so each duration is within
``RESOLUTION_NS`` of the truth or, on a busy worker, as far off as one turn took.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

# nginx writes seconds with three decimals, start and end each cut to a millisecond.
RESOLUTION_NS: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class UpstreamTry:
    """One server that the proxy asked. All durations count from when the proxy turned to it.

    ``connect_ns``: the connection (TLS with it) stood; ``header_ns``: the response head was read, which engines send
    before the first token; ``response_ns``: the last byte was read. None where that was not reached or not logged.
    """

    addr: str | None = None
    status: int | None = None
    connect_ns: int | None = None
    header_ns: int | None = None
    response_ns: int | None = None


@dataclass(frozen=True, slots=True)
class AccessRow:
    """One line of an access log.

    ``line``: its number in the file, from 1. ``ended_unix_ns``: when it was written, at the end of the request;
    ``ended_bound_ns``: how much later than that it may really have been (what the log's clock cuts off).
    ``request_ns``: from the first byte of the request to the last byte of the answer.
    ``request_id``: the proxy's own ``$request_id``; ``client_request_id``: ``X-Request-Id`` as the client sent it;
    ``answer_request_id``: the one in the answer; ``trace_id``: of ``traceparent``. ``path``: without the query.
    ``tries``: every upstream asked, in order; empty where none was, or where the log does not tell.
    """

    line: int
    ended_unix_ns: int | None = None
    ended_bound_ns: int | None = None
    request_ns: int | None = None
    request_id: str | None = None
    client_request_id: str | None = None
    answer_request_id: str | None = None
    trace_id: str | None = None
    method: str | None = None
    path: str | None = None
    http: str | None = None
    status: int | None = None
    body_bytes: int | None = None
    sent_bytes: int | None = None
    received_bytes: int | None = None
    connection: int | None = None
    connection_requests: int | None = None
    tries: tuple[UpstreamTry, ...] = ()

    @property
    def started_unix_ns(self) -> int | None:
        """When the request's first byte was read, as early as ``ended_unix_ns`` is."""
        if self.ended_unix_ns is None or self.request_ns is None:
            return None
        return self.ended_unix_ns - self.request_ns

    @property
    def ids(self) -> tuple[str, ...]:
        """What a record's ``request_id`` may be, each once: the proxy's, the client's, the answer's."""
        found = (self.request_id, self.client_request_id, self.answer_request_id)
        return tuple(dict.fromkeys(each for each in found if each is not None))

    @property
    def retried(self) -> bool:
        """Whether more than one upstream was asked."""
        return len(self.tries) > 1


@dataclass(slots=True)
class AccessLog:
    """The rows of one log, and what of it could not be used.

    ``variables``: the names its format logs. ``skipped``: lines that are not of that format. ``problem``: one
    sentence on why it cannot witness (no times in its format, no line of it, …), else None; rows may be there still.
    ``notes``: what is known of the log besides (cut at a size, torn lines).
    """

    source: str
    rows: list[AccessRow] = field(default_factory=list)
    variables: tuple[str, ...] = ()
    skipped: int = 0
    problem: str | None = None
    notes: list[str] = field(default_factory=list)
