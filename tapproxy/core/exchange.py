"""One proxied request as a state machine: facts with integer times in, one Record out.

Rules here: no clock and no I/O; every time is an absolute CLOCK_MONOTONIC nanosecond that the shell took; the first
end wins; nothing of a body outlives its parsing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from typing import Any, Final

from tapproxy.core import spot
from tapproxy.core import usage as say
from tapproxy.core.body import RequestScan
from tapproxy.core.eventlog import EventLog
from tapproxy.core.http1 import RequestHead, ResponseHead
from tapproxy.core.marks import proxy_marks
from tapproxy.core.record import (
    STORED_HEADERS,
    DownstreamPart,
    Ended,
    Events,
    Record,
    RequestPart,
    StampsPart,
    UpstreamPart,
)
from tapproxy.core.usage import TIMING_FIELDS

_MAX_ID_CHARS: Final = 256
MEASURING_FAILED: Final = "measuring_failed"
_FINGERPRINT: Final = "hmac-sha256:"
# One table, so that a head is gone through once; the timing fields are read and not stored.
_STORED: Final = {name.encode(): name for name in (*STORED_HEADERS, *TIMING_FIELDS)}
_MAX_PATH_CHARS: Final = 1024
# How a body can be read: server-sent events, one JSON object a line, or at most as one JSON value.
_EVENTS: Final = "events"
_LINES: Final = "lines"
_PLAIN: Final = "plain"
_TRACEPARENT: Final = re.compile(rb"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_PRINTABLE: Final = re.compile(rb"[\x20-\x7e]+")


@dataclass(frozen=True, slots=True)
class Vantage:
    """Where and by whom an exchange is seen; the same for all of one worker."""

    tap: str
    worker: int
    boot_id: str | None
    pair_key: bytes


class Exchange:
    """The facts of one exchange. Methods are called in the order things happen; each may be left out."""

    __slots__ = (
        "_fingerprint",
        "_log",
        "_scan",
        "_sent_bytes",
        "_t0_ns",
        "_vantage",
        "_waiting_bytes",
        "altered",
        "body_bytes",
        "downstream",
        "ended",
        "reason",
        "record_id",
        "request",
        "request_head",
        "response_head",
        "stamps",
        "t0_unix_ns",
        "upstream",
        "void",
    )

    def __init__(self, vantage: Vantage, record_id: str, t0_ns: int, t0_unix_ns: int) -> None:
        self._vantage = vantage
        self._t0_ns = t0_ns
        self.t0_unix_ns = t0_unix_ns
        self.record_id = record_id
        self.request_head: RequestHead | None = None
        self.response_head: ResponseHead | None = None
        self.request = RequestPart()
        self.upstream = UpstreamPart()
        self.downstream = DownstreamPart()
        self.stamps = StampsPart()
        self.altered: list[str] = []
        self.ended: Ended | None = None
        self.reason: str | None = None
        self.void: str | None = None
        # Of the response's body: read so far, sent so far, waiting in between.
        self.body_bytes = 0
        self._sent_bytes = 0
        self._waiting_bytes = 0
        self._scan: RequestScan | None = None
        self._fingerprint: hmac.HMAC | None = None
        self._log: EventLog | None = None

    # -- the request

    def head_read(self, head: RequestHead, at_ns: int) -> None:
        """The request head is complete."""
        self.request_head = head
        self.request.head = at_ns - self._t0_ns

    def head_refused(self, method: bytes, target: bytes, version: int) -> None:
        """The head goes no further, but its first line could be read."""
        self.request_head = RequestHead(method, target, version, b"", [])

    def request_body(self, payload: bytes, last: bool) -> None:
        """Some bytes of the request body, after they were passed on; ``last``: no more will come."""
        part = self.request
        part.bytes += len(payload)
        key = self._vantage.pair_key
        if self._scan is None:
            self._scan = RequestScan()
            if last:
                part.fingerprint = _FINGERPRINT + hmac.digest(key, payload, "sha256").hex()
            else:
                self._fingerprint = hmac.new(key, digestmod=hashlib.sha256)
        try:
            self._scan.feed(payload)
        except Exception:  # as with the answer: what is not read is not known
            self._scan.readable = False
        if self._fingerprint is not None:
            self._fingerprint.update(payload)

    def request_ended(self, at_ns: int) -> None:
        """The last byte of the request was read (r1)."""
        self.request.body_end = at_ns - self._t0_ns

    # -- the upstream connection

    def wanted(self, at_ns: int) -> None:
        self.upstream.wanted = at_ns - self._t0_ns

    def acquired(
        self,
        at_ns: int,
        *,
        peer: str,
        reused: bool,
        kernel_stamps: bool,
        dns_ns: int | None = None,
        connect_ns: int | None = None,
        tls_ns: int | None = None,
    ) -> None:
        """A connection is there; the durations belong to it only when it was opened for this exchange."""
        part = self.upstream
        part.acquired = at_ns - self._t0_ns
        part.peer = peer
        part.reused = reused
        part.dns, part.connect, part.tls = dns_ns, connect_ns, tls_ns
        self.stamps.source = "kernel" if kernel_stamps else "user"

    def write_started(self, at_ns: int) -> None:
        if self.upstream.write_start is None:
            self.upstream.write_start = at_ns - self._t0_ns

    def write_ended(self, at_ns: int) -> None:
        self.upstream.write_end = at_ns - self._t0_ns

    # -- the response

    def response_read(self, head: ResponseHead, at_ns: int) -> None:
        """The final response head is complete (h); decides how its body will be read."""
        self.response_head = head
        self.upstream.head = at_ns - self._t0_ns
        kind = self._body_kind(head)
        self._log = EventLog(sse=kind == _EVENTS, lines=kind == _LINES)

    def head_sent(self, at_ns: int) -> None:
        self.downstream.head = at_ns - self._t0_ns

    def response_body(self, payload: bytes, arrived_ns: int, read_at_ns: int, sent_ns: int | None) -> None:
        """The body bytes of one read, after they were passed on; ``sent_ns`` None while they wait in user space."""
        if not self.body_bytes and payload:
            self.upstream.first_byte = arrived_ns - self._t0_ns
            if sent_ns is not None:
                self.downstream.first_byte = sent_ns - self._t0_ns
        self.body_bytes += len(payload)
        if sent_ns is None:
            self._waiting_bytes += len(payload)
        else:
            self._sent_bytes += len(payload)
        if self._log is not None:
            try:
                self._log.add_read(payload, arrived_ns, read_at_ns, sent_ns)
            except Exception:  # measuring must never hurt the stream: the record says that it has no events
                self.measuring_failed()

    def measuring_failed(self) -> None:
        """A fault of ours: the exchange goes on, and its record has no events and no part in any statistic."""
        self._log = None
        self.void = MEASURING_FAILED

    @property
    def reads_events(self) -> bool:
        """Whether the answer's body is read as server-sent events, under whatever content type."""
        return self._log is not None and self._log.reads_events

    def reads(self) -> int:
        """How many reads the response body took so far."""
        return 0 if self._log is None else self._log.reads

    def waiting_sent(self, first_read: int, end_read: int, at_ns: int) -> None:
        """The bytes of reads [first, end) that waited have been taken by the kernel."""
        self._sent_bytes += self._waiting_bytes
        self._waiting_bytes = 0
        if self._log is not None:
            for index in range(first_read, end_read):
                self._log.set_sent(index, at_ns)
        if self.downstream.first_byte is None and self.body_bytes:
            self.downstream.first_byte = at_ns - self._t0_ns

    def response_ended(self, at_ns: int) -> None:
        """The upstream body ended (e)."""
        self.upstream.end = at_ns - self._t0_ns

    def end(self, ended: Ended, at_ns: int, reason: str | None = None) -> bool:
        """How it ended. The first call decides; later ones change nothing and return False."""
        if self.ended is not None:
            return False
        self.ended = ended
        self.reason = reason
        self.downstream.end = at_ns - self._t0_ns
        return True

    # -- the record

    def so_far(self) -> dict[str, Any]:
        """The keys of a record that are known from the start."""
        head = self.request_head
        return {
            "id": self.record_id,
            "tap": self._vantage.tap,
            "worker": self._vantage.worker,
            "boot_id": self._vantage.boot_id,
            "t0_unix_ns": self.t0_unix_ns,
            "t0_mono_ns": self._t0_ns,
            "client_http": None if head is None else f"1.{head.version}",
            "method": None if head is None else head.method.decode("ascii")[:32],
            "path": None if head is None else _path(head.target),
            "request_id": None if head is None else _text(head.get(b"x-request-id")),
            "trace_id": None if head is None else _trace_id(head.get(b"traceparent")),
            "model": None if self._scan is None else self._scan.model,
            "stream": None if self._scan is None else self._scan.stream,
            "status": None if self.response_head is None else self.response_head.status,
        }

    def finish(self) -> Record:
        """The record. Call once, after ``end``."""
        if self._fingerprint is not None:
            self.request.fingerprint = _FINGERPRINT + self._fingerprint.hexdigest()
        self.upstream.bytes, self.downstream.bytes = self.body_bytes, self._sent_bytes
        record = Record(
            **self.so_far(),
            ended=str(self.ended or Ended.COMPLETE),
            request=self.request,
            upstream=self.upstream,
            downstream=self.downstream,
            stamps=self.stamps,
            altered=self.altered,
            void=self.void,
            reason=self.reason,
            headers=dict.fromkeys(STORED_HEADERS),
        )
        response = self.response_head
        timing: dict[str, str] = {}
        if response is not None:
            timing = _store_headers(record.headers, response)
            if spot.is_event_stream(record):
                # TGI's /generate_stream streams without being asked in so many words.
                record.stream = True
            record.request_id = record.request_id or _text(response.get(b"x-request-id"))
        if self.request_head is not None:
            record.request.keep_alive = self.request_head.keep_alive
            record.request.proxy_marks = proxy_marks(self.request_head)
        try:
            self._measure(record)
            if timing:
                _take_timing(record, timing)
        except Exception:  # what is known without the body's reading is kept
            record.events, record.void = Events(), MEASURING_FAILED
        return record

    def _measure(self, record: Record) -> None:
        """What the body told, and what stands out."""
        log = self._log
        if log is not None:
            record.events = log.finish(self._t0_ns)
            deltas = log.deltas
            record.response_id = deltas.response_id
            record.model = record.model or deltas.model
            record.usage = deltas.usage
            record.engine = deltas.engine
            record.unread_events = deltas.unread
            record.unlogged_events = log.unlogged
        record.findings = spot.rules(record)

    def _body_kind(self, head: ResponseHead) -> str:
        """How the body can be read. An encoded one hides what is in it: then nothing is parsed."""
        if (head.get(b"content-encoding") or b"identity").lower() != b"identity":
            return _PLAIN
        kind = (head.get(b"content-type") or b"").partition(b";")[0].strip().lower()
        if kind == b"text/event-stream":
            return _EVENTS
        if kind == b"application/x-ndjson":
            return _LINES
        # A stream under a wrong content type is still a stream to the client that asked for one.
        asked = self._scan is not None and self._scan.stream is True
        return _EVENTS if asked and head.status == 200 and kind != b"application/json" else _PLAIN


def _store_headers(out: dict[str, str | None], head: ResponseHead) -> dict[str, str]:
    """The allow-listed fields, of several with one name the first; returns those that tell an engine's times."""
    timing: dict[str, str] = {}
    for name, value, _ in head.fields:
        stored = _STORED.get(name)
        if stored is None:
            continue
        if stored not in out:
            timing[stored] = _text(value) or ""
        elif out[stored] is None:
            out[stored] = _text(value)
    return timing


def _take_timing(record: Record, timing: dict[str, str]) -> None:
    """What the head tells, where the body told nothing."""
    engine, usage = say.read_fields(timing)
    if record.engine.source is None and say.tells_something(engine):
        record.engine = engine
    if record.usage.prompt_tokens is None and record.usage.completion_tokens is None:
        usage.cached_tokens = record.usage.cached_tokens
        record.usage = usage


def _path(target: bytes) -> str:
    """The path alone: queries and fragments carry keys."""
    path = target.partition(b"?")[0].partition(b"#")[0]
    if not path.startswith((b"/", b"*")):
        path = b"/" + path.partition(b"://")[2].partition(b"/")[2]
    return path.decode("ascii", "replace")[:_MAX_PATH_CHARS]


def _text(value: bytes | None) -> str | None:
    """A header value that may be stored: printable and short, or nothing."""
    if value is None or _PRINTABLE.fullmatch(value) is None:
        return None
    return value.decode("ascii")[:_MAX_ID_CHARS]


def _trace_id(traceparent: bytes | None) -> str | None:
    match = _TRACEPARENT.fullmatch(traceparent or b"")
    return match.group(1).decode("ascii") if match else None
