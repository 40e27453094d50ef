"""`tapproxy`: parses, calls a command, and turns how it ended into one sentence and an exit code.

Rules here. A command's module is imported when the command is invoked and not before, so help is quick. Nobody
sees a traceback who did not ask for one (TAPPROXY_DEBUG=1).

Exit codes: 0 done; 1 done with an error found (the command says so); 2 wrong usage or configuration; 3 could
not measure, or a fault of our own; 130 interrupted.
"""

from __future__ import annotations

import importlib
import keyword
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer
import typer.core

from tapproxy import __version__
from tapproxy.core.errors import ConfigError, MeasureError

# Command → its line in the help. Module and function bear the command's name, with a _ where that is a keyword.
# A Typer of that name is a command with commands of its own.
COMMANDS = {
    "demo": "A simulated engine behind a real nginx, on loopback: compare the paths, print the verdict.",
    "serve": "The tap: forward to an upstream unchanged, and measure every stream.",
    "compare": "The same load over several paths: a difference you can defend, or why there is none.",
    "check": "Check nginx configuration for what breaks streaming.",
    "probe": "Measure a deployed proxy between here and a tap, with a calibrated stream.",
    "import": "Results of other load tools (vLLM bench, aiperf, guidellm) beside a tap's records.",
    "runs": "The register of kept comparisons: list, show, diff.",
    "simulate": "The simulated engine on its own.",
    "tokens": "Token counts, and the time of template and tokenising, of a file's prompts on this host.",
    "purge": "Remove records, samples and runs, by age or all, saying what was removed.",
}

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class _Lazy(typer.core.TyperGroup):
    """Lists commands from the table; makes one when it is invoked."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        if self._listing:
            return typer.core.TyperCommand(cmd_name, short_help=COMMANDS[cmd_name], rich_markup_mode=None)
        name = cmd_name + "_" * keyword.iskeyword(cmd_name)
        made = getattr(importlib.import_module(f"tapproxy.commands.{name}"), name)
        if isinstance(made, typer.Typer):
            return typer.main.get_command(made)
        alone = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=_CONTEXT)
        alone.command(cmd_name)(made)
        return typer.main.get_command(alone)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


app = typer.Typer(
    cls=_Lazy,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings=_CONTEXT,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tapproxy {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    """My tokens are late: is it the engine, the proxy, the network or the client, and what do I change?"""


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command line; returns its exit code."""
    try:
        # Not by calling the command: its own main() would answer Ctrl-C and closed pipes in its way.
        with typer.main.get_command(app).make_context("tapproxy", list(arguments)) as context:
            context.command.invoke(context)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:
        # Whoever read our output has left (`| head`). Python would complain once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except BaseException as error:
        return _ended(_cause(error))


def _cause(error: BaseException) -> BaseException:
    """Of a group (asyncio.TaskGroup) what the user can do something about, else the first."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    ours = error.subgroup((ConfigError, MeasureError, KeyboardInterrupt))
    return _cause((ours or error).exceptions[0])


def _ended(error: BaseException) -> int:
    if isinstance(error, typer.Exit):
        return error.exit_code
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 3
    if os.environ.get("TAPPROXY_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        _say("interrupted")
        return 130
    if isinstance(error, ConfigError):
        _say(str(error))
        return 2
    if isinstance(error, MeasureError):
        _say(str(error))
        return 3
    if hasattr(error, "show") and hasattr(error, "exit_code"):  # typer's own: a wrong option, a missing argument
        error.show()
        return int(error.exit_code)
    _say(f"{type(error).__name__}: {error} (a fault of tapproxy; set TAPPROXY_DEBUG=1 for the traceback)")
    return 3


def _say(sentence: str) -> None:
    typer.echo("tapproxy: " + " ".join(sentence.split()), err=True)


if __name__ == "__main__":
    main()
