"""A soak with faults: ``python -m tests.bench.soak --seconds 600``.

A simulated engine, a tap and many clients of all manners: some leave, in every phase; some read slowly; the engine
resets, breaks off, refuses, and is killed and started again now and then. At the end each request has exactly one
record, which says of its end what its client saw, nothing is open, nothing is lost and nothing has grown.

Prints one line, and exits 1 with the reasons where something did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.lab import Holding, lost_records, reset, status, wait_for_rest, wait_until, worker_of, written
from tests.harness import Tap, tap

ANSWER_S = 15.0
SAMPLE_S = 0.5
# Of the time, what counts as warm-up: pools, rings and the allocator's arenas fill.
WARM_SHARE = 0.4
# The samples at both ends that are compared: the least of each, since what is open at the moment comes and goes.
WINDOW_SHARE = 0.2

# Manner → how many of a thousand requests.
MANNERS = {
    "leave_before_head": 15,
    "leave_in_stream": 20,
    "leave_in_upload": 15,
    "engine_resets": 20,
    "engine_closes": 10,
    "engine_says_error": 10,
    "engine_refuses": 10,
    "slow_reader": 10,
    "large_upload": 10,
    "plain": 100,
    "stream": 780,
}


Pair = tuple[Holding, Holding]  # worker, parent
PROCESSES = ("worker", "parent")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: how its client behaved, and what it saw."""

    manner: str
    began: float
    ended: float
    saw: str  # an ``Ended`` value, "left", or "nothing"


@dataclass
class Soak:
    """What came of it."""

    seconds: float
    asked: dict[str, Asked] = field(default_factory=dict)
    # When the engine was killed, and when it took requests again.
    down: list[tuple[float, float]] = field(default_factory=list)
    samples: list[tuple[float, Pair]] = field(default_factory=list)  # when, what they held
    at_rest: Pair | None = None
    ended: dict[str, list[str]] = field(default_factory=dict)  # request id → how each of its records ended
    lost: int = 0
    restarted: int = 0
    unsettled: str = ""

    def grown_bytes(self, which: int) -> int:
        """How much the worker (0) or the parent (1) has grown since the warm-up."""
        first = next(i for i, sample in enumerate(self.samples) if sample[0] >= WARM_SHARE * self.seconds)
        window = max(1, int(len(self.samples) * WINDOW_SHARE))

        def least(part: list[tuple[float, Pair]]) -> int:
            return min(held[which].resident_bytes for _, held in part)

        return least(self.samples[-window:]) - least(self.samples[first : first + window])

    def problems(self, *, growth_bytes: int) -> list[str]:
        """What did not hold."""
        found = [self.unsettled] if self.unsettled else []
        for name, asked in self.asked.items():
            ended = self.ended.get(name, [])
            if len(ended) != 1:
                found.append(f"{name} ({asked.manner}, saw {asked.saw}) has {len(ended)} records: {ended}")
            elif ended[0] not in self._allowed(asked):
                found.append(f"{name} ({asked.manner}, saw {asked.saw}) is recorded as {ended[0]}")
        found += [f"a record of {name}, which nobody asked" for name in self.ended.keys() - self.asked.keys()]
        assert self.at_rest is not None
        for which, process in enumerate(PROCESSES):
            if self.grown_bytes(which) > growth_bytes:
                found.append(f"the {process} has grown by {self.grown_bytes(which) / 1024:.0f} KiB")
            least = min(held[which].descriptors for _, held in self.samples)
            if self.at_rest[which].descriptors > least:
                found.append(f"the {process} has {self.at_rest[which].descriptors} descriptors at rest, had {least}")
        if self.lost:
            found.append(f"{self.lost} records are lost")
        if self.restarted:
            found.append(f"a worker died {self.restarted} times")
        return found

    def _allowed(self, asked: Asked) -> set[str]:
        if asked.saw != "left":
            return {asked.saw}
        # Its own leave was the end, unless the engine's was first, or all had been sent already.
        allowed = {"client_aborted"}
        if asked.manner != "leave_in_upload":
            allowed.add("complete")
        if any(began - 0.5 < asked.ended and asked.began < ended + 0.5 for began, ended in self.down):
            allowed |= {"upstream_aborted", "upstream_unreachable", "upstream_malformed"}
        return allowed

    def line(self) -> str:
        """What happened, in one line."""
        counts = Counter(ended for each in self.ended.values() for ended in each)
        ends = ", ".join(f"{count} {ended}" for ended, count in counts.most_common())
        assert self.at_rest is not None
        parts = [
            f"soak: {self.seconds:.0f} s, {len(self.asked)} requests, {len(self.down)} engine restarts",
            f"{sum(map(len, self.ended.values()))} records ({ends}), {self.lost} lost",
        ]
        for which, process in enumerate(PROCESSES):
            holding = self.at_rest[which]
            parts.append(
                f"{process} {holding.resident_bytes / 2**20:.1f} MiB "
                f"({self.grown_bytes(which) / 1024:+.0f} KiB since the warm-up), {holding.descriptors} descriptors"
            )
        return "; ".join(parts)


# -- the engine


class Engine:
    """The simulated engine on one port, killed and started again when told."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tapproxy.simulate", "--listen", f"127.0.0.1:{self.port}", "--model", "sim"],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line.startswith("listening on "), line

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


# -- the clients


class Client:
    """One user with one connection, kept where it may be. Every request has an id that is its own."""

    def __init__(self, soak: Soak, address: tuple[str, int], chance: random.Random, number: int) -> None:
        self._soak = soak
        self._address = address
        self._chance = chance
        self._number = number
        self._count = 0
        self._sock: socket.socket | None = None

    async def run(self, until: float, think_s: float) -> None:
        """Asks until the time is up."""
        while time.monotonic() < until:
            manner = self._chance.choices(list(MANNERS), list(MANNERS.values()))[0]
            self._count += 1
            name = f"{self._number}-{self._count}"
            began = time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_S):
                    saw = await self._ask(name, manner)
            except TimeoutError:
                saw = "nothing in time"
                self._drop()
            self._soak.asked[name] = Asked(manner, began, time.monotonic(), saw)
            await asyncio.sleep(self._chance.expovariate(1 / think_s))
        self._drop()

    def _drop(self, *, by_reset: bool = False) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            reset(sock) if by_reset else sock.close()

    async def _ask(self, name: str, manner: str) -> str:
        loop = asyncio.get_running_loop()
        if manner == "slow_reader" or self._chance.random() < 0.1:
            self._drop()
        if self._sock is None:
            self._sock = socket.socket()
            self._sock.setblocking(False)
            if manner == "slow_reader":
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            await loop.sock_connect(self._sock, self._address)
        head, body = self._request(name, manner)
        try:
            if manner == "leave_in_upload":
                await loop.sock_sendall(self._sock, head + body[: len(body) // 2])
                await asyncio.sleep(self._chance.uniform(0, 0.05))
                return self._leave()
            await loop.sock_sendall(self._sock, head + body)
            if manner == "leave_before_head":
                await asyncio.sleep(self._chance.uniform(0, 0.04))
                return self._leave()
            return await self._read(self._sock, manner)
        except OSError:
            # Its answer may have come before the end.
            self._drop()
            return "nothing"

    def _leave(self) -> str:
        self._drop(by_reset=self._chance.random() < 0.5)
        return "left"

    async def _read(self, sock: socket.socket, manner: str) -> str:
        """Reads the answer; how it ended, in the record's words."""
        loop = asyncio.get_running_loop()
        got = b""
        leave_after = self._chance.randint(1, 3000) if manner == "leave_in_stream" else None
        while not _whole(got):
            if manner == "slow_reader":
                await asyncio.sleep(0.01)
            try:
                data = await loop.sock_recv(sock, 16384)
            except OSError:
                data = b""
            if not data:
                self._drop()
                return "upstream_aborted" if got.startswith(b"HTTP/1.1 200 ") else "nothing"
            got += data
            if leave_after is not None and len(got) >= leave_after and not _whole(got):
                return self._leave()
        if b"\r\nconnection: close\r\n" in got.partition(b"\r\n\r\n")[0].lower() + b"\r\n":
            self._drop()
        if got.startswith(b"HTTP/1.1 502 "):
            return "upstream_unreachable" if b"is the engine up?" in got else "upstream_malformed"
        return "complete"

    def _request(self, name: str, manner: str) -> tuple[bytes, bytes]:
        """Head and body."""
        chance = self._chance
        streams = manner != "plain"
        tokens, itl_us, event_bytes = chance.randint(5, 40), chance.randint(0, 8000), 0
        if manner == "slow_reader":
            tokens, itl_us, event_bytes = 300, 0, 4000
        fields = {
            "X-Request-Id": name,
            "X-Sim-Tokens": tokens,
            "X-Sim-Itl-Us": itl_us,
            "X-Sim-Ttft-Us": chance.randint(0, 40_000),
        }
        if event_bytes:
            fields["X-Sim-Event-Bytes"] = event_bytes
        if manner == "engine_resets":
            fields["X-Sim-Fault"] = f"reset-after={chance.randint(0, 5)}"
        elif manner == "engine_closes":
            fields["X-Sim-Fault"] = f"close-after={chance.randint(0, 5)}"
        elif manner == "engine_says_error":
            fields["X-Sim-Fault"] = "error-event-after=3"
        elif manner == "engine_refuses":
            fields["X-Sim-Fault"] = "status=503"
        words = 2000 if manner in ("leave_in_upload", "large_upload") else 20
        document = {"model": "sim", "stream": streams, "messages": [{"role": "user", "content": "word " * words}]}
        body = json.dumps(document).encode()
        if manner == "large_upload":
            # A member that the engine skips: the tokens of a prompt have a limit.
            body = body[:-1] + b', "padding": "' + b"x" * chance.randint(100_000, 2_000_000) + b'"}'
        lines = ["POST /v1/chat/completions HTTP/1.1", "Host: engine", "Content-Type: application/json"]
        lines += [f"Content-Length: {len(body)}", *(f"{key}: {value}" for key, value in fields.items())]
        return "\r\n".join([*lines, "", ""]).encode(), body


def _whole(got: bytes) -> bool:
    head, found, body = got.partition(b"\r\n\r\n")
    if not found:
        return False
    lines = head.lower().split(b"\r\n")
    if b"transfer-encoding: chunked" in lines:
        return body.endswith(b"0\r\n\r\n")
    size = next((int(line.partition(b":")[2]) for line in lines if line.startswith(b"content-length:")), 0)
    return len(body) >= size


# -- all together


def soak(
    seconds: float, directory: Path, *, clients: int = 24, think_s: float = 0.1, restart_s: float = 10.0, seed: int = 1
) -> Soak:
    """Runs it. The number of requests follows from the clients and the time they think."""
    outcome = Soak(seconds)
    engine = Engine()
    engine.start()
    try:
        with tap(directory, f"http://127.0.0.1:{engine.port}") as running:
            asyncio.run(_load(outcome, running, engine, clients, think_s, restart_s, seed))
            try:
                wait_for_rest(running)
                wait_until(lambda: len(written(directory)) >= len(outcome.asked), "a record of each request")
            except AssertionError as error:
                outcome.unsettled = str(error)
            outcome.at_rest = Holding.of(worker_of(running)), Holding.of(running.process.pid)
            outcome.lost = sum(lost_records(running).values())
            outcome.restarted = status(running)["worker_restarts"]
    finally:
        engine.kill()
    for record in written(directory):
        outcome.ended.setdefault(record["request_id"], []).append(record["ended"])
    return outcome


async def _load(
    outcome: Soak, running: Tap, engine: Engine, clients: int, think_s: float, restart_s: float, seed: int
) -> None:
    chance = random.Random(seed)
    began = time.monotonic()
    worker = worker_of(running)

    def sample() -> None:
        held = Holding.of(worker), Holding.of(running.process.pid)
        outcome.samples.append((time.monotonic() - began, held))

    async def restart() -> None:
        killed = time.monotonic()
        await asyncio.to_thread(engine.kill)
        await asyncio.to_thread(engine.start)
        outcome.down.append((killed, time.monotonic()))

    async with _every(SAMPLE_S, sample), _every(restart_s, restart):
        users = [Client(outcome, running.data, random.Random(chance.random()), n) for n in range(clients)]
        await asyncio.gather(*(user.run(began + outcome.seconds, think_s) for user in users))
    sample()


@contextlib.asynccontextmanager
async def _every(seconds: float, step: Callable[[], object]) -> AsyncIterator[None]:
    """Calls ``step`` again and again; one that runs is finished."""
    stop = asyncio.Event()

    async def again() -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), seconds)
                return
            result = step()
            if asyncio.iscoroutine(result):
                await result

    task = asyncio.create_task(again())
    try:
        yield
    finally:
        stop.set()
        await task


def main() -> int:
    # Told to end, it takes its engine and its tap along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--clients", type=int, default=48)
    parser.add_argument("--think-ms", type=float, default=100.0)
    parser.add_argument("--restart-s", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--growth-mib", type=float, default=4.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tapproxy-soak-") as directory:
        outcome = soak(
            arguments.seconds,
            Path(directory),
            clients=arguments.clients,
            think_s=arguments.think_ms / 1000,
            restart_s=arguments.restart_s,
            seed=arguments.seed,
        )
    print(outcome.line())
    problems = outcome.problems(growth_bytes=int(arguments.growth_mib * 2**20))
    for problem in problems[:50]:
        print("  " + problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
