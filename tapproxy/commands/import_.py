"""`tapproxy import`: results of other load tools beside what a tap saw of the same requests.

Exit codes: 0 read, and joined where there are records; 2 the file is no result that is known here; 3 there are records,
and none of them is of a request in the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tapproxy.commands import output
from tapproxy.core.errors import ConfigError, MeasureError
from tapproxy.core.record import Record
from tapproxy.load.importers.reading import read
from tapproxy.load.importers.result import joined, result
from tapproxy.report import imported
from tapproxy.store import read_records

DEFAULT_DATA = Path("tapproxy-data")
# What aiperf puts beside its export.
_INPUTS = "inputs.json"


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The result file of the load tool.")],
    data: Annotated[
        Path | None,
        typer.Option(help="The data directory of the tap (or one file of records).  [default: tapproxy-data]"),
    ] = None,
    tap: Annotated[str | None, typer.Option(help="Only the records of the tap of this name.")] = None,
    pair_key: Annotated[
        str | None,
        typer.Option(envvar="TAPPROXY_PAIR_KEY", help="The tap's --pair-key: joins by the body where ids are missing."),
    ] = None,
    rows: Annotated[int, typer.Option(min=0, help="Single requests to list.")] = 10,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON; - is stdout.")
    ] = None,
) -> None:
    """Read results of vllm bench serve, aiperf or guidellm, and put each request beside the tap's record of it.

    Says how the tool's definitions differ from ours, and how sure it is of every join.
    """
    beside = file.with_name(_INPUTS)
    found = read(file, beside if pair_key is not None and beside.is_file() else None)
    records = _records(data)
    shown = {"file": str(file), **result(found, records, pair_key=_key(pair_key), tap=tap)}
    shown = {"schema": shown.pop("schema"), **shown}
    output.show(shown, json_file, lambda: typer.echo("\n".join(imported.lines(shown, rows))))
    if tap is not None and records and tap not in shown["taps"]:
        names = ", ".join(sorted({record.tap for record in records}))
        raise ConfigError(f"--tap {tap!r} has no records there; there are those of {names}")
    if records and not joined(shown):
        unsure = sum(tap["joined"]["unsure"] for tap in shown["taps"].values())
        raise MeasureError(
            (f"only {unsure} unsure joins: " if unsure else "")
            + f"none of the {len(shown['requests'])} requests could be joined to the {len(records)} records: the load "
            "went another way, or the records are gone; give the --data of a tap that it went through"
        )


def _key(pair_key: str | None) -> bytes | None:
    return pair_key.encode("utf-8", "surrogateescape") if pair_key else None


def _records(data: Path | None) -> list[Record]:
    """Without --data the usual directory, where there is one: a file can be read without a tap."""
    if data is None and not DEFAULT_DATA.is_dir():
        return []
    return list(read_records(data or DEFAULT_DATA))
