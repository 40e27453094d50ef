"""The calibrated stream: events are what was asked for, say when they were sent, and have the stamps of their reads."""

from __future__ import annotations

import asyncio
import json
import re
import time
from typing import Any

import pytest
import uvloop

from tapproxy.wire.calibrated import CalibratedServer, Schedule, Timed, ask, timed_events
from tapproxy.wire.fetch import Client, Fetched, Read

MS = 1_000_000


def fetch(*schedules: Schedule) -> list[Fetched]:
    """One stream after the other, over one client."""

    async def run() -> list[Fetched]:
        server = CalibratedServer()
        await server.start()
        client = Client(server.url, timeout_s=5)
        try:
            return [await ask(client, schedule) for schedule in schedules]
        finally:
            await client.close()
            await server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def test_every_event_is_valid_of_the_size_asked_for_and_stamped_before_it_arrived() -> None:
    before_ns = time.monotonic_ns()
    (fetched,) = fetch(Schedule(events=20, interval_ns=2 * MS, first_ns=5 * MS, event_bytes=250))
    assert fetched.error is None
    blocks = fetched.body.split(b"\n\n")
    assert blocks[-2:] == [b"data: [DONE]", b""]
    assert [len(block) + 2 for block in blocks[:-2]] == [250] * 20
    documents = [json.loads(block.removeprefix(b"data: ")) for block in blocks[:-2]]
    assert {document["id"] for document in documents} == {"calibrated-1"}
    assert {document["choices"][0]["delta"]["content"] for document in documents} == {"x"}
    events = timed_events(fetched)
    assert [event.sent_ns for event in events] == [document["sent_ns"] for document in documents]
    assert [event.end_offset for event in events] == [250 * number for number in range(1, 21)]
    assert events[0].sent_ns >= before_ns + 5 * MS
    assert [event.sent_ns for event in events] == sorted(event.sent_ns for event in events)
    # Of the schedule, not of the first event: on a busy machine that one may be late, the others are not for that.
    assert events[-1].sent_ns >= before_ns + 5 * MS + 38 * MS
    for event in events:
        assert event.sent_ns - MS // 10 <= event.arrived_ns <= event.read_at_ns


def test_streams_follow_one_another_on_a_connection_each_with_its_own_id() -> None:
    first, second = fetch(Schedule(events=2, interval_ns=0), Schedule(events=0))
    assert (first.reused, second.reused) == (False, True)
    assert len(timed_events(first)) == 2
    assert b"calibrated-1" in first.body
    assert second.body == b"data: [DONE]\n\n"
    assert timed_events(second) == []


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"[1]", id="no object"),
        pytest.param(b'{"model": "m"}', id="another request"),
        pytest.param(b'{"calibrated": {"events": -1}}', id="negative"),
        pytest.param(b'{"calibrated": {"events": "7"}}', id="text"),
        pytest.param(b'{"calibrated": {"interval_ns": 100000000000}}', id="beyond reason"),
    ],
)
def test_what_asks_for_no_calibrated_stream_is_refused(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # JSON's own error is one, too
        Schedule.of_body(body)

    async def run() -> Fetched:
        server = CalibratedServer()
        await server.start()
        client = Client(server.url, timeout_s=5)
        try:
            return await client.fetch("POST", "/x", [], body)
        finally:
            await client.close()
            await server.close()

    assert asyncio.run(run()).status == 400


def test_a_schedule_survives_the_way_through_a_body() -> None:
    schedule = Schedule(events=3, interval_ns=7, first_ns=9, event_bytes=300)
    assert Schedule.of_body(schedule.body()) == schedule
    assert Schedule.of_body(b'{"calibrated": {}}') == Schedule()


def block(sent_ns: int) -> bytes:
    return b'data: {"sent_ns":%d,"pad":""}\n\n' % sent_ns


def reads(*parts: bytes) -> list[Read]:
    return [Read(100 * number, 100 * number + 5, part) for number, part in enumerate(parts, 1)]


ONE, TWO = block(11), block(22)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        pytest.param((ONE, TWO), [(100, 105), (200, 205)], id="a read each"),
        pytest.param((ONE + TWO,), [(100, 105), (100, 105)], id="one read for both"),
        pytest.param((ONE[:20], ONE[20:] + TWO[:5], TWO[5:]), [(200, 205), (300, 305)], id="cut anywhere"),
        pytest.param((ONE[:-1], b"\n" + TWO), [(200, 205), (200, 205)], id="cut before the last byte"),
        pytest.param((ONE, TWO[:-1]), [(100, 105)], id="the last one is not complete"),
        pytest.param((ONE, b"data: [DONE]\n\n"), [(100, 105)], id="one without a stamp"),
        pytest.param((), [], id="nothing"),
    ],
)
def test_an_event_has_the_stamps_of_the_read_with_its_last_byte(
    parts: tuple[bytes, ...], expected: list[tuple[int, int]]
) -> None:
    fetched = Fetched(0, reads=reads(*parts))
    found = timed_events(fetched)
    assert [(event.arrived_ns, event.read_at_ns) for event in found] == expected
    assert [event.sent_ns for event in found] == [11, 22][: len(expected)]
    ends: list[Any] = [match.end() for match in re.finditer(rb"\n\n", b"".join(parts))]
    assert [event.end_offset for event in found] == ends[: len(expected)]
    assert all(isinstance(event, Timed) for event in found)
