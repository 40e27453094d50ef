"""Findings on the spot: what one exchange shows by itself, each saying what it means here.

Rules are data: a slug, its severity, the words, and a predicate that returns the evidence or None. The predicate
sees a Record, and whether that was an event stream, and nothing else: a stored record gives the same findings as a
live one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tapproxy.core.findings import Finding, Severity
from tapproxy.core.record import Record

# Below this many token events a burst is a coincidence.
MIN_EVENTS: Final = 10
# Several events in a read more often than in every fourth read: a habit, not a scheduling hiccup.
COALESCED_EVENTS_PER_READ: Final = 1.25
# A client that left less than this unread for less than this long reads well enough.
SLOW_READER_STALL_NS: Final = 100_000_000
SLOW_READER_UNSENT_BYTES: Final = 64 * 1024
# What an nginx with proxy_buffering on makes of an answer, by its framing: measured on 1.22.1 and 1.31.3.
_BEHIND_NGINX: Final = {
    "chunked": "it is chunked, so an nginx that buffers, of any version, still passes each event on to plain HTTP/1.1 "
    "and to HTTP/2 clients; HTTP/1.1 clients over TLS get nothing until 16 kB or the end (ssl_buffer_size)",
    "unchunked": "it is not chunked, so an nginx that buffers, of any version, passes it on 4 kB at a time, and to "
    "HTTP/1.1 clients over TLS 16 kB at a time",
    "asked in HTTP/1.0": "it is not chunked, since it was asked for in HTTP/1.0 (as by nginx before 1.29.7 unless "
    "proxy_http_version is 1.1): an nginx that buffers passes it on 4 kB at a time, and to HTTP/1.1 clients over TLS "
    "16 kB at a time",
}
_TOKEN_KINDS: Final = frozenset({"token", "reasoning", "tool"})


@dataclass(frozen=True, slots=True)
class SpotRule:
    """``evidence`` returns the numbers in words where the rule fires, else None."""

    rule: str
    severity: Severity
    summary: str
    advice: str
    evidence: Callable[[Record, bool], str | None]


def findings(record: Record) -> list[Finding]:
    """The findings of one record, in the order of the catalogue."""
    return [Finding(rule.rule, rule.severity, rule.summary, evidence, rule.advice) for rule, evidence in _fired(record)]


def rules(record: Record) -> list[str]:
    """Their slugs alone: what every record holds."""
    return [rule.rule for rule, _ in _fired(record)]


def _fired(record: Record) -> list[tuple[SpotRule, str]]:
    streamed = is_event_stream(record)
    return [(rule, evidence) for rule in CATALOGUE if (evidence := rule.evidence(record, streamed)) is not None]


def is_event_stream(record: Record) -> bool:
    """Whether the response said that it is a stream of server-sent events."""
    kind = (record.headers.get("content-type") or "").partition(";")[0].strip().lower()
    return kind == "text/event-stream"


def _accel_missing(record: Record, streamed: bool) -> str | None:
    if not streamed or record.status != 200 or record.headers.get("x-accel-buffering") is not None:
        return None
    if any(name.endswith("x-accel-buffering") for name in record.altered):
        # This tap sent it, being told to.
        return None
    chunked = "chunked" in (record.headers.get("transfer-encoding") or "").lower()
    framing = "chunked" if chunked else "asked in HTTP/1.0" if record.client_http == "1.0" else "unchunked"
    engine = record.headers.get("server") or "the upstream"
    return f"text/event-stream from {engine} without X-Accel-Buffering; {_BEHIND_NGINX[framing]}"


def _encoded(record: Record, streamed: bool) -> str | None:
    if not streamed:
        return None
    encoding = record.headers.get("content-encoding")
    if encoding is None or encoding.lower() == "identity":
        return None
    return f"Content-Encoding: {encoding} on text/event-stream"


def _not_sse(record: Record, streamed: bool) -> str | None:
    if streamed or record.stream is not True or record.status != 200:
        return None
    return f"the request asked for a stream, the answer's Content-Type is {record.headers.get('content-type')}"


def _coalesced(record: Record, _streamed: bool) -> str | None:
    if len(record.events.kind) < MIN_EVENTS:
        return None
    reads = [read for kind, read in zip(record.events.kind, record.events.read, strict=True) if kind in _TOKEN_KINDS]
    if len(reads) < MIN_EVENTS:
        return None
    per_read = len(reads) / len(set(reads))
    if per_read < COALESCED_EVENTS_PER_READ:
        return None
    return f"{len(reads)} token events came in {len(set(reads))} reads ({per_read:.1f} a read)"


def _slow_reader(record: Record, streamed: bool) -> str | None:
    # A large plain download waits for its client as a matter of course; a token stream does not.
    if not streamed:
        return None
    part = record.downstream
    if part.stalled_ns < SLOW_READER_STALL_NS and part.unsent_max_bytes < SLOW_READER_UNSENT_BYTES:
        return None
    return f"stalled {part.stalled_ns / 1e6:.0f} ms, at most {part.unsent_max_bytes} bytes waited for the client"


def _http10(record: Record, _streamed: bool) -> str | None:
    return "the request line says HTTP/1.0" if record.client_http == "1.0" else None


CATALOGUE: Final[tuple[SpotRule, ...]] = (
    SpotRule(
        "x-accel-buffering-missing",
        "info",
        "The engine does not tell an nginx in front to stream.",
        "Nothing is wrong at this point of the path; vLLM and SGLang never send this field. It matters where an nginx "
        "in front buffers (`proxy_buffering on`, its default): set `proxy_buffering off;` there, or have the engine "
        "send `X-Accel-Buffering: no`, which overrides it. Until then that nginx also delays the head until the first "
        "event, an event of 4 kB until the next one, and with gzip on this type everything until the end. `tapproxy "
        "check` reads its configuration and says which clients wait.",
        _accel_missing,
    ),
    SpotRule(
        "content-encoding-on-sse",
        "warning",
        "The event stream is compressed.",
        "A compressor that is not flushed after each event holds all of them, and events in a compressed body cannot "
        "be stamped here. Take text/event-stream out of what is compressed, or do not offer Accept-Encoding.",
        _encoded,
    ),
    SpotRule(
        "content-type-not-sse",
        "warning",
        "A stream was asked for, and the answer does not say it is one.",
        "Clients and proxies decide by Content-Type whether to pass data on at once. Look at what answers this path: "
        "an engine that ignores `stream`, or a gateway that rewrites the type.",
        _not_sse,
    ),
    SpotRule(
        "coalesced-events",
        "warning",
        "Events arrive here in bunches.",
        "What sends to this tap gives several events at once: an engine that bundles (stream interval, speculation, an "
        "API process that lags), or, where a proxy stands between, that proxy holding them back. A tap behind "
        "that proxy tells which.",
        _coalesced,
    ),
    SpotRule(
        "slow-reader",
        "warning",
        "The client does not take the answer as fast as it comes.",
        "The time is lost behind this tap: the client's own reading, or the network to it. The engine and what stands "
        "before this tap are not to blame for it.",
        _slow_reader,
    ),
    SpotRule(
        "client-http10",
        "info",
        "The client speaks HTTP/1.0.",
        "Usually an nginx with its default `proxy_http_version` before 1.29.7. Harmless where the engine answers in "
        "chunks anyway (vLLM, SGLang); an engine that answers HTTP/1.0 by closing makes that nginx hold 4 kB at a time "
        "and hides truncated answers. Set `proxy_http_version 1.1;`.",
        _http10,
    ),
)
