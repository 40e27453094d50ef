"""``serve --allow-probe``: requests that bear a one-time key are answered here, with the stream they ask for.

Rules here:
* Without the flag nobody looks; without a live key nothing is intercepted: such a request is the upstream's, whatever
  it bears. A worker knows keys by their SHA-256 only, so none can leak from it.
* An answer of this module is no exchange: no record, no metric, no connection of the pool. What the tap saw and did
  goes to the parent once, when the stream has ended.
* Each event bears the time of its own write, read immediately before it; one write and one chunk an event. It is the
  tap's ordinary connection that carries it, so what is measured is the way ordinary answers take.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Any, Final

import orjson

from tapproxy.core.http1 import Refusal, RequestHead
from tapproxy.core.probing import ANSWER_FIELD, ANSWER_FIELDS, KEY_FIELD, Plan, StreamEnd, shown
from tapproxy.tap.server import ClientConnection, error_response
from tapproxy.wire.calibrated import END, event_parts

# A padded upload; beyond it the request is refused.
_MOST_BODY_BYTES: Final = 1024 * 1024
_MOST_BODY_READS: Final = 512
# Streams that one worker answers at a time, whoever has a key.
_MOST_STREAMS: Final = 64


class ProbeGate:
    """The live keys of one worker, and the streams in progress. ``tell`` takes a message for the parent."""

    def __init__(self, worker: int, tell: Callable[[dict[str, Any]], None]) -> None:
        self.worker = worker
        self.tell = tell
        self.streams: set[ProbeStream] = set()
        self._expiry_ns: dict[bytes, int] = {}
        self._unread = b""

    def parent_said(self, data: bytes) -> None:
        """Bytes from the parent: lines of JSON, each giving a key (its digest) or taking it away."""
        now_ns = time.monotonic_ns()
        self._expiry_ns = {digest: at_ns for digest, at_ns in self._expiry_ns.items() if at_ns > now_ns}
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            if not line:
                continue
            said = orjson.loads(line)
            digest = bytes.fromhex(said["digest"])
            if said["expires_ns"] is None:
                self._expiry_ns.pop(digest, None)
            else:
                self._expiry_ns[digest] = said["expires_ns"]
                self.tell({"digest": said["digest"], "known_by": self.worker})

    def stream(self, client: ClientConnection) -> ProbeStream | None:
        """The stream that answers this request, or None: then it is the upstream's."""
        head = client.head
        if not self._expiry_ns or head is None:
            return None
        value = head.get(KEY_FIELD)
        if value is None:
            return None
        digest = hashlib.sha256(value).digest()
        expires_ns = self._expiry_ns.get(digest)
        if expires_ns is None:
            return None
        if time.monotonic_ns() > expires_ns:
            del self._expiry_ns[digest]
            return None
        return ProbeStream(self, client, head, digest.hex())


class ProbeStream:
    """One request of a probe and its answer: the exchange of the client connection."""

    def __init__(self, gate: ProbeGate, client: ClientConnection, head: RequestHead, digest_hex: str) -> None:
        self._gate = gate
        self._client = client
        self._head = head
        self._digest_hex = digest_hex
        self._connection = f"{gate.worker}/{_peer(client)}"
        self._done: asyncio.Future[None] = client.loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._plan: Plan | None = None
        self._due_ns: list[int] = []
        self._chunks: list[tuple[bytes, bytes]] = []
        self._chunked = True
        self._keep_alive = False
        self._all_written = False
        self._stalled_at_ns: int | None = None
        self._ended: StreamEnd | None = None
        # The report's part that grows.
        self._body_reads: list[tuple[int, int]] = []
        self._head_sent_ns: int | None = None
        self._sent_ns: list[int] = []
        self._stalled_ns = 0
        self._end_ns: int | None = None

    async def run(self) -> None:
        """Returns when the stream has ended and the parent has been told."""
        self._gate.streams.add(self)
        try:
            if len(self._gate.streams) > _MOST_STREAMS:
                # Not the upstream's: whoever has a key means the tap.
                self._refuse(Refusal(503, f"{_MOST_STREAMS} streams of probes are under way in this worker"))
            else:
                self._client.start_body(self)
            await self._done
        except asyncio.CancelledError:
            self._end(StreamEnd.SHUTDOWN)
            self._client.abort(by_reset=True)
            raise
        finally:
            self._gate.streams.discard(self)
            self._gate.tell({"digest": self._digest_hex, "report": self._report()})

    # -- the request (Exchange of the server)

    def request_wire(self, wire: bytes, payload: bytes, done: bool) -> None:
        """Bytes of the request body."""
        if self._ended is not None or self._plan is not None:
            return
        if payload:
            self._body_bytes += len(payload)
            if len(self._body_reads) < _MOST_BODY_READS:
                self._body_reads.append((time.monotonic_ns(), self._body_bytes))
            if self._body_bytes > _MOST_BODY_BYTES:
                self._refuse(Refusal(400, "the request of a probe is larger than any"))
                return
            self._body.append(payload)
        if done:
            try:
                self._plan = Plan.of_body(b"".join(self._body))
            except ValueError as error:
                self._refuse(Refusal(400, f"no plan of a probe: {error}"))
                return
            self._body.clear()
            self._answer(self._plan)

    def request_broken(self, refusal: Refusal) -> None:
        """The request body broke its framing."""
        self._refuse(refusal)

    def client_lost(self) -> None:
        """The client left, or the proxy before it."""
        self._end(StreamEnd.LEFT)

    def client_writable(self) -> None:
        """All that was written has been taken by the kernel."""
        if self._stalled_at_ns is not None:
            self._stalled_ns += time.monotonic_ns() - self._stalled_at_ns
            self._stalled_at_ns = None
        if self._all_written:
            self._complete()

    # -- the answer

    def _answer(self, plan: Plan) -> None:
        head = self._head
        chunked = self._chunked = plan.chunked(f"1.{head.version}")
        self._keep_alive = head.keep_alive and chunked and not self._client.draining
        lines = [
            b"HTTP/1.1 200 OK",
            *(name + b": " + value for name, value in ANSWER_FIELDS),
            ANSWER_FIELD + b": " + plan.id.encode(),
        ]
        if plan.unbuffered:
            lines.append(b"x-accel-buffering: no")
        if chunked:
            lines.append(b"transfer-encoding: chunked")
        if not self._keep_alive:
            lines.append(b"connection: close")
        elif head.version == 0:
            lines.append(b"connection: keep-alive")
        kinds = {size: _written(event_parts(plan.id, size), chunked) for size in set(plan.sizes_bytes())}
        self._chunks = [kinds[size] for size in plan.sizes_bytes()]
        now_ns = time.monotonic_ns()
        self._due_ns = [now_ns + due_ns for due_ns in plan.due_ns()]
        self._write(b"\r\n".join([*lines, b"\r\n"]))
        self._head_sent_ns = now_ns
        self._send_due()

    def _send_due(self) -> None:
        """Sends what is due, waits for the rest."""
        self._timer = None
        number, events = len(self._sent_ns), len(self._due_ns)
        while number < events and self._ended is None:
            now_ns = time.monotonic_ns()
            if now_ns < self._due_ns[number]:
                wait_s = (self._due_ns[number] - now_ns) / 1e9
                self._timer = self._client.loop.call_later(wait_s, self._send_due)
                return
            before, after = self._chunks[number]
            self._sent_ns.append(now_ns)
            self._write(b"%s%19d%s" % (before, now_ns, after))
            number += 1
        if self._ended is not None:
            return
        self._write(END if self._chunked else b"data: [DONE]\n\n")
        self._all_written = True
        if self._stalled_at_ns is None:
            self._complete()

    def _write(self, data: bytes) -> None:
        if not self._client.write_wire(data) and self._stalled_at_ns is None:
            self._stalled_at_ns = time.monotonic_ns()

    def _complete(self) -> None:
        if self._ended is None:
            self._end(StreamEnd.COMPLETE)
            self._client.finish(keep_alive=self._keep_alive)

    def _refuse(self, refusal: Refusal) -> None:
        if self._ended is None:
            self._client.write_wire(error_response(refusal))
            self._end(StreamEnd.BAD_REQUEST)
            self._client.finish(keep_alive=False)

    def _end(self, ended: StreamEnd) -> None:
        if self._ended is not None:
            return
        self._ended = ended
        self._end_ns = time.monotonic_ns()
        if self._timer is not None:
            self._timer.cancel()
        if self._stalled_at_ns is not None:
            self._stalled_ns += self._end_ns - self._stalled_at_ns
        if not self._done.done():
            self._done.set_result(None)

    # -- what the parent is told

    def _report(self) -> dict[str, Any]:
        """What the tap saw and did. Times are absolute CLOCK_MONOTONIC ns; None: did not happen."""
        client, head, reads = self._client, self._head, self._body_reads
        return {
            "id": None if self._plan is None else self._plan.id,
            "worker": self._gate.worker,
            "connection": self._connection,
            "method": head.method.decode("latin-1"),
            "target": head.target.decode("latin-1"),
            "http": f"1.{head.version}",
            "fields": [
                [line.partition(b":")[0].decode("latin-1"), shown(name, value)] for name, value, line in head.fields
            ],
            "t0_ns": client.t0_ns,
            "head_ns": client.head_at_ns,
            "body_first_ns": reads[0][0] if reads else None,
            "body_end_ns": client.body_end_ns,
            "body_bytes": self._body_bytes,
            "body_reads": reads,
            "head_sent_ns": self._head_sent_ns,
            "sent_ns": self._sent_ns,
            "late_ns": [sent - due for sent, due in zip(self._sent_ns, self._due_ns, strict=False)],
            "stalled_ns": self._stalled_ns,
            "ended": self._ended,
            "end_ns": self._end_ns,
        }


def _written(parts: tuple[bytes, bytes], chunked: bool) -> tuple[bytes, bytes]:
    """An event around its stamp, with its chunk's framing or without."""
    before, after = parts
    return parts if chunked else (before.partition(b"\r\n")[2], after[:-2])


def _peer(client: ClientConnection) -> str:
    """Names the connection among the others of its time: its other end."""
    address = client.transport.get_extra_info("peername")
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "local"
