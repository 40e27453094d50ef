"""Every captured answer of a real engine, through a real tap: bytes unchanged, and what the record says of them.

The expectations come from tests/captures.py and from the rules of definitions.md written once more here, in the
plainest form, for the three dialects the captures hold. The captures of one tap follow one another on connections
of their own, so that the records are in the captures' order.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tapproxy.simulate.replay import read_recording
from tests import captures
from tests.captures import Response
from tests.e2e.helpers import engine
from tests.harness import Peer, Upstream, answer, tap

NAMES = captures.names()
STREAMS = [name for name in NAMES if "event-stream" in captures.load(name).headers.get("content-type", "")]
Record = dict[str, Any]
# One hop's own: what a tap may add, take or change.
HOP_BY_HOP = {"connection", "keep-alive"}


class Asked(NamedTuple):
    """The request that a capture answered."""

    head: bytes
    body: bytes


def asked(name: str) -> Asked:
    """As the capture's ``.cmd`` (a curl command) says; a plain POST where there is none."""
    method, path, version, fields, body = "POST", "/v1/chat/completions", "1.1", ["Host: engine"], "{}"
    try:
        words = captures.raw(name, ".cmd").decode().removeprefix("#").strip()
    except FileNotFoundError:
        words = ""
    if words:
        method, body = "GET", ""
        path = re.search(r"http://127\.0\.0\.1:\d+(\S*)$", words)[1] or "/"  # type: ignore[index]
        version = "1.0" if "--http1.0" in words else "1.1"
        data = re.search(r" (?:-d|--data) (.*) http://", words)
        if data is not None:
            method, body = "POST", data[1]
        if " -I " in words:
            method = "HEAD"
        given = re.search(r" -X (\S+)", words)
        method = given[1] if given else method
        fields += re.findall(r" -H ([\w-]+: .*?)(?= -[a-zA-Z-]| http://)", words)
    lines = [f"{method} {path} HTTP/{version}", *fields, f"X-Capture: {name}"]
    if body:
        lines.append(f"Content-Length: {len(body.encode())}")
    if not any(line.lower().startswith("connection:") for line in lines):
        lines.append("Connection: close")
    return Asked("\r\n".join([*lines, "", ""]).encode(), body.encode())


def play(peer: Peer) -> None:
    """Sends the captured bytes as they are, each chunk a write of its own; closes where the engine did."""
    while True:
        head, _ = peer.request()
        name = re.search(rb"X-Capture: (\S+)", head)
        assert name is not None, head
        recording = read_recording(captures.raw(name[1].decode()))
        for write in recording.writes:
            peer.send(write)
        if not recording.complete:
            return


@pytest.fixture(scope="module")
def replayed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[bytes, Record]]:
    """For each capture: what the client got, and the tap's record."""
    got: dict[str, bytes] = {}
    with Upstream(play) as upstream, tap(tmp_path_factory.mktemp("replay"), upstream.url) as running:
        for name in NAMES:
            request = asked(name)
            with running.connect() as sock:
                sock.sendall(request.head + request.body)
                got[name] = answer(sock)
        records = sorted(running.records(len(NAMES)), key=lambda record: record["t0_mono_ns"])
        assert upstream.failures == []
    return {name: (got[name], record) for name, record in zip(NAMES, records, strict=True)}


def relayed(name: str, wire: bytes) -> Response:
    return captures.parse(wire.removesuffix(b"<RST>"), to_head=name.endswith("_head"))


@pytest.mark.parametrize("name", NAMES)
def test_the_client_gets_the_engines_bytes(name: str, replayed: dict[str, tuple[bytes, Record]]) -> None:
    wire, record = replayed[name]
    engines, clients = captures.load(name), relayed(name, wire)
    assert clients.body == engines.body
    assert clients.status == engines.status
    assert clients.complete == engines.complete
    assert bool(clients.chunks) == bool(engines.chunks)
    # Order, spelling and repetition too: fields are compared as lines.
    assert fields(wire) == fields(captures.raw(name))
    assert record["upstream"]["bytes"] == len(engines.body)
    assert record["downstream"]["bytes"] == len(engines.body)


def fields(wire: bytes) -> list[bytes]:
    lines = wire.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]
    return [line for line in lines if line.partition(b":")[0].decode().strip().lower() not in HOP_BY_HOP]


@pytest.mark.parametrize("name", NAMES)
def test_the_record_says_how_it_ended(name: str, replayed: dict[str, tuple[bytes, Record]]) -> None:
    _, record = replayed[name]
    response = captures.load(name)
    assert record["ended"] == ("complete" if response.complete else "upstream_aborted")
    assert record["status"] == response.status
    assert record["void"] in (None, "loop_lag")
    assert record["altered"] == []
    assert record["headers"]["content-type"] == response.headers.get("content-type")
    request = asked(name)
    assert record["path"] == request.head.split(b" ")[1].decode()
    assert record["request"]["bytes"] == len(request.body)


class Block(NamedTuple):
    """One event or comment of a stream. ``end``: the body offset just past the bytes that end it."""

    type: str
    data: bytes
    comment: bool
    end: int

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.data) if self.data.startswith(b"{") else {}
        return value


def blocks(body: bytes) -> list[Block]:
    """The captures use LF, or CRLF throughout (sse-starlette); an event ends at the CR of its empty line."""
    out, end_of_line = [], b"\r\n" if b"\r\n\r\n" in body else b"\n"
    at = 0
    while (end := body.find(end_of_line * 2, at)) >= 0:
        lines = body[at:end].split(end_of_line)
        data = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
        types = [line[6:].strip().decode() for line in lines if line.startswith(b"event:")]
        # A comment is complete with its own line.
        comment = not data and lines[-1].startswith(b":")
        stop = end + 1 if comment else end + len(end_of_line) + 1
        if data or comment:
            out.append(Block(types[0] if types else "message", b"\n".join(data), comment, stop))
        at = end + 2 * len(end_of_line)
    return out


MESSAGES = {
    "message_start": "role",
    "content_block_delta": "token",
    "message_delta": "finish",
}
RESPONSES = {
    "response.output_item.added": "role",
    "response.output_text.delta": "token",
    "response.completed": "finish",
    "response.incomplete": "finish",
}


def kind(block: Block, seen: set[int]) -> str:
    """definitions.md, "Event kinds"; ``seen``: the answers that have begun."""
    if block.comment:
        return "comment"
    if block.data == b"[DONE]":
        return "done"
    value = block.json
    if block.type == "error" or value.get("error"):
        return "error"
    if value.get("choices"):
        choice = value["choices"][0]
        first = choice["index"] not in seen
        seen.add(choice["index"])
        delta = choice.get("delta", {})
        if delta.get("content") or choice.get("text"):
            return "token"
        if choice.get("finish_reason"):
            return "finish"
        return "role" if first and "role" in delta else "token"
    if "choices" in value:
        return "usage"
    return {**MESSAGES, **RESPONSES}.get(str(value.get("type")), "other")


@pytest.mark.parametrize("name", STREAMS)
def test_kinds_and_offsets_are_those_of_the_stream(name: str, replayed: dict[str, tuple[bytes, Record]]) -> None:
    _, record = replayed[name]
    events, expected = record["events"], blocks(captures.load(name).body)
    seen: set[int] = set()
    assert events["kind"] == [kind(block, seen) for block in expected]
    assert events["end_offset"] == [block.end for block in expected]
    assert record["unread_events"] == 0
    assert {len(values) for values in events.values()} == {len(expected)}
    # All of it went on, and no time runs backwards.
    for arrived, read_at, sent in zip(events["arrived"], events["read_at"], events["sent"], strict=True):
        assert 0 < arrived <= read_at <= sent
    for stamps in (events["arrived"], events["read_at"], events["sent"], events["read"]):
        assert stamps == sorted(stamps)


def usage_of(name: str) -> dict[str, Any] | None:
    """The last usage in the stream; Anthropic's and the Responses API's words in OpenAI's."""
    found: dict[str, Any] = {}
    for block in blocks(captures.load(name).body):
        for holder in (block.json, block.json.get("response"), block.json.get("message")):
            found |= (holder or {}).get("usage") or {}
    if not found:
        return None
    return {
        "prompt_tokens": found.get("prompt_tokens", found.get("input_tokens")),
        "completion_tokens": found.get("completion_tokens", found.get("output_tokens")),
    }


WITH_USAGE = [name for name in STREAMS if usage_of(name) is not None]
CONTINUOUS = [name for name in STREAMS if sum(b'"usage":{' in b.data for b in blocks(captures.load(name).body)) > 2]


@pytest.mark.parametrize("name", WITH_USAGE)
def test_token_counts_add_up_to_the_usage(name: str, replayed: dict[str, tuple[bytes, Record]]) -> None:
    _, record = replayed[name]
    usage = usage_of(name)
    assert usage is not None
    assert {key: record["usage"][key] for key in usage} == usage
    kinds, tokens, total = record["events"]["kind"], record["events"]["tokens"], usage["completion_tokens"]
    known = [count for count in tokens if count is not None]
    unknown = len(tokens) - len(known)
    if unknown:
        # More tokens than events that could hold them: some event has several, and nobody says which.
        assert total > kinds.count("token")
        assert sum(known) + unknown < total
    else:
        assert sum(known) == total


@pytest.mark.parametrize("name", CONTINUOUS)
def test_token_counts_are_the_steps_of_the_continuous_usage(
    name: str, replayed: dict[str, tuple[bytes, Record]]
) -> None:
    _, record = replayed[name]
    expected, before = [], 0
    for block in blocks(captures.load(name).body):
        now = (block.json.get("usage") or {}).get("completion_tokens", before)
        expected.append(now - before)
        before = now
    assert record["events"]["tokens"] == expected
    assert sum(expected) > 0


# The same request with and without a running usage: what was concluded from the total has to be what the engine
# counted itself.
PAIRS = [
    (f"{directory}/chat_stream_usage", f"{directory}/chat_stream_usage_continuous")
    for directory in ("vllm-0.32", "vllm-0.32-request-metrics", "sglang-0.5.23")
]


@pytest.mark.parametrize(("concluded", "counted"), PAIRS, ids=[pair[0].split("/")[0] for pair in PAIRS])
def test_counts_concluded_from_the_total_are_those_the_engine_counts(
    concluded: str, counted: str, replayed: dict[str, tuple[bytes, Record]]
) -> None:
    one, other = replayed[concluded][1]["events"], replayed[counted][1]["events"]
    assert list(zip(one["kind"], one["tokens"], strict=True)) == list(zip(other["kind"], other["tokens"], strict=True))


@pytest.mark.parametrize("name", [name for name in STREAMS if usage_of(name) is None])
def test_without_a_total_only_counts_that_the_events_say_are_known(
    name: str, replayed: dict[str, tuple[bytes, Record]]
) -> None:
    _, record = replayed[name]
    assert record["usage"]["completion_tokens"] is None
    expected: list[set[int | None]] = []
    for block, kind in zip(blocks(captures.load(name).body), record["events"]["kind"], strict=True):
        choice = (block.json.get("choices") or [{}])[0]
        ids, logprobs = choice.get("token_ids"), choice.get("logprobs") or {}
        listed = ids if isinstance(ids, list) else logprobs.get("content") or logprobs.get("tokens")
        if listed:
            # With ``echo`` the prompt's tokens are in the list as well.
            expected.append({None, len(listed)} if "echo" in name else {len(listed)})
        elif kind == "finish":
            expected.append({None, 0})
        else:
            expected.append({None} if kind == "token" else {0})
    for count, possible in zip(record["events"]["tokens"], expected, strict=True):
        assert count in possible


# Plain lists beside the rules above, so that a fault in them would show.
LISTS: dict[str, tuple[list[str], list[int | None]]] = {
    "vllm-0.32/chat_stream_usage": (
        ["role", *["token"] * 8, "usage", "done"],
        [0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0],
    ),
    "sglang-0.5.23/chat_stream_usage": (
        ["role", *["token"] * 8, "finish", "usage", "done"],
        [0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    ),
    # vLLM's empty finish is the end-of-sequence token, SGLang's is none.
    "vllm-0.32/chat_stream_stop_eos": (
        ["role", "token", "token", "token", "finish", "usage", "done"],
        [0, 1, 1, 1, 1, 0, 0],
    ),
    "vllm-0.32-otlp/keepalive_stall_stream": (
        ["comment", "comment", "role", "token", "token", "done"],
        [0, 0, 0, 1, 3, 0],
    ),
    # Four tokens in an event and no count in it: the total of 18 leaves it open.
    "vllm-0.32-otlp/chat_traceparent_interval4": (
        ["role", *["token"] * 6, "usage", "done"],
        [0, None, None, None, None, None, None, 0, 0],
    ),
    "ray-serve-chat_stream": (["token"] * 4 + ["done"], [None, None, None, None, 0]),
}


@pytest.mark.parametrize("name", LISTS)
def test_known_streams_read_as_they_should(name: str, replayed: dict[str, tuple[bytes, Record]]) -> None:
    _, record = replayed[name]
    assert (record["events"]["kind"], record["events"]["tokens"]) == LISTS[name]


def test_a_killed_engine_is_an_error_event_in_a_complete_answer(replayed: dict[str, tuple[bytes, Record]]) -> None:
    _, record = replayed["vllm-0.32-failures/engine_killed_midstream"]
    assert record["ended"] == "complete"
    assert record["status"] == 200
    assert record["events"]["kind"][-2:] == ["error", "done"]
    assert record["events"]["kind"].count("token") == 782


def test_a_stopped_engine_is_an_aborted_answer_and_every_event_before_it_was_sent(
    replayed: dict[str, tuple[bytes, Record]],
) -> None:
    wire, record = replayed["vllm-0.32-failures/sigterm_midstream"]
    assert record["ended"] == "upstream_aborted"
    assert record["events"]["kind"] == ["role", *["token"] * 369]
    assert None not in record["events"]["sent"]
    # The client sees that it is cut: there is no last chunk.
    assert not wire.endswith(b"0\r\n\r\n")


METRICS = [name for name in STREAMS if b'"metrics":{' in captures.load(name).body]


@pytest.mark.parametrize("name", METRICS)
def test_the_engines_own_times_are_in_the_record(name: str, replayed: dict[str, tuple[bytes, Record]]) -> None:
    _, record = replayed[name]
    values = [block.json for block in blocks(captures.load(name).body)]
    metrics = next(m for v in values if (m := v.get("metrics") or (v.get("response") or {}).get("metrics")))
    assert record["engine"]["source"] == "response.metrics"
    for key, said in (
        ("queue_ns", "queue_time_ms"),
        ("prefill_ns", "time_to_first_token_ms"),
        ("decode_ns", "generation_time_ms"),
    ):
        assert record["engine"][key] == round(metrics[said] * 1e6)
    assert record["engine"]["frontend_ns"] is None


# -- the same with the package's own replaying engine: what a user would do to look at a capture

REPLAYS = [
    "vllm-0.32/chat_stream_usage_continuous",
    "sglang-0.5.23/chat_stream_usage",
    "llama-cpp-python-0.3.36/chat_stream_usage",
    "ray-serve-chat_stream",
    "vllm-0.32-failures/sigterm_midstream",
]


@pytest.fixture(scope="module", params=REPLAYS)
def simulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any]]:
    name = str(request.param)
    directory = tmp_path_factory.mktemp("simulated")
    file: Path = directory / "answer.http"
    file.write_bytes(captures.raw(name))
    with (
        engine("--replay", str(file), "--replay-gap-us", "500") as running,
        tap(directory / "data", running.url) as between,
    ):
        answers = []
        for address in (("127.0.0.1", running.port), between.data):
            with socket.create_connection(address, 20) as sock:
                sock.sendall(asked(name).head + asked(name).body)
                answers.append(answer(sock))
        yield name, (answers, between.record())


def test_a_replayed_capture_is_the_same_direct_and_through_the_tap(simulated: tuple[str, Any]) -> None:
    name, ((direct, through), record) = simulated
    assert direct == captures.raw(name)
    assert relayed(name, through).body == captures.load(name).body
    assert fields(through) == fields(direct)
    assert record["ended"] == ("complete" if captures.load(name).complete else "upstream_aborted")
    assert len(record["events"]["kind"]) == len(blocks(captures.load(name).body))


def test_commands_of_captures_are_understood() -> None:
    # A capture whose request we failed to read would be replayed as another one.
    assert asked("vllm-0.32/http10_chat_stream").head.startswith(b"POST /v1/chat/completions HTTP/1.0\r\n")
    assert asked("vllm-0.32/health_head").head.startswith(b"HEAD /health HTTP/1.1\r\n")
    assert b"\r\nAccept-Encoding: gzip\r\n" in asked("vllm-0.32/gzip_accept_stream").head
