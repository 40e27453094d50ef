"""Sums that a metrics page counted over many requests, laid on each of them.

Rules here:
* They are laid on the requests that ended between the same two readings, by the time each took in the engine; a bound
  says how far that may be off, and one request alone is exact. What the sums do not cover stays uncovered.
* The frontend's is laid by the room that the other parts leave, and not at all where it does not fit there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tapproxy.core.record import Ended, Record
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.figures import (
    DECODE,
    FRONTEND,
    PREFILL,
    QUEUE,
    Figure,
    Inside,
    after_head_ns,
    kept_to_the_end,
    to_last_token_ns,
)
from tapproxy.diagnose.series import Series

# A head that came before queue and prefill has room for both before the first token; one that waited for the first
# token comes with it. The engine's figures and the tap's stamps agree to a few percent.
HEAD_ROOM: Final = 0.9
# Readings of a page are a second apart: a request that ends on the edge is counted a reading later at most.
MERGED_MOST: Final = 5
# An engine cannot have spent more on the requests than the tap saw them take: its sums are of other requests then.
TOO_MUCH: Final = 1.05
# Three means are of the same requests where their counts differ by no more.
SAME_REQUESTS: Final = 0.99
# Of the streams between two readings, so many kept to the end: their decode lies before their first token.
KEPT_SHARE: Final = 0.9
# ``ttft_from`` of an engine whose TTFT begins with the request, before template and tokeniser.
FROM_REQUEST: Final = "before tokenising"
_SIGNALS: Final = {QUEUE: "queue_s", PREFILL: "prefill_s"}


@dataclass(slots=True)
class _Slice:
    """The requests that ended between two readings, and what the engine summed up in between, in ns.

    ``frontend_ns``: a request's mean, where what the engine counted then is of the same requests.
    """

    records: list[Record]
    count: float
    sums: dict[str, float]
    page: Series
    decode_ns: float | None = None
    frontend_ns: float | None = None

    @property
    def exact(self) -> bool:
        """Whether the engine counted just these requests."""
        return self.count == len(self.records)


class Laid:
    """Sums of metrics pages laid on requests."""

    def __init__(
        self,
        records: Sequence[Record],
        spent: Mapping[int, Inside],
        evidence: Evidence,
        notes: list[str],
        *,
        at_engine: bool,
    ) -> None:
        self._spent = spent
        self._at_engine = at_engine
        self._notes = notes
        self._slices: list[_Slice] = []
        self._at: dict[int, _Slice] = {}
        self._frontend_ns: int | None = None
        self._outside_ns: float | None = None
        # The clock of another boot is another; of several the one with most requests counts.
        boots = Counter(record.boot_id for record in records if _counted(record))
        boot = boots.most_common(1)[0][0] if boots else None
        ended = sorted((r for r in records if r.boot_id == boot and _counted(r)), key=_ended_ns)
        told = [page for page in evidence.engines.values() if page.count_of("queue_s") or page.count_of("prefill_s")]
        pages = [page for each in told if len((page := _of_boot(each, boot)).samples) > 1]
        if told and not pages:
            notes.append("the engine's metrics were read on another boot than the taps ran on: no time ties them")
        if not pages or not ended:
            return
        first_ns, last_ns = ended[0].t0_mono_ns, _ended_ns(ended[-1])
        windows = [page.window(first_ns, last_ns) for page in pages]
        self._slices = _slices(windows[0], ended) if len(windows) == 1 else [_whole(windows, ended)]
        if len(windows) == 1:
            every = [record for each in self._slices for record in each.records]
            self._frontend_ns, self._outside_ns = _frontend_mean_ns(windows[0]), self._beyond_ns(windows[0], every)
        for each in self._slices:
            for record in each.records:
                self._at[id(record)] = each

    def heads_came_first(self, record: Record) -> bool:
        """Whether, of the requests it ended among, queue and prefill lie behind the responses' heads."""
        each = self._at.get(id(record))
        if each is None or not each.count:
            return False
        after = [ns for other in each.records if (ns := after_head_ns(other)) is not None]
        wanted_ns = sum(each.sums.values()) * len(after) / each.count
        return bool(after) and sum(after) >= HEAD_ROOM * wanted_ns > 0

    def out(self, known: Mapping[int, Mapping[str, Figure]]) -> dict[int, dict[str, Figure]]:
        """Each request's part of each sum, where nothing told it of the request itself."""
        found: dict[int, dict[str, Figure]] = {}
        contradicted = 0
        source = self._said() if any(each.count for each in self._slices) else ""
        for each in self._slices:
            streams = [r for r in each.records if id(r) in self._spent]
            free = {id(r): self._free_ns(r, known) for r in streams}
            total_ns = sum(free.values())
            if not each.count or not streams or total_ns <= 0:
                continue
            sums = dict(each.sums)
            mean_ns = None if each.decode_ns is None else each.decode_ns / each.count
            kept = sum(kept_to_the_end(record, mean_ns) for record in streams)
            if each.decode_ns is not None and kept >= KEPT_SHARE * len(streams):
                sums[DECODE] = each.decode_ns
            # Of all that the engine counted the streams are a part; the mean stands for them as for the others.
            scale = len(streams) / each.count
            if sum(sums.values()) * scale > TOO_MUCH * total_ns:
                contradicted += len(streams)
                continue
            all_seen = each.exact and len(streams) == len(each.records)
            for record in streams:
                own_ns = free[id(record)]
                parts = found.setdefault(id(record), {})
                for part, sum_ns in sums.items():
                    if part in known.get(id(record), {}) or (part == DECODE and record.engine.decode_ns is not None):
                        continue
                    ns = round(sum_ns * scale * own_ns / total_ns)
                    bound = _bound_ns(ns, sum_ns, own_ns, total_ns) if all_seen else None
                    parts[part] = Figure(ns, source, bound)
            self._lay_frontend(each, streams, known, found, source)
        if contradicted:
            self._notes.append(
                f"the engine's metrics tell more time for {contradicted} requests than the tap saw them take: they "
                "count requests that did not come this way, and are not laid on these"
            )
        return found

    def _lay_frontend(
        self,
        each: _Slice,
        streams: Sequence[Record],
        known: Mapping[int, Mapping[str, Figure]],
        found: dict[int, dict[str, Figure]],
        source: str,
    ) -> None:
        """What the API process took of TTFT, behind the response's head too: by what the other parts leave room for,
        and nothing where it does not fit there."""
        own_ns: float | None = self._frontend_ns
        if own_ns is not None and each.frontend_ns is not None:
            own_ns = each.frontend_ns
        outside_ns = self._beyond_ns(each.page, each.records)
        outside_ns = self._outside_ns if outside_ns is None else outside_ns
        told = {id(record): record.engine.frontend_ns for record in streams}
        untold = sum(ns is None for ns in told.values())
        if (untold and own_ns is None) or (not untold and outside_ns is None):
            return
        room = {}
        for record in streams:
            parts = {**found.get(id(record), {}), **known.get(id(record), {})}
            taken_ns = sum(parts[part].ns for part in (QUEUE, PREFILL, DECODE) if part in parts)
            if DECODE not in parts and kept_to_the_end(record, record.engine.decode_ns):
                taken_ns += record.engine.decode_ns or 0
            left_ns = self._spent[id(record)].rest_ns - taken_ns - (told[id(record)] or 0)
            room[id(record)] = max(0, left_ns)
        sum_ns = untold * (own_ns or 0) + len(streams) * (outside_ns or 0)
        if not 0 < sum_ns <= TOO_MUCH * sum(room.values()):
            return
        how = f"{source}: TTFT − queue − prefill" if untold else "told by the engine (span)"
        if outside_ns is not None:
            how += f", and the tap's E2E − E2E{'' if untold else f' ({source})'}"
        for key, room_ns in room.items():
            ns = round(sum_ns * room_ns / sum(room.values()))
            found.setdefault(key, {})[FRONTEND] = Figure((told[key] or 0) + ns, how, None)

    def _beyond_ns(self, page: Series, records: Sequence[Record]) -> float | None:
        """HTTP and JSON, in and out, a request: whole answers by the tap's stamps less the engine's E2E, of the same.

        Not from before a proxy: there it would be the proxy's time as well.
        """
        if not self._at_engine:
            return None
        told_s, count = page.mean_of("e2e_s"), page.count_of("e2e_s") or 0.0
        seen_ns = [
            ns for record in records if (ns := to_last_token_ns(record, self._spent.get(id(record)))) is not None
        ]
        most = max(count, len(records))
        if told_s is None or not seen_ns or min(count, len(seen_ns)) < SAME_REQUESTS * most:
            return None
        return max(0.0, sum(seen_ns) / len(seen_ns) - 1e9 * told_s)

    def _free_ns(self, record: Record, known: Mapping[int, Mapping[str, Figure]]) -> int:
        """Its time in the engine without the frontend that was seen: the sums are of what came after."""
        frontend = known.get(id(record), {}).get(FRONTEND)
        return max(0, self._spent[id(record)].rest_ns - (frontend.ns if frontend is not None else 0))

    def _said(self) -> str:
        """One sentence for all of them: sources of many requests are told together."""
        counts = [each.count for each in self._slices if each.count]
        least, most = min(counts), max(counts)
        sizes = f"n={least:g}" if least == most else f"n={least:g} to {most:g}"
        text = f"engine /metrics, mean over the requests of {_number(len(counts), 'window')}, {sizes} each"
        ours, all_of_it = sum(len(each.records) for each in self._slices), sum(counts)
        return text if all(each.exact for each in self._slices) else f"{text}, counted {all_of_it:g} for {ours} here"


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _bound_ns(ns: int, sum_ns: float, own_ns: int, total_ns: int) -> int:
    """No request's part is more than its time or the sum, nor less than what the others cannot have taken."""
    least, most = max(0.0, sum_ns - (total_ns - own_ns)), min(sum_ns, own_ns)
    return max(0, round(max(most - ns, ns - least)))


def _counted(record: Record) -> bool:
    """Whether the engine counts it among its finished ones."""
    good = record.status is not None and record.status < 400 and record.upstream.end is not None
    return good and record.ended == Ended.COMPLETE and "error" not in record.events.kind


def _ended_ns(record: Record) -> int:
    return record.t0_mono_ns + (record.upstream.end or 0)


def _of_boot(page: Series, boot: str | None) -> Series:
    """Without the readings of another boot; those that name none stay."""
    return Series(page.source, [one for one in page.samples if None in (boot, one.boot_id) or one.boot_id == boot])


def _slices(page: Series, ended: Sequence[Record]) -> list[_Slice]:
    """As fine as the counts allow: from reading to reading, merged until the engine counted as many as ended."""
    times = [_ended_ns(record) for record in ended]
    samples = page.samples
    found: list[_Slice] = []
    start = 0
    for number in range(1, len(samples)):
        a, b = samples[start].t_mono_ns, samples[number].t_mono_ns
        records = list(ended[bisect_right(times, a) : bisect_right(times, b)])
        part = Series(page.source, samples[start : number + 1])
        made = _made([part], records)
        late = number - start >= MERGED_MOST or number == len(samples) - 1
        if made.exact or late:
            start = number
            if records:
                found.append(made)
    last_ns = samples[-1].t_mono_ns
    rest = list(ended[bisect_left(times, last_ns + 1) :])
    if rest and found:
        # Nothing was read after they ended: the last reading's means are all that is known of them.
        found[-1] = replace(found[-1], records=[*found[-1].records, *rest])
    return found


def _whole(pages: Sequence[Series], ended: Sequence[Record]) -> _Slice:
    return _made(pages, list(ended))


def _made(pages: Sequence[Series], records: list[Record]) -> _Slice:
    sums = {
        part: 1e9 * sum(rises)
        for part, signal in _SIGNALS.items()
        if (rises := [r for page in pages if (r := page.rise(f"{signal}_sum")) is not None])
    }
    counts = [
        max((c for signal in _SIGNALS.values() if (c := page.count_of(signal)) is not None), default=0.0)
        for page in pages
    ]
    decodes = [rise for page in pages if (rise := page.rise("decode_s_sum")) is not None]
    frontend_ns = _frontend_mean_ns(pages[0]) if len(pages) == 1 else None
    return _Slice(records, sum(counts), sums, pages[0], 1e9 * sum(decodes) if decodes else None, frontend_ns)


def _frontend_mean_ns(page: Series) -> int | None:
    """TTFT − queue − prefill, where TTFT begins with the request and the three are of much the same requests."""
    if page.fact("ttft_from") != FROM_REQUEST:
        return None
    signals = ("ttft_s", "queue_s", "prefill_s")
    # TTFT is counted at the first token, the others at the end: of requests that came to no end it is another's mean.
    counts = [page.count_of(signal) or 0.0 for signal in signals]
    if min(counts) < SAME_REQUESTS * max(counts):
        return None
    means = [page.mean_of(signal) for signal in signals]
    if any(mean is None for mean in means):
        return None
    whole, queue, prefill = (mean or 0.0 for mean in means)
    return max(0, round(1e9 * (whole - queue - prefill)))
