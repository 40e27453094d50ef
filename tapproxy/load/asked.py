"""What a file asks a model: chat requests with their tools, or plain prompts, as an engine would get them.

Rules here: nothing of a conversation is dropped that the template may render (tool calls, names, reasoning); what has
no tokens that could be counted here (pictures, sound) is counted as such. What prompts say is never shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from tapproxy.core.address import quote
from tapproxy.core.errors import ConfigError
from tapproxy.load.prompts import ROLES, json_lines

_MOST_BYTES: Final = 1 << 30
_EXPECTED: Final = (
    'expected JSON lines of chat requests ("messages", "tools"), of "prompt" or "text", or a line of plain text each'
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request. ``messages`` (with ``tools``) or ``text``, never both. ``not_text``: parts of another kind."""

    text: str | None = None
    messages: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    not_text: int = 0


@dataclass(slots=True)
class Batch:
    """``token_ids``: prompts that are lists of token ids, which cost no tokenising. ``empty``: with nothing in them."""

    asked: list[Asked]
    kind: str
    token_ids: int = 0
    empty: int = 0


def read(path: Path, *, as_chat: bool = False) -> Batch:
    """Every request of a file. ``as_chat``: a plain prompt is a user's message. Raises ConfigError."""
    name = quote(str(path))
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ConfigError(f"{name} is larger than 1 GiB: give a part of it")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from None
    beginning = data.lstrip()[:1]
    batch = Batch([], "JSON" if beginning in (b"{", b"[") else "lines of text")
    for where, value in _json(name, data, beginning) if batch.kind == "JSON" else _lines(data):
        _take(batch, value, where, as_chat)
    if not batch.asked and not batch.token_ids:
        raise ConfigError(f"{name} holds no prompt: {_EXPECTED}")
    return batch


def _lines(data: bytes) -> list[tuple[str, Any]]:
    text = data.decode("utf-8", "replace")
    return [("", line) for line in text.split("\n") if line.strip()]


def _json(name: str, data: bytes, beginning: bytes) -> list[tuple[str, Any]]:
    """(where it stands, value) of each: JSON lines, one array, or one object over several lines."""
    try:
        whole = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        if beginning == b"[" and b"\n[" not in data.strip():
            raise ConfigError(f"{name} is no JSON (line {error.lineno}): {_EXPECTED}") from None
    else:
        values = whole if isinstance(whole, list) else [whole]
        return [(f"{name}, entry {number}", value) for number, value in enumerate(values, 1)]
    return json_lines(name, data, _EXPECTED)


def _take(batch: Batch, value: Any, where: str, as_chat: bool) -> None:
    if isinstance(value, str):
        _take_text(batch, value, as_chat)
        return
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is no object: {_EXPECTED}")
    body = value.get("body")
    if isinstance(body, dict):  # a line of OpenAI's batch files
        value = body
    if "messages" in value or isinstance(value.get("input"), list):
        batch.asked.append(_chat(value, value.get("messages", value.get("input")), where))
    elif "conversations" in value:
        turns = _sharegpt(value["conversations"], where)
        if turns:
            batch.asked.append(Asked(messages=turns))
        else:
            batch.empty += 1
    else:
        _take_prompt(batch, value, where, as_chat)


def _take_prompt(batch: Batch, value: dict[str, Any], where: str, as_chat: bool) -> None:
    prompt = next((value[key] for key in ("prompt", "text", "input") if value.get(key) is not None), None)
    if isinstance(prompt, str):
        _take_text(batch, prompt, as_chat)
        return
    if isinstance(prompt, list) and prompt:
        if all(isinstance(each, str) for each in prompt):
            for each in prompt:
                _take_text(batch, each, as_chat)
            return
        if all(isinstance(each, int | list) for each in prompt):
            batch.token_ids += 1
            return
    raise ConfigError(f"{where} holds no prompt: {_EXPECTED}")


def _take_text(batch: Batch, text: str, as_chat: bool) -> None:
    if not text:
        batch.empty += 1
    elif as_chat:
        batch.asked.append(Asked(messages=({"role": "user", "content": text},)))
    else:
        batch.asked.append(Asked(text=text))


def _chat(value: dict[str, Any], messages: Any, where: str) -> Asked:
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{where}: messages is no list with a message in it")
    tools = value.get("tools")
    if tools is not None and not (isinstance(tools, list) and all(isinstance(each, dict) for each in tools)):
        raise ConfigError(f"{where}: tools is no list of objects")
    made, not_text = [], 0
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{where}: a message is no object with a role")
        one, others = _message(message, where)
        made.append(one)
        not_text += others
    return Asked(messages=tuple(made), tools=tuple(tools or ()), not_text=not_text)


def _message(message: dict[str, Any], where: str) -> tuple[dict[str, Any], int]:
    """As engines hand it to the template: text parts as one text, arguments of tool calls as objects."""
    made = dict(message)
    content, not_text = message.get("content"), 0
    if isinstance(content, list):
        texts = []
        for part in content:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                texts.append(part["text"])
            elif isinstance(part, str):
                texts.append(part)
            else:
                not_text += 1
        made["content"] = "\n".join(texts)
    elif content is not None and not isinstance(content, str):
        raise ConfigError(f"{where}: a message's content is not text: expected a string or a list of parts")
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        made["tool_calls"] = [_call(each) for each in calls]
    return made, not_text


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"] or b"{}")
    except orjson.JSONDecodeError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _sharegpt(turns: Any, where: str) -> tuple[dict[str, Any], ...]:
    """What comes before the assistant's first turn: the rest is what the engine is to say itself."""
    if not isinstance(turns, list):
        raise ConfigError(f"{where}: conversations is no list")
    found = []
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("value"), str):
            raise ConfigError(f"{where}: a turn of the conversation is no object with a value")
        role = ROLES.get(str(turn.get("from")), "user")
        if role == "assistant":
            break
        if turn["value"]:
            found.append({"role": role, "content": turn["value"]})
    return tuple(found)
