"""Reads what ``vllm bench serve --save-result --save-detailed`` writes: one object, lists with an entry a request.

The file keeps no request ids. They were ``PREFIX`` and the request's number in the file's order, so the number is kept
(``id_index``). ``start_times`` are Python's perf_counter. Results appended to one file stand on a line each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any, Final

from tapproxy.core.errors import ConfigError
from tapproxy.load.importers.imported import (
    ClientRequest,
    ClientRun,
    Clock,
    Imported,
    Tool,
    count,
    last_line,
    number,
    text,
)

_NS_PER_S: Final = 1e9
# What a result of the tool has whether it is detailed or not, since its first versions.
_SIGNS: Final = ("request_throughput", "total_input_tokens")
_NOT_DETAILED: Final = "it holds sums and no single requests: run `vllm bench serve` with --save-result --save-detailed"


def is_one(data: object) -> bool:
    """Whether it is a result of this tool, detailed or not."""
    return isinstance(data, Mapping) and all(sign in data for sign in _SIGNS) and "completed" in data


def parse(results: list[Mapping[str, Any]]) -> Imported:
    """One run for each result. Raises ConfigError where one is not detailed, or its lists do not fit together."""
    runs: list[ClientRun] = []
    for result in results:
        runs.append(_run(result, sum(len(run.requests) for run in runs)))
    notes = ["the file keeps no request ids: they are put together from its order and the prefix that the tap saw"]
    if not any(request.start_ns is not None for run in runs for request in run.requests):
        notes.append("the file tells no start times (an older version)")
    return Imported(Tool.VLLM_BENCH, None, tuple(runs), tuple(notes))


def _run(result: Mapping[str, Any], known: int) -> ClientRun:
    ttfts, itls = result.get("ttfts"), result.get("itls")
    if not isinstance(ttfts, list) or not isinstance(itls, list) or not ttfts:
        raise ConfigError(_NOT_DETAILED)
    columns = {name: result.get(name) for name in ("latencies", "start_times", "input_lens", "output_lens", "errors")}
    for name, column in {"itls": itls, **columns}.items():
        if column is not None and (not isinstance(column, list) or len(column) != len(ttfts)):
            raise ConfigError(f"its {name} have not one entry for each of the {len(ttfts)} ttfts")
    rows = [{name: column[at] for name, column in columns.items() if column is not None} for at in range(len(ttfts))]
    requests = tuple(_request(known, at, ttfts[at], itls[at], rows[at]) for at in range(len(ttfts)))
    api = text(result.get("endpoint_type")) or text(result.get("backend")) or "vllm bench"
    # "inf" where all were sent at once.
    rate, most = number(result.get("request_rate")), count(result.get("max_concurrency"))
    label = f"{api}, rate {text(result.get('request_rate')) or 'unknown' if rate is None else f'{rate:g}/s'}"
    return ClientRun(label + (f", at most {most} at once" if most else ""), requests)


def _request(known: int, at: int, ttft: object, itls: object, row: Mapping[str, Any]) -> ClientRequest:
    start = number(row.get("start_times"))
    ttft_s = number(ttft)
    error = last_line(row.get("errors"))
    # A failed request has a TTFT of 0.0 and an error; one of 0.0 without words failed as well.
    if error is None and not ttft_s:
        error = "no answer"
    n = count(row.get("output_lens")) or None
    asked = ClientRequest(
        index=known + at,
        id_index=at,
        error=error,
        # 0.0 is what a request that was never started has.
        start_ns=round(start * _NS_PER_S) if start else None,
        clock=Clock.MONOTONIC if start else None,
        prompt_tokens=count(row.get("input_lens")),
        output_tokens=n,
    )
    if error is not None or ttft_s is None:
        return asked
    gaps = [number(gap) for gap in itls] if isinstance(itls, list) else [None]
    whole = [gap for gap in gaps if gap is not None]
    stamps = tuple(accumulate(whole, initial=ttft_s)) if len(whole) == len(gaps) else ()
    latency = number(row.get("latencies"))
    e2e_s = latency if latency else (stamps[-1] if stamps else None)
    return replace(
        asked,
        ttft_ns=ttft_s * _NS_PER_S,
        tpot_ns=(e2e_s - ttft_s) / (n - 1) * _NS_PER_S if e2e_s is not None and n is not None and n > 1 else None,
        e2e_ns=None if e2e_s is None else e2e_s * _NS_PER_S,
        stamps_ns=tuple(stamp * _NS_PER_S for stamp in stamps),
        last_token_ns=stamps[-1] * _NS_PER_S if stamps else None,
    )
