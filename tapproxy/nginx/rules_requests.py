"""Rules about the request on its way to the engine: size, body, method, copies."""

from __future__ import annotations

from collections.abc import Iterator

from tapproxy.nginx.rule import Hit, Rule, View, remove, set_here, with_directive
from tapproxy.nginx.source import Directive
from tapproxy.nginx.values import size_bytes

_SMALL_BODY = 1 << 20
_MODEST_BODY = 10 << 20
_LARGE_IN_MEMORY = 2 << 20


def _body_size(view: View, one: Directive) -> Iterator[Hit]:
    limit = size_bytes(one.args[0] if one.args else None)
    if not limit or limit >= _MODEST_BODY:  # 0 is no limit
        return
    small = limit < _SMALL_BODY
    evidence = f"a request body over {one.args[0]} gets 413 (long prompts, images in base64)"
    edits = set_here(view, "client_max_body_size", "64m") if small else ()
    yield Hit(one, evidence, edits, None if small else "info")


def _body_size_default(view: View) -> Iterator[Hit]:
    if view.route.proxy_pass is not None and view.explicit("client_max_body_size") is None:
        yield Hit(view.route.server.block, "client_max_body_size is 1 MB by default: a longer prompt gets 413")


def _large_body(view: View) -> Iterator[Hit]:
    if view.route.proxy_pass is None or view.value("proxy_request_buffering") == "off":
        return
    explicit = view.explicit("client_body_buffer_size")
    if explicit is None:
        evidence = (
            "prompts over 16 kB go through a temporary file; measured +0.5 to 0.9 ms at 100 kB, 3.4 to 5.6 at 2 MB"
        )
        yield Hit(view.location, evidence)
    elif (size_bytes(explicit.value) or 0) >= _LARGE_IN_MEMORY:
        yield Hit(explicit.sources[0], "in memory, and still the whole prompt first: measured +3.7 to 4.7 ms at 2 MB")


def _body_dropped(view: View) -> Iterator[Hit]:
    if view.route.proxy_pass is None:
        return
    for one in view.scope.statements("proxy_pass_request_body"):
        if one.args == ("off",):
            yield Hit(one, "the engine gets an empty prompt", (remove(view, one),))
    for one in view.scope.statements("proxy_set_body"):
        if one.args and "$request_body" not in one.args[0]:
            yield Hit(one, "the engine gets this text, never the client's prompt", (remove(view, one),))


def _method(view: View, one: Directive) -> Iterator[Hit]:
    if one.args and one.args[0].upper() != "POST" and "$" not in one.args[0]:
        yield Hit(one, f"the engine gets {one.args[0].upper()} where the client sent POST", (remove(view, one),))


def _mirror(view: View, one: Directive) -> Iterator[Hit]:
    if one.args and one.args[0] != "off":
        evidence = (
            "every prompt goes out twice, so a second prefill runs; a mirror that answers late delays the next "
            "request of the client's connection (measured 0.94 s), and request buffering cannot be off"
        )
        yield Hit(one, evidence, set_here(view, "mirror", "off"))


def _auth(view: View, one: Directive) -> Iterator[Hit]:
    if one.args and one.args[0] != "off":
        yield Hit(one, "its time is added to the time to first token of every request")


RULES: tuple[Rule, ...] = (
    Rule(
        "body-size-limit",
        "error",
        "client_max_body_size is small for prompts",
        "client_max_body_size 32m or more",
        with_directive("client_max_body_size", _body_size),
    ),
    Rule(
        "body-size-default-1m",
        "info",
        "client_max_body_size has its default of 1 MB",
        "client_max_body_size 32m or more, where prompts may be long or hold images",
        _body_size_default,
    ),
    Rule(
        "request-buffering-large-body",
        "info",
        "long prompts are collected before they go on",
        "client_body_buffer_size 1m keeps them in memory",
        _large_body,
    ),
    Rule("request-body-dropped", "error", "the prompt does not reach the engine", "remove it", _body_dropped),
    Rule(
        "proxy-method-override",
        "error",
        "proxy_method changes the client's method",
        "remove it",
        with_directive("proxy_method", _method),
    ),
    Rule(
        "mirror-doubles-inference",
        "error",
        "mirror sends every prompt twice",
        "mirror off on the API paths; sample elsewhere",
        with_directive("mirror", _mirror),
    ),
    Rule(
        "auth-request-latency",
        "info",
        "auth_request asks another server first",
        "cache its answers (proxy_cache in the location it asks)",
        with_directive("auth_request", _auth),
    ),
)
