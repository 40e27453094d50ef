"""Reading what other tools wrote: each format in its versions, and one sentence for what is none of them."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

from tapproxy.core.errors import ConfigError
from tapproxy.load.importers.definitions import DIFFERENCES
from tapproxy.load.importers.imported import Clock, Tool
from tapproxy.load.importers.reading import read
from tapproxy.load.importers.result import result
from tapproxy.report.imported import lines
from tapproxy.store import read_records

DATA = Path(__file__).parent.parent / "data/import"


def write(directory: Path, value: Any, name: str = "result.json") -> Path:
    file = directory / name
    file.write_text(value if isinstance(value, str) else json.dumps(value))
    return file


def bench(**changed: Any) -> dict[str, Any]:
    """vLLM's result in plain numbers: TTFT 0.5 s, then two chunks 0.25 s apart; the second request failed."""
    result = {
        "backend": "openai-chat",
        "completed": 1,
        "request_throughput": 1.0,
        "request_rate": "inf",
        "max_concurrency": 4,
        "total_input_tokens": 8,
        "ttfts": [0.5, 0.0],
        "itls": [[0.25, 0.25], []],
        "latencies": [1.0, 0.0],
        "start_times": [100.0, 200.0],
        "input_lens": [8, 8],
        "output_lens": [3, 0],
        "errors": ["", 'Traceback (most recent call last):\n  File "x", line 1\nTimeoutError: late\n'],
        "rtfx": float("nan"),
    }
    return {key: value for key, value in (result | changed).items() if value is not None}


def test_vllm_bench_in_plain_numbers(tmp_path: Path) -> None:
    found = read(write(tmp_path, bench()))
    (run,) = found.runs
    whole, failed = run.requests
    assert (found.tool, run.label) == (Tool.VLLM_BENCH, "openai-chat, rate inf, at most 4 at once")
    assert (whole.ttft_ns, whole.tpot_ns, whole.e2e_ns) == (5e8, 2.5e8, 1e9)
    assert (whole.stamps_ns, whole.last_token_ns) == ((5e8, 7.5e8, 1e9), 1e9)
    assert (whole.start_ns, whole.clock, whole.id_index) == (100 * 10**9, Clock.MONOTONIC, 0)
    assert (whole.prompt_tokens, whole.output_tokens, whole.error) == (8, 3, None)
    assert (failed.error, failed.ttft_ns, failed.output_tokens) == ("TimeoutError: late", None, None)


def test_vllm_bench_of_before_it_told_starts_and_latencies(tmp_path: Path) -> None:
    found = read(write(tmp_path, bench(start_times=None, latencies=None)))
    whole = found.runs[0].requests[0]
    assert (whole.start_ns, whole.clock, whole.e2e_ns, whole.tpot_ns) == (None, None, 1e9, 2.5e8)
    assert any("no start times" in note for note in found.notes)


def test_results_appended_to_one_file_are_runs_of_their_own(tmp_path: Path) -> None:
    file = write(tmp_path, "\n".join(json.dumps(bench()) for _ in range(2)))
    found = read(file)
    assert [[request.index for request in run.requests] for run in found.runs] == [[0, 1], [2, 3]]
    assert [[request.id_index for request in run.requests] for run in found.runs] == [[0, 1], [0, 1]]


def line(**metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "session_num": 0,
            "x_request_id": "id-0",
            "conversation_id": "c",
            "turn_index": 0,
            "request_start_ns": 1_000,
            "request_end_ns": 2_000,
            "benchmark_phase": "profiling",
            **metadata,
        },
        "metrics": {
            "time_to_first_token": {"value": 5.0, "unit": "ms"},
            "request_latency": {"value": 0.025, "unit": "s"},
            "inter_chunk_latency": {"value": [10.0, 10.0], "unit": "ms"},
            "inter_token_latency": {"value": 10000.0, "unit": "us"},
            "output_sequence_length": {"value": 3, "unit": "tokens"},
        },
        "error": None,
    }


def test_aiperf_in_plain_numbers_whatever_its_units(tmp_path: Path) -> None:
    warmup = line(benchmark_phase="warmup")
    failed = line() | {"metrics": {}, "error": {"code": 499, "type": "RequestCancellationError", "message": "gone"}}
    file = write(tmp_path, "\n".join(json.dumps(each) for each in (line(), warmup, failed)), "profile_export.jsonl")
    found = read(file)
    whole, early, lost = found.runs[0].requests
    assert (found.tool, whole.request_id, whole.start_ns, whole.clock) == (Tool.AIPERF, "id-0", 1_000, Clock.WALL)
    assert (whole.ttft_ns, whole.e2e_ns, whole.tpot_ns) == (5e6, 25e6, 10e6)
    assert (whole.stamps_ns, whole.output_tokens, whole.warmup) == ((5e6, 15e6, 25e6), 3, False)
    assert early.warmup
    assert (lost.error, lost.ttft_ns) == ("RequestCancellationError: gone", None)


def test_the_engines_own_count_of_tokens_comes_before_the_tools(tmp_path: Path) -> None:
    counted = line()
    counted["metrics"]["usage_completion_tokens"] = {"value": 4, "unit": "tokens"}
    assert read(write(tmp_path, counted)).runs[0].requests[0].output_tokens == 4


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    file = write(tmp_path, json.dumps(line()) + "\n" + json.dumps(line())[:50])
    assert len(read(file).runs[0].requests) == 1


def test_guidellm_of_up_to_0_3(tmp_path: Path) -> None:
    request = {
        "type_": "generative_text_response",
        "request_id": "id-0",
        "prompt": "never shown",
        "start_time": 100.0,
        "first_token_time": 100.5,
        "last_token_time": 101.5,
        "end_time": 101.6,
        "prompt_tokens": 8,
        "output_tokens": 5,
        "time_per_output_token_ms": 200.0,
        "request_latency": 1.6,
    }
    lost = request | {"type_": "generative_text_error", "error": "ReadTimeout: late", "first_token_time": None}
    benchmark = {
        "args": {"strategy": {"type_": "constant", "rate": 2.5}},
        "request_totals": {"successful": 9, "incomplete": 0, "errored": 1, "total": 10},
        "requests": {"successful": [request], "incomplete": [], "errored": [lost]},
    }
    found = read(write(tmp_path, {"benchmarks": [benchmark]}))
    whole, failed = found.runs[0].requests
    assert (found.tool, found.version, found.runs[0].label) == (Tool.GUIDELLM, None, "constant at 2.5/s")
    assert (whole.ttft_ns, whole.tpot_ns, whole.e2e_ns, whole.last_token_ns) == (5e8, 2e8, 1.6e9, 1.5e9)
    assert (whole.start_ns, whole.clock, whole.output_tokens) == (100 * 10**9, Clock.WALL, 5)
    assert (failed.error, failed.ttft_ns) == ("errored: ReadTimeout: late", None)
    assert found.notes == ("the file holds a sample of the requests: 8 are not in it",)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param('{"body": {"model": "m", "stream": true}}', id="JSON, since 0.5"),
        pytest.param("{'body': {'model': 'm', 'stream': True}}", id="Python's dict, in 0.4"),
    ],
)
def test_guidellm_since_0_4(arguments: str, tmp_path: Path) -> None:
    request = {
        "request_id": "id-0",
        "response_id": "chatcmpl-0",
        "request_args": arguments,
        "info": {"status": "completed", "timings": {"request_start": 100.0, "first_token_iteration": 100.5}},
        "output_tokens": 5,
    }
    benchmark = {"config": {"strategy": {"type_": "synchronous"}}, "requests": {"successful": [request]}}
    whole = (
        read(write(tmp_path, {"metadata": {"guidellm_version": "0.7.1"}, "benchmarks": [benchmark]}))
        .runs[0]
        .requests[0]
    )
    assert (whole.response_id, whole.ttft_ns, whole.last_token_ns) == ("chatcmpl-0", 5e8, None)
    assert b'{"model":"m","stream":true}' in whole.bodies


@pytest.mark.parametrize(
    ("file", "tool", "requests"),
    [
        ("vllm-bench-0.32-chat.json", Tool.VLLM_BENCH, 8),
        ("vllm-bench-0.32-completions.json", Tool.VLLM_BENCH, 4),
        ("aiperf-0.13.jsonl", Tool.AIPERF, 5),
        ("guidellm-0.8.json", Tool.GUIDELLM, 4),
    ],
)
def test_files_that_the_tools_wrote(file: str, tool: Tool, requests: int) -> None:
    found = read(DATA / file)
    (run,) = found.runs
    assert (found.tool, len(run.requests)) == (tool, requests)
    for request in run.requests:
        assert request.error is None
        assert request.ttft_ns is not None
        assert request.e2e_ns is not None
        assert 0 < request.ttft_ns < request.e2e_ns
        assert request.output_tokens is not None
        assert request.start_ns is not None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        pytest.param("", "is empty; expected a result of", id="empty"),
        pytest.param("TTFT: 5 ms\n", r"is neither JSON nor JSON lines \(line 1\)", id="text"),
        pytest.param("[" * 100_000, "is neither JSON nor JSON lines", id="nested without end"),
        pytest.param([1, 2], "it holds a JSON list and no object", id="a list"),
        pytest.param({"a": 1}, r"its keys \(a\) are those of no tool known here", id="another object"),
        pytest.param(
            bench(ttfts=None, itls=None), "run `vllm bench serve` with --save-result --save-detailed", id="sums"
        ),
        pytest.param(bench(latencies=[1.0]), "its latencies have not one entry for each of the 2 ttfts", id="uneven"),
        pytest.param(
            {"request_latency": {"unit": "ms", "avg": 1}},
            "give the profile_export.jsonl beside it",
            id="aiperf's summary",
        ),
        pytest.param({"metadata": {"request_start_ns": 1}, "responses": []}, "aiperf's raw export", id="aiperf's raw"),
        pytest.param({"experiments": []}, "GenAI-Perf's profile export", id="GenAI-Perf"),
        pytest.param(
            {"benchmarks": [{"metrics": {}, "requests": None}]}, "it holds no single requests", id="guidellm's sums"
        ),
        pytest.param({"schema": "tapproxy.record/1"}, "a tap's own records", id="our records"),
        pytest.param({"schema": "tapproxy.comparison/1"}, "tapproxy's own comparison", id="our comparison"),
    ],
)
def test_a_file_that_is_none_of_them_is_refused_in_a_sentence(content: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        read(write(tmp_path, content))
    assert "result.json" in str(error.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file or directory; expected a result of"):
        read(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read(tmp_path)


JUNK = [None, 0, -1, 1e300, float("nan"), 10**30, "", "x", "\ud800", [], {}, True, [[]], [None], {"a": 1}]


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, of long lists the first few."""
    inner = value.items() if isinstance(value, dict) else enumerate(value[:4]) if isinstance(value, list) else ()
    return [at, *(place for key, each in inner for place in places(each, (*at, key)))]


@pytest.mark.parametrize(
    "file", ["vllm-bench-0.32-chat.json", "vllm-bench-0.32-completions.json", "aiperf-0.13.jsonl", "guidellm-0.8.json"]
)
def test_whatever_stands_in_a_file_it_is_read_or_refused(file: str, tmp_path: Path) -> None:
    chance = Random(7)
    whole = [json.loads(line) for line in (DATA / file).read_text().splitlines()]
    records = list(read_records(DATA))[:6]
    where = [place for place in places(whole) if len(place) > 1]
    for _ in range(150):
        spoilt = copy.deepcopy(whole)
        for place in chance.sample(where, chance.choice((1, 2, 5))):
            with contextlib.suppress(KeyError, IndexError, TypeError):  # gone by the one before
                holder = functools.reduce(lambda value, key: value[key], place[:-1], spoilt)
                holder[place[-1]] = chance.choice(JUNK)
        with contextlib.suppress(ConfigError):
            found = result(read(write(tmp_path, "\n".join(map(json.dumps, spoilt)))), records, pair_key=b"k")
            orjson.dumps(found)
            lines(found)


def test_every_tool_says_how_it_differs() -> None:
    assert set(DIFFERENCES) == set(Tool)
    for rows in DIFFERENCES.values():
        assert {"tpot", "ttft", "start"} <= {row.metric for row in rows}
        assert all(row.theirs and row.ours and row.aligned for row in rows)
