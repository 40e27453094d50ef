"""The budget: plain numbers in, the same numbers out, and nothing lost."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapproxy.core.record import EnginePart, Events, Record
from tapproxy.diagnose.budget import STAGES, TPOT_STAGES, TTFT_STAGES, budget, not_observable
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.links import measure_links
from tapproxy.diagnose.view import look
from tests.diagnose.make import MS, all_at_the_end, client_of, even, page, passes, sums, taps


def budget_of(
    client: list[Record] | None = None,
    outer: list[Record] | None = None,
    inner: list[Record] | None = None,
    *,
    direct: bool = False,
) -> dict[str, Any]:
    view = look(client or [], outer or [], inner or [], direct=direct)
    return budget(view, measure_links(view))


def stages_ms(band: dict[str, Any]) -> dict[str, float]:
    return {stage: round(part["ms"], 2) for stage, part in band["stages"].items() if part is not None}


def test_every_stage_of_ttft_is_what_its_two_stamps_say() -> None:
    # Each way between neighbours takes 0.2 ms, each tap 0.1 ms per direction; half a round trip is 0.025 ms.
    outer, inner = taps(passes)
    band = budget_of(client_of(outer), outer, inner)["ttft"]["p50"]
    assert round(band["total_ms"], 2) == 101.1
    assert stages_ms(band) == {
        "client": 0,
        # 0.2 in, 0.2 out, and the two halves of the round trip to the proxy.
        "network.downstream": 0.45,
        "tls": 0,
        # 0.2 in and 0.2 out, less four halves.
        "proxy": 0.3,
        "tap": 0.4,
        # Two halves on the proxy's side and the engine's round trip.
        "network.upstream": 0.1,
        # 100 ms after the inner tap's start, which wrote 0.1 ms later, less the round trip.
        "engine": 99.85,
    }
    assert abs(band["unexplained_ms"]) < 0.001
    assert band["requests"] == 4
    assert band["band"] == "P40 to P60 of TTFT@client"


def test_a_hold_is_the_proxys_and_lowers_tpot() -> None:
    outer, inner = taps(all_at_the_end)
    found = budget_of(None, outer, inner)
    assert round(found["ttft"]["p50"]["stages"]["proxy"]["ms"]) == 780
    tpot = found["tpot"]["p50"]
    assert stages_ms(tpot) == {"client": 0, "proxy": -20.0, "tap": 0, "engine.decode": 20.0}
    assert tpot["total_ms"] == 0
    assert found["ttft"]["p50"]["band"] == "P40 to P60 of TTFT@tap(outer)"


def test_a_tap_that_could_see_no_events_leaves_the_hop_to_the_client() -> None:
    outer, inner = taps(all_at_the_end)
    client = client_of(outer)
    for near in outer:
        near.headers["content-encoding"], near.events = "gzip", Events()
    found = budget_of(client, outer, inner)
    assert stages_ms(found["tpot"]["p50"])["proxy"] == -20.0
    assert round(stages_ms(found["ttft"]["p50"])["proxy"]) == 781
    assert abs(found["ttft"]["p50"]["unexplained_ms"]) < 0.001


def exact(band: dict[str, Any]) -> None:
    parts = [part["ms"] for part in band["stages"].values() if part is not None] + [band["unexplained_ms"]]
    assert sum(parts) == band["total_ms"]
    assert sum(reversed(parts)) == band["total_ms"]
    assert sum(Fraction(repr(part)) for part in parts) == Fraction(repr(band["total_ms"]))


@pytest.mark.parametrize("stray_ns", [0, 1, 333, 7_777_777, 123_456_789])
def test_stages_and_unexplained_add_up_exactly_in_json_too(stray_ns: int) -> None:
    outer, inner = taps(passes, requests=140)
    for number, (near, far) in enumerate(zip(outer, inner, strict=True)):
        near.events.arrived = [at + stray_ns * number for at in near.events.arrived]
        near.events.sent = [at + MS // 10 for at in near.events.arrived]
        near.upstream.write_start = 100_000 + number * 77
        far.engine.queue_ns = 3_333_333 + number
    found = orjson.loads(orjson.dumps(budget_of(client_of(outer), outer, inner)))
    for metric in ("ttft", "tpot"):
        for name in ("p50", "p95"):
            exact(found[metric][name])


@given(
    parts=st.lists(
        st.tuples(*(st.none() | st.integers(0, 400 * MS) for _ in range(4)), st.integers(0, 99 * MS)),
        min_size=12,
        max_size=12,
    ),
    rises=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 900), st.integers(0, 900)), min_size=2, max_size=30),
)
@settings(max_examples=60, deadline=None)
def test_whatever_the_engine_tells_stages_and_unexplained_add_up_exactly(
    parts: list[tuple[int | None, int | None, int | None, int | None, int]], rises: list[tuple[int, int, int]]
) -> None:
    """Told, seen, laid on from sums, contradictory: nothing is lost and nothing is made up."""
    outer, inner = taps(passes, requests=12)
    for far, (frontend, queue, prefill, decode, head) in zip(inner, parts, strict=True):
        far.upstream.head = head
        far.engine = EnginePart("span", frontend, queue, prefill, decode)
    count = queue_ms = prefill_ms = 0
    samples = []
    for number, (more, queued, prefilled) in enumerate(rises):
        count, queue_ms, prefill_ms = count + more, queue_ms + queued, prefill_ms + prefilled
        samples.append(page(number * 130 / len(rises), **sums(count, queue_ms / 1000, prefill_ms / 1000)))
    view = look([], outer, inner)
    found = orjson.loads(orjson.dumps(budget(view, measure_links(view), Evidence.of(samples))))
    for metric in ("ttft", "tpot"):
        band = found[metric]["p50"]
        if band["need"]:  # too few were told alike
            assert (band["total_ms"], band["stages"], band["unexplained_ms"]) == (None, {}, None)
        else:
            exact(band)


def test_what_the_engine_tells_replaces_the_undivided_engine_and_the_rest_is_unexplained() -> None:
    """Its head comes with the first token: nothing shows its frontend apart."""
    outer, inner = taps(passes)
    for far in inner:
        far.upstream.head = 100 * MS
        far.engine.source, far.engine.queue_ns, far.engine.prefill_ns = "response.metrics", 30 * MS, 50 * MS
    found = budget_of(None, outer, inner)
    band = found["ttft"]["p50"]
    assert (band["stages"]["engine.queue"]["ms"], band["stages"]["engine.prefill"]["ms"]) == (30, 50)
    assert "response.metrics" in band["stages"]["engine.queue"]["source"]
    assert band["stages"]["engine.frontend"] is None
    assert round(band["unexplained_ms"], 2) == 19.85
    # Of the client's side a round trip is known, which is a stage of TTFT; TPOT has none of it without the client.
    assert not_observable(found) == ["network.downstream", "engine.frontend"]
    # Told in parts it is not a stage that nobody could see: it is not there.
    assert [name for bands in found["ttft"].values() for name in bands["stages"] if name == "engine"] == []


@pytest.mark.parametrize("requests", [8, 12, 140])
@pytest.mark.parametrize("told", [True, False], ids=["the engine tells its parts", "the engine tells nothing"])
@pytest.mark.parametrize("encoded", [True, False], ids=["encoded before the outer tap", "events at every tap"])
def test_a_null_stage_is_named_not_observable(requests: int, told: bool, encoded: bool) -> None:
    outer, inner = taps(passes, requests=requests)
    client = client_of(outer)
    for near, far in zip(outer, inner, strict=True):
        if told:
            far.engine.source, far.engine.queue_ns, far.engine.prefill_ns = "response.metrics", 30 * MS, 50 * MS
        if encoded:
            near.headers["content-encoding"], near.events = "gzip", Events()
    found = budget_of(client, outer, inner)
    bands = [band for metric in found.values() for band in metric.values()]
    nulls = {stage for band in bands for stage, part in band["stages"].items() if part is None}
    assert nulls <= set(not_observable(found))
    # The hop then reaches to the client, and nobody sees the client's side of TPOT apart.
    assert ("network.downstream" in nulls) == (encoded and requests >= 11)


def test_stages_come_in_path_order_and_unseen_ones_are_null() -> None:
    _, inner = taps(passes)
    found = budget_of(None, None, inner)
    band = found["ttft"]["p50"]
    assert tuple(band["stages"]) == TTFT_STAGES
    assert tuple(found["tpot"]["p50"]["stages"]) == TPOT_STAGES
    unseen = ["network.downstream", "proxy", "engine.frontend", "engine.queue", "engine.prefill"]
    assert not_observable(found) == unseen
    assert [stage for stage in STAGES if stage in unseen] == unseen
    assert band["stages"]["proxy"] is None
    assert round(band["total_ms"], 2) == 100.0


def test_an_upload_is_the_clients_and_not_the_proxys() -> None:
    """The body takes 50 ms to come; the proxy passes it on when it has it whole."""
    outer, inner = taps(passes)
    for near, far in zip(outer, inner, strict=True):
        near.request.body_end = near.upstream.write_end = 50 * MS
        far.t0_mono_ns += 50 * MS
        near.events.arrived = [at + 50 * MS for at in near.events.arrived]
    band = budget_of(None, outer, inner)["ttft"]["p50"]
    assert stages_ms(band)["client"] == 49.9
    assert stages_ms(band)["proxy"] < 1


def test_connecting_and_handshake_are_the_networks_and_tls() -> None:
    outer, inner = taps(passes)
    for near, far in zip(outer, inner, strict=True):
        part = near.upstream
        part.reused, part.wanted, part.acquired, part.dns, part.connect, part.tls = (
            False,
            0,
            30 * MS,
            0,
            10 * MS,
            20 * MS,
        )
        part.write_start = part.write_end = 30 * MS + MS // 10
        far.t0_mono_ns += 30 * MS
        near.events.arrived = [at + 30 * MS for at in near.events.arrived]
    stages = stages_ms(budget_of(None, outer, inner)["ttft"]["p50"])
    assert (stages["tls"], stages["network.downstream"]) == (20, 10.05)


def test_the_taps_on_two_boots_leave_what_lies_between_them_unexplained() -> None:
    outer, inner = taps(passes)
    for far in inner:
        far.boot_id = "boot-2"
    band = budget_of(None, outer, inner)["ttft"]["p50"]
    assert band["stages"]["proxy"] is None
    assert band["unexplained_ms"] > 99


def test_too_few_requests_give_a_null_percentile_that_says_how_many_it_wants() -> None:
    outer, inner = taps(passes, requests=12)
    found = budget_of(None, outer, inner)["ttft"]
    assert found["p50"]["total_ms"] is not None
    p95 = found["p95"]
    assert (p95["total_ms"], p95["unexplained_ms"], p95["requests"], p95["need"]) == (None, None, 12, 118)
    # Not null, which would say that nobody could see them.
    assert p95["stages"] == {}


def test_requests_that_were_seen_otherwise_are_left_out_and_counted() -> None:
    outer, inner = taps(passes, requests=20)
    band = budget_of(None, outer, inner[:16])["ttft"]["p50"]
    assert band["left_out"] == 4


def test_without_usage_there_is_no_tpot() -> None:
    outer, inner = taps(passes, engine=even(20))
    for record in (*outer, *inner):
        record.usage.completion_tokens = None
        record.events.tokens = [None] * 20
    assert budget_of(None, outer, inner)["tpot"]["p50"]["total_ms"] is None
