"""``tapproxy demo``: a simulated engine behind a real nginx, on loopback; compare the paths, print the verdict.

Rules here: stdout carries the result and nothing else (the screen, or the JSON with ``--json -``); progress goes to
stderr, and only where that is a terminal. Files are written before stdout, which may turn out to take nothing. Ctrl-C
or SIGTERM ends the load, and what was measured by then is concluded on; the stage is cleared before anything is
printed.
"""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
import uvloop

from tapproxy.commands import output
from tapproxy.core.errors import ConfigError, MeasureError
from tapproxy.report import console, html, terminal
from tapproxy.simulate import scenarios
from tapproxy.simulate.scenarios import SCENARIOS, Scenario

ALL = "all"
# Requests on each of the four paths of a scenario that has them, among all.
AMONG_MANY = 40
INTERRUPTED = 130
_EXIT_CODES = {"healthy": 0, "degraded": 1}
_COULD_NOT_MEASURE = 3


def demo(
    scenario: Annotated[
        str, typer.Option(help="What to stage; see --list. all: one after another.")
    ] = scenarios.DEFAULT,
    list_: Annotated[bool, typer.Option("--list", help="List the scenarios and end.")] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the verdict as JSON; - is stdout.")
    ] = None,
    html_file: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write the result as one self-contained page; not to stdout."),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="Requests on each path; without it each scenario has its own number."),
    ] = None,
) -> None:
    """Run the same requests over four paths to a simulated engine, and say which of them is slow and why.

    The default scenario is an nginx that holds the stream, so it exits 1.
    """
    if list_:
        with console.writing():
            typer.echo(listed())
        return
    chosen = _chosen(scenario)
    console.refuse_unwritable("--json", json_file)
    if str(html_file) == "-":
        raise ConfigError("--html does not write to stdout: the page is a file of some MB, so give it a name")
    console.refuse_unwritable("--html", html_file)
    if scenario == ALL and html_file is not None:
        raise ConfigError("--html shows one scenario: name it with --scenario")
    # uvloop, as in the tap: what the client takes of a core is missing elsewhere on a small machine.
    with console.Progress() as progress, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        results = runner.run(_run(chosen, requests, progress.show))
    raise typer.Exit(_all(results, len(chosen), json_file) if scenario == ALL else _one(results, json_file, html_file))


def _chosen(name: str) -> list[Scenario]:
    if name == ALL:
        return list(SCENARIOS.values())
    if name not in SCENARIOS:
        raise ConfigError(f"--scenario {name!r} is unknown; there are {', '.join(SCENARIOS)} and {ALL}")
    return [SCENARIOS[name]]


async def _run(chosen: list[Scenario], requests: int | None, progress: scenarios.Progress) -> list[dict[str, Any]]:
    """The results until the first that was interrupted, that one included if it measured anything."""
    enough = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Only ever asks for the end. Clearing the stage takes a few seconds at most, and is not cut short.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            asyncio.get_running_loop().add_signal_handler(number, enough.set)
    results: list[dict[str, Any]] = []
    for together in scenarios.batches(chosen):
        running = [_each(scenario, len(chosen), requests, enough, progress) for scenario in together]
        found = [result for result in await asyncio.gather(*running) if result is not None]
        results += found
        if enough.is_set():
            for result in found:
                result["interrupted"] = True
            break
    return results


async def _each(
    scenario: Scenario, many: int, requests: int | None, enough: asyncio.Event, progress: scenarios.Progress
) -> dict[str, Any] | None:
    """One of them; None where it was interrupted before anything was measured."""
    try:
        return await scenarios.run(scenario, _number(scenario, requests, many), enough, progress)
    except scenarios.Interrupted:
        return None
    except scenarios.Skipped as why:
        if many == 1:
            raise MeasureError(f"{scenario.name} cannot be staged here: {why}") from None
        return scenarios.skipped(scenario, str(why))
    except MeasureError as why:
        if many == 1:
            raise
        return scenarios.failed(scenario, str(why))


def _number(scenario: Scenario, requests: int | None, chosen: int) -> int | None:
    """Enough for a median where there are many to run; alone, the scenario's own, which gives a P95 as well."""
    return AMONG_MANY if requests is None and chosen > 1 and scenario.setting is None else requests


def _one(results: list[dict[str, Any]], json_file: str | None, html_file: Path | None) -> int:
    if not results:
        typer.echo("tapproxy: interrupted before anything was measured", err=True)
        return INTERRUPTED
    result = results[0]
    shown = {**result, "timelines": _typical(result["timelines"])}
    output.write(
        shown,
        json_file,
        {str(html_file): lambda path: html.write(result, path)} if html_file is not None else {},
        lambda: terminal.show(result, console.stdout()),
    )
    if result["interrupted"]:
        if json_file == "-":
            done, wanted = result["requests"]["done"], result["requests"]["wanted"]
            typer.echo(f"tapproxy: interrupted; {done} of {wanted} requests were measured", err=True)
        return INTERRUPTED
    return _EXIT_CODES.get(result["verdict"], _COULD_NOT_MEASURE)


def _typical(timelines: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """One request of each path: the picture of the screen. All of them would be most of the file."""
    return {path: [each for each in requests if each["typical"]] for path, requests in timelines.items()}


def listed() -> str:
    """Every scenario with what it stages, in groups of one kind of cause each."""
    width = max(map(len, SCENARIOS))
    groups: dict[str, list[str]] = {}
    for each in SCENARIOS.values():
        staged = " + ".join((each.staged, *each.also))
        groups.setdefault(group(each.staged), []).append(f"  {each.name:<{width}}  {each.title} → {staged}")
    return "\n".join(line for name, lines in groups.items() for line in (name, *lines))


def group(staged: str) -> str:
    """The kind of a cause: its first word; what is no cause stands for itself."""
    return staged.partition(".")[0].replace("_", " ")


def _all(results: list[dict[str, Any]], wanted: int, json_file: str | None) -> int:
    left_out = [{"scenario": each["skipped"], "because": each["because"]} for each in results if "skipped" in each]
    whole = [result for result in results if "skipped" not in result and not result["interrupted"]]
    entries = [result["entry"] if "entry" in result else scenarios.effects(result) for result in whole]
    shown = {"schema": "tapproxy.scenarios/1", "scenarios": entries, "skipped": left_out}
    output.write(shown, json_file, {}, lambda: terminal.show_scenarios(entries, console.stdout()))
    for each in left_out:
        typer.echo(f"tapproxy: {each['scenario']} was left out: {each['because']}", err=True)
    for entry in entries:
        if "because" in entry:
            typer.echo(f"tapproxy: {entry['scenario']} could not be measured: {entry['because']}", err=True)
    if len(whole) + len(left_out) < wanted:
        typer.echo(f"tapproxy: interrupted; {len(whole)} of {wanted} scenarios were measured", err=True)
        return INTERRUPTED
    if not entries:
        return _COULD_NOT_MEASURE
    return 0 if all(entry["named"] == entry["staged"] for entry in entries) else 1
