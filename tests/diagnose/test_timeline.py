"""Latency and what changed, on one line of time."""

from __future__ import annotations

from typing import Any

from tapproxy.core.record import Record
from tapproxy.core.sample import Sample
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.timeline import TapStart, timeline
from tests.diagnose.make import SECOND, even, page, record

MINUTE = 60 * SECOND


def at(seconds: float, number: int = 0, first_ms: float = 100, prompt: int = 64) -> Record:
    made = record("tap", even(5, first_ms), number=number, t0=round(seconds * SECOND))
    made.usage.prompt_tokens, made.model = prompt, "m"
    return made


def every(seconds: float, count: int, start_s: float = 0, **more: Any) -> list[Record]:
    return [at(start_s + seconds * number, number, **more) for number in range(count)]


def marks(records: list[Record], samples: list[Sample] | None = None, starts: tuple[TapStart, ...] = ()) -> list[str]:
    found = timeline(records, Evidence.of(samples or []), starts)
    assert found is not None
    return [f"{mark['kind']}: {mark['what']}" for mark in found["marks"]]


def test_no_request_no_line() -> None:
    assert timeline([], Evidence()) is None


def test_bins_are_as_long_as_a_median_needs() -> None:
    """Ten minutes with a request a second: 54 bins of 11 fit, 40 at most are shown, and 30 s is the next step."""
    found = timeline(every(1, 600), Evidence())
    assert found is not None
    assert (found["bin_s"], len(found["bins"])) == (30, 20)
    assert {each["requests"] for each in found["bins"]} == {30}
    assert {each["ttft_ms"]["p50"] for each in found["bins"]} == {100.0}
    assert found["bins"][0]["from"] == "1970-01-01T00:00:00Z"
    assert found["marks"] == []


def test_few_requests_are_one_bin_with_a_median() -> None:
    found = timeline(every(60, 12), Evidence())
    assert found is not None
    assert [each["ttft_ms"]["p50"] for each in found["bins"] if each["requests"]] == [100.0]


def test_steady_traffic_has_no_mark() -> None:
    samples = [page(n, running=3, process_start_s=-50, finished=n) for n in range(600)]
    assert marks(every(1, 600), samples) == []


def test_an_engine_that_began_anew_is_marked_when_it_began() -> None:
    samples = [page(n, process_start_s=-50 if n < 300 else 299, finished=n % 300) for n in range(600)]
    assert marks(every(1, 600), samples) == [
        "engine restart: the engine at http://127.0.0.1:8000/metrics started anew",
    ]


def test_counters_that_fell_tell_a_restart_without_a_start_time() -> None:
    samples = [page(n, finished=n % 300) for n in range(600)]
    found = marks(every(1, 600), samples)
    assert found == ["engine restart: counters of http://127.0.0.1:8000/metrics fell: the engine started anew"]


def test_another_version_and_a_changed_setting_are_marked() -> None:
    samples = [page(n) for n in range(600)]
    for number, sample in enumerate(samples):
        late = number >= 200
        sample.facts = {
            "version": "0.11" if late else "0.10",
            "version_from": "the engine",
            "kv_dtype": "fp8"[: 2 + late],
        }
    found = marks(every(1, 600), samples)
    assert [mark.partition(" (http")[0] for mark in found] == [
        "engine change: another version: 0.10 → 0.11",
        "setting: kv dtype changed: fp → fp8",
    ]


def test_a_better_guess_at_a_version_is_no_other_version() -> None:
    samples = [page(n) for n in range(600)]
    for number, sample in enumerate(samples):
        sample.facts = {"version": "0.11 or later" if number else "0.9 or later", "version_from": "its metric names"}
    assert marks(every(1, 600), samples) == []


def test_a_page_that_could_not_be_read_is_one_mark_a_run() -> None:
    samples = [page(n) for n in range(600)]
    for sample in (*samples[100:160], *samples[400:420], samples[500]):
        sample.problem = "connection refused"
    found = marks(every(1, 600), samples)
    assert found == [
        "engine unreadable: http://127.0.0.1:8000/metrics could not be read for 59 s: connection refused",
        "engine unreadable: http://127.0.0.1:8000/metrics could not be read for 19 s: connection refused",
        "engine unreadable: http://127.0.0.1:8000/metrics could not be read: connection refused",
    ]


def test_traffic_that_jumps_is_marked_and_chance_is_not() -> None:
    calm = every(1, 300)
    rush = every(0.2, 1500, start_s=300)
    assert marks([*calm, *rush]) == ["traffic: 1 → 5 requests a second"]
    assert marks([*calm, *every(0.7, 430, start_s=300)]) == []


def test_longer_prompts_are_a_change_of_traffic() -> None:
    found = marks([*every(1, 300), *every(1, 300, start_s=300, prompt=4000)])
    assert found == ["traffic: prompts of 64 → 4000 tokens at P50"]


def test_a_silence_and_another_model() -> None:
    late = every(1, 300, start_s=900)
    for each in late:
        each.model = "n"
    found = marks([*every(1, 300), *late])
    assert found == ["silence: no request for 601 s", "model: first request for model n"]


def test_a_tap_that_was_started_again_in_between() -> None:
    starts = (TapStart("tap", 0), TapStart("tap", 300 * SECOND), TapStart("tap", 10**15))
    assert marks(every(1, 600), starts=starts) == ["tap: tap tap started, anew or with another process"]


def test_gauges_are_the_readings_of_their_bin() -> None:
    samples = [page(n, running=n // 30, kv_usage_share=0.5) for n in range(600)]
    found = timeline(every(1, 600), Evidence.of(samples))
    assert found is not None
    assert [each["running"] for each in found["bins"]] == list(range(20))
    assert {each["kv_usage_share"] for each in found["bins"]} == {0.5}
    assert {each["waiting"] for each in found["bins"]} == {None}
