"""The location that a path finds: exact, longest prefix (nested included), then regexes in the file's order.

Rules here: the order is that of ``ngx_http_core_find_location``. A regex that cannot be read here is written into
``undecided``, since another answer would lead elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from posixpath import normpath
from urllib.parse import unquote

from tapproxy.nginx.model import location_name
from tapproxy.nginx.pattern import regex
from tapproxy.nginx.source import Directive


@dataclass(frozen=True, slots=True)
class Found:
    """The locations from the outermost to the one that serves."""

    chain: tuple[Directive, ...] = ()
    final: bool = False  # nothing outside may override it
    redirect: bool = False


def find_location(block: Directive, uri: str, undecided: list[str]) -> Found:
    """``ngx_http_core_find_location``: exact, longest prefix (nested included), then regexes in the file's order."""
    prefixes: list[tuple[str, str, Directive]] = []
    patterns: list[tuple[str, str, Directive]] = []
    for one in block.block or ():
        if one.name == "location" and one.args:
            sign, name = location_name(one)
            if sign in ("~", "~*"):
                patterns.append((sign, name, one))
            elif not name.startswith("@"):
                prefixes.append((sign, name, one))
    best = _best_prefix(prefixes, uri)
    if best is not None and (best.final or best.redirect):
        return best
    found = Found()
    if best is not None:
        inner = find_location(best.chain[0], uri, undecided)
        found = Found((*best.chain, *inner.chain), inner.final, inner.redirect)
        if inner.final or inner.redirect or location_name(best.chain[0])[0] == "^~":
            return found
    for sign, pattern, one in patterns:
        compiled = regex(pattern, ignore_case=sign == "~*")
        if compiled is None:
            undecided.append(f"whether the regex of {one.file}:{one.line} matches (not readable here)")
        elif compiled.search(uri):
            inner = find_location(one, uri, undecided)
            return Found((one, *inner.chain), True, inner.redirect)
    return found


def _best_prefix(prefixes: list[tuple[str, str, Directive]], uri: str) -> Found | None:
    for exact in (True, False):
        for sign, name, one in prefixes:
            if name == uri and (sign == "=") == exact:
                return Found((one,), final=exact)
    for _, name, one in prefixes:
        # A location of one path more slash, with a handler: nginx answers 301, before it looks at any regex.
        if name == uri + "/" and _handler(one) is not None:
            return Found((one,), redirect=True)
    fitting = [(name, one) for sign, name, one in prefixes if sign != "=" and uri.startswith(name)]
    return Found((max(fitting, key=lambda entry: len(entry[0]))[1],)) if fitting else None


def _handler(block: Directive) -> Directive | None:
    return next((one for one in block.block or () if one.name.endswith("_pass")), None)


def normalise(path: str) -> str:
    """The path as nginx matches it: without query, decoded, slashes merged, dots resolved."""
    path = unquote(re.split(r"[?#]", path, maxsplit=1)[0])
    clean = normpath(re.sub(r"/+", "/", "/" + path))
    return clean + "/" if path.endswith("/") and clean != "/" else clean
