"""Spans of a real vLLM become samples, in both encodings, and nothing that is not on the list gets through."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from tapproxy.core.sample import SIGNALS, Sample, SampleKind
from tapproxy.evidence.spans import COUNTS, LATENCIES, Reading, answer, read
from tests.evidence.otlp import captured, json_text, protobuf, span

AT = Reading(t_mono_ns=5, t_unix_ns=7, boot_id="boot-1", tap="inner")
LATENCY = {"gen_ai.latency.e2e": 0.5}


@pytest.mark.parametrize("json", [False, True], ids=["protobuf", "json"])
def test_a_real_vllm_span_tells_its_stages_in_nanoseconds(json: bool) -> None:
    body = json_text(captured()) if json else protobuf(captured())
    found = read(body, AT, json=json)
    assert found.foreign == 0
    assert len(found.samples) == 7
    first = found.samples[0]
    assert first.kind == SampleKind.SPAN
    assert first.values == {
        "ttft_ns": 27_006_865,
        "e2e_ns": 64_474_821,
        "queue_ns": 31_847,
        "usage_prompt_tokens": 17,
        "usage_completion_tokens": 18,
        "prefill_ns": 9_832_117,
        "decode_ns": 37_885_266,
        "inference_ns": 47_717_383,
        "start_unix_ns": 1_795_951_823_502_899_200,
    }
    assert first.facts == {
        "request_id": "chatcmpl-trace-me-1",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
        "span_id": "ed767fc736e24309",
        "engine": "vllm",
    }
    assert first.names["queue_ns"] == "gen_ai.latency.time_in_queue"
    assert (first.t_mono_ns, first.t_unix_ns, first.boot_id, first.tap) == (5, 7, "boot-1", "inner")


def test_a_sample_of_a_span_is_stored_and_read_back() -> None:
    (sample,) = read(protobuf(captured()[:1]), AT).samples
    assert Sample.from_dict(orjson.loads(orjson.dumps(sample.to_dict()))) == sample


def test_every_figure_has_a_name_in_the_vocabulary() -> None:
    for signal in (*LATENCIES.values(), *COUNTS.values()):
        assert SIGNALS[signal][0] is SampleKind.SPAN


@pytest.mark.parametrize("json", [False, True], ids=["protobuf", "json"])
def test_prompts_and_answers_in_a_span_are_never_kept(json: bool) -> None:
    secret = "my diary, dear engine"
    given = span(
        {**LATENCY, "gen_ai.prompt.0.content": secret, "gen_ai.completion.0.content": secret, "gen_ai.input": secret}
    )
    given["resource"] = {"service.name": secret}
    (sample,) = read(json_text([given]) if json else protobuf([given]), AT, json=json).samples
    assert secret.encode() not in orjson.dumps(sample.to_dict())


@pytest.mark.parametrize("json", [False, True], ids=["protobuf", "json"])
def test_spans_of_other_services_are_counted_and_dropped(json: bool) -> None:
    others = [span({"http.request.method": "POST"}), span({"gen_ai.request.id": "a", "gen_ai.usage.prompt_tokens": 3})]
    spans = [*others, span(LATENCY)]
    found = read(json_text(spans) if json else protobuf(spans), AT, json=json)
    assert (len(found.samples), found.foreign) == (1, 2)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(-0.001, id="negative"),
        pytest.param(math.nan, id="not_a_number"),
        pytest.param(math.inf, id="endless"),
        # One engine writes these names in nanoseconds: 0.2 s would be six years.
        pytest.param(200_000_000.0, id="another_unit"),
        pytest.param("0.5", id="text"),
        pytest.param(True, id="a_boolean"),
    ],
)
def test_a_figure_beyond_reason_is_absent(value: Any) -> None:
    (sample,) = read(protobuf([span({**LATENCY, "gen_ai.latency.time_in_queue": value})]), AT).samples
    assert sample.values.keys() == {"e2e_ns", "start_unix_ns"}


def test_the_first_engine_of_vllm_told_other_stages() -> None:
    given = {
        "gen_ai.latency.time_in_scheduler": 0.001,
        "gen_ai.latency.time_in_model_forward": 0.02,
        "gen_ai.latency.time_in_model_execute": 0.03,
        "gen_ai.response.model": "llama",
    }
    (sample,) = read(protobuf([span(given)]), AT).samples
    assert sample.values["scheduler_ns"] == 1_000_000
    assert sample.values["forward_ns"] == 20_000_000
    assert sample.values["execute_ns"] == 30_000_000
    assert sample.facts["model"] == "llama"


def test_words_are_cut_and_made_printable() -> None:
    given = {**LATENCY, "gen_ai.request.id": "x" * 10_000, "gen_ai.response.model": "a\x1b[31mb"}
    (sample,) = read(protobuf([span(given)]), AT).samples
    assert sample.facts["request_id"] == "x" * 256
    assert sample.facts["model"] == "a?[31mb"


@pytest.mark.parametrize(
    ("body", "json", "why"),
    [
        pytest.param(b"\xff\xff\xff\xff", False, "no OTLP trace request in protobuf: the body is no", id="no_protobuf"),
        pytest.param(b"{", True, "no JSON", id="no_json"),
        pytest.param(b"[]", True, "expected an object with resourceSpans", id="a_list"),
        pytest.param(b'{"resourceSpans": 3}', True, "expected an object with resourceSpans", id="a_number"),
        pytest.param(b"[" * 100_000, True, "no JSON", id="nested_too_deep"),
    ],
)
def test_what_is_no_trace_request_is_refused_in_one_sentence(body: bytes, json: bool, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read(body, AT, json=json)


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"resourceSpans": [1, {"scopeSpans": "x"}, {"scopeSpans": [{"scope": 4, "spans": {"a": 1}}]}]}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": [{"key": 3}, {"value": 1}, 5]}]}]}]}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"attributes": [{"key": "gen_ai.latency.e2e"}]}]}]}]}',
    ],
)
def test_json_of_any_shape_tells_nothing_and_hurts_nothing(body: bytes) -> None:
    assert read(body, AT, json=True).samples == []


def test_the_answer_is_empty_or_says_how_many_were_not_taken() -> None:
    assert answer(0, "") == b""
    assert answer(0, "", json=True) == b"{}"
    told = ExportTraceServiceResponse.FromString(answer(3, "too many"))
    assert (told.partial_success.rejected_spans, told.partial_success.error_message) == (3, "too many")
    assert orjson.loads(answer(3, "too many", json=True)) == {
        "partialSuccess": {"rejectedSpans": "3", "errorMessage": "too many"}
    }
