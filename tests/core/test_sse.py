"""The SSE reader against the WHATWG cases: any cut of the same bytes gives the same items at the same offsets."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapproxy.core.sse import SseItem, SseParser

CASES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent.parent / "data" / "sse" / "cases.json").read_text("utf-8")
)["cases"]


def as_received(case: dict[str, Any]) -> Iterator[bytes]:
    for chunk in case["chunks"]:
        if isinstance(chunk, str):
            yield base64.b64decode(chunk)
        else:
            for _ in range(chunk["times"]):
                yield base64.b64decode(chunk["b64"])


def in_pieces(body: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


def bytewise(body: bytes) -> Iterator[bytes]:
    # Single bytes where that is quick; else pieces of a length that shares no factor with anything in the cases.
    return in_pieces(body, 1 if len(body) <= 100_000 else 997)


def at_random(body: bytes, seed: int) -> Iterator[bytes]:
    dice = random.Random(seed)
    longest = max(8, len(body) // 200)
    start = 0
    while start < len(body):
        end = start + dice.randint(0, longest)
        yield body[start:end]
        start = end


def parse(pieces: Iterable[bytes], limit: int = 16 << 20) -> tuple[SseParser, list[SseItem]]:
    parser = SseParser(limit)
    return parser, [item for piece in pieces for item in parser.feed(piece)]


CUTS: dict[str, Callable[[dict[str, Any], bytes], Iterable[bytes]]] = {
    "as received": lambda case, _: as_received(case),
    "whole": lambda _, body: [body],
    "byte by byte": lambda _, body: bytewise(body),
    "random 1": lambda _, body: at_random(body, 1),
    "random 2": lambda _, body: at_random(body, 2),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_every_cut_of_a_case_parses_as_the_standard_says(case: dict[str, Any]) -> None:
    body = b"".join(as_received(case))
    expected = case["expected"]
    assert hashlib.sha256(body).hexdigest() == expected["sha256"]
    first: list[SseItem] | None = None
    for name, cut in CUTS.items():
        parser, items = parse(cut(case, body))
        if first is None:
            first = items
        assert items == first, name
        events = [item for item in items if not item.comment]
        assert [text(item.data) for item in items if item.comment] == expected["comments"], name
        assert len(events) == len(expected["events"]), name
        for event, want in zip(events, expected["events"], strict=True):
            assert (event.type, event.last_event_id) == (want["type"], want["last_event_id"]), name
            if "data" in want:
                assert text(event.data) == want["data"], name
            else:
                assert len(event.data) == want["data_len"], name
                assert hashlib.sha256(event.data).hexdigest() == want["data_sha256"], name
        assert parser.retry == expected["retry"], name
        assert parser.last_event_id == expected["last_event_id"], name
        assert parser.undispatched_tail == expected["undispatched_tail"], name
        assert parser.offset == len(body) == expected["bytes"], name


def text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def test_all_158_cases_are_here() -> None:
    assert len(CASES) == 158


@pytest.mark.parametrize(
    ("body", "offsets"),
    [
        (b"data: a\n\n", [9]),
        (b"data: a\r\r", [9]),
        # Past the CR of the blank line: the LF that may follow belongs to it, and may come a read later.
        (b"data: a\r\n\r\n", [10]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [10, 21]),
        (b"data: a\n\ndata: b\n\n", [9, 18]),
        (b"data:a\n\ndata:b\n\n", [8, 16]),
        (b"data: a\n\r\n", [9]),
        (b": c\n\ndata: a\n\n", [4, 14]),
        (b": c\r\ndata: a\n\n", [4, 14]),
        (b"\xef\xbb\xbfdata: a\n\n", [12]),
        (b"\n\n\ndata: a\n\n\n\ndata: b\n\n", [12, 23]),
        (b"event: e\nid: 1\ndata: a\n\n", [24]),
    ],
    ids=repr,
)
def test_an_item_ends_past_the_first_byte_of_its_line_end(body: bytes, offsets: list[int]) -> None:
    for pieces in ([body], bytewise(body)):
        assert [item.end_offset for item in parse(pieces)[1]] == offsets


def test_an_event_ended_by_a_crlf_cut_in_two_belongs_to_the_read_that_ended_it() -> None:
    parser = SseParser()
    assert [item.end_offset for item in parser.feed(b"data: a\r\n\r")] == [10]
    assert parser.feed(b"\n") == []
    assert parser.feed(b"\ndata: b\n\n") == [SseItem(21, "message", b"b", False, False, "")]


def test_only_one_lf_belongs_to_a_cr() -> None:
    items = parse([b"data: a\r", b"\n", b"\n"])[1]
    assert [(item.data, item.end_offset) for item in items] == [(b"a", 10)]


def test_one_space_is_taken_off_and_no_more_on_the_quick_way_too() -> None:
    assert [item.data for item in parse([b"data:  a\n\ndata: b\n\n"])[1]] == [b" a", b"b"]
    assert [item.data for item in parse([b"data:a\n\ndata: b\n\ndata:  c\n\n"])[1]] == [b"a", b"b", b" c"]


SMALL = 64


@pytest.mark.parametrize(
    ("body", "want"),
    [
        (b"data: " + b"x" * 58 + b"\n\n", [(b"x" * 58, False, False)]),
        (b"data: " + b"x" * 59 + b"\n\n", [(b"", False, True)]),
        (b"data: a\n\ndata: " + b"x" * 999 + b"\n\ndata: b\n\n", [(b"a", 0, 0), (b"", 0, 1), (b"b", 0, 0)]),
        (b"data: 12345\n" * 20 + b"\ndata: b\n\n", [(b"", 0, 1), (b"b", 0, 0)]),
        (b"data: 123456789\n" * 6 + b"data: 1234\n\n", [(b"\n".join([b"123456789"] * 6 + [b"1234"]), 0, 0)]),
        (b"data: 123456789\n" * 6 + b"data: 12345\n\n", [(b"", 0, 1)]),
        (b":" + b"c" * 64 + b"\ndata: b\n\n", [(b"", 1, 1), (b"b", 0, 0)]),
        (b"event: " + b"e" * 64 + b"\ndata: b\n\n", [(b"b", 0, 0)]),
        (b"database" * 9 + b"\ndata: b\n\n", [(b"b", 0, 0)]),
        (b"data" * 99 + b"\n\n", []),
    ],
    ids=[
        "as long as may be",
        "a byte too long",
        "one among others",
        "many lines",
        "lines to the limit",
        "lines past the limit",
        "comment",
        "type is dropped",
        "another field",
        "no data",
    ],
)
def test_an_event_over_the_limit_keeps_its_boundaries(body: bytes, want: list[tuple[bytes, bool, bool]]) -> None:
    whole = parse([body], SMALL)[1]
    assert [(item.data, item.comment, item.oversize) for item in whole] == want
    assert all(item.type == "message" for item in whole)
    for pieces in (bytewise(body), in_pieces(body, 7), at_random(body, 3)):
        assert parse(pieces, SMALL)[1] == whole


def test_an_endless_event_is_held_in_bounded_memory() -> None:
    parser = SseParser(64 * 1024)
    block = b"x" * 8186 + b"\ndata:"
    parser.feed(b"data: a")
    tracemalloc.start()
    try:
        for _ in range(1000):
            parser.feed(block)
            parser.feed(b"y" * 8192)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 512 * 1024
    assert [(item.oversize, item.data) for item in parser.feed(b"\n\ndata: b\n\n")] == [(True, b""), (False, b"b")]


@pytest.mark.parametrize("line_end", [b"\n", b"\r", b"\r\n"], ids=["LF", "CR", "CRLF"])
@pytest.mark.parametrize("piece_bytes", [97, 4096, 1 << 24], ids=["small reads", "large reads", "whole"])
def test_a_stream_of_many_megabytes_takes_linear_time(line_end: bytes, piece_bytes: int) -> None:
    def seconds(megabytes: int) -> float:
        body = b"data: " + b"x" * (1 << 20) * megabytes + line_end + b"data: y" + line_end * 2
        body += (b": c" + line_end) * 1000 * megabytes
        started = time.process_time()
        items = parse(in_pieces(body, piece_bytes), 64 << 20)[1]
        spent = time.process_time() - started
        assert len(items) == 1 + 1000 * megabytes
        assert len(items[0].data) == (1 << 20) * megabytes + 2
        return spent

    # Sixteen times the bytes: quadratic would be 256 times the time. Caches and the machine's noise get a factor of 6.
    # Of each the better of two: a neighbour that takes the processor away for a while is no reader of ours.
    long, short = (min(seconds(megabytes) for _ in range(2)) for megabytes in (16, 1))
    assert long < 16 * 6 * max(short, 0.002)


ALPHABET = [
    b"data",
    b":",
    b" ",
    b"\n",
    b"\r",
    b"\r\n",
    b"\n\n",
    b"a",
    b"event: e",
    b"id: 7",
    b"data: {}\n\n",
    b"\xef\xbb\xbf",
]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(ALPHABET), max_size=24), st.lists(st.integers(0, 40), max_size=8), st.integers(16, 40))
def test_no_cut_changes_what_is_read(parts: list[bytes], cuts: list[int], limit: int) -> None:
    body = b"".join(parts)
    edges = [0, *sorted(cut for cut in cuts if cut < len(body)), len(body)]
    pieces = [body[a:b] for a, b in pairwise(edges)]
    whole, expected = parse([body], limit)
    single, by_byte = parse(bytewise(body), limit)
    some, cut_up = parse(pieces, limit)
    assert by_byte == expected
    assert cut_up == expected
    for parser in (single, some):
        assert parser.undispatched_tail == whole.undispatched_tail
        assert (parser.retry, parser.last_event_id, parser.offset) == (whole.retry, whole.last_event_id, whole.offset)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_without_trouble(body: bytes) -> None:
    assert parse([body])[1] == parse(bytewise(body))[1]
