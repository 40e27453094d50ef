"""The effect that a scenario put in: from its settings, from the simulator's own log, or from the clients' figures on
the path without the fault. Never from a tap.

Rules here: a median over the counted requests; too few of them: None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import orjson

from tapproxy.core import metrics, stats
from tapproxy.core.record import Record
from tapproxy.simulate.scenarios.parts import Known, Truth

Row = Mapping[str, Any]

# Column → ns, one for each request that it is about.
COLUMNS: Final[Mapping[str, Callable[[Sequence[Row]], list[float]]]] = {
    "frontend": lambda rows: [row["queued_ns"] for row in rows],
    "queue": lambda rows: [row["scheduled_ns"] - row["queued_ns"] for row in rows],
    "prefill": lambda rows: [row["first_ns"] - row["scheduled_ns"] for row in rows],
    "engine": lambda rows: [row["first_ns"] for row in rows],
    "decode": lambda rows: [row["last_ns"] - row["first_ns"] for row in rows],
    "tpot": lambda rows: [(row["last_ns"] - row["first_ns"]) / max(1, row["output_tokens"] - 1) for row in rows],
    "blocked": lambda rows: _blocked(rows),
}
# Metric → ns of a client's record.
METRICS: Final[Mapping[str, Callable[[Record], float | None]]] = {
    "ttft": metrics.ttft_ns,
    "tpot": metrics.tpot_ns,
    "e2e": metrics.e2e_ns,
    "icl": lambda record: median(gaps) if (gaps := metrics.icl_ns(record)) else None,
}

# Metric → the column of the simulator's log that the path has no part in.
OF_ENGINE: Final[Mapping[str, str]] = {"ttft": "first_ns", "e2e": "last_ns"}


def staged_ms(truth: Truth | None, log: Path, path: Sequence[Record], clean: Sequence[Record]) -> float | None:
    """The effect at P50 in ms. ``path``, ``clean``: the client's records. None where it is not known."""
    if truth is None or truth.known is Known.GIVEN:
        return None if truth is None else truth.ms
    if truth.known is Known.ENGINE:
        counted = {record.response_id for record in path}
        rows = [row for row in read(log) if row["response_id"] in counted]
        value_ms = _ms(COLUMNS[truth.of or truth.metric](rows))
        return None if value_ms is None else round(value_ms - truth.less_ms, 3)
    by_id = {row["response_id"]: row for row in read(log)}
    with_fault, without = (_figure(truth.metric, records, by_id) for records in (path, clean))
    return None if with_fault is None or without is None else round(with_fault - without, 3)


def read(log: Path) -> list[Row]:
    """The lines of requests that got a token; a last one that was cut off is left out."""
    try:
        lines = log.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    rows = [orjson.loads(line) for line in lines]
    return [row for row in rows if row["first_ns"] is not None]


def _blocked(rows: Sequence[Row]) -> list[float]:
    """Of short prompts that came while a long one (the longest there are) was computed: how much longer they took to
    their first token than the other short ones."""
    most = max(row["prompt_tokens"] for row in rows)
    longs = [row for row in rows if row["prompt_tokens"] > most / 2]
    spans = [(row["arrival_ns"] + row["scheduled_ns"], row["arrival_ns"] + row["first_ns"]) for row in longs]
    shorts = [row for row in rows if row["prompt_tokens"] <= most / 2]
    met = [any(start <= row["arrival_ns"] < end for start, end in spans) for row in shorts]
    free = stats.percentile([row["first_ns"] for row, did in zip(shorts, met, strict=True) if not did], 0.5)
    return [row["first_ns"] - (free or 0) for row, did in zip(shorts, met, strict=True) if did]


def _figure(metric: str, records: Sequence[Record], rows: Mapping[str, Row]) -> float | None:
    """The client's figure, request by request less the engine's own time: what the engine took of one and not of
    another is no matter of the path."""
    values = []
    for record in records:
        value = METRICS[metric](record)
        row = rows.get(record.response_id or "")
        if value is not None:
            values.append(value - (row[OF_ENGINE[metric]] if row is not None and metric in OF_ENGINE else 0))
    return _ms(values)


def _ms(values_ns: Sequence[float]) -> float | None:
    middle = stats.percentile(values_ns, 0.5)
    return None if middle is None else round(middle / 1e6, 3)
