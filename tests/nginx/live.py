"""A real nginx for a test: started in the sandbox, asked, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import random
import socket
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from tapproxy.nginx.sandbox import Nginx, RunningNginx, find_all, private_directory

ALL = find_all()
TEMPORARY = "".join(f"{kind}_temp_path tmp/{kind}; " for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))


def label(nginx: Nginx) -> str:
    return nginx.version


def free_ports(count: int) -> list[int]:
    """Ports nothing listens on, below the range from which the kernel gives ports to others meanwhile."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(12000, 32000), 40 * count):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError("no free ports")


def refusal(nginx: Nginx, text: str, directory: Path) -> str | None:
    """What ``nginx -t`` has against a text of ours, or None where it accepts it."""
    (directory / "tmp").mkdir(exist_ok=True)
    (directory / "tested.conf").write_text(text)
    arguments = ["-t", "-p", str(directory), "-c", str(directory / "tested.conf"), "-e", str(directory / "test.log")]
    done = subprocess.run(
        [str(nginx.path), *arguments, "-g", f"pid {directory}/test.pid;"],
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    return None if done.returncode == 0 else done.stderr.strip()


def with_nginx(nginx: Nginx, text: str, ask: Callable[[RunningNginx], Any]) -> Any:
    """What ``ask`` (in a thread) returns while nginx runs with this text."""

    async def run() -> Any:
        running = RunningNginx()
        await running.start(nginx, text, private_directory())
        try:
            return await asyncio.to_thread(ask, running)
        finally:
            await running.stop()

    return asyncio.run(run())


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def request(
    connection: http.client.HTTPConnection, method: str, path: str, host: str = "localhost"
) -> tuple[int, dict[str, str], bytes]:
    """Status, header fields (lower case) and body."""
    connection.request(method, path, headers={"Host": host})
    answer = connection.getresponse()
    body = answer.read()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, body
