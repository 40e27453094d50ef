"""One worker process: ``python -m tapproxy.tap.worker LISTEN_FD PARENT_FD``; settings come over the parent socket.

A worker carries traffic and nothing else: no storage, no admin port, no scraping. It ends when told to (SIGTERM: finish
what is open; a second one: cut it), or when its parent is gone.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import math
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, Final, cast

import uvicorn
import uvloop

from tapproxy.core.address import parse_upstream
from tapproxy.core.exchange import Vantage
from tapproxy.core.record import Ended, Record
from tapproxy.tap.acked import AckedConnection
from tapproxy.tap.alterations import ALTERATIONS, Alterations
from tapproxy.tap.app import Tap
from tapproxy.tap.health import TICK_NS, Health
from tapproxy.tap.ledger import Ledger
from tapproxy.tap.outbox import Outbox
from tapproxy.tap.probe import ProbeGate
from tapproxy.tap.quiet import QuietServer
from tapproxy.tap.relay import Relay, TapContext
from tapproxy.tap.server import ABORT_WAIT_S, ClientConnection, LeaveWatcher, ServerContext
from tapproxy.wire.acks import AckWatcher
from tapproxy.wire.client import Pool
from tapproxy.wire.origin import authority, tls_context
from tapproxy.wire.stamps import Clock, boot_id

SWEEP_S: Final = 0.25
# Sweeps between two samples of the host's CPU time.
SAMPLE_EVERY: Final = 4
FLUSH_S: Final = 5.0
# Exchanges after which an idle worker collects what cycles rare ends may have left.
COLLECT_AFTER: Final = 1000


class Worker:
    """Builds the data path of one process from its settings, and runs it."""

    def __init__(self, settings: dict[str, Any], listener: socket.socket, parent: socket.socket) -> None:
        self.settings = settings
        self.listener = listener
        self.parent = parent
        self.health = Health()
        self.sweeps = 0
        self.handled = 0
        self.collected_at = 0
        self._connections: list[ClientConnection] = []
        self._relays: list[Relay] = []
        self._share = 0
        self._opened: list[Relay] = []

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        settings = self.settings
        self.parent.setblocking(False)
        self.outbox = Outbox(loop, self.parent)
        self.ledger = Ledger(loop, self._keep)
        upstream = parse_upstream(settings["upstream"])
        self.clock = Clock()
        self.pool = Pool(
            upstream,
            self.clock,
            tls=tls_context(upstream, insecure=settings["insecure"], ca_file=settings["upstream_ca"]),
            keepalive_s=settings["upstream_keepalive_s"],
            connect_timeout_s=settings["connect_timeout_s"],
        )
        altering = Alterations(**{name: settings[name] for name in ALTERATIONS})
        context = TapContext(
            pool=self.pool,
            clock=self.clock,
            vantage=Vantage(settings["name"], settings["worker"], boot_id(), bytes.fromhex(settings["pair_key_hex"])),
            ended=self._ended,
            authority=authority(upstream).encode("ascii"),
            peer=authority(upstream) if upstream.path is None else f"unix:{upstream.path}",
            head_timeout_s=settings["head_timeout_s"],
            idle_timeout_s=settings["idle_timeout_s"],
            strict_http=settings["strict_http"],
            rewrite_host=settings["rewrite_host"],
            mirror_connections=settings["mirror_connections"],
            include_usage=settings["include_usage"],
            alterations=altering if altering.any else None,
        )
        self.tap = Tap(context)
        if settings["allow_probe"]:
            self.tap.probes = ProbeGate(settings["worker"], self.outbox.probe)
            self.tap.probes.parent_said(settings["probe_keys"].encode())
        watcher = LeaveWatcher(loop)
        acks = AckWatcher(loop, self.clock) if settings["ack_stamps"] else None
        self.context = ServerContext(
            app=self.tap,
            header_timeout_s=settings["header_timeout_s"],
            keepalive_s=settings["client_keepalive_s"],
            watcher=watcher,
            refused=self.tap.refused,
            abandoned=self.tap.abandoned,
            acks=acks,
        )
        self.server = QuietServer(
            uvicorn.Config(
                self.tap,
                # uvicorn calls it for each connection, and hands what it gets to the event loop, which takes a
                # BufferedProtocol as well.
                http=cast(Any, functools.partial(ClientConnection if acks is None else AckedConnection, self.context)),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                proxy_headers=False,
                interface="asgi3",
                # uvicorn says int and waits by asyncio.wait_for, which takes a fraction as well.
                timeout_graceful_shutdown=cast(int, settings["shutdown_grace_s"]),
                ssl_certfile=settings["tls_cert"],
                ssl_keyfile=settings["tls_key"],
                backlog=2048,
            )
        )
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        # Ctrl-C and a hang-up reach the whole group; the parent decides.
        for number in (signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, lambda: None)
        loop.add_reader(self.parent.fileno(), self._parent_spoke)
        loop.call_later(SWEEP_S, self._sweep)
        self.health.start()
        loop.call_later(TICK_NS / 1e9, self._tick, time.monotonic_ns() + TICK_NS)
        serving = loop.create_task(self.server.serve(sockets=[self.listener]))
        while not self.server.started and not serving.done():
            await asyncio.sleep(0.001)
        self.outbox.ready()
        # What lives now lives as long as the process: the collector need not look at it again. Of what comes, only the
        # young are looked at while there is traffic: a look at two thousand open streams takes tens of milliseconds,
        # and an exchange leaves no cycles behind it. The whole is collected when nothing is open.
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000, 20, 1_000_000)
        await serving
        self._cut_rest()
        # A reset waits for what was sent before it to be acknowledged; leaving now would end those answers cleanly.
        deadline = loop.time() + ABORT_WAIT_S + 0.5
        while self.context.connections and loop.time() < deadline:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        self.ledger.settle()
        self._report()
        await self.outbox.flush(FLUSH_S)
        self.pool.close()
        watcher.close()
        if acks is not None:
            acks.close()

    def stop(self) -> None:
        """First: finish what is open. Again: cut it."""
        if self.server.should_exit:
            self.server.force_exit = True
            self._cut_rest()
        self.server.should_exit = True

    def _cut_rest(self) -> None:
        for relay in list(self.tap.relays):
            relay.cut(Ended.SHUTDOWN, "the tap was stopped before the answer was complete")

    def _parent_spoke(self) -> None:
        """The parent tells of a probe's keys and of nothing else; the end of its socket says that it is gone."""
        try:
            data = self.parent.recv(4096)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            asyncio.get_running_loop().remove_reader(self.parent.fileno())
            self.stop()
        elif self.tap.probes is not None:
            self.tap.probes.parent_said(data)

    def _ended(self, make: Callable[[], Record]) -> None:
        self.handled += 1
        self.ledger.add(make)

    def _keep(self, record: Record) -> None:
        if record.void is None:
            record.void = self.health.void_reason(record)
        self.outbox.record(record)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(SWEEP_S, self._sweep)
        self.clock.sample()
        self.pool.expire()
        self.sweeps += 1
        if self.sweeps % SAMPLE_EVERY == 0:
            self.health.sample()
        self._report()
        if not self.tap.relays and self.handled - self.collected_at > COLLECT_AFTER:
            self.collected_at = self.handled
            gc.collect()

    def _visit(self) -> None:
        """Time limits and samples of open connections, some at each tick: two thousand at once would be a stall."""
        now_ns = time.monotonic_ns()
        if not self._connections and not self._relays:
            self._connections = list(self.context.connections)
            self._relays = list(self.tap.relays)
            rounds = SWEEP_S / (TICK_NS / 1e9)
            self._share = max(8, math.ceil(max(len(self._connections), len(self._relays)) / rounds))
        for _ in range(min(self._share, len(self._connections))):
            self._connections.pop().sweep(now_ns)
        for _ in range(min(self._share, len(self._relays))):
            relay = self._relays.pop()
            if relay.done.done():
                continue
            if relay.response is not None:
                relay.note_unsent()
            if not relay.announced:
                # Should this process die, the parent can still write a record of it.
                relay.announced = True
                self._opened.append(relay)

    def _report(self) -> None:
        # One that ended since it was seen is no longer open: its record is on its way, before this.
        opened = [relay.announcement() for relay in self._opened if not relay.done.done()]
        self.outbox.status(
            {
                "worker": self.settings["worker"],
                "in_flight": len(self.tap.relays),
                "connections": len(self.context.connections),
                "upstream_connections": len(self.pool.open_connections),
                "handled": self.handled,
                "lost_records": self.outbox.lost + self.ledger.failed,
                "clock_bracket_ns": self.clock.bracket_ns,
                "opened": opened,
                **self.health.status(),
            }
        )
        self._opened = []

    def _tick(self, due_ns: int) -> None:
        self.health.ticked(due_ns)
        self._visit()
        asyncio.get_running_loop().call_later(TICK_NS / 1e9, self._tick, time.monotonic_ns() + TICK_NS)


def main(arguments: list[str]) -> int:
    """Runs a worker; see the module's text for its arguments."""
    listener = socket.socket(fileno=int(arguments[0]))
    parent = socket.socket(fileno=int(arguments[1]))
    with parent.makefile("rb") as file:
        settings = json.loads(file.readline())
    uvloop.run(Worker(settings, listener, parent).run())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
