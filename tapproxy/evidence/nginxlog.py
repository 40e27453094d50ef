"""nginx's access log as a third witness: its own times of every request, and of every upstream it asked.

Rules here: the file is read in pieces and bounded; a line that is not of the format is counted and skipped. Queries,
user agents, addresses of clients and bodies are not kept. What the log does not tell is None.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import orjson

from tapproxy.core.address import quote
from tapproxy.core.errors import ConfigError
from tapproxy.core.witness import AccessLog, AccessRow, UpstreamTry
from tapproxy.evidence import logformat
from tapproxy.evidence.logformat import LogFormat

_MOST_BYTES: Final = 1 << 30
_MOST_LINE_BYTES: Final = 1 << 16
_MOST_ROWS: Final = 2_000_000
_WANTED: Final = (
    "log_format tapproxy '$msec $request_time $upstream_connect_time $upstream_header_time $upstream_response_time"
    ' $request_id $status "$request"\';'
)
_NO_TIMES: Final = f"has no times of its own: nginx has to log them, with {_WANTED}"
# How late the line may really be: the clock's cut of a time in milliseconds, or in whole seconds.
_MSEC_BOUND_NS: Final = 1_000_000
_SECOND_BOUND_NS: Final = 1_000_000_000
_BETWEEN_TRIES: Final = re.compile(r", | : ")
_MONTHS: Final = {
    name: number
    for number, name in enumerate("Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split(), 1)  # noqa: SIM905
}
_LOCAL: Final = re.compile(r"(\d{1,2})/(\w{3})/(\d{4}):(\d\d):(\d\d):(\d\d) ([+-]\d\d)(\d\d)")
_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_REQUEST: Final = re.compile(r"(\S+) (\S+)(?: HTTP/(\d(?:\.\d)?))?")
# Whose values tell a request's time.
_TIMES: Final = frozenset(("request_time", "upstream_connect_time", "upstream_header_time", "upstream_response_time"))


def read(path: Path, log_format: LogFormat | str | None = None, *, most_bytes: int = _MOST_BYTES) -> AccessLog:
    """The rows of a log. ``log_format``: as in nginx's configuration; None: the lines are JSON objects whose keys are
    named like the variables, or the format is nginx's own default, which has no times.

    Raises ConfigError where the file cannot be opened or the format is none.
    """
    log = AccessLog(source=path.name)
    wanted = logformat.of(log_format) if isinstance(log_format, str) else log_format
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            _take(log, _lines(file.read, log, most_bytes), wanted)
    except OSError as error:
        raise ConfigError(f"the nginx log {quote(str(path))} cannot be read: {error.strerror}") from None
    return log


def _lines(read_bytes: Callable[[int], bytes], log: AccessLog, most_bytes: int) -> Iterator[tuple[int, str]]:
    """(number, text). A line that never ends is cut, and the rest of the file after the limit is not read."""
    rest, number, size = b"", 0, 0
    while size < most_bytes:
        try:
            piece = read_bytes(min(1 << 20, most_bytes - size))
        except (EOFError, zlib.error):
            log.notes.append("its compressed data ends early: what came before is used")
            break
        if not piece:
            break
        size += len(piece)
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            number += 1
            yield number, line[:_MOST_LINE_BYTES].decode("utf-8", "replace").removesuffix("\r")
        rest = rest[:_MOST_LINE_BYTES]
    if size >= most_bytes:
        log.notes.append(f"only its first {most_bytes >> 20} MiB were read")
    elif rest:
        yield number + 1, rest.decode("utf-8", "replace")


def _take(log: AccessLog, lines: Iterator[tuple[int, str]], wanted: LogFormat | None) -> None:
    values_of: Callable[[str], Mapping[str, str] | None] | None = wanted.values if wanted is not None else None
    names: dict[str, None] = dict.fromkeys(wanted.variables if wanted is not None else ())
    for number, line in lines:
        if not line.strip():
            continue
        if values_of is None:
            values_of = _json_values if line.lstrip().startswith("{") else logformat.of(logformat.COMBINED).values
        values = values_of(line)
        if values is None:
            log.skipped += 1
            continue
        if wanted is None:
            names.update(dict.fromkeys(values))
        if len(log.rows) >= _MOST_ROWS:
            log.notes.append(f"only its first {_MOST_ROWS} requests were read")
            break
        log.rows.append(_row(number, values))
    log.variables = tuple(names)
    log.problem = _problem(log)


def _problem(log: AccessLog) -> str | None:
    name = f"the nginx log {quote(log.source)}"
    if not log.rows:
        if not log.skipped:
            return f"{name} holds no line"
        return f"{name} has no line of that format ({log.skipped} of another): give its log_format as nginx has it"
    if not _TIMES & set(log.variables):
        return f"{name} {_NO_TIMES}"
    if all(row.request_ns is None and not any(_told(each) for each in row.tries) for row in log.rows):
        return f"{name} names times and has none on any line: is the format the one it was written with?"
    return None


def _told(each: UpstreamTry) -> bool:
    return not (each.connect_ns is None and each.header_ns is None and each.response_ns is None)


def _json_values(line: str) -> dict[str, str] | None:
    """A JSON object with a variable's name for each key, with or without its $; a number is as good as its text."""
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(found, dict):
        return None
    return {
        key.lstrip("$"): format(value, "f") if isinstance(value, float) else str(value)
        for key, value in found.items()
        if isinstance(value, str | int | float) and not isinstance(value, bool)
    }


def _row(line: int, values: Mapping[str, str]) -> AccessRow:
    ended_ns, bound_ns = _ended(values)
    method, path, http = _request(values)
    parent = _TRACEPARENT.fullmatch(values.get("http_traceparent", ""))
    return AccessRow(
        line=line,
        ended_unix_ns=ended_ns,
        ended_bound_ns=bound_ns,
        request_ns=_ns(values.get("request_time")),
        request_id=_id(values.get("request_id")),
        client_request_id=_id(values.get("http_x_request_id")),
        answer_request_id=_id(values.get("sent_http_x_request_id") or values.get("upstream_http_x_request_id")),
        trace_id=parent[1] if parent is not None else None,
        method=method,
        path=path,
        http=http,
        status=_number(values.get("status")),
        body_bytes=_number(values.get("body_bytes_sent")),
        sent_bytes=_number(values.get("bytes_sent")),
        received_bytes=_number(values.get("request_length")),
        connection=_number(values.get("connection")),
        connection_requests=_number(values.get("connection_requests")),
        tries=_tries(values),
    )


def _ended(values: Mapping[str, str]) -> tuple[int | None, int | None]:
    """When the line was written, by the finest of the clocks that it has."""
    ended_ns = _ns(values.get("msec"))
    if ended_ns is not None:
        return ended_ns, _MSEC_BOUND_NS
    for name, read_time in (("time_iso8601", _iso_ns), ("time_local", _local_ns)):
        if name in values and (ended_ns := read_time(values[name])) is not None:
            return ended_ns, _SECOND_BOUND_NS
    return None, None


def _iso_ns(text: str) -> int | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    # nginx always writes the zone; without one it is not nginx's, and could be any.
    return None if found.tzinfo is None else round(found.timestamp()) * 1_000_000_000


def _local_ns(text: str) -> int | None:
    """``01/May/2024:12:00:00 +0200``, in English whatever the locale."""
    match = _LOCAL.fullmatch(text)
    if match is None or match[2] not in _MONTHS:
        return None
    try:
        moment = datetime(
            int(match[3]), _MONTHS[match[2]], int(match[1]), int(match[4]), int(match[5]), int(match[6]), tzinfo=UTC
        )
    except ValueError:
        return None
    hours, minutes = int(match[7]), int(match[8])
    offset_s = hours * 3600 + (minutes if not match[7].startswith("-") else -minutes) * 60
    return (round(moment.timestamp()) - offset_s) * 1_000_000_000


def _request(values: Mapping[str, str]) -> tuple[str | None, str | None, str | None]:
    """Method, path without the query, HTTP version."""
    match = _REQUEST.fullmatch(values.get("request", ""))
    if match is not None:
        method, target, http = match.groups()
    else:
        method = _word(values.get("request_method"))
        target = _word(values.get("request_uri") or values.get("uri"))
        http = (_word(values.get("server_protocol")) or "").removeprefix("HTTP/") or None
    return method, None if target is None else target.partition("?")[0], http


def _tries(values: Mapping[str, str]) -> tuple[UpstreamTry, ...]:
    """The lists are parallel: one entry a server that was asked, "-" where it did not come that far."""
    lists = {
        name: _BETWEEN_TRIES.split(values.get(f"upstream_{name}") or "")
        for name in ("addr", "status", "connect_time", "header_time", "response_time")
    }
    if all(each in ([""], ["-"]) for each in lists.values()):
        return ()  # answered by nginx itself

    def of(name: str, index: int) -> str | None:
        return lists[name][index] if index < len(lists[name]) else None

    return tuple(
        UpstreamTry(
            addr=_word(of("addr", index)),
            status=_number(of("status", index)),
            connect_ns=_ns(of("connect_time", index)),
            header_ns=_ns(of("header_time", index)),
            response_ns=_ns(of("response_time", index)),
        )
        for index in range(max(map(len, lists.values())))
    )


def _ns(text: str | None) -> int | None:
    """Seconds with decimals as integer ns, exactly; None for "-", nothing, or no number."""
    whole, _, decimals = (text or "").partition(".")
    if not whole.isdecimal() or not whole.isascii() or len(whole) > 12 or (decimals and not decimals.isdecimal()):
        return None
    return int(whole) * 1_000_000_000 + int(decimals[:9].ljust(9, "0"))


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and text.isascii() and len(text) < 20 else None


def _word(text: str | None) -> str | None:
    return None if text in (None, "", "-") else text


def _id(text: str | None) -> str | None:
    found = _word(text)
    return None if found is None or len(found) > 256 else found
