"""The engine's processes on this host: what they used, what they waited for, what they may use at most.

Rules here: sums go over every process of the engine; ``busiest`` is, interval by interval, the one that used most.
Each part that cannot be read leaves its own signals absent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tapproxy.core.sample import Sample
from tapproxy.evidence import cgroup, procfs
from tapproxy.evidence.cores import Cores
from tapproxy.evidence.procfs import Stat
from tapproxy.evidence.rising import Rising
from tapproxy.evidence.roles import Role, roles, told
from tapproxy.evidence.threads import Threads
from tapproxy.evidence.tree import Tree

_PROCESS_SIGNALS: Final = (
    *("engine_cpu_s", "engine_busiest_cpu_s", "engine_busiest_thread_cpu_s", "engine_runqueue_wait_s"),
    "engine_longest_thread_wait_s",
    *("engine_context_switches", "engine_involuntary_switches", "engine_major_faults", "engine_threads"),
    *("engine_rss_bytes", "engine_processes", "engine_affinity_cores", "engine_physical_cores"),
    *("cpu_limit_cores", "cgroup_throttled_s"),
)
_SCHEDSTAT_SIGNALS: Final = ("engine_runqueue_wait_s", "engine_longest_thread_wait_s", "engine_busiest_thread_cpu_s")
_CGROUP_SIGNALS: Final = ("cpu_limit_cores", "cgroup_throttled_s", "cgroup_periods", "cgroup_throttled_periods")
_ROLE_SIGNALS: Final = {
    Role.API: "engine_api_cpu_s",
    Role.CORE: "engine_core_cpu_s",
    Role.WORKER: "engine_worker_cpu_s",
}
# Of their numbers, in words for people.
_MOST_SHOWN: Final = 32
_NOT_NAMED: Final = "name the engine's process, as this host numbers it: --engine-pid PID"
_NO_ROLE: Final = "the names of the engine's processes do not tell which of them does this"
_NO_SCHEDSTAT: Final = "this kernel does not tell how long a thread waits for a core (/proc/PID/schedstat)"


class EngineProcesses:
    """Adds to a sample what it finds of them. ``first_pid``: a living one, the named first, or None."""

    def __init__(self, root: str, pids: Sequence[int], own_pid: int | None) -> None:
        self.first_pid: int | None = None
        self.pids: frozenset[int] = frozenset()
        self._root = root
        self._named = tuple(pids)
        self._tree = Tree(root, pids, own_pid)
        self._threads = Threads(root)
        self._cpu = Rising()
        self._faults = Rising()
        self._roles: dict[Role, Rising] = {}

    def read(self, sample: Sample, cores: Cores | None) -> None:
        """Raises nothing."""
        if not self._named:
            sample.absent.update(dict.fromkeys(_PROCESS_SIGNALS, _NOT_NAMED))
            return
        found = self._tree.find()
        members = found.members
        self.first_pid = members[0].pid if members else None
        self.pids = frozenset(each.pid for each in members)
        if found.lost:
            sample.facts["engine_lost"] = "; ".join(found.lost.values())
        if not members:
            why = sample.facts.get("engine_lost", "no process of the engine is there")
            sample.absent.update(dict.fromkeys(_PROCESS_SIGNALS, why))
            return
        if found.left_out:
            sample.facts["engine_left_out"] = f"{found.left_out} processes more than are read"
        shown = [str(each.pid) for each in members[:_MOST_SHOWN]]
        sample.facts["engine_pids"] = " ".join(shown + ["…"] * (len(members) > _MOST_SHOWN))
        self._processes(sample, members)
        self._by_role(sample, members)
        self._by_thread(sample, members)
        self._cgroup(sample, members[0].pid)
        self._affinity(sample, members, cores)

    def _processes(self, sample: Sample, members: Sequence[Stat]) -> None:
        self._cpu.add({(each.pid, each.start_ticks): each.cpu_s for each in members})
        self._faults.add({(each.pid, each.start_ticks): each.major_faults for each in members})
        sample.values["engine_cpu_s"] = self._cpu.total
        sample.values["engine_busiest_cpu_s"] = self._cpu.most
        sample.values["engine_major_faults"] = self._faults.total
        sample.values["engine_processes"] = len(members)
        sample.values["engine_threads"] = sum(each.threads for each in members)
        # Pages that several processes share are counted in each.
        sample.values["engine_rss_bytes"] = sum(each.rss_bytes for each in members)

    def _by_role(self, sample: Sample, members: Sequence[Stat]) -> None:
        found = roles(members, self._named)
        if found:
            sample.facts["engine_roles"] = told(found, members)
        for role, signal in _ROLE_SIGNALS.items():
            of = {(each.pid, each.start_ticks): each.cpu_s for each in members if found.get(each.pid) == role}
            if not of and role not in self._roles:
                sample.absent[signal] = _NO_ROLE
                continue
            rising = self._roles.setdefault(role, Rising())
            rising.add(of)
            sample.values[signal] = rising.total

    def _by_thread(self, sample: Sample, members: Sequence[Stat]) -> None:
        threads = self._threads
        threads.read(members)
        sample.values["engine_context_switches"] = threads.switches.total
        sample.values["engine_involuntary_switches"] = threads.involuntary.total
        if threads.wait_told:
            sample.values["engine_runqueue_wait_s"] = threads.wait_s.total
            sample.values["engine_busiest_thread_cpu_s"] = threads.run_s.most
            sample.values["engine_longest_thread_wait_s"] = threads.wait_s.most
        else:
            sample.absent.update(dict.fromkeys(_SCHEDSTAT_SIGNALS, _NO_SCHEDSTAT))

    def _cgroup(self, sample: Sample, pid: int) -> None:
        try:
            found = cgroup.read(self._root, pid)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            sample.absent.update(dict.fromkeys(_CGROUP_SIGNALS, f"the engine's CPU limit is not known: {why}"))
            return
        sample.facts["cgroup"] = f"version {found.version}, {found.path}"
        if found.limit_cores is None:
            sample.facts["cpu_limit"] = "none"  # known, and no number
        for signal, value in (
            ("cpu_limit_cores", found.limit_cores),
            ("cgroup_throttled_s", found.throttled_s),
            ("cgroup_periods", found.periods),
            ("cgroup_throttled_periods", found.throttled_periods),
            ("cgroup_psi_cpu_some_s", found.pressure_s),
        ):
            if value is not None:
                sample.values[signal] = value

    def _affinity(self, sample: Sample, members: Sequence[Stat], cores: Cores | None) -> None:
        """The cores of all of them together: an engine may pin each of its processes to its own."""
        allowed: set[int] = set()
        for each in members:
            try:
                text = procfs.read(f"{self._root}/proc/{each.pid}/status")
                start = text.index("\nCpus_allowed_list:") + len("\nCpus_allowed_list:")
                allowed |= procfs.cpu_list(text[start : text.index("\n", start)])
            except (OSError, ValueError):
                continue
        if cores is not None:
            # The mask may name cores that the machine could have and has not.
            allowed &= cores.online
        if not allowed:
            why = "/proc/PID/status does not tell the cores that the engine may use"
            sample.absent["engine_affinity_cores"] = sample.absent["engine_physical_cores"] = why
            return
        sample.values["engine_affinity_cores"] = len(allowed)
        physical = None if cores is None else cores.physical(allowed)
        if physical is None:
            sample.absent["engine_physical_cores"] = "the kernel does not tell which cores are threads of one"
        else:
            sample.values["engine_physical_cores"] = physical
