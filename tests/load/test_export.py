"""The table of requests, read back by somebody else."""

from __future__ import annotations

import csv
from pathlib import Path

import duckdb
import pytest

from tapproxy.load.export import COLUMNS, write_csv, write_parquet
from tapproxy.load.trial import Trial
from tests.load.standin import answer, trial


def some() -> Trial:
    return trial(
        [
            answer(0, "direct", 0, warmup=True, start_ms=1_000, due_ms=1_000),
            answer(1, "direct", 1, ttft_ms=40, tokens=3, gap_ms=10, start_ms=2_005, due_ms=2_000),
            answer(2, "other", 1, failure="status", status=503, start_ms=3_000, due_ms=3_000),
        ],
        scenario="server",
        rate=1.0,
    )


def test_csv_has_a_row_a_request_and_unknown_is_empty(tmp_path: Path) -> None:
    write_csv(tmp_path / "requests.csv", some())
    with open(tmp_path / "requests.csv", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == list(COLUMNS)
    assert [(row["path"], row["warmup"]) for row in rows] == [
        ("direct", "true"),
        ("direct", "false"),
        ("other", "false"),
    ]
    good, failed = rows[1], rows[2]
    # Due 5 ms before it was sent.
    assert (good["latency_from"], good["late_ms"], good["ttft_ms"], good["ttft_from_sent_ms"]) == (
        "scheduled",
        "5.0",
        "45.0",
        "40.0",
    )
    assert (good["e2e_ms"], good["tpot_ms"], good["completion_tokens"], good["finish_reason"]) == (
        "65.0",
        "10.0",
        "3",
        "length",
    )
    assert (failed["failure"], failed["status"], failed["ttft_ms"], failed["tpot_ms"]) == ("status", "503", "", "")


def test_parquet_has_the_same_rows_with_types(tmp_path: Path) -> None:
    path = tmp_path / "it's.parquet"
    write_parquet(path, some())
    with duckdb.connect(":memory:") as connection:
        found = connection.execute(
            "SELECT path, warmup, ttft_ms, late_ms, completion_tokens FROM read_parquet(?) ORDER BY index", [str(path)]
        ).fetchall()
        names = [row[0] for row in connection.execute("DESCRIBE SELECT * FROM read_parquet(?)", [str(path)]).fetchall()]
    assert names == list(COLUMNS)
    assert found == [
        ("direct", True, 40.0, 0.0, 6),
        ("direct", False, 45.0, 5.0, 3),
        ("other", False, None, 0.0, None),
    ]
    assert [each.name for each in tmp_path.iterdir()] == ["it's.parquet"]


def test_a_name_that_cannot_be_written_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        write_parquet(tmp_path, some())
    with pytest.raises(OSError, match="No such file"):
        write_parquet(tmp_path / "none" / "x.parquet", some())
    with pytest.raises(OSError, match="No such file"):
        write_csv(tmp_path / "none" / "x.csv", some())


def test_what_a_spreadsheet_would_run_is_text(tmp_path: Path) -> None:
    write_csv(tmp_path / "x.csv", trial([answer(0, "direct", 0, model="=cmd()")]))
    assert "'=cmd()" in (tmp_path / "x.csv").read_text()


def test_no_request_at_all_is_a_table_without_rows(tmp_path: Path) -> None:
    nothing = trial([])
    write_csv(tmp_path / "x.csv", nothing)
    write_parquet(tmp_path / "x.parquet", nothing)
    assert (tmp_path / "x.csv").read_text().count("\n") == 1
    with duckdb.connect(":memory:") as connection:
        assert connection.execute("SELECT count(*) FROM read_parquet(?)", [str(tmp_path / "x.parquet")]).fetchone() == (
            0,
        )
