"""Records are made after their exchanges, a few at a time, and none is lost on the way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tapproxy.core.record import Record
from tapproxy.tap.ledger import CROWD, TURN_NS, WAIT_S, Ledger


def maker(number: int, took_s: float = 0.0) -> Callable[[], Record]:
    def make() -> Record:
        time.sleep(took_s)
        return Record(id=str(number), tap="tap")

    return make


def test_records_come_in_the_order_of_their_exchanges_and_let_others_have_their_turn() -> None:
    async def main() -> tuple[list[str], int]:
        loop = asyncio.get_running_loop()
        made: list[str] = []
        ledger = Ledger(loop, lambda record: made.append(record.id))
        slow_s = 2 * TURN_NS / 1e9
        for number in range(5):
            ledger.add(maker(number, slow_s))
        assert made == []
        turns_between = 0
        while len(made) < 5:
            before = len(made)
            await asyncio.sleep(0)
            # Each takes longer than a turn may: after each, somebody else runs.
            assert len(made) - before <= 1
            turns_between += 1
        ledger.add(maker(5))
        ledger.add(maker(6))
        await asyncio.sleep(0.1)
        return made, turns_between

    made, turns_between = asyncio.run(main())
    assert made == [str(number) for number in range(7)]
    assert turns_between >= 5


def test_what_cannot_be_made_is_counted_and_costs_no_other() -> None:
    async def main() -> tuple[list[str], int]:
        made: list[str] = []
        ledger = Ledger(asyncio.get_running_loop(), lambda record: made.append(record.id))
        ledger.add(maker(0))
        ledger.add(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
        ledger.add(maker(2))
        ledger.settle()
        return made, ledger.failed

    assert asyncio.run(main()) == (["0", "2"], 1)


def test_a_turn_ends_between_two_steps_of_one_record() -> None:
    async def main() -> list[tuple[str, int]]:
        done: list[tuple[str, int]] = []
        turn = 0

        def step(name: str) -> Callable[[Record], None]:
            def take(record: Record) -> None:
                time.sleep(2 * TURN_NS / 1e9)
                done.append((f"{name} {record.id}", turn))

            return take

        ledger = Ledger(asyncio.get_running_loop(), step("count"), step("write"))
        ledger.add(maker(0))
        ledger.add(maker(1))
        while len(done) < 4:
            await asyncio.sleep(0)
            turn += 1
        return done

    done = asyncio.run(main())
    assert [what for what, _ in done] == ["count 0", "write 0", "count 1", "write 1"]
    assert len({turn for _, turn in done}) == 4


def busy_with_streams() -> None:
    time.sleep(0.0003)


def test_what_comes_faster_than_short_turns_make_it_makes_them_longer_and_does_not_pile_up() -> None:
    async def main() -> int:
        loop = asyncio.get_running_loop()
        made: list[str] = []
        ledger = Ledger(loop, lambda record: made.append(record.id))
        each_s = TURN_NS / 1e9 / 2
        most = given = 0
        until = loop.time() + 40 * WAIT_S
        # Six a turn of the loop and its other work, where a turn has time for one or two.
        while loop.time() < until:
            for _ in range(6):
                ledger.add(maker(given, each_s))
                given += 1
            busy_with_streams()
            await asyncio.sleep(0)
            if loop.time() > until - 10 * WAIT_S:
                most = max(most, given - len(made))
        ledger.settle()
        assert len(made) == given
        return most

    # Turns that stay short leave some thousand.
    assert asyncio.run(main()) < 40 * CROWD
