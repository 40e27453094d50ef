"""nginx's notation of times and sizes as numbers: ``1m30s``, ``64k``.

Rules here: what nginx itself would refuse, or what is a variable, is None, never 0.
"""

from __future__ import annotations

import re

_UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "M": 2592000.0, "y": 31536000.0}
_TIME_PART = re.compile(r"([0-9]{1,18})(ms|s|m|h|d|w|M|y)? ?")
_SIZE = re.compile(r"([0-9]{1,18})([kKmMgG]?)")
_MOST_DIGITS = 18
_SCALE = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def whole(text: str | None) -> int | None:
    """``0042`` as 42; None for anything else. A number too long for any setting is none."""
    return int(text) if text and len(text) <= _MOST_DIGITS and text.isascii() and text.isdigit() else None


def seconds(text: str | None) -> float | None:
    """``1m30s`` or ``90`` as 90.0; None for anything else."""
    if not text:
        return None
    total, at = 0.0, 0
    while at < len(text):
        part = _TIME_PART.match(text, at)
        if part is None:
            return None
        total += int(part[1]) * _UNITS_S[part[2] or "s"]
        at = part.end()
    return total


def size_bytes(text: str | None) -> int | None:
    """``64k`` as 65536; None for anything else."""
    match = _SIZE.fullmatch(text or "")
    return int(match[1]) * _SCALE[match[2].lower()] if match else None


def parameters(args: tuple[str, ...]) -> dict[str, str]:
    """``zone=a burst=10 nodelay`` as a mapping; a bare word has an empty value."""
    return {name: value for name, _, value in (one.partition("=") for one in args)}
