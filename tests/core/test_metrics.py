"""The formulas by hand: request at 0, head at 10, first byte at 90, role 100, tokens 150, 200, 200, finish 260."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tapproxy.core import metrics
from tapproxy.core.record import DownstreamPart, Ended, Events, Record, RequestPart, UpstreamPart, UsagePart


def record() -> Record:
    """The kernel had each read 1 before user space did; each left 4 later, the last 5."""
    return Record(
        id="a",
        tap="t",
        status=200,
        request=RequestPart(head=10, body_end=12),
        upstream=UpstreamPart(wanted=13, acquired=33, write_start=35, write_end=36, first_byte=90),
        downstream=DownstreamPart(first_byte=94),
        events=Events(
            kind=["comment", "role", "reasoning", "token", "tool", "finish", "usage", "done"],
            end_offset=[10, 20, 30, 40, 50, 60, 70, 80],
            arrived=[90, 100, 150, 200, 200, 260, 265, 270],
            read_at=[91, 101, 151, 201, 201, 261, 266, 271],
            sent=[95, 105, 155, 205, 205, 265, 270, 276],
            read=[0, 1, 2, 3, 3, 4, 5, 6],
            tokens=[0, 0, 2, 1, 3, 1, 0, 0],
        ),
        usage=UsagePart(prompt_tokens=9, completion_tokens=7),
    )


NO_EVENTS = replace(record(), events=Events())


@pytest.mark.parametrize(
    ("metric", "at_arrival", "when_sent"),
    [
        (metrics.ttfb_ns, 90, 94),
        (metrics.ttfc_ns, 100, 105),
        (metrics.ttft_ns, 150, 155),
        (metrics.ttfvt_ns, 200, 205),
        (metrics.e2e_ns, 260, 265),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_times_from_the_start(metric: object, at_arrival: int, when_sent: int) -> None:
    assert callable(metric)
    assert metric(record()) == at_arrival
    assert metric(record(), "sent") == when_sent
    assert metric(record(), "arrived", 40) == at_arrival - 40
    if metric is not metrics.ttfb_ns:
        assert metric(NO_EVENTS) is None
    assert metric(Record(id="a", tap="t"), "sent") is None


def test_icl_is_the_gap_between_token_events_and_0_within_one_read() -> None:
    assert metrics.icl_ns(record()) == [50, 0]
    assert metrics.icl_ns(NO_EVENTS) == []


def test_itl_divides_by_the_tokens_gained_and_needs_every_count() -> None:
    assert metrics.itl_ns(record()) == [50, 0]
    one = record()
    one.events.tokens = [0, 0, 2, 5, 3, 1, 0, 0]
    one.events.arrived[4] = 290
    assert metrics.itl_ns(one) == [10, 30]
    one.events.tokens[2] = None
    assert metrics.itl_ns(one) is None
    assert metrics.itl_ns(NO_EVENTS) == []


def test_the_gap_before_an_event_without_a_token_goes_to_the_next() -> None:
    one = record()
    one.events.tokens = [0, 0, 1, 0, 2, 1, 0, 0]
    one.events.arrived[4] = 210
    assert metrics.itl_ns(one) == [30]


def test_tpot_leaves_out_the_tokens_of_the_first_event() -> None:
    # (260 − 150) / (7 − 2)
    assert metrics.tpot_ns(record()) == 22
    assert metrics.tpot_flag(record()) is None
    assert metrics.tpot_ns(record(), "sent") == 22


def test_tpot_takes_the_first_event_for_one_token_and_says_so() -> None:
    one = record()
    one.events.tokens[2] = None
    assert metrics.tpot_ns(one) == pytest.approx(110 / 6)
    assert metrics.tpot_flag(one) == metrics.K1_ASSUMED


def test_without_usage_there_is_no_tpot_and_the_flag_says_what_would_tell() -> None:
    one = replace(record(), usage=UsagePart())
    assert metrics.tpot_ns(one) is None
    assert metrics.tpot_legacy_ns(one) is None
    assert metrics.tpot_flag(one) == metrics.NO_USAGE


def test_all_tokens_in_the_first_event_leave_no_tpot() -> None:
    one = replace(record(), usage=UsagePart(completion_tokens=2))
    assert metrics.tpot_ns(one) is None
    assert metrics.tpot_flag(one) == metrics.TOO_FEW_TOKENS
    assert metrics.tpot_ns(NO_EVENTS) is None
    assert metrics.tpot_flag(NO_EVENTS) is None


def test_legacy_tpot_counts_the_first_event_as_one_token() -> None:
    # (260 − 150) / (7 − 1)
    assert metrics.tpot_legacy_ns(record()) == pytest.approx(110 / 6)
    assert metrics.tpot_legacy_ns(replace(record(), usage=UsagePart(completion_tokens=1))) is None


def test_the_last_token_event_ends_it_where_the_finish_rode_with_it_or_came_before() -> None:
    one = record()
    one.events.kind[5] = "other"
    assert metrics.e2e_ns(one) == 200
    one = record()
    one.events.kind = ["comment", "role", "reasoning", "finish", "tool", "token", "usage", "done"]
    assert metrics.e2e_ns(one) == 260


def test_an_event_that_never_left_has_no_stamp_on_the_clients_side() -> None:
    one = record()
    one.events.sent = [95, 105, None, 205, 210, None, None, None]
    assert metrics.ttft_ns(one, "sent") == 205
    assert metrics.icl_ns(one, "sent") == [5]
    assert metrics.e2e_ns(one, "sent") == 210
    assert metrics.forward_delay_ns(one) == [4, 4, 4, 9]
    assert metrics.ttft_ns(one) == 150


def test_queueing_and_forward_delay_of_every_event() -> None:
    assert metrics.queueing_ns(record()) == [1] * 8
    assert metrics.forward_delay_ns(record()) == [4, 4, 4, 4, 4, 4, 4, 5]


def test_the_taps_overhead_waits_for_neither_client_nor_connection() -> None:
    # In: 12 (body there) → 13 wanted, 33 acquired → 35 written: 3. Out: 150 arrived → 155 sent: 5.
    assert metrics.tap_overhead_ns(record()) == 8
    # The body came while the head was already on its way: 10 → 13.
    assert metrics.tap_overhead_ns(replace(record(), request=RequestPart(head=10, body_end=500))) == 10
    assert metrics.tap_overhead_ns(replace(record(), upstream=UpstreamPart(wanted=13))) is None
    assert metrics.tap_overhead_ns(NO_EVENTS) is None


def test_coalescing_in_events_per_read_and_tokens_per_event() -> None:
    assert metrics.events_per_read(record()) == 1.5
    assert metrics.tokens_per_event(record()) == 2
    one = record()
    one.events.tokens[2] = None
    assert metrics.tokens_per_event(one) == pytest.approx(7 / 3)
    assert metrics.tokens_per_event(replace(one, usage=UsagePart())) is None
    assert metrics.events_per_read(NO_EVENTS) is None
    assert metrics.tokens_per_event(NO_EVENTS) is None


@pytest.mark.parametrize(
    ("ended", "status", "kinds", "failure"),
    [
        (Ended.COMPLETE, 200, ["token", "done"], None),
        (Ended.COMPLETE, 200, ["token"], None),
        (Ended.COMPLETE, 200, ["token", "error"], "error_event"),
        (Ended.COMPLETE, 429, [], "status"),
        (Ended.CLIENT_ABORTED, 200, [], "client_abort"),
        (Ended.UPSTREAM_ABORTED, 200, ["error"], "truncated"),
        (Ended.UPSTREAM_MALFORMED, None, [], "status"),
        (Ended.UPSTREAM_UNREACHABLE, 502, [], "connect"),
        (Ended.TIMEOUT, None, [], "timeout"),
        (Ended.REJECTED, 400, [], "status"),
        (Ended.SHUTDOWN, 200, [], "truncated"),
    ],
)
def test_a_failed_request_has_its_class(ended: str, status: int | None, kinds: list[str], failure: str | None) -> None:
    one = replace(record(), ended=str(ended), status=status, events=Events(kind=kinds))
    assert metrics.failure(one) == failure
    assert metrics.ended_ok(one) == (failure is None)


def test_every_end_but_complete_is_a_failure() -> None:
    for ended in Ended:
        assert metrics.ended_ok(replace(record(), ended=str(ended))) == (ended is Ended.COMPLETE)


def test_every_metric_has_its_formula_and_unit() -> None:
    for name, metric in metrics.METRICS.items():
        assert metric.name == name
        assert metric.formula
        assert metric.unit
    for name in (
        "ttfb",
        "ttfc",
        "ttft",
        "ttfvt",
        "icl",
        "itl",
        "tpot",
        "tpot_legacy",
        "e2e",
        "queueing",
        "tap_overhead",
    ):
        assert name in metrics.METRICS
        assert hasattr(metrics, f"{name}_ns")
