"""The strict reader, with h11 as its oracle: all we accept, h11 accepts, with the same meaning."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tapproxy.core.http1 import (
    MAX_CHUNK_LINE_BYTES,
    BodyReader,
    Framing,
    Refusal,
    RequestHead,
    ResponseHead,
    ResponseHeads,
    end_to_end,
    head_end,
    parse_request,
    parse_response,
)


def request(*lines: bytes) -> RequestHead | Refusal:
    return parse_request(b"\r\n".join([*lines, b"", b""]))


def response(*lines: bytes, method: bytes = b"POST") -> ResponseHead | Refusal:
    return parse_response(b"\r\n".join([*lines, b"", b""]), request_method=method)


def test_a_plain_request_keeps_its_raw_lines() -> None:
    head = request(b"POST /v1/x?a=%2F HTTP/1.1", b"HOST: up", b"X-a:  b c \t", b"X-A:")
    assert isinstance(head, RequestHead)
    assert (head.method, head.target, head.version) == (b"POST", b"/v1/x?a=%2F", 1)
    assert [field[2] for field in head.fields] == [b"HOST: up", b"X-a:  b c \t", b"X-A:"]
    assert head.get(b"x-a") == b"b c"
    assert head.framing is Framing.NONE
    assert head.keep_alive


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        pytest.param([b"GET / HTTP/1.1"], 400, id="no_host"),
        pytest.param([b"GET / HTTP/1.1", b"Host: a", b"Host: a"], 400, id="two_hosts"),
        pytest.param([b"GET / HTTP/1.1", b"Host: a, b"], 400, id="host_list"),
        pytest.param([b"GET / HTTP/1.1", b"Host: a", b" folded"], 400, id="obs_fold"),
        pytest.param([b"GET / HTTP/1.1", b"Host: a", b"X : b"], 400, id="space_before_colon"),
        pytest.param([b"GET / HTTP/1.1", b"Host: a", b"X: b\nY: c"], 400, id="bare_lf"),
        pytest.param([b"GET / HTTP/1.1", b"Host: a", b"X: b\rY: c"], 400, id="bare_cr"),
        pytest.param([b"GET / HTTP/1.1", b"Host: a", b"X: b\0"], 400, id="nul"),
        pytest.param([b"GET  / HTTP/1.1", b"Host: a"], 400, id="two_spaces"),
        pytest.param([b"GET /a b HTTP/1.1", b"Host: a"], 400, id="space_in_target"),
        pytest.param([b"GET a HTTP/1.1", b"Host: a"], 400, id="no_slash"),
        pytest.param([b"GET http://other/ HTTP/1.1", b"Host: a"], 400, id="absolute_to_another"),
        pytest.param([b"GET / HTTP/2.0", b"Host: a"], 505, id="http2"),
        pytest.param([b"GET /"], 400, id="http09"),
        pytest.param([b"CONNECT a:1 HTTP/1.1", b"Host: a:1"], 501, id="connect"),
        pytest.param(
            [b"POST / HTTP/1.1", b"Host: a", b"Content-Length: 1", b"Transfer-Encoding: chunked"], 400, id="cl_and_te"
        ),
        pytest.param([b"POST / HTTP/1.1", b"Host: a", b"Content-Length: 1", b"Content-Length: 1"], 400, id="two_cl"),
        pytest.param([b"POST / HTTP/1.1", b"Host: a", b"Content-Length: +1"], 400, id="cl_plus"),
        pytest.param([b"POST / HTTP/1.1", b"Host: a", b"Content-Length: 1_0"], 400, id="cl_underscore"),
        pytest.param([b"POST / HTTP/1.1", b"Host: a", b"Content-Length: " + b"9" * 19], 400, id="cl_huge"),
        pytest.param([b"POST / HTTP/1.1", b"Host: a", b"Transfer-Encoding: gzip, chunked"], 501, id="te_gzip"),
        pytest.param([b"POST / HTTP/1.1", b"Host: a", b"Transfer-Encoding: xchunked"], 501, id="te_unknown"),
        pytest.param([b"POST / HTTP/1.0", b"Transfer-Encoding: chunked"], 400, id="te_in_http10"),
        pytest.param([b"GET / HTTP/1.1", b"Host: a", *[b"X: y"] * 256], 431, id="too_many_fields"),
    ],
)
def test_what_others_repair_is_refused(lines: list[bytes], status: int) -> None:
    head = request(*lines)
    assert isinstance(head, Refusal)
    assert head.status == status
    assert head.reason


def test_an_http10_health_check_needs_no_host() -> None:
    head = request(b"GET /health HTTP/1.0")
    assert isinstance(head, RequestHead)
    assert not head.keep_alive


def test_an_absolute_target_to_the_same_host_is_taken_as_sent() -> None:
    head = request(b"GET http://A:1/x HTTP/1.1", b"Host: a:1")
    assert isinstance(head, RequestHead)
    assert head.target == b"http://A:1/x"


@pytest.mark.parametrize(
    ("line", "fields", "method", "framing", "length"),
    [
        pytest.param(b"HTTP/1.1 200 OK", [b"Content-Length: 5"], b"GET", Framing.LENGTH, 5, id="length"),
        pytest.param(b"HTTP/1.1 200 OK", [b"Content-Length: 0"], b"GET", Framing.NONE, 0, id="length_zero"),
        pytest.param(b"HTTP/1.1 200 OK", [b"Transfer-Encoding: CHUNKED"], b"GET", Framing.CHUNKED, 0, id="chunked"),
        pytest.param(b"HTTP/1.1 200", [], b"GET", Framing.CLOSE, 0, id="close"),
        pytest.param(b"HTTP/1.0 200 OK", [], b"GET", Framing.CLOSE, 0, id="http10"),
        pytest.param(b"HTTP/1.1 204 No Content", [], b"GET", Framing.NONE, 0, id="204"),
        pytest.param(b"HTTP/1.1 304 x", [b"Content-Length: 9"], b"GET", Framing.NONE, 0, id="304"),
        pytest.param(b"HTTP/1.1 200 OK", [b"Content-Length: 9"], b"HEAD", Framing.NONE, 0, id="head"),
    ],
)
def test_the_framing_of_an_answer(
    line: bytes, fields: list[bytes], method: bytes, framing: Framing, length: int
) -> None:
    head = response(line, *fields, method=method)
    assert isinstance(head, ResponseHead)
    assert (head.framing, head.length) == (framing, length)


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param([b"HTTP/1.1 099 x"], id="status_below_100"),
        pytest.param([b"HTTP/2 200 OK"], id="http2"),
        pytest.param([b"HTTP/1.1  200 OK"], id="two_spaces"),
        pytest.param([b"HTTP/1.1 200 OK", b"Content-Length: 1, 1"], id="cl_list"),
        pytest.param([b"HTTP/1.1 200 OK", b"Transfer-Encoding: identity"], id="te_identity"),
        pytest.param([b"HTTP/1.0 200 OK", b"Transfer-Encoding: chunked"], id="te_in_http10"),
        pytest.param([b"HTTP/1.1 200 OK", b"nocolon"], id="no_colon"),
    ],
)
def test_an_answer_nobody_can_trust_is_a_502(lines: list[bytes]) -> None:
    head = response(*lines)
    assert isinstance(head, Refusal)
    assert head.status == 502


def test_hop_fields_and_nominated_ones_stay_behind() -> None:
    head = request(
        b"GET / HTTP/1.1",
        b"Host: a",
        b"Connection: keep-alive, X-Hop, Host, Content-Length",
        b"X-Hop: s",
        b"Keep-Alive: 5",
        b"TE: trailers",
        b"Upgrade: h2c",
        b"X-End: e",
    )
    assert isinstance(head, RequestHead)
    assert [field[2] for field in end_to_end(head.fields, head.connection)] == [b"Host: a", b"X-End: e"]


def walk(framing: Framing, pieces: list[bytes], left: int = 0) -> tuple[bytes, bytes, bytes, BodyReader]:
    reader = BodyReader(framing, left)
    wire = payload = rest = b""
    for piece in pieces:
        more = reader.feed(piece)
        wire, payload, rest = wire + more[0], payload + more[1], rest + more[2]
    return wire, payload, rest, reader


CHUNKED = b"5\r\nhello\r\nA;x=y\r\n0123456789\r\n0\r\nX-T: v\r\n\r\n"


@pytest.mark.parametrize("cut", range(1, len(CHUNKED)))
def test_a_chunked_body_cut_anywhere_gives_the_same_bytes(cut: int) -> None:
    wire, payload, rest, reader = walk(Framing.CHUNKED, [CHUNKED[:cut], CHUNKED[cut:] + b"NEXT"])
    assert wire == CHUNKED
    assert payload == b"hello0123456789"
    assert rest == b"NEXT"
    assert reader.done


def test_a_chunked_body_byte_by_byte_gives_the_same_bytes() -> None:
    wire, payload, rest, reader = walk(Framing.CHUNKED, [bytes([byte]) for byte in CHUNKED])
    assert (wire, payload, rest, reader.done) == (CHUNKED, b"hello0123456789", b"", True)


def test_body_bytes_of_a_chunk_go_on_before_the_chunk_is_whole() -> None:
    reader = BodyReader(Framing.CHUNKED)
    assert reader.feed(b"ff\r\nabc")[0] == b"ff\r\nabc"


def test_the_terminator_goes_on_only_whole() -> None:
    reader = BodyReader(Framing.CHUNKED)
    assert reader.feed(b"1\r\nx\r\n0\r\n")[0] == b"1\r\nx\r\n"
    assert not reader.eof()
    assert reader.feed(b"\r\n")[0] == b"0\r\n\r\n"
    assert reader.done


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"zz\r\n", id="not_hex"),
        pytest.param(b"-5\r\n", id="negative"),
        pytest.param(b"0x5\r\n", id="0x"),
        pytest.param(b" 5\r\n", id="leading_space"),
        pytest.param(b"5 \r\n", id="trailing_space"),
        pytest.param(b"5_0\r\n", id="underscore"),
        pytest.param(b"\r\n", id="empty"),
        pytest.param(b"5\nhello\n", id="bare_lf"),
        pytest.param(b"F" * 16 + b"\r\n", id="too_large"),
        pytest.param(b"5\r\nhelloX", id="data_longer"),
        pytest.param(b"5\r\nhello\rX", id="cr_alone"),
        pytest.param(b"5;a\nb\r\n", id="lf_in_extension"),
        pytest.param(b"5;" + b"a" * MAX_CHUNK_LINE_BYTES, id="endless_extension"),
        pytest.param(b"0\r\nnocolon\r\n\r\n", id="trailer_without_colon"),
        pytest.param(b"0\r\nX: y\n\r\n", id="trailer_bare_lf"),
        pytest.param(b"0\r\n" + b"X: yyyyyyyyyyyy\r\n" * 2000, id="endless_trailers"),
    ],
)
def test_broken_chunks_are_an_error_and_nothing_more_goes_on(body: bytes) -> None:
    for pieces in ([body], [bytes([byte]) for byte in body[:9000]]):
        reader = BodyReader(Framing.CHUNKED)
        for piece in pieces:
            reader.feed(piece)
        if len(pieces) == 1 or len(body) < 9000:
            assert reader.error is not None
            assert reader.feed(b"5\r\nhello\r\n")[0] == b""
            assert not reader.done


def test_a_length_body_ends_where_it_said() -> None:
    wire, payload, rest, reader = walk(Framing.LENGTH, [b"abc", b"defgh"], left=5)
    assert (wire, payload, rest, reader.done) == (b"abcde", b"abcde", b"fgh", True)


def test_only_a_close_delimited_body_may_end_by_close() -> None:
    assert BodyReader(Framing.CLOSE).eof()
    assert not BodyReader(Framing.LENGTH, 1).eof()
    assert not BodyReader(Framing.CHUNKED).eof()


TOKEN = st.text("abcXYZ-_!", min_size=1, max_size=8).map(str.encode)
NOISE = st.binary(max_size=12)
VALUE = st.one_of(st.text('abc ,;=\t"\xe9', max_size=12).map(lambda t: t.encode("latin-1")), NOISE)
FIELD = st.one_of(
    st.tuples(TOKEN, st.sampled_from([b": ", b":", b" :", b":\t"]), VALUE).map(b"".join),
    st.sampled_from(
        [
            b"Host: a",
            b"Host: a:80",
            b"Content-Length: 5",
            b"Content-Length: 05",
            b"Transfer-Encoding: chunked",
            b"Connection: close",
            b"Connection: x-a, keep-alive",
            b"Expect: 100-continue",
        ]
    ),
    NOISE,
)
LINE = st.one_of(
    st.tuples(
        st.sampled_from([b"GET", b"POST", b"OPTIONS", b"x"]),
        st.just(b" "),
        st.sampled_from([b"/", b"/a?b", b"*", b"http://a/x", b"a"]),
        st.just(b" HTTP/1."),
        st.sampled_from([b"0", b"1", b"2"]),
    ).map(b"".join),
    NOISE,
)


def h11_request(head: bytes) -> h11.Request | None:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(head)
    try:
        event = connection.next_event()
    except h11.RemoteProtocolError:
        return None
    return event if isinstance(event, h11.Request) else None


def meaning(fields: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes | int]]:
    """h11 writes a length anew: 007 becomes 7."""
    return [
        (name.lower(), int(value) if name.lower() == b"content-length" else value.strip(b" \t"))
        for name, value in fields
    ]


@settings(max_examples=400, deadline=None)
@given(line=LINE, fields=st.lists(FIELD, max_size=5))
@example(line=b"GET / HTTP/1.1", fields=[b"Host: a", b"X: \x0bchunked"])
@example(line=b"GET / HTTP/1.1", fields=[b"Host: a", b"Content-Length: 007", b"X: 1"])
def test_every_request_we_accept_h11_accepts_with_the_same_meaning(line: bytes, fields: list[bytes]) -> None:
    raw = b"\r\n".join([line, *fields, b"", b""])
    raw = raw[: head_end(raw)]
    ours = parse_request(raw)
    if isinstance(ours, Refusal):
        return
    theirs = h11_request(raw)
    assert theirs is not None
    assert (theirs.method, theirs.target) == (ours.method, ours.target)
    assert theirs.http_version == b"1.%d" % ours.version
    assert meaning((name, value) for name, value, _ in ours.fields) == meaning(theirs.headers.raw_items())


@settings(max_examples=300, deadline=None)
@given(
    line=st.one_of(st.sampled_from([b"HTTP/1.1 200 OK", b"HTTP/1.0 404 x", b"HTTP/1.1 200", b"HTTP/1.1 204 "]), NOISE),
    fields=st.lists(FIELD, max_size=4),
)
def test_every_answer_we_accept_h11_accepts_with_the_same_meaning(line: bytes, fields: list[bytes]) -> None:
    raw = b"\r\n".join([line, *fields, b"", b""])
    raw = raw[: head_end(raw)]
    ours = parse_response(raw, request_method=b"GET")
    if isinstance(ours, Refusal):
        return
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    connection.send(h11.Request(method="GET", target="/", headers=[("host", "a")]))
    connection.receive_data(raw)
    event = connection.next_event()
    assert isinstance(event, h11.Response | h11.InformationalResponse)
    assert event.status_code == ours.status


@settings(max_examples=200, deadline=None)
@given(
    chunks=st.lists(st.binary(min_size=1, max_size=30), max_size=6),
    extension=st.sampled_from([b"", b";a", b';a="b"']),
    cuts=st.lists(st.integers(1, 200), max_size=8),
)
def test_chunked_bodies_read_as_h11_reads_them(chunks: list[bytes], extension: bytes, cuts: list[int]) -> None:
    wire = b"".join(b"%x%s\r\n%s\r\n" % (len(chunk), extension, chunk) for chunk in chunks) + b"0\r\n\r\n"
    edges = [0, *sorted({cut for cut in cuts if cut < len(wire)}), len(wire)]
    pieces = [wire[start:end] for start, end in itertools.pairwise(edges)]
    passed, payload, rest, reader = walk(Framing.CHUNKED, pieces)
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + wire)
    theirs = b""
    while not isinstance(event := connection.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Data):
            theirs += bytes(event.data)
    assert (passed, payload, rest, reader.done) == (wire, theirs, b"", True)


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"
HINTS = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_interim_heads_come_before_the_final_one_however_they_are_cut(step: int) -> None:
    heads, found = ResponseHeads(b"GET"), []
    wire = HINTS + b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"hi"
    final_at = len(wire) - 2
    for start in range(0, len(wire), step):
        heads.feed(wire[start : start + step])
        while (head := heads.take()) is not None:
            assert isinstance(head, ResponseHead)
            found.append(head.status)
            if head.status == 200:
                end = min(start + step, len(wire))
                assert heads.rest == wire[final_at:end]
                break
        if found[-1:] == [200]:
            break
    assert found == [103, 100, 200]


@pytest.mark.parametrize(
    ("wire", "why"),
    [
        (HINTS * 17 + OK, "more than 16 interim answers"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "switched protocols"),
        (b"SSH-2.0-OpenSSH\r\n", "not HTTP/1.x"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000, "longer than"),
        (HINTS + b"HTTP/1.1 20 OK\r\n\r\n", "status line"),
    ],
)
def test_heads_that_lead_nowhere_are_refused(wire: bytes, why: str) -> None:
    heads = ResponseHeads(b"GET")
    heads.feed(wire)
    while isinstance(head := heads.take(), ResponseHead):
        assert head.status == 103
    assert isinstance(head, Refusal)
    assert head.status == 502
    assert why in head.reason


def test_sixteen_interim_heads_are_taken() -> None:
    heads = ResponseHeads(b"GET")
    heads.feed(HINTS * 16 + OK)
    statuses = [head.status for _ in range(17) if isinstance(head := heads.take(), ResponseHead)]
    assert statuses == [103] * 16 + [200]
