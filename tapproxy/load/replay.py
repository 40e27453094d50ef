"""Recorded traffic as a plan: its arrivals, its prompts' sizes, the lengths of its answers; never what they said.

Each path gets the whole of it in turn: two at once would be another load than the one that was recorded.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tapproxy.core.errors import MeasureError
from tapproxy.core.record import Record
from tapproxy.load.plan import PREFIX_WORDS, Slot, words
from tapproxy.load.planning import Kind, Phase, Plan
from tapproxy.load.trial import Scenario

_GENERATING: Final = ("/chat/completions", "/completions")
# Of a request whose engine told no usage: some four bytes a token.
_BYTES_PER_TOKEN: Final = 4


@dataclass(frozen=True, slots=True)
class Arrival:
    """One recorded request: when (ns from the first), how long its prompt and its answer were, in tokens."""

    at_ns: int
    prompt_tokens: int
    max_tokens: int


def arrivals(records: Iterable[Record], default_max_tokens: int) -> list[Arrival]:
    """What was asked of the engine, in order. Raises MeasureError where there is none.

    Only one tap's records: two taps on one path saw the same requests.
    """
    asked = [
        record
        for record in records
        if record.method == "POST" and (record.path or "").endswith(_GENERATING) and record.t0_unix_ns
    ]
    if not asked:
        raise MeasureError("--replay found no recorded completion there: give the --data directory of a tap")
    tap = min(record.tap for record in asked)
    own = sorted((record for record in asked if record.tap == tap), key=lambda record: record.t0_unix_ns)
    first_ns = own[0].t0_unix_ns
    return [
        Arrival(
            record.t0_unix_ns - first_ns,
            record.usage.prompt_tokens or max(1, record.request.bytes // _BYTES_PER_TOKEN),
            record.usage.completion_tokens or default_max_tokens,
        )
        for record in own
    ]


def plan(recorded: Sequence[Arrival], paths: Sequence[str], seed: int, warmup: int) -> Plan:
    """The same arrivals over each path, after ``warmup`` requests apart, in an order drawn from the seed."""
    order = random.Random(f"replay:{seed}").sample(list(paths), len(paths))
    phases, index = [], 0
    for kind, turns in ((Kind.CLOSED, range(warmup)), (Kind.OPEN, range(len(recorded)))):
        for path in order:
            slots = []
            for turn in turns:
                slots.append(_slot(recorded[turn % len(recorded)], index, turn, path, seed, kind is Kind.CLOSED))
                index += 1
            if slots:
                phases.append(Phase(kind, tuple(slots)))
    return Plan(Scenario.SERVER, tuple(paths), tuple(phases))


def _slot(arrival: Arrival, index: int, turn: int, path: str, seed: int, warmup: bool) -> Slot:
    text = words(random.Random(f"{seed}:{turn}:{warmup}"), max(1, arrival.prompt_tokens - PREFIX_WORDS))
    return Slot(
        index,
        turn,
        path,
        text,
        arrival.max_tokens,
        warmup=warmup,
        due_ns=0 if warmup else arrival.at_ns,
        prefix=words(random.Random(f"{seed}:{turn}:{path}:{warmup}"), PREFIX_WORDS),
        prompt_tokens=max(1 + PREFIX_WORDS, arrival.prompt_tokens),
    )


def rate(recorded: Sequence[Arrival]) -> float | None:
    """Requests per second, None for one alone."""
    span_ns = recorded[-1].at_ns
    return (len(recorded) - 1) / (span_ns / 1e9) if span_ns else None
