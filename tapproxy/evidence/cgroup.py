"""The control group that a process is in: how much CPU it may have, and how long it was held back for it.

Rules here: limits are inherited, so every level up to the root of what is mounted counts: the tightest limit, and
the throttling of them all. Version 2 and version 1 are read alike. What is not mounted here is not guessed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from tapproxy.evidence import procfs

# The field of a line of mountinfo after which the file system's type stands.
_SEPARATOR: Final = " - "


@dataclass(slots=True)
class Reading:
    """``limit_cores``: None where there is no limit. ``throttled_s``: over all cores, so it may rise faster than time.

    ``periods``, ``throttled_periods``: of the quota's periods, in how many it ran out. ``pressure_s``: how long some
    task of the group waited for a core (version 2).
    """

    path: str
    version: int
    limit_cores: float | None = None
    throttled_s: float | None = None
    periods: int | None = None
    throttled_periods: int | None = None
    pressure_s: float | None = None


@dataclass(frozen=True, slots=True)
class _Mount:
    """``top``: the group that the mount point shows, of those of this hierarchy."""

    point: str
    top: str
    version: int


def read(root: str, pid: int) -> Reading:
    """The CPU part of a process's group. Raises OSError with a sentence where it cannot be read."""
    mount, group = _find(root, pid)
    inside = PurePosixPath(group)
    if mount.top != "/" and inside.is_relative_to(mount.top):
        inside = PurePosixPath("/") / inside.relative_to(mount.top)
    if ".." in inside.parts:
        raise OSError(f"process {pid} is in a control group outside this container: {group}")
    levels = [f"{root}{mount.point}{level if str(level) != '/' else ''}" for level in (inside, *inside.parents)]
    if not os.path.isdir(levels[0]):
        raise OSError(f"the control group {group} of process {pid} is not to be seen here")
    found = Reading(group, mount.version)
    for level in levels:
        (_level_v2 if mount.version == 2 else _level_v1)(level, found)
    if mount.version == 2:
        found.pressure_s = _pressure(levels[0])
    return found


def _find(root: str, pid: int) -> tuple[_Mount, str]:
    """The hierarchy that limits CPU, and the group in it."""
    groups: dict[str, str] = {}  # controller, "" for version 2 → group
    for line in procfs.read(f"{root}/proc/{pid}/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = group
    mounts = _mounts(root)
    # In a hybrid set-up the CPU controller is version 1's, and version 2 has none.
    for controller, version in (("cpu", 1), ("", 2)):
        mount = next((each for name, each in mounts if name == controller and each.version == version), None)
        if controller in groups and mount is not None:
            return mount, groups[controller]
    raise OSError("no control groups with a CPU controller are mounted here")


def _mounts(root: str) -> list[tuple[str, _Mount]]:
    """(controller, mount); the controller is empty for version 2."""
    found = []
    for line in procfs.read(f"{root}/proc/self/mountinfo").splitlines():
        before, separator, after = line.partition(_SEPARATOR)
        fields, kind = before.split(), after.split()
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            found.append(("", _Mount(fields[4], fields[3], 2)))
        elif kind[0] == "cgroup" and "cpu" in kind[2].split(","):
            found.append(("cpu", _Mount(fields[4], fields[3], 1)))
    return found


def _level_v2(level: str, found: Reading) -> None:
    try:
        quota, period = procfs.read(f"{level}/cpu.max").split()
        if quota != "max":
            _tighten(found, int(quota) / int(period))
    except (OSError, ValueError, ZeroDivisionError):
        pass  # the root group has no limit
    _throttling(level, found, "throttled_usec", 1e6)


def _level_v1(level: str, found: Reading) -> None:
    try:
        quota, period = (int(procfs.read(f"{level}/cpu.cfs_{name}_us")) for name in ("quota", "period"))
        if quota > 0:
            _tighten(found, quota / period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    _throttling(level, found, "throttled_time", 1e9)


def _tighten(found: Reading, cores: float) -> None:
    found.limit_cores = cores if found.limit_cores is None else min(found.limit_cores, cores)


def _throttling(level: str, found: Reading, name: str, a_second: float) -> None:
    try:
        fields = dict(line.split() for line in procfs.read(f"{level}/cpu.stat").splitlines())
        held, periods, ran_out = int(fields[name]), int(fields["nr_periods"]), int(fields["nr_throttled"])
    except (OSError, ValueError, KeyError):
        return
    found.throttled_s = (found.throttled_s or 0.0) + held / a_second
    found.periods = (found.periods or 0) + periods
    found.throttled_periods = (found.throttled_periods or 0) + ran_out


def _pressure(level: str) -> float | None:
    try:
        return some_s(procfs.read(f"{level}/cpu.pressure"))
    except (OSError, ValueError):
        return None


def some_s(text: str) -> float:
    """How long some task waited, of a pressure file, in s. Raises ValueError."""
    for line in text.splitlines():
        if line.startswith("some "):
            return int(line.rpartition("total=")[2]) / 1e6
    raise ValueError("no line of a pressure file begins with some")
