"""When events arrived, laid out on a common axis: the geometry of the strip charts.

Input is what was measured (ms since the request started, ascending); output is where to draw it. Rules here:
a strip never moves an event to another column than its time's; a label stands only where nothing arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tapproxy.report.figures import at, milliseconds

# Events no further apart than this came together; so many of them together are a burst. Both only choose how a
# group is drawn: a verdict rests on holds, never on this.
TOGETHER_MS = 2.0
BURST_EVENTS = 6

_STEPS = (1, 2, 2.5, 5)
# Braille: dots of a cell's left and right column from the bottom up.
_LEFT = (0x40, 0x04, 0x02, 0x01)
_RIGHT = (0x80, 0x20, 0x10, 0x08)

Role = Literal["events", "burst", "silence", "label", "blank"]


@dataclass(frozen=True, slots=True)
class Group:
    """Events that came together."""

    start_ms: float
    end_ms: float
    events: int

    @property
    def burst(self) -> bool:
        return self.events >= BURST_EVENTS


@dataclass(frozen=True, slots=True)
class Axis:
    """A time axis from 0: where it ends, and where its ticks stand."""

    span_ms: float
    ticks_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of characters of one meaning."""

    text: str
    role: Role


def typical(result: Mapping[str, Any]) -> dict[str, Sequence[float]]:
    """For each path the arrival times of the request marked as typical, else of its first."""
    found: dict[str, Sequence[float]] = {}
    for name, requests in (at(result, "timelines") or {}).items():
        if requests:
            chosen = next((r for r in requests if r.get("typical")), requests[0])
            found[name] = chosen["t_ms"]
    return found


def axis(last_ms: Iterable[float], *, ticks: int = 8) -> Axis:
    """An axis that holds the latest of these times, with about so many round ticks."""
    latest = max((t for t in last_ms if t > 0), default=0.0)
    if latest <= 0:
        return Axis(1.0, (0.0, 1.0))
    rough = latest / ticks
    power = 1.0
    while power * 10 <= rough:
        power *= 10
    while power > rough:
        power /= 10
    step = next((s * power for s in _STEPS if s * power >= rough), 10 * power)
    marks = [0.0]
    while marks[-1] + step <= latest * 1.000001:
        marks.append(marks[-1] + step)
    # A little air, so that the last event does not sit on the edge.
    return Axis(latest * 1.015, tuple(marks))


def groups(t_ms: Sequence[float], together_ms: float = TOGETHER_MS) -> list[Group]:
    """Consecutive events at most ``together_ms`` apart, as one group each."""
    found: list[Group] = []
    start = previous = 0.0
    count = 0
    for t in t_ms:
        if count and t - previous > together_ms:
            found.append(Group(start, previous, count))
            count = 0
        if not count:
            start = t
        count += 1
        previous = t
    if count:
        found.append(Group(start, previous, count))
    return found


def strip(t_ms: Sequence[float], span_ms: float, width: int, *, ascii_only: bool = False) -> list[Piece]:
    """One path's events as ``width`` characters: dots for events, a block for a burst, words for a long silence."""
    cells = _cells(t_ms, span_ms, width, ascii_only)
    pieces: list[Piece] = []
    column = 0
    previous_ms = 0.0
    bursts = {_column(g.start_ms, span_ms, width): g for g in groups(t_ms) if g.burst}
    while column < width:
        run = column
        while run < width and cells[run] is None:
            run += 1
        if run > column:
            last = run == width
            arrived = _first_from(t_ms, previous_ms)
            words = "" if last else _silence_words(arrived - previous_ms, bursts.get(run), run - column)
            pieces += _silence(words, run - column, last=last, ascii_only=ascii_only)
            column = run
            continue
        cell = cells[column]
        assert cell is not None
        role: Role = "burst" if column in bursts else "events"
        if pieces and pieces[-1].role == role:
            pieces[-1] = Piece(pieces[-1].text + cell, role)
        else:
            pieces.append(Piece(cell, role))
        previous_ms = _last_before(t_ms, (column + 1) * span_ms / width)
        column += 1
    return pieces


def ruler(marks: Axis, width: int) -> tuple[str, str]:
    """The axis as two lines: the numbers (ms), and the ticks under them. A number without room is left out."""
    numbers = [" "] * width
    ticks = ["─"] * width
    for index, mark in enumerate(marks.ticks_ms):
        column = _column(mark, marks.span_ms, width)
        ticks[column] = "┬" if index else "├"
        label = f"{mark:g}"
        start = min(max(0, column - len(label) // 2 if index else 0), width - len(label))
        if start >= 0 and all(c == " " for c in numbers[max(0, start - 1) : start + len(label)]):
            numbers[start : start + len(label)] = label
    return "".join(numbers), "".join(ticks)


def _column(t_ms: float, span_ms: float, columns: int) -> int:
    return min(columns - 1, max(0, int(t_ms * columns / span_ms)))


def _cells(t_ms: Sequence[float], span_ms: float, width: int, ascii_only: bool) -> list[str | None]:
    """The character of each column, None where nothing arrived."""
    counts = [0] * (2 * width)
    for t in t_ms:
        counts[_column(t, span_ms, 2 * width)] += 1
    cells: list[str | None] = []
    burst_columns = {_column(g.start_ms, span_ms, width) for g in groups(t_ms) if g.burst}
    for column in range(width):
        left, right = counts[2 * column], counts[2 * column + 1]
        if left + right == 0:
            cells.append(None)
        elif column in burst_columns:
            cells.append("#" if ascii_only else "█")
        elif ascii_only:
            cells.append("." if left + right < 3 else ":")
        else:
            cells.append(_braille(left, right))
    return cells


def _braille(left: int, right: int) -> str:
    dots = 0x2800
    for count, column in ((left, _LEFT), (right, _RIGHT)):
        # Like a bar code: a mark an event, a longer one for several; a burst has its own sign and its number.
        height = 0 if count == 0 else 3 if count == 1 else 4
        for dot in column[:height]:
            dots |= dot
    return chr(dots)


def _silence_words(gap_ms: float, burst: Group | None, width: int) -> str:
    """The longest of these sentences that fits with a little line on both sides, or none."""
    sentences = [f"nothing for {milliseconds(gap_ms)}", milliseconds(gap_ms)]
    if burst is not None:
        sentences = [
            f"nothing for {milliseconds(gap_ms)}, then {burst.events} at once",
            f"{milliseconds(gap_ms)}, then {burst.events}",
            f"{burst.events} at once",
            *sentences,
        ]
    return next((s for s in sentences if len(s) + 4 <= width), "")


def _silence(words: str, width: int, *, last: bool, ascii_only: bool) -> list[Piece]:
    line = "-" if ascii_only else "╌"
    if last:
        return [Piece(" " * width, "blank")]
    if not words:
        # Short gaps stay empty: a line there would read as something that arrived.
        return [Piece(" " * width, "blank")] if width < 4 else [Piece(line * width, "silence")]
    left = (width - len(words) - 2) // 2
    right = width - len(words) - 2 - left
    return [
        Piece(line * left + " ", "silence"),
        Piece(words, "label"),
        Piece(" " + line * right, "silence"),
    ]


def _first_from(t_ms: Sequence[float], after_ms: float) -> float:
    return next((t for t in t_ms if t > after_ms), after_ms)


def _last_before(t_ms: Sequence[float], end_ms: float) -> float:
    return max((t for t in t_ms if t < end_ms), default=end_ms)
