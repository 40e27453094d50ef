"""The flags that change heads: what is added when asked, nothing where it was there, nothing without the flag."""

from __future__ import annotations

import contextlib
import json
import re
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator

import pytest

from tapproxy.tap.ids import coin, trace_parent, uuid4
from tests.evidence.otlp import protobuf, span
from tests.harness import DONE, SSE_HEAD, WAIT_S, Peer, Tap, Upstream, read_until, tap

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def serve(peer: Peer) -> None:
    """Answers by path, and notes each head that came."""
    while True:
        head, _ = peer.request()
        SEEN.append(head)
        path = head.split(b" ")[1]
        if path == b"/json":
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
            continue
        accel = b"X-Accel-Buffering: yes\r\n" if path == b"/says" else b""
        peer.send(SSE_HEAD.replace(b"\r\n\r\n", b"\r\n" + accel + b"\r\n"))
        peer.event(b'{"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":"a"}}]}')
        peer.event(b"[DONE]")
        peer.send(DONE)


SEEN: list[bytes] = []


@pytest.fixture(scope="module")
def taps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Tap]]:
    """A tap for each set of flags that is asked for, for all tests together: each asks a path of its own."""
    found: dict[tuple[str, ...], Tap] = {}
    with contextlib.ExitStack() as stack:
        upstream = stack.enter_context(Upstream(serve))

        def of(*flags: str) -> Tap:
            if flags not in found:
                found[flags] = stack.enter_context(tap(tmp_path_factory.mktemp("tap"), upstream.url, *flags))
            return found[flags]

        yield of
        assert not upstream.failures


@pytest.fixture(autouse=True)
def _nothing_seen() -> None:
    SEEN.clear()


def ask(running: Tap, *fields: str, path: str = "/v1/chat/completions") -> bytes:
    """The head of the answer; the request has these fields beside the needed ones."""
    lines = "".join(f"{line}\r\n" for line in ("Host: engine", *fields, "Content-Length: 15"))
    with running.connect() as sock:
        sock.sendall(f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + b'{"stream":true}')
        head = read_until(sock, b"\r\n\r\n")
        read_until(sock, b"{}" if path == "/json" else DONE)
    return head


def field(head: bytes, name: str) -> list[str]:
    return re.findall(rf"(?i)\r\n{name}: *([^\r]*)", head.decode())


def test_a_correlated_request_bears_the_ids_of_its_record(taps: Callable[..., Tap]) -> None:
    running = taps("--correlate")
    ask(running, path="/new")
    record = running.record(path="/new")
    (parent,), (request_id,) = field(SEEN[0], "traceparent"), field(SEEN[0], "x-request-id")
    assert re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", parent)
    assert record["trace_id"] == parent[3:35]
    assert record["request_id"] == request_id
    assert (uuid.UUID(request_id).version, uuid.UUID(request_id).variant) == (4, uuid.RFC_4122)
    assert record["altered"] == ["correlate"]


def test_ids_that_are_there_stay_as_they_are(taps: Callable[..., Tap]) -> None:
    running = taps("--correlate")
    ask(running, f"traceparent: {PARENT}", "X-Request-ID: mine", path="/both")
    ask(running, "x-request-id: mine", path="/one")
    both, one = running.record(path="/both"), running.record(path="/one")
    assert (field(SEEN[0], "traceparent"), field(SEEN[0], "x-request-id")) == ([PARENT], ["mine"])
    assert (both["altered"], both["request_id"], both["trace_id"]) == ([], "mine", PARENT[3:35])
    assert field(SEEN[1], "x-request-id") == ["mine"]
    assert len(field(SEEN[1], "traceparent")) == 1
    assert (one["altered"], one["request_id"]) == (["correlate"], "mine")


def test_a_client_cannot_have_an_id_of_ours_taken_out(taps: Callable[..., Tap]) -> None:
    running = taps("--correlate", "--forward-client-ip")
    ask(running, "Connection: traceparent, x-request-id, x-forwarded-for")
    assert len(field(SEEN[0], "traceparent")) == len(field(SEEN[0], "x-request-id")) == 1
    assert field(SEEN[0], "x-forwarded-for") == ["127.0.0.1"]


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        pytest.param((), ["127.0.0.1"], id="none_was_there"),
        pytest.param(("X-Forwarded-For: 10.0.0.1",), ["10.0.0.1, 127.0.0.1"], id="appended"),
        pytest.param(
            ("x-forwarded-for: 10.0.0.1", "x-forwarded-for: 10.0.0.2"), ["10.0.0.1", "10.0.0.2, 127.0.0.1"], id="two"
        ),
        pytest.param(("X-Forwarded-For:",), ["127.0.0.1"], id="empty"),
    ],
)
def test_the_clients_address_is_appended(taps: Callable[..., Tap], fields: tuple[str, ...], sent: list[str]) -> None:
    running = taps("--forward-client-ip")
    ask(running, *fields, path=f"/from/{len(fields)}/{len(sent)}/{len(sent[0])}")
    record = running.record(path=f"/from/{len(fields)}/{len(sent)}/{len(sent[0])}")
    assert record["altered"] == ["forward-client-ip"]
    assert field(SEEN[0], "x-forwarded-for") == sent


def test_streams_are_told_not_to_be_buffered_where_nobody_says(taps: Callable[..., Tap]) -> None:
    running = taps("--set-x-accel-buffering")
    assert field(ask(running), "x-accel-buffering") == ["no"]
    assert field(ask(running, path="/says"), "x-accel-buffering") == ["yes"]
    assert field(ask(running, path="/json"), "x-accel-buffering") == []
    stream, says, plain = running.records(3)
    assert [one["altered"] for one in (stream, says, plain)] == [["set-x-accel-buffering"], [], []]
    # The record keeps what the upstream sent; the finding would advise what the flag does.
    assert stream["headers"]["x-accel-buffering"] is None
    assert "x-accel-buffering-missing" not in stream["findings"]


def test_a_random_half_is_told_and_named(taps: Callable[..., Tap]) -> None:
    running = taps("--randomize", "x-accel-buffering")
    told = [field(ask(running), "x-accel-buffering") == ["no"] for _ in range(60)]
    records = running.records(60)
    # Twelve of sixty or fewer come up once in a million.
    assert 12 < sum(told) < 48
    assert [one["altered"] == ["randomize x-accel-buffering"] for one in records] == told


def test_server_timing_says_what_is_known_at_the_head(taps: Callable[..., Tap]) -> None:
    running = taps("--server-timing")
    (timing,) = field(ask(running), "server-timing")
    record = running.record()
    known = dict(re.fullmatch(r"(tap-\w+);dur=(\d+\.\d{3})", part).groups() for part in timing.split(", "))  # type: ignore[union-attr]
    assert list(known) == ["tap-upload", "tap-connect", "tap-ttfb"]
    ttfb_ns = record["upstream"]["head"] - record["upstream"]["write_end"]
    assert float(known["tap-ttfb"]) == pytest.approx(ttfb_ns / 1e6, abs=0.001)
    assert record["altered"] == ["server-timing"]


def test_without_a_flag_nothing_is_added(taps: Callable[..., Tap]) -> None:
    running = taps()
    head = ask(running)
    assert running.record()["altered"] == []
    for name in ("traceparent", "x-request-id", "x-forwarded-for"):
        assert field(SEEN[0], name) == []
    assert head == SSE_HEAD


def test_a_tap_takes_an_engines_spans_and_keeps_them(taps: Callable[..., Tap]) -> None:
    """From the header to the sample: what ``--correlate`` sent is what the span bears."""
    running = taps("--correlate")
    ask(running, path="/spans")
    record = running.record(path="/spans")
    body = protobuf(
        [span({"gen_ai.latency.e2e": 0.25, "gen_ai.request.id": "chatcmpl-1"}, trace_id=record["trace_id"])]
    )
    request = urllib.request.Request(
        f"http://{running.admin[0]}:{running.admin[1]}/v1/traces",
        data=body,
        headers={"content-type": "application/x-protobuf"},
    )
    with urllib.request.urlopen(request, timeout=10) as answered:
        assert (answered.status, answered.read()) == (200, b"")
    assert json.loads(running.admin_get("/api/status"))["spans"]["taken"] == 1
    deadline = time.monotonic() + WAIT_S
    while not (text := "".join(file.read_text() for file in running.directory.glob("samples-*.jsonl"))):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    sample = json.loads(text)
    assert (sample["kind"], sample["values"]["e2e_ns"], sample["tap"]) == ("span", 250_000_000, "tap")
    assert sample["facts"]["trace_id"] == record["trace_id"]
    assert sample["boot_id"] == record["boot_id"]


def test_ids_are_new_each_time() -> None:
    assert len({uuid4() for _ in range(1000)}) == len({trace_parent() for _ in range(1000)}) == 1000
    assert all(uuid.UUID(uuid4()).version == 4 for _ in range(100))
    assert {coin() for _ in range(100)} == {True, False}
