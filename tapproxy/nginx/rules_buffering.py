"""Rules about proxy_buffering: what holds small events back.

Rules here: the line a finding names is the one to look at: an explicit statement, what was tried and does not help, the
location or server that lacks what another one has, and only then the proxy_pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tapproxy.nginx.passing import at_once
from tapproxy.nginx.rule import OFF, Hit, Rule, View, buffering_off, remove, set_here, with_directive
from tapproxy.nginx.source import Directive
from tapproxy.nginx.values import size_bytes

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
        has_off(one) for one in locations_of(server.block) if one is not view.location
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
    return has_off(server) or any(map(has_off, locations_of(server)))


def locations_of(block: Directive) -> Iterator[Directive]:
    """All locations of a server, nested ones behind their own."""
    for one in block.named("location"):
        yield one
        yield from locations_of(one)


def cause(view: View) -> Directive | None:
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
    at, why = cause(view), held(view)
    if at is not None and why and not stripped_by_inner(view):
        yield Hit(at, "; ".join(why), buffering_off(view))


def _buffering_on_latent(view: View) -> Iterator[Hit]:
    at = cause(view)
    if at is None or not (view.hop.buffered and view.hop.configured_on) or held(view) or view.hop.compressed:
        return
    late = any(not at_once(view.hop, kind).now for kind in view.kinds)
    evidence = (
        f"streams on a fast link, but: {'the header waits for the first event; ' if late else ''}events of 4 kB and "
        "more come one event late; at a round trip of 80 ms the first request of a connection gains 40 ms P50, 110 ms "
        "max (Nagle)"
    )
    if view.hop.framing is None:
        evidence += (
            f"; held if {view.hop.upstream.name} answers HTTP/1.0 close-delimited, which is not known here "
            "(--upstream framing=close or chunked)"
        )
    yield Hit(at, evidence, buffering_off(view))


def _wrong_module(view: View) -> Iterator[Hit]:
    if view.route.proxy_pass is None or not view.hop.buffered:
        return
    for module in ("fastcgi", "uwsgi", "scgi"):
        other = any(one.name == f"{module}_pass" for place in locations_of(view.route.server.block)
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
        "proxy_buffering is on; it holds little here, and more on a slower link, with larger events, "
        "or once a listen with ssl is added (HTTP/1.1 over TLS is held)",
        OFF,
        _buffering_on_latent,
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
