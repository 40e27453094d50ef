"""The simulator's own truth of each request: one JSON line for each that it finished, with ``--truth FILE``.

Rules here: times are the model's, in ns from the request's arrival in the API process; nothing of them is measured.
Prompts and answers are not in it.
"""

from __future__ import annotations

from collections.abc import Sequence as Several
from pathlib import Path

import orjson

from tapproxy.simulate.engine import Sequence


class Ledger:
    """Appends a line for each request as it finishes. Raises OSError where the file cannot be opened."""

    def __init__(self, path: Path) -> None:
        # Line by line: what was finished is there, however the process ends.
        self._file = path.open("ab", buffering=0)

    def note(self, response_id: str, sequences: Several[Sequence]) -> None:
        """A request is finished: its first choice's times, and what all of them were."""
        first = sequences[0]

        def since(at_ns: int | None) -> int | None:
            return None if at_ns is None else at_ns - first.arrival_ns

        line = {
            "response_id": response_id,
            "arrival_ns": first.arrival_ns,
            "queued_ns": since(first.queued_ns),
            "scheduled_ns": since(first.scheduled_ns),
            "first_ns": since(first.first_ns),
            "last_ns": since(first.last_ns),
            "preemptions": sum(sequence.preemptions for sequence in sequences),
            "prompt_tokens": first.prompt_tokens,
            "output_tokens": first.generated,
        }
        self._file.write(orjson.dumps(line) + b"\n")

    def close(self) -> None:
        self._file.close()
