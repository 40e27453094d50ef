"""What nginx refuses in a configuration as a whole: names that are missing or taken, sizes that do not fit together.

Rules here: seen from ``nginx -t`` of 1.22.1 and 1.31.3. A name that another file may define (the file is a fragment)
or a module that is not known here (third-party directives) is not missed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from tapproxy.nginx import directives as known
from tapproxy.nginx.directives import Version
from tapproxy.nginx.maps import VARIABLE
from tapproxy.nginx.model import Scope, Tree, walk
from tapproxy.nginx.source import Directive
from tapproxy.nginx.values import size_bytes

Fault = tuple[Directive, str]

_CAPTURE = re.compile(r"\(\?P?<([A-Za-z_]\w*)>")
# Directives whose arguments nginx expands when it reads them, so that an unknown variable is refused.
_EXPANDED: Final = frozenset(
    [
        "proxy_set_header",
        "add_header",
        "proxy_pass",
        "set",
        "return",
        "rewrite",
        "if",
        "limit_rate",
        "proxy_cache_key",
        "proxy_cache_bypass",
        "proxy_no_cache",
        "access_log",
        "log_format",
        "map",
        "proxy_set_body",
        "proxy_method",
        "try_files",
        "limit_req_zone",
        "limit_conn_zone",
    ]
)
# Directives that make a variable: which of their arguments names it.
_SETTERS: Final = {
    "auth_jwt_claim_set": 0, "auth_request_set": 0, "geo": -1, "js_set": 0, "js_var": 0, "keyval": 1, "map": 1,
    "perl_set": 0, "set": 0, "split_clients": 1,
}  # fmt: skip
_BUFFERS = ("proxy_buffer_size", "proxy_buffers", "proxy_busy_buffers_size", "proxy_max_temp_file_size")


def name_faults(tree: Tree, version: Version, *, foreign: bool) -> Iterator[Fault]:
    """Each statement that cannot stand beside the others, and why. ``foreign``: unknown directives were seen."""
    http = tree.http
    if http is None:
        return
    yield from _upstreams(http)
    yield from _zones(http, complete=tree.kind == "main")
    yield from _listeners(http)
    yield from _buffers(Scope((http,), version), http)
    if tree.kind == "main" and not foreign:
        yield from _variables(http)


# -- upstream blocks --------------------------------------------------------------------------------------------


def _upstreams(http: Directive) -> Iterator[Fault]:
    names: dict[str, Directive] = {}
    for one in http.named("upstream"):
        name = one.args[0].lower() if one.args else ""
        if name in names:
            yield one, f'duplicate upstream "{one.args[0]}"'
        names.setdefault(name, one)
        servers = one.named("server")
        if not servers and not one.named("state"):  # a commercial nginx keeps its servers in a file
            yield one, "no servers are inside upstream"
        elif servers and all("backup" in server.args for server in servers):
            yield one, f'no servers in upstream "{one.args[0]}"'
        for method in (*one.named("ip_hash"), *one.named("hash"), *one.named("random")):
            for server in servers:
                if "backup" in server.args and server.start > method.start:
                    yield server, 'balancing method does not support parameter "backup"'
        for name in ("keepalive", "keepalive_timeout", "keepalive_requests"):
            for second in one.named(name)[1:]:
                yield second, f'"{name}" directive is duplicate'
    for one in walk(http):
        if one.name == "proxy_pass" and one.args and "$" not in one.args[0]:
            host, colon, port = one.args[0].partition("://")[2].partition("/")[0].partition(":")
            if colon and host.lower() in names:
                yield one, f'upstream "{host}" may not have port {port}'


# -- zones ------------------------------------------------------------------------------------------------------


def _zones(http: Directive, *, complete: bool) -> Iterator[Fault]:
    zones: dict[str, Directive] = {}
    for name in ("proxy_cache_path", "limit_req_zone", "limit_conn_zone"):
        for one in http.named(name):
            wanted = "keys_zone=" if name == "proxy_cache_path" else "zone="
            zone = next((arg[len(wanted) :].partition(":")[0] for arg in one.args if arg.startswith(wanted)), None)
            if zone is not None and zone in zones:
                yield one, f'duplicate zone "{zone}"'
            elif zone is not None:
                zones[zone] = one
    for second in _seconds(http.named("log_format")):
        yield second, f'duplicate "log_format" name "{second.args[0]}"'
    for one in walk(http) if complete else ():
        zone = None
        if one.name == "proxy_cache" and len(one.args) == 1 and one.args[0] != "off" and "$" not in one.args[0]:
            zone = one.args[0]
        elif one.name == "limit_req":
            zone = next((arg[5:] for arg in one.args if arg.startswith("zone=")), None)
        elif one.name == "limit_conn" and len(one.args) == 2:
            zone = one.args[0]
        if zone is not None and zone not in zones:
            yield one, f'"{one.name}" zone "{zone}" is unknown'


def _seconds(statements: tuple[Directive, ...]) -> Iterator[Directive]:
    seen: set[str] = set()
    for one in statements:
        if one.args and one.args[0] in seen:
            yield one
        seen.update(one.args[:1])


# -- listen -----------------------------------------------------------------------------------------------------


def _listeners(http: Directive) -> Iterator[Fault]:
    defaults: set[str] = set()
    for server in http.named("server"):
        own: set[str] = set()
        for one in server.named("listen"):
            address = one.args[0] if one.args else ""
            if "quic" in one.args:  # UDP: beside TCP on the same port
                address += " quic"
            if address.isdigit():
                address = f"*:{address}"
            if address in own:
                yield one, f"a duplicate listen {address}"
            own.add(address)
            if {"default_server", "default"} & set(one.args[1:]):
                if address in defaults:
                    yield one, f"a duplicate default server for {address}"
                defaults.add(address)


# -- proxy_buffers ----------------------------------------------------------------------------------------------


def _buffers(scope: Scope, block: Directive) -> Iterator[Fault]:
    """Where a level changes one of the sizes, all of them have to fit again."""
    own = [one for name in _BUFFERS for one in block.named(name)]
    if block.name == "server":
        # nginx looks at the sizes of a server and its locations, never at those of the http block by themselves.
        own = [one for name in _BUFFERS for one in scope.statements(name)]
    text = _misfit(scope) if own and block.name != "http" else None
    if text is not None:
        yield own[-1], text
    for inner in block.block or ():
        if inner.block is not None and inner.name in ("server", "location", "if"):
            yield from _buffers(scope.inside(inner), inner)


def _misfit(scope: Scope) -> str | None:
    first = size_bytes(scope.setting("proxy_buffer_size").value)
    count_text, _, each_text = (scope.setting("proxy_buffers").value or "").partition(" ")
    count, each = size_bytes(count_text), size_bytes(each_text)
    if first is None or count is None or each is None:
        return None
    if count < 2:
        return 'there must be at least 2 "proxy_buffers"'
    largest = max(first, each)
    busy = size_bytes(scope.setting("proxy_busy_buffers_size").value)
    busy = 2 * largest if busy is None else busy
    if busy < largest:
        return (
            '"proxy_busy_buffers_size" must be equal to or greater than the maximum of the value of '
            '"proxy_buffer_size" and one of the "proxy_buffers"'
        )
    if busy > (count - 1) * each:
        return '"proxy_busy_buffers_size" must be less than the size of all "proxy_buffers" minus one buffer'
    spooled = size_bytes(scope.setting("proxy_max_temp_file_size").value)
    if spooled and spooled < largest:
        return (
            '"proxy_max_temp_file_size" must be equal to zero to disable temporary files usage or must be equal to or '
            'greater than the maximum of the value of "proxy_buffer_size" and one of the "proxy_buffers"'
        )
    return None


# -- variables --------------------------------------------------------------------------------------------------


def _variables(http: Directive) -> Iterator[Fault]:
    defined: set[str] = set()
    used: list[tuple[Directive, str]] = []
    for one in walk(http):
        place = _SETTERS.get(one.name)
        if place is not None and one.args:
            defined.add(one.args[place if place < len(one.args) else 0].lstrip("$").lower())
        for text in (one.name, *one.args, *(entry.name for entry in one.block or () if one.name == "map")):
            defined.update(name.lower() for name in _CAPTURE.findall(text))
        if one.name in _EXPANDED:
            texts = list(one.args[1:] if one.name in ("set", "rewrite") else one.args)
            if one.name == "map":
                texts = [*one.args[:1], *(arg for entry in one.block or () for arg in entry.args)]
            used += [(one, (m[1] or m[2]).lower()) for text in texts for m in VARIABLE.finditer(text)]
    for one, name in used:
        if name not in defined and not known_variable(name):
            yield one, f'unknown "{name}" variable'


def known_variable(name: str) -> bool:
    """Whether nginx itself, or a module of its own, has the variable."""
    return name.isdigit() or name in known.VARIABLES or name.startswith(known.VARIABLE_FAMILIES)
