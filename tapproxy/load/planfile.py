"""A plan as JSON, written and read again: what was sent once can be sent to the byte again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

import orjson

from tapproxy.core.address import quote
from tapproxy.core.errors import ConfigError
from tapproxy.load.plan import Slot
from tapproxy.load.planning import Kind, Phase, Plan
from tapproxy.load.trial import Scenario

SCHEMA: Final = "tapproxy.plan/1"


def to_dict(plan: Plan, sent: Sequence[Slot] | None = None, *, texts: bool = True) -> dict[str, Any]:
    """The plan as JSON. ``sent``: of a plan without an end, what it came to. ``texts`` False: without the prompts."""
    by_phase = [list(phase.slots) for phase in plan.phases]
    if plan.count is None and sent is not None:
        firsts = [phase.endless.first_index if phase.endless else 1 << 62 for phase in plan.phases]
        planned = {slot.index for slots in by_phase for slot in slots}
        for slot in sorted(sent, key=lambda slot: slot.index):
            if slot.index not in planned:
                at = max(i for i, first in enumerate(firsts) if first <= slot.index)
                by_phase[at].append(slot)
    return {
        "schema": SCHEMA,
        "scenario": str(plan.scenario),
        "paths": list(plan.paths),
        "about": plan.about,
        "phases": [
            {"kind": str(phase.kind), "width": phase.width, "slots": [_slot(slot, texts) for slot in slots]}
            for phase, slots in zip(plan.phases, by_phase, strict=True)
        ],
    }


def _slot(slot: Slot, texts: bool) -> dict[str, Any]:
    out = asdict(slot)
    if not texts:
        for key in ("prompt", "messages"):
            out.pop(key)
        out["prompt_chars"] = len(slot.prompt)
    return out


def from_dict(data: Any, where: str) -> Plan:
    """Raises ConfigError where the data is no plan."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ConfigError(f"{where} is no plan: expected the schema {SCHEMA}, as --plan writes it")
    names = {each.name for each in fields(Slot)}
    try:
        phases = []
        for phase in data["phases"]:
            slots = []
            for each in phase["slots"]:
                values = {key: value for key, value in each.items() if key in names}
                values["messages"] = tuple((str(role), str(text)) for role, text in values.get("messages") or ())
                slots.append(Slot(**values))
            phases.append(Phase(Kind(phase["kind"]), tuple(slots), int(phase["width"])))
        plan = Plan(Scenario(data["scenario"]), tuple(data["paths"]), tuple(phases), dict(data.get("about") or {}))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where} is a plan that cannot be read ({type(error).__name__}: {error})") from None
    used = {slot.path for phase in plan.phases for slot in phase.slots}
    if not used or not used <= set(plan.paths):
        raise ConfigError(f"{where} is a plan that sends nothing, or over paths it does not name")
    return plan


def read(path: Path) -> Plan:
    """Raises ConfigError where the file is no plan."""
    where = f"--plan {quote(str(path))}"
    try:
        return from_dict(orjson.loads(path.read_bytes()), where)
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror}") from None
    except orjson.JSONDecodeError:
        raise ConfigError(f"{where} is no JSON: give a file that --plan wrote, or a new name") from None
