"""A directory that stands in for a machine: as much of /proc and /sys as the host reader looks at."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

_STATUS = """Name:\t{name}
Cpus_allowed:\tff
Cpus_allowed_list:\t{cpus}
voluntary_ctxt_switches:\t{voluntary}
nonvoluntary_ctxt_switches:\t{involuntary}
"""


class Machine:
    """Writes what a test says. Times in seconds; the kernel's ticks are a hundredth."""

    def __init__(self, root: Path, cores: int = 4, threads_a_core: int = 2) -> None:
        self.root = root
        self.cores = cores
        self.write("proc/sys/kernel/random/boot_id", "boot-1\n")
        self.write("proc/sys/kernel/hostname", "gpu-7\n")
        self.write("proc/meminfo", "MemTotal:  64000 kB\nMemAvailable:  1000 kB\n")
        self.write("proc/self/mountinfo", "25 1 0:22 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
        self.write("sys/devices/system/cpu/online", f"0-{cores - 1}\n")
        for core in range(cores):
            first = core - core % threads_a_core
            siblings = f"{first}-{first + threads_a_core - 1}" if threads_a_core > 1 else f"{core}"
            self.write(f"sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list", siblings + "\n")
        self.cpu([0.0] * cores)
        for name in ("cpu", "memory", "io"):
            self.pressure(name, 0.0)
        self.tcp("self", 1000, 1, 0)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def cpu(self, busy_s: Sequence[float], *, idle_s: float = 0.0, steal_s: float = 0.0, running: int = 1) -> None:
        """``busy_s``: user time of each core; idle and stolen time are the whole machine's."""
        lines = [f"cpu  {_ticks(sum(busy_s))} 0 0 {_ticks(idle_s)} 0 0 0 {_ticks(steal_s)} 0 0"]
        lines += [f"cpu{core} {_ticks(busy)} 0 0 0 0 0 0 0 0 0" for core, busy in enumerate(busy_s)]
        lines += ["intr 5 0 0", "ctxt 9000", f"procs_running {running}", "procs_blocked 0"]
        self.write("proc/stat", "\n".join(lines) + "\n")

    def pressure(self, name: str, some_s: float) -> None:
        text = f"some avg10=0.00 avg60=0.00 avg300=0.00 total={round(some_s * 1e6)}\nfull avg10=0.00 total=0\n"
        self.write(f"proc/pressure/{name}", text)

    def tcp(self, owner: str, out: int, again: int, dropped: int) -> None:
        self.write(
            f"proc/{owner}/net/snmp", f"Ip: Forwarding\nIp: 1\nTcp: OutSegs RetransSegs InErrs\nTcp: {out} {again} 0\n"
        )
        self.write(
            f"proc/{owner}/net/netstat",
            f"TcpExt: SyncookiesSent ListenOverflows ListenDrops TCPTimeouts\nTcpExt: 0 {dropped} {dropped} 3\n",
        )

    def process(
        self,
        pid: int,
        *,
        parent: int = 1,
        name: str = "python3",
        started: int = 100,
        cpu_s: float = 0.0,
        threads: Mapping[int, tuple[float, float]] | None = None,
        cgroup: str = "0::/engine",
        cpus: str = "0-3",
        switches: tuple[int, int] = (10, 2),
        state: str = "S",
    ) -> None:
        """``threads``: thread → seconds that it ran, and that it waited for a core."""
        threads = {pid: (cpu_s, 0.0)} if threads is None else threads
        ticks = _ticks(cpu_s)
        fields = [state, parent, pid, pid, 0, -1, 0, 0, 0, 7, 0, ticks, 0, 0, 0, 20, 0, len(threads), 0, started, 0, 10]
        self.write(f"proc/{pid}/stat", f"{pid} ({name}) " + " ".join(map(str, fields)) + " 0 0\n")
        status = _STATUS.format(name=name, cpus=cpus, voluntary=switches[0], involuntary=switches[1])
        self.write(f"proc/{pid}/status", status)
        self.write(f"proc/{pid}/cgroup", cgroup + "\n")
        self.tcp(str(pid), 5000, 50, 2)
        shutil.rmtree(self.root / f"proc/{pid}/task", ignore_errors=True)
        for thread, (ran_s, waited_s) in threads.items():
            self.write(f"proc/{pid}/task/{thread}/status", status)
            times = f"{round(ran_s * 1e9)} {round(waited_s * 1e9)} {round(ran_s * 1000)}\n"
            self.write(f"proc/{pid}/task/{thread}/schedstat", times)

    def end(self, pid: int) -> None:
        shutil.rmtree(self.root / f"proc/{pid}")


def _ticks(seconds: float) -> int:
    return round(seconds * 100)
