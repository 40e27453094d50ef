"""Patches: the smallest change, in the file's own form, taken by patch(1)."""

from __future__ import annotations

import random
import shutil
import subprocess
from pathlib import Path

import pytest

from tapproxy.core.errors import ConfigError
from tapproxy.nginx import fix
from tapproxy.nginx.checker import examine
from tapproxy.nginx.source import Directive, parse


def find(text: str, name: str) -> Directive:
    def walk(block: tuple[Directive, ...]) -> list[Directive]:
        return [found for one in block for found in (one, *walk(one.block or ()))]

    return next(one for one in walk(parse(text, "f")) if one.name == name)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a {\n    p x;\n    q;\n}\n", "a {\n    p x;\n    new;\n    q;\n}\n"),
        ("a {\n\tp x; # why\n}\n", "a {\n\tp x; # why\n\tnew;\n}\n"),
        ("a { p x; }\n", "a { p x; new; }\n"),
        ("a {\n  p x; q;\n}\n", "a {\n  p x; new; q;\n}\n"),
        ("a {\r\n  p x;\r\n}\r\n", "a {\r\n  p x;\r\n  new;\r\n}\r\n"),
        ("a {\n  p\n    x;\n}\n", "a {\n  p\n    x;\n  new;\n}\n"),
        ("a {\n  p x;}", "a {\n  p x; new;}"),
        ("p x;", "p x; new;"),
    ],
    ids=["own-line", "comment", "one-line", "two-on-line", "crlf", "two-lines", "brace", "no-newline"],
)
def test_a_statement_goes_behind_another(before: str, after: str) -> None:
    assert fix.apply(before, [fix.insert_after(before, find(before, "p"), "new;")]) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("b {\n    q;\n}\n", "b {\n    new;\n    q;\n}\n"),
        ("b {\n}\n", "b {\n    new;\n}\n"),
        ("b { q; }\n", "b { new; q; }\n"),
        ("b { # why\n\n  q;\n}\n", "b { # why\n  new;\n\n  q;\n}\n"),
        ("a { b { } }", "a { b { new; } }"),
    ],
    ids=["like-neighbours", "empty", "one-line", "comment", "nested-one-line"],
)
def test_a_statement_goes_first_in_a_block(before: str, after: str) -> None:
    assert fix.apply(before, [fix.insert_first(before, find(before, "b"), "new;")]) == after


@pytest.mark.parametrize(
    ("before", "index", "after"),
    [
        ("a {\n  p X Y;\n}\n", 0, "a {\n  p Y;\n}\n"),
        ("a {\n  p X Y;\n}\n", 1, "a {\n  p X;\n}\n"),
        ("a {\n  p X;\n  q;\n}\n", 0, "a {\n  q;\n}\n"),
        ("a { p X; q; }\n", 0, "a {  q; }\n"),
    ],
    ids=["first", "last", "only-on-its-line", "only-between-others"],
)
def test_an_argument_goes_and_the_statement_with_the_last_one(before: str, index: int, after: str) -> None:
    assert fix.apply(before, [fix.remove_argument(before, find(before, "p"), index)]) == after


def test_equal_edits_count_once_and_others_keep_their_order() -> None:
    edits = [fix.Edit("f", 2, 2, "B"), fix.Edit("f", 0, 1, "A"), fix.Edit("f", 2, 2, "B")]
    assert fix.apply("xyz", edits) == "AyBz"


def test_the_diff_is_in_the_form_of_git_and_keeps_a_missing_newline() -> None:
    text = "p x;"
    patch = fix.unified({"/etc/nginx/f": text}, [fix.Edit("/etc/nginx/f", 2, 3, "y")])
    assert patch == (
        "--- a/etc/nginx/f\n+++ b/etc/nginx/f\n@@ -1 +1 @@\n"
        "-p x;\n\\ No newline at end of file\n+p y;\n\\ No newline at end of file\n"
    )


def test_a_file_whose_bytes_cannot_be_kept_gets_no_patch() -> None:
    assert fix.unified({"f": "p x; # \ufffd"}, [fix.Edit("f", 2, 3, "y")]) is None


def test_a_neighbouring_key_does_not_get_into_the_patch() -> None:
    text = 'proxy_set_header Authorization "Bearer sk-1";\np x;\n'
    patch = fix.unified({"f": text}, [fix.Edit("f", text.index("x;"), text.index("x;") + 1, "y")])
    assert patch == "--- a/f\n+++ b/f\n@@ -2 +2 @@\n-p x;\n+p y;\n"


@pytest.mark.parametrize(
    "before",
    [
        b"a {\r\n  p x;\r\n}\r\n",
        b"\xef\xbb\xbfa {\n  p x;\n}\n",
        b"a {\n  p x;\n}",
        b"# gr\xc3\xbc\xc3\x9fe\x0c\na {\n\tp x; # \xe2\x80\xa8\n}\n",
    ],
    ids=["crlf", "bom", "no-final-newline", "form-feed"],
)
def test_write_touches_no_other_byte(before: bytes, tmp_path: Path) -> None:
    file = tmp_path / "f.conf"
    file.write_bytes(before)
    text = before.decode()
    one = next(one for one in parse(text.lstrip("\ufeff"), str(file))[0].block or ())
    shift = len(text) - len(text.lstrip("\ufeff"))
    start, end = one.arg_spans[0]
    done = fix.write({str(file): text}, [fix.Edit(str(file), start + shift, end + shift, "y")])
    assert done == [(str(file), f"{file}.orig")]
    assert file.read_bytes() == before.replace(b"p x;", b"p y;")
    assert (tmp_path / "f.conf.orig").read_bytes() == before


def test_write_changes_what_a_link_leads_to(tmp_path: Path) -> None:
    (tmp_path / "available").mkdir()
    (tmp_path / "available" / "f").write_text("p x;\n")
    (tmp_path / "enabled").symlink_to("available/f")
    name = str(tmp_path / "enabled")
    fix.write({name: "p x;\n"}, [fix.Edit(name, 2, 3, "y")])
    assert (tmp_path / "enabled").is_symlink()
    assert (tmp_path / "available" / "f").read_text() == "p y;\n"
    assert sorted(one.name for one in (tmp_path / "available").iterdir()) == ["f", "f.orig"]


@pytest.mark.parametrize("found", [b"p z;\n", b"p x; # \xff\n"], ids=["changed", "not-utf8"])
def test_write_refuses_a_file_that_is_not_what_was_checked(found: bytes, tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(found)
    text = "p x;\n" if found == b"p z;\n" else found.decode(errors="replace")
    with pytest.raises(ConfigError, match="nothing was changed"):
        fix.write({str(file): text}, [fix.Edit(str(file), 2, 3, "y")])
    assert file.read_bytes() == found
    assert [one.name for one in tmp_path.iterdir()] == ["f"]


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch(1)")
@pytest.mark.parametrize("seed", range(25))
def test_any_edits_make_a_patch_that_patch_takes(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    text = "".join(chance.choice(["a x;\n", "b y;\n", "\n", "c;\r\n"]) for _ in range(chance.randrange(1, 40)))
    text = text if chance.random() < 0.7 else text + "last;"
    starts = [0, *(index + 1 for index, letter in enumerate(text) if letter == "\n")]
    edits = []
    for start in chance.sample(starts, min(len(starts), chance.randrange(1, 6))):
        end = text.find("\n", start) + 1 or len(text)
        kind = chance.choice(["insert", "remove", "change"])
        if kind == "insert":
            edits.append(fix.Edit("f", start, start, "new;\n"))
        elif kind == "remove":
            edits.append(fix.Edit("f", start, end, ""))
        elif text[start:end].strip():
            edits.append(fix.Edit("f", start, start + 1, "Z"))
    after = fix.apply(text, edits)
    patch = fix.unified({"f": text}, edits)
    if after == text:
        assert patch is None
        return
    assert patch is not None
    (tmp_path / "f").write_bytes(text.encode())
    subprocess.run(["patch", "-p1", "-s", "--binary", "-F0"], input=patch.encode(), check=True, cwd=tmp_path)
    assert ((tmp_path / "f").read_bytes() if (tmp_path / "f").exists() else b"") == after.encode()


@pytest.mark.skipif(shutil.which("patch") is None, reason="needs patch(1)")
def test_patch_takes_what_check_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "conf.d" / "llm.conf").write_text(
        "server {\n    listen 443 ssl;\n    location /v1/ {\n        proxy_pass http://127.0.0.1:8000;\n"
        "        proxy_ignore_headers X-Accel-Buffering;\n    }\n}\n"
    )
    (tmp_path / "nginx.conf").write_text(
        "events {}\nhttp {\n    gzip on; gzip_types *;\n    include conf.d/*.conf;\n}\n"
    )
    monkeypatch.chdir(tmp_path)
    before = examine(["nginx.conf"], nginx_version="1.22.1", paths=["/v1/x"])
    assert {one.rule for one in before.findings if one.severity != "info"} == {
        "buffering-on", "gzip-buffers-sse", "xab-ignored", "http10-upstream",
    }  # fmt: skip
    assert before.patch is not None
    subprocess.run(["patch", "-p1", "-s"], input=before.patch, text=True, check=True, cwd=tmp_path)
    after = examine(["nginx.conf"], nginx_version="1.22.1", paths=["/v1/x"])
    assert {one.rule for one in after.findings} == {
        "gzip-sse", "upstream-no-keepalive", "read-timeout-default", "body-size-default-1m",
        "request-buffering-large-body",
    }  # fmt: skip
    assert (tmp_path / "conf.d" / "llm.conf").read_text() == (
        "server {\n    listen 443 ssl;\n    location /v1/ {\n        proxy_pass http://127.0.0.1:8000;\n"
        "        proxy_buffering off;\n        proxy_http_version 1.1;\n"
        '        proxy_set_header Connection "";\n    }\n}\n'
    )
