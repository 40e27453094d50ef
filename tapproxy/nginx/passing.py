"""When the bytes of an answer leave nginx: the header, the body filters that stop a flush, and limited rates.

Rules here: each sentence was measured on nginx 1.22.1 and 1.31.3 and is what their source says. The header goes out
with a flush (unbuffered answers send an empty one behind it), with the first bytes of the body, or at once where it is
larger than postpone_output. A filter that drops an empty flush makes the header wait; one that answers it with bytes of
its own (gzip: its magic number) takes the header along. What decides and is not known is None, with the question.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from tapproxy.nginx.directives import H2_HEADER_FLUSH
from tapproxy.nginx.model import Scope
from tapproxy.nginx.pattern import regex
from tapproxy.nginx.values import size_bytes

if TYPE_CHECKING:  # predict stands above this module; only the names of what it hands down are needed
    from tapproxy.nginx.predict import Hop

HELD: Final = "held"
# A stream of 210 B every 20 ms is 10.8 kB/s with its framing: a rate up to the first holds it back, one from the second
# on does not, and between them the sizes of the events decide (measured: 10k held, 12k and 14k not).
SLOW_BYTES: Final = 10 << 10
TOKEN_RATE_BYTES: Final = 16 << 10
# An answer that was compressed before it comes here has a part of its bytes: how small, its text decides.
_SLOW_COMPRESSED_BYTES: Final = 512
# limit_rate_after: what any answer exceeds, and what hardly any does (5000 events of 210 B).
_SHORT_ANSWER_BYTES: Final = 4 << 10
_LONG_ANSWER_BYTES: Final = 1 << 20
# What an answer's header may have beyond what can be read from the configuration.
_FIELDS_OF_THE_ENGINE_BYTES: Final = 512
# The clients of an API, for a gzip_disable that is meant for browsers of long ago, or for all.
_AGENTS: Final = (
    "OpenAI/Python 1.99.0",
    "python-httpx/0.28.1",
    "curl/8.5.0",
    "node",
    "Mozilla/5.0 (X11) Firefox/140.0",
)


# -- filters ----------------------------------------------------------------------------------------------------


def takes(scope: Scope, types: str, content_type: str) -> bool:
    """Whether a filter with this list of types takes answers of a type. text/html is always among them."""
    named = scope.words(types) | {"text/html"}
    return "*" in named or (content_type != "" and content_type.lower() in named)


def hidden(scope: Scope, field: str) -> bool:
    """Whether a field of the upstream's answer does not get past this nginx. proxy_pass_header wins."""
    return field in scope.words("proxy_hide_header") and field not in scope.words("proxy_pass_header")


def never_compressed(scope: Scope) -> bool:
    """Whether gzip_disable shuts out every client of an API."""
    patterns = [arg for one in scope.statements("gzip_disable") for arg in one.args if arg != "msie6"]
    compiled = [found for one in patterns if (found := regex(one, ignore_case=True)) is not None]
    return bool(compiled) and all(any(one.search(agent) for one in compiled) for agent in _AGENTS)


def changes_length(scope: Scope, content_type: str) -> bool:
    """Whether a body filter works on answers of this type, so that their length is not known beforehand."""
    added = (*scope.statements("add_before_body"), *scope.statements("add_after_body"))
    return (
        (scope.is_on("ssi") and takes(scope, "ssi_types", content_type))
        or (bool(scope.statements("sub_filter")) and takes(scope, "sub_filter_types", content_type))
        or (any(one.args != ("",) for one in added) and takes(scope, "addition_types", content_type))
    )


def _drops_flush(hop: Hop) -> str | None:
    """The filter through which an empty flush does not come."""
    scope = hop.route.scope
    if scope.is_on("ssi") and takes(scope, "ssi_types", hop.content_type):
        return "ssi"
    before = next(iter(scope.statements("add_before_body")), None)
    if before is not None and before.args != ("",) and takes(scope, "addition_types", hop.content_type):
        return "add_before_body"
    return None


# -- the header -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Header:
    """Whether the header leaves before the first event. ``why`` is a part of a sentence; None: it hangs on that."""

    now: bool | None
    why: str = ""


def header_bytes(hop: Hop) -> int:
    """What the header of nginx's own answer has at least: its five fields, and what add_header adds."""
    fields = ["HTTP/1.1 200 OK", "Server: nginx", "Date: Thu, 01 Jan 1970 00:00:00 GMT", "Connection: close", ""]
    if hop.content_type:
        fields.append(f"Content-Type: {hop.content_type}")
    return sum(len(one) + 2 for one in fields) + passed_bytes(hop)


def passed_bytes(hop: Hop) -> int:
    """The fields beside those that each nginx writes anew: what add_header adds here and further in."""
    added = [one.args for one in hop.route.scope.statements("add_header") if len(one.args) >= 2 and one.args[1]]
    shown = [args for args in added if "$" not in args[1] and args[0].lower() != "x-accel-buffering"]
    return hop.upstream.passed_bytes + sum(len(args[0]) + len(args[1]) + 4 for args in shown)


def at_once(hop: Hop, kind: str) -> Header:
    """Whether a client of this kind gets the header when nginx has it."""
    waits = "the header waits for the first event"
    if kind == "h2" and hop.plain_h2:
        return Header(True)  # a frame of its own, and no layer below that gathers
    if hop.upstream.early_bytes and _passes_bytes(hop):
        return Header(True, "; the first bytes of gzip, from the nginx behind, take the header along")
    postponed = _postponed(hop) if kind == "http1" else Header(False, waits)
    if postponed.now:
        return postponed
    if hop.buffered:
        return postponed if postponed.now is None else Header(False, waits)
    stopped = _drops_flush(hop)
    if stopped is not None:
        return postponed if postponed.now is None else Header(False, f"{waits}: {stopped} lets no empty flush through")
    if kind == "h2" and hop.version < H2_HEADER_FLUSH:
        if hop.compressed:
            return Header(True, "; the first bytes of gzip take the header along")
        return Header(False, waits)
    return Header(True)


def _passes_bytes(hop: Hop) -> bool:
    """Whether a few bytes of the body go on as they are read; zlib takes them in where it is not flushed."""
    return not hop.buffered or (hop.framing == "chunked" and not hop.compressed)


def sends_early(hop: Hop) -> bool:
    """Whether bytes of the body leave with the header: those of this nginx's own gzip, or of one further in."""
    if hop.upstream.early_bytes:
        return _passes_bytes(hop)
    return hop.compressed and not hop.buffered and _drops_flush(hop) is None


def _postponed(hop: Hop) -> Header:
    """Plain HTTP/1.1: a header that has postpone_output's bytes is written without a flush."""
    setting = hop.route.scope.setting("postpone_output")
    limit = size_bytes(setting.value)
    least = header_bytes(hop)
    if limit is None or limit > _header_most(hop):
        return Header(False, "the header waits for the first event")
    if limit <= least:
        return Header(True, f"; postpone_output {setting.value} lets the header go at once")
    return Header(None, f"whether the answer's header has {limit} bytes (postpone_output): then it goes at once")


# -- rates ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Limit:
    """A rate that holds a buffered answer back, or may. ``why`` names the setting."""

    verdict: Literal["held", "depends"]
    why: str


def rate_limit(hop: Hop) -> Limit | None:
    """What limit_rate and proxy_limit_rate do to a buffered answer; nginx ignores both for others (measured)."""
    found = [limit for name in ("limit_rate", "proxy_limit_rate") if (limit := limited_by(hop, name)) is not None]
    return next((one for one in found if one.verdict == HELD), next(iter(found), None))


def stops(hop: Hop, kind: str) -> Limit | None:
    """Whether an unbuffered stream stops for good behind its header.

    A header that is written at once falls under limit_rate, which is lifted only then. The flush behind it removes the
    timer that was to end the pause (measured on both versions, each time: from a pause of 1 ms on no event ever comes).
    """
    header = _postponed(hop) if kind == "http1" and not hop.buffered else Header(False)
    value, origin = _rate(hop, "limit_rate")
    rate = size_bytes(value)
    if header.now is False or value is None or rate == 0:
        return None
    after = size_bytes(hop.route.scope.setting("limit_rate_after").value or "0")
    what = f"limit_rate {value} ({origin}) applies to a header that postpone_output lets go at once"
    if rate is None or after is None:
        return Limit("depends", f"a value that is not known: {what}, and after a pause for that no event ever comes")
    if rate > 1000 * (_header_most(hop) - after):
        return None  # a pause of less than a millisecond is none
    if header.now and rate <= 1000 * (header_bytes(hop) - after):
        return Limit("held", f"{what}: nginx then forgets to go on, and no event ever comes")
    return Limit("depends", f"the size of the answer's header: {what}, and after a pause for that no event ever comes")


def _header_most(hop: Hop) -> int:
    return header_bytes(hop) + _FIELDS_OF_THE_ENGINE_BYTES


def _rate(hop: Hop, name: str) -> tuple[str | None, str]:
    """The value of a rate, and where it is set."""
    if name == "limit_rate" and "limit_rate" in hop.route.variables:
        return hop.route.variables["limit_rate"], "set $limit_rate"
    setting = hop.route.scope.setting(name)
    return setting.value, setting.origin


def limited_by(hop: Hop, name: str) -> Limit | None:
    """What one of the two does."""
    value, origin = _rate(hop, name)
    if value in (None, "0"):
        return None
    rate = size_bytes(value)
    if rate is None:
        return Limit("depends", f"the value of {name} ({origin})")
    what = f"{name} {value}"
    limit = _slow(hop, rate, what)
    if limit is not None and name == "limit_rate":
        limit = _after(hop, limit, what)
    return None if limit is None else replace(limit, why=f"{limit.why} ({origin})")


def _slow(hop: Hop, rate: int, what: str) -> Limit | None:
    if rate == 0:
        return None
    if rate >= TOKEN_RATE_BYTES:
        if header_bytes(hop) * 20 > rate:
            return Limit("depends", f"whether tokens come while {what} still counts the large header")
        return None
    if rate <= (SLOW_BYTES if hop.upstream.content_encoding is None else _SLOW_COMPRESSED_BYTES):
        return Limit("held", f"{what} is slower than the tokens come")
    if hop.upstream.content_encoding is not None:
        return Limit("depends", f"how far the answer is compressed when it comes here: {what} counts those bytes")
    return Limit("depends", f"how large the events are and how fast they come: {what} is near their rate")


def _after(hop: Hop, limit: Limit, what: str) -> Limit | None:
    setting = hop.route.scope.setting("limit_rate_after")
    after = size_bytes(setting.value) if setting.value is not None else 0
    if after is None:
        return Limit("depends", f"the value of limit_rate_after ({setting.origin})")
    if after < _SHORT_ANSWER_BYTES:
        return limit
    if after >= _LONG_ANSWER_BYTES:
        return None
    return Limit(
        "depends",
        f"whether an answer is longer than {setting.value} (limit_rate_after): what follows is held by {what}",
    )
