"""Injected faults, counted in events of the answer."""

from __future__ import annotations

import itertools
import socket
import time

import pytest
from sim_server import ask, blocks, chat, connected, events, metric, read_all, read_answer, request, running

from tapproxy.simulate.faults import Fault, parse_fault


@pytest.fixture(scope="module")
def port() -> int:
    with running() as number:
        yield number


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("reset-after=0", Fault("reset-after", 0)),
        ("close-after=12", Fault("close-after", 12)),
        ("stall-after=3:0.5", Fault("stall-after", 3, 500_000_000)),
        ("error-event-after=2", Fault("error-event-after", 2)),
        ("status=503", Fault("status", 503)),
    ],
)
def test_a_fault_is_read(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    "text",
    ["", "reset-after", "reset-after=x", "reset-after=1:2", "stall-after=1", "stall-after=1:x", "stall-after=1:-1",
     "stall-after=1:inf", "status=200", "explode=1"],
)  # fmt: skip
def test_a_fault_that_cannot_be_says_what_can(text: str) -> None:
    with pytest.raises(ValueError, match=r"found .*"):
        parse_fault(text)


def test_close_after_ends_without_the_terminator(port: int) -> None:
    with connected(port) as sock:
        sock.sendall(request(chat(50), "X-Sim-Fault: close-after=3"))
        answer = read_all(sock)
    assert len(events(answer)) == 3
    assert answer.endswith(b"}\n\n\r\n")
    assert metric(port, "vllm:num_requests_running") == 0


def test_close_after_nothing_leaves_the_head_alone(port: int) -> None:
    with connected(port) as sock:
        sock.sendall(request(chat(50), "X-Sim-Fault: close-after=0"))
        assert read_all(sock).endswith(b"chunked\r\n\r\n")


def test_reset_after_is_a_reset(port: int) -> None:
    data = b""
    with connected(port) as sock:
        sock.sendall(request(chat(50), "X-Sim-Fault: reset-after=4"))
        try:
            while more := sock.recv(65536):
                data += more
            raise AssertionError("it was closed, not reset")
        except ConnectionResetError:
            pass
    assert len(events(data)) == 4


def test_a_reset_before_an_answer_that_is_not_streamed(port: int) -> None:
    with connected(port) as sock:
        sock.sendall(request(chat(2, stream=False), "X-Sim-Fault: reset-after=0"))
        with pytest.raises(ConnectionResetError):
            sock.recv(1)


def test_a_body_that_is_cut_is_shorter_than_its_length(port: int) -> None:
    with connected(port) as sock:
        sock.sendall(request(chat(2, stream=False), "X-Sim-Fault: close-after=0"))
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(body) not in head
    assert body.startswith(b'{"id"')


@pytest.mark.parametrize("schedule", [[], ["X-Sim-Itl-Us: 3000", "X-Sim-Ttft-Us: 3000"]], ids=["model", "fixed"])
def test_a_stall_is_one_gap_with_an_even_pace_after_it(port: int, schedule: list[str]) -> None:
    _, body = ask(port, chat(8), "X-Sim-Stamps: 1", "X-Sim-Fault: stall-after=4:0.2", *schedule)
    sent = [event["sim_sent_ns"] for event in events(body)]
    gaps_ms = [(b - a) / 1e6 for a, b in itertools.pairwise(sent)]
    assert len(sent) == 9
    assert 200 <= gaps_ms[3] < 260  # after the fourth event, the third token
    assert sorted(gaps_ms[4:])[2] == pytest.approx(3, abs=2)  # no burst: the engine stood still


def test_a_stall_between_the_role_and_the_first_token(port: int) -> None:
    _, body = ask(port, chat(3), "X-Sim-Stamps: 1", "X-Sim-Fault: stall-after=1:0.1")
    sent = [event["sim_sent_ns"] for event in events(body)]
    assert len(sent) == 4
    assert 100e6 <= sent[1] - sent[0] < 160e6


def test_a_stall_of_an_answer_that_is_not_streamed_delays_it(port: int) -> None:
    start = time.monotonic()
    ask(port, chat(1, stream=False), "X-Sim-Fault: stall-after=1:0.1")
    assert time.monotonic() - start > 0.1


def test_an_error_event_is_followed_by_done_as_in_vllm(port: int) -> None:
    _, body = ask(port, chat(50), "X-Sim-Fault: error-event-after=3")
    said = blocks(body)
    assert len(said) == 5
    assert said[3] == (
        b'{"error": {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause.",'
        b' "type": "InternalServerError", "param": null, "code": 500}}'
    )
    assert said[4] == b"[DONE]"
    assert metric(port, 'vllm:request_success_total{engine="0",finished_reason="error"') == 1


def test_an_error_of_an_answer_that_is_not_streamed_is_a_500(port: int) -> None:
    head, _ = ask(port, chat(1, stream=False), "X-Sim-Fault: error-event-after=0")
    assert head.startswith(b"HTTP/1.1 500 Internal Server Error")


def test_a_fault_of_the_configuration_is_overridden_by_the_header() -> None:
    with running(fault="status=429") as port:
        assert ask(port, chat(1))[0].startswith(b"HTTP/1.1 429 Too Many Requests")
        head, _ = ask(port, chat(1), "X-Sim-Fault: error-event-after=99")
        assert head.startswith(b"HTTP/1.1 200")


def test_a_client_that_leaves_in_a_stall_is_forgotten(port: int) -> None:
    with connected(port) as sock:
        sock.sendall(request(chat(50), "X-Sim-Fault: stall-after=2:0.05"))
        sock.recv(65536)
        sock.shutdown(socket.SHUT_WR)
        read_all(sock)
    time.sleep(0.08)
    with connected(port) as sock:
        sock.sendall(request(chat(1)))
        assert read_answer(sock)[0].startswith(b"HTTP/1.1 200")
