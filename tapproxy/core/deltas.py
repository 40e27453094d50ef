"""What each event of one response is, for every dialect the engines speak, and what the response tells of itself.

Rules here: an event has one kind (definitions.md, "Event kinds"), the most telling of what it holds; no JSON value
makes it raise; nothing of the text is kept. Token counts have their own module, counts.py.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson

from tapproxy.core import usage as say
from tapproxy.core.counts import MAX_ANSWERS, TokenCounts, own_count
from tapproxy.core.record import EnginePart, UsagePart
from tapproxy.core.sse import SseItem

# The most telling first: text seen by a user, then what else was generated.
KINDS: Final = ("token", "tool", "reasoning", "error", "finish", "usage", "role", "done", "comment", "other")

Reading = tuple[str, int | None]

_TOKEN: Final[Reading] = ("token", None)
_DONE: Final[Reading] = ("done", 0)
_ERROR: Final[Reading] = ("error", 0)
_OTHER: Final[Reading] = ("other", 0)
_UNREAD: Final[Reading] = ("other", None)
_COMMENT: Final[Reading] = ("comment", 0)
# A response that names itself at all does so at once.
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


class DeltaReader:
    """Reads one response. Feed it every item of the stream in order, or the body of an answer not streamed."""

    __slots__ = (
        "_answers",
        "_counts",
        "_events",
        "_final",
        "_unnamed",
        "_usage",
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
        self._unnamed = _NAMED_WITHIN_EVENTS  # how many more events are searched for names
        self._counts = TokenCounts()
        self._answers = self._counts.answers
        self._usage = UsagePart()
        self._final = False  # its completion tokens are the engine's last word, not a running total

    @property
    def usage(self) -> UsagePart:
        """The engine's counts so far; of running totals the sum over the answers."""
        part = self._usage
        completion = part.completion_tokens if self._final else self._counts.said()
        return UsagePart(part.prompt_tokens, completion, part.cached_tokens)

    def feed(self, item: SseItem) -> Reading:
        """The kind of one event and its tokens; None where only the end can tell, see ``resolve_tokens``."""
        index = self._events
        self._events = index + 1
        _, event_type, data, comment, _, _ = item
        if comment:
            return _COMMENT
        if data == b"[DONE]":
            self.done = True
            return _DONE
        try:
            value = orjson.loads(data)
        except ValueError:
            return self._odd(item)
        if type(value) is not dict:
            return self._odd(item)
        # The event that most of a stream consists of: text of one answer, and nothing else told. ``_object`` would
        # find the same by way of six calls; there is one of these per token.
        if not self._unnamed:
            try:
                (choice,) = value["choices"]
                if (
                    choice["delta"]["content"]
                    and choice["finish_reason"] is None
                    and choice.get("logprobs") is None
                    and choice.get("token_ids") is None
                    and value.get("usage") is None
                    and "timings" not in value
                    and "error" not in value
                    and event_type == "message"
                ):
                    self._answers[choice["index"]].unknown += 1
                    return _TOKEN
            except (KeyError, TypeError, ValueError):
                pass
        return self._object(value, index, event_type)

    def _odd(self, item: SseItem) -> Reading:
        """Whatever is not plainly a JSON object."""
        data = item.data.strip()
        if data == b"[DONE]":
            self.done = True
            return _DONE
        value = None
        if item.oversize:
            # What it held was not looked at: it may well have been text.
            self.unread += 1
            if item.type != "error":
                self._counts.vague = True
                return _UNREAD
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
        if self._unnamed:
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
            return self._native(value, value["meta_info"])
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
        answer = self._answers.get(number)
        first = answer is None
        if answer is None:
            answer = self._counts.new_answer(number)
        reason = choice.get("finish_reason")
        if reason:
            self._finished(number, reason)
            self._stages(value)
        kind = _kind(choice, reason, first)
        usage = value.get("usage")
        if kind == "role" or kind == "other":
            self._running(usage)
            return kind, 0
        tokens = own_count(choice)
        said = self._running(usage)
        timings = value.get("timings")
        if type(timings) is dict:
            self._stages(value)
            self._prompt(say.timed_prompt(timings))
            said = say.count(timings.get("predicted_n")) if said is None else said
        if said is not None:
            gained = answer.told(said)
            tokens = tokens if gained is None else gained
        if tokens is None and kind == "finish":
            tokens = self._counts.of_finish(choice, reason, index)
        if said is None:
            answer.counted(tokens)
        return kind, tokens

    def _several(self, value: dict[str, Any], choices: list[Any], index: int) -> Reading:
        """Several answers in one event. Its usage, if any, is of them together, so it is no one's running total."""
        self._counts.vague = True
        readings = [self._choice({}, choice, index) for choice in choices[:MAX_ANSWERS]]
        self._total(value.get("usage"))
        self._stages(value)
        tokens = [reading[1] for reading in readings]
        kind = min((reading[0] for reading in readings), key=KINDS.index)
        return kind, None if None in tokens else sum(count for count in tokens if count is not None)

    def _finished(self, number: int, reason: Any) -> None:
        reason = say.text(reason)
        if reason is not None and len(self.finish_reasons) < MAX_ANSWERS:
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
                details = response.get("incomplete_details")
                reason = details.get("reason") if type(details) is dict else response.get("status")
                self._finished(0, reason)
            if kind == "response.failed":
                self.error = True
                return _ERROR
            return "finish", self._counts.of_separate_finish(self.finish_reasons.get(0), index)
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
            return "finish", self._counts.of_separate_finish(reason, index)
        return ("usage", 0) if told else _OTHER

    def _message_stop(self, _: dict[str, Any], __: int) -> Reading:
        self.done = True
        return _OTHER

    def _opening(self) -> Reading:
        """A tool call's name: generated, but nobody says of how many tokens, and they may be with the arguments."""
        self._counts.vague = True
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

    def _native(self, value: dict[str, Any], meta: dict[str, Any]) -> Reading:
        """SGLang /generate: text and counts so far, not what is new."""
        number = value.get("index")
        if type(number) is not int:
            number = 0
        answer = self._answers.get(number) or self._counts.new_answer(number)
        seen, text = answer.length, value.get("text")
        if type(text) is str:
            answer.length = (len(text), zlib.crc32(text.encode("utf-8", "replace")))
        reason = meta.get("finish_reason")
        if reason:
            self._finished(number, reason.get("type") if type(reason) is dict else reason)
        self._stages(value)
        said = self._running(meta)
        kind = "finish" if reason and answer.length == seen else "token"
        if said is None:
            answer.counted(None)
            return kind, None
        return kind, answer.told(said)

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
            self._usage.completion_tokens = read[1]
            self._final = True
        return True

    def _prompt(self, read: tuple[int | None, int | None, int | None]) -> None:
        part = self._usage
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
        self._unnamed -= 1
        for holder in (value, value.get("response"), value.get("message"), value.get("meta_info")):
            if type(holder) is dict:
                if self.response_id is None:
                    self.response_id = say.text(holder.get("id"))
                if self.model is None:
                    self.model = say.text(holder.get("model"))
        if self.response_id is not None and self.model is not None:
            self._unnamed = 0

    # -- the end

    def read_body(self, body: bytes) -> None:
        """An answer that was not streamed: its names, numbers and whether it is an error."""
        try:
            value = say.parse_json(body)
        except ValueError:
            self.unread += 1
            return
        answers = value[:MAX_ANSWERS] if type(value) is list else [value]
        for answer in answers:
            if type(answer) is dict:
                self._answer(answer)

    def _answer(self, value: dict[str, Any]) -> None:
        self._name(value)
        self.error = self.error or bool(value.get("error")) or "error" in (value.get("object"), value.get("type"))
        self._total(value.get("usage"))
        self._stages(value)
        choices = value.get("choices")
        for choice in choices[:MAX_ANSWERS] if type(choices) is list else []:
            if type(choice) is dict:
                number = choice.get("index")
                self._finished(number if type(number) is int else 0, choice.get("finish_reason"))
        for key, name in (("stop_reason", "stop_reason"), ("details", "finish_reason"), ("meta_info", "finish_reason")):
            holder = value if key == name else value.get(key)
            if type(holder) is dict:
                reason = holder.get(name)
                self._finished(0, reason.get("type") if type(reason) is dict else reason)
        details, meta = value.get("details"), value.get("meta_info")
        if value.get("done") is True and "eval_duration" in value:
            self._ollama(value)
        if type(details) is dict:
            self._prompt((say.count(details.get("input_length")), None, None))
            self._total({"completion_tokens": details.get("generated_tokens")})
        if type(meta) is dict:
            self._total(meta)

    def _ollama(self, value: dict[str, Any]) -> None:
        """The last object of an Ollama answer, which holds its numbers."""
        part = say.read_durations(value)
        if say.tells_something(part):
            self.engine = part
        self.done = True
        self._finished(0, value.get("done_reason"))
        self._prompt(
            (say.count(value.get("prompt_eval_count")), None, say.count(value.get("prompt_eval_cached_count")))
        )
        self._total({"completion_tokens": value.get("eval_count")})

    def resolve_tokens(self, kinds: Sequence[str], tokens: Sequence[int | None]) -> list[int | None]:
        """The counts of all events at the end of the stream, in the order fed; see ``TokenCounts.resolve``."""
        return self._counts.resolve(kinds, tokens, self._usage.completion_tokens if self._final else None)


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
