"""The reader of Prometheus' text: what it keeps, what it passes over, and what it calls a page that is none."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapproxy.evidence.exposition import MOST_BYTES, MOST_LINES, MOST_SERIES, read

WANTED = frozenset((b"up", b"lag_sum", b"lag_count"))


def series(text: str, name: str = "up") -> dict[tuple[tuple[str, str], ...], float]:
    return read(text.encode(), WANTED).series.get(name, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("up 1\n", {(): 1.0}, id="plain"),
        pytest.param("up 1", {(): 1.0}, id="no_line_feed_at_the_end"),
        pytest.param("up\t 1.5e3 1700000000000\r\n", {(): 1500.0}, id="tab_timestamp_crlf"),
        pytest.param("  up 2\n", {(): 2.0}, id="leading_blanks"),
        pytest.param('up{} 2\nup{a="b"} 3\n', {(): 2.0, (("a", "b"),): 3.0}, id="empty_braces"),
        pytest.param('up {a="b",} 3\n', {(("a", "b"),): 3.0}, id="blank_and_comma"),
        pytest.param('up{b="2",a="1"} 3\n', {(("a", "1"), ("b", "2")): 3.0}, id="labels_in_any_order"),
        pytest.param('up{a="x}y{z # \\"q\\" \\\\ \\n"} 3\n', {(("a", 'x}y{z # "q" \\ \n'),): 3.0}, id="quoted_braces"),
        pytest.param('up 4 # {trace_id="abc"} 0.5 1.7\n', {(): 4.0}, id="exemplar"),
        pytest.param('up{a="b"} 4 # {trace_id="abc"} 0.5\n', {(("a", "b"),): 4.0}, id="exemplar_and_labels"),
        pytest.param("up 1\nup 2\n", {(): 2.0}, id="the_last_of_two"),
        pytest.param("upper 1\nup_total 1\nup 7\n# TYPE up gauge\n", {(): 7.0}, id="names_that_begin_alike"),
        pytest.param('up 1\nup one\nup\nup{a="b} 2\n', {(): 1.0}, id="broken_lines"),
        pytest.param('up NaN\nup{a="1"} +Inf\nup{a="2"} 1\n', {(("a", "2"),): 1.0}, id="not_finite"),
        pytest.param('up 1e300\nup{a="1"} -1e19\nup{a="2"} 1\n', {(("a", "2"),): 1.0}, id="beyond_any_count"),
    ],
)
def test_a_line_is_read_as_the_format_has_it(text: str, expected: dict[object, float]) -> None:
    assert series(text) == expected


def test_what_is_not_finite_is_told_apart_from_what_is_absent() -> None:
    page = read(b"up NaN\n", WANTED)
    assert (page.series, page.not_finite, page.problem) == ({}, {"up"}, None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        pytest.param(b"", "the page is empty", id="empty"),
        pytest.param(b" \r\n\n", "the page is empty", id="blank"),
        pytest.param(b"<!doctype html><html><body>Not here</body></html>", "the page is HTML and not Prometheus text"),
        pytest.param(b'{"detail":"Not Found"}', "the page is JSON and not Prometheus text"),
        pytest.param(b"[1, 2]", "the page is JSON and not Prometheus text"),
        pytest.param(b"\x89PNG\r\n\x1a\n\0\0\0", "the page is binary data and not Prometheus text"),
        pytest.param(b"hello there, this is text\nand more of it\n", "the page is other text and not Prometheus text"),
        pytest.param(b"# TYPE up gauge\n# EOF\n", "the page holds comments and not one sample"),
        pytest.param(b"x" * (MOST_BYTES + 1), "the page is larger than 16 MiB", id="too_large"),
        pytest.param(b"\n" * (MOST_LINES + 1), f"the page has more than {MOST_LINES} lines", id="lines"),
        pytest.param(
            b"".join(b'up{r="%d"} 1\n' % i for i in range(MOST_SERIES + 1)),
            f"the page has more than {MOST_SERIES} series of the engine's names",
            id="series",
        ),
    ],
)
def test_a_page_that_is_none_says_what_it_is(text: bytes, problem: str) -> None:
    page = read(text, WANTED)
    assert page.problem == problem


def test_a_metrics_page_without_a_wanted_name_shows_some_of_its_names() -> None:
    page = read(b'# c\na 1\nb{x="y"} 2\na 3\nc 4\nd 5\n', WANTED)
    assert (page.problem, page.others) == (None, ["a", "b", "c"])


def test_a_number_that_may_be_cut_in_half_is_left_out() -> None:
    assert read(b"up 1\nlag_sum 17959", WANTED, whole=False).series == {"up": {(): 1.0}}
    assert read(b"up 1\nlag_sum 17959", WANTED, whole=True).series["lag_sum"] == {(): 17959.0}


@given(st.binary(max_size=400))
def test_no_bytes_raise(data: bytes) -> None:
    for text in (data, b"up" + data, b'up{a="' + data + b'"} 1\n'):
        page = read(text, WANTED)
        assert page.problem is None or page.problem[0].islower()


def test_a_label_without_an_end_costs_no_more_than_its_length() -> None:
    # A pattern that goes back would take minutes for this line.
    assert series('up{a="' + 'x\\"' * 200_000) == {}
    assert series("up{" + "a" * 1_000_000) == {}


def test_any_order_of_lines_gives_the_same_page() -> None:
    lines = [f'up{{i="{i}"}} {i}' for i in range(50)] + ["lag_sum 1", "lag_count 2", "other 3"]
    shuffled = random.Random(1).sample(lines, len(lines))
    assert read("\n".join(shuffled).encode(), WANTED).series == read("\n".join(lines).encode(), WANTED).series
