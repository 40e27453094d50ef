"""``--include-usage``: the engine is asked, the record has the counts, the client sees what it would have seen."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator

import pytest

from tapproxy.tap.usageevent import MOST_REQUEST_BYTES, UsageEvents, asking
from tests.harness import DONE, SSE_HEAD, Peer, Tap, Upstream, read_until, tap

TEXT = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"a\\n"}}],"usage":null}\n\n'
USAGE = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
END = b"data: [DONE]\n\n"
STREAM = b"".join((b": hello\n\n", TEXT, TEXT, USAGE, END))
ASKED = b'{"model":"m","stream":true,"temperature":1e0}'


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        pytest.param(
            ASKED,
            b'{"stream_options":{"include_usage":true},"model":"m","stream":true,"temperature":1e0}',
            id="put_in_and_nothing_else_touched",
        ),
        pytest.param(b' {"stream":true}', b' {"stream_options":{"include_usage":true},"stream":true}', id="space"),
        pytest.param(
            b'{"stream":true,"stream_options":null}',
            b'{"stream":true,"stream_options":{"include_usage":true}}',
            id="null",
        ),
        pytest.param(
            b'{"stream":true,"stream_options":{"include_usage":false}}',
            b'{"stream":true,"stream_options":{"include_usage":true}}',
            id="no",
        ),
        pytest.param(b'{"stream":true,"stream_options":{"include_usage":true}}', None, id="asked"),
        pytest.param(b'{"stream":true,"stream_options":{"continuous_usage_stats":true}}', None, id="running_totals"),
        pytest.param(b'{"stream":true,"stream_options":3}', None, id="no_object"),
        pytest.param(b'{"stream":false}', None, id="no_stream"),
        pytest.param(b"{}", None, id="nothing"),
        pytest.param(b"[1]", None, id="a_list"),
        pytest.param(b'{"stream":true', None, id="no_json"),
    ],
)
def test_the_option_is_put_in_where_the_client_says_nothing_of_usage(body: bytes, changed: bytes | None) -> None:
    assert asking(body) == changed


def passed(stream: bytes, cuts: list[int], *, chunked: bool = False) -> tuple[bytes, UsageEvents]:
    events = UsageEvents(chunked=chunked)
    out = b""
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    for index, piece in enumerate(pieces):
        out += events.feed(piece, last=index == len(pieces) - 1)
    return out, events


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"], ids=["lf", "crlf", "cr"])
def test_the_usage_event_is_taken_out_however_the_stream_is_cut(newline: bytes) -> None:
    stream, kept = STREAM.replace(b"\n", newline), STREAM.replace(USAGE, b"").replace(b"\n", newline)
    dice = random.Random(3)
    cuts = [[], list(range(1, len(stream)))] + [
        sorted(dice.sample(range(1, len(stream)), dice.randint(1, 9))) for _ in range(200)
    ]
    for cut in cuts:
        out, events = passed(stream, cut)
        # Of a CRLF cut at the event's end the LF stays behind, which no reader minds.
        assert out.replace(b"\r\n", b"\n").replace(b"\n\n\n", b"\n\n") == kept.replace(b"\r\n", b"\n")
        assert events.taken == 1


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(TEXT, id="a_token"),
        pytest.param(b'data: {"choices":[{"delta":{}}],"usage":{"completion_tokens":3}}\n\n', id="a_running_total"),
        pytest.param(b'data: {"choices":[],"usage":null}\n\n', id="no_usage"),
        pytest.param(b'data: {"choices":[],"prompt_filter_results":[]}\n\n', id="a_filter_s"),
        pytest.param(b'data: {"choices":[],"usage":{"a":1},"error":{"message":"x"}}\n\n', id="an_error"),
        pytest.param(b'data: "usage" "choices"\n\n', id="no_json"),
        pytest.param(b': "usage": {}\n\n', id="a_comment"),
        pytest.param(b"data: " + b'"usage"' * 20_000 + b"\n\n", id="too_long_to_be_one"),
    ],
)
def test_every_other_event_stays(event: bytes) -> None:
    for cuts in ([], [len(event) // 2], list(range(1, min(len(event), 80)))):
        out, events = passed(event + END, cuts)
        assert out == event + END
        assert events.taken == 0


def test_a_whole_event_waits_for_nothing() -> None:
    events = UsageEvents()
    assert events.feed(TEXT, last=False) == b"%x\r\n%s\r\n" % (len(TEXT), TEXT)
    assert events.feed(b"data: ha", last=False) == b""
    assert events.feed(b"lf\n\n", last=False) == b"c\r\ndata: half\n\n\r\n"


def test_what_is_held_of_an_answer_that_was_cut_goes_out() -> None:
    events = UsageEvents()
    events.feed(b"data: ha", last=False)
    assert events.rest() == b"8\r\ndata: ha\r\n"
    assert events.rest() == b""


# -- over sockets


def serve(peer: Peer) -> None:
    while True:
        head, body = peer.request()
        SEEN.append((head, body))
        path = head.split(b" ")[1]
        usage = USAGE if b"include_usage" in body else b""
        if path.startswith(b"/close"):
            peer.send(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + TEXT + usage + END)
            peer.sock.close()
            return
        if path.startswith(b"/cut"):
            peer.send(SSE_HEAD)
            peer.event(b"x")
            peer.send(b"40\r\ndata: half")
            time.sleep(0.05)
            peer.sock.close()
            return
        peer.send(SSE_HEAD)
        for event in (TEXT, TEXT):
            peer.send(b"%x\r\n%s\r\n" % (len(event), event))
        if path.startswith(b"/together"):
            peer.send(b"%x\r\n%s\r\n" % (len(usage + END), usage + END) + DONE)
            continue
        for event in filter(None, (usage, END)):
            peer.send(b"%x\r\n%s\r\n" % (len(event), event))
            time.sleep(0.02)
        peer.send(DONE)


SEEN: list[tuple[bytes, bytes]] = []


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tap]:
    with Upstream(serve) as upstream, tap(tmp_path_factory.mktemp("usage"), upstream.url, "--include-usage") as one:
        yield one
        assert not upstream.failures


@pytest.fixture
def asked_for(running: Tap) -> Tap:
    """One tap for all tests: each asks a path of its own."""
    SEEN.clear()
    return running


def ask(running: Tap, body: bytes, path: str = "/v1/chat/completions", *, pieces: int = 1, end: bytes = DONE) -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: e\r\nContent-Type: application/json\r\ncontent-Length: {len(body)}\r\n\r\n"
    ).encode()
    whole = head + body
    step = -(-len(whole) // pieces)
    with running.connect() as sock:
        for at in range(0, len(whole), step):
            sock.sendall(whole[at : at + step])
            time.sleep(0.02 if pieces > 1 else 0)
        return read_until(sock, end)


def chunks(*events: bytes) -> bytes:
    return SSE_HEAD + b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events) + DONE


@pytest.mark.parametrize("pieces", [1, 3])
def test_the_record_has_the_counts_and_the_client_sees_none(asked_for: Tap, pieces: int) -> None:
    path = f"/in{pieces}/chat/completions"
    assert ask(asked_for, ASKED, path, pieces=pieces) == chunks(TEXT, TEXT, END)
    ((head, body),) = SEEN
    changed = asking(ASKED)
    assert changed is not None
    assert body == changed
    assert b"\r\ncontent-Length: %d\r\n" % len(changed) in head
    record = asked_for.record(path=path)
    assert record["altered"] == ["include-usage"]
    assert record["usage"] == {"prompt_tokens": 7, "completion_tokens": 2, "cached_tokens": None}
    assert record["events"]["kind"] == ["token", "token", "usage", "done"]
    assert [at is None for at in record["events"]["sent"]] == [False, False, True, False]
    assert record["request"]["bytes"] == len(ASKED)
    assert record["downstream"]["bytes"] == len(TEXT + TEXT + END)
    assert record["upstream"]["bytes"] == len(TEXT + TEXT + USAGE + END)
    assert record["ended"] == "complete"


def test_usage_and_end_in_one_write_are_told_apart(asked_for: Tap) -> None:
    assert ask(asked_for, ASKED, "/together/chat/completions") == chunks(TEXT, TEXT, END)
    record = asked_for.record(path="/together/chat/completions")
    assert [at is None for at in record["events"]["sent"]] == [False, False, True, False]


def test_an_answer_that_only_its_end_delimits(asked_for: Tap) -> None:
    got = ask(asked_for, ASKED, "/close/v1/completions", end=END)
    assert got.endswith(b"\r\n\r\n" + TEXT + END)
    assert asked_for.record(path="/close/v1/completions")["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "path"),
    [
        pytest.param(
            b'{"stream":true,"stream_options":{"include_usage":true}}', "/asked/chat/completions", id="it_asked"
        ),
        pytest.param(b'{"stream":false}', "/plain/chat/completions", id="no_stream"),
        pytest.param(ASKED, "/v1/responses", id="another_api"),
        pytest.param(b'{"stream":true,"p":"' + b"x" * MOST_REQUEST_BYTES + b'"}', "/long/completions", id="too_long"),
    ],
)
def test_what_needs_no_change_gets_none(asked_for: Tap, body: bytes, path: str) -> None:
    got = ask(asked_for, body, path)
    asked = b"include_usage" in body
    assert got == chunks(*filter(None, (TEXT, TEXT, USAGE if asked else b"", END)))
    assert SEEN[0][1] == body
    assert asked_for.record(path=path)["altered"] == []


def test_an_answer_that_is_cut_is_cut_for_the_client_too(asked_for: Tap) -> None:
    got = ask(asked_for, ASKED, "/cut/chat/completions", end=b"data: half\r\n")
    assert got == SSE_HEAD + b"9\r\ndata: x\n\n\r\na\r\ndata: half\r\n"
    assert asked_for.record(path="/cut/chat/completions")["ended"] == "upstream_aborted"


def test_a_client_that_leaves_before_its_request_is_whole_is_recorded(asked_for: Tap) -> None:
    head = b"POST /left/completions HTTP/1.1\r\nHost: e\r\nContent-Type: application/json\r\nContent-Length: 99\r\n"
    with asked_for.connect() as sock:
        sock.sendall(head + b"\r\n{")
        time.sleep(0.05)
    assert asked_for.record(path="/left/completions")["ended"] == "client_aborted"
    assert SEEN == []


def test_two_requests_on_one_connection_are_each_asked_for(asked_for: Tap) -> None:
    request = (
        b"POST /two/completions HTTP/1.1\r\nHost: e\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
    ) % (len(ASKED), ASKED)
    with asked_for.connect() as sock:
        for _ in range(2):
            sock.sendall(request)
            assert read_until(sock, DONE) == chunks(TEXT, TEXT, END)
    assert [json.loads(body)["stream_options"] for _, body in SEEN] == [{"include_usage": True}] * 2
    assert [record["usage"]["prompt_tokens"] for record in asked_for.records(2, path="/two/completions")] == [7, 7]
