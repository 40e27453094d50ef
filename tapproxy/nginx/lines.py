"""The lines of a file's text, kept for the next question: a check asks for the same few files thousands of times."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

from tapproxy.nginx.source import CREDENTIAL

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


@lru_cache(maxsize=_FILES)
def secret_lines(text: str) -> frozenset[int]:
    """The lines (from 1) of each statement or comment that may hold a credential: it can stand below its name."""
    starts = line_starts(text)
    found: set[int] = set()
    until = 0
    for match in CREDENTIAL.finditer(text):
        if match.start() < until:
            continue
        begin, until = _statement(text, match.start())
        found |= set(range(bisect_right(starts, begin), bisect_right(starts, max(match.end(), until) - 1) + 1))
    return frozenset(found)


def _statement(text: str, at: int) -> tuple[int, int]:
    """Where the statement or comment around ``at`` begins and ends: at its ``;`` or ``{``, quotes minded."""
    line = text.rfind("\n", 0, at) + 1
    if text[line:at].lstrip().startswith("#"):
        newline = text.find("\n", at)
        return line, len(text) if newline < 0 else newline
    begin = max(text.rfind(sign, 0, at) for sign in ";{}") + 1
    begin += len(text[begin:at]) - len(text[begin:at].lstrip())
    # A quote that opened before the match on its line closes behind it.
    quote = next((sign for sign in "\"'" if text.count(sign, line, at) % 2), "")
    while at < len(text):
        letter = text[at]
        if letter == "\\":
            at += 1
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in ";{":
            return begin, at + 1
        at += 1
    return begin, len(text)
