"""A stream judged from both sides' stamps: plain numbers, no socket."""

from __future__ import annotations

import zlib

import pytest

from tapproxy.nginx.live_engine import DONE, Answer, Seen, event_of, steady
from tapproxy.nginx.live_far import Far
from tapproxy.nginx.live_report import agrees, measured_to_dict, nagle, streaming_of
from tapproxy.nginx.live_stream import Stream, stream_of
from tapproxy.nginx.live_streams import Measured, doubtful
from tapproxy.wire.fetch import Fetched, Read

MS = 1_000_000
EVENTS = 10


def seen(*, method: str = "POST", finished: bool = True) -> Seen:
    """Ten events sent at 100, 120, …, 280 ms; the header at 0, the request complete at 0."""
    return Seen(
        steady(EVENTS, 20),
        connection=1,
        method=method,
        http_version="1.1",
        body_bytes=2,
        complete_ns=0,
        header_ns=0,
        sent_ns=[(100 + 20 * number) * MS for number in range(EVENTS)],
        finished=finished,
    )


def fetched(*arrivals: tuple[float, bytes], head_ms: float = 1, error: str | None = None, status: int = 200) -> Fetched:
    reads = [Read(int(at_ms * MS), int(at_ms * MS), body) for at_ms, body in arrivals]
    return Fetched(
        0, write_start_ns=0, write_end_ns=0, head_ns=int(head_ms * MS), status=status, reads=reads, error=error
    )


def each(late_ms: float) -> list[tuple[float, bytes]]:
    """Every event alone, so much late."""
    events = [(100 + 20 * number + late_ms, event_of(number, 210)) for number in range(EVENTS)]
    return [*events, (281 + late_ms, DONE)]


def whole_at_once(at_ms: float) -> list[tuple[float, bytes]]:
    return [(at_ms, b"".join(event_of(number, 210) for number in range(EVENTS)) + DONE)]


@pytest.mark.parametrize("size", [40, 210, 5000])
def test_an_event_has_the_size_that_was_asked_for(size: int) -> None:
    assert len(event_of(7, size)) == size


def test_a_stream_that_passes_at_once_streams() -> None:
    stream = stream_of(fetched(*each(0.5)), seen())
    assert (stream.streaming, stream.complete, stream.coalesced) == ("streams", True, 0)
    assert (stream.hold_p50_ms, stream.hold_max_ms) == (0.5, 0.5)
    assert (stream.header_delay_ms, stream.ttft_added_ms) == (1, 0.5)


def test_a_stream_that_comes_whole_at_its_end_is_held() -> None:
    stream = stream_of(fetched(*whole_at_once(280), head_ms=280), seen())
    assert (stream.streaming, stream.coalesced, stream.hold_max_ms, stream.hold_p50_ms) == ("held", 1, 180, 90)
    assert (stream.header_delay_ms, stream.ttft_added_ms) == (280, 180)


def test_one_late_event_on_a_noisy_machine_is_no_hold() -> None:
    reads = each(0.5)
    reads[4] = (reads[4][0] + 15, reads[4][1])
    stream = stream_of(fetched(*reads), seen())
    assert stream.hold_max_ms == 15.5
    assert (stream.streaming, doubtful(stream, "streams")) == ("streams", True)


def test_a_header_that_comes_with_the_first_event_is_late() -> None:
    assert stream_of(fetched(*each(0.5), head_ms=100), seen()).streaming == "late_header"


def test_an_event_cut_over_two_reads_arrives_with_its_end() -> None:
    body = event_of(0, 210)
    stream = stream_of(fetched((100, body[:209]), (150, body[209:]), (300, DONE)), seen())
    assert stream.hold_ms == (50,)


def test_compressed_events_are_told_apart_by_their_numbers() -> None:
    gzip = zlib.compressobj(wbits=31)
    reads = [
        (at_ms, gzip.compress(body) + gzip.flush(zlib.Z_SYNC_FLUSH if body != DONE else zlib.Z_FINISH))
        for at_ms, body in each(0.25)
    ]
    answer = fetched(*reads)
    answer.headers = [(b"Content-Encoding", b"gzip")]
    stream = stream_of(answer, seen())
    assert (stream.streaming, stream.encoding, stream.hold_ms) == ("streams", "gzip", (0.25,) * EVENTS)


@pytest.mark.parametrize(
    ("answer", "method", "streaming", "cut"),
    [
        (fetched(*each(0)[:5]), "POST", "fails", True),
        (fetched(*each(0)[:5], error="truncated: x"), "POST", "fails", True),
        (fetched(status=502), "POST", "fails", False),
        (fetched(*each(0)), "GET", "fails", False),
        (fetched(*each(0)[:1], error="timeout: no complete answer within 10 s"), "POST", "held", False),
    ],
    ids=["ends-without-its-mark", "truncated", "refused", "asked-with-get", "still-coming-after-ten-seconds"],
)
def test_what_did_not_come_as_sent_fails(answer: Fetched, method: str, streaming: str, cut: bool) -> None:
    stream = stream_of(answer, seen(method=method))
    assert (stream.streaming, stream.cut) == (streaming, cut)


def test_no_answer_at_all_is_a_failure_and_not_a_hold() -> None:
    answer = Fetched(0, error="timeout: no complete answer within 10 s")
    stream = stream_of(answer, seen(finished=False))
    assert (stream.streaming, stream.hold_p50_ms, stream.ttft_added_ms) == ("fails", None, None)


def test_the_links_own_time_is_no_hold() -> None:
    stream = stream_of(fetched(*each(40.5), head_ms=41), seen(), one_way_ms=40)
    assert (stream.hold_p50_ms, stream.header_delay_ms, stream.streaming) == (0.5, 1, "streams")


def measured(main: Stream, silence: Stream | None = None) -> Measured:
    return Measured(
        main=main, runs=1, without_gzip=main, short=main, over_16_kb=main, large_event=main, reused_connection=main,
        engine_dies=main, silence=silence, silence_ms=1500 if silence else None, large_prompt=main,
        upstream_reused=True, abort_decode=None, abort_prefill=None,
    )  # fmt: skip


def test_a_stream_cut_in_a_pause_fails_though_it_streams() -> None:
    passing, cut = stream_of(fetched(*each(0)), seen()), stream_of(fetched(*each(0)[:2]), seen())
    found = measured(passing, cut)
    assert (streaming_of(found), found.cut) == ("fails", True)
    shown = measured_to_dict(found, None, "depends")
    assert (shown["agrees"], shown["cut"], shown["streams"]["silence"]["silence_ms"]) == (None, True, 1500)
    assert agrees("streams", measured(passing)) is True
    assert agrees("held", measured(passing)) is False


def test_nagle_is_what_the_link_adds_to_a_stream_that_passes_here() -> None:
    near = stream_of(fetched(*each(0.5)), seen())
    far = stream_of(fetched(*each(70)), seen(), one_way_ms=40)
    held = stream_of(fetched(*whole_at_once(280)), seen())
    assert nagle(measured(near), Far(far, near)) is True
    assert nagle(measured(near), Far(near, near)) is False
    assert nagle(measured(held), Far(far, far)) is None


def test_the_standard_load_is_that_of_the_measurements() -> None:
    answer = steady(40, 20)
    assert isinstance(answer, Answer)
    waits_ms, sizes = zip(*answer.events, strict=True)
    assert (len(waits_ms), sum(waits_ms), set(sizes)) == (40, 880, {210})
