"""``map`` blocks: the value of a variable that a configuration derives from another.

Rules here: nginx's order (exact, regex in the file's order, default); names are compared without case, as nginx does.
What uses wildcards for host names, includes, or a regex Python cannot read has no value here (None).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tapproxy.nginx.model import Tree
from tapproxy.nginx.pattern import regex
from tapproxy.nginx.source import Directive

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
        for one in lines:
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
