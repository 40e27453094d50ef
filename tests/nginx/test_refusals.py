"""Refusals: what ``nginx -t`` says yes and no to, asked of both versions, against what is said without running it.

What is left out on purpose, since another file, host or build decides it: names of hosts, certificates, modules of
third parties, parameters of the commercial nginx, and forms that have nothing to do with streaming.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tapproxy.nginx.checker import examine
from tapproxy.nginx.model import parse_version
from tapproxy.nginx.refusals import load
from tapproxy.nginx.refusals_names import known_variable
from tapproxy.nginx.sandbox import Nginx
from tests.nginx.live import ALL, TEMPORARY, label, refusal

# fmt: off
IN_SERVER = {
    "pass-dup": "location / { proxy_pass http://127.0.0.1:9;proxy_pass http://127.0.0.1:9; }",
    "pass-upstream-port": "location / { proxy_pass http://e:80; }",
    "pass-var": "location / { set $b x; proxy_pass http://$b; }",
    "undef-var": "location / { proxy_pass http://$nope; }",
    "undef-var-header": "location / { proxy_set_header X $nope; proxy_pass http://127.0.0.1:9; }",
    "undef-add": "location / { add_header X $nope; }",
    "undef-set": "location / { set $a $nope; }",
    "undef-if": "location / { if ($nope) { return 200; } }",
    "undef-return": "location / { return 200 $nope; }",
    "undef-rewrite": "location / { rewrite ^ /$nope; }",
    "arg-var": "location / { proxy_set_header X $arg_foo; proxy_pass http://127.0.0.1:9; }",
    "http-var": "location / { proxy_set_header X $http_foo; proxy_pass http://127.0.0.1:9; }",
    "cookie": "location / { add_header X $cookie_a; }",
    "sent": "location / { add_header X $sent_http_a; }",
    "upstream_http": "location / { add_header X $upstream_http_a; }",
    "braces": "location / { add_header X ${request_id}a; }",
    "listen-bad": "listen 127.0.0.1:99999;",
    "listen-opt": "listen 127.0.0.1:18099 foo;",
    "listen-dup": "listen 127.0.0.1:18099; listen 127.0.0.1:18099;",
    "listen-default2": "listen 127.0.0.1:18099 default_server; listen 127.0.0.1:18098 default_server;",
    "listen-http2": "listen 127.0.0.1:18099 http2;",
    "regex-bad": "location ~ ( { }",
    "regex-bad2": "location ~ [ { }",
    "named-nested": "location / { location @a { } }",
    "exact-nested": "location = /a { location /a/b { } }",
    "loc-mod": "location ^= / { }",
    "loc-mod2": "location ~^ /a { }",
    "dup-exact": "location = /a { } location = /a { }",
    "dup-named": "location @a { } location @a { }",
    "dup-regex": "location ~ a { } location ~ a { }",
    "dup-caret": "location ^~ /a { } location /a { }",
    "rewrite-flag": "location / { rewrite ^/a /b foo; }",
    "rewrite-bad-re": "location / { rewrite ( /b; }",
    "rewrite-1": "location / { rewrite ^/a; }",
    "return-nocode": "location / { return; }",
    "return-url": "location / { return https://a; }",
    "return-code-text": "location / { return 301 /x; }",
    "return-bad": "location / { return abc; }",
    "return-999": "location / { return 1000; }",
    "if-empty": "location / { if () { } }",
    "if-noparen": "location / { if $a { } }",
    "if-op": "location / { if ($uri == a) { return 200; } }",
    "if-re": 'location / { if ($uri ~ "(") { return 200; } }',
    "if-f": "location / { if (-f $uri) { return 200; } }",
    "if-nested": "location / { if ($uri) { if ($uri) { } } }",
    "if-proxy_set": "location / { if ($uri) { proxy_set_header A b; } }",
    "if-add_header": "location / { if ($uri) { add_header A b; } }",
    "server-if-add_header": "if ($uri) { add_header A b; }",
    "if-location": "location / { if ($uri) { location /a { } } }",
    "try-one": "location / { try_files $uri; }",
    "try-server": "try_files $uri =404;",
    "try-code": "location / { try_files $uri =404; }",
    "try-in-if": "location / { if ($uri) { try_files $uri =404; } }",
    "errpage-1": "location / { error_page 502; }",
    "errpage-bad": "location / { error_page 200 /x; }",
    "errpage-eq": "location / { error_page 502 =200 /x; }",
    "errpage-eqsp": "location / { error_page 502 = /x; }",
    "errpage-499": "location / { error_page 499 /x; }",
    "buffers-1": "location / { proxy_buffers 8; }",
    "buffers-0": "location / { proxy_buffers 0 4k; }",
    "buffers-small": "location / { proxy_buffers 1 4k; }",
    "buffers-1b": "location / { proxy_buffers 2 4k; proxy_busy_buffers_size 8k; }",
    "busy-small": "location / { proxy_busy_buffers_size 1k; }",
    "busy-big": "location / { proxy_busy_buffers_size 64k; }",
    "buffer-size-big": "location / { proxy_buffer_size 64k; }",
    "buffer-size-64+buffers": "location / { proxy_buffer_size 64k; proxy_buffers 8 64k; }",
    "maxtemp-small": "location / { proxy_max_temp_file_size 1k; }",
    "maxtemp0": "location / { proxy_max_temp_file_size 0; }",
    "busy-64ok": "location / { proxy_buffers 4 32k; proxy_busy_buffers_size 64k; }",
    "buffersize128": "location / { proxy_buffer_size 128k; proxy_buffers 4 256k; proxy_busy_buffers_size 256k; }",
    "next-up-bad": "location / { proxy_next_upstream foo; }",
    "next-up-ok": "location / { proxy_next_upstream error timeout http_503 non_idempotent; }",
    "next-dup": "location / { proxy_next_upstream error; proxy_next_upstream timeout; }",
    "next-dupval": "location / { proxy_next_upstream error error; }",
    "ignore-bad": "location / { proxy_ignore_headers X-Foo; }",
    "ignore-ok": "location / { proxy_ignore_headers X-Accel-Buffering Cache-Control; }",
    "gzip-types-dup": "location / { gzip_types text/css text/css; }",
    "gzip-html": "location / { gzip_types text/html; }",
    "gzip-level": "location / { gzip_comp_level 10; }",
    "gzip-proxied": "location / { gzip_proxied foo; }",
    "gzip-minlen": "location / { gzip_min_length x; }",
    "gzip-http": "location / { gzip_http_version 2; }",
    "gzip-buffers": "location / { gzip_buffers 16; }",
    "cache-zone": "location / { proxy_cache nope; }",
    "cache-off": "location / { proxy_cache off; }",
    "cache-methods": "location / { proxy_cache_methods FOO; }",
    "cache-valid": "location / { proxy_cache_valid 200 1m; }",
    "cache-valid-bad": "location / { proxy_cache_valid foo 1m; }",
    "cache+store": "location / { proxy_cache off; proxy_store on; }",
    "store-on": "location / { proxy_store on; }",
    "limit-req-zone": "location / { limit_req zone=nope; }",
    "limit-conn-zone": "location / { limit_conn nope 1; }",
    "limit-rate": "location / { limit_rate 10q; }",
    "limit-rate-var": "location / { limit_rate $arg_x; }",
    "mirror": "location / { mirror /m; mirror /n; }",
    "mirror-off": "location / { mirror off; }",
    "auth": "location / { auth_request /a; }",
    "auth-dup": "location / { auth_request /a; auth_request /b; }",
    "kat-2": "keepalive_timeout 10s 20s;",
    "kat-bad": "keepalive_timeout foo;",
    "send": "send_timeout -1;",
    "resolver": "resolver 127.0.0.1;",
    "server-name-re": "server_name ~(;",
    "server-name-none": "server_name;",
    "root-dup": "root /a; root /b;",
    "alias-server": "alias /x;",
    "internal": "location / { internal; }",
    "internal-server": "internal;",
    "internal-arg": "location / { internal on; }",
    "http3": "http3 on;",
    "http2dup": "http2 on; http2 off;",
    "proxy-method": "location / { proxy_method GET; }",
    "headers-hash": "proxy_headers_hash_max_size 1024;",
    "proxy_bind": "location / { proxy_bind 127.0.0.1; }",
    "set-noname": "location / { set a b; }",
    "ssl_verify": "location / { proxy_ssl_verify maybe; }",
    "expires": "location / { expires -1; }",
    "etag": "location / { etag maybe; }",
    "client_max_0": "location / { client_max_body_size 0; }",
    "cbt0": "location / { client_body_timeout 0; }",
    "timeouts-ms": "location / { proxy_read_timeout 500ms; }",
    "time-frac": "location / { proxy_read_timeout 1.5s; }",
    "time-unit-order": "location / { proxy_read_timeout 30s1h; }",
    "time-neg": "location / { proxy_read_timeout -1; }",
    "size-neg": "location / { proxy_buffer_size -1; }",
    "tcp_nodelay": "location / { tcp_nodelay yes; }",
    "chunked": "location / { chunked_transfer_encoding 0; }",
    "postpone": "location / { postpone_output 1k; }",
    "postponebad": "location / { postpone_output x; }",
    "output_buffers": "location / { output_buffers 1; }",
    "ssl_buffer": "ssl_buffer_size 0;",
    "sub_types": "location / { sub_filter_types *; }",
    "ssi": "location / { ssi on; ssi_types text/event-stream; }",
    "types-block": "types { text/event-stream sse; }",
    "default_type": "location / { default_type text/plain; }",
    "limit_except_none": "location / { limit_except { deny all; } }",
    "limit_except_bad": "location / { limit_except FOO { deny all; } }",
    "allow": "location / { allow 10.0.0.0/8; deny all; }",
    "proxy_pass-server-level-if": "if ($uri) { proxy_pass http://127.0.0.1:9; }",
    "map-in-server": "map $a $b { }",
    "upstream-in-server": "upstream q { server a; }",
    "nested-server": "server { }",
    "error_log": "error_log off;",
    "access_log": "location / { access_log off; }",
    "proxy_cookie_path": 'location / { proxy_cookie_path / "/; secure"; }',
    "proxy_redirect": "location / { proxy_redirect off; }",
    "add_header3": "location / { add_header A b always; }",
    "add_header4": "location / { add_header A b c d; }",
    "add_header_bad": "location / { add_header A b sometimes; }",
    "psh1": "location / { proxy_set_header A; }",
    "psh_empty": 'location / { proxy_set_header A ""; }',
    "hide": "location / { proxy_hide_header; }",
    "unix": "location / { proxy_pass http://unix:/tmp/s; }",
    "unix-uri": "location / { proxy_pass http://unix:/tmp/s:/x; }",
    "https": "location / { proxy_pass https://127.0.0.1:9; }",
    "ws": "location / { proxy_pass ws://127.0.0.1:9; }",
    "emptyhost": "location / { proxy_pass http://; }",
    "badport": "location / { proxy_pass http://127.0.0.1:99999; }",
    "absolute_redirect": "absolute_redirect off;",
    "port_in_redirect": "port_in_redirect off;",
    "lcb": "large_client_header_buffers 4 16k;",
    "lcb1": "large_client_header_buffers 4;",
    "aio": "location / { aio threads; }",
    "sendfile": "location / { sendfile on; }",
    "directio": "location / { directio 4m; }",
    "satisfy": "location / { satisfy some; }",
    "merge": "merge_slashes maybe;",
    "keepalive_requests": "keepalive_requests x;",
    "reset": "reset_timedout_connection on;",
    "if_mod": "location / { if_modified_since sometimes; }",
    "lingering": "lingering_close maybe;",
    "psv": "location / { proxy_ssl_protocols TLSv1.2; }",
    "http_v": "location / { proxy_http_version 1.0; }",
}
IN_HTTP = {
    "sizes-http-fit-below": "proxy_buffer_size 64k; server { listen 127.0.0.1:18099; proxy_buffers 8 64k; }",
    "sizes-http": "proxy_buffer_size 64k; server { listen 127.0.0.1:18099; }",
    "sizes-location-fits": (
        "server { listen 127.0.0.1:18099; proxy_buffer_size 64k;"
        " location / { proxy_buffers 8 64k; } }"
    ),
    "sizes-inherited": "proxy_buffers 4 32k; server { listen 127.0.0.1:18099; location / { proxy_buffer_size 32k; } }",
    "server-name-capture": (
        "server { listen 127.0.0.1:18099; server_name ~^(?<sub>.+)[.]x$;"
        " location / { add_header X $sub; } }"
    ),
    "location-capture": (
        "server { listen 127.0.0.1:18099; location ~ ^/(?P<a>[a-z]+) { add_header X $a; } }"
    ),
    "geo-variable": "geo $ok { default 1; } server { listen 127.0.0.1:18099; add_header X $ok; }",
    "geo-address": "geo $arg_a $ok { default 1; } server { listen 127.0.0.1:18099; add_header X $ok; }",
    "set-later": (
        "server { listen 127.0.0.1:18099; location /a { add_header X $v; } location /b { set $v 1; } }"
    ),
    "auth-variable": (
        "server { listen 127.0.0.1:18099; location / { auth_request /a;"
        " auth_request_set $u $upstream_http_u; proxy_set_header U $u; } }"
    ),
    "case-of-variables": "server { listen 127.0.0.1:18099; set $MyVar 1; add_header X $myvar; }",
    "up-empty": "upstream q { }",
    "up-dup": "upstream q { server 127.0.0.1:1; } upstream q { server 127.0.0.1:2; }",
    "up-unknown-opt": "upstream q { server 127.0.0.1:1 foo=1; }",
    "up-weight": "upstream q { server 127.0.0.1:1 weight=0; }",
    "up-maxfails": "upstream q { server 127.0.0.1:1 max_fails=x; }",
    "up-failt": "upstream q { server 127.0.0.1:1 fail_timeout=10000s; }",
    "up-backup-hash": "upstream q { hash $uri; server 127.0.0.1:1 backup; server 127.0.0.1:2; }",
    "up-backup-ip": "upstream q { ip_hash; server 127.0.0.1:1 backup; server 127.0.0.1:2; }",
    "up-onlybackup": "upstream q { server 127.0.0.1:1 backup; }",
    "up-kat": "upstream q { server 127.0.0.1:1; keepalive 2; keepalive_timeout 4s; keepalive_requests 10; }",
    "up-kat-nok": "upstream q { server 127.0.0.1:1; keepalive_timeout 4s; }",
    "up-kdup": "upstream q { server 127.0.0.1:1; keepalive 2; keepalive 3; }",
    "up-2bal": "upstream q { least_conn; ip_hash; server 127.0.0.1:1; }",
    "up-least-args": "upstream q { least_conn x; server 127.0.0.1:1; }",
    "up-maxconns": "upstream q { server 127.0.0.1:1 max_conns=5; }",
    "up-zone": "upstream q { zone q 64k; server 127.0.0.1:1; }",
    "up-random": "upstream q { random two least_conn; server 127.0.0.1:1; }",
    "up-hash": "upstream q { hash $request_uri consistent; server 127.0.0.1:1; }",
    "up-portrange": "upstream q { server 127.0.0.1:99999; }",
    "map-nodollar": "map uri $b { default 1; }",
    "map-3": "map $uri $b { default 1 2; }",
    "map-dupdefault": "map $uri $b { default 1; default 2; }",
    "map-dupkey": "map $uri $b { a 1; a 2; }",
    "map-badre": "map $uri $b { ~( 1; }",
    "map-ok": 'map $http_upgrade $c { default upgrade; "" close; }',
    "map-undefsrc": "map $nope $c { default 1; }",
    "map-undefval": "map $uri $c { default $nope; }",
    "lrz": "limit_req_zone $binary_remote_addr zone=a:1m rate=2r/s;",
    "lrz-norate": "limit_req_zone $binary_remote_addr zone=a:1m;",
    "lrz-bad": "limit_req_zone $binary_remote_addr zone=a:1m rate=2;",
    "lrz-dup": "limit_req_zone $uri zone=a:1m rate=2r/s; limit_req_zone $uri zone=a:1m rate=2r/s;",
    "lcz": "limit_conn_zone $uri zone=a:1m;",
    "pcp": "proxy_cache_path /tmp/x keys_zone=c:1m;",
    "pcp-nokeys": "proxy_cache_path /tmp/x;",
    "pcp-dup": "proxy_cache_path /tmp/x keys_zone=c:1m; proxy_cache_path /tmp/y keys_zone=c:1m;",
    "geo": "geo $g { default 0; 10.0.0.0/8 1; }",
    "log": 'log_format a "$uri";',
    "logdup": 'log_format a "$uri"; log_format a b;',
    "logundef": 'log_format a "$nope";',
    "split": "split_clients $uri $v { 50% a; * b; }",
    "server-nolisten": "server { }",
    "kat0": "keepalive_timeout 0;",
    "bucket": "server_names_hash_bucket_size 64;",
    "two-names": "server { listen 127.0.0.1:18099; server_name a; } server { listen 127.0.0.1:18099; server_name a; }",
    "defaults": "server { listen 127.0.0.1:18099 default_server; } server { listen 127.0.0.1:18099 default_server; }",
    "proxy_pass-http": "proxy_pass http://127.0.0.1:9;",
    "location-http": "location / { }",
    "http-in-http": "http { }",
    "events-in": "events { }",
    "worker": "worker_connections 10;",
}
# fmt: on


@pytest.mark.skipif(not ALL, reason="no nginx here")
@pytest.mark.parametrize("nginx", ALL, ids=label)
@pytest.mark.parametrize(("table", "place"), [(IN_SERVER, "server"), (IN_HTTP, "http")], ids=["server", "http"])
def test_nginx_and_we_refuse_the_same(nginx: Nginx, table: dict[str, str], place: str, tmp_path: Path) -> None:
    wrong = []
    for name, inside in table.items():
        server = f"server {{ listen unix:{tmp_path}/s; {inside if place == 'server' else ''} }}"
        http = inside if place == "http" else "upstream e { server 127.0.0.1:9; }"
        text = f"events {{}}\nhttp {{ {TEMPORARY}\n{http}\n{server} }}"
        theirs = refusal(nginx, text, tmp_path)
        file = tmp_path / "nginx.conf"
        file.write_text(text)
        ours = load(str(file), version=parse_version(nginx.version), build=nginx.build).problems
        if (theirs is None) != (ours == []):
            wrong.append((name, theirs, [one.text for one in ours]))
    assert wrong == []


def problems(directory: Path, text: str) -> list[str]:
    file = directory / "x.conf"
    file.write_text(text)
    return [one.text for one in load(str(file), version=(1, 31, 3)).problems]


def test_a_variable_of_another_file_or_module_is_not_missed(tmp_path: Path) -> None:
    uses = "server { location / { proxy_set_header Connection $connection_up; } }"
    assert problems(tmp_path, uses) == []  # a fragment: the map may stand elsewhere
    assert problems(tmp_path, f"events {{}} http {{ lua_shared_dict a 1m; {uses} }}") == []
    # Half of the WebSocket recipe, without its map.
    assert problems(tmp_path, f"events {{}} http {{ {uses} }}") == ['unknown "connection_up" variable']
    named = 'map $http_upgrade $connection_up { default upgrade; "" ""; }'
    assert problems(tmp_path, f"events {{}} http {{ {named} {uses} }}") == []


@pytest.mark.parametrize("name", ["host", "request_id", "http_x_api_key", "upstream_addr", "1", "arg_model"])
def test_nginx_own_variables_are_known(name: str) -> None:
    assert known_variable(name)


def test_http3_listens_beside_tls_on_one_port(tmp_path: Path) -> None:
    listens = "listen 443 quic reuseport default_server; listen 443 ssl default_server; http3 on;"
    assert problems(tmp_path, f"events {{}} http {{ server {{ {listens} }} }}") == []


def test_a_template_is_no_fault(tmp_path: Path) -> None:
    text = "events {} http { server { listen 127.0.0.1:__PORT__; location / { proxy_pass http://127.0.0.1:__UP__; } } }"
    assert problems(tmp_path, text) == []


DIALECTS = {
    "openresty": """events {}
http {
  lua_package_path "/x/?.lua;;";
  init_by_lua_block { local x = "}" -- }
    if x then y() end }
  server { listen 443 ssl;
    location / {
      access_by_lua_block {
        ngx.say("{")
      }
      set_by_lua_block $token { return ngx.var.arg_t }
      proxy_pass http://127.0.0.1:8000;
      header_filter_by_lua 'ngx.header["X"] = 1';
    }
  }
}
""",
    "ingress-nginx": """events { multi_accept on; worker_connections 16384; use epoll; }
http {
  lua_package_path "/etc/nginx/lua/?.lua;;";
  opentelemetry_config /etc/nginx/o.toml;
  upstream upstream_balancer {
    server 0.0.0.1;
    balancer_by_lua_file /etc/nginx/lua/nginx/ngx_conf_balancer.lua;
    keepalive 320;
  }
  server {
    server_name llm.example;
    http2 on;
    listen 443 default_server reuseport backlog=4096 ssl;
    ssl_certificate_by_lua_file /etc/nginx/lua/nginx/ngx_conf_certificate.lua;
    location / {
      set $namespace "llm";
      set $proxy_upstream_name "llm-vllm-8000";
      rewrite_by_lua_file /etc/nginx/lua/nginx/ngx_rewrite.lua;
      proxy_set_header Host $best_http_host;
      proxy_set_header Connection $connection_upgrade;
      proxy_http_version 1.1;
      proxy_buffering on;
      proxy_pass http://upstream_balancer;
      proxy_redirect off;
    }
  }
}
""",
    "nginx-proxy-manager": """server {
  set $forward_scheme http;
  set $server "10.0.0.2";
  set $port 8000;
  listen 80;
  listen 443 ssl;
  server_name llm.example;
  http2 on;
  more_clear_headers Server;
  location / {
    add_header X-Served-By $host;
    proxy_set_header Host $host;
    proxy_pass $forward_scheme://$server:$port$request_uri;
  }
  include /data/nginx/custom/server_proxy[.]conf;
}
""",
}


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_is_read_and_what_is_skipped_is_said(name: str, tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(DIALECTS[name])
    result = examine([file], nginx_version="1.27.1", paths=["/v1/chat/completions"])
    assert [one.evidence for one in result.findings if one.rule == "config-invalid"] == []
    assert result.paths[0].clients["tls_http1"].streaming == "held"
    assert any("not nginx's own are skipped" in note for note in result.notes)


def test_what_nginx_has_of_its_own_is_not_called_foreign(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    server = "server { listen 443 ssl default_server; ssl_reject_handshake on; }"
    other = (
        "server { listen 443 ssl; server_name a; http2 on; ssl_conf_command Options KTLS; location / { return 204; } }"
    )
    file.write_text(f"events {{}} http {{ {server} {other} }}")
    assert examine([file], nginx_version="1.31.3").notes == []
