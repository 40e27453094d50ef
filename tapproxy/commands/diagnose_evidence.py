"""What stands beside the records, gathered from wherever it was asked for: samples kept then, pages read now, logs.

Rules here: an adapter each, and nothing is judged. A file that was named and cannot be read is a mistake of the command
line; a page that cannot be read now is said, and gone on without. What was read now is of now: it is shown, and no rule
takes it for what was then.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tapproxy.config import load_objectives, parse_duration
from tapproxy.core.errors import ConfigError
from tapproxy.core.objectives import Objective
from tapproxy.core.record import Record
from tapproxy.core.sample import Sample, SampleKind
from tapproxy.core.witness import AccessLog
from tapproxy.diagnose.series import Series
from tapproxy.evidence import gpulog, launch, nginxlog, topo
from tapproxy.evidence.scrape import EnginePage

# Two readings nearer to each other tell a rise that is a rounding; a page takes some ms.
_INTERVAL_LEAST_S: Final = 0.1
_INTERVAL_MOST_S: Final = 600.0
# What is shown of the engine as it is now: signal, how it is read off two readings.
_NOW: Final = (
    ("running", Series.latest),
    ("waiting", Series.latest),
    ("kv_usage_share", Series.latest),
    ("preemptions", Series.rise),
    ("finished", Series.rise),
    ("ttft_s", Series.mean_of),
    ("queue_s", Series.mean_of),
    ("prefill_s", Series.mean_of),
    ("tpot_s", Series.mean_of),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """The flags: pages to read now, logs to read, and how long to wait between two readings."""

    engines: Sequence[str] = ()
    engine_logs: Sequence[Path] = ()
    gpu_logs: Sequence[Path] = ()
    topologies: Sequence[Path] = ()
    interval: str = "1s"


@dataclass(slots=True)
class Beside:
    """``then``: sampled while the requests ran, or logged. ``now``: of each page read now, what it told."""

    then: list[Sample] = field(default_factory=list)
    now: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    addresses: set[str] = field(default_factory=set)

    def engine_addresses(self) -> set[str]:
        """HOST:PORT of the engines whose pages were read, then or now."""
        kept = {address for each in self.then if each.kind == SampleKind.ENGINE and (address := _address(each.source))}
        return kept | self.addresses


def gather(kept: Sequence[Sample], asked: Asked, records: Sequence[Record]) -> Beside:
    """Everything that was kept or asked for. Raises ConfigError where a file that was named cannot be read."""
    interval_s = parse_duration(asked.interval, "--sample-interval")
    if not _INTERVAL_LEAST_S <= interval_s <= _INTERVAL_MOST_S:
        raise ConfigError(f"--sample-interval is {asked.interval}: expected between 100ms and 10m")
    urls = [_checked(url) for url in asked.engines]
    found = Beside(then=list(kept))
    anchor = records[-1] if records else None
    for path in asked.engine_logs:
        _readable(path, "--engine-log")
        found.then.append(launch.read(path, boot_id=anchor.boot_id if anchor is not None else None))
        if not found.then[-1].values:
            found.notes.append(f"{path.name} tells nothing of how an engine started: no line of it is known")
    for path in asked.gpu_logs:
        _readable(path, "--gpu-log")
        found.then += _cards(path, anchor)
    for path in asked.topologies:
        _readable(path, "--gpu-topo")
        found.then.append(topo.read(path, boot_id=anchor.boot_id if anchor is not None else None))
        if found.then[-1].problem is not None:
            raise ConfigError(f"--gpu-topo {path.name}: {found.then[-1].problem}")
    sampled = any(sample.kind == SampleKind.ENGINE and sample.problem is None for sample in kept)
    if urls and sampled:
        found.notes.append("--engine was not read: the engine's metrics were sampled while the requests ran")
        found.addresses |= {address for url in urls if (address := _address(url))}
    elif urls:
        _read_now(found, urls, interval_s)
    return found


def _cards(path: Path, anchor: Record | None) -> list[Sample]:
    """A log's readings, dated by the clocks of a record. Raises ConfigError where it is no such log."""
    clocks = None if anchor is None else (anchor.t0_unix_ns, anchor.t0_mono_ns)
    samples = gpulog.read(path, anchor=clocks, boot_id=None if anchor is None else anchor.boot_id)
    if samples[0].problem is not None:
        raise ConfigError(f"--gpu-log {path.name}: {samples[0].problem}")
    return samples


def _readable(path: Path, flag: str) -> None:
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {str(path)!r} cannot be read: {error.strerror}") from None


def _checked(url: str) -> str:
    if _address(url) is None or urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError("--engine is no address of a metrics page: expected http://HOST:PORT/metrics")
    return url


def _address(source: str) -> str | None:
    try:
        parts = urlsplit(source)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return None
    return f"{parts.hostname}:{port}" if parts.hostname and port else None


# -- the engine as it is now


def _read_now(found: Beside, urls: Sequence[str], interval_s: float) -> None:
    pages = asyncio.run(_twice(urls, interval_s))
    for url, samples in zip(urls, pages, strict=True):
        series = Series.of(samples[0].source, samples)
        if not series.samples:
            found.notes.append(f"--engine {series.source} could not be read: {series.failed[0].problem}")
            continue
        found.addresses |= {address for address in (_address(url),) if address is not None}
        values = {name: value for name, read in _NOW if (value := read(series, name)) is not None}
        found.now.append(
            {
                "source": series.source,
                "t_unix_ns": series.samples[-1].t_unix_ns,
                "interval_s": series.seconds(),
                "facts": series.samples[-1].facts,
                "values": values,
                "absent": series.samples[-1].absent,
            }
        )


async def _twice(urls: Sequence[str], interval_s: float) -> list[list[Sample]]:
    context = ssl.create_default_context()
    pages = [EnginePage(url, verify=context) for url in urls]
    try:
        first = await asyncio.gather(*(page.read() for page in pages))
        await asyncio.sleep(interval_s)
        second = await asyncio.gather(*(page.read() for page in pages))
        return [[*both] for both in zip(first, second, strict=True)]
    finally:
        await asyncio.gather(*(page.close() for page in pages))


def access_logs(files: Sequence[Path], log_format: str | None) -> list[AccessLog]:
    """nginx's access logs. Raises ConfigError where one cannot be read, or the format is none."""
    if log_format is not None and not files:
        raise ConfigError("--nginx-log-format is the format of a log: name that with --nginx-log FILE")
    return [nginxlog.read(path, log_format) for path in files]


def objectives(file: Path | None) -> tuple[Objective, ...]:
    """The ``[[slo]]`` tables of a configuration file. Raises ConfigError."""
    return () if file is None else load_objectives(file)
