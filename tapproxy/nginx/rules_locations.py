"""Rules about which location serves a path: one that lacks the setting, one behind a jump, one that never proxies."""

from __future__ import annotations

from collections.abc import Iterator

from tapproxy.core.findings import Severity
from tapproxy.nginx import fix
from tapproxy.nginx.fix import Edit
from tapproxy.nginx.model import location_name
from tapproxy.nginx.routing import Jump
from tapproxy.nginx.rule import API_PATHS, Hit, Rule, View, buffering_off
from tapproxy.nginx.rules_buffering import has_off, held, locations_of

_DOCUMENTS = (".html", ".htm", ".json", ".txt", ".xml")


def _not_covered(view: View) -> Iterator[Hit]:
    """A location has buffering off, so it is known to matter, and this path is served by another one."""
    if view.route.proxy_pass is None or not (view.hop.buffered and view.hop.configured_on) or view.route.jumps:
        return
    path, serving = view.route.path, view.location
    severity: Severity = "error" if held(view) else "warning"
    for one in locations_of(view.route.server.block):
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
        outer = next(iter(level.named("proxy_pass")), None)
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
)
