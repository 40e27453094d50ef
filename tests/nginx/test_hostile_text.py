"""Text that is no configuration, or one out of all proportion: file and line, exit 2, in bounded time and memory."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tapproxy.cli import run
from tapproxy.nginx.checker import examine

SERVER = b"server { listen 443 ssl; location / { proxy_pass http://127.0.0.1:8000; } }"
WHOLE = b"events {}\nhttp {\n" + SERVER + b"\n}\n"
LIMIT_S = 10.0


def nested(depth: int) -> bytes:
    return b"events {}\nhttp {\nserver {\nlisten 80;\n" + b"location / {\n" * depth + b"}\n" * depth + b"}\n}\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (b"http {\n  server {\n", 3),
        (b"events {}\nhttp {\n  gzip on\n}\n", 3),
        (b"events {}\n}\n", 2),
        (b"\xef\xbb\xbf" + WHOLE, 1),
        (b"events {}\n\x00\x01\x02\xff\xfe", 2),
        (bytes(range(256)) * 64, 1),
        (b"\xff\xfe" + WHOLE.decode().encode("utf-16-le"), 1),
        (b'events {}\nhttp {\nserver_name "abc', 3),
        (b"events {}\n" + b"a" * (1 << 20), 2),
        (b"events {}\nhttp {\n" + b"x " * (1 << 19) + b"}", 3),
        (nested(300), 103),
        (b"{" * 5000, 1),
        (b";" * 5000, 1),
        (b"a {" * 5000, 1),
        (b"a" * (9 << 20), 1),
        (b"events {}\nhttp {\n" + b"include nginx.conf;\n" * 3 + SERVER + b"}\n", 3),
        (b"events {}\nhttp {\ninclude missing.conf;\n" + SERVER + b"}\n", 3),
        (b"events {}\nhttp {\ninclude .;\n" + SERVER + b"}\n", 3),
        (b"events {}\nhttp {\ninclude /*/*/*/*/*;\n" + SERVER + b"}\n", 3),
        (b"events {}\nhttp {\n content_by_lua_block {\n if {", 3),
    ],
    ids=["open", "semicolon", "close", "bom", "nul", "binary", "utf16", "quote", "1mb-word", "1mb-words", "deep",
         "braces", "semicolons", "blocks", "9mb", "loop", "missing-include", "directory", "whole-disk", "lua"],
)  # fmt: skip
def test_the_place_is_named_and_nothing_else_happens(
    text: bytes, line: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nginx.conf"
    file.write_bytes(text)
    start = time.monotonic()
    assert run(["check", str(file), "--nginx-version", "1.31.3", "--format", "json"]) == 2
    assert time.monotonic() - start < LIMIT_S
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert len(captured.err.splitlines()) == 1
    found = [one for one in json.loads(captured.out)["findings"] if one["rule"] == "config-invalid"]
    assert ("error", line) in {(one["severity"], one["line"]) for one in found}, captured.err[:300]
    assert f"nginx.conf:{line}: " in captured.err
    assert len(captured.err) < 2000


@pytest.mark.parametrize(
    "text",
    [
        WHOLE.replace(b"\n", b"\r\n"),
        WHOLE.rstrip(b"\n"),
        b"# \xff\xfe not UTF-8\n" + WHOLE,
        b"# " + b"x" * (1 << 20) + b"\n" + WHOLE,
        WHOLE.replace(b"listen 443 ssl;", b"listen 443 ssl; add_header X '" + b"y" * (1 << 20) + b"';"),
        WHOLE.replace(b"listen 443 ssl;", b"listen 443 ssl; server_name " + b"a.example " * (1 << 16) + b";"),
        nested(90).replace(b"listen 80;", b"listen 443 ssl; proxy_pass http://e;"),
    ],
    ids=["crlf", "no-newline", "latin-1", "1mb-comment", "1mb-value", "many-words", "nested"],
)
def test_what_nginx_reads_is_read(text: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nginx.conf"
    file.write_bytes(text)
    start = time.monotonic()
    assert run(["check", str(file), "--nginx-version", "1.31.3"]) in (0, 1)
    assert time.monotonic() - start < LIMIT_S
    captured = capsys.readouterr()
    assert captured.err == ""
    assert max(map(len, captured.out.splitlines())) < 3000


NUMBERS = (
    "client_max_body_size {}k;", "proxy_read_timeout {}s;", "limit_conn c {};", "limit_rate {};", "error_page {} /x;",
    "proxy_buffers {} {}k;", "gzip_comp_level {};", "proxy_cache_valid {} {}m;", "keepalive_timeout {};", "return {};",
    "proxy_pass http://127.0.0.1:{};", "proxy_next_upstream_tries {};", "limit_req zone=r burst={};",
)  # fmt: skip


@pytest.mark.parametrize("number", ["9" * 5000, "\u00b2\u0663", "-1", "0" * 30, "99999999999999999999"])
def test_no_number_breaks_the_check(number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nginx.conf"
    upstream = f"upstream e {{ server a:{number} weight={number} fail_timeout={number}; keepalive {number}; }}"
    for text in NUMBERS:
        inside = f"listen {number}; location / {{ proxy_pass http://e; {text.replace('{}', number)} }}"
        file.write_text(
            f"worker_shutdown_timeout {number}; events {{ worker_connections {number}; }}\n"
            f"http {{ {upstream}\nserver {{ {inside} }} }}\n"
        )
        assert run(["check", str(file), "--nginx-version", "1.31.3"]) in (0, 1), text
        # Each alone as well: a refusal ends the look at the path.
        file.write_text(
            f"events {{}}\nhttp {{ server {{ listen 80; location / {{ {text.replace('{}', number)} }} }} }}"
        )
        assert run(["check", str(file), "--nginx-version", "1.31.3"]) in (0, 1), text
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_include_without_permission_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nginx.conf"
    file.write_bytes(b"events {}\nhttp {\ninclude s.conf;\n" + SERVER + b"}\n")
    (tmp_path / "s.conf").write_text("gzip on;")
    (tmp_path / "s.conf").chmod(0)
    assert run(["check", str(file), "--nginx-version", "1.31.3"]) == 2
    assert "nginx.conf:3" in capsys.readouterr().err


def test_five_hundred_servers_take_less_than_two_seconds(tmp_path: Path) -> None:
    parts = ["events {}", "http {", "  proxy_http_version 1.1;"]
    for i in range(500):
        parts += [
            f"  upstream u{i} {{", "    server 127.0.0.1:9000;", "    keepalive 4;", "  }",
            "  server {", "    listen 443 ssl;", f"    server_name s{i}.example.com;",
            "    location / {", f"      proxy_pass http://u{i};", '      proxy_set_header Connection "";',
            "      proxy_set_header Host $host;", "      proxy_read_timeout 600s;", "    }",
            "    location ~ ^/x/(.*)$ {", "      return 200;", "    }",
            "    location /v1/ {", f"      proxy_pass http://u{i};", "    }", "  }",
        ]  # fmt: skip
    file = tmp_path / "nginx.conf"
    file.write_text("\n".join([*parts, "}"]))
    assert len(file.read_text().splitlines()) > 10_000
    start = time.process_time()
    result = examine([file], nginx_version="1.22.1")
    assert time.process_time() - start < 2.0  # 0.8 s on the machine this was written on
    assert len(result.paths) == 3500
    assert sum(one.rule == "buffering-on" for one in result.findings) == 1000
