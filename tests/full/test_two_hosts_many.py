"""Two hosts at length: ten thousand exchanges, an hour, and many networks of which none may accuse a healthy proxy."""

from __future__ import annotations

import random
import time

import pytest

from tapproxy.diagnose.causes import verdict
from tapproxy.diagnose.moved import bound_between
from tapproxy.diagnose.view import look
from tests.diagnose.hosts import Other, Way, elsewhere, network
from tests.diagnose.make import MS

PATIENCE_S = 60.0


@pytest.mark.parametrize("ids", [True, False])
def test_ten_thousand_exchanges_of_two_hosts(ids: bool) -> None:
    """360 ms apart, so an hour of them; each lasts half a second."""
    outer, inner = network(10_000, every_ms=360, tokens=20)
    for number, (near, far) in enumerate(zip(outer, inner, strict=True)):
        near.request.fingerprint = far.request.fingerprint = f"hmac:{number}"
        if not ids:
            near.response_id = near.request_id = far.response_id = far.request_id = None
    begun = time.perf_counter()
    view = look([], outer, elsewhere(inner, Other()))
    took_s = time.perf_counter() - begun
    truth = {far.id: far.t0_mono_ns for far in inner}
    # By its body alone a request that lagged by far more than the others stays out.
    assert len(view.crossed) == 10_000 if ids else len(view.crossed) > 9_950
    joined = [(chain.outer.id, chain.inner.id) for chain in view.chains if chain.outer and chain.inner]
    assert all(near.removeprefix("outer") == far.removeprefix("inner") for near, far in joined)
    late = [abs(each.far.t0_mono_ns - truth[each.far.id]) > bound_between(each.near, each.far) for each in view.crossed]
    assert sum(late) == 0
    assert view.hold_bound_ns < MS
    assert view.clock is not None
    assert view.clock.to_dict()["skew_ppm"] == pytest.approx(50, abs=1)
    assert took_s < PATIENCE_S


def test_no_network_between_two_hosts_makes_a_healthy_proxy_ill() -> None:
    chance = random.Random(7)
    for seed in range(200):
        ways = [Way(chance.uniform(0.05, 30), chance.choice([0.0, 0.3, 1.0])) for _ in range(2)]
        outer, inner = network(chance.choice([12, 30]), way_in=ways[0], way_out=ways[1], seed=seed)
        other = Other(chance.uniform(-1e4, 1e4), chance.uniform(-300, 300))
        found = verdict(outer=outer, inner=elsewhere(inner, other))
        assert found["causes"] == [], (seed, ways, other)
