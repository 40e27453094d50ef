"""OTLP spans of an engine: what a trace says of one request's stages, as samples of kind span.

Rules here: of a span only what the tables below name is kept, so that a prompt in an attribute is never stored; a span
without a ``gen_ai.latency`` figure is somebody else's and is counted, not kept; a figure that is negative, not finite
or longer than a day is absent. Both of OTLP's encodings over HTTP are read: protobuf and JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import orjson
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tapproxy.core.sample import Sample, SampleKind
from tapproxy.core.usage import count, duration_ns, text
from tapproxy.evidence.wirefields import Part, Walk

# vLLM's names, which TensorRT-LLM and SGLang took over, in seconds. The last three are of vLLM's first engine.
LATENCIES: Final = {
    "gen_ai.latency.time_in_queue": "queue_ns",
    "gen_ai.latency.time_to_first_token": "ttft_ns",
    "gen_ai.latency.e2e": "e2e_ns",
    "gen_ai.latency.time_in_model_prefill": "prefill_ns",
    "gen_ai.latency.time_in_model_decode": "decode_ns",
    "gen_ai.latency.time_in_model_inference": "inference_ns",
    "gen_ai.latency.time_in_scheduler": "scheduler_ns",
    "gen_ai.latency.time_in_model_forward": "forward_ns",
    "gen_ai.latency.time_in_model_execute": "execute_ns",
}
COUNTS: Final = {
    "gen_ai.usage.prompt_tokens": "usage_prompt_tokens",
    "gen_ai.usage.completion_tokens": "usage_completion_tokens",
    "gen_ai.usage.cached_tokens": "usage_cached_tokens",
}
WORDS: Final = {"gen_ai.request.id": "request_id", "gen_ai.response.model": "model"}
# Whose span it is, by how the name of its scope begins.
_ENGINES: Final = ("vllm", "sglang", "tensorrt_llm")
_KEPT: Final = frozenset({*LATENCIES, *COUNTS, *WORDS})
_SOURCE: Final = "otlp"
_SECOND_NS: Final = 1_000_000_000
_MOST_START_NS: Final = 1 << 63
# Field numbers of ExportTraceServiceRequest, ResourceSpans, ScopeSpans and InstrumentationScope. The messages around
# the spans are walked through, not parsed: made of a body that is all empty messages, they would take forty times it.
_RESOURCE_SPANS, _SCOPE_SPANS, _SCOPE, _SPANS, _SCOPE_NAME = 1, 2, 1, 2, 1
# In a body of the size that is taken, one for each eighty bytes: real spans have several hundred.
_MOST_FIELDS: Final = 200_000
_MOST_SPAN_BYTES: Final = 1 << 20
_MOST_SCOPE_BYTES: Final = 64
_TELLING: Final = b"gen_ai.latency."


class Reading(NamedTuple):
    """When and where spans came in."""

    t_mono_ns: int
    t_unix_ns: int
    boot_id: str | None = None
    tap: str | None = None


@dataclass(frozen=True, slots=True)
class Spans:
    """``samples``: one for each span that tells an engine's times. ``foreign``: how many told none.

    ``beyond``: how many tell some, and were not read since there were more than could be taken.
    """

    samples: list[Sample] = field(default_factory=list)
    foreign: int = 0
    beyond: int = 0


class _Span(NamedTuple):
    """A span in either encoding, with no more of it than may be kept."""

    scope: str
    trace_id: str | None
    span_id: str | None
    start_ns: int
    attributes: dict[str, Any]


def read(body: bytes, at: Reading, *, json: bool = False, most: int | None = None) -> Spans:
    """The spans of one ExportTraceServiceRequest; of those that tell something no more than ``most``.

    Raises ValueError, in one sentence, where it is none.
    """
    samples: list[Sample] = []
    foreign = beyond = 0
    for make in _of_json(body) if json else _of_protobuf(body):
        if make is None:
            foreign += 1
        elif most is not None and len(samples) >= most:
            beyond += 1
        else:
            sample = _sample(make(), at)
            if sample is None:
                foreign += 1
            else:
                samples.append(sample)
    return Spans(samples, foreign, beyond)


def answer(rejected: int, why: str, *, json: bool = False) -> bytes:
    """The ExportTraceServiceResponse: empty where all was taken, else how many spans were not, and why."""
    if json:
        told = {"partialSuccess": {"rejectedSpans": str(rejected), "errorMessage": why}} if rejected else {}
        return orjson.dumps(told)
    response = ExportTraceServiceResponse()
    if rejected:
        response.partial_success.rejected_spans = rejected
        response.partial_success.error_message = why
    return response.SerializeToString()


def _sample(span: _Span, at: Reading) -> Sample | None:
    """None where the span tells no time of an engine."""
    values: dict[str, float] = {}
    names: dict[str, str] = {}
    facts: dict[str, str] = {}
    timed = False
    for name, value in span.attributes.items():
        found: int | None = None
        if name in LATENCIES:
            signal = LATENCIES[name]
            found = duration_ns(value, _SECOND_NS)
            timed = timed or found is not None
        elif name in COUNTS:
            signal, found = COUNTS[name], count(value)
        else:
            word = text(value)
            if word is not None:
                facts[WORDS[name]] = word
        if found is not None:
            values[signal] = found
            names[signal] = name
    if not timed:
        return None
    if 0 < span.start_ns < _MOST_START_NS:
        values["start_unix_ns"] = span.start_ns
    for key, known in (("trace_id", span.trace_id), ("span_id", span.span_id), ("engine", _engine(span.scope))):
        if known is not None:
            facts[key] = known
    return Sample(
        kind=SampleKind.SPAN,
        source=_SOURCE,
        t_mono_ns=at.t_mono_ns,
        t_unix_ns=at.t_unix_ns,
        boot_id=at.boot_id,
        tap=at.tap,
        values=values,
        facts=facts,
        names=names,
    )


def _engine(scope: str) -> str | None:
    return next((name for name in _ENGINES if scope.startswith(name)), None)


# -- protobuf


# Reads a span; None where it cannot tell an engine's times.
_Make = Callable[[], _Span] | None


def _of_protobuf(body: bytes) -> Iterator[_Make]:
    """One without an engine's times is not even parsed: most of a busy service's are so."""
    walk = Walk(body, _MOST_FIELDS)
    try:
        for resource in _numbered(walk, walk.whole(), _RESOURCE_SPANS):
            for scope in _numbered(walk, resource, _SCOPE_SPANS):
                fields = list(walk.parts(scope))
                name = _scope_name(walk, fields)
                for number, part in fields:
                    if number == _SPANS:
                        told = walk.holds(part, _TELLING) and part[1] - part[0] <= _MOST_SPAN_BYTES
                        yield partial(_parsed, walk, part, name) if told else None
    except ValueError as error:
        raise ValueError(f"the body is no OTLP trace request in protobuf: {error}") from None


def _numbered(walk: Walk, message: Part, number: int) -> Iterator[Part]:
    return (part for found, part in walk.parts(message) if found == number)


def _scope_name(walk: Walk, fields: Iterable[tuple[int, Part]]) -> str:
    for number, scope in fields:
        if number == _SCOPE:
            for name in _numbered(walk, scope, _SCOPE_NAME):
                return walk.bytes_of(name)[:_MOST_SCOPE_BYTES].decode("utf-8", "replace")
    return ""


def _parsed(walk: Walk, part: Part, scope: str) -> _Span:
    try:
        span = Span.FromString(walk.bytes_of(part))
    except DecodeError:
        raise ValueError("the body is no OTLP trace request in protobuf: a span is broken") from None
    return _Span(
        scope,
        span.trace_id.hex() if len(span.trace_id) == 16 else None,
        span.span_id.hex() if len(span.span_id) == 8 else None,
        span.start_time_unix_nano,
        {pair.key: _value(pair.value) for pair in span.attributes if pair.key in _KEPT},
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind in ("double_value", "int_value", "string_value") else None


# -- JSON: hex ids, 64-bit integers as text, unknown members ignored (the OTLP specification)


def _of_json(body: bytes) -> Iterator[_Make]:
    try:
        request = orjson.loads(body)
    except ValueError:
        raise ValueError("the body is no JSON") from None
    if type(request) is not dict or type(request.get("resourceSpans", [])) is not list:
        raise ValueError("the body is no OTLP trace request: expected an object with resourceSpans")
    for resource in _objects(request.get("resourceSpans")):
        for scope in _objects(resource.get("scopeSpans")):
            named = scope.get("scope")
            name = named.get("name") if type(named) is dict else None
            for span in _objects(scope.get("spans")):
                attributes = dict(_json_attributes(span.get("attributes")))
                told = not LATENCIES.keys().isdisjoint(attributes)
                yield partial(_of_object, span, name if type(name) is str else "", attributes) if told else None


def _of_object(span: dict[str, Any], scope: str, attributes: dict[str, Any]) -> _Span:
    return _Span(
        scope,
        _hex(span.get("traceId"), 32),
        _hex(span.get("spanId"), 16),
        _whole(span.get("startTimeUnixNano")) or 0,
        attributes,
    )


def _json_attributes(attributes: Any) -> Iterator[tuple[str, Any]]:
    for pair in _objects(attributes):
        key, value = pair.get("key"), pair.get("value")
        if type(key) is not str or key not in _KEPT or type(value) is not dict:
            continue
        if "intValue" in value:
            yield key, _whole(value["intValue"])
        elif "doubleValue" in value:
            yield key, value["doubleValue"]
        else:
            yield key, value.get("stringValue")


def _objects(value: Any) -> Iterable[dict[str, Any]]:
    return [item for item in value if type(item) is dict] if type(value) is list else []


def _whole(value: Any) -> int | None:
    if type(value) is str and value.isascii() and value.isdigit() and len(value) <= 20:
        return int(value)
    return value if type(value) is int else None


def _hex(value: Any, digits: int) -> str | None:
    if type(value) is not str or len(value) != digits:
        return None
    try:
        return bytes.fromhex(value).hex()
    except ValueError:
        return None
