"""What one configuration does to a stream, per kind of client: the measured mechanisms M1 to M4 as a decision.

Rules here: each outcome rests on a measurement (nginx 1.22.1 and 1.31.3, events of 210 B every 20 ms, loopback). What
the engine sends is an input, ``Upstream``; where it is unknown and decides, the answer is ``depends``. The prediction
is for events under 4 kB on a fast link.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from tapproxy.core.errors import ConfigError
from tapproxy.nginx.directives import Version
from tapproxy.nginx.passing import (
    HELD,
    at_once,
    changes_length,
    header_bytes,
    hidden,
    never_compressed,
    passed_bytes,
    rate_limit,
    sends_early,
    stops,
    takes,
)
from tapproxy.nginx.routing import Route, route
from tapproxy.nginx.servers import Servers, address_of, in_use
from tapproxy.nginx.values import seconds, size_bytes

Framing = Literal["chunked", "close", "length"]
Streaming = Literal["streams", "late_header", "depends", "held", "fails"]

_ORDER: tuple[Streaming, ...] = ("streams", "late_header", "depends", "held", "fails")
_MAX_HOPS = 5
# Queue and prefill of a long prompt take this long on a healthy engine.
SHORT_SILENCE_S = 10
# The shortest header of an answer that an engine can send; a buffer smaller than this takes none (measured: 502).
_ENGINE_HEADER_BYTES = 80
# Headers of real engines and of proxies between fit in this.
_AMPLE_HEADER_BYTES = 1 << 10


@dataclass(frozen=True, slots=True)
class Upstream:
    """How the server behind nginx answers. Unknown is None; a header it does not send is None too.

    ``http10``: how it frames a stream asked for in HTTP/1.0; ``http11``: in HTTP/1.1.
    """

    name: str
    http10: Framing | None
    http11: Framing = "chunked"
    x_accel_buffering: str | None = None
    content_encoding: str | None = None
    content_type: str = "text/event-stream"
    http2: bool | None = False
    # What its header has at least, and of that what nginx passes on beside the fields that it writes itself.
    header_bytes: int = _ENGINE_HEADER_BYTES
    passed_bytes: int = 0
    # Whether bytes of the body come with the header, before the first event.
    early_bytes: bool = False


# Measured (vllm, sglang), or from the source of the engine; what was not looked at is None.
PROFILES: dict[str, Upstream] = {
    one.name: one
    for one in (
        Upstream("vllm", http10="chunked"),
        Upstream("sglang", http10="chunked"),
        Upstream("tgi", http10=None, x_accel_buffering="no"),
        Upstream("llama.cpp", http10=None, x_accel_buffering="no"),
        Upstream("ray-serve", http10=None),
        Upstream("generic", http10="close"),
    )
}


def upstream_of(profile: str, facts: Iterable[str] = ()) -> Upstream:
    """A profile, with single facts about the engine's answers put over it (``x-accel-buffering=no``)."""
    if profile not in PROFILES:
        raise ConfigError(f"unknown upstream profile {profile!r}: choose one of {', '.join(PROFILES)}")
    upstream = PROFILES[profile]
    for fact in facts:
        name, separator, value = fact.partition("=")
        name, value = name.strip().lower(), value.strip().lower()
        if not separator:
            raise ConfigError(f"--upstream {fact!r} is not of the form NAME=VALUE")
        if name == "framing" and value in ("chunked", "close", "length"):
            framing: Framing = value  # type: ignore[assignment]  # narrowed by the line above
            upstream = replace(upstream, http10=framing, http11=framing)
        elif name == "x-accel-buffering":
            upstream = replace(upstream, x_accel_buffering=value or None)
        elif name == "content-encoding":
            upstream = replace(upstream, content_encoding=value or None)
        elif name == "http2" and value in ("yes", "no"):
            upstream = replace(upstream, http2=value == "yes")
        elif name == "content-type":
            upstream = replace(upstream, content_type=value.split(";")[0].strip())
        else:
            raise ConfigError(
                f"--upstream {fact!r}: known are framing=chunked|close|length, x-accel-buffering=, "
                "content-encoding=, content-type=, http2=yes|no"
            )
    return upstream


@dataclass(frozen=True, slots=True)
class Outcome:
    """The prediction for one kind of client, in the contract's words."""

    streaming: Streaming
    mechanism: str | None
    why: str
    # Whether, or in one of the cases it depends on, no event ever comes: an nginx in front then has nothing to show.
    empty: bool = False


@dataclass(frozen=True, slots=True)
class Hop:
    """One nginx on the way: its route, what stands behind it, and the next nginx of this configuration, if any."""

    route: Route
    upstream: Upstream
    version: Version
    inner: Hop | None = None
    notes: tuple[str, ...] = ()
    replicas: int = 1
    # The nginx in front never asks for a compressed answer: it clears Accept-Encoding, or speaks HTTP/1.0.
    asked_plain: bool = False

    @property
    def http_version(self) -> str:
        """What nginx speaks to the upstream."""
        return self.route.scope.setting("proxy_http_version").value or ""

    @property
    def framing(self) -> Framing | None:
        """How the upstream then frames its stream."""
        return self.upstream.http10 if self.http_version == "1.0" else self.upstream.http11

    @property
    def configured_on(self) -> bool:
        """``proxy_buffering`` as configured."""
        return self.route.scope.is_on("proxy_buffering")

    @property
    def ignores_xab(self) -> bool:
        """Whether proxy_ignore_headers shuts out X-Accel-Buffering."""
        return "x-accel-buffering" in self.route.scope.words("proxy_ignore_headers")

    @property
    def buffered(self) -> bool:
        """Whether the answer is buffered in the end. nginx takes yes and no in any case, and nothing else."""
        asked = (self.upstream.x_accel_buffering or "").lower()
        if asked in ("yes", "no") and not self.ignores_xab:
            return asked == "yes"
        return self.configured_on

    @property
    def content_type(self) -> str:
        """The answer's type as the filters of this hop see it; empty where proxy_hide_header takes it away."""
        return "" if hidden(self.route.scope, "content-type") else self.upstream.content_type

    @property
    def gzip_type(self) -> bool:
        """Whether gzip is on for the answer's type. gzip_min_length and no-transform save no stream (measured)."""
        scope = self.route.scope
        return scope.is_on("gzip") and takes(scope, "gzip_types", self.content_type) and not never_compressed(scope)

    @property
    def compressed(self) -> bool:
        """Whether nginx compresses the answer for a client that accepts it."""
        return self.gzip_type and self.upstream.content_encoding is None and not self.asked_plain

    @property
    def plain_h2(self) -> bool:
        """Whether HTTP/2 is spoken without TLS only."""
        found = [one for one in self.route.server.listeners if one.http2]
        return bool(found) and not any(one.tls for one in found)


def hop_of(
    servers: Servers,
    first: Route,
    upstream: Upstream,
    version: Version,
    depth: int = 0,
    *,
    accepts_gzip: bool = True,
    asked_in: str = "1.1",
) -> Hop:
    """The hop of a route, with those behind it where proxy_pass leads back into this configuration.

    ``accepts_gzip`` and ``asked_in``: whether the request has Accept-Encoding: gzip, and its version of HTTP.
    """
    target = first.target
    replicas = _replicas(servers, first)
    address = next((found for one in replicas if (found := servers.listening(*one)) is not None), None)
    count = max(1, len(replicas))
    too_old = asked_in == "1.0" and first.scope.setting("gzip_http_version").value != "1.0"
    asked_plain = too_old or not accepts_gzip
    if target is None or address is None or depth >= _MAX_HOPS:
        return Hop(first, upstream, version, replicas=count, asked_plain=asked_plain)
    host = _host_sent(first)
    notes: tuple[str, ...] = ()
    if host is None and len(servers.on(address)) > 1:
        notes = (f"assumed: the default server answers on {address} (the Host sent there is not known)",)
    inner = hop_of(
        servers,
        route(servers, servers.answering(address, host), target.path, version, host=host, address=address),
        upstream,
        version,
        depth + 1,
        accepts_gzip=_asks_for_gzip(first, accepts=accepts_gzip),
        asked_in=first.scope.setting("proxy_http_version").value or "1.1",
    )
    return Hop(first, _as_upstream(inner), version, inner, notes, count, asked_plain)


def _asks_for_gzip(outer: Route, *, accepts: bool) -> bool:
    """Whether the request that this nginx sends on accepts gzip."""
    for one in outer.scope.statements("proxy_set_header"):
        if len(one.args) == 2 and one.args[0].lower() == "accept-encoding":
            return accepts if "$" in one.args[1] else "gzip" in one.args[1].lower()
    return accepts and outer.scope.setting("proxy_pass_request_headers").value != "off"


def _replicas(servers: Servers, first: Route) -> list[tuple[str, str]]:
    """Host and port of what proxy_pass leads to: the servers of an upstream block that are in use, or the address."""
    if first.target is None:
        return []
    block = servers.upstream_block(first.target.host)
    if block is None:
        return [(first.target.host, first.target.port)]
    return [address_of(one.args[0]) for one in in_use(block) if "backup" not in one.args]


def _host_sent(first: Route) -> str | None:
    for one in first.scope.statements("proxy_set_header"):
        if one.args and one.args[0].lower() == "host" and len(one.args) == 2:
            value = one.args[1]
            if value != "$proxy_host":
                return None if "$" in value else value.partition(":")[0]
    return first.target.host if first.target else None


def _as_upstream(inner: Hop) -> Upstream:
    """What the nginx in front sees of this one: X-Accel-Buffering is taken out unless passed or added."""
    scope = inner.route.scope
    added = [
        one.args[1]
        for one in scope.statements("add_header")
        if len(one.args) >= 2 and one.args[0].lower() == "x-accel-buffering"
    ]
    passed = "x-accel-buffering" in scope.words("proxy_pass_header")
    # Its own fields come behind those it passes on; of several the last one that nginx knows counts.
    sent = [inner.upstream.x_accel_buffering] if passed and inner.upstream.x_accel_buffering else []
    sent += [one.lower() for one in added]
    header = next((one for one in reversed(sent) if one in ("yes", "no")), sent[-1] if sent else None)
    chunked: Framing = "chunked" if scope.is_on("chunked_transfer_encoding") else "close"
    # A length is passed on, unless something here changes it.
    sized = inner.framing == "length" and not inner.compressed and not changes_length(scope, inner.content_type)
    return replace(
        inner.upstream,
        name="nginx",
        http10="length" if sized else "close",
        http11="length" if sized else chunked,
        x_accel_buffering=header,
        content_encoding="gzip" if inner.compressed else inner.upstream.content_encoding,
        content_type=inner.content_type,
        http2=None,
        header_bytes=header_bytes(inner),
        passed_bytes=passed_bytes(inner),
        early_bytes=sends_early(inner),
    )


def predict(hop: Hop, kind: str) -> Outcome:
    """What a client of this kind sees; the worst of this hop and those behind it."""
    own = _own(hop, kind)
    if hop.inner is None or hop.route.target is None:
        return own
    behind = predict(hop.inner, "tls_http1" if hop.route.target.scheme == "https" else "http1")
    if _worse(own, behind) is own:
        return own
    if behind.empty and behind.streaming == "held":
        # Where the header waits here, it does so for an event that never comes.
        header = at_once(hop, kind).now
        behind = replace(behind, streaming="held" if header else "depends" if header is None else "fails")
    return replace(behind, why=f"in server {hop.inner.route.server.name}, behind this one: {behind.why}")


def _worse(one: Outcome, other: Outcome) -> Outcome:
    """The worse of two that act on the same answer, the first of equals: a hold does not make up for no answer."""

    def weight(outcome: Outcome) -> float:
        return _ORDER.index(outcome.streaming) + (_ORDER.index("held") if outcome.empty else 0)

    return one if weight(one) >= weight(other) or one.streaming == "fails" else other


def _own(hop: Hop, kind: str) -> Outcome:
    found = hop.route
    if found.failure is not None:
        return Outcome("fails", None, found.failure)
    outcome = _failing(hop, kind) or (_buffered(hop, kind) if hop.buffered else _unbuffered(hop, kind))
    small = _small_buffer(hop)
    if small is not None:
        outcome = _worse(outcome, small)
    if found.undecided and outcome.streaming != "fails":
        why = f"depends on {'; '.join(found.undecided)}. Else: {outcome.why}"
        return replace(outcome, streaming="depends", why=why)
    return outcome


def _failing(hop: Hop, kind: str) -> Outcome | None:
    if kind != "http1" and not hop.plain_h2 and size_bytes(hop.route.scope.setting("ssl_buffer_size").value) == 0:
        return Outcome("fails", None, "ssl_buffer_size 0: nginx never gets to write anything over TLS")
    method = hop.route.scope.setting("proxy_method").value
    if method is not None and method.upper() != "POST":
        return Outcome("fails", None, f"proxy_method turns POST into {method}")
    if hop.http_version == "2" and not hop.upstream.http2:
        if hop.upstream.http2 is None:
            return Outcome("depends", None, "depends on whether the upstream speaks HTTP/2")
        return Outcome("fails", None, f"proxy_http_version 2: {hop.upstream.name} speaks HTTP/1.1 only, 502")
    setting = hop.route.scope.setting("proxy_read_timeout")
    limit = seconds(setting.value)
    if limit is not None and limit < SHORT_SILENCE_S and not _tries_another(hop):
        why = f"proxy_read_timeout {setting.value} cuts the answer at a longer silence: queue, prefill or a tool call"
        return Outcome("fails", None, f"{why} ({setting.origin})")
    return None


def _tries_another(hop: Hop) -> bool:
    """Whether a POST that timed out goes to another replica: then the client gets an answer, if a second one."""
    scope = hop.route.scope
    words = scope.words("proxy_next_upstream")
    if not {"timeout", "non_idempotent"} <= words or not scope.is_on("proxy_request_buffering"):
        return False
    return hop.replicas > 1 and scope.setting("proxy_next_upstream_tries").value != "1"


def _small_buffer(hop: Hop) -> Outcome | None:
    """Where the header of the answer may not fit into the buffer that is to take it."""
    setting = hop.route.scope.setting("proxy_buffer_size")
    size = size_bytes(setting.value)
    if size is None or size >= max(hop.upstream.header_bytes, _AMPLE_HEADER_BYTES):
        return None
    what = f"proxy_buffer_size {setting.value} ({setting.origin})"
    if size < hop.upstream.header_bytes:
        return Outcome("fails", None, f"{what} is smaller than any answer's header: 502")
    return Outcome(
        "depends", None, f"depends on whether the header of the answer fits into {what}: else 502", empty=True
    )


def _unbuffered(hop: Hop, kind: str) -> Outcome:
    header = at_once(hop, kind)
    stopped = stops(hop, kind)
    if stopped is not None and stopped.verdict == HELD:
        return Outcome("held", None, f"unbuffered, but {stopped.why}", empty=True)
    if stopped is not None:
        return Outcome("depends", None, f"unbuffered; depends on {stopped.why}", empty=True)
    if header.now:
        return Outcome("streams", None, f"unbuffered: every read goes to the client at once{header.why}")
    if header.now is None:
        return Outcome("depends", None, f"unbuffered: every read goes on at once; depends on {header.why}")
    return Outcome("late_header", None, f"unbuffered: every read goes on at once, but {header.why}")


def _buffered(hop: Hop, kind: str) -> Outcome:
    outcome = _gathered(hop, kind)
    if outcome.streaming == "held" and outcome.mechanism != "upstream_not_chunked":
        return outcome
    limit = rate_limit(hop)
    if limit is None or (outcome.streaming == "held" and limit.verdict != HELD):
        return outcome
    if limit.verdict == HELD:
        return Outcome("held", None, limit.why)
    return Outcome("depends", outcome.mechanism, f"depends on {limit.why}. Else: {outcome.why}")


def _gathered(hop: Hop, kind: str) -> Outcome:
    """What the buffers of a buffered answer do."""
    if hop.compressed:
        why = "buffered and compressed: zlib gives nothing before it is full or the answer ends"
        return Outcome("held", "gzip", f"{why} (clients that send Accept-Encoding: gzip; most do)")
    if kind == "tls_http1":
        size = hop.route.scope.setting("ssl_buffer_size").value
        why = f"buffered: nothing is flushed, so the TLS layer gathers {size} before it writes, the header included"
        tls = Outcome("held", "tls_buffer", why)
    else:
        tls = None
    if hop.framing is None:
        why = (
            f"depends on how the upstream answers HTTP/1.0 (not known for {hop.upstream.name}): close-delimited is held"
        )
        return Outcome("depends", "upstream_not_chunked", f"{why}; settle it with --upstream framing=close or chunked")
    if hop.framing != "chunked":
        why = "buffered, and the upstream's answer is not chunked: nothing passes before a whole buffer is full"
        return Outcome("held", "upstream_not_chunked", f"{why} (proxy_buffers, 4k by default)")
    if tls is not None:
        return tls
    large = "events of 4 kB and more come one event late"
    header = at_once(hop, kind)
    if header.now:
        return Outcome("streams", None, f"buffered, but chunks go on as they are read{header.why}; {large}")
    if header.now is None:
        return Outcome("depends", None, f"buffered, but chunks go on as they are read; depends on {header.why}")
    return Outcome("late_header", None, f"buffered: chunks go on as they are read, but {header.why}, and {large}")
