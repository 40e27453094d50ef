"""The application that the server runs: one relay a request, and a record also for what never became one."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from tapproxy.core.http1 import Refusal, request_line
from tapproxy.core.record import Ended, Record
from tapproxy.tap.probe import ProbeGate
from tapproxy.tap.relay import Relay, TapContext
from tapproxy.tap.server import Scope


@dataclass(slots=True)
class Tap:
    """The application of one worker: its exchanges, those in progress among them.

    ``probes``: under --allow-probe.
    """

    context: TapContext
    relays: set[Relay] = field(default_factory=set)
    probes: ProbeGate | None = None

    async def __call__(self, scope: Scope, _receive: Any, _send: Any) -> None:
        if self.probes is not None:
            stream = self.probes.stream(scope["extensions"]["tapproxy"])
            if stream is not None:
                await stream.run()
                return
        relay = Relay(self.context, scope["extensions"]["tapproxy"])
        self.relays.add(relay)
        try:
            await relay.run()
        finally:
            self.relays.discard(relay)

    def refused(self, refusal: Refusal, head: bytes, t0_ns: int) -> None:
        """A request that was answered without going further leaves its record."""
        self._unrelayed(Ended.REJECTED, refusal.reason, head, t0_ns, refusal.status)

    def abandoned(self, head: bytes, t0_ns: int, stopped: bool) -> None:
        """So does one whose head never became whole: an exchange begins with its first byte."""
        if stopped:
            self._unrelayed(
                Ended.SHUTDOWN, "the tap was stopped before the request head was complete", head, t0_ns, None
            )
        else:
            self._unrelayed(Ended.CLIENT_ABORTED, "the client left within its request head", head, t0_ns, None)

    def _unrelayed(self, ended: Ended, reason: str, head: bytes, t0_ns: int, status: int | None) -> None:
        now_ns = time.monotonic_ns()
        exchange = self.context.exchange(t0_ns, now_ns)
        line = request_line(head)
        if line is not None:
            exchange.head_refused(*line)
        if status is not None:
            exchange.head_sent(now_ns)
        exchange.end(ended, now_ns, reason)

        def record() -> Record:
            made = exchange.finish()
            made.status = status
            return made

        self.context.ended(record)
