"""The admin port: /metrics, health, the last records as JSON and as a page; /v1/traces takes an engine's spans.

Rules here. Everything but /healthz and /readyz asks for the token where there is one. Whatever a client or an
engine wrote is escaped; no page holds a script; nothing shown holds a prompt or a credential.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import html
import ipaddress
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tapproxy import __version__
from tapproxy.core import spot
from tapproxy.core.record import Record
from tapproxy.exporter.metrics import RING_RECORDS, Exporter
from tapproxy.exporter.probe import ProbeDesk
from tapproxy.exporter.traces import TraceDesk

_COLUMNS = ("time (UTC)", "id", "method", "path", "model", "status", "ended", "TTFT ms", "E2E ms", "events", "findings")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>tapproxy: {name}</title>
<meta http-equiv="refresh" content="5"><link rel="stylesheet" href="/style.css"></head>
<body><h1>tapproxy: {name}</h1>
<p>{status}</p>
<p><a href="/metrics">/metrics</a>
<a href="/api/records?limit=100">/api/records</a> <a href="/api/status">/api/status</a></p>
<table><thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody></table>
<p>TTFT: first token event sent downstream since the first byte of the request; E2E: the last token or finish event
(a plain response: its end). {shown} exchanges shown, newest first.</p>
</body></html>
"""
_STYLE = """body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5em; color-scheme: light dark; }
table { border-collapse: collapse; }
th, td { text-align: left; padding: .2em .8em .2em 0; border-bottom: 1px solid #8884; white-space: nowrap; }
td:nth-child(n+8):nth-child(-n+10) { text-align: right; font-variant-numeric: tabular-nums; }
"""
_STATUS_SHOWN = ("upstream", "in_flight", "workers_alive", "worker_restarts")


def _page(exporter: Exporter, name: str, status: Mapping[str, Any]) -> str:
    shown = exporter.recent(100)
    rows = "\n".join("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in kept.row()) + "</tr>" for kept in shown)
    return _PAGE.format(
        name=html.escape(name),
        status=html.escape(" · ".join(f"{key} {status[key]}" for key in _STATUS_SHOWN if key in status)),
        head="".join(f"<th>{column}</th>" for column in _COLUMNS),
        rows=rows,
        shown=len(shown),
    )


def admin_app(
    exporter: Exporter,
    status: Callable[[], dict[str, Any]],
    ready: Callable[[], bool],
    token: str | None,
    name: str = "tap",
    probes: ProbeDesk | None = None,
    traces: TraceDesk | None = None,
) -> Starlette:
    """The admin port. ``status()`` is what /api/status shows; /metrics takes from it what metrics.STATUS names.

    ``probes``: where keys of probes are given out, under --allow-probe. ``traces``: who takes an engine's spans.
    """

    async def metrics(request: Request) -> Response:
        body, content_type = exporter.render(status(), request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        return PlainTextResponse("ready\n") if ready() else PlainTextResponse("not ready\n", 503)

    async def records(request: Request) -> Response:
        text = request.query_params.get("limit", "100")
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= RING_RECORDS):
            return _json({"error": f"limit is {text[:20]!r}: expected 1 to {RING_RECORDS}"}, 400)
        found = exporter.recent(int(text), request.query_params.get("id"))
        lines = b",\n".join(kept.line for kept in found)
        return Response(b'{"records": [' + lines + b"]}\n", media_type="application/json")

    async def record(request: Request) -> Response:
        found = exporter.recent(1, request.path_params["id"])
        if not found:
            return _json({"error": f"no such record among the last {RING_RECORDS}"}, 404)
        # The record names its findings; here each says what it means.
        told = [finding.to_dict() for finding in spot.findings(Record.from_dict(found[0].record()))]
        return _json({**found[0].record(), "findings_explained": told})

    async def api_status(_: Request) -> Response:
        return _json({"version": __version__, "name": name, **status()})

    async def page(_: Request) -> Response:
        return HTMLResponse(_page(exporter, name, status()))

    async def style(_: Request) -> Response:
        return Response(_STYLE, media_type="text/css")

    async def probe(request: Request) -> Response:
        if probes is None:
            return _json({"error": "this tap answers no probes: start it with `tapproxy serve --allow-probe`"}, 403)
        status, answer = await probes.answer(request.method, request.headers, await request.body())
        return _json(answer, status)

    async def take_traces(request: Request) -> Response:
        if traces is None:
            return PlainTextResponse("this tap takes no traces\n", 404)
        try:
            reply = await traces.take(request.headers, request.stream())
            return Response(reply.body, reply.status, reply.headers)
        except ClientDisconnect:
            # Nobody reads this.
            return PlainTextResponse("the client left within its body\n", 400)

    routes = [
        Route("/v1/traces", take_traces, methods=["POST"]),
        Route("/api/probe", probe, methods=["GET", "POST", "DELETE"]),
        Route("/metrics", metrics),
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/api/records", records),
        Route("/api/records/{id}", record),
        Route("/api/status", api_status),
        Route("/", page),
        Route("/style.css", style),
    ]
    return Starlette(routes=routes, middleware=[Middleware(_Guard, token=token)])


def _json(value: Any, status: int = 200) -> Response:
    body = orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS) + b"\n"
    return Response(body, status, media_type="application/json")


_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
_OPEN = ("/healthz", "/readyz")


class _Guard:
    """The token, the Host, and the headers of every answer."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for key, value in _HEADERS.items():
                    headers.setdefault(key, value)
            await send(message)

        refusal = None if scope["path"] in _OPEN else self._refusal(Headers(scope=scope))
        await (refusal or self._app)(scope, receive, send_guarded)

    def _refusal(self, headers: Headers) -> Response | None:
        if self._token is None:
            # A page in the operator's browser can point its own name at 127.0.0.1 and then read this port.
            if not _is_local_name(headers.get("host", "")):
                return PlainTextResponse(
                    "without a token the admin port answers to addresses and localhost only\n", 403
                )
        elif not _bears(headers.get("authorization", ""), self._token):
            challenge = {"www-authenticate": 'Bearer realm="tapproxy", Basic realm="tapproxy"'}
            return PlainTextResponse("the admin token is needed\n", 401, headers=challenge)
        return None


def _bears(authorization: str, token: str) -> bool:
    """``Bearer TOKEN``, or Basic with the token as the password, which browsers can ask for."""
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() == "basic":
        try:
            given = base64.b64decode(given, validate=True).decode("latin-1").partition(":")[2]
        except (binascii.Error, ValueError):
            return False
    elif scheme.lower() != "bearer":
        return False
    return hmac.compare_digest(given.strip().encode("latin-1", "replace"), token.encode())


def _is_local_name(host: str) -> bool:
    """An address, or a name without a dot: nobody outside can register those."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] or host
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return "." not in name.removesuffix(".")
    return True
