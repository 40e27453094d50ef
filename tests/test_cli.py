"""The command line: help, exit codes, and one sentence for what went wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from tapproxy import __version__, cli
from tapproxy.core.errors import ConfigError, MeasureError


def tapproxy(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tapproxy.cli", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "120", **environ},
    )


def test_help_lists_the_commands_with_a_line_each() -> None:
    done = tapproxy("--help")
    assert (done.returncode, done.stderr) == (0, "")
    listed = done.stdout.partition("Commands:\n")[2].split("\n")
    assert [line.split()[0] for line in listed if line[:3].strip()] == list(cli.COMMANDS)
    assert "..." not in done.stdout.partition("Commands:")[2]


def test_help_imports_no_command_and_nothing_slow() -> None:
    source = (
        "import sys; from tapproxy import cli; cli.run(['--help']);"
        "print([m for m in sys.modules if m.startswith('tapproxy.commands') or m in "
        "('asyncio', 'rich', 'uvicorn', 'starlette', 'jinja2', 'orjson')])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_command_listed_is_there_and_has_help(command: str) -> None:
    done = tapproxy(command, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"Usage: tapproxy {command} [OPTIONS]" in done.stdout


def test_the_version() -> None:
    assert tapproxy("--version").stdout == f"tapproxy {__version__}\n"


def test_no_command_is_wrong_usage_and_shows_the_help() -> None:
    done = tapproxy()
    assert done.returncode == 2
    assert "Commands:" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["nonsense"], "No such command 'nonsense'", id="unknown_command"),
        pytest.param(["purge", "--nonsense"], "No such option: --nonsense", id="unknown_option"),
        pytest.param(["purge", "--data"], "requires an argument", id="missing_value"),
        pytest.param(
            ["purge", "--all", "--data", "/nonexistent"],
            "tapproxy: the data directory '/nonexistent' cannot be purged: No such file or directory; "
            "give the --data of the tap",
            id="configuration",
        ),
        pytest.param(
            ["serve"],
            "tapproxy: no upstream is given: say where the engine listens, as --upstream http://127.0.0.1:8000",
            id="no_upstream",
        ),
        pytest.param(
            ["serve", "--upstream", "localhost:8000"],
            "tapproxy: --upstream is 'localhost:8000', which has no scheme: write http://localhost:8000",
            id="no_scheme",
        ),
        pytest.param(
            ["serve", "--upstream", "http://u", "--workers", "many"], "Invalid value for '--workers'", id="not_a_number"
        ),
    ],
)
def test_wrong_usage_and_configuration_exit_2_with_a_sentence(arguments: list[str], said: str) -> None:
    done = tapproxy(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def _raises(error: BaseException) -> Callable[[], None]:
    def planted() -> None:
        raise error

    return planted


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        pytest.param(ConfigError("a b"), 2, "tapproxy: a b\n", id="configuration"),
        pytest.param(MeasureError("nothing\nanswers"), 3, "tapproxy: nothing answers\n", id="measurement"),
        pytest.param(KeyboardInterrupt(), 130, "tapproxy: interrupted\n", id="ctrl_c"),
        pytest.param(typer.Exit(1), 1, "", id="a_finding"),
        pytest.param(typer.Exit(130), 130, "", id="interrupted_and_said_so"),
        pytest.param(SystemExit(3), 3, "", id="system_exit"),
        pytest.param(
            ZeroDivisionError("oops"),
            3,
            "tapproxy: ZeroDivisionError: oops (a fault of tapproxy; set TAPPROXY_DEBUG=1 for the traceback)\n",
            id="our_fault",
        ),
        pytest.param(
            BaseExceptionGroup("tasks", [ValueError("first"), ExceptionGroup("inner", [MeasureError("m")])]),
            3,
            "tapproxy: m\n",
            id="ours_within_a_group",
        ),
        pytest.param(typer.BadParameter("no such thing"), 2, "Error: Invalid value: no such thing", id="typers_own"),
    ],
)
def test_how_a_command_ends_is_an_exit_code_and_a_sentence(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TAPPROXY_DEBUG", raising=False)
    planted = typer.Typer(add_completion=False, rich_markup_mode=None)
    planted.command()(_raises(error))
    monkeypatch.setattr(cli, "app", planted)
    assert cli.run([]) == code
    assert said in capsys.readouterr().err


def test_the_traceback_is_shown_to_who_asks_for_it() -> None:
    done = tapproxy("purge", TAPPROXY_DEBUG="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("tapproxy: say what to remove")


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    script = f"{sys.executable} -m tapproxy.cli purge --all --json - --data {tmp_path} | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.strip() in ("0", "141")
