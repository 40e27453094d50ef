"""What proves a proxy in a request's head, and what does not."""

from __future__ import annotations

import pytest

from tapproxy.core.http1 import RequestHead, parse_request
from tapproxy.core.marks import HTTP_1_0, NGINX_ORDER, proxy_marks


def marks(*fields: str, version: int = 1) -> list[str]:
    lines = [f"POST /v1/chat/completions HTTP/1.{version}", *fields, "", ""]
    head = parse_request("\r\n".join(lines).encode())
    assert isinstance(head, RequestHead)
    return proxy_marks(head)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(
            ["Host: e:8000", "Accept: */*", "Connection: keep-alive", "User-Agent: x", "Content-Length: 0"], id="httpx"
        ),
        pytest.param(["Host: e:8000", "User-Agent: curl/8", "Accept: */*", "Content-Length: 0"], id="curl"),
        pytest.param(["host: e", "connection: close", "content-type: a/b", "content-length: 0"], id="undici"),
        pytest.param(["Host: e", "Content-Length: 0"], id="a client with nothing of its own"),
        pytest.param(["Content-Length: 0", "Host: e", "User-Agent: Java"], id="Content-Length before Host"),
    ],
)
def test_clients_leave_no_mark(fields: list[str]) -> None:
    assert marks(*fields) == []


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        pytest.param(["Host: e", "Connection: close", "Content-Length: 0", "User-Agent: x"], [NGINX_ORDER], id="nginx"),
        pytest.param(
            ["Host: e", "X-Mine: 1", "Content-Length: 0", "accept: */*"], [NGINX_ORDER], id="nginx, set field"
        ),
        pytest.param(["Host: e", "User-Agent: x", "X-Forwarded-For: 10.0.0.7"], ["x-forwarded-for"], id="forwarded"),
        pytest.param(["Host: e", "Via: 1.1 cache", "X-Real-IP: 10.0.0.7"], ["via", "x-real-ip"], id="two fields"),
    ],
)
def test_a_proxy_is_known_by_what_only_it_writes_and_no_value_is_kept(fields: list[str], found: list[str]) -> None:
    assert marks(*fields) == found


def test_http_1_0_is_a_proxys() -> None:
    assert marks("Host: e", "User-Agent: x", version=0) == [HTTP_1_0]
