"""The simulated engine as a server: routes, and what stands behind them.

``serve`` runs until it is cancelled. Nothing a client sends stays longer than its request.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import socket
import time
import uuid
from collections.abc import Callable

import orjson

from tapproxy.simulate.ask import Refusal, read_ask, read_overrides
from tapproxy.simulate.clock import AlarmClock
from tapproxy.simulate.config import SimConfig, SimConfigError
from tapproxy.simulate.driver import Driver
from tapproxy.simulate.engine import Engine, Frontend
from tapproxy.simulate.http import Connection
from tapproxy.simulate.ledger import Ledger
from tapproxy.simulate.metrics import EngineMetrics
from tapproxy.simulate.replay import Player, Recording, read_recording
from tapproxy.simulate.request import Request
from tapproxy.simulate.respond import JsonAnswer, Reply, Site, StreamAnswer

__all__ = ["App", "SimConfig", "SimConfigError", "serve"]

VERSION = "0.32.0"
_BACKLOG = 2048
_METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class App:
    """Every connection of one server, and the engine they share."""

    def __init__(self, config: SimConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.config = config
        self.engine = Engine(config.engine())
        self.metrics = EngineMetrics(config.model)
        self.clock = AlarmClock(loop)
        self.clock.late_observed = self.metrics.late
        frontend = Frontend(int(config.frontend_us_per_token * 1000))
        self.driver = Driver(self.engine, frontend, self.clock, self.metrics, time.monotonic_ns)
        self.driver.step_cpu_ns = config.step_cpu_us * 1000
        self.connections: set[Connection] = set()
        self._ledger = _ledger(config)
        self._site = Site(config, self.driver, self.clock, self._ledger)
        self._recording = load_recording(config)
        self._numbers = itertools.count(1)
        self._asked = itertools.count(1)
        self._loop = loop
        self._routes: dict[str, tuple[str, Callable[[Connection, Request], None]]] = {
            "/v1/chat/completions": ("POST", lambda c, r: self._generate(c, r, chat=True)),
            "/v1/completions": ("POST", lambda c, r: self._generate(c, r, chat=False)),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", lambda c, r: c.answer(200, b"", content_type=None, fields=self._fields(r))),
            "/version": ("GET", lambda c, r: self._json(c, r, {"version": VERSION})),
            "/metrics": ("GET", self._metrics),
        }

    def close(self) -> None:
        for connection in list(self.connections):
            connection.abort()
        self.clock.close()
        if self._ledger is not None:
            self._ledger.close()

    def accept(self, listener: socket.socket) -> None:
        """Everything that waits in the backlog, in one go."""
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return  # none left, or none can be opened now
            sock.setblocking(False)
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            timeout_s = self.config.keep_alive_timeout_s
            connection = Connection(sock, self._loop, self.handle, self.connections.discard, timeout_s)
            self.connections.add(connection)

    def handle(self, connection: Connection, request: Request) -> None:
        if self._recording is not None:
            gap_ns = self.config.replay_gap_us * 1000
            player = Player(self._recording, gap_ns, self.clock, connection)
            connection.responder = player
            player.start()
            return
        method, route = self._routes.get(request.path, ("", None))
        if route is None:
            self._json(connection, request, {"detail": "Not Found"}, status=404)
        elif request.method != method:
            detail = orjson.dumps({"detail": "Method Not Allowed"})
            fields = ((b"allow", method.encode()), *self._fields(request))
            self._count(request, 405)
            connection.answer(405, detail, fields=fields)
        else:
            route(connection, request)

    # -- routes --------------------------------------------------------------------------------------------

    def _generate(self, connection: Connection, request: Request, *, chat: bool) -> None:
        fields = self._fields(request)
        try:
            overrides = read_overrides(
                request.headers, self.config, faulty=next(self._asked) % self.config.fault_every == 0
            )
            fault = overrides.fault
            if fault is not None and fault.kind == "status":
                raise Refusal(fault.number, "An injected fault.", "ServiceUnavailableError")
            ask = read_ask(chat, request.headers, request.body, self.config, overrides)
        except Refusal as refusal:
            self._count(request, refusal.status)
            connection.answer(refusal.status, refusal.body, fields=fields)
            return
        self._count(request, 200)
        self.metrics.asked(ask.n, ask.max_tokens)
        identity = _response_id(chat, request.headers.get(b"x-request-id"))
        reply = Reply(connection, ask, next(self._numbers), request.arrival_ns, identity, fields)
        answer = StreamAnswer(self._site, reply) if ask.stream else JsonAnswer(self._site, reply)
        connection.responder = answer
        answer.submit()

    def _models(self, connection: Connection, request: Request) -> None:
        model = {
            "id": self.config.model,
            "object": "model",
            "created": int(self.metrics.created_s),
            "owned_by": "vllm",
            "root": self.config.model,
            "parent": None,
            "max_model_len": self.config.max_model_len,
        }
        self._json(connection, request, {"object": "list", "data": [model]})

    def _metrics(self, connection: Connection, request: Request) -> None:
        page = self.metrics.page(self.engine, len(self.driver.fixed))
        self._count(request, 200)
        connection.answer(200, page, content_type=_METRICS_TYPE, fields=self._fields(request))

    def _json(self, connection: Connection, request: Request, value: object, status: int = 200) -> None:
        self._count(request, status)
        connection.answer(status, orjson.dumps(value), fields=self._fields(request))

    # -- what every answer has -----------------------------------------------------------------------------

    def _fields(self, request: Request) -> tuple[tuple[bytes, bytes], ...]:
        fields: list[tuple[bytes, bytes]] = []
        if self.config.request_id_headers:
            given = request.headers.get(b"x-request-id") or uuid.uuid4().hex.encode()
            fields.append((b"x-request-id", given))
        if self.config.x_accel_buffering is not None:
            fields.append((b"x-accel-buffering", self.config.x_accel_buffering.encode()))
        return tuple(fields)

    def _count(self, request: Request, status: int) -> None:
        handler = request.path if request.path in self._routes else "none"
        self.metrics.http[handler, request.method, f"{status // 100}xx"] += 1


def _response_id(chat: bool, request_id: bytes | None) -> str:
    """The caller's X-Request-Id is taken into it, as vLLM does."""
    own = request_id.decode("latin-1") if request_id else uuid.uuid4().hex[:16]
    return f"{'chatcmpl' if chat else 'cmpl'}-{own}"


def _ledger(config: SimConfig) -> Ledger | None:
    if config.truth is None:
        return None
    try:
        return Ledger(config.truth)
    except OSError as error:
        raise SimConfigError(f"--truth {config.truth} cannot be written: {error.strerror}.") from None


def load_recording(config: SimConfig) -> Recording | None:
    """The capture to replay. Raises SimConfigError where it cannot be read."""
    if config.replay is None:
        return None
    try:
        return read_recording(config.replay.read_bytes())
    except OSError as error:
        raise SimConfigError(f"--replay {config.replay} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise SimConfigError(f"--replay {config.replay} cannot be served: {error}.") from None


async def serve(config: SimConfig, ready: Callable[[int], None] | None = None) -> None:
    """Listen and answer until cancelled. Raises OSError where the address cannot be listened on."""
    loop = asyncio.get_running_loop()
    host, port = config.address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        app = App(config, loop)
        loop.add_reader(listener, app.accept, listener)
        # A collection of everything alive would stop the clock for milliseconds; what is alive now stays.
        gc.collect()
        gc.freeze()
        try:
            if ready is not None:
                ready(listener.getsockname()[1])
            await loop.create_future()
        finally:
            loop.remove_reader(listener)
            app.close()
            gc.unfreeze()
