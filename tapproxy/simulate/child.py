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
from collections import deque
from collections.abc import Sequence

_START_TIMEOUT_S = 20.0
# Asked to end, a child has this long; then its group is killed.
_STOP_TIMEOUT_S = 4.0
_KEPT_LINES = 20

# Runs before the program in the same process: asks for SIGTERM at the parent's end (kept across exec), and looks
# whether that end has come already.
_LAUNCHER = """
import os, sys
if sys.platform == "linux":
    import ctypes, signal
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


class ChildError(Exception):
    """A child that did not become ready; the message has its last words."""


class Child:
    """One running program. ``name`` is what messages call it."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._words: deque[str] = deque(maxlen=_KEPT_LINES)
        self._listeners: list[asyncio.Task[None]] = []

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def stop(self) -> None:
        """Ends the program and whatever it started. Safe to call twice."""
        if self.running:
            _signal(self.pid, signal.SIGTERM, group=False)
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)
            except TimeoutError:
                pass
        # Also after an orderly end: a grandchild that stayed would keep its ports.
        _signal(self.pid, signal.SIGKILL, group=True)
        await self._process.wait()
        for task in self._listeners:
            task.cancel()
        await asyncio.gather(*self._listeners, return_exceptions=True)

    def words(self) -> str:
        """The last that it said on stderr, on one line."""
        return " / ".join(self._words) or "it said nothing"

    async def _listen(self, stream: asyncio.StreamReader, *, keep: bool) -> None:
        # Read to the end even where nobody wants it: a full pipe would stop the program.
        while line := await stream.readline():
            if keep and line.strip():
                self._words.append(line.decode(errors="replace").strip())


async def start(
    name: str, arguments: Sequence[str], ready: re.Pattern[str], *, timeout_s: float = _START_TIMEOUT_S
) -> tuple[Child, re.Match[str]]:
    """Runs ``python arguments…`` and waits for the line on stdout that says it is ready.

    Raises ChildError with its last words where it ends or stays silent; nothing is left then.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", _LAUNCHER, str(os.getpid()), sys.executable, *arguments,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip
    child = Child(name, process)
    assert process.stdout is not None
    assert process.stderr is not None
    child._listeners.append(asyncio.create_task(child._listen(process.stderr, keep=True)))
    try:
        async with asyncio.timeout(timeout_s):
            while line := await process.stdout.readline():
                found = ready.search(line.decode(errors="replace"))
                if found:
                    child._listeners.append(asyncio.create_task(child._listen(process.stdout, keep=False)))
                    return child, found
        await process.wait()
        await asyncio.wait(child._listeners, timeout=1)
        raise ChildError(f"{name} ended with status {process.returncode} before it was ready: {child.words()}")
    except TimeoutError:
        await child.stop()
        raise ChildError(f"{name} was not ready within {timeout_s:g} s: {child.words()}") from None
    except BaseException:
        await child.stop()
        raise


def _signal(pid: int, number: signal.Signals, *, group: bool) -> None:
    try:
        os.killpg(pid, number) if group else os.kill(pid, number)
    except ProcessLookupError:
        pass
