"""Who listens where, and which server block answers a name: nginx's rules, without a socket.

Rules here: an address and port is one listener even when several servers name it; the options (ssl, http2) of one
count for all of them. Addresses are compared as written, names of hosts are not resolved.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from tapproxy.nginx.directives import H2C_WITH_HTTP1, Version
from tapproxy.nginx.maps import maps_of
from tapproxy.nginx.model import Tree, walk
from tapproxy.nginx.pattern import regex
from tapproxy.nginx.source import Directive

# In the order in which they are looked for: an address that fits exactly before one that takes all.
_ANY = ("*", "0.0.0.0", "[::]")
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


@dataclass(frozen=True, slots=True)
class Listener:
    """One ``listen`` of one server."""

    host: str
    port: str
    tls: bool
    http2: bool
    default: bool

    @property
    def address(self) -> str:
        """As one writes it; the key by which servers share a listener."""
        return self.host if self.host.startswith("unix:") else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Server:
    """One server block of the http block."""

    block: Directive
    names: tuple[str, ...]
    listeners: tuple[Listener, ...]

    @property
    def name(self) -> str:
        """The first server_name, else the first address."""
        real = [name for name in self.names if name]
        return real[0] if real else ", ".join(one.address for one in self.listeners) or "(unknown)"

    def client_kinds(self, version: Version) -> tuple[str, ...]:
        """The kinds of client the contract names, of which this server accepts connections."""
        if not self.listeners:  # a fragment: what listens is in another file
            return ("http1", "tls_http1")
        kinds = set()
        for one in self.listeners:
            if one.tls:
                kinds.add("tls_http1")
            elif not one.http2 or version >= H2C_WITH_HTTP1:
                kinds.add("http1")
            if one.http2:
                kinds.add("h2")
        return tuple(kind for kind in ("http1", "tls_http1", "h2") if kind in kinds)

    def listeners_of(self, kind: str, version: Version) -> tuple[Listener, ...]:
        """Those that a client of this kind may come in by. HTTP/2 is spoken over TLS, where it can be."""
        secure = any(one.http2 and one.tls for one in self.listeners)

        def takes(one: Listener) -> bool:
            if kind == "h2":
                return one.http2 and (one.tls or not secure)
            if kind == "tls_http1":
                return one.tls
            return not one.tls and (not one.http2 or version >= H2C_WITH_HTTP1)

        return tuple(one for one in self.listeners if takes(one))


def _listener(one: Directive, http2_on: bool) -> Listener | None:
    options = set(one.args[1:])
    if "quic" in options:  # HTTP/3: another transport, not modelled
        return None
    host, port = address_of(one.args[0])
    return Listener(
        host,
        port,
        tls="ssl" in options,
        http2="http2" in options or http2_on,
        default=bool(options & {"default_server", "default"}),
    )


def address_of(text: str) -> tuple[str, str]:
    """Host and port of a ``listen`` or an upstream's ``server``."""
    if text.startswith("unix:"):
        return text.rstrip(":"), ""
    if text.isdigit():
        return "*", text
    match = re.fullmatch(r"(\[[^]]*\]|[^:]*)(?::(\w+))?", text)
    return (match[1], match[2] or "80") if match else (text, "80")


class Servers:
    """All servers of a configuration."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        http = tree.http
        self.all: list[Server] = [] if http is None else list(self._read(http))
        self._upstreams = {
            one.args[0].lower(): one
            for one in (http.block if http is not None else None) or ()
            if one.name == "upstream" and one.args
        }
        self.maps = maps_of(tree)
        self._by_address: dict[str, list[Server]] = {}
        for server in self.all:
            for address in dict.fromkeys(listener.address for listener in server.listeners):
                self._by_address.setdefault(address, []).append(server)

    def _read(self, http: Directive) -> Iterator[Server]:
        drafts: list[tuple[Directive, tuple[str, ...], list[Listener]]] = []
        for block in http.block or ():
            if block.name != "server":
                continue
            inner = block.block or ()
            names = tuple(arg for one in inner if one.name == "server_name" for arg in one.args)
            http2_on = any(one.name == "http2" and one.args == ("on",) for one in inner)
            tls_on = any(one.name == "ssl" and one.args == ("on",) for one in inner)
            listens = [one for one in inner if one.name == "listen" and one.args]
            found = [listener for one in listens if (listener := _listener(one, http2_on)) is not None]
            if not listens and self.tree.kind in ("main", "http"):
                found = [Listener("*", "80", tls=False, http2=http2_on, default=False)]
            if tls_on:
                found = [Listener(one.host, one.port, True, one.http2, one.default) for one in found]
            drafts.append((block, names, found))
        tls = {one.address for _, _, found in drafts for one in found if one.tls}
        http2 = {one.address for _, _, found in drafts for one in found if one.http2}
        for block, names, found in drafts:
            merged = tuple(
                Listener(one.host, one.port, one.address in tls, one.address in http2, one.default) for one in found
            )
            yield Server(block, names, merged)

    def on(self, address: str) -> list[Server]:
        """The servers behind one address, in the file's order."""
        return self._by_address.get(address, [])

    def answering(self, address: str, host: str | None) -> Server:
        """The server that answers ``host`` on ``address``: its name, or the default server."""
        candidates = self.on(address)
        named = best_match(candidates, host) if host else None
        if named is not None:
            return named
        for one in candidates:
            if any(listener.default and listener.address == address for listener in one.listeners):
                return one
        return candidates[0]

    def selected(self, host: str | None) -> list[Server]:
        """All servers, or those that answer ``host`` on any address."""
        if host is None:
            return self.all
        addresses = dict.fromkeys(listener.address for one in self.all for listener in one.listeners)
        chosen = [self.answering(address, host) for address in addresses]
        return [one for one in self.all if one in chosen]

    def upstream_block(self, name: str) -> Directive | None:
        """The ``upstream`` block of that name."""
        return self._upstreams.get(name.lower())

    def targets(self, server: Server) -> Iterator[tuple[str, str]]:
        """Host and port of every literal proxy_pass of a server, upstream blocks resolved to their servers."""
        for one in walk(server.block):
            if one.name != "proxy_pass":
                continue
            match = re.match(r"(https?)://(unix:[^:]+|\[[^]]*\]|[^/:$]+)(?::(\w+))?", one.args[0] if one.args else "")
            if match is None:
                continue
            block = self.upstream_block(match[2])
            if block is None:
                yield match[2], match[3] or ("443" if match[1] == "https" else "80")
                continue
            for inner in block.block or ():
                if inner.name == "server" and inner.args:
                    yield address_of(inner.args[0])

    @cached_property
    def behind_nginx(self) -> frozenset[str]:
        """The listeners of this configuration that another of its servers proxies to."""
        found = (self.listening(host, port) for one in self.all for host, port in dict.fromkeys(self.targets(one)))
        return frozenset(address for address in found if address is not None)

    def listening(self, host: str, port: str) -> str | None:
        """The address in this configuration that a connection to ``host:port`` reaches, if any does."""
        wanted = host if host.startswith("unix:") else f"{host}:{port}"
        if wanted in self._by_address:
            return wanted
        if host in _LOOPBACK:
            for local in (*_LOOPBACK, *_ANY):
                if f"{local}:{port}" in self._by_address:
                    return f"{local}:{port}"
        return None


def in_use(upstream: Directive | None) -> list[Directive]:
    """The servers of an upstream block that are not marked as down, those for need among them."""
    servers = () if upstream is None else upstream.named("server")
    return [one for one in servers if one.args and "down" not in one.args]


def stream_server(block: Directive) -> Server:
    """A server of the stream module: it takes any bytes, so HTTP/2 too where TLS lets a client choose."""
    found = [
        Listener(one.host, one.port, one.tls, http2=one.tls, default=False)
        for statement in block.named("listen")
        if statement.args and "udp" not in statement.args and (one := _listener(statement, False)) is not None
    ]
    return Server(block, (), tuple(found))


def best_match(servers: list[Server], host: str) -> Server | None:
    """nginx's order: exact name, longest leading wildcard, longest trailing wildcard, first regex."""
    host = host.lower().rstrip(".")
    ranked: list[tuple[int, int, int, Server]] = []
    for order, server in enumerate(servers):
        for name in server.names:
            rank = _name_rank(name.lower() if not name.startswith("~") else name, host)
            if rank is not None:
                ranked.append((rank, -len(name) if rank in (1, 2) else 0, order, server))
    return min(ranked, key=lambda entry: entry[:3])[3] if ranked else None


def _name_rank(name: str, host: str) -> int | None:
    if name == host or (name.startswith(".") and host == name[1:]):
        return 0
    if name.startswith("*.") and host.endswith(name[1:]):
        return 1
    if name.startswith(".") and host.endswith(name):
        return 1
    if name.endswith(".*") and host.startswith(name[:-1]):
        return 2
    if name.startswith("~"):
        pattern = regex(name[1:], ignore_case=True)
        return 3 if pattern is not None and pattern.search(host) else None
    return None
