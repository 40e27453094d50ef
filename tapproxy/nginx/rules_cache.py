"""Rules about stored answers: proxy_cache and proxy_store on a path that streams."""

from __future__ import annotations

from collections.abc import Iterator

from tapproxy.core.findings import Severity
from tapproxy.nginx import fix
from tapproxy.nginx.rule import API_PATHS, Hit, Rule, View, set_here
from tapproxy.nginx.source import Directive


def _cache(view: View) -> Directive | None:
    """The proxy_cache in force on this path, or None."""
    found = view.scope.statements("proxy_cache")
    return found[0] if found and found[0].args != ("off",) and view.route.proxy_pass is not None else None


def _posts(view: View) -> bool:
    """Whether answers to POST are cached; those to GET and HEAD always are."""
    return "post" in view.scope.words("proxy_cache_methods")


def _asked_by_post(view: View) -> bool:
    path = view.route.path
    return path.startswith("/v1/") or path in API_PATHS


def _kept_out(view: View) -> bool | None:
    """Whether proxy_no_cache keeps every answer out: None where it depends on the request."""
    values = [arg for one in view.scope.statements("proxy_no_cache") for arg in one.args]
    if any(value not in ("", "0") and "$" not in value for value in values):
        return True
    return None if values else False


def _cache_sse(view: View) -> Iterator[Hit]:
    at, out = _cache(view), _kept_out(view)
    if at is None or not view.hop.buffered or out is True or (_asked_by_post(view) and not _posts(view)):
        return
    # An engine names no lifetime: without proxy_cache_valid nothing is kept.
    valid = [one.args for one in view.scope.statements("proxy_cache_valid")]
    kept = any(len(args) == 1 or {"200", "any"} & set(args[:-1]) for args in valid)
    severity: Severity | None = "warning" if out is None or not kept else None
    evidence = (
        "later clients get the stored stream at once (measured: in 1 ms), and a client that leaves does not stop the "
        "engine (55 further events generated)"
    )
    yield Hit(at, evidence, set_here(view, "proxy_cache", "off"), severity)


def _post_key(view: View) -> Iterator[Hit]:
    if _cache(view) is None or not view.hop.buffered or not _posts(view) or _kept_out(view) is True:
        return
    key = view.scope.setting("proxy_cache_key").value or ""
    if "$request_body" not in key:
        at = view.scope.statements("proxy_cache_methods")[0]
        evidence = "the key does not hold $request_body: another prompt gets the stored answer of the first (measured)"
        yield Hit(at, evidence, set_here(view, "proxy_cache", "off"))


def _never_cached(view: View) -> Iterator[Hit]:
    at = _cache(view)
    if at is not None and not view.hop.buffered:
        yield Hit(at, "unbuffered answers are never cached (measured)")


def _store(view: View) -> Iterator[Hit]:
    found = view.scope.statements("proxy_store")
    if found and found[0].args != ("off",) and view.route.proxy_pass is not None and view.hop.buffered:
        at = found[0]
        own = at in (view.location.block or ())
        edits = (fix.remove(view.texts[at.file], at),) if own else set_here(view, "proxy_store", "off")
        yield Hit(
            at, "each answer is written to a file, over the one before, and an abort does not stop the engine", edits
        )


RULES: tuple[Rule, ...] = (
    Rule(
        "cache-sse",
        "error",
        "answers of this path are cached",
        "proxy_cache off for the API paths",
        _cache_sse,
        by_path=True,
    ),
    Rule(
        "cache-post-ignores-body",
        "error",
        "POST is cached by a key that ignores the prompt",
        "proxy_cache off for the API paths, or $request_body in proxy_cache_key",
        _post_key,
    ),
    Rule("store-sse", "error", "proxy_store keeps a copy of the answer", "proxy_store off for the API paths", _store),
    Rule(
        "cache-disabled-by-buffering-off",
        "info",
        "proxy_cache has no effect with proxy_buffering off",
        "a location of its own for what is to be cached",
        _never_cached,
    ),
)
