"""What a running tap does with one exchange: bytes unchanged, one record, the right end."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import DONE, SSE_HEAD, Peer, Tap, Upstream, answer, read_until, tap

REQUEST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: engine\r\nContent-Length: 2\r\n\r\n{}"
GET = b"GET /x HTTP/1.1\r\nHost: engine\r\n\r\n"


def serve_scripts(peer: Peer) -> None:
    """Answers by the request's path: what the engine of a test does."""
    while True:
        head, body = peer.request()
        path = head.split(b" ")[1].decode()
        SCRIPTS[re.split("[?#]", path)[0]](peer, head, body)


def echo(peer: Peer, head: bytes, body: bytes) -> None:
    text = head + body
    peer.send(b"HTTP/1.1 200 All Right\r\nX-A: 1\r\nx-a: 2\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text))


def three_events(peer: Peer, _head: bytes, _body: bytes) -> None:
    peer.send(SSE_HEAD)
    for text in (b"a", b"b", b"[DONE]"):
        peer.event(text)
        time.sleep(0.01)
    peer.send(DONE)


def close_delimited(peer: Peer, _head: bytes, _body: bytes) -> None:
    peer.send(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: a\n\n")
    time.sleep(0.02)
    peer.send(b"data: b\n\n")
    peer.sock.close()


def cut_after_event(peer: Peer, _head: bytes, _body: bytes) -> None:
    peer.send(SSE_HEAD)
    peer.event(b"a")
    time.sleep(0.02)
    peer.sock.close()


def cut_by_reset(peer: Peer, _head: bytes, _body: bytes) -> None:
    peer.send(SSE_HEAD)
    peer.event(b"a")
    time.sleep(0.05)
    peer.reset()


def short_body(peer: Peer, _head: bytes, _body: bytes) -> None:
    peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
    time.sleep(0.02)
    peer.sock.close()


def bad_chunk(peer: Peer, _head: bytes, _body: bytes) -> None:
    peer.send(SSE_HEAD)
    peer.event(b"a")
    time.sleep(0.02)
    peer.send(b"zz\r\nhello\r\n")
    peer.closed_within(5)


def no_answer(peer: Peer, _head: bytes, _body: bytes) -> None:
    peer.sock.close()


def garbage(peer: Peer, _head: bytes, _body: bytes) -> None:
    peer.send(b"SSH-2.0-OpenSSH_9.0\r\n")
    peer.closed_within(5)


def silent(peer: Peer, _head: bytes, _body: bytes) -> None:
    peer.closed_within(15)


def one_event_then_silent(peer: Peer, _head: bytes, _body: bytes) -> None:
    peer.send(SSE_HEAD)
    peer.event(b"a")
    peer.closed_within(15)


def no_content(peer: Peer, _head: bytes, _body: bytes) -> None:
    peer.send(b"HTTP/1.1 204 No Content\r\nX-A: 1\r\n\r\n")


def not_modified(peer: Peer, _head: bytes, _body: bytes) -> None:
    peer.send(b"HTTP/1.1 304 Not Modified\r\nContent-Length: 1234\r\n\r\n")


def hints(peer: Peer, _head: bytes, _body: bytes) -> None:
    peer.send(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")


def trailers(peer: Peer, _head: bytes, _body: bytes) -> None:
    peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;e=f\r\nok\r\n0\r\nX-T: v\r\n\r\n")


SCRIPTS = {
    "/v1/chat/completions": three_events,
    "/x": echo,
    "/close": close_delimited,
    "/cut": cut_after_event,
    "/reset": cut_by_reset,
    "/short": short_body,
    "/badchunk": bad_chunk,
    "/none": no_answer,
    "/garbage": garbage,
    "/silent": silent,
    "/stall": one_event_then_silent,
    "/204": no_content,
    "/304": not_modified,
    "/103": hints,
    "/trailers": trailers,
}


@pytest.fixture(scope="module")
def engine() -> Iterator[Upstream]:
    with Upstream(serve_scripts) as upstream:
        yield upstream
    assert not upstream.failures


@pytest.fixture(scope="module")
def shared(engine: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tap]:
    """One tap for the tests that need no settings; each tells its record by a path of its own where it can."""
    with tap(tmp_path_factory.mktemp("tap"), engine.url) as running:
        yield running


def shared_records(running: Tap) -> list[dict[str, Any]]:
    time.sleep(0.3)
    text = "".join(file.read_text() for file in running.directory.glob("records-*.jsonl"))
    return [json.loads(line) for line in text.splitlines()]


def exchange(running: Tap, request: bytes) -> bytes:
    with running.connect() as sock:
        sock.sendall(request)
        return answer(sock)


def closing(method: str, path: str, version: str = "1.1") -> bytes:
    return f"{method} {path} HTTP/{version}\r\nHost: engine\r\nConnection: close\r\n\r\n".encode()


def test_the_answer_is_the_engines_byte_for_byte(shared: Tap) -> None:
    with shared.connect() as sock:
        sock.sendall(REQUEST)
        got = read_until(sock, DONE)
    assert got == SSE_HEAD + b"9\r\ndata: a\n\n\r\n9\r\ndata: b\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def test_the_request_reaches_the_engine_as_sent_hop_fields_aside(shared: Tap) -> None:
    request = (
        b"POST /x?Q=%2f%7E HTTP/1.1\r\nhOST: engine\r\nX-Dup: 1\r\nAccept-Encoding:  br \r\nX-dup: 2\r\n"
        b"Connection: keep-alive, X-Hop\r\nX-Hop: secret\r\nUpgrade: h2c\r\nContent-Length: 3\r\n\r\nabc"
    )
    with shared.connect() as sock:
        sock.sendall(request)
        got = read_until(sock, b"abc")
    head, _, seen = got.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 All Right\r\nX-A: 1\r\nx-a: 2\r\n")
    assert seen == (
        b"POST /x?Q=%2f%7E HTTP/1.1\r\nhOST: engine\r\nX-Dup: 1\r\nAccept-Encoding:  br \r\nX-dup: 2\r\n"
        b"Content-Length: 3\r\n\r\nabc"
    )


def test_a_static_connection_upgrade_is_stripped_and_served(shared: Tap) -> None:
    got = exchange(shared, b"GET /x HTTP/1.1\r\nHost: e\r\nConnection: upgrade, close\r\n\r\n")
    assert b"200 All Right" in got
    assert b"pgrade" not in got


def test_websocket_is_refused_with_501_and_a_record(shared: Tap) -> None:
    got = exchange(shared, b"GET /ws HTTP/1.1\r\nHost: e\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 501 ")
    record = shared.record(path="/ws")
    assert (record["ended"], record["status"], record["method"]) == ("rejected", 501, "GET")
    assert record["downstream"]["head"] is not None


@pytest.mark.parametrize(
    ("request_bytes", "status", "path"),
    [
        pytest.param(b"CONNECT /connect HTTP/1.1\r\nHost: a\r\n\r\n", 501, "/connect", id="connect"),
        pytest.param(b"GET /badhead?key=1 HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n", 400, "/badhead", id="bad_header"),
    ],
)
def test_a_refused_request_is_recorded_with_what_its_first_line_said(
    shared: Tap, request_bytes: bytes, status: int, path: str
) -> None:
    assert exchange(shared, request_bytes).startswith(b"HTTP/1.1 %d " % status)
    record = shared.record(path=path)
    assert (record["ended"], record["status"], record["client_http"]) == ("rejected", status, "1.1")
    assert set(record["headers"].values()) == {None}
    assert "content-type" in record["headers"]


def test_a_client_that_leaves_within_its_head_leaves_a_record(shared: Tap) -> None:
    with shared.connect() as sock:
        sock.sendall(b"POST /halfhead HTTP/1.1\r\nHost: x\r\nConte")
        time.sleep(0.05)
    assert shared.record(path="/halfhead")["ended"] == "client_aborted"


def test_a_fragment_is_no_part_of_the_stored_path(shared: Tap) -> None:
    exchange(shared, closing("GET", "/x#secret"))
    assert all("secret" not in (record["path"] or "") for record in shared_records(shared))


def test_an_http10_request_stays_one_and_gets_the_engines_chunked_answer(shared: Tap) -> None:
    got = exchange(shared, b"GET /v1/chat/completions HTTP/1.0\r\nConnection: close\r\n\r\n")
    assert got.startswith(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n")
    assert got.endswith(DONE)
    assert exchange(shared, b"GET /x HTTP/1.0\r\n\r\n").endswith(b"GET /x HTTP/1.0\r\n\r\n")


def test_a_close_delimited_answer_stays_one(shared: Tap) -> None:
    with shared.connect() as sock:
        sock.sendall(b"GET /close HTTP/1.0\r\n\r\n")
        got = answer(sock)
    assert got.startswith(b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n")
    assert got.endswith(b"\r\n\r\ndata: a\n\ndata: b\n\n")
    record = shared.record(path="/close")
    assert (record["ended"], record["client_http"], len(record["events"]["kind"])) == ("complete", "1.0", 2)
    assert "client-http10" in record["findings"]


@pytest.mark.parametrize(
    ("path", "start"),
    [
        ("/204", b"HTTP/1.1 204 No Content\r\nX-A: 1\r\n"),
        ("/304", b"HTTP/1.1 304 Not Modified\r\nContent-Length: 1234\r\n"),
    ],
)
def test_answers_without_a_body_leave_the_connection_usable(shared: Tap, path: str, start: bytes) -> None:
    with shared.connect() as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nHost: e\r\n\r\n".encode())
        assert read_until(sock, b"\r\n\r\n").startswith(start)
        sock.sendall(GET)
        assert b"200 All Right" in read_until(sock, b"GET /x HTTP/1.1\r\nHost: engine\r\n\r\n")


def test_interim_answers_and_trailers_are_relayed(shared: Tap) -> None:
    assert exchange(shared, closing("GET", "/103")).startswith(
        b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 200 OK\r\n"
    )
    assert exchange(shared, closing("GET", "/trailers")).endswith(b"2;e=f\r\nok\r\n0\r\nX-T: v\r\n\r\n")


def test_keep_alive_works_on_both_sides(engine: Upstream, tmp_path: Path) -> None:
    with tap(tmp_path, engine.url) as running, running.connect() as sock:
        before = engine.connections
        for _ in range(3):
            sock.sendall(REQUEST)
            read_until(sock, DONE)
        assert engine.connections == before + 1
        assert [record["upstream"]["reused"] for record in running.records(3)] == [False, True, True]
        assert running.records(3)[1]["upstream"]["connect"] is None


def test_two_pipelined_requests_are_answered_in_order(shared: Tap) -> None:
    with shared.connect() as sock:
        sock.sendall(GET.replace(b"/x", b"/x?1") + closing("GET", "/x?2"))
        got = answer(sock)
    assert [match.group(1) for match in re.finditer(rb"GET /x\?(\d)", got)] == [b"1", b"2"]


CUTS = [
    pytest.param("/cut", "upstream_aborted", 200, id="closed_between_chunks"),
    pytest.param("/reset", "upstream_aborted", 200, id="reset"),
    pytest.param("/short", "upstream_aborted", 200, id="short_content_length"),
    pytest.param("/badchunk", "upstream_aborted", 200, id="broken_chunk"),
    pytest.param("/none", "upstream_malformed", 502, id="no_answer"),
    pytest.param("/garbage", "upstream_malformed", 502, id="not_http"),
]


@pytest.mark.parametrize(("path", "ended", "status"), CUTS)
def test_an_upstream_that_breaks_off_leaves_a_visible_end_and_one_record(
    shared: Tap, path: str, ended: str, status: int
) -> None:
    with shared.connect() as sock:
        sock.sendall(f"POST {path} HTTP/1.1\r\nHost: e\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        got = answer(sock) if status == 200 else read_until(sock, b"}}\n")
    assert got.startswith(b"HTTP/1.1 %d " % status)
    assert not got.endswith(DONE)
    if status == 502:
        assert b'"message":"tapproxy: ' in got
    record = shared.record(path=path)
    assert (record["ended"], record["status"]) == (ended, status)
    assert record["reason"]


def test_a_cut_answer_to_http10_ends_by_reset_after_what_was_sent(tmp_path: Path) -> None:
    def script(peer: Peer) -> None:
        peer.request()
        peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        peer.event(b"a")
        time.sleep(0.05)
        peer.sock.close()

    with Upstream(script) as upstream, tap(tmp_path, upstream.url, "--strict-http") as running:
        got = exchange(running, b"GET / HTTP/1.0\r\n\r\n")
        assert got.endswith(b"\r\n\r\ndata: a\n\n<RST>")
        assert b"ransfer-" not in got
        record = running.record()
        assert (record["ended"], record["altered"]) == ("upstream_aborted", ["strict-http"])


@pytest.mark.parametrize("by_reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("path", ["/silent", "/stall"], ids=["before_the_head", "between_events"])
def test_a_client_that_leaves_ends_the_upstream_at_once(
    engine: Upstream, tmp_path: Path, path: str, by_reset: bool
) -> None:
    closed: list[float | None] = []

    def script(peer: Peer) -> None:
        peer.request()
        if path == "/stall":
            peer.send(SSE_HEAD)
            peer.event(b"a")
        closed.append(peer.closed_within(10))

    with Upstream(script) as upstream, tap(tmp_path, upstream.url) as running:
        sock = running.connect()
        sock.sendall(REQUEST)
        if path == "/stall":
            read_until(sock, b"data: a\n\n\r\n")
        else:
            time.sleep(0.1)
        left_at = time.monotonic()
        if by_reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()
        record = running.record()
        assert record["ended"] == "client_aborted"
        # What went to the client before it left counts.
        assert record["downstream"]["bytes"] == (9 if path == "/stall" else 0)
        deadline = time.monotonic() + 5
        while not closed and time.monotonic() < deadline:
            time.sleep(0.005)
        assert closed
        assert closed[0] is not None
        assert time.monotonic() - left_at < 3


def test_a_client_that_leaves_in_its_upload_ends_the_upstream(tmp_path: Path) -> None:
    bodies: list[bytes] = []

    def script(peer: Peer) -> None:
        peer.head()
        try:
            while True:
                peer._fill()
        finally:
            bodies.append(peer.buffer)

    with Upstream(script) as upstream, tap(tmp_path, upstream.url) as running:
        sock = running.connect()
        sock.sendall(b"POST / HTTP/1.1\r\nHost: e\r\nContent-Length: 10\r\n\r\nhello")
        time.sleep(0.1)
        sock.close()
        record = running.record()
        assert (record["ended"], record["request"]["bytes"]) == ("client_aborted", 5)
        assert record["request"]["body_end"] is None


def test_an_upstream_that_is_down_is_a_502_with_a_sentence_and_the_tap_stays(tmp_path: Path) -> None:
    upstream = Upstream(serve_scripts)
    with upstream:
        pass  # takes a port and gives it back
    with tap(tmp_path, upstream.url) as running:
        got = exchange(running, closing("GET", "/x"))
        assert got.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")
        assert f"cannot connect to 127.0.0.1:{upstream.port}: Connection refused; is the engine up?".encode() in got
        assert running.admin_get("/readyz") == "ready\n"
        with upstream:
            assert b"200 All Right" in exchange(running, closing("GET", "/x"))
        assert [record["ended"] for record in running.records(2)] == ["upstream_unreachable", "complete"]


@pytest.mark.parametrize(
    ("flag", "path", "start"),
    [
        pytest.param("--head-timeout", "/silent", b"HTTP/1.1 504 ", id="head"),
        pytest.param("--idle-timeout", "/stall", b"HTTP/1.1 200 ", id="idle"),
    ],
)
def test_a_configured_limit_ends_the_exchange(
    engine: Upstream, tmp_path: Path, flag: str, path: str, start: bytes
) -> None:
    with tap(tmp_path, engine.url, flag, "300ms") as running:
        got = exchange(running, closing("GET", path))
        assert got.startswith(start)
        assert running.record()["ended"] == "timeout"


def test_the_first_signal_lets_streams_finish_and_the_second_cuts_them(engine: Upstream, tmp_path: Path) -> None:
    with tap(tmp_path / "a", engine.url) as running, running.connect() as sock:
        sock.sendall(REQUEST)
        read_until(sock, b"data: a\n\n\r\n")
        running.process.send_signal(signal.SIGTERM)
        assert answer(sock).endswith(DONE)
        assert running.process.wait(10) == 0
        assert running.record()["ended"] == "complete"
    with tap(tmp_path / "b", engine.url) as running, running.connect() as sock:
        sock.sendall(closing("GET", "/stall"))
        read_until(sock, b"data: a\n\n\r\n")
        running.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        with pytest.raises(OSError, match="refused"):
            running.connect()
        running.process.send_signal(signal.SIGTERM)
        assert not answer(sock).endswith(DONE)
        assert running.process.wait(10) == 0
        record = running.record()
        assert (record["ended"], record["downstream"]["bytes"]) == ("shutdown", 9)
    with tap(tmp_path / "c", engine.url) as running, running.connect() as sock:
        sock.sendall(closing("GET", "/silent"))
        time.sleep(0.2)
        running.process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        running.process.send_signal(signal.SIGINT)
        assert answer(sock).startswith(b"HTTP/1.1 503 ")
        assert running.process.wait(10) == 130
        assert running.record()["ended"] == "shutdown"


def test_sent_is_when_the_kernel_took_it_even_for_a_client_that_does_not_read(tmp_path: Path) -> None:
    """8 MB to a client that reads nothing for a while: stalled time is counted, stamps keep their order."""
    event = b"x" * 8000

    def script(peer: Peer) -> None:
        peer.request()
        peer.send(SSE_HEAD)
        for _ in range(1000):
            peer.event(event)
        peer.send(DONE)

    with Upstream(script) as upstream, tap(tmp_path, upstream.url) as running:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            sock.connect(running.data)
            sock.sendall(REQUEST)
            time.sleep(0.5)
            got = b""
            while not got.endswith(DONE):
                got = got[-8:] + sock.recv(1 << 20)
        record = running.record()
        assert record["ended"] == "complete"
        assert record["downstream"]["stalled_ns"] > 200_000_000
        assert record["downstream"]["unsent_max_bytes"] > 0
        assert "slow-reader" in record["findings"]
        events = record["events"]
        assert len(events["sent"]) == 1000
        assert all(read <= sent for read, sent in zip(events["read_at"], events["sent"], strict=True))
        assert events["sent"] == sorted(events["sent"])


def test_a_mirrored_connection_belongs_to_one_client(engine: Upstream, tmp_path: Path) -> None:
    with tap(tmp_path, engine.url, "--mirror-connections") as running:
        before = engine.connections
        with running.connect() as one, running.connect() as other:
            for sock in (one, other, one):
                sock.sendall(REQUEST)
                read_until(sock, DONE)
        assert engine.connections == before + 2
        assert [record["upstream"]["reused"] for record in running.records(3)] == [False, False, True]
        assert running.records(3)[0]["altered"] == ["mirror-connections"]


def test_a_post_is_never_sent_twice_and_a_get_once_more(tmp_path: Path) -> None:
    """The engine closes a kept-alive connection on its second request, as vLLM does after five idle seconds."""
    seen: list[bytes] = []

    def script(peer: Peer) -> None:
        head, _ = peer.request()
        seen.append(head.split(b" ")[0])
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        head, _ = peer.request()
        seen.append(head.split(b" ")[0])

    with Upstream(script) as upstream, tap(tmp_path, upstream.url) as running, running.connect() as sock:
        sock.sendall(REQUEST)
        read_until(sock, b"ok")
        sock.sendall(REQUEST)
        assert read_until(sock, b"\r\n\r\n").startswith(b"HTTP/1.1 502 ")
        assert seen == [b"POST", b"POST"]
        read_until(sock, b"}}\n")
        sock.sendall(GET)
        read_until(sock, b"ok")
        sock.sendall(GET)
        read_until(sock, b"ok")
        assert seen == [b"POST", b"POST", b"GET", b"GET", b"GET"]
        assert len(running.records(4)) == 4


def test_a_name_that_does_not_resolve_is_said_in_words(tmp_path: Path) -> None:
    with tap(tmp_path, "http://no-such-host.invalid:8000") as running:
        got = exchange(running, closing("GET", "/x"))
        assert b"cannot connect to no-such-host.invalid:8000: " in got
        assert b"Unknown error" not in got


def test_a_dead_unix_socket_is_named(tmp_path: Path) -> None:
    with tap(tmp_path / "data", f"unix:{tmp_path}/none.sock") as running:
        got = exchange(running, closing("GET", "/x"))
        assert f"cannot connect to unix:{tmp_path}/none.sock: No such file or directory".encode() in got


def test_a_record_says_how_its_connection_was_used_and_what_only_a_proxy_writes(
    engine: Upstream, tmp_path: Path
) -> None:
    with tap(tmp_path, engine.url) as running:
        with running.connect() as sock:
            sock.sendall(GET)
            read_until(sock, b"200 All Right")
            time.sleep(0.1)
            sock.sendall(b"GET /x HTTP/1.1\r\nHost: e\r\nX-Forwarded-For: 10.9.8.7\r\nConnection: close\r\n\r\n")
            answer(sock)
        first, second = sorted(shared_records(running), key=lambda record: record["t0_mono_ns"])
    assert [each["request"]["connection_requests"] for each in (first, second)] == [1, 2]
    assert [each["request"]["keep_alive"] for each in (first, second)] == [True, False]
    assert [each["request"]["proxy_marks"] for each in (first, second)] == [[], ["x-forwarded-for"]]
    assert "10.9.8.7" not in json.dumps(second)
    # The kernel counts for the connection; each exchange has its own.
    assert first["downstream"]["segments"] >= 1
    assert first["downstream"]["segments"] + second["downstream"]["segments"] <= 8
    assert (second["downstream"]["retransmits"], second["upstream"]["disordered"]) == (0, 0)
    assert second["upstream"]["segments"] >= 1
