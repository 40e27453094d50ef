"""Asking an engine for the token counts that a client did not ask for, and keeping the client from seeing them.

Rules here: only a JSON object that asks for a stream, and says nothing of usage, is changed; its text stays as it was
but for what is put in. Of the answer only the event that holds usage and no choices is taken out, and nothing waits
but an event that has not come whole.
"""

from __future__ import annotations

from typing import Final

import orjson

from tapproxy.core.http1 import Framing, RequestHead, ResponseHead
from tapproxy.core.sse import SseItem, SseParser

FLAG: Final = "include-usage"
# A whole request is held back for this; longer ones pass as they are.
MOST_REQUEST_BYTES: Final = 1 << 20
# An event longer than this is no usage event, and goes on before its end.
_MOST_HELD_BYTES: Final = 64 << 10
_OPTION: Final = b'"stream_options":{"include_usage":true},'
# The two APIs that know the option.
_ROUTES: Final = (b"/chat/completions", b"/completions")


def may_ask(head: RequestHead) -> bool:
    """Whether this request's body is worth waiting for."""
    path = head.target.partition(b"?")[0]
    kind = (head.get(b"content-type") or b"").partition(b";")[0].strip().lower()
    return (
        head.method == b"POST"
        and path.endswith(_ROUTES)
        and kind == b"application/json"
        and head.framing is Framing.LENGTH
        and head.length <= MOST_REQUEST_BYTES
        and head.get(b"content-encoding") is None
        # The client would wait for an interim answer of an engine that has seen nothing yet.
        and head.get(b"expect") is None
    )


def asking(body: bytes) -> bytes | None:
    """The body with the option in it, None where it is to stay as it is."""
    try:
        value = orjson.loads(body)
    except ValueError:
        return None
    if type(value) is not dict or value.get("stream") is not True:
        return None
    if "stream_options" not in value:
        start = body.index(b"{") + 1
        return body[:start] + _OPTION + body[start:]
    options = value["stream_options"]
    if options is None:
        options = {}
    # With running totals every event would change.
    if type(options) is not dict or options.get("include_usage") or options.get("continuous_usage_stats"):
        return None
    value["stream_options"] = {**options, "include_usage": True}
    return orjson.dumps(value)


def with_length(fields: list[tuple[bytes, bytes, bytes]], length: int) -> list[tuple[bytes, bytes, bytes]]:
    """The fields, with another Content-Length."""
    value = b"%d" % length
    return [
        (name, value, raw[: raw.index(b":")] + b": " + value) if name == b"content-length" else (name, old, raw)
        for name, old, raw in fields
    ]


def can_take_out(head: ResponseHead) -> bool:
    """Whether an event can be taken out of this answer without another reader noticing."""
    encoded = (head.get(b"content-encoding") or b"identity").lower() != b"identity"
    framed = head.framing in (Framing.CHUNKED, Framing.CLOSE)
    return head.status == 200 and framed and not encoded and head.get(b"trailer") is None


class UsageEvents:
    """The events of one answer, without that of its usage. ``taken`` and ``passed_bytes`` may be read any time.

    ``chunked``: how the answer is framed; it may be set until the first bytes come.
    """

    __slots__ = ("_held", "_leaked", "_offset", "_parser", "chunked", "passed_bytes", "taken")

    def __init__(self, *, chunked: bool = True) -> None:
        self.taken = 0
        self.passed_bytes = 0
        self.chunked = chunked
        self._parser = SseParser(_MOST_HELD_BYTES)
        self._held = bytearray()
        self._offset = 0  # of what is held, in the body
        self._leaked = False  # the beginning of what is held has gone already

    def feed(self, payload: bytes, *, last: bool) -> bytes:
        """The bytes to write for these body bytes, framed as the answer is."""
        held = self._held
        held += payload
        out: list[bytes] = []
        begin = 0
        for item in self._parser.feed(payload):
            end = item.end_offset - self._offset
            if not self._leaked and _is_usage(item):
                self.taken += 1
            else:
                out.append(bytes(held[begin:end]))
            self._leaked = False
            begin = end
        rest = bytes(held[begin:])
        # Line ends by themselves complete nothing; a comment's blank line comes after it.
        if last or len(rest) > _MOST_HELD_BYTES or not rest.strip(b"\r\n"):
            self._leaked = bool(rest.strip(b"\r\n"))
            out.append(rest)
            begin = len(held)
        del held[:begin]
        self._offset += begin
        return self._framed(out, last=last)

    def rest(self) -> bytes:
        """What is held of an answer that was cut: it goes out as it came, without an end."""
        out = bytes(self._held)
        self._held.clear()
        return self._framed([out], last=False)

    def _framed(self, pieces: list[bytes], *, last: bool) -> bytes:
        """An event a chunk, as engines write them."""
        self.passed_bytes += sum(map(len, pieces))
        if not self.chunked:
            return b"".join(pieces)
        chunks = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece]
        return b"".join(chunks) + (b"0\r\n\r\n" if last else b"")


def _is_usage(item: SseItem) -> bool:
    """Usage and no choices: what an engine sends when it was asked for usage, and only then."""
    if item.comment or b'"usage"' not in item.data:
        return False
    try:
        value = orjson.loads(item.data)
    except ValueError:
        return False
    return (
        type(value) is dict and value.get("choices") == [] and type(value.get("usage")) is dict and "error" not in value
    )
