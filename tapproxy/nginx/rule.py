"""What a rule is, what it looks at, and the changes that rules propose.

Rules here: a rule is a row with a finder that yields what it saw; each number in an evidence was measured on nginx
1.22.1 and 1.31.3 with events of 210 B every 20 ms. A change touches the serving location, and another level only
where nothing else is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tapproxy.core.findings import Finding, Severity
from tapproxy.nginx import fix
from tapproxy.nginx.fix import Edit
from tapproxy.nginx.model import Scope, Setting, Tree
from tapproxy.nginx.predict import Hop
from tapproxy.nginx.routing import Route
from tapproxy.nginx.servers import Servers
from tapproxy.nginx.source import Directive

# Where engines stream, and where clients of the Model Context Protocol and of bare event streams do.
API_PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate", "/mcp",
    "/sse", "/generate_stream",
)  # fmt: skip
OFF = "set proxy_buffering off in the location that serves the path"


@dataclass(frozen=True, slots=True)
class View:
    """What a rule looks at: one hop, the kinds of client it serves, the files' texts, the other servers.

    ``behind_nginx``: another server of the same files proxies to this one.
    """

    hop: Hop
    kinds: tuple[str, ...]
    texts: Mapping[str, str]
    servers: Servers
    behind_nginx: bool = False

    @property
    def route(self) -> Route:
        """The way of the request to this hop's upstream."""
        return self.hop.route

    @property
    def scope(self) -> Scope:
        """The levels that the serving location gets its settings from."""
        return self.hop.route.scope

    @property
    def location(self) -> Directive:
        """The serving location, or the server where there is none."""
        return self.scope.location or self.scope.levels[0]

    @property
    def tree(self) -> Tree:
        """All files of this check."""
        return self.servers.tree

    def value(self, name: str) -> str:
        """The value in force, lower case; empty where there is none."""
        return (self.scope.setting(name).value or "").lower()

    def explicit(self, name: str) -> Setting | None:
        """The setting where some level makes it, else None."""
        setting = self.scope.setting(name)
        return setting if setting.sources else None

    @property
    def upstream_block(self) -> Directive | None:
        """The ``upstream`` block that proxy_pass names."""
        return self.servers.upstream_block(self.route.target.host) if self.route.target else None


@dataclass(frozen=True, slots=True)
class Hit:
    """Where a rule fired, and why. ``severity`` and ``advice`` only where they differ from the rule's."""

    at: Directive
    evidence: str
    edits: tuple[Edit, ...] = ()
    severity: Severity | None = None
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: the slug of the contract, its weight, what it says and advises, and its finder."""

    slug: str
    severity: Severity
    summary: str
    advice: str
    find: Callable[[View], Iterator[Hit]]
    # Whether it looks at the path itself, and not only at where the path ends.
    by_path: bool = False


@dataclass(frozen=True, slots=True)
class TreeRule:
    """A row about the files as a whole, before any path is followed."""

    slug: str
    severity: Severity
    summary: str
    advice: str
    find: Callable[[Tree], Iterator[Hit]]


@dataclass(frozen=True, slots=True)
class Flaw:
    """A finding with the edits of its patch, so that several patches can be made one."""

    finding: Finding
    edits: tuple[Edit, ...] = field(default=())


# -- changes ----------------------------------------------------------------------------------------------------


def add_beside(view: View, *statements: str) -> Edit:
    """New statements in the serving location: behind proxy_pass where that stands in the location itself."""
    anchor, location = view.route.proxy_pass, view.location
    if anchor is not None and anchor.via == location.via and anchor in (location.block or ()):
        return fix.insert_after(view.texts[anchor.file], anchor, *statements)
    return fix.insert_first(view.texts[location.file], location, *statements)


def set_here(view: View, name: str, value: str) -> tuple[Edit, ...]:
    """One value for the serving location and nowhere else: other locations keep what they have.

    Where an include gives the location its value, that include is changed: nginx refuses a second statement.
    """
    explicit = view.scope.statements(name)
    inside = (view.location.block or (), *(level.block or () for level in view.scope.levels[:1]))
    if explicit and any(explicit[0] in block for block in inside):
        return _with_args(view, explicit[0], value)
    return (add_beside(view, f"{name} {value};"),)


def _with_args(view: View, one: Directive, value: str) -> tuple[Edit, ...]:
    text = view.texts[one.file]
    start, end = one.arg_spans[0][0], one.arg_spans[-1][1]
    return () if text[start:end] == value else (Edit(one.file, start, end, value),)


def send_header(view: View, name: str, value: str) -> Edit:
    """One more field of the request to the engine, where the others are: nginx takes all of one level or none."""
    headers = view.scope.statements("proxy_set_header")
    line = f"proxy_set_header {name} {value};"
    return fix.insert_after(view.texts[headers[-1].file], headers[-1], line) if headers else add_beside(view, line)


def buffering_off(view: View) -> tuple[Edit, ...]:
    """proxy_buffering off in the serving location."""
    return set_here(view, "proxy_buffering", "off")


def remove(view: View, one: Directive) -> Edit:
    """The statement, taken out of its file."""
    return fix.remove(view.texts[one.file], one)


def with_directive(name: str, wrong: Callable[[View, Directive], Iterator[Hit]]) -> Callable[[View], Iterator[Hit]]:
    """A finder that looks at each statement of ``name`` in force on the path."""

    def find(view: View) -> Iterator[Hit]:
        if view.route.proxy_pass is not None:
            for one in view.scope.statements(name):
                yield from wrong(view, one)

    return find
