"""Answers: turns a request's tokens into events on the wire, or into one JSON body.

Rules, as vLLM: the head goes out when the frontend is done, before the queue; the role event goes with the first
token; then usage, ``[DONE]`` and the terminator, each a write of its own. A client that leaves is cancelled in
the engine in the same instant. Faults count events as they are sent.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from tapproxy.simulate.ask import Ask, error_body
from tapproxy.simulate.clock import Clock
from tapproxy.simulate.config import SimConfig
from tapproxy.simulate.driver import Driver, Schedule, Sink
from tapproxy.simulate.engine import Sequence
from tapproxy.simulate.faults import Fault
from tapproxy.simulate.http import DONE, Connection
from tapproxy.simulate.ledger import Ledger
from tapproxy.simulate.shape import Piece, StreamShape, error_event, whole_body
from tapproxy.simulate.speak import Choices, Speaker
from tapproxy.simulate.words import FILLER

_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
_END = b""  # the end of the stream, in the row of its events


@dataclass(frozen=True, slots=True)
class Site:
    """What all answers of one server share."""

    config: SimConfig
    driver: Driver
    clock: Clock
    ledger: Ledger | None = None

    def finished(self, identity: str, choices: Choices) -> None:
        """A request has all its tokens."""
        if self.ledger is not None:
            self.ledger.note(identity, choices.sequences)


@dataclass(frozen=True, slots=True)
class Reply:
    """One request's own: who asks, for what, and which fields the answer's head has besides the usual."""

    connection: Connection
    ask: Ask
    number: int
    arrival_ns: int
    identity: str
    fields: tuple[tuple[bytes, bytes], ...]


class StreamAnswer:
    def __init__(self, site: Site, reply: Reply) -> None:
        self.ask = reply.ask
        self._site = site
        self._reply = reply
        self._connection = reply.connection
        self._choices = Choices(reply.ask, site.config.seed, reply.number, reply.arrival_ns)
        self._shape = StreamShape(reply.ask, reply.identity)
        self._row: deque[bytes] = deque()  # events that are due, in order
        self._held = site.config.synthetic_stream  # they wait
        self._sent = 0
        self._begun = False
        self._over = False

    def submit(self) -> None:
        _submit(self._site, self.ask, self._choices, self)

    def on_ready(self) -> None:
        request = self._connection.request
        close = request is not None and request.http10 and self._site.config.http10 == "close"
        self._connection.start_stream(self._reply.fields, "close" if close else "chunked")
        self._fail_if_due()

    def on_tokens(self, sequence: Sequence, gained: int) -> None:
        if not self._begun:
            self._begin()
        speaker = self._choices.speak(sequence, gained)
        # As --stream-interval of vLLM: the first token at once, then every so many, and the rest at the end.
        first = speaker.said == gained
        if first or sequence.finished or len(speaker.held) >= self._site.config.bundle:
            for piece in speaker.take():
                self._row.append(self._event(speaker, piece, sequence))
        if self._choices.left == 0:
            self._finish()
        self._drain()

    def on_lost(self) -> None:
        self._over = True
        self._row.clear()
        _cancel(self._site, self._choices, "abort")

    def _begin(self) -> None:
        self._begun = True
        if self.ask.chat:
            for sequence, speaker in self._choices.speakers.items():
                self._row.append(self._shape.role(speaker.index, sequence.prompt_tokens))

    def _finish(self) -> None:
        self._site.finished(self._reply.identity, self._choices)
        if self.ask.include_usage:
            metrics = self._site.config.per_request_metrics
            self._row.append(self._shape.usage(self._choices.sequences, metrics))
        self._row += (DONE, _END)
        if self._site.config.synthetic_stream:
            self._held = False

    def _event(self, speaker: Speaker, piece: Piece, sequence: Sequence) -> bytes:
        event = self._shape.piece(speaker.index, piece, sequence.prompt_tokens)
        size_bytes = self.ask.overrides.event_bytes
        if size_bytes is None or not piece.texts[-1] or piece.channel not in ("content", "reasoning"):
            return event
        missing = size_bytes - len(b"data: }\n\n") - len(event)
        if missing <= 0:
            return event
        piece.texts[-1] += FILLER * missing
        return self._shape.piece(speaker.index, piece, sequence.prompt_tokens)

    def _drain(self) -> None:
        while self._row and not self._held and not self._over:
            event = self._row.popleft()
            if event is _END:
                self._over = True
                self._connection.end_stream()
                return
            self._connection.write_event(event, self.ask.overrides.stamps)
            self._sent += 1
            self._fail_if_due()

    def _fail_if_due(self) -> None:
        fault = self.ask.overrides.fault
        if fault is None or fault.number != self._sent or self._over:
            return
        if fault.kind == "stall-after":
            self._stall(fault)
        elif fault.kind == "reset-after":
            self._connection.reset()
        elif fault.kind == "close-after":
            self.on_lost()
            self._connection.close()
        elif fault.kind == "error-event-after":
            self._over = True
            self._row.clear()
            _cancel(self._site, self._choices, "error")
            for event in (error_event(_DEAD), DONE):
                self._connection.write_event(event, self.ask.overrides.stamps)
            self._connection.end_stream()

    def _stall(self, fault: Fault) -> None:
        self._held = True
        for sequence in self._choices.sequences:
            self._site.driver.hold(sequence, fault.stall_ns)

        def go_on() -> None:
            self._held = self._site.config.synthetic_stream and self._choices.left > 0
            self._drain()

        self._site.clock.at(time.monotonic_ns() + fault.stall_ns, go_on)


class JsonAnswer:
    def __init__(self, site: Site, reply: Reply) -> None:
        self.ask = reply.ask
        self._site = site
        self._reply = reply
        self._choices = Choices(reply.ask, site.config.seed, reply.number, reply.arrival_ns)
        self._pieces: list[list[Piece]] = [[] for _ in self._choices.sequences]

    def submit(self) -> None:
        _submit(self._site, self.ask, self._choices, self)

    def on_ready(self) -> None:
        """Nothing to send yet."""

    def on_tokens(self, sequence: Sequence, gained: int) -> None:
        speaker = self._choices.speak(sequence, gained)
        self._pieces[speaker.index] += speaker.take()
        if self._choices.left:
            return
        self._site.finished(self._reply.identity, self._choices)
        fault = self.ask.overrides.fault
        if fault is not None and fault.kind == "stall-after":
            self._site.clock.at(time.monotonic_ns() + fault.stall_ns, self._answer)
        else:
            self._answer()

    def on_lost(self) -> None:
        _cancel(self._site, self._choices, "abort")

    def _answer(self) -> None:
        connection, fault = self._reply.connection, self.ask.overrides.fault
        if not connection.open:
            return  # left during an injected stall
        metrics = self._site.config.per_request_metrics
        body = whole_body(self.ask, self._reply.identity, self._choices.sequences, self._pieces, metrics)
        kind = "" if fault is None else fault.kind
        if kind == "reset-after":
            connection.reset()
        elif kind == "close-after":
            connection.answer(200, body, fields=self._reply.fields, cut=len(body) // 2)
        elif kind == "error-event-after":
            error = error_body(_DEAD, "InternalServerError", None, 500)
            connection.answer(500, error, fields=self._reply.fields)
        else:
            connection.answer(200, body, fields=self._reply.fields)


def _submit(site: Site, ask: Ask, choices: Choices, sink: Sink) -> None:
    overrides, config = ask.overrides, site.config
    if overrides.ttft_us is None and overrides.itl_us is None:
        site.driver.submit(choices.sequences, sink)
        return
    # The half that was not given is what the model would take for this sequence alone.
    schedules: dict[Sequence, Schedule] = {}
    for sequence in choices.sequences:
        prefill_us = sequence.prompt_tokens * 1_000_000 // config.prefill_tokens_per_s
        ttft_us, itl_us = overrides.ttft_us, overrides.itl_us
        if ttft_us is None:
            ttft_us = config.prefill_overhead_us + prefill_us
        if itl_us is None:
            itl_us = config.decode_base_us + config.decode_per_seq_us
        schedules[sequence] = Schedule(sequence.arrival_ns + ttft_us * 1000, itl_us * 1000)
    site.driver.submit_fixed(schedules, sink)


def _cancel(site: Site, choices: Choices, reason: str) -> None:
    for sequence in choices.sequences:
        site.driver.cancel(sequence, reason)
