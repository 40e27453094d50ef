"""Single long gaps in streams that else run evenly: the engine put a request aside, or stopped altogether.

Rules here:
* A gap is long against the stream's own median. What others' prefills take of it is no fault of its own, and is
  estimated from what prefills of this run take a token.
* While a request is preempted the others get tokens; when the engine stops, nobody does. Preemptions are counted by
  the engine's page; without it a gap of one stream alone is not blamed on either.
* Requests and moments decide, never the longest gap: one stop of the machine accuses nobody.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Final

from tapproxy.core.stats import percentile
from tapproxy.diagnose import engine_start
from tapproxy.diagnose.engine import LEAST_TOKENS
from tapproxy.diagnose.facts import Fact, Named, Severity, median_ns, ms, percent, text_ms
from tapproxy.diagnose.rule import Case
from tapproxy.diagnose.served import Served, events_between

# latency_tree: engine.preemption against engine.stall, in medians of the stream's own ICL.
PREEMPTED_RATIO: Final = 5.0
STALL_RATIO: Final = 10.0
# A busy machine of two cores stops for 30 ms now and then, and one short of cores for 60; a stop of the engine's own
# is one that people notice.
GAP_NS: Final = 50_000_000
STALL_NS: Final = 100_000_000
# And of the time in which all streams had tokens.
STALL_TIME_SHARE: Final = 0.03
# Tokens that others got meanwhile: a step that was under way when the gap began may still hand out some.
WENT_ON_EVENTS: Final = 3
# Explained by others' prefill: twice what these usually take, since a step may hold several chunks.
PREFILL_SLACK: Final = 2.0
# Of the streams; at so many different moments; and from there on it is an error.
STREAMS_SHARE: Final = 0.05
STALL_STREAMS_SHARE: Final = 0.1
STREAMS_LEAST: Final = 3
MOMENTS_LEAST: Final = 3
MANY_SHARE: Final = 0.2
# Gaps that begin within this time are one moment: streams of one step.
MOMENT_NS: Final = 20_000_000


@dataclass(frozen=True, slots=True)
class Gap:
    """A long gap of one stream. ``preempting``: preemptions were counted around it; None: nobody counts."""

    stream: Served
    from_ns: int
    excess_ns: int
    ratio: float
    went_on: bool
    preempting: bool | None


def preemption(case: Case) -> Named | None:
    """Requests were put aside and computed again."""
    gaps = [gap for gap in long_gaps(case) if gap.went_on and gap.preempting]
    found = _judge(case, gaps, STREAMS_SHARE)
    if found is None:
        return None
    facts, effects, severity, share = found
    counts = [series.rise("preemptions") for series in case.evidence.engines.values()]
    total = sum(count for count in counts if count is not None)
    facts.insert(0, Fact("preemptions counted by the engine", round(total), "preemptions", len(counts), 1))
    kvs = [usage for series in case.evidence.engines.values() if (usage := series.most("kv_usage_share")) is not None]
    if kvs:
        facts.append(Fact("KV usage, most", percent(max(kvs)), "%", len(kvs)))
    because = f"the others got tokens meanwhile, and {round(total)} preemptions were counted"
    rejected = [("engine.stall", because), ("engine.decode", because)]
    return Named(facts, "icl", 0.85, severity, effects, None, rejected, share=share)


def stall(case: Case) -> Named | None:
    """The engine stopped, or left a stream without tokens, for no reason that it tells."""
    gaps = [gap for gap in long_gaps(case) if gap.ratio >= STALL_RATIO and gap.excess_ns >= STALL_NS and _is_stall(gap)]
    found = _judge(case, gaps, STALL_STREAMS_SHARE)
    if found is None:
        return None
    facts, effects, severity, share = found
    lost = sum(effects) / max(1, sum(one.last_ns - one.first_ns for one in case.requests))
    if lost < STALL_TIME_SHARE:
        return None
    facts.append(
        Fact("of the time in which streams had tokens", percent(lost), "%", len(gaps), percent(STALL_TIME_SHARE))
    )
    stopped = sum(not gap.went_on for gap in gaps)
    facts.append(Fact("gaps in which no stream got a token", percent(stopped / len(gaps)), "%", len(gaps)))
    counted = any(gap.preempting is not None for gap in gaps)
    because = "no preemption was counted around the gaps" if counted else "all streams stopped together"
    even = f"the median gap is {text_ms(median([gap.excess_ns / (gap.ratio - 1) for gap in gaps]))}"
    rejected = [("engine.preemption", because), ("engine.decode", even)]
    return Named(facts, "icl", 0.8 if counted else 0.65, severity, effects, None, rejected, share=share)


def unexplained_gaps(case: Case) -> list[Gap]:
    """Gaps of single streams of which nothing tells whether they were preempted."""
    return [gap for gap in long_gaps(case) if gap.ratio >= STALL_RATIO and gap.went_on and gap.preempting is None]


def long_gaps(case: Case) -> list[Gap]:
    """Every gap that others' prefills do not explain. Streams that their client held up are left out."""
    if not case.view.engine_side:
        return []  # a proxy may have made them
    cold = engine_start.cold_ids(case)
    warm_ns = max((one.first_ns for one in case.requests if id(one.record) in cold), default=0)
    streams = [one for one in case.requests if len(one.tokens_ns) >= LEAST_TOKENS and _reads_freely(one)]
    everybody = sorted(at_ns for one in streams for at_ns in one.tokens_ns)
    token_ns = _prefill_token_ns([one for one in case.requests if id(one.record) not in cold])
    by_start = sorted(case.requests, key=lambda one: one.prefill_from_ns)
    starts = [one.prefill_from_ns for one in by_start]
    longest_ns = max((one.first_ns - one.prefill_from_ns for one in by_start), default=0)
    preempted = _Preempted(case)
    found = []
    for stream in streams:
        apart = [gap for gap in stream.gaps_ns if gap > 0]
        middle_ns = median(apart) if apart else 0
        least_ns = max(PREEMPTED_RATIO * middle_ns, middle_ns + GAP_NS)
        for from_ns, gap_ns in zip(stream.tokens_ns, stream.gaps_ns, strict=False):
            if gap_ns < least_ns or from_ns < warm_ns or middle_ns == 0:
                continue
            to_ns = from_ns + gap_ns
            begun = by_start[bisect_left(starts, from_ns - longest_ns) : bisect_left(starts, to_ns)]
            others = [one for one in begun if one is not stream and one.first_ns > from_ns]
            explained_ns = PREFILL_SLACK * sum((one.prompt_tokens or 0) * token_ns for one in others)
            if gap_ns - middle_ns <= explained_ns:
                continue
            # Others' tokens of the step before and of the one after come with its own.
            near_ns = round(middle_ns / 2)
            went_on = events_between(everybody, from_ns + near_ns, to_ns - near_ns) >= WENT_ON_EVENTS
            excess_ns = round(gap_ns - middle_ns)
            ratio = gap_ns / middle_ns
            found.append(Gap(stream, from_ns, excess_ns, ratio, went_on, preempted.within(from_ns, to_ns)))
    return found


def _is_stall(gap: Gap) -> bool:
    if gap.went_on:
        return gap.preempting is False
    # Others wait as well while a preempted request is computed again.
    return not gap.preempting


def _judge(case: Case, gaps: Sequence[Gap], least_share: float) -> tuple[list[Fact], list[int], Severity, float] | None:
    """(facts, effect of each gap, severity, share of these streams' decode time), or None where they are too few."""
    streams = [one for one in case.requests if len(one.tokens_ns) >= LEAST_TOKENS]
    hit = {id(gap.stream.record): gap.stream for gap in gaps}
    if len(hit) < max(STREAMS_LEAST, least_share * len(streams)) or _moments(gaps) < MOMENTS_LEAST:
        return None
    share = len(hit) / len(streams)
    effects = [gap.excess_ns for gap in gaps]
    ratio = median([gap.ratio for gap in gaps])
    facts = [
        Fact("streams with such a gap", percent(share), "%", len(streams), percent(least_share)),
        Fact("moments at which they began", _moments(gaps), "moments", len(gaps), MOMENTS_LEAST),
        Fact("gap beyond the stream's median ICL, P50", ms(median_ns(effects)), "ms", len(gaps), ms(GAP_NS)),
        Fact("gap ÷ the stream's median ICL, P50", round(ratio, 1), "times", len(gaps), PREEMPTED_RATIO),
    ]
    decode_ns = sum(one.last_ns - one.first_ns for one in hit.values())
    return facts, effects, "error" if share >= MANY_SHARE else "warning", sum(effects) / max(1, decode_ns)


def _moments(gaps: Sequence[Gap]) -> int:
    """How many different times they began at."""
    count, last_ns = 0, None
    for from_ns in sorted(gap.from_ns for gap in gaps):
        if last_ns is None or from_ns - last_ns > MOMENT_NS:
            count += 1
        last_ns = from_ns
    return count


def _prefill_token_ns(requests: Sequence[Served]) -> float:
    """What prefill takes a prompt token at worst (P90), the rest of its step included; where it is not told, TTFT at
    the median, which holds more. 0 where no length is known."""
    sized = [(one, one.prompt_tokens) for one in requests if one.prompt_tokens]
    told = [one.prefill_ns / tokens for one, tokens in sized if one.prefill_ns is not None]
    if told:
        return percentile(told, 0.9) or 0.0
    return percentile([one.ttft_ns / tokens for one, tokens in sized], 0.5) or 0.0


class _Preempted:
    """When the engines' pages counted preemptions."""

    def __init__(self, case: Case) -> None:
        self._counts: list[tuple[list[int], list[float]]] = []
        for series in case.evidence.engines.values():
            read = [(one.t_mono_ns, one.values["preemptions"]) for one in series.samples if "preemptions" in one.values]
            if len(read) > 1:
                self._counts.append(([at_ns for at_ns, _ in read], [count for _, count in read]))

    def within(self, from_ns: int, to_ns: int) -> bool | None:
        """Whether any was counted between the reading before and the one after this time; None: nobody counts."""
        if not self._counts:
            return None
        for times, counts in self._counts:
            first, last = max(0, bisect_right(times, from_ns) - 1), min(len(times) - 1, bisect_left(times, to_ns))
            # A counter that fell was started anew.
            if any(after > before for before, after in pairwise(counts[first : last + 1])):
                return True
        return False


def _reads_freely(one: Served) -> bool:
    return not one.record.downstream.stalled_ns
