"""Objectives for traffic as it came: which requests one is for, its limits, and whether so many requests show it.

Rules here: at least a share of the requests stays within a limit. ``met`` and ``missed`` are said only where the counts
show it at MLPerf's confidence (core.stats); between the two there are too few requests, and ``need`` says how many more
within the limit would show it. Nothing is read and no request is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from tapproxy.core import stats
from tapproxy.core.errors import ConfigError

METRICS: Final = ("ttft", "tpot", "e2e")
# As MLPerf's server scenario: 99 of 100 requests are within target.
DEFAULT_SHARE: Final = 0.99
# Below it nothing is called missed either: an estimate of a median wants so many.
REQUESTS_LEAST: Final = stats.least_n(0.5, 1)
_KEYS: Final = (*METRICS, "percentile", "share", "model", "path", "prompt-tokens", "output-tokens", "name")


class State(StrEnum):
    """What the requests show of an objective."""

    MET = "met"
    MISSED = "missed"
    TOO_FEW = "too_few"


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers of tokens, both ends included; ``most`` None: no upper end."""

    least: int = 0
    most: int | None = None

    def holds(self, tokens: int) -> bool:
        return tokens >= self.least and (self.most is None or tokens <= self.most)

    def __str__(self) -> str:
        return f"{self.least} and more" if self.most is None else f"{self.least} to {self.most}"


@dataclass(frozen=True, slots=True)
class Objective:
    """One ``[[slo]]``: for which requests (None: any), the limits in ms, and the share that has to keep each."""

    limits_ms: Mapping[str, float]
    share: float = DEFAULT_SHARE
    model: str | None = None
    path: str | None = None
    prompt_tokens: Span | None = None
    output_tokens: Span | None = None
    name: str | None = None

    @property
    def is_general(self) -> bool:
        """Whether it is for every request."""
        return (self.model, self.path, self.prompt_tokens, self.output_tokens) == (None, None, None, None)

    def title(self) -> str:
        """Its own name, else what it is for."""
        if self.name:
            return self.name
        parts = (
            ("model", self.model),
            ("path", self.path),
            ("prompts of", self.prompt_tokens and f"{self.prompt_tokens} tokens"),
            ("answers of", self.output_tokens and f"{self.output_tokens} tokens"),
        )
        return ", ".join(f"{word} {value}" for word, value in parts if value) or "all requests"


@dataclass(frozen=True, slots=True)
class Judgement:
    """``need``: how many more requests within the limit would show that it is met; None where it is missed."""

    state: State
    need: int | None


def judge(share: float, n: int, over: int) -> Judgement:
    """What ``n`` requests, ``over`` of them over the limit, show of "at least ``share`` within it"."""
    if stats.passes(share, n, over):
        return Judgement(State.MET, 0)
    if over and n >= REQUESTS_LEAST and 1 - _at_most(share, n, over - 1) <= 1 - stats.CONFIDENCE:
        return Judgement(State.MISSED, None)
    return Judgement(State.TOO_FEW, max(1, stats.least_n(share, over) - n))


def _at_most(share: float, n: int, over: int) -> float:
    """The chance of so few over the limit or fewer, if just ``share`` were within it."""
    return stats.incomplete_beta(share, n - over, over)


def read(tables: object, where: str, duration_s: Callable[[object, str], float]) -> tuple[Objective, ...]:
    """The ``[[slo]]`` tables of a TOML file. ``duration_s`` reads ``500ms``. Raises ConfigError."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{where}: slo is no list of tables: write each objective under its own [[slo]]")
    return tuple(
        _one(table, f"[[slo]] number {number} in {where}", duration_s) for number, table in enumerate(tables, 1)
    )


def _one(table: dict[str, Any], where: str, duration_s: Callable[[object, str], float]) -> Objective:
    given = {key.replace("_", "-"): value for key, value in table.items()}
    for key in given:
        if key not in _KEYS:
            raise ConfigError(f"{where} has an unknown key {key!r}: the keys are {', '.join(_KEYS)}")
    limits: dict[str, float] = {}
    for metric in METRICS:
        if metric in given:
            limits[metric] = 1000 * duration_s(given[metric], f"{metric} of {where}")
            if limits[metric] <= 0:
                raise ConfigError(f"{metric} of {where} is {given[metric]}: expected a limit above 0, such as 500ms")
    if not limits:
        raise ConfigError(f'{where} has no limit: give at least one of {", ".join(METRICS)}, such as ttft = "500ms"')
    return Objective(
        limits,
        share=_share(given, where),
        model=_text(given, "model", where),
        path=_text(given, "path", where),
        prompt_tokens=_span(given, "prompt-tokens", where),
        output_tokens=_span(given, "output-tokens", where),
        name=_text(given, "name", where),
    )


def _share(given: Mapping[str, Any], where: str) -> float:
    if "percentile" in given and "share" in given:
        raise ConfigError(f"{where} has both percentile and share: they are one thing, keep one")
    key, most = ("percentile", 100) if "percentile" in given else ("share", 1)
    value = given.get(key, DEFAULT_SHARE * most)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < most:
        example = "95" if key == "percentile" else "0.95"
        raise ConfigError(f"{key} of {where} is {value!r}: expected a number between 0 and {most}, such as {example}")
    return value / most


def _text(given: Mapping[str, Any], key: str, where: str) -> str | None:
    value = given.get(key)
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{key} of {where} is {value!r}: expected a text in quotes")
    return value


def _span(given: Mapping[str, Any], key: str, where: str) -> Span | None:
    """``"0-1023"``, ``"1024-"``, or a list of both ends."""
    value = given.get(key)
    if value is None:
        return None
    ends = value.split("-") if isinstance(value, str) else value
    if isinstance(ends, list) and len(ends) == 2:
        least, most = (_tokens(end) for end in ends)
        if (least is not None or ends[0] == "") and (most is not None or ends[1] == ""):
            found = Span(least or 0, most)
            if found.most is None or found.most >= found.least:
                return found
    raise ConfigError(f'{key} of {where} is {value!r}: expected a range of tokens, such as "0-1023" or "1024-"')


def _tokens(end: object) -> int | None:
    if isinstance(end, int) and not isinstance(end, bool) and end >= 0:
        return end
    return int(end) if isinstance(end, str) and end.strip().isdecimal() else None
