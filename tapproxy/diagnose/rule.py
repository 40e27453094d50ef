"""The shape of a rule: a cause, what it needs to have been seen, how it judges, what it advises.

Rules here: nothing is judged. What a vantage could not see is neither healthy nor guilty.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from tapproxy.diagnose import engine, holding
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.facts import Named
from tapproxy.diagnose.links import Links
from tapproxy.diagnose.served import Served
from tapproxy.diagnose.shapes import Shapes
from tapproxy.diagnose.view import View


@dataclass(frozen=True, slots=True)
class Target:
    """What was asked of the run, in ns; None: nothing was."""

    ttft_ns: int | None = None
    tpot_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """What a rule may look at. ``budget`` is the contract's object; ``evidence`` covers the requests' time;
    ``requests`` are those that the engine served, as it had them."""

    view: View
    links: Links
    shapes: Shapes
    budget: dict[str, Any] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=Evidence)
    requests: list[Served] = field(default_factory=list)
    target: Target = field(default_factory=Target)


@dataclass(frozen=True, slots=True)
class Rule:
    """``needs``: what must have been seen often enough (see ``SEEN``) for the rule to be asked. ``unless``: causes, by
    the start of their names, that explain what this rule would see; it is asked only where none of them was named."""

    cause: str
    stage: str | None
    needs: str
    judge: Callable[[Case], Named | None]
    advice: str
    unless: tuple[str, ...] = ()


# How many requests stand behind each need.
SEEN: Final[dict[str, Callable[[View], int]]] = {
    "hop": lambda view: len(view.crossed) + len(holding.blind_chains(view)),
    "engine": lambda view: len(view.engine_side),
    "engine answers": lambda view: len(engine.answers(view)),
    "path": lambda view: len(view.usable),
    # Failed and void ones count too: they are what is judged.
    "records": lambda view: max(len(view.client), len(view.outer), len(view.inner)),
}
