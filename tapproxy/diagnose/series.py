"""The samples of one source over time, and what may be taken from them: means of gauges, rises of counters.

Rules here: a counter that fell was started anew, so its rise is what it has counted since, and the restart is told. A
window takes one reading before its start and one after its end, where there are any, since a counter's rise within it
can only be bounded by readings around it. Nothing read in the window: None, never 0.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean, median

from tapproxy.core.sample import Sample


@dataclass(slots=True)
class Series:
    """One source's samples in time order; those that could not be read are kept apart."""

    source: str
    samples: list[Sample] = field(default_factory=list)
    failed: list[Sample] = field(default_factory=list)

    @classmethod
    def of(cls, source: str, samples: Iterable[Sample]) -> Series:
        """Sorted by time; readings with a problem go to ``failed``."""
        ordered = sorted(samples, key=lambda sample: sample.t_mono_ns)
        good = [sample for sample in ordered if sample.problem is None]
        return cls(source, good, [sample for sample in ordered if sample.problem is not None])

    def window(self, from_ns: int, to_ns: int) -> Series:
        """The samples of this span of monotonic time, with the one before it and the one after it."""
        times = [sample.t_mono_ns for sample in self.samples]
        first, last = max(0, bisect_right(times, from_ns) - 1), bisect_left(times, to_ns) + 1
        return Series(self.source, self.samples[first:last], self.failed)

    def of_boot(self, boot_id: str | None) -> Series:
        """Without the readings of another boot, whose clock is another; those that name none stay."""
        if boot_id is None:
            return self
        return Series(self.source, [one for one in self.samples if one.boot_id in (None, boot_id)], self.failed)

    def inside(self, from_ns: int, to_ns: int) -> list[Sample]:
        """The readings within this span alone."""
        return [sample for sample in self.samples if from_ns <= sample.t_mono_ns <= to_ns]

    def values(self, signal: str) -> list[float]:
        """Every reading of a gauge, in time order."""
        return [sample.values[signal] for sample in self.samples if signal in sample.values]

    def mean(self, gauge: str) -> float | None:
        values = self.values(gauge)
        return fmean(values) if values else None

    def median(self, gauge: str) -> float | None:
        values = self.values(gauge)
        return median(values) if values else None

    def most(self, gauge: str) -> float | None:
        return max(self.values(gauge), default=None)

    def share(self, gauge: str, holds: Callable[[float], bool]) -> float | None:
        """The share of the readings for which it holds."""
        values = self.values(gauge)
        return sum(map(holds, values)) / len(values) if values else None

    def rise(self, counter: str) -> float | None:
        """What it counted from the first to the last reading. None with fewer than two readings."""
        values = self.values(counter)
        if len(values) < 2:
            return None
        return sum(b - a if b >= a else b for a, b in pairwise(values))

    def mean_of(self, histogram: str) -> float | None:
        """Δsum / Δcount: the mean of what was observed in between. None where nothing was."""
        total, count = self.rise(f"{histogram}_sum"), self.count_of(histogram)
        return total / count if total is not None and count else None

    def count_of(self, histogram: str) -> float | None:
        """How many observations came in between."""
        return self.rise(f"{histogram}_count")

    def seconds(self) -> float | None:
        """From the first to the last reading."""
        return (self.samples[-1].t_mono_ns - self.samples[0].t_mono_ns) / 1e9 if len(self.samples) > 1 else None

    def rate(self, counter: str) -> float | None:
        """Rise a second."""
        rise, seconds = self.rise(counter), self.seconds()
        return rise / seconds if rise is not None and seconds else None

    def restarts(self, counters: Sequence[str] = ("finished", "output_tokens", "prompt_tokens")) -> list[int]:
        """The monotonic times of the readings at which a counter had fallen: the process had started anew."""
        return [
            b.t_mono_ns
            for a, b in pairwise(self.samples)
            if any(b.values.get(name, 0.0) < a.values.get(name, 0.0) for name in counters if name in b.values)
        ]

    def latest(self, signal: str) -> float | None:
        values = self.values(signal)
        return values[-1] if values else None

    def fact(self, name: str) -> str | None:
        """The latest word of that name."""
        return next((sample.facts[name] for sample in reversed(self.samples) if name in sample.facts), None)

    def absent(self) -> dict[str, str]:
        """Every signal that was not there, and how to turn it on: not what a later reading had. On disk a reading names
        only what changed, so that the latest alone does not tell."""
        found: dict[str, str] = {}
        for sample in self.samples:
            there = {name.removesuffix("_sum") for name in sample.values}
            found = {name: way for name, way in (found | sample.absent).items() if name not in there}
        return found

    def how_to_get(self, signal: str) -> str | None:
        """How to turn an absent signal on, as whoever read it said."""
        return next((sample.absent[signal] for sample in reversed(self.samples) if signal in sample.absent), None)
