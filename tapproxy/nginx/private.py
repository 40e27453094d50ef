"""The private directories of nginx on loopback: how they are named, and how those that a killed process left go.

Rules here: a name says which process it belongs to: the kernel's run and the namespace of its number, the number, when
it began. Only what is ours, of this name, and of a process that is surely gone is removed; whatever is in doubt stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import re
import shutil
import stat
import tempfile
from pathlib import Path
from typing import Final

from tapproxy.wire.stamps import boot_id

_PREFIX: Final = "tapproxy-nginx-"
_NAME: Final = re.compile(_PREFIX + r"([0-9a-f]{8})-(\d{1,10})-(\d{1,20})-\w{8}", re.ASCII)


def private_directory(parent: Path | None = None) -> Path:
    """A fresh directory (0700, unguessable name) for one nginx, in the temporary directory unless ``parent`` is given.

    ``RunningNginx.stop`` removes it.
    """
    run, began = _run_of_kernel(), _began(os.getpid())
    owner = "" if run is None or began is None else f"{run}-{os.getpid()}-{began}-"
    return Path(tempfile.mkdtemp(prefix=_PREFIX + owner, dir=parent))


def remove_stale(parent: Path | None = None) -> list[Path]:
    """Removes what processes that are gone have left of these, and tells what that was. ``parent``: as above."""
    run = _run_of_kernel()
    if run is None:  # nobody here can tell whether a process is gone
        return []
    removed = []
    with contextlib.suppress(OSError), os.scandir(parent or tempfile.gettempdir()) as entries:
        for entry in entries:
            name = _NAME.fullmatch(entry.name)
            if name is None or name[1] != run or not _ours(Path(entry.path)) or _lives(int(name[2]), int(name[3])):
                continue
            # Follows no link, also where one takes the place of a directory meanwhile.
            shutil.rmtree(entry.path, ignore_errors=True)
            if not os.path.lexists(entry.path):
                removed.append(Path(entry.path))
    return removed


def _run_of_kernel() -> str | None:
    """Within what a process number means one process: a kernel's run, and a namespace (containers share /tmp)."""
    boot = boot_id()
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        return None
    return None if boot is None else hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:8]


def _began(pid: int) -> int | None:
    """When the process began, in the kernel's ticks since its start; None where there is no such process."""
    try:
        # The name stands in brackets and may hold anything; the third field follows it.
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def _lives(pid: int, began: int) -> bool:
    """Whether the process may still be there."""
    found = _began(pid)
    if found is not None:
        return found == began
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True  # there, and hidden from us


def _ours(path: Path) -> bool:
    """Whether it is a directory that this program made: of this user, or, made by root, nginx's; for no one else."""
    try:
        found = path.lstat()
    except OSError:
        return False
    owners = {os.geteuid()}
    if os.geteuid() == 0:
        with contextlib.suppress(KeyError):
            owners.add(pwd.getpwnam("nobody").pw_uid)
    return stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o700 and found.st_uid in owners
