"""From what was read to the result: the verdict of the contract, with what the screen and the page show beside it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from tapproxy import __version__
from tapproxy.commands.diagnose_data import Loaded, Wanted
from tapproxy.commands.diagnose_evidence import Beside
from tapproxy.core.objectives import Objective
from tapproxy.core.record import Record
from tapproxy.diagnose import causes
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.fits import fits
from tapproxy.diagnose.links import measure_links
from tapproxy.diagnose.presence import presence
from tapproxy.diagnose.roles import Roles
from tapproxy.diagnose.slices import slices
from tapproxy.diagnose.slo import judge_all
from tapproxy.diagnose.timeline import timeline
from tapproxy.diagnose.truth import enrich
from tapproxy.diagnose.view import look


def conclude(
    loaded: Loaded,
    wanted: Wanted,
    roles: Roles,
    beside: Beside,
    *,
    objectives: Sequence[Objective] = (),
    with_timeline: bool = False,
    nginx: Sequence[Any] = (),
) -> dict[str, Any]:
    """The whole result."""
    outer = loaded.taps.get(roles.outer, []) if roles.outer is not None else []
    inner = loaded.taps.get(roles.inner, []) if roles.inner is not None else []
    evidence = Evidence.of(beside.then)
    joined = enrich([*outer, *inner], evidence.spans)
    outer, inner = joined.records[: len(outer)], joined.records[len(outer) :]
    verdict = causes.verdict(outer=outer, inner=inner, evidence=evidence)
    trust = verdict["trust"]
    if roles.doubt is not None:
        trust["warnings"].append(f"{roles.why}; {roles.doubt}")
    requests = outer or inner
    view = look((), outer, inner)
    return {
        **verdict,
        "scenario": _title(roles, requests, wanted),
        "taps": {"outer": roles.outer, "inner": roles.inner, "why": roles.why},
        "window": window(requests, loaded),
        "presence": presence(outer, inner),
        "slices": slices(requests),
        "fits": fits(view, measure_links(view), evidence),
        "slo": judge_all(objectives, requests),
        "timeline": timeline(requests, evidence, loaded.starts) if with_timeline else None,
        "engine_now": beside.now,
        "evidence": _told(evidence),
        "notes": [*loaded.notes(), *beside.notes, *joined.warnings()],
        "environment": {"tapproxy": __version__, "python": platform.python_version()},
    }


def _told(evidence: Evidence) -> dict[str, Any]:
    """What stood beside the records: how often each source was read, and what it could not tell."""
    engines = {
        source: {
            "readings": len(page.samples),
            "failed": len(page.failed),
            "engine": page.fact("engine"),
            "version": page.fact("version"),
            "model": page.fact("model"),
            "absent": page.samples[-1].absent if page.samples else {},
        }
        for source, page in evidence.engines.items()
    }
    counts = {
        kind: {source: len(page.samples) for source, page in pages.items()}
        for kind, pages in (("hosts", evidence.hosts), ("gpus", evidence.gpus))
    }
    return {"engines": engines, **counts, "spans": len(evidence.spans), "launches": len(evidence.launches)}


def window(records: Sequence[Record], loaded: Loaded) -> dict[str, Any]:
    """The time that the requests cover, and how many there are."""
    starts = [record.t0_unix_ns for record in records]
    return {
        "from": iso(min(starts)) if starts else None,
        "to": iso(max(starts)) if starts else None,
        "requests": len(records),
        "records": loaded.records,
        "left_out": {"older": loaded.older, "unreadable": loaded.skipped, "other_exchanges": loaded.aside},
    }


def iso(unix_ns: int) -> str:
    """To the second, in UTC."""
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _title(roles: Roles, requests: Sequence[Record], wanted: Wanted) -> dict[str, Any]:
    starts = [record.t0_unix_ns for record in requests]
    span = f"{iso(min(starts))} to {iso(max(starts))}" if starts else "none"
    only = [f"{name} {value}" for name, value in (("model", wanted.model), ("path", wanted.path)) if value]
    return {
        "command": "diagnose",
        "name": " and ".join(name for name in (roles.outer, roles.inner) if name) or "no tap",
        "title": f"{len(requests)} requests, {span}" + (f"; only {', '.join(only)}" if only else ""),
        "setting": [roles.why + "."],
    }
