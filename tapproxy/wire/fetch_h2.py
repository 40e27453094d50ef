"""Requests over HTTP/2 with the stamps of ``fetch``: what a browser's side of a proxy looks like.

Rules here: the protocol is h2's; the bytes and their stamps are those of ``client.Connection``. One connection, opened
with the first request (with TLS by ALPN, without by prior knowledge), any number of streams at once; a broken one is
opened anew. Flow control is opened wide, so that a window is never what an event waits for. It never raises for what
the network or the server does: ``Fetched.error`` says it, with the first words of ``fetch``.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from h2.config import H2Configuration
from h2.connection import ConnectionState, H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings

from tapproxy.core.address import parse_upstream
from tapproxy.wire.client import Connection, connect
from tapproxy.wire.fetch import Fetched, Read
from tapproxy.wire.origin import authority, tls_context
from tapproxy.wire.reasons import os_reason
from tapproxy.wire.stamps import Clock

NOT_OFFERED: Final = "the server offers no HTTP/2"
_WINDOW_BYTES: Final = 1 << 24
_CODES: Final[dict[int, str]] = {code.value: code.name for code in ErrorCodes}
# They belong to a connection, and HTTP/2 has none of them (RFC 9113 8.2.2); Host is :authority there.
_NOT_IN_H2: Final = frozenset({b"host", b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te"})


class H2Client:
    """Requests to one origin over one HTTP/2 connection at a time."""

    def __init__(
        self,
        url: str,
        *,
        insecure: bool = False,
        ca_file: Path | str | None = None,
        timeout_s: float | None = None,
        connect_timeout_s: float | None = 10.0,
    ) -> None:
        """Raises ConfigError for a URL that is no origin, or a CA file that cannot be read."""
        self._upstream = parse_upstream(url, "the URL")
        self._tls = tls_context(self._upstream, insecure=insecure, ca_file=ca_file)
        if self._tls is not None:
            self._tls.set_alpn_protocols(["h2"])
        self.clock = Clock()
        self.timeout_s = timeout_s
        self.connect_timeout_s = connect_timeout_s
        self.authority = authority(self._upstream).encode("ascii")
        self._session: _Session | None = None
        self._opening = asyncio.Lock()

    async def fetch(
        self,
        method: str,
        target: str,
        headers: list[tuple[bytes, bytes]] | None = None,
        body: bytes = b"",
        *,
        slowly: Sequence[tuple[float, bytes]] = (),
        enough: Callable[[Fetched], bool] | None = None,
    ) -> Fetched:
        """As ``wire.fetch.Client.fetch``. An answer that is left is reset, and the connection closed if it is alone."""
        self.clock.sample()
        fetched = Fetched(time.monotonic_ns())
        session = await self._opened(fetched)
        if session is None:
            return fetched
        fetched.stamps = "kernel" if session.connection.kernel_stamps else "user"
        size = len(body) + sum(len(piece) for _, piece in slowly)
        fields = self._fields(method, target, headers or [], size, session)
        try:
            stream = session.open(fetched, fields, body, last=not slowly, enough=enough)
        except H2Error as error:
            fetched.error = f"malformed: {error}"
            return fetched
        try:
            async with asyncio.timeout(self.timeout_s):
                for number, (pause_s, piece) in enumerate(slowly, 1):
                    await asyncio.wait({stream.done}, timeout=pause_s)
                    if stream.done.done():
                        break
                    session.send(stream, piece, last=number == len(slowly))
                await stream.done
        except TimeoutError:
            fetched.error = f"timeout: no complete answer within {self.timeout_s:g} s"
            stream.left = True
        except asyncio.CancelledError:
            session.cancel(stream)
            raise
        fetched.add_facts(session.connection, self.clock)
        if stream.left:
            session.leave(stream)
            fetched.left_ns = time.monotonic_ns()
        return fetched

    async def _opened(self, fetched: Fetched) -> _Session | None:
        """The connection, made where there is none; None where that fails, which ``fetched.error`` tells."""
        async with self._opening:
            session = self._session
            if session is not None and session.usable:
                fetched.reused = True
                return session
            try:
                connection = await connect(self._upstream, self.clock, tls=self._tls, timeout_s=self.connect_timeout_s)
            except (OSError, ssl.SSLError, TimeoutError) as error:
                # RFC 7301 3.2: a server that knows none of the protocols says so by an alert.
                refused = "no application protocol" in str(error).lower().replace("_", " ")
                fetched.error = NOT_OFFERED if refused else f"connect: {os_reason(error)}"
                return None
            fetched.add_connect(connection)
            if self._tls is not None and connection.protocol != "h2":
                connection.close()
                fetched.error = NOT_OFFERED
                return None
            self._session = _Session(connection)
            return self._session

    def _fields(
        self, method: str, target: str, headers: list[tuple[bytes, bytes]], size: int, session: _Session
    ) -> list[tuple[bytes, bytes]]:
        given = [(name.lower(), value) for name, value in headers]
        fields = [
            (b":method", method.encode("ascii")),
            (b":scheme", b"http" if self._tls is None else b"https"),
            (b":authority", dict(given).get(b"host", self.authority)),
            (b":path", target.encode("ascii")),
            *((name, value) for name, value in given if name not in _NOT_IN_H2),
        ]
        if (size or method in ("POST", "PUT", "PATCH")) and not any(name == b"content-length" for name, _ in given):
            fields.append((b"content-length", b"%d" % size))
        return fields

    async def close(self) -> None:
        """Closes the connection."""
        if self._session is not None:
            self._session.close()
            self._session = None


class _Stream:
    """One request's body still to be sent, and its answer being read."""

    def __init__(
        self,
        number: int,
        fetched: Fetched,
        enough: Callable[[Fetched], bool] | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.number = number
        self.fetched = fetched
        self.left = False
        # ``last``: no more than ``unsent`` will follow. ``sent``: the end of the request was written, or will never be.
        # ``written``: the kernel has all that was given.
        self.unsent = memoryview(b"")
        self.last = False
        self.sent = False
        self.written = False
        # The answer's bytes of the read at hand: one read is one Read, however many frames it held.
        self.reading: list[bytes] = []
        self.done: asyncio.Future[None] = loop.create_future()
        self._enough = enough

    def read(self, arrived_ns: int, read_at_ns: int) -> bool:
        """Notes what one socket read brought. Whether that is all that is wanted."""
        body = b"".join(self.reading)
        self.reading.clear()
        if not body:
            return False
        self.fetched.reads.append(Read(arrived_ns, read_at_ns, body))
        return self._enough is not None and self._enough(self.fetched)

    def finish(self, error: str | None) -> None:
        """Ends it, once."""
        if not self.done.done():
            self.fetched.error = error
            self.done.set_result(None)


class _Session:
    """The protocol's state over one connection: the sink of its bytes."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.streams: dict[int, _Stream] = {}
        self._going_away = False
        # Validation of what the peer sends stays on: a proxy that breaks the protocol is an answer too.
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        # In the first SETTINGS frame, which holds from the first byte; a later one would hold once acknowledged.
        self._h2.local_settings = Settings(
            client=True,
            initial_values={SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW_BYTES, SettingCodes.ENABLE_PUSH: 0},
        )
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_WINDOW_BYTES)
        connection.attach(self)
        self._flush()

    @property
    def usable(self) -> bool:
        """Whether a further request can go over it."""
        return not self._going_away and not self.connection.closed

    def open(
        self,
        fetched: Fetched,
        fields: list[tuple[bytes, bytes]],
        body: bytes,
        *,
        last: bool,
        enough: Callable[[Fetched], bool] | None,
    ) -> _Stream:
        """Sends the request's head, and what the peer's window takes of its body. ``last``: that is all of it.

        Raises H2Error where the protocol does not allow a further stream.
        """
        number = self._h2.get_next_available_stream_id()
        fetched.write_start_ns = time.monotonic_ns()
        self._h2.send_headers(number, fields, end_stream=last and not body)
        stream = self.streams[number] = _Stream(number, fetched, enough, self.connection.loop)
        stream.sent = last and not body
        self.send(stream, body, last=last)
        return stream

    def send(self, stream: _Stream, data: bytes, *, last: bool) -> None:
        """More of the request's body, as far as the peer's window lets it; the rest follows."""
        stream.unsent = memoryview(bytes(stream.unsent) + data)
        stream.last, stream.written = last, False
        self._push(stream)
        self._flush()

    def _push(self, stream: _Stream) -> None:
        try:
            while stream.unsent:
                window = self._h2.local_flow_control_window(stream.number)
                room = min(window, self._h2.max_outbound_frame_size, len(stream.unsent))
                if room <= 0:
                    return
                part, stream.unsent = stream.unsent[:room], stream.unsent[room:]
                self._h2.send_data(stream.number, bytes(part))
            if stream.last and not stream.sent:
                stream.sent = True
                self._h2.end_stream(stream.number)
        except H2Error:
            # The peer has ended the stream (an early 413, say): the event that says so is still to come.
            stream.unsent, stream.sent = memoryview(b""), True

    def leave(self, stream: _Stream) -> None:
        """Leaves an answer in the middle; with no other stream on it the connection is closed, as HTTP/1.1 has it."""
        self.cancel(stream)
        if not self.streams:
            self.close()

    def cancel(self, stream: _Stream) -> None:
        """Resets one stream, as a client does that no longer wants the answer."""
        if self.streams.pop(stream.number, None) is not None:
            self._reset(stream)
            self._flush()

    def _reset(self, stream: _Stream) -> None:
        if not self.connection.closed:
            try:
                self._h2.reset_stream(stream.number, ErrorCodes.CANCEL)
            except H2Error:
                pass  # it ended meanwhile

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data and self.connection.write(data):
            self.upstream_writable()

    def close(self) -> None:
        """Closes the connection; what is still open on it ends with it."""
        self.connection.close()
        self._fail("closed by this client")

    # -- the sink

    def upstream_bytes(self, data: bytes, arrived_ns: int, read_at_ns: int) -> None:
        """What the peer sent (Sink)."""
        try:
            events = self._h2.receive_data(data)
        except H2Error as error:
            self._flush()
            self._fail(f"malformed: {error}")
            self.connection.close()
            return
        for event in events:
            self._event(event, arrived_ns, read_at_ns)
        for stream in list(self.streams.values()):
            if stream.read(arrived_ns, read_at_ns):
                # It stays in ``streams`` until whoever waits for it leaves: that is one step of the loop from here.
                stream.left = True
                stream.finish(None)
        self._flush()

    def _event(self, event: Event, arrived_ns: int, read_at_ns: int) -> None:
        if isinstance(event, WindowUpdated):
            for one in self.streams.values():
                if not one.sent:
                    self._push(one)
            return
        if isinstance(event, ConnectionTerminated):
            self._goaway(event)
            return
        number = getattr(event, "stream_id", None)
        stream = self.streams.get(number) if number is not None else None
        if isinstance(event, DataReceived) and event.flow_controlled_length:
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        if stream is None or stream.done.done():
            return
        fetched = stream.fetched
        if isinstance(event, ResponseReceived):
            fields = [(bytes(name), bytes(value)) for name, value in event.headers]
            status = dict(fields).get(b":status", b"")
            fetched.head_ns = arrived_ns
            fetched.http_version = "2"
            fetched.status = int(status) if status.isdigit() else None
            fetched.headers = [(name, value) for name, value in fields if not name.startswith(b":")]
        elif isinstance(event, DataReceived):
            stream.reading.append(event.data)
        elif isinstance(event, StreamEnded):
            stream.read(arrived_ns, read_at_ns)
            fetched.end_ns = arrived_ns
            if not stream.sent:
                self._reset(stream)  # a whole answer to half a request: the rest is not sent
            self._end(stream, None)
        elif isinstance(event, StreamReset):
            stream.read(arrived_ns, read_at_ns)
            began = "truncated" if fetched.head_ns is not None else "closed"
            code = _CODES.get(event.error_code, event.error_code)
            self._end(stream, f"{began}: the stream was reset ({code})")

    def _goaway(self, event: ConnectionTerminated) -> None:
        """No further streams; those it names are still answered (RFC 9113 6.8)."""
        self._going_away = True
        code = _CODES.get(int(event.error_code or 0), event.error_code)
        refused = [one for one in self.streams.values() if one.number > (event.last_stream_id or 0)]
        for stream in refused:
            self._end(stream, f"closed: the server takes no more requests on this connection (GOAWAY, {code})")
        if self.streams:
            # h2 counts a connection as closed from here, and would call the rest of the answers a broken protocol.
            self._h2.state_machine.state = ConnectionState.CLIENT_OPEN

    def _end(self, stream: _Stream, error: str | None) -> None:
        self.streams.pop(stream.number, None)
        stream.finish(error)

    def upstream_closed(self, error: Exception | None) -> None:
        """The connection ended (Sink)."""
        self._fail(str(error or "the server closed the connection"))

    def upstream_writable(self) -> None:
        """The kernel took all (Sink)."""
        for stream in self.streams.values():
            if not stream.written and not stream.unsent:
                stream.written = True
                stream.fetched.write_end_ns = time.monotonic_ns()

    def _fail(self, why: str) -> None:
        self._going_away = True
        for stream in list(self.streams.values()):
            error = why
            if not why.startswith("malformed: "):
                error = f"closed: no answer ({why})" if stream.fetched.head_ns is None else f"truncated: {why}"
            self._end(stream, error)
