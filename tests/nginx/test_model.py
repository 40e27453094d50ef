"""Reading a configuration: includes, fragments, inheritance, and what nginx would refuse (nginx itself is asked)."""

from __future__ import annotations

import contextlib
import http.client
import os
from pathlib import Path

import pytest

from tapproxy.core.errors import ConfigError
from tapproxy.nginx import model
from tapproxy.nginx.directives import Build, default_of
from tapproxy.nginx.model import Scope, Tree, parse_version
from tapproxy.nginx.refusals import load
from tapproxy.nginx.routing import route
from tapproxy.nginx.sandbox import Nginx, RunningNginx
from tapproxy.nginx.servers import Servers
from tests.nginx.live import ALL, TEMPORARY, free_ports, label, refusal, request, with_nginx

VERSION = (1, 31, 3)


def write(directory: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return str(directory / next(iter(files)))


def read(directory: Path, files: dict[str, str], version: tuple[int, ...] = VERSION) -> Tree:
    return load(write(directory, files), version=version)


def location_scope(tree: Tree) -> Scope:
    http = tree.http
    assert http is not None
    server = next(one for one in http.block or () if one.name == "server")
    location = next(one for one in server.block or () if one.name == "location")
    return Scope((location, server, http), VERSION)


# -- inheritance ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("http", "server", "location", "value", "line"),
    [
        ("", "", "", "on", None),
        ("proxy_buffering off;", "", "", "off", 3),
        ("proxy_buffering off;", "proxy_buffering on;", "", "on", 5),
        ("proxy_buffering on;", "proxy_buffering on;", "proxy_buffering off;", "off", 7),
    ],
    ids=["default", "http", "server-over-http", "location-over-all"],
)
def test_the_nearest_level_wins(
    http: str, server: str, location: str, value: str, line: int | None, tmp_path: Path
) -> None:
    text = f"events {{}}\nhttp {{\n{http}\nserver {{\n{server}\nlocation / {{\n{location}\n}} }} }}"
    setting = location_scope(read(tmp_path, {"nginx.conf": text})).setting("proxy_buffering")
    assert setting.value == value
    assert setting.origin == (f"{tmp_path}/nginx.conf:{line}" if line else "default")


def test_headers_are_all_or_nothing_per_level(tmp_path: Path) -> None:
    text = (
        'events {} http { proxy_set_header A 1; server { proxy_set_header Connection ""; proxy_set_header B 2;\n'
        "location / { proxy_set_header Host $host; } } }"
    )
    scope = location_scope(read(tmp_path, {"nginx.conf": text}))
    assert scope.setting("proxy_set_header").value == "Host $host"
    outer = Scope(scope.levels[1:], VERSION)
    assert outer.setting("proxy_set_header").value == 'Connection ""; B 2'


@pytest.mark.parametrize(("version", "value"), [("1.22.1", "1.0"), ("1.29.6", "1.0"), ("1.29.7", "1.1")])
def test_the_default_http_version_changed_once(version: str, value: str) -> None:
    assert default_of("proxy_http_version", parse_version(version)) == value


# -- includes ---------------------------------------------------------------------------------------------------


def test_includes_are_read_in_the_files_order_relative_to_nginx_conf(tmp_path: Path) -> None:
    tree = read(
        tmp_path,
        {
            "nginx.conf": "events {}\nhttp { include conf.d/*.conf; }",
            "conf.d/b.conf": "map $uri $y { include c; }\nserver { include snippets/s.conf; }",
            "conf.d/a.conf": "upstream e { server 127.0.0.1:1; }",
            "snippets/s.conf": "location / { proxy_pass http://e; }",
        },
    )
    assert tree.problems == []
    assert tree.http is not None
    assert [one.name for one in tree.http.block or ()] == ["upstream", "map", "server"]
    place = location_scope(tree).levels[0]
    assert (place.file, place.line) == (f"{tmp_path}/snippets/s.conf", 1)
    assert [step.file for step in place.via] == [f"{tmp_path}/nginx.conf", f"{tmp_path}/conf.d/b.conf"]


def test_a_missing_file_is_refused_and_an_empty_glob_only_noted(tmp_path: Path) -> None:
    tree = read(tmp_path, {"nginx.conf": "events {}\nhttp {\n include none.conf;\n include no/*.conf;\n}"})
    assert [(one.text, one.line) for one in tree.problems] == [
        (f'open() "{tmp_path}/none.conf" failed (2: No such file or directory)', 3)
    ]
    assert [one.line for one in tree.empty_includes] == [4]


def test_a_snippet_included_twice_in_one_block_is_the_includes_fault(tmp_path: Path) -> None:
    tree = read(
        tmp_path,
        {
            "nginx.conf": "events {}\nhttp {\n include s.conf;\n server {\n  include s.conf;\n  include s.conf;\n }\n}",
            "s.conf": "proxy_buffering off;\n",
        },
    )
    (one,) = tree.problems
    assert (one.line, one.directive) == (6, "include s.conf;")
    assert one.text == f'"proxy_buffering" directive is duplicate in {tmp_path}/s.conf:1'


def test_a_file_that_includes_itself_is_refused(tmp_path: Path) -> None:
    tree = read(tmp_path, {"nginx.conf": "events {}\nhttp { include a; }", "a": "include b;", "b": "include a;"})
    assert "includes itself" in tree.problems[0].text


def test_includes_that_multiply_are_bounded(tmp_path: Path) -> None:
    files = {"nginx.conf": "events {}\nhttp { include f0; }"}
    files |= {f"f{i}": f"include f{i + 1};" * 16 for i in range(8)} | {"f8": "gzip on;"}
    with pytest.raises(ConfigError, match="more than 5000 statements"):
        model.read(write(tmp_path, files), max_statements=5000)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a regular file"):
        read(tmp_path, {"nginx.conf": "events {}\nhttp { include pipe; }"})
    with pytest.raises(ConfigError, match="is not a regular file"):
        load("/dev/zero", version=VERSION)


def test_a_syntax_error_says_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'nginx.conf:2: directive "gzip" is not terminated by ";"'):
        read(tmp_path, {"nginx.conf": "http {\n gzip on\n}"})


@pytest.mark.parametrize("text", ["1.31", "nginx", "1.31.x", ""])
def test_a_version_has_three_numbers(text: str) -> None:
    with pytest.raises(ConfigError, match="is not of the form"):
        parse_version(text)


# -- fragments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("events {} http { server { location / {} } }", "main"),
        ("server { location / {} }", "http"),
        ("upstream e { server a; } server { location / {} }", "http"),
        ("location / { proxy_pass http://e; }", "server"),
        ("proxy_pass http://e; proxy_buffering off;", "location"),
    ],
)
def test_a_fragment_is_known_by_what_it_has(text: str, kind: str, tmp_path: Path) -> None:
    tree = read(tmp_path, {"fragment.conf": text})
    assert (tree.kind, tree.problems) == (kind, [])
    assert location_scope(tree).context.startswith("http > server > location /")


def test_relative_includes_of_a_fragment_count_from_nginx_conf_above_it(tmp_path: Path) -> None:
    write(tmp_path, {"nginx.conf": "", "snippets/s.conf": "proxy_buffering off;"})
    tree = read(tmp_path, {"sites-enabled/llm": "server { location / { include snippets/s.conf; } }"})
    assert tree.problems == []
    assert location_scope(tree).setting("proxy_buffering").value == "off"


# -- what nginx refuses -----------------------------------------------------------------------------------------

LOC = "location / {{ {} }}"
FAULTS = {
    "healthy": LOC.format("proxy_pass http://127.0.0.1:9; proxy_buffering off;"),
    "flag": LOC.format("proxy_buffering no;"),
    "flag-variable": LOC.format("proxy_buffering $x;"),
    "flag-case": LOC.format("proxy_buffering OFF;"),
    "duplicate": LOC.format("proxy_buffering off; proxy_buffering off;"),
    "duplicate-header-is-fine": LOC.format("proxy_set_header A 1; proxy_set_header A 2;"),
    "duplicate-ignore-is-fine": LOC.format("proxy_ignore_headers Expires; proxy_ignore_headers Cache-Control;"),
    "in-if": LOC.format("if ($arg_x) { proxy_buffering off; }"),
    "in-if-allowed": LOC.format("if ($arg_x) { gzip off; }"),
    "arguments": LOC.format("proxy_read_timeout 60s 60s;"),
    "no-arguments": LOC.format("proxy_read_timeout;"),
    "context": "proxy_pass http://127.0.0.1:9;",
    "misspelt": LOC.format("proxy_bufering off;"),
    "http-version": LOC.format("proxy_http_version 1.2;"),
    "http-version-2": LOC.format("proxy_pass http://127.0.0.1:9; proxy_http_version 2;"),
    "http2-directive": "http2 on;",
    "time": LOC.format("proxy_read_timeout soon;"),
    "time-units": LOC.format("proxy_read_timeout 1h30m;"),
    "size": LOC.format("proxy_buffer_size 4kb;"),
    "size-units": LOC.format("client_max_body_size 64M;"),
    "uri-in-regex": LOC.format("").replace("/", "~ ^/v1/").replace("{ ", "{ proxy_pass http://127.0.0.1:9/x;"),
    "uri-in-named": LOC.format("").replace("/", "@b").replace("{ ", "{ proxy_pass http://127.0.0.1:9/x;"),
    "uri-in-if": LOC.format("if ($arg_x) { proxy_pass http://127.0.0.1:9/; }"),
    "no-scheme": LOC.format("proxy_pass 127.0.0.1:9;"),
    "duplicate-location": LOC.format("") + LOC.format(""),
    "nested-outside": "location /a { location /b { } }",
    "block-missing": "location /;",
    "block-extra": LOC.format("gzip on { }"),
    "gunzip": LOC.format("gunzip on;"),
    "sub-filter": LOC.format("sub_filter a b;"),
    "early-hints": LOC.format("early_hints 1;"),
    "limit-except": LOC.format("limit_except GET { deny all; }"),
    "error-page": LOC.format("error_page 502 = @none;"),
    "return": LOC.format("return 200 ok;"),
}


@pytest.mark.skipif(not ALL, reason="no nginx here")
@pytest.mark.parametrize("nginx", ALL, ids=label)
def test_what_nginx_refuses_is_found_and_nothing_else(nginx: Nginx, tmp_path: Path) -> None:
    wrong = []
    for name, inside in FAULTS.items():
        text = (
            f"events {{}}\nhttp {{ {TEMPORARY}\nupstream e {{ server 127.0.0.1:9; }}\n"
            f"server {{ listen unix:{tmp_path}/s; {inside} }} }}"
        )
        theirs = refusal(nginx, text, tmp_path)
        file = write(tmp_path, {"nginx.conf": text})
        ours = load(file, version=parse_version(nginx.version), build=nginx.build).problems
        if (theirs is None) != (ours == []):
            wrong.append((name, theirs, [one.text for one in ours]))
    assert wrong == []


@pytest.mark.skipif(not ALL, reason="no nginx here")
@pytest.mark.parametrize("nginx", ALL, ids=label)
@pytest.mark.parametrize(
    ("keepalive", "before", "since"),
    [
        ("16", True, True),
        ("0", False, True),
        ("32 local", False, True),
        ("32 remote", False, False),
        ("x", False, False),
    ],
)
def test_keepalive_differs_by_version(nginx: Nginx, keepalive: str, before: bool, since: bool, tmp_path: Path) -> None:
    text = f"events {{}}\nhttp {{ {TEMPORARY} upstream e {{ server 127.0.0.1:9; keepalive {keepalive}; }} }}"
    version = parse_version(nginx.version)
    expected = since if version >= (1, 29, 7) else before
    ours = load(write(tmp_path, {"nginx.conf": text}), version=version).problems
    assert (refusal(nginx, text, tmp_path) is None, ours == []) == (expected, expected)


def test_a_module_that_is_not_loaded_is_told_from_one_that_is_missing(tmp_path: Path) -> None:
    text = "events {}\nstream { server { listen 1; } }"
    file = write(tmp_path, {"nginx.conf": text})
    missing = load(file, version=VERSION, build=Build(frozenset())).problems
    unloaded = load(file, version=VERSION, build=Build(frozenset(), frozenset({"stream"}))).problems
    assert "built without the module stream" in missing[0].text
    assert "load_module is missing" in unloaded[0].text
    write(tmp_path, {"nginx.conf": "load_module modules/ngx_stream_module.so;\n" + text})
    assert load(file, version=VERSION, build=Build(frozenset(), frozenset({"stream"}))).problems == []
    assert load(file, version=VERSION, build=None).problems == []


def test_a_whole_configuration_needs_events(tmp_path: Path) -> None:
    tree = read(tmp_path, {"nginx.conf": "http { server { } }"})
    assert [one.text for one in tree.problems] == ['no "events" section in configuration']


@pytest.mark.skipif(not ALL, reason="no nginx here")
def test_headers_are_merged_where_nginx_is_told_to(tmp_path: Path) -> None:
    ways = {
        "merge": "add_header_inherit merge; add_header X-B 2;",
        "merge-outer": "add_header X-B 2; location /merge-outer/x { add_header_inherit merge; add_header X-C 3; }",
        "on": "add_header X-B 2;",
        "off": "add_header_inherit off;",
        "none": "",
    }
    newest = max(ALL, key=lambda nginx: parse_version(nginx.version))
    if parse_version(newest.version) < (1, 29, 3):
        pytest.skip("no nginx here that knows add_header_inherit")
    (port,) = free_ports(1)
    locations = "".join(f"location /{name} {{ {inside} return 204; }}\n" for name, inside in ways.items())
    locations = locations.replace("X-C 3;", "X-C 3; return 204;")
    text = f"events {{}} http {{ {TEMPORARY} server {{ listen 127.0.0.1:{port}; add_header X-A 1;\n{locations} }} }}"
    servers = Servers(read(tmp_path, {"nginx.conf": text}))
    paths = [*(f"/{name}" for name in ways), "/merge-outer/x"]

    def ask(_: RunningNginx) -> dict[str, set[str]]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
            return {path: {name for name in request(connection, "GET", path)[1] if name[:2] == "x-"} for path in paths}

    ours = {}
    for path in paths:
        scope = route(servers, servers.all[0], path, VERSION, method="GET").scope
        ours[path] = {one.args[0].lower() for one in scope.statements("add_header")}
    assert with_nginx(newest, text, ask) == ours
