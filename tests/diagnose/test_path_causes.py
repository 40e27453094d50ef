"""The causes on the path: each fires on what was made to show it, with the right effect, and not on its siblings."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tapproxy.core.record import Events, Record
from tapproxy.core.sample import Sample, SampleKind
from tapproxy.diagnose.causes import verdict
from tapproxy.diagnose.evidence import Evidence
from tests.diagnose.make import (
    MS,
    Proxy,
    all_at_the_end,
    buffer_of,
    client_of,
    even,
    late_by,
    noisy,
    passes,
    record,
    taps,
)
from tests.diagnose.test_causes import cause_of, fact_of, names, rejected_by

LONG = even(120)
HOUR = 3_600_000 * MS


def sooner(outer: Sequence[Record], inner: Sequence[Record], every_ms: int = 1500) -> None:
    """The same requests, ``every_ms`` apart: near enough for connections to be kept."""
    for number, (near, far) in enumerate(zip(outer, inner, strict=True)):
        shift = near.t0_mono_ns - number * every_ms * MS
        near.t0_mono_ns -= shift
        far.t0_mono_ns -= shift


def effect(found: dict[str, Any], cause: str) -> float:
    value = cause_of(found, cause)["effect_ms"]["p50"]
    assert isinstance(value, float)
    return value


# -- proxy.timeout


def cut_at(age_ms: Callable[[int], float], *, requests: int = 30, cuts: int = 12, status: int | None = 200) -> Any:
    """(outer, inner): the first ``cuts`` answers are cut by the proxy, each at its age, ten tokens in."""
    outer, inner = taps(passes, requests=requests)
    for number in range(cuts):
        near, far = outer[number], inner[number]
        age = round(age_ms(number) * MS)
        tokens = 0 if status == 504 else 10
        for each in (near, far):
            for name in ("kind", "end_offset", "arrived", "read_at", "sent", "read", "tokens"):
                setattr(each.events, name, getattr(each.events, name)[:tokens])
        far.ended, far.downstream.end, far.upstream.end = "client_aborted", age, None
        near.ended = "complete" if status == 504 else "upstream_aborted"
        near.status, near.downstream.end, near.upstream.end = status, age, None
        if status == 504:
            far.status = far.upstream.head = far.upstream.first_byte = None
            near.response_id = far.response_id = None
    return outer, inner


def test_answers_cut_after_one_silence_are_the_proxys_timeout() -> None:
    # The last of ten tokens is there at 100 + 9 × 20 = 280 ms; the proxy waits a second more.
    outer, inner = cut_at(lambda number: 280 + 1000 + number % 3)
    found = verdict(outer=outer, inner=inner)
    assert (found["verdict"], names(found)) == ("degraded", ["proxy.timeout"]), found["trust"]
    cause = cause_of(found, "proxy.timeout")
    assert effect(found, "proxy.timeout") == pytest.approx(1001, abs=2)
    assert fact_of(cause, "silence when the answer was cut")["n"] == 12
    assert "engine.errors" in rejected_by(cause)
    assert not [warning for warning in found["trust"]["warnings"] if "no rule names why" in warning]


def test_a_504_at_one_age_is_the_proxys_timeout_too() -> None:
    outer, inner = cut_at(lambda number: 1000 + number, status=504)
    found = verdict(outer=outer, inner=inner)
    assert names(found) == ["proxy.timeout"], found["trust"]
    assert effect(found, "proxy.timeout") == pytest.approx(1005, abs=6)


@pytest.mark.parametrize("where", ["both", "inner alone"])
def test_clients_that_leave_are_no_timeout_at_whatever_age(where: str) -> None:
    outer, inner = cut_at(lambda number: 300 + number * 170)
    for near in outer[:12]:
        near.ended = "client_aborted"
    found = verdict(outer=outer, inner=inner) if where == "both" else verdict(inner=inner)
    assert "proxy.timeout" not in names(found)


def test_an_engine_that_breaks_off_is_no_timeout() -> None:
    outer, inner = cut_at(lambda number: 1280)
    for far in inner[:12]:
        far.ended = "upstream_aborted"
    assert names(verdict(outer=outer, inner=inner)) == ["engine.errors"]


def test_a_tap_alone_behind_a_proxy_names_the_limit_and_is_less_sure() -> None:
    _, inner = cut_at(lambda number: 1280 + number)
    for far in inner:
        far.request.proxy_marks = ["via"]
    found = verdict(inner=inner)
    assert names(found) == ["proxy.timeout"]
    assert cause_of(found, "proxy.timeout")["confidence"] == 0.5


# -- proxy.retry


def sent_twice(count: int, *, after_ms: float = 250, requests: int = 30, by: str = "request_id") -> Any:
    """The first ``count`` requests failed behind the proxy first, and went again ``after_ms`` later."""
    outer, inner = taps(passes, requests=requests)
    more = []
    for number in range(count):
        near, far = outer[number], inner[number]
        first = record("inner", [], number=number, t0=far.t0_mono_ns)
        first.id, first.response_id, first.ended, first.status = f"first-{number}", None, "upstream_malformed", 502
        shift = round(after_ms * MS)
        far.t0_mono_ns += shift
        near.events.arrived = [at + shift for at in near.events.arrived]
        near.events.read_at = list(near.events.arrived)
        near.events.sent = [at + MS // 10 for at in near.events.arrived]
        near.upstream.first_byte, near.upstream.end = near.events.arrived[0], near.events.arrived[-1]
        near.downstream.end = near.events.sent[-1]
        if by != "request_id":
            for each in (near, far, first):
                each.request_id = None
                if by == "trace_id":
                    each.trace_id, each.request.fingerprint = f"trace-{number}", None
        more.append(first)
    return outer, [*inner, *more]


@pytest.mark.parametrize("by", ["request_id", "trace_id", "fingerprint"])
def test_one_request_that_the_proxy_sends_twice_is_its_retry(by: str) -> None:
    found = verdict(**dict(zip(("outer", "inner"), sent_twice(12, by=by), strict=True)))
    # The engine did fail those sends and is named for it; what the clients had of it is the wait.
    assert names(found) == ["proxy.retry", "engine.errors"]
    cause = cause_of(found, "proxy.retry")
    assert effect(found, "proxy.retry") == pytest.approx(250, abs=1)
    assert fact_of(cause, "requests sent more than once")["value"] == 40.0
    assert fact_of(cause, "first send ended: upstream_malformed")["value"] == 12


def test_a_retry_after_a_reset_that_the_engine_survives_stands_alone() -> None:
    outer, inner = sent_twice(12)
    for far in inner[30:]:
        far.ended, far.status = "client_aborted", None
    found = verdict(outer=outer, inner=inner)
    assert names(found) == ["proxy.retry"]


def test_a_clients_own_retry_is_two_requests_and_nobodys_fault() -> None:
    outer, inner = taps(passes, requests=24)
    for number in range(0, 24, 2):
        for side in (outer, inner):
            side[number + 1].request_id = side[number].request_id
            side[number + 1].request.fingerprint = side[number].request.fingerprint
    assert verdict(outer=outer, inner=inner)["verdict"] == "healthy"


def test_one_prompt_sent_by_many_at_once_is_no_retry() -> None:
    outer, inner = taps(passes, requests=20)
    for number, (near, far) in enumerate(zip(outer, inner, strict=True)):
        shift = near.t0_mono_ns - number * MS
        near.t0_mono_ns -= shift
        far.t0_mono_ns -= shift
        near.request_id = far.request_id = None
        near.request.fingerprint = far.request.fingerprint = "hmac-sha256:same"
    assert verdict(outer=outer, inner=inner)["verdict"] == "healthy"


# -- proxy.connection_reuse, tls.handshake, dns.slow


def fresh_behind_proxy(inner: Sequence[Record], cost_ms: float, outer: Sequence[Record]) -> None:
    """The proxy opens a connection for each request, which takes it so long."""
    for near, far in zip(outer, inner, strict=True):
        far.request.connection_requests, far.request.keep_alive = 1, False
        late = round(cost_ms * MS)
        far.t0_mono_ns += late
        near.events.arrived = [at + late for at in near.events.arrived]
        near.events.read_at = list(near.events.arrived)
        near.events.sent = [at + MS // 10 for at in near.events.arrived]


def kept(records: Sequence[Record]) -> None:
    for number, each in enumerate(records):
        each.request.connection_requests, each.request.keep_alive = number + 1, True


def test_a_proxy_that_opens_a_connection_for_each_request_is_named_with_what_it_costs() -> None:
    outer, inner = taps(passes, requests=20)
    sooner(outer, inner)
    kept(outer)
    # Half a round trip each way of 0.05 ms is the line's own; the rest of 0.2 + 30 ms is not.
    fresh_behind_proxy(inner, 30, outer)
    found = verdict(outer=outer, inner=inner)
    assert names(found) == ["proxy.connection_reuse"]
    cause = cause_of(found, "proxy.connection_reuse")
    assert cause["severity"] == "warning"
    assert effect(found, "proxy.connection_reuse") == pytest.approx(30, abs=0.3)
    assert fact_of(cause, "new connections though one was free")["value"] == 100.0
    assert "tls.handshake" in rejected_by(cause)


def test_new_connections_that_cost_next_to_nothing_are_worth_knowing_and_no_illness() -> None:
    outer, inner = taps(passes, requests=20)
    sooner(outer, inner)
    kept(outer)
    fresh_behind_proxy(inner, 0, outer)
    found = verdict(outer=outer, inner=inner)
    assert (found["verdict"], names(found)) == ("healthy", ["proxy.connection_reuse"])
    assert cause_of(found, "proxy.connection_reuse")["severity"] == "info"


def test_connections_for_many_requests_at_once_and_after_long_pauses_are_as_they_must_be() -> None:
    for every_ms in (1, 10_000):
        outer, inner = taps(passes, requests=20)
        sooner(outer, inner, every_ms)
        kept(outer)
        fresh_behind_proxy(inner, 0, outer)
        assert (verdict(outer=outer, inner=inner))["causes"] == []


def test_a_benchmark_that_opens_connections_on_purpose_accuses_no_proxy() -> None:
    """Client and tap, nothing between them, a fresh connection for every request."""
    outer, inner = taps(passes, requests=20)
    sooner(outer, inner)
    client = client_of(outer)
    for seen in client:
        seen.upstream.reused, seen.upstream.connect, seen.upstream.tls = False, MS // 5, 3 * MS
        seen.upstream.wanted = -4 * MS
    for far in inner:
        far.request.connection_requests, far.request.keep_alive, far.request.proxy_marks = 1, True, []
    found = verdict(client=client, inner=inner)
    assert (found["verdict"], found["causes"]) == ("healthy", [])


def test_a_proxy_that_closes_its_clients_connections_is_seen_by_the_tap_before_it() -> None:
    outer, inner = taps(passes, requests=20)
    sooner(outer, inner)
    kept(outer)
    kept(inner)
    for near in outer:
        near.upstream.reused, near.upstream.connect = False, 40 * MS
        near.upstream.acquired = near.upstream.write_start = near.upstream.write_end = 40 * MS
        near.t0_mono_ns -= 40 * MS
        near.events.arrived = [at + 40 * MS for at in near.events.arrived]
        near.events.read_at = list(near.events.arrived)
        near.events.sent = [at + MS // 10 for at in near.events.arrived]
    found = verdict(outer=outer, inner=inner)
    assert names(found) == ["proxy.connection_reuse"]
    assert effect(found, "proxy.connection_reuse") == 40.0


def reconnecting(cost_ms: int, tls_share: float = 0.5) -> Any:
    """Clients that connect anew for each request, and a tap that does as they do: so much of it for TLS."""
    outer, inner = taps(passes, requests=20)
    sooner(outer, inner)
    late = cost_ms * MS
    for near in outer:
        near.altered, near.request.connection_requests, near.request.keep_alive = ["mirror-connections"], 1, True
        near.upstream.reused, near.upstream.tls = False, round(tls_share * late)
        near.upstream.connect = late - near.upstream.tls
        near.upstream.acquired = near.upstream.write_start = near.upstream.write_end = late
        near.t0_mono_ns -= late
        near.events.arrived = [at + late for at in near.events.arrived]
        near.events.read_at = list(near.events.arrived)
        near.events.sent = [at + MS // 10 for at in near.events.arrived]
    return verdict(outer=outer, inner=inner)


def test_clients_that_connect_anew_from_far_are_named_where_the_tap_connects_as_they_do() -> None:
    found = reconnecting(120)
    assert names(found) == ["proxy.connection_reuse"]
    assert effect(found, "proxy.connection_reuse") == 120.0
    assert "one client object" in found["causes"][0]["advice"]
    assert found["trust"]["warnings"] == []
    assert names(reconnecting(1)) == []


def test_time_of_slow_handshakes_is_counted_once() -> None:
    found = reconnecting(160, tls_share=0.99)
    assert names(found) == ["tls.handshake"]
    # 20 ms of connecting beside 140 of TLS: both are there, and together they are what was paid.
    found = reconnecting(160, tls_share=0.875)
    assert names(found) == ["tls.handshake", "proxy.connection_reuse"]
    assert effect(found, "tls.handshake") + effect(found, "proxy.connection_reuse") == 160.0


def test_502_after_a_pause_is_a_connection_that_had_ended() -> None:
    outer, inner = taps(passes, requests=40)
    # Pairs: one at once after the other, then 10 s of nothing; the one after the pause fails, now and then.
    for number in range(40):
        start = (number // 2 * 10_000 + number % 2 * 1_000) * MS
        inner[number].t0_mono_ns += start - outer[number].t0_mono_ns
        outer[number].t0_mono_ns = start
    failed = list(range(2, 40, 4))
    for number in failed:
        outer[number].status, outer[number].events, outer[number].response_id = 502, Events(), None
        outer[number].downstream.end = 2 * MS
    found = verdict(outer=outer, inner=[far for number, far in enumerate(inner) if number not in failed])
    assert names(found) == ["proxy.connection_reuse"]
    assert "keepalive_timeout 4s" in found["causes"][0]["advice"]
    assert not [warning for warning in found["trust"]["warnings"] if "no rule names why" in warning]


@pytest.mark.parametrize("tap", ["outer", "inner"])
def test_a_handshake_that_is_slow_each_time_is_named(tap: str) -> None:
    outer, inner = taps(passes, requests=48)
    for each in (outer if tap == "outer" else inner)[::4]:
        each.upstream.reused, each.upstream.connect, each.upstream.tls = False, 2 * MS, 90 * MS
        each.upstream.acquired = each.upstream.write_start = each.upstream.write_end = 92 * MS
        each.t0_mono_ns -= 92 * MS
        each.events.arrived = [at + 92 * MS for at in each.events.arrived]
        each.events.sent = [at + MS // 10 for at in each.events.arrived]
    if tap == "inner":
        for far, near in zip(inner[::4], outer[::4], strict=True):
            far.t0_mono_ns += 92 * MS
            near.events.arrived = [at + 92 * MS for at in near.events.arrived]
            near.events.sent = [at + MS // 10 for at in near.events.arrived]
    found = verdict(outer=outer, inner=inner)
    assert names(found) == ["tls.handshake"]
    assert effect(found, "tls.handshake") is not None
    cause = cause_of(found, "tls.handshake")
    assert (cause["stage"], cause["effect_ms"]["p50"]) == ("tls", 90.0)
    assert fact_of(cause, "requests that paid it")["value"] == 25.0


def test_a_handshake_over_a_long_line_is_the_lines() -> None:
    outer, inner = taps(passes, requests=40)
    client = client_of(outer)
    for seen in client:
        seen.upstream.reused, seen.upstream.connect, seen.upstream.tls = False, 60 * MS, 125 * MS
    assert "tls.handshake" not in names(verdict(client=client, outer=outer, inner=inner))


@pytest.mark.parametrize(("side", "stage"), [("client", "network.downstream"), ("inner", "network.upstream")])
def test_names_that_are_looked_up_slowly_are_named_where_it_happens(side: str, stage: str) -> None:
    outer, inner = taps(passes, requests=40)
    client = client_of(outer)
    for each in (client if side == "client" else inner)[::2]:
        each.upstream.reused, each.upstream.dns = False, 120 * MS
    found = verdict(client=client, outer=outer, inner=inner)
    assert names(found) == ["dns.slow"]
    cause = cause_of(found, "dns.slow")
    assert (cause["stage"], cause["effect_ms"]["p50"]) == (stage, 120.0)


def test_a_resolver_that_answers_is_nobodys_fault() -> None:
    outer, inner = taps(passes, requests=40)
    for each in inner:
        each.upstream.reused, each.upstream.dns = False, 4 * MS
    assert verdict(outer=outer, inner=inner)["verdict"] == "healthy"


# -- proxy.request_buffering


def uploads(*, upload_ms: float, hold_ms: float, collected: bool, size: int = 2_000_000, requests: int = 20) -> Any:
    """Requests written over ``upload_ms``; the proxy passes on as they come, or collects and then takes ``hold_ms``."""
    outer, inner = taps(passes, requests=requests)
    for near, far in zip(outer, inner, strict=True):
        written = round(upload_ms * MS) + MS // 10
        near.request.bytes = far.request.bytes = size
        near.request.body_end, near.upstream.write_end = written - MS // 20, written
        done = near.t0_mono_ns + written + round(hold_ms * MS)
        far.t0_mono_ns = near.t0_mono_ns + written + MS // 5 if collected else far.t0_mono_ns
        far.request.body_end = far.upstream.write_end = done - far.t0_mono_ns
        far.upstream.wanted = far.upstream.acquired = far.upstream.write_start = MS // 10
        shift = done + MS // 5 - far.t0_mono_ns
        far.events.arrived = [at + shift for at in far.events.arrived]
        far.events.read_at = list(far.events.arrived)
        far.events.sent = [at + MS // 10 for at in far.events.arrived]
        near.events.arrived = [far.t0_mono_ns - near.t0_mono_ns + at + MS // 5 for at in far.events.sent]
        near.events.read_at = list(near.events.arrived)
        near.events.sent = [at + MS // 10 for at in near.events.arrived]
    return outer, inner


def test_requests_that_are_collected_and_come_late_are_named_with_what_they_lost() -> None:
    outer, inner = uploads(upload_ms=400, hold_ms=80, collected=True)
    found = verdict(outer=outer, inner=inner)
    assert names(found) == ["proxy.request_buffering"]
    assert cause_of(found, "proxy.request_buffering")["severity"] == "warning"
    assert effect(found, "proxy.request_buffering") == pytest.approx(80, abs=3)


@pytest.mark.parametrize(
    ("upload_ms", "hold_ms", "collected"),
    [
        pytest.param(400, 0.5, True, id="collected, and sent on at once"),
        pytest.param(400, 0.5, False, id="passed on as it comes"),
        pytest.param(400, 60, False, id="a slow line takes what the kernel took at once"),
        pytest.param(3, 1.0, True, id="a fast upload"),
    ],
)
def test_large_prompts_are_healthy(upload_ms: float, hold_ms: float, collected: bool) -> None:
    outer, inner = uploads(upload_ms=upload_ms, hold_ms=hold_ms, collected=collected)
    assert not [name for name in names(verdict(outer=outer, inner=inner)) if "request_buffering" in name]


def test_the_few_ms_of_a_collected_prompt_are_worth_knowing_and_no_illness() -> None:
    found = verdict(**dict(zip(("outer", "inner"), uploads(upload_ms=50, hold_ms=5, collected=True), strict=True)))
    assert (found["verdict"], names(found)) == ("healthy", ["proxy.request_buffering"])
    assert effect(found, "proxy.request_buffering") == pytest.approx(5, abs=0.5)


# -- network.nagle


def waits_for_ack(cycle_ms: float, way_ms: float = 0.2) -> Proxy:
    """Sends at once while nothing is unacknowledged, else all that waits when the acknowledgement comes."""

    def proxy(leaves: Sequence[int], size: int) -> tuple[list[int], list[int]]:
        cycle, way = round(cycle_ms * MS), round(way_ms * MS)
        sent: list[int] = []
        free = 0
        while len(sent) < len(leaves):
            start = max(leaves[len(sent)], free)
            sent += [start] * sum(at <= start for at in leaves[len(sent) :])
            free = start + cycle
        return [at + way for at in sent], list(range(len(sent)))

    return proxy


def nagled(cycle_ms: float, way_ms: float, gap_ms: float, *, seed: int | None = None, count: int = 120) -> Any:
    proxy = waits_for_ack(cycle_ms, way_ms)
    return taps(proxy if seed is None else noisy(proxy, seed), engine=even(count, gap_ms=gap_ms))


def test_bursts_a_round_trip_apart_are_nagles() -> None:
    outer, inner = nagled(80, 40, 20)
    for near in outer:
        near.upstream.rtt_ns = near.upstream.min_rtt_ns = 80 * MS
    found = verdict(outer=outer, inner=inner)
    # The distance itself is there as well; of what it slows it has the smaller part.
    assert names(found) == ["network.nagle", "network.downstream"]
    cause = cause_of(found, "network.nagle")
    assert 20 <= cause["effect_ms"]["p50"] <= 60
    assert {"proxy.response_buffering", "network.downstream"} <= set(rejected_by(cause))


@pytest.mark.parametrize("gap_ms", [7, 10, 20])
def test_bursts_a_delayed_acknowledgement_apart_are_nagles(gap_ms: float) -> None:
    outer, inner = nagled(41.5, 0.2, gap_ms)
    found = verdict(outer=outer, inner=inner)
    assert names(found) == ["network.nagle"]
    assert fact_of(found["causes"][0], "distance of the bursts")["value"] == pytest.approx(41.5, abs=3)


@pytest.mark.parametrize("gap_ms", [4, 8, 10, 13.3, 20, 40])
@pytest.mark.parametrize("quantum", [630, 1050, 1400, 2100, 4096])
def test_a_buffer_that_is_full_every_40_ms_is_a_buffer(quantum: int, gap_ms: float) -> None:
    for seed in range(3):
        outer, inner = taps(noisy(buffer_of(quantum), seed), engine=even(120, gap_ms=gap_ms))
        assert "network.nagle" not in names(verdict(outer=outer, inner=inner))


# -- network.loss


def lossy(share: float, stall_ms: float = 220, seed: int = 1) -> Proxy:
    """Every now and then a segment is sent again, and all behind it waits."""
    chance = random.Random(seed)

    def proxy(leaves: Sequence[int], size: int) -> tuple[list[int], list[int]]:
        out: list[int] = []
        for at in leaves:
            late = at + MS // 5 + (round(stall_ms * MS) if chance.random() < share else 0)
            out.append(max(late, out[-1] if out else 0))
        return out, list(range(len(out)))

    return proxy


def counted(outer: Sequence[Record], inner: Sequence[Record], share: float) -> None:
    for near, far in zip(outer, inner, strict=True):
        segments = len(far.events.kind)
        near.upstream.segments, far.downstream.segments = segments, segments
        near.upstream.disordered, far.downstream.retransmits = 0, round(share * segments)


@pytest.mark.parametrize("share", [0.01, 0.03, 0.06])
def test_segments_sent_again_with_a_tail_are_loss(share: float) -> None:
    outer, inner = taps(lossy(share), engine=LONG, requests=20)
    counted(outer, inner, share)
    found = verdict(outer=outer, inner=inner)
    assert names(found) == ["network.loss"]
    cause = cause_of(found, "network.loss")
    assert cause["stage"] == "network.upstream"
    assert effect(found, "network.loss") == pytest.approx(220, abs=25)
    assert fact_of(cause, "segments lost")["threshold"] == 0.5


def test_a_tail_without_loss_and_loss_without_a_tail_are_no_loss() -> None:
    outer, inner = taps(lossy(0.02), engine=LONG, requests=20)
    counted(outer, inner, 0)
    assert "network.loss" not in names(verdict(outer=outer, inner=inner))
    outer, inner = taps(passes, engine=LONG, requests=20)
    counted(outer, inner, 0.02)
    assert verdict(outer=outer, inner=inner)["verdict"] == "healthy"


def test_what_the_proxy_sends_again_is_seen_by_the_receiver_or_by_the_host() -> None:
    outer, inner = taps(lossy(0.02), engine=LONG, requests=20)
    counted(outer, inner, 0)
    for near in outer:
        near.upstream.disordered = 3
    found = verdict(outer=outer, inner=inner)
    assert (names(found), found["causes"][0]["stage"]) == (["network.loss"], "network.downstream")
    counted(outer, inner, 0)
    begun_ns = min(near.t0_mono_ns for near in outer)
    host = [
        Sample(
            SampleKind.HOST,
            "host",
            begun_ns + at * MS,
            at,
            values={"tcp_out_segments": 1000.0 * at, "tcp_retransmits": 20.0 * at},
        )
        for at in (1, 2, 3)
    ]
    found = verdict(outer=outer, inner=inner, evidence=Evidence.of(host))
    assert names(found) == ["network.loss"]
    assert cause_of(found, "network.loss")["confidence"] == 0.5


def test_loss_between_client_and_tap_is_seen_by_the_tap() -> None:
    outer, inner = taps(passes, engine=LONG, requests=20)
    client = client_of(outer)
    proxy = lossy(0.03)
    for seen in client:
        seen.events.arrived, _ = proxy(seen.events.arrived, 210)
        seen.events.read_at = list(seen.events.arrived)
    for near in outer:
        near.downstream.segments, near.downstream.retransmits = 120, 4
    found = verdict(client=client, outer=outer, inner=inner)
    assert (names(found), found["causes"][0]["stage"]) == (["network.loss"], "network.downstream")


# -- client.saturated, tap.saturated


def test_a_tap_that_was_away_says_so_and_nothing_else_is_claimed() -> None:
    outer, inner = taps(all_at_the_end, requests=20)
    for far in inner[:12]:
        far.void = "loop_lag"
    found = verdict(outer=outer, inner=inner)
    assert (found["verdict"], names(found)[0]) == ("not_measured", "tap.saturated")
    assert "proxy.response_buffering" not in names(found)
    assert found["trust"]["ok"] is False


def test_an_engine_that_died_is_named_by_a_tap_that_was_away_too() -> None:
    """Counting failures needs no clock. A limit of the tap's own that ran out is another matter."""
    outer, inner = taps(passes, requests=20)
    for near, far in zip(outer[:12], inner[:12], strict=True):
        near.void = far.void = "loop_lag"
        near.ended = far.ended = "upstream_aborted"
    found = verdict(outer=outer, inner=inner)
    assert (found["verdict"], names(found)[:2]) == ("degraded", ["engine.errors", "tap.saturated"])
    for near, far in zip(outer[:12], inner[:12], strict=True):
        near.ended = far.ended = "timeout"
    found = verdict(outer=outer, inner=inner)
    assert (found["verdict"], "engine.errors" in names(found)) == ("not_measured", False)


def test_a_tap_that_reads_late_is_saturated() -> None:
    outer, inner = taps(all_at_the_end, requests=20)
    for far in inner:
        far.events.read_at = [at + 25 * MS for at in far.events.arrived]
    found = verdict(outer=outer, inner=inner)
    assert names(found) == ["tap.saturated"]
    assert effect(found, "tap.saturated") == 25.0
    assert found["verdict"] == "not_measured"


def test_a_load_client_that_reads_late_voids_the_run() -> None:
    outer, inner = taps(all_at_the_end, requests=20)
    client = client_of(outer)
    for seen in client:
        seen.events.read_at = [at + 8 * MS for at in seen.events.arrived]
    for near in outer:
        near.events.read_at = list(near.events.arrived)
    # Behind a hop that releases all at once there is no gap to hold its lag against.
    outer, inner = taps(passes, requests=20)
    client = client_of(outer)
    for seen in client:
        seen.events.read_at = [at + 8 * MS for at in seen.events.arrived]
    found = verdict(client=client, outer=outer, inner=inner)
    assert names(found) == ["client.saturated"]
    assert effect(found, "client.saturated") == 8.0


# -- client.not_streaming


def whole_answers(count: int, of: int = 20, e2e_ms: int = 2000, tokens: int = 90) -> list[Record]:
    _, inner = taps(passes, requests=of)
    for far in inner[:count]:
        far.events, far.stream = Events(), False
        far.upstream.first_byte = far.upstream.end = far.upstream.head = e2e_ms * MS
        far.usage.completion_tokens = tokens
    return inner


def test_answers_that_nobody_asked_for_as_a_stream_are_named_with_what_it_costs() -> None:
    inner = whole_answers(20)
    for far in inner:
        far.engine.source, far.engine.queue_ns, far.engine.prefill_ns = "response.metrics", 20 * MS, 180 * MS
    found = verdict(inner=inner)
    assert names(found) == ["client.not_streaming"]
    assert effect(found, "client.not_streaming") == 1800.0
    assert cause_of(found, "client.not_streaming")["stage"] == "client"


def test_without_the_engines_word_the_effect_is_not_known() -> None:
    found = verdict(inner=whole_answers(20))
    assert names(found) == ["client.not_streaming"]
    assert found["causes"][0]["effect_ms"] == {"p50": None, "p95": None}
    inner = whole_answers(20)
    begun_ns = min(far.t0_mono_ns for far in inner)
    page = [
        Sample(
            SampleKind.ENGINE,
            "page",
            begun_ns + at * MS,
            at,
            values={"ttft_s_sum": 0.25 * at, "ttft_s_count": 1.0 * at},
        )
        for at in (1, 11)
    ]
    found = verdict(inner=inner, evidence=Evidence.of(page))
    assert effect(found, "client.not_streaming") == 1750.0


@pytest.mark.parametrize(
    "inner",
    [
        pytest.param(whole_answers(6), id="some of the traffic"),
        pytest.param(whole_answers(20, tokens=3), id="answers of three tokens"),
        pytest.param(whole_answers(20, e2e_ms=200), id="short answers"),
    ],
)
def test_some_whole_answers_are_by_design(inner: list[Record]) -> None:
    assert "client.not_streaming" not in names(verdict(inner=inner))


def test_a_client_that_reads_the_whole_answer_at_once_is_named() -> None:
    outer, inner = taps(passes)
    client = client_of(outer)
    for seen in client:
        seen.events.arrived = [seen.events.arrived[-1]] * 40
        seen.events.read_at, seen.events.read, seen.stamps.source = list(seen.events.arrived), [0] * 40, "user"
    found = verdict(client=client, outer=outer, inner=inner)
    assert names(found) == ["client.not_streaming"]
    assert effect(found, "client.not_streaming") == pytest.approx(780.2, abs=0.5)


# -- a tap alone


def alone(marks: list[str] | None, proxy: Proxy = passes) -> dict[str, Any]:
    _, inner = taps(proxy)
    for far in inner:
        far.request.proxy_marks = marks
    return verdict(inner=inner)


@pytest.mark.parametrize("marks", [["HTTP/1.0"], ["x-forwarded-for"], None], ids=["HTTP/1.0", "forwarded", "unknown"])
def test_a_tap_alone_behind_a_proxy_is_no_word_on_health(marks: list[str] | None) -> None:
    found = alone(marks)
    assert (found["verdict"], found["causes"]) == ("not_measured", [])
    assert {"proxy", "network.downstream"} <= set(found["not_observable"])
    assert any("no word on health" in warning for warning in found["trust"]["warnings"])


def test_a_tap_alone_without_a_mark_of_a_proxy_is_healthy_as_far_as_it_sees() -> None:
    found = alone([])
    assert (found["verdict"], found["causes"]) == ("healthy", [])
    assert {"proxy", "network.downstream"} <= set(found["not_observable"])
    assert any("would not show" in warning for warning in found["trust"]["warnings"])


def test_a_tap_alone_that_is_said_to_be_direct_still_says_what_it_cannot_see() -> None:
    outer, _ = taps(passes)
    for near in outer:
        near.request.proxy_marks = ["HTTP/1.0"]
    found = verdict(outer=outer, direct=True)
    assert found["verdict"] == "not_measured"
    assert {"proxy", "network.downstream"} <= set(found["not_observable"])


# -- several at once


def test_two_faults_are_both_named_the_larger_first() -> None:
    outer, inner = taps(all_at_the_end)
    for far in inner:
        far.upstream.rtt_ns, far.upstream.head = 60 * MS, 70 * MS
    found = verdict(outer=outer, inner=inner)
    assert names(found) == ["proxy.response_buffering", "network.upstream"]
    outer, inner = taps(late_by(0.2))
    held, _ = taps(all_at_the_end, engine=even(12, first_ms=900, gap_ms=10))
    _, inner = taps(passes, engine=even(12, first_ms=900, gap_ms=10))
    for far in inner:
        far.upstream.rtt_ns, far.upstream.head = 600 * MS, 700 * MS
    found = verdict(outer=held, inner=inner)
    assert names(found) == ["network.upstream", "proxy.response_buffering"]
