"""A tap before a proxy, alone: what the engine told against what arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tapproxy.core.record import Record
from tapproxy.diagnose.causes import verdict
from tests.diagnose.make import MS, Proxy, all_at_the_end, buffer_of, busy, even, every, late_by, noisy, passes, taps
from tests.diagnose.test_causes import cause_of, names


def before(proxy: Proxy, *, told: bool = True, decode: bool = True, **engine: Any) -> list[Record]:
    """The outer tap's records; the engine told a prefill of 99 of 100 ms, and that 40 tokens took 780 ms to make."""
    outer, inner = taps(proxy, **engine)
    for near, far in zip(outer, inner, strict=True):
        near.request.proxy_marks = []
        if told:
            arrived = far.events.arrived
            near.engine.source, near.engine.queue_ns, near.engine.prefill_ns = "response.metrics", 0, arrived[0] - MS
            near.engine.decode_ns = arrived[-1] - arrived[0] if decode else None
    return outer


def judged(outer: Sequence[Record]) -> dict[str, Any]:
    return verdict(outer=outer)


@pytest.mark.parametrize("proxy", [passes, busy, noisy(passes, 1)], ids=["streams", "busy", "noisy"])
@pytest.mark.parametrize("decode", [True, False], ids=["pace told", "pace untold"])
def test_where_the_engines_times_explain_what_arrived_the_way_behind_is_well(proxy: Proxy, decode: bool) -> None:
    found = judged(before(proxy, decode=decode))
    assert (found["verdict"], found["causes"]) == ("healthy", [])


@pytest.mark.parametrize(
    ("proxy", "what"),
    [
        pytest.param(late_by(40), "of TTFT at P50 were spent behind outer and not in what the engine told", id="hold"),
        pytest.param(all_at_the_end, "came closer together than the engine made them", id="whole answer"),
        pytest.param(every(200), "of TTFT at P50 were spent behind outer", id="timer"),
    ],
)
def test_what_the_engines_times_leave_is_never_healthy_and_nobodys_for_certain(proxy: Proxy, what: str) -> None:
    found = judged(before(proxy))
    assert (found["verdict"], found["causes"]) == ("not_measured", [])
    assert any(what in warning for warning in found["trust"]["warnings"]), found["trust"]["warnings"]


def test_a_hold_after_a_long_prefill_is_said_although_most_is_explained() -> None:
    """A second of prefill, and 300 ms in the proxy: more than half is explained, and a tenth is not."""
    found = judged(before(late_by(300), engine=even(first_ms=1000)))
    assert found["verdict"] == "not_measured"
    assert any("301.2 of 1300.4" in warning for warning in found["trust"]["warnings"]), found["trust"]["warnings"]
    assert judged(before(late_by(50), engine=even(first_ms=1000)))["verdict"] == "healthy"


@pytest.mark.parametrize("told", [True, False], ids=["told", "untold"])
@pytest.mark.parametrize("quantum", [4096, 8192, 16384])
def test_lumps_of_a_buffers_size_name_the_proxy(quantum: int, told: bool) -> None:
    """210 bytes an event every 20 ms: 4096 bytes wait for the 20th, 380 ms after the first."""
    count = 4 * quantum // 210
    outer = before(buffer_of(quantum), told=told, engine=even(count))
    found = judged(outer)
    assert (found["verdict"], names(found)) == ("degraded", ["proxy.response_buffering"])
    cause = cause_of(found, "proxy.response_buffering")
    held_ms = (outer[0].events.arrived[0] - 100 * MS) / MS
    assert cause["effect_ms"]["p50"] == pytest.approx(held_ms, rel=0.06)
    assert f"{ {4096: 4, 8192: 8, 16384: 16}[quantum] } kB a burst" in str(cause["evidence"])


def test_lumps_of_no_known_size_are_said_and_blamed_on_nobody() -> None:
    found = judged(before(buffer_of(2400), told=False, engine=even(80)))
    assert (found["verdict"], names(found)) == ("not_measured", [])
    assert any("several at a time" in warning for warning in found["trust"]["warnings"])


def test_next_to_the_engine_its_lumps_are_its_own() -> None:
    outer = before(buffer_of(4096), told=False, engine=even(80))
    assert not any(name.startswith("proxy") for name in names(verdict(inner=outer)))
