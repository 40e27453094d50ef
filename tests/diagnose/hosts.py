"""Two taps on two hosts: a network of random delays, and the inner tap's records on a clock of its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace

from tapproxy.core.record import Record
from tests.diagnose.make import MS, Proxy, even, passes, taps

OTHER_BOOT = "boot-2"
TIMES = {
    "request": ("head", "body_end"),
    "upstream": ("wanted", "acquired", "write_start", "write_end", "head", "first_byte", "end"),
    "downstream": ("head", "first_byte", "end"),
    "events": ("arrived", "read_at", "sent"),
}


@dataclass(frozen=True)
class Way:
    """One direction of the hop in ms: never less than ``least``, on average ``more`` beyond that; one in twenty ten
    times as much."""

    least: float = 0.2
    more: float = 0.3

    def take(self, chance: random.Random) -> int:
        tail = 10 if chance.random() < 0.05 else 1
        return round((self.least + (chance.expovariate(1 / self.more) * tail if self.more else 0)) * MS)


@dataclass(frozen=True)
class Other:
    """The inner host's clock: the outer one's is ``offset_s`` more, and gains ``skew_ppm``. At ``step_at_s`` (on the
    outer one) it jumps by ``step_ms`` more."""

    offset_s: float = 3.7
    skew_ppm: float = 50
    step_at_s: float | None = None
    step_ms: float = 0
    bend_ppm: float = 0  # after step_at_s

    def at(self, near_ns: int) -> int:
        far = (near_ns - self.offset_s * 1e9) / (1 + self.skew_ppm * 1e-6)
        if self.step_at_s is not None and near_ns > self.step_at_s * 1e9:
            far -= self.step_ms * MS + self.bend_ppm * 1e-6 * (near_ns - self.step_at_s * 1e9)
        return round(far)

    def record(self, record: Record) -> Record:
        """The record as a tap on that host would have written it; its wall clock is off by the offset too."""
        start = self.at(record.t0_mono_ns)
        made = replace(record, t0_mono_ns=start, boot_id=OTHER_BOOT)
        made.t0_unix_ns = record.t0_unix_ns - round(self.offset_s * 1e9)
        for part, names in TIMES.items():
            moved = copy(getattr(record, part))
            for name in names:
                value = getattr(moved, name)
                several = value if isinstance(value, list) else [value]
                found = [None if at is None else self.at(record.t0_mono_ns + at) - start for at in several]
                setattr(moved, name, found if isinstance(value, list) else found[0])
            setattr(made, part, moved)
        return made


def network(
    requests: int,
    *,
    proxy: Proxy = passes,
    way_in: Way = Way(),
    way_out: Way = Way(0.0, 0.3),  # beside what ``proxy`` takes
    every_ms: float = 1000,
    tokens: int = 20,
    seed: int = 1,
) -> tuple[list[Record], list[Record]]:
    """(outer, inner) on one clock: ``taps`` with random delays both ways, about a request every ``every_ms``."""
    chance = random.Random(seed)
    outer, inner = taps(proxy, requests=requests, engine=even(tokens))
    start = 1000.0 * MS
    for near, far in zip(outer, inner, strict=True):
        start += chance.expovariate(1 / (every_ms * MS))
        # As made, the inner tap's first byte comes 0.3 ms after the outer one's.
        late = way_in.take(chance) - 2 * MS // 10
        arrived: list[int] = []
        for at in near.events.arrived:
            arrived.append(max(at + late + way_out.take(chance), arrived[-1] if arrived else 0))
        near.events.arrived = near.events.read_at = arrived
        near.events.sent = [at + MS // 10 for at in arrived]
        near.upstream.head = 3 * MS // 10 + late + (far.downstream.head or 0) + MS // 5 + way_out.take(chance)
        near.upstream.first_byte, near.upstream.end = arrived[0], arrived[-1]
        near.downstream.end = arrived[-1] + MS // 10
        near.t0_mono_ns = near.t0_unix_ns = round(start)
        far.t0_mono_ns = far.t0_unix_ns = round(start) + 3 * MS // 10 + late
    return outer, inner


def elsewhere(inner: Sequence[Record], clock: Other) -> list[Record]:
    """The inner tap's records from another host."""
    return [clock.record(record) for record in inner]
