"""Two taps around a real nginx: joined, compared as if on two hosts, and checked against nginx's own log.

Both taps run here, so the true hold is known event by event; the inner one's records are then put on a clock of their
own, as another host would have written them, and what comes of that is held against the truth.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tapproxy.core.record import Record
from tapproxy.core.witness import AccessRow, UpstreamTry
from tapproxy.diagnose.causes import LEAST_REQUESTS, verdict
from tapproxy.diagnose.moved import bound_between
from tapproxy.diagnose.pairing import Pair, hold_ns, pair
from tapproxy.diagnose.view import look
from tapproxy.diagnose.witness import witness
from tests.diagnose.hosts import Other, elsewhere
from tests.e2e.helpers import ask, chat, crowd, engine, scheduled
from tests.harness import Tap, tap
from tests.probe.proxies import free_port, installed, running

MS = 1_000_000
REQUESTS = 16
# What runs for the first time takes longer, and is void for it now and then.
WARM = 2
TOKENS = 24
PLACES = ("stream", "buffered", "gzip")
Seen = dict[str, tuple[list[Record], list[Record], list[AccessRow]]]
KEY = ("--pair-key", "a-key-that-both-taps-share")
LOG = (
    '{"msec":"$msec","rt":"$request_time","uct":"$upstream_connect_time","uht":"$upstream_header_time",'
    '"urt":"$upstream_response_time","id":"$request_id","client":"$http_x_request_id","uri":"$uri",'
    '"status":"$status","bytes":"$body_bytes_sent"}'
)


@contextmanager
def nginx(directory: Path, upstream_port: int) -> Iterator[int]:
    """nginx with one location that streams, one that holds 4 kB, and one that compresses."""
    program, port = installed("nginx"), free_port()
    (directory / "tmp").mkdir(parents=True)
    directory.chmod(0o755)
    (directory / "tmp").chmod(0o777)
    names = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = " ".join(f"{name}_temp_path {directory}/tmp/{name};" for name in names)
    keep = 'proxy_pass http://inner/; proxy_http_version 1.1; proxy_set_header Connection "";'
    (directory / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {directory}/nginx.pid; worker_processes 1;\n"
        "events { worker_connections 256; }\n"
        f"http {{ {temporary} log_format own escape=json '{LOG}'; access_log {directory}/access.log own;\n"
        f"  upstream inner {{ server 127.0.0.1:{upstream_port}; keepalive 16; }}\n"
        f"  server {{ listen 127.0.0.1:{port};\n"
        f"    location /stream/ {{ {keep} proxy_buffering off; }}\n"
        # Asked in HTTP/1.0 the engine closes, and nginx then waits until a buffer is full.
        f"    location /buffered/ {{ proxy_pass http://127.0.0.1:{upstream_port}/; proxy_http_version 1.0; }}\n"
        f"    location /gzip/ {{ {keep} gzip on; gzip_types text/event-stream; }} }} }}\n"
    )
    command = [program, "-p", str(directory), "-c", str(directory / "nginx.conf"), "-e", str(directory / "error.log")]
    with running(command, ("127.0.0.1", port), directory, f"http://127.0.0.1:{port}", {}):
        yield port


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """(outer, inner, log) of each location. Every request has the same body, and all but the gzip ones no id."""
    directory = tmp_path_factory.mktemp("two")
    os.chmod(directory, 0o755)
    with ExitStack() as stack:
        behind = stack.enter_context(engine("--http10", "close"))
        inner = stack.enter_context(tap(directory / "inner", behind.url, "--name", "inner", *KEY))
        port = stack.enter_context(nginx(directory / "nginx", inner.data[1]))
        outer = stack.enter_context(tap(directory / "outer", f"http://127.0.0.1:{port}", "--name", "outer", *KEY))
        asyncio.run(load(outer, "stream", WARM))
        for place in PLACES:
            asyncio.run(load(outer, place, REQUESTS))
        count = WARM + REQUESTS * len(PLACES)
        near, far = (of_places(each.records(count)[WARM:]) for each in (outer, inner))
        lines = (directory / "nginx/access.log").read_text().splitlines()
    rows = [row(number, line) for number, line in enumerate(lines, 1)][WARM:]
    return {
        place: (near[place], far[place], [one for one in rows if (one.path or "").startswith(f"/{place}/")])
        for place in PLACES
    }


async def load(outer: Tap, place: str, count: int) -> None:
    fields = (*scheduled(TOKENS, 10_000, 30_000), "Accept-Encoding: gzip")

    async def one(number: int) -> Any:
        named = (f"X-Request-Id: {place}-{number}",) if place == "gzip" else ()
        request = chat(*fields, *named).replace(b"POST /v1", b"POST /" + place.encode() + b"/v1", 1)
        return await ask(outer.data[1], request)

    answers = await crowd(count, count, one)
    assert {answer.status for answer in answers} == {200}


def of_places(found: list[dict[str, Any]]) -> dict[str, list[Record]]:
    """Written when they ended, and the places were asked one after another."""
    records = [Record.from_dict(each) for each in found]
    return {place: records[n * REQUESTS : (n + 1) * REQUESTS] for n, place in enumerate(PLACES)}


def row(number: int, line: str) -> AccessRow:
    """A line of the log as its reader gives it."""
    said = json.loads(line)

    def ns(text: str) -> int | None:
        return None if text in ("", "-") else round(float(text) * 1e9)

    one_try = UpstreamTry(connect_ns=ns(said["uct"]), header_ns=ns(said["uht"]), response_ns=ns(said["urt"]))
    return AccessRow(
        line=number,
        ended_unix_ns=ns(said["msec"]),
        ended_bound_ns=MS,
        request_ns=ns(said["rt"]),
        request_id=said["id"],
        client_request_id=said["client"] or None,
        # $uri is what the client asked for.
        path=said["uri"],
        status=int(said["status"]),
        body_bytes=int(said["bytes"]),
        tries=(one_try,),
    )


@pytest.mark.parametrize("place", ["stream", "buffered"])
def test_holds_of_two_hosts_are_those_of_one_within_the_bound(seen: Seen, place: str) -> None:
    outer, inner, _ = seen[place]
    assert len(pair(outer, inner).pairs) == REQUESTS
    here = look([], outer, inner)
    # A machine with other things to do voids some.
    measured = len(here.crossed)
    assert measured == sum(
        not (chain.outer and chain.outer.void) and not (chain.inner and chain.inner.void) for chain in here.chains
    )
    assert measured >= REQUESTS / 2
    truth = {crossed.far.id: crossed.hop.hold_ns for crossed in here.crossed}
    there = look([], outer, elsewhere(inner, Other()))
    assert len(there.crossed) == measured
    true, within, bounds = [], 0, []
    for crossed in there.crossed:
        bound_ns = bound_between(crossed.near, crossed.far)
        found = hold_ns(Pair(crossed.near, crossed.far, "found"), bound_ns)
        assert found.by == "end_offset"
        true += truth[crossed.far.id]
        within += sum(abs(a - b) <= bound_ns for a, b in zip(crossed.hop.hold_ns, truth[crossed.far.id], strict=True))
        bounds.append(bound_ns)
    assert within >= 0.99 * len(true)
    # Loopback: less than the hold that there is to find, by far.
    assert max(bounds) < 5 * MS
    if place == "buffered":
        assert median(true) > 20 * MS
        for records in (inner, elsewhere(inner, Other())) if measured >= LEAST_REQUESTS else ():
            causes = [cause["cause"] for cause in verdict(outer=outer, inner=records)["causes"]]
            assert causes[:1] == ["proxy.response_buffering"]


def test_the_compressed_answers_join_by_the_requests_id_and_set_the_clock(seen: Seen) -> None:
    outer, inner, _ = seen["gzip"]
    assert {each.headers["content-encoding"] for each in outer} == {"gzip"}
    assert not any(each.events.kind for each in outer)
    other = Other()
    assert pair(outer, elsewhere(inner, other)).by == {"request_id": REQUESTS}
    view = look([], outer, elsewhere(inner, other))
    (clock,) = view.clocks.clocks
    assert clock.pairs == REQUESTS
    for chain, true in zip(view.chains, (pair_of(each, inner) for each in outer), strict=True):
        assert chain.inner is not None
        assert chain.outer is not None
        error_ns = chain.inner.t0_mono_ns - true.t0_mono_ns
        assert abs(error_ns) <= bound_between(chain.outer, chain.inner)


def pair_of(outer: Record, inner: list[Record]) -> Record:
    return next(each for each in inner if each.request_id == outer.request_id)


def test_nginxs_own_log_is_joined_and_agrees(seen: Seen) -> None:
    for place, (outer, inner, rows) in seen.items():
        found = witness(rows, look([], outer, inner))
        assert found.rows == REQUESTS
        by = "request_id" if place == "gzip" else "time"
        # Identical requests at one time: the log's milliseconds and wall clock cannot tell them all apart.
        assert set(found.by) <= {by}
        assert len(found.joined) + found.ambiguous == REQUESTS
        assert found.warnings == []
        if place == "gzip":
            assert len(found.joined) == REQUESTS
            request, upstream, header = found.agreements
            assert (request.holds, upstream.holds, header.holds) == (True, True, True)
            assert len(request.differences_ns) == len(upstream.differences_ns) == REQUESTS
