"""The verdict on the screen: the worst cause with what decided it, the budget beside it, the line to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tapproxy.report.console import clean, heading, verdict_sign, verdict_style
from tapproxy.report.figures import UNKNOWN, at, milliseconds, number, quantity, share

_MIN_WIDTH_SIDE_BY_SIDE: Final = 92
# Facts of a cause on the screen; the page and the JSON have all of them.
_MAX_FACTS: Final = 7


def verdict(result: Mapping[str, Any], width: int, plain: bool) -> RenderableType:
    """The word, the worst cause, its evidence and the budget of TTFT."""
    word = str(at(result, "verdict") or "not_measured")
    line = Text().append(f"{verdict_sign(result, plain)} {word.replace('_', ' ').upper()}", style=verdict_style(result))
    # What is only worth knowing is no answer to "why", and comes last.
    known = [*(at(result, "causes") or []), *(at(result, "worth_knowing") or [])]
    causes = [cause for cause in known if cause.get("severity") != "info"]
    notes = [cause for cause in known if cause.get("severity") == "info"]
    left: list[RenderableType] = []
    below: list[RenderableType] = []
    if causes:
        line.append("  " + clean(causes[0].get("cause", "")), style="bold")
        line.append(f"  {effect(causes[0])}")
        left += _evidence(causes[0])
        below += _rejected(causes[0])
        below += [Text(f"also {clean(c.get('cause', ''))}: {effect(c)}", "dim") for c in causes[1:4]]
    below += [
        Text(f"worth knowing: {clean(c.get('cause', ''))}: {clean(c.get('advice') or '')}", "dim") for c in notes[:3]
    ]
    beside = bool(left) and width >= _MIN_WIDTH_SIDE_BY_SIDE
    right = _budget_block(result, width // 2 - 3 if beside else width - 2, plain)
    if beside and right:
        grid = Table.grid(padding=(0, 3, 0, 0), expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        grid.add_row(Group(*left), Group(*right))
        body = [grid, *below]
    else:
        body = [*left, *below, *right]
    return Group(line, Padding(Group(*body), (0, 0, 0, 2))) if body else line


def effect(cause: Mapping[str, Any]) -> str:
    """What it costs, with its share of the metric."""
    metric = clean(cause.get("metric") or "").upper()
    of_it = "" if cause.get("share") is None else f", {share(cause['share'])} of it"
    return f"{metric} {milliseconds(at(cause, 'effect_ms', 'p50'), signed=True)} at P50{of_it}".strip()


def _evidence(cause: Mapping[str, Any]) -> list[RenderableType]:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for item in _most_telling(cause.get("evidence") or []):
        unit = clean(item.get("unit") or "")
        value = quantity(item.get("value"), unit)
        extras = [
            f"{word}{quantity(item[key], 'share' if unit == 'share' and key == 'threshold' else None)}"
            for word, key in (("threshold ", "threshold"), ("n=", "n"))
            if item.get(key) is not None
        ]
        extra = f" ({', '.join(extras)})" if extras else ""
        grid.add_row(Text("·"), Text.assemble((clean(item.get("what", "")) + ": ", "dim"), value + extra))
    return [heading("Evidence", f"confidence {share(cause.get('confidence'))}"), grid]


def _rejected(cause: Mapping[str, Any]) -> list[RenderableType]:
    names = ", ".join(clean(item.get("cause", "")) for item in cause.get("rejected") or [])
    if not names:
        return []
    return [Text.assemble(("Rejected: ", "bold"), names, ("; why: --html, --json", "dim"))]


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
        heading("Where TTFT goes", f"P50 {milliseconds(total)}, {clean(at(result, 'budget_path') or '')}".rstrip(", "))
    ]
    known = {name: at(stage, "ms") for name, stage in stages.items()}
    rows = [(name, ms) for name, ms in known.items() if ms is not None]
    rows.append(("unexplained", at(part, "unexplained_ms")))
    label = max(len(name) for name, _ in rows)
    figures = max(len(number(ms)) for _, ms in rows)
    room = max(4, min(40, width - label - figures - 7))
    guilty = at((at(result, "causes") or [None])[0], "stage")
    bars = signed_bars([ms or 0 for _, ms in rows], room, plain)
    for (name, ms), bar in zip(rows, bars, strict=True):
        style = "bold red" if name == guilty else "cyan"
        out.append(
            Text.assemble(clean(name).ljust(label), "  ", number(ms).rjust(figures), (" ms  ", "dim"), (bar, style))
        )
    # A stage can be seen in one budget and not in the other: beside its number here it says in which it is not.
    unseen = [
        clean(name) + (" (in TPOT)" if known.get(name) is not None else "")
        for name in at(result, "not_observable") or []
    ]
    if unseen:
        out.append(Text("not observable from here: " + ", ".join(unseen), "dim"))
    return out


def signed_bars(values: Sequence[float], room: int, plain: bool = False) -> list[str]:
    """Bars on one scale. Where one of them is negative all stand on a line in between, the negative ones left of it."""
    most, least = max((0.0, *values)), min((0.0, *values))
    span = (most - least) or 1
    left = round(-least / span * (room - 1))
    if not left:
        return [bar_text(max(0, value) / span, room, plain) for value in values]
    full, line = ("#", "|") if plain else ("█", "│")
    out = []
    for value in values:
        # No eighths on the left: they would have to grow from the right.
        below = full * round(max(0, -value) / span * (room - 1))
        out.append(below.rjust(left) + line + bar_text(max(0, value) / (most or 1), room - 1 - left, plain))
    return out


def bar_text(fraction: float, room: int, plain: bool = False) -> str:
    """A bar in eighths of a character; none where it would be thinner."""
    eighths = round(fraction * room * 8)
    if plain:
        return "#" * round(fraction * room)
    full, rest = divmod(eighths, 8)
    return "█" * full + ("" if rest == 0 else " ▏▎▍▌▋▊▉"[rest])


def fix(result: Mapping[str, Any]) -> RenderableType | None:
    """What to do against the worst cause, with the change itself where there is one."""
    causes = at(result, "causes") or []
    if not causes:
        return None
    first = causes[0]
    change = first.get("fix")
    advice = Text(clean(first.get("advice") or UNKNOWN))
    if not change:
        return Group(heading("What to do"), Padding(advice, (0, 0, 0, 2)))
    where = clean(change.get("file") or "") + (f":{change['line']}" if change.get("line") else "")
    lines: list[RenderableType] = [heading("Change", where), Padding(advice, (0, 0, 0, 2))]
    for line in diff_lines(change.get("diff") or ""):
        style = {"+": "bold green", "-": "red"}.get(line[:1], "dim")
        lines.append(Text("  " + clean(line), style=style, no_wrap=True, overflow="ellipsis"))
    proof = measured_again(change)
    if proof is not None:
        lines += [Text(), Padding(Text(proof), (0, 0, 0, 2))]
    return Group(*lines)


def measured_again(change: Mapping[str, Any]) -> str | None:
    """What came of the change, where it was made and the same load sent again."""
    parts = [
        f"{name} {number(before)} → {number(after)} ms"
        for name, key in (("TTFT", "ttft_ms"), ("hold", "hold_ms"))
        if (before := at(change, "measured", key, "before", "p50")) is not None
        and (after := at(change, "measured", key, "after", "p50")) is not None
    ]
    if not parts:
        return None
    path = clean(at(change, "measured", "path") or "")
    return f"Measured with this change (path {path}), P50: {', '.join(parts)}"


def diff_lines(diff: str, context: int = 2) -> list[str]:
    """A unified diff without its heads (the place is said already), with at most so many lines around a change."""
    lines = [line for line in diff.splitlines() if not line.startswith(("--- ", "+++ ", "@@"))]
    changes = [index for index, line in enumerate(lines) if line[:1] in ("+", "-")]
    return [
        line
        for index, line in enumerate(lines)
        if any(abs(index - change) <= context for change in changes) and (line.strip() or index in changes)
    ]
