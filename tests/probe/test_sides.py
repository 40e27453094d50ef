"""What a proxy does beside the stream, from plain numbers on both sides."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

from tapproxy.core.probing import Framing, Part, Plan, StreamEnd, shown
from tapproxy.probe import plans, sides
from tapproxy.probe.asking import Clocks
from tapproxy.probe.observe import Observed, observe
from tapproxy.wire.fetch import Fetched, Read
from tests.probe import streams
from tests.probe.streams import MS, START_NS

COMMON = Clocks(True, "one host")
APART = Clocks(False, "two hosts")


def left_after(events: int, *, left_ms: float, tap_offset_ms: float = 0.0, **report: Any) -> Observed:
    """A stream of 20 ms that was left after so many events; the tap's clock is ahead by the offset."""
    one = streams.delivered(plans.SMALL, streams.direct, events=events)
    one.events = [event._replace(sent_ns=event.sent_ns + round(tap_offset_ms * MS)) for event in one.events]
    one.fetched.left_ns = START_NS + round(left_ms * MS)
    assert one.tap is not None
    one.tap |= report
    one.tap["sent_ns"] = [round(at + tap_offset_ms * MS) for at in one.tap["sent_ns"]]
    return one


def test_an_abort_is_timed_on_one_clock() -> None:
    # The fifth event was sent at 380 ms; the client left at 381, the tap was told at 391.
    one = left_after(5, left_ms=381, ended=StreamEnd.LEFT, end_ns=START_NS + 391 * MS)
    found = sides.abort(one, COMMON)
    assert found is not None
    assert (found["reached"], found["after_ms"], found["events_sent_for_nobody"]) == (True, 10.0, 0)


def test_without_one_it_is_a_round_trip_from_the_last_event() -> None:
    """The tap's clock is an hour ahead; what counts is the time since an event that both know."""
    hour_ms = 3_600_000.0
    end_ns = round(START_NS + (391 + hour_ms) * MS)
    one = left_after(5, left_ms=381, tap_offset_ms=hour_ms, ended=StreamEnd.LEFT, end_ns=end_ns)
    found = sides.abort(one, APART)
    assert found is not None
    # 0.2 ms of it is how long that event took.
    assert abs(found["after_ms"] - 10.2) < 0.01
    assert found["how"] == "a round trip, from the last event that came"


def test_an_abort_that_never_comes_is_counted_in_events() -> None:
    sent_ns = [START_NS + (300 + 20 * number) * MS for number in range(120)]
    one = left_after(5, left_ms=381)
    assert one.tap is not None
    one.tap |= {"sent_ns": sent_ns, "end_ns": sent_ns[-1]}
    found = sides.abort(one, COMMON)
    assert found is not None
    assert found["reached"] is False
    assert found["after_ms"] is None
    assert found["events_sent_for_nobody"] == 115


def left_early(*, left_ms: float, tap_offset_ms: float = 0.0, **report: Any) -> Observed:
    """A stream whose first event was due after 2.5 s, left before it. The tap was asked 3 ms after the request."""
    plan = plans.ABORT_FIRST
    fetched = Fetched(START_NS, write_start_ns=START_NS, write_end_ns=START_NS, left_ns=START_NS + round(left_ms * MS))
    out = Observed("abort-first", plan, fetched)
    out.tap = streams.report(plan.id, report.pop("sent_ns", []), **report)
    out.tap["head_sent_ns"] = START_NS + round((3 + tap_offset_ms) * MS)
    return out


def test_an_abort_before_the_first_event_is_timed_with_and_without_a_common_clock() -> None:
    at_once = left_early(left_ms=1_000, ended=StreamEnd.LEFT, end_ns=START_NS + 1_001 * MS)
    found = sides.abort_first(at_once, COMMON)
    assert found is not None
    assert (found["after_ms"], found["events_sent_for_nobody"], sides.deaf(found)) == (1.0, 0, False)
    hour_ms = 3_600_000
    sent_ns = [START_NS + (hour_ms + 2_503 + 20 * number) * MS for number in range(2)]
    end_ns = START_NS + (hour_ms + 2_524) * MS
    late = left_early(left_ms=1_000, tap_offset_ms=hour_ms, sent_ns=sent_ns, ended=StreamEnd.LEFT, end_ns=end_ns)
    found = sides.abort_first(late, APART)
    assert found is not None
    # 1524 ms; the 3 ms that the request took are left out.
    assert (found["after_ms"], found["events_sent_for_nobody"], sides.deaf(found)) == (1521.0, 2, True)


def test_an_abort_before_the_first_event_says_nothing_where_it_came_too_late_or_the_tap_was_not_asked() -> None:
    ended = left_early(left_ms=1_000, end_ns=START_NS + 900 * MS)
    begun = left_early(left_ms=1_000, sent_ns=[START_NS + 500 * MS], end_ns=START_NS + 2_000 * MS)
    unasked = left_early(left_ms=1_000)
    unasked.tap = None
    assert [sides.abort_first(one, COMMON) for one in (ended, begun, unasked)] == [None, None, None]
    assert not sides.deaf(None)


def uploaded(*, took_ms: float, tap_took_ms: float) -> Observed:
    one = streams.delivered(plans.SMALL, streams.direct)
    one.fetched.write_start_ns, one.fetched.write_end_ns = START_NS, START_NS + round(took_ms * MS)
    assert one.tap is not None
    one.tap |= {"body_first_ns": 5, "body_end_ns": 5 + round(tap_took_ms * MS)}
    return one


def test_a_body_that_came_at_once_was_kept() -> None:
    kept, passed = (
        sides.upload(uploaded(took_ms=960, tap_took_ms=0.3)),
        sides.upload(uploaded(took_ms=960, tap_took_ms=955)),
    )
    assert kept is not None
    assert kept["buffered"] is True
    assert passed is not None
    assert passed["buffered"] is False


def test_without_the_taps_word_nothing_is_said() -> None:
    one = uploaded(took_ms=960, tap_took_ms=1)
    one.tap = None
    assert sides.upload(one) is None
    assert sides.abort(one, COMMON) is None
    assert sides.silence(one, 10) is None
    assert sides.reuse([one, one]) is None
    assert sides.answer_rewriting(one) is None


def quiet(*, came: int, error: str | None, **report: Any) -> Observed:
    plan = Plan("quiet", (Part(3, 230, 5 * MS), Part(1, 230, 10_000 * MS), Part(1, 230, 5 * MS)))
    fetched = Fetched(START_NS, head_ns=START_NS, status=200, http_version="1.1", error=error)
    out = Observed("quiet-middle", plan, fetched)
    out.events = streams.delivered(plans.SMALL, streams.direct, events=came).events
    sent = [START_NS + number * 5 * MS for number in range(3)]
    out.tap = streams.report(plan.id, sent, **report)
    return out


def test_a_cut_is_timed_by_the_taps_own_clock() -> None:
    one = quiet(came=3, error="truncated: closed", ended=StreamEnd.LEFT, end_ns=START_NS + 2_010 * MS)
    found = sides.silence(one, 10_000 * MS)
    assert found is not None
    assert (found["cut"], found["after_s"], found["side"], found["silent"]) == (True, 2.0, "tap", False)


def test_a_cut_that_looks_like_an_end_is_called_silent() -> None:
    one = quiet(came=3, error=None, ended=StreamEnd.LEFT, end_ns=START_NS + 2_010 * MS)
    found = sides.silence(one, 10_000 * MS)
    assert found is not None
    assert found["silent"] is True


def test_silence_that_was_borne_is_no_cut() -> None:
    found = sides.silence(quiet(came=5, error=None), 10_000 * MS)
    assert found == {"cut": False, "after_s": None, "waited_s": 10.0, "side": None}


def test_connections_are_told_apart_by_the_taps_word() -> None:
    chain = [streams.delivered(plans.SMALL, streams.direct) for _ in range(3)]
    for number, one in enumerate(chain):
        one.fetched.reused = number > 0
        assert one.tap is not None
        one.tap["connection"] = "0/127.0.0.1:5"
    found = sides.reuse(chain)
    assert found is not None
    assert (found["client_reused"], found["upstream_reused"], found["upstream_connections"]) == (True, True, 1)
    for number, one in enumerate(chain):
        assert one.tap is not None
        one.tap["connection"] = f"0/127.0.0.1:{number}"
    found = sides.reuse(chain)
    assert found is not None
    assert found["upstream_reused"] is False


def test_rewriting_tells_what_was_added_removed_and_changed_and_no_secret() -> None:
    one = streams.delivered(plans.SMALL, streams.direct)
    assert one.tap is not None
    one.tap |= {
        "http": "1.0",
        "fields": [
            ["Host", "inner"],
            ["Connection", "close"],
            ["X-Tapproxy-Probe", "(not shown)"],
            ["Authorization", "(not shown)"],
            ["X-Mine", "another secret"],
            ["content-length", "10"],
        ],
    }
    sent = [(b"X-Tapproxy-Probe", b"KEY"), (b"Authorization", b"Bearer secret"), (b"X-Probe-Kept", b"as it was")]
    sent.append((b"X-Mine", b"secret"))
    found = sides.request_rewriting(one, sent, "outer", 10, [(b"X-Mine", b"secret")])
    assert found is not None
    assert found.to_dict() == {
        "http": {"sent": "1.1", "received": "1.0"},
        "added": {"connection": "close"},
        "removed": ["x-probe-kept"],
        "changed": {"host": {"sent": "outer", "received": "inner"}},
    }


def test_an_answers_rewriting_starts_from_what_the_tap_sent_and_shows_no_cookie() -> None:
    cell = replace(plans.SMALL, framing=Framing.AS_ASKED)
    one = streams.delivered(cell, streams.direct)
    assert one.tap is not None
    one.fetched.headers = [
        (b"Server", b"nginx"),
        (b"Content-Type", b"text/event-stream; charset=utf-8"),
        (b"x-tapproxy-stream", one.plan.id.encode()),
        (b"Set-Cookie", b"route=s3cret"),
    ]
    chunked = sides.answer_rewriting(one)
    assert chunked is not None
    assert chunked.removed == ("transfer-encoding",)
    assert chunked.changed == {"server": ("tapproxy-probe", "nginx")}
    assert chunked.added == {"set-cookie": "(not shown)"}
    # An HTTP/1.0 request was answered without chunks, so nobody removed anything.
    one.tap["http"] = "1.0"
    closed = sides.answer_rewriting(one)
    assert closed is not None
    assert closed.removed == ()


def test_a_field_whose_name_speaks_of_a_credential_is_shown_without_its_value() -> None:
    for name in (b"X-Tapproxy-Probe", b"authorization", b"Cookie", b"x-api-key", b"X-Engine-Token", b"X-Auth"):
        assert shown(name, b"s3cret") == "(not shown)"
    for name in (b"Host", b"x-forwarded-for", b"via", b"x-request-id"):
        assert shown(name, b"plain") == "plain"


def test_a_head_that_waits_for_its_first_event_is_late() -> None:
    """Sent 300 ms apart, come together."""
    one = streams.delivered(plans.SMALL, streams.direct)
    assert sides.header_delay_ms([one]) == -0.2
    one.fetched.head_ns = one.events[0].arrived_ns
    assert sides.header_delay_ms([one]) == 300.0
    one.fetched.head_ns = None
    assert sides.header_delay_ms([one]) is None


def test_gzip_is_undone_read_by_read_and_dated_by_the_read_that_brought_the_end() -> None:
    plain = streams.delivered(plans.SMALL, streams.direct, events=2)
    packer = zlib.compressobj(wbits=31)
    first = packer.compress(plain.fetched.reads[0].body) + packer.flush(zlib.Z_SYNC_FLUSH)
    second = packer.compress(plain.fetched.reads[1].body) + packer.flush()
    fetched = Fetched(0, status=200, headers=[(b"Content-Encoding", b"gzip")])
    fetched.reads = [Read(10, 11, first), Read(20, 21, second[:5]), Read(30, 31, second[5:])]
    found = observe("gzip", plain.plan, fetched)
    assert [(event.arrived_ns, event.read_at_ns) for event in found.events] == [(10, 11), (30, 31)]
    assert [event.end_offset for event in found.events] == [230, 460]


def test_an_encoding_nobody_asked_for_is_trouble_and_no_events() -> None:
    fetched = Fetched(0, status=200, headers=[(b"Content-Encoding", b"br")])
    fetched.reads = [Read(10, 11, b"xxx")]
    found = observe("br", plans.SMALL.plan("m"), fetched)
    assert found.events == []
    assert found.trouble == "the answer came as br, which nobody asked for"
    fetched.headers = [(b"Content-Encoding", b"gzip")]
    assert "cannot be read" in (observe("gzip", plans.SMALL.plan("m"), fetched).trouble or "")


def test_clocks_are_common_only_where_the_kernel_and_the_reading_agree() -> None:
    assert Clocks.compare({"boot_id": "a", "mono_ns": 15}, 10, 20, "a").common
    assert "another host" in Clocks.compare({"boot_id": "b", "mono_ns": 15}, 10, 20, "a").why
    assert "time namespace" in Clocks.compare({"boot_id": "a", "mono_ns": 25}, 10, 20, "a").why
    assert "nobody knows" in Clocks.compare({"boot_id": None, "mono_ns": 15}, 10, 20, "a").why
    assert not Clocks.compare({"boot_id": "a", "mono_ns": 15}, 10, 20, None).common
