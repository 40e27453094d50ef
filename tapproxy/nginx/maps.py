"""``map`` blocks: the value of a variable that a configuration derives from another.

Rules here: nginx's order (exact, regex in the file's order, default); names are compared without case, as nginx does.
What uses wildcards for host names, includes, or a regex Python cannot read has no value here (None).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tapproxy.nginx.model import Tree
from tapproxy.nginx.pattern import regex
from tapproxy.nginx.source import Directive

# ``$name`` or ``${name}``: the name is in one of the two groups.
VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_MAX_DEPTH = 10
_PARAMETERS = frozenset({"hostnames", "volatile"})


@dataclass(frozen=True, slots=True)
class Map:
    """One ``map $source $name { ... }``."""

    source: str
    block: Directive

    def entry(self, value: str) -> Directive | None:
        """The line that a source's value meets; None where it cannot be told."""
        lines = [one for one in self.block.block or () if one.name not in _PARAMETERS]
        if any(one.name in ("hostnames", "include") for one in self.block.block or ()):
            return None
        for one in lines:
            if one.name != "default" and one.name.removeprefix("\\").lower() == value.lower():
                return one
        for one in lines if value else ():  # nginx asks no regex about an empty value (measured on both versions)
            if one.name.startswith("~"):
                pattern = one.name[2:] if one.name.startswith("~*") else one.name[1:]
                compiled = regex(pattern, ignore_case=one.name.startswith("~*"))
                if compiled is None:
                    return None
                if compiled.search(value):
                    return one
        return next((one for one in lines if one.name == "default"), None)

    def value(self, source: str, expand: Callable[[str], str | None]) -> str | None:
        """What the variable is where the source has this value; a map without a default gives an empty one."""
        one = self.entry(source)
        if one is None:
            return None if any(inner.name == "include" for inner in self.block.block or ()) else ""
        if len(one.args) != 1 or re.search(r"\$\d", one.args[0]):
            return None
        return expand(one.args[0])


def maps_of(tree: Tree) -> dict[str, Map]:
    """All maps of a configuration, by the name of the variable they set."""
    found: dict[str, Map] = {}
    for one in (tree.http.block if tree.http is not None else None) or ():
        if one.name == "map" and len(one.args) == 2:
            found.setdefault(one.args[1].lstrip("$"), Map(one.args[0], one))
    return found


def expand(text: str, variables: Mapping[str, str], maps: Mapping[str, Map], depth: int = 0) -> str | None:
    """The text with its variables filled in, ``map`` blocks followed, or None where one is not known."""
    missing = False

    def value(match: re.Match[str]) -> str:
        nonlocal missing
        name = match[1] or match[2]
        found = variables.get(name)
        if found is None and name in maps and depth < _MAX_DEPTH:
            source = expand(maps[name].source, variables, maps, depth + 1)
            if source is not None:
                found = maps[name].value(source, lambda text: expand(text, variables, maps, depth + 1))
        missing = missing or found is None
        return found or ""

    filled = VARIABLE.sub(value, text)
    return None if missing else filled
