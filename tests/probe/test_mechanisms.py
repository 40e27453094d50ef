"""Each mechanism, from streams whose proxy is known, is named; a healthy one is none; what fits two is not claimed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tapproxy.probe import plans
from tapproxy.probe.mechanisms import name
from tapproxy.probe.naming import Mechanism
from tapproxy.probe.shape import Shape, shape, void_reason
from tests.probe import streams
from tests.probe.streams import Proxy


def judged(proxy: Proxy, cells: Sequence[plans.Cell] = plans.IDENTITY, **facts: object) -> tuple[str, list[str]]:
    """The slug, and the names of the held streams."""
    found = streams.shapes(cells, proxy, **facts)
    held, streaming = [one for one in found if one.held], [one for one in found if not one.held]
    return name(held, streaming).slug if held else "streams", [one.name for one in held]


@pytest.mark.parametrize(
    ("proxy", "slug"),
    [
        pytest.param(streams.direct, "streams", id="direct"),
        pytest.param(streams.quanta(2048), "quanta_2k", id="quanta_2k"),
        pytest.param(streams.quanta(4096), "quanta_4k", id="quanta_4k"),
        pytest.param(streams.quanta(8192), "quanta_8k", id="quanta_8k"),
        pytest.param(streams.quanta(16384), "quanta_16k", id="quanta_16k"),
        pytest.param(streams.quanta(12_000), "quanta_other", id="quanta_of_no_usual_size"),
        pytest.param(streams.quanta(1 << 20), "full", id="a_buffer_larger_than_all"),
        pytest.param(streams.full, "full", id="full"),
        pytest.param(streams.timer(50, one_shot=False), "timer", id="ticks"),
        pytest.param(streams.timer(100, one_shot=False), "timer", id="slower_ticks"),
        pytest.param(streams.timer(100, one_shot=True), "timer", id="one_shot"),
        pytest.param(streams.timer(204, one_shot=True), "timer", id="cork"),
        pytest.param(streams.limited(10_000), "rate_limit", id="rate_limit"),
        pytest.param(streams.limited(30_000), "rate_limit", id="a_limit_that_slow_streams_do_not_feel"),
        pytest.param(streams.one_late(), "one_event_late", id="one_late"),
        pytest.param(streams.one_late(4080), "one_event_late", id="one_late_from_4_kB_on"),
    ],
)
def test_a_mechanism_is_named_by_what_stays_the_same(proxy: Proxy, slug: str) -> None:
    assert judged(proxy)[0] == slug


def test_cork_is_a_timer_with_a_known_cause() -> None:
    held = streams.shapes(plans.IDENTITY, streams.timer(204, one_shot=True))
    found = name(held, [])
    assert found.mechanism is Mechanism.CORK
    assert "MSG_MORE" in found.text


def test_nagle_is_told_from_a_timer_by_the_round_trip_and_by_large_events() -> None:
    facts = {"rtt_ns": 82_000_000, "min_rtt_ns": 80_000_000}
    slug, held = judged(streams.nagle(80), **facts)
    assert slug == "nagle"
    assert "large" not in held
    # The same wait for events of any size, at the same distance, is the proxy's timer.
    assert judged(streams.timer(80, one_shot=False), **facts)[0] == "timer"


def test_near_by_small_events_wait_for_delayed_acknowledgements() -> None:
    """Bursts every 40 ms on a connection without a distance, and large events unhindered."""
    assert judged(streams.nagle(40))[0] == "delayed_ack"
    assert judged(streams.timer(40, one_shot=False))[0] == "timer"


def test_the_evidence_has_values_thresholds_and_rejected_rivals() -> None:
    held = streams.shapes(plans.IDENTITY, streams.quanta(4096))
    found = name(held, [])
    sizes = [item["value"] for item in found.evidence if item["unit"] == "B"]
    assert len(sizes) >= 2
    assert all(0.8 * 4096 <= size <= 1.08 * 4096 for size in sizes)
    assert any(item["threshold"] is not None for item in found.evidence)
    assert {rival for rival, _ in found.rejected} == {"timer", "full", "rate_limit", "network.downstream"}


def test_streams_of_one_rate_name_nothing() -> None:
    """At one rate so many bytes are so much time."""
    cells = [plans.SMALL_FAST, plans.MIDDLE]
    assert judged(streams.quanta(4096), cells)[0] == "unclear"


def test_random_delays_name_nothing() -> None:
    chance = random.Random(7)

    def proxy(events: Sequence[tuple[int, float]]) -> list[float]:
        out: list[float] = []
        for _, sent in events:
            out.append(max([sent + chance.uniform(0, 90), *out[-1:]]))
        return out

    assert judged(proxy)[0] == "unclear"


def test_a_rate_with_segments_sent_again_is_not_laid_on_the_proxy() -> None:
    held = streams.shapes(plans.IDENTITY, streams.limited(10_000), retransmits=40)
    found = name([one for one in held if one.held], [one for one in held if not one.held])
    assert found.network_trouble
    assert "it may be the network" in found.text


@pytest.mark.parametrize("seed", range(20))
def test_a_busy_machine_holds_nothing(seed: int) -> None:
    """Pauses of up to 30 ms now and then, in which events come together."""
    chance = random.Random(seed)

    def proxy(events: Sequence[tuple[int, float]]) -> list[float]:
        out: list[float] = []
        until = 0.0
        for _, sent in events:
            if chance.random() < 0.03:
                until = sent + chance.uniform(5, 30)
            out.append(max(sent + chance.uniform(0.05, 0.5), until))
        return out

    assert judged(proxy)[0] == "streams"


def test_holds_are_relative_so_a_distance_is_none() -> None:
    def far(events: Sequence[tuple[int, float]]) -> list[float]:
        return [sent + 250.0 for _, sent in events]

    assert judged(far)[0] == "streams"


def test_a_stream_that_the_tap_sent_late_is_void() -> None:
    one = streams.delivered(plans.SMALL, streams.direct)
    assert one.tap is not None
    assert void_reason(one) is None
    one.tap["late_ns"] = [7_000_000] * plans.SMALL.events
    assert void_reason(one) is None
    one.tap["late_ns"] = [20_000_000] * plans.SMALL.events
    assert void_reason(one) == "the tap itself sent late (P50 20.0, P95 20.0 ms): its host is busy"
    one.tap = None
    assert void_reason(one) == "the tap has no report of it"


def test_a_few_events_have_no_shape() -> None:
    assert shape(streams.delivered(plans.SMALL, streams.direct, events=7)) is None
    found = shape(streams.delivered(plans.SMALL, streams.direct, events=8))
    assert isinstance(found, Shape)
    assert found.events == 8
