"""Requests over HTTP/2 with the stamps of ``fetch``: what a browser's side of a proxy looks like.

Rules here: the protocol is h2's; the bytes and their stamps are those of ``client.Connection``. One connection, opened
with the first request (with TLS by ALPN, without by prior knowledge), any number of streams at once. Flow control is
opened wide, so that a window is never what an event waits for.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path
from typing import Final

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import H2Error
from h2.settings import SettingCodes

from tapproxy.core.address import parse_upstream
from tapproxy.wire.client import Connection, connect
from tapproxy.wire.fetch import Fetched, Read
from tapproxy.wire.origin import authority, tls_context
from tapproxy.wire.stamps import Clock

_WINDOW: Final = 1 << 24


class H2Client:
    """Requests to one origin over one HTTP/2 connection."""

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
        self.authority = authority(self._upstream)
        self._session: _Session | None = None
        self._opening = asyncio.Lock()

    async def fetch(
        self, method: str, target: str, headers: list[tuple[bytes, bytes]] | None = None, body: bytes = b""
    ) -> Fetched:
        """Sends one request and reads its answer to the end; what went wrong is in ``error``."""
        self.clock.sample()
        fetched = Fetched(time.monotonic_ns(), http_version="2")
        async with self._opening:
            session = self._session
            fetched.reused = session is not None and session.usable
            if session is None or not session.usable:
                try:
                    connection = await connect(
                        self._upstream, self.clock, tls=self._tls, timeout_s=self.connect_timeout_s
                    )
                except (OSError, ssl.SSLError, TimeoutError) as error:
                    fetched.error = f"connect: {error or type(error).__name__}"
                    return fetched
                fetched.connect_ns, fetched.tls_ns = connection.connect_ns, connection.tls_ns
                session = self._session = _Session(connection)
        fetched.stamps = "kernel" if session.connection.kernel_stamps else "user"
        try:
            stream = session.open(fetched, method, self.authority, target, headers or [], body)
        except H2Error as error:
            fetched.error = f"malformed: {error}"
            return fetched
        try:
            async with asyncio.timeout(self.timeout_s):
                await stream.done
        except TimeoutError:
            fetched.error = f"timeout: no complete answer within {self.timeout_s:g} s"
            session.cancel(stream)
        except asyncio.CancelledError:
            session.cancel(stream)
            raise
        self.clock.sample()
        return fetched

    async def close(self) -> None:
        """Closes the connection."""
        if self._session is not None:
            self._session.connection.close()
            self._session = None


class _Stream:
    """One request's body still to be sent, and its answer being read."""

    def __init__(self, number: int, fetched: Fetched, body: bytes, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.fetched = fetched
        self.unsent = memoryview(body)
        self.done: asyncio.Future[None] = loop.create_future()

    def finish(self, error: str | None) -> None:
        if not self.done.done():
            self.fetched.error = error
            self.done.set_result(None)


class _Session:
    """The protocol's state over one connection: the sink of its bytes."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.streams: dict[int, _Stream] = {}
        self.usable = True
        # Validation of what the peer sends stays on: a proxy that breaks the protocol is an answer too.
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        self._h2.initiate_connection()
        self._h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW, SettingCodes.ENABLE_PUSH: 0})
        self._h2.increment_flow_control_window(_WINDOW)
        connection.attach(self)
        self._flush()

    def open(
        self,
        fetched: Fetched,
        method: str,
        host: str,
        target: str,
        headers: list[tuple[bytes, bytes]],
        body: bytes,
    ) -> _Stream:
        """Sends the request's head, and what the peer's window takes of its body."""
        number = self._h2.get_next_available_stream_id()
        stream = self.streams[number] = _Stream(number, fetched, body, self.connection.loop)
        scheme = "http" if self.connection.tls_ns is None else "https"
        fields = [(":method", method), (":scheme", scheme), (":authority", host), (":path", target)]
        head = [(name.encode("ascii"), value.encode("ascii")) for name, value in fields]
        head += [(name.lower(), value) for name, value in headers]
        if body or method in ("POST", "PUT", "PATCH"):
            head.append((b"content-length", b"%d" % len(body)))
        fetched.write_start_ns = time.monotonic_ns()
        self._h2.send_headers(number, head, end_stream=not body)
        self._send_body(stream)
        self._flush()
        return stream

    def _send_body(self, stream: _Stream) -> None:
        while stream.unsent:
            try:
                window = self._h2.local_flow_control_window(stream.number)
                room = min(window, self._h2.max_outbound_frame_size, len(stream.unsent))
                if room <= 0:
                    return
                part, stream.unsent = stream.unsent[:room], stream.unsent[room:]
                self._h2.send_data(stream.number, bytes(part), end_stream=not stream.unsent)
            except H2Error:
                # The peer has ended the stream (an early 413, say): the event that says so is still to come.
                stream.unsent = memoryview(b"")
                return
        stream.fetched.write_end_ns = stream.fetched.write_end_ns or time.monotonic_ns()

    def cancel(self, stream: _Stream) -> None:
        """Resets one stream, as a client does that no longer wants the answer."""
        if self.streams.pop(stream.number, None) is not None and not self.connection.closed:
            try:
                self._h2.reset_stream(stream.number, ErrorCodes.CANCEL)
            except H2Error:
                pass  # it ended meanwhile
            self._flush()

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data:
            self.connection.write(data)

    # -- the sink

    def upstream_bytes(self, data: bytes, arrived_ns: int, read_at_ns: int) -> None:
        try:
            events = self._h2.receive_data(data)
        except H2Error as error:
            self._fail(f"malformed: {error}")
            self._flush()
            return
        for event in events:
            self._event(event, arrived_ns, read_at_ns)
        self._flush()

    def _event(self, event: object, arrived_ns: int, read_at_ns: int) -> None:
        if isinstance(event, WindowUpdated):
            for stream in list(self.streams.values()):
                if not stream.done.done():
                    self._send_body(stream)
            return
        if isinstance(event, ConnectionTerminated):
            self.usable = False
            return
        number = getattr(event, "stream_id", None)
        found = self.streams.get(number) if number is not None else None
        if isinstance(event, DataReceived) and event.flow_controlled_length:
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        if found is None:
            return
        fetched = found.fetched
        if isinstance(event, ResponseReceived):
            fields = [(bytes(name), bytes(value)) for name, value in event.headers]
            fetched.head_ns = arrived_ns
            fetched.status = next(int(value) for name, value in fields if name == b":status")
            fetched.headers = [(name, value) for name, value in fields if not name.startswith(b":")]
        elif isinstance(event, DataReceived):
            fetched.reads.append(Read(arrived_ns, read_at_ns, event.data))
        elif isinstance(event, StreamEnded):
            fetched.end_ns = arrived_ns
            self._end(found, None)
        elif isinstance(event, StreamReset):
            # After a whole answer the peer may refuse the rest of the request (RFC 9113 8.1).
            known = {code.value: code.name for code in ErrorCodes}
            self._end(found, f"truncated: the stream was reset ({known.get(event.error_code, event.error_code)})")

    def _end(self, stream: _Stream, error: str | None) -> None:
        self.streams.pop(stream.number, None)
        stream.finish(error)

    def upstream_closed(self, error: Exception | None) -> None:
        self._fail(f"truncated: {error or 'the server closed the connection'}")

    def upstream_writable(self) -> None:
        pass

    def _fail(self, error: str) -> None:
        self.usable = False
        for stream in list(self.streams.values()):
            self._end(stream, error)
