"""What in a request's head only a proxy writes.

Rules here: names of marks and never values, which are addresses of people. A mark proves a proxy, and no mark proves
nothing: HAProxy, for one, leaves none.
"""

from __future__ import annotations

from typing import Final

from tapproxy.core.http1 import RequestHead

# Fields that say whom a request came from: no client has anything to say there.
_FORWARDING: Final = frozenset(
    b"forwarded via x-forwarded-for x-forwarded-host x-forwarded-port x-forwarded-proto x-forwarded-server x-real-ip "
    b"x-envoy-external-address x-envoy-internal x-envoy-original-path x-original-forwarded-for "
    b"cf-connecting-ip cf-ray true-client-ip fastly-client-ip".split()
)
# What every client library writes of its own, and a proxy passes on.
_CLIENTS_OWN: Final = frozenset((b"user-agent", b"accept", b"accept-encoding", b"content-type", b"authorization"))
HTTP_1_0: Final = "HTTP/1.0"
NGINX_ORDER: Final = "field order of nginx"


def proxy_marks(head: RequestHead) -> list[str]:
    """The marks of this head, each once; empty where there are none.

    nginx writes what it sets itself (Host, Connection, Content-Length) before what the client sent; the usual client
    libraries have a field of their own before Content-Length. HTTP/1.0 is what nginx before 1.29.7 asks in.
    """
    marks: list[str] = []
    host = own = length = -1
    for index, (name, _, _) in enumerate(head.fields):
        if name in _FORWARDING:
            marks.append(name.decode("ascii"))
        elif name == b"host":
            host = index
        elif name == b"content-length":
            length = index
        elif own < 0 and name in _CLIENTS_OWN:
            own = index
    if len(marks) > 1:
        marks = sorted(set(marks))
    if head.version == 0:
        marks.append(HTTP_1_0)
    if 0 <= host < length < own:
        marks.append(NGINX_ORDER)
    return marks
