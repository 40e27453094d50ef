"""Pairing: certain or not at all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tapproxy.core.record import Record
from tapproxy.diagnose.pairing import Hold, Pair, floor_ns, hold_ns, pair, pair_events, request_hold_ns
from tests.diagnose.make import MS, even, passes, record, taps


def seen(number: int, *, t0: int = 0, response: str | None, request: str | None, trace: str | None = None) -> Record:
    """A record known by the ids given; its exchange lasts 100 ms."""
    made = record("tap", [50 * MS, 100 * MS], number=number, t0=t0)
    made.response_id, made.request_id, made.trace_id = response, request, trace
    made.request.fingerprint = None
    return made


def prompt(number: int, t0_ms: float, prompt_id: str = "p", lasts_ms: int = 1000) -> Record:
    """A record known by its prompt alone."""
    made = record("tap", [MS, lasts_ms * MS], number=number, t0=round(t0_ms * MS))
    made.response_id = made.request_id = made.trace_id = None
    made.request.fingerprint = prompt_id
    return made


@pytest.mark.parametrize(
    ("near", "far", "by"),
    [
        pytest.param(("r", "q", "t"), ("r", "other", "other"), "response_id", id="the response id joins first"),
        pytest.param((None, "q", "t"), ("r", "q", "other"), "request_id", id="then the request id"),
        pytest.param((None, None, "t"), ("r", "q", "t"), "trace_id", id="then the trace id"),
        pytest.param(("r", "q", "t"), ("r2", "q", "t"), None, id="two response ids never pair"),
        pytest.param((None, None, None), (None, None, None), None, id="no id at all"),
        pytest.param(("", None, None), ("", None, None), None, id="an empty id is no id"),
    ],
)
def test_ids_join_in_order(
    near: tuple[str | None, str | None, str | None], far: tuple[str | None, str | None, str | None], by: str | None
) -> None:
    outer = seen(1, response=near[0], request=near[1], trace=near[2])
    inner = seen(2, response=far[0], request=far[1], trace=far[2])
    result = pair([outer], [inner])
    assert result.by == ({by: 1} if by else {})
    assert len(result.pairs) + len(result.unpaired_outer) == 1
    assert len(result.pairs) + len(result.unpaired_inner) == 1


def test_a_retry_leaves_one_outer_and_two_inner_records_of_which_only_the_answer_pairs() -> None:
    outer = seen(1, response="second", request="q")
    first, second = seen(2, response="first", request="q"), seen(3, response="second", request="q")
    result = pair([outer], [first, second])
    assert [each.inner for each in result.pairs] == [second]
    assert result.unpaired_inner == [first]


def test_a_request_id_that_two_requests_share_pairs_neither() -> None:
    outer = [seen(1, response=None, request="q"), seen(2, response=None, request="q")]
    inner = [seen(3, response=None, request="q")]
    result = pair(outer, inner)
    assert (result.pairs, result.unpaired_outer, result.unpaired_inner) == ([], outer, inner)


def test_the_leftovers_of_a_shared_trace_are_not_each_other() -> None:
    """The trace's first request lost its inner record, the second its outer one: both left over, not one request."""
    outer = [seen(1, response=None, request=None, trace="t"), seen(2, response="b", request=None, trace="t")]
    inner = [seen(3, response="b", request=None, trace="t"), seen(4, response="c", request=None, trace="t")]
    result = pair(outer, inner)
    assert result.by == {"response_id": 1}
    assert len(result.unpaired_outer) == len(result.unpaired_inner) == 1


def test_a_request_id_used_again_the_next_day_is_not_the_same_request() -> None:
    day = 86_400_000 * MS
    result = pair([seen(1, response=None, request="1")], [seen(2, t0=day, response=None, request="1")])
    assert result.pairs == []


@pytest.mark.parametrize(
    ("outer_ms", "inner_ms", "pairs"),
    [
        pytest.param([0], [1], [(0, 0)], id="one each"),
        pytest.param([0, 2000], [1, 2001], [(0, 0), (1, 1)], id="one after the other"),
        pytest.param([0, 500], [1, 501], [(0, 0), (1, 1)], id="overlapping, clearly apart"),
        pytest.param([0, 2], [1, 3], [], id="two at once: nobody can tell"),
        pytest.param([0], [1, 400], [], id="one outer, two inner: a retry, which of them answered is unknown"),
        pytest.param([0], [5000], [], id="long after the exchange ended"),
        pytest.param([100], [0], [], id="before the outer tap saw it"),
    ],
)
def test_a_fingerprint_joins_with_the_time(
    outer_ms: Sequence[int], inner_ms: Sequence[int], pairs: list[tuple[int, int]]
) -> None:
    outer = [prompt(number, at) for number, at in enumerate(outer_ms)]
    inner = [prompt(number, at) for number, at in enumerate(inner_ms)]
    result = pair(outer, inner)
    assert [(outer.index(each.outer), inner.index(each.inner)) for each in result.pairs] == pairs


def test_different_prompts_at_one_time_are_no_rivals() -> None:
    result = pair([prompt(0, 0, "a"), prompt(1, 0, "b")], [prompt(0, 1, "b"), prompt(1, 1, "a")])
    assert result.by == {"fingerprint": 2}


def test_ten_thousand_sends_of_one_prompt_pair_in_time() -> None:
    outer = [prompt(number, number * 2000.0) for number in range(3000)]
    inner = [prompt(number, number * 2000.0 + 1) for number in range(3000)]
    assert pair(outer, inner).by == {"fingerprint": 3000}


def test_events_pair_by_where_they_end_in_the_body() -> None:
    (outer,), (inner,) = taps(passes, requests=1)
    del outer.events.kind[30:], outer.events.end_offset[30:]  # the outer tap saw the stream cut
    found = pair_events(outer, inner)
    assert (found.by, found.pairs) == ("end_offset", [(index, index) for index in range(30)])


def test_events_of_a_changed_body_pair_by_order() -> None:
    (outer,), (inner,) = taps(passes, requests=1)
    outer.events.end_offset = [offset + 7 for offset in outer.events.end_offset]
    found = pair_events(outer, inner)
    assert (found.by, len(found.pairs)) == ("index", 40)


def test_events_of_an_encoded_body_pair_by_order() -> None:
    (outer,), (inner,) = taps(passes, requests=1)
    outer.headers["content-encoding"] = "gzip"
    assert pair_events(outer, inner).by == "index"


@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(["token"] * 20 + ["reasoning"] * 20, id="other kinds"),
        pytest.param(["token"] * 39 + ["usage"], id="another number of tokens"),
    ],
)
def test_events_of_another_answer_do_not_pair(kinds: list[str]) -> None:
    (outer,), (inner,) = taps(passes, requests=1)
    outer.events.end_offset = [offset + 7 for offset in outer.events.end_offset]
    outer.events.kind = kinds
    assert pair_events(outer, inner).by is None


def test_a_hold_is_arrival_at_the_nearer_tap_minus_departure_at_the_farther() -> None:
    # Inner starts 10 ms after outer and sends at 50 and 60; outer reads at 65 and 70.
    outer = record("outer", [65 * MS, 70 * MS], t0=1000 * MS)
    inner = record("inner", [49 * MS, 59 * MS], t0=1010 * MS, sent=[50 * MS, 60 * MS])
    hold = hold_ns(Pair(outer, inner, "response_id"))
    assert hold.values_ns == [5 * MS, 0]
    assert floor_ns([hold]) == 0


def test_an_event_that_never_left_has_no_hold() -> None:
    outer = record("outer", [65 * MS, 70 * MS])
    inner = record("inner", [49 * MS, 59 * MS], sent=[50 * MS, None])
    assert hold_ns(Pair(outer, inner, "response_id")).events == [(0, 0)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"boot_id": "boot-2"}, "no common clock", id="another boot"),
        pytest.param({"boot_id": None}, "which boot", id="no boot id"),
        pytest.param({"void": "loop_lag"}, "void: loop_lag", id="void"),
        pytest.param({"clock_step": True}, "stepped", id="clock step under kernel stamps"),
    ],
)
@pytest.mark.parametrize("side", ["outer", "inner"])
def test_what_cannot_be_compared_has_no_hold_but_a_reason(
    change: dict[str, str | bool | None], reason: str, side: str
) -> None:
    (outer,), (inner,) = taps(passes, requests=1)
    changed = outer if side == "outer" else inner
    for name, value in change.items():
        setattr(changed.stamps if name == "clock_step" else changed, name, value)
    hold = hold_ns(Pair(outer, inner, "response_id"))
    assert hold.values_ns is None
    assert reason in (hold.reason or "")
    assert request_hold_ns(Pair(outer, inner, "response_id")).after_start_ns is None


def test_a_clock_step_does_not_touch_user_space_stamps() -> None:
    (outer,), (inner,) = taps(passes, requests=1)
    outer.stamps.clock_step, outer.stamps.source = True, "user"
    assert hold_ns(Pair(outer, inner, "response_id")).values_ns is not None


def test_the_request_is_held_from_its_first_and_from_its_last_byte() -> None:
    outer = record("outer", even(), t0=1000 * MS)
    outer.upstream.write_start, outer.upstream.write_end = 1 * MS, 41 * MS
    inner = record("inner", even(), t0=1043 * MS)
    hold = request_hold_ns(Pair(outer, inner, "response_id"))
    assert (hold.after_start_ns, hold.after_end_ns) == (42 * MS, 2 * MS)


@pytest.mark.parametrize(
    ("values", "floor"),
    [
        pytest.param([5, 3, 9], 3, id="the smallest"),
        pytest.param([5, -3, 9], 5, id="a sender's late stamp is none"),
        pytest.param([-5, -3], -5, id="all below zero: shown as it is"),
    ],
)
def test_the_floor_is_the_smallest_hold_that_can_be(values: list[int], floor: int) -> None:
    assert floor_ns([Hold(values[:1]), Hold(values[1:])]) == floor


def test_no_holds_have_no_floor() -> None:
    assert floor_ns([Hold(None, reason="void")]) is None
