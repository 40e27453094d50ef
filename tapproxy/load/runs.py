"""The register (stands in until its part is merged)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from tapproxy.core.errors import ConfigError
from tapproxy.load.trial import Trial


class Register:
    """Runs under ``DIR/runs``."""

    def __init__(self, data_dir: Path) -> None:
        self._directory = data_dir / "runs"

    def keep(self, trial: Trial, comparison: dict[str, Any], plan: dict[str, Any]) -> Path:
        """Writes it."""
        directory = self._directory / trial.id
        directory.mkdir(parents=True, mode=0o700)
        (directory / "comparison.json").write_bytes(orjson.dumps(comparison))
        (directory / "plan.json").write_bytes(orjson.dumps(plan))
        return directory

    def load(self, id: str) -> Any:
        """Raises ConfigError."""
        raise ConfigError(f"no run {id}")
