"""Joining: certain where an id says so, likely where only time does, unsure where a rival could claim it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tapproxy.core.record import Events, Record, RequestPart, UsagePart
from tapproxy.load.importers.imported import ClientRequest, Clock
from tapproxy.load.importers.join import By, Join, Sure, fingerprint, join
from tapproxy.load.importers.reading import read
from tapproxy.store import read_records

DATA = Path(__file__).parent.parent / "data/import"
MS = 1_000_000
S = 1_000 * MS
KEY = b"shared"


def record(
    number: int, at_ns: int, *, tokens: int = 4, body: bytes | None = None, request_id: str | None = None
) -> Record:
    """Seen at ``at_ns`` on both clocks; the answer takes 100 ms."""
    return Record(
        id=f"record-{number}",
        tap="tap",
        request_id=request_id,
        response_id=f"chatcmpl-{number}",
        t0_unix_ns=at_ns,
        t0_mono_ns=at_ns,
        stream=True,
        request=RequestPart(fingerprint=None if body is None else fingerprint(body, KEY)),
        events=Events(
            kind=["token", "token"],
            end_offset=[1, 2],
            arrived=[50 * MS, 100 * MS],
            read_at=[50 * MS, 100 * MS],
            sent=[50 * MS, 100 * MS],
            read=[0, 1],
            tokens=[1, 1],
        ),
        usage=UsagePart(completion_tokens=tokens),
    )


def request(number: int, at_ns: int | None, **more: object) -> ClientRequest:
    """Sent at ``at_ns``, a millisecond before the tap sees it; the last token comes 101 ms later."""
    made = ClientRequest(index=number, start_ns=at_ns, clock=Clock.WALL, output_tokens=4, last_token_ns=101 * MS)
    return replace(made, **more)  # type: ignore[arg-type]


def found(joins: list[Join]) -> list[tuple[int, str, str, str]]:
    return [(each.request.index, each.record.id, each.by.value, each.sure.value) for each in joins]


def test_the_id_of_the_response_comes_first() -> None:
    asked = [request(0, S, response_id="chatcmpl-1", request_id="a")]
    seen = [record(0, S, request_id="a"), record(1, 9 * S)]
    assert found(join(asked, seen)) == [(0, "record-1", "response_id", "certain")]


def test_the_requests_id_is_certain_whenever_it_was() -> None:
    asked = [request(0, None, request_id="a"), request(1, None, request_id="b")]
    seen = [record(0, S, request_id="b"), record(1, 2 * S, request_id="a"), record(2, S)]
    assert found(join(asked, seen)) == [
        (0, "record-1", "request_id", "certain"),
        (1, "record-0", "request_id", "certain"),
    ]


def test_of_an_id_that_was_used_twice_the_nearest_in_time_is_likely() -> None:
    asked = [request(0, S, request_id="a")]
    seen = [record(0, S + MS, request_id="a"), record(1, 5 * S, request_id="a")]
    (joined,) = join(asked, seen)
    assert found([joined]) == [(0, "record-0", "request_id", "likely")]
    assert joined.why == "the id was used more than once; nearest in time"


def numbered(start_ns: int, n: int = 4) -> list[ClientRequest]:
    return [request(i, start_ns + i * S, id_index=i, clock=Clock.MONOTONIC) for i in range(n)]


def run_of(prefix: str, start_ns: int, first: int = 0, n: int = 4, tokens: int = 4) -> list[Record]:
    return [record(first + i, start_ns + MS + i * S, request_id=f"{prefix}{i}", tokens=tokens) for i in range(n)]


def test_numbers_find_the_run_with_their_clock() -> None:
    seen = run_of("bench-a-", 100 * S) + run_of("bench-b-", 200 * S, first=10)
    joins = join(numbered(200 * S), seen)
    assert found(joins) == [(i, f"record-{10 + i}", "request_id", "certain") for i in range(4)]
    assert all("start times agree on one clock" in (each.why or "") for each in joins)


def test_a_prefix_may_end_in_a_digit() -> None:
    joins = join(numbered(100 * S, n=12), run_of("run1", 100 * S, n=12))
    assert found(joins) == [(i, f"record-{i}", "request_id", "certain") for i in range(12)]


def test_numbers_of_another_host_are_likely_at_best() -> None:
    joins = join(numbered(7_000 * S), run_of("bench-a-", 100 * S))
    assert [each.sure for each in joins] == [Sure.LIKELY] * 4
    assert "another such run would look the same" in (joins[0].why or "")


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param(run_of("bench-a-", 100 * S) + run_of("bench-b-", 300 * S, first=10), id="two runs, another clock"),
        pytest.param(run_of("bench-a-", 7_000 * S, tokens=5), id="other numbers of tokens"),
        pytest.param(run_of("bench-a-", 7_000 * S, n=1), id="one request of four"),
        pytest.param(
            [record(i, 7_000 * S + MS + i * S, request_id=f"bench-a-{i}f") for i in range(4)],
            id="ids that end in no number",
        ),
    ],
)
def test_numbers_that_may_be_another_runs_join_nobody_by_id(seen: list[Record]) -> None:
    assert not [each for each in join(numbered(7_000 * S), seen) if each.by is By.REQUEST_ID]


def test_a_number_that_was_seen_twice_joins_nobody() -> None:
    seen = [*run_of("bench-a-", 100 * S), record(9, 100 * S + 2 * MS, request_id="bench-a-0")]
    joined = {each.request.index for each in join(numbered(100 * S), seen) if each.by is By.REQUEST_ID}
    assert joined == {1, 2, 3}


def test_a_body_that_was_sent_once_is_certain_and_one_sent_twice_is_told_by_time() -> None:
    asked = [request(0, S, bodies=(b"a",)), request(1, 2 * S, bodies=(b"x", b"b")), request(2, 3 * S, bodies=(b"b",))]
    seen = [record(0, 9 * S, body=b"a"), record(1, 2 * S + MS, body=b"b"), record(2, 3 * S + MS, body=b"b")]
    assert found(join(asked, seen, KEY)) == [
        (0, "record-0", "fingerprint", "certain"),
        (1, "record-1", "fingerprint", "likely"),
        (2, "record-2", "fingerprint", "likely"),
    ]
    # Without the key, or with another, a fingerprint says nothing: request 0 was at no time that fits.
    assert [each.by for each in join(asked, seen)] == [By.TIME, By.TIME]
    assert [each.by for each in join(asked, seen, b"another")] == [By.TIME, By.TIME]


def test_by_time_alone_is_likely_and_says_how_near() -> None:
    (joined,) = join([request(0, S)], [record(0, S + MS), record(1, S + 500 * MS)])
    assert found([joined]) == [(0, "record-0", "time", "likely")]
    assert joined.why == "last tokens 0.0 ms apart; the next is 499 ms away"


@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        pytest.param([request(0, S)], [record(0, S + MS), record(1, S + 3 * MS)], id="two records as near"),
        pytest.param([request(0, S), request(1, S + 2 * MS)], [record(0, S + MS)], id="two requests as near"),
        pytest.param([request(0, S)], [record(0, S + 400 * MS)], id="far away"),
    ],
)
def test_what_a_rival_could_claim_is_unsure(asked: list[ClientRequest], seen: list[Record]) -> None:
    assert [each.sure for each in join(asked, seen)] == [Sure.UNSURE]


@pytest.mark.parametrize(
    ("asked", "seen"),
    [
        pytest.param(request(0, S), record(0, S + MS, tokens=5), id="other tokens"),
        pytest.param(request(0, 20 * S), record(0, S), id="long before"),
        pytest.param(request(0, S), record(0, 20 * S), id="long after"),
        pytest.param(
            request(0, S + 10 * MS, clock=Clock.MONOTONIC), record(0, S), id="before it was sent, on one clock"
        ),
        pytest.param(request(0, None), record(0, S), id="no time"),
    ],
)
def test_what_cannot_be_one_is_not_joined(asked: ClientRequest, seen: Record) -> None:
    assert join([asked], [seen]) == []


@pytest.mark.parametrize(
    ("file", "by"),
    [
        ("vllm-bench-0.32-chat.json", By.REQUEST_ID),
        ("vllm-bench-0.32-completions.json", By.REQUEST_ID),
        ("aiperf-0.13.jsonl", By.REQUEST_ID),
        ("guidellm-0.8.json", By.RESPONSE_ID),
    ],
)
def test_captured_runs_join_by_their_ids(file: str, by: By) -> None:
    asked = read(DATA / file).runs[0].requests
    joins = join(asked, list(read_records(DATA)))
    assert Counter((each.by, each.sure) for each in joins) == {(by, Sure.CERTAIN): len(asked)}


@pytest.mark.parametrize(("file", "inputs"), [("guidellm-0.8.json", None), ("aiperf-0.13.jsonl", "inputs.json")])
def test_without_ids_captured_runs_join_by_their_bodies(file: str, inputs: str | None) -> None:
    asked = read(DATA / file, None if inputs is None else DATA / inputs).runs[0].requests
    records = list(read_records(DATA))
    truth = {each.request.index: each.record.id for each in join(asked, records)}
    bare = [replace(each, request_id=None, response_id=None) for each in asked]
    joins = join(bare, records, b"secret-pair")
    assert {each.by for each in joins} == {By.FINGERPRINT}
    assert {each.request.index: each.record.id for each in joins} == truth
    # By time alone what is not unsure is right as well.
    by_time = [each for each in join(bare, records) if each.sure is not Sure.UNSURE]
    assert by_time
    assert all(truth[each.request.index] == each.record.id for each in by_time)
