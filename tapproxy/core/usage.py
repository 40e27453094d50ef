"""What an engine says of itself in a response: its JSON, token counts, stage times and names.

Rules here: nothing raises for any JSON value; a number of the wrong kind, negative, not finite or beyond reason is
unknown (None), never 0; strings are cut and made storable.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import orjson

from tapproxy.core.record import EnginePart, UsagePart

_MAX_TEXT_CHARS: Final = 256
_MAX_COUNT: Final = 1 << 31
_MAX_STAMP_S: Final = 1e11
_DAY_NS: Final = 86_400_000_000_000
# The standard library's reader takes what orjson refuses (NaN, lone surrogates, bytes that are not UTF-8) and is
# some twenty times slower: it gets no more than this.
_MAX_LENIENT_BYTES: Final = 256 * 1024

_DIGITS: Final = re.compile("[0-9]{1,12}", re.ASCII)

_PROMPT_KEYS: Final = ("prompt_tokens", "input_tokens")
_COMPLETION_KEYS: Final = ("completion_tokens", "output_tokens")
_DETAIL_KEYS: Final = ("prompt_tokens_details", "input_tokens_details")
_CACHED_KEYS: Final = ("cache_read_input_tokens", "prompt_cache_hit_tokens", "cached_tokens")


def parse_json(data: bytes) -> Any:
    """The JSON value; raises only ValueError. Takes also what Python writes and the standard forbids (NaN)."""
    try:
        return orjson.loads(data)
    except ValueError:
        pass
    if len(data) > _MAX_LENIENT_BYTES:
        raise ValueError("not strict JSON, and too long for the lenient reader")
    try:
        return json.loads(data.decode("utf-8", "replace"), strict=False)
    except RecursionError:
        raise ValueError("nested too deep") from None


def text(value: Any) -> str | None:
    """A name that may be stored and shown: a string, cut, with ``?`` for each character that is none to be seen.

    Those are control characters (an ESC in a model's name would speak to the operator's terminal), marks that turn
    the direction of writing, separators of lines, and lone surrogates, which no UTF-8 file can hold.
    """
    if type(value) is not str or not value:
        return None
    short: str = value[:_MAX_TEXT_CHARS]
    return short if short.isprintable() else "".join(char if char.isprintable() else "?" for char in short)


def count(value: Any) -> int | None:
    """A number of tokens."""
    return value if type(value) is int and 0 <= value < _MAX_COUNT else None


def duration_ns(value: Any, unit_ns: int) -> int | None:
    """A duration of up to a day, given in units of ``unit_ns``."""
    if type(value) is not int and type(value) is not float:
        return None
    # NaN fails both comparisons.
    return round(value * unit_ns) if 0 <= value <= _DAY_NS // unit_ns else None


def read_usage(usage: dict[str, Any]) -> tuple[int | None, int | None, int | None]:
    """Prompt, completion and cached tokens of a ``usage`` object, in OpenAI's, Anthropic's or a cousin's words."""
    cached = _first_count(usage, _CACHED_KEYS)
    for key in _DETAIL_KEYS:
        details = usage.get(key)
        if cached is None and type(details) is dict:
            cached = count(details.get("cached_tokens"))
    return _first_count(usage, _PROMPT_KEYS), _first_count(usage, _COMPLETION_KEYS), cached


def _first_count(values: dict[str, Any], keys: tuple[str, ...]) -> int | None:
    for key in keys:
        found = count(values.get(key))
        if found is not None:
            return found
    return None


def read_metrics(metrics: dict[str, Any]) -> EnginePart:
    """vLLM's ``metrics``. Its ``time_to_first_token_ms`` counts from scheduling: prefill alone, without the queue."""
    return EnginePart(
        source="response.metrics",
        queue_ns=duration_ns(metrics.get("queue_time_ms"), 1_000_000),
        prefill_ns=duration_ns(metrics.get("time_to_first_token_ms"), 1_000_000),
        decode_ns=duration_ns(metrics.get("generation_time_ms"), 1_000_000),
    )


def read_timings(timings: dict[str, Any]) -> EnginePart:
    """llama.cpp's ``timings``; it tells no queue."""
    return EnginePart(
        source="response.timings",
        prefill_ns=duration_ns(timings.get("prompt_ms"), 1_000_000),
        decode_ns=duration_ns(timings.get("predicted_ms"), 1_000_000),
    )


def timed_prompt(timings: dict[str, Any]) -> tuple[int | None, int | None, int | None]:
    """llama.cpp's prompt: ``prompt_n`` tokens were computed, ``cache_n`` were found in its cache."""
    computed, cached = count(timings.get("prompt_n")), count(timings.get("cache_n"))
    return None if computed is None else computed + (cached or 0), None, cached


def read_meta_info(meta: dict[str, Any]) -> EnginePart:
    """SGLang's ``meta_info``: durations in seconds, and stamps of which only differences mean anything here."""
    first, whole = meta.get("first_token_latency"), meta.get("e2e_latency")
    return EnginePart(
        source="response.meta_info",
        frontend_ns=_between_ns(meta.get("request_received_ts"), meta.get("api_server_dispatch_finish_ts")),
        queue_ns=duration_ns(meta.get("queue_time"), 1_000_000_000),
        prefill_ns=_between_ns(meta.get("forward_entry_time"), meta.get("prefill_finished_time")),
        decode_ns=_between_ns(first, whole),
    )


def _between_ns(start: Any, end: Any) -> int | None:
    """Seconds from start to end, None where they cannot be of one clock."""
    for value in (start, end):
        if type(value) is not int and type(value) is not float:
            return None
        # SGLang writes 0.0 for what it did not stamp.
        if not 0 < value < _MAX_STAMP_S:
            return None
    return duration_ns(end - start, 1_000_000_000)


def read_durations(value: dict[str, Any]) -> EnginePart:
    """Ollama's figures, in ns, in the last object of an answer; loading the model is no stage of a request."""
    return EnginePart(
        source="response.durations",
        prefill_ns=duration_ns(value.get("prompt_eval_duration"), 1),
        decode_ns=duration_ns(value.get("eval_duration"), 1),
    )


# TGI's fields of an answer that was not streamed, in whole ms, and how many tokens: numbers and nothing else. Others
# use some of these names in other units, so they count only where all the times are there.
_TGI_TIMES: Final = ("x-validation-time", "x-queue-time", "x-inference-time")
_TGI_PROMPT: Final = "x-prompt-tokens"
_TGI_GENERATED: Final = "x-generated-tokens"
TIMING_FIELDS: Final = (*_TGI_TIMES, _TGI_PROMPT, _TGI_GENERATED)


def read_fields(fields: dict[str, str]) -> tuple[EnginePart, UsagePart]:
    """TGI's header fields: validation is where it tokenises; inference is prefill and decode in one.

    They are told apart only where a single token was made: then all of it was prefill.
    """
    numbers = {name: int(value) for name, value in fields.items() if _DIGITS.fullmatch(value) is not None}
    if any(name not in numbers for name in _TGI_TIMES):
        return EnginePart(), UsagePart()
    validation_ms, queue_ms, inference_ms = [numbers[name] for name in _TGI_TIMES]
    generated = count(numbers.get(_TGI_GENERATED))
    single = generated == 1
    part = EnginePart(
        source="response.headers",
        frontend_ns=duration_ns(validation_ms, 1_000_000),
        queue_ns=duration_ns(queue_ms, 1_000_000),
        prefill_ns=duration_ns(inference_ms, 1_000_000) if single else None,
        decode_ns=0 if single else None,
    )
    return part, UsagePart(count(numbers.get(_TGI_PROMPT)), generated)


def tells_something(part: EnginePart) -> bool:
    """Whether any stage is known."""
    return not (
        part.frontend_ns is None and part.queue_ns is None and part.prefill_ns is None and part.decode_ns is None
    )
