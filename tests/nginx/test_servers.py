"""Who listens, and which server answers a name: by table, and a real nginx is asked."""

from __future__ import annotations

import http.client
from pathlib import Path

import pytest

from tapproxy.nginx.refusals import load
from tapproxy.nginx.sandbox import Nginx, RunningNginx
from tapproxy.nginx.servers import Servers
from tests.nginx.live import ALL, TEMPORARY, free_ports, label, request, with_nginx

VERSION = (1, 31, 3)


def servers_of(inside: str, directory: Path) -> Servers:
    file = directory / "servers.conf"
    file.write_text(f"events {{}} http {{ {inside} }}")
    return Servers(load(str(file), version=VERSION))


@pytest.mark.parametrize(
    ("listen", "version", "kinds"),
    [
        ("listen 80;", VERSION, ("http1",)),
        ("", VERSION, ("http1",)),
        ("listen 443 ssl;", VERSION, ("tls_http1",)),
        ("listen 443 ssl http2;", VERSION, ("tls_http1", "h2")),
        ("listen 443 ssl; http2 on;", VERSION, ("tls_http1", "h2")),
        ("listen 80; listen 443 ssl;", VERSION, ("http1", "tls_http1")),
        ("listen 80 http2;", (1, 22, 1), ("h2",)),
        ("listen 80 http2;", VERSION, ("http1", "h2")),
        ("listen 443 quic; listen 443 ssl;", VERSION, ("tls_http1",)),
        ("listen 443; ssl on;", VERSION, ("tls_http1",)),
    ],
)
def test_a_listener_tells_its_kinds_of_client(
    listen: str, version: tuple[int, ...], kinds: tuple[str, ...], tmp_path: Path
) -> None:
    servers = servers_of(f"server {{ {listen} location / {{ }} }}", tmp_path)
    assert servers.all[0].client_kinds(version) == kinds


def test_options_of_a_shared_listener_count_for_all_its_servers(tmp_path: Path) -> None:
    servers = servers_of("server { listen 443 ssl; } server { listen 443; server_name b; }", tmp_path)
    assert servers.all[1].client_kinds(VERSION) == ("tls_http1",)


def test_a_fragment_without_listener_may_serve_both(tmp_path: Path) -> None:
    file = tmp_path / "locations.conf"
    file.write_text("location / { proxy_pass http://e; }")
    servers = Servers(load(str(file), version=VERSION))
    assert servers.all[0].client_kinds(VERSION) == ("http1", "tls_http1")


@pytest.mark.parametrize(
    ("host", "port", "address"),
    [
        ("127.0.0.1", "81", "127.0.0.1:81"),
        ("localhost", "81", "127.0.0.1:81"),
        ("127.0.0.1", "82", "*:82"),
        ("10.0.0.1", "82", None),
        ("127.0.0.1", "83", None),
        ("unix:/run/e.sock", "80", "unix:/run/e.sock"),
    ],
)
def test_a_connection_back_into_the_configuration_is_seen(
    host: str, port: str, address: str | None, tmp_path: Path
) -> None:
    inside = "server { listen 127.0.0.1:81; } server { listen 82; } server { listen unix:/run/e.sock; }"
    assert servers_of(inside, tmp_path).listening(host, port) == address


NAMES = [
    "server_name first.example;",
    "server_name a.example www.a.example;",
    "server_name *.a.example;",
    "server_name *.b.a.example;",
    "server_name mail.*;",
    "server_name ~^(?<who>user\\d+)\\.example$;",
    "server_name .dot.example;",
    "server_name _ MiXed.example;",
]
HOSTS = [
    "a.example", "www.a.example", "x.a.example", "x.b.a.example", "mail.a.example", "mail.example", "user12.example",
    "dot.example", "x.dot.example", "_", "mixed.example", "MIXED.example", "other.example", "127.0.0.1", "user.example",
]  # fmt: skip


@pytest.mark.skipif(not ALL, reason="no nginx here")
@pytest.mark.parametrize("default", [None, 2], ids=["first-is-default", "default-server"])
@pytest.mark.parametrize("nginx", ALL, ids=label)
def test_names_choose_the_server_that_nginx_chooses(nginx: Nginx, default: int | None, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    blocks = "".join(
        f"server {{ listen 127.0.0.1:{port}{' default_server' if number == default else ''}; {name}\n"
        f"return 200 {number}; }}\n"
        for number, name in enumerate(NAMES)
    )
    servers = servers_of(blocks, tmp_path)

    def ask(_: RunningNginx) -> list[int]:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        answers = [int(request(connection, "GET", "/", host)[2]) for host in HOSTS]
        connection.close()
        return answers

    theirs = with_nginx(nginx, f"events {{}} http {{ access_log off; {TEMPORARY}\n{blocks} }}", ask)
    ours = [servers.all.index(servers.answering(f"127.0.0.1:{port}", host)) for host in HOSTS]
    assert dict(zip(HOSTS, ours, strict=True)) == dict(zip(HOSTS, theirs, strict=True))


def test_a_name_selects_one_server_per_address(tmp_path: Path) -> None:
    servers = servers_of(
        "server { listen 80; server_name a; } server { listen 80; server_name b; } server { listen 81; }", tmp_path
    )
    assert [servers.all.index(one) for one in servers.selected("b")] == [1, 2]
    assert servers.selected(None) == servers.all
