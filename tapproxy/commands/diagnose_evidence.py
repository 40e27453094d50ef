"""What stands beside the records, gathered from wherever it was asked for: samples kept then, pages read now, logs.

Rules here: an adapter each, and nothing is judged. What cannot be read is said and gone on without, except for a file
that was named: that is a mistake of the command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tapproxy.config import load_objectives
from tapproxy.core.errors import ConfigError
from tapproxy.core.objectives import Objective
from tapproxy.core.sample import Sample, SampleKind


@dataclass(frozen=True, slots=True)
class Asked:
    """The flags: pages to read now, logs to read, and how long to wait between two readings."""

    engines: Sequence[str] = ()
    engine_logs: Sequence[Path] = ()
    gpu_logs: Sequence[Path] = ()
    interval: str = "1s"


@dataclass(slots=True)
class Beside:
    """``then``: sampled while the requests ran. ``now``: read by this command. ``notes``: a sentence each."""

    then: list[Sample] = field(default_factory=list)
    now: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def engine_addresses(self) -> set[str]:
        """HOST:PORT of the engines whose pages were read."""
        engines = [sample for sample in (*self.then, *self.now) if sample.kind == SampleKind.ENGINE]
        return {address for sample in engines if (address := _address(sample.source)) is not None}


def _address(source: str) -> str | None:
    try:
        parts = urlsplit(source)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None
    return f"{parts.hostname}:{port}" if parts.hostname and port else None


def gather(kept: Sequence[Sample], asked: Asked) -> Beside:
    """Everything that was kept or asked for. Raises ConfigError where a file that was named cannot be read."""
    found = Beside(then=list(kept))
    for flag, given in (
        ("--engine", asked.engines),
        ("--engine-log", asked.engine_logs),
        ("--gpu-log", asked.gpu_logs),
    ):
        if given:
            raise ConfigError(f"{flag} cannot be read yet")
    return found


def nginx_lines(files: Sequence[Path], log_format: str | None) -> list[Any]:
    """The lines of nginx's access logs."""
    if files or log_format:
        raise ConfigError("--nginx-log cannot be read yet")
    return []


def objectives(file: Path | None) -> tuple[Objective, ...]:
    """The ``[[slo]]`` tables of a configuration file. Raises ConfigError."""
    return () if file is None else load_objectives(file)
