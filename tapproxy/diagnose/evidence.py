"""What stands beside the records: the engine's, the host's and the cards' own readings, spans, start-up logs.

Rules here: samples are sorted by what they are of, and nothing is concluded. Evidence that was not taken is empty, and
every rule that wants it then says so instead of judging. A page that a router answers is no engine's, whatever the
names on it: it stands apart, and no rule and no budget reads it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from tapproxy.core.sample import ROUTER_NAME, Sample, SampleKind
from tapproxy.diagnose.series import Series


@dataclass(slots=True)
class Evidence:
    """By source: ``engines`` (metrics pages), ``hosts``, ``gpus``, ``routers`` (pages of no engine). ``spans`` and
    ``launches`` one by one."""

    engines: dict[str, Series] = field(default_factory=dict)
    hosts: dict[str, Series] = field(default_factory=dict)
    gpus: dict[str, Series] = field(default_factory=dict)
    spans: list[Sample] = field(default_factory=list)
    launches: list[Sample] = field(default_factory=list)
    routers: dict[str, Series] = field(default_factory=dict)

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> Evidence:
        grouped: dict[tuple[str, str], list[Sample]] = defaultdict(list)
        for sample in samples:
            grouped[sample.kind, sample.source].append(sample)
        found = cls()
        homes = {SampleKind.ENGINE: found.engines, SampleKind.HOST: found.hosts, SampleKind.GPU: found.gpus}
        singles = {SampleKind.SPAN: found.spans, SampleKind.LAUNCH: found.launches}
        for (kind, source), group in grouped.items():
            if kind in homes:
                homes[SampleKind(kind)][source] = Series.of(source, group)
            elif kind in singles:
                singles[SampleKind(kind)] += group
        found.routers = {name: page for name, page in found.engines.items() if page.fact("engine") == ROUTER_NAME}
        for name in found.routers:
            del found.engines[name]
        return found

    def window(self, from_ns: int, to_ns: int, boot_id: str | None = None) -> Evidence:
        """The series cut to this span of monotonic time; spans and launches are kept whole. Readings of another boot
        than ``boot_id`` have another clock: they are left out."""

        def cut(group: dict[str, Series]) -> dict[str, Series]:
            return {name: each.of_boot(boot_id).window(from_ns, to_ns) for name, each in group.items()}

        return Evidence(
            cut(self.engines), cut(self.hosts), cut(self.gpus), self.spans, self.launches, cut(self.routers)
        )

    def launched(self, signal: str) -> float | None:
        """The latest word of the start-up logs on it."""
        told = [sample.values[signal] for sample in self.launches if signal in sample.values]
        return told[-1] if told else None
