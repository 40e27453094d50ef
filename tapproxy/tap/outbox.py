"""From the data path to the parent: records leave through a socket pair, or are counted as lost.

Rules here: handing over never blocks and never fails a request; what does not fit is dropped and counted, and the count
travels with the next status frame. Frames leave in batches: each send wakes the parent, which on a busy core means a
switch of processes in the middle of somebody's stream (measured: a fourth of the cost of a short request). What the
records add up to is counted here and follows its batch, so that the parent need not read them.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from typing import Any, Final

import orjson

from tapproxy.core import frames, spot
from tapproxy.core.record import Record
from tapproxy.core.tally import Tally

# What may wait for a parent that is slow: a few hundred long records.
MAX_WAITING_BYTES: Final = 32 * 1024 * 1024
BATCH_S: Final = 0.05
BATCH_BYTES: Final = 256 * 1024


class Outbox:
    """The worker's end of the socket pair."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
        self.lost = 0
        self._loop = loop
        self._sock = sock
        self._waiting: deque[memoryview] = deque()
        self._waiting_bytes = 0
        self._writing = False
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        # What the records add up to, since it was last handed over.
        self._tally: Tally | None = None
        self._told: set[str] = set()

    def count(self, record: Record) -> None:
        """Adds a record to what is handed over with the next batch."""
        if self._tally is None:
            self._tally = Tally()
        self._tally.count(record)

    def record(self, record: Record) -> None:
        """Hands a record over, or counts it as lost."""
        if not self._told.issuperset(record.findings):
            self._tell(record)
        try:
            body = record.id.encode() + orjson.dumps(record)
        except (TypeError, ValueError):
            # A lone surrogate or a number beyond 64 bits: nothing of ours, and no reason to fail a request.
            self.lost += 1
            return
        if not self._put(frames.pack(frames.RECORD, body)):
            self.lost += 1

    def _tell(self, record: Record) -> None:
        """What a rule found is said in full the first time."""
        for finding in spot.findings(record):
            if finding.rule not in self._told:
                found = {"record": record.id, **finding.to_dict()}
                if self._put(frames.pack(frames.FOUND, orjson.dumps(found))):
                    self._told.add(finding.rule)

    def _hand_over_tally(self) -> None:
        """Where it does not fit now it stays, and goes with a later batch."""
        if self._tally is None:
            return
        try:
            frame = frames.pack(frames.TALLY, orjson.dumps(self._tally.dump()))
        except (TypeError, ValueError):  # as with a record; were it kept, no batch would leave any more
            self._tally = None
            return
        if self._append(frame):
            self._tally = None

    def status(self, status: dict[str, Any]) -> None:
        """Tells the parent how this worker is."""
        self._put(frames.pack(frames.STATUS, orjson.dumps(status)))

    def ready(self) -> None:
        """Tells the parent that this worker takes requests."""
        self._put(frames.pack(frames.READY, b"{}"))

    def probe(self, message: dict[str, Any]) -> None:
        """Tells the parent of a probe's key or stream."""
        self._put(frames.pack(frames.PROBE, orjson.dumps(message)))

    def _append(self, frame: bytes) -> bool:
        if self._closed or self._waiting_bytes + len(frame) > MAX_WAITING_BYTES:
            return False
        self._waiting.append(memoryview(frame))
        self._waiting_bytes += len(frame)
        return True

    def _put(self, frame: bytes) -> bool:
        if not self._append(frame):
            return False
        if self._timer is None and not self._writing:
            self._timer = self._loop.call_later(BATCH_S, self._write)
        if self._waiting_bytes > BATCH_BYTES and not self._writing:
            self._write()
        return True

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._writing:
            self._hand_over_tally()
        if len(self._waiting) > 1 and not self._writing:
            # One send for the batch.
            batch = memoryview(b"".join(self._waiting))
            self._waiting.clear()
            self._waiting.append(batch)
        while self._waiting:
            view = self._waiting[0]
            try:
                taken = self._sock.send(view)
            except (BlockingIOError, InterruptedError):
                self._arm()
                return
            except OSError:
                # The parent is gone; its workers end when they notice, without failing a request over it.
                self._closed = True
                self._waiting.clear()
                self._waiting_bytes = 0
                break
            self._waiting_bytes -= taken
            if taken < len(view):
                self._waiting[0] = view[taken:]
                self._arm()
                return
            self._waiting.popleft()
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock.fileno())

    def _arm(self) -> None:
        if not self._writing:
            self._writing = True
            self._loop.add_writer(self._sock.fileno(), self._write)

    async def flush(self, timeout_s: float) -> None:
        """Waits until all is handed over, what the records add up to included, at most ``timeout_s``."""
        deadline = self._loop.time() + timeout_s
        while self._loop.time() < deadline:
            if not self._writing:
                self._write()
            if self._closed or not (self._waiting or self._tally):
                return
            await asyncio.sleep(0.005)
