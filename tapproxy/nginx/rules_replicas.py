"""Rules about several servers behind one name: what is tried again, and who is left out for how long."""

from __future__ import annotations

from collections.abc import Iterator

from tapproxy.core.findings import Severity
from tapproxy.nginx import fix
from tapproxy.nginx.rule import Hit, Rule, View, with_directive
from tapproxy.nginx.servers import in_use
from tapproxy.nginx.source import Directive
from tapproxy.nginx.values import parameters, seconds, whole

_LONG_FAIL_TIMEOUT_S = 60
# Answers after which the engine may have done the work already; 503 and 429 come before it.
_AFTER_WORK = frozenset({"timeout", "http_500", "http_502", "http_504"})
_SMALL_MAX_CONNS = 64


def _retry_doubles(view: View, one: Directive) -> Iterator[Hit]:
    words = {arg.lower() for arg in one.args}
    late = words & _AFTER_WORK
    if "non_idempotent" not in words or not late or len(in_use(view.upstream_block)) < 2:
        return
    if view.value("proxy_request_buffering") == "off" or view.value("proxy_next_upstream_tries") == "1":
        return  # the body is gone, or there is only one try (measured: 503 passes through)
    severity: Severity | None = None if "timeout" in words else "warning"
    text = view.texts[one.file]
    edits = [fix.remove_argument(text, one, index) for index, arg in enumerate(one.args) if arg.lower() in late]
    evidence = f"a POST that fails late ({', '.join(sorted(late))}) is sent to another replica: measured 2 generations"
    yield Hit(one, evidence, tuple(edits), severity)


def _no_retry(view: View, one: Directive) -> Iterator[Hit]:
    if one.args == ("off",) and len(in_use(view.upstream_block)) > 1:
        yield Hit(one, "the body is gone once sent: a 503 or a reset of one replica is not tried on another (measured)")


def _fail_timeout(view: View) -> Iterator[Hit]:
    servers = in_use(view.upstream_block)
    for one in servers if len(servers) > 1 and view.route.proxy_pass is not None else ():
        given = parameters(one.args[1:])
        length = seconds(given.get("fail_timeout"))
        if length is not None and length > _LONG_FAIL_TIMEOUT_S and given.get("max_fails") != "0":
            index = 1 + list(given).index("fail_timeout")
            fails = given.get("max_fails", "1")
            evidence = f"after {fails} failed requests this replica gets nothing for {length:g} s"
            yield Hit(one, evidence, (fix.replace_argument(one, index, "fail_timeout=30s"),))


def _max_conns(view: View) -> Iterator[Hit]:
    for one in in_use(view.upstream_block) if view.route.proxy_pass is not None else ():
        limit = whole(parameters(one.args[1:]).get("max_conns"))
        if limit:
            evidence = f"the request after {limit} open streams gets 502 at once: nginx has no queue (measured)"
            yield Hit(one, evidence, (), None if limit < _SMALL_MAX_CONNS else "info")


RULES: tuple[Rule, ...] = (
    Rule(
        "retry-doubles-post",
        "error",
        "a POST is tried again after the engine may have begun",
        "take timeout and http_5xx out of proxy_next_upstream, or non_idempotent",
        with_directive("proxy_next_upstream", _retry_doubles),
    ),
    Rule(
        "request-buffering-off-disables-retry",
        "info",
        "with proxy_request_buffering off no request is tried on another server",
        "nothing, if that is meant",
        with_directive("proxy_request_buffering", _no_retry),
    ),
    Rule(
        "fail-timeout-excessive",
        "warning",
        "a replica that failed stays out for very long",
        "fail_timeout=10s to 30s",
        _fail_timeout,
    ),
    Rule(
        "max-conns-502",
        "warning",
        "max_conns without a queue",
        "let the engine queue: leave max_conns out, or set it above what it takes at once",
        _max_conns,
    ),
)
