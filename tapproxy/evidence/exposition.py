"""Prometheus' text format, read for a handful of names: a page of 5 MB holds a few dozen lines that are wanted.

Rules here: nothing is kept but the series asked for; a line that cannot be read is passed over, since one broken
exporter must not hide the rest; what is not finite is no value; of a series that stands there twice the last counts.
Lines, series and bytes are bounded, and a page beyond a bound has a problem instead of half an answer.

An own reader, since prometheus_client's takes 40 times as long: it makes an object of every bucket.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Container, Iterator
from dataclasses import dataclass, field
from typing import Final

Labels = tuple[tuple[str, str], ...]

# Real pages: vLLM 60 kB and 500 lines, Ray Serve 600 kB and 1,900; the largest reported are a few MB.
MOST_BYTES: Final = 16 << 20
MOST_LINES: Final = 500_000
# Of the wanted names: a page of more is labelled by request, which no engine does.
MOST_SERIES: Final = 20_000
# How many lines decide whether a page without any wanted name is a metrics page at all.
_LOOKED_AT: Final = 200

# No count, sum or byte of an engine comes near it, and it still fits a JSON integer.
_MOST: Final = float(1 << 62)

# Quoted text may hold braces and escaped quotes. Possessive: no line can make the search go back.
_SAMPLE: Final = re.compile(
    rb'[ \t]*([a-zA-Z_:][\w:]*)[ \t]*(?:\{((?:[^"{}\n]|"(?:[^"\\\n]|\\.)*+")*+)\})?[ \t]*([^ \t\r\n]+)'
)
_LABEL: Final = re.compile(rb'([a-zA-Z_]\w*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*+)"')
_ESCAPE: Final = re.compile(r"\\(.)")
_COMMENT: Final = ord("#")


@dataclass(slots=True)
class Page:
    """The wanted series of a page. ``others``: names of the page that were not wanted, a few of the first.

    ``problem``: why this is no page to go by, else None.
    """

    series: dict[str, dict[Labels, float]] = field(default_factory=dict)
    not_finite: set[str] = field(default_factory=set)
    others: list[str] = field(default_factory=list)
    problem: str | None = None


def read(text: bytes, wanted: Container[bytes], *, whole: bool = True) -> Page:
    """The series of ``wanted`` names. ``whole``: the page is known to have come to its end.

    Where it is not, the last line without a line feed may be the half of a number, and is left out.
    """
    page = Page()
    if len(text) > MOST_BYTES:
        page.problem = f"the page is larger than {MOST_BYTES >> 20} MiB"
        return page
    held = 0
    for number, line in enumerate(io.BytesIO(text)):
        if line[0] == _COMMENT:
            continue
        if number >= MOST_LINES:
            page.problem = f"the page has more than {MOST_LINES} lines"
            return page
        brace = line.find(b"{")
        name = line[:brace] if brace > 0 else line
        if (name if name in wanted else _name_of(name)) not in wanted:
            continue
        if not whole and not line.endswith(b"\n"):
            continue
        held += _keep(page, line)
        if held > MOST_SERIES:
            page.problem = f"the page has more than {MOST_SERIES} series of the engine's names"
            return page
    if not page.series and not page.not_finite:
        page.others, page.problem = _what_it_is(text)
    return page


def _name_of(start: bytes) -> bytes:
    """The name where no brace follows it at once: `name 1`, ` name {`, `name 1 # {trace_id="…"} 1`."""
    words = start.split(None, 1)
    return words[0] if words else b""


def _keep(page: Page, line: bytes) -> int:
    """Keeps one line's value; how many series that added."""
    found = _SAMPLE.match(line)
    if found is None:
        return 0
    try:
        value = float(found[3])
    except ValueError:
        return 0
    name = found[1].decode("ascii", "replace")
    if not math.isfinite(value) or abs(value) >= _MOST:
        page.not_finite.add(name)
        return 0
    series = page.series.setdefault(name, {})
    before = len(series)
    series[tuple(sorted(_labels(found[2] or b"")))] = value
    return len(series) - before


def _labels(text: bytes) -> Iterator[tuple[str, str]]:
    for found in _LABEL.finditer(text):
        value = found[2].decode("utf-8", "replace")
        if "\\" in value:
            value = _ESCAPE.sub(lambda each: "\n" if each[1] == "n" else each[1], value)
        yield found[1].decode("ascii", "replace"), value


def _what_it_is(text: bytes) -> tuple[list[str], str | None]:
    """(the first names, None) of a metrics page without a wanted name; else what the page seems to be."""
    start = text[:4096].lstrip(b"\xef\xbb\xbf \t\r\n")
    if not start:
        return [], "the page is empty"
    if b"\0" in start:
        return [], "the page is binary data and not Prometheus text"
    names: list[str] = []
    samples = lines = 0
    for line in io.BytesIO(text):
        if line.isspace() or line[0] == _COMMENT:
            continue
        lines += 1
        found = _SAMPLE.match(line)
        if found is not None and _is_number(found[3]):
            samples += 1
            name = found[1].decode("ascii", "replace")[:80]
            if name not in names and len(names) < 3:
                names.append(name)
        if lines >= _LOOKED_AT:
            break
    if samples and samples * 2 >= lines:
        return names, None
    if not lines and start.startswith(b"#"):
        return [], "the page holds comments and not one sample"
    kinds = ((b"<", "HTML"), (b"{", "JSON"), (b"[", "JSON"))
    kind = next((kind for letter, kind in kinds if start.startswith(letter)), "other text")
    return [], f"the page is {kind} and not Prometheus text"


def _is_number(text: bytes) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
