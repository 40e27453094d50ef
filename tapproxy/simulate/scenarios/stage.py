"""Everything that a scenario runs on: the simulated engine, real nginx, taps on both sides of it.

Rules here: all of it listens on free loopback ports and lives in one private directory; whatever was started is
stopped and whatever was written is removed, at whatever point a start is cut short. Path ``fixed`` runs what
``nginx.fix`` makes of the scenario's own configuration when it starts; no second file says what the fix should be.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tapproxy.core.errors import MeasureError
from tapproxy.nginx import fix, sandbox
from tapproxy.nginx.checker import Examination, examine
from tapproxy.nginx.ports import HeldPorts
from tapproxy.simulate import child
from tapproxy.simulate.scenarios.catalogue import Workload
from tapproxy.simulate.scenarios.parts import Scenario

MODEL: Final = "sim"
_ENGINE_READY: Final = re.compile(r"listening on (\S+):(\d+)")
_TAP_READY: Final = re.compile(r"data on (\S+):(\d+), admin on (\S+)")


@dataclass(slots=True)
class Stage:
    """What runs: where each path begins, where each tap keeps its records, and what was patched for path ``fixed``."""

    directory: Path
    nginx: sandbox.Nginx
    urls: dict[str, str] = field(default_factory=dict)
    records: dict[str, Path] = field(default_factory=dict)
    # What the check says of the configuration, whose patch makes path ``fixed`` of path ``nginx``; None until it runs.
    examined: Examination | None = None
    children: list[child.Child] = field(default_factory=list)
    servers: list[sandbox.RunningNginx] = field(default_factory=list)

    async def stop(self) -> None:
        """Ends everything at once; taps write out what they hold. Safe to call twice."""
        ends = [each.stop() for each in self.children] + [each.stop() for each in self.servers]
        self.children, self.servers = [], []
        await asyncio.gather(*ends)


@asynccontextmanager
async def staged(scenario: Scenario, workload: Workload) -> AsyncIterator[Stage]:
    """Starts all parts, those that can at the same time; leaves no process, port or file behind."""
    nginx = sandbox.find_nginx()
    directory = Path(tempfile.mkdtemp(prefix="tapproxy-demo-"))
    # nginx runs as nobody where we are root, and has to pass through to its own home; what lies here is closed itself.
    os.chmod(directory, 0o711)
    stage = Stage(directory, nginx)
    try:
        await _start_all(stage, scenario, workload)
        yield stage
    finally:
        try:
            await stage.stop()
        finally:
            shutil.rmtree(directory, ignore_errors=True)


async def _start_all(stage: Stage, scenario: Scenario, workload: Workload) -> None:
    pair_key = secrets.token_hex(16)
    paths = ("nginx", "fixed")
    with HeldPorts(len(paths)) as ports:
        try:
            async with asyncio.TaskGroup() as group:
                engine = group.create_task(_engine(stage, workload))
                servers = []
                for path, port in zip(paths, ports.numbers, strict=True):
                    home = stage.directory / f"nginx-{path}"
                    home.mkdir(mode=0o700)
                    cert, key = sandbox.make_certificate(home)
                    servers.append((path, port, home, cert, key))
                    # A tap starts with its upstream down, so the outer ones need not wait for nginx.
                    upstream = ("--upstream", f"https://127.0.0.1:{port}", "--upstream-ca", str(cert))
                    group.create_task(_tap(stage, f"outer-{path}", path, pair_key, *upstream))
                inner = await _tap(stage, "inner", "tap", pair_key, "--upstream", f"http://127.0.0.1:{await engine}")
                for path, port, home, cert, key in servers:
                    text = sandbox.render_demo(
                        scenario.nginx, listen_port=port, upstream_port=inner, cert=cert, key=key, directory=home
                    )
                    text = _with_lines(text, scenario.http_lines)
                    if path == "fixed":
                        text = _patched(stage, text, f"demo-{scenario.nginx}.conf")
                    group.create_task(_nginx(stage, text, home))
        except* child.ChildError as error:
            raise MeasureError(str(error.exceptions[0])) from None


async def _engine(stage: Stage, workload: Workload) -> int:
    flags = {
        "--listen": "127.0.0.1:0",
        "--model": MODEL,
        "--output-tokens": workload.tokens,
        "--ttft-us": workload.ttft_ms * 1000,
        "--itl-us": workload.interval_ms * 1000,
        "--max-num-seqs": max(64, workload.concurrency),
    }
    arguments = [str(word) for flag in flags.items() for word in flag]
    found = await _start(
        stage, "the engine", ["-m", "tapproxy.simulate", *arguments, "--per-request-metrics"], _ENGINE_READY
    )
    stage.urls["direct"] = f"http://127.0.0.1:{found[2]}"
    return int(found[2])


async def _tap(stage: Stage, name: str, path: str, pair_key: str, *upstream: str) -> int:
    """Starts a tap at which ``path`` begins; its data port."""
    data = stage.directory / name
    flags = ("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--name", name, "--data", str(data))
    more = ("--pair-key", pair_key, "--shutdown-grace", "1s")
    arguments = ["-m", "tapproxy.cli", "serve", *upstream, *flags, *more]
    found = await _start(stage, f"tap {name}", arguments, _TAP_READY)
    stage.records[name] = data
    stage.urls[path] = f"http://127.0.0.1:{found[2]}"
    return int(found[2])


async def _start(stage: Stage, name: str, arguments: Sequence[str], ready: re.Pattern[str]) -> re.Match[str]:
    started, found = await child.start(name, arguments, ready)
    stage.children.append(started)
    return found


def _patched(stage: Stage, text: str, name: str) -> str:
    """What ``check --fix --write`` would make of this configuration."""
    nginx = stage.nginx
    # By its name in the package and not by one on this disk: it is only ever read from here.
    stage.examined = examine([name], nginx_version=nginx.version, build=nginx.build, texts={name: text})
    return fix.apply(text, stage.examined.edits)


async def _nginx(stage: Stage, text: str, home: Path) -> None:
    server = sandbox.RunningNginx()
    stage.servers.append(server)
    await server.start(stage.nginx, text, home)


def _with_lines(text: str, lines: Sequence[str]) -> str:
    """The configuration with more lines at the start of its http block."""
    head, block, rest = text.partition("http {\n")
    return head + block + "".join(f"    {line}\n" for line in lines) + rest
