"""What each event of one answer is, and how many tokens it carries, for every dialect the engines speak.

Rules here: an event has one kind (definitions.md, "Event kinds"), the most telling of what it holds; a count is
given only where it is known, from the event itself or, at the end, because the engine's total leaves no other way;
no JSON value makes it raise; nothing of the text is kept.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson

from tapproxy.core import usage as say
from tapproxy.core.record import EnginePart, UsagePart
from tapproxy.core.sse import SseItem

# The most telling first: text seen by a user, then what else was generated.
KINDS: Final = ("token", "tool", "reasoning", "error", "finish", "usage", "role", "done", "comment", "other")
TOKEN_KINDS: Final = frozenset(("token", "tool", "reasoning"))

Reading = tuple[str, int | None]

_TOKEN: Final[Reading] = ("token", None)
_DONE: Final[Reading] = ("done", 0)
_ERROR: Final[Reading] = ("error", 0)
_OTHER: Final[Reading] = ("other", 0)
_COMMENT: Final[Reading] = ("comment", 0)
_MAX_CHOICES: Final = 1024
# Where an answer names itself at all it does so at once.
_NAMED_WITHIN_EVENTS: Final = 16

# /v1/responses: what each ``type`` says. All others are ``other``.
_RESPONSES_DELTAS: Final = {
    "response.output_text.delta": "token",
    "response.refusal.delta": "token",
    "response.reasoning.delta": "reasoning",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
    "response.function_call_arguments.delta": "tool",
    "response.mcp_call_arguments.delta": "tool",
    "response.mcp_call.arguments_delta": "tool",
    "response.custom_tool_call_input.delta": "tool",
    "response.code_interpreter_call_code.delta": "tool",
}
_RESPONSES_TOOLS: Final = frozenset(("function_call", "custom_tool_call", "mcp_call"))
# Anthropic /v1/messages: the delta of a content_block_delta, and the block of a content_block_start.
_MESSAGES_DELTAS: Final = {"text_delta": "token", "thinking_delta": "reasoning", "input_json_delta": "tool"}
_MESSAGES_TOOLS: Final = frozenset(("tool_use", "server_tool_use", "mcp_tool_use"))


class _Choice:
    """One of the answers asked for (``n``, several prompts): how far its count is known."""

    __slots__ = ("length", "said", "total", "unknown")

    def __init__(self) -> None:
        self.total = 0  # tokens so far, where ``unknown`` is 0
        self.unknown = 0  # token events of unknown count since the engine last said a total
        self.said: int | None = None  # the engine's own running total
        self.length = (0, 0)  # of SGLang's cumulative text: characters and checksum

    def told(self, said: int) -> int | None:
        """Takes the engine's running total; returns what this event added, None where that can't be told."""
        gained = None if self.unknown or said < self.total else said - self.total
        self.said = self.total = said
        self.unknown = 0
        return gained

    def counted(self, tokens: int | None) -> None:
        """Takes an event without a running total."""
        if tokens is None:
            self.unknown += 1
        else:
            self.total += tokens


class DeltaReader:
    """Reads one response. Feed it every item of the stream in order, or the body of an answer not streamed."""

    __slots__ = (
        "_choices",
        "_events",
        "_final",
        "_maybe",
        "_prompt_usage",
        "_soft",
        "_vague",
        "done",
        "engine",
        "error",
        "finish_reasons",
        "model",
        "response_id",
        "unread",
    )

    def __init__(self) -> None:
        self.response_id: str | None = None
        self.model: str | None = None
        self.engine = EnginePart()
        self.finish_reasons: dict[int, str] = {}
        self.done = False  # the end marker of its dialect was seen
        self.error = False
        self.unread = 0  # events whose JSON could not be read
        self._events = 0
        self._choices: dict[int, _Choice] = {}
        self._prompt_usage = UsagePart()
        self._final = False  # the total is the engine's last word, not a running one
        self._maybe: set[int] = set()  # finish events that may be the end-of-sequence token
        self._soft: set[int] = set()  # finish events held to carry no token, until the total says they do
        self._vague = False  # an event of several answers at once: its parts can't be told

    @property
    def usage(self) -> UsagePart:
        """The engine's counts so far; of running totals the sum over the answers."""
        part = self._prompt_usage
        completion = part.completion_tokens
        if not self._final:
            said = [choice.said for choice in self._choices.values() if choice.said is not None]
            completion = sum(said) if said else completion
        return UsagePart(part.prompt_tokens, completion, part.cached_tokens)

    def feed(self, item: SseItem) -> Reading:
        """The kind of one event and its tokens; None where only the end can tell, see ``resolve_tokens``."""
        index = self._events
        self._events = index + 1
        _, event_type, data, comment, _, _ = item
        if comment:
            return _COMMENT
        try:
            value = orjson.loads(data)
        except ValueError:
            return self._odd(item)
        if type(value) is not dict:
            return self._odd(item)
        # The event that most of a stream consists of: text of one answer, and nothing else told. ``_object`` would
        # find the same by way of six calls; there is one of these per token.
        choices = value.get("choices")
        if type(choices) is list and len(choices) == 1 and index >= _NAMED_WITHIN_EVENTS:
            choice = choices[0]
            delta = choice.get("delta") if type(choice) is dict else None
            if (
                type(delta) is dict
                and delta.get("content")
                and not choice.get("finish_reason")
                and choice.get("logprobs") is None
                and choice.get("token_ids") is None
                and value.get("usage") is None
                and "timings" not in value
                and "error" not in value
                and event_type == "message"
            ):
                number = choice.get("index")
                state = self._choices.get(number) if type(number) is int else None
                if state is not None:
                    state.unknown += 1
                    return _TOKEN
        return self._object(value, index, event_type)

    def _odd(self, item: SseItem) -> Reading:
        """Whatever is not plainly a JSON object."""
        data = item.data.strip()
        if data == b"[DONE]":
            self.done = True
            return _DONE
        value = None
        if item.oversize:
            self.unread += 1
        elif data:
            try:
                value = say.parse_json(data)
            except ValueError:
                self.unread += 1
        if type(value) is dict:
            return self._object(value, self._events - 1, item.type)
        if item.type == "error":
            self.error = True
            return _ERROR
        return _OTHER

    def _object(self, value: dict[str, Any], index: int, event_type: str) -> Reading:
        if index < _NAMED_WITHIN_EVENTS:
            self._name(value)
        if event_type == "error" or value.get("error"):
            self.error = True
            return _ERROR
        choices = value.get("choices")
        if type(choices) is list and choices:
            if len(choices) == 1:
                return self._choice(value, choices[0], index)
            return self._several(value, choices, index)
        return self._no_choices(value, index)

    def _no_choices(self, value: dict[str, Any], index: int) -> Reading:
        kind = value.get("type")
        if type(kind) is str:
            if kind.startswith("response."):
                return self._responses(kind, value, index)
            reader = _MESSAGES.get(kind)
            if reader is not None:
                return reader(self, value, index)
        if kind == "error" or value.get("object") == "error":
            self.error = True
            return _ERROR
        if type(value.get("meta_info")) is dict:
            return self._native(value, value["meta_info"], index)
        if type(value.get("token")) is dict:
            return self._generate_stream(value, value["token"])
        self._stages(value)
        if self._total(value.get("usage")):
            return "usage", 0
        return _OTHER

    # -- OpenAI chat and completions

    def _choice(self, value: dict[str, Any], choice: Any, index: int) -> Reading:
        if type(choice) is not dict:
            return _OTHER
        number = choice.get("index")
        if type(number) is not int:
            number = 0
        state = self._choices.get(number)
        first = state is None
        if state is None:
            state = self._new_choice(number)
        reason = choice.get("finish_reason")
        if reason:
            self._finished(number, reason)
            self._stages(value)
        kind = _kind(choice, reason, first)
        usage = value.get("usage")
        if kind == "role" or kind == "other":
            self._running(usage)
            return kind, 0
        tokens = _own_count(choice)
        said = self._running(usage)
        timings = value.get("timings")
        if type(timings) is dict:
            self._stages(value)
            self._prompt(say.timed_prompt(timings))
            said = say.count(timings.get("predicted_n")) if said is None else said
        if said is not None:
            gained = state.told(said)
            tokens = tokens if gained is None else gained
        if tokens is None and kind == "finish":
            tokens = self._finish_tokens(choice, index)
        if said is None:
            state.counted(tokens)
        return kind, tokens

    def _several(self, value: dict[str, Any], choices: list[Any], index: int) -> Reading:
        """Several answers in one event. Its usage, if any, is of them together, so it is no one's running total."""
        usage, self._vague = value.get("usage"), True
        readings = [self._choice({}, choice, index) for choice in choices[:_MAX_CHOICES]]
        self._total(usage)
        self._stages(value)
        tokens = [reading[1] for reading in readings]
        kind = min((reading[0] for reading in readings), key=KINDS.index)
        return kind, None if None in tokens else sum(count for count in tokens if count is not None)

    def _finish_tokens(self, choice: dict[str, Any], index: int) -> int | None:
        """Tokens of a finish event that shows no text and no count.

        vLLM marks a choice that ended with ``stop_reason``: this event is its end-of-sequence token. SGLang and
        llama.cpp send the finish by itself, without any content. An empty content from elsewhere may be either.
        """
        reason = choice.get("finish_reason")
        if "stop_reason" in choice:
            return 0 if reason == "abort" else None
        delta = choice.get("delta")
        empty = choice.get("text") == "" if delta is None else type(delta) is dict and delta.get("content") == ""
        if empty:
            self._maybe.add(index)
            return None
        if reason != "length":
            self._soft.add(index)
        return 0

    def _new_choice(self, number: int) -> _Choice:
        state = _Choice()
        if len(self._choices) < _MAX_CHOICES:
            self._choices[number] = state
        return state

    def _finished(self, number: int, reason: Any) -> None:
        reason = say.text(reason)
        if reason is not None and len(self.finish_reasons) < _MAX_CHOICES:
            self.finish_reasons[number] = reason

    # -- /v1/responses and Anthropic's /v1/messages

    def _responses(self, kind: str, value: dict[str, Any], index: int) -> Reading:
        channel = _RESPONSES_DELTAS.get(kind)
        if channel is not None:
            logprobs = value.get("logprobs")
            return channel, len(logprobs) if type(logprobs) is list and logprobs else None
        response = value.get("response")
        if kind in ("response.completed", "response.incomplete", "response.failed"):
            self.done = True
            if type(response) is dict:
                self._total(response.get("usage"))
                self._stages(response)
                self._finished(0, response.get("status"))
            if kind == "response.failed":
                self.error = True
                return _ERROR
            return self._soft_finish(index)
        if kind == "response.output_item.added":
            item = value.get("item")
            if type(item) is dict:
                if str(item.get("type")) in _RESPONSES_TOOLS:
                    return self._opening()
                if item.get("role") and not item.get("content"):
                    return "role", 0
        return _OTHER

    def _message_start(self, value: dict[str, Any], _: int) -> Reading:
        message = value.get("message")
        usage = message.get("usage") if type(message) is dict else None
        if type(usage) is dict:
            self._prompt(say.read_usage(usage))
        return "role", 0

    def _block_start(self, value: dict[str, Any], _: int) -> Reading:
        block = value.get("content_block")
        if type(block) is dict:
            if str(block.get("type")) in _MESSAGES_TOOLS:
                return self._opening()
            if block.get("text"):
                return "token", None
            if block.get("thinking"):
                return "reasoning", None
        return _OTHER

    def _block_delta(self, value: dict[str, Any], _: int) -> Reading:
        delta = value.get("delta")
        name = delta.get("type") if type(delta) is dict else None
        kind = _MESSAGES_DELTAS.get(name) if type(name) is str else None
        return _OTHER if kind is None else (kind, None)

    def _message_delta(self, value: dict[str, Any], index: int) -> Reading:
        delta = value.get("delta")
        reason = delta.get("stop_reason") if type(delta) is dict else None
        told = self._total(value.get("usage"))
        if reason:
            self._finished(0, reason)
            return self._soft_finish(index)
        return ("usage", 0) if told else _OTHER

    def _message_stop(self, _: dict[str, Any], __: int) -> Reading:
        self.done = True
        return _OTHER

    def _soft_finish(self, index: int) -> Reading:
        self._soft.add(index)
        return "finish", 0

    def _opening(self) -> Reading:
        """A tool call's name: generated, but nobody says of how many tokens, and they may be with the arguments."""
        self._vague = True
        return "tool", None

    # -- TGI and SGLang's own

    def _generate_stream(self, value: dict[str, Any], token: dict[str, Any]) -> Reading:
        """TGI sends one event per token; the last holds the whole text, and details where asked for."""
        details = value.get("details")
        if type(details) is dict:
            self._finished(0, details.get("finish_reason"))
            self._prompt((say.count(details.get("input_length")), None, None))
            self._total({"completion_tokens": details.get("generated_tokens")})
        if value.get("generated_text") is None:
            return "token", 1
        self.done = True
        return ("finish" if token.get("special") is True or not token.get("text") else "token"), 1

    def _native(self, value: dict[str, Any], meta: dict[str, Any], index: int) -> Reading:
        """SGLang /generate: text and counts so far, not what is new."""
        number = value.get("index")
        if type(number) is not int:
            number = 0
        state = self._choices.get(number) or self._new_choice(number)
        seen, text = state.length, value.get("text")
        if type(text) is str:
            state.length = (len(text), zlib.crc32(text.encode("utf-8", "replace")))
        reason = meta.get("finish_reason")
        if reason:
            self._finished(number, reason.get("type") if type(reason) is dict else reason)
        self._stages(value)
        said = self._running(meta)
        kind = "finish" if reason and state.length == seen else "token"
        if said is None:
            state.counted(None)
            return kind, None
        return kind, state.told(said)

    # -- the engine's numbers

    def _running(self, usage: Any) -> int | None:
        """Takes a running usage; returns its completion tokens."""
        if type(usage) is not dict:
            return None
        read = say.read_usage(usage)
        self._prompt(read)
        return read[1]

    def _total(self, usage: Any) -> bool:
        """Takes the usage of the whole answer; says whether there was one."""
        if type(usage) is not dict or not usage:
            return False
        read = say.read_usage(usage)
        self._prompt(read)
        if read[1] is not None:
            self._prompt_usage.completion_tokens = read[1]
            self._final = True
        return True

    def _prompt(self, read: tuple[int | None, int | None, int | None]) -> None:
        part = self._prompt_usage
        if read[0] is not None:
            part.prompt_tokens = read[0]
        if read[2] is not None:
            part.cached_tokens = read[2]

    def _stages(self, value: dict[str, Any]) -> None:
        for key, reader in _STAGES:
            told = value.get(key)
            if type(told) is dict:
                part = reader(told)
                if say.tells_something(part):
                    self.engine = part

    def _name(self, value: dict[str, Any]) -> None:
        for holder in (value, value.get("response"), value.get("message"), value.get("meta_info")):
            if type(holder) is dict:
                if self.response_id is None:
                    self.response_id = say.text(holder.get("id"))
                if self.model is None:
                    self.model = say.text(holder.get("model"))

    # -- the end

    def read_body(self, body: bytes) -> None:
        """An answer that was not streamed: its names, numbers and whether it is an error."""
        try:
            value = say.parse_json(body)
        except ValueError:
            self.unread += 1
            return
        answers = value[:_MAX_CHOICES] if type(value) is list else [value]
        for answer in answers:
            if type(answer) is dict:
                self._answer(answer)

    def _answer(self, value: dict[str, Any]) -> None:
        self._name(value)
        self.error = self.error or bool(value.get("error")) or "error" in (value.get("object"), value.get("type"))
        self._total(value.get("usage"))
        self._stages(value)
        choices = value.get("choices")
        for choice in choices[:_MAX_CHOICES] if type(choices) is list else []:
            if type(choice) is dict:
                number = choice.get("index")
                self._finished(number if type(number) is int else 0, choice.get("finish_reason"))
        for key, name in (("stop_reason", "stop_reason"), ("details", "finish_reason"), ("meta_info", "finish_reason")):
            holder = value if key == name else value.get(key)
            if type(holder) is dict:
                reason = holder.get(name)
                self._finished(0, reason.get("type") if type(reason) is dict else reason)
        details, meta = value.get("details"), value.get("meta_info")
        if type(details) is dict:
            self._prompt((say.count(details.get("input_length")), None, None))
            self._total({"completion_tokens": details.get("generated_tokens")})
        if type(meta) is dict:
            self._total(meta)

    def resolve_tokens(self, kinds: Sequence[str], tokens: Sequence[int | None]) -> list[int | None]:
        """The counts at the end of the stream: those still open, where the engine's total leaves one answer.

        An event of unknown count carries at least one token. So where the total leaves as many tokens as there are
        such events each carries one; where it leaves one event open that one carries the rest. Everything else
        stays unknown. Where counts that were told exceed the total, the engine counts otherwise: none is believed.
        """
        out = list(tokens)
        total = self.usage.completion_tokens
        if total is not None and not self._final:
            # A running total: what came after it counts as well, and where that is unknown so is the total.
            if any(choice.unknown for choice in self._choices.values()):
                return out
            total = sum(choice.total for choice in self._choices.values())
        if total is None:
            return out
        left = total - sum(count for count in out if count is not None)
        if left < 0:
            told = TOKEN_KINDS | {"finish"}
            return [None if kind in told else count for kind, count in zip(kinds, out, strict=False)]
        if self._vague:
            return out
        unknown = [i for i, count in enumerate(out) if count is None]
        maybe = [i for i in unknown if i in self._maybe]
        soft = [i for i in self._soft if i < len(out)]
        sure = len(unknown) - len(maybe)
        if left == sure:
            for i in unknown:
                out[i] = 0 if i in self._maybe else 1
        elif left == len(unknown):
            for i in unknown:
                out[i] = 1
        elif len(unknown) == 1 and not soft and left:
            out[unknown[0]] = left
        elif not unknown and len(soft) == 1:
            out[soft[0]] = left
        return out


def _kind(choice: dict[str, Any], reason: Any, first: bool) -> str:
    """The kind of one choice of a chat or completions event."""
    delta = choice.get("delta")
    if type(delta) is dict:
        if delta.get("content"):
            return "token"
        if delta.get("tool_calls") or delta.get("function_call"):
            return "tool"
        if delta.get("reasoning") or delta.get("reasoning_content"):
            return "reasoning"
        if delta.get("refusal"):
            return "token"
        if reason:
            return "finish"
        return "role" if first and delta.get("role") else "token"
    if "text" in choice:
        if choice["text"] or not reason:
            return "token" if type(choice["text"]) is str else "other"
        return "finish"
    message = choice.get("message")
    if type(message) is dict:
        # The whole answer in one event, which is what a synthetic stream sends.
        return _kind({"delta": message}, reason, first)
    return "finish" if reason else "other"


def _own_count(choice: dict[str, Any]) -> int | None:
    """How many tokens a choice says it carries, by its token ids or its logprobs."""
    ids = choice.get("token_ids")
    if type(ids) is list:
        return len(ids)
    logprobs = choice.get("logprobs")
    if type(logprobs) is not dict:
        return None
    for key in ("content", "refusal"):
        listed = logprobs.get(key)
        if type(listed) is list and listed:
            return len(listed)
    listed = logprobs.get("tokens")
    if type(listed) is not list or not listed:
        return None
    odds = logprobs.get("token_logprobs")
    if type(odds) is list and odds and odds[0] is None:
        # ``echo``: the prompt's tokens come first, and the very first has no probability.
        prompt = choice.get("prompt_token_ids")
        return max(len(listed) - len(prompt), 0) if type(prompt) is list else None
    return len(listed)


_STAGES: Final = (
    ("metrics", say.read_metrics),
    ("timings", say.read_timings),
    ("meta_info", say.read_meta_info),
)
_MESSAGES: Final[dict[str, Callable[[DeltaReader, dict[str, Any], int], Reading]]] = {
    "message_start": DeltaReader._message_start,
    "content_block_start": DeltaReader._block_start,
    "content_block_delta": DeltaReader._block_delta,
    "message_delta": DeltaReader._message_delta,
    "message_stop": DeltaReader._message_stop,
}
