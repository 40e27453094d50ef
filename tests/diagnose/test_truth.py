"""Spans find their records, or nobody's; what they add is filled in, and what the response told stays."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tapproxy.core.record import EnginePart, Record, UsagePart
from tapproxy.core.sample import Sample, SampleKind
from tapproxy.diagnose.truth import enrich
from tests.diagnose.make import MS, even, record

TRACE = "0af7651916cd43dd8448eb211c80319c"


def span(
    request_id: str | None = None,
    *,
    trace_id: str | None = None,
    number: int = 0,
    queue: float | None = 30,
    prefill: float | None = 50,
    decode: float | None = 780,
    ttft: float | None = 100,
    e2e: float | None = 880,
    tokens: tuple[int, int] | None = (64, 40),
) -> Sample:
    """Times in ms."""
    times = {"queue_ns": queue, "prefill_ns": prefill, "decode_ns": decode, "ttft_ns": ttft, "e2e_ns": e2e}
    values: dict[str, float] = {name: round(ms * MS) for name, ms in times.items() if ms is not None}
    if tokens is not None:
        values["usage_prompt_tokens"], values["usage_completion_tokens"] = tokens
    facts = {"request_id": request_id, "trace_id": trace_id, "span_id": f"{number:016x}"}
    return Sample(SampleKind.SPAN, "otlp", 0, 0, values=values, facts={k: v for k, v in facts.items() if v is not None})


def seen(number: int = 0, tap: str = "inner", **given: object) -> Record:
    made = record(tap, even(), number=number)
    return replace(made, **given)  # type: ignore[arg-type]  # any field of a record


def test_a_span_is_joined_by_the_response_id_and_fills_the_stages() -> None:
    found = enrich([seen()], [span("chatcmpl-0")])
    assert (found.joined, found.ambiguous, found.unmatched, found.by) == (1, 0, 0, {"response_id": 1})
    engine = found.records[0].engine
    assert engine.source == "span"
    assert (engine.queue_ns, engine.prefill_ns, engine.decode_ns) == (30 * MS, 50 * MS, 780 * MS)
    # 100 ms from arrival to the first token: 30 queued, 50 in prefill, and 20 before the queue.
    assert engine.frontend_ns == 20 * MS


def test_the_records_given_are_left_as_they_were() -> None:
    given = seen()
    found = enrich([given], [span("chatcmpl-0")])
    assert given.engine == EnginePart()
    assert found.records[0] is not given


def test_a_record_without_a_span_is_the_same_object() -> None:
    given = [seen(0), seen(1)]
    found = enrich(given, [span("chatcmpl-0")])
    assert found.records[1] is given[1]
    assert found.filled == 1


@pytest.mark.parametrize(
    ("request_id", "given", "by"),
    [
        pytest.param("chatcmpl-0", {}, "response_id", id="chat"),
        pytest.param("cmpl-9-0", {"response_id": "cmpl-9"}, "response_id_stem", id="completions_first_prompt"),
        pytest.param("cmpl-9-0-1a2b3c4d", {"response_id": "cmpl-9"}, "response_id_stem", id="unique_within_the_engine"),
        pytest.param("0_chatcmpl-0", {}, "response_id_stem", id="the_only_answer_of_n_that_was_told"),
        pytest.param("chatcmpl-my-id", {"request_id": "my-id", "response_id": None}, "request_id", id="x_request_id"),
        pytest.param("my-id", {"request_id": "my-id", "response_id": None}, "request_id", id="taken_as_it_was"),
        pytest.param(None, {"trace_id": TRACE}, "trace_id", id="trace"),
    ],
)
def test_ids_of_spans_are_read_as_engines_make_them(request_id: str | None, given: dict[str, Any], by: str) -> None:
    found = enrich([seen(**given), seen(1)], [span(request_id, trace_id=TRACE)])
    assert found.by == {by: 1}
    assert found.records[0].engine.source == "span"
    assert found.records[1].engine.source is None


def test_spans_that_nobody_knows_are_counted() -> None:
    found = enrich([seen()], [span("chatcmpl-elsewhere"), span(None, trace_id=TRACE, number=1)])
    assert (found.joined, found.ambiguous, found.unmatched) == (0, 0, 2)


def test_two_records_with_one_trace_and_nothing_to_tell_them_apart_are_left_out() -> None:
    """An agent's calls share a trace: which of the two the span is of, nobody can say."""
    given = [seen(0, trace_id=TRACE, response_id=None), seen(1, trace_id=TRACE, response_id=None)]
    found = enrich(given, [span(None, trace_id=TRACE), span(None, trace_id=TRACE, number=1)])
    assert (found.joined, found.ambiguous, found.unmatched) == (0, 2, 0)
    assert all(each.engine.source is None for each in found.records)
    assert found.warnings() == ["2 spans were left out: several requests or spans share their ids"]


def test_in_one_trace_token_counts_tell_the_requests_apart() -> None:
    short = UsagePart(prompt_tokens=64, completion_tokens=7)
    given = [seen(0, trace_id=TRACE, response_id=None), seen(1, trace_id=TRACE, response_id=None, usage=short)]
    spans = [span(None, trace_id=TRACE, tokens=(64, 7), queue=1), span(None, trace_id=TRACE, number=1, queue=2)]
    found = enrich(given, spans)
    assert (found.joined, found.ambiguous) == (2, 0)
    assert [each.engine.queue_ns for each in found.records] == [2 * MS, MS]


def test_a_rest_of_a_trace_is_not_joined_because_it_is_the_rest() -> None:
    """One of three calls left no record and another no span: the two that remain are not one request."""
    given = [seen(0, trace_id=TRACE), seen(1, trace_id=TRACE)]
    found = enrich(given, [span("chatcmpl-0", trace_id=TRACE), span("chatcmpl-2", trace_id=TRACE, number=1)])
    assert found.joined == 1
    assert found.records[1].engine.source is None


def test_one_trace_id_joins_a_request_that_a_gateway_renamed_only_with_equal_counts() -> None:
    renamed = seen(response_id="chatcmpl-of-the-gateway", request_id=None, trace_id=TRACE)
    assert enrich([renamed], [span("chatcmpl-real", trace_id=TRACE)]).by == {"trace_id": 1}
    assert enrich([renamed], [span("chatcmpl-real", trace_id=TRACE, tokens=None)]).joined == 0
    assert enrich([renamed], [span("chatcmpl-real", trace_id=TRACE, tokens=(64, 41))]).joined == 0


def test_a_span_longer_than_its_exchange_is_of_another() -> None:
    given = seen(response_id=None, usage=UsagePart(), trace_id=TRACE)
    assert enrich([given], [span(None, trace_id=TRACE, e2e=880)]).joined == 1
    assert enrich([given], [span(None, trace_id=TRACE, e2e=5000)]).joined == 0


def test_several_answers_to_one_request_are_ambiguous() -> None:
    given = seen(usage=UsagePart(prompt_tokens=64))
    found = enrich([given], [span("0_chatcmpl-0"), span("1_chatcmpl-0", number=1)])
    assert (found.joined, found.ambiguous) == (0, 2)


def test_a_span_sent_twice_counts_once() -> None:
    twice = [span("chatcmpl-0", trace_id=TRACE), span("chatcmpl-0", trace_id=TRACE)]
    found = enrich([seen()], twice)
    assert (found.joined, found.repeated, found.ambiguous) == (1, 1, 0)


def test_both_taps_of_a_request_get_the_same_span() -> None:
    found = enrich([seen(tap="outer"), seen(tap="inner")], [span("chatcmpl-0")])
    assert found.joined == 1
    assert found.filled == 2
    assert [each.engine.queue_ns for each in found.records] == [30 * MS, 30 * MS]


def test_what_the_response_told_is_kept_and_the_rest_is_filled() -> None:
    told = EnginePart(source="response.metrics", queue_ns=31 * MS, prefill_ns=50 * MS, decode_ns=780 * MS)
    found = enrich([seen(engine=told)], [span("chatcmpl-0")])
    engine = found.records[0].engine
    assert engine.source == "response.metrics+span"
    assert (engine.queue_ns, engine.frontend_ns) == (31 * MS, 20 * MS)
    assert found.disagreeing == 0
    assert found.warnings() == []


def test_a_response_and_a_span_that_differ_are_counted_and_said() -> None:
    told = EnginePart(source="response.metrics", queue_ns=300 * MS)
    found = enrich([seen(engine=told)], [span("chatcmpl-0")])
    assert found.disagreeing == 1
    assert found.records[0].engine.queue_ns == 300 * MS
    assert "differ by more than 2 ms and 5%" in found.warnings()[0]


@pytest.mark.parametrize(
    ("given", "frontend"),
    [
        pytest.param({"ttft": 100, "queue": 30, "prefill": 50}, 20 * MS, id="told"),
        pytest.param({"ttft": 79.5, "queue": 30, "prefill": 50}, 0, id="rounding_of_two_clocks"),
        pytest.param({"ttft": 60, "queue": 30, "prefill": 50}, None, id="less_than_its_parts"),
        pytest.param({"ttft": 100, "queue": None, "prefill": 50}, None, id="no_queue_told"),
        pytest.param({"ttft": 100, "queue": 30, "prefill": None}, None, id="no_prefill_told"),
        pytest.param({"ttft": None, "queue": 30, "prefill": 50}, None, id="no_first_token_told"),
    ],
)
def test_the_frontend_is_the_first_token_less_queue_and_prefill(given: dict[str, Any], frontend: int | None) -> None:
    found = enrich([seen()], [span("chatcmpl-0", **given)])
    assert found.records[0].engine.frontend_ns == frontend


def test_token_counts_that_the_response_left_open_are_filled() -> None:
    found = enrich([seen(usage=UsagePart())], [span("chatcmpl-0")])
    assert found.records[0].usage == UsagePart(prompt_tokens=64, completion_tokens=40)


def test_a_span_that_tells_nothing_new_changes_nothing() -> None:
    given = seen(engine=EnginePart("response.metrics", 1, 2, 3, 4))
    found = enrich([given], [span("chatcmpl-0", queue=None, prefill=None, decode=None, ttft=None)])
    assert found.records[0] is given
    assert (found.joined, found.filled) == (1, 0)


def test_four_thousand_requests_are_joined_each_to_its_own() -> None:
    """Some by response id, some by request id, some by trace; one prompt, one length, in any order."""
    given, spans = [], []
    for number in range(4000):
        made = seen(number, trace_id=f"{number:032x}")
        ids = (f"chatcmpl-{number}", f"chatcmpl-req-{number}", None)
        if number % 3:
            made = replace(made, response_id=None)
        spans.append(span(ids[number % 3], trace_id=f"{number:032x}", number=number, queue=number / 1000))
        given.append(made)
    random.Random(1).shuffle(spans)
    found = enrich(given, spans)
    assert (found.joined, found.ambiguous, found.unmatched) == (4000, 0, 0)
    assert found.by == {"response_id": 1334, "request_id": 1333, "trace_id": 1333}
    assert [each.engine.queue_ns for each in found.records] == [number * 1000 for number in range(4000)]
