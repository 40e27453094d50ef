"""OTLP at the admin port: what an exporter sends becomes samples; too much, or no OTLP, is refused and counted."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import orjson
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from tapproxy.core.sample import Sample
from tapproxy.evidence import spans
from tapproxy.exporter import Exporter, admin_app
from tapproxy.exporter.traces import MOST_BODY_BYTES, MOST_INFLATED_BYTES, SPANS_AT_ONCE, SPANS_PER_S, TraceDesk
from tests.evidence.otlp import captured, json_text, protobuf, span

PROTOBUF = {"content-type": "application/x-protobuf"}
GZIP = {**PROTOBUF, "content-encoding": "gzip"}


class Admin:
    """An admin port with a desk for traces, and what the desk handed on."""

    def __init__(self, token: str | None = None, **desk: Any) -> None:
        self.samples: list[Sample] = []
        self.desk = TraceDesk(_read, _answer, self.samples.extend, **desk)
        self.exporter = Exporter()
        status = lambda: {"spans": self.desk.status()}  # noqa: E731 - as the supervisor's
        self.app = admin_app(self.exporter, status, lambda: True, token, traces=self.desk)

    def post(self, body: bytes | AsyncIterator[bytes], headers: dict[str, str]) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.post("/v1/traces", content=body, headers=headers)

        return asyncio.run(ask())

    def metrics(self) -> str:
        return self.exporter.render({"spans": self.desk.status()})[0].decode()


def _read(body: bytes, json: bool, most: int) -> spans.Spans:
    return spans.read(body, spans.Reading(1, 2), json=json, most=most)


def _answer(rejected: int, why: str, json: bool) -> bytes:
    return spans.answer(rejected, why, json=json)


@pytest.fixture
def admin() -> Iterator[Admin]:
    made = Admin()
    yield made
    made.desk.close()


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        pytest.param(protobuf(captured()), PROTOBUF, id="protobuf"),
        pytest.param(gzip.compress(protobuf(captured())), GZIP, id="gzip"),
        pytest.param(
            gzip.compress(protobuf(captured()[:3])) + gzip.compress(protobuf(captured()[3:])), GZIP, id="two_members"
        ),
        pytest.param(json_text(captured()), {"content-type": "application/json; charset=utf-8"}, id="json"),
    ],
)
def test_what_an_exporter_sends_becomes_samples(admin: Admin, body: bytes, headers: dict[str, str]) -> None:
    answered = admin.post(body, headers)
    assert answered.status_code == 200
    assert answered.headers["content-type"] == headers["content-type"].partition(";")[0]
    assert answered.content in (b"", b"{}")
    assert [sample.facts["request_id"] for sample in admin.samples] == [
        one["attrs"]["gen_ai.request.id"] for one in captured()
    ]
    assert admin.desk.status() == {"bodies": 1, "taken": 7, "foreign": 0, "over_rate": 0, "refused": {}}


def test_an_empty_request_is_answered_as_one(admin: Admin) -> None:
    assert admin.post(b"", PROTOBUF).status_code == 200
    assert admin.samples == []


@pytest.mark.parametrize(
    ("body", "headers", "status", "why"),
    [
        pytest.param(b"{}", {"content-type": "text/plain"}, 415, "content-type is 'text/plain': expected", id="type"),
        pytest.param(b"", {"content-type": ""}, 415, "content-type is ''", id="no_type"),
        pytest.param(b"", {**PROTOBUF, "content-encoding": "zstd"}, 415, "expected gzip or none", id="coding"),
        pytest.param(b"\xff" * 9, PROTOBUF, 400, "the body is no OTLP trace request", id="no_protobuf"),
        pytest.param(b"not packed", GZIP, 400, "the body is no gzip", id="no_gzip"),
        pytest.param(gzip.compress(b"\n" * 999)[:-9], GZIP, 400, "cut short", id="cut_gzip"),
        pytest.param(gzip.compress(b"") * 17, GZIP, 400, "more than 16 members", id="members"),
        pytest.param(b"a" * (MOST_BODY_BYTES + 1), PROTOBUF, 413, "longer than 4 MiB: let", id="too_long"),
        pytest.param(
            gzip.compress(bytes(MOST_INFLATED_BYTES + 1)), GZIP, 413, "longer than 16 MiB unpacked", id="inflated"
        ),
        pytest.param(
            gzip.compress(b" " * (MOST_BODY_BYTES + 1)),
            {"content-type": "application/json", "content-encoding": "gzip"},
            413,
            "longer than 4 MiB for JSON",
            id="long_json",
        ),
        pytest.param(
            gzip.compress(b"\x0a\x00" * (7 << 20), 1), GZIP, 400, "too many fields", id="nothing_but_messages"
        ),
    ],
)
def test_what_cannot_be_taken_is_refused_in_one_sentence(
    admin: Admin, body: bytes, headers: dict[str, str], status: int, why: str
) -> None:
    answered = admin.post(body, headers)
    assert answered.status_code == status
    assert why in answered.text
    assert answered.text.count("\n") == 1
    assert admin.samples == []
    assert sum(admin.desk.counts.refused.values()) == 1


def test_a_body_without_a_length_is_bounded_as_well(admin: Admin) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield bytes(64 << 10)

    assert admin.post(endless(), PROTOBUF).status_code == 413


def test_a_bomb_is_not_unpacked(admin: Admin) -> None:
    """A quarter of a gibibyte of zeros, packed to a thousandth: no more than the limit is ever made of it."""
    packer = zlib.compressobj(6, wbits=31)
    zeros = bytes(1 << 20)
    bomb = b"".join(packer.compress(zeros) for _ in range(256)) + packer.flush()
    assert len(bomb) < MOST_BODY_BYTES
    tracemalloc.start()
    try:
        assert admin.post(bomb, GZIP).status_code == 413
        assert tracemalloc.get_traced_memory()[1] < 3 * MOST_INFLATED_BYTES
    finally:
        tracemalloc.stop()


def test_spans_of_other_services_are_counted_and_shown(admin: Admin) -> None:
    admin.post(protobuf([*captured(), span({"http.route": "/"})]), PROTOBUF)
    page = admin.metrics()
    assert 'tapproxy_spans_total{what="taken"} 7.0' in page
    assert 'tapproxy_spans_total{what="foreign"} 1.0' in page
    assert 'tapproxy_spans_total{what="over_rate"} 0.0' in page


def test_a_flood_is_taken_up_to_a_rate_and_the_rest_is_counted_and_said() -> None:
    """Eight thousand a second for five seconds: what may come at once, two thousand a second, and no more."""
    now_s = 100.0
    admin = Admin(now=lambda: now_s)
    body = protobuf([span({"gen_ai.latency.e2e": 0.5}, span_id=f"{number:016x}") for number in range(1000)])
    answers = []
    for _ in range(40):
        answers.append(admin.post(body, PROTOBUF))
        now_s += 0.125
    admin.desk.close()
    taken = SPANS_AT_ONCE + 39 * SPANS_PER_S // 8
    assert len(admin.samples) == taken
    assert admin.desk.counts.over_rate == 40_000 - taken
    assert all(answered.status_code == 200 for answered in answers)
    told = ExportTraceServiceResponse.FromString(answers[-1].content).partial_success
    assert (told.rejected_spans, told.error_message) == (750, "more than 2000 spans a second are not kept")
    assert f'tapproxy_spans_total{{what="over_rate"}} {40_000 - taken}.0' in admin.metrics()


def test_reading_spans_takes_no_more_than_its_share_of_the_cpu() -> None:
    admin = Admin(cpu_at_once_s=0.0005)
    body = gzip.compress(protobuf([span({"a": "b" * 50})] * 5000))
    assert admin.post(body, GZIP).status_code == 200
    refused = admin.post(body, GZIP)
    admin.desk.close()
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "more than its share of the CPU" in refused.text
    assert admin.desk.status()["refused"] == {"busy": 1}
    assert 'tapproxy_traces_refused_total{why="busy"} 1.0' in admin.metrics()


def test_with_a_token_an_exporter_needs_it() -> None:
    admin = Admin(token="s3cret")
    assert admin.post(protobuf(captured()), PROTOBUF).status_code == 401
    assert admin.post(protobuf(captured()), {**PROTOBUF, "authorization": "Bearer s3cret"}).status_code == 200
    admin.desk.close()
    assert len(admin.samples) == 7


def test_only_post_is_answered(admin: Admin) -> None:
    async def ask() -> int:
        transport = httpx.ASGITransport(app=admin.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get("/v1/traces")).status_code

    assert asyncio.run(ask()) == 405


def test_the_counts_are_part_of_the_status(admin: Admin) -> None:
    async def ask() -> dict[str, Any]:
        transport = httpx.ASGITransport(app=admin.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            found: dict[str, Any] = orjson.loads((await client.get("/api/status")).content)["spans"]
            return found

    assert asyncio.run(ask())["taken"] == 0
