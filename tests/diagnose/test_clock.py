"""Two hosts: what is recovered lies within what was said of its uncertainty, and no number stands without that."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapproxy.core.record import Events, Record
from tapproxy.core.sample import Sample, SampleKind
from tapproxy.diagnose.causes import verdict
from tapproxy.diagnose.clock import sure
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.moved import Clocks, Moved, align, bound_between, drift_between, evidence_on_home
from tapproxy.diagnose.pairing import Hold, Pair, hold_ns
from tapproxy.diagnose.view import View, look
from tests.diagnose.hosts import OTHER_BOOT, Other, Way, elsewhere, network
from tests.diagnose.make import BOOT, MS, Proxy, all_at_the_end, buffer_of, client_of, late_by, limited_to, passes


def true_holds(outer: Sequence[Record], inner: Sequence[Record]) -> dict[str, Hold]:
    return {far.id: hold_ns(Pair(near, far, "truth")) for near, far in zip(outer, inner, strict=True)}


def recovered(view: View, truth: dict[str, Hold]) -> tuple[list[int], list[int], list[int]]:
    """(true hold, error, bound) of every event that the run still has a hold of."""
    true, errors, bounds = [], [], []
    for crossed in view.crossed:
        bound_ns = bound_between(crossed.near, crossed.far)
        found = hold_ns(Pair(crossed.near, crossed.far, "found"), bound_ns).values_ns or []
        expected = truth[crossed.far.id].values_ns or []
        true += expected
        errors += [a - b for a, b in zip(found, expected, strict=True)]
        bounds += [bound_ns] * len(found)
    return true, errors, bounds


@pytest.mark.parametrize(
    ("other", "more", "widest_ms"),
    [
        pytest.param(Other(), {}, 0.6, id="3.7 s and 50 ppm"),
        pytest.param(Other(-3.7, -50), {}, 0.6, id="the other way"),
        pytest.param(Other(0.0, 500), {}, 0.6, id="500 ppm"),
        pytest.param(Other(86_400.0 * 30, 0), {}, 0.6, id="a month of uptime, no skew"),
        pytest.param(Other(), {"requests": 10}, 1.5, id="ten requests"),
        pytest.param(Other(), {"requests": 2}, 3.0, id="two requests"),
        pytest.param(Other(), {"every_ms": 18_000, "requests": 200}, 1.0, id="an hour"),
        pytest.param(Other(), {"way_in": Way(10), "way_out": Way(1)}, 8.0, id="10 ms in, 1 ms out"),
        pytest.param(Other(), {"way_in": Way(1), "way_out": Way(10)}, 8.0, id="1 ms in, 10 ms out"),
        pytest.param(Other(), {"way_in": Way(0.2, 8), "way_out": Way(0.1, 8)}, 2.0, id="heavy tails"),
        pytest.param(Other(), {"proxy": all_at_the_end}, 0.6, id="a proxy that holds whole answers"),
        pytest.param(Other(), {"proxy": buffer_of(4096)}, 0.6, id="a proxy that holds 4 kB"),
        pytest.param(Other(), {"proxy": limited_to(5000)}, 0.6, id="a proxy that limits the rate"),
        pytest.param(Other(), {"proxy": late_by(50)}, 0.6, id="a proxy that holds every event"),
    ],
)
def test_hold_is_recovered_within_the_stated_bound(other: Other, more: dict[str, Any], widest_ms: float) -> None:
    outer, inner = network(**{"requests": 60, **more})
    truth = true_holds(outer, inner)
    view = look([], outer, elsewhere(inner, other))
    true, errors, bounds = recovered(view, truth)
    assert len(true) == 20 * len(outer)
    assert sum(abs(error) <= bound for error, bound in zip(errors, bounds, strict=True)) >= 0.99 * len(errors)
    assert abs(median(errors)) <= median(bounds)
    assert max(bounds) < widest_ms * MS
    assert view.hold_bound_ns == max(bounds)


@settings(deadline=None, max_examples=40)
@given(
    offset_s=st.floats(-1e5, 1e5),
    skew_ppm=st.floats(-500, 500),
    way_in=st.builds(Way, st.floats(0.05, 20), st.floats(0, 5)),
    way_out=st.builds(Way, st.floats(0, 20), st.floats(0, 5)),
    requests=st.integers(1, 30),
    seed=st.integers(0, 1000),
)
def test_no_clock_and_no_network_gets_beyond_the_bound(
    offset_s: float, skew_ppm: float, way_in: Way, way_out: Way, requests: int, seed: int
) -> None:
    outer, inner = network(requests, way_in=way_in, way_out=way_out, seed=seed, tokens=5)
    truth = true_holds(outer, inner)
    _, errors, bounds = recovered(look([], outer, elsewhere(inner, Other(offset_s, skew_ppm))), truth)
    assert len(errors) == 5 * requests
    assert all(abs(error) <= bound for error, bound in zip(errors, bounds, strict=True))


def test_the_skew_is_told_where_the_stamps_prove_it_and_only_there() -> None:
    outer, inner = network(60)
    shown = align([outer, elsewhere(inner, Other(skew_ppm=50))]).clocks[0].to_dict()
    assert shown["skew_ppm"] == pytest.approx(50, abs=10)
    low, high = shown["skew_ppm_between"]
    assert low <= 50 <= high
    assert shown["offset_ms"] == pytest.approx(3_700, abs=5)
    assert (shown["pairs"], shown["pieces"], shown["steps"], shown["reason"]) == (60, 1, [], None)
    steady = align([outer, elsewhere(inner, Other(skew_ppm=0))]).clocks[0].to_dict()
    assert steady["skew_ppm"] is None
    assert steady["skew_ppm_between"][0] < 0 < steady["skew_ppm_between"][1]


@pytest.mark.parametrize("step_ms", [50, -50, 5, -5, -3_600_000])
def test_a_clock_that_jumps_splits_the_run_and_what_lies_on_the_jump_has_no_times(step_ms: float) -> None:
    outer, inner = network(60)
    truth = true_holds(outer, inner)
    view = look([], outer, elsewhere(inner, Other(step_at_s=30, step_ms=step_ms)))
    true, errors, bounds = recovered(view, truth)
    assert len(true) >= 50 * 20
    assert all(abs(error) <= bound for error, bound in zip(errors, bounds, strict=True))
    assert view.clock is not None
    (step,) = view.clock.steps
    assert step.size_ns / MS == pytest.approx(step_ms, abs=1.5, rel=1e-4)
    assert sum(view.incomparable.values()) == 60 - len(view.crossed)
    assert set(view.incomparable) <= {"the hosts' clocks jumped against each other at that time"}
    assert "they jumped once" in view.clock.sentence()


def test_a_clock_that_bends_is_followed() -> None:
    """Slewing: no jump, but no one line fits either."""
    outer, inner = network(120)
    truth = true_holds(outer, inner)
    view = look([], outer, elsewhere(inner, Other(skew_ppm=0, step_at_s=60, bend_ppm=200)))
    true, errors, bounds = recovered(view, truth)
    assert len(true) == 120 * 20
    assert sum(abs(error) <= bound for error, bound in zip(errors, bounds, strict=True)) >= 0.99 * len(errors)
    assert view.clock is not None
    assert len(view.clock.pieces) == 2
    assert view.clock.steps == []


def test_clocks_that_jump_all_the_time_are_not_compared() -> None:
    outer, inner = network(40)
    jumping = [Other(offset_s=number % 7).record(record) for number, record in enumerate(inner)]
    view = look([], outer, jumping)
    assert view.crossed == []
    assert sum(view.incomparable.values()) == 40
    assert next(iter(view.incomparable)).startswith("no clock fits")
    found = verdict(outer=outer, inner=jumping)
    assert found["verdict"] == "not_measured"
    assert [cause["cause"] for cause in found["causes"]] == ["measurement.not_comparable"]


def test_answers_that_nobody_saw_on_both_sides_leave_the_offset_unknown() -> None:
    outer, inner = network(20)
    for near in outer:
        near.events, near.upstream.head, near.upstream.first_byte, near.upstream.end = Events(), None, None, None
    clock = align([outer, elsewhere(inner, Other())]).clocks[0]
    assert clock.pieces == []
    assert "way out" in (clock.reason or "")
    assert clock.over(0, 1) is None


def test_one_boot_is_not_aligned_at_all() -> None:
    outer, inner = network(20)
    view = look([], outer, inner)
    assert view.clocks == Clocks()
    assert view.clock is None
    assert view.inner is inner
    assert view.hold_bound_ns == 0


def test_only_the_other_host_moves_and_its_own_durations_stay() -> None:
    outer, inner = network(60)
    there = elsewhere(inner, Other(skew_ppm=0))
    view = look([], outer, there)
    assert list(view.outer) == outer
    moved = view.inner[0]
    assert isinstance(moved, Moved)
    assert (moved.boot_id, moved.own_boot_id) == (BOOT, OTHER_BOOT)
    assert moved.events.arrived == there[0].events.arrived
    assert abs(moved.t0_mono_ns - inner[0].t0_mono_ns) <= moved.clock_bound_ns
    assert there[0].boot_id == OTHER_BOOT


def test_two_taps_of_one_host_keep_their_distance_when_both_are_put_on_the_clients_clock() -> None:
    outer, inner = network(60)
    client = client_of(outer)
    other = Other()
    view = look(client, elsewhere(outer, other), elsewhere(inner, other))
    truth = true_holds(elsewhere(outer, other), elsewhere(inner, other))
    for crossed in view.crossed:
        assert bound_between(crossed.near, crossed.far) == 0
        found = hold_ns(Pair(crossed.near, crossed.far, "found")).values_ns or []
        expected = truth[crossed.far.id].values_ns or []
        # 50 ppm of the exchange's half second.
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) < 50_000
    assert len(view.crossed) == 60


def test_of_there_and_back_only_the_drift_remains_uncertain() -> None:
    outer, inner = network(60)
    view = look([], outer, elsewhere(inner, Other()))
    near, far = view.outer[0], view.inner[0]
    assert bound_between(near, far) > MS // 5
    # 12 ppm either way of 100 ms.
    assert drift_between(near, far, 100 * MS) < 5_000
    assert drift_between(near, near, 100 * MS) == 0


def test_a_body_that_is_encoded_on_the_way_still_sets_the_clock_by_its_head_and_end() -> None:
    outer, inner = network(60, proxy=all_at_the_end)
    for near in outer:
        near.headers["content-encoding"], near.response_id, near.events = "gzip", None, Events()
    there = elsewhere(inner, Other())
    (clock,) = align([outer, there]).clocks
    assert clock.pairs == 60
    reading = clock.over(there[30].t0_mono_ns, there[30].t0_mono_ns)
    assert reading is not None
    error = there[30].t0_mono_ns + reading.offset_ns - inner[30].t0_mono_ns
    assert abs(error) <= reading.bound_ns < MS


@pytest.mark.parametrize(
    ("proxy", "word", "causes"),
    [
        pytest.param(passes, "healthy", [], id="healthy"),
        pytest.param(all_at_the_end, "degraded", ["proxy.response_buffering"], id="buffered"),
    ],
)
def test_two_hosts_are_judged_as_one_is(proxy: Proxy, word: str, causes: list[str]) -> None:
    outer, inner = network(60, proxy=proxy)
    here = verdict(outer=outer, inner=inner)
    there = verdict(outer=outer, inner=elsewhere(inner, Other()))
    for found in (here, there):
        assert found["verdict"] == word
        assert [cause["cause"] for cause in found["causes"]] == causes
        assert found["trust"]["ok"] is True
    assert here["clocks"] == []
    assert there["clocks"][0]["skew_ppm"] == pytest.approx(50, abs=10)
    assert any("two hosts' clocks" in warning for warning in there["trust"]["warnings"])
    a, b = here["budget"]["ttft"]["p50"]["stages"]["proxy"], there["budget"]["ttft"]["p50"]["stages"]["proxy"]
    # To and fro, the offset drops out.
    assert b["ms"] == pytest.approx(a["ms"], abs=0.05)
    assert b["bound_ms"] == pytest.approx(a["bound_ms"], abs=0.05)
    if causes:
        what = {fact["what"]: fact for fact in there["causes"][0]["evidence"]}
        bound = what["how far all holds may be off, since two hosts' clocks are compared"]
        assert 0 < bound["value"] < 1
        # What may as well be its own error is not shown.
        floor = what["floor of the hop, smallest hold"]
        assert floor["value"] is None or floor["value"] >= bound["value"]


def test_a_number_is_shown_where_it_is_more_than_its_bound() -> None:
    assert sure(5, 4) == 5
    assert sure(-5, 4) == -5
    assert sure(3, 4) is None
    assert sure(None, 4) is None


def test_what_was_sampled_on_the_other_host_moves_with_it() -> None:
    outer, inner = network(60)
    other = Other()
    clocks = align([outer, elsewhere(inner, other)])
    true_ns = inner[30].t0_mono_ns
    there = Sample(SampleKind.ENGINE, "http://e/metrics", other.at(true_ns), 0, OTHER_BOOT, values={"running": 3})
    here = Sample(SampleKind.HOST, "host", true_ns, 0, BOOT, values={"cores": 2})
    unknown = Sample(SampleKind.GPU, "gpu", true_ns, 0, "boot-3", values={"power_w": 2})
    moved = evidence_on_home(Evidence.of([there, here, unknown]), clocks)
    (sample,) = moved.engines["http://e/metrics"].samples
    assert sample.boot_id == BOOT
    assert abs(sample.t_mono_ns - true_ns) < MS
    assert moved.hosts["host"].samples == [here]
    assert moved.gpus["gpu"].samples == [unknown]
