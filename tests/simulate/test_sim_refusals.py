"""What the engine refuses, in vLLM's words and shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sim_server import ask, chat, connected, read_all, request, running


@pytest.fixture(scope="module")
def port() -> int:
    with running(max_model_len=1000) as number:
        yield number


LONG = [{"role": "user", "content": "word " * 1000}]
REFUSED: list[Any] = [
    pytest.param(b'{"model": ', [], 400, "Bad Request", "body.10", id="json"),
    pytest.param(b"[1]", [], 400, "Bad Request", "body", id="not an object"),
    pytest.param({"stream": True}, [], 400, "Bad Request", "body.messages", id="no messages"),
    pytest.param({"messages": []}, [], 400, "Bad Request", "body.messages", id="no message"),
    pytest.param({"messages": ["hi"]}, [], 400, "Bad Request", "body.messages", id="a message that is a text"),
    pytest.param(chat(model="other"), [], 404, "NotFoundError", "model", id="model"),
    pytest.param(chat(0), [], 400, "BadRequestError", "max_tokens", id="no tokens"),
    pytest.param(chat(1000), [], 400, "BadRequestError", "max_tokens", id="more than fits"),
    pytest.param(chat(n="two"), [], 400, "Bad Request", "body.n", id="n"),
    pytest.param(chat(stream="yes"), [], 400, "Bad Request", "body.stream", id="stream"),
    pytest.param(chat(temperature=-5), [], 400, "BadRequestError", "temperature", id="temperature"),
    pytest.param(chat(tools=["x"]), [], 400, "Bad Request", "body.tools", id="tools"),
    pytest.param(
        chat(messages=LONG), [], 400, "BadRequestError", "input_tokens", id="long"
    ),
    pytest.param(
        chat(stream=False, stream_options={"include_usage": True}),
        [], 400, "Bad Request", "body.stream_options", id="options without a stream",
    ),
    pytest.param(chat(), ["X-Sim-Tokens: many"], 400, "BadRequestError", "X-Sim-Tokens", id="override"),
    pytest.param(chat(), ["X-Sim-Fault: explode"], 400, "BadRequestError", "X-Sim-Fault", id="fault"),
    pytest.param(chat(), ["X-Sim-Fault: status=503"], 503, "ServiceUnavailableError", None, id="injected status"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "fields", "status", "kind", "param"), REFUSED)
def test_a_refusal_has_vllms_nested_error(
    port: int, body: Any, fields: list[str], status: int, kind: str, param: str | None
) -> None:
    head, answer = ask(port, body, *fields)
    assert head.startswith(b"HTTP/1.1 %d " % status)
    error = json.loads(answer)["error"]
    assert (error["type"], error["param"], error["code"]) == (kind, param, status)
    assert b"word word" not in answer  # the request is never repeated


def test_the_wording_for_an_unknown_model_is_vllms(port: int) -> None:
    _, answer = ask(port, chat(model="nope"))
    assert answer == (
        b'{"error":{"message":"The model `nope` does not exist. Valid aliases: sim.","type":"NotFoundError",'
        b'"param":"model","code":404}}'
    )


@pytest.mark.parametrize(
    ("method", "target", "status", "body", "allow"),
    [
        pytest.param("GET", "/v1/nothing", 404, b'{"detail":"Not Found"}', b"", id="route"),
        pytest.param("GET", "/v1/completions", 405, b'{"detail":"Method Not Allowed"}', b"allow: POST", id="method"),
        pytest.param("GET", "/version?x=1", 200, b'{"version":"0.32.0"}', b"", id="version"),
        pytest.param("GET", "/health", 200, b"", b"", id="health"),
    ],
)
def test_routes(port: int, method: str, target: str, status: int, body: bytes, allow: bytes) -> None:
    head, answer = ask(port, None, method=method, target=target)
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert allow in head
    assert answer == body


def test_head_has_no_body(port: int) -> None:
    with connected(port) as sock:
        sock.sendall(request(method="HEAD", target="/health", version="1.0"))
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 405 Method Not Allowed\r\n")
    assert answer.endswith(
        b"content-length: 31\r\ncontent-type: application/json\r\nvary: Origin\r\nconnection: close\r\n\r\n"
    )


def test_the_model_is_listed(port: int) -> None:
    _, answer = ask(port, None, method="GET", target="/v1/models")
    model = json.loads(answer)["data"][0]
    assert (model["id"], model["max_model_len"], model["owned_by"]) == ("sim", 1000, "vllm")


def test_another_media_type_is_refused(port: int) -> None:
    with connected(port) as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.0\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\n{}")
        assert b"Unsupported Media Type" in read_all(sock)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"hello\r\n\r\n", id="no request line"),
        pytest.param(b"GET / HTTP/2.0\r\n\r\n", id="version"),
        pytest.param(b"GET / HTTP/1.1\r\nno colon\r\n\r\n", id="field"),
        pytest.param(b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", id="length"),
        pytest.param(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", id="chunk"),
        pytest.param(b"A" * 70_000, id="endless head"),
    ],
)
def test_what_is_no_http_is_answered_400_and_closed(port: int, data: bytes) -> None:
    with connected(port) as sock:
        sock.sendall(data)
        answer = read_all(sock)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert answer.endswith(b"Invalid HTTP request received.")
