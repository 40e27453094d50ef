"""What finished records add up to: counters, and histograms of their times, in a form that can be handed on.

A worker counts its records as it writes them and hands on what came since the last time (``take``); the parent adds
that to the whole (``add``), which is what /metrics shows. So the parent need not read a record to count it.

Rules here. Labels are bounded, whatever a client or an engine sends: no path, no id, and the first 20 model names, the
rest being ``other``; bounded again where tallies are added. A value that is unknown is not counted, and a request that
failed has no latency. Values are kept as they come and sorted into buckets later: looking each one up costs ten times
as much. Histograms are our own: prometheus-client's observe() costs more for the events of one stream than all here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from operator import sub
from typing import Any, Final

from tapproxy.core.counts import TOKEN_KINDS
from tapproxy.core.deltas import KINDS
from tapproxy.core.histogram import Histogram
from tapproxy.core.metrics import LAST_KINDS, VISIBLE_KINDS
from tapproxy.core.record import DownstreamPart, Ended, Events, Record, RequestPart, UpstreamPart

MODELS_MAX: Final = 20
# Values that may wait for their buckets: some ten megabytes.
_WAITING_MAX: Final = 200_000
UNKNOWN: Final = "unknown"
OTHER: Final = "other"
_NAMELESS: Final = (UNKNOWN, OTHER)

# The name of a row or counter, then its labels' values.
Key = tuple[str, ...]

_US, _MS = 1_000, 1_000_000
_HOP_NS = (
    *(n * _US for n in (5, 10, 20, 30, 50, 75, 100, 150, 200, 300, 500, 750, 1000, 1500)),
    *(n * _MS for n in (2, 3, 5, 10, 20, 50, 100, 200, 500, 1000, 5000)),
)
_INTERVAL_NS = tuple(
    round(n * _MS)
    for n in (
        0.5,
        1,
        2,
        3,
        4,
        5,
        6,
        8,
        10,
        12,
        15,
        20,
        25,
        30,
        40,
        50,
        75,
        100,
        150,
        200,
        300,
        500,
        1000,
        2000,
        5000,
        10000,
    )
)
# The bounds of OpenTelemetry's gen_ai.server.time_to_first_token, and what lies beyond 10 s.
_FIRST_NS = (
    *(n * _MS for n in (1, 2, 5, 10, 20, 40, 60, 80, 100, 150, 200, 250, 300, 400, 500, 750)),
    *(n * _MS for n in (1000, 1500, 2500, 5000, 7500, 10000, 20000, 40000, 80000)),
)
# Those of gen_ai.server.request.duration.
_DURATION_NS = tuple(10 * _MS << n for n in range(16))
_CONNECT_NS = tuple(round(n * _MS) for n in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000))
_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 16, 24, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Row:
    """One histogram of the page. ``unit`` divides the integers kept: 1e9 makes ns seconds."""

    name: str
    help: str
    labels: tuple[str, ...]
    bounds: tuple[int, ...]
    unit: float = 1e9


ROWS = {
    row.name: row
    for row in (
        Row(
            "tapproxy_ttft_seconds",
            "First response body byte, data event of any kind, token event on any channel, or visible token "
            "event, since the first byte of the request; side: read from the upstream or sent downstream.",
            ("side", "kind"),
            _FIRST_NS,
        ),
        Row(
            "tapproxy_request_duration_seconds",
            "Last token or finish event (a plain response: its end) since the first byte of the request.",
            ("side",),
            _DURATION_NS,
        ),
        Row(
            "tapproxy_chunk_interval_seconds",
            "Gap between token events of one stream (ICL; 0 where one read held both).",
            ("side",),
            _INTERVAL_NS,
        ),
        Row(
            "tapproxy_chunk_queueing_seconds",
            "How long an event had been in this host before the tap read it.",
            (),
            _HOP_NS,
        ),
        Row(
            "tapproxy_chunk_forward_delay_seconds",
            "From the read that held an event to its bytes in the kernel's hands for the client.",
            (),
            _HOP_NS,
        ),
        Row("tapproxy_upload_seconds", "The request: read from the client, written upstream.", ("side",), _FIRST_NS),
        Row("tapproxy_pool_wait_seconds", "Waiting for an upstream connection, beyond making one.", (), _CONNECT_NS),
        Row("tapproxy_connect_seconds", "Making an upstream connection, by phase.", ("phase",), _CONNECT_NS),
        Row("tapproxy_events_per_read", "Token events that came in one read.", (), _COUNTS, 1),
        Row("tapproxy_tokens_per_event", "Tokens of a token event, where known.", (), _COUNTS, 1),
    )
}

# name → help, labels
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tapproxy_requests": ("Finished exchanges.", ("status_class", "ended", "stream")),
    "tapproxy_request_bytes": ("Request body bytes received.", ()),
    "tapproxy_response_bytes": ("Response body bytes, by side.", ("side",)),
    "tapproxy_tokens": ("Tokens by the engine's own count, where it gave one.", ("model", "type")),
    "tapproxy_downstream_stalled_seconds": ("Reading upstream was paused: the client's buffer was full.", ()),
    "tapproxy_findings": ("What stood out in exchanges, by rule.", ("rule",)),
    "tapproxy_records_void": ("Records whose timings are not counted here, and why.", ("reason",)),
    "tapproxy_records_unreadable": ("Records that could not be counted.", ()),
}

MODEL_TTFT_COUNT: Final = "tapproxy_model_ttft_count"
MODEL_TTFT_NS: Final = "tapproxy_model_ttft_ns"

_REQUEST_BYTES: Final = ("tapproxy_request_bytes",)
_RESPONSE_BYTES_UP: Final = ("tapproxy_response_bytes", "upstream")
_RESPONSE_BYTES_DOWN: Final = ("tapproxy_response_bytes", "downstream")
_STALLED: Final = ("tapproxy_downstream_stalled_seconds",)
_UPLOAD_UP: Final = ("tapproxy_upload_seconds", "upstream")
_UPLOAD_DOWN: Final = ("tapproxy_upload_seconds", "downstream")
_DNS: Final = ("tapproxy_connect_seconds", "dns")
_TCP: Final = ("tapproxy_connect_seconds", "tcp")
_TLS: Final = ("tapproxy_connect_seconds", "tls")
_POOL_WAIT: Final = ("tapproxy_pool_wait_seconds",)
_QUEUEING: Final = ("tapproxy_chunk_queueing_seconds",)
_FORWARD: Final = ("tapproxy_chunk_forward_delay_seconds",)
_PER_READ: Final = ("tapproxy_events_per_read",)
_PER_EVENT: Final = ("tapproxy_tokens_per_event",)


class _Side:
    """The rows that are kept for each side, with their labels."""

    def __init__(self, side: str) -> None:
        self.interval: Key = ("tapproxy_chunk_interval_seconds", side)
        self.duration: Key = ("tapproxy_request_duration_seconds", side)
        self.byte, self.chunk, self.token, self.visible = (
            ("tapproxy_ttft_seconds", side, kind) for kind in ("byte", "chunk", "token", "visible")
        )


_DATA: Final = frozenset(KINDS) - {"comment"}


def _index(kinds: list[str], wanted: frozenset[str]) -> int:
    """Where the first of those kinds is, -1 where there is none."""
    for index, kind in enumerate(kinds):
        if kind in wanted:
            return index
    return -1


_UP: Final = _Side("upstream")
_DOWN: Final = _Side("downstream")


class _Bounded:
    """The first ``limit`` values keep their name; the rest are ``other``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def __call__(self, value: str | None) -> str:
        if value is None:
            return UNKNOWN
        if value in _NAMELESS:
            return value
        value = value[:128]
        if value not in self._seen:
            if len(self._seen) >= self._limit:
                return OTHER
            self._seen.add(value)
        return value


class Tally:
    """Counts finished records. ``count`` is called where the records are made and must be cheap."""

    def __init__(self) -> None:
        self.counters: dict[Key, int] = {}
        self.histograms: dict[Key, Histogram] = {}
        self._values: dict[Key, list[int]] = {}
        self._waiting = 0
        self._model = _Bounded(MODELS_MAX)
        self._rule = _Bounded(100)
        self._reason = _Bounded(20)
        self._bounds = {
            "tapproxy_tokens": self._model,
            MODEL_TTFT_COUNT: self._model,
            MODEL_TTFT_NS: self._model,
            "tapproxy_findings": self._rule,
            "tapproxy_records_void": self._reason,
        }

    # --- counting ---

    def count(self, record: Record) -> None:
        """Counts one record. Nothing is raised: what cannot be counted is counted as that."""
        try:
            self._count(record)
        except (TypeError, ValueError, IndexError, AttributeError):
            self.more(("tapproxy_records_unreadable",), 1)
        if self._waiting > _WAITING_MAX:
            self.settle()

    def _count(self, record: Record) -> None:
        status, stream = record.status, record.stream
        upstream, downstream = record.upstream, record.downstream
        status_class = f"{status // 100}xx" if status is not None else "none"
        stream_label = UNKNOWN if stream is None else "true" if stream else "false"
        self.more(("tapproxy_requests", status_class, record.ended, stream_label), 1)
        self.more(_REQUEST_BYTES, record.request.bytes)
        self.more(_RESPONSE_BYTES_UP, upstream.bytes)
        self.more(_RESPONSE_BYTES_DOWN, downstream.bytes)
        self.more(_STALLED, downstream.stalled_ns)
        for rule in record.findings:
            self.more(("tapproxy_findings", self._rule(rule)), 1)
        model = self._model(record.model)
        usage = record.usage
        if usage.prompt_tokens is not None:
            self.more(("tapproxy_tokens", model, "prompt"), usage.prompt_tokens)
        if usage.completion_tokens is not None:
            self.more(("tapproxy_tokens", model, "completion"), usage.completion_tokens)
        if record.void is not None:
            self.more(("tapproxy_records_void", self._reason(record.void)), 1)
            return
        self._connection(record.request, upstream)
        failed = record.ended != Ended.COMPLETE or status is None or status >= 400
        self._stream(record.events, model, upstream, downstream, failed)

    def more(self, key: Key, number: int) -> None:
        """Adds to a counter."""
        self.counters[key] = self.counters.get(key, 0) + number

    def _connection(self, request: RequestPart, upstream: UpstreamPart) -> None:
        if request.body_end is not None:
            self._value(_UPLOAD_DOWN, request.body_end)
        if upstream.write_start is not None and upstream.write_end is not None:
            self._value(_UPLOAD_UP, upstream.write_end - upstream.write_start)
        making_ns = 0
        for key, phase_ns in ((_DNS, upstream.dns), (_TCP, upstream.connect), (_TLS, upstream.tls)):
            if phase_ns is not None:
                self._value(key, phase_ns)
                making_ns += phase_ns
        if upstream.wanted is not None and upstream.acquired is not None:
            self._value(_POOL_WAIT, max(0, upstream.acquired - upstream.wanted - making_ns))

    def _stream(
        self, events: Events, model: str, upstream: UpstreamPart, downstream: DownstreamPart, failed: bool
    ) -> None:
        kinds, arrived, read_at, sent = events.kind, events.arrived, events.read_at, events.sent
        which = [index for index, kind in enumerate(kinds) if kind in TOKEN_KINDS]
        if arrived:
            self._list(_QUEUEING, map(sub, read_at, arrived))
            gone = len(sent) - sent.count(None)
            # Only the end of a stream goes unsent.
            self._list(_FORWARD, map(sub, sent[:gone], read_at[:gone]))
        if which:
            reads = [events.read[i] for i in which]
            alone = len(set(reads)) == len(reads)
            self._list(_PER_READ, [1] * len(reads) if alone else Counter(reads).values())
            self._list(_PER_EVENT, [n for n in [events.tokens[i] for i in which] if n is not None])
        failed = failed or "error" in kinds
        first = visible = last = -1
        if not failed and kinds:
            first = _index(kinds, _DATA)
            visible = _index(kinds, VISIBLE_KINDS)
            if which:
                last = len(kinds) - 1
                while kinds[last] not in LAST_KINDS:
                    last -= 1
        for keys, stamps, part in ((_UP, arrived, upstream), (_DOWN, sent, downstream)):
            tokens = [stamps[i] for i in which]
            if None in tokens:
                tokens = tokens[: tokens.index(None)]
            if len(tokens) > 1:
                self._list(keys.interval, map(sub, tokens[1:], tokens))
            if failed:
                continue
            self._first(keys.byte, part.first_byte)
            if first >= 0:
                self._first(keys.chunk, stamps[first])
            if tokens:
                first_ns = tokens[0]
                self._first(keys.token, first_ns)
                if visible >= 0:
                    self._first(keys.visible, stamps[visible])
                self._first(keys.duration, stamps[last])
                if keys is _DOWN and first_ns is not None:
                    self.more((MODEL_TTFT_COUNT, model), 1)
                    self.more((MODEL_TTFT_NS, model), first_ns)
            else:
                self._first(keys.duration, part.end)

    def _first(self, key: Key, value_ns: int | None) -> None:
        if value_ns is not None:
            self._value(key, value_ns)

    def _value(self, key: Key, value: int) -> None:
        self._waiting += 1
        kept = self._values.get(key)
        if kept is None:
            self._values[key] = [value]
        else:
            kept.append(value)

    def _list(self, key: Key, values: Iterable[int]) -> None:
        kept = self._values.get(key)
        if kept is None:
            kept = self._values[key] = []
        before = len(kept)
        kept.extend(values)
        self._waiting += len(kept) - before

    def settle(self) -> None:
        """Sorts what waits into buckets."""
        values, self._values, self._waiting = self._values, {}, 0
        for key, kept in values.items():
            self._histogram(key).add_many(kept)

    def _histogram(self, key: Key) -> Histogram:
        found = self.histograms.get(key)
        if found is None:
            found = self.histograms[key] = Histogram(ROWS[key[0]].bounds)
        return found

    # --- handing on ---

    def dump(self) -> dict[str, Any]:
        """The whole as plain JSON."""
        self.settle()
        return {
            "counters": [[*key, number] for key, number in self.counters.items()],
            "histograms": [
                [*key, one.total, [[i, n] for i, n in enumerate(one.counts) if n]]
                for key, one in self.histograms.items()
            ],
        }

    def add(self, dumped: dict[str, Any]) -> None:
        """Adds what another tally dumped."""
        for *names, number in dumped["counters"]:
            self.more(self._bounded(names), number)
        for *names, total, counts in dumped["histograms"]:
            self._histogram(self._bounded(names)).add_counts(counts, total)

    def _bounded(self, names: list[str]) -> Key:
        bound = self._bounds.get(names[0])
        if bound is not None:
            names[1] = bound(names[1])
        return tuple(names)
