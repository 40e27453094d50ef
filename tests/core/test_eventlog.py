"""Events meet the stamps of the reads that brought them. Plain numbers: read 1 at 100, read 2 at 200."""

from __future__ import annotations

import json
import random
import sys
import tracemalloc

import pytest

from tapproxy.core.eventlog import EventLog
from tapproxy.core.record import Events, UsagePart
from tapproxy.core.sse import SseParser
from tests import captures


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode() + b"\n\n"


ROLE = b'data: {"id":"c","model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"


def log(*reads: bytes, sse: bool = True) -> EventLog:
    """Read i arrives at 100·i, is read 1 later and sent 2 later."""
    events = EventLog(sse=sse)
    for number, body in enumerate(reads, 1):
        events.add_read(body, 100 * number, 100 * number + 1, 100 * number + 2)
    return events


def test_every_event_has_the_stamps_of_its_read() -> None:
    events = log(ROLE, event("a"), event("b") + USAGE, DONE).finish()
    ends = [len(ROLE), len(ROLE + event("a"))]
    ends += [ends[1] + len(event("b")), ends[1] + len(event("b") + USAGE)]
    assert events == Events(
        kind=["role", "token", "token", "usage", "done"],
        end_offset=[*ends, ends[3] + len(DONE)],
        arrived=[100, 200, 300, 300, 400],
        read_at=[101, 201, 301, 301, 401],
        sent=[102, 202, 302, 302, 402],
        read=[0, 1, 2, 2, 3],
        tokens=[0, 1, 1, 0, 0],
    )


def test_an_event_cut_in_two_belongs_to_the_read_of_its_last_byte() -> None:
    whole = event("a")
    assert log(whole[:20], whole[20:]).finish().arrived == [200]
    assert log(whole[:-1], whole[-1:] + event("b")).finish().arrived == [200, 200]


def test_a_crlf_cut_in_two_dates_the_event_by_its_cr() -> None:
    whole = event("a").replace(b"\n", b"\r\n")
    assert log(whole[:-1], whole[-1:] + whole).finish().arrived == [100, 200]
    assert log(whole[:-2], whole[-2:]).finish().arrived == [200]


def test_reads_without_body_bytes_take_an_index_and_no_event() -> None:
    events = log(ROLE, b"", event("a")).finish()
    assert (events.read, events.arrived) == ([0, 2], [100, 300])


def test_comments_are_events_with_a_stamp() -> None:
    events = log(b": keep-alive\n\n", ROLE).finish()
    assert (events.kind, events.arrived) == (["comment", "role"], [100, 200])


def test_sent_may_come_later_or_never() -> None:
    events = EventLog()
    for number in range(3):
        assert events.add_read(event("a"), 10 * number, 10 * number, None) == number
    events.set_sent(0, 7)
    events.set_sent(2, 27)
    events.set_sent(3, 99)
    events.set_sent(-1, 99)
    assert events.finish().sent == [7, None, 27]


def test_times_are_made_relative_at_the_end() -> None:
    events = EventLog()
    events.add_read(event("a"), 1_000_100, 1_000_101, 1_000_102)
    events.add_read(event("b"), 1_000_200, 1_000_201, None)
    out = events.finish(1_000_000)
    assert (out.arrived, out.read_at, out.sent) == ([100, 200], [101, 201], [102, None])


def test_finishing_twice_gives_the_same() -> None:
    events = log(ROLE, event("a"), USAGE)
    assert events.finish() == events.finish()
    assert events.deltas.usage == UsagePart(5, 2)


def test_adding_a_read_does_not_parse_until_there_is_enough() -> None:
    events = log(ROLE)
    assert events.deltas.response_id is None
    events.add_read(event("a" * 8192), 0, 0, 0)
    assert events.deltas.response_id == "c"


def test_bytes_and_reads_are_counted() -> None:
    events = log(ROLE, event("a"))
    assert (events.body_bytes, events.reads) == (len(ROLE + event("a")), 2)


@pytest.mark.parametrize(
    "name", ["vllm-0.32/chat_stream_n2", "vllm-0.32-spec-ngram/chat_stream", "sglang-0.5.23/responses_stream"]
)
@pytest.mark.parametrize("seed", range(4))
def test_any_cut_gives_the_same_events_and_each_the_right_read(name: str, seed: int) -> None:
    body = captures.load(name).body
    whole = log(body).finish()
    dice = random.Random(seed)
    ends, position = [], 0
    events = EventLog()
    while position < len(body):
        size = dice.choice((0, 1, 2, 50, 400, 9000))
        ends.append(min(position + size, len(body)))
        events.add_read(body[position : ends[-1]], len(ends), len(ends), len(ends))
        position = ends[-1]
    cut = events.finish()
    assert (cut.kind, cut.end_offset, cut.tokens) == (whole.kind, whole.end_offset, whole.tokens)
    # By the definition: the first read that reaches the event's end.
    assert cut.read == [next(i for i, end in enumerate(ends) if end >= offset) for offset in cut.end_offset]
    assert cut.arrived == [read + 1 for read in cut.read]


def test_the_offsets_are_those_of_the_parser() -> None:
    body = captures.load("vllm-0.32/chat_stream_usage").body
    assert log(body).finish().end_offset == [item.end_offset for item in SseParser().feed(body)]


# -- bodies that are no event stream

ANSWER = (
    b'{"id":"c","model":"m","choices":[{"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":2}}'
)


def test_a_json_answer_gives_its_numbers_and_no_events() -> None:
    events = log(ANSWER[:30], ANSWER[30:], sse=False)
    assert events.finish() == Events()
    assert events.deltas.usage == UsagePart(5, 2)
    assert (events.reads, events.body_bytes) == (2, len(ANSWER))
    events.set_sent(0, 1)


def test_a_json_answer_under_the_wrong_content_type_is_read_too() -> None:
    events = log(b"\n " + ANSWER)
    assert events.finish() == Events()
    assert events.deltas.usage == UsagePart(5, 2)
    assert events.deltas.response_id == "c"


def test_a_stream_is_a_stream_whatever_it_begins_with() -> None:
    events = log(b"{junk}\n\n" + event("a"))
    assert events.finish().kind == ["token"]
    assert events.deltas.unread == 0


def test_a_body_that_is_too_long_is_not_kept() -> None:
    events = EventLog(sse=False)
    tracemalloc.start()
    try:
        for number in range(400):
            events.add_read(b"[" * 65_536, number, number, number)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * 1024 * 1024
    assert events.finish() == Events()
    assert events.deltas.unread == 0
    assert events.body_bytes == 400 * 65_536


@pytest.mark.parametrize("body", [b"<html>", b"Not Found", b"\x89PNG", b""], ids=repr)
def test_a_body_that_is_no_json_is_nobody_s_unread_event(body: bytes) -> None:
    events = log(body, sse=False)
    assert events.finish() == Events()
    assert events.deltas.unread == 0


def test_an_answer_cut_short_is_counted_as_unread() -> None:
    events = log(ANSWER[:50], sse=False)
    assert events.finish() == Events()
    assert events.deltas.unread == 1


def test_an_empty_body_is_nothing() -> None:
    assert log().finish() == Events()
    assert log(b"").finish() == Events()
    assert log(sse=False).finish() == Events()


# -- memory


def test_an_event_that_came_alone_costs_at_most_56_bytes() -> None:
    count = 20_000
    body = event("some text")
    events = EventLog()
    events.add_read(body, 0, 0, 0)
    events.flush()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            events.add_read(body, number, number, number)
        events.flush()
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown / count <= 56
    assert len(events.finish().kind) == count + 1


def test_a_stream_that_waits_costs_little() -> None:
    events = log(ROLE)
    events.flush()
    tracemalloc.start()
    try:
        kept = [log(ROLE) for _ in range(100)]
        for one in kept:
            one.flush()
        each = tracemalloc.get_traced_memory()[0] / len(kept)
    finally:
        tracemalloc.stop()
    assert each < 6 * 1024
    assert sys.getsizeof(kept) > 0


def test_an_endless_stream_of_tiny_events_is_counted_and_not_kept() -> None:
    events = EventLog(max_events=100)
    events.add_read(b":\n" * 250, 1, 1, 1)
    events.add_read(USAGE, 2, 2, 2)
    out = events.finish()
    assert (len(out.kind), events.unlogged) == (100, 151)
    assert events.deltas.usage == UsagePart(5, 2)


def test_an_endless_stream_of_tiny_reads_is_counted_and_not_kept() -> None:
    events = EventLog(max_events=100)
    for number in range(300):
        events.add_read(event("a"), number, number, None)
    events.set_sent(250, 1)
    out = events.finish()
    assert (len(out.kind), events.unlogged, events.reads) == (100, 200, 300)
    assert out.read == list(range(100))
