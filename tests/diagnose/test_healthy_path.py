"""Nothing is wrong, in twenty seeds of a loaded machine each, and nothing is said to be."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tapproxy.core.record import Record
from tapproxy.diagnose.causes import verdict
from tests.diagnose.make import MS, client_of, even, noisy, passes, taps
from tests.diagnose.test_causes import names
from tests.diagnose.test_path_causes import fresh_behind_proxy, kept, sooner, uploads

SEEDS = range(20)


def complete(outer: Sequence[Record], inner: Sequence[Record], chance: random.Random) -> None:
    """All that a tap of today records beside the stream, of a path that is well."""
    for number, (near, far) in enumerate(zip(outer, inner, strict=True)):
        for each in (near, far):
            segments = len(each.events.kind) + 2
            each.upstream.segments = each.downstream.segments = segments
            each.upstream.disordered = each.downstream.retransmits = 0
            each.upstream.min_rtt_ns = each.downstream.min_rtt_ns = 40_000
            each.request.connection_requests, each.request.keep_alive, each.request.proxy_marks = number + 1, True, []
            # Read as a busy process reads: at once as a rule, now and then some ms late.
            late = [round(chance.expovariate(1) * 0.1 * MS) for _ in each.events.arrived]
            each.events.read_at = [at + more for at, more in zip(each.events.arrived, late, strict=True)]
            each.events.sent = [at + MS // 10 for at in each.events.read_at]
        far.request.proxy_marks = ["x-forwarded-for"]
    if outer:
        outer[0].downstream.retransmits = 1


def through_nginx(seed: int, **engine: Any) -> tuple[list[Record], list[Record]]:
    outer, inner = taps(noisy(passes, seed), requests=24, **engine)
    sooner(outer, inner)
    complete(outer, inner, random.Random(seed))
    return outer, inner


def nginx(seed: int) -> dict[str, Any]:
    outer, inner = through_nginx(seed)
    return verdict(client=client_of(outer), outer=outer, inner=inner)


def fast_tokens(seed: int) -> dict[str, Any]:
    outer, inner = through_nginx(seed, engine=even(200, gap_ms=4))
    return verdict(client=client_of(outer), outer=outer, inner=inner)


def slow_but_steady(seed: int) -> dict[str, Any]:
    outer, inner = through_nginx(seed, engine=even(40, first_ms=3000, gap_ms=150))
    return verdict(client=client_of(outer), outer=outer, inner=inner)


def tap(seed: int) -> dict[str, Any]:
    outer, inner = through_nginx(seed)
    for far in inner:
        far.request.proxy_marks = []
    return verdict(client=client_of(outer), inner=inner)


def direct(seed: int) -> dict[str, Any]:
    outer, _ = through_nginx(seed)
    return verdict(client=client_of(outer, "direct"), direct=True)


def lone_tap(seed: int) -> dict[str, Any]:
    _, inner = through_nginx(seed)
    for far in inner:
        far.request.proxy_marks = []
    return verdict(inner=inner)


def compressed_at_origin(seed: int) -> dict[str, Any]:
    outer, inner = through_nginx(seed)
    for each in (*outer, *inner):
        each.headers["content-encoding"] = "gzip"
    return verdict(client=client_of(outer), outer=outer, inner=inner)


def http_1_0(seed: int) -> dict[str, Any]:
    """As nginx before 1.29.7 asks: one connection a request, which costs next to nothing next door."""
    outer, inner = through_nginx(seed)
    kept(outer)
    fresh_behind_proxy(inner, 0, outer)
    for far in inner:
        far.client_http, far.request.proxy_marks = "1.0", ["HTTP/1.0"]
    return verdict(client=client_of(outer), outer=outer, inner=inner)


def fresh_connections(seed: int) -> dict[str, Any]:
    """A benchmark that opens a connection, with TLS, for each request."""
    outer, inner = through_nginx(seed)
    for near in outer:
        near.request.connection_requests = 1
    client = client_of(outer)
    for seen in client:
        seen.upstream.reused, seen.upstream.wanted = False, -5 * MS
        seen.upstream.dns, seen.upstream.connect, seen.upstream.tls = MS // 2, MS // 5, 4 * MS
    return verdict(client=client, outer=outer, inner=inner)


def some_way_off(seed: int) -> dict[str, Any]:
    """Clients 8 ms away: a distance, and less than anybody feels."""
    outer, inner = through_nginx(seed)
    client = client_of(outer)
    for seen in client:
        seen.t0_mono_ns -= 4 * MS
        seen.events.arrived = [at + 8 * MS for at in seen.events.arrived]
        seen.events.read_at = list(seen.events.arrived)
        seen.upstream.rtt_ns = seen.upstream.min_rtt_ns = 8 * MS
    return verdict(client=client, outer=outer, inner=inner)


def long_prompts(seed: int) -> dict[str, Any]:
    outer, inner = uploads(upload_ms=300, hold_ms=1 + seed % 2 * 0.5, collected=bool(seed % 3), requests=24)
    return verdict(client=client_of(outer), outer=outer, inner=inner)


def clients_that_leave(seed: int) -> dict[str, Any]:
    """A fifth of the clients has read enough, at whatever age."""
    chance = random.Random(seed)
    outer, inner = through_nginx(seed)
    for near, far in zip(outer, inner, strict=True):
        if chance.random() < 0.2:
            tokens = chance.randrange(2, 38)
            for each in (near, far):
                for name in ("kind", "end_offset", "arrived", "read_at", "sent", "read", "tokens"):
                    setattr(each.events, name, getattr(each.events, name)[:tokens])
                each.ended, each.downstream.end, each.upstream.end = "client_aborted", each.events.arrived[-1], None
    return verdict(outer=outer, inner=inner)


ALL: list[Callable[[int], dict[str, Any]]] = [
    direct,
    tap,
    lone_tap,
    nginx,
    fast_tokens,
    slow_but_steady,
    compressed_at_origin,
    http_1_0,
    fresh_connections,
    some_way_off,
    long_prompts,
    clients_that_leave,
]


@pytest.mark.parametrize("run", ALL, ids=lambda run: run.__name__)
def test_what_is_well_is_called_healthy_in_every_seed(run: Callable[[int], dict[str, Any]]) -> None:
    for seed in SEEDS:
        found = run(seed)
        assert (seed, found["verdict"], found["causes"]) == (seed, "healthy", []), found["trust"]


@pytest.mark.parametrize("run", [run for run in ALL if run is not http_1_0], ids=lambda run: run.__name__)
def test_and_nothing_is_even_worth_knowing(run: Callable[[int], dict[str, Any]]) -> None:
    assert names(run(3)) == []
