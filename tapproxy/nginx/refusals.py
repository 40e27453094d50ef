"""What ``nginx -t`` would say to a configuration, as far as it can be told without running nginx.

Rules here: a complaint is nginx's, in its words, and was seen from nginx 1.22.1 or 1.31.3 (the tests ask both). The
tables are in ``directives``; crossplane's are used for argument counts and contexts (not strict: it has never heard of
newer directives), and not believed where they are stale.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from crossplane.analyzer import DIRECTIVES, analyze, enter_block_ctx
from crossplane.errors import NgxParserDirectiveError

from tapproxy.nginx import directives as known
from tapproxy.nginx.directives import Build, Version
from tapproxy.nginx.model import Context, Problem, Tree, location_name, read
from tapproxy.nginx.refusals_names import name_faults
from tapproxy.nginx.refusals_values import value_fault
from tapproxy.nginx.source import Directive


def load(file: str, *, version: Version, build: Build | None = None, texts: Mapping[str, str] | None = None) -> Tree:
    """Read ``file`` and what it includes, and note all that this nginx would refuse.

    ``build`` None: which modules that nginx has is not known, and none is missed.
    """
    tree = read(file, texts=texts)
    checker = _Checker(tree, version, build)
    checker.block(tree.root, ())
    if tree.kind == "main":
        checker.top()
    for one, text in name_faults(tree, version, foreign=bool(checker.foreign)):
        checker.note(one, text, ("http",))
    tree.problems += checker.found
    tree.foreign = list(checker.foreign.values())
    return tree


class _Checker:
    """Walks all blocks, with nginx's context of each."""

    def __init__(self, tree: Tree, version: Version, build: Build | None) -> None:
        self.tree = tree
        self.version = version
        self.build = build
        self.loaded = " ".join(one.args[0] for one in tree.root if one.name == "load_module" and one.args)
        self.found: list[Problem] = []
        # Directives that no table has, each name once: skipped, and said.
        self.foreign: dict[str, Directive] = {}

    def note(self, one: Directive, text: str, context: Context) -> None:
        where = " > ".join(context) or "main"
        self.found.append(Problem(text, one.file, one.line, one.text, where))

    def top(self) -> None:
        """What only a whole configuration can lack."""
        names = {one.name for one in self.tree.root}
        if "events" not in names:
            self.tree.problems.append(Problem('no "events" section in configuration', self.tree.file, 1, "", "main"))

    def block(self, block: tuple[Directive, ...], context: Context, parent: Directive | None = None) -> None:
        """The statements of one block, and of those within it."""
        first: dict[str, Directive] = {}
        locations: set[tuple[str, str]] = set()
        for one in block:
            if "lua" in one.name or (one.name not in DIRECTIVES and one.name not in known.OURS):
                self.foreign.setdefault(one.name, one)
            text = self._fault(one, context, parent)
            if text is None and context[:1] == ("http",):
                text = _misplaced_location(one, parent, locations) or _misplaced_uri(one, parent)
            if text is not None:
                self.note(one, text, context)
            elif one.name in known.SINGLE and one.name in first:
                self._duplicate(first[one.name], one, context)
            first.setdefault(one.name, one)
            if one.block is not None and one.name not in known.OPAQUE_BLOCKS:
                inner = enter_block_ctx({"directive": one.name}, context)
                self.block(one.block, inner, one)

    def _duplicate(self, first: Directive, second: Directive, context: Context) -> None:
        text = f'"{second.name}" directive is duplicate in {second.file}:{second.line}'
        # The snippet is not at fault, including it here is: other blocks may include it rightly.
        culprit = next((step for step in second.via if step not in first.via), second)
        self.note(culprit, text, context)

    def _fault(self, one: Directive, context: Context, parent: Directive | None) -> str | None:
        return self._unknown(one, context) or self._grammar(one, context) or self._value(one, context, parent)

    def _unknown(self, one: Directive, context: Context) -> str | None:
        name, unknown = one.name, f'unknown directive "{one.name}"'
        if name in known.SINCE and self.version < known.SINCE[name]:
            return f"{unknown} (nginx has it since {_dotted(known.SINCE[name])})"
        if name in known.REMOVED and self.version >= known.REMOVED[name] and context[:1] == ("http",):
            return f"{unknown} (nginx has dropped it in {_dotted(known.REMOVED[name])})"
        module = known.MODULES.get(name)
        if module is not None and self.build is not None and module not in self.build.modules:
            if module not in self.build.dynamic:
                return f"{unknown} (this nginx is built without the module {module})"
            if f"ngx_{module}_module" not in self.loaded:
                return f"{unknown} (the module {module} is not loaded: load_module is missing)"
        if (
            name.startswith(known.CLOSED_FAMILIES)
            and context[:1] == ("http",)
            and name not in DIRECTIVES
            and name not in known.NEWER_NAMES
            and name not in known.SINCE
        ):
            return unknown
        return None

    def _grammar(self, one: Directive, context: Context) -> str | None:
        if one.name.startswith(known.STALE_IN_CROSSPLANE):
            return None
        statement = {"directive": one.name, "line": one.line, "args": list(one.args)}
        try:
            analyze(one.file, statement, ";" if one.block is None else "{", context)
        except NgxParserDirectiveError as error:
            return str(error.strerror)
        return None

    def _value(self, one: Directive, context: Context, parent: Directive | None) -> str | None:
        if context[:1] != ("http",):
            return None
        if one.name == "keepalive" and not self._keepalive(one.args):
            return f'invalid value "{one.args[0] if one.args else ""}" in "{one.name}" directive'
        return value_fault(one, self.version, parent)

    def _keepalive(self, args: tuple[str, ...]) -> bool:
        if self.version >= known.HTTP11_DEFAULT:
            return bool(args) and args[0].isdigit() and args[1:] in ((), ("local",))
        return len(args) == 1 and re.fullmatch("[1-9][0-9]*", args[0]) is not None


def _misplaced_location(one: Directive, parent: Directive | None, seen: set[tuple[str, str]]) -> str | None:
    if one.name != "location" or not one.args:
        return None
    sign, name = location_name(one)
    key = ("" if sign == "^~" else sign, name)  # nginx keeps both kinds of prefix in one place
    if key in seen and sign not in ("~", "~*") and not name.startswith("@"):
        return f'duplicate location "{name}"'
    seen.add(key)
    if parent is None or parent.name != "location" or sign in ("~", "~*"):
        return None
    outer_sign, outer = location_name(parent)
    if outer_sign == "=":
        return f'location "{name}" cannot be inside the exact location "{outer}"'
    if name.startswith("@"):
        return f'named location "{name}" can be on the server level only'
    if not name.startswith(outer):  # of a regex too nginx compares the letters of its pattern
        return f'location "{name}" is outside location "{outer}"'
    return None


def _misplaced_uri(one: Directive, parent: Directive | None) -> str | None:
    if one.name != "proxy_pass" or parent is None or not one.args or "$" in one.args[0]:
        return None
    sign, name = location_name(parent) if parent.name == "location" else ("", "")
    bare = parent.name in ("if", "limit_except") or sign in ("~", "~*") or name.startswith("@")
    address = one.args[0].partition("://")[2]
    has_uri = ":/" in address.removeprefix("unix:/") if address.startswith("unix:") else "/" in address
    if bare and has_uri:
        return (
            '"proxy_pass" cannot have URI part in location given by regular expression, or inside named location, or '
            'inside "if" statement, or inside "limit_except" block'
        )
    return None


def _dotted(version: Version) -> str:
    return ".".join(str(part) for part in version)
