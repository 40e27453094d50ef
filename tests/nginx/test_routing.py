"""Which location serves a path: by table, and against a real nginx on generated configurations.

In the comparisons every location says its name in a header and proxies to a port where nothing listens: 502 with a
name means "proxied from there", anything else means that nginx answered itself.
"""

from __future__ import annotations

import http.client
import random
from pathlib import Path

import pytest

from tapproxy.nginx.locations import normalise
from tapproxy.nginx.model import Tree
from tapproxy.nginx.refusals import load
from tapproxy.nginx.routing import Route, route
from tapproxy.nginx.sandbox import Nginx, RunningNginx
from tapproxy.nginx.servers import Servers
from tests.nginx.live import ALL, TEMPORARY, free_ports, label, request, with_nginx

VERSION = (1, 31, 3)
DEAD = 1  # tcpmux: nothing listens, connections are refused at once


def tree_of(text: str, directory: Path) -> Tree:
    file = directory / "routing.conf"
    file.write_text(text)
    tree = load(str(file), version=VERSION)
    assert tree.problems == []
    return tree


def follow(inside: str, path: str, directory: Path, *, method: str = "POST", host: str | None = None) -> Route:
    tree = tree_of(f"events {{}} http {{ server {{ listen 127.0.0.1:80; {inside} }} }}", directory)
    servers = Servers(tree)
    return route(servers, servers.all[0], path, VERSION, method=method, host=host)


def name_of(found: Route) -> str | None:
    """The header a location of the comparisons bears."""
    names = found.scope.statements("add_header")
    return names[0].args[1] if names else None


PREFIXES = ["/", "/v1", "/v1/", "/v1/chat", "/v1/chat/", "/v1/chat/completions", "/v1/chat/completions/", "/api/"]
PATTERNS = ["~ ^/v1/", "~ completions$", "~* CHAT", "~ ^/api/(chat|generate)$", "~ /$", "~* ^/V1"]
URIS = [
    "/", "/v1", "/v1/", "/v1/chat", "/v1/chat/", "/v1/chat/completions", "/v1/chat/completions/",
    "/V1/chat/completions", "/v1/completions", "/api", "/api/chat", "/api/generate", "/v1//chat/./completions",
    "/v1/x/../chat/completions", "/v1/ch%61t/completions", "/other",
]  # fmt: skip


def generated(random_source: random.Random, counter: list[int], inside: str = "/", depth: int = 0) -> str:
    """Some locations, nested up to three deep; nginx demands that a nested prefix begins with its parent's."""
    text = ""
    taken: set[tuple[bool, str]] = set()
    for _ in range(random_source.randint(1, 5)):
        counter[0] += 1
        body = f"add_header X-Loc n{counter[0]} always; proxy_pass http://127.0.0.1:{DEAD};"
        if random_source.random() < 0.3:
            wanted = random_source.choice(PATTERNS)
            nested = generated(random_source, counter, "/", depth + 1) if depth < 2 and counter[0] % 4 == 0 else ""
            # Inside a regex location only regexes may be nested with certainty.
            nested = "" if "location /" in nested or "location =" in nested or "location ^~" in nested else nested
            text += f"location {wanted} {{ {body} {nested} }}\n"
            continue
        name = random_source.choice([prefix for prefix in PREFIXES if prefix.startswith(inside)])
        sign = random_source.choice(["", "", "^~ ", "= "])
        if (sign == "= ", name) in taken:
            continue
        taken.add((sign == "= ", name))
        nested = ""
        if sign != "= " and depth < 2 and random_source.random() < 0.4:
            nested = generated(random_source, counter, name, depth + 1)
        text += f"location {sign}{name} {{ {body} {nested} }}\n"
    return text


@pytest.mark.skipif(not ALL, reason="no nginx here")
@pytest.mark.parametrize("nginx", ALL, ids=label)
def test_generated_locations_are_chosen_as_nginx_chooses(nginx: Nginx, tmp_path: Path) -> None:
    count = 40
    ports = free_ports(count)
    random_source = random.Random(7)
    counter = [0]
    blocks = [f"server {{ listen 127.0.0.1:{port}; {generated(random_source, counter)} }}\n" for port in ports]
    text = f"events {{}} http {{ access_log off; {TEMPORARY}\n{''.join(blocks)} }}"
    servers = Servers(tree_of(text, tmp_path))

    def ask(_running: RunningNginx) -> int:
        compared = 0
        for port, server in zip(ports, servers.all, strict=True):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            for uri in URIS:
                status, fields, _body = request(connection, "GET", uri)
                ours = route(servers, server, uri, VERSION, method="GET")
                expected = (status == 502, fields.get("x-loc") if status == 502 else None)
                got = (ours.proxy_pass is not None, name_of(ours) if ours.proxy_pass else None)
                assert got == expected, (blocks[servers.all.index(server)], uri, status, fields, ours.failure)
                if status == 301:
                    assert "redirected (301)" in (ours.failure or "")
                compared += 1
            connection.close()
        return compared

    assert with_nginx(nginx, text, ask) == count * len(URIS)


HERE = f"proxy_pass http://127.0.0.1:{DEAD}"
WAYS = {
    "rewrite-last": (
        "location /api/ { add_header X-Loc a always; rewrite ^/api/(.*)$ /v1/$1 last; " + HERE + "; }"
        "location /v1/ { add_header X-Loc v always; " + HERE + "; }"
    ),
    "rewrite-break": (
        "location /api/ { add_header X-Loc a always; rewrite ^/api/(.*)$ /v1/$1 break; " + HERE + "; }"
        "location /v1/ { add_header X-Loc v always; " + HERE + "; }"
    ),
    "rewrite-none": (
        "location /api/ { add_header X-Loc a always; rewrite ^/api/(.*)$ /mid/$1; rewrite ^/mid/(.*)$ /v1/$1; "
        + HERE + "; }"
        "location /v1/ { add_header X-Loc v always; " + HERE + "; }"
    ),
    "rewrite-server": (
        "rewrite ^/api/(.*)$ /v1/$1; location / { add_header X-Loc r always; " + HERE + "; }"
        "location /v1/ { add_header X-Loc v always; " + HERE + "; }"
    ),
    "rewrite-redirect": "location / { add_header X-Loc r always; rewrite ^/api/ /v1/ redirect; " + HERE + "; }",
    "rewrite-set": (
        "location /api/ { set $to /v1; add_header X-Loc a always; rewrite ^/api(/.*)$ $to$1 last; " + HERE + "; }"
        "location /v1/ { add_header X-Loc v always; " + HERE + "; }"
    ),
    "return-server": "return 301 https://x$request_uri; location / { add_header X-Loc r always; " + HERE + "; }",
    "return-named": (
        "location / { add_header X-Loc r always; error_page 418 = @s; return 418; }"
        "location @s { add_header X-Loc s always; " + HERE + "; }"
    ),
    "return-uri": (
        "location / { add_header X-Loc r always; error_page 418 = /s/x; return 418; }"
        "location /s/ { add_header X-Loc s always; " + HERE + "; }"
    ),
    "return-other-code": (
        "location / { add_header X-Loc r always; error_page 418 = @s; return 403; }"
        "location @s { add_header X-Loc s always; " + HERE + "; }"
    ),
    "return-named-twice": (
        "location / { add_header X-Loc r always; error_page 418 = @s; return 418; }"
        "location @s { add_header X-Loc s always; error_page 418 = @t; return 418; }"
        "location @t { add_header X-Loc t always; " + HERE + "; }"
    ),
    "try-code-named": (
        "location / { add_header X-Loc r always; error_page 404 = @s; try_files /none =404; }"
        "location @s { add_header X-Loc s always; " + HERE + "; }"
    ),
    "limit-named": (
        "location / { add_header X-Loc r always; error_page 403 = @s; limit_except GET { deny all; } " + HERE + "; }"
        "location @s { add_header X-Loc s always; " + HERE + "; }"
    ),
    "server-return-named": (
        "error_page 418 = @s; return 418; location / { add_header X-Loc r always; " + HERE + "; }"
        "location @s { add_header X-Loc s always; " + HERE + "; }"
    ),
    "return-location": "location / { add_header X-Loc r always; return 204; }",
    "if-method": (
        "location / { add_header X-Loc r always; if ($request_method = OPTIONS) { return 204; } " + HERE + "; }"
    ),
    "if-post-pass": (
        "location / { add_header X-Loc r always; if ($request_method = POST) "
        "{ add_header X-Loc i always; " + HERE + "; } return 405; }"
    ),
    "if-uri": (
        "location / { add_header X-Loc r always; if ($uri ~ ^/api/chat$) { rewrite ^ /v1/x last; } " + HERE + "; }"
        "location /v1/ { add_header X-Loc v always; " + HERE + "; }"
    ),
    "if-upgrade": (
        "location / { add_header X-Loc r always; if ($http_upgrade) { return 400; } " + HERE + "; }"
    ),
    "if-file": (
        "location / { add_header X-Loc r always; if (!-f $request_filename) { rewrite ^ /v1/x last; } return 200; }"
        "location /v1/ { add_header X-Loc v always; " + HERE + "; }"
    ),
    "try-files-named": (
        "location / { add_header X-Loc r always; try_files $uri @back; }"
        "location @back { add_header X-Loc b always; " + HERE + "; }"
    ),
    "try-files-uri": (
        "location / { add_header X-Loc r always; try_files $uri /v1/x; }"
        "location /v1/ { internal; add_header X-Loc v always; " + HERE + "; }"
    ),
    "try-files-code": "location / { add_header X-Loc r always; try_files $uri =404; " + HERE + "; }",
    "try-files-own-pass": (
        "location / { add_header X-Loc r always; try_files /none @b; " + HERE + "; } location @b { return 418; }"
    ),
    "internal": "location / { internal; add_header X-Loc r always; " + HERE + "; }",
    "limit-except": (
        "location / { add_header X-Loc r always; " + HERE + "; limit_except GET { " + HERE + "; } }"
    ),
    "limit-except-deny": "location / { add_header X-Loc r always; " + HERE + "; limit_except GET { deny all; } }",
    "limit-except-inherits": (
        "location / { add_header X-Loc r always; " + HERE + "; limit_except GET { allow 127.0.0.1; deny all; } }"
    ),
    "nested-without-pass": (
        "location /api/ { add_header X-Loc a always; " + HERE + "; location /api/chat { add_header X-Loc n always; } }"
    ),
    "inherits-header": "add_header X-Loc s always; location /api/ { " + HERE + "; }",
    "glued-modifier": (
        "location ~*^/API/ { add_header X-Loc g always; " + HERE + "; }"
        "location / { add_header X-Loc r always; " + HERE + "; }"
    ),
    "no-location": "location /other/ { add_header X-Loc o always; " + HERE + "; }",
}  # fmt: skip


@pytest.mark.skipif(not ALL, reason="no nginx here")
@pytest.mark.parametrize("nginx", ALL, ids=label)
def test_rewrites_and_fallbacks_lead_where_nginx_leads(nginx: Nginx, tmp_path: Path) -> None:
    ports = free_ports(len(WAYS))
    blocks = [
        f"server {{ listen 127.0.0.1:{port}; {text} }}\n" for port, text in zip(ports, WAYS.values(), strict=True)
    ]
    text = f"events {{}} http {{ access_log off; root /nonexistent; {TEMPORARY}\n{''.join(blocks)} }}"
    servers = Servers(tree_of(text, tmp_path))

    def ask(_running: RunningNginx) -> None:
        for port, server, name in zip(ports, servers.all, WAYS, strict=True):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            status, fields, _body = request(connection, "POST", "/api/chat")
            connection.close()
            ours = route(servers, server, "/api/chat", VERSION)
            expected = (status == 502, fields.get("x-loc") if status == 502 else None)
            got = (ours.proxy_pass is not None, name_of(ours) if ours.proxy_pass else None)
            assert got == expected, (name, status, fields, ours.failure)

    with_nginx(nginx, text, ask)


@pytest.mark.parametrize(
    ("inside", "path", "sent"),
    [
        ("location /api/ { proxy_pass http://127.0.0.1:9; }", "/api/chat", "/api/chat"),
        ("location /api/ { proxy_pass http://127.0.0.1:9/; }", "/api/chat", "/chat"),
        ("location /api/ { proxy_pass http://127.0.0.1:9/v1/; }", "/api/chat", "/v1/chat"),
        ("location /api { proxy_pass http://127.0.0.1:9/v1; }", "/api/chat", "/v1/chat"),
        ("location /api/ { rewrite ^/api/(.*) /x/$1 break; proxy_pass http://127.0.0.1:9/v1/; }", "/api/c", "/x/c"),
        ("location ~ ^/api { proxy_pass http://127.0.0.1:9; }", "/api/chat?x=1", "/api/chat"),
        ("location / { proxy_pass http://unix:/run/e.sock:/v1/; }", "/chat", "/v1/chat"),
        ("location / { set $e http://127.0.0.1:9; proxy_pass $e; }", "/chat", "/chat"),
    ],
    ids=["as-is", "slash", "prefix", "no-slash", "rewritten", "regex", "unix", "set"],
)
def test_the_path_sent_upstream(inside: str, path: str, sent: str, tmp_path: Path) -> None:
    found = follow(inside, path, tmp_path)
    assert found.target is not None
    assert found.target.path == sent


def test_a_target_in_a_variable_is_not_followed_and_said_so(tmp_path: Path) -> None:
    found = follow("location / { proxy_pass http://$arg_pool; }", "/v1/x", tmp_path)
    assert (found.proxy_pass is not None, found.target) == (True, None)
    assert "is a variable, not followed" in found.notes[0]


@pytest.mark.parametrize(
    ("inside", "undecided"),
    [
        ("location / { if ($host = a) { return 404; } proxy_pass http://e; }", "whether if ($host = a) holds"),
        ("location / { if ($http_x) { set $y 1; } proxy_pass http://e; }", None),
        ("location ~ ^/v1(*SKIP) { proxy_pass http://e; } location / { proxy_pass http://e; }", "whether the regex"),
        ("location / { rewrite ^ /$http_x last; proxy_pass http://e; }", "where the rewrite"),
    ],
    ids=["if-return", "if-set-only", "regex", "rewrite"],
)  # fmt: skip
def test_what_cannot_be_known_is_named(inside: str, undecided: str | None, tmp_path: Path) -> None:
    found = follow(inside, "/v1/x", tmp_path)
    assert found.proxy_pass is not None
    if undecided is None:
        assert found.undecided == ()
    else:
        assert any(undecided in one for one in found.undecided)


def test_the_host_asked_for_decides_an_if(tmp_path: Path) -> None:
    inside = "location / { if ($host = a.example) { return 404; } proxy_pass http://e; }"
    assert follow(inside, "/x", tmp_path, host="b.example").failure is None
    assert "return 404" in (follow(inside, "/x", tmp_path, host="a.example").failure or "")


def test_a_redirection_loop_ends(tmp_path: Path) -> None:
    found = follow("location / { rewrite ^/(.*)$ /x$1 last; }", "/v1", tmp_path)
    assert "cycle" in (found.failure or "")


def test_fallbacks_are_the_proxied_targets_of_error_page(tmp_path: Path) -> None:
    found = follow(
        "error_page 500 /50x.html;"
        "location / { error_page 502 503 = @b; error_page 404 /404.html; proxy_pass http://e; }"
        "location @b { proxy_pass http://f; }",
        "/v1/x",
        tmp_path,
    )
    assert [one.proxy_pass.args[0] for one in found.fallbacks if one.proxy_pass] == ["http://f"]


@pytest.mark.parametrize(
    ("path", "normal"),
    [("/a//b", "/a/b"), ("/a/./b/../c", "/a/c"), ("/a/%62?q#f", "/a/b"), ("a", "/a"), ("/a/", "/a/"), ("//", "/")],
)
def test_paths_are_matched_in_their_normal_form(path: str, normal: str) -> None:
    assert normalise(path) == normal
