"""A replay's bytes on the wire are the file's bytes, with the file's own framing as writes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from sim_server import connected, read_all, read_until, request, running

from tapproxy.simulate.app import load_recording
from tapproxy.simulate.config import SimConfig, SimConfigError
from tapproxy.simulate.replay import read_recording

DATA = Path(__file__).parent.parent / "data" / "simulate"
STREAM = (DATA / "vllm-0.32-chat_stream_usage.http").read_bytes()
PLAIN = (DATA / "vllm-0.32-chat_nonstream.http").read_bytes()
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"

CASES = [
    pytest.param(STREAM, 13, True, id="a stream: head, eleven events, the terminator"),
    pytest.param(PLAIN, 2, True, id="content-length"),
    pytest.param(STREAM[:-5], 12, False, id="no terminator"),
    pytest.param(STREAM[:-100], 11, False, id="cut within a chunk"),
    pytest.param(PLAIN[:-9], 2, False, id="shorter than its length"),
    pytest.param(HEAD + b"3\r\nabc\r\n0\r\nx-trailer: 1\r\n\r\n", 3, True, id="trailers"),
    pytest.param(HEAD + b"3\r\nabc\r\nzz\r\n", 3, False, id="framing that breaks"),
    pytest.param(HEAD + b"0\r\n\r\n\n", 3, False, id="a byte too many"),
    pytest.param(b"HTTP/1.1 200 OK\r\n\r\ndata: x\n\n", 2, False, id="until close"),
    pytest.param(b"HTTP/1.1 204 No Content\r\n\r\n", 1, True, id="no body"),
    pytest.param(b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN, 2, True, id="an interim head before"),
    pytest.param(b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nhi", 2, False, id="HTTP/1.0"),
    pytest.param(b"HTTP/1.1 200 OK\r\nConnection: close\r\ncontent-length: 2\r\n\r\nhi", 2, False, id="close"),
]  # fmt: skip


@pytest.mark.parametrize(("data", "writes", "complete"), CASES)
def test_a_recording_is_cut_into_the_files_own_chunks(data: bytes, writes: int, complete: bool) -> None:
    recording = read_recording(data)
    assert b"".join(recording.writes) == data
    assert (len(recording.writes), recording.complete) == (writes, complete)


@pytest.mark.parametrize("data", [b"", b"hello", b"HTTP/1.1 200 OK\r\n", b"GET / HTTP/1.1\r\n\r\n"])
def test_what_is_no_answer_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no HTTP/1 response head"):
        read_recording(data)
    file = tmp_path / "x.http"
    file.write_bytes(data)
    with pytest.raises(SimConfigError, match="cannot be served"):
        load_recording(SimConfig(replay=file))


def serve(tmp_path: Path, data: bytes, **changes: Any) -> Any:
    file = tmp_path / "x.http"
    file.write_bytes(data)
    return running(replay=file, **changes)


@pytest.mark.parametrize(("data", "writes", "complete"), CASES)
def test_the_bytes_on_the_wire_are_the_files(data: bytes, writes: int, complete: bool, tmp_path: Path) -> None:
    with serve(tmp_path, data, replay_gap_us=0) as port, connected(port) as sock:
        sock.sendall(request(target="/anything", method="GET"))
        if not complete:
            assert read_all(sock) == data
            return
        for _ in range(2):  # the connection is good for another one
            got = b""
            while len(got) < len(data):
                got += sock.recv(65536)
            assert got == data
            sock.sendall(request(target="/again"))


def test_each_chunk_is_a_write_and_the_gap_lies_between_them(tmp_path: Path) -> None:
    with serve(tmp_path, STREAM, replay_gap_us=10_000) as port, connected(port) as sock:
        start = time.monotonic()
        sock.sendall(request())
        reads = []
        while not reads or not b"".join(reads).endswith(b"\r\n0\r\n\r\n"):
            reads.append(sock.recv(65536))
        assert time.monotonic() - start >= 0.12
    assert b"".join(reads) == STREAM
    assert len(reads) >= 12  # a busy machine may merge a pair


def test_a_client_that_asks_to_close_is_closed(tmp_path: Path) -> None:
    with serve(tmp_path, STREAM, replay_gap_us=0) as port, connected(port) as sock:
        sock.sendall(request({}, "Connection: close"))
        assert read_all(sock) == STREAM


def test_a_client_that_leaves_ends_the_replay(tmp_path: Path) -> None:
    with serve(tmp_path, STREAM, replay_gap_us=20_000) as port:
        with connected(port) as sock:
            sock.sendall(request())
            read_until(sock, b"\n\n\r\n")
        with connected(port) as sock:
            sock.sendall(request())
            assert sock.recv(10) == STREAM[:10]
