"""The parent process of a tap: admin port, storage, signals; the workers carry the traffic.

Rules here: nothing in this process stands in a stream's way. A worker that dies is started again. First SIGTERM or
Ctrl-C: streams finish within the grace period; a second one cuts them; records are flushed either way.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import orjson
import uvicorn

from tapproxy.config import ServeConfig
from tapproxy.core import frames
from tapproxy.core.address import parse_address, parse_upstream
from tapproxy.core.errors import MeasureError
from tapproxy.core.record import Ended, Record
from tapproxy.exporter import Exporter, admin_app
from tapproxy.exporter.probe import ProbeDesk
from tapproxy.sampling import Keeper, Sampler, Source
from tapproxy.store import Kind, RecordStore
from tapproxy.tap.quiet import QuietServer
from tapproxy.wire.client import keep_alive
from tapproxy.wire.origin import check_listener_certificate, tls_context
from tapproxy.wire.stamps import boot_id

# A worker that fails again and again is not restarted in a tight loop.
RESTART_WAIT_S: Final = 0.5
STORE_CHECK_S: Final = 1.0
STORE_QUIET_S: Final = 60.0
# A sample is a few kB: minutes of a disk that stands still.
SAMPLES_QUEUE_BYTES: Final = 16 << 20
# Beyond the grace period: flushing, and the worker's own exit.
EXIT_WAIT_S: Final = 10.0


@dataclass(slots=True)
class _Worker:
    """One worker process as its parent sees it."""

    number: int
    process: subprocess.Popen[bytes]
    sock: socket.socket
    reader: frames.FrameReader = field(default_factory=frames.FrameReader)
    ready: bool = False
    status: dict[str, Any] = field(default_factory=dict)
    # Exchanges it told of that have no record yet, by id.
    open: dict[str, dict[str, Any]] = field(default_factory=dict)
    exited: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerProcess(NamedTuple):
    """A worker as it was started: its process, and our end of its socket."""

    process: subprocess.Popen[bytes]
    sock: socket.socket


def start_worker(listener: socket.socket, settings: dict[str, Any]) -> WorkerProcess:
    """Starts a process that takes connections from ``listener``."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tapproxy.tap.worker", str(listener.fileno()), str(theirs.fileno())],
            pass_fds=(listener.fileno(), theirs.fileno()),
            stdin=subprocess.DEVNULL,
        )
    ours.sendall(json.dumps(settings).encode() + b"\n")
    ours.setblocking(False)
    return WorkerProcess(process, ours)


class Supervisor:
    """Runs one tap until it is told to stop. ``announce`` gets the bound (data, admin) addresses once it is ready.

    ``self_test``: what to run before any worker is started; what it returns is shown in the status. ``watched``: what
    is sampled beside the traffic.
    """

    def __init__(
        self,
        config: ServeConfig,
        announce: Callable[[str, str], None],
        self_test: Callable[[Supervisor], Coroutine[Any, Any, dict[str, Any]]] | None = None,
        watched: Sequence[Source] = (),
    ) -> None:
        self.config = config
        self.announce = announce
        self.self_tested: dict[str, Any] | None = None
        self._self_test = self_test
        self._watched = watched
        self.exporter = Exporter(config.name)
        self.restarts = 0
        self.lost_by_dead_workers = 0
        self.started_unix_s = time.time()
        self._workers: list[_Worker] = []
        self._told: set[str] = set()
        self._stopping = 0
        self.interrupted = False
        self._store_said = (0, 0)
        self._samples_lost_said = False
        self._store_quiet_until_s = 0.0
        self._stop = asyncio.Event()
        desk = ProbeDesk(config.name, config.workers, self._tell_workers, boot_id())
        self.probes = desk if config.allow_probe else None
        # Paired taps share a key; a tap alone makes one up, so that fingerprints confirm no guess.
        key = config.pair_key.encode() if config.pair_key else secrets.token_bytes(32)
        self._pair_key_hex = key.hex()

    async def run(self) -> None:
        """Returns after an orderly stop. Raises MeasureError or ConfigError where the tap cannot start."""
        config = self.config
        # The workers need these; said here, where it is one sentence and the right exit code.
        tls_context(parse_upstream(config.upstream), insecure=config.insecure, ca_file=config.upstream_ca)
        if config.tls_cert is not None and config.tls_key is not None:
            check_listener_certificate(config.tls_cert, config.tls_key)
        self.listener = _listen(config.listen, "--listen")
        admin_listener = _listen(config.admin, "--admin")
        self.store = RecordStore(config.data, max_bytes=config.max_disk_bytes)
        self.sample_store = RecordStore(
            config.data,
            max_bytes=config.max_disk_bytes,
            kind=Kind.SAMPLES,
            beside=self.store,
            queue_bytes=SAMPLES_QUEUE_BYTES,
        )
        self.keeper = Keeper(self.sample_store.append, tap=config.name, boot_id=boot_id())
        self.sampler = Sampler(
            self._watched, self.keeper, config.sample_interval_s, lambda sentence: _say(f"tapproxy: {sentence}\n")
        )
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.stop)
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_signal_handler(signal.SIGHUP, self._reopen)
        app = admin_app(self.exporter, self.status, self.ready, config.admin_token, config.name, self.probes)
        admin = QuietServer(
            uvicorn.Config(
                app,
                log_config=None,
                lifespan="off",
                access_log=False,
                http="h11",
                timeout_keep_alive=75,
                server_header=False,
            )
        )
        serving_admin = loop.create_task(admin.serve(sockets=[admin_listener]))
        try:
            if self._self_test is not None:
                await self._test_self(self._self_test(self))
            for number in range(0 if self._stopping else config.workers):
                self._spawn(number)
            self.sampler.start()
            await self._wait_ready()
            loop.call_later(STORE_CHECK_S, self._check_store)
            if not self._stopping:
                self.announce(_bound(self.listener), _bound(admin_listener))
            await self._stop.wait()
            await self._drain()
        finally:
            for worker in self._workers:
                if worker.process.poll() is None:
                    worker.process.kill()
                    worker.process.wait()
            await self.sampler.stop()
            admin.should_exit = True
            admin.force_exit = True
            await serving_admin
            self.store.close()
            self.sample_store.close()
            self.listener.close()

    # -- workers

    async def _test_self(self, test: Coroutine[Any, Any, dict[str, Any]]) -> None:
        """A signal to stop ends the test."""
        running, stopped = asyncio.ensure_future(test), asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if running.done():
            self.self_tested = running.result()
        else:
            running.cancel()
            await asyncio.wait({running})

    def _spawn(self, number: int) -> None:
        worker = _Worker(number, *start_worker(self.listener, self.settings(number)))
        self._workers.append(worker)
        asyncio.get_running_loop().add_reader(worker.sock.fileno(), self._read, worker)

    def settings(self, number: int) -> dict[str, Any]:
        """What the worker of that number is told."""
        config = self.config
        return {
            "worker": number,
            "pair_key_hex": self._pair_key_hex,
            "probe_keys": "" if self.probes is None else self.probes.keys(),
            **{
                key: str(value) if isinstance(value := getattr(config, key), Path) else value
                for key in (
                    "upstream",
                    "name",
                    "connect_timeout_s",
                    "head_timeout_s",
                    "idle_timeout_s",
                    "shutdown_grace_s",
                    "client_keepalive_s",
                    "upstream_keepalive_s",
                    "header_timeout_s",
                    "insecure",
                    "upstream_ca",
                    "rewrite_host",
                    "strict_http",
                    "mirror_connections",
                    "ack_stamps",
                    "allow_probe",
                    "tls_cert",
                    "tls_key",
                )
            },
        }

    def _tell_workers(self, line: str) -> None:
        """Lines for every worker that can read them; a worker that cannot is dead or about to be."""
        for worker in self._workers:
            if worker.ready:
                with contextlib.suppress(OSError):
                    worker.sock.send(line.encode())

    async def _wait_ready(self) -> None:
        """Raises MeasureError where a worker ends before it is ready."""
        while not self.ready() and not self._stopping:
            if self.restarts:
                raise MeasureError("a worker ended before it could take a request; what it said stands above")
            await asyncio.sleep(0.005)

    def _read(self, worker: _Worker) -> None:
        try:
            data = worker.sock.recv(256 * 1024)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self._worker_ended(worker)
            return
        for kind, body in worker.reader.feed(data):
            if kind == frames.RECORD:
                line = body[frames.ID_BYTES :]
                self.store.append(line)
                self.exporter.keep(line)
                if worker.open:
                    worker.open.pop(body[: frames.ID_BYTES].decode(), None)
            elif kind == frames.TALLY:
                self.exporter.tally.add(orjson.loads(body))
            elif kind == frames.FOUND:
                self._tell(orjson.loads(body))
            elif kind == frames.STATUS:
                worker.status = orjson.loads(body)
                for opened in worker.status.pop("opened", ()):
                    worker.open[opened["id"]] = opened
            elif kind == frames.READY:
                worker.ready = True
                if self.probes is not None:
                    # Those given out since it was started; the others were in its settings.
                    worker.sock.send(self.probes.keys().encode())
            elif kind == frames.PROBE and self.probes is not None:
                self.probes.worker_said(orjson.loads(body))

    def _reopen(self) -> None:
        self.store.reopen()
        self.sample_store.reopen()

    def _check_store(self) -> None:
        """Says when records were lost or the oldest were removed: once a minute at most, and then how many."""
        asyncio.get_running_loop().call_later(STORE_CHECK_S, self._check_store)
        now_s = time.monotonic()
        lost, removed = self.store.lost, self.store.removed
        if self.sample_store.lost and not self._samples_lost_said:
            self._samples_lost_said = True
            _say(
                f"tapproxy: samples are being lost: {self.sample_store.last_error}; records have a queue of their own\n"
            )
        if (lost, removed) == self._store_said or now_s < self._store_quiet_until_s:
            return
        if lost > self._store_said[0]:
            _say(
                f"tapproxy: {lost} records lost so far: {self.store.last_error}; requests go on, "
                f"make room or choose another --data\n"
            )
        if removed > self._store_said[1]:
            _say(f"tapproxy: {removed} of the oldest records removed so far, to stay within --max-disk\n")
        self._store_said = (lost, removed)
        self._store_quiet_until_s = now_s + STORE_QUIET_S

    def _tell(self, found: dict[str, Any]) -> None:
        """Says a finding where it is first seen; the rest are counted in /metrics."""
        if found["rule"] not in self._told:
            self._told.add(found["rule"])
            _say(
                f"tapproxy: {found['severity']}: {found['rule']}: {found['summary']} {found['advice']} "
                f"[{found['evidence']}; first seen in {found['record']}]\n"
            )

    def _worker_ended(self, worker: _Worker) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(worker.sock.fileno())
        worker.sock.close()
        worker.ready = False
        worker.exited.set()
        if self._stopping:
            return
        self._workers.remove(worker)
        self.restarts += 1
        self.lost_by_dead_workers += int(worker.status.get("lost_records", 0))
        for opened in worker.open.values():
            # Exchanges younger than a quarter of a second died unannounced.
            record = Record(**opened, ended=Ended.SHUTDOWN, reason="the worker process that carried it died")
            self.store.append(orjson.dumps(record))
            self.exporter.observe(record)
        loop.call_later(RESTART_WAIT_S, self._respawn, worker)

    def _respawn(self, worker: _Worker) -> None:
        code = worker.process.poll()
        _say(f"tapproxy: worker {worker.number} ended with status {code} and is started again\n")
        if not self._stopping:
            self._spawn(worker.number)

    # -- the end

    def _interrupt(self) -> None:
        self.interrupted = True
        self.stop()

    def stop(self) -> None:
        """First call: finish what is open. Second: cut it."""
        self._stopping += 1
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGTERM)
        self._stop.set()

    async def _drain(self) -> None:
        """Waits for the workers, at most the grace period and a little more."""
        # Our copy of the listening socket would keep taking connections into its backlog.
        self.listener.close()
        waiting = [asyncio.ensure_future(worker.exited.wait()) for worker in self._workers]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=self.config.shutdown_grace_s + EXIT_WAIT_S)
            for task in late:
                task.cancel()
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(worker.process.wait, 2.0)

    # -- what the admin port shows

    def ready(self) -> bool:
        """Whether every worker takes requests. The upstream may be down: engines take minutes to load."""
        return (
            not self._stopping
            and len(self._workers) == self.config.workers
            and all(worker.ready for worker in self._workers)
        )

    def status(self) -> dict[str, Any]:
        """What /api/status shows."""

        def total(key: str) -> int:
            return sum(int(worker.status.get(key, 0)) for worker in self._workers)

        def greatest(key: str) -> float | None:
            known = [worker.status[key] for worker in self._workers if worker.status.get(key) is not None]
            return max(known, default=None)

        return {
            "upstream": self.config.upstream,
            "pid": os.getpid(),
            "uptime_s": round(time.time() - self.started_unix_s, 3),
            "ready": self.ready(),
            "in_flight": total("in_flight"),
            "connections": total("connections"),
            "upstream_connections": total("upstream_connections"),
            "handled": total("handled"),
            "loop_lag_ns": greatest("loop_lag_max_ns"),
            "gc_pause_ns": greatest("gc_pause_max_ns"),
            "steal_share": greatest("steal_share"),
            "cpu_share": greatest("cpu_share"),
            "clock_bracket_ns": greatest("clock_bracket_ns"),
            "workers": self.config.workers,
            "workers_alive": sum(worker.ready for worker in self._workers),
            "worker_restarts": self.restarts,
            "outbox_lost": self.lost_by_dead_workers + total("lost_records"),
            "store": self.store.stats(),
            "samples": {**self.sampler.status(), "store": self.sample_store.stats()},
            "self_test": self.self_tested,
            # Of the parent, whose installation the workers share.
            "compiled": not str(frames.__file__).endswith(".py"),
        }


def _say(text: str) -> None:
    """To whoever reads the standard error; nobody may be left who does, and that costs no record."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):
        pass


def _listen(address: str, flag: str) -> socket.socket:
    """A bound, listening socket. Raises MeasureError where the address cannot be had."""
    host, port = parse_address(address, flag)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted connections inherit it.
        keep_alive(sock)
        sock.bind((host, port))
        sock.listen(2048)
    except (OSError, UnicodeError) as error:
        sock.close()
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            raise MeasureError(
                f"{flag} {address} is in use: another program listens there; stop it or choose another port"
            ) from None
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise MeasureError(f"cannot listen on {flag} {address}: {reason}") from None
    sock.setblocking(False)
    return sock


def _bound(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
