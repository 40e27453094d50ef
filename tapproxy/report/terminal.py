"""A result as one screen of text: paths, a picture of when events arrived, the verdict, what to change.

Takes the dict that ``demo`` and ``compare`` build (a verdict of the contract with ``paths``, ``timelines``,
``tap``, ``environment`` beside it) and prints what is there. Rules here: nothing is computed; colour only repeats
what a word or a sign says; every string of the result is printed as plain text, control characters taken out, since
engines, models and headers wrote some of them.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rich import progress as live
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from tapproxy.report import timeline
from tapproxy.report.figures import UNKNOWN, at, milliseconds, number, quantity, share, wanted

MAX_WIDTH = 110
# Where nobody says how wide it is.
_PIPED_WIDTH = 100
# Facts of a cause on the screen; the page and the JSON have all of them.
_MAX_FACTS = 8
_MIN_WIDTH_SIDE_BY_SIDE = 92

_SIGNS = {"healthy": ("✓", "bold green"), "degraded": ("✗", "bold red"), "not_measured": ("?", "bold yellow")}
_ASCII_SIGNS = {"healthy": "+", "degraded": "x", "not_measured": "?"}
_ROLE_STYLES: dict[timeline.Role, str] = {
    "events": "cyan",
    "burst": "bold red",
    "silence": "dim",
    "label": "bold",
    "blank": "",
}
# Column heading, where its summary stands in a path.
_METRICS = (("TTFT", "ttft_ms"), ("inter-chunk", "icl_ms"), ("end to end", "e2e_ms"), ("hold", "hold_ms"))
_PERCENTILES = ("p50", "p95")


def stdout() -> Console:
    """Where results go. rich honours NO_COLOR, TERM=dumb and COLUMNS, and writes plain text into a pipe."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _PIPED_WIDTH
    return console


class Progress:
    """One line on stderr while something runs; nothing at all where that is no terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live = live.Progress(
            SpinnerColumn("line" if not _unicode(self._console) else "dots"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[count]}", markup=False),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._live.add_task("starting", total=None, count="")

    def __enter__(self) -> Progress:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, what: str, done: int, of: int) -> None:
        """``of`` 0: nobody knows how much there is to do."""
        count = f"{done} of {of} requests" if of else ""
        self._live.update(self._task, description=clean(what), completed=done, total=of or None, count=count)


def clean(text: object) -> str:
    """Text someone else wrote, as one line that cannot move a cursor, colour a terminal or hide its order."""
    out = []
    for character in str(text):
        if character in "\n\r\t":
            out.append(" ")
        elif unicodedata.category(character) in ("Cc", "Cf", "Co", "Cs", "Zl", "Zp"):
            out.append("�")
        else:
            out.append(character)
    return "".join(out)


def show(result: Mapping[str, Any], console: Console) -> None:
    """Prints the whole screen."""
    width = min(console.width, MAX_WIDTH)
    plain = not _unicode(console)
    for block in (
        _title(result),
        _paths(result, width, plain),
        _picture(result, width, plain),
        _verdict(result, width, plain),
        _fix(result, width),
        _tap(result, plain),
        _notes(result),
    ):
        if block is not None:
            console.print(block, width=width, markup=False, highlight=False)
            console.print()


def _unicode(console: Console) -> bool:
    try:
        "█⣿✗".encode(console.encoding or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def _heading(text: str, note: str = "") -> Text:
    return Text.assemble((text, "bold"), ("  " + note if note else "", "dim"))


def _title(result: Mapping[str, Any]) -> RenderableType:
    scenario = at(result, "scenario") or {}
    lines = [
        Text.assemble(
            ("tapproxy", "bold"),
            f" {clean(scenario.get('command', 'demo'))} · ",
            (clean(scenario.get("name", "")), "bold"),
            f": {clean(scenario.get('title', ''))}",
        )
    ]
    lines += [Text(clean(line), style="dim") for line in scenario.get("setting", [])]
    return Group(*lines)


def _paths(result: Mapping[str, Any], width: int, plain: bool) -> RenderableType | None:
    paths = at(result, "paths")
    if not paths:
        return None
    names = {name: _path_name(name, result, plain) for name in paths}
    first = min(18, max(len(name) for name in names.values()))
    tail = (("tokens/s", 10), ("failed", 8)) if width >= 84 else (("failed", 8),)
    column = max(6, min(9, (width - first - sum(w for _, w in tail)) // (len(_METRICS) * len(_PERCENTILES))))
    over, under = Text().append("in ms".ljust(first), style="dim"), Text("path".ljust(first), "dim")
    for title, _ in _METRICS:
        over.append(title.rjust(column * len(_PERCENTILES)), style="bold")
        for percentile in _PERCENTILES:
            under.append(percentile.upper().rjust(column))
    for title, room in tail:
        over.append(title.rjust(room), style="bold")
    lines = [over, under]
    for name, path in paths.items():
        style = _verdict_style(result) if name == at(result, "budget_path") else "bold"
        line = Text().append(names[name][:first].ljust(first), style=style)
        for _, key in _METRICS:
            for percentile in _PERCENTILES:
                line.append(number(at(path, key, percentile)).rjust(column))
        errors = at(path, "errors")
        failed = sum(errors.values()) if isinstance(errors, Mapping) else errors
        if len(tail) > 1:
            line.append(number(at(path, "output_tokens_per_s")).rjust(tail[0][1]))
        line.append(quantity(failed, None).rjust(tail[-1][1]), style="bold red" if failed else "")
        lines.append(line)
    return Group(*lines)


def _verdict_style(result: Mapping[str, Any]) -> str:
    return _SIGNS.get(str(at(result, "verdict")), _SIGNS["not_measured"])[1]


def _path_name(name: object, result: Mapping[str, Any], plain: bool) -> str:
    """The path's name, signed where it is the one that the verdict is about."""
    if name != at(result, "budget_path"):
        return "  " + clean(name)
    return f"{_sign(result, plain)} {clean(name)}"


def _sign(result: Mapping[str, Any], plain: bool) -> str:
    verdict = str(at(result, "verdict"))
    return _ASCII_SIGNS.get(verdict, "?") if plain else _SIGNS.get(verdict, _SIGNS["not_measured"])[0]


def _picture(result: Mapping[str, Any], width: int, plain: bool) -> RenderableType | None:
    lines = timelines(result)
    if not lines:
        return None
    names = {name: _path_name(name, result, plain) for name in lines}
    label = min(18, max(len(name) for name in names.values())) + 2
    room = width - label
    marks = timeline.axis([t for line in lines.values() for t in line[-1:]])
    numbers, ticks = timeline.ruler(marks, room)
    if plain:
        ticks = ticks.translate(str.maketrans("─├┬", "-++"))
    out = [
        _heading("When the events of one typical request arrived", "each mark is an event, a block many at once"),
        Text("ms ".rjust(label) + numbers, "dim"),
        Text(" " * label + ticks, "dim"),
    ]
    for name, t_ms in lines.items():
        style = _verdict_style(result) if name == at(result, "budget_path") else "bold"
        row = Text().append(names[name][: label - 2].ljust(label), style=style)
        for piece in timeline.strip(t_ms, marks.span_ms, room, ascii_only=plain):
            row.append(piece.text, style=_ROLE_STYLES[piece.role])
        out.append(row)
    return Group(*out)


def timelines(result: Mapping[str, Any]) -> dict[str, Sequence[float]]:
    """For each path the arrival times of the request marked as typical, else of its first."""
    found: dict[str, Sequence[float]] = {}
    for name, requests in (at(result, "timelines") or {}).items():
        if requests:
            chosen = next((r for r in requests if r.get("typical")), requests[0])
            found[name] = chosen["t_ms"]
    return found


def _verdict(result: Mapping[str, Any], width: int, plain: bool) -> RenderableType:
    verdict = str(at(result, "verdict") or "not_measured")
    line = Text().append(f"{_sign(result, plain)} {verdict.replace('_', ' ').upper()}", style=_verdict_style(result))
    causes = at(result, "causes") or []
    left: list[RenderableType] = []
    if causes:
        line.append("  " + clean(causes[0].get("cause", "")), style="bold")
        line.append(f"  {_effect(causes[0])}")
        left += _evidence(causes[0])
        left += [Text(f"also {clean(c.get('cause', ''))}: {_effect(c)}", "dim") for c in causes[1:4]]
    beside = bool(left) and width >= _MIN_WIDTH_SIDE_BY_SIDE
    right = _budget_block(result, width // 2 - 3 if beside else width - 2, plain)
    if not (beside and right):
        return Group(line, *([Padding(Group(*left, *right), (0, 0, 0, 2))] if left or right else []))
    grid = Table.grid(padding=(0, 3, 0, 0), expand=True)
    grid.add_column(ratio=1)
    grid.add_column(ratio=1)
    grid.add_row(Group(*left), Group(*right))
    return Group(line, Padding(grid, (0, 0, 0, 2)))


def _effect(cause: Mapping[str, Any]) -> str:
    metric = clean(cause.get("metric") or "").upper()
    of_it = "" if cause.get("share") is None else f", {share(cause['share'])} of it"
    return f"{metric} {milliseconds(at(cause, 'effect_ms', 'p50'), signed=True)} at P50{of_it}".strip()


def _evidence(cause: Mapping[str, Any]) -> list[RenderableType]:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    items = cause.get("evidence") or []
    shown = _most_telling(items)
    for item in shown:
        value = quantity(item.get("value"), clean(item.get("unit") or ""))
        extras = [
            f"{word}{quantity(item[key], None)}"
            for word, key in (("threshold ", "threshold"), ("n=", "n"))
            if item.get(key) is not None
        ]
        extra = f" ({', '.join(extras)})" if extras else ""
        grid.add_row(Text("·"), Text.assemble((clean(item.get("what", "")) + ": ", "dim"), value + extra))
    rejected = [clean(item.get("cause", "")) for item in cause.get("rejected") or []]
    if rejected:
        grid.add_row(Text("·"), Text.assemble(("not: ", "dim"), ", ".join(rejected)))
    if len(shown) < len(items) or rejected:
        grid.add_row(Text(""), Text("all of it, with the reasons: --html, --json", "dim"))
    return [_heading("Evidence", f"confidence {share(cause.get('confidence'))}"), grid]


def _most_telling(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """What was held against a threshold decided; of the rest the last come closest to the mechanism."""
    deciding = [item for item in items if item.get("threshold") is not None][:_MAX_FACTS]
    room = _MAX_FACTS - len(deciding)
    others = [item for item in items if item not in deciding][-room:] if room else []
    return [item for item in items if item in deciding or item in others]


def _budget_block(result: Mapping[str, Any], width: int, plain: bool) -> list[RenderableType]:
    part = at(result, "budget", "ttft", "p50")
    stages = at(part, "stages")
    if not stages:
        return []
    total = at(part, "total_ms")
    out: list[RenderableType] = [
        _heading("Where TTFT goes", f"P50 {milliseconds(total)}, {clean(at(result, 'budget_path') or '')}".rstrip(", "))
    ]
    known = {name: at(stage, "ms") for name, stage in stages.items()}
    rows = [(name, ms) for name, ms in known.items() if ms is not None]
    rows.append(("unexplained", at(part, "unexplained_ms")))
    label = max(len(name) for name, _ in rows)
    figures = max(len(number(ms)) for _, ms in rows)
    room = max(4, min(40, width - label - figures - 7))
    guilty = at((at(result, "causes") or [None])[0], "stage")
    largest = max((abs(ms) for _, ms in rows if ms is not None), default=0) or 1
    for name, ms in rows:
        bar = bar_text(0 if ms is None else abs(ms) / largest, room, plain)
        style = "bold red" if name == guilty else "cyan"
        out.append(
            Text.assemble(clean(name).ljust(label), "  ", number(ms).rjust(figures), (" ms  ", "dim"), (bar, style))
        )
    unseen = at(result, "not_observable") or []
    if unseen:
        out.append(Text("not observable from here: " + ", ".join(map(clean, unseen)), "dim"))
    return out


def bar_text(fraction: float, room: int, plain: bool = False) -> str:
    """A bar in eighths of a character; none where it would be thinner."""
    eighths = round(fraction * room * 8)
    if plain:
        return "#" * round(fraction * room)
    full, rest = divmod(eighths, 8)
    return "█" * full + ("" if rest == 0 else " ▏▎▍▌▋▊▉"[rest])


def _fix(result: Mapping[str, Any], width: int) -> RenderableType | None:
    causes = at(result, "causes") or []
    if not causes:
        return None
    first = causes[0]
    fix = first.get("fix")
    advice = Text(clean(first.get("advice") or UNKNOWN))
    if not fix:
        return Group(_heading("What to do"), Padding(advice, (0, 0, 0, 2)))
    where = clean(fix.get("file") or "") + (f":{fix['line']}" if fix.get("line") else "")
    lines: list[RenderableType] = [_heading("Change", where), Padding(advice, (0, 0, 0, 2))]
    for line in diff_lines(fix.get("diff") or ""):
        style = {"+": "bold green", "-": "red"}.get(line[:1], "dim")
        lines.append(Text("  " + clean(line), style=style, no_wrap=True, overflow="ellipsis"))
    return Group(*lines)


def diff_lines(diff: str, context: int = 2) -> list[str]:
    """A unified diff without its heads (the place is said already), with at most so many lines around a change."""
    lines = [line for line in diff.splitlines() if not line.startswith(("--- ", "+++ ", "@@"))]
    changes = [index for index, line in enumerate(lines) if line[:1] in ("+", "-")]
    return [
        line
        for index, line in enumerate(lines)
        if any(abs(index - change) <= context for change in changes) and (line.strip() or index in changes)
    ]


def _tap(result: Mapping[str, Any], plain: bool) -> RenderableType | None:
    tap = at(result, "tap")
    if not tap:
        return None
    added, delay = at(tap, "added_ttft_ms") or {}, at(tap, "forward_delay_ms") or {}
    row = _heading("The tap's own cost")
    row.append(f"  TTFT {milliseconds(added.get('p50'), signed=True)}")
    row.append(f" (P50 of tap − P50 of direct, n={quantity(added.get('n'), None)})", "dim")
    row.append(f"; forward delay {milliseconds(delay.get('p50'))} P50, {milliseconds(delay.get('p95'))} P95")
    row.append(f" ({quantity(delay.get('n'), None)} events)", "dim")
    limit, within = at(tap, "limit_ms"), at(tap, "within_limit")
    if within is not None:
        sign = ("ok" if plain else "✓") if within else ("!!" if plain else "✗")
        words = f"{sign} {'under' if within else 'NOT under'} {quantity(limit, 'ms')} at P50"
        row.append("\n" + words, "green" if within else "bold red")
    return row


def _notes(result: Mapping[str, Any]) -> RenderableType | None:
    notes = [clean(note) for note in at(result, "notes") or []]
    notes += [f"{clean(w)}" for w in at(result, "trust", "warnings") or []]
    paths = at(result, "paths") or {}
    missing = [wanted(at(path, "ttft_ms"), "p95") for path in paths.values()]
    needed = [n for n in missing if n]
    if needed:
        notes.append(f"{UNKNOWN} under P95: too few requests for it; {max(needed)} more on each path would give it.")
    if not notes:
        return None
    return Group(*(Text(note, "dim") for note in notes))


def show_scenarios(entries: Sequence[Mapping[str, Any]], console: Console) -> None:
    """What was staged beside what the verdict named, a line each."""
    plain = not _unicode(console)
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("", "scenario", "staged", "named"):
        table.add_column(title)
    for title in ("staged ms", "measured ms"):
        table.add_column(title, justify="right")
    table.add_column("also")
    for entry in entries:
        right = entry.get("named") == entry.get("staged")
        sign = ("+" if plain else "✓") if right else ("x" if plain else "✗")
        table.add_row(
            Text(sign, "green" if right else "bold red"),
            *(Text(clean(entry.get(key, ""))) for key in ("scenario", "staged", "named")),
            *(Text(number(entry.get(key))) for key in ("effect_staged_ms", "effect_measured_ms")),
            Text(", ".join(clean(cause) for cause in entry.get("also") or [])),
        )
    console.print(table, markup=False, highlight=False)
    console.print(
        Text("Effect on TTFT at P50: as the clients felt it, and as the verdict has it from the taps.", "dim")
    )
