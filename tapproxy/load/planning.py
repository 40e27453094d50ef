"""The plan of a comparison as data: phases of slots, made from settings and a seed.

Rules here: one seed gives one plan, to the byte; every path gets the same prompts in the same rounds, each with a
prefix of its own; nothing here sends, waits or reads a clock. Counts and rates are per path.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from itertools import islice
from typing import Any, Final

from tapproxy.core.errors import ConfigError
from tapproxy.load import schedule
from tapproxy.load.plan import PREFIX_WORDS, Slot, words
from tapproxy.load.prompts import Prompt
from tapproxy.load.trial import Scenario

# Whole blocks of each path, where nobody says how many: enough to turn the order around, few enough to be long.
BLOCKS: Final = {Scenario.OFFLINE: 2, Scenario.CONCURRENCY: 4}
# The arms of a comparison of a path with itself.
FLOOR_PATHS: Final = ("A", "B")
# Where a phase has no end of its own, its slots are numbered from here on, phase after phase.
_ROOM: Final = 1_000_000


class Kind(StrEnum):
    """How the slots of a phase are sent."""

    # The next one when one of ``width`` has ended; one that has a time has it when its turn comes.
    CLOSED = "closed"
    OPEN = "open"  # each when it is due
    BURST = "burst"  # all at once


class Arrivals(StrEnum):
    """How the gaps of ``server`` are drawn."""

    POISSON = "poisson"
    CONSTANT = "constant"


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a request of a round is made of, whatever its number."""

    seed: int
    prompts: tuple[Prompt, ...]
    max_tokens: int

    def slot(self, index: int, turn: int, path: str, **more: Any) -> Slot:
        """The request of that round over that path; its prefix comes from the seed, the round and the path."""
        prompt = self.prompts[turn % len(self.prompts)]
        return Slot(
            index,
            turn,
            path,
            prompt.text,
            prompt.max_tokens or self.max_tokens,
            prefix=words(random.Random(f"{self.seed}:{turn}:{path}"), PREFIX_WORDS),
            messages=prompt.messages,
            prompt_tokens=prompt.tokens,
            **more,
        )

    def order(self, turn: int, paths: Sequence[str]) -> list[str]:
        """The paths in this round's order."""
        return random.Random(f"{self.seed}:{turn}").sample(list(paths), len(paths))


@dataclass(frozen=True, slots=True)
class Endless:
    """Rounds without end, for a phase that ends by the clock."""

    recipe: Recipe
    paths: tuple[str, ...]
    first_round: int
    first_index: int
    block: int = 0

    def slots(self) -> Iterator[Slot]:
        """One after another; whoever takes them stops."""
        index, turn = self.first_index, self.first_round
        while True:
            for path in self.recipe.order(turn, self.paths):
                yield self.recipe.slot(index, turn, path, block=self.block)
                index += 1
            turn += 1


@dataclass(frozen=True, slots=True)
class Phase:
    """Slots that are sent together; the next phase begins when the last of them has ended.

    ``duration_s``: no slot begins later than that after the first that is no warm-up. ``spacing_ns``: between the
    first sends of the ``width`` clients of a closed loop: started at once, with answers of one length, they would go
    on in step, and what is measured were bursts.
    """

    kind: Kind
    slots: tuple[Slot, ...]
    width: int = 1
    duration_s: float | None = None
    endless: Endless | None = None
    spacing_ns: int = 0

    def take(self, part: int = 0, of: int = 1) -> Iterator[Slot]:
        """What that part of so many sends: every so-many-th slot, none where there are fewer clients than parts."""
        of = min(of, self.width) if self.kind is Kind.CLOSED else of
        if part >= of:
            return
        yield from self.slots[part::of]
        if self.endless is not None:
            yield from islice(self.endless.slots(), part, None, of)

    def part_width(self, part: int, of: int) -> int:
        """How many of ``width`` that part has at once."""
        return self.width // of + (part < self.width % of)


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is to be sent, in its order. ``about``: the settings it was made from, as JSON."""

    scenario: Scenario
    paths: tuple[str, ...]
    phases: tuple[Phase, ...]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int | None:
        """Requests in all; None where the clock ends them."""
        if any(phase.endless is not None for phase in self.phases):
            return None
        return sum(len(phase.slots) for phase in self.phases)


@dataclass(frozen=True, slots=True)
class Load:
    """What a plan is made for. ``requests`` or ``duration_s``, per path."""

    scenario: Scenario
    requests: int | None = 100
    duration_s: float | None = None
    rate: float | None = None
    concurrency: int | None = None
    warmup: int = 10
    max_tokens: int = 128
    seed: int = 1
    blocks: int | None = None
    arrivals: Arrivals = Arrivals.POISSON


def make(load: Load, paths: Sequence[str], prompts: Sequence[Prompt]) -> Plan:
    """The plan of a load. Raises ConfigError for one that cannot be."""
    _check(load, paths)
    recipe = Recipe(load.seed, tuple(prompts), load.max_tokens)
    cold, turn = [], 0
    if load.warmup:
        # The first request of all over each path, alone: what it costs is told apart.
        due_ns = 0 if load.scenario is Scenario.SERVER else None
        order = recipe.order(0, paths)
        slots = [recipe.slot(i, 0, path, warmup=True, due_ns=due_ns) for i, path in enumerate(order)]
        cold, turn = [Phase(Kind.CLOSED, tuple(slots))], 1
    maker = {
        Scenario.SINGLE_STREAM: _single_stream,
        Scenario.SERVER: _server,
        Scenario.OFFLINE: _offline,
        Scenario.CONCURRENCY: _concurrency,
    }[load.scenario]
    about = asdict(load)
    return _numbered(Plan(load.scenario, tuple(paths), (*cold, *maker(load, tuple(paths), recipe, turn)), about))


def _check(load: Load, paths: Sequence[str]) -> None:
    if not paths or len(set(paths)) != len(paths):
        raise ConfigError(f"a plan needs paths with different names, got: {', '.join(paths) or 'none'}")
    if (load.requests is None) == (load.duration_s is None):
        raise ConfigError("give --requests or --duration, one of them")
    if load.scenario is Scenario.SERVER and load.rate is None:
        raise ConfigError("--scenario server wants --rate, requests per second on each path")
    if load.scenario is not Scenario.SERVER and load.rate is not None:
        raise ConfigError(f"--rate belongs to --scenario server, not to {load.scenario}")
    if load.scenario is Scenario.CONCURRENCY and load.concurrency is None:
        raise ConfigError("--scenario concurrency wants --concurrency, requests at once")
    if load.scenario is not Scenario.CONCURRENCY and load.concurrency is not None:
        raise ConfigError(f"--concurrency belongs to --scenario concurrency, not to {load.scenario}")
    if load.scenario is Scenario.OFFLINE and load.duration_s is not None:
        raise ConfigError("offline sends everything at once: give --requests, a duration means nothing there")
    for name, value, least in (
        ("--requests", load.requests, 1),
        ("--concurrency", load.concurrency, 1),
        ("--warmup", load.warmup, 0),
        ("--max-tokens", load.max_tokens, 1),
        ("--blocks", load.blocks, 1),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}: expected at least {least}")
    for name, number in (("--rate", load.rate), ("--duration", load.duration_s)):
        if number is not None and not 0 < number < 1e6:
            raise ConfigError(f"{name} is {number:g}: expected a number above 0")


def _single_stream(load: Load, paths: tuple[str, ...], recipe: Recipe, turn: int) -> list[Phase]:
    measured = load.requests or 0
    slots = [
        recipe.slot(0, each, path, warmup=each < load.warmup)
        for each in range(turn, load.warmup + measured)
        for path in recipe.order(each, paths)
    ]
    endless = None if load.requests else Endless(recipe, paths, load.warmup, 0)
    return [Phase(Kind.CLOSED, tuple(slots), 1, load.duration_s, endless)]


def _server(load: Load, paths: tuple[str, ...], recipe: Recipe, turn: int) -> list[Phase]:
    assert load.rate is not None
    warmup = load.warmup - turn
    if load.requests is None:
        assert load.duration_s is not None
        # The warm-up takes its time at the same rate, before.
        times = schedule.poisson_for(paths, load.duration_s + warmup / load.rate, load.rate, load.seed)
        if load.arrivals is Arrivals.CONSTANT:
            count = max(warmup + 1, round(load.duration_s * load.rate) + warmup)
            times = schedule.constant(paths, count, load.rate, load.seed)
    else:
        draw = schedule.poisson if load.arrivals is Arrivals.POISSON else schedule.constant
        times = draw(paths, warmup + load.requests, load.rate, load.seed)
    slots = [
        recipe.slot(0, turn + place, path, warmup=place < warmup, due_ns=due_ns)
        for path in paths
        for place, due_ns in enumerate(times[path])
    ]
    slots.sort(key=lambda slot: slot.due_ns or 0)
    return [Phase(Kind.OPEN, tuple(slots))]


def _offline(load: Load, paths: tuple[str, ...], recipe: Recipe, turn: int) -> list[Phase]:
    assert load.requests is not None
    phases = []
    if load.warmup > turn:
        for path in recipe.order(turn, paths):
            slots = tuple(recipe.slot(0, each, path, warmup=True) for each in range(turn, load.warmup))
            phases.append(Phase(Kind.BURST, slots))
    for path, block, rounds in _blocks(load, paths, recipe, load.requests):
        slots = tuple(recipe.slot(0, load.warmup + each, path, block=block) for each in rounds)
        phases.append(Phase(Kind.BURST, slots, len(slots)))
    return phases


def _concurrency(load: Load, paths: tuple[str, ...], recipe: Recipe, turn: int) -> list[Phase]:
    assert load.concurrency is not None
    blocks = load.blocks or BLOCKS[Scenario.CONCURRENCY]
    phases = []
    for path, block, rounds in _blocks(load, paths, recipe, load.requests):
        # Warm-up leads into the path's first block, without a break: steady state is what follows it.
        before = range(turn, load.warmup) if block == 0 else range(0)
        slots = [recipe.slot(0, each, path, warmup=True) for each in before]
        slots += [recipe.slot(0, load.warmup + each, path, block=block) for each in rounds]
        endless, duration_s = None, None
        if load.duration_s is not None:
            endless = Endless(recipe, (path,), load.warmup + block * _ROOM, 0, block)
            duration_s = load.duration_s / blocks
        phases.append(Phase(Kind.CLOSED, tuple(slots), load.concurrency, duration_s, endless))
    return phases


def _blocks(
    load: Load, paths: tuple[str, ...], recipe: Recipe, requests: int | None
) -> Iterator[tuple[str, int, range]]:
    """(path, block, its rounds). The order of the paths is drawn for the first block and turned round by the next:
    what drifts evenly favours nobody."""
    blocks = load.blocks or BLOCKS[load.scenario]
    if requests is not None:
        blocks = min(blocks, requests)
    order = recipe.order(-1, paths)
    for block in range(blocks):
        rounds = range(0)
        if requests is not None:
            rounds = range(block * requests // blocks, (block + 1) * requests // blocks)
        for path in order if block % 2 == 0 else reversed(order):
            yield path, block, rounds


def _numbered(plan: Plan) -> Plan:
    """Indexes in the order of sending."""
    index = 0
    phases = []
    for number, phase in enumerate(plan.phases):
        if plan.count is None:
            index = max(index, number * _ROOM)
        slots = tuple(replace(slot, index=index + place) for place, slot in enumerate(phase.slots))
        index += len(slots)
        endless = None if phase.endless is None else replace(phase.endless, first_index=index)
        phases.append(replace(phase, slots=slots, endless=endless))
    return replace(plan, phases=tuple(phases))


def twice(plan: Plan) -> Plan:
    """The same load over two paths that are the same, ``A`` and ``B``: the first two of the plan, named so.

    Raises ConfigError for a plan of one path, which has no second arm to take.
    """
    if len(plan.paths) < 2:
        raise ConfigError("--floor of a given plan needs a plan for two paths or more")
    names = dict(zip(plan.paths[:2], FLOOR_PATHS, strict=True))

    def renamed(slots: Sequence[Slot]) -> tuple[Slot, ...]:
        return tuple(replace(slot, path=names[slot.path]) for slot in slots if slot.path in names)

    phases = [replace(phase, slots=renamed(phase.slots)) for phase in plan.phases if phase.endless is None]
    return _numbered(Plan(plan.scenario, FLOOR_PATHS, tuple(phase for phase in phases if phase.slots), plan.about))
