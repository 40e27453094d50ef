"""Sending phases: when, how many at once, and what is kept of a run that is told to stop."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest

from tapproxy.load.driver import Driver, Lane
from tapproxy.load.plan import Slot
from tapproxy.load.planning import Endless, Kind, Phase, Recipe
from tapproxy.load.prompts import Prompt
from tapproxy.load.sender import Ask, Result
from tapproxy.wire.fetch import Fetched
from tests.load.answers import FakeClient, answer, pieces

MS = 1_000_000


class Timed(FakeClient):
    """Answers after a while, and notes when it was asked."""

    def __init__(self, takes_s: float = 0.0) -> None:
        super().__init__(lambda _: answer(pieces(), start_ns=time.monotonic_ns()))
        self.takes_s = takes_s
        self.at_ns: list[int] = []

    async def fetch(self, *arguments: Any, **more: Any) -> Fetched:
        self.at_ns.append(time.monotonic_ns())
        start_ns = self.at_ns[-1]
        fetched = await super().fetch(*arguments, **more)
        if self.takes_s:
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            await asyncio.sleep(self.takes_s)
            self.under_way -= 1
        fetched.start_ns = start_ns
        return fetched


def slots(count: int, gap_ms: int | None = None) -> tuple[Slot, ...]:
    return tuple(Slot(i, i, "a", "x", 3, due_ns=None if gap_ms is None else i * gap_ms * MS) for i in range(count))


def drive(client: FakeClient, phase: Phase, ask: Ask | None = None, **more: Any) -> list[Result]:
    async def story() -> list[Result]:
        results: list[Result] = []
        driver = Driver({"a": Lane(client, ask or Ask())}, results.append, **more)
        await driver.run(phase)
        driver.close()
        return results

    return asyncio.run(asyncio.wait_for(story(), 20))


def test_what_has_a_time_is_sent_at_its_time_whatever_the_answers_take() -> None:
    client = Timed(takes_s=0.2)
    results = drive(client, Phase(Kind.OPEN, slots(10, gap_ms=10)))
    assert client.most_under_way == 10
    assert [result.due_ns - results[0].due_ns for result in results] == [i * 10 * MS for i in range(10)]  # type: ignore[operator]
    late_ns = sorted(at - result.due_ns for at, result in zip(client.at_ns, results, strict=True))  # type: ignore[operator]
    assert late_ns[0] >= 0
    assert late_ns[4] < 5 * MS


def test_a_closed_loop_never_has_more_at_once() -> None:
    client = Timed(takes_s=0.005)
    results = drive(client, Phase(Kind.CLOSED, slots(30), width=4))
    assert (len(results), client.most_under_way) == (30, 4)
    assert {result.due_ns for result in results} == {None}


def test_a_turn_that_is_a_time_is_due_when_it_comes() -> None:
    first, second = drive(Timed(takes_s=0.05), Phase(Kind.CLOSED, slots(2, gap_ms=0)))
    assert first.due_ns is not None
    assert second.due_ns is not None
    assert second.due_ns - first.due_ns >= 50 * MS


def test_clients_of_a_closed_loop_begin_one_after_the_other() -> None:
    client = Timed(takes_s=0.08)
    drive(client, Phase(Kind.CLOSED, slots(4), width=4, spacing_ns=20 * MS))
    starts = [(at - client.at_ns[0]) / MS for at in client.at_ns]
    assert starts == pytest.approx([0, 20, 40, 60], abs=15)


def test_a_burst_goes_out_at_once() -> None:
    client = Timed(takes_s=0.05)
    drive(client, Phase(Kind.BURST, slots(50), width=50))
    assert client.most_under_way == 50


def test_a_phase_without_end_ends_with_its_time_and_a_whole_round() -> None:
    recipe = Recipe(1, (Prompt("x"),), 3)
    clients = {"a": Timed(takes_s=0.01), "b": Timed(takes_s=0.01)}

    async def story() -> list[Result]:
        results: list[Result] = []
        driver = Driver({path: Lane(client, Ask()) for path, client in clients.items()}, results.append)
        endless = Endless(recipe, ("a", "b"), 0, 0)
        await driver.run(Phase(Kind.CLOSED, (), 1, 0.3, endless))
        driver.close()
        return results

    results = asyncio.run(asyncio.wait_for(story(), 20))
    by_path = [sum(result.slot.path == path for result in results) for path in ("a", "b")]
    assert by_path[0] == by_path[1] > 3


def test_a_path_that_refuses_at_once_is_not_asked_without_pause() -> None:
    client = FakeClient(lambda _: Fetched(time.monotonic_ns(), error="connect: refused"))
    phase = Phase(Kind.CLOSED, (), 2, 0.4, Endless(Recipe(1, (Prompt("x"),), 3), ("a",), 0, 0))
    results = drive(client, phase)
    assert 2 <= len(results) <= 20
    assert {result.failure for result in results} == {"connect"}


def test_told_to_stop_it_keeps_what_has_ended() -> None:
    client = Timed(takes_s=0.01)

    async def story() -> list[Result]:
        results: list[Result] = []
        driver = Driver({"a": Lane(client, Ask())}, results.append)
        sending = asyncio.ensure_future(driver.run(Phase(Kind.CLOSED, slots(100_000), width=2)))
        while len(results) < 10:
            await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        driver.close()
        return results

    results = asyncio.run(asyncio.wait_for(story(), 20))
    # All but those that were under way.
    assert len(client.asked) - 2 <= len(results) <= len(client.asked)
    assert results


def test_a_part_sends_its_part() -> None:
    found = [drive(Timed(), Phase(Kind.BURST, slots(10)), part=part, of=3) for part in range(3)]
    assert [[result.slot.index for result in part] for part in found] == [[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]


@pytest.mark.parametrize("kind", list(Kind))
def test_a_stop_before_the_start_leaves_nothing_behind(kind: Kind) -> None:
    async def story() -> None:
        driver = Driver({"a": Lane(Timed(), Ask())}, lambda _: None)
        sending = asyncio.ensure_future(driver.run(Phase(kind, slots(5, 10)), time.monotonic_ns() + 10_000 * MS))
        await asyncio.sleep(0.01)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        driver.close()

    asyncio.run(asyncio.wait_for(story(), 5))


def asked(ask: Ask, slot: Slot) -> dict[str, Any]:
    client = Timed()
    drive(client, Phase(Kind.BURST, (slot,)), ask)
    body: dict[str, Any] = orjson.loads(client.asked[0][3])
    return body


PREFIXED = Slot(0, 0, "a", "s\n\nu", 3, prefix="able army", messages=(("system", "s"), ("user", "u")))


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        pytest.param(
            Ask(),
            {"messages": [{"role": "system", "content": "able army s"}, {"role": "user", "content": "u"}]},
            id="before the first message",
        ),
        pytest.param(Ask(api="completions", target="/v1/completions"), {"prompt": "able army s\n\nu"}, id="completion"),
        pytest.param(Ask(api="completions", salt=1), {"prompt": "area army s\n\nu"}, id="another word with a salt"),
    ],
)
def test_the_prefix_comes_before_everything_else(ask: Ask, expected: dict[str, Any]) -> None:
    body = asked(ask, PREFIXED)
    assert {key: body.get(key) for key in expected} == expected
    assert ("prompt" in body) != ("messages" in body)


def test_what_was_given_for_the_body_wins() -> None:
    body = asked(Ask(extra=(("temperature", 0.7), ("seed", 3))), PREFIXED)
    assert (body["temperature"], body["seed"]) == (0.7, 3)
