"""What an import found, as the object that is written and shown."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from tapproxy.core.record import Record
from tapproxy.load.importers import sides
from tapproxy.load.importers.definitions import DIFFERENCES
from tapproxy.load.importers.imported import ClientRequest, ClientRun, Imported, Tool
from tapproxy.load.importers.join import Sure, join

SCHEMA: Final = "tapproxy.import/1"
_Views = list[tuple[ClientRequest, dict[str, Any]]]


def result(
    imported: Imported, records: Iterable[Record], *, pair_key: bytes | None = None, tap: str | None = None
) -> dict[str, Any]:
    """Joins the file's requests to the records of each tap, and puts both views side by side.

    ``tap``: only that tap's records. ``pair_key``: the tap's, for fingerprints.
    """
    by_tap: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if tap is None or record.tap == tap:
            by_tap[record.tap].append(record)
    taps = {name: _views(imported, by_tap[name], pair_key) for name in sorted(by_tap)}
    seen: dict[int, dict[str, Any]] = defaultdict(dict)
    for name, views in taps.items():
        for request, view in views:
            seen[request.index][name] = view
    return {
        "schema": SCHEMA,
        "tool": imported.tool.value,
        "version": imported.version,
        "notes": list(imported.notes),
        "definitions": [asdict(row) for row in DIFFERENCES[imported.tool]],
        "observed": _observed(imported.tool, taps),
        "runs": [_run(run) for run in imported.runs],
        "taps": {name: _tap(imported, views, by_tap[name]) for name, views in taps.items()},
        "requests": [
            _request(request, at, seen.get(request.index, {}))
            for at, run in enumerate(imported.runs)
            for request in run.requests
        ],
    }


def joined(result: dict[str, Any]) -> int:
    """How many of the file's requests were joined to a record of some tap, sure enough to count."""
    return sum(
        any(view["sure"] != Sure.UNSURE.value for view in request["taps"].values()) for request in result["requests"]
    )


def _views(imported: Imported, records: Sequence[Record], pair_key: bytes | None) -> _Views:
    views: _Views = []
    taken: set[str] = set()
    for run in imported.runs:
        free = [record for record in records if record.id not in taken]
        for each in join(run.requests, free, pair_key):
            views.append((each.request, sides.both(each, imported.tool)))
            taken.add(each.record.id)
    return views


def _run(run: ClientRun) -> dict[str, Any]:
    failed = sum(request.error is not None for request in run.requests)
    warmup = sum(request.warmup for request in run.requests)
    return {"label": run.label, "requests": len(run.requests), "failed": failed, "warmup": warmup}


def _tap(imported: Imported, views: _Views, records: Sequence[Record]) -> dict[str, Any]:
    asked = sum(len(run.requests) for run in imported.runs)
    found = Counter(view["sure"] for _, view in views)
    return {
        "records": len(records),
        "joined": {sure.value: found[sure.value] for sure in Sure},
        "by": dict(Counter(view["by"] for _, view in views if view["sure"] != Sure.UNSURE.value)),
        "not_joined": asked - len(views),
        "summary": sides.summary(views),
    }


def _request(request: ClientRequest, run: int, taps: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "index": request.index,
        "run": run,
        "request_id": request.request_id,
        "warmup": request.warmup,
        "error": request.error,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "client": {
            name: None if value is None else value / 1e6
            for name, value in (
                ("ttft_ms", request.ttft_ns),
                ("tpot_ms", request.tpot_ns),
                ("e2e_ms", request.e2e_ns),
            )
        },
        "taps": taps,
    }


def _observed(tool: Tool, taps: dict[str, _Views]) -> list[str]:
    """What the joined requests show of the tool's own habits, in this file."""
    said = []
    for name, views in taps.items():
        aligned = [view["client_aligned"] for _, view in views if view["sure"] != Sure.UNSURE.value]
        role = sum(each["counted"] == sides.ROLE_COUNTED for each in aligned)
        early = sum(
            view["client_aligned"]["ttft_ms"] is not None
            and request.ttft_ns is not None
            and view["client_aligned"]["ttft_ms"] > request.ttft_ns / 1e6
            for request, view in views
            if view["client_aligned"]["counted"] == sides.ROLE_COUNTED
        )
        if tool is Tool.VLLM_BENCH and early:
            said.append(
                f"{name}: in {early} of {len(aligned)} joined requests its TTFT ends at the role event, before a token"
            )
        elif tool is Tool.VLLM_BENCH and aligned and not role:
            said.append(f"{name}: it counts no role event here: its TTFT is that of the first token event")
        lost = [each["how"] for each in aligned if each["ttft_ms"] is None and each["e2e_ms"] is None]
        if lost:
            said.append(f"{name}: {len(lost)} of {len(aligned)} could not be aligned ({lost[0]})")
    return said
