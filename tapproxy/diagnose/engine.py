"""Rules for the engine, as the tap next to it sees its answers.

Rules here: only a vantage with nothing before the engine may accuse it; a stream is judged by how its tokens came
to that vantage, before any proxy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from tapproxy.core.metrics import icl_ns, tokens_per_event
from tapproxy.core.record import Ended, Record
from tapproxy.diagnose.facts import Fact, Named, median_ns, ms, percent
from tapproxy.diagnose.measures import e2e_ns, events_per_read, token_events
from tapproxy.diagnose.view import View, outcome, standing

# latency_tree, engine.synthetic_stream: nine events of ten in the last twentieth of the answer's time …
LAST_EVENTS_SHARE: Final = 0.9
LAST_TIME_SHARE: Final = 0.05
# … and faster than any engine decodes: after a long prefill a short answer lies there as well.
DECODE_LEAST_NS: Final = 1_000_000
# An answer this quick is there at once, streamed or not: an API process that is busy for a moment sends it in one go.
NOTICED_NS: Final = 100_000_000
# Fewer tokens make no stream.
LEAST_TOKENS: Final = 5
# latency_tree, engine.bundling: tokens per event, at an even pace (the slow gaps within three times the median).
BUNDLE_TOKENS: Final = 1.5
EVEN_PACE: Final = 3.0
# A bundle is of a set size; events of speculation are not.
ONE_SIZE_SHARE: Final = 0.7
# Below this distance several writes may be read at once by chance.
BUNDLE_GAP_NS: Final = 5_000_000
# A rule on streams speaks of half of them or more.
STREAMS_SHARE: Final = 0.5
# latency_tree, engine.errors.
ERRORS_SHARE: Final = 0.01
ERRORS_LEAST: Final = 2


def standings(records: Iterable[Record]) -> Counter[str]:
    """How many records stand how. A status below 500 is the request's own fault."""
    return Counter(_blamed(record) for record in records)


def answers(view: View) -> list[Record]:
    """Everything that the vantage next to the engine may judge errors by."""
    records = view.inner or ((view.outer or view.client) if view.direct else ())
    return [record for record in records if _blamed(record) not in ("void", "cut")]


def errors(view: View) -> Named | None:
    """Error statuses, error events and broken answers of the engine."""
    records = answers(view)
    failed = Counter(_blamed(record) for record in records)
    total = len(records) - failed["ok"]
    if total < max(ERRORS_LEAST, ERRORS_SHARE * len(records)):
        return None
    facts = [Fact("answers that failed", percent(total / len(records)), "%", len(records), percent(ERRORS_SHARE))]
    facts += [Fact(name, count, "answers", len(records)) for name, count in failed.most_common() if name != "ok"]
    how = Counter(_status_of(record) for record in records if _blamed(record) == "failed: status")
    facts += [Fact(name, count, "answers", len(records)) for name, count in how.most_common()]
    stages = Counter(_failed_in(record) for record in records if _blamed(record) != "ok")
    return Named(facts, None, 0.9, stage=stages.most_common(1)[0][0])


def _status_of(record: Record) -> str:
    """Whose status it is: the engine's, or the tap's own in place of an answer that never came."""
    if record.ended == Ended.UPSTREAM_UNREACHABLE:
        return "of these: no connection to the engine"
    if record.ended == Ended.UPSTREAM_MALFORMED:
        return "of these: connection broken, or no HTTP, before any answer"
    return f"of these: status {record.status}"


def _failed_in(record: Record) -> str:
    """How far it had come: it had tokens; it had a good head; or not even that."""
    if token_events(record):
        return "engine.decode"
    return "engine.prefill" if record.status is not None and record.status < 400 else "engine.queue"


def synthetic_stream(view: View) -> Named | None:
    """All tokens at the end, at once, although the request asked for a stream."""
    streams = [
        record
        for record in view.engine_side
        if len(token_events(record)) >= LEAST_TOKENS and e2e_ns(record) >= NOTICED_NS
    ]
    synthetic = [record for record in streams if _all_at_the_end(record)]
    if not synthetic or len(synthetic) < STREAMS_SHARE * len(streams):
        return None
    gaps = [gap for record in synthetic for gap in icl_ns(record)]
    facts = [
        Fact("answers whose tokens came all at the end", percent(len(synthetic) / len(streams)), "%", len(streams), 50),
        Fact("gap between tokens, P50", ms(median_ns(gaps)), "ms", len(gaps), ms(DECODE_LEAST_NS)),
        Fact("answer's time, P50", ms(median_ns([e2e_ns(record) for record in synthetic])), "ms", len(synthetic)),
    ]
    decodes = [record.engine.decode_ns for record in synthetic if record.engine.decode_ns is not None]
    because = "the tap next to the engine already saw the tokens come at once, before any proxy"
    return Named(
        facts,
        metric="ttft",
        confidence=0.8,
        # What streaming would have saved is the time of generation, where the engine tells it.
        effects_ns=decodes if len(decodes) == len(synthetic) else (),
        whole_ns=median_ns([e2e_ns(record) for record in synthetic]),
        rejected=[("proxy.response_buffering", because)],
    )


def bundling(view: View, *, drafts: bool = False) -> Named | None:
    """Several tokens at a time, at an even pace. ``drafts``: the engine speculates, and its steps give several."""
    if drafts:
        return None
    streams = [record for record in view.engine_side if len(token_events(record)) >= LEAST_TOKENS]
    bundled = [record for record in streams if _is_bundled(record)]
    if not bundled or len(bundled) < STREAMS_SHARE * len(streams):
        return None
    gaps = [gap for record in bundled for gap in read_gaps_ns(record)]
    per_event = median_ns([round(1000 * (tokens_per_event(record) or 1)) for record in bundled]) or 1000
    per_read = events_per_read(bundled)
    together = per_event / 1000 * per_read
    facts = [
        Fact("tokens an event, P50", per_event / 1000, "", len(bundled)),
        Fact("token events a read", per_read, "", len(bundled)),
        Fact("tokens at a time", round(together, 2), "", len(bundled), BUNDLE_TOKENS),
        Fact("between two such times, P50", ms(median_ns(gaps)), "ms", len(gaps), ms(BUNDLE_GAP_NS)),
    ]
    because = "the tap next to the engine already saw the tokens come together, before any proxy"
    middles = [median_ns(read_gaps_ns(record)) or 0 for record in bundled]
    return Named(
        facts,
        metric="icl",
        confidence=0.7,
        severity="warning",
        effects_ns=[round(gap * (1 - 1 / together)) for gap in middles],
        whole_ns=median_ns(middles),
        rejected=[("proxy.response_buffering", because)],
    )


def read_gaps_ns(record: Record) -> list[int]:
    """The gaps between token events that came in different reads."""
    events = record.events
    tokens = token_events(record)
    return [events.arrived[b] - events.arrived[a] for a, b in pairwise(tokens) if events.read[a] != events.read[b]]


def _is_bundled(record: Record) -> bool:
    gaps = sorted(read_gaps_ns(record))
    if len(gaps) < 2 or gaps[len(gaps) // 2] < BUNDLE_GAP_NS:
        return False
    even = gaps[9 * len(gaps) // 10] <= EVEN_PACE * gaps[len(gaps) // 2]
    return (
        even and _is_of_one_size(record) and (tokens_per_event(record) or 1) * events_per_read([record]) > BUNDLE_TOKENS
    )


def _is_of_one_size(record: Record) -> bool:
    """Whether most events hold the same number of tokens, the first and last aside; speculation gives now one, now
    more. Where the counts are not told: not contradicted."""
    counts = [record.events.tokens[index] for index in token_events(record)[1:-1]]
    known = Counter(count for count in counts if count is not None)
    return not known or known.most_common(1)[0][1] >= ONE_SIZE_SHARE * known.total()


def _all_at_the_end(record: Record) -> bool:
    tokens = token_events(record)
    last_ns = record.events.arrived[tokens[-1]]
    late = sum(record.events.arrived[index] >= last_ns * (1 - LAST_TIME_SHARE) for index in tokens)
    return late >= LAST_EVENTS_SHARE * len(tokens) and (median_ns(icl_ns(record)) or 0) < DECODE_LEAST_NS


def _blamed(record: Record) -> str:
    word = standing(record)
    # Who reads late sees the same answers fail; only its own limits it may have missed itself.
    if word == "void" and (ended := outcome(record)) != "failed: timeout":
        word = ended
    if word == "failed: status" and record.status is not None and record.status < 500:
        return "cut"
    return word
