"""Clients that leave in every phase of an exchange, many at once, and what the upstream saw of it and when.

The delay of a disconnect is from the instant before the client's ``close`` to the upstream's end of file, on one clock
and in one process: it holds the tap's time, two passes of the kernel and this loop's own lag, so it errs against us.
"""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from tests.e2e.helpers import percentile
from tests.faults.lab import EngineSite, Holding, Visit, reset, wait_for_rest, wait_until, worker_of, written
from tests.harness import SSE_HEAD, Tap, tap

# Phase → how many of a hundred leave in it. The upload, an upload that the upstream does not take, the wait for the
# head, between two events, and while reading is paused since this client does not read.
PHASES = {"/upload": 20, "/full": 6, "/head": 32, "/events": 32, "/flood": 10}
# What took nothing for so long is taken to be full.
QUIET_S = 0.05
WAIT_S = 20.0
_HEAD = "POST {path} HTTP/1.1\r\nHost: engine\r\nX-Request-Id: {name}\r\nContent-Length: {size}\r\n\r\n"


@dataclass
class Outcome:
    """What came of many disconnects."""

    before: Holding
    after: Holding
    seconds: float
    delays_ms: dict[tuple[str, str], list[float]]  # (phase, how) → each
    # Upstream connections that are open although all clients left.
    left_open: int
    ended: dict[str, list[str]] = field(default_factory=dict)  # request id → how each of its records ended
    stalled: set[str] = field(default_factory=set)  # request ids where reading was paused

    @property
    def all_ms(self) -> list[float]:
        return [delay for delays in self.delays_ms.values() for delay in delays]

    def line(self) -> str:
        """What happened, in one line."""
        p50, p99, most = (percentile(self.all_ms, p) for p in (50, 99, 100))
        grown_kib = (self.after.resident_bytes - self.before.resident_bytes) / 1024
        return (
            f"{len(self.all_ms)} disconnects in {self.seconds:.1f} s: upstream closed after p50 {p50:.1f} ms, "
            f"p99 {p99:.1f} ms, max {most:.1f} ms; worker {grown_kib:+.0f} KiB, "
            f"descriptors {self.before.descriptors} -> {self.after.descriptors}"
        )


def disconnects(directory: Path, count: int, at_once: int) -> Outcome:
    """``count`` clients that leave, in all phases, half by FIN and half by RST; the tap is at rest before and after."""
    site = EngineSite()
    with tap(directory, site.url) as running:
        outcome = uvloop.run(_disconnects(site, running, count, at_once))
        wait_until(lambda: len(written(directory)) >= count, f"{count} records")
        for record in written(directory):
            outcome.ended.setdefault(record["request_id"], []).append(record["ended"])
            if record["downstream"]["stalled_ns"]:
                outcome.stalled.add(record["request_id"])
    return outcome


async def _disconnects(site: EngineSite, running: Tap, count: int, at_once: int) -> Outcome:
    plan = [(path, how) for path, share in PHASES.items() for how in ("fin", "rst") for _ in range(share // 2)]
    # A step that is prime to a hundred mixes the phases, the same way each time.
    cases = [plan[(number * 37) % len(plan)] for number in range(count)]
    worker = worker_of(running)
    delays: dict[tuple[str, str], list[float]] = {}
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        path, how = cases[number]
        async with gate, asyncio.timeout(WAIT_S):
            delay_ns = await _leave(site, running.data, f"{path[1:]}-{how}-{number}", path, how)
        delays.setdefault((path, how), []).append(delay_ns / 1e6)

    async with site.serving():
        # What is made once and kept is made before the first look.
        warm = min(count // 10, 200)
        await asyncio.gather(*(one(number) for number in range(warm)))
        await asyncio.to_thread(wait_for_rest, running)
        before = Holding.of(worker)
        started = time.monotonic()
        await asyncio.gather(*(one(number) for number in range(warm, count)))
        seconds = time.monotonic() - started
        await asyncio.to_thread(wait_for_rest, running)
        return Outcome(before, Holding.of(worker), seconds, delays, site.connections)


async def _leave(site: EngineSite, address: tuple[str, int], name: str, path: str, how: str) -> int:
    """One client that leaves; how long until the upstream knew, in ns."""
    loop = asyncio.get_running_loop()
    visit = site.visit(name)
    with socket.socket() as sock:
        sock.setblocking(False)
        # Little room on both ways, so that a pause is reached soon.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        await loop.sock_connect(sock, address)
        uploads = path in ("/upload", "/full")
        body = b"{}" if not uploads else b"some of it"
        head = _HEAD.format(path=path, name=name, size=1 << 30 if uploads else len(body))
        await loop.sock_sendall(sock, head.encode() + body)
        await visit.reached.wait()
        if path == "/full":
            await _fill(sock)
        elif path == "/events":
            await _read_until(sock, b"data: a\n\n\r\n")
        elif path == "/flood":
            await _read_until(sock, SSE_HEAD)
            await _flooded(visit)
        left_ns = time.monotonic_ns()
        if how == "rst":
            reset(sock)
        elif path == "/flood":
            # With unread bytes a close is a reset: only this sends a FIN.
            sock.shutdown(socket.SHUT_WR)
        else:
            sock.close()
        if path == "/full" and visit.engine is not None:
            # The end stands behind what was sent: who does not read cannot see it.
            visit.engine.transport.resume_reading()
        return await visit.left - left_ns


async def _read_until(sock: socket.socket, end: bytes) -> None:
    loop = asyncio.get_running_loop()
    seen = b""
    while end not in seen:
        data = await loop.sock_recv(sock, 256)
        assert data, "the tap closed first"
        seen += data


async def _fill(sock: socket.socket) -> None:
    """Sends until nothing is taken any more: the tap no longer reads."""
    block = bytes(65536)
    taken_at = time.monotonic()
    while time.monotonic() - taken_at < QUIET_S:
        try:
            if sock.send(block):
                taken_at = time.monotonic()
        except BlockingIOError:
            await asyncio.sleep(0.005)


async def _flooded(visit: Visit) -> None:
    """Until the upstream could not write through many rounds of the loop: the tap no longer reads."""
    rounds, full = 0, 0
    while rounds < 20:
        await asyncio.sleep(0.005)
        rounds = rounds + 1 if full == visit.full else 0
        full = visit.full
