"""A saved log of ``nvidia-smi --query-gpu=… --format=csv -l 1``: the samples of every card it watched.

Rules here: columns are found by their names, in any order; units are read where they stand. What a card does not tell
(``[N/A]``) is absent with that word. A line that is none is counted and skipped: logs are torn, and hold headers again.

Times: nvidia-smi writes the local time of its host without a zone. It is read in the zone that is given, else in this
host's, and each sample says so (``times``). Monotonic time comes of it by the anchor, a pair of wall and monotonic
clock readings of the host that was measured (a record has one). Without a column of times the samples are dated by
``started_unix_ns`` and ``interval_s`` where both are given; else they have no time at all: 0, and ``untimed`` says so.
"""

from __future__ import annotations

import csv
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import tzinfo
from pathlib import Path
from typing import Final, TextIO

from tapproxy.core.address import quote
from tapproxy.core.sample import Sample, SampleKind
from tapproxy.evidence import procfs, throttle
from tapproxy.evidence.gpulogtime import read_time

_MOST_BYTES: Final = 256 << 20
_MOST_SAMPLES: Final = 500_000
_MIB: Final = 1 << 20
_PERCENT: Final = 0.01

# Column → signal, and what its number in the column's own unit is multiplied with.
_COLUMNS: Final[dict[str, tuple[str, float]]] = {
    "utilization.gpu": ("gpu_busy_share", _PERCENT),
    "utilization.memory": ("gpu_memory_busy_share", _PERCENT),
    "memory.used": ("gpu_memory_used_bytes", _MIB),
    "memory.total": ("gpu_memory_total_bytes", _MIB),
    "clocks.sm": ("sm_clock_mhz", 1),
    "clocks.current.sm": ("sm_clock_mhz", 1),
    "clocks.max.sm": ("sm_clock_max_mhz", 1),
    "power.draw": ("power_w", 1),
    "power.draw.instant": ("power_w", 1),
    "power.draw.average": ("power_w", 1),
    "enforced.power.limit": ("power_limit_w", 1),
    "power.limit": ("power_limit_w", 1),
    "temperature.gpu": ("temperature_c", 1),
}
# A unit that is not the usual one of its column → what it is in that.
_UNITS: Final = {
    "%": 1.0, "mib": 1.0, "mhz": 1.0, "w": 1.0, "c": 1.0, "kib": 1 / 1024, "gib": 1024.0, "ghz": 1000.0, "mw": 0.001,
}  # fmt: skip
_IDENTITIES: Final = ("index", "uuid", "gpu_uuid", "name", "gpu_name", "pci.bus_id", "gpu_bus_id")
_TIMES: Final = ("timestamp",)
_MIG: Final = ("mig.mode.current", "mig.mode")
_REASON_PREFIXES: Final = ("clocks_throttle_reasons.", "clocks_event_reasons.")
_KNOWN: Final = {*_COLUMNS, *_IDENTITIES, *_TIMES, *_MIG}
_UNTIMED: Final = "the log has no timestamps: give its start and interval, or log with the column timestamp"
_FAILED: Final = ("nvidia-smi has failed", "no devices were found", "failed to initialize nvml")


@dataclass(slots=True)
class _Log:
    """What is known while it is read. ``columns``: name → place; empty until a header was seen."""

    columns: dict[str, int] = field(default_factory=dict)
    units: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, int] = field(default_factory=dict)  # place → bit
    width: int = 0
    skipped: int = 0
    readings: dict[str, int] = field(default_factory=dict)  # of each card so far
    said: str | None = None
    torn: bool = False  # the line has no end: what is written of its last number is not known


def read(
    path: Path,
    *,
    columns: Sequence[str] | None = None,
    zone: tzinfo | None = None,
    started_unix_ns: int | None = None,
    interval_s: float | None = None,
    anchor: tuple[int, int] | None = None,
    boot_id: str | None = None,
    most_bytes: int = _MOST_BYTES,
) -> list[Sample]:
    """Every reading of every card, in the log's order. Never raises: a single sample has the ``problem`` else.

    ``columns``: the names given to ``--query-gpu``, for a log with ``noheader``. ``anchor``: (wall, monotonic) clock
    of the measured host in ns, with its ``boot_id``; without, those of this host now.
    """
    if anchor is None:
        anchor = (time.time_ns(), time.monotonic_ns())
        boot_id = procfs.boot_id() if boot_id is None else boot_id
    log = _Log()
    if columns:
        _header(log, list(columns))
    samples: list[Sample] = []
    try:
        for fields in _rows(path, most_bytes, log):
            if len(samples) >= _MOST_SAMPLES:
                log.said = f"only its first {_MOST_SAMPLES} readings were taken"
                break
            if log.torn and samples:
                log.skipped += 1
                break
            sample = _sample(log, fields, zone)
            if sample is not None:
                _date(log, sample, anchor, started_unix_ns, interval_s)
                sample.boot_id = boot_id
                samples.append(sample)
    except (OSError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        if not samples:
            return [_none(f"the GPU log {quote(path.name)} cannot be read: {why}", boot_id)]
        log.said = f"the rest cannot be read: {why}"
    if not samples:
        return [_none(f"the GPU log {quote(path.name)} {_why(log)}", boot_id)]
    if log.skipped:
        samples[-1].facts["skipped"] = f"{log.skipped} lines of the log are none of its columns"
    if log.said:
        samples[-1].facts["log"] = log.said
    return samples


def _none(problem: str, boot_id: str | None) -> Sample:
    return Sample(SampleKind.GPU, "gpu log", 0, 0, boot_id, problem=problem)


def _why(log: _Log) -> str:
    if log.said is not None:
        return f"says only: {log.said}"
    if not log.columns:
        return (
            "has no header that is known: log with --format=csv, or give the columns that --query-gpu had"
            " (index,utilization.gpu,memory.used,…)"
        )
    return f"holds no reading ({log.skipped} lines are none of its columns)"


def _rows(path: Path, most_bytes: int, log: _Log) -> Iterator[list[str]]:
    """Fields of each line, as PowerShell and others save them too (UTF-16, byte order marks)."""
    with path.open("rb") as file:
        begins = file.read(2)
    encoding = "utf-16" if begins in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    with path.open(encoding=encoding, errors="replace", newline="") as text:
        yield from csv.reader(_bounded(text, most_bytes, log), skipinitialspace=True, quoting=csv.QUOTE_NONE)


def _bounded(text: TextIO, most: int, log: _Log) -> Iterator[str]:
    """Lines until so many characters; a line that never ends is cut, and a NUL is nothing."""
    while most > 0 and (line := text.readline(1 << 16)):
        most -= len(line)
        log.torn = not line.endswith(("\n", "\r"))
        yield line.replace("\0", "")


def _header(log: _Log, fields: Sequence[str]) -> bool:
    """Takes a line as the header where it is one: it names a column that is known, and has no number."""
    names = [name.partition("[")[0].strip().lower() for name in fields]
    if not any(name in _KNOWN or name.startswith(_REASON_PREFIXES) for name in names):
        return False
    log.columns = {}
    log.units = {}
    log.reasons = {}
    for place, (name, whole) in enumerate(zip(names, fields, strict=True)):
        log.columns.setdefault(name, place)
        log.units[place] = whole.partition("[")[2].rstrip("] ").lower()
        for prefix in _REASON_PREFIXES:
            bit = throttle.BITS.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
            if bit is not None:
                log.reasons[place] = bit
    log.width = len(names)
    return True


def _sample(log: _Log, fields: list[str], zone: tzinfo | None) -> Sample | None:
    fields = [each.strip() for each in fields]
    if not any(fields) or _header(log, fields):
        return None
    text = " ".join(fields)
    if text.lower().startswith(_FAILED):
        log.said = text[:200]
        return None
    if not log.columns or len(fields) != log.width:
        log.skipped += 1
        return None
    sample = Sample(SampleKind.GPU, _source(log, fields), 0, 0)
    for name, (signal, factor) in _COLUMNS.items():
        if name in log.columns and signal not in sample.values:
            _number(sample, signal, fields[log.columns[name]], log.units[log.columns[name]], factor)
    for name in _MIG:
        word = fields[log.columns[name]].lower() if name in log.columns else ""
        if word in ("enabled", "disabled"):
            sample.values["mig"] = float(word == "enabled")
        elif word == "[n/a]":
            sample.values["mig"] = 0.0  # a card that cannot be divided is not
    _throttled(log, sample, fields)
    if "timestamp" in log.columns:
        word = fields[log.columns["timestamp"]]
        found = read_time(word, zone)
        if found is None:
            sample.facts["untimed"] = f"its time {quote(word[:40])} is not read: expected 2024/05/01 12:00:00.123"
        else:
            sample.t_unix_ns, sample.facts["times"] = found
    if not sample.values and not sample.absent:
        log.skipped += 1
        return None
    return sample


def _source(log: _Log, fields: Sequence[str]) -> str:
    """By the same name as a card that was read live: ``gpu INDEX UUID``, as far as the log tells."""
    index = fields[log.columns["index"]] if "index" in log.columns else ""
    uuid = next((fields[log.columns[name]] for name in ("uuid", "gpu_uuid") if name in log.columns), "")
    bus = next((fields[log.columns[name]] for name in ("pci.bus_id", "gpu_bus_id") if name in log.columns), "")
    return " ".join(each for each in ("gpu", index, uuid or bus) if each)


def _number(sample: Sample, signal: str, text: str, unit: str, factor: float) -> None:
    number, _, own_unit = text.partition(" ")
    unit = own_unit.strip().lower() or unit
    try:
        value = float(number)
    except ValueError:
        sample.absent.setdefault(signal, f"the log says {quote(text[:40])}")
        return
    if unit and unit not in _UNITS:
        sample.absent.setdefault(signal, f"its unit {quote(unit[:20])} is not known")
        return
    sample.absent.pop(signal, None)
    scaled = value * _UNITS.get(unit, 1.0)
    # 97 × 0.01 is not 0.97.
    sample.values[signal] = scaled / 100 if factor == _PERCENT else scaled * factor


def _throttled(log: _Log, sample: Sample, fields: Sequence[str]) -> None:
    """The bitmask (``….active``), or a column for each reason: Active or Not Active."""
    for prefix in _REASON_PREFIXES:
        place = log.columns.get(f"{prefix}active")
        if place is None:
            continue
        try:
            throttle.tell(sample, int(fields[place], 16))
            return
        except ValueError:
            sample.absent["throttled"] = f"the log says {quote(fields[place][:40])}"
    mask = known = 0
    for place, bit in log.reasons.items():
        word = fields[place].lower()
        if word in ("active", "not active"):
            known |= bit
            mask |= bit if word == "active" else 0
    if known:
        throttle.tell(sample, mask, known)


def _date(
    log: _Log, sample: Sample, anchor: tuple[int, int], started_unix_ns: int | None, interval_s: float | None
) -> None:
    """The monotonic time, and the wall's where the log has none."""
    number = log.readings.get(sample.source, 0)
    log.readings[sample.source] = number + 1
    if not sample.t_unix_ns and started_unix_ns is not None and interval_s is not None:
        sample.t_unix_ns = started_unix_ns + round(number * interval_s * 1e9)
        sample.facts.pop("untimed", None)
        sample.facts["times"] = "counted from the start and interval that were given"
    if sample.t_unix_ns:
        wall_ns, mono_ns = anchor
        sample.t_mono_ns = sample.t_unix_ns - wall_ns + mono_ns
    else:
        sample.facts.setdefault("untimed", _UNTIMED)
