"""The rules that blame a GPU or the host that the engine runs on. Each judges in a module of its own."""

from __future__ import annotations

from typing import Final

from tapproxy.diagnose.rule import Rule

RULES: Final[tuple[Rule, ...]] = ()
