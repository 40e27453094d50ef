"""What a prompt costs before the engine's scheduler sees it: the template's and the tokenizer's time, on this host.

Rules here: times are the processor's, of this thread, so that a busy host makes them no longer; that it was busy is
said. Every prompt is timed once, in an order that is no order of the file, after some were done untimed: a
tokenizer keeps words it has seen, in an engine as well, but no engine gets one prompt over and over. Percentiles are
those of the prompts measured, nearest rank. Nothing is extrapolated beyond the longest of them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean, median
from typing import Any, Final, Protocol

from tapproxy.core.stats import percentile
from tapproxy.load.asked import Asked
from tapproxy.load.template import RefusedError, Template

AT_TOKENS: Final = (8192, 32768, 131072)
# Fewer prompts give no 95th percentile that is not their maximum.
P95_LEAST: Final = 20
# A line wants prompts of different length: as many, and the longest so many times the shortest.
_FIT_LEAST: Final = 8
_FIT_SPREAD: Final = 2.0
# Slopes of all pairs: more points than this are thinned, since pairs grow with their square.
_FIT_POINTS: Final = 300
_UNTIMED: Final = 8
# Others had the processor for so much of the time.
_BUSY_SHARE: Final = 0.1
# The longer half of the prompts costs so much more for each further token than the shorter half: that is no line.
_BENT: Final = 1.5
_HALF_SPREAD: Final = 1.2


class Tokenizes(Protocol):
    """Counts the tokens of a text; ``special``: with those that a model wants around a plain prompt."""

    def tokens(self, text: str, special: bool) -> int: ...


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one prompt. ``template_ns``: None where none was rendered; ``tool_tokens``: None without tools."""

    tokens: int
    characters: int
    template_ns: int | None
    tokenize_ns: int
    tool_tokens: int | None = None

    @property
    def total_ns(self) -> int:
        return (self.template_ns or 0) + self.tokenize_ns


@dataclass(slots=True)
class Measured:
    """``refused``: how → prompts that the template did not render. ``left``: not measured, the time was up."""

    costs: list[Cost] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    left: int = 0
    wall_ns: int = 0
    cpu_ns: int = 0


def measure(
    asked: Sequence[Asked],
    tokenizer: Tokenizes,
    template: Template | None,
    *,
    budget_s: float,
    seed: int = 1,
    now_ns: Callable[[], int] = time.perf_counter_ns,
    cpu_ns: Callable[[], int] = time.thread_time_ns,
) -> Iterator[Measured]:
    """Yields the state after each prompt, the last one complete. ``budget_s``: no prompt is begun after it."""
    order = list(range(len(asked)))
    random.Random(f"tokens:{seed}").shuffle(order)
    for index in order[:_UNTIMED]:
        _one(asked[index], tokenizer, template, cpu_ns, {})
    state = Measured()
    began_ns = now_ns()
    for done, index in enumerate(order):
        if now_ns() - began_ns > budget_s * 1e9:
            state.left = len(order) - done
            break
        before_ns, before_cpu_ns = now_ns(), cpu_ns()
        cost = _one(asked[index], tokenizer, template, cpu_ns, state.refused)
        state.wall_ns += now_ns() - before_ns
        state.cpu_ns += cpu_ns() - before_cpu_ns
        if cost is not None:
            state.costs.append(cost)
        yield state
    yield state


def _one(
    asked: Asked,
    tokenizer: Tokenizes,
    template: Template | None,
    cpu_ns: Callable[[], int],
    refused: dict[str, int],
) -> Cost | None:
    template_ns = None
    chat = bool(asked.messages)
    if not chat:
        text = asked.text or ""
    elif template is None:
        text = "\n\n".join(str(each.get("content") or "") for each in asked.messages)
    else:
        try:
            before_ns = cpu_ns()
            text = template.render(asked.messages, asked.tools)
            template_ns = cpu_ns() - before_ns
        except RefusedError as error:
            refused[error.kind] = refused.get(error.kind, 0) + 1
            return None
    before_ns = cpu_ns()
    # A template writes a model's special tokens itself; engines add them to plain prompts.
    tokens = tokenizer.tokens(text, not chat)
    tokenize_ns = cpu_ns() - before_ns
    return Cost(tokens, len(text), template_ns, tokenize_ns, _tool_tokens(asked, tokenizer, template, tokens))


def _tool_tokens(asked: Asked, tokenizer: Tokenizes, template: Template | None, tokens: int) -> int | None:
    """What the tools' schemas are of it: the prompt is rendered without them, untimed."""
    if not asked.tools or template is None:
        return None
    try:
        return tokens - tokenizer.tokens(template.render(asked.messages), False)
    except RefusedError:
        return None


@dataclass(frozen=True, slots=True)
class Line:
    """Cost of a prompt = ``fixed_ns`` + ``per_token_ns`` × its tokens."""

    fixed_ns: float
    per_token_ns: float

    def at(self, tokens: int) -> float:
        return self.fixed_ns + self.per_token_ns * tokens


def fit(points: Sequence[tuple[int, int]], spread: float = _FIT_SPREAD) -> Line | None:
    """Theil and Sen's: the median of all pairs' slopes, which a few prompts that were interrupted do not bend.

    None where there are too few prompts, or the longest is less than ``spread`` times the shortest.
    """
    chosen = sorted(points)
    if len(chosen) > _FIT_POINTS:
        chosen = [chosen[index * (len(chosen) - 1) // (_FIT_POINTS - 1)] for index in range(_FIT_POINTS)]
    if len(chosen) < _FIT_LEAST or chosen[-1][0] < spread * max(1, chosen[0][0]):
        return None
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(chosen, 2) if a[0] != b[0]]
    slope = median(slopes)
    return Line(median(cost - slope * tokens for tokens, cost in chosen), slope)


def result(measured: Measured) -> dict[str, Any]:
    """The figures, in ms and µs, as JSON has them."""
    costs = measured.costs
    tokens = [cost.tokens for cost in costs]
    rendered = [cost.template_ns for cost in costs if cost.template_ns is not None]
    line = fit([(cost.tokens, cost.total_ns) for cost in costs])
    total_s = sum(cost.total_ns for cost in costs) / 1e9
    tools = [cost.tool_tokens for cost in costs if cost.tool_tokens is not None]
    return {
        "measured": len(costs),
        "tokens": {**_summary(tokens, 1), "total": sum(tokens)},
        "characters_per_token": round(sum(cost.characters for cost in costs) / sum(tokens), 2) if sum(tokens) else None,
        "tool_tokens": {**_summary(tools, 1), "prompts": len(tools)} if tools else None,
        "template_ms": _summary(rendered, 1e6) if rendered else None,
        "tokenize_ms": _summary([cost.tokenize_ns for cost in costs], 1e6),
        "total_ms": _summary([cost.total_ns for cost in costs], 1e6),
        "tokens_per_s": round(sum(tokens) / total_s) if total_s else None,
        "prompts_per_s": round(len(costs) / total_s, 1) if total_s else None,
        "fit": None
        if line is None
        else {"fixed_ms": round(line.fixed_ns / 1e6, 4), "per_token_us": round(line.per_token_ns / 1e3, 4)},
        "at_tokens": {str(at): _at(at, line, tokens) for at in AT_TOKENS},
        "warnings": _warnings(measured, line),
    }


def _summary(values: Sequence[float], unit: float) -> dict[str, float | None]:
    def of(p: float) -> float | None:
        found = percentile(values, p)
        return None if found is None else round(found / unit, 4)

    return {
        "p50": of(0.5),
        "p95": of(0.95) if len(values) >= P95_LEAST else None,
        "max": of(1.0),
        "mean": round(fmean(values) / unit, 4) if values else None,
    }


def _at(at: int, line: Line | None, tokens: Sequence[int]) -> dict[str, Any]:
    """What a prompt of that length costs, where prompts as long were measured."""
    if line is None:
        why = f"no line could be fitted: at least {_FIT_LEAST} prompts are needed, the longest twice the shortest"
        return {"ms": None, "why": why}
    if at > max(tokens):
        return {"ms": None, "why": f"the longest prompt measured has {max(tokens)} tokens"}
    return {"ms": round(line.at(at) / 1e6, 3), "why": None}


def _warnings(measured: Measured, line: Line | None) -> list[str]:
    found = []
    if measured.wall_ns and 1 - measured.cpu_ns / measured.wall_ns > _BUSY_SHARE:
        share = 1 - measured.cpu_ns / measured.wall_ns
        found.append(
            f"for {share:.0%} of the time this process had no core, as others were busy: the figures are processor"
            " time, and requests on this host wait longer"
        )
    if measured.left:
        found.append(f"{measured.left} prompts were not measured: the time was up (--budget)")
    if 0 < len(measured.costs) < P95_LEAST:
        found.append(f"{P95_LEAST - len(measured.costs)} more prompts are needed for a 95th percentile")
    tools = [cost.tool_tokens for cost in measured.costs if cost.tool_tokens is not None]
    if tools and not any(tools):
        found.append("the chat template renders no tools: their schemas cost no tokens here")
    if line is not None and _bent(measured.costs):
        found.append("long prompts cost more for each further token than short ones: their time does not grow evenly")
    return found


def _bent(costs: Sequence[Cost]) -> bool:
    points = sorted((cost.tokens, cost.total_ns) for cost in costs)
    middle = len(points) // 2
    short, long = (fit(half, _HALF_SPREAD) for half in (points[:middle], points[middle:]))
    if short is None or long is None or short.per_token_ns <= 0:
        return False
    return long.per_token_ns > _BENT * short.per_token_ns
