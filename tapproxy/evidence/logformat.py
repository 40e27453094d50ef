"""An nginx ``log_format`` as a pattern: which variable stands where in a line.

Rules here: a format is read as nginx does (quoted pieces joined, ``escape=``), and a line either is of it, whole, or
it is not. No line makes the pattern take long: logs hold what strangers send.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import orjson

from tapproxy.core.address import quote
from tapproxy.core.errors import ConfigError

COMBINED: Final = (
    '$remote_addr - $remote_user [$time_local] "$request" $status $body_bytes_sent "$http_referer" "$http_user_agent"'
)
# A variable of every upstream asked: "0.002, 0.010 : -" (a comma at the next server, a colon at an inner redirect).
_LISTS: Final = re.compile(r"upstream_(connect|header|response)_time|upstream_(addr|status|response_length)")
_TIME: Final = re.compile(r"msec|(request|upstream_\w+)_time")
_VARIABLE: Final = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_ESCAPES: Final = ("default", "json", "none")
_HEX: Final = re.compile(rb"\\x([0-9A-Fa-f]{2})")
_MOST_VARIABLES: Final = 100
_ONE_TIME: Final = r"(?:-|\d+(?:\.\d+)?)"
_ONE_WORD: Final = r'[^\s,"]+'
# A word of a configuration: quoted, or to the next blank or semicolon. A # begins a comment at a word's start.
_WORD: Final = re.compile(
    r"""\s*(?:\#[^\n]*\s*)*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s;{}"']+)|([;{}]))""", re.DOTALL
)
_CONTROLS: Final = {"t": "\t", "r": "\r", "n": "\n"}
# What begins with a slash, so that a name before it ends there: $scheme://$host$request_uri.
_PATHS: Final = ("request_uri", "uri", "document_uri")


@dataclass(frozen=True, slots=True)
class LogFormat:
    """``text``: the format. ``variables``: in order, each once or more. ``pattern``: a whole line, a group for each."""

    text: str
    escape: str
    variables: tuple[str, ...]
    pattern: re.Pattern[str]

    def values(self, line: str) -> dict[str, str] | None:
        """Variable → what stands for it, unescaped; None where the line is not of this format."""
        match = self.pattern.fullmatch(line)
        if match is None:
            return None
        values: dict[str, str] = {}
        for name, value in zip(self.variables, match.groups(), strict=True):
            values.setdefault(name, _unescaped(value, self.escape))
        return values


def of(text: str, where: str = "--nginx-log-format") -> LogFormat:
    """From a format's own text, or from a whole ``log_format NAME [escape=…] '…' '…';``. Raises ConfigError."""
    stripped = text.strip()
    if re.match(r"log_format\s", stripped):
        found = all_of(stripped if stripped.endswith(";") else stripped + ";")
        if len(found) != 1:
            raise ConfigError(f"{where} is no single log_format: expected log_format NAME '…';")
        return next(iter(found.values()))
    return _compiled(stripped, "default", where)


def all_of(configuration: str) -> dict[str, LogFormat]:
    """Every ``log_format`` of a configuration's text, by name. Raises ConfigError for one that cannot be read."""
    found: dict[str, LogFormat] = {}
    position = 0
    statement: list[str] = []
    while (match := _WORD.match(configuration, position)) is not None:
        position = match.end()
        double, single, bare, mark = match.groups()
        if mark is None:
            word = next(each for each in (double, single, bare) if each is not None)
            statement.append(
                word if bare is not None else re.sub(r"\\(.)", lambda each: _CONTROLS.get(each[1], each[1]), word)
            )
            continue
        if mark == ";" and len(statement) > 2 and statement[0] == "log_format":
            name, pieces = statement[1], statement[2:]
            escape = "default"
            if pieces[0].startswith("escape="):
                escape = pieces.pop(0).removeprefix("escape=")
            found[name] = _compiled("".join(pieces), escape, f"log_format {quote(name)}")
        statement = []
    return found


def _compiled(text: str, escape: str, where: str) -> LogFormat:
    if escape not in _ESCAPES:
        raise ConfigError(f"{where}: escape={quote(escape)} is none of default, json, none")
    parts = list(_VARIABLE.finditer(text))
    if not parts:
        raise ConfigError(f"{where} names no variable: expected a format such as '$msec $request_time $request_id'")
    if len(parts) > _MOST_VARIABLES:
        raise ConfigError(f"{where} names more than {_MOST_VARIABLES} variables")
    # A JSON format that was written for escape=json and is given alone.
    if escape == "default" and text.startswith("{") and text.endswith("}"):
        escape = "json"
    names: list[str] = []
    pattern, position, touching = "", 0, 0
    for index, part in enumerate(parts):
        pattern += re.escape(text[position : part.start()])
        position = part.end()
        following = text[position : parts[index + 1].start() if index + 1 < len(parts) else len(text)]
        after = _name(parts[index + 1]) if index + 1 < len(parts) else None
        names.append(_name(part))
        value = _value(names[-1], following, after, escape)
        touching += value == ".*?"
        pattern += f"({value})"
    if touching > 1:
        raise ConfigError(f"{where} has variables with nothing between them: where one ends cannot be told")
    return LogFormat(text, escape, tuple(names), re.compile(pattern + re.escape(text[position:]), re.DOTALL))


def _name(variable: re.Match[str]) -> str:
    return variable[1] or variable[2]


def _value(name: str, following: str, after: str | None, escape: str) -> str:
    """A pattern for what stands for a variable. ``following``: the text up to the next one, which is ``after``.

    Atomic: what a value took it keeps, so a line that does not match is given up at once, whatever stands in it.
    """
    if _LISTS.fullmatch(name):
        one = _ONE_TIME if name.endswith("_time") else _ONE_WORD
        return f"(?:{one}(?:(?:, | : ){one}){{0,63}})?"
    if _TIME.fullmatch(name):
        return f"{_ONE_TIME}|"
    if not following:
        return ".*" if after is None else "[^/]*" if after in _PATHS else ".*?"
    if following[0] == '"' and escape != "none":
        return r'(?>(?:[^"\\]|\\.)*)'
    return f"(?>(?:(?!{re.escape(following)}).)*)"


def _unescaped(value: str, escape: str) -> str:
    if "\\" not in value or escape == "none":
        return value
    if escape == "json":
        try:
            return str(orjson.loads(f'"{value}"'))
        except orjson.JSONDecodeError:
            return value
    raw = _HEX.sub(lambda match: bytes([int(match[1], 16)]), value.encode())
    return raw.decode("utf-8", "replace")
