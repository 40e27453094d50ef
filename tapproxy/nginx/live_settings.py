"""The settings that a live check runs: one row each, with the reader of its value.

Rules here: what nginx is given is built from numbers, units and words of closed sets; no letter of a user's file is
copied. A row's reader turns arguments into such a text, or says why it does not (``NotRunError``). What is in no table
is not run (``live_left_out`` says why).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

from tapproxy.nginx import values

Level = Literal["location", "server", "upstream"]

_MAX_BYTES: Final = 64 << 20  # of one setting; nginx itself is held to a limit too
_LARGE_FIELD_BYTES: Final = 64
_MAX_FIELD_BYTES: Final = 3000
_MAX_TIME_MS: Final = 30 * 86_400_000


class NotRunError(Exception):
    """A value that is not run; the text says why."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a reader may ask: the type that the engine's answers have, and what a variable stands for."""

    content_type: str
    connection_of: Callable[[str], str | None]


Arguments = tuple[str, ...]
Reader = Callable[[Arguments, Facts], str | None]  # None: no effect here, nothing to write


@dataclass(frozen=True, slots=True)
class Row:
    """One setting: how its value is read, where it is written, and whether one level may have several."""

    read: Reader
    level: Level = "location"
    many: bool = False


def time_ms(text: str) -> int:
    """nginx's time in milliseconds (``1m30s``; a bare number is seconds). Raises NotRunError."""
    time_s = values.seconds(text)
    if time_s is None:
        raise NotRunError(f"its time {shown(text)} is not read here")
    if time_s * 1000 > _MAX_TIME_MS:
        raise NotRunError(f"its time {shown(text)} is out of the range that is run")
    return round(time_s * 1000)


def size_bytes(text: str, most: int = _MAX_BYTES) -> int:
    """nginx's size in bytes. Raises NotRunError."""
    size = values.size_bytes(text)
    if size is None:
        raise NotRunError(f"its size {shown(text)} is not read here" if "$" not in text else "its value is a variable")
    if size > most:
        raise NotRunError(f"its size {shown(text)} is more than is run here ({most} bytes)")
    return size


def shown(text: str) -> str:
    """A user's text within a sentence: short, quoted, without controls."""
    return repr(text if len(text) <= 40 else text[:40] + "…")


def _one(arguments: Arguments) -> str:
    if len(arguments) != 1:
        raise NotRunError(f"it has {len(arguments)} arguments where one is run")
    return arguments[0]


def _flag(arguments: Arguments, _: Facts) -> str:
    word = _one(arguments).lower()
    if word not in ("on", "off"):
        raise NotRunError(f"its value {shown(word)} is neither on nor off")
    return word


def _time(arguments: Arguments, _: Facts) -> str:
    return f"{time_ms(_one(arguments))}ms"


def _size(arguments: Arguments, _: Facts) -> str:
    return str(size_bytes(_one(arguments)))


def _body_limit(arguments: Arguments, _: Facts) -> str:
    # It bounds what is accepted and allocates nothing.
    return str(size_bytes(_one(arguments), 1 << 50))


def _keepalive_timeout(arguments: Arguments, facts: Facts) -> str:
    # The second argument is what a header says to the client.
    return _time(arguments[:1], facts)


def _number(least: int, most: int) -> Reader:
    def read(arguments: Arguments, _: Facts) -> str:
        text = _one(arguments)
        number = values.whole(text)
        if number is None or not least <= number <= most:
            raise NotRunError(f"its number {shown(text)} is not within {least} to {most}")
        return str(number)

    return read


def _buffers(arguments: Arguments, _: Facts) -> str:
    number = values.whole(arguments[0]) if len(arguments) == 2 else None
    if number is None:
        raise NotRunError("it is not a number and a size")
    size = size_bytes(arguments[1])
    if number * size > _MAX_BYTES:
        raise NotRunError(f"{number} buffers of {size} bytes are more than is run here ({_MAX_BYTES} bytes)")
    return f"{number} {size}"


def _words(*allowed: str, several: bool = False) -> Reader:
    """Words of a closed set; what is written is the set's own spelling."""
    spelling = {word.lower(): word for word in allowed}

    def read(arguments: Arguments, _: Facts) -> str:
        if len(arguments) != 1 and not several:
            raise NotRunError(f"it has {len(arguments)} arguments where one is run")
        found = [spelling.get(argument.lower()) for argument in arguments]
        known = [word for word in found if word is not None]
        if len(known) < len(found):
            odd = next(argument for argument in arguments if argument.lower() not in spelling)
            raise NotRunError(f"its value {shown(odd)} is none of {', '.join(allowed)}")
        return " ".join(known)

    return read


def _some_words(*allowed: str) -> Reader:
    """As ``_words``, of those that bear on a stream; the others have no effect on it and are dropped."""
    spelling = {word.lower(): word for word in allowed}

    def read(arguments: Arguments, _: Facts) -> str | None:
        return " ".join(spelling[one.lower()] for one in arguments if one.lower() in spelling) or None

    return read


def _types(arguments: Arguments, facts: Facts) -> str:
    """A list of MIME types comes down to one question: is the answer's among them?"""
    if "*" in arguments:
        return "*"
    return facts.content_type if facts.content_type in {one.lower() for one in arguments} else "application/x-other"


def _request_header(arguments: Arguments, facts: Facts) -> str | None:
    if len(arguments) != 2:
        raise NotRunError("it is not a name and a value")
    name, value = arguments[0].lower(), arguments[1]
    if name == "connection":
        word = facts.connection_of(value)
        if word is None:
            raise NotRunError(f"the value {shown(value)} of Connection is not known here")
        return f'Connection "{word}"'
    if name == "accept-encoding":
        if value == "":
            return 'Accept-Encoding ""'
        return "Accept-Encoding $http_accept_encoding" if "$" in value else "Accept-Encoding gzip"
    if name == "content-length" and value == "":
        return 'Content-Length ""'
    if name in ("te", "transfer-encoding", "content-length", "expect"):
        raise NotRunError(f"it changes the framing header {name} of the request")
    return None  # no other request header bears on how the answer passes


def _response_header(arguments: Arguments, _: Facts) -> str | None:
    if len(arguments) < 2:
        return None
    if arguments[0].lower() != "x-accel-buffering":
        # Only its size matters: a header larger than postpone_output goes at once.
        size = 0 if "$" in arguments[1] or not arguments[1] else len(arguments[0]) + len(arguments[1])
        return f"X-Size {'a' * (min(size, _MAX_FIELD_BYTES) - len('X-Size'))}" if size >= _LARGE_FIELD_BYTES else None
    value = arguments[1].lower()
    if "$" in value:
        raise NotRunError("the value of X-Accel-Buffering is a variable")
    # nginx knows yes and no; any other word has no effect, and "other" stands for it.
    return f"X-Accel-Buffering {value if value in ('yes', 'no') else 'other'}"


def _sub_filter(arguments: Arguments, _: Facts) -> str:
    # That a filter works through the answer matters, what it looks for does not.
    return "tapproxy-looks-for-this tapproxy-puts-this"


_ACCEL = (
    "X-Accel-Redirect", "X-Accel-Expires", "X-Accel-Limit-Rate", "X-Accel-Buffering", "X-Accel-Charset", "Expires",
    "Cache-Control", "Set-Cookie", "Vary",
)  # fmt: skip
_PROXIED = ("off", "expired", "no-cache", "no-store", "private", "no_last_modified", "no_etag", "auth", "any")
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS")

ROWS: Final[dict[str, Row]] = {
    # towards the engine
    "proxy_buffering": Row(_flag),
    "proxy_buffers": Row(_buffers),
    "proxy_buffer_size": Row(_size),
    "proxy_busy_buffers_size": Row(_size),
    "proxy_max_temp_file_size": Row(_size),
    "proxy_temp_file_write_size": Row(_size),
    "proxy_http_version": Row(_words("1.0", "1.1", "2")),
    "proxy_request_buffering": Row(_flag),
    "proxy_read_timeout": Row(_time),
    "proxy_send_timeout": Row(_time),
    "proxy_connect_timeout": Row(_time),
    "proxy_ignore_client_abort": Row(_flag),
    "proxy_pass_request_body": Row(_flag),
    "proxy_pass_request_headers": Row(_flag),
    "proxy_method": Row(_words(*_METHODS)),
    "proxy_limit_rate": Row(_size),
    "proxy_socket_keepalive": Row(_flag),
    "proxy_ssl_session_reuse": Row(_flag),
    "proxy_set_header": Row(_request_header, many=True),
    "proxy_ignore_headers": Row(_some_words(*_ACCEL), many=True),
    "proxy_pass_header": Row(_some_words(*_ACCEL), many=True),
    "proxy_hide_header": Row(_some_words("X-Accel-Buffering", "Content-Type", "Content-Encoding"), many=True),
    "add_header": Row(_response_header, many=True),
    # what changes the answer on its way
    "chunked_transfer_encoding": Row(_flag),
    "postpone_output": Row(_size),
    "output_buffers": Row(_buffers),
    "limit_rate": Row(_size),
    "limit_rate_after": Row(_size),
    "gzip": Row(_flag),
    "gzip_types": Row(_types, many=True),
    "gzip_proxied": Row(_words(*_PROXIED, several=True)),
    "gzip_min_length": Row(_size),
    "gzip_comp_level": Row(_number(1, 9)),
    "gzip_http_version": Row(_words("1.0", "1.1")),
    "gzip_buffers": Row(_buffers),
    "gzip_vary": Row(_flag),
    "gzip_disable": Row(_words("msie6")),
    "gunzip": Row(_flag),
    "gunzip_buffers": Row(_buffers),
    "sub_filter": Row(_sub_filter, many=True),
    "sub_filter_once": Row(_flag),
    "sub_filter_types": Row(_types, many=True),
    "sub_filter_last_modified": Row(_flag),
    # The answers are our own and hold no command.
    "ssi": Row(_flag),
    "ssi_types": Row(_types, many=True),
    "charset": Row(_words("off", "utf-8", "iso-8859-1", "windows-1252")),
    "charset_types": Row(_types, many=True),
    # the client's side
    "tcp_nodelay": Row(_flag),
    "tcp_nopush": Row(_flag),
    "sendfile": Row(_flag),
    "keepalive_timeout": Row(_keepalive_timeout),
    "keepalive_requests": Row(_number(1, 1_000_000)),
    "send_timeout": Row(_time),
    "reset_timedout_connection": Row(_flag),
    "client_body_timeout": Row(_time),
    "client_max_body_size": Row(_body_limit),
    "client_body_buffer_size": Row(_size),
    "client_body_in_single_buffer": Row(_flag),
    "http2_chunk_size": Row(_size),
    "ssl_buffer_size": Row(_size, "server"),
    # the upstream block, in the file's order: the order of keepalive and balancer matters to old nginx
    "keepalive": Row(_number(0, 1024), "upstream"),
    "least_conn": Row(_words(several=True), "upstream"),
    "ip_hash": Row(_words(several=True), "upstream"),
}
# Of an upstream block too, where they mean the connections to the engine.
UPSTREAM_ROWS: Final[dict[str, Row]] = {
    name: Row(ROWS[name].read, "upstream")
    for name in ("keepalive", "least_conn", "ip_hash", "keepalive_timeout", "keepalive_requests")
}
