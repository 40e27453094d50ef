"""What a host or a card shows accuses it only where an engine is there, and loses time to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tapproxy.core.sample import ROUTER_NAME, Sample
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.pressure import launched_capacity
from tapproxy.diagnose.series import Series
from tests.diagnose import staged
from tests.diagnose.staged import card, host
from tests.diagnose.virtual import launch, readings, sample_of

Values = Callable[[float], dict[str, float]]


def of_host(values: Values, *more: Sample, here: str | None = "yes") -> list[tuple[str, str]]:
    """(cause, severity) of a run of a healthy engine, on a host with these readings."""
    return [(each["cause"], each["severity"]) for each in causes("host", values, *more, here=here)]


def of_card(values: Values) -> list[tuple[str, str]]:
    return [(each["cause"], each["severity"]) for each in causes("gpu", values)]


def causes(kind: str, values: Values, *more: Sample, here: str | None = "yes") -> list[dict[str, Any]]:
    case = staged.chatty_mix(1)
    read = readings(kind, case.run, values)
    for sample in read:
        if here is None:
            sample.facts.pop("engine_here", None)
        elif kind == "host":
            sample.facts["engine_here"] = here
    case.beside = [*read, *more]
    verdict = case.verdict()
    found: list[dict[str, Any]] = [*verdict["causes"], *verdict["worth_knowing"]]
    return found


def limited(share: float, stopped: float) -> Values:
    """A limit that runs out in this share of the periods; ``stopped``: seconds told a second."""
    return lambda ms: host(at_ms=ms, stopped_ms=share * ms) | {"cgroup_throttled_s": stopped * ms / 1000}


def counted(**a_second: float) -> Values:
    """Counters that rise so much a second."""
    return lambda ms: host(at_ms=ms) | {name: rate * ms / 1000 for name, rate in a_second.items()}


@pytest.mark.parametrize(("here", "accused"), [("yes", True), ("no", False), (None, False)])
def test_a_host_without_the_engine_is_not_accused(here: str | None, accused: bool) -> None:
    assert of_host(limited(0.9, 0.2), here=here) == ([("host.cpu", "warning")] if accused else [])


@pytest.mark.parametrize(
    ("share", "stopped", "accused"),
    [
        pytest.param(11 / 12, 0.27 / 1.2, True, id="eleven periods of twelve, and few seconds told"),
        pytest.param(0.92, 0.01, True, id="hardly any seconds told"),
        pytest.param(0.1, 0.05, False, id="now and then"),
        pytest.param(0.0, 3.0, False, id="seconds added up over cores alone"),
    ],
)
def test_a_cpu_limit_is_judged_by_the_periods_in_which_it_ran_out(share: float, stopped: float, accused: bool) -> None:
    assert of_host(limited(share, stopped)) == ([("host.cpu", "warning")] if accused else [])


def test_the_thread_that_waited_most_lost_the_time_and_the_sum_over_threads_is_no_loss() -> None:
    (cause,) = causes("host", counted(engine_longest_thread_wait_s=0.3, engine_runqueue_wait_s=2.0))
    assert (cause["cause"], cause["severity"], cause["metric"]) == ("host.cpu", "warning", "icl")
    assert cause["share"] == pytest.approx(0.3, abs=0.01)
    assert of_host(counted(engine_longest_thread_wait_s=0.02, engine_runqueue_wait_s=2.0)) == []


def test_a_process_of_many_busy_threads_is_not_one_that_is_full() -> None:
    assert of_host(counted(engine_busiest_cpu_s=3.0, engine_busiest_thread_cpu_s=0.5)) == []
    assert of_host(counted(engine_busiest_cpu_s=1.1, engine_busiest_thread_cpu_s=0.98)) == [("host.cpu", "info")]


def test_a_frontend_that_waits_for_a_core_is_the_hosts_and_no_slow_tokenizer() -> None:
    """Four fifths of the time it waited for a core: what is left is no part of TTFT that anybody notices."""
    case = staged.tokenizer(1)
    waits = counted(engine_longest_thread_wait_s=0.8)
    case.beside = readings("host", case.run, waits)
    verdict = case.verdict()
    found = [(each["cause"], each["severity"]) for each in (*verdict["causes"], *verdict["worth_knowing"])]
    assert found == [("host.cpu", "warning")]
    for sample in case.beside:
        sample.facts["engine_here"] = "no"
    assert [each["cause"] for each in case.verdict()["causes"]] == ["engine.tokenizer"]


@pytest.mark.parametrize(
    ("cores", "told", "found"),
    [
        pytest.param({"engine_physical_cores": 5.0}, {"gpus_used": 4}, (4, 5, 6), id="those it may run on"),
        pytest.param({"cpu_limit_cores": 3.0}, {"gpus_used": 2}, (2, 3, 4), id="its limit"),
        pytest.param({}, {"gpus_used": 16, "nodes": 2, "gpus": 4}, (8, 8, 10), id="those of this host"),
        pytest.param({}, {"gpus_used": 4, "gpus": 8}, None, id="cards that others use"),
        pytest.param({}, {"gpus": 8}, (8, 8, 10), id="all cards, where none is told"),
    ],
)
def test_two_and_n_cores_are_wanted_for_the_n_cards_of_the_engine(
    cores: dict[str, float], told: dict[str, float], found: tuple[int, int, int] | None
) -> None:
    named = causes("host", lambda ms: host(at_ms=ms) | cores, launch(**told))
    facts = [
        (each["what"], each["value"], each["threshold"])
        for cause in named
        for each in cause["evidence"]
        if each["what"].startswith("physical cores")
    ]
    want = [] if found is None else [(f"physical cores, for {found[0]} GPUs", *found[1:])]
    assert facts == want


@pytest.mark.parametrize(
    ("busy", "found"),
    [
        pytest.param(0.0, [], id="there and idle"),
        pytest.param(0.04, [], id="a display"),
        pytest.param(0.2, [("gpu.contention", "info")], id="at work, and nobody pays"),
        pytest.param(0.6, [("gpu.contention", "warning")], id="most of the card"),
    ],
)
def test_a_process_on_the_card_that_does_nothing_is_no_contention(busy: float, found: list[tuple[str, str]]) -> None:
    assert of_card(lambda _: card(others=1) | {"other_busy_share": busy}) == found


def test_a_neighbour_that_works_now_and_then_pays_for_the_slow_tokens_of_that_time_alone() -> None:
    case = staged.decode_slower(1)
    case.beside = readings("gpu", case.run, lambda ms: card(others=1) | {"other_busy_share": 0.5 * (ms > staged.LATE)})
    first = case.verdict()["causes"][0]
    assert (first["cause"], first["severity"]) == ("gpu.contention", "error")
    assert first["effect_ms"]["p50"] == pytest.approx(18, rel=0.1)


def test_the_cache_of_a_start_up_log_is_one_engines_of_several() -> None:
    told = launch(kv_cache_tokens=1000, data_parallel=4)
    assert launched_capacity(Evidence.of([told])) == 4000
    assert launched_capacity(Evidence.of([launch(kv_cache_tokens=1000), launch(data_parallel=4)])) == 1000


def test_a_routers_page_is_no_engines() -> None:
    """It re-uses the engine's names: what it sums up is of all replicas and begins before the engine."""
    case = staged.queue_closed(1)
    for sample in case.run.samples:
        sample.facts["engine"] = ROUTER_NAME
    evidence = Evidence.of(case.run.samples)
    assert (len(evidence.engines), len(evidence.routers)) == (0, 1)
    assert len(next(iter(evidence.window(0, 10**18).routers.values())).samples) == len(case.run.samples)
    for record in case.run.records:
        record.engine = type(record.engine)()
    found = case.verdict()
    assert [cause["cause"] for cause in found["causes"]] == ["engine.unattributed"]
    assert "engine.queue" not in {stage for stage, part in found["budget"]["ttft"]["p50"]["stages"].items() if part}


def test_what_a_page_lacks_is_known_from_whichever_reading_told_it() -> None:
    """On disk only a reading whose absences changed names them."""
    first, second, third = (sample_of("engine", "p", at, {"running": 1.0}) for at in (1, 2, 3))
    first.absent = {"queue_s": "turn it on", "waiting": "another flag"}
    second.values["waiting"] = 3.0
    series = Series.of("p", [first, second, third])
    assert series.absent() == {"queue_s": "turn it on"}
