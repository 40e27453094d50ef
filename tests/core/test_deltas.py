"""Kinds and token counts of every dialect: hand-made events, every captured stream, and whatever JSON there may be.

Kinds are written one letter an event: R role, t token, r reasoning, k tool, f finish, u usage, D done, E error,
c comment, o other. Counts likewise, ``?`` where nobody can know.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapproxy.core.deltas import DeltaReader
from tapproxy.core.record import EnginePart, UsagePart
from tapproxy.core.sse import SseItem, SseParser
from tests import captures
from tests.core.test_sse import CASES, as_received

LETTERS = {
    "role": "R",
    "token": "t",
    "reasoning": "r",
    "tool": "k",
    "finish": "f",
    "usage": "u",
    "done": "D",
    "error": "E",
    "comment": "c",
    "other": "o",
}


def item(data: Any, type_: str = "message") -> SseItem:
    body = data if isinstance(data, bytes) else json.dumps(data).encode()
    return SseItem(0, type_, body, False, False, "")


def read(events: list[Any]) -> tuple[DeltaReader, str, list[int | None]]:
    """Reads events; a tuple is (event type, data)."""
    reader = DeltaReader()
    items = [item(event[1], event[0]) if isinstance(event, tuple) else item(event) for event in events]
    readings = [reader.feed(one) for one in items]
    kinds = [kind for kind, _ in readings]
    tokens = reader.resolve_tokens(kinds, [count for _, count in readings])
    return reader, "".join(LETTERS[kind] for kind in kinds), tokens


def read_stream(body: bytes) -> tuple[DeltaReader, str, list[int | None]]:
    reader = DeltaReader()
    readings = [reader.feed(one) for one in SseParser().feed(body)]
    kinds = [kind for kind, _ in readings]
    tokens = reader.resolve_tokens(kinds, [count for _, count in readings])
    return reader, "".join(LETTERS[kind] for kind in kinds), tokens


def chat(
    delta: Any,
    *,
    finish: str | None = None,
    index: int = 0,
    choice: dict[str, Any] | None = None,
    **top: Any,
) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "model": "m",
        "choices": [{"index": index, "delta": delta, "finish_reason": finish, **(choice or {})}],
        **top,
    }


def usage(completion: int, prompt: int = 5) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def total(completion: int) -> dict[str, Any]:
    return {"choices": [], "usage": usage(completion)}


ROLE = chat({"role": "assistant", "content": ""})
VLLM_END = chat({"content": ""}, finish="stop", choice={"stop_reason": None})
SGLANG_END = chat({"reasoning_content": None}, finish="stop", choice={"matched_stop": 2})
DONE = b"[DONE]"


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (ROLE, "R"),
        (chat({"role": "assistant"}), "R"),
        (chat({"role": "assistant", "content": None, "reasoning_content": None}), "R"),
        (chat({"role": "assistant", "content": "a"}), "t"),
        (chat({"content": "a"}), "t"),
        (chat({"content": "a"}, finish="stop"), "t"),
        (chat({"content": ""}), "t"),
        (chat({}), "t"),
        (chat({"content": None, "reasoning_content": "a"}), "r"),
        (chat({"reasoning": "a"}), "r"),
        (chat({"content": "a", "reasoning": "a"}), "t"),
        (chat({"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}), "k"),
        (chat({"role": "assistant", "content": None, "tool_calls": [{"index": 0}]}), "k"),
        (chat({"content": "a", "tool_calls": [{"index": 0}]}), "t"),
        (chat({"tool_calls": None, "content": "a"}), "t"),
        (chat({"function_call": {"arguments": "{"}}), "k"),
        (chat({"refusal": "no"}), "t"),
        (chat({}, finish="stop"), "f"),
        (chat({"content": ""}, finish="stop"), "f"),
        (chat({"role": "assistant", "content": ""}, finish="stop"), "f"),
        (chat({}, finish="stop", usage=usage(3)), "f"),
        (chat({"content": "a"}, usage=usage(3)), "t"),
        (chat({"content": "a"}, usage=None), "t"),
        (chat(None), "o"),
        (chat(None, finish="stop"), "f"),
        ({"choices": [{"index": 0, "message": {"role": "assistant", "content": "all of it"}}]}, "t"),
        ({"choices": [{"index": 0, "text": "a", "finish_reason": None}]}, "t"),
        ({"choices": [{"index": 0, "text": "", "finish_reason": None}]}, "t"),
        ({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}, "t"),
        ({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}, "f"),
        (total(3), "u"),
        ({"usage": usage(3)}, "u"),
        ({"choices": [], "usage": None}, "o"),
        ({"choices": [], "prompt_filter_results": [{}]}, "o"),
        (b"[DONE]", "D"),
        (b" [DONE] ", "D"),
        ({"error": {"message": "m"}}, "E"),
        ({"error": "m", "error_type": "generation"}, "E"),
        ({"error": None, "choices": [{"index": 0, "delta": {"content": "a"}}]}, "t"),
        ({"object": "error", "message": "m", "code": 400}, "E"),
        (chat({"content": ""}, finish="error", error={"code": 502}), "E"),
        (("error", {"message": "m"}), "E"),
        (("error", b"no JSON"), "E"),
        (b"", "o"),
        (b"hello", "o"),
        (b"[1, 2]", "o"),
        ({}, "o"),
        ({"choices": [{"index": 0, "delta": {"content": "a"}}, {"index": 1, "delta": {}}]}, "t"),
        (
            {
                "choices": [
                    {"index": 0, "delta": {}, "finish_reason": "stop"},
                    {"index": 1, "delta": {"reasoning": "a"}},
                ]
            },
            "r",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value, default=str)[:120],
)
def test_an_event_has_the_kind_of_the_most_telling_it_holds(event: Any, kind: str) -> None:
    assert read([event])[1] == kind


def test_only_the_first_empty_delta_with_a_role_is_the_role_event() -> None:
    # Some servers repeat the role in every delta; an empty one later on is a token whose text is held back.
    assert read([ROLE, chat({"role": "assistant", "content": "a"}), ROLE])[1] == "Rtt"
    assert read([ROLE, chat({"role": "assistant"}, index=1)])[1] == "RR"


@pytest.mark.parametrize(
    ("events", "kinds", "counts"),
    [
        ([ROLE, chat({"content": "a"}), chat({"content": ""}), VLLM_END, total(3), DONE], "RttfuD", "011100"),
        ([ROLE, chat({"content": "a b"}), VLLM_END, total(3), DONE], "RtfuD", "0??00"),
        ([ROLE, chat({"content": "a"}), VLLM_END, DONE], "RtfD", "0??0"),
        ([ROLE, chat({}, finish="abort", choice={"stop_reason": None})], "Rf", "00"),
        ([ROLE, chat({"content": "a"}), SGLANG_END, total(1)], "Rtfu", "0100"),
        # The end-of-sequence token came with the finish, or the text was of two tokens: nobody says.
        ([ROLE, chat({"content": "a"}), SGLANG_END, total(2)], "Rtfu", "0?00"),
        ([ROLE, chat({"content": "a"}, usage=usage(1)), SGLANG_END, total(2)], "Rtfu", "0110"),
        ([ROLE, chat({"content": "a b c"}), chat({}, finish="length"), total(3)], "Rtfu", "0300"),
        ([ROLE, chat({"content": "a b"}), chat({}, finish="stop", usage=usage(1))], "Rtf", "010"),
        ([ROLE, chat({"content": "a b"}), chat({}, finish="length", usage=usage(2))], "Rtf", "020"),
        # An empty content with the finish and nobody's mark: one token where the total says so.
        ([chat({"content": "a"}), chat({"content": ""}, finish="stop"), total(2)], "tfu", "110"),
        ([chat({"content": "a"}), chat({"content": ""}, finish="stop"), total(1)], "tfu", "100"),
        ([chat({"content": "a"}), chat({"content": ""}, finish="stop")], "tf", "??"),
        (
            [chat({"role": "assistant", "content": ""}, usage=usage(0)), chat({"content": "a"}, usage=usage(1)),
             chat({"content": "b c d"}, usage=usage(4)), chat({"content": ""}, usage=usage(5))],
            "Rttt", "0131",
        ),
        # Running totals are each answer's own.
        (
            [chat({"content": "a"}, usage=usage(1)), chat({"content": "a b"}, index=1, usage=usage(2)),
             chat({"content": "b"}, usage=usage(2)), chat({"content": "c"}, index=1, usage=usage(3)), total(5)],
            "ttttu", "12110",
        ),
        # They are of all answers together: what was told exceeds the total, so none of it is believed.
        (
            [chat({"content": "a"}, usage=usage(1)), chat({"content": "a"}, index=1, usage=usage(2)),
             chat({"content": "b"}, usage=usage(3)), total(3)],
            "tttu", "???0",
        ),
        # A running total that starts late tells of the later events only.
        ([chat({"content": "a"}), chat({"content": "b"}, usage=usage(9)), chat({"content": "c"}, usage=usage(10))],
         "ttt", "??1"),
        # What came after the last running total still counts.
        ([chat({"content": "a"}, usage=usage(1)), chat({"content": "b"}, choice={"token_ids": [1, 2]})], "tt", "12"),
        # Cut off: the last total came before the last event.
        ([chat({"content": "a"}), chat({"content": "b"}, usage=usage(3)), chat({"content": "c"})], "ttt", "???"),
        ([chat({"content": "a"}, choice={"token_ids": [7, 8]}), chat({"content": "b"}, choice={"token_ids": [9]})],
         "tt", "21"),
        ([chat({"content": "a"}, choice={"logprobs": {"content": [{}, {}, {}]}}), chat({"content": "b"})], "tt", "3?"),
        ([chat({"refusal": "a"}, choice={"logprobs": {"content": None, "refusal": [{}]}})], "t", "1"),
        (
            [{"choices": [{"text": "p a", "logprobs": {"tokens": ["p", " a"], "token_logprobs": [None, -1.0]},
                           "prompt_token_ids": [1]}]},
             {"choices": [{"text": "b", "logprobs": {"tokens": ["b"], "token_logprobs": [-1.0]}}]}],
            "tt", "11",
        ),
        (
            [{"choices": [{"text": "p a", "logprobs": {"tokens": ["p", " a"], "token_logprobs": [None, -1.0]}}]},
             {"choices": [{"text": "b", "logprobs": {"tokens": ["b"], "token_logprobs": [-1.0]}}]}, total(2)],
            "ttu", "110",
        ),
        ([chat({"tool_calls": [{"index": 0}]}), chat({"tool_calls": [{"index": 0}]}), VLLM_END, total(3)],
         "kkfu", "1110"),
        ([chat({"reasoning": "a"}), chat({"content": "b"}), total(2)], "rtu", "110"),
        # Two answers in one event.
        ([{"choices": [{"index": 0, "delta": {"content": "a"}}, {"index": 1, "delta": {"content": "b"}}]}, total(2)],
         "tu", "?0"),
        ([{"choices": [{"index": 0, "delta": {"content": "a"}, "token_ids": [1]},
                       {"index": 1, "delta": {"content": "b"}, "token_ids": [1, 2]}]}], "t", "3"),
        # llama.cpp with timings_per_token.
        ([chat({"content": "a"}, timings={"predicted_n": 1}), chat({"content": "b"}, timings={"predicted_n": 3}),
          chat({}, finish="stop", timings={"predicted_n": 4, "prompt_ms": 2.5, "predicted_ms": 8})], "ttf", "121"),
        ([], "", ""),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_a_count_is_given_only_where_it_is_known(events: list[Any], kinds: str, counts: str) -> None:
    _, seen, tokens = read(events)
    assert seen == kinds
    assert "".join("?" if count is None else str(count) for count in tokens) == counts


def test_the_plain_way_and_the_long_way_count_alike() -> None:
    # Once the response has named itself plain text takes a short cut; everything else must still be seen.
    events = [ROLE] + [chat({"content": "a"}) for _ in range(20)]
    assert read([*events, total(20), DONE])[1:] == ("R" + "t" * 20 + "uD", [0] + [1] * 20 + [0, 0])
    told = [chat({"content": "a"}, usage=usage(n)) for n in range(1, 21)]
    assert read([ROLE, *told])[2] == [0] + [1] * 20
    assert read([*events, chat({"content": "b"}, finish="stop"), ("error", b"{}")])[1] == "R" + "t" * 21 + "E"
    other = chat({"content": "b"}, index=1)
    assert read([*events, other, other, total(22)])[2] == [0] + [1] * 22 + [0]
    assert read([*events, chat({"content": "a"}, error={"code": 1})])[0].error


def typed(name: str, **rest: Any) -> tuple[str, dict[str, Any]]:
    """An event of a dialect that names each event twice."""
    return name, {"type": name, **rest}


MESSAGES = [
    typed(
        "message_start",
        message={"id": "msg_1", "role": "assistant", "content": [], "model": "m"}
        | {"usage": {"input_tokens": 12, "output_tokens": 1}},
    ),
    typed("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    typed("ping"),
    typed("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "a"}),
    typed("content_block_delta", index=0, delta={"type": "signature_delta", "signature": "a"}),
    typed("content_block_delta", index=1, delta={"type": "text_delta", "text": "a"}),
    typed("content_block_stop", index=1),
    typed("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 2, "cache_read_input_tokens": 4}),
    typed("message_stop"),
]
TOOL_USE = [
    typed("content_block_start", content_block={"type": "tool_use", "name": "f", "input": {}}),
    typed("content_block_delta", delta={"type": "input_json_delta", "partial_json": "{}"}),
]


def test_anthropic_messages_are_read_by_their_types() -> None:
    reader, kinds, tokens = read(MESSAGES)
    assert kinds == "Roorotofo"
    assert tokens == [0, 0, 0, 1, 0, 1, 0, 0, 0]
    assert reader.usage == UsagePart(12, 2, 4)
    assert (reader.response_id, reader.model, reader.done) == ("msg_1", "m", True)
    assert reader.finish_reasons == {0: "end_turn"}
    assert read([("error", {"type": "error", "error": {"type": "overloaded_error"}})])[1] == "E"


def test_a_tool_call_that_opens_leaves_its_count_open() -> None:
    assert read([*MESSAGES[:2], *TOOL_USE, *MESSAGES[-2:]])[1:] == ("Rokkfo", [0, 0, None, None, 0, 0])


RESPONSES = [
    typed("response.created", response={"id": "resp_1", "model": "m", "usage": None, "error": None}),
    typed("response.output_item.added", item={"id": "msg_1", "role": "assistant", "content": [], "type": "message"}),
    typed("response.reasoning_text.delta", delta="a"),
    typed("response.output_text.delta", delta="a", logprobs=[]),
    typed("response.output_text.delta", delta="a b", logprobs=[{}, {}]),
    typed("response.output_text.done", text="a a b"),
    typed("response.output_item.done", item={"role": "assistant", "content": [{}]}),
    typed(
        "response.completed",
        response={
            "id": "resp_1",
            "status": "completed",
            "usage": {"input_tokens": 12, "input_tokens_details": {"cached_tokens": 3}, "output_tokens": 4},
            "metrics": {"queue_time_ms": 1, "time_to_first_token_ms": 2.5, "generation_time_ms": 10},
        },
    ),
]


def test_responses_events_are_read_by_their_types() -> None:
    reader, kinds, tokens = read(RESPONSES)
    assert kinds == "oRrttoof"
    assert tokens == [0, 0, 1, 1, 2, 0, 0, 0]
    assert reader.usage == UsagePart(12, 4, 3)
    assert reader.engine == EnginePart("response.metrics", None, 1_000_000, 2_500_000, 10_000_000)
    assert (reader.response_id, reader.model, reader.done, reader.error) == ("resp_1", "m", True, False)


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ({"type": "response.failed", "response": {"status": "failed", "error": {"code": "server_error"}}}, "E"),
        ({"type": "error", "message": "m"}, "E"),
        ({"type": "response.incomplete", "response": {"incomplete_details": {"reason": "max_output_tokens"}}}, "f"),
        ({"type": "response.function_call_arguments.delta", "delta": "{"}, "k"),
        ({"type": "response.function_call_arguments.done", "arguments": "{}"}, "o"),
        ({"type": "response.output_item.added", "item": {"type": "function_call", "name": "f"}}, "k"),
        ({"type": "response.output_item.added", "item": {"type": "reasoning", "summary": []}}, "o"),
        ({"type": "response.refusal.delta", "delta": "no"}, "t"),
        ({"type": "response.reasoning_summary_text.delta", "delta": "a"}, "r"),
        ({"type": "response.tomorrow", "delta": "a"}, "o"),
    ],
    ids=lambda value: value if isinstance(value, str) else value["type"],
)
def test_other_responses_events(event: Any, kind: str) -> None:
    assert read([event])[1] == kind


def tgi(text: str, *, special: bool = False, **more: Any) -> bytes:
    token = {"id": 1, "text": text, "logprob": -0.1, "special": special}
    return b"data:" + json.dumps({"index": 1, "token": token, "generated_text": None, "details": None} | more).encode()


def test_tgi_sends_one_token_an_event_and_no_done() -> None:
    details = {"finish_reason": "eos_token", "generated_tokens": 3, "input_length": 9}
    stream = [tgi("a"), tgi(" b"), tgi("</s>", special=True, generated_text="a b", details=details)]
    reader, kinds, tokens = read_stream(b"\n\n".join(stream) + b"\n\n")
    assert (kinds, tokens) == ("ttf", [1, 1, 1])
    assert reader.usage == UsagePart(9, 3, None)
    assert (reader.finish_reasons, reader.done) == ({0: "eos_token"}, True)


def test_a_last_token_of_tgi_with_text_is_a_token_and_the_finish_is_noted() -> None:
    details = {"finish_reason": "length", "generated_tokens": 2}
    last = tgi(" b", generated_text="a b", details=details)
    reader, kinds, tokens = read_stream(tgi("a") + b"\n\n" + last + b"\n\n")
    assert (kinds, tokens, reader.finish_reasons) == ("tt", [1, 1], {0: "length"})


def native(text: str, completion: Any, reason: Any = None, **meta: Any) -> dict[str, Any]:
    info = {
        "id": "r1",
        "finish_reason": reason,
        "prompt_tokens": 7,
        "completion_tokens": completion,
        "cached_tokens": 2,
    }
    return {"text": text, "output_ids": [1] * 9, "meta_info": info | meta}


def test_sglang_generate_is_cumulative() -> None:
    stages = {
        "queue_time": 0.001,
        "request_received_ts": 1e9,
        "api_server_dispatch_finish_ts": 1e9 + 0.25,
        "forward_entry_time": 50.0,
        "prefill_finished_time": 50.5,
        "first_token_latency": 0.75,
        "e2e_latency": 2.0,
    }
    end = native("a b c", 4, {"type": "stop", "matched": 2}, **stages)
    events = [native("a", 1), native("a", 2), native("a b c", 3), end, DONE]
    reader, kinds, tokens = read(events)
    assert (kinds, tokens) == ("tttfD", [1, 1, 1, 1, 0])
    assert reader.usage == UsagePart(7, 4, 2)
    assert (reader.response_id, reader.finish_reasons) == ("r1", {0: "stop"})
    assert reader.engine == EnginePart("response.meta_info", 250_000_000, 1_000_000, 500_000_000, 1_250_000_000)
    last = read([native("a", 1), native("a b c", 3, {"type": "length", "length": 3})])
    assert last[1:] == ("tt", [1, 2])


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "3", None, True, [], {}, 10**400, 1e300], ids=repr)
def test_a_stage_time_that_cannot_be_is_unknown(value: Any) -> None:
    metrics = {"queue_time_ms": value, "time_to_first_token_ms": 4.0, "generation_time_ms": value}
    reader = DeltaReader()
    reader.feed(item({"choices": [], "usage": usage(1), "metrics": metrics}))
    assert reader.engine == EnginePart("response.metrics", None, None, 4_000_000, None)
    reader.feed(item({"choices": [], "metrics": {"queue_time_ms": value}}))
    assert reader.engine.prefill_ns == 4_000_000
    reader.feed(item({"text": "a", "meta_info": {"queue_time": value, "first_token_latency": value, "e2e_latency": 1}}))
    assert reader.engine.source == "response.metrics"


@pytest.mark.parametrize("value", [-1, 1.5, "3", None, True, [], {}, 10**30], ids=repr)
def test_a_count_that_cannot_be_is_unknown(value: Any) -> None:
    events = [
        chat({"content": "a"}, usage={"completion_tokens": value}),
        {
            "choices": [],
            "usage": {
                "completion_tokens": value,
                "prompt_tokens": value,
                "prompt_tokens_details": {"cached_tokens": value},
            },
        },
    ]
    reader, kinds, tokens = read(events)
    assert (kinds, tokens) == ("tu", [None, 0])
    assert reader.usage == UsagePart()


def test_llama_cpp_timings_give_stages_and_counts() -> None:
    timings = {"cache_n": 3, "prompt_n": 9, "prompt_ms": 4.5, "predicted_n": 2, "predicted_ms": 20}
    reader, kinds, tokens = read(
        [chat({"content": "a"}), chat({"content": "b"}), chat({}, finish="length", timings=timings), DONE]
    )
    assert (kinds, tokens) == ("ttfD", [1, 1, 0, 0])
    assert reader.usage == UsagePart(12, 2, 3)
    assert reader.engine == EnginePart("response.timings", None, None, 4_500_000, 20_000_000)


@pytest.mark.parametrize(
    ("data", "kind", "unread"),
    [
        (b'{"choices":[{"delta":{"content":"x"},"logprobs":{"v":NaN}}]}', "t", 0),
        (b'{"choices":[{"index":0,"delta":{"content":"\\ud83d"}}]}', "t", 0),
        (b'{"choices":[{"index":0,"delta":{"content":"\xff"}}]}', "t", 0),
        (b'{"choices":[{"index":0,"delta":{"content":"a\tb"}}]}', "t", 0),
        (b'  {"choices":[{"index":0,"delta":{"content":"a"}}]}', "t", 0),
        (b'{"choices":[{"index":0,"delta":{"content":"x"}}],"n":' + b"9" * 5000 + b"}", "o", 1),
        (b"[" * 100_000, "o", 1),
        (b'{"a":' * 50_000, "o", 1),
        (b'{"a":' * 40_000 + b"1" + b"}" * 40_000, "o", 1),
        (b'{"n":NaN,"s":"' + b"x" * 300_000 + b'"}', "o", 1),
        (b"{", "o", 1),
        (b'{"error":{"message":"m"}', "o", 1),
        (b"nothing of the kind", "o", 1),
        (b"[" * 100_000 + b"]" * 100_000, "o", 1),
        (b'"text"', "o", 0),
        (b"", "o", 0),
    ],
    ids=lambda value: repr(value[:40]) if isinstance(value, bytes) else None,
)
def test_json_that_orjson_refuses_is_read_where_it_can_be_and_counted_where_not(
    data: bytes, kind: str, unread: int
) -> None:
    reader, kinds, _ = read([data])
    assert (kinds, reader.unread) == (kind, unread)


def test_an_oversize_event_is_counted_as_unread() -> None:
    reader = DeltaReader()
    assert reader.feed(SseItem(9, "message", b"", False, True, "")) == ("other", None)
    assert reader.feed(SseItem(9, "error", b"", False, True, "")) == ("error", 0)
    assert reader.unread == 2


def test_names_are_cut_and_can_be_stored() -> None:
    reader = read([{"id": "i" * 300, "model": "m\ud83d" * 200, "choices": []}])[0]
    assert reader.response_id == "i" * 256
    assert reader.model is not None
    assert len(reader.model.encode("utf-8")) == 256
    assert read([{"id": 7, "model": ["m"], "choices": []}])[0].response_id is None


def test_the_first_name_stays() -> None:
    reader = read([{"id": "a", "model": "m", "choices": []}, {"id": "b", "model": "n", "choices": []}])[0]
    assert (reader.response_id, reader.model) == ("a", "m")


def test_a_response_is_named_after_many_keep_alives_too() -> None:
    reader = read_stream(b": keep-alive\n\n" * 50 + b"data: " + json.dumps(ROLE).encode() + b"\n\n")[0]
    assert (reader.response_id, reader.model) == ("chatcmpl-1", "m")


def test_finish_reasons_are_kept_per_answer_and_their_number_is_bounded() -> None:
    events = [chat({"content": "a"}, finish="stop", index=n) for n in range(1500)]
    assert len(read(events)[0].finish_reasons) == 1024
    assert read(events[:2])[0].finish_reasons == {0: "stop", 1: "stop"}


# -- answers that are not streamed

BODIES: list[tuple[dict[str, Any], UsagePart, dict[int, str], bool]] = [
    (
        {"id": "c", "choices": [{"index": 1, "finish_reason": "length", "message": {}}], "usage": usage(8)},
        UsagePart(5, 8),
        {1: "length"},
        False,
    ),
    ({"error": {"message": "m"}}, UsagePart(), {}, True),
    ({"object": "error", "message": "m"}, UsagePart(), {}, True),
    ({"type": "error", "error": {}}, UsagePart(), {}, True),
    (
        {"type": "message", "stop_reason": "end_turn", "usage": {"input_tokens": 3, "output_tokens": 4}},
        UsagePart(3, 4),
        {0: "end_turn"},
        False,
    ),
    (
        {"generated_text": "a", "details": {"finish_reason": "length", "generated_tokens": 2, "input_length": 6}},
        UsagePart(6, 2),
        {0: "length"},
        False,
    ),
    (native("a b", 2, {"type": "stop"}), UsagePart(7, 2, 2), {0: "stop"}, False),
    ({"choices": None, "usage": "none", "metrics": 3}, UsagePart(), {}, False),
]


@pytest.mark.parametrize(("body", "counts", "reasons", "error"), BODIES, ids=lambda value: str(value)[:40])
def test_a_body_that_is_not_streamed_gives_the_same_facts(
    body: dict[str, Any], counts: UsagePart, reasons: dict[int, str], error: bool
) -> None:
    reader = DeltaReader()
    reader.read_body(json.dumps(body).encode())
    assert (reader.usage, reader.finish_reasons, reader.error) == (counts, reasons, error)
    assert reader.unread == 0


def test_a_body_that_is_no_json_is_counted() -> None:
    reader = DeltaReader()
    reader.read_body(b"<html>")
    assert reader.unread == 1
    reader.read_body(json.dumps([{"error": {}}, native("a", 3)]).encode())
    assert reader.usage.completion_tokens == 3


# -- every captured stream. The expectations were worked out from the files, with a regex and by eye.

VLLM_PLAIN = ("Rt3D", "0 ? ? ? 0")
SGLANG_PLAIN = ("Rt3fD", "0 ? ? ? 0 0")
ONES8, MANY8 = " 1" * 8, " ?" * 8
# completion_tokens of one event after the other, as the file has them.
SPEC_NGRAM = (
    "1 2 3 4 5 6 7 8 10 12 13 15 16 17 18 19 20 22 24 27 28 33 34 35 36 37 38 39 41 42 43 45 50 51 52 54 55 56 58 59 60"
)
SPEC_STEPS = " ".join(
    str(int(b) - int(a)) for a, b in zip(["0", *SPEC_NGRAM.split()], SPEC_NGRAM.split(), strict=False)
)
STREAMS: dict[str, tuple[str, str]] = {
    "llama-cpp-python-0.3.36/chat_stream_usage": ("Rt4fD", "0 ? ? ? ? 0 0"),
    "llama-cpp-python-0.3.36/completions_stream": ("t6fD", "? ? ? ? ? ? ? 0"),
    "llama-cpp-python-0.3.36/err_too_long": ("", ""),
    "ray-serve-chat_stream": ("t4D", "? ? ? ? 0"),
    "sglang-0.5.23/body_request_id": SGLANG_PLAIN,
    "sglang-0.5.23/chat_max_tokens_1_stream": ("RtfuD", "0 1 0 0 0"),
    "sglang-0.5.23/chat_stream": ("Rt8fD", "0" + MANY8 + " 0 0"),
    "sglang-0.5.23/chat_stream_logprobs": ("Rt4fD", "0 1 1 1 1 0 0"),
    "sglang-0.5.23/chat_stream_n2": ("RtRt11ffuD", "0 1 0" + " 1" * 11 + " 0 0 0 0"),
    "sglang-0.5.23/chat_stream_stop_eos": ("Rt3fuD", "0 ? ? ? 0 0 0"),
    "sglang-0.5.23/chat_stream_stop_string": ("RfD", "0 0 0"),
    "sglang-0.5.23/chat_stream_usage": ("Rt8fuD", "0" + ONES8 + " 0 0 0"),
    "sglang-0.5.23/chat_stream_usage_continuous": ("Rt8fuD", "0" + ONES8 + " 0 0 0"),
    "sglang-0.5.23/completions_stream": ("t8D", MANY8 + " 0"),
    "sglang-0.5.23/completions_stream_echo": ("t4D", "? ? ? ? 0"),
    "sglang-0.5.23/completions_stream_logprobs": ("t4D", "1 1 1 1 0"),
    "sglang-0.5.23/completions_stream_multiprompt": ("t10uD", "1 " * 10 + "0 0"),
    "sglang-0.5.23/completions_stream_n2": ("t12D", "? " * 12 + "0"),
    "sglang-0.5.23/completions_stream_usage": ("t8uD", ONES8 + " 0 0"),
    "sglang-0.5.23/conn_close_stream": SGLANG_PLAIN,
    "sglang-0.5.23/err_bad_model": ("Rt2461", "0" + " ?" * 2461),
    "sglang-0.5.23/gzip_accept_stream": SGLANG_PLAIN,
    "sglang-0.5.23/http10_chat_stream": SGLANG_PLAIN,
    "sglang-0.5.23/messages_stream": ("Rot5ofo", "0 0 1 1 1 1 1 0 0 0"),
    "sglang-0.5.23/orca_json_stream": SGLANG_PLAIN,
    "sglang-0.5.23/responses_stream": ("ooRot2ooof", "0 0 0 0 ? ? 0 0 0 0"),
    "sglang-0.5.23/xrid_chat_stream": SGLANG_PLAIN,
    "sglang-0.5.23/xrid_completions_stream": ("t3D", "? ? ? 0"),
    "vllm-0.32-failures/engine_killed_midstream": ("Rt782ED", "0" + " ?" * 782 + " 0 0"),
    "vllm-0.32-failures/sigterm_midstream": ("Rt369", "0" + " ?" * 369),
    "vllm-0.32-otlp/chat_traceparent_interval4": ("Rt6uD", "0 ? ? ? ? ? ? 0 0"),
    "vllm-0.32-otlp/keepalive_stall_stream": ("ccRt2D", "0 0 0 1 3 0"),
    "vllm-0.32-request-metrics/body_request_id": ("Rt2fD", "0 ? ? ? 0"),
    "vllm-0.32-request-metrics/responses_stream": ("ooRot2ooof", "0 0 0 0 ? ? 0 0 0 0"),
    "vllm-0.32-spec-ngram/chat_stream": ("Rt41uD", f"0 {SPEC_STEPS} 0 0"),
    "vllm-0.32/body_request_id": VLLM_PLAIN,
    "vllm-0.32/chat_stream_stop_string": ("Rt7uD", "0 1 1 1 1 1 1 1 0 0"),
    "vllm-0.32/responses_stream": ("ooRot3ooof", "0 0 0 0 ? ? ? 0 0 0 0"),
}
for run in ("vllm-0.32", "vllm-0.32-request-metrics"):
    STREAMS |= {
        f"{run}/chat_max_tokens_1_stream": ("RtuD", "0 1 0 0"),
        f"{run}/chat_stream": ("Rt8D", "0" + MANY8 + " 0"),
        f"{run}/chat_stream_logprobs": ("Rt4D", "0 1 1 1 1 0"),
        f"{run}/chat_stream_n2": ("R2t12uD", "0 0" + " 1" * 12 + " 0 0"),
        f"{run}/chat_stream_stop_eos": ("Rt3fuD", "0 1 1 1 1 0 0"),
        f"{run}/chat_stream_token_ids": ("Rt4D", "0 1 1 1 1 0"),
        f"{run}/chat_stream_usage": ("Rt8uD", "0" + ONES8 + " 0 0"),
        f"{run}/chat_stream_usage_continuous": ("Rt8uD", "0" + ONES8 + " 0 0"),
        f"{run}/completions_stream": ("t8D", MANY8 + " 0"),
        f"{run}/completions_stream_echo": ("t4D", "? ? ? ? 0"),
        f"{run}/completions_stream_logprobs": ("t4D", "1 1 1 1 0"),
        f"{run}/completions_stream_multiprompt": ("t10uD", "1 " * 10 + "0 0"),
        f"{run}/completions_stream_n2": ("t12D", "? " * 12 + "0"),
        f"{run}/completions_stream_usage": ("t8uD", ONES8 + " 0 0"),
        f"{run}/conn_close_stream": VLLM_PLAIN,
        f"{run}/gzip_accept_stream": VLLM_PLAIN,
        f"{run}/http10_chat_stream": VLLM_PLAIN,
        f"{run}/messages_stream": ("Rot5ofo", "0 0 1 1 1 1 1 0 0 0"),
        f"{run}/orca_json_stream": VLLM_PLAIN,
        f"{run}/xrid_chat_stream": VLLM_PLAIN,
        f"{run}/xrid_completions_stream": ("t3D", "? ? ? 0"),
    }
RESPONSES_BY_NAME = {name: captures.load(name) for name in captures.names()}
STREAMED = [name for name, r in RESPONSES_BY_NAME.items() if "event-stream" in r.headers.get("content-type", "")]


def spelled_out(kinds: str) -> str:
    """``Rt3D`` → ``RtttD``."""
    return re.sub(r"([A-Za-z])(\d+)", lambda m: m[1] * int(m[2]), kinds)


def test_every_captured_stream_has_its_expectation() -> None:
    assert sorted(STREAMS) == STREAMED


@pytest.mark.parametrize("name", sorted(STREAMS))
def test_a_captured_stream_reads_as_its_engine_meant_it(name: str) -> None:
    kinds, counts = STREAMS[name]
    body = RESPONSES_BY_NAME[name].body
    reader, seen, tokens = read_stream(body)
    assert seen == spelled_out(kinds)
    assert tokens == [None if count == "?" else int(count) for count in counts.split()]
    assert reader.unread == 0
    assert reader.error == ("E" in kinds)
    said = re.findall(rb'"(?:completion|output)_tokens":(\d+)', body)
    assert reader.usage.completion_tokens == (int(said[-1]) if said else None)
    if said and None not in tokens:
        assert sum(count for count in tokens if count is not None) == int(said[-1])
    ids = re.search(rb'"id": ?"([^"]+)"', body)
    assert reader.response_id == (ids[1].decode() if ids else None)
    assert reader.model == ("nope" if "bad_model" in name else "tiny" if ids else None)


@pytest.mark.parametrize("name", sorted(set(RESPONSES_BY_NAME) - set(STREAMED)))
def test_a_captured_body_reads_as_its_engine_meant_it(name: str) -> None:
    response = RESPONSES_BY_NAME[name]
    reader = DeltaReader()
    if response.body:
        reader.read_body(response.body)
    assert reader.unread == 0
    said = re.findall(rb'"completion_tokens":(\d+)', response.body)
    assert reader.usage.completion_tokens == (int(said[-1]) if said else None)
    # SGLang's and vLLM's refusals; FastAPI's {"detail": …} for unknown routes is no engine's.
    refused = response.status >= 400 and bool(response.body) and b'"detail"' not in response.body
    assert reader.error == refused


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("chat_stream_usage", (25_959, 4_098_099, 23_987_198)),
        ("completions_stream_usage", (26_129, 4_112_381, 24_552_841)),
        ("chat_nonstream", (50_114, 5_142_637, 15_574_767)),
        ("completions_nonstream", (25_188, 3_718_023, 16_870_008)),
        ("responses_stream", (26_830, 5_634_169, 22_830_334)),
    ],
)
def test_the_engines_own_times_of_a_request_are_read(name: str, engine: tuple[int, int, int]) -> None:
    response = RESPONSES_BY_NAME[f"vllm-0.32-request-metrics/{name}"]
    if "event-stream" in response.headers["content-type"]:
        reader = read_stream(response.body)[0]
    else:
        reader = DeltaReader()
        reader.read_body(response.body)
    queue_ns, prefill_ns, decode_ns = engine
    assert reader.engine == EnginePart("response.metrics", None, queue_ns, prefill_ns, decode_ns)
    assert reader.usage.cached_tokens == 0


# -- the OpenAI reading of the SSE cases

OPENAI_CASES = [case for case in CASES if "openai" in case]


@pytest.mark.parametrize("case", OPENAI_CASES, ids=lambda case: case["id"])
def test_a_case_has_the_openai_reading_expected(case: dict[str, Any]) -> None:
    reader, kinds, _ = read_stream(b"".join(as_received(case)))
    want = case["openai"]
    # Counted among the events alone, comments aside.
    events = kinds.replace("c", "")
    content = [i for i, kind in enumerate(events) if kind in "trk"]
    assert len(content) == want["content_events"]
    assert (content[0] if content else None) == want["first_content_event"]
    assert (reader.done, reader.error, reader.unread) == (want["done"], want["error"], want["n_json_bad"])
    reasons = {int(n): choice["finish_reason"] for n, choice in want["choices"].items()}
    assert reader.finish_reasons == {n: reason for n, reason in reasons.items() if reason is not None}
    said = want["usage"] or {}
    assert reader.usage == UsagePart(said.get("prompt_tokens"), said.get("completion_tokens"))


def test_the_cases_with_an_openai_reading_are_many() -> None:
    assert len(OPENAI_CASES) > 50


# -- whatever JSON there may be

KEYS = [
    "id", "object", "model", "type", "choices", "index", "delta", "role", "content", "reasoning", "tool_calls",
    "refusal", "finish_reason", "stop_reason", "logprobs", "tokens", "token_logprobs", "token_ids", "usage",
    "completion_tokens", "prompt_tokens", "prompt_tokens_details", "cached_tokens", "metrics", "queue_time_ms",
    "timings", "predicted_n", "meta_info", "text", "token", "generated_text", "details", "generated_tokens", "error",
    "response", "message", "item", "content_block", "prompt_token_ids", "special", "first_token_latency", "e2e_latency",
]  # fmt: skip
WORDS = [
    "", "a", "error", "stop", "length", "abort", "tool_use", "function_call", "text_delta", "message_start",
    "content_block_start", "content_block_delta", "message_delta", "message_stop", "response.completed",
    "response.failed", "response.output_text.delta", "response.output_item.added", "assistant", "\ud83d", "x" * 300,
]  # fmt: skip
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.integers()
    | st.floats()
    | st.sampled_from(WORDS)
    | st.text(max_size=5)
)
ANY_JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=6),
    max_leaves=20,
)
CHOICE = st.fixed_dictionaries(
    {},
    optional={
        "index": SCALARS,
        "delta": ANY_JSON,
        "text": ANY_JSON,
        "finish_reason": ANY_JSON,
        "logprobs": ANY_JSON,
        "token_ids": ANY_JSON,
        "stop_reason": SCALARS,
    },
)
EVENT = (
    st.fixed_dictionaries(
        {"choices": st.lists(CHOICE | ANY_JSON, max_size=2)},
        optional={"usage": ANY_JSON, "timings": ANY_JSON, "metrics": ANY_JSON, "error": ANY_JSON},
    )
    | st.dictionaries(st.sampled_from(KEYS), ANY_JSON, max_size=6)
    | ANY_JSON
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(EVENT, st.sampled_from(["message", "message_start", "error"])), max_size=22))
def test_no_json_value_makes_it_raise(events: list[tuple[Any, str]]) -> None:
    reader = DeltaReader()
    readings = [reader.feed(item(value, name)) for value, name in events]
    kinds = [kind for kind, _ in readings]
    tokens = reader.resolve_tokens(kinds, [count for _, count in readings])
    assert len(tokens) == len(events)
    assert all(kind in LETTERS for kind in kinds)
    assert all(count is None or count >= 0 for count in tokens)
    kept = [reader.response_id, reader.model, *reader.finish_reasons.values()]
    assert all(name is None or 0 < len(name.encode()) <= 4 * 256 for name in kept)


@settings(max_examples=150, deadline=None)
@given(ANY_JSON)
def test_no_body_makes_it_raise(body: Any) -> None:
    reader = DeltaReader()
    reader.read_body(json.dumps(body).encode())
    assert reader.usage.completion_tokens is None or reader.usage.completion_tokens >= 0
