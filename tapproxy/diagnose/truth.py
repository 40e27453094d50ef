"""Which span is of which record, and what it adds to what the response itself told of the engine's stages.

Rules here:
* A join is certain or it is not made. Ids count over all records of a tap and all spans, never over what is left of
  them; a key that several share joins only where token counts and durations leave one record to one span.
* A span joins at most one record of each tap, and a record at most one span.
* What the response told is kept; a span fills what it left open. Where both tell a stage and differ, that is counted.
* Durations only: the engine's clock is nobody's here, so no time point of a span is compared with a record's.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from tapproxy.core.record import Ended, Record
from tapproxy.core.sample import Sample

# An engine's own end of a request may lie a moment after its last byte left; clocks of two hosts differ by far less.
DURATION_SLACK_NS: Final = 250_000_000
# Both are taken from the same stamps inside the engine: what differs by more is another request's, or another meaning.
DISAGREE_NS: Final = 2_000_000
DISAGREE_SHARE: Final = 0.05
# TTFT is taken on the API process's wall clock, queue and prefill on the core's monotonic one: so far below zero is
# rounding, further is no frontend time at all.
FRONTEND_SLACK_NS: Final = 1_000_000

# One of n answers to a request is ``0_chatcmpl-…``; prompts of one request are ``cmpl-…-0``; versions that make ids
# unique within the engine append eight hex digits. In front stands the route's own word.
_CHILD: Final = re.compile(r"\A\d+_(?=.)")
_SUFFIX: Final = re.compile(r"(?<=.)-(?:\d{1,4}|[0-9a-f]{8})\Z")
_ROUTE: Final = re.compile(r"\A[a-z]+[-_](?=.)")
_STAGES: Final = (("queue_ns", "queue_ns"), ("prefill_ns", "prefill_ns"), ("decode_ns", "decode_ns"))
SOURCE: Final = "span"


@dataclass(frozen=True, slots=True)
class Enriched:
    """``records``: as given, in order; those that a span added to are copies.

    Of the spans: ``joined`` to a record of some tap, ``ambiguous`` (several could be meant, so none is), ``unmatched``
    (no record bears their ids), ``repeated`` (sent twice by their exporter). ``by``: records by the key that joined
    them. ``filled``: records that gained something. ``disagreeing``: records whose response told another time.
    """

    records: list[Record]
    joined: int = 0
    ambiguous: int = 0
    unmatched: int = 0
    repeated: int = 0
    filled: int = 0
    disagreeing: int = 0
    by: dict[str, int] = field(default_factory=dict)

    def warnings(self) -> list[str]:
        """What a reader of the verdict has to know, one sentence each."""
        told = []
        if self.ambiguous:
            told.append(f"{self.ambiguous} spans were left out: several requests or spans share their ids")
        if self.disagreeing:
            told.append(
                f"{self.disagreeing} requests: their span and their response differ by more than "
                f"{DISAGREE_NS / 1e6:g} ms and {DISAGREE_SHARE:.0%}; the response's times are used"
            )
        return told


def enrich(records: Sequence[Record], spans: Iterable[Sample]) -> Enriched:
    """Joins spans (samples of kind span) to records of any number of taps, and fills the records' ``engine``."""
    every = list(spans)
    unique = _unique(every)
    taps: dict[str, list[int]] = defaultdict(list)
    for index, record in enumerate(records):
        taps[record.tap].append(index)
    found, by = list(records), Counter[str]()
    joined, doubtful = set[int](), set[int]()
    filled = disagreeing = 0
    for indexes in taps.values():
        pairs, unsure = _join([records[index] for index in indexes], unique)
        doubtful |= unsure
        for place, (number, key) in pairs.items():
            index = indexes[place]
            joined.add(number)
            by[key] += 1
            found[index] = made = _filled(records[index], unique[number])
            filled += made is not records[index]
            disagreeing += _disagrees(records[index], unique[number])
    doubtful -= joined
    return Enriched(
        found,
        joined=len(joined),
        ambiguous=len(doubtful),
        unmatched=len(unique) - len(joined) - len(doubtful),
        repeated=len(every) - len(unique),
        filled=filled,
        disagreeing=disagreeing,
        by=dict(by),
    )


# -- joining


def _unique(spans: Iterable[Sample]) -> list[Sample]:
    """An exporter that had no answer sends its batch again."""
    seen: set[tuple[str, str]] = set()
    out = []
    for span in spans:
        key = (span.facts.get("trace_id", ""), span.facts.get("span_id", ""))
        if key[1] and key in seen:
            continue
        seen.add(key)
        out.append(span)
    return out


def _join(records: Sequence[Record], spans: Sequence[Sample]) -> tuple[dict[int, tuple[int, str]], set[int]]:
    """Record's place → (span's number, key); and the spans that several records or spans compete for."""
    pairs: dict[int, tuple[int, str]] = {}
    taken: set[int] = set()
    doubtful: set[int] = set()
    for name, of_record, of_span in _KEYS:
        places, numbers = _grouped(records, of_record), _grouped(spans, of_span)
        for value in places.keys() & numbers.keys():
            group = _certain([(p, records[p]) for p in places[value]], [(n, spans[n]) for n in numbers[value]], name)
            for place, number in group.items():
                if place not in pairs and number not in taken:
                    pairs[place] = (number, name)
                    taken.add(number)
            if len(places[value]) > 1 or len(numbers[value]) > 1:
                doubtful.update(numbers[value])
    return pairs, doubtful - taken


def _certain(places: list[tuple[int, Record]], numbers: list[tuple[int, Sample]], key: str) -> dict[int, int]:
    """Of those that share a key, the record and span that only each other can be meant by."""
    if key == "response_id" and len(places) == len(numbers) == 1:
        return {places[0][0]: numbers[0][0]}
    if len(places) * len(numbers) > _MOST_COMBINATIONS:
        return {}
    weak = key == "trace_id"
    of_place: dict[int, list[int]] = defaultdict(list)
    of_number: dict[int, list[int]] = defaultdict(list)
    for place, record in places:
        for number, span in numbers:
            if _possible(record, span, weak=weak):
                of_place[place].append(number)
                of_number[number].append(place)
    return {place: found[0] for place, found in of_place.items() if len(found) == 1 == len(of_number[found[0]])}


# One id on thousands of records and spans is a constant, and tells nothing.
_MOST_COMBINATIONS: Final = 10_000


def _possible(record: Record, span: Sample, *, weak: bool) -> bool:
    """Whether nothing that both tell contradicts; a weak key must not join two requests that bear other ids."""
    counts = [
        (ours, span.values.get(theirs))
        for ours, theirs in (
            (record.usage.prompt_tokens, "usage_prompt_tokens"),
            (record.usage.completion_tokens, "usage_completion_tokens"),
        )
        if ours is not None and theirs in span.values
    ]
    if any(ours != theirs for ours, theirs in counts):
        return False
    e2e_ns, end_ns = span.values.get("e2e_ns"), record.upstream.end
    end_ns = end_ns if record.ended == Ended.COMPLETE else None
    if e2e_ns is not None and end_ns is not None and e2e_ns > end_ns + DURATION_SLACK_NS:
        return False
    # One trace may hold many requests, and one of them may have left no record, another no span.
    other = bool(record.response_id and span.facts.get("request_id"))
    return not (weak and other and len(counts) < 2)


def _grouped(items: Sequence[object], keys: Callable[..., Iterable[str]]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for index, item in enumerate(items):
        for value in dict.fromkeys(keys(item)):
            groups[value].append(index)
    return groups


def _present(value: str | None) -> tuple[str, ...]:
    return (value,) if value else ()


def _span_id(span: Sample) -> tuple[str, ...]:
    return _present(span.facts.get("request_id"))


def _span_stems(span: Sample) -> list[str]:
    """The ids that a span's own may have been made of, the least changed first."""
    stems: list[str] = []
    for whole in _span_id(span):
        bare = _CHILD.sub("", whole, count=1)
        stems += [bare, _SUFFIX.sub("", bare)]
        stems.append(_SUFFIX.sub("", stems[-1]))
    return stems


def _span_requests(span: Sample) -> list[str]:
    return [form for stem in _span_stems(span) for form in (stem, _ROUTE.sub("", stem, count=1))]


def _span_trace(span: Sample) -> tuple[str, ...]:
    return _present(span.facts.get("trace_id"))


# Strongest first: (name, of a record, of a span). vLLM makes its response id and its span's id of X-Request-Id.
_KEYS: Final[tuple[tuple[str, Callable[[Record], Iterable[str]], Callable[[Sample], Iterable[str]]], ...]] = (
    ("response_id", lambda record: _present(record.response_id), _span_id),
    ("response_id_stem", lambda record: _present(record.response_id), _span_stems),
    ("request_id", lambda record: _present(record.request_id), _span_requests),
    ("trace_id", lambda record: _present(record.trace_id), _span_trace),
)


# -- filling


def _told_ns(span: Sample) -> dict[str, int]:
    """The stages that a span tells, by the names of ``EnginePart``."""
    told = {ours: int(span.values[theirs]) for ours, theirs in _STAGES if theirs in span.values}
    ttft_ns = span.values.get("ttft_ns")
    # From arrival to the first token, the queue included, unlike the response's figure of that name: what is before
    # the queue is the difference, and only where the engine tells both others.
    if ttft_ns is not None and "queue_ns" in told and "prefill_ns" in told:
        frontend_ns = int(ttft_ns) - told["queue_ns"] - told["prefill_ns"]
        if frontend_ns >= -FRONTEND_SLACK_NS:
            told["frontend_ns"] = max(0, frontend_ns)
    return told


def _filled(record: Record, span: Sample) -> Record:
    """The record with what the span adds; the same object where it adds nothing."""
    engine, usage = record.engine, record.usage
    more = {name: ns for name, ns in _told_ns(span).items() if getattr(engine, name) is None}
    if more:
        engine = replace(engine, **more, source=SOURCE if engine.source is None else f"{engine.source}+{SOURCE}")
    counts = {
        name: int(span.values[f"usage_{name}"])
        for name in ("prompt_tokens", "completion_tokens")
        if getattr(usage, name) is None and f"usage_{name}" in span.values
    }
    if counts:
        usage = replace(usage, **counts)
    if engine is record.engine and usage is record.usage:
        return record
    return replace(record, engine=engine, usage=usage)


def _disagrees(record: Record, span: Sample) -> bool:
    """Whether response and span tell one stage differently."""
    for name, span_ns in _told_ns(span).items():
        own_ns = getattr(record.engine, name)
        if own_ns is not None and abs(own_ns - span_ns) > max(DISAGREE_NS, DISAGREE_SHARE * max(own_ns, span_ns)):
            return True
    return False
