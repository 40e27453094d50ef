"""A real vLLM and its own benchmark, through a running tap: both tell of the same requests, and must agree.

    TAPPROXY_VLLM=DIR pytest -o addopts= -s tests/full/test_import_real.py

DIR holds ``venv`` (with a CPU build of vLLM) and ``model`` (a small one; random weights will do). Takes two minutes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from tapproxy.cli import run
from tests.harness import tap

HOME = Path(os.environ.get("TAPPROXY_VLLM", ""))
VLLM = HOME / "venv/bin/vllm"
pytestmark = pytest.mark.skipif(
    not os.environ.get("TAPPROXY_VLLM") or not VLLM.exists(),
    reason="needs a real vLLM: TAPPROXY_VLLM names a directory with venv/ and model/",
)
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
START_S = 300
REQUESTS = 200
AGREE_MS = 1.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    log = (tmp_path_factory.mktemp("vllm") / "vllm.log").open("w")
    words = [str(VLLM), "serve", str(HOME / "model"), "--served-model-name", "tiny", "--host", "127.0.0.1"]
    words += ["--port", str(port), "--max-model-len", "2048", "--max-num-seqs", "64", "--dtype", "bfloat16"]
    process = subprocess.Popen(
        [*words, "--enforce-eager"], stdout=log, stderr=log, env={**os.environ, **QUIET, **CPU}, start_new_session=True
    )
    try:
        deadline = time.monotonic() + START_S
        while True:
            assert process.poll() is None, f"vLLM ended: {log.name}"
            assert time.monotonic() < deadline, f"vLLM did not start: {log.name}"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                    break
            except OSError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
        log.close()


def bench(url: str, file: Path, api: str, requests: int, *more: str) -> None:
    backend, endpoint = {
        "chat": ("openai-chat", "/v1/chat/completions"),
        "completions": ("openai", "/v1/completions"),
    }[api]
    words = [str(VLLM), "bench", "serve", "--backend", backend, "--endpoint", endpoint, "--base-url", url]
    words += ["--model", "tiny", "--tokenizer", str(HOME / "model"), "--dataset-name", "random"]
    words += ["--random-input-len", "64", "--random-output-len", "48", "--num-prompts", str(requests), "--ignore-eos"]
    words += ["--save-result", "--save-detailed", "--result-dir", str(file.parent), "--result-filename", file.name]
    done = subprocess.run(
        [*words, *more], capture_output=True, text=True, env={**os.environ, **QUIET}, timeout=START_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_its_saved_numbers_agree_with_the_taps(api: str, engine: str, tmp_path: Path) -> None:
    file, out = tmp_path / "result.json", tmp_path / "import.json"
    with tap(tmp_path / "data", engine) as between:
        bench(between.url, tmp_path / "warm.json", api, 20, "--max-concurrency", "1")
        bench(between.url, file, api, REQUESTS, "--max-concurrency", "1", "--seed", "7")
    assert run(["import", str(file), "--data", str(tmp_path / "data"), "--json", str(out)]) == 0
    result: dict[str, Any] = orjson.loads(out.read_bytes())
    (seen,) = result["taps"].values()
    assert seen["joined"] == {"certain": REQUESTS, "likely": 0, "unsure": 0}
    summary = seen["summary"]
    # A busy machine voids records; of too few nothing can be said.
    assert summary["requests"] >= 20, f"only {summary['requests']} counted, {summary['void']} void"
    for metric in ("ttft_ms", "tpot_ms"):
        apart = summary[metric]["absolute_difference"]
        sys.stdout.write(f"\n{api}: {metric}: |client − tap| p50 {apart['p50']:.3f} p99 {apart['p99']:.3f} ms")
        sys.stdout.write(
            f" (as told p50 {summary[metric]['told']['p50']:.3f}, tap {summary[metric]['tap']['p50']:.3f})"
        )
        assert apart["p50"] <= AGREE_MS
    told = "ends at the role event" if api == "chat" else "counts no role event"
    assert any(told in each for each in result["observed"]), result["observed"]
