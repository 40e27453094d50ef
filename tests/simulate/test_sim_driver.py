"""The driver on a clock that a test turns: absolute deadlines, holds, cancellations."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from tapproxy.simulate.clock import Alarm
from tapproxy.simulate.driver import Driver, Schedule
from tapproxy.simulate.engine import Engine, EngineConfig, Frontend, Sequence
from tapproxy.simulate.metrics import EngineMetrics

MS = 1_000_000


class Clock:
    """Rings alarms in order, each ``late_ns`` after its deadline."""

    def __init__(self, late_ns: int = 0) -> None:
        self.now_ns = 0
        self.late_ns = late_ns
        self.heap: list[tuple[int, int, Alarm]] = []
        self.count = 0

    def at(self, deadline_ns: int, callback: Callable[[], None]) -> Alarm:
        self.count += 1
        alarm = Alarm(deadline_ns, callback)
        heapq.heappush(self.heap, (deadline_ns, self.count, alarm))
        return alarm

    def run(self, until_ns: int | None = None) -> None:
        while self.heap and (until_ns is None or self.heap[0][0] + self.late_ns <= until_ns):
            deadline_ns, _, alarm = heapq.heappop(self.heap)
            self.now_ns = max(self.now_ns, deadline_ns + self.late_ns)
            if alarm.callback is not None:
                alarm.callback()
        if until_ns is not None:
            self.now_ns = until_ns


class Sink:
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.ready_ns: int | None = None
        self.tokens_ms: list[int] = []
        self.then: Callable[[Sequence], None] = lambda _: None

    def on_ready(self) -> None:
        self.ready_ns = self.clock.now_ns

    def on_tokens(self, sequence: Sequence, gained: int) -> None:
        assert sequence.last_ns is not None
        self.tokens_ms += [sequence.last_ns // MS] * gained
        self.then(sequence)


def make(clock: Clock, frontend_ns: int = 0, **changes: int) -> Driver:
    settings = {"prefill_tokens_per_s": 1000, "prefill_overhead_ns": 0, "decode_base_ns": 10 * MS}
    engine = Engine(EngineConfig(**(settings | {"decode_per_seq_ns": MS} | changes)))  # type: ignore[arg-type]
    return Driver(engine, Frontend(frontend_ns), clock, EngineMetrics("m"), lambda: clock.now_ns)


def sequence(clock: Clock, prompt: int, output: int) -> Sequence:
    return Sequence(prompt, output, clock.now_ns, clock.now_ns)


def test_late_timers_do_not_add_up() -> None:
    clock = Clock(late_ns=3 * MS)
    driver, sink = make(clock), Sink(clock)
    driver.submit([sequence(clock, 20, 4)], sink)
    clock.run()
    assert sink.tokens_ms == [20, 31, 42, 53]


def test_a_request_that_comes_while_a_late_step_is_still_to_be_handed_out_is_served() -> None:
    clock = Clock(late_ns=4 * MS)
    driver, first, second = make(clock), Sink(clock), Sink(clock)
    driver.submit([sequence(clock, 20, 1)], first)
    clock.run(until_ns=22 * MS)  # the step ended at 20, the timer has not rung
    driver.submit([sequence(clock, 10, 1)], second)
    clock.run()
    assert first.tokens_ms == [20]
    assert second.tokens_ms == [32]  # from when it was queued, not from the step's planned end


def test_the_head_is_due_when_the_frontend_is_done() -> None:
    clock = Clock()
    driver, sink, other = make(clock, frontend_ns=MS), Sink(clock), Sink(clock)
    driver.submit([sequence(clock, 5, 1)], sink)
    driver.submit([sequence(clock, 5, 1)], other)
    clock.run()
    assert (sink.ready_ns, other.ready_ns) == (5 * MS, 10 * MS)
    assert (sink.tokens_ms, other.tokens_ms) == ([10], [15])
    ttft = driver.metrics.histograms["vllm:time_to_first_token_seconds"]
    assert ttft.sum == 0.025  # 10 + 15 ms: the frontend counts


def test_a_request_cancelled_in_the_frontend_never_enters_the_queue() -> None:
    clock = Clock()
    driver, sink = make(clock, frontend_ns=MS), Sink(clock)
    one = sequence(clock, 5, 1)
    driver.submit([one], sink)
    driver.cancel(one, "abort")
    clock.run()
    assert sink.ready_ns is None
    assert driver.metrics.finished == {"abort": 1}


def test_cancelling_a_running_request_lets_the_next_one_in() -> None:
    clock = Clock()
    driver, sink, other = make(clock, max_num_seqs=1), Sink(clock), Sink(clock)
    one = sequence(clock, 10, 100)
    driver.submit([one], sink)
    driver.submit([sequence(clock, 10, 1)], other)
    clock.run(until_ns=25 * MS)
    driver.cancel(one, "abort")
    assert driver.engine.kv_usage == 0
    clock.run()
    assert sink.tokens_ms == [10, 21]
    assert other.tokens_ms == [42]  # the step that was begun for nobody ends at 32


def test_a_sink_that_cancels_the_other_choice_is_heard_in_the_same_step() -> None:
    clock = Clock()
    driver, sink = make(clock), Sink(clock)
    one, two = sequence(clock, 10, 5), sequence(clock, 10, 5)
    sink.then = lambda _: [driver.cancel(s, "abort") for s in (one, two)] and None
    driver.submit([one, two], sink)
    clock.run()
    assert sink.tokens_ms == [20]
    assert driver.metrics.finished == {"abort": 2}
    assert driver.engine.step is None


def test_a_hold_delays_the_next_token_by_the_stall_and_a_step() -> None:
    clock = Clock()
    driver, sink = make(clock), Sink(clock)
    one = sequence(clock, 10, 4)

    def hold_once(_: Sequence) -> None:
        if len(sink.tokens_ms) == 2:
            driver.hold(one, 500 * MS)

    sink.then = hold_once
    driver.submit([one], sink)
    clock.run()
    assert sink.tokens_ms == [10, 21, 21 + 500 + 11, 21 + 500 + 22]


def test_a_fixed_schedule_keeps_its_times_beside_a_busy_engine() -> None:
    clock = Clock(late_ns=2 * MS)
    driver, sink, other = make(clock), Sink(clock), Sink(clock)
    driver.submit([sequence(clock, 500, 50)], other)
    fixed = sequence(clock, 10, 4)
    driver.submit_fixed({fixed: Schedule(30 * MS, 7 * MS)}, sink)
    assert len(driver.fixed) == 1
    clock.run()
    assert sink.tokens_ms == [30, 37, 44, 51]
    assert not driver.fixed
    assert driver.metrics.finished == {"length": 2}


def test_a_hold_shifts_a_fixed_schedule() -> None:
    clock = Clock()
    driver, sink = make(clock), Sink(clock)
    fixed = sequence(clock, 10, 3)
    sink.then = lambda s: driver.hold(s, 100 * MS) if s.generated == 1 else None
    driver.submit_fixed({fixed: Schedule(30 * MS, 7 * MS)}, sink)
    clock.run()
    assert sink.tokens_ms == [30, 137, 144]
