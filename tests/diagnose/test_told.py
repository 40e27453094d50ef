"""What the engine's own figures say of one request: told, seen at the head, or laid on it from sums over many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tapproxy.core.record import Record
from tapproxy.core.sample import Sample
from tapproxy.diagnose.budget import budget, not_observable
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.links import measure_links
from tapproxy.diagnose.view import look
from tests.diagnose.make import MS, SECOND, even, page, record, sums


def answer(number: int, start_s: float, first_ms: float, *, head_ms: float | None = None) -> Record:
    """Ten tokens at 20 ms, the first after ``first_ms``; the head comes with it, or earlier."""
    made = record("inner", even(10, first_ms), number=number, t0=round(start_s * SECOND))
    made.upstream.head = round((first_ms if head_ms is None else head_ms) * MS)
    return made


def ttft(records: Sequence[Record], samples: Sequence[Sample] = (), *, outer: bool = False) -> dict[str, Any]:
    view = look([], records, []) if outer else look([], [], records)
    found: dict[str, Any] = budget(view, measure_links(view), Evidence.of(samples))
    return found


def ms(band: dict[str, Any], stage: str) -> float | None:
    part = band["stages"].get(stage)
    return None if part is None else round(part["ms"], 1)


def test_a_head_before_queue_and_prefill_shows_the_frontend() -> None:
    # Request out at 0.1 ms, head at 20.15, first token at 120.15; the round trip takes 0.05.
    records = [answer(n, n, 120.15, head_ms=20.15) for n in range(12)]
    for each in records:
        each.engine.source, each.engine.queue_ns, each.engine.prefill_ns = "response.metrics", 60 * MS, 39 * MS
    band = ttft(records)["ttft"]["p50"]
    assert (ms(band, "engine.frontend"), ms(band, "engine.queue"), ms(band, "engine.prefill")) == (20.0, 60.0, 39.0)
    assert round(band["unexplained_ms"], 1) == 1.0
    assert band["stages"]["engine.frontend"]["source"] == "request out to response head in, less the round trip"


@pytest.mark.parametrize("head_ms", [120.15, 120.0, 60.0])
def test_a_head_that_waited_for_the_token_or_the_queue_shows_no_frontend(head_ms: float) -> None:
    records = [answer(n, n, 120.15, head_ms=head_ms) for n in range(12)]
    for each in records:
        each.engine.source, each.engine.queue_ns, each.engine.prefill_ns = "response.metrics", 60 * MS, 39 * MS
    band = ttft(records)["ttft"]["p50"]
    assert ms(band, "engine.frontend") is None
    assert round(band["unexplained_ms"], 1) == 21.0


def test_a_head_alone_divides_nothing() -> None:
    """An engine that tells nothing is one stage: a head may be sent at any time."""
    band = ttft([answer(n, n, 120.15, head_ms=20.15) for n in range(12)])["ttft"]["p50"]
    assert (ms(band, "engine"), ms(band, "engine.frontend")) == (120.0, None)


def test_one_request_between_two_readings_is_told_exactly_and_for_every_band() -> None:
    records = [answer(n, n + 0.1, 100 + n) for n in range(140)]
    samples = [page(n, **sums(n, 0.06 * n, 0.03 * n)) for n in range(141)]
    found = ttft(records, samples)["ttft"]
    for band in found.values():
        assert (ms(band, "engine.queue"), ms(band, "engine.prefill")) == (60.0, 30.0)
        assert band["stages"]["engine.queue"]["bound_ms"] < 0.1
    assert "140 windows, n=1 each" in found["p50"]["stages"]["engine.queue"]["source"]


def test_many_between_two_readings_are_a_mean_for_the_middle_and_nothing_for_the_tail() -> None:
    records = [answer(n, 1 + n / 100, 100 + n % 7) for n in range(140)]
    samples = [page(0, **sums(1000, 50, 50)), page(10, **sums(1140, 50 + 140 * 0.06, 50 + 140 * 0.03))]
    found = ttft(records, samples)["ttft"]
    middle, tail = found["p50"], found["p95"]
    assert abs((ms(middle, "engine.queue") or 0) - 60) < 1
    assert "mean over the requests of 1 window, n=140 each" in middle["stages"]["engine.queue"]["source"]
    # How far it may be off for one request: anything that its time in the engine allows.
    assert middle["stages"]["engine.queue"]["bound_ms"] > 30
    # What the sums do not cover is not spread: 103 ms on average, of which 90 are told.
    assert 10 < middle["unexplained_ms"] < 15
    assert ms(tail, "engine.queue") is None
    assert (ms(tail, "engine") or 0) > 100
    assert abs(tail["unexplained_ms"]) < 0.01
    assert not {"engine.queue", "engine.prefill"} - set(not_observable({"ttft": found}))


def test_heads_that_came_before_queue_and_prefill_show_the_frontend_beside_a_page_too() -> None:
    """Queues of 0 and 120 ms, prefills of 30: a mean of the two hides that each head left in time."""
    records = [answer(n, 1 + n / 10, 50 + (n % 2) * 120, head_ms=20.15) for n in range(20)]
    samples = [page(0, **sums(0, 0, 0)), page(10, **sums(20, 20 * 0.06, 20 * 0.0295))]
    assert ms(ttft(records, samples)["ttft"]["p50"], "engine.frontend") == 20.0
    late = [answer(n, 1 + n / 10, 50 + (n % 2) * 120) for n in range(20)]
    assert ms(ttft(late, samples)["ttft"]["p50"], "engine.frontend") is None


def test_sums_of_other_peoples_requests_are_not_laid_on_these() -> None:
    records = [answer(n, 1 + n / 10, 100) for n in range(20)]
    samples = [page(0, **sums(0, 0, 0)), page(10, **sums(40, 40, 4))]
    band = ttft(records, samples)["ttft"]["p50"]
    assert (ms(band, "engine"), ms(band, "engine.queue")) == (99.8, None)


def test_half_of_the_requests_elsewhere_are_a_mean_with_no_bound() -> None:
    records = [answer(n, 1 + n / 10, 100) for n in range(20)]
    samples = [page(0, **sums(0, 0, 0)), page(10, **sums(40, 40 * 0.05, 40 * 0.02))]
    band = ttft(records, samples)["ttft"]["p50"]
    assert (ms(band, "engine.queue"), ms(band, "engine.prefill")) == (50.0, 20.0)
    assert band["stages"]["engine.queue"]["bound_ms"] is None
    assert "n=40 each, counted 40 for 20 here" in band["stages"]["engine.queue"]["source"]


def test_another_boots_readings_say_nothing() -> None:
    records = [answer(n, n + 0.1, 100) for n in range(20)]
    samples = [page(n, **sums(n, 0.06 * n, 0.03 * n)) for n in range(21)]
    for sample in samples:
        sample.boot_id = "boot-9"
    assert ms(ttft(records, samples)["ttft"]["p50"], "engine.queue") is None


@pytest.mark.parametrize(("begins", "frontend"), [("before tokenising", 9.0), ("after tokenising", None)])
def test_a_mean_frontend_needs_a_ttft_that_begins_before_it(begins: str, frontend: float | None) -> None:
    records = [answer(n, n + 0.1, 100) for n in range(20)]
    samples = [page(n, **sums(n, 0.06 * n, 0.03 * n, 0.099 * n)) for n in range(21)]
    for sample in samples:
        sample.facts["ttft_from"] = begins
    assert ms(ttft(records, samples)["ttft"]["p50"], "engine.frontend") == frontend


def api_process(*, others: int = 1) -> tuple[list[Record], list[Sample]]:
    """As a real vLLM does it, idle: the head leaves at 3 ms, after tokenising; handing the request on and writing the
    first token take 3 ms more. TTFT 13, of which the engine counts 11 from when it has parsed the request; its E2E of
    whole answers is 1.5 ms less than what the tap sees of them."""
    records = [answer(n, n + 0.1, 13.15, head_ms=3.15) for n in range(20)]
    for each in records:
        each.engine.source, each.engine.queue_ns, each.engine.prefill_ns = "response.metrics", 0, 7 * MS
    samples = []
    for n in range(21):
        count = n * others
        e2e = {"e2e_s_sum": count * (0.013 + 9 * 0.020 - 0.0015), "e2e_s_count": count}
        samples.append(page(n, **sums(count, 0, 0.007 * count, 0.011 * count), **e2e))
        samples[-1].facts["ttft_from"] = "before tokenising"
    return records, samples


def test_what_the_api_process_does_behind_the_head_is_the_frontends_too() -> None:
    records, samples = api_process()
    band = ttft(records, samples)["ttft"]["p50"]
    assert (ms(band, "engine.frontend"), ms(band, "engine.prefill")) == (5.5, 7.0)
    assert round(band["unexplained_ms"], 1) == 0.5
    assert band["stages"]["engine.frontend"]["bound_ms"] is None
    assert "the tap's E2E − E2E" in band["stages"]["engine.frontend"]["source"]
    # Without the page the head is all that shows it, and the rest is said to be unexplained.
    band = ttft(records)["ttft"]["p50"]
    assert (ms(band, "engine.frontend"), round(band["unexplained_ms"], 1)) == (3.0, 3.0)


def test_what_a_span_told_of_a_requests_frontend_is_not_overruled_by_a_mean() -> None:
    records, samples = api_process()
    for each in records:
        each.engine.frontend_ns = round(3.4 * MS)
    assert ms(ttft(records, samples)["ttft"]["p50"], "engine.frontend") == 4.9
    for sample in samples:
        del sample.values["e2e_s_sum"], sample.values["e2e_s_count"]
    assert ms(ttft(records, samples)["ttft"]["p50"], "engine.frontend") == 3.4


def test_a_mean_over_long_and_short_prompts_is_laid_where_it_has_room() -> None:
    """The API process takes 60 ms for one prompt of five and 3 for the others; read all at once, the mean of 14.4 is
    nobody's. The short ones have room for 4 ms each, and are not told to have spent more."""
    records = []
    for n in range(40):
        is_long = n % 5 == 0
        records.append(answer(n, 1 + n / 5, 150 if is_long else 14.15, head_ms=3.15))
        records[-1].engine.source, records[-1].engine.queue_ns = "response.metrics", 0
        records[-1].engine.prefill_ns = (85 if is_long else 10) * MS
    samples = [page(0, **sums(0, 0, 0, 0)), page(20, **sums(40, 0, 8 * 0.085 + 32 * 0.01, 8 * 0.145 + 32 * 0.013))]
    for sample in samples:
        sample.facts["ttft_from"] = "before tokenising"
    band = ttft(records, samples)["ttft"]["p50"]
    assert 3.0 <= (ms(band, "engine.frontend") or 0) <= 4.1
    assert 0 <= band["unexplained_ms"] <= 1.1


def test_whole_answers_of_other_requests_or_from_before_a_proxy_tell_nothing_of_the_api_process() -> None:
    records, samples = api_process(others=2)
    source = ttft(records, samples)["ttft"]["p50"]["stages"]["engine.frontend"]["source"]
    assert "E2E" not in source
    records, samples = api_process()
    for each in records:
        each.upstream.head = round(13.15 * MS)
    band = ttft(records, samples, outer=True)["ttft"]["p50"]
    assert ms(band, "engine.frontend") == 4.0
    assert "E2E" not in band["stages"]["engine.frontend"]["source"]


def test_a_mean_ttft_of_requests_that_came_to_no_end_tells_no_frontend() -> None:
    records = [answer(n, n + 0.1, 100) for n in range(20)]
    samples = [page(n, **sums(n, 0.06 * n, 0.03 * n, 0.099 * n)) for n in range(21)]
    samples[-1].values["ttft_s_count"], samples[-1].values["ttft_s_sum"] = 22, 20 * 0.099 + 2 * 30
    for sample in samples:
        sample.facts["ttft_from"] = "before tokenising"
    assert ms(ttft(records, samples)["ttft"]["p50"], "engine.frontend") is None


def test_what_a_response_told_of_itself_is_not_overruled_by_a_mean() -> None:
    records = [answer(n, n + 0.1, 100) for n in range(20)]
    for each in records:
        each.engine.source, each.engine.queue_ns = "span", 11 * MS
    samples = [page(n, **sums(n, 0.06 * n, 0.03 * n)) for n in range(21)]
    band = ttft(records, samples)["ttft"]["p50"]
    assert (ms(band, "engine.queue"), ms(band, "engine.prefill")) == (11.0, 30.0)


def test_behind_a_proxy_the_engines_parts_are_told_and_the_rest_is_unexplained() -> None:
    records = [answer(n, n, 300) for n in range(12)]
    for each in records:
        each.engine.source, each.engine.queue_ns, each.engine.prefill_ns = "response.metrics", 60 * MS, 39 * MS
        each.engine.decode_ns = 9 * 15 * MS
    found = ttft(records, outer=True)
    band = found["ttft"]["p50"]
    assert (ms(band, "engine.queue"), ms(band, "proxy"), ms(band, "engine")) == (60.0, None, None)
    assert band["unexplained_ms"] > 200
    tpot = found["tpot"]["p50"]
    assert (ms(tpot, "engine.decode"), round(tpot["unexplained_ms"], 1)) == (15.0, 5.0)


def test_an_answer_that_was_made_first_and_sent_after_shows_its_decode_in_ttft() -> None:
    records = [record("inner", [300 * MS] * 10, number=n, t0=n * SECOND) for n in range(12)]
    for each in records:
        each.upstream.head = 300 * MS
        each.engine.source, each.engine.queue_ns, each.engine.prefill_ns = "response.metrics", 20 * MS, 78 * MS
        each.engine.decode_ns = 200 * MS
    found = ttft(records)
    band = found["ttft"]["p50"]
    assert ms(band, "engine.decode") == 200.0
    assert round(band["unexplained_ms"], 1) == 1.8
    assert ms(found["tpot"]["p50"], "engine.decode") == 0.0


def test_a_decode_that_was_told_of_the_request_is_not_laid_on_it_again() -> None:
    records = [record("inner", [300 * MS] * 10, number=n, t0=round((n + 0.1) * SECOND)) for n in range(20)]
    for each in records:
        each.upstream.head = 300 * MS
        each.engine.source, each.engine.queue_ns, each.engine.prefill_ns = "response.metrics", 20 * MS, 78 * MS
        each.engine.decode_ns = 200 * MS
    samples = [page(n, **sums(n, 0.02 * n, 0.078 * n), decode_s_sum=0.2 * n, decode_s_count=n) for n in range(21)]
    band = ttft(records, samples)["ttft"]["p50"]
    assert (ms(band, "engine.decode"), round(band["unexplained_ms"], 1)) == (200.0, 1.8)


def test_a_page_tells_the_decode_that_lies_before_the_first_token_too() -> None:
    records = [record("inner", [300 * MS] * 10, number=n, t0=round((n + 0.1) * SECOND)) for n in range(20)]
    for each in records:
        each.upstream.head = 300 * MS
    samples = [page(n, **sums(n, 0.02 * n, 0.078 * n), decode_s_sum=0.2 * n, decode_s_count=n) for n in range(21)]
    found = ttft(records, samples)
    band = found["ttft"]["p50"]
    assert (ms(band, "engine.queue"), ms(band, "engine.prefill"), ms(band, "engine.decode")) == (20.0, 78.0, 200.0)
    assert round(band["unexplained_ms"], 1) == 1.8
    assert ms(found["tpot"]["p50"], "engine.decode") == 0.0
    # Streamed as they are made, the decode is none of TTFT.
    streamed = [answer(n, n + 0.1, 100) for n in range(20)]
    assert ms(ttft(streamed, samples)["ttft"]["p50"], "engine.decode") is None


def test_a_decode_that_lies_before_the_first_token_counts_once_though_two_tell_of_it() -> None:
    """An answer made first and streamed afterwards: the response tells of its decode, and so does the page."""
    records = []
    for n in range(20):
        at_once = [500 + 0.01 * token for token in range(10)]
        made = record("inner", [round(ms_ * MS) for ms_ in at_once], number=n, t0=round((n + 0.1) * SECOND))
        made.engine.source, made.engine.queue_ns, made.engine.prefill_ns = "response.metrics", 60 * MS, 39 * MS
        made.engine.decode_ns = 400 * MS
        records.append(made)
    samples = [
        page(n, **sums(n, 0.06 * n, 0.039 * n), decode_s_sum=0.4 * n, decode_s_count=float(n)) for n in range(21)
    ]
    for beside in ([], samples):
        band = ttft(records, beside)["ttft"]["p50"]
        assert ms(band, "engine.decode") == 400.0
        assert abs(band["unexplained_ms"]) < 2
