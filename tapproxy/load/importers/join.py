"""Which record of a tap is which request of a load tool, by what it was found, and how sure that is.

Rules here, strongest first: the id of the response, the request's id, the ids that vLLM's benchmark made of a prefix
and a number, the fingerprint of the body, the time alone. A key that two requests or two records share joins nobody by
itself. What only the time says is likely at best; what a rival could claim as well is unsure, shown, and counted in no
sum.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tapproxy.core import metrics
from tapproxy.core.counts import TOKEN_KINDS
from tapproxy.core.record import Record
from tapproxy.core.stats import percentile
from tapproxy.load.importers.imported import ClientRequest, Clock


class By(StrEnum):
    """What joined them."""

    RESPONSE_ID = "response_id"
    REQUEST_ID = "request_id"
    FINGERPRINT = "fingerprint"
    TIME = "time"


class Sure(StrEnum):
    """How sure it is that both are one request."""

    CERTAIN = "certain"
    LIKELY = "likely"
    UNSURE = "unsure"


@dataclass(frozen=True, slots=True)
class Join:
    """One request and its record at one tap; ``why`` is said where it is not plain from ``by``."""

    request: ClientRequest
    record: Record
    by: By
    sure: Sure
    why: str | None = None


_NUMBERED: Final = re.compile(r"[0-9]{1,9}\Z")
# A benchmark's starts are this alike to the tap's, but for waiting for a connection. Two runs are farther apart.
_SPREAD_NS: Final = 5_000_000_000
# Of requests joined by number so many must have the tokens that the tap saw.
_AGREE: Final = 0.95
# How much later than the client's start the tap may see the first byte (waiting for a connection, a slow loop) …
_LATEST_NS: Final = 10_000_000_000
# … and how much earlier, since clocks differ: on one monotonic clock not at all, on disciplined wall clocks a second.
_EARLIEST_NS: Final = {Clock.MONOTONIC: 1_000_000, Clock.WALL: 1_000_000_000}
# Time tells one request from another only where the rival is clearly farther away.
_RIVAL_FACTOR: Final = 3
_RIVAL_MARGIN_NS: Final = 5_000_000
# What is this far from the tap's is not called likely, whoever the rivals are.
_NEAR_NS: Final = 250_000_000


def join(requests: Sequence[ClientRequest], records: Sequence[Record], pair_key: bytes | None = None) -> list[Join]:
    """Joins one run's requests to one tap's records, in the order of the requests.

    ``pair_key``: the tap's --pair-key; without it fingerprints cannot be computed.
    """
    found: dict[int, Join] = {}
    taken: set[str] = set()

    def keep(joins: Iterable[Join]) -> None:
        for each in joins:
            if each.request.index not in found and each.record.id not in taken:
                found[each.request.index] = each
                taken.add(each.record.id)

    keep(_by_key(requests, records, By.RESPONSE_ID, lambda r: r.response_id, lambda r: r.response_id))
    keep(_by_key(requests, records, By.REQUEST_ID, lambda r: r.request_id, lambda r: r.request_id))
    keep(_by_number(requests, records))
    left = [each for each in requests if each.index not in found]
    if left:
        free = [record for record in records if record.id not in taken and _streamed(record)]
        if pair_key is not None:
            keep(_by_fingerprint(left, free, pair_key))
            left = [each for each in left if each.index not in found]
            free = [record for record in free if record.id not in taken]
        keep(_by_time(left, free, None))
    return [found[each.index] for each in requests if each.index in found]


def _by_key(
    requests: Sequence[ClientRequest],
    records: Sequence[Record],
    by: By,
    of_request: Callable[[ClientRequest], str | None],
    of_record: Callable[[Record], str | None],
) -> list[Join]:
    asked = Counter(filter(None, map(of_request, requests)))
    seen: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        key = of_record(record)
        if key is not None:
            seen[key].append(record)
    joins = []
    for request in requests:
        key = of_request(request)
        if key is None or key not in seen:
            continue
        if asked[key] == 1 and len(seen[key]) == 1:
            joins.append(Join(request, seen[key][0], by, Sure.CERTAIN))
        else:
            # The same id more than once (a retry, a file read twice): the time has to say which.
            joins += [
                Join(request, each.record, by, Sure.LIKELY, "the id was used more than once; nearest in time")
                for each in _by_time([request], seen[key], None)
                if each.sure is not Sure.UNSURE
            ]
    return joins


# --- by the number at the end of the id ------------------------------------------------------------------


def _by_number(requests: Sequence[ClientRequest], records: Sequence[Record]) -> list[Join]:
    """vLLM's benchmark: the ids are PREFIX0, PREFIX1, …; which prefix is this run's, its clock and tokens tell."""
    numbered = {each.id_index: each for each in requests if each.id_index is not None}
    if not numbered:
        return []
    rated = []
    for group in _prefixes(records).values():
        pairs = [(numbered[at], record) for at, record in group.items() if at in numbered]
        fit = _fit(pairs, len(numbered)) if pairs else None
        if fit is not None:
            rated.append((fit, pairs))
    certain = sorted((each for each in rated if each[0].lag_ns is not None), key=lambda each: each[0].lag_ns or 0)
    chosen = certain or rated
    if not chosen:
        return []
    # Two prefixes that fit as well: nobody can say which run this is.
    if len(chosen) > 1:
        nearest, next_ = chosen[0][0].lag_ns, chosen[1][0].lag_ns
        if nearest is None or next_ is None or next_ <= _RIVAL_FACTOR * nearest + _RIVAL_MARGIN_NS:
            return []
    fit, pairs = chosen[0]
    sure = Sure.LIKELY if fit.lag_ns is None else Sure.CERTAIN
    return [Join(request, record, By.REQUEST_ID, sure, fit.why) for request, record in pairs]


@dataclass(frozen=True, slots=True)
class _Fit:
    """What speaks for a prefix; ``lag_ns``: how much later the tap saw the starts, None where clocks do not tell."""

    why: str
    lag_ns: float | None = None


def _prefixes(records: Sequence[Record]) -> dict[str, dict[int, Record]]:
    groups: dict[str, dict[int, Record]] = defaultdict(dict)
    twice: set[tuple[str, int]] = set()
    for record in records:
        request_id = record.request_id or ""
        digits = _NUMBERED.search(request_id)
        # The prefix may end in digits itself, so that "run12" is number 2 of "run1" or number 12 of "run".
        for start in range(digits.start(), len(request_id)) if digits is not None else ():
            prefix, number = request_id[:start], request_id[start:]
            if number[0] == "0" and len(number) > 1:
                continue  # "007" is not what str(7) wrote
            if int(number) in groups[prefix]:
                twice.add((prefix, int(number)))
            groups[prefix][int(number)] = record
    for prefix, at in twice:
        del groups[prefix][at]
    return groups


def _fit(pairs: Sequence[tuple[ClientRequest, Record]], wanted: int) -> _Fit | None:
    """Whether these records may be this run, and what that rests on."""
    if 2 * len(pairs) < wanted:
        return None
    tokens = [
        request.output_tokens == record.usage.completion_tokens
        for request, record in pairs
        if request.output_tokens is not None and record.usage.completion_tokens is not None
    ]
    if tokens and sum(tokens) < _AGREE * len(tokens):
        return None
    words = "number in the file = number at the end of the request id"
    words += "; token counts agree" if tokens else ""
    lags = [record.t0_mono_ns - request.start_ns for request, record in pairs if request.start_ns is not None]
    if not lags:
        return _Fit(words)
    low, middle, high = percentile(lags, 0.1), percentile(lags, 0.5), percentile(lags, 0.9)
    if low is None or middle is None or high is None or high - low > _SPREAD_NS:
        return None
    if low >= -_EARLIEST_NS[Clock.MONOTONIC] and high <= _SPREAD_NS:
        return _Fit(f"{words}; start times agree on one clock", middle)
    return _Fit(f"{words}; starts as far apart as the tap's, on another clock: another such run would look the same")


# --- by what was asked, and when -------------------------------------------------------------------------


def _streamed(record: Record) -> bool:
    return bool(record.stream) or bool(record.events.kind)


def fingerprint(body: bytes, key: bytes) -> str:
    """As a tap with that --pair-key writes it."""
    return "hmac-sha256:" + hmac.new(key, body, hashlib.sha256).hexdigest()


def _by_fingerprint(requests: Sequence[ClientRequest], records: Sequence[Record], key: bytes) -> list[Join]:
    seen: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.request.fingerprint:
            seen[record.request.fingerprint].append(record)
    same: dict[str, list[ClientRequest]] = defaultdict(list)
    for request in requests:
        for print_ in (fingerprint(body, key) for body in request.bodies):
            if print_ in seen:
                same[print_].append(request)
                break
    joins = []
    for print_, asking in same.items():
        answered = seen[print_]
        if len(asking) == 1 and len(answered) == 1:
            joins.append(Join(asking[0], answered[0], By.FINGERPRINT, Sure.CERTAIN, "the only request of this body"))
        else:
            joins += _by_time(asking, answered, By.FINGERPRINT)
    return joins


def _by_time(requests: Sequence[ClientRequest], records: Sequence[Record], by: By | None) -> list[Join]:
    """Mutually nearest in time; likely where every rival is clearly farther away."""
    costs = _costs(requests, records)
    of_request: dict[int, list[tuple[float, int]]] = defaultdict(list)
    of_record: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for (one, other), cost in costs.items():
        of_request[one].append((cost, other))
        of_record[other].append((cost, one))
    for ranked in (*of_request.values(), *of_record.values()):
        ranked.sort()
    joins = []
    for one, ranked in of_request.items():
        cost, other = ranked[0]
        if of_record[other][0][1] != one:
            continue
        rivals = [each[1][0] for each in (ranked, of_record[other]) if len(each) > 1]
        rival = min(rivals, default=None)
        clear = rival is None or rival > _RIVAL_FACTOR * cost + _RIVAL_MARGIN_NS
        sure = Sure.LIKELY if clear and cost <= _NEAR_NS else Sure.UNSURE
        what = "same body; " if by is By.FINGERPRINT else ""
        next_ = "no other came near" if rival is None else f"the next is {rival / 1e6:.0f} ms away"
        ends = "starts" if requests[one].last_token_ns is None else "last tokens"
        why = f"{what}{ends} {cost / 1e6:.1f} ms apart; {next_}"
        joins.append(Join(requests[one], records[other], by or By.TIME, sure, why))
    return joins


def _costs(requests: Sequence[ClientRequest], records: Sequence[Record]) -> Mapping[tuple[int, int], float]:
    """How far apart in time, of every request and record that may be one."""
    costs: dict[tuple[int, int], float] = {}
    for clock in Clock:
        at_ns = [record.t0_mono_ns if clock is Clock.MONOTONIC else record.t0_unix_ns for record in records]
        order = sorted(range(len(records)), key=at_ns.__getitem__)
        starts = [at_ns[index] for index in order]
        for one, request in enumerate(requests):
            if request.clock is not clock or request.start_ns is None:
                continue
            first = bisect_left(starts, request.start_ns - _EARLIEST_NS[clock])
            for place in range(first, len(order)):
                lag_ns = starts[place] - request.start_ns
                if lag_ns > _LATEST_NS:
                    break
                cost = _cost(request, records[order[place]], lag_ns, _EARLIEST_NS[clock])
                if cost is not None:
                    costs[one, order[place]] = cost
    return costs


def _cost(request: ClientRequest, record: Record, lag_ns: int, slack_ns: int) -> float | None:
    """The distance of the last tokens, else of the starts; None where it cannot be this one.

    Not the starts as long as there are ends: a client may wait for its connection, and not for a token that is there.
    """
    theirs, ours = request.output_tokens, record.usage.completion_tokens
    if theirs is not None and ours is not None and theirs != ours:
        return None
    if request.last_token_ns is None:
        return float(abs(lag_ns))
    # Whether the finish event is the last token, or has none, tools see differently.
    last = (metrics.last_ns(record, "sent"), _last_token_ns(record))
    gaps = [request.last_token_ns - (lag_ns + at) for at in last if at is not None]
    # The client cannot have had the last token before the tap sent it on.
    possible = [abs(gap_ns) for gap_ns in gaps if gap_ns >= -slack_ns]
    return min(possible, default=None)


def _last_token_ns(record: Record) -> int | None:
    events = record.events
    sent = [at for kind, at in zip(events.kind, events.sent, strict=False) if kind in TOKEN_KINDS and at is not None]
    return sent[-1] if sent else None
