"""OTLP requests as an engine's exporter sends them: of spans a real vLLM sent, or of any attributes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

DATA = Path(__file__).parent.parent / "data" / "otlp"


def captured() -> list[dict[str, Any]]:
    """Spans of vLLM 0.32 as a receiver wrote them down."""
    return [json.loads(line) for line in (DATA / "vllm-0.32.jsonl").read_text().splitlines()]


def span(attributes: Mapping[str, Any], *, trace_id: str = "0a" * 16, span_id: str = "0b" * 8) -> dict[str, Any]:
    """One made up."""
    return {
        "name": "llm_request",
        "trace_id": trace_id,
        "span_id": span_id,
        "start_ns": 1_795_951_823_000_000_000,
        "end_ns": 1_795_951_824_000_000_000,
        "attrs": dict(attributes),
        "scope": "vllm.tracing.otel",
        "resource": {"service.name": "engine"},
    }


def protobuf(spans: Iterable[Mapping[str, Any]]) -> bytes:
    """The request's bytes."""
    request = ExportTraceServiceRequest()
    for given in spans:
        resource = request.resource_spans.add()
        _fill(resource.resource.attributes, given["resource"])
        scope = resource.scope_spans.add()
        scope.scope.name = given["scope"]
        made = scope.spans.add()
        made.name = given["name"]
        made.trace_id, made.span_id = bytes.fromhex(given["trace_id"]), bytes.fromhex(given["span_id"])
        made.start_time_unix_nano, made.end_time_unix_nano = given["start_ns"], given["end_ns"]
        _fill(made.attributes, given["attrs"])
    return request.SerializeToString()


def _fill(attributes: Any, given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        pair = attributes.add()
        pair.key = key
        kind = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}[type(value)]
        setattr(pair.value, kind, value)


def json_text(spans: Iterable[Mapping[str, Any]]) -> bytes:
    """The same as OTLP/JSON writes it: hex ids, and 64-bit integers as text."""

    def value(given: Any) -> dict[str, Any]:
        if type(given) is int:
            return {"intValue": str(given)}
        return {"doubleValue" if type(given) is float else "stringValue": given}

    resources = [
        {
            "resource": {"attributes": [{"key": k, "value": value(v)} for k, v in given["resource"].items()]},
            "scopeSpans": [
                {
                    "scope": {"name": given["scope"]},
                    "spans": [
                        {
                            "traceId": given["trace_id"],
                            "spanId": given["span_id"],
                            "name": given["name"],
                            "startTimeUnixNano": str(given["start_ns"]),
                            "endTimeUnixNano": str(given["end_ns"]),
                            "attributes": [{"key": k, "value": value(v)} for k, v in given["attrs"].items()],
                        }
                    ],
                }
            ],
        }
        for given in spans
    ]
    return json.dumps({"resourceSpans": resources}).encode()
