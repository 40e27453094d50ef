"""A real vLLM, loaded, misconfigured and killed, behind a tap: each trial's verdict, beside what vLLM itself tells.

    TAPPROXY_VLLM=DIR pytest -o addopts= -s tests/full/test_diagnose_vllm.py

DIR holds ``venv`` (with a CPU build of vLLM) and ``model`` (a small one; random weights will do). Each trial starts its
own engine: some ten minutes in all. Two cores are few for an engine, its API process, a tap and a load: records of a
moment when the tap itself had to wait are void, and too many of them skip a trial, since nothing was measured.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from tapproxy.cli import run
from tests.harness import Tap, tap

HOME = Path(os.environ.get("TAPPROXY_VLLM", ""))
VLLM = HOME / "venv/bin/vllm"
pytestmark = pytest.mark.skipif(
    not os.environ.get("TAPPROXY_VLLM") or not VLLM.exists(),
    reason="needs a real vLLM: TAPPROXY_VLLM names a directory with venv/ and model/",
)
QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
START_S = 300
REQUEST_S = 120
# What the budget may leave unexplained at P50 where the engine tells its parts.
UNEXPLAINED_SHARE, UNEXPLAINED_MS = 0.03, 2.0
WORDS = ("alpha", "bravo", "carbon", "delta", "ember", "fjord", "granite", "harbor", "indigo", "jasper")


@dataclass
class Engine:
    """A running vLLM. ``log``: what it wrote since it started."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def sums(self) -> dict[str, float]:
        """The page's sums and counts of queue, prefill and generation, by name."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found = re.findall(r"^vllm:(\w+_(?:sum|count|total))\{[^}]*\} (\S+)$", text, re.M)
        out: dict[str, float] = {}
        for name, value in found:
            out[name] = out.get(name, 0.0) + float(value)
        return out

    def core(self) -> int:
        """The process that computes, a child of the API process."""
        told = re.findall(r"\(EngineCore\w* pid=(\d+)\)", self.log.read_text())
        return int(told[-1])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def cores_apart() -> Iterator[None]:
    """The engine has one core to itself, tap and load the others: for loads that would leave the tap none in time."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        yield
        return
    os.sched_setaffinity(0, cores[1:])
    PINNED[:] = ["taskset", "-c", str(cores[0])]
    try:
        yield
    finally:
        PINNED.clear()
        os.sched_setaffinity(0, cores)


PINNED: list[str] = []


@contextlib.contextmanager
def vllm(port: int, log: Path, *flags: str, env: dict[str, str] | None = None) -> Iterator[Engine]:
    words = [str(VLLM), "serve", str(HOME / "model"), "--served-model-name", "tiny", "--host", "127.0.0.1"]
    words += ["--port", str(port), "--max-model-len", "2048", "--dtype", "bfloat16", "--enforce-eager"]
    # Two cores are few: what measures goes before what is measured.
    words = [*PINNED, "nice", "-n", "10", *words, "--enable-per-request-metrics", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(
            words, stdout=out, stderr=out, env={**os.environ, **QUIET, **CPU, **(env or {})}, start_new_session=True
        )
        engine = Engine(process, f"http://127.0.0.1:{port}", log)
        try:
            deadline = time.monotonic() + START_S
            while True:
                assert process.poll() is None, f"vLLM ended: {log}\n{log.read_text()[-2000:]}"
                assert time.monotonic() < deadline, f"vLLM did not start: {log}"
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{engine.url}/health", timeout=2):
                    break
                time.sleep(0.5)
            yield engine
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                pass
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


@dataclass(frozen=True)
class Ask:
    """One request: when it goes out, and how long prompt and answer are, in words and tokens."""

    at_s: float
    words: int
    tokens: int
    seed: int
    repeat: bool = False
    packed: bool = False


def send(url: str, ask: Ask) -> str:
    """Sends it and reads the answer to its end; what went wrong, or nothing."""
    host = url.removeprefix("http://")
    dice = random.Random(ask.seed)
    some = [f"{dice.choice(WORDS)}{dice.randrange(1000)}" for _ in range(8 if ask.repeat else ask.words)]
    prompt = " ".join(some[index % len(some)] for index in range(ask.words))
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": ask.tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection(host, timeout=REQUEST_S)
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(body),
            {"Content-Type": "application/json"} | ({"Accept-Encoding": "gzip"} if ask.packed else {}),
        )
        answer = connection.getresponse()
        text = answer.read()
        text = gzip.decompress(text) if answer.getheader("Content-Encoding") == "gzip" else text
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        connection.close()
    return "" if answer.status == 200 and b"[DONE]" in text and b'"error"' not in text else f"status {answer.status}"


def load(url: str, asks: Sequence[Ask]) -> list[str]:
    """All of them, each at its time, from a thread each; what went wrong of each."""
    out = [""] * len(asks)
    start = time.monotonic()

    def one(index: int) -> None:
        out[index] = send(url, asks[index])

    threads = []
    for index, ask in sorted(enumerate(asks), key=lambda pair: pair[1].at_s):
        time.sleep(max(0.0, start + ask.at_s - time.monotonic()))
        threads.append(threading.Thread(target=one, args=(index,)))
        threads[-1].start()
    for thread in threads:
        thread.join(REQUEST_S)
    return out


def in_waves(count: int, at_once: int, words: int, tokens: int, url: str, *, packed: bool = False) -> list[str]:
    """``count`` requests, always ``at_once`` in flight."""
    left = list(range(count))
    out: list[str] = []
    lock = threading.Lock()

    def worker() -> None:
        while True:
            with lock:
                if not left:
                    return
                number = left.pop()
            word = send(url, Ask(0, words, tokens, 1000 + number, packed=packed))
            with lock:
                out.append(word)

    threads = [threading.Thread(target=worker) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(REQUEST_S)
    return out


def steady(count: int, every_s: float, words: int, tokens: int, *, repeat: bool = False) -> list[Ask]:
    return [Ask(index * every_s, words, tokens, 100 + index, repeat) for index in range(count)]


def warm(url: str, count: int = 6, words: int = 60) -> None:
    for number in range(count):
        assert send(url, Ask(0, words, 8, number)) == ""


@contextlib.contextmanager
def tapped(directory: Path, engine: Engine) -> Iterator[Tap]:
    flags = ("--engine-metrics", engine.url + "/metrics", "--engine-pid", str(engine.process.pid))
    with tap(directory, engine.url, *flags, "--name", "inner", "--sample-interval", "500ms") as running:
        yield running
        time.sleep(1.2)


@dataclass
class Found:
    """A verdict, with what the trial's records and the engine's page say beside it."""

    verdict: dict[str, Any]
    ttft: dict[str, Any]
    records: list[dict[str, Any]]

    @property
    def causes(self) -> list[str]:
        return [each["cause"] for each in self.verdict["causes"] if each["severity"] != "info"]

    def explained(self) -> bool:
        band = self.ttft
        if band["total_ms"] is None:
            return False
        return bool(abs(band["unexplained_ms"]) <= max(UNEXPLAINED_MS, UNEXPLAINED_SHARE * band["total_ms"]))


def diagnosed(
    name: str,
    directory: Path,
    engine: Engine,
    *more: str,
    before: dict[str, float] | None = None,
    with_log: bool = True,
) -> Found:
    """The verdict on what the tap recorded; its figures are printed. ``with_log``: with the engine's start-up log."""
    log = ["--engine-log", str(engine.log)] if with_log else []
    file = directory.parent / f"{name}.json"
    run(["diagnose", "--data", str(directory), *log, "--json", str(file), *more])
    verdict = orjson.loads(file.read_bytes())
    records = [
        orjson.loads(line)
        for path in sorted(directory.glob("records-*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]
    records = [record for record in records if record["path"] == "/v1/chat/completions"]
    found = Found(verdict, verdict["budget"]["ttft"]["p50"], records)
    void = sum(record["void"] is not None for record in records)
    words = [f"\n{name}: {verdict['verdict']}; {len(records)} requests, {void} void"]
    for cause in verdict["causes"]:
        words.append(f"  {cause['cause']} ({cause['severity']}): effect {cause['effect_ms']}, share {cause['share']}")
    if found.ttft["total_ms"] is not None:
        stages = {stage: part["ms"] for stage, part in found.ttft["stages"].items() if part is not None}
        told = ", ".join(f"{stage} {value:.2f}" for stage, value in stages.items() if value)
        words.append(
            f"  TTFT P50 {found.ttft['total_ms']:.2f} ms: {told}; unexplained {found.ttft['unexplained_ms']:.2f}"
        )
    if before is not None:
        after = engine.sums()
        rise = {key: after[key] - before.get(key, 0.0) for key in after}
        count = rise.get("request_queue_time_seconds_count", 0)
        means = [
            f"{short} {1000 * rise[f'{long}_sum'] / rise[f'{long}_count']:.2f} ms"
            for short, long in (
                ("TTFT", "time_to_first_token_seconds"),
                ("queue", "request_queue_time_seconds"),
                ("prefill", "request_prefill_time_seconds"),
                ("decode", "request_decode_time_seconds"),
            )
            if rise.get(f"{long}_count")
        ]
        words.append(
            f"  vLLM's means over {count:g} requests: {', '.join(means)}; "
            f"preemptions {rise.get('num_preemptions_total', 0):g}"
        )
    sys.stdout.write("\n".join(words) + "\n")
    if verdict["causes"] and verdict["causes"][0]["cause"] == "tap.saturated":
        pytest.skip(f"{void} of {len(records)} records are void: this machine was too busy to measure on")
    return found


def test_idle_and_well(tmp_path: Path) -> None:
    """One request at a time, on an engine that was warmed: nothing is ill, and nothing is left over."""
    with vllm(free_port(), tmp_path / "vllm.log") as engine:
        warm(engine.url)
        before = engine.sums()
        with tapped(tmp_path / "data", engine) as between:
            assert not any(load(between.url, steady(60, 0.4, 60, 24)))
        found = diagnosed("idle", tmp_path / "data", engine, before=before)
    assert found.verdict["verdict"] == "healthy", found.verdict
    assert found.explained(), found.ttft


def test_long_prompts_by_design(tmp_path: Path) -> None:
    """Every prompt is long: prefill is what it takes, and no fault."""
    with vllm(free_port(), tmp_path / "vllm.log") as engine:
        warm(engine.url, words=300)
        before = engine.sums()
        with tapped(tmp_path / "data", engine) as between:
            assert not any(load(between.url, steady(40, 0.5, 300, 16)))
        found = diagnosed("long", tmp_path / "data", engine, before=before)
    # What is left there is the API process's as well: writing the first event of a long prompt, which nothing tells.
    assert found.verdict["verdict"] == "healthy", found.verdict


def test_queueing(tmp_path: Path) -> None:
    """Sixteen at once where two may run: they queue."""
    with cores_apart(), vllm(free_port(), tmp_path / "vllm.log", "--max-num-seqs", "2") as engine:
        warm(engine.url)
        before = engine.sums()
        with tapped(tmp_path / "data", engine) as between:
            assert not any(in_waves(80, 16, 60, 48, between.url))
        found = diagnosed("queue", tmp_path / "data", engine, before=before, with_log=False)
        told = diagnosed("queue-log", tmp_path / "data", engine, before=before)
    assert found.causes[:1] == ["engine.queue"], found.verdict
    assert found.explained(), found.ttft
    # The log tells the limit, and the KV cache has room: it may be raised.
    assert told.causes == ["engine.batching", "engine.queue"], told.verdict


def test_long_prompts_in_the_way_of_short_ones(tmp_path: Path) -> None:
    """Four long prompts in one step, now and then, among many short ones: these wait for the step's end."""
    with vllm(free_port(), tmp_path / "vllm.log", "--max-num-batched-tokens", "8192") as engine:
        warm(engine.url, words=20)
        warm(engine.url, words=330)
        before = engine.sums()
        asks = [Ask(index * 0.08, 10, 4, 100 + index) for index in range(220)]
        asks += [Ask(1.0 + 1.6 * (index // 4), 330, 4, 900 + index) for index in range(40)]
        with tapped(tmp_path / "data", engine) as between:
            assert not any(load(between.url, asks))
        found = diagnosed("blocked", tmp_path / "data", engine, before=before)
    assert found.causes[:1] == ["engine.prefill"], found.verdict


def test_several_tokens_an_event(tmp_path: Path) -> None:
    with cores_apart(), vllm(free_port(), tmp_path / "vllm.log", "--stream-interval", "4") as engine:
        warm(engine.url)
        before = engine.sums()
        with tapped(tmp_path / "data", engine) as between:
            assert not any(in_waves(48, 4, 40, 64, between.url))
        found = diagnosed("interval", tmp_path / "data", engine, before=before)
    assert found.causes[:1] == ["engine.bundling"], found.verdict


SPECULATION = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'


@pytest.mark.parametrize("repeat", [False, True])
def test_speculation(repeat: bool, tmp_path: Path) -> None:
    """Whether drafts are kept is the model's and the prompts' matter; events that differ in size are no bundling."""
    with vllm(free_port(), tmp_path / "vllm.log", "--speculative-config", SPECULATION) as engine:
        warm(engine.url)
        before = engine.sums()
        with tapped(tmp_path / "data", engine) as between:
            assert not any(load(between.url, steady(40, 0.4, 60, 64, repeat=repeat)))
        after = engine.sums()
        found = diagnosed("speculation", tmp_path / "data", engine, before=before)
    rise = {key: after[key] - before.get(key, 0.0) for key in after if key.startswith("spec_decode")}
    drafted = rise["spec_decode_num_draft_tokens_total"]
    kept = rise["spec_decode_num_accepted_tokens_total"] / drafted if drafted else None
    sys.stdout.write(f"  drafted {drafted:g}, kept {kept}\n")
    assert "engine.bundling" not in found.causes, found.verdict
    if kept is not None and drafted >= 400 and kept < 0.45:
        assert found.causes[:1] == ["engine.spec_decode"], found.verdict


@pytest.mark.parametrize("whole", [True, False])
def test_killed_in_the_middle_of_streams(whole: bool, tmp_path: Path) -> None:
    """The engine's core dies (its API process then answers errors), or all of it does (silence)."""
    with cores_apart(), vllm(free_port(), tmp_path / "vllm.log", "--max-num-seqs", "16") as engine:
        warm(engine.url)
        with tapped(tmp_path / "data", engine) as between:

            def kill() -> None:
                time.sleep(4.1)
                if whole:
                    os.killpg(engine.process.pid, signal.SIGKILL)
                else:
                    os.kill(engine.core(), signal.SIGKILL)

            killer = threading.Thread(target=kill)
            killer.start()
            failed = [word for word in load(between.url, steady(40, 0.25, 40, 200)) if word]
            killer.join()
            assert len(failed) >= 3, "it was killed too late"
        found = diagnosed(f"killed-{'whole' if whole else 'core'}", tmp_path / "data", engine)
    sys.stdout.write(f"  {len(failed)} of 40 failed at the client\n")
    assert found.causes[:1] == ["engine.errors"], found.verdict


def test_first_requests_after_a_start(tmp_path: Path) -> None:
    """Nothing warmed it."""
    with cores_apart(), vllm(free_port(), tmp_path / "vllm.log") as engine:
        before = engine.sums()
        with tapped(tmp_path / "data", engine) as between:
            assert not any(load(between.url, steady(50, 0.3, 60, 16)))
        found = diagnosed("cold", tmp_path / "data", engine, before=before)
    assert set(found.causes) <= {"engine.cold_start"}, found.verdict


def test_small_kv_cache(tmp_path: Path) -> None:
    """Room for some four of the ten that are there at once."""
    with cores_apart(), vllm(free_port(), tmp_path / "vllm.log", "--num-gpu-blocks-override", "20") as engine:
        warm(engine.url)
        before = engine.sums()
        with tapped(tmp_path / "data", engine) as between:
            assert not any(in_waves(48, 10, 60, 120, between.url))
        found = diagnosed("kv", tmp_path / "data", engine, before=before)
    assert found.causes
    assert found.causes[0] in ("engine.kv_cache", "engine.preemption"), found.verdict


def test_spans_tell_of_each_request(tmp_path: Path) -> None:
    """Its spans go to the tap's admin port, and tell what the page told only as a mean."""
    port = free_port()
    upstream = f"http://127.0.0.1:{port}"
    flags = ("--engine-metrics", upstream + "/metrics", "--name", "inner", "--sample-interval", "500ms", "--correlate")
    with tap(tmp_path / "data", upstream, *flags) as between:
        endpoint = f"http://{between.admin[0]}:{between.admin[1]}/v1/traces"
        env = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "500"}
        with vllm(port, tmp_path / "vllm.log", "--otlp-traces-endpoint", endpoint, env=env) as engine:
            warm(engine.url)
            before = engine.sums()
            assert not any(load(between.url, steady(50, 0.4, 60, 24)))
            time.sleep(2)
            found = diagnosed("spans", tmp_path / "data", engine, before=before)
    assert found.verdict["verdict"] == "healthy", found.verdict
    assert found.explained(), found.ttft


NGINX = shutil.which("nginx")
NGINX_CONFIG = """
daemon off; worker_processes 1; pid {home}/nginx.pid; error_log {home}/error.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {home}/body; proxy_temp_path {home}/proxy; fastcgi_temp_path {home}/fastcgi;
    uwsgi_temp_path {home}/uwsgi; scgi_temp_path {home}/scgi;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass {upstream}; proxy_http_version 1.1; proxy_set_header Connection ""; {location} }}
    }}
}}
"""


@contextlib.contextmanager
def running_nginx(home: Path, upstream: str, location: str) -> Iterator[str]:
    """As it comes, and ``location`` beside."""
    home.mkdir()
    home.chmod(0o755)
    port = free_port()
    (home / "nginx.conf").write_text(NGINX_CONFIG.format(home=home, port=port, upstream=upstream, location=location))
    process = subprocess.Popen([NGINX or "", "-p", str(home), "-c", str(home / "nginx.conf")])
    try:
        deadline = time.monotonic() + 10
        while True:
            assert process.poll() is None, "nginx ended: see what it wrote above"
            assert time.monotonic() < deadline, "nginx did not listen"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


@pytest.mark.skipif(NGINX is None, reason="needs an nginx")
@pytest.mark.parametrize("packed", [False, True])
def test_an_nginx_before_an_engine_that_queues(packed: bool, tmp_path: Path) -> None:
    """Two taps. With proxy_buffering on a chunked answer streams all the same, and nginx is not blamed; with gzip it
    holds, and there are two faults at once."""
    location = "gzip on; gzip_types text/event-stream; gzip_proxied any;" if packed else ""
    key = ("--pair-key", "12" * 16)
    with cores_apart(), vllm(free_port(), tmp_path / "vllm.log", "--max-num-seqs", "2") as engine:
        warm(engine.url)
        before = engine.sums()
        metrics = ("--engine-metrics", engine.url + "/metrics", "--engine-pid", str(engine.process.pid))
        with (
            tap(
                tmp_path / "inner", engine.url, *metrics, "--name", "inner", "--sample-interval", "500ms", *key
            ) as inner,
            running_nginx(tmp_path / "nginx", inner.url, location) as nginx,
            tap(tmp_path / "outer", nginx, "--name", "outer", *key) as outer,
        ):
            assert not any(in_waves(60, 8, 40, 48, outer.url, packed=packed))
            time.sleep(1.2)
        found = diagnosed("nginx", tmp_path / "inner", engine, "--data", str(tmp_path / "outer"), before=before)
    assert "engine.queue" in found.causes, found.verdict
    assert ("proxy.compression" in found.causes) == packed, found.verdict
    assert "proxy.response_buffering" not in found.causes, found.verdict
