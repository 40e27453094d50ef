"""A histogram with fixed bounds that takes many values at once.

A live page of a hundred thousand events a second is counted in one process: sorting a stream's values and
bisecting the bounds costs a tenth of looking each value up. Bounds are upper and inclusive, as Prometheus has
them; the last bucket is everything above.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence


class Histogram:
    """Counts per bucket, not cumulated, the sum, and the number of values. Integers, unit the caller's."""

    __slots__ = ("bounds", "count", "counts", "total")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0
        self.count = 0

    def add(self, value: int) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
        self.count += 1

    def add_many(self, values: Iterable[int]) -> None:
        ordered = sorted(values)
        size = len(ordered)
        if size < 4:
            for value in ordered:
                self.add(value)
            return
        counts = self.counts
        # From the bucket of the least value to that of the greatest: most streams span a few.
        index = bisect_left(self.bounds, ordered[0])
        done = 0
        while done < size and index < len(self.bounds):
            upto = bisect_right(ordered, self.bounds[index], done)
            counts[index] += upto - done
            done = upto
            index += 1
        counts[-1] += size - done
        self.total += sum(ordered)
        self.count += size

    def add_counts(self, counts: Iterable[Sequence[int]], total: int) -> None:
        """What another histogram of the same bounds counted: pairs of bucket and number, and the sum of its values."""
        for bucket, number in counts:
            self.counts[bucket] += number
            self.count += number
        self.total += total
