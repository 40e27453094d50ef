"""A program started for a while: ready or an error with its last words, and gone afterwards."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tapproxy.simulate.child import ChildError, start

T = TypeVar("T")
READY = re.compile(r"ready (\d+)")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(work, 30))


def program(text: str) -> list[str]:
    return ["-u", "-c", text]


def alive(pid: int) -> bool:
    """A zombie is gone: it only waits for whoever inherited it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_line_that_says_ready_is_handed_on() -> None:
    async def work() -> tuple[str, bool]:
        child, found = await start("it", program("print('loading'); print('ready 42'); input()"), READY)
        running = child.running
        await child.stop()
        return found[1], running and not child.running

    # input() ends at once, since stdin is empty: the child may be gone already, but it was ready.
    assert run(work())[0] == "42"


def test_one_that_ends_early_leaves_its_last_words() -> None:
    text = "import sys; print('loading'); sys.exit('no such model')"
    with pytest.raises(ChildError, match=r"the engine ended with status 1 before it was ready: no such model"):
        run(start("the engine", program(text), READY))


def test_one_that_stays_silent_is_ended() -> None:
    with pytest.raises(ChildError, match=r"it was not ready within 0.3 s: it said nothing"):
        run(start("it", program("import time; time.sleep(60)"), READY, timeout_s=0.3))


def test_one_that_ignores_the_request_is_killed() -> None:
    text = "import signal, time; signal.signal(15, signal.SIG_IGN); print('ready 1'); time.sleep(60)"

    async def work() -> int:
        child, _ = await start("it", program(text), READY)
        await child.stop(grace_s=0.2)
        await child.stop()
        return child.pid

    assert not alive(run(work()))


def test_what_it_started_ends_with_it() -> None:
    text = (
        "import subprocess, sys, time\n"
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('ready', p.pid); time.sleep(60)"
    )

    async def work() -> int:
        child, found = await start("it", program(text), READY)
        await child.stop()
        return int(found[1])

    grandchild = run(work())
    deadline = time.monotonic() + 5
    while alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(grandchild)


def test_a_start_that_is_cut_short_leaves_nothing(tmp_path: Path) -> None:
    text = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"

    async def work() -> None:
        task = asyncio.ensure_future(start("it", program(text), READY))
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(work())
    assert not alive(int((tmp_path / "pid").read_text()))


def test_it_leads_a_group_of_its_own() -> None:
    async def work() -> tuple[int, int]:
        child, _ = await start("it", program("import time; print('ready 1'); time.sleep(60)"), READY)
        group = os.getpgid(child.pid)
        await child.stop()
        return child.pid, group

    pid, group = run(work())
    assert pid == group != os.getpgrp()
