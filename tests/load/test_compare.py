"""What a comparison says of each path, checked in the head."""

from __future__ import annotations

from typing import Any

import pytest

from tapproxy.core.record import Events, Record, UpstreamPart, UsagePart
from tapproxy.load.compare import summarise
from tapproxy.load.plan import Slot
from tapproxy.load.sender import Result

MS = 1_000_000


def result(
    index: int,
    path: str = "direct",
    *,
    ttft_ms: int = 100,
    tokens: int | None = 3,
    failure: str | None = None,
    warmup: bool = False,
    reused: bool = True,
    start_ms: int | None = None,
) -> Result:
    """Three tokens, 20 ms apart; the answer ends with the last one."""
    arrived = [(ttft_ms + 20 * step) * MS for step in range(3)]
    record = Record(
        id=str(index),
        tap=f"client:{path}",
        t0_mono_ns=(index * 1000 if start_ms is None else start_ms) * MS,
        status=200,
        upstream=UpstreamPart(
            reused=reused,
            connect=None if reused else 2 * MS,
            tls=None if reused else 8 * MS,
            end=arrived[-1],
        ),
        events=Events(["token"] * 3, [1, 2, 3], arrived, arrived, [None] * 3, [0, 1, 2], [None] * 3),
        usage=UsagePart(completion_tokens=tokens),
    )
    return Result(Slot(index, index, path, "", 3, warmup=warmup), record, failure)


def only(results: list[Result], **more: Any) -> dict[str, Any]:
    (path,) = summarise(results, **more).values()
    return path


def test_a_path_is_summed_up_in_ms_with_its_count() -> None:
    path = only([result(index, ttft_ms=100 + index) for index in range(20)])
    assert path["requests"] == 20
    ttft = path["ttft_ms"]
    assert (ttft["p50"], ttft["p95"], ttft["n"]) == (109, None, 20)
    assert ttft["need"] == {"p90": 44, "p95": 110, "p99": 642}
    assert (path["icl_ms"]["p50"], path["icl_ms"]["n"]) == (20, 40)
    assert path["tpot_ms"]["p50"] == 20
    assert path["e2e_ms"]["p50"] == 149
    assert path["ttfvt_ms"] == ttft


def test_failed_requests_are_counted_by_class_and_have_no_latency() -> None:
    good = [result(index) for index in range(11)]
    bad = [result(11, failure="status", ttft_ms=1), result(12, failure="truncated", ttft_ms=1)]
    path = only([*good, *bad])
    assert path["requests"] == 13
    assert path["errors"] == {
        "connect": 0,
        "status": 1,
        "error_event": 0,
        "truncated": 1,
        "malformed": 0,
        "timeout": 0,
    }
    assert (path["ttft_ms"]["n"], path["ttft_ms"]["mean"]) == (11, 100)


def test_warm_up_is_left_out() -> None:
    assert only([result(0, warmup=True, ttft_ms=9000), result(1)])["requests"] == 1


def test_paths_come_in_the_plans_order_and_apart() -> None:
    found = summarise([result(1, "b"), result(0, "a"), result(2, "a")])
    assert [(name, path["requests"]) for name, path in found.items()] == [("a", 2), ("b", 1)]


def test_hold_is_null_where_nothing_paired() -> None:
    assert only([result(0)])["hold_ms"] is None
    assert only([result(0)], holds_ns={"direct": None})["hold_ms"] is None
    assert only([result(0)], holds_ns={"direct": [5 * MS] * 11})["hold_ms"]["p50"] == 5


def test_connecting_is_the_median_of_those_that_paid_for_it() -> None:
    path = only([result(0, reused=False), result(1), result(2), result(3)])
    assert path["connect_ms"] == {"dns": None, "tcp": 2, "tls": 8, "reused_share": 0.75}


@pytest.mark.parametrize(
    ("results", "rate"),
    [
        # Each answer takes 140 ms and has 3 tokens.
        pytest.param([result(0), result(1)], 6 / 0.28, id="one after the other: the pauses are other paths' time"),
        pytest.param([result(0, start_ms=0), result(1, start_ms=70)], 6 / 0.21, id="overlapping"),
        pytest.param([result(0), result(1, tokens=None)], None, id="one count unknown: unknown"),
        pytest.param([result(0, failure="status")], None, id="no whole answer"),
    ],
)
def test_throughput_is_tokens_over_the_time_the_path_was_used(results: list[Result], rate: float | None) -> None:
    assert only(results)["output_tokens_per_s"] == (None if rate is None else pytest.approx(rate))


def test_itl_is_null_where_counts_are_unknown_and_given_where_they_are_not() -> None:
    assert only([result(0)])["itl_ms"] is None
    counted = [result(index) for index in range(11)]
    for each in counted:
        each.record.events.tokens = [1, 2, 2]
    assert only(counted)["itl_ms"]["p50"] == 10
