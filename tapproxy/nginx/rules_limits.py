"""Rules about limits: request rate, connections, bandwidth, workers."""

from __future__ import annotations

from collections.abc import Iterator

from tapproxy.core.findings import Severity
from tapproxy.nginx import fix
from tapproxy.nginx.model import Tree
from tapproxy.nginx.passing import HELD, TOKEN_RATE_BYTES, limited_by, stops
from tapproxy.nginx.rule import Hit, Rule, TreeRule, View, buffering_off, remove, with_directive
from tapproxy.nginx.source import Directive
from tapproxy.nginx.values import parameters, seconds, size_bytes, whole

_FEW_STREAMS = 10
_FEW_CONNECTIONS = 64
_TIGHT_CONNECTIONS = 512
_LONG_SHUTDOWN_S = 300


def _limit_req(view: View, one: Directive) -> Iterator[Hit]:
    given = parameters(one.args)
    delays = not {"nodelay", "delay"} & given.keys() and not view.scope.is_on("limit_req_dry_run")
    if delays and given.get("burst", "0").strip("0"):
        end = one.arg_spans[-1][1]
        evidence = "a request over the rate waits before it is passed on: measured 0.5 s for each one queued (2 r/s)"
        yield Hit(one, evidence, (fix.Edit(one.file, end, end, " nodelay"),))


def _limit_conn(view: View, one: Directive) -> Iterator[Hit]:
    count = whole(one.args[1] if len(one.args) > 1 else None)
    if count is not None and count < _FEW_STREAMS and not view.scope.is_on("limit_conn_dry_run"):
        yield Hit(one, f"a stream counts for its whole length: the one after {count} of the same key gets 503")


def _limit_rate(view: View) -> Iterator[Hit]:
    if view.route.proxy_pass is None:
        return
    for name in ("limit_rate", "proxy_limit_rate"):
        limit = limited_by(view.hop, name) if view.hop.buffered else None
        stopped = stops(view.hop, "http1") if name == "limit_rate" and "http1" in view.kinds else None
        for one in view.scope.statements(name):
            rate = size_bytes(one.args[0] if one.args else None)
            if stopped is not None:
                severity: Severity | None = None if stopped.verdict == HELD else "warning"
                yield Hit(one, stopped.why, (remove(view, one),), severity)
            elif limit is not None and limit.verdict == HELD:
                yield Hit(one, "slower than tokens come: measured 3.2 s hold at 2k", buffering_off(view))
            elif limit is not None and rate:
                yield Hit(one, f"it depends on {limit.why}", buffering_off(view), "warning")
            elif rate and view.hop.buffered and TOKEN_RATE_BYTES <= rate < 4 * TOKEN_RATE_BYTES:
                yield Hit(one, "near the rate of tokens", buffering_off(view), "warning")


def _limit_ignored(view: View) -> Iterator[Hit]:
    if view.route.proxy_pass is None or view.hop.buffered:
        return
    stopping = "http1" in view.kinds and stops(view.hop, "http1") is not None
    for name in ("limit_rate", "proxy_limit_rate"):
        if name == "limit_rate" and stopping:
            continue  # not ignored at all
        for one in view.scope.statements(name):
            if one.args != ("0",):
                yield Hit(one, "nginx ignores it for unbuffered answers (measured)")


def _worker_connections(tree: Tree) -> Iterator[Hit]:
    for events in tree.root:
        for one in events.block or () if events.name == "events" else ():
            count = whole(one.args[0]) if one.name == "worker_connections" and one.args else None
            if count is not None and count < _TIGHT_CONNECTIONS:
                severity: Severity | None = None if count < _FEW_CONNECTIONS else "warning"
                evidence = (
                    f"a stream holds two connections for its whole length: {count // 2} at most per worker, the next "
                    "client's connection is closed without an answer (measured)"
                )
                yield Hit(one, evidence, (fix.replace_argument(one, 0, "4096"),), severity)


def _shutdown(tree: Tree) -> Iterator[Hit]:
    for one in tree.root:
        limit = seconds(one.args[0]) if one.name == "worker_shutdown_timeout" and one.args else None
        if limit is not None and limit < _LONG_SHUTDOWN_S:
            yield Hit(
                one, f"a reload cuts every stream that runs {limit:g} s longer; without it they finish (measured)"
            )


RULES: tuple[Rule, ...] = (
    Rule(
        "limit-req-delays",
        "warning",
        "limit_req makes requests wait",
        "nodelay, or a higher rate",
        with_directive("limit_req", _limit_req),
    ),
    Rule(
        "limit-conn-streams",
        "warning",
        "limit_conn allows few streams",
        "a larger number: a stream is a connection for minutes",
        with_directive("limit_conn", _limit_conn),
    ),
    Rule(
        "limit-rate-throttles",
        "error",
        "the answer's rate is limited below what an engine sends",
        "remove it for the API paths, or proxy_buffering off, which ignores it",
        _limit_rate,
    ),
    Rule(
        "limit-rate-ignored",
        "info",
        "limit_rate has no effect with proxy_buffering off",
        "remove it",
        _limit_ignored,
    ),
)

TREE_RULES: tuple[TreeRule, ...] = (
    TreeRule(
        "worker-connections-low",
        "error",
        "few connections per worker",
        "worker_connections 4096 or more",
        _worker_connections,
    ),
    TreeRule(
        "worker-shutdown-timeout-cuts",
        "warning",
        "a reload cuts streams",
        "leave worker_shutdown_timeout out, or set it longer than an answer takes",
        _shutdown,
    ),
)
