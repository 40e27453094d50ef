"""What engines tell of a request beside their events: TGI in header fields, Ollama in its last object."""

from __future__ import annotations

import orjson
import pytest

from tapproxy.core.exchange import Exchange, Vantage
from tapproxy.core.http1 import RequestHead, ResponseHead, parse_request, parse_response
from tapproxy.core.record import Ended, EnginePart, Record, UsagePart

MS = 1_000_000
# As TGI's router answers /generate: times in whole ms.
TGI = {
    "content-type": "application/json",
    "x-compute-type": "gpu+optimized",
    "x-compute-time": "1.532",
    "x-compute-characters": "42",
    "x-total-time": "1532",
    "x-validation-time": "3",
    "x-queue-time": "211",
    "x-inference-time": "1318",
    "x-time-per-token": "65",
    "x-prompt-tokens": "17",
    "x-generated-tokens": "20",
}
# As Ollama's documentation of /api/generate shows them.
OLLAMA_PIECE = {
    "model": "llama3.2",
    "created_at": "2023-08-04T08:52:19.385406455-07:00",
    "response": "The",
    "done": False,
}
OLLAMA_LAST = {
    "model": "llama3.2",
    "created_at": "2023-08-04T19:22:45.499127Z",
    "response": "",
    "done": True,
    "done_reason": "stop",
    "context": [1, 2, 3],
    "total_duration": 10706818083,
    "load_duration": 6338219291,
    "prompt_eval_count": 26,
    "prompt_eval_duration": 130079000,
    "eval_count": 259,
    "eval_duration": 4232710000,
}


def exchanged(fields: dict[str, str], body: bytes, *pieces: bytes, request: bytes = b"{}") -> Record:
    """The record of an answer with these header fields, that came in these pieces."""
    exchange = Exchange(Vantage("tap", 0, None, b"key"), "0" * 26, 1000, 5)
    asked = parse_request(b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n")
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    answered = parse_response(f"HTTP/1.1 200 OK\r\n{lines}\r\n".encode(), request_method=b"POST")
    assert isinstance(asked, RequestHead)
    assert isinstance(answered, ResponseHead)
    exchange.head_read(asked, 1001)
    exchange.request_body(request, True)
    exchange.response_read(answered, 1010)
    for piece in (body, *pieces):
        exchange.response_body(piece, 1020, 1021, 1022)
    exchange.response_ended(1030)
    exchange.end(Ended.COMPLETE, 1040)
    return exchange.finish()


def test_tgi_tells_validation_and_queue_in_its_header() -> None:
    record = exchanged(TGI, b'{"generated_text":"no"}')
    assert record.engine == EnginePart("response.headers", frontend_ns=3 * MS, queue_ns=211 * MS)
    assert record.usage == UsagePart(17, 20)


def test_of_a_single_token_the_inference_was_prefill() -> None:
    record = exchanged({**TGI, "x-generated-tokens": "1"}, b"{}")
    assert (record.engine.prefill_ns, record.engine.decode_ns) == (1318 * MS, 0)


def test_what_the_body_tells_is_kept() -> None:
    body = b'{"usage":{"prompt_tokens":5,"completion_tokens":6},"metrics":{"queue_time_ms":7}}'
    record = exchanged(TGI, body)
    assert record.engine == EnginePart("response.metrics", queue_ns=7 * MS)
    assert record.usage == UsagePart(5, 6)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"x-queue-time": ""}, id="empty"),
        pytest.param({"x-queue-time": "-1"}, id="negative"),
        pytest.param({"x-queue-time": "0.211s"}, id="another_unit"),
        pytest.param({"x-queue-time": "²"}, id="no_ascii_digit"),
        pytest.param({"x-queue-time": "9" * 13}, id="beyond_reason"),
        pytest.param({"x-validation-time": "sk-secret"}, id="a_word"),
    ],
)
def test_a_field_that_is_no_number_of_ms_tells_nothing(changed: dict[str, str]) -> None:
    record = exchanged({**TGI, **changed}, b"{}")
    assert record.engine == EnginePart()
    assert b"secret" not in orjson.dumps(record.to_dict())


def test_one_field_of_that_name_alone_is_somebody_elses() -> None:
    """Other servers write x-inference-time too, in seconds or as text."""
    assert exchanged({"x-inference-time": "2"}, b"{}").engine == EnginePart()


def test_the_timing_fields_are_not_stored_as_headers() -> None:
    assert exchanged(TGI, b"{}").headers.keys() == exchanged({}, b"{}").headers.keys()


@pytest.mark.parametrize("cut", [1, 7, 100, 4000])
def test_ollama_tells_its_times_in_the_last_object(cut: int) -> None:
    body = b"".join(orjson.dumps(part) + b"\n" for part in (*[OLLAMA_PIECE] * 40, OLLAMA_LAST))
    pieces = [body[at : at + cut] for at in range(0, len(body), cut)]
    record = exchanged({"content-type": "application/x-ndjson"}, b"", *pieces)
    assert record.engine == EnginePart("response.durations", prefill_ns=130_079_000, decode_ns=4_232_710_000)
    assert record.usage == UsagePart(26, 259)
    assert record.model == "llama3.2"
    assert record.unread_events == 0


def test_a_long_ollama_answer_is_not_kept_in_memory_and_yet_read() -> None:
    piece = orjson.dumps({**OLLAMA_PIECE, "response": "x" * 1000}) + b"\n"
    record = exchanged({"content-type": "application/x-ndjson"}, b"", *[piece * 8] * 300, orjson.dumps(OLLAMA_LAST))
    assert record.engine.source == "response.durations"
    assert record.usage.completion_tokens == 259


def test_an_ollama_answer_in_one_piece_is_read_too() -> None:
    record = exchanged({"content-type": "application/json; charset=utf-8"}, orjson.dumps(OLLAMA_LAST))
    assert record.engine.source == "response.durations"


def test_an_ollama_answer_that_was_cut_tells_no_times() -> None:
    body = orjson.dumps(OLLAMA_PIECE) + b"\n" + orjson.dumps(OLLAMA_LAST)[:-20]
    record = exchanged({"content-type": "application/x-ndjson"}, body)
    assert record.engine == EnginePart()
    assert record.unread_events == 1


def test_sglang_writes_zero_for_what_it_did_not_stamp() -> None:
    meta = {"id": "r", "forward_entry_time": 0.0, "prefill_finished_time": 50.5, "queue_time": 0.001}
    record = exchanged({"content-type": "application/json"}, orjson.dumps({"text": "a", "meta_info": meta}))
    assert record.engine == EnginePart("response.meta_info", queue_ns=MS)
