"""Rules about the connections to the engine: HTTP version, reuse, the upstream block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from tapproxy.nginx import fix
from tapproxy.nginx.directives import HTTP11_DEFAULT
from tapproxy.nginx.fix import Edit
from tapproxy.nginx.rule import Hit, Rule, View, add_beside, with_directive
from tapproxy.nginx.source import Directive
from tapproxy.nginx.values import seconds, whole

# uvicorn, and so vLLM and SGLang: VLLM_HTTP_TIMEOUT_KEEP_ALIVE.
_ENGINE_IDLE_S = 5
_BALANCERS = frozenset({"least_conn", "ip_hash", "hash", "random", "least_time"})


# -- HTTP version -----------------------------------------------------------------------------------------------


def _http11(view: View) -> tuple[Edit, ...]:
    """HTTP/1.1 towards the upstream, and no "Connection: close" where this nginx would send it."""
    edits: list[Edit] = []
    lines: list[str] = []
    explicit = view.scope.statements("proxy_http_version")
    if not explicit:
        lines.append("proxy_http_version 1.1;")
    elif explicit[0].args != ("1.1",):
        edits.append(fix.replace_argument(explicit[0], 0, "1.1"))
    headers = view.scope.statements("proxy_set_header")
    if view.hop.version < HTTP11_DEFAULT and _connection_header(view) is None:
        if headers and headers[-1] not in (view.location.block or ()):
            # All or nothing per level: one header set in the location would drop those of the outer level.
            outer = headers[-1]
            edits.append(fix.insert_after(view.texts[outer.file], outer, 'proxy_set_header Connection "";'))
        else:
            lines.append('proxy_set_header Connection "";')
    if lines:
        edits.append(add_beside(view, *lines))
    return tuple(edits)


def _http10(view: View) -> Iterator[Hit]:
    if view.hop.http_version != "1.0" or view.route.proxy_pass is None:
        return
    explicit = view.scope.statements("proxy_http_version")
    evidence = "a new connection for every request, and chunked request bodies are collected first"
    if view.hop.framing == "chunked":
        evidence += (
            f"; streaming rests on {view.hop.upstream.name} answering HTTP/1.0 with chunked framing, against the RFC"
        )
    else:
        evidence += "; an engine that crashes leaves a short answer that looks complete (measured, no [DONE])"
    at = explicit[0] if explicit else view.route.proxy_pass
    # Whoever wrote it down may mean it; who left the default of an old nginx does not know.
    yield Hit(at, evidence, _http11(view), "info" if explicit else None)


def _http2(view: View) -> Iterator[Hit]:
    if view.hop.http_version == "2" and view.route.proxy_pass is not None and view.hop.upstream.http2 is False:
        at = view.scope.statements("proxy_http_version")[0]
        yield Hit(at, f"{view.hop.upstream.name} speaks HTTP/1.1 only: 502", (fix.replace_argument(at, 0, "1.1"),))


# -- reuse of connections ---------------------------------------------------------------------------------------


def _connection_header(view: View) -> Directive | None:
    return next(
        (one for one in view.scope.statements("proxy_set_header") if one.args and one.args[0].lower() == "connection"),
        None,
    )


def _connection_sent(view: View) -> str | None:
    """The Connection field that the engine gets from an API client's request; None where it cannot be told."""
    one = _connection_header(view)
    if one is None or len(one.args) < 2:
        return "" if view.hop.version >= HTTP11_DEFAULT else "close"
    return view.route.expand(one.args[1], view.servers.maps)


def _statement(block: Directive, name: str) -> Directive | None:
    return next(iter(block.named(name)), None)


def _kept(view: View, block: Directive) -> int:
    """How many idle connections the upstream block keeps per worker."""
    keepalive = _statement(block, "keepalive")
    if keepalive is not None and _replaced_by(view, block, keepalive) is not None:
        return 0
    if keepalive is None:
        return 32 if view.hop.version >= HTTP11_DEFAULT else 0
    return whole(keepalive.args[0] if keepalive.args else None) or 0


def _reuse(view: View) -> Literal["yes", "no", "unknown"]:
    block = view.upstream_block
    if block is None or not _kept(view, block) or view.hop.http_version == "1.0":
        return "no"
    sent = _connection_sent(view)
    return "unknown" if sent is None else "no" if "close" in sent.lower() else "yes"


def _lost_headers(view: View) -> list[Directive]:
    """What an outer level sets and the serving location loses: Host always, Connection where it then matters."""
    own = view.scope.statements("proxy_set_header")
    if not own:
        return []
    levels = view.scope.levels
    inner = next((index for index, level in enumerate(levels) if own[0] in (level.block or ())), len(levels))
    outer = next(
        (found for level in levels[inner + 1 :]
         if (found := [one for one in level.named("proxy_set_header") if len(one.args) > 1])),
        [],
    )  # fmt: skip
    kept = {one.args[0].lower() for one in own if one.args}
    needed = {"host"} if view.hop.version >= HTTP11_DEFAULT or view.upstream_block is None else {"host", "connection"}
    return [one for one in outer if one.args[0].lower() in needed - kept]


def _inheritance_lost(view: View) -> Iterator[Hit]:
    lost = _lost_headers(view) if view.route.proxy_pass is not None else []
    if lost:
        own = view.scope.statements("proxy_set_header")
        names = " and ".join(one.args[0] for one in lost)
        evidence = f"one proxy_set_header here drops all of the outer level: {names} ({lost[0].file}:{lost[0].line})"
        if any(one.args[0].lower() == "connection" for one in lost):
            evidence += "; no connection to the engine is used twice"
        lines = [f"proxy_set_header {one.words};" for one in lost]
        yield Hit(own[0], evidence, (fix.insert_after(view.texts[own[-1].file], own[-1], *lines),))


def _keepalive_ineffective(view: View) -> Iterator[Hit]:
    block = view.upstream_block
    keepalive = _statement(block, "keepalive") if block is not None else None
    if block is None or keepalive is None or view.route.proxy_pass is None or not _kept(view, block):
        return
    if _reuse(view) != "no" or any(one.args[0].lower() == "connection" for one in _lost_headers(view)):
        return
    header = _connection_header(view)
    if view.hop.http_version == "1.0":
        yield Hit(keepalive, "HTTP/1.0 with Connection: close is sent: no connection is used twice", _http11(view))
    elif header is None:
        yield Hit(keepalive, "Connection: close is sent: no connection is used twice", _http11(view))
    else:
        entry = _map_entry(view, header.args[1])
        at = entry or keepalive
        if entry is not None:
            edits = (fix.replace_argument(entry, 0, '""'),)
        else:
            edits = (fix.replace_argument(header, 1, '""'),)
        evidence = f"for an API client (no Upgrade) Connection: {_connection_sent(view)} is sent: no reuse"
        yield Hit(at, evidence, edits)


def _map_entry(view: View, value: str) -> Directive | None:
    """The line of a map that gives a variable its value for an API client."""
    found = view.servers.maps.get(value.lstrip("$").strip("{}"))
    source = view.route.expand(found.source, view.servers.maps) if found is not None else None
    return found.entry(source) if found is not None and source is not None else None


def _no_keepalive(view: View) -> Iterator[Hit]:
    at = view.route.proxy_pass
    target = view.route.target
    if at is None or target is None or (target.host.startswith("unix:")):
        return
    block = view.upstream_block
    if block is None:
        if "$" in at.args[0]:
            return
        evidence = "no upstream block: every request opens a new TCP connection (measured on both versions)"
        closing = view.hop.version < HTTP11_DEFAULT and _connection_header(view) is None
        version = view.scope.statements("proxy_http_version")
        if closing and version and version[0].args == ("1.1",):
            yield Hit(version[0], f"{evidence}, and Connection: close is sent")
        elif view.hop.http_version != "1.0" or not version:
            yield Hit(at, evidence)
        return
    keepalive = _statement(block, "keepalive")
    if not _kept(view, block) and (keepalive is None or _replaced_by(view, block, keepalive) is None):
        name = block.args[0] if block.args else ""
        change = (
            f"add keepalive to upstream {name}" if keepalive is None else f"keepalive 16 or more in upstream {name}"
        )
        more = [] if view.hop.http_version == "1.1" else ["proxy_http_version 1.1"]
        if "close" in (_connection_sent(view) or "").lower():
            more.append('proxy_set_header Connection ""')
        if more:
            change += f", with {' and '.join(more)}"
        yield Hit(keepalive or block, "no idle connection is kept: every request opens a new one", advice=change)


def _variable_pass(view: View) -> Iterator[Hit]:
    at = view.route.proxy_pass
    if at is None or not at.args or view.upstream_block is not None:
        return
    scheme, _, rest = at.args[0].partition("://")
    if "$" in scheme + rest.partition("/")[0]:
        yield Hit(at, "the address is a variable and no upstream block: no connection to the engine is used twice")


def _replaced_by(view: View, block: Directive, keepalive: Directive) -> Directive | None:
    """The balancing method that comes after keepalive and takes its place (before 1.29.7, where nginx only warns)."""
    if view.hop.version >= HTTP11_DEFAULT:
        return None
    statements = block.block or ()
    later = statements[statements.index(keepalive) + 1 :]
    return next((one for one in later if one.name in _BALANCERS), None)


def _before_balancer(view: View) -> Iterator[Hit]:
    block = view.upstream_block
    if block is None:
        return
    keepalive = _statement(block, "keepalive")
    one = _replaced_by(view, block, keepalive) if keepalive is not None else None
    if keepalive is not None and one is not None:
        evidence = f"{one.name} ({one.file}:{one.line}) comes later and replaces it: no connection is used twice"
        edits = (
            fix.remove(view.texts[keepalive.file], keepalive),
            fix.insert_after(view.texts[one.file], one, f"keepalive {keepalive.words};"),
        )
        yield Hit(keepalive, evidence, edits if one.file == keepalive.file else ())


def _keepalive_race(view: View) -> Iterator[Hit]:
    block = view.upstream_block
    if block is None or view.route.proxy_pass is None or _reuse(view) != "yes" or view.hop.inner is not None:
        return
    timeout = _statement(block, "keepalive_timeout")
    idle = seconds(timeout.args[0]) if timeout is not None and timeout.args else 60.0
    if idle is not None and idle >= _ENGINE_IDLE_S:
        at = timeout or _statement(block, "keepalive") or block
        evidence = (
            f"nginx keeps an idle connection {idle:g} s, uvicorn (vLLM, SGLang) closes it after {_ENGINE_IDLE_S} s: "
            "a POST that meets the closing gets 502 and is not tried again (measured)"
        )
        yield Hit(at, evidence)


# -- static Connection ------------------------------------------------------------------------------------------


def _static_upgrade(view: View, one: Directive) -> Iterator[Hit]:
    if len(one.args) == 2 and one.args[0].lower() == "connection" and one.args[1].lower() == "upgrade":
        yield Hit(one, "Connection: upgrade goes to the engine with every request, WebSocket or not")


RULES: tuple[Rule, ...] = (
    Rule(
        "http10-upstream",
        "warning",
        "nginx speaks HTTP/1.0 to the upstream",
        'proxy_http_version 1.1 and proxy_set_header Connection ""',
        _http10,
    ),
    Rule(
        "http2-upstream-unsupported",
        "error",
        "proxy_http_version 2, to an engine that does not speak it",
        "proxy_http_version 1.1; where the engine does speak HTTP/2 say so: --upstream http2=yes",
        _http2,
    ),
    Rule(
        "keepalive-ineffective",
        "warning",
        "keepalive is set, and no connection to the engine is used twice",
        'proxy_http_version 1.1 and proxy_set_header Connection "" (in a map: \'\' "")',
        _keepalive_ineffective,
    ),
    Rule(
        "set-header-inheritance-lost",
        "warning",
        "proxy_set_header is all or nothing per level: the outer level's are lost here",
        "repeat them in this block",
        _inheritance_lost,
    ),
    Rule(
        "keepalive-before-balancer",
        "warning",
        "keepalive stands before the balancing method, which replaces it",
        "put keepalive behind it",
        _before_balancer,
    ),
    Rule(
        "upstream-no-keepalive",
        "info",
        "every request opens a new connection to the engine",
        "an upstream block with keepalive, and proxy_pass to its name",
        _no_keepalive,
    ),
    Rule(
        "variable-proxy-pass",
        "info",
        "proxy_pass to a variable",
        "let the variable hold the name of an upstream block with keepalive",
        _variable_pass,
    ),
    Rule(
        "connection-upgrade-static",
        "warning",
        'Connection "upgrade" is sent with every request',
        "a map of $http_upgrade: default upgrade, '' \"\"",
        with_directive("proxy_set_header", _static_upgrade),
    ),
    Rule(
        "keepalive-race-502",
        "info",
        "idle connections are kept longer than the engine keeps them",
        "keepalive_timeout 4s in the upstream block, or a longer one at the engine (VLLM_HTTP_TIMEOUT_KEEP_ALIVE)",
        _keepalive_race,
    ),
)
