"""What to change, by mechanism and by the proxy that names itself in its answers; data, no logic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tapproxy.probe.naming import Mechanism

_OTHER: Final = "other"

BUFFERING: Final = {
    "nginx": "nginx: `proxy_buffering off;` in the location that serves this path (`tapproxy check` finds the line).",
    "apache": "Apache: `ProxyPass … flushpackets=on`, and no mod_buffer on this path.",
    "caddy": "Caddy: `flush_interval -1` in reverse_proxy.",
    _OTHER: (
        "Turn response buffering off for this path. nginx: `proxy_buffering off;`; HAProxy: `option http-no-delay`; "
        "Apache: `flushpackets=on`; Caddy: `flush_interval -1`; Envoy: no buffer filter on the route."
    ),
}
ADVICE: Final[Mapping[Mechanism, Mapping[str, str]]] = {
    Mechanism.QUANTA: BUFFERING,
    Mechanism.FULL: BUFFERING,
    Mechanism.TIMER: BUFFERING,
    Mechanism.CORK: {
        _OTHER: (
            "The proxy writes with MSG_MORE or TCP_CORK. HAProxy: `option http-no-delay`; "
            "nginx: `tcp_nopush off;` for this path, or `proxy_buffering off;`."
        )
    },
    Mechanism.NAGLE: {
        "nginx": "nginx: `proxy_buffering off;` (the buffered way never sets TCP_NODELAY) and `tcp_nodelay on;`.",
        _OTHER: "Set TCP_NODELAY on the connections to clients. nginx: `proxy_buffering off;` and `tcp_nodelay on;`.",
    },
    Mechanism.DELAYED_ACK: {_OTHER: "Set TCP_NODELAY on the proxy's connections to clients."},
    Mechanism.RATE_LIMIT: {
        "nginx": "nginx: remove `limit_rate` (and `proxy_limit_rate`) from this path.",
        "apache": "Apache: take the RATE_LIMIT filter (mod_ratelimit) off this path.",
        _OTHER: "Remove the rate limit from this path. nginx: `limit_rate`; Apache: mod_ratelimit; HAProxy: bwlim.",
    },
    Mechanism.NEXT_EVENT: {
        "nginx": "nginx: `proxy_buffering off;`, or proxy_buffer_size and proxy_buffers above the largest event.",
        _OTHER: BUFFERING[_OTHER],
    },
    Mechanism.UNCLEAR: {_OTHER: "Probe again on a quiet machine, and from nearer to the proxy."},
}
COMPRESSION: Final = {
    "nginx": "nginx: `proxy_buffering off;` or `gzip off;` for this path.",
    "apache": "Apache: take the DEFLATE filter off this path (`SetEnv no-gzip 1`).",
    "caddy": "Caddy: keep text/event-stream out of `encode` (a matcher on the path, or on Content-Type).",
    _OTHER: (
        "Do not compress text/event-stream on this path. HAProxy: leave it out of `compression type`; "
        "nginx: `gzip off;`; Caddy: a matcher for `encode`; Apache: `SetEnv no-gzip 1`."
    ),
}
ABORT: Final = {
    "nginx": "nginx: no `proxy_ignore_client_abort on;` and no `proxy_cache` on this path.",
    "apache": "Apache learns it by writing: have the engine send SSE comments while a request waits.",
    _OTHER: (
        "Pass aborts on. nginx: no proxy_ignore_client_abort, no proxy_cache on this path; HAProxy: "
        "`option abortonclose`; else have the engine send SSE comments while a request waits."
    ),
}
TIMEOUT: Final = {
    "nginx": "nginx: `proxy_read_timeout 600s;` or more, and have the engine send SSE comments while it thinks.",
    "apache": "Apache: `ProxyTimeout 600` or more.",
    "caddy": "Caddy: a longer `read_timeout` in reverse_proxy's transport, or none.",
    _OTHER: (
        "Let silence last longer than the longest prefill and queue. nginx: `proxy_read_timeout`; HAProxy: "
        "`timeout server`; Apache: `ProxyTimeout`; Envoy: `stream_idle_timeout` and the route's `timeout`."
    ),
}


def of(table: Mapping[str, str], family: str | None) -> str:
    """The advice for a proxy of this family, or for any."""
    return table.get(family or _OTHER, table[_OTHER])


def family(server: str | None, via: str | None) -> str | None:
    """Which proxy names itself in Server or Via; None where none does."""
    text = f"{server or ''} {via or ''}".lower()
    return next((name for name in ("nginx", "apache", "caddy", "haproxy", "envoy") if name in text), None)
