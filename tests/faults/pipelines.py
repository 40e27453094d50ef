"""Random pipelines of requests against a running tap, and a strict upstream that notes what reached it.

``valid`` pipelines are predicted to the byte; ``mutated`` ones are held against h11, which reads the same bytes as a
server would: what reaches the upstream must be a prefix of what h11 read, since the tap may only be the stricter.
"""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import h11
from hypothesis import strategies as st

from tests.harness import Peer, Tap

# Longer than any exchange here takes, on a machine that is busy.
LIMIT_S = 8.0
BIG_BYTES = 1 << 20
Call = tuple[bytes, bytes, bytes]  # method, target, body


# -- the upstream


@dataclass
class Seen:
    """What reached the upstream of one client connection, in order."""

    whole: list[Call] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)  # the heads of the whole ones
    cut: int = 0  # began and never ended
    broken: list[str] = field(default_factory=list)  # what h11 as the upstream's reader said of it


class Site:
    """The strict upstream: h11 reads, and each whole request is answered by its method, target and body length."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen = Seen()

    def take(self) -> Seen:
        """What came since the last time."""
        with self._lock:
            seen, self._seen = self._seen, Seen()
        return seen

    def look(self) -> int:
        """How many requests began since the last time."""
        with self._lock:
            return len(self._seen.whole) + self._seen.cut

    def script(self, peer: Peer) -> None:
        """Runs for each connection (``tests.harness.Upstream``)."""
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=BIG_BYTES)
        while True:
            raw, request, body = b"", None, b""
            while True:
                try:
                    event = connection.next_event()
                except h11.RemoteProtocolError as error:
                    with self._lock:
                        self._seen.broken.append(str(error))
                        self._seen.cut += request is not None
                    return
                if event is h11.NEED_DATA:
                    try:
                        data = peer.sock.recv(65536)
                    except OSError:
                        data = b""
                    raw += data
                    if not data:
                        with self._lock:
                            self._seen.cut += bool(raw)
                        return
                    connection.receive_data(data)
                elif isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                elif isinstance(event, h11.EndOfMessage):
                    break
                else:
                    return
            assert request is not None
            with self._lock:
                self._seen.whole.append((request.method, request.target, body))
                self._seen.raw.append(raw)
            text = b"%s %s %d" % (request.method, request.target, len(body))
            answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text)
            peer.send(answer if request.method == b"HEAD" else answer + text)
            connection.send(h11.Response(status_code=200, headers=[("Content-Length", str(len(text)))]))
            if request.method != b"HEAD":
                connection.send(h11.Data(data=text))
            connection.send(h11.EndOfMessage())
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                return
            connection.start_next_cycle()


# -- the client


@dataclass
class Got:
    """What a client got: whole answers, then perhaps one of the tap's own."""

    answers: list[bytes] = field(default_factory=list)  # the bodies
    refusal: int | None = None
    closed: bool = False
    in_time: bool = True


def converse(running: Tap, data: bytes, cuts: Sequence[int], methods: Sequence[bytes], *, until_closed: bool) -> Got:
    """Sends in these pieces, then reads ``len(methods)`` answers, or to the end where it is sure to come."""
    got = Got()
    deadline = time.monotonic() + LIMIT_S
    with running.connect() as sock:
        sock.settimeout(LIMIT_S)
        places = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
        try:
            for start, end in itertools.pairwise(places):
                sock.sendall(data[start:end])
        except OSError:
            pass  # refused in the middle: the answer is there all the same
        buffer = b""
        while until_closed or len(got.answers) < len(methods):
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                part = sock.recv(65536)
            except TimeoutError:
                got.in_time = False
                break
            except OSError:
                part = b""
            if not part:
                got.closed = True
                break
            buffer = _answers(buffer + part, got, methods)
            if got.refusal is not None:
                until_closed = True
    return got


def _answers(buffer: bytes, got: Got, methods: Sequence[bytes]) -> bytes:
    """Takes whole answers off the front."""
    while b"\r\n\r\n" in buffer:
        head, _, rest = buffer.partition(b"\r\n\r\n")
        match = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        assert match is not None, head
        status = int(head.split(b" ", 2)[1])
        if status != 200:
            # The last that comes; its body is left out where what was refused began with HEAD.
            got.refusal = status
            return b""
        number = len(got.answers)
        size = 0 if number < len(methods) and methods[number] == b"HEAD" else int(match[1])
        if len(rest) < size:
            break
        got.answers.append(rest[:size])
        buffer = rest[size:]
    return buffer


# -- what h11 makes of the same bytes


def oracle(data: bytes) -> tuple[list[Call], bool]:
    """The whole requests in these bytes, and whether what follows is certainly wrong (else: more could come)."""
    calls: list[Call] = []
    while True:
        # The tap skips one empty line before a request, as RFC 9112 2.2 wants; h11 does not.
        data = data.removeprefix(b"\r\n")
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=BIG_BYTES)
        connection.receive_data(data)
        request, body = None, b""
        try:
            while not isinstance(event := connection.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                else:
                    return calls, False
        except h11.RemoteProtocolError:
            return calls, True
        assert request is not None
        calls.append((request.method, request.target, body))
        if connection.their_state is h11.MUST_CLOSE:
            # What follows a last request is nobody's.
            return calls, True
        data = connection.trailing_data[0]


# -- pipelines

HIDDEN = b"GET /smuggled HTTP/1.1\r\nHost: e\r\n\r\n"
_BODY = st.one_of(
    st.just(b""),
    st.just(HIDDEN),
    st.just(b"0\r\n\r\n" + HIDDEN),
    st.binary(max_size=300),
    st.builds(lambda byte, size: bytes([byte]) * size, st.integers(0, 255), st.integers(1, 40_000)),
)
_CHUNK = st.tuples(st.sampled_from([b"", b"0", b"000"]), st.sampled_from([b"", b";a", b';a="b"']))


@dataclass(frozen=True)
class Request:
    """One valid request as it stands on the wire, and what it means."""

    wire: bytes
    call: Call
    last: bool  # the client asks to close


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """A valid request of any framing."""
    method = draw(st.sampled_from([b"GET", b"POST", b"HEAD", b"PUT", b"DELETE", b"X-OWN"]))
    target = b"/" + draw(st.from_regex(rb"[a-z0-9/%=&;:@~.?-]{0,12}", fullmatch=True))
    framing = draw(st.sampled_from(["none", "length", "chunked"]))
    body = b"" if framing == "none" else draw(_BODY)
    last = draw(st.integers(0, 9)) == 0
    lines = [b"%s %s HTTP/1.1" % (method, target), draw(st.sampled_from([b"Host: e", b"hOST:e", b"Host: \t e \t"]))]
    if last:
        lines.append(draw(st.sampled_from([b"Connection: close", b"connection: Close, x-hop"])))
    if framing == "length":
        lines.append(
            draw(st.sampled_from([b"Content-Length: %d", b"CONTENT-LENGTH:%d", b"Content-Length: 000%d"])) % len(body)
        )
    wire = body
    if framing == "chunked":
        lines.append(draw(st.sampled_from([b"Transfer-Encoding: chunked", b"transfer-encoding:CHUNKED"])))
        wire = b""
        rest = body
        while rest:
            size = draw(st.integers(1, len(rest)))
            zeros, extension = draw(_CHUNK)
            wire += b"%s%x%s\r\n%s\r\n" % (zeros, size, extension, rest[:size])
            rest = rest[size:]
        wire += draw(st.sampled_from([b"0\r\n\r\n", b"000;a\r\n\r\n", b"0\r\nX-T: a\r\nX-T: b\r\n\r\n"]))
    lines += draw(
        st.lists(st.sampled_from([b"X-A: b", b"x-a:", b"X-Long: " + b"c" * 3000, b"Accept: */*"]), max_size=4)
    )
    head = b"\r\n".join([*lines, b"", b""])
    return Request(head + wire, (method, target, body), last)


# Heads that nobody may take, after which the connection is closed. The request line is that of a smuggling attempt.
_BAD_HEADS = [
    b"POST /bad HTTP/1.1\r\nHost: e\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /bad HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    b"POST /bad HTTP/1.1\r\nHost: e\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST /bad HTTP/1.1\r\nHost: e\r\nContent-Length: 5\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /bad HTTP/1.1\r\nHost: e\r\nContent-Length: +5\r\n\r\nhello",
    b"POST /bad HTTP/1.1\r\nHost: e\r\nContent-Length: 5, 5\r\n\r\nhello",
    b"POST /bad HTTP/1.1\r\nHost: e\r\nContent-Length: 0x5\r\n\r\nhello",
    b"POST /bad HTTP/1.1\r\nHost: e\r\nContent-Length : 5\r\n\r\nhello",
    b"POST /bad HTTP/1.1\r\nHost: e\r\nContent-Length: 5\nX: a\r\n\r\nhello",
    b"POST /bad HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    b"POST /bad HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    b"POST /bad HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    b"POST /bad HTTP/1.1\r\nHost: e\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    b"POST /bad HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST /bad HTTP/1.0\r\nHost: e\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"GET /bad HTTP/1.1\r\nHost: e\r\nX: a\x00b\r\n\r\n",
    b"GET /bad HTTP/1.1\r\nHost: e\r\nX: a\rb\r\n\r\n",
    b"GET /bad HTTP/1.1\r\nHost: e\r\n folded\r\n\r\n",
    b"GET /bad HTTP/1.1\r\nHost: e\r\nHost: e\r\n\r\n",
    b"GET /bad HTTP/1.1\r\n\r\n",
    b"GET  /bad HTTP/1.1\r\nHost: e\r\n\r\n",
    b"GET /bad HTTP/1.1 \r\nHost: e\r\n\r\n",
    b"GET /bad HTTP/2.0\r\nHost: e\r\n\r\n",
    b"GET bad HTTP/1.1\r\nHost: e\r\n\r\n",
    b"GET http://other/bad HTTP/1.1\r\nHost: e\r\n\r\n",
    b"CONNECT e:443 HTTP/1.1\r\nHost: e:443\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /bad HTTP/1.1\r\nHost: e\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
    b"GET /bad HTTP/1.1\r\nHost: e\r\n" + b"X: a\r\n" * 300 + b"\r\n",
]
# Bodies that break their framing after a good head: the upstream may see a beginning, and never an end.
_BAD_BODIES = [
    b"zz\r\n",
    b"5\r\nhelloX",
    b"5\nhello\r\n",
    b"-1\r\n",
    b"0x5\r\nhello\r\n",
    b"1" * 17 + b"\r\n",
    b"5 \r\nhello\r\n",
]
_BAD_BODIES += [b"0\r\nX : a\r\n\r\n", b"0\r\nX: a\n\r\n", b"5\r\nhello\r\n;\r\n"]
bad_endings = st.one_of(
    st.sampled_from(_BAD_HEADS),
    st.sampled_from(_BAD_BODIES).map(
        lambda body: b"POST /bad HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: chunked\r\n\r\n" + body
    ),
)
cuts = st.lists(st.integers(0, 1 << 20), max_size=6)
pipelines = st.lists(requests(), min_size=1, max_size=4)

# What turns up where one byte string becomes another's meaning.
_SPLICES = [
    b"\r\n",
    b"\n",
    b"\r",
    b" ",
    b"\t",
    b":",
    b"0",
    b"\x00",
    b"\r\n\r\n",
    b"Content-Length: 3\r\n",
    b"HTTP/1.1",
    b"\x80",
]
_SPLICES += [b"Transfer-Encoding: chunked\r\n", b"Host: e\r\n", HIDDEN, b"0\r\n\r\n", b"Connection: close\r\n", b","]


@st.composite
def mutations(draw: st.DrawFn, data: bytes) -> bytes:
    """The same bytes with a few of them changed, most of the changes where heads and chunk sizes are."""
    for _ in range(draw(st.integers(1, 3))):
        marks = [match.start() for match in re.finditer(rb"\r\n|: | ", data[:4000])] or [0]
        place = draw(st.sampled_from(marks)) + draw(st.integers(0, 3))
        match draw(st.sampled_from(["insert", "remove", "replace", "repeat"])):
            case "insert":
                data = data[:place] + draw(st.sampled_from(_SPLICES)) + data[place:]
            case "remove":
                data = data[:place] + data[place + draw(st.integers(1, 4)) :]
            case "replace":
                part = draw(st.sampled_from(_SPLICES))
                data = data[:place] + part + data[place + len(part) :]
            case _:
                size = draw(st.integers(1, 30))
                data = data[: place + size] + data[place : place + size] + data[place + size :]
    return data
