"""How the results of a comparison leave: the contract's JSON, files of requests, lines for the terminal, exit code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import typer

from tapproxy.commands import output
from tapproxy.commands.compare_points import Done, Outcome, settings_of
from tapproxy.load.export import write_csv, write_parquet
from tapproxy.load.trial import Trial
from tapproxy.report import comparison as report
from tapproxy.report import console

INTERRUPTED: Final = 130
_COULD_NOT_MEASURE: Final = 3


def show(outcome: Outcome, json_file: str | None, csv_file: Path | None, parquet_file: Path | None) -> int:
    """Writes everything and returns the exit code."""
    files: dict[str, Callable[[Path], object]] = {}
    for name, write in ((csv_file, write_csv), (parquet_file, write_parquet)):
        if name is not None:
            files |= _files(name, write, outcome.done, outcome.row)
    document = _document(outcome)
    output.write(document, json_file, files, lambda: typer.echo("\n".join(_lines(outcome))), outcome.unkept)
    if outcome.stopped is not None:
        typer.echo(f"tapproxy: the rest was not measured: {console.clean(outcome.stopped)}", err=True)
    if outcome.interrupted:
        typer.echo("tapproxy: interrupted; what was measured by then is shown and kept", err=True)
        return INTERRUPTED
    return _exit_code(outcome)


def _files(
    name: Path, write: Callable[[Path, Trial], None], done: list[Done], row: bool
) -> dict[str, Callable[[Path], object]]:
    """One file, or one for each point of a row, numbered."""

    def writer(trial: Trial) -> Callable[[Path], object]:
        return lambda path: write(path, trial)

    if not row:
        return {str(name): writer(each.trial) for each in done}
    return {
        str(name.with_name(f"{name.stem}-{number}{name.suffix}")): writer(each.trial)
        for number, each in enumerate(done, 1)
    }


def _document(outcome: Outcome) -> dict[str, Any]:
    if not outcome.row:
        shown: dict[str, Any] = outcome.done[0].comparison.to_dict()
        return shown
    found: dict[str, Any] = {"schema": "tapproxy.comparisons/1"}
    if outcome.rates is not None:
        found["find_rate"] = outcome.rates
    found["points"] = [
        {"setting": each.point.swept, "path": each.point.only, "comparison": each.comparison.to_dict()}
        for each in outcome.done
    ]
    found["interrupted"] = outcome.interrupted
    found["stopped"] = outcome.stopped
    return found


def _lines(outcome: Outcome) -> list[str]:
    out: list[str] = []
    if outcome.rates is None:
        for name, done in settings_of(outcome):
            if outcome.row:
                out += ["", f"== {name}"] if out else [f"== {name}"]
            out += report.lines(done.comparison)
            if done.kept is not None:
                out.append(f"kept as run {done.trial.id}")
        return out
    for path, found in outcome.rates.items():
        out.append(f"{path}: {_rate(found)}")
        out += [
            f"    {each['rate']:>10.4g}/s  {'met' if each['met'] else 'not met'}   run {each['run']}"
            for each in sorted(found["tried"], key=lambda each: float(each["rate"]))
        ]
    return out


def _rate(found: dict[str, Any]) -> str:
    best, missed = found["rate"], found["missed"]
    if best is None:
        return "no rate that was tried met the objectives" if found["tried"] else "could not be told"
    above = f"; {missed:.4g}/s does not" if missed is not None else "; no limit was found"
    return f"{best:.4g} requests per second meet the objectives{above}"


def _exit_code(outcome: Outcome) -> int:
    if outcome.rates is not None:
        return 0 if all(found["rate"] is not None for found in outcome.rates.values()) else _COULD_NOT_MEASURE
    codes = [int(each.comparison.exit_code) for each in outcome.done]
    return next((code for code in (1, _COULD_NOT_MEASURE) if code in codes), 0)
