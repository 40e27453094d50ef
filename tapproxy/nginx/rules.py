"""The rules: what is wrong with a configuration for streaming, how much it costs, and the patch.

Rules here: a rule is a row of ``RULES`` (a path through nginx) or of ``FILE_RULES`` (a whole configuration), with a
finder that yields what it saw. Each number in an evidence was measured on nginx 1.22.1 and 1.31.3 with events of
210 B every 20 ms; each rule has a file in nginx/bad that it must fire on, and is silent on nginx/streaming.conf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from tapproxy.core.findings import Finding, Severity
from tapproxy.nginx import fix
from tapproxy.nginx.directives import HTTP11_DEFAULT
from tapproxy.nginx.fix import Edit
from tapproxy.nginx.model import Tree
from tapproxy.nginx.predict import Hop
from tapproxy.nginx.source import Directive


@dataclass(frozen=True, slots=True)
class View:
    """What a rule looks at: one hop, the kinds of client it serves, the files' texts."""

    hop: Hop
    kinds: tuple[str, ...]
    texts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Hit:
    """Where a rule fired, and why. ``severity`` only where it differs from the rule's."""

    at: Directive
    evidence: str
    edits: tuple[Edit, ...] = ()
    severity: Severity | None = None


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: the slug of the contract, its weight, what it says and advises, and its finder."""

    slug: str
    severity: Severity
    summary: str
    advice: str
    find: Callable[[View], Iterator[Hit]]


@dataclass(frozen=True, slots=True)
class Flaw:
    """A finding with the edits of its patch, so that several patches can be made one."""

    finding: Finding
    edits: tuple[Edit, ...] = field(default=())


# -- fixes ------------------------------------------------------------------------------------------------------


def _add_beside(view: View, *statements: str) -> Edit:
    """New statements in the serving location: behind proxy_pass where that stands in the location itself."""
    scope, anchor = view.hop.route.scope, view.hop.route.proxy_pass
    location = scope.location or scope.levels[0]
    if anchor is not None and anchor.via == location.via and anchor in (location.block or ()):
        return fix.insert_after(view.texts[anchor.file], anchor, *statements)
    return fix.insert_first(view.texts[location.file], location, *statements)


def _buffering_off(view: View) -> tuple[Edit, ...]:
    """proxy_buffering off in the serving location, and nowhere else: other locations keep what they have."""
    scope = view.hop.route.scope
    location = scope.location or scope.levels[0]
    explicit = scope.statements("proxy_buffering")
    if explicit and explicit[0] in (location.block or ()) and explicit[0].via == location.via:
        return (fix.replace_argument(explicit[0], 0, "off"),)
    return (_add_beside(view, "proxy_buffering off;"),)


def _http11(view: View) -> tuple[Edit, ...]:
    """HTTP/1.1 towards the upstream, and no "Connection: close" where this nginx would send it."""
    scope = view.hop.route.scope
    edits: list[Edit] = []
    lines: list[str] = []
    explicit = scope.statements("proxy_http_version")
    if explicit:
        edits.append(fix.replace_argument(explicit[0], 0, "1.1"))
    else:
        lines.append("proxy_http_version 1.1;")
    headers = scope.statements("proxy_set_header")
    sets_connection = any(one.args[0].lower() == "connection" for one in headers if one.args)
    if view.hop.version < HTTP11_DEFAULT and not sets_connection:
        location = scope.location or scope.levels[0]
        if headers and headers[-1] not in (location.block or ()):
            # All or nothing per level: one header set in the location would drop those of the outer level.
            outer = headers[-1]
            edits.append(fix.insert_after(view.texts[outer.file], outer, 'proxy_set_header Connection "";'))
        else:
            lines.append('proxy_set_header Connection "";')
    if lines:
        edits.append(_add_beside(view, *lines))
    return tuple(edits)


# -- finders ----------------------------------------------------------------------------------------------------


def _cause_of_buffering(view: View) -> Directive | None:
    """The statement that leaves buffering on: its own, else the proxy_pass that has no other."""
    explicit = view.hop.route.scope.statements("proxy_buffering")
    return explicit[0] if explicit and view.hop.configured_on else view.hop.route.proxy_pass


def _held(view: View) -> list[str]:
    """The measured mechanisms that hold small events in this hop, in words."""
    if not (view.hop.buffered and view.hop.configured_on):
        return []
    found = []
    if "tls_http1" in view.kinds:
        size = view.hop.route.scope.setting("ssl_buffer_size").value
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


def _buffering_on(view: View) -> Iterator[Hit]:
    at, held = _cause_of_buffering(view), _held(view)
    if at is not None and held:
        yield Hit(at, "; ".join(held), _buffering_off(view))


def _buffering_on_latent(view: View) -> Iterator[Hit]:
    at = _cause_of_buffering(view)
    if at is None or not (view.hop.buffered and view.hop.configured_on) or _held(view) or view.hop.compressed:
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
    yield Hit(at, evidence, _buffering_off(view))


def _relies_on_xab(view: View) -> Iterator[Hit]:
    at = _cause_of_buffering(view)
    if at is not None and view.hop.configured_on and not view.hop.buffered:
        yield Hit(
            at,
            f"{view.hop.upstream.name} sends X-Accel-Buffering: no, which nginx obeys (hold 0.2 ms); another engine, "
            "or a proxy between, may not send it",
            _buffering_off(view),
        )


def _xab_ignored(view: View) -> Iterator[Hit]:
    if not view.hop.buffered or not view.hop.ignores_xab:
        return
    for one in view.hop.route.scope.statements("proxy_ignore_headers"):
        for index, argument in enumerate(one.args):
            if argument.lower() == "x-accel-buffering":
                edit = fix.remove_argument(view.texts[one.file], one, index)
                yield Hit(one, "over TLS held up to 800 ms although the upstream said no", (edit,))


def _xab_yes(view: View) -> Iterator[Hit]:
    explicit = view.hop.route.scope.statements("proxy_buffering")
    if view.hop.buffered and not view.hop.configured_on and explicit:
        yield Hit(
            explicit[0],
            "the upstream's X-Accel-Buffering: yes turns buffering on over this line: held up to 800 ms over TLS",
            (_add_beside(view, "proxy_ignore_headers X-Accel-Buffering;"),),
        )


def _gzip_at(view: View) -> Directive | None:
    scope = view.hop.route.scope
    statements = scope.statements("gzip_types") or scope.statements("gzip")
    return statements[0] if statements else None


def _gzip_buffers(view: View) -> Iterator[Hit]:
    at = _gzip_at(view)
    if at is None or not view.hop.gzip_type or not (view.hop.configured_on or view.hop.buffered):
        return
    if view.hop.compressed and view.hop.buffered:
        yield Hit(
            at,
            "for clients that accept gzip everything is held until the end: 300 events (63 kB) came as one block "
            "after 3.0 s, on plain, TLS and HTTP/2 alike",
            _buffering_off(view),
        )
    else:
        saved_by = "Content-Encoding" if view.hop.upstream.content_encoding else "X-Accel-Buffering: no"
        yield Hit(
            at,
            f"saved only by the upstream's {saved_by}; without that header, held until the end",
            _buffering_off(view),
            "warning",
        )


def _gzip_sse(view: View) -> Iterator[Hit]:
    at = _gzip_at(view)
    if at is not None and view.hop.compressed and not view.hop.buffered and not view.hop.configured_on:
        yield Hit(at, "unbuffered, so zlib is flushed with every read: hold 0.2 ms, 7 times fewer bytes")


def _http10(view: View) -> Iterator[Hit]:
    route = view.hop.route
    if view.hop.http_version != "1.0" or route.proxy_pass is None:
        return
    explicit = route.scope.statements("proxy_http_version")
    evidence = "a new connection for every request, and chunked request bodies are collected first"
    if view.hop.framing == "chunked":
        evidence += (
            f"; streaming rests on {view.hop.upstream.name} answering HTTP/1.0 with chunked framing, against the RFC"
        )
    else:
        evidence += "; an engine that crashes leaves a short answer that looks complete (measured, no [DONE])"
    at = explicit[0] if explicit else route.proxy_pass
    # Whoever wrote it down may mean it; who left the default of an old nginx does not know.
    yield Hit(at, evidence, _http11(view), "info" if explicit else None)


_OFF = "set proxy_buffering off in the location that serves the path"

RULES: tuple[Rule, ...] = (
    Rule(
        "buffering-on",
        "error",
        "proxy_buffering is on where that holds tokens back",
        f"{_OFF}; proxy_http_version, postpone_output and buffer sizes do not help",
        _buffering_on,
    ),
    Rule(
        "buffering-on-latent",
        "warning",
        "proxy_buffering is on; it holds little here, and more on a slower link, a new listener, or larger events",
        _OFF,
        _buffering_on_latent,
    ),
    Rule(
        "relies-on-xab",
        "info",
        "streaming relies on the upstream's X-Accel-Buffering: no",
        f"{_OFF}, so that it does not depend on a header",
        _relies_on_xab,
    ),
    Rule(
        "xab-ignored",
        "error",
        "proxy_ignore_headers shuts out X-Accel-Buffering while buffering is on",
        f"take X-Accel-Buffering out of proxy_ignore_headers, or {_OFF}",
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
        "gzip-buffers-sse",
        "error",
        "gzip applies to event streams while buffering is on",
        f"{_OFF}, or gzip off there",
        _gzip_buffers,
    ),
    Rule(
        "gzip-sse",
        "info",
        "event streams are compressed, unbuffered",
        "nothing to do; gzip off saves the processor time",
        _gzip_sse,
    ),
    Rule(
        "http10-upstream",
        "warning",
        "nginx speaks HTTP/1.0 to the upstream",
        'proxy_http_version 1.1 and proxy_set_header Connection ""',
        _http10,
    ),
)


def path_flaws(view: View) -> Iterator[Flaw]:
    """What the rules have to say about one hop."""
    if view.hop.route.proxy_pass is None:
        return
    for rule in RULES:
        for hit in rule.find(view):
            finding = Finding(
                rule=rule.slug,
                severity=hit.severity or rule.severity,
                summary=rule.summary,
                evidence=hit.evidence,
                advice=rule.advice,
                file=hit.at.file,
                line=hit.at.line,
                directive=hit.at.text,
                context=view.hop.route.scope.context,
                patch=fix.unified(view.texts, hit.edits),
            )
            yield Flaw(finding, hit.edits)


def file_flaws(tree: Tree) -> Iterator[Flaw]:
    """What can be said about the files before any path is followed."""
    for problem in tree.problems:
        yield Flaw(
            Finding(
                rule="config-invalid",
                severity="error",
                summary="nginx does not start with this configuration",
                evidence=problem.text,
                advice="correct it, and run nginx -t on the machine that serves",
                file=problem.file,
                line=problem.line,
                directive=problem.directive or None,
                context=problem.context,
            )
        )
    for include in tree.empty_includes:
        yield Flaw(
            Finding(
                rule="include-matches-nothing",
                severity="warning",
                summary="an include matches no file, which nginx accepts in silence",
                evidence=f"no file for {include.args[0]}: what it was to set is not set",
                advice="correct the path, or remove the include",
                file=include.file,
                line=include.line,
                directive=include.text,
            )
        )
