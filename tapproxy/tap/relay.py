"""One exchange between a client connection and an upstream connection: bytes go through, facts are noted after.

Rules here:
* A read is stamped, its whole valid part is written on, stamped again, and only then handed to the exchange.
* What goes out is what came in: version, framing, order, case, chunk sizes; hop-by-hop fields aside. The client's
  wish to close is passed on too, since an engine may frame its answer by it.
* A POST is never sent twice: only a request without a body, and of an idempotent method, is sent again, once, and
  only when a reused connection ended without a byte.
* Whatever happens, the exchange ends once and leaves one record.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from tapproxy.core.exchange import Exchange, Vantage
from tapproxy.core.http1 import (
    BodyReader,
    Field,
    Framing,
    Refusal,
    ResponseHead,
    ResponseHeads,
    end_to_end,
)
from tapproxy.core.record import AckedEvents, Ended, Record
from tapproxy.tap.alterations import Alterations
from tapproxy.tap.ids import ulid
from tapproxy.tap.server import READ_AHEAD_BYTES, ClientConnection, error_response
from tapproxy.tap.usageevent import FLAG, UsageEvents, asking, can_take_out, may_ask, with_length
from tapproxy.wire.client import Connection, Pool
from tapproxy.wire.reasons import os_reason
from tapproxy.wire.stamps import Clock

_IDEMPOTENT: Final = frozenset({b"GET", b"HEAD", b"OPTIONS", b"PUT", b"DELETE", b"TRACE"})
_CLOSE: Final[Field] = (b"connection", b"close", b"connection: close")
_KEEP_ALIVE: Final[Field] = (b"connection", b"keep-alive", b"connection: keep-alive")


@dataclass(slots=True)
class TapContext:
    """What all exchanges of one worker share."""

    pool: Pool
    clock: Clock
    vantage: Vantage
    # Takes what makes the record of an exchange that ended.
    ended: Callable[[Callable[[], Record]], None]
    # The upstream as a Host field names it, and as a person does.
    authority: bytes
    peer: str
    head_timeout_s: float | None = None
    idle_timeout_s: float | None = None
    strict_http: bool = False
    rewrite_host: bool = False
    mirror_connections: bool = False
    # None where no flag asks for any, which costs nothing.
    alterations: Alterations | None = None
    include_usage: bool = False

    def exchange(self, t0_ns: int, now_ns: int) -> Exchange:
        """A fresh exchange that began at ``t0_ns``."""
        t0_unix_ns = time.time_ns() - (now_ns - t0_ns)
        return Exchange(self.vantage, ulid(t0_unix_ns // 1_000_000), t0_ns, t0_unix_ns)


class Relay:
    """One exchange: the sink of the upstream connection and the exchange of the client connection."""

    __slots__ = (
        "_acks",
        "_completed",
        "_heads",
        "_keep_alive",
        "_last_read_ns",
        "_opening",
        "_received",
        "_reframe",
        "_request",
        "_request_bytes",
        "_request_done",
        "_stalled_at_ns",
        "_status",
        "_timer",
        "_unsent_from",
        "_usage",
        "_whole",
        "announced",
        "body",
        "client",
        "done",
        "exchange",
        "head",
        "loop",
        "response",
        "tap",
        "upstream",
    )

    def __init__(self, tap: TapContext, client: ClientConnection) -> None:
        head = client.head
        assert head is not None
        self.tap = tap
        self.client = client
        self.loop = client.loop
        self.head = head
        self.exchange = tap.exchange(client.t0_ns, client.head_at_ns)
        self.exchange.head_read(head, client.head_at_ns)
        self.exchange.request.connection_requests = client.requests
        if tap.mirror_connections:
            self.exchange.altered.append("mirror-connections")
        self.upstream: Connection | None = None
        self.response: ResponseHead | None = None
        self.body: BodyReader | None = None
        self.done: asyncio.Future[bool] = self.loop.create_future()
        self._request: list[bytes] = []
        self._request_bytes = 0
        self._request_done = False
        self._opening: asyncio.Task[Connection] | None = None
        self._heads = ResponseHeads(head.method)
        self._received = False
        self._keep_alive = False
        self._reframe = False
        # Under --include-usage: resolved when the request is there as a whole; what takes the event out of the answer.
        self._whole: asyncio.Future[None] | None = None
        self._usage: UsageEvents | None = None
        self._unsent_from: int | None = None
        self._stalled_at_ns = 0
        self._completed = False
        self._last_read_ns = 0
        self._timer: asyncio.TimerHandle | None = None
        self.announced = False
        # The status of an answer of our own.
        self._status: int | None = None
        self._acks = client.ack_log()

    def announcement(self) -> dict[str, Any]:
        """What is known of an exchange that goes on: enough of a record, should this process not live to write it."""
        return self.exchange.so_far()

    # -- the life of an exchange

    async def run(self) -> None:
        """Returns when the exchange has ended and its record is out."""
        try:
            if self.tap.include_usage and may_ask(self.head):
                await self._ask_for_usage()
            else:
                self._request = [self._request_head()]
                self.client.start_body(self)
            while not self.done.done():
                # Most connections are at hand: only what has to wait is a coroutine of its own.
                upstream = self._at_hand()
                if upstream is None and not self.done.done():
                    upstream = await self._open()
                if upstream is None:
                    break
                self._begin(upstream)
                if await self.done:
                    # Once more, on another connection.
                    self.done = self.loop.create_future()
            if self._acks is not None:
                await self._acks.all_acked()
        except asyncio.CancelledError:
            # The grace period ran out: uvicorn cancels what is left, and with the task what it waited for.
            if self.done.cancelled():
                self.done = self.loop.create_future()
            self.cut(Ended.SHUTDOWN, "the tap was stopped before the answer was complete")
            raise
        except Exception as error:
            self._failed(error)
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self.exchange.end(Ended.CLIENT_ABORTED if self.client.lost else Ended.SHUTDOWN, time.monotonic_ns())
            self.tap.ended(self.record)

    async def _ask_for_usage(self) -> None:
        """Waits for the whole request, and puts the option in where it does not say anything of usage."""
        self._whole = self.loop.create_future()
        self.client.start_body(self)
        if not self._request_done:
            waited: set[asyncio.Future[Any]] = {self._whole, self.done}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if self.done.done():
            return
        body = b"".join(self._request)
        changed = asking(body)
        if changed is not None:
            self.exchange.altered.append(FLAG)
            self._usage = UsageEvents()
            body = changed
        self._request = [self._request_head(None if changed is None else len(body)), body]

    def _begin(self, upstream: Connection) -> None:
        """Sends the request on this connection, and listens."""
        self.upstream = upstream
        now_ns = time.monotonic_ns()
        first = upstream.exchanges == 0
        self.exchange.acquired(
            now_ns,
            peer=upstream.peer,
            reused=not first,
            kernel_stamps=upstream.kernel_stamps,
            dns_ns=upstream.dns_ns if first else None,
            connect_ns=upstream.connect_ns if first else None,
            tls_ns=upstream.tls_ns if first else None,
        )
        upstream.attach(self)
        self._send_request(upstream)

    def _at_hand(self) -> Connection | None:
        """A connection that needs no waiting, or None; that may have ended the exchange."""
        tap = self.tap
        self.exchange.wanted(time.monotonic_ns())
        upstream = self._mirrored() if tap.mirror_connections else tap.pool.take()
        if upstream is not None:
            return upstream
        try:
            return tap.pool.open_now()
        except OSError as refused:
            self._unreachable(refused)
            return None

    async def _open(self) -> Connection | None:
        """A new connection, or None where the exchange ended meanwhile."""
        self._opening = self.loop.create_task(self.tap.pool.open())
        try:
            # A client that leaves cancels the opening only, so that a cancelled exchange still means "stopped".
            await asyncio.wait({self._opening})
        except asyncio.CancelledError:
            self._opening.cancel()
            raise
        opening, self._opening = self._opening, None
        if opening.cancelled():
            return None
        error = opening.exception()
        if error is not None:
            self._unreachable(error)
            return None
        if self.done.done():
            opening.result().close()
            return None
        return opening.result()

    def _mirrored(self) -> Connection | None:
        upstream, self.client.mirror = self.client.mirror, None
        if upstream is None or upstream.closed:
            return None
        if upstream.readable_now():
            upstream.close()
            return None
        return upstream

    def _unreachable(self, error: BaseException) -> None:
        peer = self.tap.peer
        if isinstance(error, TimeoutError) and not str(error):
            why = f"no connection to {peer} within {self.tap.pool.connect_timeout_s:g} s; is the engine up?"
            self._answer_error(Ended.TIMEOUT, Refusal(504, why))
            return
        if isinstance(error, ssl.SSLError):
            why = f"the TLS handshake with {peer} failed: {os_reason(error)}"
        else:
            why = f"cannot connect to {peer}: {os_reason(error)}"
        self._answer_error(Ended.UPSTREAM_UNREACHABLE, Refusal(502, why + "; is the engine up?"))

    # -- the request on its way up

    def _request_head(self, length: int | None = None) -> bytes:
        """``length``: of a body that is not the client's."""
        head = self.head
        fields = end_to_end(head.fields, head.connection)
        if length is not None:
            fields = with_length(fields, length)
        lines = [head.line]
        if self.tap.rewrite_host:
            self.exchange.altered.append("rewrite-host")
            fields = [item for item in fields if item[0] != b"host"]
            lines.append(b"Host: " + self.tap.authority)
        if self.tap.alterations is not None:
            fields = self.tap.alterations.request(self.exchange, head, fields, self.client.peer_ip())
        lines += [item[2] for item in fields]
        # An engine may frame its answer by this: an HTTP/1.0 client that asked to close gets what it would have got.
        if b"close" in head.connection:
            lines.append(b"Connection: close")
        elif head.version == 0 and b"keep-alive" in head.connection:
            lines.append(b"Connection: keep-alive")
        lines.append(b"\r\n")
        return b"\r\n".join(lines)

    def request_wire(self, wire: bytes, payload: bytes, done: bool) -> None:
        """Bytes of the request body (Exchange of the server)."""
        upstream = self.upstream
        if upstream is None:
            self._request.append(wire)
            self._request_bytes += len(wire)
            if self._request_bytes > READ_AHEAD_BYTES and self._whole is None:
                self.client.pause_body()
        elif wire and not upstream.write(wire) and not done:
            self.client.pause_body()
        if payload:
            self.exchange.request_body(payload, done)
        if done:
            self._request_done = True
            if self._whole is not None and not self._whole.done():
                self._whole.set_result(None)
            if upstream is not None:
                self._limit_head()
            self.exchange.request_ended(self.client.body_end_ns or time.monotonic_ns())
            if upstream is not None and not upstream.unsent_bytes:
                self.exchange.write_ended(time.monotonic_ns())

    def _send_request(self, upstream: Connection) -> None:
        data = b"".join(self._request)
        if self._request_bytes or self.head.method not in _IDEMPOTENT:
            self._request = []
        self.exchange.write_started(time.monotonic_ns())
        if self._request_done:
            self._limit_head()
        if not upstream.write(data):
            return
        if self._request_done:
            self.exchange.write_ended(time.monotonic_ns())
        else:
            self.client.resume_body()

    def _limit_head(self) -> None:
        """The limit for the head begins when the request is complete: an upload takes what it takes."""
        if self.tap.head_timeout_s is not None and self._timer is None and self.response is None:
            self._timer = self.loop.call_later(self.tap.head_timeout_s, self._head_late)

    def upstream_writable(self) -> None:
        """The upstream took all that was written (Sink)."""
        if self._request_done:
            self.exchange.write_ended(time.monotonic_ns())
        self.client.resume_body()

    def request_broken(self, refusal: Refusal) -> None:
        """The request body broke its framing."""
        if self.response is not None:
            self.cut(Ended.REJECTED, refusal.reason)
        else:
            self._answer_error(Ended.REJECTED, refusal)

    # -- the answer on its way down

    def upstream_bytes(self, data: bytes, arrived_ns: int, read_at_ns: int) -> None:
        """What the upstream sent (Sink)."""
        try:
            self._forward(data, arrived_ns, read_at_ns)
        except Exception as error:
            self._failed(error)

    def _forward(self, data: bytes, arrived_ns: int, read_at_ns: int) -> None:
        """The hot path: everything an event costs is in here."""
        self._received = True
        self._last_read_ns = read_at_ns
        body = self.body
        head = b""
        if body is None:
            taken = self._read_head(data, arrived_ns)
            if taken is None:
                return
            body, head, data = taken
        wire, payload, rest = body.feed(data)
        if self._reframe:
            wire = payload if self._usage is None else self._usage.feed(payload, last=body.done)
        if head:
            wire = head + wire
        if wire:
            taken_now = self.client.write_wire(wire)
            sent_ns = time.monotonic_ns()
            if head and taken_now:
                self.exchange.head_sent(sent_ns)
            if not taken_now and self._unsent_from is None and not self.client.lost:
                self._stall(sent_ns)
            if payload:
                self.exchange.response_body(
                    payload, arrived_ns, read_at_ns, sent_ns if taken_now and self._unsent_from is None else None
                )
        elif payload:
            # All of it is held back, or taken out: no event of it waits for the client.
            gone_ns = time.monotonic_ns() if self._usage is not None and self._unsent_from is None else None
            self.exchange.response_body(payload, arrived_ns, read_at_ns, gone_ns)
        if self._acks is not None and payload:
            self._acks.wrote()
        if body.done:
            self._complete(read_at_ns, clean=not rest)
        elif body.error is not None:
            self.cut(Ended.UPSTREAM_ABORTED, "the upstream broke its framing: " + body.error)

    def _read_head(self, data: bytes, arrived_ns: int) -> tuple[BodyReader, bytes, bytes] | None:
        """Looks for the final head: the body's reader, the head to send, the body bytes after it; None without one."""
        heads = self._heads
        heads.feed(data)
        while (head := heads.take()) is not None:
            if isinstance(head, Refusal):
                self._malformed(head.reason)
                return None
            if head.status >= 200:
                break
            # RFC 9110 15.2: an HTTP/1.0 client does not know interim answers.
            if self.head.version == 1:
                lines = [head.line, *(item[2] for item in end_to_end(head.fields, head.connection)), b"\r\n"]
                self.client.write_wire(b"\r\n".join(lines))
        else:
            return None
        if self._timer is not None:
            self._timer.cancel()
        if self.tap.idle_timeout_s is not None:
            self._timer = self.loop.call_later(self.tap.idle_timeout_s, self._idle_late)
        self.response = head
        self.body = body = BodyReader.of(head)
        self.exchange.response_read(head, arrived_ns)
        return body, self._response_head(head), heads.rest

    def _response_head(self, head: ResponseHead) -> bytes:
        request = self.head
        fields = end_to_end(head.fields, head.connection)
        dechunk = self.tap.strict_http and request.version == 0 and head.framing is Framing.CHUNKED
        if self._usage is not None:
            if self.exchange.reads_events and can_take_out(head):
                self._usage.chunked = head.framing is Framing.CHUNKED and not dechunk
            else:
                self._usage = None
        self._reframe = dechunk or self._usage is not None
        if dechunk:
            self.exchange.altered.append("strict-http")
            fields = [item for item in fields if item[0] not in (b"transfer-encoding", b"trailer")]
        self._keep_alive = (
            request.keep_alive
            and head.framing is not Framing.CLOSE
            and not dechunk
            and self.client.body_done
            and not self.client.draining
        )
        if self.tap.alterations is not None:
            fields = self.tap.alterations.response(self.exchange, head, fields)
        if not self._keep_alive:
            fields.append(_CLOSE)
        elif request.version == 0:
            fields.append(_KEEP_ALIVE)
        return b"\r\n".join([head.line, *(item[2] for item in fields), b"\r\n"])

    def _stall(self, now_ns: int) -> None:
        """Bytes wait for the client: read no more until they are gone."""
        self._unsent_from = self.exchange.reads()
        self._stalled_at_ns = now_ns
        if self.upstream is not None:
            self.upstream.pause_reading()
        self.note_unsent()

    def note_unsent(self) -> None:
        """Samples what waits for the client; called now and then, and at each stall."""
        part = self.exchange.downstream
        part.unsent_max_bytes = max(part.unsent_max_bytes, self.client.unsent_bytes())

    def client_writable(self) -> None:
        """The client's kernel took all that was written (Exchange of the server)."""
        if self._unsent_from is None:
            return
        now_ns = time.monotonic_ns()
        exchange = self.exchange
        exchange.waiting_sent(self._unsent_from, exchange.reads(), now_ns)
        if exchange.downstream.head is None:
            exchange.head_sent(now_ns)
        exchange.downstream.stalled_ns += now_ns - self._stalled_at_ns
        self._unsent_from = None
        if self._completed:
            self._finish(now_ns)
        elif self.upstream is not None:
            self.upstream.resume_reading()

    # -- ends

    def _complete(self, read_at_ns: int, *, clean: bool) -> None:
        """The answer is complete on the upstream side."""
        exchange, upstream = self.exchange, self.upstream
        self._release_held()
        exchange.response_ended(read_at_ns)
        self._completed = True
        self.upstream = None
        if upstream is not None:
            self._upstream_facts(upstream)
            self._release(upstream, clean)
        if self._unsent_from is None:
            self._finish(time.monotonic_ns())

    def _release_held(self) -> None:
        """The beginning of an event whose end did not come goes out before the answer's end."""
        if self._usage is not None:
            rest = self._usage.rest()
            if rest:
                self.client.write_wire(rest)

    def _release(self, upstream: Connection, clean: bool) -> None:
        response = self.response
        reusable = (
            clean and self._request_done and self.head.keep_alive and response is not None and response.keep_alive
        )
        if not reusable:
            upstream.close()
        elif self.tap.mirror_connections:
            upstream.detach()
            self.client.mirror = upstream
        else:
            self.tap.pool.give(upstream)

    def _finish(self, now_ns: int) -> None:
        self._end(Ended.COMPLETE, now_ns, None)
        self._client_facts()
        self.client.finish(keep_alive=self._keep_alive)

    def upstream_closed(self, error: Exception | None) -> None:
        """The upstream ended or failed (Sink). The connection is closed already."""
        upstream, self.upstream = self.upstream, None
        if self.body is None:
            if self._may_retry(upstream):
                self.done.set_result(True)
                return
            how = "closed the connection" if error is None else f"broke the connection ({os_reason(error)})"
            part = "in the middle of the response head" if self._heads.rest else "without an answer"
            self._malformed(f"the upstream {how} {part}")
            return
        if error is None and self.body.eof():
            self._complete(self._last_read_ns if self._last_read_ns else time.monotonic_ns(), clean=False)
            return
        how = "closed" if error is None else os_reason(error)
        self.cut(
            Ended.UPSTREAM_ABORTED,
            f"the upstream ended ({how}) after {self.exchange.body_bytes} body bytes, before its answer did",
        )

    def _may_retry(self, upstream: Connection | None) -> bool:
        return (
            upstream is not None
            and upstream.exchanges > 1
            and not self._received
            and bool(self._request)
            and self._request_done
        )

    def client_lost(self) -> None:
        """The client left (Exchange of the server)."""
        if self._opening is not None:
            self._opening.cancel()
        if self._completed and self._unsent_from is None:
            return
        self._drop_upstream()
        self._end(Ended.CLIENT_ABORTED, time.monotonic_ns(), "the client left before the answer was complete")

    def cut(self, ended: Ended, reason: str) -> None:
        """Ends an answer in the middle, visibly; or the whole connection where none has begun."""
        if self.done.done():
            if self._acks is not None:
                self._acks.settle()
            return
        if self.response is None and ended is Ended.SHUTDOWN:
            self._answer_error(ended, Refusal(503, reason))
            return
        self._drop_upstream()
        self._release_held()
        self._end(ended, time.monotonic_ns(), reason)
        self._client_facts()
        response = self.response
        by_reset = response is None or response.framing is Framing.CLOSE or self.head.version == 0
        self.client.abort(by_reset=by_reset)

    def _failed(self, error: Exception) -> None:
        """A fault of ours ends the exchange as one: nobody waits for ever, and no upstream is blamed.

        The exception's text stays here: it may quote what went through.
        """
        self.exchange.measuring_failed()
        self.cut(Ended.SHUTDOWN, f"tapproxy failed ({_where(error)}); please report it")

    def _malformed(self, why: str) -> None:
        self._answer_error(Ended.UPSTREAM_MALFORMED, Refusal(502, why))

    def _head_late(self) -> None:
        if self.body is None and not self.done.done():
            why = f"no response head within {self.tap.head_timeout_s:g} s"
            self._answer_error(Ended.TIMEOUT, Refusal(504, why))

    def _idle_late(self) -> None:
        limit_s = self.tap.idle_timeout_s
        if limit_s is None or self._completed or self.done.done():
            return
        silent_s = (time.monotonic_ns() - self._last_read_ns) / 1e9
        # While the client does not take what is there, the silence is ours.
        if self._unsent_from is not None:
            silent_s = 0.0
        if silent_s < limit_s:
            self._timer = self.loop.call_later(limit_s - silent_s, self._idle_late)
            return
        self.cut(Ended.TIMEOUT, f"the upstream was silent for {limit_s:g} s")

    def _answer_error(self, ended: Ended, refusal: Refusal) -> None:
        """No head has gone out yet: the client gets a whole answer that says what happened."""
        if self.done.done():
            return
        self._drop_upstream()
        # After an interim answer too: the final one is still owed.
        keep_alive = self.head.keep_alive and self.client.body_done and ended not in (Ended.REJECTED, Ended.SHUTDOWN)
        wire = error_response(refusal, keep_alive=keep_alive, head_only=self.head.method == b"HEAD")
        self.client.write_wire(wire)
        now_ns = time.monotonic_ns()
        self.exchange.head_sent(now_ns)
        self._end(ended, now_ns, refusal.reason)
        self._status = refusal.status
        self.client.finish(keep_alive=keep_alive)

    def _drop_upstream(self) -> None:
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            self._upstream_facts(upstream)
            # A plain close: an engine takes it for what it is, a client that left.
            upstream.close()

    def _end(self, ended: Ended, now_ns: int, reason: str | None) -> None:
        if self._unsent_from is not None:
            self.exchange.downstream.stalled_ns += now_ns - self._stalled_at_ns
            self.note_unsent()
            self._unsent_from = None
        self.exchange.end(ended, now_ns, reason)
        if not self.done.done():
            self.done.set_result(False)

    # -- what the kernel knows

    def _upstream_facts(self, upstream: Connection) -> None:
        facts = upstream.facts()
        if facts is not None:
            part = self.exchange.upstream
            part.rtt_ns, part.min_rtt_ns = facts.rtt_ns, facts.min_rtt_ns
            own = facts.since(upstream.facts_before)
            part.retransmits, part.segments, part.disordered = own.retransmits, own.segments_in, own.disordered
            upstream.facts_before = facts

    def _client_facts(self) -> None:
        part = self.exchange.downstream
        facts = self.client.facts()
        if facts is not None:
            part.rtt_ns, part.min_rtt_ns = facts.rtt_ns, facts.min_rtt_ns
            own = facts.since(self.client.facts_before)
            part.retransmits, part.segments = own.retransmits, own.segments_out
            self.client.facts_before = facts

    def record(self) -> Record:
        """The record of the exchange that ended."""
        record = self.exchange.finish()
        stepped_at_ns = self.tap.clock.stepped_at_ns
        if stepped_at_ns is not None and stepped_at_ns >= record.t0_mono_ns:
            record.stamps.clock_step = True
            record.void = record.void or "clock_step"
        if self._acks is not None:
            record.stamps.acks = True
            acked = self._acks.of_events(record.events.read, record.t0_mono_ns)
            record.events = AckedEvents.of(record.events, acked)
        if self._usage is not None and self._usage.taken:
            # What was taken out never left.
            kinds = record.events.kind
            record.events.sent = [
                None if kinds[index] == "usage" else sent for index, sent in enumerate(record.events.sent)
            ]
            if record.ended == Ended.COMPLETE:
                record.downstream.bytes = self._usage.passed_bytes
        if self._status is not None:
            record.status = self._status
        return record


def _where(error: Exception) -> str:
    """The exception's type and the line that raised it."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    name = type(error).__name__
    return name if at is None else f"{name} at {os.path.basename(at.tb_frame.f_code.co_filename)}:{at.tb_lineno}"
