"""Runs the model in real time: a step's tokens are handed out when the step ends.

Deadlines are absolute: the next step starts at the planned end of the one before, not when the timer rang, so
lateness never adds up. Sinks are called from the event loop and may submit, hold or cancel in the call.
Sequences with a fixed schedule (``submit_fixed``) stand beside the model: they take no KV and no step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tapproxy.simulate.clock import Alarm, Clock
from tapproxy.simulate.engine import Engine, Frontend, Output, Sequence
from tapproxy.simulate.metrics import EngineMetrics


class Sink(Protocol):
    """Who wants a request's tokens."""

    def on_ready(self) -> None:
        """The frontend is done; the sequences enter the queue now."""

    def on_tokens(self, sequence: Sequence, gained: int) -> None: ...


@dataclass(slots=True)
class Schedule:
    """Tokens at fixed times, whatever else goes on."""

    next_ns: int
    itl_ns: int
    alarm: Alarm | None = None


class Driver:
    def __init__(
        self,
        engine: Engine,
        frontend: Frontend,
        clock: Clock,
        metrics: EngineMetrics,
        now_ns: Callable[[], int],
    ) -> None:
        self.engine = engine
        self.frontend = frontend
        self.metrics = metrics
        self.fixed: dict[Sequence, Schedule] = {}
        # Processor time that handing out a step takes, as an engine's own process needs it.
        self.step_cpu_ns = 0
        self._clock = clock
        self._now_ns = now_ns
        self._sinks: dict[Sequence, Sink] = {}
        self._arriving: set[Sequence] = set()  # in the frontend
        self._wake: Alarm | None = None
        self._handing_out = False

    def submit(self, sequences: list[Sequence], sink: Sink) -> None:
        """Through the frontend into the queue. ``queued_ns`` is set here."""
        tokens = sum(s.prompt_tokens for s in sequences)
        ready_ns = self.frontend.admit(sequences[0].arrival_ns, tokens)
        for sequence in sequences:
            sequence.queued_ns = ready_ns
            self._sinks[sequence] = sink
        self._arriving.update(sequences)

        def ready() -> None:
            alive = [s for s in sequences if s in self._arriving]
            self._arriving.difference_update(alive)
            if not alive:
                return
            sink.on_ready()
            # The sink may have cancelled in the call (a fault before the first event).
            for sequence in alive:
                if sequence in self._sinks:
                    self.engine.add(sequence)
            self._kick(ready_ns)

        if ready_ns <= self._now_ns():
            ready()
        else:
            self._clock.at(ready_ns, ready)

    def submit_fixed(self, schedules: dict[Sequence, Schedule], sink: Sink) -> None:
        for sequence in schedules:
            sequence.queued_ns = sequence.scheduled_ns = sequence.arrival_ns
            self._sinks[sequence] = sink
        self.fixed.update(schedules)
        sink.on_ready()
        for sequence in schedules:
            self._arm_fixed(sequence)

    def hold(self, sequence: Sequence, stall_ns: int) -> None:
        """No token for so long from now: the rest comes that much later, it is not caught up."""
        schedule = self.fixed.get(sequence)
        if schedule is None:
            sequence.hold_until_ns = self._now_ns() + stall_ns
        else:
            schedule.next_ns += stall_ns

    def cancel(self, sequence: Sequence, reason: str) -> None:
        """Drop it wherever it is; nothing happens where it has finished."""
        if self._sinks.pop(sequence, None) is None:
            return
        arriving = sequence in self._arriving
        self._arriving.discard(sequence)
        fixed = self.fixed.pop(sequence, None)
        if fixed is not None:
            if fixed.alarm is not None:
                fixed.alarm.cancel()
        elif not arriving:
            self.engine.abort(sequence)
            self._kick(self._now_ns())  # its place may be what another one waits for
        self.metrics.ended(sequence, reason)

    # -- the model -----------------------------------------------------------------------------------------

    def _kick(self, at_ns: int) -> None:
        if self.engine.step is not None or self._handing_out:
            return
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        at_ns = max(at_ns, self.engine.last_end_ns)
        end_ns = self.engine.begin(at_ns)
        if end_ns is not None:
            self._clock.at(end_ns, self._step_ended)
            return
        wake_ns = self.engine.wake_ns(at_ns)
        if wake_ns is not None:
            self._wake = self._clock.at(wake_ns, lambda: self._kick(wake_ns))

    def _step_ended(self) -> None:
        step = self.engine.complete()
        if self.step_cpu_ns:
            until_ns = time.thread_time_ns() + self.step_cpu_ns
            while time.thread_time_ns() < until_ns:
                pass
        self.metrics.step(step)
        self._handing_out = True  # a sink that cancels or holds does so before the next step is planned
        for output in step.outputs:
            self._hand_out(output)
        self._handing_out = False
        self._kick(step.end_ns)

    def _hand_out(self, output: Output) -> None:
        sequence = output.sequence
        sink = self._sinks.get(sequence)
        if sink is None:
            return  # cancelled by a sink called before this one in the same step
        if sequence.finished:
            del self._sinks[sequence]
            self.metrics.ended(sequence, sequence.ends_with)
        sink.on_tokens(sequence, output.gained)

    # -- fixed schedules -----------------------------------------------------------------------------------

    def _arm_fixed(self, sequence: Sequence) -> None:
        schedule = self.fixed.get(sequence)  # gone: finished, or cancelled by its sink
        if schedule is not None:
            schedule.alarm = self._clock.at(schedule.next_ns, lambda: self._ring_fixed(sequence, schedule))

    def _ring_fixed(self, sequence: Sequence, schedule: Schedule) -> None:
        token_ns = schedule.next_ns
        output = Output(sequence, 1, sequence.last_ns)
        sequence.generated += 1
        sequence.last_ns = token_ns
        if sequence.first_ns is None:
            sequence.first_ns = token_ns
        schedule.next_ns = token_ns + schedule.itl_ns
        if sequence.finished:
            sequence.finished_ns = token_ns
            del self.fixed[sequence]
        self.metrics.output(output)
        self._hand_out(output)
        self._arm_fixed(sequence)
