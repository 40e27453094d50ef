"""Waking at a time: never early, in order, and soon after it."""

from __future__ import annotations

import asyncio
import time

import pytest

from tapproxy.wire.alarms import Alarms

MS = 1_000_000


@pytest.mark.parametrize("precise", [True, False], ids=["timerfd", "the loop's own timers"])
def test_whoever_waits_is_woken_in_order_and_never_early(precise: bool) -> None:
    async def story() -> list[tuple[int, int]]:
        alarms = Alarms(precise=precise)
        start_ns = time.monotonic_ns()
        woken: list[tuple[int, int]] = []

        async def wait(ms: int) -> None:
            await alarms.until(start_ns + ms * MS)
            woken.append((ms, time.monotonic_ns() - start_ns - ms * MS))

        await asyncio.gather(*(wait(ms) for ms in (30, 10, 20, 10, 0)))
        alarms.close()
        return woken

    woken = asyncio.run(story())
    assert [ms for ms, _ in woken] == [0, 10, 10, 20, 30]
    # A loop's own timer may ring within its grain of a millisecond.
    assert all(late_ns >= (0 if precise else -2 * MS) for _, late_ns in woken)


def test_somebody_who_left_does_not_hold_up_the_others() -> None:
    async def story() -> float:
        alarms = Alarms()
        start_ns = time.monotonic_ns()
        gone = asyncio.ensure_future(alarms.until(start_ns + 5 * MS))
        later = asyncio.ensure_future(alarms.until(start_ns + 20 * MS))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait_for(later, 5)
        alarms.close()
        return (time.monotonic_ns() - start_ns) / MS

    assert asyncio.run(story()) >= 20


def test_a_time_gone_by_costs_no_wait() -> None:
    async def story() -> None:
        alarms = Alarms()
        await asyncio.wait_for(alarms.until(time.monotonic_ns() - 1), 1)
        alarms.close()

    asyncio.run(story())
