"""The verdict: every cause fires on what was made to show it, and nothing fires on a path that streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from tapproxy.core.record import Record
from tapproxy.diagnose.causes import RULES, verdict
from tests.diagnose.make import (
    MS,
    Proxy,
    all_at_the_end,
    buffer_of,
    busy,
    client_of,
    even,
    every,
    late_by,
    limited_in_lumps,
    limited_to,
    noisy,
    one_event_late,
    passes,
    taps,
)
from tests.diagnose.staged import STAGED

LONG = even(120)


def of_taps(proxy: Proxy, **engine: Any) -> dict[str, Any]:
    outer, inner = taps(proxy, **engine)
    return verdict(outer=outer, inner=inner)


def names(found: dict[str, Any]) -> list[str]:
    """The causes, and after them what is only worth knowing."""
    return [cause["cause"] for cause in told(found)]


def told(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [*found["causes"], *found["worth_knowing"]]


def cause_of(found: dict[str, Any], name: str) -> dict[str, Any]:
    (cause,) = (cause for cause in told(found) if cause["cause"] == name)
    assert isinstance(cause, dict)
    return cause


def fact_of(cause: dict[str, Any], what: str) -> dict[str, Any]:
    (fact,) = (fact for fact in cause["evidence"] if fact["what"].startswith(what))
    assert isinstance(fact, dict)
    return fact


def rejected_by(cause: dict[str, Any]) -> dict[str, str]:
    return {rival["cause"]: rival["because"] for rival in cause["rejected"]}


HEALTHY: list[Any] = [
    pytest.param(passes, {}, id="passes every event on"),
    pytest.param(passes, {"engine": even(120, gap_ms=3)}, id="fast tokens"),
    pytest.param(busy, {}, id="a busy machine, single hiccups of 30 ms"),
    pytest.param(busy, {"engine": even(120, gap_ms=3)}, id="a busy machine and fast tokens"),
    pytest.param(passes, {"engine": even(1)}, id="answers of one token"),
    pytest.param(all_at_the_end, {"engine": even(1)}, id="one token, which is also the end"),
    pytest.param(late_by(5), {}, id="a line of 5 ms"),
]


@pytest.mark.parametrize(("proxy", "engine"), HEALTHY)
@pytest.mark.parametrize("with_client", [False, True], ids=["taps", "taps and client"])
def test_a_path_that_streams_is_healthy(proxy: Proxy, engine: dict[str, Any], with_client: bool) -> None:
    outer, inner = taps(proxy, **engine)
    found = verdict(client=client_of(outer) if with_client else (), outer=outer, inner=inner)
    assert (found["verdict"], found["causes"]) == ("healthy", [])
    assert found["trust"] == {"ok": True, "warnings": []}


@pytest.mark.parametrize("gap_ms", [1, 3, 8, 20])
@pytest.mark.parametrize("seed", range(4))
def test_noise_neither_accuses_nor_excuses(gap_ms: int, seed: int) -> None:
    engine = even(120, gap_ms=gap_ms)
    assert names(of_taps(noisy(passes, seed), engine=engine)) == []
    assert names(of_taps(noisy(buffer_of(4096), seed), engine=engine)) == ["proxy.response_buffering"]


@pytest.mark.parametrize(
    ("proxy", "engine", "mechanism"),
    [
        pytest.param(buffer_of(4096), {}, "about 4 kB a burst", id="read buffer of 4 kB (M1)"),
        pytest.param(buffer_of(15_600), {"engine": LONG}, "about 16 kB a burst", id="TLS write buffer (M2)"),
        pytest.param(all_at_the_end, {}, "one burst at the end", id="all at the end (M3)"),
        pytest.param(buffer_of(16_384), {}, "one burst at the end", id="an answer smaller than the buffer"),
        pytest.param(every(130), {"engine": LONG}, "bursts at a constant distance", id="batch timer"),
        pytest.param(one_event_late, {}, "each event waits for the next one", id="one event late"),
        pytest.param(buffer_of(1400), {"engine": LONG}, "bursts of no known size", id="a buffer of an unusual size"),
        pytest.param(buffer_of(4096), {"engine": even(120, gap_ms=3)}, "about 4 kB a burst", id="fast tokens"),
    ],
)
def test_a_hop_that_holds_and_releases_in_lumps_is_named_with_its_mechanism(
    proxy: Proxy, engine: dict[str, Any], mechanism: str
) -> None:
    found = of_taps(proxy, **engine)
    assert (found["verdict"], names(found)) == ("degraded", ["proxy.response_buffering"])
    cause = cause_of(found, "proxy.response_buffering")
    assert (cause["stage"], cause["severity"]) == ("proxy", "error")
    assert any(fact["what"].startswith(mechanism) for fact in cause["evidence"])
    assert cause["confidence"] >= 0.5
    assert cause["advice"]


def test_the_evidence_of_buffering_is_the_hold_the_tell_and_every_rival_with_its_number() -> None:
    # 40 tokens, 20 ms apart, all released with the last: the first waits 39 × 20 ms.
    cause = cause_of(of_taps(all_at_the_end), "proxy.response_buffering")
    assert cause["metric"] == "ttft"
    assert cause["effect_ms"] == {"p50": 780.2, "p95": None}
    first = fact_of(cause, "first token held")
    assert (first["value"], first["unit"], first["n"], first["threshold"]) == (780.2, "ms", 12, 10.2)
    assert fact_of(cause, "floor of the hop")["value"] == 0.2
    assert fact_of(cause, "TTFT before the hop")["value"] == 100.0
    assert fact_of(cause, "ICL before the hop")["value"] == 20.0
    assert fact_of(cause, "ICL after the hop")["value"] == 0.0
    assert fact_of(cause, "token events a read, before")["value"] == 1.0
    assert fact_of(cause, "token events a read, after")["value"] == 40.0
    assert fact_of(cause, "events held")["threshold"] == 10.0
    rejected = rejected_by(cause)
    assert set(rejected) == {
        "network.downstream",
        "network.upstream",
        "network.loss",
        "proxy.compression",
        "proxy.rate_limit",
        "client.slow_reader",
        "engine.synthetic_stream",
        "engine.bundling",
        "tap.overhead",
    }
    assert all(any(sign.isdigit() for sign in why) for name, why in rejected.items() if name != "proxy.compression")


def test_buffering_that_only_some_clients_meet_is_named_and_a_single_stream_is_not() -> None:
    outer, inner = taps(passes, requests=20)
    held, _ = taps(all_at_the_end, requests=20)
    assert names(verdict(outer=[*outer[:15], *held[15:]], inner=inner)) == ["proxy.response_buffering"]
    assert names(verdict(outer=[*outer[:19], *held[19:]], inner=inner)) == []


def test_the_client_can_be_the_nearer_side_of_the_hop() -> None:
    outer, inner = taps(all_at_the_end)
    found = verdict(client=client_of(outer), inner=inner)
    assert names(found) == ["proxy.response_buffering"]


def test_a_long_line_is_no_buffer() -> None:
    """The farther side is fast, the nearer one slow by a constant 40 ms: the round trip says it is the line."""
    outer, inner = taps(late_by(40))
    for near in outer:
        near.upstream.rtt_ns = 80 * MS
    for far, near in zip(inner, outer, strict=True):
        far.t0_mono_ns += 40 * MS
        for times in (near.events.arrived, near.events.read_at):
            times[:] = [at + 40 * MS for at in times]
        near.events.sent = [at + MS // 10 for at in near.events.arrived]
    found = verdict(outer=outer, inner=inner)
    assert names(found) == ["network.downstream"]
    cause = cause_of(found, "network.downstream")
    assert cause["effect_ms"]["p50"] == 80.0
    assert "proxy.response_buffering" in rejected_by(cause)


@pytest.mark.parametrize("rtt_ms", [20, 40, 80])
def test_a_constant_delay_that_a_round_trip_explains_accuses_no_proxy(rtt_ms: int) -> None:
    outer, inner = taps(late_by(20))
    for near in outer:
        near.upstream.rtt_ns = rtt_ms * MS
    found = verdict(outer=outer, inner=inner)
    assert not [name for name in names(found) if name.startswith("proxy")]
    assert not [warning for warning in found["trust"]["warnings"] if warning.startswith("proxy takes")]


def test_a_constant_delay_that_nothing_explains_is_neither_buffering_nor_health() -> None:
    found = of_taps(late_by(60))
    assert (found["verdict"], names(found)) == ("degraded", [])
    assert any(warning.startswith("proxy takes 60") for warning in found["trust"]["warnings"])
    assert any("constant delay" in warning for warning in found["trust"]["warnings"])


def compressed(outer: Sequence[Record], *, decoded: bool) -> None:
    """What a tap, or a client that decodes, sees of a stream that became gzip."""
    for near in outer:
        near.headers["content-encoding"] = "gzip"
        near.upstream.first_byte = near.events.arrived[0]
        near.upstream.end = near.events.arrived[-1]
        if not decoded:
            near.events = type(near.events)()


@pytest.mark.parametrize("decoded", [True, False], ids=["events decoded", "events hidden"])
def test_a_hold_that_comes_with_gzip_is_the_compressors(decoded: bool) -> None:
    outer, inner = taps(all_at_the_end)
    compressed(outer, decoded=decoded)
    found = verdict(outer=outer, inner=inner)
    assert (found["verdict"], names(found)) == ("degraded", ["proxy.compression"])
    cause = cause_of(found, "proxy.compression")
    assert cause["effect_ms"]["p50"] == 780.2
    assert "proxy.response_buffering" in rejected_by(cause)


@pytest.mark.parametrize("decoded", [True, False], ids=["events decoded", "events hidden"])
def test_gzip_that_is_flushed_with_every_event_is_healthy(decoded: bool) -> None:
    outer, inner = taps(passes)
    client = client_of(outer)
    compressed(outer, decoded=decoded)
    found = verdict(client=client, outer=outer, inner=inner)
    assert (found["verdict"], names(found)) == ("healthy", [])


def test_gzip_hides_the_events_from_the_tap_and_the_client_takes_its_place() -> None:
    outer, inner = taps(all_at_the_end)
    client = client_of(outer)
    for seen in client:
        seen.headers["content-encoding"] = "gzip"
    compressed(outer, decoded=False)
    assert names(verdict(client=client, outer=outer, inner=inner)) == ["proxy.compression"]


def test_an_engine_that_compresses_itself_is_not_the_proxy() -> None:
    outer, inner = taps(all_at_the_end)
    for record in (*outer, *inner):
        record.headers["content-encoding"] = "gzip"
    assert names(of := verdict(outer=outer, inner=inner)) == ["proxy.response_buffering"], of


def test_a_limited_rate_is_no_buffer() -> None:
    # 210 bytes every 20 ms are 10.5 kB/s; 5 kB/s lets the last of 120 tokens wait 2.6 s.
    found = of_taps(limited_to(5000), engine=LONG)
    assert names(found) == ["proxy.rate_limit"]
    assert fact_of(found["causes"][0], "bytes a second")["value"] == 5000


def test_a_limited_rate_in_lumps_is_no_buffer_either() -> None:
    """nginx with limit_rate behind TLS: lumps as a buffer's, but the answer lags when the engine is long done."""
    found = of_taps(limited_in_lumps(5000), engine=LONG)
    assert names(found) == ["proxy.rate_limit"]


def test_a_client_that_reads_slowly_is_the_clients_doing() -> None:
    outer, inner = taps(all_at_the_end)
    for near in outer:
        near.downstream.stalled_ns = 700 * MS
        near.downstream.unsent_max_bytes = 100_000
    found = verdict(outer=outer, inner=inner)
    assert names(found) == ["client.slow_reader"]
    assert cause_of(found, "client.slow_reader")["stage"] == "client"


def test_a_slow_client_of_a_lone_tap_is_seen_there() -> None:
    _, inner = taps(passes)
    for far in inner:
        far.downstream.stalled_ns = 700 * MS
        far.events.sent = [(at or 0) + 700 * MS for at in far.events.sent]
    assert names(verdict(inner=inner)) == ["client.slow_reader"]


def test_an_engine_that_makes_the_answer_first_is_named_and_the_proxy_is_not() -> None:
    at_once = [800 * MS + MS // 10 * index for index in range(40)]
    found = of_taps(passes, engine=at_once)
    assert names(found) == ["engine.synthetic_stream"]
    assert cause_of(found, "engine.synthetic_stream")["stage"] == "engine.decode"


def test_an_answer_of_a_moment_is_no_synthetic_stream() -> None:
    """A real vLLM whose API process was busy: sixteen tokens, made in 24 ms, and written in one go."""
    assert names(of_taps(passes, engine=[35 * MS] * 16)) == []


def test_a_short_answer_after_a_long_prefill_is_no_synthetic_stream() -> None:
    assert names(of_taps(passes, engine=even(10, first_ms=10_000, gap_ms=20))) == []


@pytest.mark.parametrize(
    ("engine", "extra"),
    [
        pytest.param(even(20, gap_ms=80), {"tokens": 4}, id="four tokens an event"),
        pytest.param(
            [100 * MS + 80 * MS * (index // 4) for index in range(40)],
            {"reads": [index // 4 for index in range(40)]},
            id="four events a read",
        ),
    ],
)
def test_an_engine_that_bundles_is_named_and_the_proxy_is_not(engine: list[int], extra: dict[str, Any]) -> None:
    found = of_taps(passes, engine=engine, **extra)
    assert names(found) == ["engine.bundling"]
    cause = cause_of(found, "engine.bundling")
    assert fact_of(cause, "tokens at a time")["value"] == 4.0
    # Token by token there would be 20 ms between them; now there are 80.
    assert cause["effect_ms"]["p50"] == 60.0


def test_a_buffer_behind_a_bundling_engine_is_named_beside_it() -> None:
    found = of_taps(buffer_of(4096), engine=even(40, gap_ms=80), tokens=4)
    assert names(found) == ["proxy.response_buffering", "engine.bundling"]


def test_a_tap_that_takes_a_noticeable_part_accuses_itself() -> None:
    outer, inner = taps(passes)
    for far in inner:
        far.events.sent = [at + 9 * MS for at in far.events.arrived]
    for near in outer:
        near.events.arrived = [at + 9 * MS for at in near.events.arrived]
        near.events.sent = [at + 9 * MS for at in near.events.arrived]
    found = verdict(outer=outer, inner=inner)
    assert names(found) == ["tap.overhead"]
    assert cause_of(found, "tap.overhead")["severity"] == "warning"


def test_waiting_for_client_or_connection_is_not_the_taps_overhead() -> None:
    outer, inner = taps(passes)
    for far in inner:
        far.request.head, far.upstream.wanted, far.upstream.acquired = 20 * MS, 20 * MS, 60 * MS
        far.upstream.write_start = far.upstream.write_end = 60 * MS
    assert "tap.overhead" not in names(verdict(outer=outer, inner=inner))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        pytest.param({"status": 500}, "failed: status", id="status"),
        pytest.param({"ended": "upstream_aborted"}, "failed: truncated", id="cut"),
        pytest.param({"ended": "upstream_unreachable", "status": 502}, "failed: status", id="unreachable"),
    ],
)
def test_an_engine_that_fails_is_named(change: dict[str, Any], what: str) -> None:
    outer, inner = taps(passes, requests=20)
    for record in (*outer[:3], *inner[:3]):
        for name, value in change.items():
            setattr(record, name, value)
    found = verdict(outer=outer, inner=inner)
    assert names(found) == ["engine.errors"]
    assert fact_of(found["causes"][0], what)["value"] == 3
    if change.get("ended") == "upstream_unreachable":
        assert fact_of(found["causes"][0], "of these: no connection to the engine")["value"] == 3


def test_failures_that_no_rule_names_are_not_healthy() -> None:
    outer, inner = taps(passes, requests=20)
    for near in outer[:3]:
        near.status = 502
    found = verdict(outer=outer, inner=inner[3:])
    assert (found["verdict"], found["causes"]) == ("degraded", [])
    assert "3 of 20 requests failed (status 3) and no rule names why" in found["trust"]["warnings"]


def test_a_request_that_the_client_got_wrong_is_nobodys_failure() -> None:
    outer, inner = taps(passes, requests=20)
    for record in (*outer[:3], *inner[:3]):
        record.status = 400
    assert "engine.errors" not in names(verdict(outer=outer, inner=inner))


@pytest.mark.parametrize("proxy", [passes, all_at_the_end], ids=["streams", "holds"])
def test_too_few_requests_give_no_verdict_and_say_how_many_more(proxy: Proxy) -> None:
    found = of_taps(proxy, requests=8)
    assert (found["verdict"], names(found)) == ("not_measured", ["measurement.too_few_samples"])
    cause = found["causes"][0]
    assert (cause["stage"], cause["evidence"][0]["n"], cause["evidence"][0]["threshold"]) == (None, 8, 11)
    assert cause["advice"] == "Send 3 more requests: a median wants 11."
    assert found["budget"]["ttft"]["p50"]["total_ms"] is None


def test_no_records_give_no_verdict() -> None:
    found = verdict()
    assert (found["verdict"], names(found)) == ("not_measured", ["measurement.too_few_samples"])
    assert "there are no records" in found["trust"]["warnings"]


@pytest.mark.parametrize("proxy", [passes, all_at_the_end], ids=["streams", "holds"])
def test_behind_a_proxy_alone_its_hold_is_not_observable(proxy: Proxy) -> None:
    _, inner = taps(proxy)
    found = verdict(inner=inner)
    assert "proxy" in found["not_observable"]
    assert not [name for name in names(found) if name.startswith("proxy")]
    assert found["budget"]["ttft"]["p50"]["stages"]["proxy"] is None


@pytest.mark.parametrize("vantage", ["outer", "client"])
def test_from_before_the_proxy_alone_there_is_no_word_on_health(vantage: str) -> None:
    outer, _ = taps(all_at_the_end)
    found = verdict(outer=outer) if vantage == "outer" else verdict(client=client_of(outer))
    assert (found["verdict"], found["causes"]) == ("not_measured", [])
    assert {"proxy", "engine"} <= set(found["not_observable"])


def test_a_direct_path_needs_no_tap() -> None:
    outer, _ = taps(passes)
    found = verdict(client=client_of(outer, "direct"), direct=True)
    assert (found["verdict"], found["causes"]) == ("healthy", [])
    assert found["budget"]["ttft"]["p50"]["stages"]["proxy"]["ms"] == 0


@pytest.mark.parametrize("where", ["outer", "inner"])
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda record: setattr(record, "boot_id", "boot-2"), id="another host"),
        pytest.param(lambda record: setattr(record.stamps, "clock_step", True), id="the clock stepped"),
        pytest.param(lambda record: setattr(record, "void", "measuring_failed"), id="void"),
    ],
)
def test_what_cannot_be_compared_accuses_nobody(spoil: Callable[[Record], None], where: str) -> None:
    outer, inner = taps(all_at_the_end)
    for record in outer if where == "outer" else inner:
        spoil(record)
    found = verdict(outer=outer, inner=inner)
    assert found["verdict"] == "not_measured"
    assert names(found)[0].startswith("measurement.")
    assert not found["trust"]["ok"]
    assert "proxy" in found["not_observable"]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        pytest.param(lambda: taps(passes, requests=8), "8 requests measured: a verdict needs 11", id="too few"),
        pytest.param(lambda: ([], []), "0 requests measured: a verdict needs 11", id="none"),
        pytest.param(lambda: _on_two_boots(), "12 requests cannot be compared between the taps: ", id="two boots"),
    ],
)
def test_numbers_that_are_not_to_be_trusted_have_a_warning_that_says_why(
    run: Callable[[], tuple[list[Record], list[Record]]], words: str
) -> None:
    outer, inner = run()
    trust = verdict(outer=outer, inner=inner)["trust"]
    assert trust["ok"] is False
    assert any(warning.startswith(words) for warning in trust["warnings"]), trust


def _on_two_boots() -> tuple[list[Record], list[Record]]:
    outer, inner = taps(passes)
    for far in inner:
        far.boot_id = "boot-2"
    return outer, inner


def test_a_few_void_records_are_left_out_and_counted() -> None:
    outer, inner = taps(passes, requests=20)
    held, _ = taps(all_at_the_end, requests=20)
    for near in held[:3]:
        near.void = "loop_lag"
    found = verdict(outer=[*held[:3], *outer[3:]], inner=inner)
    assert (found["verdict"], found["trust"]["ok"]) == ("healthy", True)
    assert "3 of 40 records are void and left out" in found["trust"]["warnings"]


def test_records_that_do_not_pair_are_counted_and_give_no_verdict() -> None:
    outer, inner = taps(all_at_the_end)
    for far in inner:
        far.response_id, far.request_id, far.request.fingerprint = f"other-{far.id}", "x", "y"
    found = verdict(outer=outer, inner=inner)
    assert (found["verdict"], names(found)) == ("not_measured", ["measurement.too_few_samples"])
    assert found["trust"]["ok"] is False
    assert "24 of 24 records could not be paired" in found["trust"]["warnings"][0]


def test_events_that_arrive_before_they_were_sent_make_the_run_doubtful() -> None:
    outer, inner = taps(late_by(-5))
    found = verdict(outer=outer, inner=inner)
    assert not found["trust"]["ok"]
    assert "clocks or pairing are wrong" in found["trust"]["warnings"][0]


def test_the_verdict_is_what_the_contract_says_and_survives_json() -> None:
    found = orjson.loads(orjson.dumps(of_taps(all_at_the_end)))
    assert found["schema"] == "tapproxy.verdict/1"
    assert {"schema", "verdict", "not_observable", "causes", "budget", "trust"} <= set(found)
    assert set(found["causes"][0]) == {
        "cause",
        "stage",
        "severity",
        "confidence",
        "metric",
        "effect_ms",
        "share",
        "evidence",
        "rejected",
        "advice",
        "fix",
    }
    assert set(found["causes"][0]["evidence"][0]) == {"what", "value", "unit", "n", "threshold"}
    assert set(found["budget"]) == {"ttft", "tpot"}


def test_an_engine_far_from_the_proxy_is_a_line_behind_the_proxy() -> None:
    outer, inner = taps(passes)
    for far in inner:
        far.upstream.rtt_ns = 60 * MS
        far.upstream.head = 70 * MS
    found = verdict(outer=outer, inner=inner)
    assert names(found) == ["network.upstream"]
    # 60 ms to the engine, and 0.05 ms to and fro between proxy and tap.
    assert cause_of(found, "network.upstream")["effect_ms"]["p50"] == 60.05


def test_a_round_trip_full_of_delayed_acknowledgements_is_no_distance() -> None:
    """On loopback a smoothed round trip of 40 ms is the peer's delayed ACK: answers come faster than that."""
    outer, inner = taps(passes)
    for record in (*outer, *inner):
        record.upstream.rtt_ns = record.downstream.rtt_ns = 40 * MS
    assert (verdict(outer=outer, inner=inner)["verdict"]) == "healthy"


def test_every_rule_has_a_test_that_makes_it_fire() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    elsewhere = {cause for cause, _ in STAGED}
    untested = [rule.cause for rule in RULES if f'names(found) == ["{rule.cause}"]' not in text]
    assert [cause for cause in untested if cause not in elsewhere] == [
        # Fires beside the word of the verdict.
        "proxy.compression",
    ]
