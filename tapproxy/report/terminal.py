"""A result as one screen of text: paths, a picture of when events arrived, the verdict, what to change.

Takes the dict that ``demo`` and ``compare`` build (a verdict of the contract with ``paths``, ``timelines``,
``tap``, ``environment`` beside it) and prints what is there. Rules here: nothing is computed; colour only repeats
what a word or a sign says; every string of the result is printed as plain text, control characters taken out, since
engines, models and headers wrote some of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from tapproxy.report import judgement, timeline
from tapproxy.report.console import can_unicode, clean, heading, verdict_sign, verdict_style
from tapproxy.report.figures import UNKNOWN, at, milliseconds, number, quantity, wanted

MAX_WIDTH: Final = 110
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
_TAIL = (("tokens/s", 10), ("failed", 8))
# A figure with its space, at least and at most; a path's name, at most.
_LEAST_FIGURE: Final = 6
_MOST_FIGURE: Final = 9
_MOST_NAME: Final = 18


def show(result: Mapping[str, Any], console: Console) -> None:
    """Prints the whole screen."""
    width = min(console.width, MAX_WIDTH)
    plain = not can_unicode(console)
    blocks = (
        _title(result),
        _paths(result, width, plain),
        _picture(result, width, plain),
        judgement.verdict(result, width, plain),
        judgement.fix(result),
        _tap(result, plain),
        _notes(result),
    )
    for index, block in enumerate(block for block in blocks if block is not None):
        if index:
            console.print()
        console.print(block, width=width, markup=False, highlight=False)


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
    first, column, metrics, tail = _columns(max(len(name) for name in names.values()), width)
    over, under = Text().append("in ms".ljust(first), style="dim"), Text("path".ljust(first), "dim")
    for title, _ in metrics:
        over.append(title.rjust(column * len(_PERCENTILES)), style="bold")
        for percentile in _PERCENTILES:
            under.append(percentile.upper().rjust(column))
    for title, room in tail:
        over.append(title.rjust(room), style="bold")
    lines = [over, under]
    for name, path in paths.items():
        style = verdict_style(result) if name == at(result, "budget_path") else "bold"
        line = Text().append(names[name][:first].ljust(first), style=style)
        for _, key in metrics:
            for percentile in _PERCENTILES:
                line.append(number(at(path, key, percentile)).rjust(column))
        failed = _failed(path)
        shown = ((number(at(path, "output_tokens_per_s")), ""), (quantity(failed, None), "bold red" if failed else ""))
        for (text, style), (_, room) in zip(shown, tail, strict=False):
            line.append(text.rjust(room), style=style)
        lines.append(line)
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
    left_out = [title for title, _ in (*_METRICS, *_TAIL)][len(metrics) + len(tail) :]
    if left_out:
        failures = sum(_failed(path) or 0 for path in paths.values())
        more = f"; {failures} requests failed" if failures else ""
        lines.append(Text(f"no room at {width} columns for: {', '.join(left_out)}{more}", "dim"))
    return Group(*lines)


def _columns(name: int, width: int) -> tuple[int, int, tuple[tuple[str, str], ...], tuple[tuple[str, int], ...]]:
    """(width of the names, of a figure, the metrics shown, the columns behind them): from the right, what has no room
    is left out; nothing wraps.
    """
    metrics: tuple[tuple[str, str], ...] = _METRICS
    tail: tuple[tuple[str, int], ...] = _TAIL
    name = min(_MOST_NAME, name)

    def needed() -> int:
        return (
            min(name, 8) + _LEAST_FIGURE * len(_PERCENTILES) * len(metrics) + sum(len(title) + 1 for title, _ in tail)
        )

    while tail and needed() > width:
        tail = tail[:-1]
    while len(metrics) > 1 and needed() > width:
        metrics = metrics[:-1]
    figures = len(metrics) * len(_PERCENTILES)
    if name + 7 * figures + sum(room for _, room in tail) > width:
        tail = tuple((title, len(title) + 1) for title, _ in tail)
    room = width - sum(room for _, room in tail)
    name = min(name, max(8, room - _LEAST_FIGURE * figures))
    return name, max(_LEAST_FIGURE, min(_MOST_FIGURE, (room - name) // figures)), metrics, tail


def _failed(path: Mapping[str, Any]) -> int | None:
    errors = at(path, "errors")
    return sum(errors.values()) if isinstance(errors, Mapping) else errors


def _path_name(name: object, result: Mapping[str, Any], plain: bool) -> str:
    """The path's name, signed where it is the one that the verdict is about."""
    if name != at(result, "budget_path"):
        return "  " + clean(name)
    return f"{verdict_sign(result, plain)} {clean(name)}"


def _picture(result: Mapping[str, Any], width: int, plain: bool) -> RenderableType | None:
    lines = timeline.typical(result)
    if not lines:
        return None
    names = {name: _path_name(name, result, plain) for name in lines}
    label = min(_MOST_NAME, max(len(name) for name in names.values())) + 2
    room = max(8, width - label)
    marks = timeline.axis([t for line in lines.values() for t in line[-1:]])
    numbers, ticks = timeline.ruler(marks, room)
    if plain:
        ticks = ticks.translate(str.maketrans("─├┬", "-++"))
    out = [
        heading("When the events of one typical request arrived", "each mark is an event, a block many at once"),
        Text("ms ".rjust(label) + numbers, "dim"),
        Text(" " * label + ticks, "dim"),
    ]
    for name, t_ms in lines.items():
        style = verdict_style(result) if name == at(result, "budget_path") else "bold"
        row = Text().append(names[name][: label - 2].ljust(label), style=style)
        for piece in timeline.strip(t_ms, marks.span_ms, room, ascii_only=plain):
            row.append(piece.text, style=_ROLE_STYLES[piece.role])
        out.append(row)
    return Group(*out)


def _tap(result: Mapping[str, Any], plain: bool) -> RenderableType | None:
    tap = at(result, "tap")
    if not tap:
        return None
    added, delay = at(tap, "added_ttft_ms") or {}, at(tap, "forward_delay_ms") or {}
    row = heading("The tap's own cost")
    limit, within = at(tap, "limit_ms"), at(tap, "within_limit")
    if within is not None:
        sign = ("+" if plain else "✓") if within else ("x" if plain else "✗")
        words = f"  {sign} {'under' if within else 'NOT under'} {quantity(limit, 'ms')} at P50"
        row.append(words, "green" if within else "bold red")
    row.append(f"\n  TTFT {milliseconds(added.get('p50'), signed=True)}")
    row.append(f" (P50s, tap − direct, n={quantity(added.get('n'), None)})", "dim")
    row.append(f", forward delay {milliseconds(delay.get('p50'))} P50, {number(delay.get('p95'))} P95")
    row.append(f" ({quantity(delay.get('n'), None)} events)", "dim")
    return row


def _notes(result: Mapping[str, Any]) -> RenderableType | None:
    notes = [clean(note) for note in at(result, "notes") or []]
    notes += [f"{clean(w)}" for w in at(result, "trust", "warnings") or []]
    paths = at(result, "paths") or {}
    missing = [wanted(at(path, "ttft_ms"), "p95") for path in paths.values()]
    needed = [n for n in missing if n]
    if needed:
        notes.append(f"{UNKNOWN} under P95: too few requests for it; {max(needed)} more on each path would give it.")
    if at(result, "next"):
        notes.append(clean(result["next"]))
    if not notes:
        return None
    return Group(*(Text(note, "dim") for note in notes))


def show_scenarios(entries: Sequence[Mapping[str, Any]], console: Console) -> None:
    """What was staged beside what the verdict named, a line each."""
    plain = not can_unicode(console)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for title in ("", "scenario", "staged", "named"):
        table.add_column(title, no_wrap=True)
    for title in ("staged", "found"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("of", no_wrap=True)
    for entry in entries:
        names = [entry.get("named") or UNKNOWN, *(f"+ {cause}" for cause in entry.get("also") or [])]
        table.add_row(
            _agreement(entry, plain),
            *(Text(clean(entry.get(key) or UNKNOWN)) for key in ("scenario", "staged")),
            Text("\n".join(clean(name) for name in names)),
            *(Text(number(entry.get(key))) for key in ("effect_staged_ms", "effect_measured_ms")),
            Text(clean(entry.get("metric") or entry.get("metric_measured") or "")),
        )
    console.print(table, markup=False, highlight=False)
    right = sum(entry.get("named") == entry.get("staged") for entry in entries)
    agreeing = sum(bool(entry.get("ok")) for entry in entries)
    words = (
        f"{right} of {len(entries)} named what was staged; {agreeing} of them also its effect, within 5 % or 3 ms, and "
        "all else that was staged. Effects at P50: as put in, and as the verdict has it."
    )
    console.print(Text(words, "dim"))


def _agreement(entry: Mapping[str, Any], plain: bool) -> Text:
    """A sign: all agrees; the cause does and its effect does not; another cause was named."""
    if entry.get("named") != entry.get("staged"):
        return Text("x" if plain else "✗", "bold red")
    if not entry.get("ok"):
        return Text("~" if plain else "≈", "yellow")
    return Text("+" if plain else "✓", "green")
