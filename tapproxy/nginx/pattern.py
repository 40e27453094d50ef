"""nginx's regular expressions (PCRE) in Python's dialect, where that is possible."""

from __future__ import annotations

import re
from functools import lru_cache

# What makes Python's engine try for minutes: a repetition of repetitions, very many of them, a very long pattern.
_EXPLOSIVE = re.compile(r"[*+]\??\)+[*+{]")
_MOST_REPETITIONS = 12
_MOST_LETTERS = 2000


@lru_cache(maxsize=4096)
def regex(pattern: str, *, ignore_case: bool) -> re.Pattern[str] | None:
    """A PCRE pattern of a configuration, or None where Python's dialect cannot express it in bounded time."""
    repetitions = pattern.count("*") + pattern.count("+")
    if len(pattern) > _MOST_LETTERS or repetitions > _MOST_REPETITIONS or _EXPLOSIVE.search(pattern):
        return None
    translated = re.sub(r"\(\?<([A-Za-z_]\w*)>", r"(?P<\1>", pattern)
    try:
        return re.compile(translated, re.IGNORECASE if ignore_case else 0)
    except (re.error, RecursionError, OverflowError):
        return None
