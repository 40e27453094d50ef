"""What asks how the client came in sends plain HTTP one way and TLS another: each kind of client has its own answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapproxy.nginx.checker import CheckedPath, examine

LISTEN = "listen 80; listen 443 ssl; http2 on; ssl_certificate c; ssl_certificate_key k;"
PASS = "proxy_pass http://127.0.0.1:8000; proxy_buffering off;"


def checked(directory: Path, inside: str, listen: str = LISTEN) -> CheckedPath:
    file = directory / "nginx.conf"
    file.write_text(f"events {{}} http {{ server {{ {listen} {inside} }} }}")
    return examine([file], nginx_version="1.31.3").paths[0]


@pytest.mark.parametrize(
    "redirect",
    [
        'if ($scheme = "http") { return 301 https://$host$request_uri; }',
        "if ($scheme != https) { return 301 https://$host$request_uri; }",
        "if ($https = '') { return 301 https://$host$request_uri; }",
        "if ($https != on) { rewrite ^ https://$host$request_uri permanent; }",
        "if ($server_port = 80) { return 301 https://$host$request_uri; }",
        # As nginx-proxy-manager writes it.
        'set $test ""; if ($scheme = "http") { set $test "H"; } if ($test = H) { return 301 https://$host/; }',
    ],
    ids=["scheme", "not-https", "no-https", "rewrite", "port", "by-a-variable"],
)
def test_a_redirect_of_plain_http_is_for_plain_clients_only(redirect: str, tmp_path: Path) -> None:
    for inside in (f"{redirect} location / {{ {PASS} }}", f"location / {{ {redirect} {PASS} }}"):
        found = checked(tmp_path, inside)
        assert {kind: one.streaming for kind, one in found.clients.items()} == {
            "http1": "fails",
            "tls_http1": "streams",
            "h2": "streams",
        }
        assert found.hop.route.undecided == ()
        assert found.hop.route.proxy_pass is not None


def test_the_check_asks_with_post(tmp_path: Path) -> None:
    found = checked(tmp_path, f"location / {{ if ($request_method = OPTIONS) {{ return 204; }} {PASS} }}")
    assert {one.streaming for one in found.clients.values()} == {"streams"}


def test_two_ports_of_one_kind_leave_the_port_open(tmp_path: Path) -> None:
    inside = f"if ($server_port = 80) {{ return 301 https://$host/; }} location / {{ {PASS} }}"
    found = checked(tmp_path, inside, f"listen 8080; {LISTEN}")
    streaming = {kind: one.streaming for kind, one in found.clients.items()}
    assert streaming == {"http1": "depends", "tls_http1": "streams", "h2": "streams"}


def test_what_no_kind_of_client_tells_stays_open(tmp_path: Path) -> None:
    inside = f'if ($http_x_forwarded_proto = "http") {{ return 301 https://$host/; }} location / {{ {PASS} }}'
    found = checked(tmp_path, inside)
    assert {one.streaming for one in found.clients.values()} == {"depends"}
    # A quoted word leaves the bracket alone; it is shown as it is written.
    assert "if ($http_x_forwarded_proto = http) holds" in found.clients["http1"].why


def test_a_server_behind_is_asked_by_the_listener_it_is_reached_on(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(
        f"events {{}} http {{ server {{ {LISTEN} if ($scheme = http) {{ return 403; }} location / {{ {PASS} }} }}"
        " server { listen 81; location / { proxy_pass http://127.0.0.1:80; proxy_buffering off; } } }"
    )
    front = examine([file], nginx_version="1.31.3").paths[-1]
    assert front.clients["http1"].streaming == "fails"
    assert "return 403" in front.clients["http1"].why


def test_each_way_has_its_own_findings(tmp_path: Path) -> None:
    """TLS goes to a buffered location, plain HTTP to an unbuffered one: the rules see both."""
    file = tmp_path / "nginx.conf"
    other = "location /plain/ { proxy_buffering off; proxy_send_timeout 1s; proxy_pass http://127.0.0.1:8001; }"
    file.write_text(
        f"events {{}} http {{ server {{ {LISTEN}\nif ($scheme = http) {{ rewrite ^ /plain/x; }}\n"
        f"location / {{ proxy_pass http://127.0.0.1:8000; }}\n{other} }} }}"
    )
    result = examine([file], nginx_version="1.31.3")
    first = result.paths[0]
    assert first.clients["http1"].streaming == "streams"
    assert first.clients["tls_http1"].streaming == "held"
    assert {one.line for one in result.findings if one.rule == "buffering-on"} == {3}
    assert 4 in {one.line for one in result.findings}
