"""Numbers as text: one way to write them, on the terminal and in the page.

Rules here: unknown is an en dash, never 0; a unit stands with its number or over its column; rounding keeps what
can be read at a glance and the exact value stays in the JSON. Nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNKNOWN = "–"
MINUS = "−"


def number(value: float | int | None, *, signed: bool = False) -> str:
    """Three figures or so: ``0.31``, ``15.0``, ``218``, ``12345``; no grouping, whose space could break a line."""
    if value is None:
        return UNKNOWN
    size = abs(value)
    if size < 0.995:
        text = f"{size:.2f}"
    elif size < 99.95:
        text = f"{size:.1f}"
    else:
        text = f"{size:.0f}"
    if value < 0 and text.strip("0.") != "":
        return MINUS + text
    return "+" + text if signed and value > 0 else text


def milliseconds(value: float | int | None, *, signed: bool = False) -> str:
    """A time with its unit; a dash alone where it is unknown."""
    return UNKNOWN if value is None else f"{number(value, signed=signed)} ms"


def share(value: float | None) -> str:
    """A fraction of one as percent."""
    if value is None:
        return UNKNOWN
    text = f"{abs(value) * 100:.0f} %"
    return MINUS + text if value < 0 and text != "0 %" else text


def percentage(value: float | None) -> str:
    """A fraction of one to a hundredth of a percent, where it tells two apart: ``99.9 %``, ``95 %``."""
    return UNKNOWN if value is None else f"{round(value * 100, 2):g} %"


def quantity(value: float | int | None, unit: str | None) -> str:
    """A number in a sentence, with whatever unit came with it: no ``.0`` after a whole one, a share as percent."""
    if value is None:
        return UNKNOWN
    if unit == "share":
        return share(value)
    text = number(value)
    if float(value).is_integer():
        text = text.partition(".")[0]
    return f"{text} {unit}" if unit else text


def at(data: Mapping[str, Any] | None, *keys: str) -> Any:
    """``data[a][b]…``, or None as soon as one of them is missing: half a result must print too."""
    found: Any = data
    for key in keys:
        if not isinstance(found, Mapping):
            return None
        found = found.get(key)
    return found


def wanted(summary: Mapping[str, Any] | None, percentile: str) -> int | None:
    """How many more requests a percentile needs that was left out for want of samples."""
    missing = at(summary, "need", percentile)
    return missing if isinstance(missing, int) and missing > 0 else None
