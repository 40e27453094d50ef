"""What a hop did to one stream, and what the releases point to."""

from __future__ import annotations

import pytest

from tapproxy.diagnose import hop
from tapproxy.diagnose.pairing import Pair, hold_ns
from tests.diagnose.make import (
    MS,
    Proxy,
    all_at_the_end,
    buffer_of,
    busy,
    even,
    every,
    late_by,
    one_event_late,
    passes,
    taps,
)


def crossed(proxy: Proxy, tokens: int = 120) -> hop.HopStream:
    (outer,), (inner,) = taps(proxy, requests=1, engine=even(tokens))
    stream = hop.stream(outer, inner, hold_ns(Pair(outer, inner, "response_id")))
    assert stream is not None
    return stream


@pytest.mark.parametrize(
    ("proxy", "at_least", "at_most"),
    [
        pytest.param(passes, 0, 0, id="passes"),
        pytest.param(late_by(400), 0, 0, id="a long line delays and puts nothing together"),
        pytest.param(busy, 0, 0.05, id="a busy machine: single events"),
        pytest.param(buffer_of(4096), 0.9, 1, id="4 kB"),
        pytest.param(all_at_the_end, 1, 1, id="all at the end"),
        pytest.param(every(50), 0.5, 0.7, id="a timer of 50 ms under tokens of 20"),
        pytest.param(one_event_late, 0, 0.01, id="one event late"),
    ],
)
def test_coalescing_is_what_the_hop_put_together(proxy: Proxy, at_least: float, at_most: float) -> None:
    share = hop.coalesced_share(crossed(proxy))
    assert share is not None
    assert at_least <= share <= at_most


def test_what_came_together_from_the_engine_is_not_the_hops_doing() -> None:
    lumps = [100 * MS + 160 * MS * (index // 8) for index in range(40)]
    (outer,), (inner,) = taps(passes, requests=1, engine=lumps, reads=[index // 8 for index in range(40)])
    stream = hop.stream(outer, inner, hold_ns(Pair(outer, inner, "response_id")))
    assert stream is not None
    assert hop.coalesced_share(stream) == 0


def test_bursts_hold_the_bytes_since_the_burst_before() -> None:
    found = hop.bursts(crossed(buffer_of(4096), tokens=40))
    # 4096 bytes are 19 events of 210 and a half; the half waits with the next ones, and the end brings the last.
    assert [(burst.events, burst.size_bytes) for burst in found] == [(19, 3990), (21, 4410)]


@pytest.mark.parametrize(
    ("proxy", "name"),
    [
        pytest.param(buffer_of(4096), "full_buffer", id="4 kB: read buffer"),
        pytest.param(buffer_of(8192), "full_buffer", id="8 kB: read buffer"),
        pytest.param(buffer_of(15_600), "tls_buffer", id="16 kB on the wire: TLS write buffer"),
        pytest.param(all_at_the_end, "whole_answer", id="all at the end"),
        pytest.param(buffer_of(1_000_000), "whole_answer", id="buffer larger than the answer"),
        pytest.param(one_event_late, "one_event_late", id="one event late"),
        pytest.param(every(130), "timer", id="a timer"),
        pytest.param(buffer_of(1400), "irregular", id="no known size"),
    ],
)
def test_the_size_of_the_bursts_names_the_mechanism(proxy: Proxy, name: str) -> None:
    found = hop.mechanism([crossed(proxy) for _ in range(3)])
    assert found.name == name


def test_a_stream_of_one_token_has_nothing_to_put_together() -> None:
    stream = crossed(passes, tokens=1)
    assert hop.coalesced_share(stream) is None
    assert [burst.events for burst in hop.bursts(stream)] == [1]
