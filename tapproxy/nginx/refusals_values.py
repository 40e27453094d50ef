"""Values that nginx refuses: one statement looked at on its own, in nginx's words.

Rules here: a row was seen from ``nginx -t`` of 1.22.1 and 1.31.3 (the tests ask both). What only a commercial
or patched nginx takes is not refused here: it may be what runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from tapproxy.nginx import directives as known
from tapproxy.nginx.directives import Version
from tapproxy.nginx.model import location_name
from tapproxy.nginx.pattern import NOT_READABLE, translated
from tapproxy.nginx.source import Directive
from tapproxy.nginx.values import whole

_TIME = re.compile(r"(?=\d)(\d+y ?)?(\d+M ?)?(\d+w ?)?(\d+d ?)?(\d+h ?)?(\d+m ?)?(\d+s ?)?(\d+ms ?)?(\d+)?")
_SIZE = re.compile(r"\d+[kKmM]?")
_OFFSET = re.compile(r"\d+[kKmMgG]?")

# Every argument is one of these, in any case.
WORDS: Final[dict[str, frozenset[str]]] = {
    "proxy_next_upstream": frozenset(
        [
            "error",
            "timeout",
            "invalid_header",
            "non_idempotent",
            "http_500",
            "http_502",
            "http_503",
            "http_504",
            "http_403",
            "http_404",
            "http_429",
            "off",
            "updating",
        ]
    ),
    "proxy_ignore_headers": frozenset(
        [
            "x-accel-redirect",
            "x-accel-expires",
            "x-accel-limit-rate",
            "x-accel-buffering",
            "x-accel-charset",
            "expires",
            "cache-control",
            "set-cookie",
            "vary",
        ]
    ),
    "gzip_proxied": frozenset(
        ["off", "expired", "no-cache", "no-store", "private", "no_last_modified", "no_etag", "auth", "any"]
    ),
    "proxy_cache_methods": frozenset(("get", "head", "post")),
    "satisfy": frozenset(("all", "any")),
    "if_modified_since": frozenset(("off", "exact", "before")),
    "lingering_close": frozenset(("off", "on", "always")),
    "gzip_http_version": frozenset(("1.0", "1.1")),
    "limit_except": frozenset(
        [
            "get",
            "head",
            "post",
            "put",
            "delete",
            "mkcol",
            "copy",
            "move",
            "options",
            "propfind",
            "proppatch",
            "lock",
            "unlock",
            "patch",
        ]
    ),
}
SIZES: Final = frozenset(["postpone_output", "gzip_min_length", "client_header_buffer_size", "http2_chunk_size"])
OFFSETS: Final = frozenset(["proxy_max_temp_file_size", "client_max_body_size"])
NUMBERS: Final = frozenset(["keepalive_requests", "gzip_comp_level", "worker_connections"])
# A number of buffers and the size of each.
PAIRS: Final = frozenset(["proxy_buffers", "gzip_buffers", "output_buffers", "large_client_header_buffers"])
_LISTEN_FLAGS = frozenset(
    [
        "default_server",
        "default",
        "bind",
        "ssl",
        "http2",
        "quic",
        "proxy_protocol",
        "deferred",
        "reuseport",
        "multipath",
        "off",
    ]
)
_LISTEN_VALUES = (
    "setfib=",
    "fastopen=",
    "backlog=",
    "rcvbuf=",
    "sndbuf=",
    "accept_filter=",
    "ipv6only=",
    "so_keepalive=",
)
# Seen by Python as by PCRE; of what else Python cannot read, nothing is said.
_BROKEN_REGEX = ("missing )", "unterminated character set", "unbalanced parenthesis")
_FILE_TESTS = ("-f", "-d", "-e", "-x", "!-f", "!-d", "!-e", "!-x")
_CONDITION_SIGNS = frozenset(("=", "!=", "~", "~*", "!~", "!~*"))


def value_fault(one: Directive, version: Version, parent: Directive | None) -> str | None:
    """What nginx has against the arguments of one statement of the http block, or None."""
    checks = _BY_NAME.get(one.name)
    text = checks(one, parent) if checks is not None else None
    return text or _form_fault(one, version)


def _invalid(one: Directive, value: str) -> str:
    return f'invalid value "{value}" in "{one.name}" directive'


def _form_fault(one: Directive, version: Version) -> str | None:
    """The directives whose first argument has one form."""
    value = one.args[0] if one.args else ""
    allowed = known.VALUES.get(one.name)
    if allowed is not None and value not in [v for since, v in allowed if version >= since][-1]:
        return _invalid(one, value)
    words = WORDS.get(one.name)
    if words is not None:
        return next((_invalid(one, arg) for arg in one.args if arg.lower() not in words), None)
    forms = (
        (one.name in known.TIMES, _TIME),
        (one.name in known.SIZES or one.name in SIZES, _SIZE),
        (one.name in OFFSETS, _OFFSET),
        (one.name in NUMBERS, re.compile(r"\d+")),
    )
    # client_max_body_size and its like take more than sizes do, so that its own form is asked alone.
    for applies, form in reversed(forms):
        if applies:
            return None if form.fullmatch(value) else _invalid(one, value)
    if one.name in PAIRS:
        good = len(one.args) == 2 and re.fullmatch(r"0*[1-9]\d*", one.args[0]) and _SIZE.fullmatch(one.args[1])
        return None if good else f'"{one.name}" directive invalid value'
    return None


# -- one function a directive -----------------------------------------------------------------------------------


def regex_fault(pattern: str) -> str | None:
    """Why no engine of regular expressions can read this; None also where only Python's cannot."""
    try:
        re.compile(translated(pattern))
    except NOT_READABLE as error:
        text = str(error)
        if "\\Q" not in pattern and any(text.startswith(broken) for broken in _BROKEN_REGEX):
            return f'pcre_compile() failed: {text} in "{pattern}"'
    return None


def _is_port(text: str) -> bool:
    return 1 <= (whole(text) or 0) <= 65535


def _location(one: Directive, _: Directive | None) -> str | None:
    sign, name = location_name(one)
    if len(one.args) == 2 and sign not in ("=", "~", "~*", "^~"):
        return f'invalid location modifier "{sign}"'
    return regex_fault(name) if sign in ("~", "~*") else None


def _rewrite(one: Directive, _: Directive | None) -> str | None:
    if len(one.args) == 3 and one.args[2] not in ("last", "break", "redirect", "permanent"):
        return f'invalid parameter "{one.args[2]}"'
    return regex_fault(one.args[0]) if one.args else None


def _return(one: Directive, _: Directive | None) -> str | None:
    code = one.args[0] if one.args else ""
    if len(one.args) == 1 and re.match(r"https?://|\$scheme", code):
        return None
    return None if re.fullmatch(r"\d{1,3}", code) else f'invalid return code "{code}"'


def _if(one: Directive, _: Directive | None) -> str | None:
    words = list(one.args)
    if not words or not words[0].startswith("("):
        return f'invalid condition "{words[0] if words else ""}"'
    words[0] = words[0][1:]
    if not words[-1].endswith(")"):
        return f'invalid condition "{words[-1]}"'
    words[-1] = words[-1][:-1]
    words = [word for word in words if word]
    first = words[0] if words else ")"
    if first.startswith(_FILE_TESTS):
        return None
    if not first.startswith("$"):
        return f'invalid condition "{first}"'
    if len(words) > 1 and words[1] not in _CONDITION_SIGNS:
        return f'unexpected "{words[1]}" in condition'
    return regex_fault(words[2]) if len(words) > 2 and "~" in words[1] else None


def _error_page(one: Directive, _: Directive | None) -> str | None:
    for arg in one.args[:-1]:
        if arg.startswith("="):
            if not re.fullmatch(r"=\d*", arg):
                return f'invalid value "{arg}"'
        elif whole(arg) is None:
            return f'invalid value "{arg}"'
        elif arg == "499":
            return 'invalid value "499"'
        elif not 300 <= (whole(arg) or 0) <= 599:
            return f'value "{arg}" must be between 300 and 599'
    return None


def _listen(one: Directive, _: Directive | None) -> str | None:
    address = one.args[0] if one.args else ""
    port = re.search(r":?(\d+)$", address) if not address.startswith(("unix:", "[")) and (
        address.isdigit() or ":" in address) else re.search(r"\]:(\d+)$", address)  # fmt: skip
    if port is not None and not _is_port(port[1]):
        return f'invalid port in "{address}" of the "listen" directive'
    for arg in one.args[1:]:
        if arg not in _LISTEN_FLAGS and not arg.startswith(_LISTEN_VALUES):
            return f'invalid parameter "{arg}"'
    return None


def _server(one: Directive, parent: Directive | None) -> str | None:
    """A server of an upstream block."""
    if parent is None or parent.name != "upstream" or not one.args:
        return None
    port = re.search(r":(\d+)$", one.args[0])
    if port is not None and not one.args[0].startswith("unix:") and not _is_port(port[1]):
        return f'invalid port in upstream "{one.args[0]}"'
    for arg in one.args[1:]:
        name, sign, value = arg.partition("=")
        number = name in ("weight", "max_fails", "max_conns")
        good = name in known.UPSTREAM_SERVER_WORDS and bool(sign) == (name not in known.UPSTREAM_SERVER_FLAGS)
        if not good or (number and whole(value) is None) or arg == "weight=0":
            return f'invalid parameter "{arg}"'
        if name == "fail_timeout" and not _TIME.fullmatch(value):
            return f'invalid parameter "{arg}"'
    return None


def _proxy_pass(one: Directive, _: Directive | None) -> str | None:
    url = one.args[0] if one.args else ""
    if "$" in url:
        return None
    if not url.lower().startswith(("http://", "https://")):
        return "invalid URL prefix"
    address = url.partition("://")[2]
    if address.startswith(("unix:", "[")):
        return None
    host = address.partition("/")[0]
    if not host or host.startswith(":"):
        return f'no host in upstream "{address}"'
    port = host.partition(":")[2]
    # A port that is no number may be a place to fill in: the file is then a template.
    if port.isdigit() and not _is_port(port):
        return f'invalid port in upstream "{address}"'
    return None


def _set(one: Directive, _: Directive | None) -> str | None:
    return (
        None
        if one.args and one.args[0].startswith("$")
        else f'invalid variable name "{one.args[0] if one.args else ""}"'
    )


def _add_header(one: Directive, _: Directive | None) -> str | None:
    return f'invalid parameter "{one.args[2]}"' if len(one.args) > 2 and one.args[2] != "always" else None


def _limit_rate(one: Directive, _: Directive | None) -> str | None:
    value = one.args[0] if one.args else ""
    return None if "$" in value or _SIZE.fullmatch(value) else f'"{one.name}" directive invalid value'


def _comp_level(one: Directive, _: Directive | None) -> str | None:
    value = one.args[0] if one.args else ""
    return "value must be between 1 and 9" if value.isdigit() and not 1 <= (whole(value) or 0) <= 9 else None


def _keepalive_timeout(one: Directive, _: Directive | None) -> str | None:
    bad = next((arg for arg in one.args if not _TIME.fullmatch(arg)), None)
    return None if bad is None else f'"{one.name}" directive invalid value'


def _cache_valid(one: Directive, _: Directive | None) -> str | None:
    for arg in one.args[:-1]:
        if arg != "any" and not 100 <= (whole(arg) or 0) <= 599:
            return f'invalid status "{arg}"'
    return (
        None
        if one.args and _TIME.fullmatch(one.args[-1])
        else f'invalid time value "{one.args[-1] if one.args else ""}"'
    )


def _server_name(one: Directive, _: Directive | None) -> str | None:
    return next((fault for arg in one.args if arg.startswith("~") and (fault := regex_fault(arg[1:]))), None)


def _map(one: Directive, _: Directive | None) -> str | None:
    seen: set[str] = set()
    for entry in one.block or ():
        if entry.name in ("include", "volatile", "hostnames"):
            continue
        if len(entry.args) != 1:
            return "invalid number of the map parameters"
        if entry.name.startswith("~"):
            fault = regex_fault(entry.name.removeprefix("~").removeprefix("*"))
            if fault is not None:
                return fault
            continue
        key = entry.name.lower()
        if key in seen:
            return "duplicate default map parameter" if key == "default" else f'conflicting parameter "{entry.name}"'
        seen.add(key)
    return None


_BY_NAME: dict[str, Callable[[Directive, Directive | None], str | None]] = {
    "add_header": _add_header,
    "error_page": _error_page,
    "gzip_comp_level": _comp_level,
    "if": _if,
    "keepalive_timeout": _keepalive_timeout,
    "limit_rate": _limit_rate,
    "limit_rate_after": _limit_rate,
    "listen": _listen,
    "location": _location,
    "map": _map,
    "proxy_cache_valid": _cache_valid,
    "proxy_limit_rate": _limit_rate,
    "proxy_pass": _proxy_pass,
    "return": _return,
    "rewrite": _rewrite,
    "server": _server,
    "server_name": _server_name,
    "set": _set,
}
