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
from tapproxy.report.figures import at, milliseconds, number, percentage, quantity, share

MAX_WIDTH: Final = 110
_INDENT: Final = (0, 0, 0, 2)
_BUDGETS: Final = (("ttft", "TTFT"), ("tpot", "TPOT"))
# Causes after the first that are told in full; the rest have a line each.
_IN_FULL: Final = 2


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
        _objectives(result, plain),
        _slices(result),
        _fits(result),
        _timeline(result, plain),
        _presence(result),
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
    if causes:
        line.append("  " + clean(causes[0].get("cause", "")), style="bold")
        line.append(f"  {judgement.effect(causes[0])}")
    return line


def _cause(cause: Mapping[str, Any]) -> RenderableType:
    """Evidence, rivals and advice of one cause."""
    lines: list[RenderableType] = [
        Text.assemble(
            (clean(cause.get("cause", "")), "bold"),
            (f"  {clean(cause.get('severity', ''))}, stage {clean(cause.get('stage') or 'none')}", "dim"),
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
    guilty = at((at(result, "causes") or [None])[0], "stage")
    for name in (*stages, *more):
        part = at(median, "stages", name)
        tail = at(bands["p95"], "stages", name)
        table.add_row(
            Text(clean(name), "bold red" if name == guilty else ""),
            number(at(part, "ms")),
            number(at(part, "bound_ms")),
            share(at(part, "ms") / total) if total and part is not None else "",
            number(at(tail, "ms")),
            clean(at(part, "source") or at(tail, "source") or ""),
        )
    rest = at(median, "unexplained_ms")
    table.add_row(
        Text("unexplained"),
        number(rest),
        "",
        share(rest / total) if total else "",
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
    for name in at(result, "not_observable") or []:
        # A stage can be seen in one budget and not in the other.
        seen = [title for (_, title), stages in zip(_BUDGETS, budgets, strict=True) if stages.get(name) is not None]
        unseen.append(clean(name) + (f" (but in {seen[0]})" if seen else ""))
    return Text.assemble(("Not observable from here: ", "bold"), ", ".join(unseen)) if unseen else None


_SLICES: Final = {
    "prompt_tokens": "tokens of the prompt",
    "output_tokens": "tokens of the answer",
    "mode": "mode",
    "model": "model",
    "path": "path",
}
_STATES: Final = {
    "met": ("✓", "+", "green", "met"),
    "missed": ("✗", "x", "bold red", "missed"),
    "too_few": ("?", "?", "yellow", "too few to say"),
}


def _objectives(result: Mapping[str, Any], plain: bool) -> RenderableType | None:
    """Each limit of each objective, with the counts that decide it."""
    lines: list[Text] = []
    for entry in at(result, "slo") or []:
        for limit in entry.get("limits") or []:
            sign, ascii_sign, style, word = _STATES.get(str(limit.get("state")), _STATES["too_few"])
            line = Text.assemble(
                (f"{ascii_sign if plain else sign} {word}", style), f"  {clean(entry.get('for', ''))}: "
            )
            line.append(f"{clean(limit.get('metric', '')).upper()} within {milliseconds(limit.get('limit_ms'))} ")
            line.append(
                f"for {percentage(limit.get('share'))} of requests: it was for {percentage(limit.get('within_share'))}"
            )
            line.append(f" (n={quantity(limit.get('n'), None)}, {quantity(limit.get('over'), None)} over)")
            if limit.get("need"):
                line.append(f"; {limit['need']} more within it would show it")
            if limit.get("unknown"):
                line.append(f"; {limit['unknown']} without a number")
            lines.append(line)
        if entry.get("unsorted"):
            lines.append(Text(f"  without a token count, and so in no length class: {entry['unsorted']}", "dim"))
    return Group(heading("Objectives"), Padding(Group(*lines), _INDENT)) if lines else None


def _slices(result: Mapping[str, Any]) -> RenderableType | None:
    """The same metrics for parts of the requests."""
    found = at(result, "slices") or {}
    if not found:
        return None
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True, overflow="ellipsis", max_width=40)
    for title in ("n", "failed", "TTFT P50", "P95", "TPOT P50", "P95", "E2E P50", "P95"):
        table.add_column(title, justify="right", no_wrap=True)
    for dimension, classes in found.items():
        table.add_row(Text(_SLICES.get(dimension, clean(dimension)), "bold"))
        for entry in classes:
            figures = [number(at(entry, key, p)) for key in ("ttft_ms", "tpot_ms", "e2e_ms") for p in ("p50", "p95")]
            counts = (quantity(entry.get("n"), None), quantity(entry.get("failed"), None))
            table.add_row(Text("  " + clean(entry.get("class", ""))), *counts, *figures)
    note = "in ms; a dash: too few requests for it, or no usage to count tokens by"
    return Group(heading("By kind of request", note), Padding(table, _INDENT))


def _fits(result: Mapping[str, Any]) -> RenderableType | None:
    found = [clean(fit["says"]) for fit in (at(result, "fits") or {}).values() if fit]
    return _lines("Growth with length", found)


def _timeline(result: Mapping[str, Any], plain: bool) -> RenderableType | None:
    """Bins and marks in one table, in time order."""
    found = at(result, "timeline")
    if not found:
        return None
    bins, marks = found["bins"], list(found["marks"])
    gauges = [name for name in _GAUGES if any(each.get(name) is not None for each in bins)]
    day = len({each["from"][:10] for each in bins}) > 1
    titles = ("requests/s", "failed", "TTFT P50", "P95", "TPOT P50", *(_GAUGES[name] for name in gauges))
    first = max(len("from (UTC)"), *(len(_clock(each["from"], day)) for each in bins))
    lines = [Text("from (UTC)".ljust(first) + "".join(title.rjust(_room(title)) for title in titles), "dim")]
    middles = [at(each, "ttft_ms", "p50") for each in bins]
    most = max((ms for ms in middles if ms is not None), default=0) or 1
    for each, middle in zip(bins, middles, strict=True):
        while marks and marks[0]["t_unix_ns"] <= each["t_unix_ns"]:
            lines.append(_mark(marks.pop(0), day, plain))
        figures = (
            number(each["rate_per_s"]),
            quantity(each["failed"], None) if each["failed"] else "",
            number(middle),
            number(at(each, "ttft_ms", "p95")),
            number(at(each, "tpot_ms", "p50")),
            *(share(each[name]) if name.endswith("_share") else number(each[name]) for name in gauges),
        )
        row = _clock(each["from"], day).ljust(first)
        row += "".join(figure.rjust(_room(title)) for figure, title in zip(figures, titles, strict=True))
        bar = judgement.bar_text((middle or 0) / most, 24, plain)
        lines.append(Text.assemble(row, "  ", (bar, "cyan"), no_wrap=True, overflow="crop"))
    lines += [_mark(mark, day, plain) for mark in marks]
    title = heading("Over time", f"a line each {found['bin_s']} s, in ms, TTFT P50 as a bar; between them what changed")
    return Group(title, Padding(Group(*lines), _INDENT))


_GAUGES: Final = {"running": "running", "waiting": "waiting", "kv_usage_share": "KV"}


def _room(title: str) -> int:
    """A column as wide as its title, and as six figures at least."""
    return max(len(title), 6) + 2


def _clock(iso: str, day: bool) -> str:
    return clean(iso if day else iso[11:].rstrip("Z"))


def _mark(mark: Mapping[str, Any], day: bool, plain: bool) -> Text:
    sign = ">" if plain else "▸"
    return Text(f"{sign} {_clock(mark['at'], day)} {clean(mark['kind'])}: {clean(mark['what'])}", "bold yellow")


def _presence(result: Mapping[str, Any]) -> RenderableType | None:
    lines = []
    for item in at(result, "presence") or []:
        of = quantity(item.get("requests"), None)
        lines.append(f"{clean(item.get('tap', ''))}: {clean(item.get('what', ''))} ({of} requests)")
    return _lines("What the taps changed", lines)


def _notes(result: Mapping[str, Any]) -> RenderableType | None:
    warnings = [clean(warning) for warning in at(result, "trust", "warnings") or []]
    trusted = at(result, "trust", "ok")
    word = "" if trusted is not False else "the numbers are doubtful"
    return _lines("What to know of these numbers", [*warnings, *(clean(n) for n in at(result, "notes") or [])], word)


def _lines(title: str, lines: Sequence[str], note: str = "") -> RenderableType | None:
    if not lines:
        return None
    return Group(heading(title, note), *(Padding(Text(f"· {line}"), _INDENT) for line in lines))
