"""nginx's regular expressions (PCRE) in Python's dialect, where that is possible."""

from __future__ import annotations

import re
from functools import lru_cache

# What makes Python's engine try for minutes: a repetition of repetitions, very many of them, a very long pattern.
_EXPLOSIVE = re.compile(r"[*+]\??\)+[*+{]")
_MOST_REPETITIONS = 12
_MOST_LETTERS = 2000
# What re.compile raises for a pattern that it does not take.
NOT_READABLE = (re.error, RecursionError, OverflowError)


@lru_cache(maxsize=4096)
def regex(pattern: str, *, ignore_case: bool) -> re.Pattern[str] | None:
    """A PCRE pattern of a configuration, or None where Python's dialect cannot express it in bounded time."""
    repetitions = pattern.count("*") + pattern.count("+")
    if len(pattern) > _MOST_LETTERS or repetitions > _MOST_REPETITIONS or _EXPLOSIVE.search(pattern):
        return None
    try:
        return re.compile(translated(pattern), re.IGNORECASE if ignore_case else 0)
    except NOT_READABLE:
        return None


def translated(pattern: str) -> str:
    """The pattern with PCRE's way to name a group as Python has it."""
    return re.sub(r"\(\?<([A-Za-z_]\w*)>", r"(?P<\1>", pattern)
