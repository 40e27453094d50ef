"""The JSON of vLLM 0.32's OpenAI routes, byte for byte in its order of fields.

Stream events are made "open": without their last brace, so that the connection can add a stamp as the last field
in the instant before it writes.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass

import orjson

from tapproxy.simulate.ask import Ask
from tapproxy.simulate.engine import Sequence

FINGERPRINT = "vllm-0.32.0-simulated"
_FINGERPRINT_FIELD = b',"system_fingerprint":"' + FINGERPRINT.encode() + b'"'
_LOGPROB = -1.5


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event says: the tokens' texts on one channel, and the end of the choice if it is there."""

    channel: str  # content, reasoning, tool_head, tool
    texts: list[str]
    generated: int  # tokens of the choice up to here
    finish_reason: str | None = None


class StreamShape:
    """The events of one streamed answer."""

    def __init__(self, ask: Ask, identity: str) -> None:
        self.ask = ask
        kind = "chat.completion.chunk" if ask.chat else "text_completion"
        head = {"id": identity, "object": kind, "created": int(time.time()), "model": ask.model}
        self._head = orjson.dumps(head)[:-1] + b',"choices":['
        self._per_event_usage = ask.continuous_usage
        self._tool_id = f"chatcmpl-tool-{uuid.uuid4().hex}"

    def role(self, index: int, prompt_tokens: int) -> bytes:
        return (
            b'%b{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]%b'
            b',"prompt_token_ids":null,"prompt_text":null' % (self._head, index, self._usage_so_far(prompt_tokens, 0))
        )

    def piece(self, index: int, piece: Piece, prompt_tokens: int) -> bytes:
        ask = self.ask
        reason = b"null" if piece.finish_reason is None else b'"%b"' % piece.finish_reason.encode()
        logprobs = self._logprobs(piece)
        if ask.chat:
            stop = b"" if piece.finish_reason is None else b',"stop_reason":null'
            choice = b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b,"token_ids":null}]' % (
                index,
                self._delta(piece),
                logprobs,
                reason,
                stop,
            )
        else:
            choice = (
                b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":null'
                b',"prompt_token_ids":null,"token_ids":null}]'
                % (index, orjson.dumps("".join(piece.texts)), logprobs, reason)
            )
        last = b"" if piece.finish_reason is None or ask.include_usage else _FINGERPRINT_FIELD
        return self._head + choice + self._usage_so_far(prompt_tokens, piece.generated) + last

    def usage(self, sequences: list[Sequence], with_metrics: bool) -> bytes:
        usage = _usage(self.ask, sequences)
        if with_metrics:
            usage["prompt_tokens_details"] = {"cached_tokens": 0, "created_cache_tokens": 0}
        tail = b"]" + b',"usage":' + orjson.dumps(usage) + _FINGERPRINT_FIELD
        if with_metrics and len(sequences) == 1:
            present = {name: value for name, value in request_metrics(sequences[0]).items() if value is not None}
            tail += b',"metrics":' + orjson.dumps(present)
        return self._head + tail

    def _delta(self, piece: Piece) -> bytes:
        text = "".join(piece.texts)
        if piece.channel == "tool_head":
            name = orjson.dumps(self.ask.tool)
            return b'{"tool_calls":[{"id":"%b","type":"function","index":0,"function":{"name":%b,"arguments":""}}]}' % (
                self._tool_id.encode(),
                name,
            )
        if piece.channel == "tool":
            return b'{"tool_calls":[{"index":0,"function":{"arguments":%b}}]}' % orjson.dumps(text)
        return b'{"%b":%b}' % (piece.channel.encode(), orjson.dumps(text))

    def _usage_so_far(self, prompt_tokens: int, generated: int) -> bytes:
        if not self._per_event_usage:
            return b""
        return (
            b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d'
            b',"completion_tokens_details":null}' % (prompt_tokens, prompt_tokens + generated, generated)
        )

    def _logprobs(self, piece: Piece) -> bytes:
        return orjson.dumps(logprobs(self.ask.chat, piece.texts)) if self.ask.logprobs else b"null"


def logprobs(chat: bool, texts: list[str]) -> dict[str, object]:
    if chat:
        return {
            "content": [{"token": t, "logprob": _LOGPROB, "bytes": list(t.encode()), "top_logprobs": []} for t in texts]
        }
    offsets, at = [], 0
    for text in texts:
        offsets.append(at)
        at += len(text)
    return {
        "text_offset": offsets,
        "token_logprobs": [_LOGPROB] * len(texts),
        "tokens": texts,
        "top_logprobs": [{t: _LOGPROB} for t in texts],
    }


def error_event(message: str) -> bytes:
    """In the stream, spelled with spaces as vLLM does."""
    return b'{"error": {"message": %b, "type": "InternalServerError", "param": null, "code": 500}' % orjson.dumps(
        message
    )


def whole_body(
    ask: Ask, identity: str, sequences: list[Sequence], pieces: list[list[Piece]], with_metrics: bool
) -> bytes:
    """The answer that is not streamed."""
    usage = _usage(ask, sequences)
    usage["prompt_tokens_details"] = (
        {"cached_tokens": 0, "created_cache_tokens": 0, "multimodal_tokens": None} if with_metrics else None
    )
    usage["completion_tokens_details"] = None
    metrics: dict[str, object] | None = None
    if with_metrics and len(sequences) == 1:
        metrics = {**request_metrics(sequences[0]), "speculative_decoding": None}
    document: dict[str, object] = {
        "id": identity,
        "object": "chat.completion" if ask.chat else "text_completion",
        "created": int(time.time()),
        "model": ask.model,
        "choices": [_choice(ask, index, said) for index, said in enumerate(pieces)],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage,
    }
    if ask.chat:
        document |= {"prompt_logprobs": None, "prompt_token_ids": None, "prompt_text": None}
    return orjson.dumps(document | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": metrics})


def _choice(ask: Ask, index: int, pieces: list[Piece]) -> dict[str, object]:
    def text(channel: str) -> str:
        return "".join(t for piece in pieces if piece.channel == channel for t in piece.texts)

    said = logprobs(ask.chat, [t for piece in pieces for t in piece.texts]) if ask.logprobs else None
    ending = {"logprobs": said, "finish_reason": ask.finish_reason, "stop_reason": None, "token_ids": None}
    if not ask.chat:
        plain = {"prompt_logprobs": None, "prompt_token_ids": None, "routed_experts": None}
        return {"index": index, "text": text("content"), **ending, **plain}
    message: dict[str, object] = {
        "role": "assistant",
        "content": None if ask.tool else text("content"),
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": text("reasoning") or None,
    }
    if ask.tool:
        function = {"name": ask.tool, "arguments": text("tool")}
        identity = f"chatcmpl-tool-{uuid.uuid4().hex}"
        message["tool_calls"] = [{"id": identity, "type": "function", "function": function}]
    return {"index": index, "message": message, **ending, "routed_experts": None}


def _usage(ask: Ask, sequences: list[Sequence]) -> dict[str, object]:
    """A prompt is counted once, however many choices were made of it."""
    prompt, completion = sum(ask.prompts), sum(s.generated for s in sequences)
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def request_metrics(sequence: Sequence) -> dict[str, float | None]:
    """vLLM's per-request ``metrics``. Its time_to_first_token_ms counts from scheduled: prefill only."""
    first_ns, last_ns, scheduled_ns = sequence.first_ns, sequence.last_ns, sequence.scheduled_ns
    if first_ns is None or last_ns is None or scheduled_ns is None:
        raise RuntimeError("metrics of a sequence that never had a token")
    generation_ns, tokens = last_ns - first_ns, sequence.generated
    inference_ns = last_ns - scheduled_ns
    return {
        "time_to_first_token_ms": (first_ns - scheduled_ns) / 1e6,
        "generation_time_ms": generation_ns / 1e6,
        "queue_time_ms": (scheduled_ns - sequence.queued_ns) / 1e6,
        "mean_itl_ms": generation_ns / (tokens - 1) / 1e6 if tokens > 1 else None,
        "tokens_per_second": tokens * 1e9 / inference_ns if inference_ns else None,
    }
