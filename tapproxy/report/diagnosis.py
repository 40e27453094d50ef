"""A diagnosis as one screen of text: the verdict first, then cause, evidence, rivals, advice, and where the time goes.

Rules here: nothing is computed; colour only repeats what a word or a sign says; every string of the result is printed
as plain text, control characters taken out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tapproxy.report import judgement
from tapproxy.report.console import can_unicode, clean, heading, verdict_sign, verdict_style
from tapproxy.report.diagnosed import Block, tables
from tapproxy.report.figures import at, number, quantity, share

MAX_WIDTH: Final = 110
_INDENT: Final = (0, 0, 0, 2)
_BUDGETS: Final = (("ttft", "TTFT"), ("tpot", "TPOT"))
# Causes after the first that are told in full; the rest have a line each.
_IN_FULL: Final = 2
_SHARED_MS: Final = 0.05
# The name of a row; a model's may be as long as anybody likes.
_NAME_MOST: Final = 36


def show(result: Mapping[str, Any], console: Console) -> None:
    """Prints the whole screen."""
    width = min(console.width, MAX_WIDTH)
    plain = not can_unicode(console)
    blocks: list[RenderableType | None] = [
        _title(result),
        _verdict(result, plain),
        *(_cause(cause) for cause in (at(result, "causes") or [])[:_IN_FULL]),
        _others(result),
        *(_budget(result, key, title, width, plain) for key, title in _BUDGETS),
        _unseen(result),
        *(_block(block, plain) for block in tables(result)),
        _notes(result),
    ]
    for index, block in enumerate(block for block in blocks if block is not None):
        if index:
            console.print()
        console.print(block, width=width, markup=False, highlight=False)


def _title(result: Mapping[str, Any]) -> RenderableType:
    scenario = at(result, "scenario") or {}
    head = Text.assemble(
        ("tapproxy", "bold"),
        f" {clean(scenario.get('command', ''))} · ",
        (clean(scenario.get("name", "")), "bold"),
        f": {clean(scenario.get('title', ''))}",
    )
    return Group(head, *(Text(clean(line), style="dim") for line in scenario.get("setting", [])))


def _verdict(result: Mapping[str, Any], plain: bool) -> RenderableType:
    word = str(at(result, "verdict") or "not_measured")
    line = Text().append(f"{verdict_sign(result, plain)} {word.replace('_', ' ').upper()}", style=verdict_style(result))
    causes = at(result, "causes") or []
    # What is only worth knowing is told below, and is no headline of its own.
    if causes and causes[0].get("severity") != "info":
        line.append("  " + clean(causes[0].get("cause", "")), style="bold")
        if causes[0].get("metric"):
            line.append(f"  {judgement.effect(causes[0])}")
    return line


def _cause(cause: Mapping[str, Any]) -> RenderableType:
    """Evidence, rivals and advice of one cause."""
    lines: list[RenderableType] = [
        Text.assemble(
            (clean(cause.get("cause", "")), "bold"),
            (f"  {clean(cause.get('severity', ''))}", "dim"),
            (f", stage {clean(cause['stage'])}" if cause.get("stage") else "", "dim"),
            (f", confidence {share(cause.get('confidence'))}", "dim"),
        )
    ]
    body: list[RenderableType] = [_fact(item) for item in cause.get("evidence") or []]
    for item in cause.get("rejected") or []:
        body.append(Text.assemble(("not ", "dim"), clean(item.get("cause", "")), f": {clean(item.get('because', ''))}"))
    advice = clean(cause.get("advice") or "")
    if advice:
        body.append(Text.assemble(("→ ", "bold"), advice))
    return Group(*lines, Padding(Group(*body), _INDENT))


def _fact(item: Mapping[str, Any]) -> Text:
    unit = clean(item.get("unit") or "")
    extras = [
        f"{word}{quantity(item[key], unit if key == 'threshold' else None)}"
        for word, key in (("threshold ", "threshold"), ("n=", "n"))
        if item.get(key) is not None
    ]
    extra = f" ({', '.join(extras)})" if extras else ""
    return Text.assemble(
        "· ", (clean(item.get("what", "")) + ": ", "dim"), (quantity(item.get("value"), unit), "bold"), extra
    )


def _others(result: Mapping[str, Any]) -> RenderableType | None:
    rest = (at(result, "causes") or [])[_IN_FULL:]
    if not rest:
        return None
    return Group(*(Text(f"also {clean(cause.get('cause', ''))}: {judgement.effect(cause)}") for cause in rest))


def _budget(result: Mapping[str, Any], key: str, title: str, width: int, plain: bool) -> RenderableType | None:
    """The stages of one metric at P50 and P95, with shares, bounds and sources; they add up to the last line."""
    bands = {name: at(result, "budget", key, name) for name in ("p50", "p95")}
    median = bands["p50"]
    if at(median, "total_ms") is None:
        return None
    stages = [name for name, part in (at(median, "stages") or {}).items() if part is not None]
    more = [
        name for name, part in (at(bands["p95"], "stages") or {}).items() if part is not None and name not in stages
    ]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=True, header_style="dim")
    table.add_column("stage", no_wrap=True)
    for column in ("P50 ms", "±", "share", "P95 ms"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("known from", style="dim", ratio=1)
    total = at(median, "total_ms")
    # Of a hundredth of a ms a share is noise.
    shared = abs(total) >= _SHARED_MS
    guilty = at((at(result, "causes") or [None])[0], "stage")
    for name in (*stages, *more):
        part = at(median, "stages", name)
        tail = at(bands["p95"], "stages", name)
        table.add_row(
            Text(clean(name), "bold red" if name == guilty else ""),
            number(at(part, "ms")),
            number(at(part, "bound_ms")),
            share(at(part, "ms") / total) if part is not None and shared else "",
            number(at(tail, "ms")),
            clean(at(part, "source") or at(tail, "source") or ""),
        )
    rest = at(median, "unexplained_ms")
    table.add_row(
        Text("unexplained"),
        number(rest),
        "",
        share(rest / total) if shared else "",
        number(at(bands["p95"], "unexplained_ms")),
        "what the evidence does not cover",
    )
    table.add_row(Text("total", "bold"), number(total), "", "", number(at(bands["p95"], "total_ms")), _bands(bands))
    return Group(heading(f"Where {title} goes"), Padding(table, _INDENT))


def _bands(bands: Mapping[str, Any]) -> str:
    parts = []
    for name, band in bands.items():
        if at(band, "total_ms") is not None:
            parts.append(f"{name.upper()}: mean of {at(band, 'requests')} requests, {clean(at(band, 'band') or '')}")
        elif at(band, "need"):
            parts.append(f"{name.upper()}: {at(band, 'need')} more requests would give it")
    return "; ".join(parts)


def _unseen(result: Mapping[str, Any]) -> RenderableType | None:
    budgets = [at(result, "budget", key, "p50", "stages") or {} for key, _ in _BUDGETS]
    unseen = []
    for name in (at(result, "not_observable") or []) if at(result, "window", "requests") else []:
        # A stage can be seen in one budget and not in the other.
        seen = [title for (_, title), stages in zip(_BUDGETS, budgets, strict=True) if stages.get(name) is not None]
        unseen.append(clean(name) + (f" (but in {seen[0]})" if seen else ""))
    return Text.assemble(("Not observable from here: ", "bold"), ", ".join(unseen)) if unseen else None


# Of a block's tone, its colour; its sign says the same.
_TONES: Final = {"good": "green", "bad": "bold red", "unsure": "yellow"}
_BAR: Final = 24


def _block(block: Block, plain: bool) -> RenderableType:
    lines: list[Text] = [Text(line.text, _TONES.get(line.tone, "")) for line in block.lines]
    if not any(line.tone for line in block.lines):
        lines = [Text(f"· {line.text}") for line in block.lines]
    if block.rows:
        lines += _table(block, plain)
    return Group(heading(block.title, block.note), *(Padding(line, _INDENT) for line in lines))


def _table(block: Block, plain: bool) -> list[Text]:
    """Columns as wide as what stands in them; a row over all of them may be longer."""
    first = max(len(block.heads[0]), *(len(row.name) for row in block.rows if not row.over))
    first = min(first, _NAME_MOST)
    rooms = [
        2 + max(len(head), *(len(row.cells[column]) for row in block.rows if row.cells))
        for column, head in enumerate(block.heads[1:])
    ]
    lines = [Text(block.heads[0].ljust(first) + _cells(block.heads[1:], rooms), "dim")]
    for row in block.rows:
        if row.over:
            lines.append(Text(row.over.replace("→", ">") if plain else row.over, "bold"))
            continue
        line = Text(row.name[:first].ljust(first) + _cells(row.cells, rooms), no_wrap=True, overflow="crop")
        if row.bar is not None:
            line.append("  " + judgement.bar_text(row.bar, _BAR, plain), "cyan")
        lines.append(line)
    return lines


def _cells(cells: Sequence[str], rooms: Sequence[int]) -> str:
    return "".join(cell.rjust(room) for cell, room in zip(cells, rooms, strict=True))


def _notes(result: Mapping[str, Any]) -> RenderableType | None:
    warnings = [clean(warning) for warning in at(result, "trust", "warnings") or []]
    trusted = at(result, "trust", "ok")
    word = "" if trusted is not False else "the numbers are doubtful"
    return _lines("What to know of these numbers", [*warnings, *(clean(n) for n in at(result, "notes") or [])], word)


def _lines(title: str, lines: Sequence[str], note: str = "") -> RenderableType | None:
    if not lines:
        return None
    return Group(heading(title, note), *(Padding(Text(f"· {line}"), _INDENT) for line in lines))
