"""What ran where while a comparison was made: engines, the nginx in front, GPU and driver, this host.

Rules here: nothing is changed and nothing is started but `nginx -V` and `nvidia-smi`. What cannot be seen from here
(another host, another container, another user's process) is None, and is not guessed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tapproxy import __version__
from tapproxy.core.address import is_loopback
from tapproxy.core.errors import ConfigError
from tapproxy.load import environment
from tapproxy.load.redact import Redactor
from tapproxy.nginx import model

_TIMEOUT_S: Final = 5.0
_LISTENING: Final = "0A"
_MASTER: Final = "nginx: master process "
# By a word of its command line: whose flags are kept. Longest first, since paths hold several.
_KNOWN: Final = ("text-generation-launcher", "llama-server", "sglang", "vllm", "tapproxy")


async def gather(
    paths: Mapping[str, str],
    headers: Sequence[tuple[bytes, bytes]] = (),
    *,
    insecure: bool = False,
    ca_file: str | None = None,
) -> dict[str, Any]:
    """The environment of a run over ``paths`` (name → URL), for ``Trial.environment``.

    It asks each engine by HTTP and looks at this host; a path that does not answer has nothing told. ``headers`` are
    those of the requests (the engine may want a key).
    """

    async def one(url: str) -> dict[str, Any]:
        seen = await environment.ask(url, headers, insecure=insecure, ca_file=ca_file)
        return seen | await asyncio.to_thread(local, url)

    found = await asyncio.gather(*map(one, paths.values()))
    host = await asyncio.to_thread(this_host)
    return {**host, "paths": dict(zip(paths, map(_flags_beside, found), strict=True))}


def _flags_beside(seen: dict[str, Any]) -> dict[str, Any]:
    """The flags of an engine's own process are the engine's."""
    process = seen.get("process")
    if process is not None and process["name"] not in ("tapproxy", "nginx"):
        seen["engine"]["flags"] = process.pop("flags")
    return seen


def this_host(proc: Path = Path("/proc")) -> dict[str, Any]:
    """tapproxy's version, the client's machine, and its GPUs where there are any."""
    return {
        "tapproxy": __version__,
        "host": {
            "kernel": platform.release(),
            "cpu": _cpu(proc),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
        },
        "gpu": gpus(proc),
    }


def _cpu(proc: Path) -> str | None:
    try:
        lines = (proc / "cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


def gpus(proc: Path = Path("/proc"), command: str = "nvidia-smi") -> dict[str, Any] | None:
    """``{"names", "memory", "driver"}`` of this host's NVIDIA GPUs; None where none is seen."""
    said = _run([command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"])
    rows = [[cell.strip() for cell in line.split(",")] for line in (said or "").splitlines()]
    whole = [row for row in rows if len(row) == 3]
    if whole:
        return {"names": [row[0] for row in whole], "memory": [row[1] for row in whole], "driver": whole[0][2]}
    try:
        # The driver is there and its tool is not: a container, often.
        driver = (proc / "driver/nvidia/version").read_text(errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return None
    return {"names": None, "memory": None, "driver": driver.partition(":")[2].strip()}


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError, UnicodeError):
        return None
    return done.stdout + done.stderr if done.returncode == 0 else None


@dataclass(frozen=True, slots=True)
class _Process:
    pid: str
    words: list[str]
    title: str


def local(url: str, proc: Path = Path("/proc")) -> dict[str, Any]:
    """``{"process", "nginx"}``: who listens at the URL's port, where that is on this host and may be looked at."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or {"https": 443}.get(parts.scheme, 80)
    except ValueError:
        raise ConfigError(f"{url!r} is not a URL") from None
    unseen: dict[str, Any] = {"process": None, "nginx": None}
    if not is_loopback(host):
        return unseen
    processes = _listeners(port, proc)
    for process in processes:
        words = _nginx_words(process)
        if words is not None:
            return {"process": {"name": "nginx"}, "nginx": nginx(words, proc / process.pid)}
    for process in processes:
        name = next((known for known in _KNOWN if any(known in word for word in process.words[:4])), None)
        if name is not None:
            return {"process": {"name": name, "flags": flags(process.words)}, "nginx": None}
    return unseen


def _listeners(port: int, proc: Path) -> list[_Process]:
    """The processes that hold a listening socket of that port, the oldest first."""
    inodes = set()
    for table in ("net/tcp", "net/tcp6"):
        try:
            lines = (proc / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            cells = line.split()
            if len(cells) > 9 and cells[3] == _LISTENING and int(cells[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{cells[9]}]")
    found = []
    for entry in sorted((each for each in proc.iterdir() if each.name.isdigit()), key=lambda each: int(each.name)):
        try:
            holds = any(os.readlink(fd) in inodes for fd in (entry / "fd").iterdir())
            raw = (entry / "cmdline").read_bytes() if holds else b""
        except OSError:  # another user's, or gone
            continue
        if holds:
            words = [word.decode("utf-8", "replace") for word in raw.rstrip(b"\0").split(b"\0")]
            found.append(_Process(entry.name, words, " ".join(words)))
    return found


def flags(words: Sequence[str]) -> dict[str, Any]:
    """``--name value``, ``--name=value`` and ``--name`` of a command line, by name; secrets are left out.

    What listens where is left out as well: it is in the path's URL.
    """
    out: dict[str, Any] = {}
    name = None
    for word in Redactor().arguments(words):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            out[name] = value if equals else True
            name = None if equals else name
        elif name is not None:
            out[name] = word if out[name] is True else f"{out[name]} {word}"
    return {name: value for name, value in out.items() if name not in ("--host", "--port", "--listen", "--admin")}


def _nginx_words(process: _Process) -> list[str] | None:
    """The command line of an nginx master, or of one that runs as a single process; None for anything else."""
    if process.title.startswith(_MASTER):
        return process.title.removeprefix(_MASTER).split()
    return process.words if process.words and Path(process.words[0]).name == "nginx" else None


def nginx(words: Sequence[str], process: Path) -> dict[str, Any]:
    """The version of a running nginx, and a hash over its configuration with all that it includes."""
    said = _run([str(process / "exe"), "-V"]) or ""
    version = next((line.partition("/")[2] for line in said.splitlines() if line.startswith("nginx version:")), None)
    built = dict(word.partition("=")[::2] for word in said.split() if word.startswith("--"))
    prefix = _after(words, "-p") or built.get("--prefix", "")
    file = _after(words, "-c") or built.get("--conf-path", "conf/nginx.conf")
    digest, files = config_hash(Path(prefix, file))
    return {"version": version, "config_sha256": digest, "config_files": files}


def _after(words: Sequence[str], flag: str) -> str | None:
    return next((value for name, value in pairwise(words) if name == flag), None)


def config_hash(file: Path) -> tuple[str | None, int | None]:
    """(SHA-256 over the names and contents of the file and all it includes, how many); None where it is not readable.

    Comments count: what was touched is to be seen.
    """
    try:
        texts = model.read(str(file)).texts
    except (OSError, ConfigError):
        return None, None
    digest = hashlib.sha256()
    for name, text in sorted(texts.items()):
        for part in (name, text):
            data = part.encode("utf-8", "surrogateescape")
            digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest(), len(texts)
