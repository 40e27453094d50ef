"""The line of a configuration that a finding is about, as a compiler shows it.

Rules here: a line that may hold a credential is not shown (findings end up in logs and CI), and a long one is cut
around the statement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tapproxy.core.findings import Finding
from tapproxy.nginx.lines import line_of, secret_lines

_WIDTH = 100
_TAB = "    "


@dataclass(frozen=True, slots=True)
class Excerpt:
    """``column`` counts from 1, in letters of the file. ``text`` and ``marks`` are one under the other."""

    column: int
    text: str
    marks: str


def excerpt(texts: Mapping[str, str], finding: Finding) -> Excerpt | None:
    """Where in its line the statement of a finding stands; None where there is no line, or it must not be shown."""
    text = texts.get(finding.file or "", "")
    line = line_of(text, finding.line or 0)
    if line is None or not line.strip() or finding.line in secret_lines(text):
        return None
    start, length = _statement(line, finding.directive or "")
    first = max(0, start - _WIDTH // 2) if len(line) > _WIDTH else 0
    cut = line[first : first + _WIDTH]
    before, inside = cut[: start - first], cut[start - first : start - first + length]
    return Excerpt(
        column=start + 1,
        text=cut.replace("\t", _TAB).rstrip(),
        marks=" " * len(before.replace("\t", _TAB)) + "^" + "~" * (len(inside.replace("\t", _TAB)) - 1),
    )


def _statement(line: str, directive: str) -> tuple[int, int]:
    """Offset and length of a statement in its line: the whole of it, else its name, else the line."""
    for wanted in (directive, directive.split(" ")[0]):
        at = line.find(wanted) if wanted else -1
        if at >= 0:
            return at, len(wanted)
    start = len(line) - len(line.lstrip())
    return start, max(1, len(line.strip()))
