"""The simulator's own truth of each request, and the window in which its steps are slower."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from sim_server import ask, chat, connected, read_answer, request, running

from tapproxy.simulate.engine import Engine, EngineConfig, Sequence

MS = 1_000_000


def test_each_finished_request_is_a_line_with_the_models_own_times(tmp_path: Path) -> None:
    truth = tmp_path / "truth.jsonl"
    with running(truth=truth, frontend_us_per_token=1000.0) as port, connected(port) as sock:
        for _ in range(2):
            sock.sendall(request(chat(3)))
            read_answer(sock)
        ask(port, chat(2, stream=False))
    lines = [json.loads(line) for line in truth.read_text().splitlines()]
    assert [line["output_tokens"] for line in lines] == [3, 3, 2]
    for line in lines:
        assert line["response_id"].startswith("chatcmpl-")
        # A token is 1 ms in the frontend; nobody waits; 2 ms and something is the prefill, 3 ms each further token.
        assert line["queued_ns"] == line["prompt_tokens"] * MS
        assert line["scheduled_ns"] == line["queued_ns"]
        assert line["first_ns"] - line["scheduled_ns"] == 2 * MS + line["prompt_tokens"] * 50_000
        assert line["last_ns"] - line["first_ns"] == (line["output_tokens"] - 1) * 3 * MS
        assert line["preemptions"] == 0


def test_a_truth_that_cannot_be_written_is_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tapproxy.simulate", "--listen", "127.0.0.1:0", "--truth", "/nowhere/at/all"],
        capture_output=True, text=True, timeout=10, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "--truth /nowhere/at/all cannot be written: No such file or directory.\n"


def test_steps_in_the_slow_window_take_so_much_longer() -> None:
    config = EngineConfig(
        decode_base_ns=10 * MS,
        decode_per_seq_ns=0,
        prefill_overhead_ns=10 * MS,
        prefill_tokens_per_s=10**9,
        slow_after_ns=25 * MS,
        slow_for_ns=50 * MS,
        slow_percent=300,
    )
    engine = Engine(config)
    engine.add(Sequence(1, 8, 1000, 1000))
    now_ns, took_ms = 1000, []
    while (end_ns := engine.begin(now_ns)) is not None:
        engine.complete()
        took_ms.append((end_ns - now_ns) // MS)
        now_ns = end_ns
    assert took_ms == [10, 10, 10, 30, 30, 10, 10, 10]
