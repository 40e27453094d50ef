"""What finished records add up to (``core.tally``), as Prometheus reads it, and the last of the records."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
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
from tapproxy.core.metrics import LAST_KINDS
from tapproxy.core.record import Record
from tapproxy.core.tally import COUNTERS, MODEL_TTFT_COUNT, MODEL_TTFT_NS, ROWS, Key, Tally

RING_RECORDS = 1000
RING_BYTES = 64 << 20


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
    """The sum of what all workers counted, and the last records. One process, one thread."""

    def __init__(self, name: str = "tap") -> None:
        self._name = name
        self.tally = Tally()
        self._ring: deque[Kept] = deque()
        self._ring_bytes = 0

    # --- counting ---

    def observe(self, record: Record) -> None:
        """Counts a record that no worker counted, and keeps it."""
        self.tally.count(record)
        self.keep(orjson.dumps(record))

    def keep(self, line: bytes) -> None:
        """Keeps a record, one JSON object, in the ring."""
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
        self.tally.settle()
        counted: dict[str, dict[Key, int]] = {name: {} for name in (*COUNTERS, MODEL_TTFT_COUNT, MODEL_TTFT_NS)}
        for (name, *values), number in self.tally.counters.items():
            counted[name][tuple(values)] = number
        for name, (text, labels) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            scale = 1e9 if name.endswith("_seconds") else 1
            if not labels:
                counted[name].setdefault((), 0)
            for label_values, number in counted[name].items():
                counter.add_metric(label_values, number / scale)
            yield counter
        summary = SummaryMetricFamily(
            "tapproxy_model_ttft_seconds", "First token event sent downstream, by model.", labels=["model"]
        )
        for model, number in counted[MODEL_TTFT_COUNT].items():
            summary.add_metric(model, count_value=number, sum_value=counted[MODEL_TTFT_NS][model] / 1e9)
        yield summary
        for row in ROWS.values():
            family = HistogramMetricFamily(row.name, row.help, labels=row.labels)
            for (name, *values), histogram in self.tally.histograms.items():
                if name == row.name:
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
    yield from _samples(status.get("samples") or {})


def _samples(status: Mapping[str, Any]) -> Iterator[Metric]:
    """What was read beside the traffic, by kind: engine, host, gpu, span."""
    for key, metric, text in (
        ("kept", "tapproxy_samples_total", "Samples of engines, of the host, of cards, and spans."),
        ("failed", "tapproxy_samples_failed_total", "Readings that gave no sample."),
    ):
        if status.get(key):
            counter = CounterMetricFamily(metric, text, labels=["kind"])
            for kind, number in sorted(status[key].items()):
                counter.add_metric([kind], number)
            yield counter
    lost = (status.get("store") or {}).get("lost")
    if lost is not None:
        yield CounterMetricFamily("tapproxy_samples_lost_total", "Samples lost on the way to the disk.", value=lost)


def _row(record: dict[str, Any]) -> tuple[str, ...]:
    """What the page shows of a record, as text, not yet escaped."""
    events = record["events"]
    tokens = [i for i, kind in enumerate(events["kind"]) if kind in LAST_KINDS]
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
