"""The requests of a run as a table, one row each: CSV, or Parquet for whoever asks further questions.

Rules here: numbers only, no prompt and no answer; times are ms, unknown is empty (null), and every column is the same
in both files. Warm-up is in it, marked.
"""

from __future__ import annotations

import csv
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import duckdb
import orjson

from tapproxy.core import metrics
from tapproxy.load.arms import Start, late_ns, start_of, values_ns
from tapproxy.load.sender import Result
from tapproxy.load.trial import Trial

_Cell = str | int | float | bool | None


def _ms(value_ns: float | None) -> float | None:
    return None if value_ns is None else value_ns / 1e6


def _latency(metric: str, start: Start | None = None) -> Callable[[Result, Start], _Cell]:
    def cell(result: Result, usual: Start) -> _Cell:
        if result.failure is not None:
            return None
        values = values_ns(result, metric, start or usual)
        return _ms(values[0]) if values else None

    return cell


def _gap_median(result: Result, _: Start) -> _Cell:
    gaps = sorted(metrics.icl_ns(result.record)) if result.failure is None else []
    return _ms(gaps[(len(gaps) - 1) // 2]) if gaps else None


# Column → its DuckDB type and its cell. ``latency_from`` says where the start of TTFT, TTFVT and E2E lies.
COLUMNS: Final[dict[str, tuple[str, Callable[[Result, Start], _Cell]]]] = {
    "path": ("VARCHAR", lambda r, _: r.slot.path),
    "index": ("BIGINT", lambda r, _: r.slot.index),
    "round": ("BIGINT", lambda r, _: r.slot.round),
    "warmup": ("BOOLEAN", lambda r, _: r.slot.warmup),
    "request_id": ("VARCHAR", lambda r, _: r.record.request_id),
    "response_id": ("VARCHAR", lambda r, _: r.record.response_id),
    "model": ("VARCHAR", lambda r, _: r.record.model),
    "sent_unix_ns": ("BIGINT", lambda r, _: r.record.t0_unix_ns),
    "late_ms": ("DOUBLE", lambda r, _: None if r.due_ns is None else _ms(late_ns(r))),
    "status": ("INTEGER", lambda r, _: r.record.status),
    "failure": ("VARCHAR", lambda r, _: r.failure),
    "error": ("VARCHAR", lambda r, _: r.error),
    "void": ("VARCHAR", lambda r, _: r.record.void),
    "latency_from": ("VARCHAR", lambda _, start: str(start)),
    "ttft_ms": ("DOUBLE", _latency("ttft_ms")),
    "ttfvt_ms": ("DOUBLE", _latency("ttfvt_ms")),
    "e2e_ms": ("DOUBLE", _latency("e2e_ms")),
    "ttft_from_sent_ms": ("DOUBLE", _latency("ttft_ms", Start.SENT)),
    "e2e_from_sent_ms": ("DOUBLE", _latency("e2e_ms", Start.SENT)),
    "tpot_ms": ("DOUBLE", _latency("tpot_ms")),
    "icl_p50_ms": ("DOUBLE", _gap_median),
    "prompt_tokens": ("BIGINT", lambda r, _: r.record.usage.prompt_tokens),
    "cached_tokens": ("BIGINT", lambda r, _: r.record.usage.cached_tokens),
    "completion_tokens": ("BIGINT", lambda r, _: r.record.usage.completion_tokens),
    "finish_reason": ("VARCHAR", lambda r, _: r.finish_reason),
    "events": ("BIGINT", lambda r, _: len(r.record.events.kind)),
    "reads": ("BIGINT", lambda r, _: len(set(r.record.events.read))),
    "body_bytes": ("BIGINT", lambda r, _: r.record.upstream.bytes),
    "reused": ("BOOLEAN", lambda r, _: r.record.upstream.reused),
    "dns_ms": ("DOUBLE", lambda r, _: _ms(r.record.upstream.dns)),
    "tcp_ms": ("DOUBLE", lambda r, _: _ms(r.record.upstream.connect)),
    "tls_ms": ("DOUBLE", lambda r, _: _ms(r.record.upstream.tls)),
}


def rows(trial: Trial) -> Iterator[dict[str, Any]]:
    """The requests in the plan's order."""
    start = start_of(trial.asked.scenario, trial.results)
    for result in sorted(trial.results, key=lambda result: result.slot.index):
        yield {name: cell(result, start) for name, (_, cell) in COLUMNS.items()}


def write_csv(path: Path, trial: Trial) -> None:
    """Writes the table with a line of headings. Raises OSError."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(COLUMNS), lineterminator="\n")
        writer.writeheader()
        writer.writerows({name: _text(value) for name, value in row.items()} for row in rows(trial))


def _text(value: _Cell) -> _Cell:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        # A spreadsheet would run what an engine or a proxy wrote.
        return "'" + value
    return value


def write_parquet(path: Path, trial: Trial) -> None:
    """Writes the table as Parquet; the file is there whole or not at all. Raises OSError."""
    columns = ", ".join(f"'{name}': '{kind}'" for name, (kind, _) in COLUMNS.items())
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(21, "Is a directory", str(path))
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tapproxy-") as folder:
        lines, whole = Path(folder) / "rows.jsonl", Path(folder) / "rows.parquet"
        with open(lines, "wb") as file:
            file.writelines(orjson.dumps(row) + b"\n" for row in rows(trial))
        with duckdb.connect(":memory:", config={"threads": 1}) as connection:
            try:
                connection.execute(
                    f"COPY (SELECT * FROM read_json({_quoted(lines)}, format = 'newline_delimited', "
                    f"columns = {{{columns}}})) TO {_quoted(whole)} (FORMAT parquet, COMPRESSION zstd)"
                )
            except duckdb.IOException as error:
                raise OSError(5, str(error), str(path)) from error
        os.replace(whole, path)


def _quoted(path: Path) -> str:
    return "'" + str(path).replace("'", "''") + "'"
