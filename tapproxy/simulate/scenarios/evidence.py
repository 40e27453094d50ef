"""What is read beside a scenario's path while it runs: the engine's metrics page, its process and the host."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from tapproxy import sources
from tapproxy.core.sample import Sample, SampleKind
from tapproxy.evidence import gpulog, launch
from tapproxy.evidence.host import HostReader
from tapproxy.sampling import Blocking, Held, Sampler, Source
from tapproxy.simulate.scenarios.parts import Card
from tapproxy.wire.stamps import boot_id

# The engine's page takes a millisecond of its process: often enough for runs of a few seconds, and no load of its own.
INTERVAL_S: Final = 0.5
# Where a scenario lasts some seconds in all.
OFTEN_S: Final = 0.25


async def sampling(engine_url: str, pid: int | None = None, interval_s: float = INTERVAL_S) -> tuple[Sampler, Held]:
    """The page of the engine, and with ``pid`` its process and the host: read once, and from then on at the interval.

    Whoever asks for it stops the sampler.
    """
    held = Held(boot_id=boot_id())
    read: list[Source] = list(sources.pages((f"{engine_url}/metrics",)))
    if pid is not None:
        host = HostReader((pid,))
        read.append(Blocking(SampleKind.HOST, host.source, lambda: _here(host.read())))
    sampler = Sampler(read, held, interval_s, lambda _: None, sparing=False)
    await sampler.once()
    sampler.start()
    return sampler, held


def _here(sample: Sample) -> Sample:
    """Marked as of the host that the engine runs on."""
    sample.facts["engine_here"] = "yes"
    return sample


def of_card(card: Card, slow: tuple[int, int], until_ns: int, directory: Path) -> list[Sample]:
    """What is told of a card that is not there, from a second before the run to its end; ``slow``: the window in which
    the engine was slow, in monotonic ns, as ``until_ns`` is."""
    mono_ns, unix_ns = time.monotonic_ns(), time.time_ns()
    step_ns = round(OFTEN_S * 1e9)
    times = range(slow[0] - 20 * step_ns, until_ns + step_ns, step_ns)
    if card is Card.HOT:
        log = directory / "nvidia-smi.csv"
        log.write_text(_HEAD + "".join(_row(unix_ns - mono_ns + t, slow[0] <= t < slow[1]) for t in times))
        return gpulog.read(log, anchor=(unix_ns, mono_ns), boot_id=boot_id())
    return [
        Sample(
            SampleKind.GPU,
            "gpu 0",
            t,
            unix_ns - mono_ns + t,
            boot_id(),
            values={
                "gpu_busy_share": 1.0 if slow[0] <= t < slow[1] else 0.8,
                "sm_clock_mhz": 1980.0,
                "sm_clock_max_mhz": 1980.0,
                "other_processes": float(slow[0] <= t < slow[1]),
            },
        )
        for t in times
    ]


_HEAD: Final = (
    "timestamp, index, utilization.gpu [%], memory.used [MiB], memory.total [MiB], clocks.sm [MHz], "
    "clocks.max.sm [MHz], power.draw [W], temperature.gpu, clocks_event_reasons.active\n"
)


def _row(unix_ns: int, hot: bool) -> str:
    stamp = time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(unix_ns // 1_000_000_000))
    clock, power, degrees, brake = (765, "301.20", 91, 0x20) if hot else (1980, "612.40", 66, 0)
    stamp += f".{unix_ns % 1_000_000_000 // 1_000_000:03d}"
    return f"{stamp}, 0, 97 %, 70123 MiB, 81559 MiB, {clock} MHz, 1980 MHz, {power} W, {degrees}, 0x{brake:016x}\n"


def of_startup(lines: str, directory: Path) -> Sample:
    """What the start-up log says."""
    log = directory / "engine.log"
    log.write_text(lines)
    return launch.read(log)
