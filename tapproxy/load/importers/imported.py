"""What a result file of another load tool says, in one shape.

Rules here: durations in ns, as the tool told them, by its own definitions; what it does not tell is None, never 0. The
bodies that some tools save are kept for their fingerprints alone and are never shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final


class Tool(StrEnum):
    """Who wrote the file."""

    VLLM_BENCH = "vllm-bench"
    AIPERF = "aiperf"
    GUIDELLM = "guidellm"


class Clock(StrEnum):
    """Which clock the tool's start times are on."""

    # Python's perf_counter, which on Linux is CLOCK_MONOTONIC: the tap's own clock where both ran on one host.
    MONOTONIC = "monotonic"
    WALL = "wall"


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One request as the tool measured it. ``index``: its place in the file, over all runs.

    ``id_index``: the number that its request id ends in, where the file keeps the numbers and not the ids.
    ``stamps_ns``: when each chunk that the tool counted came, from ``start_ns``; empty where it does not tell.
    ``bodies``: ways in which the request body may have been written.
    """

    index: int
    error: str | None = None
    warmup: bool = False
    request_id: str | None = None
    response_id: str | None = None
    id_index: int | None = None
    start_ns: int | None = None
    clock: Clock | None = None
    ttft_ns: float | None = None
    tpot_ns: float | None = None
    e2e_ns: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    stamps_ns: tuple[float, ...] = ()
    last_token_ns: float | None = None
    bodies: tuple[bytes, ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class ClientRun:
    """One run of the tool; a file may hold several (rates of a sweep, results appended)."""

    label: str
    requests: tuple[ClientRequest, ...]


@dataclass(frozen=True, slots=True)
class Imported:
    """A whole file. ``version``: of the tool, where it tells it. ``notes``: what it does not tell, in sentences."""

    tool: Tool
    version: str | None
    runs: tuple[ClientRun, ...]
    notes: tuple[str, ...] = ()


def number(value: object) -> float | None:
    """A finite number, else None (NaN and Infinity are how Python's json writes what was not measured)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -_MOST < value < _MOST:
        return None
    return float(value)


def count(value: object) -> int | None:
    """A whole number of at least 0, else None."""
    found = number(value)
    return int(found) if found is not None and 0 <= found < _MOST_COUNTED and found == int(found) else None


def text(value: object) -> str | None:
    """A string with something in it, else None; half a surrogate pair, which no output takes, is replaced."""
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) and value else None


def scaled(value: object, factor: float) -> float | None:
    """A number times ``factor``; None stays None."""
    found = number(value)
    return None if found is None else found * factor


def last_line(value: object) -> str | None:
    """Of an error or a traceback the line that names it, shortened: the rest may quote the request."""
    lines = [line.strip() for line in (text(value) or "").splitlines() if line.strip()]
    return lines[-1][:120] if lines else None


def each(value: object) -> list[dict[str, Any]]:
    """The objects of a list; empty where it is none."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def mapping(value: object) -> Mapping[str, Any]:
    """An object; empty where it is none."""
    return value if isinstance(value, dict) else {}


# Beyond the ns of any clock and the tokens of any answer: what is larger was not measured. NaN is in no range.
_MOST: Final = 1e19
_MOST_COUNTED: Final = 1e12
# Unit, as tools write it → ns.
NS_PER: Final[dict[str, float]] = {"ns": 1, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9, "sec": 1e9, "seconds": 1e9}
