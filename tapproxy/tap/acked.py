"""The client's side under ``--ack-stamps``: when the client's kernel had each read of an answer.

Rules here: none of this exists where the flag is off, the ordinary connection does not know of it. A record waits for
the acknowledgement of its last byte, at most ``ACK_WAIT_S``; what is not acknowledged by then stays unknown. A
connection that closes after its answer sends its end at once, as without the flag, and keeps a duplicate of its socket
until the last stamp is in; a cut one does not wait, since its reset must not.
"""

from __future__ import annotations

import asyncio
import socket
from array import array
from collections.abc import Sequence
from typing import Any, Final

from uvicorn.server import ServerState

from tapproxy.tap.server import ClientConnection, ServerContext
from tapproxy.wire.acks import AckTrack, AckWatcher

# Beyond the round trips that people serve over, and within what a crash may cost (a second of records).
ACK_WAIT_S: Final = 1.0
# As many reads as an event log keeps.
_MAX_READS: Final = 1_000_000
_UNKNOWN: Final = -1


class AckLog:
    """The acknowledgements of one answer, read by read (the numbers of ``events.read``)."""

    __slots__ = ("_acked", "_connection", "_last", "_offsets", "_settled", "_unplaced")

    def __init__(self, connection: AckedConnection) -> None:
        self._connection = connection
        # Per read: the bytes written to the connection when the read was on its way, and when those were acknowledged.
        self._offsets = array("q")
        self._acked = array("q")
        # Reads at the end of the list whose bytes were not all taken yet: they get the place of the next that is.
        self._unplaced = 0
        self._last = (0, 0)
        self._settled: asyncio.Future[None] | None = None

    def wrote(self) -> None:
        """The bytes of the next read were handed over just now."""
        if len(self._offsets) >= _MAX_READS:
            return
        place = self._connection.place()
        if place is None:
            self._offsets.append(_UNKNOWN)
            self._unplaced += 1
            return
        self._place_rest(place)
        self._offsets.append(place)

    def _place_rest(self, place: int) -> None:
        """The reads without a place are covered by this one."""
        if self._unplaced:
            end = len(self._offsets)
            for index in range(end - self._unplaced, end):
                self._offsets[index] = place
            self._unplaced = 0
            self.acked(*self._last)

    def acked(self, acked_bytes: int, at_ns: int) -> None:
        """The client's kernel had that many bytes of the connection at that time."""
        self._last = (acked_bytes, at_ns)
        offsets, acked = self._offsets, self._acked
        number = len(acked)
        while number < len(offsets) and _UNKNOWN < offsets[number] <= acked_bytes:
            acked.append(at_ns)
            number += 1
        if number == len(offsets):
            self.settle()

    async def all_acked(self) -> None:
        """Waits for the last acknowledgement: the answer is complete. Returns without it when time is out."""
        connection = self._connection
        if self._unplaced and (place := connection.place()) is not None:
            self._place_rest(place)
        if len(self._acked) < len(self._offsets) and connection.track is not None:
            self._settled = connection.loop.create_future()
            timer = connection.loop.call_later(ACK_WAIT_S, self.settle)
            try:
                await self._settled
            finally:
                timer.cancel()

    def settle(self) -> None:
        """Waits no longer."""
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)

    def of_events(self, reads: Sequence[int], t0_ns: int) -> list[int | None]:
        """For events that came in these reads: when they were acknowledged, relative to t0; None where unknown.

        Nothing more will be asked of this log.
        """
        self._connection.ack_log_read(self)
        acked = self._acked
        count = len(acked)
        return [acked[read] - t0_ns if read < count else None for read in reads]


class AckedConnection(ClientConnection):
    """A client connection whose kernel tells of acknowledgements."""

    __slots__ = ("_logs", "_orderly", "_tls", "_written", "track")

    def __init__(
        self,
        context: ServerContext,
        *,
        config: Any,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: Any = None,
    ) -> None:
        super().__init__(context, config=config, server_state=server_state, app_state=app_state, _loop=_loop)
        self.track: AckTrack | None = None
        self._logs: list[AckLog] = []
        self._written = 0
        self._tls = False
        self._orderly = False

    @property
    def _watcher(self) -> AckWatcher:
        assert self.context.acks is not None
        return self.context.acks

    def watch(self, sock: socket.socket) -> None:
        self._tls = self.transport.get_extra_info("ssl_object") is not None
        # The leave watcher's epoll would wake at every stamp too: here one epoll does both.
        self.track = self._watcher.watch(sock, self._acked, self._hung_up)
        if self.track is None:
            super().watch(sock)

    def ack_log(self) -> AckLog | None:
        if self.track is None:
            return None
        log = AckLog(self)
        self._logs.append(log)
        return log

    def ack_log_read(self, log: AckLog) -> None:
        """That answer's record is being written."""
        self._logs.remove(log)
        if self.lost and not self._logs:
            self._let_go()

    def write_wire(self, data: bytes) -> bool:
        taken = super().write_wire(data)
        if not self.lost:
            self._written += len(data)
        return taken

    def place(self) -> int | None:
        """Bytes that the connection carried up to here; None where they cannot be told, or not yet."""
        if self.track is None or not self._tls:
            return self._written
        # What TLS makes of them is known to the kernel alone, once it has them all.
        return self.track.written() if self.writable else None

    def _acked(self, acked_bytes: int, at_ns: int) -> None:
        for log in tuple(self._logs):
            log.acked(acked_bytes, at_ns)

    def _hung_up(self) -> None:
        if self.lost:
            self._let_go()
        else:
            self.watched_leave()

    def linger(self) -> None:
        self._orderly = True
        super().linger()

    def shutdown(self) -> None:
        self._orderly = self._orderly or self.head is None
        super().shutdown()

    def abort(self, *, by_reset: bool) -> None:
        self._orderly = False
        super().abort(by_reset=by_reset)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.track is None:
            return
        if self._orderly and exc is None and self._logs:
            # The transport's descriptor is closed, or will be in this call's wake; ours waits for the last stamps.
            self._watcher.finish(self.track)
            self.loop.call_later(ACK_WAIT_S, self._let_go)
        else:
            self._let_go()

    def _let_go(self) -> None:
        track, self.track = self.track, None
        if track is not None:
            self._watcher.forget(track)
        for log in self._logs:
            log.settle()
