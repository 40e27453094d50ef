"""Alarms on a real loop: in order, never early."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import uvloop

from tapproxy.simulate.clock import AlarmClock


@pytest.mark.parametrize("precise", [True, False], ids=["timerfd", "the loop's timers"])
def test_alarms_ring_in_order_never_early_and_cancelled_ones_not_at_all(precise: bool) -> None:
    async def main() -> list[tuple[str, int]]:
        loop = asyncio.get_running_loop()
        clock, done = AlarmClock(loop, precise=precise), loop.create_future()
        rung: list[tuple[str, int]] = []
        start_ns = time.monotonic_ns()

        def alarm(name: str, after_ns: int) -> Any:
            due_ns = start_ns + after_ns
            return clock.at(due_ns, lambda: rung.append((name, time.monotonic_ns() - due_ns)))

        alarm("third", 9_000_000)
        alarm("first", 2_300_000)
        alarm("never", 3_000_000).cancel()
        alarm("second", 2_400_000)
        alarm("gone by", -5_000_000)
        clock.at(start_ns + 12_000_000, lambda: done.set_result(None))
        await done
        clock.close()
        return rung

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rung = runner.run(main())
    assert [name for name, _ in rung] == ["gone by", "first", "second", "third"]
    assert all(late_ns >= 0 for _, late_ns in rung)
