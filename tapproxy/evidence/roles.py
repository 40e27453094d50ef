"""What each process of an engine does, by the name it gives itself.

Rules here: a name that is not in the table gives no role; nothing is read from a command line, which may hold keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from tapproxy.evidence.procfs import Stat


class Role(StrEnum):
    """The parts of an engine that may each be short of a core."""

    API = "api"  # speaks HTTP, renders the template, tokenises
    CORE = "core"  # schedules
    WORKER = "worker"  # computes, one a card


# The kernel keeps 15 characters of a name. TGI's parts all begin with the same 15, so theirs do not tell.
_ROLES: Final[tuple[tuple[Role, re.Pattern[str]], ...]] = (
    (Role.CORE, re.compile(r"VLLM::EngineCor|sglang::schedul")),
    (Role.WORKER, re.compile(r"VLLM::Worker|ray::RayWorker")),
    (Role.API, re.compile(r"VLLM::APIServer|sglang::http")),
)


def roles(members: Sequence[Stat], named: Sequence[int]) -> dict[int, Role]:
    """pid → role, of those that tell.

    A named process without a role of its own, of which another is the scheduler, is the one that speaks HTTP: vLLM
    and SGLang start their scheduler from there.
    """
    found: dict[int, Role] = {}
    for each in members:
        role = next((role for role, name in _ROLES if name.match(each.name)), None)
        if role is not None:
            found[each.pid] = role
    if Role.CORE in found.values():
        for each in members:
            if each.pid in named and each.pid not in found:
                found[each.pid] = Role.API
    return found


def told(found: Mapping[int, Role], members: Sequence[Stat]) -> str:
    """One line for people: ``api 12, core 14, worker 15``."""
    return ", ".join(f"{found[each.pid]} {each.pid}" for each in members if each.pid in found)
