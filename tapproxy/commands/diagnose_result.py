"""From what was read to the result: the verdict of the contract, with what the screen and the page show beside it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from tapproxy import __version__
from tapproxy.commands.diagnose_data import Loaded, Wanted
from tapproxy.commands.diagnose_evidence import Beside
from tapproxy.core.objectives import Objective
from tapproxy.core.record import Record
from tapproxy.core.witness import AccessLog
from tapproxy.diagnose import causes
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.fits import fits
from tapproxy.diagnose.links import measure_links
from tapproxy.diagnose.presence import presence
from tapproxy.diagnose.roles import Roles
from tapproxy.diagnose.rule import Target
from tapproxy.diagnose.slices import slices
from tapproxy.diagnose.slo import judge_all
from tapproxy.diagnose.timeline import timeline
from tapproxy.diagnose.truth import enrich
from tapproxy.diagnose.view import View, look
from tapproxy.diagnose.witness import Witnessed, witness

# The longest answers, and clocks that differ a little.
_LINES_NS: Final = 3600 * 1_000_000_000


def conclude(
    loaded: Loaded,
    wanted: Wanted,
    roles: Roles,
    beside: Beside,
    *,
    objectives: Sequence[Objective] = (),
    with_timeline: bool = False,
    logs: Sequence[AccessLog] = (),
) -> dict[str, Any]:
    """The whole result."""
    outer = loaded.taps.get(roles.outer, []) if roles.outer is not None else []
    inner = loaded.taps.get(roles.inner, []) if roles.inner is not None else []
    evidence = Evidence.of(beside.then)
    joined = enrich([*outer, *inner], evidence.spans)
    outer, inner = joined.records[: len(outer)], joined.records[len(outer) :]
    verdict = causes.verdict(outer=outer, inner=inner, evidence=evidence, target=_target(objectives))
    trust = verdict["trust"]
    if roles.doubt is not None:
        trust["warnings"].append(f"{roles.why}; {roles.doubt}")
    requests = outer or inner
    view = look((), outer, inner)
    seen, told_of_logs = _witnessed(logs, requests, view)
    trust["warnings"] += [] if seen is None else seen.warnings
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
        "witness": None if seen is None else seen.to_dict(),
        "evidence": _told(evidence),
        "notes": [*loaded.notes(), *beside.notes, *_not_read(evidence), *joined.warnings(), *told_of_logs],
        "environment": {"tapproxy": __version__, "python": platform.python_version()},
    }


def _target(objectives: Sequence[Objective]) -> Target:
    """What was asked of all requests; an objective for some of them is no word on the others."""
    general = [each for each in objectives if each.is_general]
    ttft, tpot = (
        min((each.limits_ms[metric] for each in general if metric in each.limits_ms), default=None)
        for metric in ("ttft", "tpot")
    )
    return Target(
        ttft_ns=None if ttft is None else round(ttft * 1e6), tpot_ns=None if tpot is None else round(tpot * 1e6)
    )


def _witnessed(logs: Sequence[AccessLog], requests: Sequence[Record], view: View) -> tuple[Witnessed | None, list[str]]:
    """The logs' lines of the requests' time beside them, and what is to be known of the logs."""
    if not logs or not requests:
        return None, []
    starts = [record.t0_unix_ns for record in requests]
    # A line is written when its request has ended.
    from_ns, to_ns = min(starts) - _LINES_NS, max(starts) + _LINES_NS
    rows = [
        row for log in logs for row in log.rows if row.ended_unix_ns is None or from_ns <= row.ended_unix_ns <= to_ns
    ]
    notes = [log.problem for log in logs if log.problem is not None]
    notes += [f"{log.source}: {note}" for log in logs for note in log.notes]
    notes += [f"{log.skipped} lines of {log.source} are not of its format" for log in logs if log.skipped]
    return witness(rows, view), notes


def _told(evidence: Evidence) -> dict[str, Any]:
    """What stood beside the records: how often each source was read, and what it could not tell."""
    engines = {
        source: {
            "readings": len(page.samples),
            "failed": len(page.failed),
            "engine": page.fact("engine"),
            "version": page.fact("version"),
            "model": page.fact("model"),
            "absent": page.absent(),
        }
        for source, page in (evidence.engines | evidence.routers).items()
    }
    counts = {
        kind: {source: len(page.samples) for source, page in pages.items()}
        for kind, pages in (("hosts", evidence.hosts), ("gpus", evidence.gpus))
    }
    return {"engines": engines, **counts, "spans": len(evidence.spans), "launches": len(evidence.launches)}


def _not_read(evidence: Evidence) -> list[str]:
    """What was to be read beside the records and never could be, and why."""
    out = [
        f"{source} was never read: {page.failed[-1].problem}"
        for pages in (evidence.engines, evidence.gpus)
        for source, page in pages.items()
        if page.failed and not page.samples
    ]
    for source, page in evidence.hosts.items():
        lost = page.fact("engine_lost")
        out += [f"{source}: {lost}"] if lost else []
    return out


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
