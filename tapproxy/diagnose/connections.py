"""What opening connections costs: names looked up, TLS handshakes, and connections that a proxy could have kept.

Rules here:
* A handshake or a look-up is slow by itself, each time it is paid, round trips taken out; whoever pays often though
  each is quick has a fault of reuse.
* A connection was to be had for a request only where an earlier one had just become free: more requests at once need
  more connections, and idle ones expire on purpose. Clients that open one for each request (a benchmark's choice)
  are no proxy's fault; where a tap opens one for each of theirs, what that costs is named there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tapproxy.core.metrics import ttft_ns
from tapproxy.core.record import Record
from tapproxy.diagnose.facts import Fact, Named, Severity, median_ns, ms, percent, text_ms
from tapproxy.diagnose.links import Links
from tapproxy.diagnose.measures import known
from tapproxy.diagnose.pairing import Pair, request_hold_ns
from tapproxy.diagnose.shapes import STREAMS_LEAST
from tapproxy.diagnose.view import View, standing, usable_records

# A resolver near by answers in 1 ms from its cache and within 20 where it has to ask.
SLOW_DNS_NS: Final = 20_000_000
# Two flights (TLS 1.2) and some ms of computing; round trips are taken out before.
SLOW_TLS_NS: Final = 20_000_000
TLS_FLIGHTS: Final = 2
# Paid by one request in twenty, it is in every P95.
PAID_SHARE: Final = 0.05
# latency_tree, proxy.connection_reuse: paid on more than half of the requests …
MISSED_SHARE: Final = 0.5
# … for which a connection had become free within this time: pools keep theirs for 4 s and more (uvicorn: 5).
KEPT_NS: Final = 2_000_000_000
# As for tap.overhead: below this nobody gains by removing it.
COST_NS: Final = 2_000_000
COST_SHARE: Final = 0.05
# A request that was written in one go; of a long upload the hold is not the connection's.
SMALL_BYTES: Final = 64 * 1024
# 502 after idle: a connection that the other end had closed, or somebody between had forgotten.
IDLE_NS: Final = 1_000_000_000
STALE_SHARE: Final = 0.8
QUICK_NS: Final = 1_000_000_000

_MIRRORED: Final = "mirror-connections"
_MIRRORED_ADVICE: Final = (
    "Let clients keep their connections: one client object for all requests (httpx.Client, OpenAI()), not one each, "
    "and see that the proxy does not close them (nginx: `keepalive_timeout 75s;`, `keepalive_requests`). Each request "
    "then saves the round trips of connecting and of the handshake; idle connections cost some memory at both ends. "
    "Verify: of the requests at the tap before the proxy, nearly all come over connections that carried others before."
)


def slow_dns(view: View) -> Named | None:
    """Looking the name up is slow, on whichever side pays most for it."""
    found = [
        named
        for stage, records in _sides(view)
        if (named := _slow(records, stage, "dns", SLOW_DNS_NS, "looking the name up")) is not None
    ]
    return max(found, key=lambda named: median_ns(named.effects_ns) or 0, default=None)


def slow_tls(view: View) -> Named | None:
    """The handshake is slow each time it is paid."""
    found = [
        named
        for _, records in _sides(view)
        if (named := _slow(records, None, "tls", SLOW_TLS_NS, "TLS handshake")) is not None
    ]
    return max(found, key=lambda named: median_ns(named.effects_ns) or 0, default=None)


def _sides(view: View) -> Iterator[tuple[str, Sequence[Record]]]:
    yield "network.downstream", view.client
    yield "network.upstream" if view.direct else "network.downstream", view.outer
    yield "network.upstream", view.inner


def _slow(records: Sequence[Record], stage: str | None, part: str, slow_ns: int, what: str) -> Named | None:
    usable = usable_records(records)
    payers = [record for record in usable if getattr(record.upstream, part) is not None]
    if len(payers) < max(STREAMS_LEAST, PAID_SHARE * len(usable)):
        return None
    times: list[int] = [getattr(record.upstream, part) for record in payers]
    trips = [_trip_ns(record) for record in payers] if part == "tls" else [0] * len(payers)
    own = [time - TLS_FLIGHTS * trip for time, trip in zip(times, trips, strict=True)]
    if (median_ns(own) or 0) < slow_ns:
        return None
    where, trip = payers[0].tap, median_ns(trips)
    facts = [
        Fact(f"{what}, P50 ({where})", ms(median_ns(times)), "ms", len(times)),
        Fact("the same without its round trips, P50", ms(median_ns(own)), "ms", len(own), ms(slow_ns)),
        Fact("requests that paid it", percent(len(payers) / len(usable)), "%", len(usable), percent(PAID_SHARE)),
    ]
    rejected = []
    if part == "tls":
        because = f"a round trip takes {text_ms(trip)}; a handshake waits for {TLS_FLIGHTS} at most"
        rejected = [(stage or "network.downstream", because)]
        often = f"it is slow each time, {text_ms(median_ns(times))}; kept connections would only hide it"
        rejected.append(("proxy.connection_reuse", often))
    # A load client's TTFT begins when the request is written, after the connection is there.
    counted = payers[0].upstream.wanted is not None and payers[0].upstream.wanted >= 0
    return Named(
        facts,
        metric="ttft" if counted else "connect",
        confidence=0.9,
        severity="warning",
        effects_ns=times,
        whole_ns=median_ns(known(map(ttft_ns, payers))) if counted else None,
        rejected=rejected,
        stage=stage,
    )


def _trip_ns(record: Record) -> int:
    """A TCP handshake is one round trip; the least that the socket saw, where it is less."""
    seen = known((record.upstream.connect, record.upstream.min_rtt_ns))
    return min(seen, default=0)


@dataclass(frozen=True, slots=True)
class Reuse:
    """One hop: for how many requests a connection was free, who got a new one all the same, and what that cost."""

    where: str
    chances: int
    missed: list[Record]
    costs_ns: list[int]
    mirrored: bool = False


def missed_reuse(view: View, links: Links) -> Named | None:
    """A connection paid for on more than half of the requests that could have had one."""
    slow = slow_tls(view) is not None
    both = (_behind(view, links), _before(view, without_tls=slow))
    found = [reuse for reuse in both if reuse is not None and reuse.costs_ns]
    guilty = [each for each in found if len(each.missed) >= max(STREAMS_LEAST, MISSED_SHARE * each.chances)]
    if not guilty:
        return stale_reuse(view)
    worst = max(guilty, key=lambda each: median_ns(each.costs_ns) or 0)
    cost = median_ns(worst.costs_ns)
    whole = median_ns(known(ttft_ns(chain.seen()[0]) for chain in view.usable))
    limit_ns = max(COST_NS, COST_SHARE * (whole or 0))
    severity: Severity = "warning" if cost is not None and cost >= limit_ns else "info"
    if worst.mirrored and severity == "info":
        return None
    facts = [
        Fact(
            f"new connections though one was free, {worst.where}",
            percent(len(worst.missed) / worst.chances),
            "%",
            worst.chances,
            percent(MISSED_SHARE),
        ),
        Fact("what a new one costs a request, P50", ms(cost), "ms", len(worst.costs_ns), ms(limit_ns)),
    ]
    closing = [record.request.keep_alive for record in worst.missed if record.request.keep_alive is not None]
    if closing:
        facts.append(
            Fact("of these requests, told to close after one", percent(closing.count(False) / len(closing)), "%")
        )
    text = f"opening one takes {text_ms(cost)}: no single handshake is slow, but it is paid again and again"
    return Named(
        facts,
        metric="ttft",
        confidence=0.85,
        severity=severity,
        effects_ns=worst.costs_ns,
        whole_ns=whole,
        rejected=[] if slow else [("tls.handshake", text)],
        advice=_MIRRORED_ADVICE if worst.mirrored else None,
    )


def _behind(view: View, links: Links) -> Reuse | None:
    """Between the proxy and the tap next to the engine."""
    known_counts = [record for record in view.inner if record.request.connection_requests is not None]
    chosen = [record for record in known_counts if _is_proxied(record, view)]
    if not chosen:
        return None
    missed, chances = _missed([(record, record.request.connection_requests == 1) for record in chosen])
    if chances < STREAMS_LEAST:
        return None
    near_of = {id(chain.inner): chain.outer or chain.client for chain in view.usable if chain.inner is not None}
    holds = [
        (record, hold) for record in chosen if (hold := _request_hold_ns(near_of.get(id(record)), record)) is not None
    ]
    kept = [hold for record, hold in holds if record.request.connection_requests != 1]
    trips = (links.near_request_ns or 0) + (links.far_request_ns or 0)
    usual = (median_ns(kept) or 0) if len(kept) >= STREAMS_LEAST else trips
    fresh = {id(record) for record in missed}
    costs = [max(0, hold - usual) + _mirrored_ns(record) for record, hold in holds if id(record) in fresh]
    if not near_of:
        # Nobody before the proxy to measure from: a connection takes a round trip at least.
        costs = [trip + _mirrored_ns(record) for record in missed if (trip := record.downstream.min_rtt_ns) is not None]
    return Reuse("between the proxy and the tap behind it", chances, missed, costs)


def _is_proxied(record: Record, view: View) -> bool:
    """Whether the connection is certainly a proxy's, and not its client's own."""
    return bool(view.outer) or bool(record.request.proxy_marks)


def _before(view: View, *, without_tls: bool) -> Reuse | None:
    """Between the outer tap, which keeps what it may keep, and the proxy.

    ``without_tls``: the handshakes are slow by themselves, and counted there.
    """
    if view.direct:
        return None
    chosen = [
        record
        for record in view.outer
        if record.upstream.reused is not None and record.request.keep_alive is not False and standing(record) == "ok"
    ]
    missed, chances = _missed([(record, record.upstream.reused is False) for record in chosen])
    if chances < STREAMS_LEAST:
        return None
    costs = [
        record.upstream.acquired - record.upstream.wanted - ((without_tls and record.upstream.tls) or 0)
        for record in missed
        if record.upstream.acquired is not None and record.upstream.wanted is not None
    ]
    mirrored = any(_MIRRORED in record.altered for record in missed)
    return Reuse("between the outer tap and the proxy", chances, missed, costs, mirrored)


def _missed(requests: Sequence[tuple[Record, bool]]) -> tuple[list[Record], int]:
    """Those that got a new connection (True) though an earlier request's had become free; and for how many one had."""
    free: deque[int] = deque()
    busy: list[int] = []
    missed, chances = [], 0
    for record, is_new in sorted(requests, key=lambda each: each[0].t0_mono_ns):
        now_ns = record.t0_mono_ns
        free.extend(sorted(end for end in busy if end < now_ns))
        busy = [end for end in busy if end >= now_ns]
        while free and free[0] < now_ns - KEPT_NS:
            free.popleft()
        if free:
            free.pop()
            chances += 1
            if is_new:
                missed.append(record)
        busy.append(now_ns + (record.downstream.end or 0))
    return missed, chances


def _request_hold_ns(near: Record | None, far: Record) -> int | None:
    """The nearer side's first byte written to the farther one's first byte read."""
    if near is None or near.request.bytes > SMALL_BYTES:
        return None
    return request_hold_ns(Pair(near, far, "chain")).after_start_ns


def _mirrored_ns(record: Record) -> int:
    """Where the tap opens one of its own for each of the proxy's: what that took, as the engine's would without it."""
    part = record.upstream
    if _MIRRORED not in record.altered or part.acquired is None or part.wanted is None:
        return 0
    return part.acquired - part.wanted


def stale_reuse(view: View) -> Named | None:
    """502 after idle: the proxy used a connection that had ended, and did not dare to send the request again."""
    near = sorted(view.outer or view.client, key=lambda record: record.t0_mono_ns)
    arrived = {id(chain.outer or chain.client) for chain in view.chains if chain.inner is not None}
    busy_until: int | None = None
    rows: list[tuple[bool, bool, int]] = []
    for record in near:
        pause = None if busy_until is None else record.t0_mono_ns - busy_until
        end_ns = record.t0_mono_ns + (record.downstream.end or record.upstream.end or 0)
        busy_until = end_ns if busy_until is None else max(busy_until, end_ns)
        if pause is not None:
            failed = record.status == 502 and id(record) not in arrived
            rows.append((pause >= IDLE_NS, failed and end_ns - record.t0_mono_ns < QUICK_NS, pause))
    failures = [pause for _, failed, pause in rows if failed]
    after_idle = [pause for idle, failed, pause in rows if failed and idle]
    went_on = [failed for idle, failed, _ in rows if not idle]
    if not view.inner or len(after_idle) < STREAMS_LEAST or len(after_idle) < STALE_SHARE * len(failures):
        return None
    # Without requests that followed at once and went well, a proxy that is down looks the same.
    if went_on.count(False) < len(after_idle):
        return None
    facts = [
        Fact("requests that failed with 502 and never came through", len(failures), "requests", len(near)),
        Fact(
            "of them after a pause", percent(len(after_idle) / len(failures)), "%", len(failures), percent(STALE_SHARE)
        ),
        Fact("length of that pause, least", ms(min(after_idle)), "ms", len(after_idle), ms(IDLE_NS)),
        Fact("failed among those without a pause", went_on.count(True), "requests", len(went_on)),
    ]
    return Named(
        facts,
        metric=None,
        confidence=0.75,
        rejected=[("engine.errors", "none of them reached the tap next to the engine")],
        advice="The proxy sends a request over a connection that its other end has closed meanwhile, and a POST is not "
        "sent again. Keep idle connections for a shorter time than the engine does (nginx: `keepalive_timeout 4s;` in "
        "the upstream block; uvicorn closes after 5 s, vLLM: VLLM_HTTP_TIMEOUT_KEEP_ALIVE), or raise the engine's. It "
        "costs a new connection after each pause. Verify: a request after a pause of that length gets its answer.",
    )
