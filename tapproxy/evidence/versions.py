"""Which version of an engine a page is of, by the names on it.

Rules here: a name that is there says "not before", one that was dropped says "not after", and one that is always shown
from a version on says by its absence "before". Where these contradict one another, those that are there count: a fork,
or another server that speaks the same names, may leave things out. The bounds are those of the versions that were
looked at.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Final

from tapproxy.evidence.names import MARKERS, ROWS, Engine, Row

Version = tuple[int, ...]
_NUMBERS: Final = re.compile(r"v?(\d+(?:\.\d+){0,3})")
# vLLM counts its TTFT from before template and tokenising since this version, from after them until then.
_TTFT_BEFORE: Final[Version] = (0, 17)


def parse(text: str) -> Version | None:
    """``0.32.0``, ``v0.9.2.dev3+g1`` → numbers; None where there are none."""
    found = _NUMBERS.match(text.strip())
    return None if found is None else tuple(int(part) for part in found[1].split("."))


@dataclass(frozen=True, slots=True)
class Range:
    """From ``least`` to ``most``, both included; ``below`` is not. None: no bound."""

    least: Version | None = None
    most: Version | None = None
    below: Version | None = None

    def __str__(self) -> str:
        least, most, below = ("" if each is None else _text(each) for each in (self.least, self.most, self.below))
        ends = f"{most} or earlier" if most else f"before {below}" if below else ""
        if not least:
            return ends or "unknown"
        if most == least:
            return least
        return f"{least} to {most}" if most else f"{least} or later" + (f", before {below}" if below else "")

    def before(self, version: Version) -> bool:
        """Whether all of it is earlier than ``version``."""
        if self.most is not None and self.most < version:
            return True
        return self.below is not None and self.below <= version

    def from_(self, version: Version) -> bool:
        """Whether all of it is ``version`` or later."""
        return self.least is not None and self.least >= version


def _text(version: Version) -> str:
    return ".".join(map(str, version))


def guess(engine: Engine, names: Container[str], told: str | None = None, *, complete: bool = True) -> Range:
    """The range of versions that has these names; exactly ``told`` where the engine says its version.

    ``complete``: what is not shown does not exist. (Ray shows a metric once it was set, and not before.)
    """
    exact = parse(told) if told else None
    if exact is not None:
        return Range(exact, exact)
    least = most = below = None
    for name, since, until, always in _dated(engine):
        if name in names:
            least = _later(least, parse(since))
            most = _earlier(most, parse(until))
        elif always and complete:
            below = _earlier(below, parse(since))
    if least is not None and most is not None and most < least:
        most = None
    if below is not None and least is not None and below <= least:
        below = None
    if below is not None and most is not None:
        # The tighter of the two bounds.
        most, below = (None, below) if below <= most else (most, None)
    return Range(least, most, below)


def _dated(engine: Engine) -> list[tuple[str, str, str, bool]]:
    """(a name of the page, since, until, always) of what dates this engine's pages."""
    out = [(marker.name, marker.since, "", marker.always) for marker in MARKERS if marker.engine is engine]
    for row in ROWS:
        if row.engine is engine and (row.since or row.until) and not row.name.startswith("ray_vllm_"):
            out += [(name, row.since, row.until, row.always) for name in _first_names(row)]
    return out


def _first_names(row: Row) -> tuple[str, ...]:
    return next(row.parts())[1][:1]


def _later(one: Version | None, other: Version | None) -> Version | None:
    return max((each for each in (one, other) if each is not None), default=None)


def _earlier(one: Version | None, other: Version | None) -> Version | None:
    return min((each for each in (one, other) if each is not None), default=None)


def ttft_from(engine: Engine, version: Range) -> str:
    """Where the engine's TTFT begins: what it holds of the frontend hangs on that."""
    if engine is Engine.VLLM and version.from_(_TTFT_BEFORE):
        return "before tokenising"
    if engine is Engine.VLLM and version.before(_TTFT_BEFORE):
        return "after tokenising"
    return "unknown"
