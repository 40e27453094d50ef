"""The same faults in other clothes: levels, jumps, maps, chains; and what looks like a fault and is none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tapproxy.nginx.checker import Examination, examine
from tapproxy.nginx.predict import upstream_of

PLAIN, TLS = "listen 80;", "listen 443 ssl; ssl_certificate c; ssl_certificate_key k;"
H11 = 'proxy_http_version 1.1; proxy_set_header Connection "";'
PASS = "proxy_pass http://127.0.0.1:8000;"
TWO = "upstream p { server 127.0.0.1:1; server 127.0.0.1:2; keepalive 4; keepalive_timeout 4s; }"
ONE = "upstream p { server 127.0.0.1:1; keepalive 4; keepalive_timeout 4s; }"
CACHE = "proxy_cache_path /x keys_zone=c:1m;"


def examined(
    directory: Path,
    listen: str,
    inside: str,
    *,
    http: str = "",
    main: str = "",
    path: str = "/v1/chat/completions",
    facts: Sequence[str] = (),
    version: str = "1.31.3",
    profile: str = "generic",
) -> Examination:
    """One server with ``inside``, one statement a line, so that a line tells which."""
    file = directory / "nginx.conf"
    file.write_text(f"{main} events {{}}\nhttp {{\n{http}\nserver {{\n{listen}\n{inside}\n}}\n}}\n")
    return examine([file], nginx_version=version, paths=[path], upstream=upstream_of(profile, facts))


def graver(result: Examination) -> set[tuple[str, str]]:
    return {(one.rule, one.severity) for one in result.findings if one.severity != "info"}


def inside(text: str, also: str = "") -> str:
    return f"location / {{ {PASS} {H11} {text} }} {also}"


OFF = "proxy_buffering off;"
HELD = ("buffering-on", "error")
LATENT = ("buffering-on-latent", "warning")


@pytest.mark.parametrize(
    ("listen", "text", "http", "found"),
    [
        (TLS, f"{OFF} location / {{ {PASS} {H11} }}", "", set()),
        (TLS, f"location /v1/ {{ {OFF} {PASS} location /v1/chat/ {{ {PASS} {H11} }} }}", "", set()),
        (TLS, inside(""), OFF, set()),
        (TLS, inside("proxy_buffering on;"), OFF, {HELD}),
        (TLS, f"{OFF} location / {{ try_files /x @a; }} location @a {{ {PASS} {H11} proxy_buffering on; }}", "",
         {HELD, ("rewrite-changes-location", "warning")}),
        (TLS, f"location /v1/ {{ {OFF} rewrite ^/v1/(.*) /e/$1 last; }} location /e/ {{ {PASS} {H11} }}", "",
         {HELD, ("rewrite-changes-location", "warning")}),
        (TLS, f"location /v1/ {{ {OFF} rewrite ^/v1/(.*) /e/$1 break; {PASS} {H11} }}", "", set()),
        (TLS, f"location = /v1/completions {{ {OFF} {PASS} {H11} }} location / {{ {PASS} {H11} }}", "",
         {HELD, ("streaming-path-not-covered", "error")}),
        (TLS, f"location /app/ {{ {OFF} {PASS} {H11} }} location / {{ {PASS} {H11} }}", "", {HELD}),
        (PLAIN, f"location /v1/ {{ {OFF} {PASS} {H11} }} location /v1/chat/ {{ {PASS} {H11} }}", "",
         {LATENT, ("streaming-path-not-covered", "warning")}),
        (TLS, f"location /v1/ {{ {OFF} {PASS} {H11} location /v1/chat/ {{ gzip off; }} }}", "",
         {("proxy-pass-not-inherited", "error")}),
        (TLS, f"location /v1/ {{ {OFF} {PASS} {H11} location /v1/chat/ {{ root /srv; }} }}", "", set()),
        (TLS, f"location /v1/chat/completions/ {{ {OFF} {PASS} {H11} }}", "", {("trailing-slash-redirect", "error")}),
        (TLS, inside(OFF, "error_page 502 504 /50x.html; location = /50x.html { root html; }"), "", set()),
        (TLS, inside(f"{OFF} error_page 502 @b;", f"location @b {{ {OFF} {PASS} {H11} }}"), "", set()),
        (TLS, inside(f"{OFF} error_page 404 = /b;", f"location = /b {{ {OFF} {PASS} {H11} }}"), "", set()),
        (TLS, inside(f"{OFF} error_page 502 = /b;", f"location = /b {{ {OFF} {PASS} {H11} }}"), "",
         {("error-page-uri-changes-method", "error")}),
        (TLS, inside("fastcgi_buffering off;", "location /php { fastcgi_pass 127.0.0.1:9; }"), "",
         {HELD, ("wrong-module-directive", "error")}),
        (TLS, f"fastcgi_buffering off; {inside('', 'location /php { fastcgi_pass 127.0.0.1:9; }')}", "", {HELD}),
        (TLS, inside(f"{OFF} fastcgi_buffering off;"), "", set()),
        (TLS, inside(f"{OFF} add_header X-Accel-Buffering no;"), "", set()),
        (TLS, inside(f"{OFF} proxy_request_buffering off;"), "", set()),
        (TLS, inside(f"{OFF} postpone_output 0; tcp_nopush on;"), "", set()),
        (PLAIN, inside("gzip on; gzip_types *; gzip_min_length 1000;"), "", {("gzip-buffers-sse", "error")}),
        (PLAIN, inside(""), "gzip on; gzip_types text/event-stream;", {("gzip-buffers-sse", "error")}),
        (PLAIN, inside("gzip off;"), "gzip on; gzip_types text/event-stream;", {LATENT}),
        (PLAIN, inside("gzip on; gzip_types text/css;"), "", {LATENT}),
        (PLAIN, inside("proxy_cache c; proxy_cache_valid 200 1m;"), CACHE, {LATENT}),  # POST is not cached
        (PLAIN, inside("proxy_cache c; proxy_cache_methods POST; proxy_cache_key $request_body; proxy_cache_valid 1m;"),
         CACHE, {LATENT, ("cache-sse", "error")}),
        (PLAIN, inside("proxy_cache c; proxy_cache_methods POST; proxy_no_cache 1;"), CACHE, {LATENT}),
        (PLAIN, inside(f"{OFF} proxy_cache c; proxy_cache_methods POST;"), CACHE, set()),
        (PLAIN, inside("proxy_store on;"), "", {LATENT, ("store-sse", "error")}),
        (PLAIN, inside(f"{OFF} proxy_store on;"), "", set()),
        (PLAIN, inside("proxy_limit_rate 2k;"), "", {LATENT, ("limit-rate-throttles", "error")}),
        (PLAIN, inside("limit_rate 10m;"), "", {LATENT}),
        (PLAIN, f"limit_rate 2k; {inside(OFF)}", "", set()),
        (PLAIN, f"mirror /m; {inside(OFF, f'location /m {{ {PASS} }}')}", "", {("mirror-doubles-inference", "error")}),
        (PLAIN, f"mirror /m; {inside(OFF + ' mirror off;', f'location /m {{ {PASS} }}')}", "", set()),
        (PLAIN, inside(f"{OFF} proxy_set_body x;"), "", {("request-body-dropped", "error")}),
        (PLAIN, inside(f"{OFF} proxy_set_body $request_body;"), "", set()),
        (PLAIN, inside(f"{OFF} proxy_method POST;"), "", set()),
        (PLAIN, inside(f"{OFF} client_max_body_size 0;"), "", set()),
        (PLAIN, inside(f"{OFF} client_max_body_size 10k;"), "", {("body-size-limit", "error")}),
        (PLAIN, inside(f"{OFF} proxy_read_timeout 20s;"), "", {("read-timeout-too-short", "warning")}),
        (PLAIN, inside(f"{OFF} proxy_read_timeout 5m;"), "", set()),
        (PLAIN, inside(f"{OFF} limit_req zone=r burst=9;"), "limit_req_zone $uri zone=r:1m rate=2r/s;",
         {("limit-req-delays", "warning")}),
        (PLAIN, inside(f"{OFF} limit_req zone=r burst=9 nodelay;"), "limit_req_zone $uri zone=r:1m rate=2r/s;", set()),
        (PLAIN, inside(f"{OFF} limit_req zone=r;"), "limit_req_zone $uri zone=r:1m rate=2r/s;", set()),
        (PLAIN, inside(f"{OFF} limit_conn c 200;"), "limit_conn_zone $uri zone=c:1m;", set()),
        (PLAIN, inside(f"{OFF} tcp_nodelay on;"), "tcp_nodelay off;", set()),
    ],
)  # fmt: skip
def test_a_variant_has_these_findings(
    listen: str, text: str, http: str, found: set[tuple[str, str]], tmp_path: Path
) -> None:
    assert graver(examined(tmp_path, listen, text, http=http)) == found


def proxied(text: str) -> str:
    return f"location / {{ proxy_pass http://p; {OFF} {text} }}"


UPGRADE = "map $http_upgrade $c {{ default upgrade; '' {}; }}"
INEFFECTIVE = ("keepalive-ineffective", "warning")
HTTP10 = ("http10-upstream", "warning")


@pytest.mark.parametrize(
    ("version", "text", "http", "found"),
    [
        ("1.22.1", proxied(H11), ONE, set()),
        ("1.22.1", proxied("proxy_http_version 1.1;"), ONE, {INEFFECTIVE}),
        ("1.31.3", proxied("proxy_http_version 1.1;"), ONE, set()),
        ("1.31.3", proxied("proxy_set_header Connection close;"), ONE, {INEFFECTIVE}),
        ("1.22.1", proxied('proxy_http_version 1.1; proxy_set_header Connection keep-alive;'), ONE, set()),
        ("1.31.3", proxied("proxy_set_header Connection $c;"), f"{ONE} {UPGRADE.format('close')}", {INEFFECTIVE}),
        ("1.31.3", proxied("proxy_set_header Connection $c;"), f"{ONE} {UPGRADE.format(chr(34) * 2)}", set()),
        ("1.31.3", proxied("proxy_set_header Connection $http_connection;"), ONE, set()),  # the client's
        ("1.31.3", f"proxy_set_header Host a; {proxied('proxy_set_header X 1;')}", ONE,
         {("set-header-inheritance-lost", "warning")}),
        ("1.31.3", f"proxy_set_header Host a; {proxied('proxy_set_header Host b;')}", ONE, set()),
        ("1.22.1", f"{H11} {proxied('proxy_set_header X 1;')}", ONE, {("set-header-inheritance-lost", "warning")}),
        ("1.31.3", f"{H11} {proxied('proxy_set_header X 1;')}", ONE, set()),
        ("1.22.1", proxied(H11), ONE.replace("keepalive_timeout 4s;", "keepalive_timeout 4s; least_conn;"),
         {("keepalive-before-balancer", "warning")}),
        ("1.22.1", proxied(H11), ONE.replace("{ server", "{ least_conn; server"), set()),
        ("1.22.1", proxied(""), ONE, {HTTP10, INEFFECTIVE}),
        ("1.31.3", proxied("proxy_next_upstream error timeout non_idempotent;"), TWO,
         {("retry-doubles-post", "error")}),
        ("1.31.3", proxied("proxy_next_upstream error timeout non_idempotent;"), ONE, set()),
        ("1.31.3", proxied("proxy_next_upstream error timeout;"), TWO, set()),
        ("1.31.3", proxied("proxy_next_upstream http_503 non_idempotent;"), TWO, set()),
        ("1.31.3", proxied("proxy_next_upstream timeout non_idempotent; proxy_next_upstream_tries 1;"), TWO, set()),
        ("1.31.3", proxied(""), TWO.replace("1;", "1 fail_timeout=2h;"), {("fail-timeout-excessive", "warning")}),
        ("1.31.3", proxied(""), TWO.replace("1;", "1 fail_timeout=2h max_fails=0;"), set()),
        ("1.31.3", proxied(""), ONE.replace("1;", "1 fail_timeout=2h;"), set()),
        ("1.31.3", proxied(""), ONE.replace("1;", "1 max_conns=4;"), {("max-conns-502", "warning")}),
        ("1.31.3", proxied(""), ONE.replace("1;", "1 max_conns=400;"), set()),
        ("1.31.3", proxied("proxy_http_version 2;"), ONE, {("http2-upstream-unsupported", "error")}),
    ],
)  # fmt: skip
def test_an_upstream_has_these_findings(
    version: str, text: str, http: str, found: set[tuple[str, str]], tmp_path: Path
) -> None:
    assert graver(examined(tmp_path, PLAIN, text, http=http, version=version)) == found


@pytest.mark.parametrize(
    ("main", "found"),
    [
        ("events { worker_connections 16; } #", {("worker-connections-low", "error")}),
        ("events { worker_connections 256; } #", {("worker-connections-low", "warning")}),
        ("events { worker_connections 512; } #", set()),
        ("worker_shutdown_timeout 5s;", {("worker-shutdown-timeout-cuts", "warning")}),
        ("worker_shutdown_timeout 1h;", set()),
    ],
)
def test_the_workers_have_these_findings(main: str, found: set[tuple[str, str]], tmp_path: Path) -> None:
    assert graver(examined(tmp_path, PLAIN, inside(OFF), main=main)) == found


INNER = "server {{ listen 127.0.0.1:81; location / {{ {} }} }}"
OUTER = f"location / {{ proxy_pass http://127.0.0.1:81; {H11} }}"


@pytest.mark.parametrize(
    ("inner", "facts", "streaming", "found"),
    [
        (f"{PASS} {H11}", ["x-accel-buffering=no"], "held", {("xab-stripped-by-inner-hop", "error")}),
        (f"{PASS} {H11} proxy_pass_header X-Accel-Buffering;", ["x-accel-buffering=no"], "streams", set()),
        (f"{PASS} {H11} {OFF} add_header X-Accel-Buffering no;", [], "streams", set()),
        (f"{PASS} {H11} {OFF} add_header X-Accel-Buffering off;", [], "held", {HELD, ("xab-bad-value", "error")}),
        (f"{PASS} {H11} {OFF}", [], "held", {HELD}),
        (f"{PASS} {H11} {OFF} gzip on; gzip_types *;", [], "held", {HELD}),
    ],
)
def test_a_chain_of_two_has_these_findings(
    inner: str, facts: list[str], streaming: str, found: set[tuple[str, str]], tmp_path: Path
) -> None:
    result = examined(tmp_path, TLS, OUTER, http=INNER.format(inner), facts=facts)
    outer = next(one for one in result.paths if "tls_http1" in one.clients)
    assert outer.clients["tls_http1"].streaming == streaming
    # The inner one, asked on its own, is a plain listener: what it only may do is not this test's.
    assert graver(result) - {LATENT} == found


def test_an_inner_gzip_is_not_asked_for_where_accept_encoding_is_cleared(tmp_path: Path) -> None:
    inner = INNER.format(f"{PASS} {H11} gzip on; gzip_types *;")
    clear = OUTER.replace("}", f'proxy_set_header Accept-Encoding ""; {OFF} }}')
    result = examined(tmp_path, TLS, clear, http=inner)
    outer = next(one for one in result.paths if "tls_http1" in one.clients)
    assert outer.clients["tls_http1"].streaming == "late_header"
    other = examined(tmp_path, TLS, OUTER.replace("}", f"{OFF} }}"), http=inner)
    outer = next(one for one in other.paths if "tls_http1" in one.clients)
    assert (outer.clients["tls_http1"].streaming, outer.clients["tls_http1"].mechanism) == ("held", "gzip")


def test_a_map_leads_to_its_engine(tmp_path: Path) -> None:
    pools = "map $uri $pool { default 127.0.0.1:9; ~^/v1/ 127.0.0.1:81; }"
    inner = INNER.format(f"{PASS} proxy_http_version 1.0;")
    text = f"location / {{ proxy_pass http://$pool; {OFF} {H11} }}"
    result = examined(tmp_path, PLAIN, text, http=f"{pools}\n{inner}")
    outer = next(one for one in result.paths if one.hop.inner is not None)
    assert outer.clients["http1"].streaming == "held"
    assert "behind this one" in outer.clients["http1"].why


@pytest.mark.parametrize(
    ("retry", "streaming"),
    [("error timeout", "fails"), ("error timeout non_idempotent", "streams"), ("error non_idempotent", "fails")],
)
def test_a_short_read_timeout_fails_unless_another_replica_is_asked(retry: str, streaming: str, tmp_path: Path) -> None:
    text = proxied(f"proxy_read_timeout 1s; proxy_next_upstream {retry};")
    result = examined(tmp_path, PLAIN, text, http=TWO)
    assert result.paths[0].clients["http1"].streaming == streaming


def test_the_level_a_value_comes_from_is_said(tmp_path: Path) -> None:
    result = examined(tmp_path, TLS, f"server_name llm; {inside('')}", http="proxy_buffering on;")
    (held,) = [one for one in result.findings if one.rule == "buffering-on"]
    assert (held.line, held.directive) == (3, "proxy_buffering on;")
    assert held.evidence.endswith("(set at the level of http)")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("location / {\nproxy_pass http://e;\n}", 7),
        ("location / {\nproxy_pass http://e;\nproxy_http_version 1.0;\n}", 8),
        ("location / {\nproxy_pass http://e;\nproxy_http_version 1.0;\nproxy_buffers 4 256k;\n}", 9),
        ("location / {\nproxy_pass http://e;\nproxy_http_version 1.0;\nproxy_buffers 8 4k;\n"
         "proxy_busy_buffers_size 8k;\n}", 10),
        ("location /a {\nproxy_buffering off; proxy_pass http://e;\n}\nlocation / {\nproxy_pass http://e;\n}", 9),
        ("location / {\nproxy_pass http://e;\nproxy_buffering on;\n}", 8),
    ],
    ids=["proxy_pass", "http10", "buffers", "busy", "other-location", "explicit"],
)  # fmt: skip
def test_the_line_is_the_one_to_look_at(text: str, line: int, tmp_path: Path) -> None:
    result = examined(tmp_path, PLAIN, text, http="upstream e { server 127.0.0.1:9; }", version="1.22.1")
    (held,) = [one for one in result.findings if one.rule == "buffering-on"]
    assert held.line == line


def test_information_that_locations_share_is_told_once_at_the_level_they_share(tmp_path: Path) -> None:
    """The default of a server is one line, however many locations have it; what differs per location stays."""
    file = tmp_path / "nginx.conf"
    places = "\n".join(f"location /v{number}/ {{ {PASS} {H11} {OFF} }}" for number in range(3))
    file.write_text(f"events {{}} http {{\nserver {{ listen 80; server_name a;\n{places}\n}} }}")
    result = examine([file], nginx_version="1.31.3", paths=["/v0/x", "/v1/x", "/v2/x"])
    (default,) = [one for one in result.findings if one.rule == "body-size-default-1m"]
    assert (default.line, default.context) == (2, "http > server a")
    assert "set at the level" not in default.evidence
    timeouts = [one for one in result.findings if one.rule == "read-timeout-default"]
    assert [one.line for one in timeouts] == [3, 4, 5]
    assert timeouts[0].context == "http > server a > location /v0/"


@pytest.mark.parametrize(
    ("block", "text", "version", "advice"),
    [
        ("upstream p { server 127.0.0.1:1; }", H11, "1.22.1", "add keepalive to upstream p"),
        (
            "upstream p { server 127.0.0.1:1; }", "", "1.22.1",
            'add keepalive to upstream p, with proxy_http_version 1.1 and proxy_set_header Connection ""',
        ),
        ("upstream p { server 127.0.0.1:1; keepalive 0; }", H11, "1.31.3", "keepalive 16 or more in upstream p"),
        ("", H11, "1.31.3", "an upstream block with keepalive, and proxy_pass to its name"),
    ],
    ids=["block", "block-and-http10", "none-kept", "no-block"],
)  # fmt: skip
def test_the_advice_for_keepalive_knows_the_block_that_is_there(
    block: str, text: str, version: str, advice: str, tmp_path: Path
) -> None:
    target = "p" if block else "127.0.0.1:8000"
    result = examined(
        tmp_path, PLAIN, f"location / {{ proxy_pass http://{target}; {text} {OFF} }}", http=block, version=version
    )
    (found,) = [one for one in result.findings if one.rule == "upstream-no-keepalive"]
    assert found.advice == advice


def test_gzip_takes_the_header_of_an_unbuffered_h2_stream_along(tmp_path: Path) -> None:
    """Before 1.25 a header over HTTP/2 waits for the first event, but for gzip's first bytes (measured: streams)."""
    listen = f"{TLS.replace('ssl;', 'ssl http2;')} gzip on; gzip_types text/event-stream;"
    for more, expected in (("", "streams"), ("gzip off;", "late_header")):
        result = examined(tmp_path, listen, inside(f"{OFF} {more}"), version="1.22.1", profile="vllm")
        assert result.paths[0].clients["h2"].streaming == expected
