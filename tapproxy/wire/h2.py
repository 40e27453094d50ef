"""A measuring HTTP/2 client on the tap's own connection, for whoever measures what a proxy does to such clients.

Rules here: one stream at a time on a connection, over TLS, by ALPN. Every read is stamped before it is parsed, as
everywhere. Windows are opened wide and given back at once, so that flow control is no hold of our making. It never
raises for what the network or the server does: ``Fetched.error`` says it. The framing is the library h2's.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from tapproxy.core.address import parse_upstream
from tapproxy.core.errors import ConfigError
from tapproxy.wire.client import Connection, connect
from tapproxy.wire.fetch import Fetched, Read
from tapproxy.wire.origin import authority, tls_context
from tapproxy.wire.stamps import Clock

_WINDOW_BYTES: Final = 16 * 1024 * 1024
NOT_OFFERED: Final = "the server offers no HTTP/2"
# They belong to a connection, and HTTP/2 has none of them (RFC 9113 8.2.2).
_NOT_IN_H2: Final = frozenset({b"host", b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"te"})


class H2Client:
    """Requests to one origin over HTTP/2, one after the other on one connection; a broken one is opened anew."""

    def __init__(
        self,
        url: str,
        *,
        insecure: bool = False,
        ca_file: Path | str | None = None,
        timeout_s: float | None = None,
        connect_timeout_s: float | None = 10.0,
    ) -> None:
        """Raises ConfigError for a URL that is no https origin, or a CA file that cannot be read."""
        self._upstream = parse_upstream(url, "the URL")
        context = tls_context(self._upstream, insecure=insecure, ca_file=ca_file)
        if context is None:
            raise ConfigError(f"{url!r} is not https: HTTP/2 is agreed on in TLS")
        context.set_alpn_protocols(["h2"])
        self._tls: ssl.SSLContext = context
        self.clock = Clock()
        self.timeout_s = timeout_s
        self.authority = authority(self._upstream).encode("ascii")
        self._connect_timeout_s = connect_timeout_s
        self._link: _Link | None = None

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
        """As ``wire.fetch.Client.fetch``; leaving an answer resets its stream and closes the connection."""
        self.clock.sample()
        fetched = Fetched(time.monotonic_ns())
        link = self._link
        fetched.reused = link is not None and not link.closed
        if link is None or link.closed:
            try:
                connection = await connect(self._upstream, self.clock, tls=self._tls, timeout_s=self._connect_timeout_s)
            except (OSError, ssl.SSLError, TimeoutError) as error:
                # RFC 7301 3.2: a server that knows none of the protocols says so by an alert.
                refused = "no application protocol" in str(error).lower().replace("_", " ")
                fetched.error = NOT_OFFERED if refused else f"connect: {error or type(error).__name__}"
                return fetched
            fetched.dns_ns, fetched.connect_ns, fetched.tls_ns = (
                connection.dns_ns,
                connection.connect_ns,
                connection.tls_ns,
            )
            if connection.protocol != "h2":
                connection.close()
                fetched.error = NOT_OFFERED
                return fetched
            link = self._link = _Link(connection)
        size = len(body) + sum(len(piece) for _, piece in slowly)
        names = {name.lower() for name, _ in headers or []}
        fields = [
            (b":method", method.encode("ascii")),
            (b":scheme", b"https"),
            (b":authority", self.authority),
            (b":path", target.encode("ascii")),
            *((name.lower(), value) for name, value in headers or [] if name.lower() not in _NOT_IN_H2),
        ]
        if b"content-length" not in names and (size or method in ("POST", "PUT", "PATCH")):
            fields.append((b"content-length", b"%d" % size))
        fetched.stamps = "kernel" if link.connection.kernel_stamps else "user"
        done = link.start(fetched, fields, body, last=not slowly, enough=enough)
        try:
            async with asyncio.timeout(self.timeout_s):
                for number, (pause_s, piece) in enumerate(slowly, 1):
                    await asyncio.wait({done}, timeout=pause_s)
                    if done.done():
                        break
                    link.send(piece, last=number == len(slowly))
                await done
        except TimeoutError:
            fetched.error = f"timeout: no complete answer within {self.timeout_s:g} s"
            link.close()
            fetched.left_ns = time.monotonic_ns()
            return fetched
        except asyncio.CancelledError:
            link.close()
            raise
        facts = link.connection.facts()
        if facts is not None:
            fetched.rtt_ns, fetched.min_rtt_ns = facts.rtt_ns, facts.min_rtt_ns
            fetched.retransmits = facts.retransmits
        if link.left:
            link.close()
            fetched.left_ns = time.monotonic_ns()
        return fetched

    async def close(self) -> None:
        """Closes the connection."""
        if self._link is not None:
            self._link.close()


class _Link:
    """One connection and the stream on it: the sink of the connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.left = False
        self._state = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, header_encoding=None, validate_inbound_headers=False)
        )
        self._state.local_settings = h2.settings.Settings(
            client=True,
            initial_values={
                h2.settings.SettingCodes.ENABLE_PUSH: 0,
                h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW_BYTES,
            },
        )
        self._state.initiate_connection()
        self._state.increment_flow_control_window(_WINDOW_BYTES)
        self._stream = 0
        self._fetched: Fetched | None = None
        self._done: asyncio.Future[None] | None = None
        self._enough: Callable[[Fetched], bool] | None = None
        self._unsent = b""
        self._last = False
        connection.attach(self)
        self._flush()

    @property
    def closed(self) -> bool:
        """Whether no further request can go over it."""
        return self.connection.closed

    def start(
        self,
        fetched: Fetched,
        fields: list[tuple[bytes, bytes]],
        body: bytes,
        *,
        last: bool,
        enough: Callable[[Fetched], bool] | None,
    ) -> asyncio.Future[None]:
        """Sends a request; the future is done when its answer has ended, however it did."""
        self._fetched, self._enough, self._unsent = fetched, enough, b""
        done = self._done = self.connection.loop.create_future()
        fetched.write_start_ns = time.monotonic_ns()
        try:
            self._stream = self._state.get_next_available_stream_id()
            self._state.send_headers(self._stream, fields, end_stream=last and not body)
        except h2.exceptions.ProtocolError as error:
            self._finish(f"h2: {error}")
            self.close()
            return done
        if body or not last:
            self.send(body, last=last)
        else:
            self._flush()
        return done

    def send(self, data: bytes, *, last: bool) -> None:
        """More of the request's body, as far as the server's window lets it; the rest follows."""
        self._unsent += data
        self._last = last
        self._push()

    def _push(self) -> None:
        if self._done is None or self._done.done() or (not self._unsent and not self._last):
            self._flush()
            return
        try:
            while self._unsent:
                room = min(self._state.local_flow_control_window(self._stream), self._state.max_outbound_frame_size)
                if room <= 0:
                    break
                piece, self._unsent = self._unsent[:room], self._unsent[room:]
                self._state.send_data(self._stream, piece)
            if not self._unsent and self._last:
                self._last = False
                self._state.end_stream(self._stream)
        except h2.exceptions.ProtocolError as error:
            self._finish(f"h2: {error}")
        self._flush()
        if self._fetched is not None and not self._unsent:
            self._fetched.write_end_ns = time.monotonic_ns()

    def _flush(self) -> None:
        if not self.connection.closed and (data := self._state.data_to_send()):
            self.connection.write(data)

    # -- the connection's sink

    def upstream_bytes(self, data: bytes, arrived_ns: int, read_at_ns: int) -> None:
        """What the server sent (Sink)."""
        try:
            events = self._state.receive_data(data)
        except h2.exceptions.ProtocolError as error:
            self._finish(f"h2: {error}")
            self.close()
            return
        body = b""
        for event in events:
            if isinstance(event, h2.events.ConnectionTerminated):
                self._finish(f"closed: the server ended the connection (GOAWAY, code {int(event.error_code or 0)})")
            elif isinstance(event, h2.events.DataReceived):
                self._state.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
                body += event.data or b"" if event.stream_id == self._stream else b""
            elif isinstance(event, h2.events.ResponseReceived) and event.stream_id == self._stream:
                self._head(event, arrived_ns)
            elif isinstance(event, h2.events.StreamEnded) and event.stream_id == self._stream:
                self._body(body, arrived_ns, read_at_ns)
                body = b""
                if self._fetched is not None:
                    self._fetched.end_ns = arrived_ns
                self._finish(None)
            elif isinstance(event, h2.events.StreamReset) and event.stream_id == self._stream:
                self._body(body, arrived_ns, read_at_ns)
                body = b""
                self._finish(f"truncated: the server reset the stream (code {int(event.error_code or 0)})")
        self._body(body, arrived_ns, read_at_ns)
        self._push()

    def _head(self, event: h2.events.ResponseReceived, arrived_ns: int) -> None:
        fetched = self._fetched
        if fetched is None:
            return
        fields = [(bytes(name), bytes(value)) for name, value in event.headers or []]
        fetched.head_ns = arrived_ns
        fetched.http_version = "2"
        status = dict(fields).get(b":status", b"")
        fetched.status = int(status) if status.isdigit() else None
        fetched.headers = [(name, value) for name, value in fields if not name.startswith(b":")]

    def _body(self, body: bytes, arrived_ns: int, read_at_ns: int) -> None:
        fetched = self._fetched
        if not body or fetched is None or self._done is None or self._done.done():
            return
        fetched.reads.append(Read(arrived_ns, read_at_ns, body))
        if self._enough is not None and self._enough(fetched):
            self.left = True
            self._state.reset_stream(self._stream, h2.errors.ErrorCodes.CANCEL)
            self._finish(None)

    def upstream_closed(self, error: Exception | None) -> None:
        """The connection ended (Sink)."""
        began = self._fetched is not None and self._fetched.head_ns is not None
        self._finish(f"{'truncated' if began else 'closed'}: {error or 'the server closed the connection'}")

    def upstream_writable(self) -> None:
        """The kernel took all (Sink)."""

    def _finish(self, error: str | None) -> None:
        if self._done is not None and not self._done.done():
            if self._fetched is not None:
                self._fetched.error = error
            self._done.set_result(None)

    def close(self) -> None:
        """Closes at once."""
        self._flush()
        self.connection.close()
