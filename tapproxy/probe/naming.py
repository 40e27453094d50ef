"""The names of mechanisms, and a named one with what shows it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Mechanism(StrEnum):
    """What holds bytes."""

    QUANTA = "quanta"
    TIMER = "timer"
    CORK = "cork"
    NAGLE = "nagle"
    DELAYED_ACK = "delayed_ack"
    FULL = "full"
    RATE_LIMIT = "rate_limit"
    NEXT_EVENT = "one_event_late"
    GZIP = "gzip"
    READ_TIMEOUT = "read_timeout"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Named:
    """A mechanism, what shows it, and what it is not. ``slug``: with its size, as quanta_16k."""

    mechanism: Mechanism
    slug: str
    text: str
    evidence: tuple[dict[str, Any], ...]
    rejected: tuple[tuple[str, str], ...] = ()
    # It may as well be the network.
    network_trouble: bool = False


def fact(what: str, value: float, unit: str, n: int, threshold: float | None) -> dict[str, Any]:
    """One line of evidence, as the verdict has it."""
    return {"what": what, "value": round(value, 3), "unit": unit, "n": n, "threshold": threshold}
