"""One exchange: whatever our own measuring does, what is known of it is recorded."""

from __future__ import annotations

import orjson
import pytest

from tapproxy.core import exchange as module
from tapproxy.core.body import RequestScan
from tapproxy.core.eventlog import EventLog
from tapproxy.core.exchange import Exchange, Vantage
from tapproxy.core.http1 import RequestHead, ResponseHead, parse_request, parse_response
from tapproxy.core.record import Ended, Events, Record
from tests.harness import interpreted

EVENT = b'data: {"id":"c","model":"m","choices":[{"index":0,"delta":{"content":"x"},"finish_reason":null}]}\n\n'


def begun() -> Exchange:
    out = Exchange(Vantage("tap", 0, None, b"key"), "0" * 26, 1000, 5)
    request = parse_request(b"POST /v1/chat/completions?key=1 HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n")
    response = parse_response(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nServer: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        request_method=b"POST",
    )
    assert isinstance(request, RequestHead)
    assert isinstance(response, ResponseHead)
    out.head_read(request, 1001)
    out.request_body(b'{"model":"asked","stream":true}', True)
    out.response_read(response, 1010)
    return out


def ended(exchange: Exchange) -> Record:
    exchange.end(Ended.COMPLETE, 1100)
    return exchange.finish()


def test_what_is_told_of_an_open_exchange_is_what_its_record_begins_with() -> None:
    exchange = begun()
    early = exchange.so_far()
    record = orjson.loads(orjson.dumps(ended(exchange)))
    assert {key: record[key] for key in early} == early
    assert (early["path"], early["model"], early["stream"], early["status"]) == (
        "/v1/chat/completions",
        "asked",
        True,
        200,
    )


def test_bytes_are_counted_also_when_nothing_measures_any_more() -> None:
    exchange = begun()
    exchange.response_body(EVENT, 1020, 1021, 1022)
    exchange.measuring_failed()
    exchange.response_body(EVENT, 1030, 1031, 1032)
    exchange.response_body(EVENT, 1040, 1041, None)
    exchange.waiting_sent(0, 3, 1050)
    record = ended(exchange)
    assert record.upstream.bytes == record.downstream.bytes == 3 * len(EVENT)
    assert (record.void, record.events, record.status) == ("measuring_failed", Events(), 200)


@interpreted
@pytest.mark.parametrize("broken", [(EventLog, "finish"), (module.spot, "rules"), (EventLog, "add_read")])
def test_a_fault_of_ours_voids_the_record_and_leaves_the_rest(
    broken: tuple[object, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_args: object) -> None:
        raise RuntimeError("a prompt")

    monkeypatch.setattr(*broken, fails)
    exchange = begun()
    exchange.response_body(EVENT, 1020, 1021, 1022)
    record = ended(exchange)
    assert (record.void, record.events, record.ended) == ("measuring_failed", Events(), "complete")
    assert (record.upstream.bytes, record.model, record.headers["server"]) == (len(EVENT), "asked", "x")
    assert b"a prompt" not in orjson.dumps(record)


@interpreted
def test_a_fault_in_reading_the_request_leaves_its_bytes_and_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: object) -> None:
        raise RuntimeError

    monkeypatch.setattr(RequestScan, "feed", fails)
    exchange = begun()
    record = ended(exchange)
    assert (record.model, record.stream, record.request.bytes) == (None, True, 31)
    assert (record.request.fingerprint or "").startswith("hmac-sha256:")


def test_events_beyond_what_is_kept_are_told() -> None:
    exchange = begun()
    exchange._log = EventLog(max_events=2)
    for number in range(5):
        exchange.response_body(EVENT, 1020 + number, 1021 + number, 1022 + number)
    record = ended(exchange)
    assert (len(record.events.kind), record.unlogged_events) == (2, 3)
