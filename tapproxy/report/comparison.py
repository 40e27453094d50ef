"""The terminal's table (stands in until the judging part is merged)."""

from __future__ import annotations

from typing import Any


def lines(comparison: Any) -> list[str]:
    """A few lines."""
    shown = comparison.to_dict()
    return [
        f"{name}: {path['requests']} requests, TTFT P50 {path['ttft_ms']['p50']} ms"
        for name, path in shown["paths"].items()
    ]
