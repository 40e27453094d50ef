"""The proxy's log beside two taps: joined for certain, compared by durations, and heard where it contradicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tapproxy.core.record import Record
from tapproxy.core.witness import AccessRow, UpstreamTry
from tapproxy.diagnose.view import View, look
from tapproxy.diagnose.witness import Witnessed, witness
from tests.diagnose.make import MS, Proxy, all_at_the_end, passes, taps


def line_of(number: int, near: Record, far: Record, *, wall_ns: int = 0) -> AccessRow:
    """What nginx would log of it, in whole milliseconds: it has the request 0.1 ms after the outer tap wrote it, and
    is done with it 0.1 ms before the outer tap is."""
    start_ns = near.t0_unix_ns + (near.upstream.write_start or 0) + MS // 10
    end_ns = near.t0_unix_ns + (near.upstream.end or 0) - MS // 10
    return AccessRow(
        line=number,
        ended_unix_ns=(end_ns + wall_ns) // MS * MS,
        ended_bound_ns=MS,
        request_ns=(end_ns // MS - start_ns // MS) * MS,
        request_id=f"nginx-{number}",
        client_request_id=near.request_id,
        path=near.path,
        status=near.status,
        body_bytes=near.upstream.bytes + 7 * len(near.events.kind) + 5,
        tries=(
            UpstreamTry(
                addr="10.0.0.1:8000",
                status=far.status,
                connect_ns=0,
                header_ns=(far.downstream.head or 0) // MS * MS,
                response_ns=(far.downstream.end or 0) // MS * MS,
            ),
        ),
    )


def run(proxy: Proxy = passes, requests: int = 12) -> tuple[View, list[AccessRow]]:
    outer, inner = taps(proxy, requests=requests)
    rows = [line_of(number, *pair) for number, pair in enumerate(zip(outer, inner, strict=True), 1)]
    return look([], outer, inner), rows


def no_ids(view: View, rows: list[AccessRow]) -> list[AccessRow]:
    """The same where nobody sends an id, and the taps do not see nginx's own."""
    for record in (*view.outer, *view.inner):
        record.request_id = record.trace_id = None
    return [replace(row, client_request_id=None) for row in rows]


def outcome(found: Witnessed) -> tuple[int, dict[str, int], int, int]:
    return len(found.joined), found.by, found.ambiguous, found.unjoined


@pytest.mark.parametrize("proxy", [passes, all_at_the_end])
def test_lines_join_by_id_and_agree_also_where_the_proxy_holds(proxy: Proxy) -> None:
    view, rows = run(proxy)
    found = witness(rows[::-1], view)
    assert outcome(found) == (12, {"request_id": 12}, 0, 0)
    assert {(each.row.request_id, each.chain.outer and each.chain.outer.id) for each in found.joined} == {
        (f"nginx-{number + 1}", f"outer-{number}") for number in range(12)
    }
    assert [(each.holds, len(each.differences_ns)) for each in found.agreements] == [(True, 12)] * 3
    assert found.warnings == []
    assert all(abs(ns) <= 2 * MS for each in found.agreements for ns in each.differences_ns)
    shown = found.to_dict()
    assert shown["around_ms"] == pytest.approx(0, abs=1.5)
    assert (shown["connect_ms"], shown["retried"], shown["header_ms"]) == (None, 0, 1.0)


def test_without_ids_path_size_and_time_join_what_stands_alone() -> None:
    view, rows = run()
    rows = no_ids(view, rows)
    assert outcome(witness(rows, view)) == (12, {"time": 12}, 0, 0)
    # A second request of that time, path and size: nobody can tell which line is whose.
    double = replace(rows[3], line=99, request_id="nginx-99")
    assert outcome(witness([*rows, double], view)) == (11, {"time": 11}, 2, 0)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"path": "/v1/models"}, id="another path"),
        pytest.param({"status": 499}, id="another status"),
        pytest.param({"body_bytes": 10}, id="another size"),
        pytest.param({"ended_unix_ns": 5}, id="another time"),
        pytest.param({"ended_unix_ns": None}, id="no time"),
    ],
)
def test_a_line_of_another_request_is_left_out(change: dict[str, object]) -> None:
    view, rows = run()
    rows = no_ids(view, rows)
    rows[0] = replace(rows[0], **change)  # type: ignore[arg-type]  # each of its field's type
    assert outcome(witness(rows, view)) == (11, {"time": 11}, 0, 1)


def test_an_id_that_all_requests_share_joins_none_but_the_proxys_own_does() -> None:
    view, rows = run()
    for near, far, row in zip(view.outer, view.inner, rows, strict=True):
        near.request_id, far.request_id = "constant", row.request_id
    rows = [replace(row, client_request_id="constant") for row in rows]
    assert outcome(witness(rows, view)) == (12, {"request_id": 12}, 0, 0)


def test_tries_connections_and_time_lost_on_them_are_told() -> None:
    view, rows = run()
    (last,) = rows[0].tries
    lost = UpstreamTry("10.0.0.2:8000", 502, 4 * MS, None, 250 * MS)
    rows[0] = replace(rows[0], tries=(lost, replace(last, connect_ns=6 * MS)))
    found = witness(rows, view)
    assert found.retried == [rows[0]]
    assert found.retry_ns == [250 * MS]
    assert found.connects_ns == [4 * MS, 6 * MS]
    assert found.to_dict()["connect_ms"] == 5.0


@pytest.mark.parametrize("wrong", [2, 6])
def test_a_log_that_contradicts_the_tap_is_a_warning_once_it_is_more_than_chance(wrong: int) -> None:
    view, rows = run()
    for index in range(wrong):
        rows[index] = replace(rows[index], request_ns=(rows[index].request_ns or 0) + 300 * MS)
    found = witness(rows, view)
    assert found.agreements[0].disagree == wrong
    assert found.agreements[0].holds is (wrong < 3)
    assert [
        text.startswith("the proxy's log and the tap disagree on a request's whole time") for text in found.warnings
    ] == ([True] if wrong >= 3 else [])


def test_an_offset_of_the_proxys_clock_makes_nothing_disagree() -> None:
    outer, inner = taps(passes)
    rows = [line_of(n, *each, wall_ns=3_700 * MS) for n, each in enumerate(zip(outer, inner, strict=True), 1)]
    found = witness(rows, look([], outer, inner))
    assert outcome(found)[0] == 12
    assert found.warnings == []


def test_a_log_without_times_says_nothing() -> None:
    view, rows = run()
    bare = [replace(row, request_ns=None, tries=()) for row in rows]
    found = witness(bare, view)
    assert outcome(found)[0] == 12
    assert [each.holds for each in found.agreements] == [None] * 3
    assert found.to_dict()["around_ms"] is None
    assert witness([], view).to_dict()["rows"] == 0
