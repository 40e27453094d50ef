"""Rules about X-Accel-Buffering: who says it, who hears it, and who only seems to."""

from __future__ import annotations

from collections.abc import Iterator

from tapproxy.core.findings import Severity
from tapproxy.nginx import fix
from tapproxy.nginx.rule import OFF, Hit, Rule, View, add_beside, buffering_off, remove, with_directive
from tapproxy.nginx.rules_buffering import cause, held, stripped_by_inner
from tapproxy.nginx.source import Directive

_XAB = "x-accel-buffering"


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
    at = added[0] if added else cause(view)
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


RULES: tuple[Rule, ...] = (
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
)
