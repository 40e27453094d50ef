"""Clients that have nothing of a stream: they did not ask for one, or read it all at once.

Rules here: what they wait for without need is the time from the first token to the last. An answer that was not
streamed does not show its first token: the engine's own times say when that was, else nothing does. A client is
said to read at once only where the tap before it sent the tokens apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tapproxy.core.record import Record
from tapproxy.diagnose import hop
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.facts import Fact, Named, median_ns, ms, percent
from tapproxy.diagnose.measures import e2e_ns, known, token_events
from tapproxy.diagnose.pairing import Pair, hold_ns
from tapproxy.diagnose.shapes import STREAMS_LEAST
from tapproxy.diagnose.view import View, usable_records

# Speaks of the traffic, not of a job beside it.
UNSTREAMED_SHARE: Final = 0.5
# An answer of a few tokens is as good whole.
LEAST_TOKENS: Final = 10
# Whom a whole answer in this time keeps waiting?
LEAST_E2E_NS: Final = 500_000_000
# The whole answer in one or two reads, though it was sent over this time at least.
READS_MOST: Final = 2
SENT_APART_NS: Final = 100_000_000
# Where clients answer for their requests: generation.
_GENERATES: Final = ("completions", "responses", "messages", "generate", "generate_stream", "chat", "predictions")


def not_streaming(view: View, evidence: Evidence) -> Named | None:
    """``stream`` is not asked for, or one read takes the whole answer."""
    return _unasked(view, evidence) or _at_once(view)


def _unasked(view: View, evidence: Evidence) -> Named | None:
    records = [record for record in usable_records(view.inner or view.outer or view.client) if _generates(record)]
    whole = [record for record in records if not record.stream and _is_long(record)]
    if len(whole) < max(STREAMS_LEAST, UNSTREAMED_SHARE * len(records)):
        return None
    ends = [e2e_ns(record) for record in whole]
    firsts, source = _first_tokens(whole, evidence)
    needless = [max(0, end - first) for end, first in zip(ends, firsts, strict=True)] if firsts else []
    tokens = known(record.usage.completion_tokens for record in whole)
    facts = [
        Fact("answers not asked for as a stream", percent(len(whole) / len(records)), "%", len(records), 50.0),
        Fact("the client's wait for the whole answer, P50", ms(median_ns(ends)), "ms", len(ends), ms(LEAST_E2E_NS)),
        Fact("tokens of such an answer, P50", median_ns(tokens), "tokens", len(tokens), LEAST_TOKENS),
        Fact(f"first token at the engine, P50 ({source})", ms(median_ns(firsts)), "ms", len(firsts)),
    ]
    return Named(
        facts,
        metric="ttft",
        confidence=0.9,
        severity="warning",
        effects_ns=needless,
        whole_ns=median_ns(ends),
        rejected=[("proxy.response_buffering", "nothing was streamed that a proxy could have held back")],
    )


def _first_tokens(records: Sequence[Record], evidence: Evidence) -> tuple[list[int], str]:
    told = [
        sum(known((record.engine.frontend_ns, record.engine.queue_ns, record.engine.prefill_ns)))
        if record.engine.prefill_ns is not None
        else None
        for record in records
    ]
    if all(first is not None for first in told):
        return known(told), "told by the engine"
    means = known(
        None if mean is None else round(mean * 1e9)
        for mean in (series.mean_of("ttft_s") for series in evidence.engines.values())
    )
    if means:
        return [round(sum(means) / len(means))] * len(records), "the mean of the engine's page"
    return [], "not known: ask the engine for its metrics, with --engine-metrics"


def _at_once(view: View) -> Named | None:
    pairs = [
        (chain.client, tap) for chain in view.usable if chain.client and (tap := chain.outer or chain.inner) is not None
    ]
    found = []
    for client, tap in pairs:
        if not _is_the_clients(client, view):
            continue
        stream = hop.stream(client, tap, hold_ns(Pair(client, tap, "chain")))
        if stream is None or len(stream.near_ns) < LEAST_TOKENS:
            continue
        apart_ns = stream.far_ns[-1] - stream.far_ns[0]
        if apart_ns >= SENT_APART_NS and len(set(stream.near_read)) <= READS_MOST:
            found.append(stream)
    if len(found) < max(STREAMS_LEAST, UNSTREAMED_SHARE * len(pairs)):
        return None
    holds = [stream.hold_ns[0] for stream in found]
    reads = [len(set(stream.near_read)) for stream in found]
    facts = [
        Fact("reads the client took a whole answer in, P50", median_ns(reads), "reads", len(reads), READS_MOST),
        Fact(
            "time over which the tap sent it to the client, P50",
            ms(median_ns([stream.far_ns[-1] - stream.far_ns[0] for stream in found])),
            "ms",
            len(found),
            ms(SENT_APART_NS),
        ),
        Fact("first token sent to first token read, P50", ms(median_ns(holds)), "ms", len(holds)),
        Fact("streams so", percent(len(found) / len(pairs)), "%", len(pairs), percent(UNSTREAMED_SHARE)),
    ]
    because = "the tap next to the client sent the tokens as they came; nothing stands between it and the client"
    return Named(
        facts,
        metric="ttft",
        confidence=0.8,
        severity="warning",
        effects_ns=holds,
        whole_ns=median_ns(known(client.events.arrived[0] for client, _ in pairs if client.events.arrived)),
        rejected=[("proxy.response_buffering", because)],
    )


def _is_the_clients(client: Record, view: View) -> bool:
    """Whether the client itself may be accused: where the inner tap is the one before it, a proxy may stand between.

    The kernel stamps what comes in; where it did, the bytes came so, whoever reads.
    """
    return bool(view.outer) and client.stamps.source != "kernel"


def _generates(record: Record) -> bool:
    return record.method == "POST" and (record.path or "").rstrip("/").rpartition("/")[2] in _GENERATES


def _is_long(record: Record) -> bool:
    tokens = record.usage.completion_tokens
    if token_events(record) or (tokens is not None and tokens < LEAST_TOKENS):
        return False
    return e2e_ns(record) >= LEAST_E2E_NS
