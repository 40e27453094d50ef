"""Rules about proxy_buffering and X-Accel-Buffering: what holds small events back.

Rules here: the line a finding names is the one to look at: an explicit statement, what was tried and does not help, the
location or server that lacks what another one has, and only then the proxy_pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tapproxy.core.findings import Severity
from tapproxy.nginx import fix
from tapproxy.nginx.model import location_name
from tapproxy.nginx.rule import OFF, Hit, Rule, View, add_beside, buffering_off, remove, set_here, with_directive
from tapproxy.nginx.source import Directive
from tapproxy.nginx.values import size_bytes

_XAB = "x-accel-buffering"
# Tried against the hold of an answer that is not chunked, and only moving it: the name, and nginx's own default.
_ONLY_MOVES_IT = (("proxy_buffers", ("8", "4k")), ("proxy_busy_buffers_size", ()), ("proxy_http_version", ("1.1",)))


# -- where ------------------------------------------------------------------------------------------------------


def has_off(block: Directive) -> bool:
    """Whether a block itself switches buffering off."""
    return any(one.args == ("off",) for one in block.named("proxy_buffering"))


def _elsewhere(view: View) -> Directive | None:
    """The location or server that lacks ``proxy_buffering off`` while another one, that looks meant, has it."""
    if any(not jump.left.is_on("proxy_buffering") for jump in view.route.jumps):
        return view.location
    server = view.route.server
    if view.scope.location is not None and any(
        has_off(one) for one in _locations(server.block) if one is not view.location
    ):
        return view.location
    if any(name not in ("", "_") for name in server.names):
        return None
    # It answers whatever no other server is named for: the request may have been meant for one of those.
    for listener in server.listeners:
        if any(other is not server and _off_somewhere(other.block) for other in view.servers.on(listener.address)):
            return next(iter(server.block.named("server_name")), server.block)
    return None


def _off_somewhere(server: Directive) -> bool:
    return has_off(server) or any(map(has_off, _locations(server)))


def _locations(block: Directive) -> Iterator[Directive]:
    for one in block.named("location"):
        yield one
        yield from _locations(one)


def _cause(view: View) -> Directive | None:
    """The statement to look at where buffering is on."""
    explicit = view.scope.statements("proxy_buffering")
    if explicit and view.hop.configured_on:
        return explicit[0]
    elsewhere = _elsewhere(view)
    if elsewhere is not None:
        return elsewhere
    if "tls_http1" not in view.kinds and view.hop.framing not in ("chunked", None):
        for name, harmless in _ONLY_MOVES_IT:
            tried = view.scope.statements(name)
            if tried and tried[0].args != harmless:
                return tried[0]
    return view.route.proxy_pass


# -- what -------------------------------------------------------------------------------------------------------


def held(view: View) -> list[str]:
    """The measured mechanisms that hold small events in this hop, in words."""
    if not (view.hop.buffered and view.hop.configured_on):
        return []
    found = []
    if "tls_http1" in view.kinds:
        size = view.scope.setting("ssl_buffer_size").value
        found.append(
            f"TLS with HTTP/1.1 clients: held P50 410 ms, max 800 ms, header included, until {size} have gathered "
            "or the answer ends (16 kB: 73 events)"
        )
    if view.hop.framing not in ("chunked", None):
        found.append(
            f"the upstream's answer to HTTP/{view.hop.http_version} is not chunked ({view.hop.upstream.name}): "
            "held P50 180 ms, max 380 ms, in bursts of 19 events (4 kB)"
        )
    return found


def stripped_by_inner(view: View) -> bool:
    """The engine asks for streaming, the nginx between takes that header out, and this one then buffers."""
    inner = view.hop.inner
    if inner is None or not (view.hop.buffered and view.hop.configured_on):
        return False
    return (inner.upstream.x_accel_buffering or "").lower() == "no" and view.hop.upstream.x_accel_buffering is None


def _buffering_on(view: View) -> Iterator[Hit]:
    at, why = _cause(view), held(view)
    if at is not None and why and not stripped_by_inner(view):
        yield Hit(at, "; ".join(why), buffering_off(view))


def _buffering_on_latent(view: View) -> Iterator[Hit]:
    at = _cause(view)
    if at is None or not (view.hop.buffered and view.hop.configured_on) or held(view) or view.hop.compressed:
        return
    evidence = (
        "streams on a fast link, but: the header waits for the first event; events of 4 kB and more come one event "
        "late; at a round trip of 80 ms the first request of a connection gains 40 ms P50, 110 ms max (Nagle)"
    )
    if view.hop.framing is None:
        evidence += (
            f"; held if {view.hop.upstream.name} answers HTTP/1.0 close-delimited, which is not known here "
            "(--upstream framing=close or chunked)"
        )
    yield Hit(at, evidence, buffering_off(view))


def _relies_on_xab(view: View) -> Iterator[Hit]:
    at = next(iter(view.scope.statements("proxy_buffering")), view.route.proxy_pass)
    if at is not None and view.hop.configured_on and not view.hop.buffered:
        yield Hit(
            at,
            f"{view.hop.upstream.name} sends X-Accel-Buffering: no, which nginx obeys (hold 0.2 ms); another engine, "
            "or a proxy between, may not send it",
            buffering_off(view),
        )


def _xab_ignored(view: View) -> Iterator[Hit]:
    if not view.hop.buffered or not view.hop.ignores_xab:
        return
    for one in view.scope.statements("proxy_ignore_headers"):
        for index, argument in enumerate(one.args):
            if argument.lower() == _XAB:
                edit = fix.remove_argument(view.texts[one.file], one, index)
                yield Hit(one, "over TLS held up to 800 ms although the upstream said no", (edit,))


def _xab_yes(view: View) -> Iterator[Hit]:
    explicit = view.scope.statements("proxy_buffering")
    if not view.hop.buffered or view.hop.configured_on or not explicit:
        return
    ignored = view.scope.statements("proxy_ignore_headers")
    if ignored and ignored[0] in (view.location.block or ()):
        end = ignored[0].arg_spans[-1][1]
        edit = fix.Edit(ignored[0].file, end, end, " X-Accel-Buffering")
    else:
        # All or nothing per level: what an outer level ignores has to be said again.
        names = dict.fromkeys(arg for one in ignored for arg in one.args)
        edit = add_beside(view, f"proxy_ignore_headers {' '.join([*names, 'X-Accel-Buffering'])};")
    yield Hit(
        explicit[0],
        "the upstream's X-Accel-Buffering: yes turns buffering on over this line: held up to 800 ms over TLS",
        (edit,),
    )


def _xab_bad_value(view: View) -> Iterator[Hit]:
    sent = (view.hop.upstream.x_accel_buffering or "").lower()
    if sent in ("", "yes", "no") or not view.hop.buffered or view.hop.ignores_xab:
        return
    inner = view.hop.inner
    added = [one for one in inner.route.scope.statements("add_header") if _names_xab(one)] if inner else []
    at = added[0] if added else _cause(view)
    if at is not None and "$" not in sent:
        edits = (fix.replace_argument(at, 1, "no"),) if added else buffering_off(view)
        yield Hit(
            at, f'nginx ignores the value "{sent}" (only yes and no count): buffered as if it were not sent', edits
        )


def _xab_stripped(view: View) -> Iterator[Hit]:
    inner = view.hop.inner
    if not stripped_by_inner(view) or inner is None or view.route.proxy_pass is None:
        return
    name = inner.route.server.name
    evidence = f"the nginx behind ({name}) takes the engine's X-Accel-Buffering: no out of the answer"
    why = held(view)
    severity: Severity = "error" if why else "warning"
    yield Hit(view.route.proxy_pass, "; ".join([evidence, *why]), buffering_off(view), severity)


def _names_xab(one: Directive) -> bool:
    return bool(one.args) and one.args[0].lower() == _XAB


def _add_header_noop(view: View, one: Directive) -> Iterator[Hit]:
    if not _names_xab(one) or view.behind_nginx:
        return
    if view.hop.buffered:
        yield Hit(one, "add_header goes to the client; nginx obeys only what the upstream sends", buffering_off(view))
    else:
        evidence = "add_header goes to the client: of use only where another nginx stands in front of this one"
        yield Hit(one, evidence, (), "info")


def _request_header_noop(view: View, one: Directive) -> Iterator[Hit]:
    if _names_xab(one):
        on = view.hop.buffered
        yield Hit(
            one,
            "proxy_set_header goes to the engine in the request; nginx obeys the header of the answer only",
            (remove(view, one), *buffering_off(view)) if on else (),
            None if on else "info",
        )


def _wrong_module(view: View) -> Iterator[Hit]:
    if view.route.proxy_pass is None or not view.hop.buffered:
        return
    for module in ("fastcgi", "uwsgi", "scgi"):
        other = any(one.name == f"{module}_pass" for place in _locations(view.route.server.block)
                    for one in place.block or ())  # fmt: skip
        for level in view.scope.levels:
            if level.name == "http" or (other and level.name != "location"):
                continue
            for one in level.block or ():
                if one.name == f"{module}_buffering":
                    edits = (remove(view, one), *buffering_off(view))
                    yield Hit(
                        one, f"no effect: the location uses proxy_pass, and {one.name} is for {module}_pass", edits
                    )


def _request_direction(view: View, one: Directive) -> Iterator[Hit]:
    if one.args == ("off",) and view.hop.buffered:
        yield Hit(
            one, "this is the upload; the answer is still buffered, held up to 800 ms over TLS", buffering_off(view)
        )


# Tried as "streaming fixes"; none of them changed a measured hold.
_NOOPS: dict[str, Callable[[tuple[str, ...]], bool]] = {
    "proxy_max_temp_file_size": lambda args: args == ("0",),
    "postpone_output": lambda args: args == ("0",),
    "proxy_cache": lambda args: args == ("off",),
    "proxy_busy_buffers_size": lambda args: True,
    "tcp_nopush": lambda args: True,
    "output_buffers": lambda args: True,
}


def _noop(view: View) -> Iterator[Hit]:
    if view.route.proxy_pass is None or not held(view):
        return
    for name, tried in _NOOPS.items():
        for one in view.scope.statements(name):
            if one in (view.location.block or ()) and tried(one.args):
                yield Hit(one, "measured: the hold is the same with and without it")


def _small_header_buffer(view: View, one: Directive) -> Iterator[Hit]:
    size = size_bytes(one.args[0] if one.args else None)
    if size is not None and size < 4096:
        evidence = f"{one.args[0]}: an answer whose header is larger than this gets 502 (upstream sent too big header)"
        # With other sizes set as well, a larger one may not fit them: nginx refuses that.
        alone = not view.explicit("proxy_buffers") and not view.explicit("proxy_busy_buffers_size")
        yield Hit(one, evidence, set_here(view, "proxy_buffer_size", "8k") if alone else ())


# -- which location ---------------------------------------------------------------------------------------------

API_PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate", "/mcp",
    "/sse", "/generate_stream",
)  # fmt: skip


def _not_covered(view: View) -> Iterator[Hit]:
    """A location has buffering off, so it is known to matter, and this path is served by another one."""
    if view.route.proxy_pass is None or not (view.hop.buffered and view.hop.configured_on) or view.route.jumps:
        return
    path, serving = view.route.path, view.location
    severity: Severity = "error" if held(view) else "warning"
    for one in _locations(view.route.server.block):
        sign, name = location_name(one)
        if one is serving or not has_off(one) or sign in ("~", "~*") or name.startswith("@"):
            continue
        where = f"{' '.join(serving.args)} ({serving.file}:{serving.line})"
        if sign != "=" and path.startswith(name):
            # It fits, and loses: the location that wins is the one to change.
            evidence = f"location {name} has proxy_buffering off, but {path} is served by location {where}"
            yield Hit(serving, evidence, buffering_off(view), severity)
        elif path.lower().startswith(name.lower()):
            evidence = f"locations are case-sensitive: {path} is served by location {where}, where buffering is on"
            yield Hit(one, evidence, buffering_off(view), severity)
        elif any(api == name or (sign != "=" and api.startswith(name)) for api in API_PATHS):
            evidence = f"this does not cover {path}: it is served by location {where}, where buffering is on"
            yield Hit(one, evidence, buffering_off(view), severity)


def _jump_loses_off(view: View) -> Iterator[Hit]:
    if view.route.proxy_pass is None or not (view.hop.buffered and view.hop.configured_on):
        return
    for jump in view.route.jumps:
        if not jump.left.is_on("proxy_buffering"):
            where = f"{view.location.file}:{view.location.line}"
            evidence = f"the location it leaves has proxy_buffering off, the one it leads to ({where}) has not"
            yield Hit(jump.statement, evidence, buffering_off(view))


RULES: tuple[Rule, ...] = (
    Rule(
        "buffering-on",
        "error",
        "proxy_buffering is on where that holds tokens back",
        f"{OFF}; proxy_http_version, postpone_output and buffer sizes do not help",
        _buffering_on,
    ),
    Rule(
        "buffering-on-latent",
        "warning",
        "proxy_buffering is on; it holds little here, and more on a slower link, a new listener, or larger events",
        OFF,
        _buffering_on_latent,
    ),
    Rule(
        "streaming-path-not-covered",
        "error",
        "the location with proxy_buffering off does not serve this API path",
        "one location /v1/ for all API paths, or proxy_buffering off at server level",
        _not_covered,
        by_path=True,
    ),
    Rule(
        "rewrite-changes-location",
        "warning",
        "a jump leads out of the location that has proxy_buffering off",
        "set proxy_buffering off in the target, or at server level: settings stay behind with the location",
        _jump_loses_off,
    ),
    Rule(
        "relies-on-xab",
        "info",
        "streaming relies on the upstream's X-Accel-Buffering: no",
        f"{OFF}, so that it does not depend on a header",
        _relies_on_xab,
    ),
    Rule(
        "xab-ignored",
        "error",
        "proxy_ignore_headers shuts out X-Accel-Buffering while buffering is on",
        f"take X-Accel-Buffering out of proxy_ignore_headers, or {OFF}",
        _xab_ignored,
    ),
    Rule(
        "xab-yes-overrides-off",
        "error",
        "the upstream sends X-Accel-Buffering: yes, which overrides proxy_buffering off",
        "proxy_ignore_headers X-Accel-Buffering in the location that serves the path",
        _xab_yes,
    ),
    Rule(
        "xab-bad-value",
        "error",
        "X-Accel-Buffering has a value that nginx does not know",
        f"send X-Accel-Buffering: no, or {OFF}",
        _xab_bad_value,
    ),
    Rule(
        "xab-stripped-by-inner-hop",
        "error",
        "the nginx behind this one strips X-Accel-Buffering, and this one buffers",
        f"{OFF}; or proxy_pass_header X-Accel-Buffering (or add_header) on the inner one",
        _xab_stripped,
    ),
    Rule(
        "add-header-xab-noop",
        "error",
        "add_header X-Accel-Buffering does not change this nginx",
        OFF,
        with_directive("add_header", _add_header_noop),
    ),
    Rule(
        "xab-request-header-noop",
        "error",
        "proxy_set_header X-Accel-Buffering does nothing",
        f"remove it; {OFF}",
        with_directive("proxy_set_header", _request_header_noop),
    ),
    Rule(
        "wrong-module-directive",
        "error",
        "a buffering directive of another module, in a location that uses proxy_pass",
        "proxy_buffering off",
        _wrong_module,
    ),
    Rule(
        "request-vs-response-buffering",
        "warning",
        "request buffering is off, response buffering is on",
        "proxy_buffering off is the one for the answer",
        with_directive("proxy_request_buffering", _request_direction),
    ),
    Rule("noop-directive", "info", "tried against held tokens, without effect", f"remove it; {OFF}", _noop),
    Rule(
        "proxy-buffer-size-small",
        "warning",
        "proxy_buffer_size is smaller than an answer's header may be",
        "proxy_buffer_size 8k",
        with_directive("proxy_buffer_size", _small_header_buffer),
    ),
)
