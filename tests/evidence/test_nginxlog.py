"""Access logs of a real nginx (1.22): a server that refuses before one that answers, nginx's own answer, an abort."""

from __future__ import annotations

import gzip
import time
from pathlib import Path

import pytest

from tapproxy.core.errors import ConfigError
from tapproxy.core.witness import AccessRow, UpstreamTry
from tapproxy.evidence import logformat, nginxlog

DATA = Path(__file__).parent.parent / "data/nginxlog"
FORMATS = logformat.all_of((DATA / "formats.conf").read_text())
MS = 1_000_000

# The first request of the logs: the first server refused, the second one answered over 153 ms.
ENDED_NS = 1_795_986_294_139 * MS
TRIES = (
    UpstreamTry("127.0.0.1:18078", 502, None, None, 0),
    UpstreamTry("127.0.0.1:18077", 200, 1 * MS, 2 * MS, 153 * MS),
)
ID = "518fa8bf359f90fe697dd1c0460c5818"


def test_a_format_of_plain_fields_is_read_with_its_lists() -> None:
    log = nginxlog.read(DATA / "plain.log", FORMATS["plain"])
    assert (log.problem, log.skipped, len(log.rows), log.source) == (None, 0, 5, "plain.log")
    assert log.rows[0] == AccessRow(
        line=1,
        ended_unix_ns=ENDED_NS,
        ended_bound_ns=1 * MS,
        request_ns=154 * MS,
        request_id=ID,
        method="POST",
        path="/v1/chat/completions",
        http="1.1",
        status=200,
        connection=1,
        connection_requests=1,
        tries=TRIES,
    )
    assert log.rows[0].started_unix_ns == ENDED_NS - 154 * MS
    assert [row.retried for row in log.rows] == [True, False, True, False, False]


def test_what_nginx_answered_itself_asked_nobody() -> None:
    for name in ("plain", "json"):
        own = nginxlog.read(DATA / f"{name}.log", FORMATS[name]).rows[3]
        assert (own.path, own.status, own.request_ns, own.tries) == ("/own", 204, 0, ())


def test_a_json_format_is_read_by_its_own_text() -> None:
    row = nginxlog.read(DATA / "json.log", FORMATS["json"]).rows[0]
    assert (row.ended_unix_ns, row.ended_bound_ns) == (ENDED_NS, 1 * MS)
    assert row.ids == (ID, "cl-1", "eng-7")
    assert row.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert (row.body_bytes, row.sent_bytes, row.received_bytes) == (44, 195, 276)
    assert row.tries == TRIES


def test_a_json_log_whose_keys_are_the_variables_needs_no_format() -> None:
    log = nginxlog.read(DATA / "named.log")
    assert log.problem is None
    row = log.rows[0]
    assert (row.ended_unix_ns, row.request_ns, row.request_id) == (ENDED_NS, 154 * MS, ID)
    assert row.path == "/v1/chat/completions"
    assert [each.response_ns for each in row.tries] == [0, 153 * MS]


def test_a_format_without_escapes_is_read() -> None:
    row = nginxlog.read(DATA / "none.log", FORMATS["none"]).rows[0]
    assert (row.ended_unix_ns, row.ended_bound_ns) == (1_795_986_294_000 * MS, 1000 * MS)
    assert [each.addr for each in row.tries] == ["127.0.0.1:18078", "127.0.0.1:18077"]


def test_a_host_that_touches_the_path_ends_before_it() -> None:
    log = nginxlog.read(DATA / "touching.log", FORMATS["touching"])
    assert log.skipped == 0
    assert log.rows[0].path == "/v1/chat/completions"
    assert [each.header_ns for each in log.rows[0].tries] == [None, 2 * MS]


def test_nginx_s_default_format_has_no_times_and_says_what_to_write() -> None:
    log = nginxlog.read(DATA / "combined.log")
    assert len(log.rows) == 5
    assert log.problem is not None
    assert "has no times of its own" in log.problem
    assert "$upstream_header_time" in log.problem


def test_no_query_and_no_agent_is_kept() -> None:
    for name in ("plain", "json", "none", "touching", "combined"):
        log = nginxlog.read(DATA / f"{name}.log", FORMATS.get(name))
        assert "secret" not in repr(log)
        assert "weird" not in repr(log)
        assert "agent" not in repr(log.rows)


def test_the_format_may_be_given_as_text_or_as_the_directive() -> None:
    text = FORMATS["plain"].text
    directive = f"log_format x escape=default '{text}'"
    assert nginxlog.read(DATA / "plain.log", text).rows == nginxlog.read(DATA / "plain.log", directive).rows


def test_a_line_of_another_format_is_counted_and_skipped(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    file.write_text("1.5 0.100\nsomething else\n\n2.5 0.200\r\n3.5 0.3")  # the last one is torn, and whole enough
    log = nginxlog.read(file, "$msec $request_time")
    assert [(row.line, row.request_ns) for row in log.rows] == [(1, 100 * MS), (4, 200 * MS), (5, 300 * MS)]
    assert (log.skipped, log.problem) == (1, None)


@pytest.mark.parametrize(
    ("content", "log_format", "expected"),
    [
        pytest.param(b"", None, "holds no line", id="empty"),
        pytest.param(b"\x00\xff\xfe" * 50 + b"\n", None, "has no line of that format (1 of another)", id="binary"),
        pytest.param(b"a b\n", "$msec $request_time", "has no line of that format", id="another format"),
        pytest.param(b"- -\n", "$msec $request_time", "has none on any line", id="no time on any line"),
        pytest.param(b"[1]\n{}\n", None, "has no line of that format", id="no objects"),
        pytest.param(b'{"t": 1}\n', None, "has no times of its own", id="keys that name no variable"),
    ],
)
def test_a_log_that_cannot_witness_says_why(
    tmp_path: Path, content: bytes, log_format: str | None, expected: str
) -> None:
    file = tmp_path / "access.log"
    file.write_bytes(content)
    log = nginxlog.read(file, log_format)
    assert log.problem is not None
    assert expected in log.problem


@pytest.mark.parametrize(
    ("log_format", "expected"),
    [
        ("no variable", "names no variable"),
        ("log_format a '$msec'; log_format b '$msec';", "is no single log_format"),
        ("log_format a escape=xml '$msec';", "is none of default, json, none"),
        ("$a$b$c", "nothing between them"),
        ("$a " * 101, "more than 100 variables"),
    ],
)
def test_a_format_that_cannot_be_read_is_refused(log_format: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected.replace("$", r"\$")):
        logformat.of(log_format)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        nginxlog.read(tmp_path / "no.log")


def test_formats_are_found_in_a_configuration_among_comments_and_blocks() -> None:
    found = logformat.all_of(
        "# log_format not '$a';\nhttp { server { listen 80; }\n"
        "log_format  one  '$msec '\n  # in between\n  \"it\\'s ${request_time}\";\n"
        "log_format two escape=json '{\"rt\":$request_time}'; }"
    )
    assert {name: each.text for name, each in found.items()} == {
        "one": "$msec it's ${request_time}",
        "two": '{"rt":$request_time}',
    }
    assert found["one"].values("1.5 it's 0.25") == {"msec": "1.5", "request_time": "0.25"}


def test_a_rotated_log_is_read_compressed_and_its_torn_end_said(tmp_path: Path) -> None:
    file = tmp_path / "access.log.1.gz"
    file.write_bytes(gzip.compress((DATA / "plain.log").read_bytes()))
    assert len(nginxlog.read(file, FORMATS["plain"]).rows) == 5
    file.write_bytes(file.read_bytes()[:-40])
    assert nginxlog.read(file, FORMATS["plain"]).notes == ["its compressed data ends early: what came before is used"]


def test_no_more_than_the_limit_is_read(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    file.write_bytes((b"1.5 0.1 ".ljust(8191, b"x") + b"\n") * 256)
    log = nginxlog.read(file, "$msec $request_time $http_user_agent", most_bytes=1 << 20)
    assert len(log.rows) == 128
    assert log.notes == ["only its first 1 MiB were read"]


def test_an_endless_line_is_no_burden(tmp_path: Path) -> None:
    file = tmp_path / "access.log"
    file.write_bytes(b'1.5 "' + b"\\" * (3 << 20) + b"\n" + b'1.5 "x" 0.1\n')
    began = time.monotonic()
    log = nginxlog.read(file, '$msec "$request" $request_time')
    assert (len(log.rows), log.skipped) == (1, 1)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize(
    "line", ["0, " * 20_000 + "x", '"' * 60_000, "a " * 30_000, "\\" * 60_000], ids=["list", "quotes", "words", "slash"]
)
def test_no_line_takes_long(line: str) -> None:
    for each in (*FORMATS.values(), logformat.of(logformat.COMBINED)):
        began = time.monotonic()
        assert each.values(line) is None
        assert time.monotonic() - began < 1


@pytest.mark.parametrize(
    ("text", "expected_s"),
    [
        ("01/May/2024:12:00:00 +0200", 1714557600),
        ("01/May/2024:12:00:00 -0330", 1714577400),
        ("29/Feb/2023:12:00:00 +0000", None),
        ("01/Mai/2024:12:00:00 +0200", None),
    ],
)
def test_local_times_are_read_with_their_zone(tmp_path: Path, text: str, expected_s: int | None) -> None:
    file = tmp_path / "access.log"
    file.write_text(f"[{text}] 0.1\n")
    (row,) = nginxlog.read(file, "[$time_local] $request_time").rows
    assert row.ended_unix_ns == (None if expected_s is None else expected_s * 1_000_000_000)
