"""Reads aiperf's ``profile_export.jsonl``: a line a request, ``metadata``, ``metrics`` with their units, ``error``.

The X-Request-ID of every request is in it. Start and end are wall-clock ns; durations were taken on a monotonic clock.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import orjson

from tapproxy.load.importers.imported import (
    NS_PER,
    ClientRequest,
    ClientRun,
    Clock,
    Imported,
    Tool,
    count,
    each,
    last_line,
    mapping,
    number,
    text,
)

# The engine's own count first; older versions have only the one of aiperf's tokenizer.
_OUTPUT_TOKENS: Final = ("usage_completion_tokens", "output_sequence_length", "output_token_count")
_PROMPT_TOKENS: Final = ("usage_prompt_tokens", "input_sequence_length", "error_isl")


def is_line(data: object) -> bool:
    """Whether an object is a line of this file."""
    return (
        isinstance(data, Mapping) and isinstance(data.get("metrics"), Mapping | None) and _is_metadata(data)
    ) and "metrics" in data


def is_raw_line(data: object) -> bool:
    """Whether it is one of profile_export_raw.jsonl, which holds whole requests and answers and no metrics."""
    return isinstance(data, Mapping) and _is_metadata(data) and "metrics" not in data


def is_aggregate(data: object) -> bool:
    """Whether it is profile_export_aiperf.json: statistics over all requests."""
    return (
        isinstance(data, Mapping)
        and "avg" in mapping(data.get("request_latency"))
        and "unit" in mapping(data.get("request_latency"))
    )


def _is_metadata(data: Mapping[str, Any]) -> bool:
    return "request_start_ns" in mapping(data.get("metadata"))


def parse(lines: Sequence[Mapping[str, Any]], inputs: object = None) -> Imported:
    """``inputs``: the content of the inputs.json beside the file, for the bodies' fingerprints."""
    payloads = {
        text(session.get("session_id")): session.get("payloads") for session in each(mapping(inputs).get("data"))
    }
    requests = tuple(_request(at, line, payloads) for at, line in enumerate(lines))
    notes = []
    if not any(request.stamps_ns for request in requests):
        notes.append("the file tells no times of single chunks (no inter_chunk_latency)")
    return Imported(Tool.AIPERF, None, (ClientRun("profile", requests),), tuple(notes))


def _request(at: int, line: Mapping[str, Any], payloads: Mapping[str | None, object]) -> ClientRequest:
    metadata, metrics = mapping(line.get("metadata")), mapping(line.get("metrics"))
    failed = mapping(line.get("error"))
    error = None
    if line.get("error") or metadata.get("was_cancelled") is True:
        words = (text(failed.get("type")), last_line(failed.get("message")))
        error = ": ".join(word for word in words if word) or "cancelled"
    start = number(metadata.get("request_start_ns"))
    ttft_ns, e2e_ns = _ns(metrics, "time_to_first_token"), _ns(metrics, "request_latency")
    gaps = _gaps_ns(metrics)
    stamps = tuple(accumulate(gaps, initial=ttft_ns)) if gaps and ttft_ns is not None else ()
    return ClientRequest(
        index=at,
        error=error,
        warmup=metadata.get("benchmark_phase") == "warmup",
        request_id=text(metadata.get("x_request_id")),
        start_ns=None if start is None else int(start),
        clock=None if start is None else Clock.WALL,
        ttft_ns=ttft_ns if error is None else None,
        tpot_ns=_ns(metrics, "inter_token_latency") if error is None else None,
        e2e_ns=e2e_ns if error is None else None,
        prompt_tokens=_tokens(metrics, _PROMPT_TOKENS),
        output_tokens=_tokens(metrics, _OUTPUT_TOKENS),
        stamps_ns=stamps if error is None else (),
        last_token_ns=None if error is not None else stamps[-1] if stamps else e2e_ns,
        bodies=_bodies(payloads.get(text(metadata.get("conversation_id"))), metadata.get("turn_index")),
    )


def _ns(metrics: Mapping[str, Any], name: str) -> float | None:
    metric = mapping(metrics.get(name))
    factor, value = NS_PER.get(str(metric.get("unit"))), number(metric.get("value"))
    return None if factor is None or value is None else value * factor


def _gaps_ns(metrics: Mapping[str, Any]) -> list[float]:
    metric = mapping(metrics.get("inter_chunk_latency"))
    factor, values = NS_PER.get(str(metric.get("unit"))), metric.get("value")
    if factor is None or not isinstance(values, list):
        return []
    known = [value for value in map(number, values) if value is not None]
    return [value * factor for value in known] if len(known) == len(values) else []


def _tokens(metrics: Mapping[str, Any], names: Sequence[str]) -> int | None:
    for name in names:
        found = count(mapping(metrics.get(name)).get("value"))
        if found is not None:
            return found
    return None


def _bodies(payloads: object, turn: object) -> tuple[bytes, ...]:
    at = count(turn) or 0
    if not isinstance(payloads, list) or at >= len(payloads) or not isinstance(payloads[at], dict):
        return ()
    return written(payloads[at])


def written(payload: Mapping[str, Any]) -> tuple[bytes, ...]:
    """The ways in which Python's clients write a JSON body: the fingerprint is over its very bytes."""
    ways = [
        orjson.dumps(payload),
        json.dumps(payload).encode(),
        json.dumps(payload, separators=(",", ":")).encode(),
        json.dumps(payload, ensure_ascii=False).encode("utf-8", "surrogatepass"),
    ]
    return tuple(dict.fromkeys(ways))
