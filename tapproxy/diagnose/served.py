"""The requests as the engine had them: when each was asked, what it was told to have waited for, how its tokens came.

Rules here: nothing is judged. Times are monotonic ns of the vantage nearest to the engine, from the request's last
byte out. What the engine told of a request (its response, a span) goes before what is read from stamps; what
neither tells is None.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from tapproxy.core.record import Record
from tapproxy.diagnose.measures import token_events
from tapproxy.diagnose.view import View

# A response head that comes with the first token tells of no frontend; on a busy machine the two are a ms apart.
_HEAD_BEFORE_NS: Final = 2_000_000
# The head may come late for other reasons than the frontend: no later than what the engine's own times leave.
_HEAD_SLACK_NS: Final = 5_000_000


@dataclass(frozen=True, slots=True)
class Served:
    """One request. ``gaps_ns``: between its token events. ``prompt_tokens``: those not found in the prefix cache.
    ``in_flight``: others on their way when it was asked. ``frontend_from``: where ``frontend_ns`` is from."""

    record: Record
    asked_ns: int
    first_ns: int
    last_ns: int
    tokens_ns: Sequence[int]
    gaps_ns: Sequence[int]
    prompt_tokens: int | None
    in_flight: int
    frontend_ns: int | None
    frontend_from: str | None
    queue_ns: int | None
    prefill_ns: int | None

    @property
    def kind(self) -> tuple[str | None, str]:
        """Model and route: requests of another kind, of another engine perhaps, are no measure for this one."""
        return self.record.model, (self.record.path or "").partition("?")[0]

    @property
    def ttft_ns(self) -> int:
        """From the request's last byte out to its first token in."""
        return self.first_ns - self.asked_ns

    @property
    def pace_ns(self) -> float | None:
        """Mean time a token, after the first."""
        tokens = self.record.usage.completion_tokens
        if tokens is None:
            tokens = len(self.tokens_ns)
        return (self.last_ns - self.first_ns) / (tokens - 1) if tokens > 1 and len(self.tokens_ns) > 1 else None

    @property
    def prefill_from_ns(self) -> int:
        """When its prefill began, or where that is not told, when it was asked: then it may have begun later."""
        return self.asked_ns if self.prefill_ns is None else self.first_ns - self.prefill_ns


def by_kind(requests: Iterable[Served]) -> list[list[Served]]:
    """The requests of each kind in their order, the kind with most requests first."""
    kinds: dict[tuple[str | None, str], list[Served]] = defaultdict(list)
    for one in requests:
        kinds[one.kind].append(one)
    return sorted(kinds.values(), key=len, reverse=True)


def served(view: View, trip_ns: int | None = None) -> list[Served]:
    """The requests of a run in the order they were asked; of the vantage next to the engine where there is one.
    ``trip_ns``: the least round trip to the engine, which is no part of its frontend."""
    records = view.engine_side or [chain.seen()[-1] for chain in view.usable]
    rows = [(record, token_events(record)) for record in records]
    rows = [(record, tokens) for record, tokens in rows if tokens and record.upstream.write_start is not None]
    spans = [(_asked_ns(record), record.t0_mono_ns + record.events.arrived[tokens[-1]]) for record, tokens in rows]
    starts, ends = sorted(start for start, _ in spans), sorted(end for _, end in spans)
    found = []
    for (record, tokens), (asked_ns, last_ns) in zip(rows, spans, strict=True):
        others = bisect_right(starts, asked_ns) - bisect_right(ends, asked_ns) - 1
        times = [record.t0_mono_ns + record.events.arrived[index] for index in tokens]
        frontend_ns, source = _frontend(record, times[0] - asked_ns, trip_ns or 0)
        found.append(
            Served(
                record,
                asked_ns,
                times[0],
                last_ns,
                times,
                [b - a for a, b in pairwise(times)],
                _computed_tokens(record),
                max(0, others),
                frontend_ns,
                source,
                record.engine.queue_ns,
                record.engine.prefill_ns,
            )
        )
    return sorted(found, key=lambda one: one.asked_ns)


class Prefills:
    """When any prefill of these requests was under way. A stream's own lies before its tokens."""

    def __init__(self, requests: Sequence[Served]) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start_ns, end_ns in sorted((one.prefill_from_ns, one.first_ns) for one in requests):
            if self._ends and start_ns <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end_ns)
            else:
                self._starts.append(start_ns)
                self._ends.append(end_ns)

    def within(self, from_ns: int, to_ns: int) -> bool:
        """Whether one, or a chunk of it, was computed between the two."""
        index = bisect_right(self._ends, from_ns)
        return index < len(self._starts) and self._starts[index] < to_ns


def pace_ns(requests: Sequence[Served]) -> float | None:
    """The median over the requests of their own median gap between token events that came in different reads."""
    middles = [median(apart) for one in requests if (apart := [gap for gap in one.gaps_ns if gap > 0])]
    return median(middles) if middles else None


def events_between(times_ns: Sequence[int], from_ns: int, to_ns: int) -> int:
    """How many of these sorted times lie between the two, ends excluded."""
    return max(0, bisect_left(times_ns, to_ns) - bisect_right(times_ns, from_ns))


def _asked_ns(record: Record) -> int:
    upstream = record.upstream
    given = upstream.write_end if upstream.write_end is not None else upstream.write_start
    return record.t0_mono_ns + (given or 0)


def _computed_tokens(record: Record) -> int | None:
    prompt = record.usage.prompt_tokens
    return None if prompt is None else max(0, prompt - (record.usage.cached_tokens or 0))


def _frontend(record: Record, ttft_ns: int, trip_ns: int) -> tuple[int | None, str | None]:
    engine = record.engine
    if engine.frontend_ns is not None:
        return engine.frontend_ns, f"told by the engine ({engine.source or 'source unknown'})"
    rest_ns = None
    if engine.queue_ns is not None and engine.prefill_ns is not None:
        rest_ns = max(0, ttft_ns - trip_ns - engine.queue_ns - engine.prefill_ns)
    head_ns = None
    if record.upstream.head is not None:
        head_ns = max(0, record.t0_mono_ns + record.upstream.head - _asked_ns(record) - trip_ns)
    # vLLM sends the head when the frontend is done, before the queue.
    early = head_ns is not None and ttft_ns - trip_ns - head_ns >= _HEAD_BEFORE_NS
    if head_ns is not None and early and (rest_ns is None or head_ns <= rest_ns + _HEAD_SLACK_NS):
        return head_ns, "response head, sent when the frontend is done"
    return (None, None) if rest_ns is None else (rest_ns, "TTFT less the queue and prefill that the engine told")
