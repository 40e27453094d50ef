"""Rules about the request on its way to the engine: size, body, method, copies, and locations that never proxy it."""

from __future__ import annotations

from collections.abc import Iterator

from tapproxy.nginx import fix
from tapproxy.nginx.fix import Edit
from tapproxy.nginx.model import location_name
from tapproxy.nginx.routing import Jump
from tapproxy.nginx.rule import Hit, Rule, View, remove, set_here, with_directive
from tapproxy.nginx.source import Directive
from tapproxy.nginx.values import size_bytes

_SMALL_BODY = 1 << 20
_MODEST_BODY = 10 << 20
_LARGE_IN_MEMORY = 2 << 20
_DOCUMENTS = (".html", ".htm", ".json", ".txt", ".xml")


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


def _redirect(view: View) -> Iterator[Hit]:
    at = view.route.failed_at
    if view.route.failure_kind != "slash-redirect" or at is None:
        return
    edits: tuple[Edit, ...] = ()
    name = location_name(at)[1]
    if at.args and at.args[-1] == name and name.endswith("/"):
        edits = (fix.replace_argument(at, len(at.args) - 1, name.rstrip("/")),)
    yield Hit(at, f"POST {name.rstrip('/')} is answered by nginx itself: 301, and clients repeat it as GET", edits)


def _not_inherited(view: View) -> Iterator[Hit]:
    at = view.route.failed_at
    if view.route.failure_kind != "no-handler" or at is None or at.name != "location":
        return
    if any(one.name in ("root", "alias", "index", "autoindex", "stub_status", "internal") for one in at.block or ()):
        return  # files are what it is for
    for level in view.scope.levels[1:]:
        outer = next((one for one in level.block or () if one.name == "proxy_pass"), None) if (
            level.name == "location") else None  # fmt: skip
        if outer is not None:
            uri = outer.args[0].partition("://")[2].partition("/")[1] if outer.args else ""
            edits = () if uri else (fix.insert_first(view.texts[at.file], at, f"proxy_pass {outer.words};"),)
            evidence = f"404: proxy_pass is not inherited from the outer location ({outer.file}:{outer.line})"
            yield Hit(at, evidence, edits)
            return


def _error_page(view: View) -> Iterator[Hit]:
    jump = next((one for one in view.route.jumps if one.statement.name == "error_page"), None)
    target = jump.statement.args[-1] if jump is not None else ""
    if jump is None or not target.startswith("/") or target.endswith(_DOCUMENTS) or view.route.proxy_pass is None:
        return
    if any(code.startswith("5") for code in jump.statement.args[:-1]):
        evidence = f"the fallback gets GET {target} without a body, not the client's POST (measured)"
        yield Hit(jump.statement, evidence, _named(view, jump))


def _named(view: View, jump: Jump) -> tuple[Edit, ...]:
    """A named location in place of the URI: it keeps the method and the body."""
    location, target = view.location, jump.statement.args[-1]
    at = view.route.proxy_pass
    if location.name != "location" or location_name(location)[1] != target or at is None or "$" in at.args[0]:
        return ()
    if location not in (view.route.server.block.block or ()):
        return ()
    name = "@" + target.strip("/").replace("/", "_")
    start, end = location.arg_spans[0][0], location.arg_spans[-1][1]
    edits = [
        fix.replace_argument(jump.statement, len(jump.statement.args) - 1, name),
        Edit(location.file, start, end, name),
    ]
    scheme, _, address = at.args[0].partition("://")
    if "/" in address and not address.startswith("unix:"):
        edits.append(fix.replace_argument(at, 0, f"{scheme}://{address.partition('/')[0]}"))
    return tuple(edits)


RULES: tuple[Rule, ...] = (
    Rule(
        "trailing-slash-redirect",
        "error",
        "the location has a slash more than the API path",
        "drop the slash",
        _redirect,
    ),
    Rule(
        "proxy-pass-not-inherited",
        "error",
        "a nested location without proxy_pass",
        "repeat proxy_pass in the nested location",
        _not_inherited,
    ),
    Rule(
        "error-page-uri-changes-method",
        "error",
        "error_page with a URI turns POST into GET",
        "error_page to a named location: it keeps method and body",
        _error_page,
    ),
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
