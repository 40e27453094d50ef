"""Sending a plan: order, fairness, what a record says, and the class of every failure."""

from __future__ import annotations

import asyncio
import gzip
import uuid
import zlib

import orjson
import pytest

from tapproxy.core import metrics
from tapproxy.load.plan import interleaved
from tapproxy.load.sender import Ask, Result, run
from tapproxy.wire.fetch import Fetched
from tests.load.answers import DONE, FakeClient, answer, chunk, finish, pieces, usage


async def _one(fetched: Fetched, ask: Ask | None = None) -> tuple[Result, FakeClient]:
    client = FakeClient(lambda _: fetched)
    (result,) = await run(interleaved(["nginx"], 1, seed=1, max_tokens=9), {"nginx": client}, ask=ask)
    return result, client


def one(fetched: Fetched, ask: Ask | None = None) -> Result:
    return asyncio.run(_one(fetched, ask))[0]


def test_the_record_counts_from_the_first_byte_written() -> None:
    record = one(answer(pieces(), start_ns=1000)).record
    assert (record.tap, record.t0_mono_ns, record.status, record.ended) == ("client:nginx", 1100, 200, "complete")
    part = record.upstream
    assert (part.wanted, part.write_start, part.write_end, part.head, part.first_byte) == (-100, 0, 10, 50, 100)
    assert (part.connect, part.tls, part.dns, part.reused, part.rtt_ns) == (40, 50, None, False, 7)
    assert record.events.kind == ["role", "token", "token", "token", "usage", "done"]
    # The role event comes at 200 of the start, 100 of the first byte written; then one every 50.
    assert record.events.arrived == [100, 150, 200, 250, 300, 350]
    assert record.events.read_at == [103, 153, 203, 253, 303, 353]
    assert set(record.events.sent) == {None}
    assert (record.response_id, record.usage.completion_tokens) == ("chatcmpl-1", 3)
    assert (metrics.ttft_ns(record), metrics.icl_ns(record)) == (150, [50, 50])


def test_what_is_asked_is_a_stream_with_usage_and_an_id_of_its_own() -> None:
    result, client = asyncio.run(_one(answer(pieces()), Ask(model="m", headers=((b"Authorization", b"Bearer k"),))))
    ((method, target, headers, body),) = client.asked
    assert (method, target) == ("POST", "/v1/chat/completions")
    asked = orjson.loads(body)
    assert asked["stream"] is True
    assert asked["stream_options"] == {"include_usage": True}
    assert (asked["model"], asked["max_tokens"], asked["messages"][0]["role"]) == ("m", 9, "user")
    # llama.cpp refuses ids that are no UUID of version 4.
    assert uuid.UUID(headers[b"X-Request-Id"].decode()).version == 4
    assert result.record.request_id == headers[b"X-Request-Id"].decode()
    assert headers[b"Accept-Encoding"] == b"gzip, deflate"
    assert headers[b"Authorization"] == b"Bearer k"


def test_neither_prompt_nor_key_is_kept_in_the_record() -> None:
    result = one(answer(pieces()), Ask(headers=((b"Authorization", b"Bearer secret-key"),)))
    text = orjson.dumps(result.record.to_dict()).decode()
    assert result.slot.prompt not in text
    assert "secret-key" not in text


@pytest.mark.parametrize(
    ("fetched", "failure", "ended"),
    [
        pytest.param(answer(pieces()), None, "complete", id="whole"),
        pytest.param(answer([chunk("a"), finish()]), None, "complete", id="whole, without [DONE]"),
        pytest.param(
            Fetched(0, error="connect: [Errno 111] refused"), "connect", "upstream_unreachable", id="cannot connect"
        ),
        pytest.param(answer([], status=502, headers=[]), "status", "complete", id="status"),
        pytest.param(answer([], status=301, headers=[]), "status", "complete", id="a redirect is no answer"),
        pytest.param(
            answer([chunk("a"), b'data: {"error": {"message": "x", "code": 500}}\n\n', DONE]),
            "error_event",
            "complete",
            id="error event",
        ),
        pytest.param(
            answer([chunk("a")], error="truncated: closed early"), "truncated", "upstream_aborted", id="cut short"
        ),
        pytest.param(answer([chunk("a")]), "truncated", "upstream_aborted", id="ended cleanly, but never finished"),
        pytest.param(
            answer([], status=None, headers=[], error="closed: no answer"),
            "truncated",
            "upstream_aborted",
            id="no answer",
        ),
        pytest.param(
            answer([], status=None, error="malformed: no status line"),
            "malformed",
            "upstream_malformed",
            id="malformed",
        ),
        pytest.param(answer([chunk("a")], error="timeout: 5 s"), "timeout", "timeout", id="timeout"),
        pytest.param(
            answer([b"not gzip"], headers=[(b"content-type", b"text/event-stream"), (b"content-encoding", b"gzip")]),
            "malformed",
            "upstream_malformed",
            id="not what its encoding says",
        ),
        pytest.param(
            answer([b"x"], headers=[(b"content-type", b"text/event-stream"), (b"content-encoding", b"br")]),
            "malformed",
            "upstream_malformed",
            id="an encoding that was not offered",
        ),
    ],
)
def test_every_failure_has_its_class(fetched: Fetched, failure: str | None, ended: str) -> None:
    result = one(fetched)
    assert (result.failure, result.record.ended) == (failure, ended)
    assert (result.error is None) == (failure is None)


def test_an_answer_that_is_no_stream_has_its_usage_and_no_events() -> None:
    body = orjson.dumps(
        {
            "id": "chatcmpl-2",
            "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 7},
        }
    )
    result = one(answer([body], headers=[(b"content-type", b"application/json")]))
    assert result.failure is None
    assert (result.record.events.kind, result.record.usage.completion_tokens) == ([], 7)


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
def test_events_of_a_compressed_body_have_the_stamps_of_the_reads_that_brought_them(coding: str) -> None:
    squeeze = zlib.compressobj(wbits=31 if coding == "gzip" else 15)
    flushed = [squeeze.compress(piece) + squeeze.flush(zlib.Z_SYNC_FLUSH) for piece in pieces()]
    flushed[-1] += squeeze.flush()
    headers = [(b"content-type", b"text/event-stream"), (b"content-encoding", coding.encode())]
    record = one(answer(flushed, headers=headers)).record
    assert record.events.arrived == [100, 150, 200, 250, 300, 350]
    assert record.events.end_offset == one(answer(pieces())).record.events.end_offset
    assert record.headers["content-encoding"] == coding


def test_events_of_a_body_compressed_as_a_whole_come_at_once() -> None:
    whole = gzip.compress(b"".join(pieces()))
    headers = [(b"content-type", b"text/event-stream"), (b"content-encoding", b"gzip")]
    record = one(answer([whole[:10], whole[10:]], headers=headers)).record
    assert record.events.arrived == [150] * 6
    assert record.events.read == [0] * 6


def test_slots_start_in_the_order_of_the_plan_and_results_come_back_in_it() -> None:
    async def go() -> tuple[list[str], list[Result]]:
        log: list[str] = []
        clients = {name: FakeClient(lambda _: answer(pieces()), log, name) for name in ("a", "b")}
        return log, await run(interleaved(["a", "b"], 10, seed=1), clients, concurrency=4)

    log, results = asyncio.run(go())
    assert log == [result.slot.path for result in results]
    assert [result.slot.index for result in results] == list(range(20))


@pytest.mark.parametrize(("concurrency", "each"), [(1, 1), (2, 1), (4, 2), (5, 3)])
def test_a_path_that_hangs_takes_no_more_than_its_part(concurrency: int, each: int) -> None:
    async def go() -> tuple[int, int]:
        clients = {name: FakeClient(lambda _: answer(pieces())) for name in ("a", "b")}
        clients["a"].hold = asyncio.Event()
        sending = asyncio.create_task(run(interleaved(["a", "b"], 20, seed=1), clients, concurrency=concurrency))
        for _ in range(200):
            await asyncio.sleep(0)
        waiting = clients["a"].under_way
        clients["a"].hold.set()
        await sending
        return waiting, clients["b"].most_under_way

    waiting, other = asyncio.run(go())
    assert waiting == each
    assert other <= each


def test_an_interrupted_run_keeps_what_it_measured() -> None:
    async def go() -> list[Result]:
        client = FakeClient(lambda _: answer(pieces()))
        into: list[Result] = []
        seen: list[int] = []

        def progress(result: Result) -> None:
            seen.append(result.slot.index)
            if len(seen) == 3:
                client.hold = asyncio.Event()  # the fourth never ends

        sending = asyncio.create_task(
            run(interleaved(["a"], 9, seed=1), {"a": client}, on_progress=progress, into=into)
        )
        while client.hold is None or not client.under_way:
            await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        return into

    assert [result.slot.index for result in asyncio.run(go())] == [0, 1, 2]


def test_a_count_that_only_the_end_tells_is_resolved() -> None:
    record = one(answer([chunk("a"), chunk("b"), finish(), usage(3), DONE])).record
    assert record.events.tokens[:2] == [1, 1]
