"""The official client works against the simulator, and its events have the fields of a real vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from sim_server import ask, chat, events, running

DATA = Path(__file__).parent.parent / "data" / "simulate"
MESSAGES: Any = [{"role": "user", "content": "What is the weather?"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
]


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with running(per_request_metrics=True, request_id_headers=True) as number:
        yield number


@pytest.fixture(scope="module")
def client(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_a_chat_is_streamed(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="sim", messages=MESSAGES, stream=True, max_tokens=5, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert sum(1 for chunk in chunks if chunk.choices and chunk.choices[0].delta.content) == 5
    assert chunks[-2].choices[0].finish_reason == "length"
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 5)


def test_completions_are_streamed(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="sim", prompt="Once", stream=True, max_tokens=4)
    chunks = list(stream)
    assert len(chunks) == 4
    assert all(chunk.choices[0].text for chunk in chunks)


@pytest.mark.parametrize("tokens", [4, 5, 40])
def test_a_tool_call_comes_in_pieces_that_are_json(client: openai.OpenAI, tokens: int) -> None:
    stream = client.chat.completions.create(model="sim", messages=MESSAGES, tools=TOOLS, stream=True, max_tokens=tokens)
    calls, reasons = [], []
    for chunk in stream:
        calls += chunk.choices[0].delta.tool_calls or []
        reasons.append(chunk.choices[0].finish_reason)
    head = calls[0].function
    assert head is not None
    assert (head.name, head.arguments, calls[0].type) == ("get_weather", "", "function")
    assert calls[0].id
    rest = [call.function for call in calls[1:]]
    assert "query" in json.loads("".join(one.arguments or "" for one in rest if one is not None))
    assert len(calls) == tokens - 1  # the last token is the end of sequence
    assert reasons[-1] == "tool_calls"
    assert set(reasons[:-1]) == {None}


def test_a_tool_call_that_is_not_streamed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="sim", messages=MESSAGES, tools=TOOLS, max_tokens=20)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert "query" in json.loads(call.function.arguments)
    assert answer.choices[0].finish_reason == "tool_calls"


def test_tools_that_are_not_wanted_are_not_called(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="sim", messages=MESSAGES, tools=TOOLS, tool_choice="none", max_tokens=3
    )
    assert answer.choices[0].message.content


def test_answers_that_are_not_streamed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=5, n=2, logprobs=True)
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10
    text = client.completions.create(model="sim", prompt="Once", max_tokens=5)
    assert text.choices[0].text


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=-1)
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="sim", messages=MESSAGES, extra_headers={"X-Sim-Fault": "status=503"})
    with pytest.raises(openai.APIError, match="EngineCore encountered an issue"):
        list(
            client.chat.completions.create(
                model="sim", messages=MESSAGES, stream=True, extra_headers={"X-Sim-Fault": "error-event-after=2"}
            )
        )


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["sim"]


def shape(value: Any) -> Any:
    """Keys in their order, and what kind of value each has; the lengths of lists aside."""
    if isinstance(value, dict):
        return [(key, shape(inner)) for key, inner in value.items()]
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def test_streamed_events_have_the_fields_of_a_captured_vllm_in_its_order(port: int) -> None:
    real = events((DATA / "vllm-0.32-chat_stream_usage.http").read_bytes())
    _, body = ask(port, chat(8, stream_options={"include_usage": True}))
    assert [shape(event) for event in events(body)] == [shape(event) for event in real]


def test_a_whole_body_has_the_fields_of_a_captured_vllm_in_its_order(port: int) -> None:
    real = (DATA / "vllm-0.32-chat_nonstream.http").read_bytes().partition(b"\r\n\r\n")[2]
    _, body = ask(port, chat(8, stream=False))
    assert shape(json.loads(body)) == shape(json.loads(real))
