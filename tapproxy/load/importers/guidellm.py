"""Reads guidellm's ``benchmarks.json``: ``benchmarks``, each with ``requests`` by how they ended.

Two formats: up to 0.3 the times stand in the request, from 0.4 on under ``info.timings``; from 0.5 on there is the id
of the response as well. All times are the wall clock's, in seconds.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, Final

import orjson

from tapproxy.core.errors import ConfigError
from tapproxy.load.importers.aiperf import written
from tapproxy.load.importers.imported import (
    ClientRequest,
    ClientRun,
    Clock,
    Imported,
    Tool,
    count,
    each,
    last_line,
    mapping,
    number,
    scaled,
    text,
)

_NS_PER_S: Final = 1e9
_NS_PER_MS: Final = 1e6
_ENDED: Final = ("successful", "incomplete", "errored")
_NO_SINGLE_ONES: Final = (
    "it holds no single requests: run guidellm without a limit on the requests it samples, and save as JSON"
)


def is_one(data: object) -> bool:
    """Whether it is a report of this tool."""
    return isinstance(data, Mapping) and any("requests" in b or "metrics" in b for b in each(data.get("benchmarks")))


def parse(report: Mapping[str, Any]) -> Imported:
    """One run for each benchmark. Raises ConfigError where there is no request in any."""
    runs: list[ClientRun] = []
    known = left_out = 0
    for benchmark in each(report.get("benchmarks")):
        run = _run(benchmark, known)
        runs.append(run)
        known += len(run.requests)
        left_out += _left_out(benchmark, len(run.requests))
    if not known:
        raise ConfigError(_NO_SINGLE_ONES)
    notes = [f"the file holds a sample of the requests: {left_out} are not in it"] if left_out else []
    return Imported(
        Tool.GUIDELLM, text(mapping(report.get("metadata")).get("guidellm_version")), tuple(runs), tuple(notes)
    )


def _run(benchmark: Mapping[str, Any], first_index: int) -> ClientRun:
    by_end = mapping(benchmark.get("requests"))
    requests = [(ended, request) for ended in _ENDED for request in each(by_end.get(ended))]
    config = mapping(benchmark.get("config")) or mapping(benchmark.get("args"))
    strategy = mapping(config.get("strategy"))
    label = text(strategy.get("type_")) or "benchmark"
    rate = number(strategy.get("rate"))
    return ClientRun(
        label + (f" at {rate:g}/s" if rate is not None else ""),
        tuple(_request(first_index + at, ended, request) for at, (ended, request) in enumerate(requests)),
    )


def _left_out(benchmark: Mapping[str, Any], kept: int) -> int:
    total = count(mapping(benchmark.get("request_totals")).get("total"))
    return max(0, total - kept) if total is not None else 0


def _request(at: int, ended: str, request: Mapping[str, Any]) -> ClientRequest:
    info = mapping(request.get("info"))
    timings = mapping(info.get("timings"))
    start = _first(timings.get("request_start"), timings.get("resolve_start"), request.get("start_time"))
    first = _first(timings.get("first_token_iteration"), request.get("first_token_time"))
    last = _first(timings.get("last_token_iteration"), request.get("last_token_time"))
    error = None if ended == "successful" else _error(ended, request, info)
    measured = error is None and start is not None
    return ClientRequest(
        index=at,
        error=error,
        request_id=text(request.get("request_id")),
        response_id=text(request.get("response_id")),
        start_ns=None if start is None else round(start * _NS_PER_S),
        clock=None if start is None else Clock.WALL,
        ttft_ns=_since(start, first) if measured else None,
        tpot_ns=scaled(request.get("time_per_output_token_ms"), _NS_PER_MS) if measured else None,
        e2e_ns=scaled(request.get("request_latency"), _NS_PER_S) if measured else None,
        prompt_tokens=count(request.get("prompt_tokens")),
        output_tokens=count(request.get("output_tokens")),
        last_token_ns=_since(start, last) if measured else None,
        bodies=_bodies(request.get("request_args")),
    )


def _first(*values: object) -> float | None:
    return next((found for found in map(number, values) if found is not None), None)


def _since(start: float | None, at: float | None) -> float | None:
    return None if start is None or at is None else (at - start) * _NS_PER_S


def _error(ended: str, request: Mapping[str, Any], info: Mapping[str, Any]) -> str:
    said = last_line(info.get("error")) or last_line(request.get("error"))
    return f"{ended}: {said}" if said else ended


def _bodies(request_args: object) -> tuple[bytes, ...]:
    """The body among the arguments, which stand there as JSON or, in 0.4, as Python writes a dict."""
    found = text(request_args)
    if found is None:
        return ()
    try:
        arguments = orjson.loads(found)
    except ValueError:
        try:
            arguments = ast.literal_eval(found)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return ()
    body = mapping(arguments).get("body")
    return written(body) if isinstance(body, dict) and body else ()
