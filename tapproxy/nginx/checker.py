"""One static check: files in, predictions and findings out (contract, "check").

Rules here: it puts ``model``, ``routing``, ``predict`` and ``rules`` together and decides nothing of its own. A path
is tried in every server; findings that several paths share are told once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from tapproxy.core.errors import ConfigError
from tapproxy.core.findings import Finding
from tapproxy.nginx import directives as known
from tapproxy.nginx import fix
from tapproxy.nginx.directives import Build, Version
from tapproxy.nginx.fix import Edit
from tapproxy.nginx.model import Scope, Tree, Unreadable, parse_version
from tapproxy.nginx.predict import PROFILES, Hop, Outcome, Upstream, hop_of, predict, upstream_of
from tapproxy.nginx.refusals import load
from tapproxy.nginx.routing import Route, route
from tapproxy.nginx.rule import Flaw, View
from tapproxy.nginx.rules import CONFIG_INVALID, file_flaws, path_flaws, with_patches
from tapproxy.nginx.servers import Server, Servers, stream_server
from tapproxy.nginx.source import HIDDEN, SECRET_VALUE

# The usual API paths, tried where none is named.
DEFAULT_PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate",
    "/generate_stream",
)  # fmt: skip

_FOREIGN_SHOWN = 6
# Between the levels of a finding's context.
_LEVELS = " > "
_WEIGHT = {"error": 0, "warning": 1, "info": 2}


@dataclass(frozen=True, slots=True)
class CheckedPath:
    """One path through one server: where it ends, what is in force there, what each kind of client sees."""

    path: str
    server: Server
    hop: Hop
    fallbacks: tuple[Hop, ...]
    clients: dict[str, Outcome]
    # Where clients of a kind end elsewhere (a redirect of plain HTTP): their own way. ``hop`` is that of all others.
    elsewhere: dict[str, Hop] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The entry of ``paths`` in the contract."""
        found = self.hop.route
        location = found.scope.location
        return {
            "path": self.path,
            "server": self.server.name,
            "location": " ".join(location.args) if location else None,
            "file": location.file if location else self.server.block.file,
            "line": location.line if location else self.server.block.line,
            "proxy_pass": _shown(found.proxy_pass.args[0]) if found.proxy_pass else None,
            "upstream_path": found.target.path if found.target else None,
            "effective": _effective(found) if found.proxy_pass else {},
            "clients": {
                kind: {"streaming": one.streaming, "mechanism": one.mechanism, "why": one.why}
                for kind, one in self.clients.items()
            },
            "notes": [*found.notes, *self.hop.notes],
            "undecided": list(
                dict.fromkeys(one for hop in (self.hop, *self.elsewhere.values()) for one in hop.route.undecided)
            ),
            "fallbacks": [
                {**_place(hop.route), "clients": {kind: predict(hop, kind).streaming for kind in self.clients}}
                for hop in self.fallbacks
            ],
        }


def _shown(address: str) -> str:
    return HIDDEN if SECRET_VALUE.search(address) else address


def _effective(found: Route) -> dict[str, dict[str, Any]]:
    shown: dict[str, dict[str, Any]] = {}
    if found.scope.levels[-1].name == "stream":  # of other modules than those shown here
        return shown
    for name in known.SHOWN:
        setting = found.scope.setting(name)
        if setting.value is not None:
            shown[name] = {"value": setting.value, "from": setting.origin}
    return shown


def _place(found: Route) -> dict[str, Any]:
    location = found.scope.location or found.scope.levels[0]
    return {"location": " ".join(location.args), "file": location.file, "line": location.line}


@dataclass(slots=True)
class Examination:
    """Everything one check found out. ``unread`` is set where the text, or a part of it, could not be read."""

    nginx_version: str
    files: list[str] = field(default_factory=list)
    paths: list[CheckedPath] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    flaws: list[Flaw] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    trees: list[Tree] = field(default_factory=list)
    unread: Unreadable | None = None

    @property
    def findings(self) -> list[Finding]:
        """The findings, worst first."""
        return [one.finding for one in self.flaws]

    @property
    def edits(self) -> list[Edit]:
        """What all patches change together."""
        return [edit for one in self.flaws for edit in one.edits]

    @property
    def patch(self) -> str | None:
        """All patches as one."""
        return fix.unified(self.texts, self.edits, with_keys=True)

    def to_dict(self) -> dict[str, Any]:
        """``tapproxy.check/1``."""
        return {
            "schema": "tapproxy.check/1",
            "nginx_version": self.nginx_version,
            "files": self.files,
            "paths": [one.to_dict() for one in self.paths],
            "findings": [one.to_dict() for one in self.findings],
            "notes": self.notes,
        }


def examine(
    files: Sequence[str | Path],
    *,
    nginx_version: str,
    paths: Sequence[str] = DEFAULT_PATHS,
    server: str | None = None,
    upstream: Upstream = PROFILES["vllm"],
    build: Build | None = None,
    texts: Mapping[str, str] | None = None,
) -> Examination:
    """Check each of ``files``, a whole configuration or a fragment, as this nginx would read it.

    ``texts``: what the files so named hold once a patch is applied.
    """
    version = parse_version(nginx_version)
    result = Examination(nginx_version)
    for file in dict.fromkeys(str(one) for one in files):
        tree = _load(file, version, build, texts)
        result.texts |= tree.texts
        result.trees.append(tree)
        servers = Servers(tree)
        _note_scope(result, tree, servers)
        chosen = servers.selected(server)
        if server is not None and servers.all and not chosen:
            raise ConfigError(f"no server in {file} answers {server!r}")
        result.flaws += file_flaws(tree)
        for problem in tree.problems:
            if problem.unread and result.unread is None:
                result.unread = Unreadable(problem.file, problem.line, problem.text)
        if tree.problems:
            result.notes.append(f"nginx does not start with {file}: what it does to a path is told once it does")
        for one in chosen:
            seen: set[tuple[Any, ...]] = set()
            for path in paths:
                result.flaws += _examine_path(result, servers, one, path, server, upstream, version, seen)
        if not servers.all:
            result.paths += _stream_paths(tree, paths, upstream, version)
    result.files = list(result.texts)
    result.flaws = with_patches(_distinct(result.flaws), result.texts)
    return result


def _load(file: str, version: Version, build: Build | None, texts: Mapping[str, str] | None) -> Tree:
    try:
        return load(file, version=version, build=build, texts=texts)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from None


def _note_scope(result: Examination, tree: Tree, servers: Servers) -> None:
    if tree.kind != "main":
        result.notes.append(
            f"{tree.file} is a fragment ({tree.kind} level): settings of the levels above it are not seen, the "
            "defaults are taken for them"
        )
    if tree.foreign:
        named = ", ".join(f"{one.name} ({one.file}:{one.line})" for one in tree.foreign[:_FOREIGN_SHOWN])
        more = len(tree.foreign) - _FOREIGN_SHOWN
        result.notes.append(
            f"directives that are not nginx's own are skipped, and may change what is said here: {named}"
            + (f" and {more} more" if more > 0 else "")
        )
    if servers.all or tree.problems:
        return
    if any(one.name == "stream" for one in tree.root):
        result.notes.append(f"{tree.file} has no HTTP server; stream servers pass bytes on as they come")
    else:
        raise ConfigError(f"{tree.file} has no server block: nothing to check for streaming")


def _examine_path(
    result: Examination,
    servers: Servers,
    server: Server,
    path: str,
    host: str | None,
    upstream: Upstream,
    version: Version,
    seen: set[tuple[Any, ...]],
) -> Iterator[Flaw]:
    kinds = server.client_kinds(version)
    ways = _ways(servers, server, path, version, host, upstream, kinds)
    hop = _main(list(ways.values()))
    refused = servers.tree.problems
    if refused:
        clients = dict.fromkeys(kinds, _not_started(servers.tree))
    else:
        clients = {kind: predict(way, kind) for kind, way in ways.items()}
    fallbacks = tuple(hop_of(servers, one, upstream, version) for one in hop.route.fallbacks)
    elsewhere = {kind: way for kind, way in ways.items() if way is not hop}
    result.paths.append(CheckedPath(path, server, hop, fallbacks, clients, elsewhere))
    if refused:
        return  # what it would do if it started is not asked; the note says so
    near = any(one.address in servers.behind_nginx for one in server.listeners)
    for way in dict.fromkeys(id(one) for one in ways.values()):
        own = tuple(kind for kind in kinds if id(ways[kind]) == way)
        first = ways[own[0]]
        beside = fallbacks if first is hop else [hop_of(servers, r, upstream, version) for r in first.route.fallbacks]
        for one in (first, *beside):
            # What is said of a place may hang on the kinds of client that come there.
            place = (own, *_end(one)) if elsewhere else _end(one)
            yield from path_flaws(View(one, own, servers.tree.texts, servers, near), only_by_path=place in seen)
            seen.add(place)
        behind = first.inner
        while behind is not None:
            inner_kinds = behind.route.server.client_kinds(version)
            yield from path_flaws(View(behind, inner_kinds, servers.tree.texts, servers, behind_nginx=True))
            behind = behind.inner


def _ways(
    servers: Servers,
    server: Server,
    path: str,
    version: Version,
    host: str | None,
    upstream: Upstream,
    kinds: Sequence[str],
) -> dict[str, Hop]:
    """The way of each kind of client: one and the same, unless something asks how the client came in."""
    found = route(servers, server, path, version, host=host)
    if not found.undecided or len(kinds) < 2:
        return dict.fromkeys(kinds, hop_of(servers, found, upstream, version))
    by_end: dict[tuple[Any, ...], Hop] = {}
    ways = {}
    for kind in kinds:
        hop = hop_of(servers, route(servers, server, path, version, host=host, kind=kind), upstream, version)
        ways[kind] = by_end.setdefault((*_end(hop), hop.route.undecided, hop.route.failure), hop)
    return ways


def _main(ways: Sequence[Hop]) -> Hop:
    """The way that is shown: one that leads to an engine, where there is one."""
    return next((one for one in ways if one.route.proxy_pass is not None), ways[0])


def _not_started(tree: Tree) -> Outcome:
    first = tree.problems[0]
    return Outcome("fails", None, f"nginx does not start: {first.text} ({first.file}:{first.line})")


def _stream_paths(tree: Tree, paths: Sequence[str], upstream: Upstream, version: Version) -> Iterator[CheckedPath]:
    """Servers of the stream module know no paths: bytes pass as they come (measured: no hold)."""
    for stream in tree.root:
        for block in stream.named("server") if stream.name == "stream" else ():
            server = stream_server(block)
            passed = block.named("proxy_pass")
            found = Route(server, "", Scope((block, stream), version), proxy_pass=passed[0] if passed else None)
            why = "the stream module passes bytes on as they come, whatever they are"
            outcome = Outcome("streams", None, why) if passed else Outcome("fails", None, "no proxy_pass")
            if tree.problems:
                outcome = _not_started(tree)
            for path in paths:
                clients = dict.fromkeys(server.client_kinds(version), outcome)
                yield CheckedPath(path, server, Hop(found, upstream, version), (), clients)


def _end(hop: Hop) -> tuple[Any, ...]:
    """Where a path ends and how it came there: two that agree in this differ for no rule but those by path."""
    found = hop.route
    return (
        found.scope.levels,
        found.proxy_pass,
        found.failed_at,
        found.failure_kind,
        tuple(jump.statement for jump in found.jumps),
        None if hop.inner is None else _end(hop.inner),
    )


def _distinct(flaws: list[Flaw]) -> list[Flaw]:
    """Each finding once, worst first; the same place seen by several paths counts as one."""
    by_place: dict[tuple[Any, ...], Flaw] = {}
    for one in flaws:
        finding = one.finding
        place = (finding.rule, finding.file, finding.line, finding.directive, finding.context)
        known_one = by_place.get(place)
        if known_one is None or _WEIGHT[finding.severity] < _WEIGHT[known_one.finding.severity]:
            by_place[place] = one
    return sorted(
        _told_once(list(by_place.values())),
        key=lambda one: (_WEIGHT[one.finding.severity], one.finding.file or "", one.finding.line or 0),
    )


def _told_once(flaws: list[Flaw]) -> list[Flaw]:
    """Information that several locations share, word for word and line by line, once, at the level they share."""
    shared: dict[tuple[Any, ...], Flaw] = {}
    for index, one in enumerate(flaws):
        finding = one.finding
        told = (
            finding.rule,
            finding.file,
            finding.line,
            finding.directive,
            finding.evidence,
            finding.advice,
            one.edits,
        )
        key = told if finding.severity == "info" else (index,)
        first = shared.get(key)
        if first is None:
            shared[key] = one
        elif first.finding.context != finding.context:
            context = _common(first.finding.context or "", finding.context or "")
            shared[key] = replace(first, finding=replace(first.finding, context=context or None))
    return list(shared.values())


def _common(one: str, other: str) -> str:
    """The levels that two contexts begin with."""
    pairs = zip(one.split(_LEVELS), other.split(_LEVELS), strict=False)
    return _LEVELS.join(here for here, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def unreadable(error: Unreadable, nginx_version: str) -> Examination:
    """What can be told of a configuration that cannot be parsed: where that failed."""
    finding = Finding(
        rule=CONFIG_INVALID,
        severity="error",
        summary="the configuration cannot be read",
        evidence=error.text,
        advice="correct it, and run nginx -t on the machine that serves",
        file=error.file,
        line=error.line,
    )
    return Examination(nginx_version, files=[error.file], flaws=[Flaw(finding)], unread=error)


def check(
    files: Sequence[str | Path],
    *,
    nginx_version: str,
    path: str | None = "/v1/chat/completions",
    upstream_profile: str = "vllm",
    build: Build | None = None,
) -> list[Finding]:
    """The findings for one path (None: the usual API paths), worst first."""
    paths = DEFAULT_PATHS if path is None else (path,)
    upstream = upstream_of(upstream_profile)
    return examine(files, nginx_version=nginx_version, paths=paths, upstream=upstream, build=build).findings
