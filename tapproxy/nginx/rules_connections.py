"""Rules about the connection to the client: Nagle, keep-alive, buffers of TLS and HTTP/2."""

from __future__ import annotations

from collections.abc import Iterator

from tapproxy.nginx.rule import Hit, Rule, View, set_here, with_directive
from tapproxy.nginx.source import Directive
from tapproxy.nginx.values import seconds


def _nodelay_off(view: View, one: Directive) -> Iterator[Hit]:
    if one.args == ("off",):
        evidence = (
            "each event waits for the acknowledgement of the one before: +40 ms P50, +78 ms max at a round trip of "
            "80 ms, 0 on loopback"
        )
        yield Hit(one, evidence, set_here(view, "tcp_nodelay", "on"))


def _keepalive_off(view: View, one: Directive) -> Iterator[Hit]:
    if one.args and seconds(one.args[0]) == 0:
        yield Hit(one, "every request needs a new connection from the client, with TLS a new handshake")


def _tls_buffer(view: View, one: Directive) -> Iterator[Hit]:
    if view.hop.buffered and "tls_http1" in view.kinds:
        evidence = (
            "it bounds what TLS holds (4k: 380 ms, 1400: 140 ms max) and does not end it; unbuffered it is of no use"
        )
        yield Hit(one, evidence)


def _http2_chunk(view: View, one: Directive) -> Iterator[Hit]:
    if view.hop.buffered and "h2" in view.kinds:
        yield Hit(one, "measured: no effect on when events arrive")


RULES: tuple[Rule, ...] = (
    Rule(
        "tcp-nodelay-off",
        "warning",
        "tcp_nodelay is off",
        "tcp_nodelay on",
        with_directive("tcp_nodelay", _nodelay_off),
    ),
    Rule(
        "client-keepalive-off",
        "info",
        "clients cannot use a connection twice",
        "leave keepalive_timeout at its default",
        with_directive("keepalive_timeout", _keepalive_off),
    ),
    Rule(
        "ssl_buffer_size",
        "info",
        "ssl_buffer_size is no remedy for held tokens",
        "proxy_buffering off",
        with_directive("ssl_buffer_size", _tls_buffer),
    ),
    Rule(
        "http2_chunk_size",
        "info",
        "http2_chunk_size is no remedy for held tokens",
        "proxy_buffering off",
        with_directive("http2_chunk_size", _http2_chunk),
    ),
)
