"""Rules about what rewrites the body on its way: gzip, gunzip, sub_filter, SSI, addition."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tapproxy.nginx.rule import OFF, Hit, Rule, View, buffering_off, send_header, with_directive
from tapproxy.nginx.source import Directive


def _gzip_at(view: View) -> Directive | None:
    statements = view.scope.statements("gzip_types") or view.scope.statements("gzip")
    return statements[0] if statements else None


def _gzip_buffers(view: View) -> Iterator[Hit]:
    at = _gzip_at(view)
    if at is None or view.route.proxy_pass is None or not view.hop.gzip_type:
        return
    if not (view.hop.configured_on or view.hop.buffered):
        return
    if view.hop.compressed and view.hop.buffered:
        yield Hit(
            at,
            "for clients that accept gzip everything is held until the end: 300 events (63 kB) came as one block "
            "after 3.0 s, on plain, TLS and HTTP/2 alike",
            buffering_off(view),
        )
    else:
        saved_by = "Content-Encoding" if view.hop.upstream.content_encoding else "X-Accel-Buffering: no"
        yield Hit(
            at,
            f"saved only by the upstream's {saved_by}; without that header, held until the end",
            buffering_off(view),
            "warning",
        )


def _gzip_sse(view: View) -> Iterator[Hit]:
    at = _gzip_at(view)
    off = not view.hop.buffered and not view.hop.configured_on
    if at is not None and view.route.proxy_pass is not None and view.hop.compressed and off:
        yield Hit(at, "unbuffered, so zlib is flushed with every read: hold 0.2 ms, 7 times fewer bytes")


def _gunzip(view: View, one: Directive) -> Iterator[Hit]:
    if one.args == ("on",) and view.hop.buffered:
        yield Hit(one, "an answer that the engine compressed is unpacked here; measured: no hold on a plain listener")


def _accept_encoding(view: View) -> Iterator[Hit]:
    """The engine is known to compress: nginx could keep it from doing so, and does not."""
    if (view.hop.upstream.content_encoding or "identity") == "identity" or view.route.proxy_pass is None:
        return
    headers = view.scope.statements("proxy_set_header")
    if not any(one.args[:1] and one.args[0].lower() == "accept-encoding" for one in headers):
        evidence = "the client's Accept-Encoding reaches the engine, whose own compressor may hold tokens"
        yield Hit(view.route.proxy_pass, evidence, (send_header(view, "Accept-Encoding", '""'),))


def _filter(types: str, active: Callable[[View], Directive | None], effect: str) -> Callable[[View], Iterator[Hit]]:
    """A body filter that is active and takes event streams; the finding is at the line that lets it."""

    def find(view: View) -> Iterator[Hit]:
        at = active(view)
        if at is None or view.route.proxy_pass is None:
            return
        wanted = view.hop.content_type
        for one in view.scope.statements(types):
            if {"*", wanted} & {arg.lower() for arg in one.args}:
                yield Hit(one if types != "addition_types" else at, effect)
                return

    return find


def _sub_filter(view: View) -> Directive | None:
    return next(iter(view.scope.statements("sub_filter")), None)


def _ssi(view: View) -> Directive | None:
    return next(iter(view.scope.statements("ssi")), None) if view.scope.is_on("ssi") else None


def _addition(view: View) -> Directive | None:
    found = (*view.scope.statements("add_after_body"), *view.scope.statements("add_before_body"))
    return next((one for one in found if one.args != ("",)), None)


RULES: tuple[Rule, ...] = (
    Rule(
        "gzip-buffers-sse",
        "error",
        "gzip applies to event streams while buffering is on",
        f"{OFF}, or gzip off there",
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
        "gunzip-sse",
        "info",
        "gunzip unpacks event streams while buffering is on",
        f'{OFF}; proxy_set_header Accept-Encoding "" keeps the engine from compressing',
        with_directive("gunzip", _gunzip),
    ),
    Rule(
        "accept-encoding-forwarded",
        "info",
        "the engine compresses, since it is told that the client accepts it",
        'proxy_set_header Accept-Encoding ""',
        _accept_encoding,
    ),
    Rule(
        "sub-filter-sse",
        "warning",
        "sub_filter works on event streams",
        "take text/event-stream out of sub_filter_types for the API paths",
        _filter("sub_filter_types", _sub_filter, "it rewrites tokens; a match that may still come is waited for"),
    ),
    Rule(
        "ssi-sse",
        "warning",
        "SSI works on event streams",
        "ssi off for the API paths: a model that writes <!--# makes nginx obey it",
        _filter(
            "ssi_types",
            _ssi,
            "measured: no hold, but tokens that look like SSI commands are carried out, and the header waits for the "
            "first event, unbuffered too",
        ),
    ),
    Rule(
        "addition-sse",
        "warning",
        "text is added to event streams",
        "take text/event-stream out of addition_types for the API paths",
        _filter(
            "addition_types", _addition, "measured: the text comes behind data: [DONE], which clients do not expect"
        ),
    ),
)
