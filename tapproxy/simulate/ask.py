"""What one request asks for: the JSON body and the X-Sim headers, checked the way vLLM checks them.

Everything vLLM would take and this engine has no use for (temperature, stop, seed …) is ignored. Refusals carry
vLLM's nested error body.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from tapproxy.simulate.config import SimConfig
from tapproxy.simulate.faults import Fault, parse_fault
from tapproxy.simulate.words import count_tokens

_TOOL_OVERHEAD_TOKENS = 4  # the call's head, its opening and closing piece, and the end-of-sequence token


class Refusal(Exception):
    """An error answer: status and JSON body."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = error_body(message, kind, param, status)


def error_body(message: str, kind: str, param: str | None, code: int) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


@dataclass(frozen=True, slots=True)
class Overrides:
    """X-Sim-* headers over the configuration's defaults."""

    tokens: int | None
    itl_us: int | None
    ttft_us: int | None
    event_bytes: int | None
    reasoning_tokens: int
    stamps: bool
    fault: Fault | None


@dataclass(frozen=True, slots=True)
class Ask:
    chat: bool
    model: str
    stream: bool
    prompts: tuple[int, ...]  # tokens of each prompt; chat has one
    n: int
    max_tokens: int | None
    output_tokens: int  # of each choice
    ends_with: str  # "stop": the last token is the end of sequence and has no text
    include_usage: bool
    continuous_usage: bool
    logprobs: bool
    tool: str | None  # name of the function that is called
    overrides: Overrides

    @property
    def finish_reason(self) -> str:
        """What the client is told; the engine itself knows only stop and length."""
        return "tool_calls" if self.tool is not None and self.ends_with == "stop" else self.ends_with


def read_overrides(headers: dict[bytes, bytes], config: SimConfig, *, faulty: bool = True) -> Overrides:
    """``faulty``: the configured fault is for this request."""
    fault_text = headers.get(b"x-sim-fault")
    fault = config.parsed_fault() if faulty else None
    if fault_text is not None:
        try:
            fault = parse_fault(fault_text.decode("latin-1"))
        except ValueError as error:
            raise Refusal(400, f"X-Sim-Fault: {error}", "BadRequestError", "X-Sim-Fault") from None
    stamps = headers.get(b"x-sim-stamps")
    event_bytes = _number(headers, b"x-sim-event-bytes", 1)
    itl_us = _number(headers, b"x-sim-itl-us", 0)
    ttft_us = _number(headers, b"x-sim-ttft-us", 0)
    return Overrides(
        tokens=_number(headers, b"x-sim-tokens", 1),
        itl_us=config.itl_us if itl_us is None else itl_us,
        ttft_us=config.ttft_us if ttft_us is None else ttft_us,
        event_bytes=config.event_bytes if event_bytes is None else event_bytes,
        reasoning_tokens=_number(headers, b"x-sim-reasoning-tokens", 0) or 0,
        stamps=config.stamps if stamps is None else stamps.strip() not in (b"0", b"false", b""),
        fault=fault,
    )


def read_ask(
    chat: bool,
    headers: dict[bytes, bytes],
    body: bytes,
    config: SimConfig,
    overrides: Overrides,
) -> Ask:
    """Raises Refusal."""
    document = _document(headers, body)
    model = document.get("model", config.model)
    if model != config.model:
        message = f"The model `{model}` does not exist. Valid aliases: {config.model}."
        raise Refusal(404, message, "NotFoundError", "model")
    prompts = (_chat_tokens(document),) if chat else _prompt_tokens(document)
    stream = _flag(document, "stream")
    options = document.get("stream_options") or {}
    if options and not stream:
        raise _invalid("stream_options", "Stream options can only be defined when `stream=True`.")
    if not isinstance(options, dict):
        raise _invalid("stream_options", "Input should be a valid dictionary")
    tool = _tool(document) if chat else None
    limit = _max_tokens(document, chat)
    tokens, ends_with = _length(document, limit, max(prompts), tool, overrides, config)
    temperature = document.get("temperature")
    if isinstance(temperature, int | float) and temperature < 0:
        message = f"temperature must be non-negative, got {float(temperature)}."
        raise Refusal(400, message, "BadRequestError", "temperature")
    return Ask(
        chat=chat,
        model=config.model,
        stream=stream,
        prompts=prompts,
        n=_count(document, "n", 1) or 1,
        max_tokens=limit,
        output_tokens=tokens,
        ends_with=ends_with,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")) and bool(options.get("include_usage")),
        logprobs=document.get("logprobs") not in (None, False),
        tool=tool,
        overrides=overrides,
    )


def _document(headers: dict[bytes, bytes], body: bytes) -> dict[str, Any]:
    media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if media_type != b"application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise Refusal(400, message, "Bad Request")
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # The reason only, never the text around it: bodies are not repeated in answers.
        message = (
            f"1 validation error:\n  {{'type': 'json_invalid', 'loc': 'body.{error.pos}', 'msg': 'JSON decode error',"
            f" 'ctx': {{'error': '{error.msg.partition(':')[0]}'}}}}"
        )
        raise Refusal(400, message, "Bad Request", f"body.{error.pos}") from None
    if not isinstance(document, dict):
        raise _invalid(None, "Input should be a valid dictionary")
    return document


def _invalid(field: str | None, message: str, kind: str = "value_error") -> Refusal:
    where = "body" if field is None else f"body.{field}"
    text = f"1 validation error:\n  {{'type': '{kind}', 'loc': '{where}', 'msg': '{message}'}}"
    return Refusal(400, text, "Bad Request", where)


def _chat_tokens(document: dict[str, Any]) -> int:
    """Tokens of all messages' text, joined; parts that are not text count nothing."""
    if "messages" not in document:
        raise _invalid("messages", "Field required", "missing")
    messages = document["messages"]
    if not isinstance(messages, list) or not messages:
        raise _invalid("messages", "Input should be a non-empty list")
    texts: list[str] = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise _invalid("messages", "Each message should be a dictionary with a role")
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts += [p["text"] for p in parts if isinstance(p, dict) and isinstance(p.get("text"), str)]
    return count_tokens("".join(texts))


def _prompt_tokens(document: dict[str, Any]) -> tuple[int, ...]:
    """A text, token ids, or a list of either."""
    if "prompt" not in document:
        raise _invalid("prompt", "Field required", "missing")
    prompt = document["prompt"]
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_ids(prompt)):
        prompt = [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise _invalid("prompt", "Input should be a valid string or a non-empty list")
    counts = []
    for one in prompt:
        if isinstance(one, str):
            counts.append(count_tokens(one))
        elif isinstance(one, list) and one and _is_ids(one):
            counts.append(len(one))
        else:
            raise _invalid("prompt", "Each prompt should be a string or a list of token ids")
    return tuple(counts)


def _is_ids(value: list[Any]) -> bool:
    return all(type(item) is int for item in value)


def _tool(document: dict[str, Any]) -> str | None:
    tools = document.get("tools")
    if not tools or document.get("tool_choice") == "none":
        return None
    try:
        names = [str(tool["function"]["name"]) for tool in tools]
    except (TypeError, KeyError):
        raise _invalid("tools", "Each tool should be a function with a name") from None
    choice = document.get("tool_choice")
    if isinstance(choice, dict):
        named = choice.get("function")
        chosen = named.get("name") if isinstance(named, dict) else None
        if chosen not in names:
            raise _invalid("tool_choice", "The named function is not among the tools")
        return str(chosen)
    return names[0]


def _max_tokens(document: dict[str, Any], chat: bool) -> int | None:
    if chat and document.get("max_completion_tokens") is not None:
        return _count(document, "max_completion_tokens", 1)
    return _count(document, "max_tokens", 1)


def _length(
    document: dict[str, Any],
    limit: int | None,
    prompt: int,
    tool: str | None,
    overrides: Overrides,
    config: SimConfig,
) -> tuple[int, str]:
    """Tokens of each choice and how it ends. X-Sim-Tokens is exact and wins over everything."""
    room = config.max_model_len - prompt
    if room < 1:
        message = (
            f"This model's maximum context length is {config.max_model_len} tokens. However, your prompt contains"
            f" {prompt} input tokens. Please reduce the length of the input prompt."
        )
        raise Refusal(400, message, "BadRequestError", "input_tokens")
    wanted = overrides.tokens or limit
    if wanted is not None and wanted > room:
        message = (
            f"max_tokens={wanted} cannot be greater than max_model_len={config.max_model_len} less the prompt's"
            f" {prompt} tokens. Please request fewer output tokens."
        )
        raise Refusal(400, message, "BadRequestError", "max_tokens")
    if overrides.tokens is not None:
        # A tool call has to close its JSON, so it ends by itself where it can.
        return overrides.tokens, "stop" if tool and overrides.tokens >= _TOOL_OVERHEAD_TOKENS else "length"
    most = room if limit is None else limit
    natural = max(config.output_tokens, _count(document, "min_tokens", 0) or 0)
    if tool is not None and most >= _TOOL_OVERHEAD_TOKENS:
        # A call ends when its JSON is closed, whatever ignore_eos says: it is made as long as the limit allows.
        return max(min(natural, most), _TOOL_OVERHEAD_TOKENS), "stop"
    if _flag(document, "ignore_eos"):
        return most, "length"
    return (most, "length") if most <= natural else (natural, "stop")


def _count(document: dict[str, Any], name: str, least: int) -> int | None:
    value = document.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise _invalid(name, "Input should be a valid integer")
    if value < least:
        message = f"{name} must be at least {least}, got {value}."
        raise Refusal(400, message, "BadRequestError", name)
    return value


def _flag(document: dict[str, Any], name: str) -> bool:
    value = document.get(name)
    if value is not None and not isinstance(value, bool):
        raise _invalid(name, "Input should be a valid boolean")
    return bool(value)


def _number(headers: dict[bytes, bytes], name: bytes, least: int) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    value = text.strip()
    if not value.isdigit() or len(value) > 12 or int(value) < least:
        shown = name.decode().title()
        raise Refusal(400, f"{shown} must be a whole number of at least {least}.", "BadRequestError", shown)
    return int(value)
