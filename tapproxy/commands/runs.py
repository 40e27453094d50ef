"""`tapproxy runs`: the register of kept comparisons. Parses, calls, prints; the register is ``tapproxy.load.runs``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tapproxy.commands import output
from tapproxy.core.errors import ConfigError
from tapproxy.load.runs import Kept, Register
from tapproxy.report import runs as text

runs = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="The register of kept comparisons: each run of `tapproxy compare`, under DIR/runs/ID.",
)

_Data = Annotated[Path, typer.Option(help="The data directory.")]
_Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout.")]
_DEFAULT = Path("tapproxy-data")


@runs.command("list")
def list_(data: _Data = _DEFAULT, json_file: _Json = None) -> None:
    """The kept runs, the oldest first."""
    found = [asdict(each) for each in Register(_there(data)).list()]
    _out({"schema": "tapproxy.runs/1", "runs": found}, json_file, text.listing(found))


@runs.command()
def show(
    run_id: Annotated[str, typer.Argument(metavar="ID", help="The run's id, or the beginning of one.")],
    data: _Data = _DEFAULT,
    json_file: _Json = None,
) -> None:
    """One run: what was asked, of what, and what came of it."""
    shown = _shown(Register(_there(data)).load(run_id))
    _out(shown, json_file, text.one(shown))


@runs.command()
def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="The earlier run.")],
    other: Annotated[str, typer.Argument(metavar="B", help="The later run.")],
    data: _Data = _DEFAULT,
    json_file: _Json = None,
) -> None:
    """What changed from run A to run B: in the settings, and in the numbers."""
    found = Register(_there(data)).diff(one, other)
    _out(found, json_file, text.difference(found))


def _there(data: Path) -> Path:
    if not data.is_dir():
        raise ConfigError(f"the data directory {str(data)!r} is not there: give the --data that `compare` was given")
    return data


def _shown(run: Kept) -> dict[str, Any]:
    return {
        "schema": "tapproxy.run/1",
        "id": run.id,
        "directory": str(run.directory),
        "started_unix_ns": run.started_unix_ns,
        "tapproxy": run.version,
        "asked": run.asked,
        "paths": run.paths,
        "client": run.client,
        "prompts_digest": run.prompts_digest,
        "interrupted": run.interrupted,
        "notes": run.notes,
        "environment": run.environment,
        "plan": run.plan,
        "comparison": run.comparison,
    }


def _out(value: dict[str, Any], json_file: str | None, lines: list[str]) -> None:
    output.show(value, json_file, lambda: typer.echo("\n".join(lines)))
