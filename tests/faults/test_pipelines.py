"""Pipelines made by chance, good and bad, through a running tap: what reaches the engine is what was sent, or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.faults import pipelines
from tests.faults.lab import wait_for_rest, wait_until, written
from tests.faults.pipelines import LIMIT_S, Request, Seen, Site, bad_endings, converse, mutations, oracle
from tests.harness import Tap, Upstream, tap

EXAMPLES = 150
# The same examples each time; and none is made smaller, which would take minutes where each is a conversation.
chance = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


FLAGS = ("--header-timeout", "1s", "--upstream-keepalive", "300ms")


class Bench:
    """A tap, its upstream, and how many records there must be.

    ``perhaps``: how many more there may be, from clients that left in the middle of a request before it was refused.
    """

    def __init__(self, running: Tap, site: Site) -> None:
        self.running = running
        self.site = site
        self.records = 0
        self.perhaps = 0

    def seen(self, least: int) -> Seen:
        """What reached the upstream: at least so many requests."""
        wait_until(lambda: self.site.look() >= least, f"{least} requests at the upstream", LIMIT_S)
        return self.site.take()


def benches(directory: Path) -> Iterator[Bench]:
    """A fresh bench, and at its end the check of its records."""
    site = Site()
    with Upstream(site.script) as upstream, tap(directory, upstream.url, *FLAGS) as running:
        bench = Bench(running, site)
        yield bench
        wait_until(lambda: len(written(directory)) >= bench.records, f"{bench.records} records")
        wait_for_rest(running)
    # What was on its way is there now.
    assert bench.records <= len(written(directory)) <= bench.records + bench.perhaps
    assert not upstream.failures


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield from benches(tmp_path_factory.mktemp("tap"))


def check_valid(bench: Bench, sent: list[Request], ending: bytes, cuts: list[int]) -> None:
    """Every request once, as it was sent; then the refusal of what is none."""
    data = b"".join(request.wire for request in sent) + ending
    upto = next((number + 1 for number, request in enumerate(sent) if request.last), len(sent))
    refused = ending and upto == len(sent) and not sent[-1].last
    calls = [request.call for request in sent[:upto]]
    closes = bool(ending) or sent[upto - 1].last
    got = converse(bench.running, data, cuts, [method for method, _, _ in calls], until_closed=closes)
    assert got.in_time
    seen = bench.seen(len(calls))
    assert seen.whole == calls
    assert seen.broken == []
    assert all(raw.startswith(b"%s %s HTTP/1.1\r\n" % call[:2]) for raw, call in zip(seen.raw, calls, strict=True))
    assert got.answers == [b"" if call[0] == b"HEAD" else b"%s %s %d" % (*call[:2], len(call[2])) for call in calls]
    assert (got.refusal is not None) == bool(refused)
    assert got.refusal in (None, 400, 431, 501, 505)
    assert got.closed == closes
    bench.records += len(calls) + bool(refused)


def check_mutated(bench: Bench, data: bytes, cuts: list[int]) -> None:
    """What reaches the upstream is a prefix of what h11 reads; nothing hangs; nothing is without a record."""
    calls, wrong = oracle(data)
    got = converse(bench.running, data, cuts, [method for method, _, _ in calls], until_closed=wrong)
    assert got.in_time
    seen = bench.seen(len(got.answers))
    assert seen.whole == calls[: len(seen.whole)]
    assert len(got.answers) == len(seen.whole) or got.closed
    # Stricter than h11 it may be, laxer not: where h11 stops, it stops.
    assert got.closed or len(got.answers) == len(calls)
    bench.records += len(seen.whole) + (got.refusal is not None)
    bench.perhaps += got.refusal is None and not got.closed


def test_every_request_arrives_once_as_sent_and_what_is_none_is_refused(bench: Bench) -> None:
    @chance
    @given(sent=pipelines.pipelines, ending=st.one_of(st.just(b""), bad_endings), cuts=pipelines.cuts)
    def holds(sent: list[Request], ending: bytes, cuts: list[int]) -> None:
        check_valid(bench, sent, ending, cuts)

    holds()


def test_what_reaches_the_engine_is_no_more_than_h11_reads(bench: Bench) -> None:
    @chance
    @given(data=st.data(), sent=pipelines.pipelines, cuts=pipelines.cuts)
    def holds(data: st.DataObject, sent: list[Request], cuts: list[int]) -> None:
        check_mutated(bench, data.draw(mutations(b"".join(request.wire for request in sent))), cuts)

    holds()
