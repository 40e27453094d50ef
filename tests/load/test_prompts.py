"""Prompts from files and made up; counted by whoever can."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from tapproxy.core.errors import ConfigError
from tapproxy.load import prompts
from tapproxy.load.plan import PREFIX_WORDS
from tapproxy.load.prompts import Characters, Prompt
from tapproxy.load.tokens import Remote
from tapproxy.wire.fetch import Fetched, Read
from tests.load.answers import FakeClient


def written(directory: Path, *lines: Any) -> Path:
    file = directory / "prompts.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


CONVERSATION = {
    "id": "x",
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "Hi\u2028there"},
        {"from": "gpt", "value": "Hello."},
        {"from": "human", "value": "More."},
    ],
}
MESSAGES = {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]}
PARTS = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param(
            MESSAGES, Prompt("Be brief.\n\nHi", (("system", "Be brief."), ("user", "Hi"))), id="OpenAI messages"
        ),
        pytest.param(PARTS, Prompt("a\nb", (("user", "a\nb"),)), id="content in parts"),
        pytest.param(
            CONVERSATION,
            Prompt("Be brief.\n\nHi\u2028there", (("system", "Be brief."), ("user", "Hi\u2028there"))),
            id="ShareGPT, up to the first answer",
        ),
        pytest.param({"prompt": "Say it", "max_tokens": 7}, Prompt("Say it", max_tokens=7), id="with its length"),
        pytest.param({"text": "Say it"}, Prompt("Say it"), id="text"),
        pytest.param('"Say it"', Prompt("Say it"), id="a string"),
    ],
)
def test_the_usual_shapes_are_read(tmp_path: Path, line: Any, expected: Prompt) -> None:
    assert prompts.read(written(tmp_path, line, "")) == [expected]


def test_a_json_array_is_read_as_sharegpt_publishes_it(tmp_path: Path) -> None:
    nobody = {"conversations": [{"from": "gpt", "value": "I begin."}]}
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([CONVERSATION, nobody]))
    # A conversation that the assistant opens asks for nothing.
    assert [prompt.messages[0] for prompt in prompts.read(file)] == [("system", "Be brief.")]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        pytest.param([], "holds no prompt", id="empty"),
        pytest.param([MESSAGES, "{not json"], "line 2 is no JSON", id="no JSON"),
        pytest.param(["[1, 2"], "no JSON", id="half an array"),
        pytest.param(["3"], "no object", id="a number"),
        pytest.param([{"question": "x"}], "holds no prompt", id="another shape"),
        pytest.param([{"messages": []}], "no list with a message", id="no message"),
        pytest.param([{"messages": [{"content": "x"}]}], "no object with a role", id="no role"),
        pytest.param([{"prompt": "x", "max_tokens": 0}], "max_tokens is '0'", id="no length"),
        pytest.param(
            [{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}],
            "not text",
            id="a picture",
        ),
    ],
)
def test_what_is_no_prompt_is_said_with_its_line(tmp_path: Path, lines: list[Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prompts.read(written(tmp_path, *lines))


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        prompts.read(tmp_path / "none")


class Odd:
    """A vocabulary in which every word of the list is two tokens, and the whole text has one more."""

    name = "odd"

    async def count(self, text: str) -> int:
        return 2 * len(text.split(" ")) + 1


@pytest.mark.parametrize(
    ("counter", "tokens", "near"), [(Characters(), 64, 0), (Characters(), 2000, 0), (Odd(), 65, 0), (Odd(), 64, 1)]
)
def test_made_up_prompts_have_the_wanted_length(counter: prompts.Counter, tokens: int, near: int) -> None:
    found = asyncio.run(prompts.synthetic(5, tokens, 1, counter))
    assert all(prompt.tokens is not None and abs(prompt.tokens - tokens) <= near for prompt in found)
    assert len({prompt.text for prompt in found}) == 5
    assert found == asyncio.run(prompts.synthetic(5, tokens, 1, counter))


def test_a_length_that_the_prefix_exceeds_is_refused() -> None:
    with pytest.raises(ConfigError, match="too short"):
        asyncio.run(prompts.synthetic(1, PREFIX_WORDS, 1, Characters()))


def answered(status: int, body: object) -> Fetched:
    return Fetched(0, status=status, reads=[Read(0, 0, orjson.dumps(body))])


@pytest.mark.parametrize(
    ("status", "body", "count"),
    [
        pytest.param(200, {"count": 3, "tokens": [1, 2, 3]}, 3, id="vLLM"),
        pytest.param(200, {"tokens": [1, 2]}, 2, id="llama.cpp"),
        pytest.param(404, {"detail": "Not Found"}, None, id="not there"),
        pytest.param(200, {"count": "3"}, None, id="no number"),
        pytest.param(200, [], None, id="something else"),
    ],
)
def test_the_engines_tokenize_is_asked(status: int, body: object, count: int | None) -> None:
    client = FakeClient(lambda _: answered(status, body))
    remote = Remote(client, "/tokenize", "m", ((b"Authorization", b"Bearer k"),))
    assert asyncio.run(remote.try_count("some text")) == count
    ((method, target, headers, sent),) = client.asked
    assert (method, target, headers[b"Authorization"]) == ("POST", "/tokenize", b"Bearer k")
    assert orjson.loads(sent)["prompt"] == "some text"


def test_one_list_of_prompts_has_one_name() -> None:
    assert prompts.digest([Prompt("a")]) == prompts.digest([Prompt("a")])
    assert prompts.digest([Prompt("a")]) != prompts.digest([Prompt("b")])
