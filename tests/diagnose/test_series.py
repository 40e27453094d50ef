"""What may be taken from the samples of one source: rises over restarts, means, windows with their neighbours."""

from __future__ import annotations

import pytest

from tapproxy.core.sample import SIGNALS, Sample, SampleKind, Shape
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.series import Series

S = 1_000_000_000


def sample(second: float, kind: str = SampleKind.ENGINE, source: str = "engine", **values: float) -> Sample:
    return Sample(kind, source, t_mono_ns=round(second * S), t_unix_ns=0, values=values)


def test_a_counter_that_fell_was_started_anew_and_its_rise_goes_on() -> None:
    series = Series.of("engine", [sample(at, finished=value) for at, value in enumerate((100, 130, 5, 25))])

    assert series.rise("finished") == 30 + 5 + 20
    assert series.restarts() == [2 * S]


def test_a_histogram_gives_the_mean_of_what_came_in_between_and_none_where_nothing_did() -> None:
    series = Series.of(
        "engine", [sample(0, queue_s_sum=4.0, queue_s_count=2), sample(1, queue_s_sum=10, queue_s_count=5)]
    )

    assert series.mean_of("queue_s") == pytest.approx(2.0)
    assert Series.of("engine", [series.samples[0]] * 2).mean_of("queue_s") is None
    assert series.mean_of("prefill_s") is None


def test_a_window_takes_the_reading_before_and_the_one_after() -> None:
    series = Series.of("engine", [sample(at, running=at) for at in range(10)])

    assert series.window(round(3.5 * S), round(5.5 * S)).values("running") == [3, 4, 5, 6]
    assert series.window(-S, 0).values("running") == [0]
    assert series.window(20 * S, 30 * S).values("running") == [9]


def test_a_failed_reading_is_kept_apart_and_an_absent_signal_says_how_to_get_it() -> None:
    broken = Sample(SampleKind.ENGINE, "engine", S, 0, problem="connection refused")
    told = Sample(SampleKind.ENGINE, "engine", 2 * S, 0, absent={"queue_s": "start it with --enable-metrics"})
    series = Series.of("engine", [told, broken])

    assert (series.samples, series.failed) == ([told], [broken])
    assert series.how_to_get("queue_s") == "start it with --enable-metrics"
    assert series.mean("running") is None


def test_evidence_is_sorted_by_what_it_is_of() -> None:
    found = Evidence.of(
        [sample(0), sample(1, source="other"), sample(0, SampleKind.GPU, "gpu 0"), sample(0, SampleKind.SPAN, "otlp")]
    )

    assert (set(found.engines), set(found.gpus), len(found.spans), found.hosts) == (
        {"engine", "other"},
        {"gpu 0"},
        1,
        {},
    )
    assert found.window(5 * S, 6 * S).engines["other"].source == "other"


def test_a_sample_survives_its_line_and_an_unknown_one_is_refused() -> None:
    there = sample(1, running=3)
    there.facts["version"] = "0.32.0"

    assert Sample.from_dict({**there.to_dict(), "later": 1}) == there
    with pytest.raises(ValueError, match="schema"):
        Sample.from_dict({"schema": "tapproxy.record/1"})
    with pytest.raises(ValueError, match="needed"):
        Sample.from_dict({"schema": "tapproxy.sample/1", "kind": "host"})


def test_every_signal_has_a_kind_and_a_shape() -> None:
    assert {kind for kind, _ in SIGNALS.values()} == set(SampleKind)
    assert {shape for _, shape in SIGNALS.values()} == set(Shape)
