"""The lines of a file's text, kept for the next question: a check asks for the same few files thousands of times."""

from __future__ import annotations

from functools import lru_cache

_FILES = 8


@lru_cache(maxsize=_FILES)
def line_starts(text: str) -> tuple[int, ...]:
    """The offset of each line's first letter. A form feed or U+2028 ends none, as for patch and nginx."""
    starts, at = [0], text.find("\n")
    while at >= 0:
        starts.append(at + 1)
        at = text.find("\n", at + 1)
    return tuple(starts)


def line_of(text: str, number: int) -> str | None:
    """One line, counted from 1, without its end; None where there is none."""
    starts = line_starts(text)
    if not 1 <= number <= len(starts):
        return None
    end = starts[number] - 1 if number < len(starts) else len(text)
    return text[starts[number - 1] : end].rstrip("\r")
