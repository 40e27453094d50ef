"""The cores of a machine: how many there are, and how many of them are real.

Rules here: two threads of one core are one physical core. Where the kernel does not tell, nothing is assumed.
"""

from __future__ import annotations

from dataclasses import dataclass

from tapproxy.evidence import procfs


@dataclass(frozen=True, slots=True)
class Cores:
    """``online``: the numbers of the logical ones. ``siblings``: logical core → the lowest number on the same core."""

    online: frozenset[int]
    siblings: dict[int, int]

    def physical(self, of: frozenset[int] | set[int] | None = None) -> int | None:
        """How many physical cores, of all or of those given; None where the kernel does not tell."""
        wanted = self.online if of is None else self.online & of
        if not wanted or not wanted <= self.siblings.keys():
            return None
        return len({self.siblings[each] for each in wanted})


def read(root: str) -> Cores:
    """Raises OSError or ValueError where even the list of cores cannot be read."""
    online = frozenset(procfs.cpu_list(procfs.read(f"{root}/sys/devices/system/cpu/online")))
    siblings = {}
    for number in online:
        # The older name of the two; newer kernels have both.
        for name in ("core_cpus_list", "thread_siblings_list"):
            try:
                text = procfs.read(f"{root}/sys/devices/system/cpu/cpu{number}/topology/{name}")
                siblings[number] = min(procfs.cpu_list(text), default=number)
                break
            except (OSError, ValueError):
                continue
    return Cores(online, siblings)
