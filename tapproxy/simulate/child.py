"""A program started for a while: the simulated engine, a tap. It says when it is ready, and never outlives its parent.

Rules here: imports nothing of ours (as all of simulate, scenarios aside). Each child leads its own process group, so
that the terminal's Ctrl-C reaches only the parent, who stops the children in order; a parent that is killed takes
them along (Linux: the parent-death signal). What a child says on stderr is kept for the message when it fails.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_START_TIMEOUT_S = 20.0
# Asked to end, a child has this long; then its group is killed.
_STOP_TIMEOUT_S = 4.0
_POLL_S = 0.01
_KEPT_LINES = 20
# After the end of the program, for what it still said.
_LAST_WORDS_S = 1.0

# Runs before the program in the same process: asks for SIGTERM at the parent's end (kept across exec), and looks
# whether that end has come already. Enters the network namespace of a process, puts a file in the place of
# /etc/resolv.conf (in a mount namespace of its own: nobody else sees it), and keeps to some cores, where told to.
_LAUNCHER = """
import os, sys
parent, network, resolver, cores = sys.argv[1:5]
if sys.platform == "linux":
    import ctypes, signal
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, int(signal.SIGTERM), 0, 0, 0)
    if network != "0":
        there = os.open(f"/proc/{network}/ns/net", os.O_RDONLY)
        if libc.setns(there, 0x40000000):
            sys.exit("the network namespace cannot be entered")
        os.close(there)
    if resolver:
        private = libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None)
        if private or libc.mount(os.fsencode(resolver), b"/etc/resolv.conf", None, 0x1000, None):
            sys.exit("a resolv.conf of its own is not allowed: " + os.strerror(ctypes.get_errno()))
    if cores:
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
if os.getppid() != int(parent):
    sys.exit("the parent is gone")
os.execv(sys.argv[5], sys.argv[5:])
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a child runs: in the network namespace of the process ``network`` (0: ours), with ``resolver`` for its
    /etc/resolv.conf, on these cores alone (none: on any)."""

    network: int = 0
    resolver: Path | None = None
    cores: tuple[int, ...] = ()

    def words(self) -> list[str]:
        """As the launcher is told."""
        return [str(self.network), str(self.resolver or ""), ",".join(map(str, self.cores))]


class ChildError(Exception):
    """A child that did not become ready; the message has its last words."""


class Child:
    """One running program. ``name`` is what messages call it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, ready: re.Pattern[str]) -> None:
        self.name = name
        self.pid = process.pid
        self.ready: asyncio.Future[re.Match[str]] = asyncio.get_running_loop().create_future()
        self._process = process
        self._words: deque[str] = deque(maxlen=_KEPT_LINES)
        assert process.stdout is not None
        assert process.stderr is not None
        # Both are read to their end even where nobody wants them: a full pipe would stop the program.
        self._pumps = [
            asyncio.ensure_future(self._look_for(ready, process.stdout)),
            asyncio.ensure_future(self._keep_words(process.stderr)),
        ]

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    def words(self) -> str:
        """The last that it said on stderr, on one line."""
        return " / ".join(self._words) or "it said nothing"

    async def wait(self) -> int:
        """Its exit status, once it has ended and said its last."""
        status = await self._process.wait()
        await asyncio.wait(self._pumps, timeout=_LAST_WORDS_S)
        return status

    async def stop(self, grace_s: float = _STOP_TIMEOUT_S) -> None:
        """Ends the program and whatever it started. Safe to call twice."""
        if self.running:
            _signal(self.pid, signal.SIGTERM, group=False)
            # Not process.wait(): that also waits for the pipes, which a grandchild may hold.
            deadline = time.monotonic() + grace_s
            while self.running and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_S)
        # Also after an orderly end: a grandchild that stayed would keep its ports.
        _signal(self.pid, signal.SIGKILL, group=True)
        await self.wait()
        for pump in self._pumps:
            pump.cancel()
        self.ready.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _look_for(self, ready: re.Pattern[str], stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            found = ready.search(line.decode(errors="replace"))
            if found and not self.ready.done():
                self.ready.set_result(found)

    async def _keep_words(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            if line.strip():
                self._words.append(line.decode(errors="replace").strip())


async def start(
    name: str,
    arguments: Sequence[str],
    ready: re.Pattern[str],
    *,
    timeout_s: float = _START_TIMEOUT_S,
    place: Place = Place(),
) -> tuple[Child, re.Match[str]]:
    """Runs ``python arguments…`` and waits for the line on stdout that says it is ready.

    Raises ChildError with its last words where it ends or stays silent; nothing is left then.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", _LAUNCHER, str(os.getpid()), *place.words(), sys.executable, *arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    child = Child(name, process, ready)
    ended = asyncio.ensure_future(child.wait())
    try:
        either: set[asyncio.Future[Any]] = {child.ready, ended}
        await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if child.ready.done():
            return child, child.ready.result()
        if ended.done():
            trouble = f"{name} ended with status {ended.result()} before it was ready: {child.words()}"
        else:
            trouble = f"{name} was not ready within {timeout_s:g} s: {child.words()}"
        await child.stop()
        raise ChildError(trouble)
    except asyncio.CancelledError:
        await child.stop()
        raise
    finally:
        ended.cancel()


def _signal(pid: int, number: signal.Signals, *, group: bool) -> None:
    try:
        os.killpg(pid, number) if group else os.kill(pid, number)
    except ProcessLookupError:
        pass
