"""What a request body asks for, read off its bytes as they pass: a JSON object of any size in bounded memory.

Rules here: only the members of the table below are kept, and only where they are short; texts and images are
stepped over; a body that is no JSON object tells nothing; as with every JSON reader the last of two equal names
counts; nothing is raised for any bytes.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import orjson

from tapproxy.core.usage import count, text

# Longer than any name in the table, with each of its characters escaped.
_MAX_NAME_BYTES: Final = 256
_MAX_VALUE_BYTES: Final = 2048
_MAX_DEPTH: Final = 2
# Up to here a whole body is read by orjson, in less than the tenth of a millisecond.
_WHOLE_BYTES: Final = 64 * 1024

# Possessive: what they took is never given back, so that a cut body is not searched again.
_STRING_REST: Final = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_SKIP: Final = re.compile(rb'[^"{}\[\]]*+')
_SCALAR: Final = re.compile(rb'[^"{}\[\],:]*+')
_SPACE: Final = b" \t\r\n"

# The members that are kept, as (name,) or (outer name, name). OpenAI's, then Responses', TGI's and SGLang's own.
_WANTED: Final = frozenset(
    (
        ("model",),
        ("stream",),
        ("n",),
        ("max_tokens",),
        ("max_completion_tokens",),
        ("max_output_tokens",),
        ("ignore_eos",),
        ("echo",),
        ("stream_options", "include_usage"),
        ("stream_options", "continuous_usage_stats"),
        ("parameters", "max_new_tokens"),
        ("sampling_params", "max_new_tokens"),
        ("sampling_params", "n"),
        ("sampling_params", "ignore_eos"),
    )
)
_WANTED_NAMES: Final = frozenset(path[0] for path in _WANTED)
_WANTED_WITHIN: Final = {
    name: frozenset(path[1] for path in _WANTED if len(path) == 2 and path[0] == name) for name in _WANTED_NAMES
}


class RequestScan:
    """Feed it the body's bytes in order, in any pieces; ask at any time, best at the end."""

    __slots__ = (
        "_capture",
        "_capture_limit",
        "_depth",
        "_escaped",
        "_in_string",
        "_is_name",
        "_kinds",
        "_names",
        "_over",
        "_started",
        "_values",
        "complete",
        "readable",
    )

    def __init__(self) -> None:
        self.readable = True  # so far: a JSON object, or nothing yet
        self.complete = False  # the object was closed
        self._started = False
        self._depth = 0
        self._kinds: list[int] = []  # the brackets that are open, of the first two levels
        self._names: list[str | None] = [None, None]
        self._is_name = False  # the next string of an object is a member's name
        self._in_string = False
        self._escaped = False  # the last byte was a backslash in a string
        self._capture: bytearray | None = None
        self._capture_limit = 0
        self._over = False
        self._values: dict[tuple[str, ...], Any] = {}

    # -- what was asked for; None where it was not said

    @property
    def model(self) -> str | None:
        return text(self._values.get(("model",)))

    @property
    def stream(self) -> bool | None:
        """A whole object that does not say is not to be streamed; where it can't be read, nobody knows."""
        value = self._values.get(("stream",))
        if type(value) is bool:
            return value
        return False if self.complete else None

    @property
    def n(self) -> int | None:
        return self._number(("n",), ("sampling_params", "n"))

    @property
    def max_tokens(self) -> int | None:
        return self._number(
            ("max_completion_tokens",),
            ("max_tokens",),
            ("max_output_tokens",),
            ("parameters", "max_new_tokens"),
            ("sampling_params", "max_new_tokens"),
        )

    @property
    def include_usage(self) -> bool | None:
        return self._flag(("stream_options", "include_usage"))

    @property
    def continuous_usage(self) -> bool | None:
        return self._flag(("stream_options", "continuous_usage_stats"))

    @property
    def ignore_eos(self) -> bool | None:
        return self._flag(("ignore_eos",), ("sampling_params", "ignore_eos"))

    @property
    def echo(self) -> bool | None:
        return self._flag(("echo",))

    def _number(self, *paths: tuple[str, ...]) -> int | None:
        for path in paths:
            found = count(self._values.get(path))
            if found is not None:
                return found
        return None

    def _flag(self, *paths: tuple[str, ...]) -> bool | None:
        for path in paths:
            value = self._values.get(path)
            if type(value) is bool:
                return value
        return None

    # -- reading

    def feed(self, data: bytes) -> None:
        """Some more bytes of the body."""
        if not self.readable or self.complete:
            return
        position = 0
        if not self._started:
            if len(data) <= _WHOLE_BYTES and self._whole(data):
                return
            rest = data.lstrip(_SPACE)
            if not rest:
                return
            self._started = True
            if rest[:1] != b"{":
                self.readable = False
                return
            position = len(data) - len(rest)
        length = len(data)
        while position < length and not self.complete:
            if self._in_string:
                position = self._string(data, position)
            else:
                position = self._between(data, position)

    def _whole(self, data: bytes) -> bool:
        """A small body that came in one piece, as most do: read at once. False where it is not whole, or no JSON."""
        try:
            value = orjson.loads(data)
        except ValueError:
            return False
        self._started = True
        if type(value) is not dict:
            self.readable = False
            return True
        self.complete = True
        for name in value.keys() & _WANTED_NAMES:
            found = value[name]
            if type(found) is dict:
                for inner in found.keys() & _WANTED_WITHIN[name]:
                    self._keep_value((name, inner), found[inner])
            else:
                self._keep_value((name,), found)
        return True

    def _keep_value(self, path: tuple[str, ...], found: Any) -> None:
        if path in _WANTED and found is not None and type(found) not in (dict, list):
            self._values[path] = found if type(found) is not str or len(found) < _MAX_VALUE_BYTES else None

    def _string(self, data: bytes, position: int) -> int:
        start = position
        if self._escaped:
            self._escaped = False
            position += 1
        match = _STRING_REST.match(data, position)
        end = match.end() if match is not None else position
        if end == len(data) - 1 and data[end] == 0x5C:
            # A backslash is the last byte: what it stands before comes with the next piece.
            self._escaped = True
            end += 1
        self._keep(data, start, end)
        if end < len(data):
            self._in_string = False
            self._ended(string=True)
            return end + 1
        return end

    def _between(self, data: bytes, position: int) -> int:
        """Bytes outside of strings, up to the next that means something here."""
        deep = self._depth > _MAX_DEPTH
        match = (_SKIP if deep else _SCALAR).match(data, position)
        end = match.end() if match is not None else position
        if not deep:
            self._keep(data, position, end)
        if end == len(data):
            return end
        mark = data[end]
        if mark == 0x22:
            self._in_string = True
            if not deep:
                self._begin(string=True)
        elif mark in b"{[":
            self._open(mark)
        elif mark in b"}]":
            self._close()
        elif mark == 0x3A:
            self._is_name = False
            self._begin(string=False)
        else:
            self._ended(string=False)
            self._next_member()
        return end + 1

    def _open(self, mark: int) -> None:
        self._capture = None
        self._depth += 1
        if self._depth <= _MAX_DEPTH:
            self._kinds.append(mark)
            self._names[self._depth - 1] = None
            self._is_name = mark == 0x7B

    def _close(self) -> None:
        if self._depth <= _MAX_DEPTH:
            self._ended(string=False)
            self._kinds.pop()
        self._depth -= 1
        self._is_name = False
        if self._depth == 0:
            self.complete = True

    def _next_member(self) -> None:
        level = self._depth
        if 0 < level <= _MAX_DEPTH:
            self._is_name = self._kinds[level - 1] == 0x7B
            if self._is_name:
                self._names[level - 1] = None

    def _begin(self, *, string: bool) -> None:
        """A member's name or value begins: kept only where the table wants it."""
        self._capture, self._over = None, False
        if self._is_name:
            self._capture, self._capture_limit = bytearray(b'"'), _MAX_NAME_BYTES
        elif self._path() in _WANTED:
            self._capture, self._capture_limit = bytearray(b'"' if string else b""), _MAX_VALUE_BYTES

    def _keep(self, data: bytes, start: int, end: int) -> None:
        capture = self._capture
        if capture is None or self._over:
            return
        if len(capture) + end - start > self._capture_limit:
            self._over = True
            capture.clear()
        else:
            capture += data[start:end]

    def _ended(self, *, string: bool) -> None:
        capture, self._capture = self._capture, None
        if capture is None or (not string and not capture.strip()):
            return
        path = self._path()
        if string:
            capture += b'"'
        value = None if self._over else _value(bytes(capture))
        if self._is_name:
            self._is_name = False
            self._names[self._depth - 1] = value if type(value) is str else None
        elif path in _WANTED:
            self._values[path] = value

    def _path(self) -> tuple[str, ...]:
        """The names that lead here; empty where one is unknown or an array lies between."""
        level = self._depth
        names = self._names[:level]
        if not 0 < level <= _MAX_DEPTH or 0x5B in self._kinds:
            return ()
        return tuple(name for name in names if name is not None) if None not in names else ()


def _value(raw: bytes) -> Any:
    try:
        return json.loads(raw.decode("utf-8", "replace"), strict=False)
    except ValueError:
        return None
