"""Starts the parts of a scenario's paths, the engine first, each part told where the next one listens.

Rules here: everything listens on loopback, or in network namespaces of the scenario's own; it lives in one private
directory; whatever was started is stopped and whatever was written is removed, at whatever point a start is cut short.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tapproxy.core.errors import MeasureError
from tapproxy.nginx import sandbox
from tapproxy.nginx.ports import bound
from tapproxy.simulate import child
from tapproxy.simulate.scenarios import disturb, edit
from tapproxy.simulate.scenarios.parts import End, Engine, Nginx, Part, Relay, Setting, Tap, Value
from tapproxy.wire import link

MODEL: Final = "sim"
_ENGINE_READY: Final = re.compile(r"listening on (\S+):(\d+)")
_TAP_READY: Final = re.compile(r"data on (\S+):(\d+), admin on (\S+)")
# Where the slow look-ups are answered: loopback, where nobody else is.
_DNS_HOST: Final = "127.77.53.1"


class Skipped(Exception):
    """This host does not allow the scenario; the text says what."""


@dataclass(slots=True)
class Line:
    """What runs. ``taps``: name → where the taps of that name keep their records; those of the clean path are apart."""

    directory: Path
    urls: dict[str, str] = field(default_factory=dict)
    certificates: dict[str, Path] = field(default_factory=dict)
    taps: dict[str, list[Path]] = field(default_factory=dict)
    engine: child.Child | None = None
    engine_address: str = ""
    nginx: sandbox.Nginx | None = None
    children: list[child.Child] = field(default_factory=list)
    servers: list[sandbox.RunningNginx] = field(default_factory=list)

    @property
    def truth(self) -> Path:
        """The simulator's own log."""
        return self.directory / "truth.jsonl"

    async def stop(self) -> None:
        """Ends everything at once; taps write out what they hold. Safe to call twice."""
        ends = [each.stop() for each in self.children] + [each.stop() for each in self.servers]
        self.children, self.servers = [], []
        await asyncio.gather(*ends)


@dataclass(frozen=True, slots=True)
class _Place:
    """A part's network: 0 is ours. ``address``: where it is reached from the other end of the link."""

    pid: int = 0
    address: str = "127.0.0.1"
    end: link.End | None = None


@dataclass(slots=True)
class _Starter:
    """Starts parts. ``clean``: those of the path without the fault, whose taps nobody reads."""

    line: Line
    setting: Setting
    places: dict[End, _Place]
    pair_key: str
    numbers: dict[str, int] = field(default_factory=dict)
    resolver: Path | None = None

    async def path(self, parts: Sequence[Part], to: str, *, clean: bool) -> str:
        """Starts the parts before the engine, the last of them first; where the first one listens."""
        for index in range(len(parts) - 1, -1, -1):
            part = parts[index]
            before = parts[index - 1] if index else None
            host = self._host(part, before)
            if isinstance(part, Relay):
                to = await self._relay(part, host, to)
            elif isinstance(part, Nginx):
                to = await self._nginx(part, host, to, clean=clean)
            elif isinstance(part, Tap):
                to = await self._tap(part, host, to, clean=clean)
        return to

    def _host(self, part: Part, before: Part | None) -> str:
        """Loopback where the part before it is at the same end."""
        comes_from = End.HERE if before is None else before.end
        if isinstance(before, Relay) and before.leads_to is not None:
            comes_from = before.leads_to
        return "127.0.0.1" if comes_from == part.end else self.places[part.end].address

    async def engine(self, part: Engine, before: Part | None) -> str:
        """Starts the engine; where it listens."""
        host = self._host(part, before)
        flags: dict[str, Value] = {"listen": f"{host}:0", "model": MODEL, "truth": str(self.line.truth)}
        flags |= part.flags
        if self.setting.told:
            flags["per_request_metrics"] = True
        started, found = await self._start(
            "the engine",
            ["-m", "tapproxy.simulate", *_words(flags)],
            _ENGINE_READY,
            part.end,
            part.cores,
        )
        self.line.engine = started
        self.line.engine_address = f"{host}:{found[2]}"
        return self.line.engine_address

    async def _relay(self, part: Relay, host: str, to: str) -> str:
        # What it leads to may speak TLS, which is no matter of the relay's.
        where, _, rest = to.partition(" ")
        scheme, slashes, address = where.rpartition("://")
        settings = dict(part.settings) | {"listen": f"{host}:0", "to": address}
        if part.leads_to is not None:
            settings["enter"] = self.places[part.leads_to].pid
        words = ["-m", "tapproxy.simulate.relay", *_words(settings)]
        _, found = await self._start("a relay", words, _ENGINE_READY, part.end)
        return f"{scheme}{slashes}{host}:{found[2]} {rest}".strip()

    async def _tap(self, part: Tap, host: str, to: str, *, clean: bool) -> str:
        number = self.numbers[part.name] = self.numbers.get(part.name, 0) + 1
        data = self.line.directory / f"{part.name}-{number}"
        upstream, _, more = to.partition(" ")
        if part.upstream_name is not None:
            upstream = f"{part.upstream_name}:{upstream.rpartition(':')[2]}"
        url = upstream if "://" in upstream else f"http://{upstream}"
        words = ["-m", "tapproxy.cli", "serve", "--upstream", url, *more.split(), "--listen", f"{host}:0"]
        words += ["--admin", "127.0.0.1:0", "--name", part.name, "--data", str(data), "--pair-key", self.pair_key]
        words += ["--shutdown-grace", "1s", *part.flags]
        resolver = self.resolver if part.upstream_name is not None else None
        started, found = await self._start(f"tap {part.name}", words, _TAP_READY, part.end, part.cores, resolver)
        if not clean:
            self.line.taps.setdefault(part.name, []).append(data)
            if part.stopped_ms:
                disturb.stand_still(started.pid, part.stopped_ms, part.every_ms)
        return f"{host}:{found[2]}"

    async def _nginx(self, part: Nginx, host: str, to: str, *, clean: bool) -> str:
        place = self.places[part.end]
        backup = await self.path(part.backup, to, clean=clean) if part.backup else None
        home = self.line.directory / f"nginx-{len(self.line.servers)}"
        home.mkdir(mode=0o700)
        cert, key = sandbox.make_certificate(home, ("localhost", "127.0.0.1", host)) if part.tls else (home, home)
        # In a namespace of its own every port is free.
        with contextlib.ExitStack() as held:
            port = 8080 if place.end else held.enter_context(bound(0)).getsockname()[1]
            upstream = int(to.rpartition(":")[2])
            text = sandbox.render_demo(
                part.kind, listen_port=port, upstream_port=upstream, cert=cert, key=key, directory=home, tls=part.tls
            )
            text = edit.with_addresses(text, host, port, to, backup)
            text = edit.with_lines(text, part.http, part.location)
            self.line.nginx = self.line.nginx or sandbox.find_nginx()
            server = sandbox.RunningNginx()
            self.line.servers.append(server)
            await server.start(self.line.nginx, text, home, end=place.end)
        return f"https://{host}:{port} --upstream-ca {cert}" if part.tls else f"{host}:{port}"

    async def _start(
        self,
        name: str,
        words: Sequence[str],
        ready: re.Pattern[str],
        end: End,
        cores: tuple[int, ...] = (),
        resolver: Path | None = None,
    ) -> tuple[child.Child, re.Match[str]]:
        place = child.Place(self.places[end].pid, resolver, cores)
        started, found = await child.start(name, words, ready, place=place)
        self.line.children.append(started)
        return started, found


@asynccontextmanager
async def running(setting: Setting, names: tuple[str, str]) -> AsyncIterator[Line]:
    """All parts of a scenario, running. ``names``: of its path and of the clean one.

    Raises Skipped where this host does not allow it, MeasureError where something does not start.
    """
    directory = Path(tempfile.mkdtemp(prefix="tapproxy-demo-"))
    # nginx runs as nobody where we are root, and has to pass through to its own home; what lies here is closed itself.
    os.chmod(directory, 0o711)
    line = Line(directory)
    try:
        async with AsyncExitStack() as stack:
            places = _places(setting, stack)
            starter = _Starter(line, setting, places, secrets.token_hex(16))
            try:
                if setting.dns_ms is not None:
                    starter.resolver = await _resolver(setting.dns_ms, directory, stack)
                stack.push_async_callback(line.stop)
                stack.callback(disturb.let_go)
                await _start_all(starter, setting, names)
            except child.ChildError as error:
                raise MeasureError(str(error)) from None
            yield line
    finally:
        shutil.rmtree(directory, ignore_errors=True)


async def _start_all(starter: _Starter, setting: Setting, names: tuple[str, str]) -> None:
    *before, engine = setting.path
    if not isinstance(engine, Engine):
        raise RuntimeError("a path ends with its engine")
    to = await starter.engine(engine, before[-1] if before else None)
    for core in setting.hogs:
        await starter._start("a busy program", ["-c", disturb.HOG], re.compile("busy()"), End.HERE, (core,))
    paths = [starter.path(setting.path, to, clean=False)]
    if setting.clean:
        paths.append(starter.path(setting.clean, to, clean=True))
    entries = await asyncio.gather(*paths)
    for name, entry in zip(names, entries, strict=False):
        where, _, cert = entry.partition(" --upstream-ca ")
        starter.line.urls[name] = where if "://" in where else f"http://{where}"
        if cert:
            starter.line.certificates[name] = Path(cert)


def _places(setting: Setting, stack: AsyncExitStack) -> dict[End, _Place]:
    places = {End.HERE: _Place()}
    if setting.link is None:
        return places
    try:
        near, far = stack.enter_context(link.link(setting.link.delay_ms, setting.link.lost_share))
    except link.Unavailable as why:
        raise Skipped(f"no link between network namespaces: {why}") from None
    places[End.NEAR], places[End.FAR] = (_Place(end.pid, end.address, end) for end in (near, far))
    return places


async def _resolver(delay_ms: float, directory: Path, stack: AsyncExitStack) -> Path:
    """A name server of ours that takes its time, and the resolv.conf that names it."""
    if os.geteuid() != 0:
        raise Skipped("a name server of its own takes root")
    try:
        stack.callback((await disturb.slow_names(_DNS_HOST, delay_ms)).close)
    except OSError as error:
        raise Skipped(f"no name server on {_DNS_HOST}:53: {error.strerror}") from None
    path = directory / "resolv.conf"
    path.write_text(f"nameserver {_DNS_HOST}\noptions timeout:5 attempts:1\n")
    return path


def _words(flags: dict[str, Value]) -> list[str]:
    out: list[str] = []
    for name, value in flags.items():
        flag = "--" + name.replace("_timeout_s", "_timeout").replace("_", "-")
        out += [flag] if value is True else [] if value is False else [flag, str(value)]
    return out
