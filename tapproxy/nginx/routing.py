"""Which location finally serves a path: server rewrites, location choice, location rewrites, try_files, error_page.

Rules here: the order is nginx's own (``ngx_http_core_find_location``, the phases of ``ngx_http_core_module``). What
cannot be known from the text (a variable, a file on disk, a regex Python cannot read) is written into ``notes`` when
an assumption was made, and into ``undecided`` when another answer would lead elsewhere. Nothing is guessed silently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tapproxy.nginx import directives as known
from tapproxy.nginx.directives import Version
from tapproxy.nginx.locations import find_location, normalise
from tapproxy.nginx.maps import Map, expand
from tapproxy.nginx.model import Scope, location_name
from tapproxy.nginx.pattern import regex
from tapproxy.nginx.servers import Server, Servers
from tapproxy.nginx.source import Directive

_MAX_JUMPS = 10  # nginx: "rewrite or internal redirection cycle"
_PROXY_URL = re.compile(r"(https?)://(unix:[^:]+|\[[^]]*\]|[^/:]+)(?::(\w+))?:?(/.*)?")
_STEERING = frozenset({"return", "rewrite", "break", "proxy_pass", "limit_rate", "gzip"})


@dataclass(frozen=True, slots=True)
class Target:
    """Where proxy_pass leads: scheme and address, and the path sent there."""

    scheme: str
    host: str
    port: str
    path: str


@dataclass(frozen=True, slots=True)
class Jump:
    """The statement that sent the request to another location, and the levels it left."""

    statement: Directive
    left: Scope


Failure = Literal["answered", "slash-redirect", "no-handler"]


@dataclass(frozen=True, slots=True)
class Route:
    """The way of one request through one server. ``failure`` says why nothing is proxied, where that is so.

    ``failure_kind`` and ``failed_at`` are for rules: how, and the block in which.
    """

    server: Server
    path: str
    scope: Scope
    proxy_pass: Directive | None = None
    target: Target | None = None
    failure: str | None = None
    notes: tuple[str, ...] = ()
    undecided: tuple[str, ...] = ()
    fallbacks: tuple[Route, ...] = ()
    jumps: tuple[Jump, ...] = ()
    failure_kind: Failure | None = None
    failed_at: Directive | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def expand(self, text: str, maps: Mapping[str, Map]) -> str | None:
        """The text with its variables filled in, or None where one is not known here."""
        return expand(text, self.variables, maps)


@dataclass(slots=True)
class _Answered(Exception):
    """nginx answers here itself, or cannot serve."""

    why: str
    kind: Failure = "answered"
    at: Directive | None = None
    code: str = ""  # the status, where it is known: error_page may lead on


@dataclass(slots=True)
class _Walk:
    """One request on its way. The state is nginx's: the URI, whether it changed, variables set so far."""

    servers: Servers
    server: Server
    scope: Scope
    uri: str
    method: str
    variables: dict[str, str]
    notes: list[str] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    captures: tuple[str, ...] = ()
    rewritten: bool = False  # proxy_pass then ignores its own URI part
    internal: bool = False
    if_block: Directive | None = None
    jumps: list[Jump] = field(default_factory=list)
    rewrote: Directive | None = None

    # -- variables ---------------------------------------------------------------------------------------------

    def expand(self, text: str) -> str | None:
        """The text with its variables filled in, or None where one is not known here."""
        return expand(text, self.known(), self.servers.maps)

    def known(self) -> dict[str, str]:
        """All variables whose value is known at this moment."""
        numbered = {str(n): self.captures[n - 1] if n <= len(self.captures) else "" for n in range(1, 10)}
        return {**self.variables, **numbered, "uri": self.uri, "document_uri": self.uri}

    # -- the rewrite module ------------------------------------------------------------------------------------

    def rewrites(self, block: Directive) -> str:
        """Run one block's rewrite statements: ``last`` (search again), ``break`` (stay) or ``end`` (ran through)."""
        for one in block.block or ():
            if one.name == "set" and len(one.args) == 2:
                self._set(one)
            elif one.name == "return":
                why = f"answered here: {one.text.rstrip(';')} ({one.file}:{one.line})"
                raise _Answered(why, code=one.args[0] if one.args else "")
            elif one.name == "break":
                return "break"
            elif one.name == "rewrite" and len(one.args) >= 2:
                flag = self._rewrite(one)
                if flag is not None:
                    return flag
            elif one.name == "if":
                flag = self._if(one)
                if flag is not None:
                    return flag
        return "end"

    def _set(self, one: Directive) -> None:
        name, value = one.args[0].lstrip("$"), self.expand(one.args[1])
        if value is None:
            self.variables.pop(name, None)
        else:
            self.variables[name] = value

    def _rewrite(self, one: Directive) -> str | None:
        compiled = regex(one.args[0], ignore_case=False)
        if compiled is None:
            self.undecided.append(f"whether the rewrite of {one.file}:{one.line} applies (regex not readable here)")
            return None
        match = compiled.search(self.uri)
        if match is None:
            return None
        self.captures = tuple(group or "" for group in match.groups())
        flag = one.args[2] if len(one.args) > 2 else ""
        if flag in ("redirect", "permanent") or re.match(r"https?://|\$scheme", one.args[1]):
            raise _Answered(f"redirected to another address ({one.file}:{one.line})")
        replacement = self.expand(one.args[1].split("?", 1)[0])
        if replacement is None:
            self.undecided.append(f"where the rewrite of {one.file}:{one.line} leads (it uses a variable)")
            return None
        self.uri, self.rewritten, self.rewrote = normalise(replacement), True, one
        if flag in ("last", "break"):
            return flag
        return None

    def _if(self, one: Directive) -> str | None:
        verdict = self._condition(one)
        steering = sorted({inner.name for inner in one.block or ()} & _STEERING)
        if verdict is None:
            if steering:
                self.undecided.append(
                    f"whether {one.text.removesuffix(' {')} holds ({one.file}:{one.line}; it has {', '.join(steering)})"
                )
            for inner in one.block or ():
                if inner.name == "set" and inner.args:
                    self.variables.pop(inner.args[0].lstrip("$"), None)
            return None
        if not verdict:
            return None
        self.if_block = one
        flag = self.rewrites(one)
        return None if flag == "end" else flag

    def _condition(self, one: Directive) -> bool | None:
        words = list(one.args)
        if not words:
            return None
        # A bracket may be a word of its own; an empty word in quotes is one to compare with.
        words[:1] = [word] if (word := words[0].removeprefix("(")) else []
        if words:
            words[-1:] = [word] if (word := words[-1].removesuffix(")")) else []
        if not words:
            return None
        if len(words) == 1:
            value = self.expand(words[0])
            return None if value is None else value not in ("", "0")
        if words[0].lstrip("!") in ("-f", "-d", "-e", "-x"):
            self.notes.append(f"assumed: nothing on disk under this path ({one.file}:{one.line})")
            return words[0].startswith("!")
        if len(words) != 3:
            return None
        value, operator, operand = self.expand(words[0]), words[1], words[2]
        if value is None:
            return None
        if operator in ("=", "!="):
            other = self.expand(operand)
            return None if other is None else (value == other) == (operator == "=")
        compiled = regex(operand, ignore_case="*" in operator)
        if compiled is None or operator.strip("!*") != "~":
            return None
        return (compiled.search(value) is not None) != operator.startswith("!")

    # -- the phases --------------------------------------------------------------------------------------------

    def run(self, named: str | None = None) -> Route:
        """From the server block to what serves the request; ``named`` starts in that named location."""
        server_scope = self.scope
        try:
            return self._phases(server_scope, named)
        except _Answered as answer:
            statement = self._error_page(answer.code)
            if statement is None:
                return self._failed(answer)
        # A status of nginx's own, and a page for it: `error_page 418 = @stream; return 418;` is a way to jump.
        self.jumps.append(Jump(statement, self.scope))
        self.internal, wanted = True, statement.args[-1]
        if not wanted.startswith("@"):
            self.uri, self.method = normalise(wanted), "GET"
            self.variables["request_method"] = "GET"
        try:
            return self._phases(server_scope, wanted if wanted.startswith("@") else None)
        except _Answered as answer:  # recursive_error_pages is off by default
            return self._failed(answer)

    def _phases(self, server_scope: Scope, named: str | None) -> Route:
        self.scope = server_scope
        if named is None:
            self.rewrites(self.server.block)
            self.if_block = None  # a server-level "if" changes no location's settings
        return self._serve(server_scope, named)

    def _error_page(self, code: str) -> Directive | None:
        for one in self.scope.statements("error_page") if code else ():
            if code in one.args[:-1] and one.args[-1].startswith(("@", "/")) and "$" not in one.args[-1]:
                return one
        return None

    def _failed(self, answer: _Answered) -> Route:
        found = self._route(failure=answer.why)
        return replace(found, failure_kind=answer.kind, failed_at=answer.at or self.scope.location)

    def _serve(self, server_scope: Scope, named: str | None) -> Route:
        for _ in range(_MAX_JUMPS + 1):
            self.scope = self._enter(server_scope, named)
            self.if_block = None
            location = self.scope.levels[0]
            flag = self.rewrites(location)
            if self._moved(flag):
                if self.rewrote is not None:
                    self.jumps.append(Jump(self.rewrote, self.scope))
                named = None
                continue
            jump = self._try_files(location)
            if jump is None:
                return self._content()
            named = jump if jump.startswith("@") else None
            if named is None:
                self.uri = normalise(jump)
        raise _Answered("rewrite or internal redirection cycle: nginx answers 500")

    def _moved(self, flag: str) -> bool:
        """Whether the URI has changed so that nginx looks for the location again."""
        changed, self._changed_from = self.uri != self._changed_from, self.uri
        if flag == "break":
            return False
        self.internal = self.internal or changed
        return changed or flag == "last"

    _changed_from: str = ""

    def _enter(self, server_scope: Scope, named: str | None) -> Scope:
        self._changed_from = self.uri
        if named is not None:
            for one in self.server.block.block or ():
                if one.name == "location" and one.args[:1] == (named,):
                    return server_scope.inside(one)
            raise _Answered(f"no location {named}: nginx answers 500")
        found = find_location(self.server.block, self.uri, self.undecided)
        if not found.chain:
            raise _Answered(f"no location matches {self.uri}: nginx looks for a file")
        last = found.chain[-1]
        if found.redirect:
            raise _Answered(
                f"redirected (301) to {self.uri}/ by location {' '.join(last.args)} ({last.file}:{last.line})",
                "slash-redirect",
                last,
            )
        scope = server_scope
        for location in found.chain:
            scope = scope.inside(location)
        if not self.internal and any(one.name == "internal" for one in last.block or ()):
            raise _Answered(f"404: the location is internal ({last.file}:{last.line})")
        return scope

    def _try_files(self, location: Directive) -> str | None:
        statement = next((one for one in location.block or () if one.name == "try_files"), None)
        if statement is None or not statement.args:
            return None
        self.notes.append(
            f"assumed: no file on disk for this path, so try_files goes to its last argument "
            f"({statement.file}:{statement.line})"
        )
        self.internal = True
        self.jumps.append(Jump(statement, self.scope))
        last = self.expand(statement.args[-1])
        if last is None:
            raise _Answered(f"try_files leads to a variable, not followed ({statement.file}:{statement.line})")
        if last.startswith("="):
            raise _Answered(f"{last[1:]} from try_files ({statement.file}:{statement.line})", code=last[1:])
        return last

    def _content(self) -> Route:
        blocks = [self.scope.levels[0]]
        if self.if_block is not None:
            self.scope = self.scope.inside(self.if_block)
            blocks.insert(0, self.if_block)
        limit = next((one for one in blocks[-1].block or () if one.name == "limit_except"), None)
        if limit is not None and not _allowed(limit, self.method):
            inner = {one.name for one in limit.block or ()}
            if any(one.name == "deny" and one.args == ("all",) for one in limit.block or ()) and "allow" not in inner:
                raise _Answered(f"403 for {self.method}: limit_except ({limit.file}:{limit.line})", code="403")
            if inner & {"deny", "allow", "auth_basic"}:
                self.undecided.append(f"whether limit_except lets the client in ({limit.file}:{limit.line})")
            self.scope = self.scope.inside(limit)
            blocks.insert(0, limit)
        for block in blocks:
            for one in block.block or ():
                if one.name == "proxy_pass" and one.args:
                    return self._proxied(one)
                if one.name in known.OTHER_PASSES:
                    return self._route(failure=f"served by {one.name} ({one.file}:{one.line}), which is not examined")
        location = self.scope.location
        where = f" ({location.file}:{location.line})" if location else ""
        raise _Answered(f"404: no proxy_pass in the location{where}, nginx looks for a file", "no-handler", location)

    def _proxied(self, one: Directive) -> Route:
        address = self.expand(one.args[0])
        match = _PROXY_URL.fullmatch(address) if address is not None else None
        target = None
        if address is None:
            self.notes.append(f"the engine's address is a variable, not followed ({one.file}:{one.line})")
        elif match is not None:
            scheme, host, port, uri = match.groups()
            default_port = "443" if scheme == "https" else "80"
            target = Target(scheme, host, port or default_port, self._upstream_path(one, uri))
        return self._route(proxy_pass=one, target=target)

    def _upstream_path(self, one: Directive, uri: str | None) -> str:
        location = self.scope.location
        if uri is None or self.rewritten or location is None:
            return self.uri
        if "$" in one.args[0]:
            return uri  # with variables nginx sends the URI as it is
        return uri + self.uri[len(location_name(location)[1]) :]

    def _route(
        self, *, proxy_pass: Directive | None = None, target: Target | None = None, failure: str | None = None
    ) -> Route:
        return Route(
            self.server,
            self.uri,
            self.scope,
            proxy_pass,
            target,
            failure,
            tuple(dict.fromkeys(self.notes)),
            tuple(dict.fromkeys(self.undecided)),
            jumps=tuple(self.jumps),
            variables=self.known(),
        )


def _allowed(limit: Directive, method: str) -> bool:
    return method in limit.args or (method == "HEAD" and "GET" in limit.args)


def _incoming(server: Server, version: Version, kind: str | None, address: str | None) -> dict[str, str]:
    """The variables that tell how the client came in, as far as the listeners it may have used agree."""
    listeners = [
        one
        for one in (server.listeners if kind is None else server.listeners_of(kind, version))
        if address is None or one.address == address
    ]
    tls, ports = {one.tls for one in listeners}, {one.port for one in listeners}
    if not server.listeners and kind is not None:  # a fragment: what listens is in another file
        tls = {kind == "tls_http1"}
    found: dict[str, str] = {}
    if tls == {True}:
        found |= {"scheme": "https", "https": "on"}
    elif tls == {False}:
        found |= {"scheme": "http", "https": "", "ssl_protocol": "", "ssl_cipher": ""}
    if len(ports) == 1 and ports != {""}:
        found["server_port"] = next(iter(ports))
    return found


def route(
    servers: Servers,
    server: Server,
    path: str,
    version: Version,
    *,
    method: str = "POST",
    host: str | None = None,
    kind: str | None = None,
    address: str | None = None,
) -> Route:
    """Where a request for ``path`` ends in ``server``, with the locations that error_page may send it to.

    ``kind``: of client, and ``address``: the listener it came in by; None is any that the server has.
    """
    http = servers.tree.http
    levels = (server.block,) if http is None else (server.block, http)
    uri = normalise(path)
    query = path.partition("?")[2]
    incoming = _incoming(server, version, kind, address)

    def walk(uri: str, method: str, *, internal: bool) -> _Walk:
        variables = {
            "request_method": method,
            "request_uri": path,
            "args": query,
            "query_string": query,
            "is_args": "?" if query else "",
            "http_upgrade": "",  # an API client does not ask for a WebSocket
        }
        variables |= incoming
        if host is not None:
            variables |= {"host": host, "http_host": host}
        return _Walk(servers, server, Scope(levels, version), uri, method, variables, internal=internal)

    main = walk(uri, method, internal=False).run()
    fallbacks: dict[str, Route] = {}
    if main.proxy_pass is not None:
        for statement in main.scope.statements("error_page"):
            wanted = statement.args[-1]
            if wanted.startswith("@"):
                found = walk(main.path, method, internal=True).run(named=wanted)
            elif wanted.startswith("/") and "$" not in wanted:
                # A URI turns the request into GET; only a named location keeps the method.
                found = walk(normalise(wanted), "GET", internal=True).run()
            else:
                continue
            fallbacks[wanted] = replace(found, jumps=(Jump(statement, main.scope), *found.jumps))
    proxied = tuple(
        one for one in fallbacks.values() if one.proxy_pass is not None and one.proxy_pass is not main.proxy_pass
    )
    return replace(main, path=uri, fallbacks=proxied)
