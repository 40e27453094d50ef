"""From what was measured to findings and a verdict.

Rules here: an error is what tokens wait for, or what cuts them; a warning costs something in some cases; the rest is
information and makes nothing ill. A claim has its evidence, its threshold and the rivals it rejected; where too little
came the kind of client is not measured, and a verdict that rests on nothing is ``not_measured``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tapproxy.core.findings import Finding, Severity
from tapproxy.probe import advice, plans, sides
from tapproxy.probe.asking import Clocks
from tapproxy.probe.mechanisms import name
from tapproxy.probe.naming import Mechanism, Named, fact
from tapproxy.probe.run import Measured
from tapproxy.probe.shape import HELD_P50_MS, Shape, sound

# A cut below the first is an error, below the second a warning: nginx's default of 60 s is for the operator to know.
_CUT_ERROR_S: Final = 29.0
_CUT_WARNING_S: Final = 59.0
_LEAST_CELLS: Final = 3
_CAUSES: Final = {
    Mechanism.QUANTA: ("proxy.response_buffering", "proxy"),
    Mechanism.FULL: ("proxy.response_buffering", "proxy"),
    Mechanism.TIMER: ("proxy.response_buffering", "proxy"),
    Mechanism.CORK: ("proxy.response_buffering", "proxy"),
    Mechanism.NEXT_EVENT: ("proxy.response_buffering", "proxy"),
    Mechanism.RATE_LIMIT: ("proxy.rate_limit", "proxy"),
    Mechanism.NAGLE: ("network.nagle", "network.downstream"),
    Mechanism.DELAYED_ACK: ("network.nagle", "network.downstream"),
}
_ORDER: Final = {"error": 0, "warning": 1, "info": 2}


@dataclass(slots=True)
class Client:
    """What one kind of client gets: streams, late_header, held or fails; None where that is not known."""

    kind: str
    streaming: str | None
    mechanism: str | None
    why: str


@dataclass(slots=True)
class Conclusion:
    """The verdict's parts."""

    clients: list[Client] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    causes: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unclear: bool = False

    @property
    def verdict(self) -> str:
        """healthy, degraded or not_measured."""
        if any(cause["severity"] == "error" for cause in self.causes):
            return "degraded"
        known = [one for one in self.clients if one.streaming is not None]
        return "healthy" if known and not self.unclear else "not_measured"


def conclude(measured: Sequence[Measured], clocks: Clocks) -> Conclusion:
    """Judges every kind of client, and what they have in common once."""
    out = Conclusion()
    if not clocks.common:
        out.warnings.append(f"no common clock ({clocks.why}): only gaps, order and round trips are claimed")
    for one in measured:
        _judge(one, out, clocks)
    _merge(out)
    out.causes.sort(key=lambda cause: (_ORDER[cause["severity"]], -(cause["effect_ms"]["p50"] or 0.0)))
    out.findings.sort(key=lambda finding: _ORDER[finding.severity])
    return out


def _judge(one: Measured, out: Conclusion, clocks: Clocks) -> None:
    family = _family(one)
    if one.trouble is not None:
        out.clients.append(Client(one.kind, None, None, one.trouble))
        return
    for cell, reason in one.void.items():
        out.warnings.append(f"{one.kind}: the stream {cell} is void: {reason}")
    plain = [one.shapes[cell.name] for cell in plans.IDENTITY if cell.name in one.shapes]
    failed = [cell for cell in one.cells if not cell.events and not cell.complete]
    if len(plain) < _LEAST_CELLS:
        what = "fails" if len(failed) >= _LEAST_CELLS else None
        why = f"{len(plain)} of {len(plans.IDENTITY)} streams say something, {_LEAST_CELLS} are needed"
        if what == "fails":
            why = f"{len(failed)} streams failed: {failed[0].fetched.error or f'status {failed[0].fetched.status}'}"
            out.unclear = True
        out.clients.append(Client(one.kind, what, None, why))
        return
    client = _held(one, plain, out, family)
    out.clients.append(client)
    _gzip(one, plain, out, family)
    _late_header(one, client, out, family)
    _close_delimited(one, plain, out, family)
    _silence(one, out, family)
    _aborts(one, out, family)
    _beside(one, out)


def _family(one: Measured) -> str | None:
    for cell in one.cells:
        if cell.fetched.status is not None:
            return advice.family(cell.header(b"server"), cell.header(b"via"))
    return None


def _held(one: Measured, plain: list[Shape], out: Conclusion, family: str | None) -> Client:
    held, streaming = [cell for cell in plain if cell.held], [cell for cell in plain if not cell.held]
    only_large = [cell.name for cell in held] == [plans.LARGE.name]
    if not held:
        worst = max(cell.p50_ms for cell in plain)
        why = (
            f"{len(plain)} streams of different size and rate: half of the events within {worst:.1f} ms of the fastest"
        )
        return Client(one.kind, "streams", None, why)
    named = name(held, streaming, sound(one.reused))
    if only_large and named.mechanism is Mechanism.NEXT_EVENT:
        _add(one, out, named, held, "warning", "buffering-on-latent", family)
        return Client(one.kind, "streams", None, f"small events stream; {named.text}")
    if named.mechanism is Mechanism.UNCLEAR or (len(held) < 2 and streaming):
        out.unclear = True
        out.warnings.append(
            f"{one.kind}: {len(held)} of {len(plain)} streams came late twice "
            f"(P50 up to {max(cell.p50_ms for cell in held):.0f} ms), in no pattern that names a mechanism: no claim"
        )
        return Client(one.kind, "held", None, "events come late, and nothing measured says by what")
    if named.network_trouble:
        out.unclear = True
        out.warnings.append(f"{one.kind}: {named.text}: no claim between proxy and network")
        return Client(one.kind, "held", None, named.text)
    by_acks = named.mechanism in (Mechanism.NAGLE, Mechanism.DELAYED_ACK)
    severity: Severity = "warning" if by_acks else "error"
    rule = "limit-rate-throttles" if named.mechanism is Mechanism.RATE_LIMIT else "buffering-on"
    rule = "tcp-nodelay-off" if by_acks else rule
    if by_acks:
        # Large events are no part of it; a look-ahead that holds them stands beside it.
        large = [cell for cell in held if cell.name == plans.LARGE.name]
        held = [cell for cell in held if cell.name != plans.LARGE.name]
        ahead = name(large, [cell for cell in plain if cell not in large and not cell.held]) if large else None
        if ahead is not None and ahead.mechanism is Mechanism.NEXT_EVENT:
            _add(one, out, ahead, large, "warning", "buffering-on-latent", family)
    _add(one, out, named, held, severity, rule, family)
    # What a distance adds is a finding; the proxy itself passes every event on.
    return Client(one.kind, "streams" if by_acks else "held", named.slug, named.text)


def _add(
    one: Measured, out: Conclusion, named: Named, held: list[Shape], severity: Severity, rule: str, family: str | None
) -> None:
    cause, stage = _CAUSES[named.mechanism]
    text = advice.of(advice.ADVICE[named.mechanism], family)
    freed = sound(one.extra.get(plans.UNBUFFERED.name))
    more: tuple[dict[str, Any], ...] = ()
    small = any(cell.name == plans.SMALL.name for cell in held)
    if freed is not None and small and cause == "proxy.response_buffering" and not freed.held:
        more = (fact("hold P50 with X-Accel-Buffering: no", freed.p50_ms, "ms", freed.events, HELD_P50_MS),)
        text += " The engine's X-Accel-Buffering: no lets it through as well (measured)."
    _cause(out, one.kind, cause, stage, severity, named, held, text, more)
    _finding(out, rule, severity, f"{one.kind}: {named.text}", _figures(held), text)


def _figures(shapes: Sequence[Shape]) -> str:
    return "; ".join(
        f"{one.name} ({one.event_bytes} B / {one.interval_ms:.0f} ms): hold P50 {one.p50_ms:.0f}, "
        f"max {one.max_ms:.0f} ms, {len(one.bursts)} bursts of {one.events} events"
        for one in shapes
    )


def _gzip(one: Measured, plain: list[Shape], out: Conclusion, family: str | None) -> None:
    packed = {cell.name: cell for cell in one.of(plans.GZIP) if cell.encoding is not None}
    if not packed:
        return
    identity = {cell.name for cell in plain if cell.held}
    # Each compressed stream beside the same one uncompressed.
    twins = {plans.GZIP_SMALL.name: plans.SMALL.name, plans.GZIP_MIDDLE.name: plans.MIDDLE.name}
    held = [
        one.shapes[packed_name]
        for packed_name, twin in twins.items()
        if packed_name in packed and one.shapes[packed_name].held and twin not in identity
    ]
    if not held and identity & set(twins.values()):
        text = "answers are compressed where the client allows it; since plain ones are held too, no more is claimed"
        _finding(out, "gzip-sse", "info", f"{one.kind}: {text}", ", ".join(packed), "")
        return
    if not held:
        worst = max(one.shapes[packed_name].p50_ms for packed_name in packed)
        text = "answers are compressed where the client allows it, and every event is flushed"
        _finding(out, "gzip-sse", "info", f"{one.kind}: {text}", f"hold P50 {worst:.1f} ms", "")
        return
    uncompressed = [cell for cell in plain if cell.name in twins.values()]
    text = "compressed answers are held, the same streams uncompressed are not"
    if len(packed) < len(plans.GZIP):
        text += " (events that begin an answer below the proxy's least size are not compressed)"
    named = Named(
        Mechanism.GZIP,
        "gzip",
        text,
        (
            *(fact(f"hold P50 of {cell.name}", cell.p50_ms, "ms", cell.events, HELD_P50_MS) for cell in held),
            *(fact(f"hold P50 of {cell.name}, not compressed", cell.p50_ms, "ms", cell.events, HELD_P50_MS)
              for cell in uncompressed),
        ),
        (("proxy.response_buffering", "the same streams with Accept-Encoding: identity come on time"),
         ("network.downstream", "it carried the uncompressed ones, which are larger")),
    )  # fmt: skip
    fix = advice.of(advice.COMPRESSION, family)
    _cause(out, one.kind, "proxy.compression", "proxy", "error", named, held, fix)
    _finding(out, "gzip-buffers-sse", "error", f"{one.kind}: {text}", _figures(held), fix)


def _late_header(one: Measured, client: Client, out: Conclusion, family: str | None) -> None:
    delay_ms = one.header_delay_ms()
    if client.streaming != "streams" or delay_ms is None or delay_ms < sides.HEADER_LATE_MS:
        return
    client.streaming = "late_header"
    client.why = f"the answer's head waits for its first event; {client.why}"
    text = "the answer's head is held until the first event: who waits for it sees nothing in queue and prefill"
    evidence = f"head and first event came {delay_ms:.0f} ms closer together than they were sent"
    _finding(out, "header-late", "warning", f"{one.kind}: {text}", evidence, advice.of(advice.BUFFERING, family))


def _close_delimited(one: Measured, plain: list[Shape], out: Conclusion, family: str | None) -> None:
    """An engine other than vLLM and SGLang behind a proxy that asks in HTTP/1.0."""
    shapes = [found for cell in plans.CLOSE if (found := sound(one.extra.get(cell.name))) is not None]
    held = [made for made in shapes if made.held]
    if len(held) < 2 or any(cell.held for cell in plain):
        return
    named = name(held, [made for made in shapes if not made.held])
    text = (
        "the proxy asks in HTTP/1.0. An engine that answers that without chunks (not vLLM, not SGLang) is held: "
        + named.text
    )
    _finding(out, "http10-upstream", "warning", f"{one.kind}: {text}", _figures(held),
             "nginx: `proxy_http_version 1.1;`, and " + advice.of(advice.BUFFERING, family))  # fmt: skip


def _silence(one: Measured, out: Conclusion, family: str | None) -> None:
    cuts = {place: found for place, found in one.silence.items() if found is not None and found["cut"]}
    if not cuts:
        return
    seconds = [found["after_s"] for found in cuts.values() if found["after_s"] is not None]
    waited = next(iter(cuts.values()))["waited_s"]
    shortest = min(seconds, default=waited)
    severity: Severity = "error" if shortest < _CUT_ERROR_S else "warning" if shortest < _CUT_WARNING_S else "info"
    places = {"quiet-first": "before the first event", "quiet-middle": "between events"}
    text = f"silence is cut after {shortest:.1f} s ({', '.join(places[place] for place in cuts)})"
    if any(found.get("silent") for found in cuts.values()):
        text += "; the client cannot tell it from a whole answer"
    fix = advice.of(advice.TIMEOUT, family)
    named = Named(
        Mechanism.READ_TIMEOUT,
        "read_timeout",
        text,
        tuple(fact(f"silence {places[place]} until the cut", found["after_s"] or waited, "s", 1, _CUT_ERROR_S)
              for place, found in cuts.items()),
        (("client", "it waited"), ("tap", "it was sending, and its connection was closed by the proxy")),
    )  # fmt: skip
    if severity != "info":
        _cause(out, one.kind, "proxy.timeout", "proxy", severity, named, [], fix)
    _finding(out, "read-timeout-too-short", severity, f"{one.kind}: {text}",
             "; ".join(f"{places[place]}: {found['client_saw']}" for place, found in cuts.items()), fix)  # fmt: skip


def _aborts(one: Measured, out: Conclusion, family: str | None) -> None:
    """A client that leaves, in the middle and before the first event: of the two the second costs a whole prefill."""
    found = [
        (place, aborted)
        for place, aborted in (("", one.abort), (" before the first event", one.abort_first))
        if aborted is not None and sides.deaf(aborted)
    ]
    if not found:
        return
    text = "; ".join(
        f"a client that leaves{place} is noticed upstream {_noticed(aborted, before_first=bool(place))}"
        for place, aborted in found
    )
    evidence = "; ".join(f"{aborted['events_sent_for_nobody']} events were sent for nobody" for _, aborted in found)
    # Apache always learns it by writing: no setting of its own is wrong.
    severity: Severity = "info" if family == "apache" and not sides.deaf(one.abort) else "warning"
    _finding(out, "ignore-client-abort", severity, f"{one.kind}: {text}", evidence, advice.of(advice.ABORT, family))


def _noticed(aborted: dict[str, Any], *, before_first: bool) -> str:
    if not aborted["reached"]:
        return "never"
    sent = aborted["events_sent_for_nobody"]
    if before_first and sent:
        return f"only when events are sent to it ({sent} of them): its queue and prefill go on for nobody"
    return f"after {aborted['after_ms']:.0f} ms"


def _beside(one: Measured, out: Conclusion) -> None:
    if one.upload is not None and one.upload["buffered"]:
        _finding(out, "request-buffering", "info", f"{one.kind}: request bodies are passed on when they are whole",
                 f"an upload of {one.upload['upload_ms']:.0f} ms came within {one.upload['tap_saw_it_take_ms']:.0f} ms",
                 "")  # fmt: skip
    if one.refused:
        statuses = " and ".join(str(status) for status in sorted(set(one.refused)))
        _finding(out, "limit-conn-streams", "warning",
                 f"{one.kind}: {len(one.refused)} of {len(one.cells)} streams at one time were refused ({statuses})",
                 f"the proxy answered {statuses} in the place of the tap; sent again one by one",
                 "Allow as many streams at a time as one client has. nginx: limit_conn, limit_req with burst and "
                 "nodelay; HAProxy: maxconn.")  # fmt: skip
    if one.reuse is not None and not one.reuse["upstream_reused"]:
        _finding(out, "upstream-no-keepalive", "info", f"{one.kind}: every request makes a new connection upstream",
                 f"{one.reuse['upstream_connections']} connections for {one.reuse['requests']} requests",
                 "Keep connections to the engine open. nginx: an upstream block with keepalive, HTTP/1.1, "
                 'Connection "".')  # fmt: skip
    if one.reuse is not None and not one.reuse["client_reused"]:
        _finding(out, "client-keepalive-off", "info", f"{one.kind}: the proxy closes its client's connection",
                 f"{one.reuse['requests']} requests one after the other", "")  # fmt: skip


def _cause(
    out: Conclusion,
    kind: str,
    cause: str,
    stage: str,
    severity: Severity,
    named: Named,
    held: Sequence[Shape],
    text: str,
    more: Sequence[dict[str, Any]] = (),
) -> None:
    p50 = max((one.p50_ms for one in held), default=None)
    p95 = max((one.p95_ms for one in held), default=None)
    out.causes.append(
        {
            "cause": cause,
            "stage": stage,
            "severity": severity,
            "mechanism": named.slug,
            "summary": named.text,
            "clients": [kind],
            # What is left: that something else acts in exactly this pattern in every stream, twice. A judgement.
            "confidence": 0.95 if max(len(held), len(named.evidence)) >= 3 else 0.9,
            "metric": "hold" if held else "silence",
            "effect_ms": {"p50": None if p50 is None else round(p50, 3), "p95": None if p95 is None else round(p95, 3)},
            "share": None,
            "evidence": [*named.evidence, *more],
            "rejected": [{"cause": rival, "because": because} for rival, because in named.rejected],
            "advice": text,
            "fix": None,
        }
    )


def _finding(out: Conclusion, rule: str, severity: Severity, summary: str, evidence: str, text: str) -> None:
    out.findings.append(Finding(rule, severity, summary, evidence, text))


def _merge(out: Conclusion) -> None:
    """One cause for clients that share it."""
    merged: dict[tuple[str, str, str], dict[str, Any]] = {}
    for cause in out.causes:
        key = (cause["cause"], cause["mechanism"], cause["severity"])
        first = merged.setdefault(key, cause)
        if first is not cause:
            first["clients"] += cause["clients"]
            first["evidence"] += [
                item | {"what": f"{cause['clients'][0]}: {item['what']}"} for item in cause["evidence"]
            ]
    out.causes = list(merged.values())
