"""Steps that took much longer for the same work than others of the run: something else held the engine up in them.

Rules here: work is the prompt tokens of all requests whose prefills overlapped, so that a batch is no fault; prompts
are compared with others of much the same length, since a step costs something by itself. What came to the engine by
another way is not seen here: where its page counted much more than these requests, nothing is said.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final

from tapproxy.diagnose.facts import Fact, median_ns, ms, percent
from tapproxy.diagnose.rule import Case
from tapproxy.diagnose.served import Served

# Decodes in the same step cost two or three times an empty step at most; and a tenth of a second is noticed.
DRAGGED_RATIO: Final = 5.0
DRAGGED_NS: Final = 100_000_000
# The better steps are the fastest fifth, of enough requests to have one.
BETTER_SHARE: Final = 0.2
BETTER_LEAST: Final = 5
REQUESTS_SHARE: Final = 0.2
REQUESTS_LEAST: Final = 5
# The engine counted no more requests than these, give or take those at the edges.
OTHERS_SHARE: Final = 0.2


@dataclass(frozen=True, slots=True)
class Dragged:
    """Requests whose prefill took much longer than the same work took others. ``excess_ns``: how much, of each."""

    slow: Sequence[Served]
    excess_ns: Sequence[int]
    ratio: float
    compared: int

    @property
    def whole_ns(self) -> int:
        return median_ns([one.ttft_ns for one in self.slow]) or 0

    def facts(self) -> list[Fact]:
        count = len(self.slow)
        share = Fact(
            "requests whose prefill took much longer than the same work in other steps",
            percent(count / self.compared),
            "%",
            self.compared,
            percent(REQUESTS_SHARE),
        )
        return [
            share,
            Fact(
                "their prefill a token, against the fastest fifth", round(self.ratio, 1), "times", count, DRAGGED_RATIO
            ),
            Fact("their prefill, P50", ms(median_ns([one.prefill_ns or 0 for one in self.slow])), "ms", count),
        ]


def dragged(case: Case, cold: set[int] | frozenset[int] = frozenset()) -> Dragged | None:
    """``cold``: identities of records that came while the engine was still warming up."""
    told = [one for one in case.requests if one.prefill_ns and one.prompt_tokens and id(one.record) not in cold]
    counted = [count for each in case.evidence.engines.values() if (count := each.count_of("prefill_s"))]
    if counted and sum(counted) > (1 + OTHERS_SHARE) * len(case.requests):
        return None
    classes: dict[int, list[tuple[float, Served, float]]] = defaultdict(list)
    for one, tokens in zip(told, _tokens_then(told), strict=True):
        classes[(one.prompt_tokens or 0).bit_length()].append(((one.prefill_ns or 0) / tokens, one, tokens))
    slow, excess, ratios = [], [], []
    for alike in classes.values():
        rates = sorted(rate for rate, _, _ in alike)
        place = int(BETTER_SHARE * len(rates))
        if place < BETTER_LEAST:
            continue
        best = rates[place]
        for rate, one, tokens in alike:
            more_ns = rate * tokens - best * tokens
            if rate >= DRAGGED_RATIO * best and more_ns >= DRAGGED_NS:
                slow.append(one)
                excess.append(round(more_ns))
                ratios.append(rate / best)
    if len(slow) < max(REQUESTS_LEAST, REQUESTS_SHARE * len(told)):
        return None
    return Dragged(slow, excess, sorted(ratios)[len(ratios) // 2], len(told))


def _tokens_then(told: Sequence[Served]) -> list[float]:
    """Of each, the prompt tokens of all whose prefill overlapped with its own, itself among them."""
    starts = sorted((one.prefill_from_ns, one.prompt_tokens or 0) for one in told)
    ends = sorted((one.first_ns, one.prompt_tokens or 0) for one in told)
    begun, ended = ([0, *accumulate(tokens for _, tokens in each)] for each in (starts, ends))
    start_times, end_times = [at for at, _ in starts], [at for at, _ in ends]
    return [
        float(begun[bisect_left(start_times, one.first_ns)] - ended[bisect_right(end_times, one.prefill_from_ns)])
        for one in told
    ]
