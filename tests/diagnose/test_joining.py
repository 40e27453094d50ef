"""Joining thousands: all of them with ids, and by the body alone only those that are certain."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapproxy.core.record import Ended, Record
from tapproxy.diagnose.pairing import Pairing, pair
from tapproxy.diagnose.view import look
from tests.diagnose.hosts import Other, elsewhere, network
from tests.diagnose.make import MS, record

# What a machine with other things to do may take for ten thousand; it takes a tenth.
PATIENCE_S = 15.0


@dataclass
class Crowd:
    """Exchanges that overlap: ``at_once`` at any time, each 1 to 3 s long; a share ``lost`` of the records is gone."""

    requests: int = 10_000
    at_once: int = 512
    bodies: int = 0  # 0: each its own
    lost: float = 0.0
    seed: int = 1

    def made(self) -> tuple[list[Record], list[Record], dict[str, str]]:
        """(outer, inner, true partner of each)."""
        chance = random.Random(self.seed)
        outer, inner, truth = [], [], {}
        start = 1000.0
        for number in range(self.requests):
            start += chance.expovariate(self.at_once / 2000)
            lag, back = 0.3 + chance.expovariate(2), 0.2 + chance.expovariate(2)
            life = chance.uniform(1000, 3000)
            far = record("inner", [round(life * MS)], number=number, t0=round((start + lag) * MS))
            near = record("outer", [round((life + lag + back) * MS)], number=number, t0=round(start * MS))
            near.upstream.head = MS + round((lag + back) * MS)
            for each in (near, far):
                each.request.fingerprint = f"hmac:{chance.randrange(self.bodies) if self.bodies else number}"
            near.request.fingerprint = far.request.fingerprint
            truth[near.id] = far.id
            outer += [near] * (chance.random() >= self.lost)
            inner += [far] * (chance.random() >= self.lost)
        chance.shuffle(inner)
        return outer, inner, truth


def without_ids(*sides: list[Record]) -> None:
    for side in sides:
        for each in side:
            each.response_id = each.request_id = each.trace_id = None


def wrong(found: Pairing, truth: dict[str, str]) -> int:
    return sum(truth[each.outer.id] != each.inner.id for each in found.pairs)


@pytest.mark.parametrize("bodies", [1, 5000])
def test_ten_thousand_with_ids_are_all_joined_whatever_their_bodies(bodies: int) -> None:
    outer, inner, truth = Crowd(bodies=bodies).made()
    begun = time.perf_counter()
    found = pair(outer, inner)
    assert time.perf_counter() - begun < PATIENCE_S
    assert (len(found.pairs), wrong(found, truth), found.ambiguous) == (10_000, 0, 0)


def test_a_client_that_gives_every_request_one_id_breaks_no_join() -> None:
    outer, inner, truth = Crowd(2000).made()
    for each in (*outer, *inner):
        each.request_id = "constant"
    found = pair(outer, inner)
    assert (found.by, wrong(found, truth)) == ({"response_id": 2000}, 0)
    # Without response ids (an encoded body) the fingerprint is left, and joins what the body names.
    for each in outer:
        each.response_id = None
    found = pair(outer, inner)
    assert (found.by, wrong(found, truth)) == ({"fingerprint": 2000}, 0)


@pytest.mark.parametrize(
    ("bodies", "lost", "least"),
    [
        pytest.param(0, 0.0, 1.0, id="a body each"),
        pytest.param(1250, 0.0, 0.95, id="some twice"),
        pytest.param(50, 0.0, 0.5, id="fifty bodies"),
        pytest.param(1, 0.0, 0.0, id="one body"),
        pytest.param(250, 0.05, 0.7, id="and one in twenty records lost"),
        pytest.param(20, 0.3, 0.1, id="twenty bodies, one in three lost"),
    ],
)
def test_by_the_body_alone_none_is_wrong_and_the_ambiguous_are_counted(bodies: int, lost: float, least: float) -> None:
    outer, inner, truth = Crowd(2500, bodies=bodies, lost=lost).made()
    only_certain(outer, inner, truth, least)


def only_certain(outer: list[Record], inner: list[Record], truth: dict[str, str], least: float) -> None:
    without_ids(outer, inner)
    begun = time.perf_counter()
    found = pair(outer, inner)
    assert time.perf_counter() - begun < PATIENCE_S
    there = {each.id for each in inner}
    possible = sum(truth[each.id] in there for each in outer)
    assert wrong(found, truth) == 0
    assert len(found.pairs) >= least * possible
    assert len(found.pairs) + len(found.unpaired_outer) == len(outer)
    # Whose partner is there and not joined is counted.
    assert possible - len(found.pairs) <= found.ambiguous <= len(found.unpaired_outer)


@settings(deadline=None, max_examples=60)
@given(
    requests=st.integers(1, 120),
    at_once=st.integers(1, 64),
    bodies=st.integers(0, 6),
    lost=st.sampled_from([0.0, 0.02, 0.1]),
    twice=st.sampled_from([0.0, 0.1]),
    offset_s=st.sampled_from([None, 0.0, 3.7, -86_400.0]),
    seed=st.integers(0, 10_000),
)
def test_with_ids_all_that_are_there_are_joined_and_none_wrongly(
    requests: int, at_once: int, bodies: int, lost: float, twice: float, offset_s: float | None, seed: int
) -> None:
    """Records lost on either side, written twice, of another host, in any order."""
    outer, inner, truth = Crowd(requests, at_once, bodies, lost, seed).made()
    chance = random.Random(seed)
    doubled = [each for each in inner if chance.random() < twice]
    if offset_s is not None:
        inner, doubled = elsewhere(inner, Other(offset_s)), elsewhere(doubled, Other(offset_s))
    found = pair(outer, inner + doubled)
    assert wrong(found, truth) == 0
    # A line that is there twice names nobody for certain.
    expected = {each.id for each in outer} & {
        near for near, far in truth.items() if far in {each.id for each in inner} - {each.id for each in doubled}
    }
    assert expected <= {each.outer.id for each in found.pairs}


def test_request_ids_join_across_hosts_whose_wall_clocks_disagree() -> None:
    outer, inner = network(20)
    for each in outer:
        each.response_id = None
    assert pair(outer, elsewhere(inner, Other())).by == {"request_id": 20}


def test_bodies_join_across_hosts_once_the_clocks_are_known() -> None:
    """Five ids set the clock; the rest of the requests are told apart by it, identical bodies too."""
    outer, inner = network(60)
    for number, (near, far) in enumerate(zip(outer, inner, strict=True)):
        near.request.fingerprint = far.request.fingerprint = f"hmac:{number % 2}"
        if number >= 20:
            without_ids([near], [far])
    view = look([], outer, elsewhere(inner, Other()))
    joined = [chain for chain in view.chains if chain.inner is not None]
    assert all(chain.outer is not None and chain.inner is not None for chain in joined)
    assert [c.inner.id.replace("inner", "outer") for c in joined if c.inner] == [c.outer.id for c in joined if c.outer]
    assert len(joined) >= 55


def tries(*, first: dict[str, object], ids: bool = True) -> tuple[list[Record], list[Record]]:
    """One request before the hop, two behind it: the first as ``first`` says, the second answered."""
    near = record("outer", [900 * MS], t0=1000 * MS)
    one = record("inner", [300 * MS], number=0, t0=1001 * MS)
    two = record("inner", [500 * MS], number=0, t0=1302 * MS)
    one.response_id, one.id = None, "inner-first"
    for name, value in first.items():
        setattr(one, name, value)
    if not ids:
        without_ids([near], [one, two])
    return [near], [one, two]


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize(
    "first",
    [
        pytest.param({"status": 503}, id="an error status"),
        pytest.param({"ended": Ended.CLIENT_ABORTED, "status": None}, id="the proxy ran out of patience"),
        pytest.param({"ended": Ended.UPSTREAM_ABORTED}, id="a broken answer"),
        pytest.param({"status": 429}, id="too many requests"),
    ],
)
def test_a_request_that_the_proxy_tried_twice_is_told_with_its_tries(ids: bool, first: dict[str, object]) -> None:
    outer, inner = tries(first=first, ids=ids)
    found = pair(outer, inner[::-1])
    assert found.retried == [(outer[0], inner)]
    # The answer's own id joins the second try; without it nobody says which was answered.
    assert [(each.outer, each.inner) for each in found.pairs] == ([(outer[0], inner[1])] if ids else [])
    view = look([], outer, inner)
    assert view.retried == [(outer[0], inner)]
    assert view.unpaired == (0 if ids else 1)


def test_a_copy_and_a_client_that_asks_again_are_no_retries() -> None:
    # Both answered: a mirror.
    outer, inner = tries(first={})
    assert pair(outer, inner).retried == []
    # At the same time: a mirror whose copy failed.
    outer, inner = tries(first={"status": 503})
    inner[1].t0_mono_ns = inner[0].t0_mono_ns + MS
    assert pair(outer, inner).retried == []
    # The client's own second request has a record before the hop.
    outer, inner = tries(first={"status": 503})
    again = record("outer", [500 * MS], t0=1301 * MS)
    outer[0].events.arrived = [250 * MS]
    outer[0].upstream.end = outer[0].downstream.end = 300 * MS
    again.id = "outer-again"
    assert pair([*outer, again], inner).retried == []
