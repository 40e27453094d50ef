"""The engine's processes: those that the operator named, and what they started.

Rules here: only what was named is followed, by number and start time; a number that another process bears now is
said, never followed. Children are looked for at every reading. A child that was once seen stays one of the engine's,
also when its parent is gone and it has another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from tapproxy.evidence import procfs
from tapproxy.evidence.procfs import Stat

# Whose child a process is does not change, but numbers are used again: how often everything is looked at anew.
_RESCAN_TURNS: Final = 30
# An engine with more processes than this is a whole cluster's launcher; the rest is counted, not read.
_MOST_PROCESSES: Final = 256


@dataclass(frozen=True, slots=True)
class Found:
    """``members``: the living, the named ones first. ``lost``: named pid → why it is not followed any more."""

    members: list[Stat] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)
    left_out: int = 0


class Tree:
    """Finds them again at each call of ``find``."""

    def __init__(self, root: str, pids: Sequence[int], without: int | None = None) -> None:
        """``without``: a process that is none of the engine's, nor are its children: the reader's own."""
        self._root = root
        self._without = without
        self._named = list(dict.fromkeys(pids))
        self._starts: dict[int, int] = {}  # of members, by pid
        self._lost: dict[int, str] = {}
        self._parents: dict[int, int] = {}  # of everything that was seen, by pid
        self._turns = 0

    def find(self) -> Found:
        """Raises nothing: what cannot be read is not there."""
        members: dict[int, Stat] = {}
        for pid in self._named:
            if pid not in self._lost:
                self._take_named(pid, members)
        # Those seen before, whoever their parent is now.
        for pid in list(self._starts):
            if pid not in members:
                found = self._stat(pid)
                if found is not None and found.start_ticks == self._starts[pid]:
                    members[pid] = found
                else:
                    del self._starts[pid]
        left_out = self._take_children(members) if members else 0
        return Found(list(members.values()), dict(self._lost), left_out)

    def _take_named(self, pid: int, members: dict[int, Stat]) -> None:
        found = self._stat(pid)
        known = self._starts.get(pid)
        if found is None:
            was = "has ended" if known is not None else "is not to be seen here"
            self._lose(pid, f"process {pid} {was}: name the engine's process by --engine-pid, as this host numbers it")
        elif known is not None and found.start_ticks != known:
            self._lose(pid, f"number {pid} is another process now, started later: the engine's is gone; name the new")
        else:
            self._starts[pid] = found.start_ticks
            members[pid] = found

    def _lose(self, pid: int, why: str) -> None:
        self._lost[pid] = why
        self._starts.pop(pid, None)

    def _stat(self, pid: int) -> Stat | None:
        try:
            found = procfs.stat(self._root, pid)
        except (OSError, ValueError):
            return None
        return None if found.ended else found

    def _take_children(self, members: dict[int, Stat]) -> int:
        """Adds every descendant; returns how many there was no room for."""
        children: dict[int, list[int]] = {}
        for pid, parent in self._all_parents().items():
            children.setdefault(parent, []).append(pid)
        waiting, left_out = list(members), 0
        while waiting:
            for pid in sorted(children.get(waiting.pop(0), ())):
                if pid in members or pid in self._lost or pid == self._without:
                    continue
                if len(members) >= _MOST_PROCESSES:
                    left_out += 1
                    continue
                found = self._stat(pid)
                if found is not None:
                    members[pid] = found
                    self._starts[pid] = found.start_ticks
                    waiting.append(pid)
        return left_out

    def _all_parents(self) -> dict[int, int]:
        """Reads only processes that are new: the list of numbers is cheap, a file each is not."""
        if self._turns % _RESCAN_TURNS == 0:
            self._parents.clear()
        self._turns += 1
        try:
            now = procfs.pids(self._root)
        except OSError:
            return {}
        known = self._parents
        parents = {}
        for pid in now:
            parent = known.get(pid)
            if parent is None:
                found = self._stat(pid)
                # One that ended meanwhile: 0 is nobody's child.
                parent = 0 if found is None else found.ppid
            parents[pid] = parent
        self._parents = parents
        return parents
