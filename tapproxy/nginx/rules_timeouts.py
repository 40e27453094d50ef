"""Rules about silence and time: which timeout cuts a stream, and when."""

from __future__ import annotations

from collections.abc import Iterator

from tapproxy.core.findings import Severity
from tapproxy.nginx.predict import SHORT_SILENCE_S
from tapproxy.nginx.rule import Hit, Rule, View, set_here, with_directive
from tapproxy.nginx.source import Directive
from tapproxy.nginx.values import seconds

_DEFAULT_READ_S = 60
_PATIENT_READ_S = 300
_SHORT_SEND_S = 10
_SHORT_BODY_S = 10
_TCP_CONNECT_S = 75


def _read_timeout(view: View, one: Directive) -> Iterator[Hit]:
    limit = seconds(one.args[0] if one.args else None)
    if limit is None or limit >= _PATIENT_READ_S:
        return
    severity: Severity = "error" if limit < SHORT_SILENCE_S else "warning" if limit < _DEFAULT_READ_S else "info"
    effect = "a broken answer"
    if view.value("chunked_transfer_encoding") == "off":
        effect = "a short answer that looks complete, since chunked_transfer_encoding is off"
    evidence = (
        f"a silence of {limit:g} s (queue, prefill, a tool call) is cut: 504 before the first token, {effect} after it"
    )
    yield Hit(one, evidence, set_here(view, "proxy_read_timeout", "600s") if severity != "info" else (), severity)


def _read_timeout_default(view: View) -> Iterator[Hit]:
    if view.route.proxy_pass is not None and view.explicit("proxy_read_timeout") is None:
        yield Hit(view.route.proxy_pass, "proxy_read_timeout is 60 s by default: a longer silence of the engine is cut")


def _send_timeout(view: View, one: Directive) -> Iterator[Hit]:
    limit = seconds(one.args[0] if one.args else None)
    if limit is not None and limit < _SHORT_SEND_S:
        evidence = (
            "cuts a client that stops reading while the socket buffers are full; token-rate streams never got there"
        )
        yield Hit(one, evidence)


def _body_timeout(view: View, one: Directive) -> Iterator[Hit]:
    limit = seconds(one.args[0] if one.args else None)
    if limit is not None and limit < _SHORT_BODY_S:
        evidence = (
            f"a pause of {limit:g} s in the upload: the connection is closed, without an answer (measured, no 408)"
        )
        yield Hit(one, evidence, set_here(view, "client_body_timeout", "60s"))


def _connect_timeout(view: View, one: Directive) -> Iterator[Hit]:
    limit = seconds(one.args[0] if one.args else None)
    if limit is not None and limit > _TCP_CONNECT_S:
        yield Hit(one, "nginx's documentation: it cannot usually exceed 75 seconds, and a dead engine is noticed late")


def _ignore_abort(view: View, one: Directive) -> Iterator[Hit]:
    if one.args == ("on",):
        evidence = (
            "a client that leaves during prefill is not noticed before the first token (measured 1.72 s against "
            "less than 1 ms): the engine works for nobody"
        )
        yield Hit(one, evidence, set_here(view, "proxy_ignore_client_abort", "off"))


def _chunked_off(view: View, one: Directive) -> Iterator[Hit]:
    if one.args == ("off",):
        evidence = "a cut answer looks complete to an HTTP/1.1 client, and its connection is closed after every answer"
        yield Hit(one, evidence, set_here(view, "chunked_transfer_encoding", "on"))


RULES: tuple[Rule, ...] = (
    Rule(
        "read-timeout-too-short",
        "error",
        "proxy_read_timeout is shorter than an engine may be silent",
        "proxy_read_timeout 600s or more, and keep-alive comments from the engine where it can send them",
        with_directive("proxy_read_timeout", _read_timeout),
    ),
    Rule(
        "read-timeout-default",
        "info",
        "proxy_read_timeout has its default of 60 s",
        "proxy_read_timeout 600s or more, where queue and prefill may take longer",
        _read_timeout_default,
    ),
    Rule(
        "send-timeout-too-short",
        "warning",
        "send_timeout is only seconds",
        "leave it at its default of 60s",
        with_directive("send_timeout", _send_timeout),
    ),
    Rule(
        "client-body-timeout-short",
        "warning",
        "client_body_timeout is only seconds",
        "leave it at its default of 60s",
        with_directive("client_body_timeout", _body_timeout),
    ),
    Rule(
        "connect-timeout-over-75s",
        "info",
        "proxy_connect_timeout is longer than TCP tries",
        "a few seconds",
        with_directive("proxy_connect_timeout", _connect_timeout),
    ),
    Rule(
        "ignore-client-abort",
        "warning",
        "nginx does not tell the engine that a client has gone",
        "proxy_ignore_client_abort off",
        with_directive("proxy_ignore_client_abort", _ignore_abort),
    ),
    Rule(
        "chunked-off",
        "warning",
        "chunked_transfer_encoding is off",
        "remove it",
        with_directive("chunked_transfer_encoding", _chunked_off),
    ),
)
