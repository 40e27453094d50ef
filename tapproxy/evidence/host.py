"""The machine that the engine runs on, and the engine's processes on it, as one sample a reading.

Rules here: the parts are read one by one, and one that cannot be read leaves its signals absent with a sentence; the
others are there all the same. Counters are cumulative and never fall while this reader lives, also where a process
or a thread ends. Nothing of a command line or an environment is read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tapproxy.core.sample import Sample, SampleKind
from tapproxy.evidence import cgroup, cores, procfs
from tapproxy.evidence.cores import Cores
from tapproxy.evidence.engineproc import EngineProcesses
from tapproxy.evidence.rising import Rising

_NO_PSI: Final = "this kernel keeps no pressure figures (PSI): boot it with psi=1"
_PSI: Final = {"cpu": "psi_cpu_some_s", "memory": "psi_memory_some_s", "io": "psi_io_some_s"}
# Of the engine's network namespace: file, table → column → signal.
_TCP: Final = (
    ("snmp", "Tcp:", {"OutSegs": "tcp_out_segments", "RetransSegs": "tcp_retransmits"}),
    (
        "netstat",
        "TcpExt:",
        {"ListenDrops": "tcp_listen_drops", "ListenOverflows": "tcp_listen_overflows", "TCPTimeouts": "tcp_timeouts"},
    ),
)
_USER, _NICE, _SYSTEM, _IDLE, _IOWAIT, _IRQ, _SOFTIRQ, _STEAL = range(8)


class HostReader:
    """Reads the host, and the processes ``pids`` with what they started. ``root``: a directory in its place.

    ``read`` never raises. A reading takes about a millisecond, and 3 ms more where an engine has hundreds of threads.
    """

    def __init__(
        self,
        pids: Sequence[int] = (),
        root: Path = Path("/"),
        *,
        now_ns: Callable[[], int] = time.monotonic_ns,
        unix_ns: Callable[[], int] = time.time_ns,
        own_pid: int | None = None,
    ) -> None:
        """``own_pid``: a process that is none of the engine's unless it is named, nor are its children; this one, where
        it is the real machine that is read.
        """
        self._root = "" if root == Path("/") else str(root)
        if own_pid is None and not self._root:
            own_pid = os.getpid()
        self._now_ns = now_ns
        self._unix_ns = unix_ns
        self._engine = EngineProcesses(self._root, pids, own_pid)
        self._core_busy = Rising()
        self._cores: Cores | None = None
        self._boot_id = procfs.boot_id(self._root)
        self.source = f"host {self._hostname() or 'unnamed'}"

    @property
    def engine_pids(self) -> frozenset[int]:
        """The engine's processes, as of the last reading: whose a process on a card is."""
        return self._engine.pids

    def read(self) -> Sample:
        """One reading of everything."""
        sample = Sample(SampleKind.HOST, self.source, 0, 0, self._boot_id)
        try:
            self._machine(sample)
        except (OSError, ValueError, IndexError) as error:
            sample.values.clear()
            sample.problem = f"/proc/stat cannot be read ({_why(error)}): the host can be watched on Linux alone"
        else:
            self._topology(sample)
            self._memory(sample)
            self._pressure(sample)
            self._engine.read(sample, self._cores)
            self._tcp(sample)
        sample.t_mono_ns, sample.t_unix_ns = self._now_ns(), self._unix_ns()
        return sample

    def _hostname(self) -> str | None:
        try:
            return procfs.read(f"{self._root}/proc/sys/kernel/hostname").strip() or None
        except OSError:
            return None

    def _machine(self, sample: Sample) -> None:
        """``/proc/stat``. Raises OSError, ValueError, IndexError."""
        busy: dict[object, float] = {}
        values = sample.values
        for line in procfs.read(f"{self._root}/proc/stat").splitlines():
            name, _, rest = line.partition(" ")
            if name == "cpu":
                ticks = _ticks(rest)
                values["cpu_busy_s"] = procfs.seconds(_busy(ticks))
                values["cpu_steal_s"] = procfs.seconds(ticks[_STEAL])
                values["cpu_iowait_s"] = procfs.seconds(ticks[_IOWAIT])
                values["cpu_total_s"] = procfs.seconds(sum(ticks))
            elif name.startswith("cpu"):
                busy[name] = procfs.seconds(_busy(_ticks(rest)))
            elif name == "ctxt":
                values["context_switches"] = int(rest)
            elif name == "procs_running":
                # The reader itself is one of them.
                values["run_queue"] = max(0, int(rest) - 1)
        if "cpu_total_s" not in values or not busy:
            raise ValueError("it has no line of a core")
        self._core_busy.add(busy)
        values["busiest_core_busy_s"] = self._core_busy.most
        values["cores"] = len(busy)

    def _topology(self, sample: Sample) -> None:
        # Cores come and go on some machines; else once is enough.
        if self._cores is None or len(self._cores.online) != sample.values["cores"]:
            try:
                self._cores = cores.read(self._root)
            except (OSError, ValueError):
                self._cores = None
        physical = None if self._cores is None else self._cores.physical()
        if physical is None:
            sample.absent["physical_cores"] = "the kernel does not tell which cores are threads of one (/sys/devices)"
        else:
            sample.values["physical_cores"] = physical

    def _memory(self, sample: Sample) -> None:
        try:
            for line in procfs.read(f"{self._root}/proc/meminfo").splitlines():
                if line.startswith("MemAvailable:"):
                    sample.values["memory_available_bytes"] = int(line.split()[1]) * 1024
                    return
            raise ValueError("no MemAvailable")
        except (OSError, ValueError, IndexError) as error:
            sample.absent["memory_available_bytes"] = f"/proc/meminfo does not tell ({_why(error)})"

    def _pressure(self, sample: Sample) -> None:
        for name, signal in _PSI.items():
            try:
                sample.values[signal] = cgroup.some_s(procfs.read(f"{self._root}/proc/pressure/{name}"))
            except (OSError, ValueError):
                sample.absent[signal] = _NO_PSI

    def _tcp(self, sample: Sample) -> None:
        """Of the engine's network namespace, where it has one of its own; else of this one."""
        owner = self._engine.first_pid
        of = f"proc/{owner}/net" if owner is not None else "proc/self/net"
        sample.facts["tcp_of"] = f"the network namespace of process {owner}" if owner is not None else "this host"
        for file, table, wanted in _TCP:
            try:
                found = _table(procfs.read(f"{self._root}/{of}/{file}"), table)
            except (OSError, ValueError) as error:
                found = {}
                why = f"/{of}/{file} cannot be read ({_why(error)})"
            else:
                why = f"/{of}/{file} does not tell it"
            for column, signal in wanted.items():
                if column in found:
                    sample.values[signal] = found[column]
                else:
                    sample.absent[signal] = why


def _ticks(rest: str) -> list[int]:
    """Guests' time, which follows, is in the user's already."""
    ticks = [int(each) for each in rest.split()[:8]]
    return ticks + [0] * (8 - len(ticks))


def _busy(ticks: Sequence[int]) -> int:
    """Stolen time is nobody's work here."""
    return sum(ticks[each] for each in (_USER, _NICE, _SYSTEM, _IRQ, _SOFTIRQ))


def _table(text: str, name: str) -> dict[str, int]:
    """A table of snmp or netstat: a line of columns and a line of numbers. Raises ValueError."""
    lines = [line.split() for line in text.splitlines() if line.startswith(name)]
    if len(lines) < 2:
        raise ValueError(f"no table {name[:-1]}")
    return dict(zip(lines[0][1:], (int(each) for each in lines[1][1:]), strict=False))


def _why(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)[:80]
