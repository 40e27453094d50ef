"""The settings that an engine prints of itself: a Python dict, a call's arguments, or Rust's debug text.

Rules here: only the outermost pairs count, so that a draft model's settings are not taken for the engine's. Texts
stay texts: nothing is evaluated. What is looked up in the result is a table's business; the rest is dropped.
"""

from __future__ import annotations

import re
from typing import Final

_OPEN: Final = "([{<"
_CLOSE: Final = ")]}>"
_KEY: Final = re.compile(r"""\s*['"]?([A-Za-z_]\w*)['"]?\s*[:=]\s*(.*)\Z""", re.DOTALL)
_MOST_CHARACTERS: Final = 1 << 18


def pairs(text: str) -> dict[str, str]:
    """Name → value, as text, of ``a=1, b='x, y', c={…}`` or ``'a': 1, …``, up to the bracket that closes it."""
    found: dict[str, str] = {}
    for piece in _pieces(text[:_MOST_CHARACTERS]):
        match = _KEY.match(piece)
        if match is not None:
            found[match[1]] = match[2].strip()
    return found


def _pieces(text: str) -> list[str]:
    """Split at the commas that stand outside of every bracket and quotation mark."""
    pieces, depth, start, quoted = [], 0, 0, ""
    position = 0
    while position < len(text):
        letter = text[position]
        if quoted:
            if letter == "\\":
                position += 1
            elif letter == quoted:
                quoted = ""
        elif letter in "'\"":
            # An apostrophe within a word opens nothing.
            if position == start or not text[position - 1].isalnum():
                quoted = letter
        elif letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth -= 1
            if depth < 0:
                break
        elif letter == "," and depth == 0:
            pieces.append(text[start:position])
            start = position + 1
        position += 1
    pieces.append(text[start:position])
    return pieces


def plain(value: str) -> str | None:
    """A value without its quotation marks and Rust's ``Some(…)``; None where it is none."""
    while value.startswith("Some(") and value.endswith(")"):
        value = value[5:-1].strip().rstrip(",").strip()
    if len(value) >= 2 and value[0] in "'\"" and value[-1] == value[0]:
        value = value[1:-1]
    return None if value in ("None", "null", "") else value


def number(value: str | None) -> float | None:
    """A number; True and False as 1 and 0; else None."""
    if value is None:
        return None
    truth = {"true": 1.0, "false": 0.0}.get(value.lower())
    if truth is not None:
        return truth
    try:
        found = float(value.replace(",", ""))
    except ValueError:
        return None
    return found if abs(found) < 1e15 else None
