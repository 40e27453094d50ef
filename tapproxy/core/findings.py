"""A finding is data: a rule's slug, its weight, the numbers behind it, and what to do.

Findings on the spot (seen on one exchange) have their catalogue here, so that each says what it means *here*
and a test can hold that every one of them fires and stays silent on a healthy stream.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Severity = Literal["error", "warning", "info"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One observation of a rule.

    ``file``, ``line``, ``directive`` and ``context`` are for configuration findings and None elsewhere.
    ``patch`` is a unified diff, or None where none can be given.
    """

    rule: str
    severity: Severity
    summary: str
    evidence: str
    advice: str
    file: str | None = None
    line: int | None = None
    directive: str | None = None
    context: str | None = None
    patch: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of the contract ("Findings and causes")."""
        return asdict(self)
