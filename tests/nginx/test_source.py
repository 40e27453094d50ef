"""The reader of configuration text, against crossplane and by hand."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import crossplane
import pytest

from tapproxy.nginx.sandbox import data_dir
from tapproxy.nginx.source import Directive, SourceError, parse
from tests.nginx.corpus import DATA

FILES = sorted([*DATA.glob("*.conf"), *data_dir().rglob("*.conf")])


def flat(block: Iterable[Directive]) -> list[tuple[str, list[str], int]]:
    found = []
    for one in block:
        found.append((one.name, list(one.args), one.line))
        found += flat(one.block or ())
    return found


def flat_oracle(block: list[dict[str, Any]]) -> list[tuple[str, list[str], int]]:
    found = []
    for one in block:
        found.append((one["directive"], one["args"], one["line"]))
        found += flat_oracle(one.get("block", []))
    return found


def test_every_file_reads_as_crossplane_reads_it() -> None:
    assert len(FILES) > 130
    for file in FILES:
        oracle = crossplane.parse(str(file), single=True, check_ctx=False, check_args=False)
        assert flat(parse(file.read_text(), str(file))) == flat_oracle(oracle["config"][0]["parsed"]), file


def test_offsets_lead_back_to_the_text() -> None:
    text = Path(DATA / "c03_xab_ignored.conf").read_text()

    def check(block: Iterable[Directive]) -> None:
        for one in block:
            assert text[one.start : one.start + len(one.name)] == one.name
            assert text[one.end - 1] == (";" if one.block is None else "{")
            for argument, (start, end) in zip(one.args, one.arg_spans, strict=True):
                assert text[start:end].strip("\"'") == argument
            if one.close is not None:
                assert text[one.close - 1] == "}"
            check(one.block or ())

    check(parse(text, "nginx.conf"))


@pytest.mark.parametrize(
    ("text", "args"),
    [
        ("a b c;", ("b", "c")),
        ("a 'b c' \"d\";", ("b c", "d")),
        ('a "";', ("",)),
        ('a "say \\"x\\"";', ('say "x"',)),
        ("a ^/v1/(.*)\\.php$;", ("^/v1/(.*)\\.php$",)),
        ("a ${x}y;", ("${x}y",)),
        ("a b#c;", ("b#c",)),
        ("a # comment; {\n b;", ("b",)),
        ("a b}c;", ("b}c",)),
        ("a\r\n b;\r\n", ("b",)),
    ],
    ids=[
        "plain", "quotes", "empty", "escaped", "regex", "variable", "hash-inside", "comment", "brace-inside", "crlf",
    ],
)  # fmt: skip
def test_words_are_nginx_words(text: str, args: tuple[str, ...]) -> None:
    (one,) = parse(text, "f")
    assert one.args == args


@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("a b", 'unexpected end of file after "a", expecting ";" or "}"', 1),
        ("a {\n b c\n}", 'directive "b" is not terminated by ";"', 2),
        ("a {\n b;\n", 'unexpected end of file, expecting "}"', 3),
        ("a; }", 'unexpected "}"', 1),
        ("{ }", 'unexpected "{"', 1),
        ("\na 'b", 'unexpected end of file, expecting ";" or "}"', 2),
        ("a 'b'c;", 'unexpected "c"', 1),
        ("a {" * 200, "blocks nested deeper than 100", 1),
    ],
    ids=["eof", "semicolon", "open-block", "extra-brace", "no-name", "open-quote", "after-quote", "depth"],
)
def test_what_cannot_be_read_says_where(text: str, message: str, line: int) -> None:
    with pytest.raises(SourceError) as caught:
        parse(text, "f")
    assert (str(caught.value), caught.value.line) == (message, line)


def test_a_lua_block_is_one_statement() -> None:
    text = 'content_by_lua_block {\n local s = "}"  -- a brace }\n if x then y = {1} end\n}\nb;'
    first, second = parse(text, "f")
    assert (first.name, first.block, second.name, second.line) == ("content_by_lua_block", (), "b", 5)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ('proxy_set_header Connection "";', 'proxy_set_header Connection "";'),
        ('proxy_set_header Authorization "Bearer sk-1";', "proxy_set_header Authorization (hidden);"),
        ("set $api_key sk-1;", "set $api_key (hidden);"),
        ("location ~ ^/v1/ { }", "location ~ ^/v1/ {"),
    ],
    ids=["empty", "header", "variable", "block"],
)
def test_a_quoted_statement_shows_no_credential(text: str, shown: str) -> None:
    (one,) = parse(text, "f")
    assert one.text == shown
