"""What is read beside a scenario's path while it runs: the engine's metrics page, its process and the host."""

from __future__ import annotations

from typing import Final

from tapproxy import sources
from tapproxy.core.sample import Sample, SampleKind
from tapproxy.evidence.host import HostReader
from tapproxy.sampling import Blocking, Held, Sampler, Source
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
        host = HostReader(pid)
        read.append(Blocking(SampleKind.HOST, host.source, lambda: _here(host.read())))
    sampler = Sampler(read, held, interval_s, lambda _: None, sparing=False)
    await sampler.once()
    sampler.start()
    return sampler, held


def _here(sample: Sample) -> Sample:
    """Marked as of the host that the engine runs on."""
    sample.facts["engine_here"] = "yes"
    return sample
