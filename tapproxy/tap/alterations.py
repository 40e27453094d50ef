"""What the operator has a tap change in heads: correlation ids, the client's address, X-Accel-Buffering, Server-Timing.

Rules here: all of it is off unless asked for; what is there already stays as it is; each exchange that was changed
names the flag in its record; fields are changed after the hop-by-hop ones are gone, so that no client can have one of
ours taken out by nominating it in Connection.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

from tapproxy.core.exchange import Exchange
from tapproxy.core.http1 import Field, RequestHead, ResponseHead
from tapproxy.tap.ids import coin, trace_parent, uuid4

_STREAMS: Final = frozenset({b"text/event-stream", b"application/x-ndjson"})
_FORWARDED: Final = b"x-forwarded-for"
_ACCEL: Final = b"x-accel-buffering"
_ACCEL_NO: Final[Field] = (_ACCEL, b"no", b"X-Accel-Buffering: no")
# An IPv4 client of a listener that takes both.
_MAPPED: Final = "::ffff:"

SET_ACCEL: Final = "set-x-accel-buffering"
RANDOMIZE_ACCEL: Final = "randomize x-accel-buffering"


@dataclass(frozen=True, slots=True)
class Alterations:
    """Which are on. The records' ``altered`` names them as the command line does."""

    correlate: bool = False
    forward_client_ip: bool = False
    set_x_accel_buffering: bool = False
    randomize_x_accel_buffering: bool = False
    server_timing: bool = False

    @property
    def any(self) -> bool:
        """Whether anything is."""
        return self != _NONE

    def request(self, exchange: Exchange, head: RequestHead, fields: list[Field], client_ip: str | None) -> list[Field]:
        """The fields to send on for these; ids that are added are the record's as well."""
        if self.correlate:
            fields = _correlated(exchange, head, fields)
        if self.forward_client_ip and client_ip:
            exchange.altered.append("forward-client-ip")
            fields = _forwarded(fields, _plain(client_ip))
        return fields

    def response(self, exchange: Exchange, head: ResponseHead, fields: list[Field]) -> list[Field]:
        """The fields to send to the client for these."""
        accel = SET_ACCEL if self.set_x_accel_buffering else RANDOMIZE_ACCEL if self.randomize_x_accel_buffering else ""
        # A half of the streams gets it, the other is what it is compared with.
        wanted = accel == SET_ACCEL or (accel == RANDOMIZE_ACCEL and coin())
        if wanted and head.get(_ACCEL) is None and _is_stream(exchange, head):
            exchange.altered.append(accel)
            fields = [*fields, _ACCEL_NO]
        if self.server_timing:
            timing = _server_timing(exchange)
            if timing:
                exchange.altered.append("server-timing")
                fields = [*fields, (b"server-timing", timing, b"Server-Timing: " + timing)]
        return fields


# An upstream that takes an id at all takes a UUID4; one engine refuses anything else.
_IDS: Final = ((b"traceparent", b"traceparent", trace_parent), (b"x-request-id", b"X-Request-Id", uuid4))
_NONE: Final = Alterations()
# Their names, which are the settings' too.
ALTERATIONS: Final = tuple(part.name for part in dataclasses.fields(Alterations))


def _plain(host: str) -> str:
    """An address as X-Forwarded-For has it: without a zone, and IPv4 as IPv4."""
    bare = host.partition("%")[0]
    return bare[len(_MAPPED) :] if bare.lower().startswith(_MAPPED) and "." in bare else bare


def _correlated(exchange: Exchange, head: RequestHead, fields: list[Field]) -> list[Field]:
    added: list[Field] = []
    for name, shown, make in _IDS:
        if head.get(name) is None:
            value = make().encode("ascii")
            added.append((name, value, shown + b": " + value))
    if not added:
        return fields
    exchange.altered.append("correlate")
    # The record's ids are those of the head.
    head.fields += added
    return [*fields, *added]


def _forwarded(fields: list[Field], address: str) -> list[Field]:
    """Appended to the last list there is, as every proxy on the way did."""
    own = address.encode("ascii", "replace")
    for index in range(len(fields) - 1, -1, -1):
        name, value, raw = fields[index]
        if name == _FORWARDED:
            whole = value + b", " + own if value else own
            line = raw[: raw.index(b":")] + b": " + whole
            return [*fields[:index], (name, whole, line), *fields[index + 1 :]]
    return [*fields, (_FORWARDED, own, b"X-Forwarded-For: " + own)]


def _is_stream(exchange: Exchange, head: ResponseHead) -> bool:
    kind = (head.get(b"content-type") or b"").partition(b";")[0].strip().lower()
    return head.status == 200 and (kind in _STREAMS or exchange.reads_events)


def _server_timing(exchange: Exchange) -> bytes:
    """What is known when the head leaves: the upload, the wait for a connection, and for the upstream's head."""
    part = exchange.upstream
    body_end_ns = exchange.request.body_end
    spans = (
        ("tap-upload", 0, body_end_ns),
        ("tap-connect", part.wanted, part.acquired),
        ("tap-ttfb", part.write_end, part.head),
    )
    known = [
        f"{name};dur={max(0, end_ns - start_ns) / 1e6:.3f}"
        for name, start_ns, end_ns in spans
        if start_ns is not None and end_ns is not None
    ]
    return ", ".join(known).encode("ascii")
