"""vLLM's habits on the wire, seen by a raw socket."""

from __future__ import annotations

import json
import re
import time

import pytest
from sim_server import (
    ask,
    blocks,
    chat,
    connected,
    events,
    metric,
    read_all,
    read_answer,
    read_until,
    request,
    running,
    wait_for,
)

DATE = rb"date: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT\r\n"
STREAM_HEAD = (
    rb"HTTP/1\.1 200 OK\r\n" + DATE + rb"server: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    rb"vary: Origin\r\n%btransfer-encoding: chunked"
)
CHUNK_HEAD = r'data: {"id":"chatcmpl-[0-9a-f]{16}","object":"chat.completion.chunk","created":\d{10},"model":"sim",'


@pytest.fixture(scope="module")
def port() -> int:
    with running() as number:
        yield number


def test_the_head_comes_at_once_and_before_the_prefill(port: int) -> None:
    with connected(port) as sock:
        sock.sendall(request(chat(1), "X-Sim-Ttft-Us: 60000"))
        start = time.monotonic()
        head = sock.recv(65536)
        assert re.fullmatch(STREAM_HEAD % b"" + rb"\r\n\r\n", head)
        headed = time.monotonic() - start
        assert sock.recv(65536).startswith(b"100\r\ndata: ")
        assert headed < 0.03 < time.monotonic() - start


def test_each_event_is_one_chunk_and_one_write(port: int) -> None:
    with connected(port) as sock:
        sock.sendall(request(chat(6), "X-Sim-Itl-Us: 15000", "X-Sim-Ttft-Us: 15000"))
        reads = []
        while not reads or not reads[-1].endswith(b"0\r\n\r\n"):
            reads.append(sock.recv(65536))
    # The head; role and first token close together; four tokens; the last with what follows it at once.
    tokens = [
        read for read in reads if read.count(b"data: ") == 1 and b'"finish_reason":null' in read and b"role" not in read
    ]
    assert len(tokens) >= 4
    for read in tokens:
        size, _, rest = read.partition(b"\r\n")
        assert len(rest) == int(size, 16) + 2
    chunk = rb"[0-9a-f]+\r\ndata: (?:\{.*\}|\[DONE\])\n\n\r\n"
    assert re.fullmatch(rb"(?:%b){8}0\r\n\r\n" % chunk, b"".join(reads).partition(b"\r\n\r\n")[2])


def test_the_events_of_a_chat_are_spelled_as_vllm_does(port: int) -> None:
    _, body = ask(port, chat(2))
    said = [b"data: " + block for block in blocks(body)]
    choice = r'"choices":\[{"index":0,"delta":{%s},"logprobs":null,"finish_reason":%s}\]'
    word = r'"content":"[^"]+"'
    role = choice % ('"role":"assistant","content":""', "null") + ',"prompt_token_ids":null,"prompt_text":null}'
    token = choice % (word, 'null,"token_ids":null') + "}"
    last = choice % (word, '"length","stop_reason":null,"token_ids":null') + ',"system_fingerprint":"[^"]+"}'
    for found, expected in zip(said, (role, token, last), strict=False):
        assert re.fullmatch(CHUNK_HEAD + expected, found.decode())
    assert said[3:] == [b"data: [DONE]"]


def test_usage_comes_in_an_event_of_its_own_and_carries_the_fingerprint(port: int) -> None:
    _, body = ask(port, chat(2, stream_options={"include_usage": True}))
    said = events(body)
    assert said[-1]["choices"] == []
    assert said[-1]["usage"] == {"prompt_tokens": 6, "total_tokens": 8, "completion_tokens": 2}
    assert [("system_fingerprint" in event) for event in said] == [False, False, False, True]


def test_continuous_usage_counts_up_with_every_event(port: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    _, body = ask(port, chat(3, stream_options=options))
    assert [event["usage"]["completion_tokens"] for event in events(body)] == [0, 1, 2, 3, 3]


def test_an_answer_that_ends_by_itself_ends_in_an_empty_event_that_is_a_token(port: int) -> None:
    _, body = ask(port, chat(500, ignore_eos=False, stream_options={"include_usage": True}), "X-Sim-Itl-Us: 0")
    said = events(body)
    assert said[-2]["choices"][0] == {
        **{"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": "stop"},
        **{"stop_reason": None, "token_ids": None},
    }
    assert said[-1]["usage"]["completion_tokens"] == 128 == len(said) - 2  # less role and usage


def test_two_choices_have_their_roles_first(port: int) -> None:
    _, body = ask(port, chat(3, n=2, stream_options={"include_usage": True}))
    said = events(body)
    indices = [event["choices"][0]["index"] for event in said[:-1]]
    assert indices == [0, 1] * 4
    assert [("role" in event["choices"][0]["delta"]) for event in said[:3]] == [True, True, False]
    assert said[-1]["usage"]["completion_tokens"] == 6


def test_completions_have_no_role_and_one_choice_for_each_prompt(port: int) -> None:
    body = {"prompt": ["one two", "three"], "stream": True, "max_tokens": 2, "ignore_eos": True}
    _, answer = ask(port, body, target="/v1/completions")
    said = events(answer)
    assert [event["choices"][0]["index"] for event in said] == [0, 1, 0, 1]
    assert all(event["id"].startswith("cmpl-") and event["object"] == "text_completion" for event in said)
    assert list(said[0]["choices"][0]) == [
        *("index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids")
    ]


@pytest.mark.parametrize(
    ("chat_api", "path"), [(True, "chat/completions"), (False, "completions")], ids=["chat", "completions"]
)
def test_logprobs_name_every_token(port: int, chat_api: bool, path: str) -> None:
    body = chat(2, logprobs=True) if chat_api else {"prompt": "a", "stream": True, "max_tokens": 2, "logprobs": 1}
    _, answer = ask(port, body, target=f"/v1/{path}")
    choice = events(answer)[-1]["choices"][0]
    if chat_api:
        assert [one["token"] for one in choice["logprobs"]["content"]] == [choice["delta"]["content"]]
    else:
        assert choice["logprobs"]["tokens"] == [choice["text"]]


def test_http10_is_answered_chunked_and_the_connection_closed(port: int) -> None:
    with connected(port) as sock:
        sock.sendall(request(chat(2), version="1.0"))
        answer = read_all(sock)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert re.fullmatch(STREAM_HEAD % rb"connection: close\r\n", head)
    assert body.endswith(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


def test_http10_can_be_answered_until_close() -> None:
    with running(http10="close") as port:
        with connected(port) as sock:
            sock.sendall(request(chat(2), version="1.0"))
            answer = read_all(sock)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert head.endswith(b"connection: close")
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")
        head, _ = ask(port, chat(2))  # HTTP/1.1 as ever
        assert b"transfer-encoding: chunked" in head


def test_a_connection_serves_many_requests_and_closes_when_asked(port: int) -> None:
    with connected(port) as sock:
        for _ in range(2):
            sock.sendall(request(chat(1)))
            assert b"connection" not in read_answer(sock)[0]
        sock.sendall(request(chat(1), "Connection: close"))
        answer = read_all(sock)
    assert b"\r\nconnection: close\r\ntransfer-encoding: chunked\r\n" in answer


def test_pipelined_requests_are_answered_in_order(port: int) -> None:
    with connected(port) as sock:
        sock.sendall(request(chat(2), "X-Request-Id: a") + request(chat(2), "X-Request-Id: b", "Connection: close"))
        answer = read_all(sock)
    assert re.findall(rb'"id":"chatcmpl-(.)"', answer) == [b"a"] * 3 + [b"b"] * 3


def test_an_idle_connection_is_closed_after_the_timeout() -> None:
    with running(keep_alive_timeout_s=0.05) as port, connected(port) as sock:
        sock.sendall(request(chat(1)))
        read_answer(sock)
        start = time.monotonic()
        assert sock.recv(1) == b""
        assert 0.03 < time.monotonic() - start < 2


def test_request_bodies_may_be_chunked_and_wait_for_continue(port: int) -> None:
    data = json.dumps(chat(1)).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"expect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n"
    )
    with connected(port) as sock:
        sock.sendall(head)
        assert sock.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        for part in (b"5\r\n", data[:5], b"\r\n%x;ext=1\r\n" % (len(data) - 5), data[5:] + b"\r\n0\r\n", b"\r\n"):
            sock.sendall(part)
        assert read_answer(sock)[0].startswith(b"HTTP/1.1 200 OK")


def test_optional_header_fields_are_sent() -> None:
    with running(x_accel_buffering="no", request_id_headers=True) as port:
        head, body = ask(port, chat(1), "X-Request-Id: my-0001")
        assert b"\r\nx-request-id: my-0001\r\nx-accel-buffering: no\r\n" in head
        assert events(body)[0]["id"] == "chatcmpl-my-0001"
        head, _ = ask(port, None, target="/health", method="GET")
        assert re.search(rb"x-request-id: [0-9a-f]{32}\r\n", head)


def test_a_client_that_leaves_is_aborted_in_the_engine_at_once() -> None:
    with running() as port:
        with connected(port) as sock:
            sock.sendall(request(chat(2000)))
            read_until(sock, b"\n\n\r\n")
            assert metric(port, "vllm:num_requests_running") == 1
            assert metric(port, "vllm:kv_cache_usage_perc") > 0
        wait_for(lambda: metric(port, "vllm:num_requests_running") == 0, 0.5)
        assert metric(port, "vllm:kv_cache_usage_perc") == 0
        assert metric(port, 'vllm:request_success_total{engine="0",finished_reason="abort"') == 1


def test_a_client_that_stops_reading_delays_nobody_else_and_gets_everything(port: int) -> None:
    with connected(port) as slow:
        slow.sendall(request(chat(1000), "X-Sim-Event-Bytes: 8000", "X-Sim-Itl-Us: 10"))
        start = time.monotonic()
        ask(port, chat(2))
        assert time.monotonic() - start < 1
        _, body = read_answer(slow)
    assert len(events(body)) == 1001


def test_events_are_padded_to_the_size_asked_for(port: int) -> None:
    _, body = ask(port, chat(3), "X-Sim-Event-Bytes: 1000")
    sizes = [len(b"data: " + block + b"\n\n") for block in blocks(body)]
    assert sizes[1:4] == [1000, 1000, 1000]


def test_a_bundle_is_the_first_token_and_then_so_many_per_event() -> None:
    with running(bundle=4) as port:
        options = {"include_usage": True, "continuous_usage_stats": True}
        _, body = ask(port, chat(10, stream_options=options, logprobs=True))
        said = events(body)
        assert [event["usage"]["completion_tokens"] for event in said] == [0, 1, 5, 9, 10, 10]
        assert [len(event["choices"][0]["logprobs"]["content"]) for event in said[1:-1]] == [1, 4, 4, 1]


def test_a_synthetic_stream_comes_in_one_go_at_the_end() -> None:
    with running(synthetic_stream=True, itl_us=10_000, ttft_us=10_000) as port:
        _, body = ask(port, chat(6), "X-Sim-Stamps: 1")
        sent = [event["sim_sent_ns"] for event in events(body)]
        assert len(sent) == 7
        assert sent[-1] - sent[0] < 10_000_000


def test_reasoning_comes_before_the_visible_text(port: int) -> None:
    _, body = ask(port, chat(4), "X-Sim-Reasoning-Tokens: 2")
    channels = [next(iter(event["choices"][0]["delta"])) for event in events(body)]
    assert channels == ["role", "reasoning", "reasoning", "content", "content"]


def test_the_text_is_the_seeds_and_never_the_prompts() -> None:
    def text(seed: int, prompt: str) -> str:
        with running(seed=seed) as port:
            body = chat(12, messages=[{"role": "user", "content": prompt}])
            _, answer = ask(port, body)
            return "".join(event["choices"][0]["delta"].get("content", "") for event in events(answer))

    assert text(1, "Zanzibar") == text(1, "Timbuktu")
    assert text(1, "Zanzibar") != text(2, "Zanzibar")
    assert "Zanzibar" not in text(1, "Zanzibar")


def test_stamps_grow_and_lie_before_the_arrival(port: int) -> None:
    with connected(port) as sock:
        before = time.monotonic_ns()
        sock.sendall(request(chat(5, stream_options={"include_usage": True}), "X-Sim-Stamps: 1"))
        seen: list[tuple[int, int]] = []
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(65536)
            after = time.monotonic_ns()
            seen += [(int(x), after) for x in re.findall(rb'"sim_sent_ns":(\d+)\}\n\n', data)[len(seen) :]]
    stamps = [stamp for stamp, _ in seen]
    assert len(stamps) == 7  # role, five tokens, usage; [DONE] has none
    assert stamps == sorted(stamps)
    assert all(before < stamp < arrived for stamp, arrived in seen)
    assert [event["sim_sent_ns"] for event in events(data)] == stamps


def test_a_fixed_schedule_is_kept_to_the_millisecond(port: int) -> None:
    _, body = ask(port, chat(11), "X-Sim-Stamps: 1", "X-Sim-Itl-Us: 8300", "X-Sim-Ttft-Us: 20500")
    sent = [event["sim_sent_ns"] for event in events(body)[1:]]
    # From first to last: a single late wake-up on a busy machine shifts no other token.
    late = [(stamp - sent[0]) - i * 8_300_000 for i, stamp in enumerate(sent)]
    assert sorted(abs(one) for one in late)[5] < 1_500_000


def test_x_sim_tokens_wins_over_the_body(port: int) -> None:
    _, body = ask(port, chat(50, stream_options={"include_usage": True}), "X-Sim-Tokens: 4")
    assert events(body)[-1]["usage"]["completion_tokens"] == 4


def test_per_request_metrics_are_the_models_own_times() -> None:
    with running(per_request_metrics=True, prefill_tokens_per_s=1000, max_num_seqs=1) as port:
        options = {"include_usage": True}
        with connected(port) as first:
            first.sendall(request(chat(5)))
            read_until(first, b"\n\n\r\n")  # the engine is busy: three tokens of 3 ms to go, at least
            _, body = ask(port, chat(3, stream_options=options))
        found = events(body)[-1]["metrics"]
        assert found["time_to_first_token_ms"] == 8.0  # 2 + 6 × 1: the prefill only
        assert found["generation_time_ms"] == 6.0
        assert found["mean_itl_ms"] == 3.0
        assert found["tokens_per_second"] == pytest.approx(3 / 0.014)
        assert 0 < found["queue_time_ms"] <= 12
        _, answer = ask(port, chat(1, stream=False))
        metrics = json.loads(answer)["metrics"]
        assert (metrics["mean_itl_ms"], metrics["speculative_decoding"]) == (None, None)


def test_an_answer_that_is_not_streamed_is_one_body(port: int) -> None:
    head, body = ask(port, chat(3, stream=False))
    assert re.fullmatch(
        rb"HTTP/1\.1 200 OK\r\n" + DATE + rb"server: uvicorn\r\ncontent-length: \d+\r\n"
        rb"content-type: application/json\r\nvary: Origin",
        head,
    )
    document = json.loads(body)
    assert document["usage"]["completion_tokens"] == 3
    assert document["choices"][0]["finish_reason"] == "length"
    assert list(document) == [
        *("id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage"),
        *("prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params", "ec_transfer_params", "metrics"),
    ]
