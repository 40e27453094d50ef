"""The openai client and ``curl -N`` work through the tap as they do directly.

Two engines with one seed say the same words to the same requests in the same order: one is asked directly, the other
through a tap, and what the client makes of the answers is compared. What every answer draws anew (ids, the second
it was created in) is left out.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import openai
import pytest

from tests.e2e.helpers import PROMPT, engine
from tests.harness import Tap, tap

FLAGS = ("--model", "sim", "--ttft-us", "20000", "--itl-us", "5000", "--output-tokens", "24", "--seed", "7")
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "look_up", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}},
    }
]
DRAWN = {"id", "created"}


class Ways(NamedTuple):
    """The two base URLs, the tap in the second one's way, and how many records it had before this test."""

    direct: str
    through: str
    tap: Tap
    before: int = 0

    def both(self, ask: Callable[[openai.OpenAI], Any]) -> tuple[Any, Any]:
        """What the client makes of it directly, and through the tap."""
        got = []
        for url in (self.direct, self.through):
            with openai.OpenAI(base_url=f"{url}/v1", api_key="sk-loopback", max_retries=0) as client:
                got.append(ask(client))
        return got[0], got[1]

    def records(self, count: int) -> list[dict[str, Any]]:
        """The records of this test."""
        return self.tap.records(self.before + count)[self.before :]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    with ExitStack() as stack:
        direct, behind = (stack.enter_context(engine(*FLAGS)) for _ in range(2))
        between = stack.enter_context(tap(tmp_path_factory.mktemp("client"), behind.url))
        yield Ways(direct.url, between.url, between)


@pytest.fixture
def ways(running: Ways) -> Ways:
    # What an engine says depends on how many it has answered: each test asks both, and equally often.
    written: int = json.loads(running.tap.admin_get("/api/status"))["store"]["written"]
    return running._replace(before=written)


def plain(value: Any) -> Any:
    """A model of the client's as JSON values, without what is drawn anew."""
    if hasattr(value, "model_dump"):
        value = value.model_dump()
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items() if key not in DRAWN}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    return value


def chat_stream(client: openai.OpenAI) -> Any:
    stream = client.chat.completions.create(
        model="sim",
        messages=MESSAGES,
        stream=True,
        max_tokens=12,
        stream_options={"include_usage": True},
    )
    return [plain(chunk) for chunk in stream]


def chat_stream_to_its_end(client: openai.OpenAI) -> Any:
    stream = client.chat.completions.create(model="sim", messages=MESSAGES, stream=True)
    return [plain(chunk) for chunk in stream]


def completions_stream(client: openai.OpenAI) -> Any:
    stream = client.completions.create(
        model="sim", prompt=PROMPT, stream=True, max_tokens=12, stream_options={"include_usage": True}
    )
    return [plain(chunk) for chunk in stream]


def chat_whole(client: openai.OpenAI) -> Any:
    return plain(client.chat.completions.create(model="sim", messages=MESSAGES, max_tokens=8))


def completions_whole(client: openai.OpenAI) -> Any:
    return plain(client.completions.create(model="sim", prompt=PROMPT, max_tokens=8))


def tool_call(client: openai.OpenAI) -> Any:
    answer = client.chat.completions.create(model="sim", messages=MESSAGES, tools=TOOLS)
    check_call(answer.choices[0].message.tool_calls)
    return plain(answer)


def check_call(calls: Any) -> None:
    (call,) = calls
    assert call.function.name == "look_up"
    assert set(json.loads(call.function.arguments)) == {"query"}


def tool_call_stream(client: openai.OpenAI) -> Any:
    with client.chat.completions.stream(model="sim", messages=MESSAGES, tools=TOOLS) as stream:
        events = [plain(event) for event in stream]
        answer = stream.get_final_completion()
    check_call(answer.choices[0].message.tool_calls)
    return [*events, plain(answer)]


def models(client: openai.OpenAI) -> Any:
    return [plain(model) | {"id": model.id} for model in client.models.list()]


def refused(status: type[openai.APIStatusError], **arguments: Any) -> Callable[[openai.OpenAI], Any]:
    def ask(client: openai.OpenAI) -> Any:
        with pytest.raises(status) as caught:
            client.chat.completions.create(**{"model": "sim", "messages": MESSAGES, "stream": True, **arguments})
        error = caught.value
        assert type(error) is status
        return error.status_code, error.message, error.body

    return ask


def error_event(client: openai.OpenAI) -> Any:
    got: list[Any] = []
    stream = client.chat.completions.create(
        model="sim",
        messages=MESSAGES,
        stream=True,
        extra_headers={"X-Sim-Fault": "error-event-after=4"},
    )
    with pytest.raises(openai.APIError) as caught:
        got.extend(plain(chunk) for chunk in stream)
    assert len(got) == 4
    return got, caught.value.message


TASKS: dict[str, tuple[Callable[[openai.OpenAI], Any], dict[str, Any]]] = {
    # What the client did, and what the record has to say of it.
    "chat stream": (chat_stream, {"stream": True, "status": 200, "usage": 12}),
    "chat stream to its end": (chat_stream_to_its_end, {"stream": True, "status": 200, "usage": None}),
    "completions stream": (completions_stream, {"stream": True, "status": 200, "usage": 12}),
    "chat": (chat_whole, {"stream": False, "status": 200, "usage": 8}),
    "completions": (completions_whole, {"stream": False, "status": 200, "usage": 8}),
    "tool call": (tool_call, {"stream": False, "status": 200, "usage": 24}),
    "tool call stream": (tool_call_stream, {"stream": True, "status": 200, "usage": None}),
    "models": (models, {"stream": None, "status": 200, "usage": None}),
    "unknown model": (refused(openai.NotFoundError, model="other"), {"stream": True, "status": 404, "usage": None}),
    "bad temperature": (
        refused(openai.BadRequestError, temperature=-1),
        {"stream": True, "status": 400, "usage": None},
    ),
    "too many tokens": (
        refused(openai.BadRequestError, max_tokens=10**6),
        {"stream": True, "status": 400, "usage": None},
    ),
    "error event": (error_event, {"stream": True, "status": 200, "usage": None}),
}


def test_the_openai_client_gets_through_the_tap_what_it_gets_directly(ways: Ways) -> None:
    direct, through = ways.both(lambda client: {name: task(client) for name, (task, _) in TASKS.items()})
    for name in TASKS:
        assert through[name] == direct[name], name
    assert len(through["chat stream"]) == 1 + 12 + 1
    assert sum(choice["finish_reason"] == "length" for c in through["chat stream"] for choice in c["choices"]) == 1
    # One record each, in order, and nothing of the key or the words in them.
    records = ways.records(len(TASKS))
    for record, (name, (_, expected)) in zip(records, TASKS.items(), strict=True):
        assert record["ended"] == "complete", name
        assert record["status"] == expected["status"], name
        assert record["stream"] is expected["stream"], name
        assert record["usage"]["completion_tokens"] == expected["usage"], name
        assert record["altered"] == []
    assert [record["upstream"]["reused"] for record in records[1:]] == [True] * (len(TASKS) - 1)
    stored = b"".join(file.read_bytes() for file in ways.tap.directory.iterdir())
    for secret in (b"sk-loopback", PROMPT.encode(), b"look_up"):
        assert secret not in stored


def test_a_tool_calls_events_are_told_apart(ways: Ways) -> None:
    ways.both(tool_call_stream)
    kinds = ways.records(1)[0]["events"]["kind"]
    assert kinds[:2] == ["role", "tool"]
    assert set(kinds[2:-2]) == {"tool"}
    assert kinds[-2:] == ["finish", "done"]


def leave_early(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="sim",
        messages=MESSAGES,
        stream=True,
        extra_headers={"X-Sim-Tokens": "2000"},
    )
    for number, _ in enumerate(stream):
        if number == 5:
            break
    stream.close()


def test_a_client_that_stops_reading_is_an_abort_and_the_engine_is_told(ways: Ways) -> None:
    ways.both(leave_early)
    (record,) = ways.records(1)
    assert record["ended"] == "client_aborted"
    assert 6 <= len(record["events"]["kind"]) < 1000
    # The engine is free again (it had 10 s to go), as its own page says, which passes through the data port.
    with urllib.request.urlopen(f"{ways.through}/metrics", timeout=20) as answer:
        page = answer.read().decode()
    assert re.search(r'^vllm:request_success_total\{.*finished_reason="abort".*\} 1(\.0)?$', page, re.MULTILINE)
    assert re.search(r"^vllm:num_requests_running\{.*\} 0(\.0)?$", page, re.MULTILINE)
    ways.records(2)


# -- curl

BODY = json.dumps({"model": "sim", "messages": MESSAGES, "stream": True, "max_tokens": 20, "ignore_eos": True})
VARIANTS: dict[str, tuple[str, ...]] = {
    "HTTP/1.1": (),
    "HTTP/1.0": ("--http1.0",),
    "compressed": ("--compressed",),
    "raw": ("--raw",),
}


def curl(url: str, *flags: str) -> tuple[str, str, list[float]]:
    """Head, body with the drawn values taken out, and when each line came (seconds from the start)."""
    started = time.monotonic()
    command = ["curl", "-sS", "-N", "-i", "--max-time", "20", *flags, "-H", "Content-Type: application/json"]
    with subprocess.Popen([*command, "-d", BODY, f"{url}/v1/chat/completions"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines, times = [], []
        while line := process.stdout.readline():
            lines.append(line.decode())
            times.append(time.monotonic() - started)
    assert process.returncode == 0
    end = lines.index("\r\n")
    head = [line for line in lines[:end] if not line.lower().startswith("date:")]
    body = "".join(line for line in lines[end + 1 :])
    for event in body.split("data: ")[1:]:
        if event.startswith("{"):
            value = json.loads(event.splitlines()[0])
            body = body.replace(value["id"], "ID").replace(f'"created":{value["created"]}', '"created":0')
    return "".join(head), body, times[end:]


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on PATH")
@pytest.mark.parametrize("flags", VARIANTS.values(), ids=VARIANTS.keys())
def test_curl_gets_through_the_tap_what_it_gets_directly(flags: tuple[str, ...], ways: Ways) -> None:
    head, body, times = curl(ways.direct, *flags)
    head_through, body_through, times_through = curl(ways.through, *flags)
    # In any order: each hop writes its own Connection field where it likes.
    assert sorted(head_through.splitlines()) == sorted(head.splitlines())
    assert body_through == body
    assert body.count("data: ") == 22
    # 19 gaps of 5 ms: it streams, the last word comes long after the first.
    for seconds in (times, times_through):
        assert seconds[-1] - seconds[2] > 0.06
    (record,) = ways.records(1)
    assert record["ended"] == "complete"
    assert record["client_http"] == ("1.0" if "--http1.0" in flags else "1.1")
    assert record["events"]["kind"] == ["role", *["token"] * 20, "done"]
