"""Disturbances that are no part of a path: processes that stand still, busy cores, a slow name server.

Rules here: whatever was stopped goes on at the end (``let_go``), whatever way the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Final, cast

# A program that takes a core: it says so, and never rests.
HOG: Final = "print('busy', flush=True)\nwhile True: pass"
_TASKS: set[asyncio.Task[None]] = set()


def stand_still(pid: int, stopped_ms: float, every_ms: float) -> None:
    """From now on the processes that ``pid`` started stand still for so long of every so long."""
    task = asyncio.ensure_future(_stand_still(children(pid), stopped_ms / 1000, every_ms / 1000))
    _TASKS.add(task)
    task.add_done_callback(_TASKS.discard)


def let_go() -> None:
    """Everything that stands still goes on, for good."""
    for task in list(_TASKS):
        task.cancel()


async def _stand_still(pids: list[int], stopped_s: float, every_s: float) -> None:
    due_s = time.monotonic()
    try:
        while True:
            _signal(pids, signal.SIGSTOP)
            # Counted from when it was to begin: what is late does not add up.
            await asyncio.sleep(max(0.0, due_s + stopped_s - time.monotonic()))
            _signal(pids, signal.SIGCONT)
            due_s += every_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
    finally:
        _signal(pids, signal.SIGCONT)


def _signal(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def children(pid: int) -> list[int]:
    """The processes that this one started and that still run."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


async def slow_names(host: str, delay_ms: float) -> asyncio.DatagramTransport:
    """A name server on ``host``:53 that answers every name with 127.0.0.1, so late. Raises OSError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setblocking(False)
        sock.bind((host, 53))
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(lambda: _Names(delay_ms / 1000), sock=sock)
    except BaseException:
        sock.close()
        raise
    return transport


class _Names(asyncio.DatagramProtocol):
    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str | object, int]) -> None:
        answer = answered(data)
        if answer is not None:
            asyncio.get_running_loop().call_later(self._delay_s, self._transport.sendto, answer, addr)


def answered(query: bytes) -> bytes | None:
    """The answer to a query of one name: 127.0.0.1 for an A, no such record for everything else. None: no query."""
    if len(query) < 17:
        return None
    end = 12
    while end < len(query) and query[end]:
        end += query[end] + 1
    question = query[12 : end + 5]
    if len(question) != end - 12 + 5:
        return None
    is_a = question[-4:] == b"\0\1\0\1"
    head = query[:2] + struct.pack(">HHHHH", 0x8180, 1, int(is_a), 0, 0)
    record = b"\xc0\x0c" + struct.pack(">HHIH", 1, 1, 0, 4) + socket.inet_aton("127.0.0.1")
    return head + question + (record if is_a else b"")
