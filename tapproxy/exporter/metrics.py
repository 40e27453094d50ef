"""What finished records add up to, for Prometheus, and the last of them.

Rules here. Labels are bounded, whatever a client or an engine sends: no path, no id, and the first 20 model
names, the rest being ``other``. A value that is unknown is not counted, and a request that failed has no
latency. Histograms are our own and handed to prometheus-client as families when it asks: its own observe()
costs more for the events of one stream than all else here.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from operator import sub
from typing import Any

import orjson
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import choose_encoder

from tapproxy import __version__
from tapproxy.core.counts import TOKEN_KINDS
from tapproxy.core.histogram import Histogram
from tapproxy.core.metrics import VISIBLE_KINDS
from tapproxy.core.record import Record

MODELS_MAX = 20
RING_RECORDS = 1000
RING_BYTES = 64 << 20

_LAST_KINDS = TOKEN_KINDS | {"finish"}
_KNOWN_KEYS = frozenset(("schema", *(f.name for f in fields(Record))))

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
class _Row:
    """One histogram of the page. ``unit`` divides the integers kept: 1e9 makes ns seconds."""

    name: str
    help: str
    labels: tuple[str, ...]
    bounds: tuple[int, ...]
    unit: float = 1e9


_ROWS = {
    row.name: row
    for row in (
        _Row(
            "tapproxy_ttft_seconds",
            "First response body byte, data event of any kind, token event on any channel, or visible token "
            "event, since the first byte of the request; side: read from the upstream or sent downstream.",
            ("side", "kind"),
            _FIRST_NS,
        ),
        _Row(
            "tapproxy_request_duration_seconds",
            "Last token or finish event (a plain response: its end) since the first byte of the request.",
            ("side",),
            _DURATION_NS,
        ),
        _Row(
            "tapproxy_chunk_interval_seconds",
            "Gap between token events of one stream (ICL; 0 where one read held both).",
            ("side",),
            _INTERVAL_NS,
        ),
        _Row(
            "tapproxy_chunk_queueing_seconds",
            "How long an event had been in this host before the tap read it.",
            (),
            _HOP_NS,
        ),
        _Row(
            "tapproxy_chunk_forward_delay_seconds",
            "From the read that held an event to its bytes in the kernel's hands for the client.",
            (),
            _HOP_NS,
        ),
        _Row("tapproxy_upload_seconds", "The request: read from the client, written upstream.", ("side",), _FIRST_NS),
        _Row("tapproxy_pool_wait_seconds", "Waiting for an upstream connection, beyond making one.", (), _CONNECT_NS),
        _Row("tapproxy_connect_seconds", "Making an upstream connection, by phase.", ("phase",), _CONNECT_NS),
        _Row("tapproxy_events_per_read", "Token events that came in one read.", (), _COUNTS, 1),
        _Row("tapproxy_tokens_per_event", "Tokens of a token event, where known.", (), _COUNTS, 1),
    )
}

# name → help, labels
_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tapproxy_requests": ("Finished exchanges.", ("status_class", "ended", "stream")),
    "tapproxy_request_bytes": ("Request body bytes received.", ()),
    "tapproxy_response_bytes": ("Response body bytes, by side.", ("side",)),
    "tapproxy_tokens": ("Tokens by the engine's own count, where it gave one.", ("model", "type")),
    "tapproxy_downstream_stalled_seconds": ("Reading upstream was paused: the client's buffer was full.", ()),
    "tapproxy_findings": ("What stood out in exchanges, by rule.", ("rule",)),
    "tapproxy_records_void": ("Records whose timings are not counted here, and why.", ("reason",)),
    "tapproxy_records_unreadable": ("Records this page could not read.", ()),
}


class _Bounded:
    """The first ``limit`` values keep their name; the rest are ``other``."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def __call__(self, value: str | None) -> str:
        if value is None:
            return "unknown"
        value = value[:128]
        if value not in self._seen:
            if len(self._seen) >= self._limit:
                return "other"
            self._seen.add(value)
        return value


class Kept:
    """One record of the ring. Most are never looked at: only the line is kept, and read when somebody asks."""

    __slots__ = ("line",)

    def __init__(self, line: bytes) -> None:
        self.line = line

    def record(self) -> dict[str, Any]:
        """The record as an object."""
        found: dict[str, Any] = orjson.loads(self.line)
        return found

    def bears(self, any_id: str) -> bool:
        """Whether this is one of its ids: its own, the request's, the response's, the trace's."""
        # Without the search in the bytes a look-up would parse a thousand records.
        if orjson.dumps(any_id) not in self.line:
            return False
        record = self.record()
        return any_id in (record["id"], record["request_id"], record["response_id"], record["trace_id"])

    def row(self) -> tuple[str, ...]:
        """What the page shows."""
        return _row(self.record())


class Exporter:
    """Counts finished records. One process, one thread; ``observe`` is on the parent's loop and must be cheap."""

    def __init__(self, name: str = "tap") -> None:
        self._name = name
        self._histograms: dict[str, dict[tuple[str, ...], Histogram]] = {key: {} for key in _ROWS}
        self._counters: dict[str, Counter[tuple[str, ...]]] = {key: Counter() for key in _COUNTERS}
        self._model_ttft: dict[str, list[int]] = {}  # model → [count, total ns]
        self._model = _Bounded(MODELS_MAX)
        self._rule = _Bounded(100)
        self._reason = _Bounded(20)
        self._ring: deque[Kept] = deque()
        self._ring_bytes = 0

    # --- counting ---

    def observe(self, record: dict[str, Any], line: bytes | None = None) -> None:
        """Counts one record and keeps it in the ring. ``line``: the same as JSON, where it is at hand."""
        try:
            self._count(record)
            self._keep(record, line)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            # Another version's record must not take the process down that all workers report to.
            self._counters["tapproxy_records_unreadable"][()] += 1

    def _count(self, record: dict[str, Any]) -> None:
        counters = self._counters
        status, stream = record["status"], record["stream"]
        upstream, downstream = record["upstream"], record["downstream"]
        status_class = f"{status // 100}xx" if status is not None else "none"
        stream_label = "unknown" if stream is None else "true" if stream else "false"
        counters["tapproxy_requests"][status_class, record["ended"], stream_label] += 1
        counters["tapproxy_request_bytes"][()] += record["request"]["bytes"]
        counters["tapproxy_response_bytes"]["upstream",] += upstream["bytes"]
        counters["tapproxy_response_bytes"]["downstream",] += downstream["bytes"]
        counters["tapproxy_downstream_stalled_seconds"][()] += downstream["stalled_ns"]
        for rule in record["findings"]:
            counters["tapproxy_findings"][self._rule(rule),] += 1
        model = self._model(record["model"])
        for kind, tokens in (("prompt", "prompt_tokens"), ("completion", "completion_tokens")):
            if record["usage"][tokens] is not None:
                counters["tapproxy_tokens"][model, kind] += record["usage"][tokens]
        if record["void"] is not None:
            counters["tapproxy_records_void"][self._reason(record["void"]),] += 1
            return
        self._connection(record["request"], upstream)
        failed = record["ended"] != "complete" or status is None or status >= 400
        self._stream(record["events"], model, upstream, downstream, failed)

    def _connection(self, request: dict[str, Any], upstream: dict[str, Any]) -> None:
        if request["body_end"] is not None:
            self._histogram("tapproxy_upload_seconds", "downstream").add(request["body_end"])
        if upstream["write_start"] is not None and upstream["write_end"] is not None:
            self._histogram("tapproxy_upload_seconds", "upstream").add(upstream["write_end"] - upstream["write_start"])
        making_ns = 0
        for phase, key in (("dns", "dns"), ("tcp", "connect"), ("tls", "tls")):
            if upstream[key] is not None:
                self._histogram("tapproxy_connect_seconds", phase).add(upstream[key])
                making_ns += upstream[key]
        if upstream["wanted"] is not None and upstream["acquired"] is not None:
            waited_ns = upstream["acquired"] - upstream["wanted"] - making_ns
            self._histogram("tapproxy_pool_wait_seconds").add(max(0, waited_ns))

    def _stream(
        self, events: dict[str, Any], model: str, upstream: dict[str, Any], downstream: dict[str, Any], failed: bool
    ) -> None:
        kinds, arrived, read_at, sent = events["kind"], events["arrived"], events["read_at"], events["sent"]
        which = [index for index, kind in enumerate(kinds) if kind in TOKEN_KINDS]
        if arrived:
            self._histogram("tapproxy_chunk_queueing_seconds").add_many(map(sub, read_at, arrived))
            gone = len(sent) - sent.count(None)
            # Only the end of a stream goes unsent.
            self._histogram("tapproxy_chunk_forward_delay_seconds").add_many(map(sub, sent[:gone], read_at[:gone]))
        if which:
            self._histogram("tapproxy_events_per_read").add_many(Counter([events["read"][i] for i in which]).values())
            known = [n for n in [events["tokens"][i] for i in which] if n is not None]
            self._histogram("tapproxy_tokens_per_event").add_many(known)
        failed = failed or "error" in kinds
        for side, stamps, part in (("upstream", arrived, upstream), ("downstream", sent, downstream)):
            tokens = [stamps[i] for i in which]
            if None in tokens:
                tokens = tokens[: tokens.index(None)]
            if len(tokens) > 1:
                self._histogram("tapproxy_chunk_interval_seconds", side).add_many(map(sub, tokens[1:], tokens))
            if failed:
                continue
            self._first(side, "byte", part["first_byte"])
            if kinds:
                first = next((i for i, kind in enumerate(kinds) if kind != "comment"), None)
                self._first(side, "chunk", None if first is None else stamps[first])
            if tokens:
                self._first(side, "token", tokens[0])
                visible = next((i for i in which if kinds[i] in VISIBLE_KINDS), None)
                self._first(side, "visible", None if visible is None else stamps[visible])
                last = next(i for i in range(len(kinds) - 1, -1, -1) if kinds[i] in _LAST_KINDS)
                end_ns = stamps[last]
                if side == "downstream":
                    entry = self._model_ttft.setdefault(model, [0, 0])
                    entry[0] += 1
                    entry[1] += tokens[0]
            else:
                end_ns = part["end"]
            if end_ns is not None:
                self._histogram("tapproxy_request_duration_seconds", side).add(end_ns)

    def _first(self, side: str, kind: str, value_ns: int | None) -> None:
        if value_ns is not None:
            self._histogram("tapproxy_ttft_seconds", side, kind).add(value_ns)

    def _histogram(self, name: str, *labels: str) -> Histogram:
        found = self._histograms[name].get(labels)
        if found is None:
            found = self._histograms[name][labels] = Histogram(_ROWS[name].bounds)
        return found

    def _keep(self, record: dict[str, Any], line: bytes | None) -> None:
        if line is None or not record.keys() <= _KNOWN_KEYS:
            # Captured bodies, should a record hold some, are for the disk alone.
            line = orjson.dumps({key: value for key, value in record.items() if key in _KNOWN_KEYS})
        line = line.rstrip(b"\n")
        self._ring.append(Kept(line))
        self._ring_bytes += len(line)
        while len(self._ring) > RING_RECORDS or (self._ring_bytes > RING_BYTES and len(self._ring) > 1):
            self._ring_bytes -= len(self._ring.popleft().line)

    # --- showing ---

    def recent(self, limit: int = RING_RECORDS, any_id: str | None = None) -> list[Kept]:
        """The last records, newest first; with ``any_id`` those that bear it as id, request, response or trace id."""
        newest = reversed(self._ring)
        found = newest if any_id is None else (kept for kept in newest if kept.bears(any_id))
        return list(itertools.islice(found, limit))

    def render(self, status: Mapping[str, Any], accept: str = "") -> tuple[bytes, str]:
        """The metrics page and its content type."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(lambda: self._collect(status)))
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    def _collect(self, status: Mapping[str, Any]) -> Iterator[Metric]:
        yield from _process(self._name, status)
        for name, (text, labels) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            scale = 1e9 if name.endswith("_seconds") else 1
            if not labels:
                counter.add_metric((), self._counters[name][()] / scale)
            else:
                for values, number in self._counters[name].items():
                    counter.add_metric(values, number / scale)
            yield counter
        summary = SummaryMetricFamily(
            "tapproxy_model_ttft_seconds", "First token event sent downstream, by model.", labels=["model"]
        )
        for model, (count, total_ns) in self._model_ttft.items():
            summary.add_metric([model], count_value=count, sum_value=total_ns / 1e9)
        yield summary
        for row in _ROWS.values():
            family = HistogramMetricFamily(row.name, row.help, labels=row.labels)
            for values, histogram in self._histograms[row.name].items():
                family.add_metric(values, _buckets(histogram, row.unit), sum_value=histogram.total / row.unit)
            yield family


class _Collector:
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self.collect = collect


def _buckets(histogram: Histogram, unit: float) -> list[tuple[str, float]]:
    bounds = [*(str(bound / unit) for bound in histogram.bounds), "+Inf"]
    return list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))


# key of status() → metric, help, unit. Counters end in _total.
STATUS = (
    ("in_flight", "tapproxy_in_flight", "Exchanges going on now.", 1),
    ("connections", "tapproxy_connections", "Client connections open now.", 1),
    ("loop_lag_ns", "tapproxy_event_loop_lag_seconds", "Greatest lag of a worker's event loop, lately.", 1e9),
    ("gc_pause_ns", "tapproxy_gc_pause_seconds", "Greatest pause for garbage collection, lately.", 1e9),
    ("steal_share", "tapproxy_cpu_steal_ratio", "CPU time that this host wanted and others had, as a share.", 1),
    ("cpu_share", "tapproxy_worker_cpu_ratio", "CPU time of the busiest worker, as a share of one core.", 1),
    ("workers_alive", "tapproxy_workers", "Workers that accept connections.", 1),
    ("worker_restarts", "tapproxy_worker_restarts_total", "Workers started again after one died.", 1),
    ("records_written", "tapproxy_records_written_total", "Records written to disk.", 1),
    ("records_removed", "tapproxy_records_removed_total", "Records removed to stay within --max-disk.", 1),
)


def _process(name: str, status: Mapping[str, Any]) -> Iterator[Metric]:
    build = GaugeMetricFamily("tapproxy_build_info", "Version and name of this tap.", labels=["version", "tap"])
    build.add_metric([__version__, name], 1)
    yield build
    store = status.get("store") or {}
    known = {"records_written": store.get("written"), "records_removed": store.get("removed"), **status}
    for key, metric, text, unit in STATUS:
        value = known.get(key)
        if value is not None:
            family = CounterMetricFamily if metric.endswith("_total") else GaugeMetricFamily
            yield family(metric, text, value=value / unit)
    lost = CounterMetricFamily("tapproxy_records_lost_total", "Records lost, and where.", labels=["where"])
    for where, value in (("worker", status.get("outbox_lost")), ("disk", store.get("lost"))):
        if value is not None:
            lost.add_metric([where], value)
    yield lost


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    """What the page shows of a record, as text, not yet escaped."""
    events = record["events"]
    tokens = [i for i, kind in enumerate(events["kind"]) if kind in _LAST_KINDS]
    first_ns = next((events["sent"][i] for i in tokens if events["kind"][i] in TOKEN_KINDS), None)
    last_ns = events["sent"][tokens[-1]] if tokens else record["downstream"]["end"]
    began = datetime.fromtimestamp(record["t0_unix_ns"] / 1e9, UTC)
    return (
        f"{began:%Y-%m-%d %H:%M:%S}",
        record["id"],
        *("" if record[key] is None else str(record[key])[:80] for key in ("method", "path", "model", "status")),
        record["ended"] + (f" (void: {record['void']})" if record["void"] else ""),
        _ms(first_ns),
        _ms(last_ns),
        str(len(events["kind"])),
        ", ".join(record["findings"]),
    )


def _ms(value_ns: int | None) -> str:
    return "" if value_ns is None else f"{value_ns / 1e6:.1f}"
