"""Requests that the proxy sent more than once.

Rules here: one request before the proxy and several behind it, known by an id or by the body's fingerprint within the
time of the one before. Two before it are the client's own retry, and nobody's fault here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tapproxy.core.metrics import ttft_ns
from tapproxy.core.record import Ended, Record
from tapproxy.diagnose.facts import Fact, Named, median_ns, ms, percent
from tapproxy.diagnose.measures import known, token_events
from tapproxy.diagnose.view import View

# One in a hundred, and three: a single retry is what retries are for.
RETRIED_SHARE: Final = 0.01
RETRIED_LEAST: Final = 3
# Both stamps are one clock's: this covers their order within a process.
_SLACK_NS: Final = 1_000_000
# A proxy leaves the one before it asks the next; the tap may notice that some ms later. What goes on beside it is no
# retry: a mirrored request, or two taps in a row.
_LEFT_NS: Final = 20_000_000

_KEYS: Final[tuple[Callable[[Record], str | None], ...]] = (
    lambda record: record.request_id,
    lambda record: record.trace_id,
    lambda record: record.request.fingerprint,
)


@dataclass(frozen=True, slots=True)
class Retried:
    """One request of the nearer side and all that the farther side had of it, in time order."""

    near: Record
    sends: list[Record]

    @property
    def lost_ns(self) -> int:
        """From the first send's arrival behind the proxy to the last one's."""
        return self.sends[-1].t0_mono_ns - self.sends[0].t0_mono_ns


def proxy_retry(view: View) -> Named | None:
    """One outer exchange, two inner ones."""
    near = view.outer or view.client
    found = list(retried(near, view.inner))
    if len(found) < max(RETRIED_LEAST, RETRIED_SHARE * len(near)):
        return None
    first = Counter(_how(each.sends[0]) for each in found)
    twice = sum(sum(bool(token_events(send)) for send in each.sends) > 1 for each in found)
    lost = [each.lost_ns for each in found]
    facts = [
        Fact("requests sent more than once", percent(len(found) / len(near)), "%", len(near), percent(RETRIED_SHARE)),
        Fact("sends of such a request, most", max(len(each.sends) for each in found), "sends", len(found)),
        Fact("first send to last, P50", ms(median_ns(lost)), "ms", len(lost)),
        Fact("of them with tokens in more than one answer", twice, "requests", len(found)),
    ]
    facts += [Fact(f"first send ended: {how}", count, "requests", len(found)) for how, count in first.most_common()]
    because = (
        f"before the proxy each of the {len(found)} was one exchange, which a client's own retry is not; what failed "
        "first is the engine's where it failed, the time between the sends is what sending again costs"
    )
    return Named(
        facts,
        metric="ttft",
        confidence=0.9,
        effects_ns=lost,
        whole_ns=median_ns(known(ttft_ns(each.near) for each in found)),
        rejected=[("engine.errors", because)],
    )


def retried(near: Sequence[Record], far: Sequence[Record]) -> Iterator[Retried]:
    """Every request of ``near`` that is in ``far`` more than once."""
    at_far = [_grouped(far, key) for key in _KEYS]
    at_near = [_grouped(near, key) for key in _KEYS]
    for record in near:
        for key, nears, fars in zip(_KEYS, at_near, at_far, strict=True):
            value = key(record)
            if value is None or len(fars.get(value, ())) < 2:
                continue
            # Another request with the same key at that time may own one of the sends.
            if any(other is not record and _overlap(record, other) for other in nears[value]):
                continue
            sends = _one_by_one([send for send in fars[value] if _within(record, send)])
            if len(sends) > 1:
                yield Retried(record, sends)
            break


def _grouped(records: Sequence[Record], key: Callable[[Record], str | None]) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if value := key(record):
            groups[value].append(record)
    return groups


def _within(near: Record, send: Record) -> bool:
    # A record that is void was sent all the same: a stamp some ms late tells no other order.
    if near.boot_id is None or near.boot_id != send.boot_id:
        return False
    end_ns = _end_ns(near)
    return -_SLACK_NS <= send.t0_mono_ns - near.t0_mono_ns <= end_ns + _SLACK_NS


def _one_by_one(sends: Sequence[Record]) -> list[Record]:
    """The first, and each that began when the one before had ended."""
    found: list[Record] = []
    for send in sorted(sends, key=lambda send: send.t0_mono_ns):
        if not found or send.t0_mono_ns >= found[-1].t0_mono_ns + _end_ns(found[-1]) - _LEFT_NS:
            found.append(send)
    return found


def _overlap(one: Record, other: Record) -> bool:
    first, second = sorted((one, other), key=lambda record: record.t0_mono_ns)
    return second.t0_mono_ns <= first.t0_mono_ns + _end_ns(first) + _SLACK_NS


def _end_ns(record: Record) -> int:
    ends = (record.downstream.end, record.upstream.end, *record.events.arrived[-1:])
    return max((end for end in ends if end is not None), default=0)


def _how(send: Record) -> str:
    if send.status is not None and send.status >= 400 and send.ended == Ended.COMPLETE:
        return f"status {send.status}"
    return str(send.ended)
