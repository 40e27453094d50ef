"""Records and samples of other hosts, put on the clock of the host that is nearest to the client.

Rules here: one boot, one clock: nothing on the outermost vantage's boot is moved, and two records of one boot keep
their distance exactly. What is moved carries how far it may be off. What cannot be moved stays as it is, and whoever
compares it is told so by its boot id.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Final

from tapproxy.core.record import Record
from tapproxy.core.sample import Sample
from tapproxy.diagnose.clock import Clock, Reading, fit
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.pairing import Pair, pair
from tapproxy.diagnose.series import Series


@dataclass
class Moved(Record):
    """A record on another boot's clock: times are what they would be there, give or take ``clock_bound_ns``; the rate
    of that clock is off by ``skew_bound`` at most."""

    own_boot_id: str | None = None
    clock_bound_ns: int = 0
    skew_bound: float = 0.0


@dataclass(frozen=True, slots=True)
class Clocks:
    """Every pair of boots that exchanges were seen on. ``home``: the boots whose clock counts."""

    home: frozenset[str] = frozenset()
    clocks: list[Clock] = field(default_factory=list)

    def on_home(self, boot_id: str | None, from_ns: int, to_ns: int) -> tuple[str, Reading] | None:
        """(home boot, offset to its clock) of a span of time on some boot; None where there is none."""
        offset_ns, skew, bound_ns, skew_bound, passed = 0, 0.0, 0, 0.0, set[str]()
        while boot_id is not None and boot_id not in self.home:
            passed.add(boot_id)
            start_ns, end_ns = from_ns + offset_ns, to_ns + offset_ns
            ways = [c for c in self.clocks if c.far_boot == boot_id and c.pieces and c.near_boot not in passed]
            if not ways:
                return None
            # A host that was started anew in between has two boots: the one that was there at that time counts.
            clock = min(ways, key=lambda each: _away_ns(each, start_ns, end_ns))
            found = clock.over(start_ns, end_ns)
            if found is None:
                return None
            offset_ns += found.offset_ns
            skew += found.skew
            bound_ns += found.bound_ns
            skew_bound += found.skew_bound
            boot_id = clock.near_boot
        return None if boot_id is None else (boot_id, Reading(offset_ns, skew, bound_ns, skew_bound))

    def record(self, record: Record) -> Record:
        """The record on its home clock, or as it is where that is its own or unknown."""
        if not self.clocks or record.boot_id is None or record.boot_id in self.home:
            return record
        start_ns = record.t0_mono_ns
        found = self.on_home(record.boot_id, start_ns, start_ns + _length_ns(record))
        return record if found is None else _moved(record, *found)

    def reason(self, near: Record, far: Record) -> str | None:
        """Why two records of different hosts stand on no common clock, where that is why."""
        boots = {near.boot_id, far.boot_id}
        if len(boots) == 1 or None in boots or not self.clocks:
            return None
        why = next((each.reason for each in self.clocks if not each.pieces and each.far_boot in boots), None)
        return why or "the hosts' clocks jumped against each other at that time"

    def records(self, records: Sequence[Record]) -> Sequence[Record]:
        """Each on its home clock."""
        return [self.record(record) for record in records] if self.clocks else records

    def slack_ns(self, records: Iterable[Record]) -> int:
        """How far any of these may be off."""
        return max((each.clock_bound_ns for each in records if isinstance(each, Moved)), default=0)

    def sample(self, sample: Sample) -> Sample:
        """The sample on its home clock, or as it is."""
        found = self.on_home(sample.boot_id, sample.t_mono_ns, sample.t_mono_ns) if self.clocks else None
        if found is None or found[0] == sample.boot_id:
            return sample
        return replace(sample, boot_id=found[0], t_mono_ns=sample.t_mono_ns + found[1].offset_ns)


def align(vantages: Sequence[Sequence[Record]]) -> Clocks:
    """The clocks of the boots that these vantages (outermost first) were on. Empty where all are on one."""
    if len({record.boot_id for records in vantages for record in records} - {None}) < 2:
        return Clocks()
    home = frozenset(record.boot_id for record in vantages[0] if record.boot_id is not None)
    seen: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for near, far in pairwise(vantages):
        for each in pair(near, far).pairs:
            boots = each.outer.boot_id, each.inner.boot_id
            if boots[0] is not None and boots[1] is not None and boots[0] != boots[1]:
                seen[boots[0], boots[1]].append(each)
    return Clocks(home, [fit(near, far, pairs) for (near, far), pairs in sorted(seen.items())])


def bound_between(near: Record, far: Record) -> int:
    """How far a time from one of these records to the other may be off for their clocks' sake, in ns."""
    if _own_boot(near) == _own_boot(far):
        return 0
    bounds = [each.clock_bound_ns if isinstance(each, Moved) else 0 for each in (near, far)]
    # What both were moved by (client's host ← outer's) is in both, and drops out of their difference.
    return abs(bounds[1] - bounds[0])


def drift_between(near: Record, far: Record, span_ns: int) -> int:
    """How far the *difference* of two times between these records, ``span_ns`` apart, may be off: the offset drops out
    of it, and only what the clocks may have drifted in between remains."""
    if _own_boot(near) == _own_boot(far):
        return 0
    skews = [each.skew_bound if isinstance(each, Moved) else 0.0 for each in (near, far)]
    return min(2 * bound_between(near, far), round(abs(skews[1] - skews[0]) * abs(span_ns)))


def crossing_bound_ns(near: Record, far: Record, span_ns: int, *, both_ways: bool) -> int:
    """What two clocks leave uncertain of the time between two vantages: of the way in and the way out together
    (``both_ways``, ``span_ns`` apart) the offset drops out, of one of them it does not."""
    return drift_between(near, far, span_ns) if both_ways else bound_between(near, far)


def evidence_on_home(evidence: Evidence, clocks: Clocks) -> Evidence:
    """What was sampled on other hosts, on the clock that their records were put on."""
    if not clocks.clocks:
        return evidence

    def series(group: dict[str, Series]) -> dict[str, Series]:
        return {
            name: Series(each.source, [*map(clocks.sample, each.samples)], [*map(clocks.sample, each.failed)])
            for name, each in group.items()
        }

    return replace(
        evidence,
        engines=series(evidence.engines),
        hosts=series(evidence.hosts),
        gpus=series(evidence.gpus),
        routers=series(evidence.routers),
        spans=[*map(clocks.sample, evidence.spans)],
        launches=[*map(clocks.sample, evidence.launches)],
    )


def _own_boot(record: Record) -> str | None:
    return record.own_boot_id if isinstance(record, Moved) else record.boot_id


def _away_ns(clock: Clock, from_ns: int, to_ns: int) -> int:
    """How far a span lies outside the time that the clock was fitted over."""
    return max(0, clock.pieces[0].from_ns - from_ns, to_ns - clock.pieces[-1].to_ns)


def _length_ns(record: Record) -> int:
    known = (record.upstream.end, record.downstream.end, *record.events.arrived[-1:], *record.events.sent[-1:])
    return max((at for at in known if at is not None), default=0)


def _moved(record: Record, home: str, reading: Reading) -> Moved:
    values = {item.name: getattr(record, item.name) for item in _GIVEN}
    values["t0_mono_ns"] = record.t0_mono_ns + reading.offset_ns
    values["boot_id"] = home
    if reading.skew:
        values.update(_stretched(record, reading.skew))
    return Moved(**values, own_boot_id=record.boot_id, clock_bound_ns=reading.bound_ns, skew_bound=reading.skew_bound)


def _stretched(record: Record, skew: float) -> dict[str, object]:
    """The parts with times from t0, as another clock would have counted them. Durations within one host are left: of
    a second a clock of 500 ppm makes half a ms."""
    out = {part: _copy(getattr(record, part), names, skew) for part, names in _TIMES.items()}
    if record.events.acked is not None:
        out["events"] = _copy(out["events"], ("acked",), skew)
    return out


def _copy(part: object, names: Iterable[str], skew: float) -> object:
    def one(value: int | None) -> int | None:
        return None if value is None else value + round(value * skew)

    out = copy(part)
    for name in names:
        value = getattr(part, name)
        setattr(out, name, [one(each) for each in value] if isinstance(value, list) else one(value))
    return out


_TIMES: Final = {
    "request": ("head", "body_end"),
    "upstream": ("wanted", "acquired", "write_start", "write_end", "head", "first_byte", "end"),
    "downstream": ("head", "first_byte", "end"),
    "events": ("arrived", "read_at", "sent"),
}
_GIVEN: Final = tuple(item for item in fields(Record) if item.init)
