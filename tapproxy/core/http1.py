"""The strict HTTP/1.1 reader, both directions: bytes in, facts out, no I/O (RFC 9110, RFC 9112).

Rules here:
* What is accepted means the same to everyone: h11 is the oracle of the tests (all we accept, h11 accepts, with the
  same meaning). Where the RFC lets a reader repair (bare LF, obs-fold, CL beside TE, two equal CLs), we refuse: a
  relay that repairs is a relay that can be used to smuggle.
* Raw bytes are kept: a relay forwards lines as they were written, in order, duplicates and case included.
* Trouble is data, not an exception: a ``Refusal`` says which status to answer and why.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, NamedTuple

MAX_HEAD_BYTES: Final = 64 * 1024
MAX_INTERIM: Final = 16
MAX_FIELDS: Final = 256
MAX_TRAILER_BYTES: Final = 16 * 1024
# A chunk-size line is a number and perhaps an extension nobody uses; anything longer is an attack on buffers.
MAX_CHUNK_LINE_BYTES: Final = 4 * 1024
# A content-length beyond this is no body but an overflow probe (1 PiB).
MAX_CONTENT_LENGTH: Final = 1 << 50

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_TEXT: Final = rb"[\t\x20-\x7e\x80-\xff]*"
_REQUEST_LINE: Final = re.compile(rb"(" + _TOKEN + rb") ([\x21-\x7e]+) HTTP/(\d)\.(\d)")
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) (\d{3})(?: (" + _TEXT + rb"))?")
_FIELDS: Final = re.compile(rb"(?:" + _TOKEN + rb":" + _TEXT + rb"\r\n)*")
_CHUNK_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;" + _TEXT + rb")?\r\n")
# Short size lines that were read before, with their sizes: looked up, they cost a third of being read again.
_SIZES: Final[dict[bytes, int]] = {}
_SIZES_MAX: Final = 4096
_SHORT_LINE_BYTES: Final = 6
_DIGITS: Final = re.compile(rb"[0-9]{1,19}")
# RFC 3986 reg-name, IP literal and port, less the comma: what follows one is a second host.
_HOST: Final = re.compile(rb"[A-Za-z0-9\-._~%!$&'()*+;=:\[\]]*")
_ABSOLUTE: Final = re.compile(rb"(?i:https?)://([^/?#@]+)(?:[/?][^#]*)?")


class Framing(Enum):
    """How a message body is delimited on the wire."""

    NONE = "none"
    LENGTH = "content-length"
    CHUNKED = "chunked"
    CLOSE = "close"


class Refusal(NamedTuple):
    """A head or body that is not accepted: the status to answer a client with, and one sentence why."""

    status: int
    reason: str


# One field line: lower-case name, value without surrounding whitespace, the line as received (no CRLF). A plain tuple:
# a head has some eight of them, and a named one costs ten times as much to make.
Field = tuple[bytes, bytes, bytes]


@dataclass(slots=True)
class RequestHead:
    """A whole, acceptable request head. ``version`` is the minor version: 0 or 1."""

    method: bytes
    target: bytes
    version: int
    line: bytes
    fields: list[Field]
    framing: Framing = Framing.NONE
    length: int = 0
    connection: frozenset[bytes] = frozenset()
    upgrade: bytes | None = None

    @property
    def keep_alive(self) -> bool:
        """Whether the client lets the connection be used again (RFC 9112 9.3)."""
        if b"close" in self.connection:
            return False
        return self.version == 1 or b"keep-alive" in self.connection

    def get(self, name: bytes) -> bytes | None:
        """The first value of a field (lower-case name), or None."""
        return _first(self.fields, name)


@dataclass(slots=True)
class ResponseHead:
    """A whole, acceptable response head. ``version`` is the minor version: 0 or 1."""

    status: int
    version: int
    line: bytes
    fields: list[Field]
    framing: Framing = Framing.NONE
    length: int = 0
    connection: frozenset[bytes] = frozenset()

    @property
    def keep_alive(self) -> bool:
        """Whether the server lets the connection be used again; never after a body that only its close ends."""
        if b"close" in self.connection or self.framing is Framing.CLOSE:
            return False
        return self.version == 1 or b"keep-alive" in self.connection

    def get(self, name: bytes) -> bytes | None:
        """The first value of a field (lower-case name), or None."""
        return _first(self.fields, name)


def head_end(data: bytes | bytearray, start: int = 0) -> int:
    """The offset just past the empty line that ends a head, or -1 while it has not come.

    ``start``: how far an earlier call has looked (the last three bytes are looked at again).
    """
    found = data.find(b"\r\n\r\n", max(0, start - 3))
    return -1 if found < 0 else found + 4


def request_line(head: bytes | bytearray) -> tuple[bytes, bytes, int] | None:
    """Method, target and minor version of a head that need not be acceptable otherwise; None where they are not there.

    For the record of a refused request; nothing is relayed by it.
    """
    line, newline, _ = bytes(head[:MAX_HEAD_BYTES]).partition(b"\r\n")
    match = _REQUEST_LINE.fullmatch(line) if newline else None
    if match is None or match.group(3) != b"1" or match.group(4) not in (b"0", b"1"):
        return None
    return match.group(1), match.group(2), int(match.group(4))


def parse_request(head: bytes) -> RequestHead | Refusal:
    """Reads a request head that ends with its empty line.

    Errors: a Refusal with 400 (malformed), 431 (too many fields), 501 (a transfer coding or method we do not
    relay), 505 (another version of HTTP).
    """
    end = head.find(b"\r\n")
    line = head[:end]
    match = _REQUEST_LINE.fullmatch(line)
    if match is None:
        return Refusal(400, "the request line is not METHOD SP TARGET SP HTTP/1.x")
    method, target, major, minor = match.groups()
    if major != b"1" or minor not in (b"0", b"1"):
        return Refusal(505, f"HTTP/{major.decode()}.{minor.decode()} is not spoken here, only 1.0 and 1.1")
    fields = _fields(head, end)
    if isinstance(fields, Refusal):
        return fields
    out = RequestHead(method, target, int(minor), line, fields)
    return _check_target(out) or _check_request_fields(out) or out


def _check_target(head: RequestHead) -> Refusal | None:
    target = head.target
    if head.method == b"CONNECT":
        return Refusal(501, "CONNECT is not relayed: this is no forward proxy")
    if target.startswith(b"/") or (target == b"*" and head.method == b"OPTIONS"):
        return None
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        return Refusal(400, "the request target is neither a path nor an http URL")
    if absolute.group(1).lower() != (head.get(b"host") or b"").lower():
        return Refusal(400, "the request target names another host than the Host field")
    return None


def _check_request_fields(head: RequestHead) -> Refusal | None:
    hosts = 0
    codings: list[bytes] = []
    lengths: list[bytes] = []
    for name, value, _ in head.fields:
        if name == b"host":
            hosts += 1
            if _HOST.fullmatch(value) is None:
                return Refusal(400, "the Host field holds characters no host name has")
        elif name == b"transfer-encoding":
            codings.append(value.lower())
        elif name == b"content-length":
            lengths.append(value)
        elif name == b"connection":
            head.connection |= _tokens(value)
        elif name == b"upgrade":
            head.upgrade = value.lower() if head.upgrade is None else head.upgrade + b"," + value.lower()
    if hosts > 1:
        return Refusal(400, f"{hosts} Host fields, expected one")
    if not hosts and head.version == 1:
        return Refusal(400, "no Host field, which HTTP/1.1 demands")
    if codings and head.version == 0:
        return Refusal(400, "Transfer-Encoding in an HTTP/1.0 request has no agreed meaning")
    return _set_framing(head, codings, lengths)


def parse_response(head: bytes, *, request_method: bytes) -> ResponseHead | Refusal:
    """Reads a response head that ends with its empty line; the request's method decides whether a body follows.

    Errors: a Refusal (status 502) where nothing trustworthy can be made of it.
    """
    end = head.find(b"\r\n")
    line = head[:end]
    match = _STATUS_LINE.fullmatch(line)
    if match is None or match.group(2) < b"100":
        return Refusal(502, "the status line is not HTTP/1.x SP STATUS")
    fields = _fields(head, end)
    if isinstance(fields, Refusal):
        return Refusal(502, fields.reason)
    out = ResponseHead(int(match.group(2)), int(match.group(1)), line, fields)
    codings: list[bytes] = []
    lengths: list[bytes] = []
    for name, value, _ in fields:
        if name == b"transfer-encoding":
            codings.append(value.lower())
        elif name == b"content-length":
            lengths.append(value)
        elif name == b"connection":
            out.connection |= _tokens(value)
    if codings and out.version == 0:
        return Refusal(502, "Transfer-Encoding in an HTTP/1.0 response has no agreed meaning")
    refusal = _set_framing(out, codings, lengths)
    if refusal is not None:
        return Refusal(502, refusal.reason)
    if request_method == b"HEAD" or out.status in (204, 304) or out.status < 200:
        out.framing, out.length = Framing.NONE, 0
    elif out.framing is Framing.NONE and not lengths:
        out.framing = Framing.CLOSE
    return out


@dataclass(slots=True)
class ResponseHeads:
    """The heads of one answer, however its bytes are cut: interim ones (1xx), then the final one.

    ``feed`` bytes, then ``take`` until None; ``rest`` holds what follows the final head.
    """

    request_method: bytes
    rest: bytes = b""
    _looked: int = 0
    _interim: int = 0

    def feed(self, data: bytes) -> None:
        """Takes the next bytes."""
        self.rest += data

    def take(self) -> ResponseHead | Refusal | None:
        """The next head; None while it is not whole, a Refusal (502) where none can come any more."""
        end = head_end(self.rest, self._looked)
        if max(end, len(self.rest) if end < 0 else 0) > MAX_HEAD_BYTES:
            return Refusal(502, f"the response head is longer than {MAX_HEAD_BYTES} bytes")
        if end < 0:
            self._looked = len(self.rest)
            if not b"HTTP/1.".startswith(self.rest[:7]):
                return Refusal(502, "the answer is not HTTP/1.x")
            return None
        head = parse_response(self.rest[:end], request_method=self.request_method)
        if isinstance(head, Refusal):
            return head
        self.rest = self.rest[end:]
        self._looked = 0
        if head.status >= 200:
            return head
        self._interim += 1
        if head.status == 101:
            return Refusal(502, "the upstream switched protocols, which nobody asked for")
        if self._interim > MAX_INTERIM:
            return Refusal(502, f"more than {MAX_INTERIM} interim answers")
        return head


def _set_framing(head: RequestHead | ResponseHead, codings: list[bytes], lengths: list[bytes]) -> Refusal | None:
    """RFC 9112 6.3 without its leniencies."""
    if codings:
        if lengths:
            return Refusal(400, "both Transfer-Encoding and Content-Length: one of them lies")
        if codings != [b"chunked"]:
            return Refusal(501, "a Transfer-Encoding other than one plain 'chunked' is not relayed")
        head.framing = Framing.CHUNKED
    elif lengths:
        if len(lengths) > 1:
            return Refusal(400, f"{len(lengths)} Content-Length fields, expected one")
        if _DIGITS.fullmatch(lengths[0]) is None or int(lengths[0]) > MAX_CONTENT_LENGTH:
            return Refusal(400, "the Content-Length is not a plain decimal number of a possible size")
        head.length = int(lengths[0])
        head.framing = Framing.LENGTH if head.length else Framing.NONE
    return None


def _fields(head: bytes, line_end: int) -> list[Field] | Refusal:
    """The field lines between the first line and the empty line."""
    block = head[line_end + 2 : -2]
    if not block:
        return []
    if _FIELDS.fullmatch(block) is None:
        return Refusal(400, "a header line is not NAME: VALUE in plain characters ended by CRLF")
    lines = block[:-2].split(b"\r\n")
    if len(lines) > MAX_FIELDS:
        return Refusal(431, f"{len(lines)} header fields, at most {MAX_FIELDS} are taken")
    out: list[Field] = []
    for raw in lines:
        name, _, value = raw.partition(b":")
        out.append((name.lower(), value.strip(b" \t"), raw))
    return out


def _first(fields: list[Field], name: bytes) -> bytes | None:
    for field_name, value, _ in fields:
        if field_name == name:
            return value
    return None


def _tokens(value: bytes) -> frozenset[bytes]:
    return frozenset(token for part in value.lower().split(b",") if (token := part.strip(b" \t")))


def _short_size(line: bytes) -> int:
    """The size of a short chunk-size line, remembered for the next time; 0 where it is none, or the last chunk's."""
    match = _CHUNK_LINE.fullmatch(line)
    size = 0 if match is None else int(match.group(1), 16)
    if size and len(_SIZES) < _SIZES_MAX:
        _SIZES[line] = size
    return size


# What a body reader made of some bytes: (wire, payload, rest). ``wire``: the bytes to forward as they are, framing
# included; ``payload``: the body bytes among them; ``rest``: bytes past the end of the message.
Fed = tuple[bytes, bytes, bytes]


@dataclass(slots=True)
class BodyReader:
    """Walks one message body, however its bytes are cut.

    ``done``: the body ended as framed. ``error``: it broke its framing; nothing more may be forwarded.
    The bytes of a chunk-size line, of the CRLF after chunk data and of the last chunk with its trailers are
    forwarded only when they are whole and valid; body bytes at once.
    """

    framing: Framing
    left: int = 0
    done: bool = False
    error: str | None = None
    _tail: bytes = b""
    _trailer: bool = field(default=False)

    @classmethod
    def of(cls, head: RequestHead | ResponseHead) -> BodyReader:
        """The reader of the body that this head announces."""
        return cls(head.framing, head.length, done=head.framing is Framing.NONE)

    def feed(self, data: bytes) -> Fed:
        """Takes the next bytes. After ``done`` everything is ``rest``; after ``error`` everything is dropped."""
        if self.error is not None:
            return (b"", b"", b"")
        if self.framing is Framing.CHUNKED and not self.done:
            if not self.left and not self._tail and not self._trailer:
                # One whole chunk in one read: what an engine that writes an event at a time sends.
                start = data.find(b"\n", 0, _SHORT_LINE_BYTES) + 1
                size = _SIZES.get(data[:start]) or _short_size(data[:start])
                if size and start + size + 2 == len(data) and data.endswith(b"\r\n"):
                    return (data, data[start:-2], b"")
            return self._chunks(data)
        if self.done:
            return (b"", b"", data)
        if self.framing is Framing.CLOSE:
            return (data, data, b"")
        taken = data[: self.left]
        self.left -= len(taken)
        self.done = not self.left
        return (taken, taken, data[len(taken) :])

    def eof(self) -> bool:
        """The peer closed: whether that is a proper end of this body."""
        if self.framing is Framing.CLOSE and self.error is None:
            self.done = True
        return self.done

    def _chunks(self, data: bytes) -> Fed:
        """The general walk. ``left`` counts chunk data and its CRLF together."""
        if self._tail:
            data = self._tail + data
            self._tail = b""
        payload: list[bytes] = []
        position, end = 0, len(data)
        while position < end:
            if self._trailer:
                position = self._trailers(data, position)
                break
            if self.left:
                step = self._chunk_data(data, position, payload)
                if step == position:
                    break
                position = step
                continue
            match = _CHUNK_LINE.match(data, position)
            if match is None:
                self._hold_line(data, position)
                break
            size = int(match.group(1), 16)
            if size == 0:
                self._trailer = True
                position = self._trailers(data, position)
                break
            self.left = size + 2
            position = match.end()
        rest = b""
        if self.done:
            rest = data[position:]
        elif self.error is None and position < end:
            self._tail = data[position:]
        body = payload[0] if len(payload) == 1 else b"".join(payload)
        return (data[:position], body, rest)

    def _chunk_data(self, data: bytes, position: int, payload: list[bytes]) -> int:
        """Takes chunk data, then its CRLF; returns the new position (the old one where the CRLF is not whole)."""
        if self.left > 2:
            part = data[position : position + self.left - 2]
            payload.append(part)
            self.left -= len(part)
            return position + len(part)
        ending = data[position : position + 2]
        if not b"\r\n".startswith(ending):
            self.error = "chunk data is not followed by CRLF"
            return position
        if len(ending) == 1:
            return position
        self.left = 0
        return position + 2

    def _hold_line(self, data: bytes, position: int) -> None:
        """A chunk-size line that did not match: incomplete, or wrong."""
        line = data[position : position + MAX_CHUNK_LINE_BYTES + 1]
        if b"\n" in line or len(line) > MAX_CHUNK_LINE_BYTES or not _CHUNK_LINE_PREFIX.fullmatch(line):
            self.error = "a chunk-size line is not HEX[;extension] ended by CRLF"

    def _trailers(self, data: bytes, position: int) -> int:
        """From the last chunk's size line to the empty line; returns the position past it, or the old one."""
        start = data.index(b"\r\n", position) + 2
        if data.startswith(b"\r\n", start):
            self.done = True
            return start + 2
        end = data.find(b"\r\n\r\n", start)
        block = data[start : end + 2] if end >= 0 else data[start:]
        if len(block) > MAX_TRAILER_BYTES:
            self.error = f"trailers longer than {MAX_TRAILER_BYTES} bytes"
        elif end >= 0:
            if _FIELDS.fullmatch(block) is None or block.count(b"\r\n") > MAX_FIELDS:
                self.error = "a trailer line is not NAME: VALUE ended by CRLF, or there are too many"
            else:
                self.done = True
                return end + 4
        elif b"\n" in block.replace(b"\r\n", b""):
            self.error = "a bare LF in the trailers"
        return position


_CHUNK_LINE_PREFIX: Final = re.compile(rb"[0-9A-Fa-f]{1,15}(?:;" + _TEXT + rb")?\r?")

# Fields that belong to one hop (RFC 9110 7.6.1), framing aside: Transfer-Encoding goes on because the framing does.
_HOP_FIELDS: Final = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"upgrade", b"te"})
# Naming one of these in Connection is an attack on the next hop, not a hop-by-hop field.
_NEVER_NOMINATED: Final = frozenset(
    {b"host", b"content-length", b"transfer-encoding", b"authorization", b"content-type", b"content-encoding"}
)


def end_to_end(fields: list[Field], connection: frozenset[bytes]) -> list[Field]:
    """The fields a relay passes on: hop-by-hop and Connection-nominated ones removed, the rest in order, raw."""
    if not connection:
        return [item for item in fields if item[0] not in _HOP_FIELDS]
    nominated = connection - _NEVER_NOMINATED
    return [item for item in fields if item[0] not in _HOP_FIELDS and item[0] not in nominated]
