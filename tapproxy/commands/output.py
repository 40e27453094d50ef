"""Results on their way out: files first, then stdout, which may turn out to take nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import typer

from tapproxy.core.errors import ConfigError, MeasureError
from tapproxy.report import console


def show(value: dict[str, Any], json_file: str | None, screen: Callable[[], None]) -> None:
    """A result that costs nothing to have again: the JSON where it was asked for, else or beside it the screen.

    Raises ConfigError where the file cannot be written, MeasureError where stdout cannot.
    """
    if json_file not in (None, "-"):
        try:
            Path(str(json_file)).write_bytes(_json(value))
        except OSError as error:
            raise ConfigError(f"--json {json_file!r} cannot be written: {error.strerror}") from None
    with console.writing():
        if json_file == "-":
            typer.echo(_json(value), nl=False)
        else:
            screen()


def _json(value: dict[str, Any]) -> bytes:
    """As bytes: JSON is UTF-8, whatever the terminal's encoding."""
    return orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n"


def write(
    value: dict[str, Any],
    json_file: str | None,
    files: Mapping[str, Callable[[Path], object]],
    screen: Callable[[], None],
    troubles: Sequence[str] = (),
) -> None:
    """Everything that was asked for, files first. One that cannot be written does not take the others along.

    ``troubles``: what could not be written before. Raises MeasureError in the end where anything could not.
    """
    text = _json(value)
    wanted = dict(files)
    if json_file not in (None, "-"):
        wanted[str(json_file)] = lambda path: path.write_bytes(text)
    written, missing = [], list(troubles)
    for name, put in wanted.items():
        try:
            put(Path(name))
            written.append(name)
        except OSError as error:
            missing.append(f"{name!r} cannot be written: {error.strerror}")
    with console.writing(
        f"the result is in {' and '.join(written)}" if written else "with --json FILE it would be kept"
    ):
        if json_file == "-":
            typer.echo(text, nl=False)
        else:
            screen()
    if missing:
        raise MeasureError("measured, but " + "; ".join(missing))
