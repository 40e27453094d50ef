"""Injected faults: what goes wrong, after how many events of the answer (``[DONE]`` counts as one)."""

from __future__ import annotations

from dataclasses import dataclass

KINDS = ("reset-after", "close-after", "stall-after", "error-event-after", "status")
SHAPES = "reset-after=N, close-after=N, stall-after=N:SECONDS, error-event-after=N or status=CODE"


@dataclass(frozen=True, slots=True)
class Fault:
    kind: str
    number: int  # events sent before it happens; for "status" the code
    stall_ns: int = 0


def parse_fault(text: str) -> Fault:
    """Raises ValueError with a sentence that says what was found and what is possible."""
    kind, _, value = text.strip().partition("=")
    number, colon, seconds = value.partition(":")
    if kind not in KINDS or not (number.isascii() and number.isdigit()) or bool(colon) != (kind == "stall-after"):
        raise ValueError(f"found {text!r}; expected {SHAPES}.")
    if kind == "status" and not 400 <= int(number) <= 599:
        raise ValueError(f"found {text!r}; the status must be from 400 to 599.")
    try:
        stall_ns = int(float(seconds) * 1e9) if colon else 0
    except (ValueError, OverflowError):
        raise ValueError(f"found {text!r}; expected {SHAPES}.") from None
    if stall_ns < 0:
        raise ValueError(f"found {text!r}; a stall cannot be negative.")
    return Fault(kind, int(number), stall_ns)
