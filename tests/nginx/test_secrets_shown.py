"""Secrets in every place where a configuration has them, and no form of the result shows one.

The exception is the patch that --fix prints: it has to apply, and goes to who asked for it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tapproxy.cli import run
from tapproxy.nginx.lines import secret_lines

TEXT = """\
events {}
http {
map $http_x_api_key $ok { default 0; CANARY01 1; "sk-CANARY02" 1; }
upstream e { server 127.0.0.1:8000; }
server {
listen 443 ssl; ssl_certificate c; ssl_certificate_key k;
set $api_key CANARY03;
location /v1/ { proxy_set_header Authorization "Bearer CANARY04"; proxy_pass http://e; gzip on; gzip_types *; }
location /v1/completions { proxy_set_header Authorization
   "Bearer; CANARY05"; proxy_pass http://e; proxy_set_header X-Accel-Buffering no; }
location /v1/responses { if ($arg_x = "sk-CANARY06") { return 200 ok; }
   proxy_pass http://user:CANARY07@127.0.0.1:8000; }
location /v1/messages {
   # key: sk-CANARY08
   proxy_pass http://e;
   proxy_set_header X-Auth CANARY09;
}
location /api/chat { if ($http_authorization != "CANARY10") { return 403; } proxy_pass http://e; limit_rate 1k; }
location /api/generate { proxy_set_header
 Cookie
 "a; CANARY12"
 ; proxy_pass
 http://e; rewrite ^/api/generate /g?token=CANARY15 break; }
}
}
"""  # fmt: skip


@pytest.mark.parametrize("form", ["text", "json", "github", "sarif"])
def test_no_form_of_the_findings_shows_a_secret(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(TEXT)
    run(["check", str(file), "--nginx-version", "1.31.3", "--format", form])
    captured = capsys.readouterr()
    assert "buffering-on" in captured.out
    assert [line for line in (captured.out + captured.err).splitlines() if "CANARY" in line] == []


def test_the_patch_that_was_asked_for_has_the_true_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(TEXT)
    run(["check", str(file), "--nginx-version", "1.31.3", "--path", "/v1/x", "--fix"])
    captured = capsys.readouterr()
    assert '-location /v1/ { proxy_set_header Authorization "Bearer CANARY04"; ' in captured.out
    assert "CANARY" not in captured.err


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a b;\nset $api_key\n x;\nc d;\n", {2, 3}),
        ('a b; h Authorization "x;\n y"; c\n d;\n', {1, 2}),
        ("a b;\n# the token is x\nc d;\n", {2}),
        ("if ($http_authorization = x) {\n a b;\n}\n", {1}),
        ("proxy_pass\n http://u:p@h;\na b;\n", {1, 2}),
        ("a b;\n", set()),
    ],
    ids=["below-its-name", "quoted-end", "comment", "block", "user-in-an-address", "none"],
)
def test_a_secret_is_all_of_its_statement(text: str, lines: set[int]) -> None:
    assert secret_lines(text) == lines
