"""What a diagnosis is made of: records and samples of data directories, as many as fit and no others.

Rules here: what is left out is counted and said. What stands there twice (a directory named twice, a copy of it beside
it) counts once. Files are read newest first, and only as far back as needed: a
directory of a gigabyte is never held in memory. What is no request for an answer (health checks, model lists) is
counted and set aside.
"""

from __future__ import annotations

import heapq
import os
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Final

from tapproxy.core.errors import ConfigError
from tapproxy.core.record import Record
from tapproxy.core.sample import Sample, SampleKind
from tapproxy.diagnose.timeline import TapStart
from tapproxy.store import RecordFile, read_records, read_samples, scan

NEWEST: Final = 100_000
# An event takes some 500 bytes of memory until the verdict: a gigabyte, for ten thousand answers of a hundred tokens
# at two taps.
EVENTS_MOST: Final = 2_100_000
# Routes that are posted to and generate nothing.
_NO_ANSWER: Final = ("tokenize", "/embeddings", "/rerank", "/score", "/classify", "/pooling", "/moderations")
# Of a file of records: when it was begun, and by which process.
_BEGAN: Final = re.compile(r"records-([0-9TZ.]+)-([0-9]+)\.jsonl")
# Of one source: five hours of a reading a second; and spans, of which each request has one.
SAMPLES_MOST: Final = 20_000
SPANS_MOST: Final = 200_000
# A reading before the first request and one after the last, at any usual interval.
_AROUND_NS: Final = 60 * 1_000_000_000
_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which of the records. Times are wall-clock ns; None: no limit."""

    since_ns: int | None = None
    until_ns: int | None = None
    model: str | None = None
    path: str | None = None
    newest: int = NEWEST

    def takes(self, record: Record) -> bool:
        if self.since_ns is not None and record.t0_unix_ns < self.since_ns:
            return False
        if self.until_ns is not None and record.t0_unix_ns > self.until_ns:
            return False
        if self.model is not None and record.model != self.model:
            return False
        return self.path is None or (record.path or "").partition("?")[0] == self.path


@dataclass(slots=True)
class Loaded:
    """What was read. ``older``: left out since newer ones filled the room; ``aside``: no requests for an answer."""

    taps: dict[str, list[Record]] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    starts: list[TapStart] = field(default_factory=list)
    skipped: int = 0
    torn: int = 0
    older: int = 0
    aside: int = 0
    others: int = 0
    thinned: int = 0
    earlier: int = 0
    twice: int = 0

    @property
    def records(self) -> int:
        return sum(map(len, self.taps.values()))

    def notes(self) -> list[str]:
        """What was left out, a sentence each."""
        found = []
        if self.earlier and not self.taps:
            files = "file of records was" if self.earlier == 1 else "files of records were"
            found.append(f"{self.earlier} {files} last written before the time that was asked for")
        if self.others and not self.taps:
            found.append(f"{self.others} records are of other times, models or paths than were asked for")
        if self.older:
            found.append(
                f"{self.older} older records are left out: at most {self.records} fit (--newest, or "
                f"{EVENTS_MOST} events); --since and --until choose others"
            )
        if self.aside:
            found.append(f"{self.aside} exchanges that ask for no answer (health checks, model lists) are set aside")
        if self.twice:
            found.append(f"{self.twice} records stand there twice, in copies of a file, and count once")
        if self.thinned:
            found.append(f"{self.thinned} samples are left out: of one source at most {SAMPLES_MOST} are looked at")
        if self.skipped:
            torn = f", {self.torn} of them the unfinished last line of a file" if self.torn else ""
            found.append(f"{self.skipped} lines could not be read and are left out{torn}")
        return found


def moment_ns(text: str, flag: str, now_ns: int | None = None) -> int:
    """``10m``, ``2h``, ``1d`` before now, or an ISO time (without a zone: this machine's) → wall-clock ns.

    Raises ConfigError for anything else.
    """
    match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smhdw])", text.strip())
    if match is not None:
        now = time.time_ns() if now_ns is None else now_ns
        return max(0, now - round(float(match[1]) * _UNITS_S[match[2]] * 1e9))
    try:
        return round(datetime.fromisoformat(text.strip()).timestamp() * 1e9)
    except (ValueError, OverflowError, OSError):
        raise ConfigError(
            f"{flag} {text!r} is no time: expected an age (90s, 10m, 2h, 1d) or a date and time (2026-11-29T20:15)"
        ) from None


def load(directories: Sequence[Path], wanted: Wanted) -> Loaded:
    """Records of all directories, by the name of their tap, oldest first; samples beside them.

    Raises ConfigError where a directory cannot be read.
    """
    found = Loaded()
    kept: list[tuple[int, int, str, Record]] = []  # a heap: the oldest first to go
    events = count = 0
    begun: dict[tuple[str, str], int] = {}  # (tap, its process): when its first file here was begun
    known: set[tuple[str, str]] = set()  # (tap, id) of the kept
    directories = list({os.path.realpath(directory): directory for directory in reversed(directories)}.values())[::-1]
    files = [(directory, file) for directory in directories for file in _files(directory)]
    files.sort(key=lambda each: each[1].mtime_ns, reverse=True)
    for index, (directory, file) in enumerate(files):
        if wanted.since_ns is not None and file.mtime_ns < wanted.since_ns:
            found.earlier = len(files) - index
            break  # last written before then, as all that follow
        full = len(kept) >= wanted.newest or events >= EVENTS_MOST
        if full and file.mtime_ns < kept[0][0]:
            found.older += sum(_lines(each.path) for _, each in files[index:])
            break
        reader = read_records(file.path, wanted.since_ns)
        tap_names: set[str] = set()
        for record in reader:
            if not wanted.takes(record):
                found.others += 1
                continue
            if not _asks(record):
                found.aside += 1
                continue
            if (record.tap, record.id) in known:
                found.twice += 1
                continue
            known.add((record.tap, record.id))
            count += 1
            tap_names.add(record.tap)
            heapq.heappush(kept, (record.t0_unix_ns, count, str(directory), record))
            events += len(record.events.kind)
            while kept and (len(kept) > wanted.newest or events > EVENTS_MOST):
                _, _, _, gone = heapq.heappop(kept)
                known.discard((gone.tap, gone.id))
                events -= len(gone.events.kind)
                found.older += 1
        began = _BEGAN.search(file.path.name)
        if began is not None:
            at_ns = moment_ns(began[1], "the name of a file")
            for tap in tap_names:
                begun[tap, began[2]] = min(at_ns, begun.get((tap, began[2]), at_ns))
        found.skipped += reader.skipped
        found.torn += reader.torn
    kept.sort(key=lambda each: each[:2])
    found.starts = [TapStart(tap, at_ns) for (tap, _), at_ns in begun.items()]
    found.taps = _by_tap([(directory, record) for _, _, directory, record in kept])
    found.samples = _samples(directories, found)
    return found


def _asks(record: Record) -> bool:
    """Whether it asks for an answer of tokens."""
    return record.method == "POST" and not (record.path or "").partition("?")[0].endswith(_NO_ANSWER)


def _files(directory: Path) -> list[RecordFile]:
    if directory.is_file():
        info = directory.stat()
        return [RecordFile(directory, info.st_size, info.st_mtime_ns)]
    try:
        return scan(directory)
    except OSError as error:
        raise ConfigError(
            f"the data directory {str(directory)!r} cannot be read: {error.strerror or error}; "
            "give the --data of the tap"
        ) from None


def _by_tap(records: Sequence[tuple[str, Record]]) -> dict[str, list[Record]]:
    """One name in several directories is several taps, unless they are one tap's at different times."""
    homes: dict[str, set[str]] = defaultdict(set)
    for directory, record in records:
        homes[record.tap].add(directory)
    found: dict[str, list[Record]] = defaultdict(list)
    for directory, record in records:
        name = record.tap if len(homes[record.tap]) == 1 else f"{record.tap}@{Path(directory).name or directory}"
        if name != record.tap:
            record.tap = name
        found[name].append(record)
    return dict(found)


def _lines(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
    except OSError:
        return 0


def _samples(directories: Sequence[Path], found: Loaded) -> list[Sample]:
    """What was sampled while the requests ran, with a little before and after. Of very many, evenly fewer."""
    starts = [record.t0_unix_ns for records in found.taps.values() for record in (records[0], records[-1])]
    if not starts:
        return []
    from_ns, to_ns = min(starts) - _AROUND_NS, max(starts) + _AROUND_NS
    kept: dict[tuple[str, str], _Thinned] = defaultdict(_Thinned)
    known: set[int] = set()
    for directory in directories:
        if not directory.is_dir():
            continue
        reader = read_samples(directory, from_ns)
        for sample in reader:
            if sample.t_unix_ns > to_ns:
                continue
            if len(directories) > 1:  # a copy may be among them
                what = hash((sample.source, sample.t_mono_ns, *sample.facts.values(), *sample.values.values()))
                if what in known:
                    continue
                known.add(what)
            kept[sample.kind, sample.source].add(sample)
        found.skipped += reader.skipped
        found.torn += reader.torn
    found.thinned = sum(each.left_out for each in kept.values())
    return [sample for each in kept.values() for sample in each.samples]


class _Thinned:
    """Samples of one source: all of them, or every second, fourth, … once they are too many.

    Counters are cumulative, so that what remains tells the same rises.
    """

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.left_out = 0
        self._every = 1
        self._seen = 0

    def add(self, sample: Sample) -> None:
        self._seen += 1
        # Spans and start-up logs are no series: each is of something else.
        single = sample.kind in (SampleKind.SPAN, SampleKind.LAUNCH)
        if not single and self._seen % self._every:
            self.left_out += 1
            return
        self.samples.append(sample)
        if single and len(self.samples) > SPANS_MOST:
            del self.samples[: SPANS_MOST // 10]
            self.left_out += SPANS_MOST // 10
        elif not single and len(self.samples) > SAMPLES_MOST:
            self.left_out += len(self.samples[::2])
            self.samples = self.samples[1::2]
            self._every *= 2
