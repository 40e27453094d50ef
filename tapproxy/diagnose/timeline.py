"""Latency over time, and on the same line what changed: engine, version, settings, traffic, taps, silence.

Rules here: wall-clock time, since that is what operators' logs have. Bins are as long as a median needs, so that few
requests make few bins. A mark is a change that was seen, never a guess at why latency moved; a change of traffic is
marked where chance alone would not make it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby, pairwise
from statistics import fmean
from typing import Any, Final

from tapproxy.core import metrics, stats
from tapproxy.core.record import Record
from tapproxy.core.sample import Sample
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.measures import known
from tapproxy.diagnose.series import Series
from tapproxy.diagnose.slices import percentiles

# What a screen holds.
BINS_MOST: Final = 40
_STEPS_S: Final = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
# Requests a bin has on average: a median wants so many.
PER_BIN: Final = stats.least_n(0.5, 1)
# Twice the rate or prompt length, and four standard deviations of counting: neither a trend nor chance.
JUMP: Final = 2.0
JUMP_SIGMAS: Final = 4.0
# A silence is this much longer than requests usually are apart, and two bins at least.
SILENCE_FACTOR: Final = 20
SILENCE_BINS: Final = 2
# A page's own time of its process's start may be rounded to a second.
START_SLACK_S: Final = 2.0
GAUGES: Final = ("running", "waiting", "kv_usage_share")
# Facts whose change is another engine rather than another setting.
_IDENTITY: Final = {"engine": "another engine", "version": "another version", "model": "another model"}
# Facts that are no setting: who read it, and how sure it is.
_NO_SETTING: Final = frozenset(("ttft_from", "version_from", "generation", "within"))
# Who told the version; another teller is a better guess at the same engine.
_TOLD: Final = "the engine"


@dataclass(frozen=True, slots=True)
class TapStart:
    """A tap's process began, as the name of its file of records has it."""

    tap: str
    t_unix_ns: int


def timeline(records: Sequence[Record], evidence: Evidence, starts: Iterable[TapStart] = ()) -> dict[str, Any] | None:
    """``bin_s``, ``bins`` and ``marks``, in time order; None without requests."""
    if not records:
        return None
    ordered = sorted(records, key=lambda record: record.t0_unix_ns)
    first_ns, last_ns = ordered[0].t0_unix_ns, ordered[-1].t0_unix_ns
    step_ns = _step_s((last_ns - first_ns) / 1e9, len(ordered)) * 1_000_000_000
    begin_ns = first_ns // step_ns * step_ns
    count = (last_ns - begin_ns) // step_ns + 1
    groups: list[list[Record]] = [[] for _ in range(count)]
    for record in ordered:
        groups[(record.t0_unix_ns - begin_ns) // step_ns].append(record)
    bins = [_bin(begin_ns + number * step_ns, step_ns, members, evidence) for number, members in enumerate(groups)]
    marks = [
        *_engine_marks(evidence),
        *_model_marks(ordered),
        *_traffic_marks(groups, begin_ns, step_ns),
        *_tap_marks(starts, first_ns, last_ns),
        *_silences(ordered, step_ns),
    ]
    marks = [mark for mark in marks if begin_ns <= mark["t_unix_ns"] <= last_ns + step_ns]
    return {
        "bin_s": step_ns // 1_000_000_000,
        "bins": bins,
        "marks": sorted(marks, key=lambda mark: mark["t_unix_ns"]),
    }


def _step_s(seconds: float, requests: int) -> int:
    bins = max(1, min(BINS_MOST, requests // PER_BIN))
    return next((step for step in _STEPS_S if seconds / step <= bins), math.ceil(seconds / bins))


def _bin(start_ns: int, step_ns: int, records: Sequence[Record], evidence: Evidence) -> dict[str, Any]:
    good = [record for record in records if record.void is None and metrics.ended_ok(record)]
    prompts = known(record.usage.prompt_tokens for record in records)
    enough = not stats.need(0.5, len(prompts))
    return {
        "from": _iso(start_ns),
        "t_unix_ns": start_ns,
        "requests": len(records),
        "failed": sum(not metrics.ended_ok(record) for record in records),
        "rate_per_s": round(len(records) * 1e9 / step_ns, 3),
        "ttft_ms": percentiles(known(map(metrics.ttft_ns, good))),
        "tpot_ms": percentiles([value for record in good if (value := metrics.tpot_ns(record)) is not None]),
        "prompt_tokens_p50": stats.percentile(prompts, 0.5) if enough else None,
        **{gauge: _gauge(evidence.engines, gauge, start_ns, start_ns + step_ns) for gauge in GAUGES},
    }


def _gauge(pages: Mapping[str, Series], signal: str, from_ns: int, to_ns: int) -> float | None:
    """The mean of the readings in the bin: over replicas summed, a share averaged."""
    means = [
        fmean(values)
        for page in pages.values()
        if (
            values := [
                sample.values[signal]
                for sample in page.samples
                if from_ns <= sample.t_unix_ns < to_ns and signal in sample.values
            ]
        )
    ]
    if not means:
        return None
    return round(fmean(means) if signal.endswith("_share") else sum(means), 3)


def _mark(t_unix_ns: int, kind: str, what: str) -> dict[str, Any]:
    return {"at": _iso(t_unix_ns), "t_unix_ns": t_unix_ns, "kind": kind, "what": what}


def _engine_marks(evidence: Evidence) -> Iterator[dict[str, Any]]:
    for source, page in evidence.engines.items():
        for before, after in pairwise(page.samples):
            yield from _between(source, before, after)
        yield from _unreadable(source, page)


def _between(source: str, before: Sample, after: Sample) -> Iterator[dict[str, Any]]:
    """What changed from one reading to the next."""
    begun = after.values.get("process_start_s")
    earlier = before.values.get("process_start_s")
    if begun is not None and earlier is not None and begun - earlier > START_SLACK_S:
        yield _mark(round(begun * 1e9), "engine restart", f"the engine at {source} started anew")
    elif Series.of(source, [before, after]).restarts():
        text = f"counters of {source} fell: the engine started anew"
        yield _mark(after.t_unix_ns, "engine restart", text)
    for name, value in after.facts.items():
        old = before.facts.get(name)
        if old is None or old == value or name in _NO_SETTING:
            continue
        if name == "version" and any(each.facts.get("version_from", _TOLD) != _TOLD for each in (before, after)):
            continue
        kind = "engine change" if name in _IDENTITY else "setting"
        text = _IDENTITY.get(name, f"{name.replace('_', ' ')} changed")
        yield _mark(after.t_unix_ns, kind, f"{text}: {old} → {value} ({source})")


def _unreadable(source: str, page: Series) -> Iterator[dict[str, Any]]:
    """A run of readings that failed is one mark."""
    every = sorted([*page.samples, *page.failed], key=lambda sample: sample.t_unix_ns)
    for failed, run in groupby(every, key=lambda sample: sample.problem is not None):
        members = list(run)
        if failed:
            span = (members[-1].t_unix_ns - members[0].t_unix_ns) / 1e9
            # How often is not told: a lasting failure is kept when it begins, and now and then.
            lasted = f" for {span:.0f} s" if span >= 1 else ""
            text = f"{source} could not be read{lasted}: {members[0].problem}"
            yield _mark(members[0].t_unix_ns, "engine unreadable", text)


def _model_marks(ordered: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """A model, or a server's name, that no request before had. The first of each is where the data begin."""
    yield from _firsts("model", "first request for model", ordered, [record.model for record in ordered])
    servers = [record.headers.get("server") for record in ordered]
    yield from _firsts("server", "first answer that names server", ordered, servers)


def _firsts(kind: str, what: str, ordered: Sequence[Record], values: Sequence[str | None]) -> Iterator[dict[str, Any]]:
    seen: set[str] = set()
    for record, value in zip(ordered, values, strict=True):
        if value is None or value in seen:
            continue
        if seen:
            yield _mark(record.t0_unix_ns, kind, f"{what} {value}")
        seen.add(value)


def _traffic_marks(groups: Sequence[Sequence[Record]], begin_ns: int, step_ns: int) -> Iterator[dict[str, Any]]:
    # The first and the last bin are cut by where the data begin and end.
    whole = list(enumerate(groups))[1:-1]
    for (_, before), (number, after) in pairwise(whole):
        at_ns, a, b = begin_ns + number * step_ns, len(before), len(after)
        # None at all is a silence, told by itself.
        if a and b and abs(a - b) > JUMP_SIGMAS * math.sqrt(a + b) and max(a, b) >= JUMP * max(1, min(a, b)):
            seconds = step_ns / 1e9
            yield _mark(at_ns, "traffic", f"{a / seconds:.2g} → {b / seconds:.2g} requests a second")
        lengths = [known(record.usage.prompt_tokens for record in members) for members in (before, after)]
        if any(stats.need(0.5, len(each)) for each in lengths):
            continue
        short, long = (stats.percentile(each, 0.5) or 0 for each in lengths)
        if max(short, long) >= JUMP * max(1, min(short, long)):
            yield _mark(at_ns, "traffic", f"prompts of {short:.0f} → {long:.0f} tokens at P50")


def _tap_marks(starts: Iterable[TapStart], first_ns: int, last_ns: int) -> Iterator[dict[str, Any]]:
    for start in starts:
        if first_ns < start.t_unix_ns <= last_ns:
            yield _mark(start.t_unix_ns, "tap", f"tap {start.tap} started, anew or with another process")


def _silences(ordered: Sequence[Record], step_ns: int) -> Iterator[dict[str, Any]]:
    gaps = [b.t0_unix_ns - a.t0_unix_ns for a, b in pairwise(ordered)]
    usual = stats.percentile(gaps, 0.5) or 0
    for record, gap in zip(ordered, gaps, strict=False):
        if gap >= max(SILENCE_BINS * step_ns, SILENCE_FACTOR * usual):
            yield _mark(record.t0_unix_ns, "silence", f"no request for {gap / 1e9:.0f} s")


def _iso(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
