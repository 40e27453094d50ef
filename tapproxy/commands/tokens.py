"""`tapproxy tokens`: how many tokens the prompts of a file have, and what an API process pays for them on this host.

Exit codes: 0 measured; 2 the file, the tokenizer or the template cannot be read; 3 no prompt could be measured.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import Progress

from tapproxy.commands import output
from tapproxy.core.errors import MeasureError
from tapproxy.load import asked as asked_
from tapproxy.load import template as template_
from tapproxy.load import tokencost
from tapproxy.load.asked import Batch
from tapproxy.load.limits import Running, bounded
from tapproxy.load.template import Template
from tapproxy.load.tokencost import Measured
from tapproxy.load.tokens import Local
from tapproxy.report import tokencost as screen

SCHEMA: Final = "tapproxy.tokens/1"
_IDS: Final = "they are lists of token ids, which cost no tokenising"
_EMPTY: Final = "nothing is in them"
_REFUSED: Final = "the chat template refused them, "


def tokens(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="Chat requests or prompts: JSON lines, or a line of plain text each."),
    ],
    tokenizer: Annotated[
        Path,
        typer.Option(metavar="DIR", help="The model's directory: tokenizer.json, and its chat template."),
    ],
    as_chat: Annotated[
        bool, typer.Option("--as-chat", help="Take plain prompts as a user's message, by way of the chat template.")
    ] = False,
    budget: Annotated[
        float, typer.Option(min=0.1, metavar="SECONDS", help="Measure for so long at most; what is left is said.")
    ] = 60.0,
    seed: Annotated[int, typer.Option(help="The order in which prompts are measured.")] = 1,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON; - is stdout.")
    ] = None,
) -> None:
    """Count the tokens of a file's prompts and time the chat template and the tokenizer on this host, on one core.

    That is what an engine's API process does with each request before its scheduler sees it. Prompts are never shown.
    """
    counter = Local(tokenizer)
    batch = asked_.read(file, as_chat=as_chat)
    running = Running()
    with bounded(running):
        made = template_.of(tokenizer, running)
        measured, interrupted = _measure(batch, counter, made, budget, seed)
    if interrupted and not measured.costs:
        raise KeyboardInterrupt
    if not measured.costs:
        why = [f"{number}: {word}" for word, number in _not_measured(batch, measured).items()]
        raise MeasureError("no prompt could be measured: " + ("; ".join(why) or "the time was up (--budget)"))
    shown = document(file, counter, made, batch, measured)
    if interrupted:
        shown["warnings"].append("interrupted: what was measured until then is shown")
    output.show(shown, json_file, lambda: typer.echo("\n".join(screen.lines(shown))))
    if interrupted:
        typer.echo("tapproxy: interrupted", err=True)
        raise typer.Exit(130)


def _measure(batch: Batch, counter: Local, made: Template | None, budget_s: float, seed: int) -> tuple[Measured, bool]:
    """What was measured, and whether Ctrl-C ended it."""
    state = Measured()
    console = Console(stderr=True)
    try:
        with Progress(console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
            bar = progress.add_task("prompts", total=len(batch.asked))
            for state in tokencost.measure(batch.asked, counter, made, budget_s=budget_s, seed=seed):
                progress.update(bar, completed=len(state.costs) + sum(state.refused.values()))
    except KeyboardInterrupt:
        return state, True
    return state, False


def document(file: Path, counter: Local, made: Template | None, batch: Batch, measured: Measured) -> dict[str, Any]:
    """The result as JSON."""
    chat = [each for each in batch.asked if each.messages]
    found = tokencost.result(measured)
    warnings = found.pop("warnings")
    if chat and made is None:
        warnings.append("no chat template is in that directory: of conversations the contents alone were counted")
    not_text = sum(each.not_text for each in batch.asked)
    if not_text:
        warnings.append(f"{not_text} parts that are no text (pictures, sound) have tokens that are not counted")
    return {
        "schema": SCHEMA,
        "file": file.name,
        "tokenizer": counter.name.removeprefix("tokenizer "),
        "template": None if made is None else made.source,
        "cores": os.cpu_count(),
        "prompts": {
            "read": len(batch.asked) + batch.token_ids + batch.empty,
            "chat": len(chat),
            "plain": len(batch.asked) - len(chat),
            "with_tools": sum(1 for each in chat if each.tools),
            "not_measured": _not_measured(batch, measured),
        },
        **found,
        "warnings": warnings,
    }


def _not_measured(batch: Batch, measured: Measured) -> dict[str, int]:
    """Why → how many."""
    found = Counter({_REFUSED + how: number for how, number in measured.refused.items()})
    found[_IDS] += batch.token_ids
    found[_EMPTY] += batch.empty
    return {why: number for why, number in found.items() if number}
