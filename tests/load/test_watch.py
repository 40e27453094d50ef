"""When the client says that it is the bottleneck, and when it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tapproxy.core.record import Record, UpstreamPart
from tapproxy.load import watch
from tapproxy.load.plan import Slot
from tapproxy.load.sender import Result
from tapproxy.load.watch import Vitals

MS = 1_000_000
S = 1_000_000_000
QUIET = Vitals(lags_ns=[50_000] * 1000, wall_ns=10 * S, cpu_ns=1 * S)


def sent(index: int, late_ms: float, *, warmup: bool = False) -> Result:
    """Due at 100 ms each, sent so late; the connection took another 5 ms, which is latency."""
    due_ns = 100 * MS * index
    t0_ns = due_ns + int(late_ms * MS) + 5 * MS
    record = Record(id="x", tap="client:a", t0_mono_ns=t0_ns, upstream=UpstreamPart(wanted=-5 * MS))
    return Result(Slot(index, index, "a", "", 1, warmup=warmup), record, None, None, due_ns)


def test_a_client_at_ease_is_not_saturated() -> None:
    found = watch.facts([QUIET], [sent(index, 0.1) for index in range(100)])
    assert (found.saturated, found.why) == (False, None)
    assert (found.late_p50_ns, found.late_p99_ns) == (100_000, 100_000)
    assert (found.cpu_share, found.loop_lag_p99_ns, found.processes) == (0.1, 50_000, 1)


@pytest.mark.parametrize(
    ("vitals", "late_ms", "said"),
    [
        pytest.param(replace(QUIET, cpu_ns=int(9.7 * S)), 0.1, "97% of a core", id="a full core"),
        pytest.param(replace(QUIET, lags_ns=[50_000] * 900 + [30 * MS] * 100), 0.1, "30 ms late to look", id="lag"),
        pytest.param(QUIET, 25.0, "25 ms after their time", id="late sends"),
    ],
)
def test_one_that_spoils_the_numbers_says_so(vitals: Vitals, late_ms: float, said: str) -> None:
    found = watch.facts([vitals], [sent(index, late_ms) for index in range(100)])
    assert found.saturated
    assert found.why is not None
    assert said in found.why
    assert "--processes" in found.why


def test_one_full_process_of_many_is_enough() -> None:
    assert watch.facts([QUIET, replace(QUIET, cpu_ns=10 * S)], []).saturated


def test_a_moment_says_nothing_of_a_core() -> None:
    assert watch.facts([Vitals(lags_ns=[1000], wall_ns=20 * MS, cpu_ns=20 * MS)], []).cpu_share is None


def test_one_bad_moment_of_a_short_run_is_no_verdict() -> None:
    short = Vitals(lags_ns=[50_000] * 40 + [30 * MS], wall_ns=S // 2, cpu_ns=S // 10)
    found = watch.facts([short], [sent(index, 40.0 if index == 7 else 0.1) for index in range(20)])
    assert (found.saturated, found.loop_lag_p99_ns, found.late_p99_ns) == (False, 30 * MS, 40 * MS)
    # One that is always late is a verdict, however short.
    assert watch.facts([short], [sent(index, 40.0) for index in range(20)]).saturated


def test_a_standstill_from_outside_is_told_apart() -> None:
    stopped = replace(QUIET, stood_still=[(1000 * MS, 2000 * MS)])
    results = [sent(index, 0.1 if index < 10 or index > 20 else 2000 - 100 * index) for index in range(100)]
    found = watch.facts([stopped], results)
    assert not found.saturated
    assert found.loop_lag_max_ns == 1 * S
    (note,) = watch.standstills([stopped])
    assert "1 time" in note
    assert "1.00 s" in note


def test_warm_up_is_left_out() -> None:
    assert watch.facts([QUIET], [sent(0, 500.0, warmup=True)]).late_p99_ns is None
