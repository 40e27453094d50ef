"""Both views of one request: the tool's, the same by our definitions, the tap's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapproxy.core.record import Events, Record, UsagePart
from tapproxy.load.importers import result
from tapproxy.load.importers.imported import ClientRequest, ClientRun, Clock, Imported, Tool
from tapproxy.load.importers.join import By, Join, Sure
from tapproxy.load.importers.reading import read
from tapproxy.load.importers.sides import align, both, summary
from tapproxy.store import read_records

DATA = Path(__file__).parent.parent / "data/import"
MS = 1_000_000


def record(kinds: list[str], *, tokens: int = 3, ended: str = "complete", void: str | None = None) -> Record:
    """One event every 10 ms from 10 ms on, sent on at once."""
    at = [10 * MS * (i + 1) for i in range(len(kinds))]
    return Record(
        id="r",
        tap="tap",
        t0_mono_ns=1_000 * MS,
        t0_unix_ns=1_000 * MS,
        ended=ended,
        status=200,
        events=Events(
            kind=kinds,
            end_offset=list(range(len(kinds))),
            arrived=at,
            read_at=at,
            sent=list(at),
            read=list(range(len(kinds))),
            tokens=[1 if kind == "token" else None for kind in kinds],
        ),
        usage=UsagePart(completion_tokens=tokens),
        void=void,
    )


def client(*stamps_ms: float, start_ms: int = 998, clock: Clock = Clock.MONOTONIC) -> ClientRequest:
    return ClientRequest(
        index=0,
        start_ns=start_ms * MS,
        clock=clock,
        ttft_ns=stamps_ms[0] * MS,
        e2e_ns=stamps_ms[-1] * MS,
        output_tokens=3,
        stamps_ns=tuple(each * MS for each in stamps_ms),
        last_token_ns=stamps_ms[-1] * MS,
    )


CHAT = ["role", "token", "token", "token", "usage", "done"]


def test_the_role_event_is_taken_out_of_vllms_ttft() -> None:
    # It says TTFT 13 ms, which is the role event; the first token came to it at 23.
    found = align(client(13, 23, 33, 43), record(CHAT), Tool.VLLM_BENCH)
    assert (found.ttft_ns, found.tpot_ns, found.e2e_ns) == (23 * MS, 10 * MS, 43 * MS)
    assert found.how == "its 4 chunks are every event with choices, the role event too"


def test_a_version_that_skips_the_role_event_is_seen_by_its_number_of_chunks() -> None:
    found = align(client(23, 33, 43), record(CHAT), Tool.VLLM_BENCH)
    assert (found.ttft_ns, found.e2e_ns) == (23 * MS, 43 * MS)
    assert found.counted == "every event with choices, without a role event"


def test_a_finish_event_of_its_own_ends_e2e() -> None:
    kinds = ["role", "token", "token", "token", "finish", "usage", "done"]
    found = align(client(13, 23, 33, 43, 53), record(kinds), Tool.VLLM_BENCH)
    assert (found.ttft_ns, found.e2e_ns, found.tpot_ns) == (23 * MS, 53 * MS, 15 * MS)


def test_chunks_that_fit_no_set_of_events_are_not_forced() -> None:
    found = align(client(13, 23), record(CHAT), Tool.VLLM_BENCH)
    assert (found.ttft_ns, found.e2e_ns) == (None, None)
    assert found.how == "it counted 2 chunks, and that is no set of the tap's events"
    # aiperf leaves out chunks without text: its TTFT is of a token all the same.
    loose = align(client(23, 43), record(CHAT), Tool.AIPERF)
    assert (loose.ttft_ns, loose.tpot_ns, loose.counted) == (23 * MS, 10 * MS, None)


def joined(request: ClientRequest, seen: Record, sure: Sure = Sure.CERTAIN) -> dict[str, Any]:
    return both(Join(request, seen, By.REQUEST_ID, sure), Tool.VLLM_BENCH)


def test_on_one_clock_what_lies_before_and_after_the_tap_is_told_apart() -> None:
    # Sent 2 ms before the tap saw it; every chunk came 1 ms after the tap had sent it.
    view = joined(client(13, 23, 33, 43), record(CHAT))
    assert (view["tap"]["ttft_ms"], view["tap"]["tpot_ms"], view["tap"]["e2e_ms"]) == (20.0, 10.0, 40.0)
    assert (view["before_tap_ms"], view["after_tap_ms"]) == (2.0, 1.0)
    assert view["client_aligned"]["ttft_ms"] == 23.0
    assert view["client_aligned"]["ttft_from_tap_ms"] == 21.0
    assert view["difference_ms"] == {"ttft": 1.0, "tpot": 0.0, "e2e": 1.0}
    assert view["difference_from"] == "counted from the tap's start"


def test_without_one_clock_only_durations_are_compared() -> None:
    other_host = joined(client(13, 23, 33, 43, start_ms=90_000_000), record(CHAT))
    assert (other_host["before_tap_ms"], other_host["after_tap_ms"]) == (None, None)
    assert other_host["difference_ms"] == {"ttft": 3.0, "tpot": 0.0, "e2e": 3.0}
    wall = joined(client(13, 23, 33, 43, clock=Clock.WALL), record(CHAT))
    assert (wall["difference_from"], wall["before_tap_ms"]) == ("each from its own start", 2.0)


def test_what_is_unsure_failed_or_void_is_in_no_sum() -> None:
    request = client(13, 23, 33, 43)
    views = [
        (request, joined(request, record(CHAT))),
        (request, joined(request, record(CHAT), Sure.UNSURE)),
        (request, joined(request, record(CHAT, void="loop_lag"))),
        (request, joined(request, record(CHAT[:3], ended="client_aborted"))),
    ]
    found = summary(views)
    assert (found["requests"], found["void"]) == (1, 1)
    assert found["ttft_ms"]["told"] == {"p50": 13.0, "p99": 13.0, "n": 1}
    assert found["ttft_ms"]["aligned"]["p50"] == 23.0


def test_a_client_that_leaves_on_done_has_had_the_whole_answer() -> None:
    assert joined(client(13, 23, 33, 43), record(CHAT, ended="client_aborted"))["tap"]["failure"] is None


def test_taps_of_both_sides_are_joined_each() -> None:
    outer, inner = record(CHAT), record(CHAT)
    outer.tap, outer.id, outer.request_id, inner.tap, inner.id, inner.request_id = "outer", "o", "a", "inner", "i", "a"
    asked = Imported(Tool.AIPERF, None, (ClientRun("run", (ClientRequest(0, request_id="a"),)),))
    found = result.result(asked, [outer, inner])
    assert {name: view["record"] for name, view in found["requests"][0]["taps"].items()} == {"inner": "i", "outer": "o"}
    assert list(result.result(asked, [outer, inner], tap="outer")["taps"]) == ["outer"]


@pytest.mark.parametrize("file", ["vllm-bench-0.32-chat.json", "guidellm-0.8.json"])
def test_captured_runs_agree_with_the_tap_within_a_millisecond(file: str) -> None:
    found = result.result(read(DATA / file), list(read_records(DATA)))
    counted = found["taps"]["tap"]["summary"]
    assert counted["requests"] >= 3
    for metric in ("ttft_ms", "tpot_ms"):
        assert counted[metric]["absolute_difference"]["p50"] <= 1.0
    if file.startswith("vllm"):
        assert found["observed"] == [
            "tap: in 8 of 8 joined requests its TTFT ends at the role event, before a token",
        ]
