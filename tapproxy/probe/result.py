"""The result of a probe as the JSON document shows it. Nothing is judged here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tapproxy.probe.asking import Desk, Via
from tapproxy.probe.conclude import Client, Conclusion
from tapproxy.probe.run import Measured, Settings
from tapproxy.probe.shape import shape_json


def document(
    via: Via, desk: Desk, settings: Settings, measured: Sequence[Measured], conclusion: Conclusion
) -> dict[str, Any]:
    """The result: a verdict, and what it rests on."""
    return {
        "schema": "tapproxy.verdict/1",
        "verdict": conclusion.verdict,
        "not_observable": ["client", "network.upstream", "engine"],
        "causes": conclusion.causes,
        "budget": None,
        "trust": {"ok": not conclusion.warnings, "warnings": conclusion.warnings},
        "probe": {
            "via": via.url,
            "path": via.path,
            "tap": desk.about.get("tap"),
            "workers": desk.about.get("workers"),
            "idle_s": settings.idle_s,
            "clock": {"common": desk.clocks.common, "why": desk.clocks.why},
        },
        "clients": {one.kind: _client(one, client) for one, client in zip(measured, conclusion.clients, strict=True)},
        "findings": [finding.to_dict() for finding in conclusion.findings],
    }


def _client(one: Measured, client: Client) -> dict[str, Any]:
    """What the result shows of one kind of client."""
    return {
        "streaming": client.streaming,
        "mechanism": client.mechanism,
        "why": client.why,
        "http_to_tap": next((cell.tap["http"] for cell in one.cells if cell.tap is not None), None),
        "streams": [shape_json(found) for found in one.shapes.values()],
        "void": one.void,
        "header_delay_ms": one.header_delay_ms(),
        "compressed": [cell.name for cell in one.cells if cell.encoding is not None],
        "request_buffering": one.upload,
        "abort": one.abort,
        "abort_before_first_event": one.abort_first,
        "reuse": one.reuse,
        "silence": one.silence,
        "rewriting": {
            "request": None if one.request_fields is None else one.request_fields.to_dict(),
            "answer": None if one.answer_fields is None else one.answer_fields.to_dict(),
        },
    }
