"""What stands around the messages: TLS, IPv6, UNIX sockets, interim answers, trailers, answers without a body."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import trustme

from tapproxy.wire.fetch import Client
from tests.faults.lab import client_tls, reset, status, wait_until
from tests.harness import DONE, SSE_HEAD, Peer, Tap, Upstream, answer, read_until, tap

GET = b"GET /x HTTP/1.1\r\nHost: e\r\n\r\n"
WAIT_S = 10.0
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


# -- TLS on the listener


# How long each request for /wait… waited for its connection to be closed.
left: list[float | None] = []


@dataclass(frozen=True, slots=True)
class Certificate:
    """One that names localhost and 127.0.0.1, and who vouches for it."""

    ca: Path
    chain: Path
    key: Path


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    directory = tmp_path_factory.mktemp("certificate")
    found = Certificate(*(directory / name for name in ("ca.pem", "chain.pem", "key.pem")))
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    authority.cert_pem.write_to_path(found.ca)
    issued.private_key_pem.write_to_path(found.key)
    found.chain.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
    return found


def three_events(peer: Peer) -> None:
    while True:
        head, _ = peer.request()
        if head.startswith(b"GET /wait"):
            left.append(peer.closed_within(WAIT_S))
            return
        peer.send(SSE_HEAD)
        for text in (b"a", b"b", b"[DONE]"):
            peer.event(text)
            time.sleep(0.02)
        peer.send(DONE)


@pytest.fixture(scope="module")
def secure(certificate: Certificate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tap]:
    """A tap with TLS on its data port before an upstream without."""
    flags = ("--tls-cert", str(certificate.chain), "--tls-key", str(certificate.key))
    with Upstream(three_events) as upstream, tap(tmp_path_factory.mktemp("tap"), upstream.url, *flags) as running:
        yield running


STREAM = SSE_HEAD + b"9\r\ndata: a\n\n\r\n9\r\ndata: b\n\n\r\ne\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def test_a_stream_goes_through_tls_event_by_event(secure: Tap, certificate: Certificate) -> None:
    with client_tls(certificate.ca).wrap_socket(secure.connect(), server_hostname="localhost") as sock:
        sock.settimeout(2)
        for _ in range(2):
            sock.sendall(GET)
            got = b""
            while not got.endswith(DONE):
                got += sock.recv(4096)
            assert got == STREAM
    assert [record["ended"] for record in secure.records(2, path="/x")] == ["complete", "complete"]


@needs_curl
def test_curl_reads_a_stream_over_tls(secure: Tap, certificate: Certificate) -> None:
    url = f"https://localhost:{secure.data[1]}/curl"
    done = subprocess.run(
        ["curl", "-sS", "-N", "--max-time", "3", "--cacert", str(certificate.ca), "-d", "{}", url],
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout == b"data: a\n\ndata: b\n\ndata: [DONE]\n\n"


@needs_openssl
def test_openssl_reads_a_stream_over_tls(secure: Tap, certificate: Certificate) -> None:
    arguments = ["-connect", f"localhost:{secure.data[1]}", "-CAfile", str(certificate.ca), "-verify_return_error"]
    with subprocess.Popen(
        ["openssl", "s_client", "-quiet", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(b"GET /openssl HTTP/1.1\r\nHost: e\r\nConnection: close\r\n\r\n")
        process.stdin.flush()
        # Its end would be the client's: stdin stays open until the answer is there.
        timer = threading.Timer(3, process.kill)
        timer.start()
        assert process.stdout is not None
        got = process.stdout.read()
        timer.cancel()
        assert got == STREAM.replace(b"chunked\r\n\r\n", b"chunked\r\nconnection: close\r\n\r\n")


def test_our_own_client_reads_a_stream_over_tls(secure: Tap, certificate: Certificate) -> None:
    async def fetch() -> tuple[str | None, bytes]:
        client = Client(f"https://localhost:{secure.data[1]}", ca_file=str(certificate.ca), timeout_s=3)
        try:
            fetched = await client.fetch("POST", "/own", [], b"{}")
            return fetched.error, b"".join(read.body for read in fetched.reads)
        finally:
            await client.close()

    assert asyncio.run(fetch()) == (None, b"data: a\n\ndata: b\n\ndata: [DONE]\n\n")


def test_who_speaks_no_tls_to_a_tls_port_is_closed_and_harms_nobody(secure: Tap) -> None:
    with secure.connect() as sock:
        sock.sendall(GET)
        assert not answer(sock).startswith(b"HTTP/")
    wait_until(lambda: status(secure)["connections"] == 0, "no connection left")


LEAVES = [pytest.param("fin", id="fin"), pytest.param("rst", id="rst"), pytest.param("notify", id="close_notify")]


@pytest.mark.parametrize("how", LEAVES)
def test_a_tls_client_that_leaves_ends_the_upstream(secure: Tap, certificate: Certificate, how: str) -> None:
    before = len(left)
    sock = client_tls(certificate.ca).wrap_socket(secure.connect(), server_hostname="localhost")
    sock.sendall(b"GET /wait-%s HTTP/1.1\r\nHost: e\r\n\r\n" % how.encode())
    time.sleep(0.1)
    if how == "rst":
        reset(sock)
    elif how == "notify":
        sock.setblocking(False)
        with contextlib.suppress(ssl.SSLWantReadError):
            sock.unwrap()
    else:
        sock.close()
    wait_until(lambda: len(left) > before, "the upstream's end", 3)
    assert left[-1] is not None
    assert secure.record(path=f"/wait-{how}")["ended"] == "client_aborted"
    sock.close()


# -- TLS to the upstream


TLS_ENDS = [
    pytest.param("notify", "complete", id="close_notify"),
    # RFC 9112 9.8: without it a body that only its end delimits is incomplete, since anybody on the way can send a FIN.
    pytest.param(
        "fin",
        "upstream_aborted",
        id="fin_alone",
    ),
    pytest.param("rst", "upstream_aborted", id="rst"),
]


@pytest.fixture(scope="module")
def behind(certificate: Certificate, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tap]:
    """A tap before an upstream with TLS that ends its answers as the path says."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.chain, certificate.key)

    def script(peer: Peer) -> None:
        with context.wrap_socket(peer.sock, server_side=True) as sock:
            path = Peer(sock).head().split(b" ")[1]
            sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: a\n\n")
            time.sleep(0.05)
            if path == b"/notify":
                with contextlib.suppress(OSError):
                    sock.unwrap()
            elif path == b"/rst":
                reset(sock)
            else:
                socket.socket(fileno=sock.detach()).close()

    with Upstream(script) as upstream:
        flags = ("--upstream-ca", str(certificate.ca))
        with tap(tmp_path_factory.mktemp("tap"), upstream.url.replace("http:", "https:"), *flags) as running:
            yield running
    assert not upstream.failures


@pytest.mark.parametrize(("how", "ended"), TLS_ENDS)
def test_a_close_delimited_answer_over_tls_is_whole_only_where_tls_says_so(behind: Tap, how: str, ended: str) -> None:
    with behind.connect() as sock:
        sock.sendall(f"GET /{how} HTTP/1.1\r\nHost: e\r\n\r\n".encode())
        assert answer(sock).endswith(b"\r\n\r\ndata: a\n\n" + (b"" if ended == "complete" else b"<RST>"))
    assert behind.record(path=f"/{how}")["ended"] == ended


def test_a_tls_handshake_that_goes_nowhere_ends_at_the_limit_and_with_its_client(tmp_path: Path) -> None:
    closed: list[float | None] = []

    def deaf(peer: Peer) -> None:
        closed.append(peer.closed_within(WAIT_S))

    flags = ("--insecure", "--connect-timeout", "400ms")
    with Upstream(deaf) as upstream, tap(tmp_path, upstream.url.replace("http:", "https:"), *flags) as running:
        with running.connect() as sock:
            sock.sendall(GET)
            assert read_until(sock, b"\r\n\r\n").startswith(b"HTTP/1.1 504 ")
        sock = running.connect()
        sock.sendall(GET)
        wait_until(lambda: upstream.connections == 2, "the second connection")
        sock.close()
        wait_until(lambda: len(closed) == 2, "its end", 3)
        # Not after the limit.
        assert closed[1] is not None
        assert closed[1] < 0.35
        assert [record["ended"] for record in running.records(2)] == ["timeout", "client_aborted"]


# -- addresses


@pytest.fixture
def six() -> None:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 on this host")


@contextlib.contextmanager
def upstream_on(listener: socket.socket) -> Iterator[None]:
    """One answer a connection, on a listener of any family."""

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock, contextlib.suppress(EOFError, OSError):
                sock.settimeout(WAIT_S)
                Peer(sock).request()
                sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(WAIT_S)


@pytest.mark.usefixtures("six")
def test_ipv6_on_both_sides(tmp_path: Path) -> None:
    listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
    url = f"http://[::1]:{listener.getsockname()[1]}"
    with upstream_on(listener), tap(tmp_path, url, "--listen", "[::1]:0") as running:
        with socket.create_connection(("::1", running.data[1]), WAIT_S) as sock:
            sock.sendall(GET)
            assert read_until(sock, b"\r\n\r\nok").startswith(b"HTTP/1.1 200 OK\r\n")
        record = running.record()
        assert (record["ended"], record["upstream"]["peer"]) == ("complete", url.removeprefix("http://"))
        assert record["stamps"]["source"] == "kernel"


def test_an_upstream_on_a_unix_socket(tmp_path: Path) -> None:
    place = tmp_path / "engine.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place))
    listener.listen()
    with upstream_on(listener), tap(tmp_path / "data", f"unix:{place}") as running:
        with running.connect() as sock:
            sock.sendall(GET)
            assert read_until(sock, b"\r\n\r\nok").startswith(b"HTTP/1.1 200 OK\r\n")
        record = running.record()
        # The kernel stamps no UNIX socket, and has no TCP_INFO of it.
        assert (record["ended"], record["stamps"]["source"]) == ("complete", "user")
        assert record["upstream"]["peer"] == f"unix:{place}"
        assert record["upstream"]["rtt_ns"] is None


def test_a_unix_socket_that_is_not_there_is_a_502_and_to_head_one_without_a_body(tmp_path: Path) -> None:
    with tap(tmp_path, f"unix:{tmp_path}/none.sock") as running, running.connect() as sock:
        sock.sendall(GET)
        assert b"No such file or directory" in read_until(sock, b"}}\n")
        assert running.record()["ended"] == "upstream_unreachable"
        sock.sendall(b"HEAD /x HTTP/1.1\r\nHost: e\r\nConnection: close\r\n\r\n")
        head = answer(sock)
        assert head.startswith(b"HTTP/1.1 502 ")
        assert head.endswith(b"\r\n\r\n")


# -- messages beside the ordinary


def by_path(peer: Peer) -> None:
    """Answers by the path."""
    while True:
        head = peer.head()
        path = head.split(b" ")[1]
        if path == b"/continue":
            assert b"\r\nExpect: 100-continue\r\n" in head
            peer.send(b"HTTP/1.1 100 Continue\r\nX-Hint: a\r\n\r\n")
            while len(peer.buffer) < 6:
                peer._fill()
            body, peer.buffer = peer.buffer, b""
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n" + body)
        elif path == b"/refuse":
            peer.send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig")
            return
        elif path.startswith(b"/interim/"):
            count = int(path.rpartition(b"/")[2])
            peer.send(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * count)
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        elif path == b"/length":
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nX-A: 1\r\n\r\n")
        elif path == b"/204":
            peer.send(b"HTTP/1.1 204 No Content\r\n\r\n")
        elif path == b"/304":
            peer.send(b'HTTP/1.1 304 Not Modified\r\nETag: "a"\r\nContent-Length: 1000\r\n\r\n')
        elif path == b"/trailers":
            while not peer.buffer.endswith(b"\r\n\r\n"):
                peer._fill()
            body, peer.buffer = peer.buffer, b""
            peer.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        else:
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(head), head))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tap]:
    with Upstream(by_path) as upstream, tap(tmp_path_factory.mktemp("tap"), upstream.url) as running:
        yield running
    assert not upstream.failures


@needs_curl
@pytest.mark.parametrize(("path", "status_code", "body"), [("/continue", "200", b"upload"), ("/refuse", "413", b"big")])
def test_curl_waits_for_the_engines_100_continue(plain: Tap, path: str, status_code: str, body: bytes) -> None:
    done = subprocess.run(
        [
            *("curl", "-sS", "-i", "--max-time", "5", "--expect100-timeout", "4"),
            *("-H", "Expect: 100-continue", "-d", "upload", plain.url + path),
        ],
        capture_output=True,
        check=True,
    )
    heads, _, got = done.stdout.rpartition(b"\r\n\r\n")
    assert got == body
    assert heads.split(b"\r\n\r\n")[-1].startswith(b"HTTP/1.1 " + status_code.encode())
    assert heads.startswith(b"HTTP/1.1 100 Continue\r\nX-Hint: a\r\n\r\n") == (path == "/continue")


@pytest.mark.parametrize(("count", "status_line"), [(16, b"HTTP/1.1 200 "), (17, b"HTTP/1.1 502 ")])
def test_sixteen_interim_answers_are_relayed_and_no_more(plain: Tap, count: int, status_line: bytes) -> None:
    with plain.connect() as sock:
        sock.sendall(b"GET /interim/%d HTTP/1.1\r\nHost: e\r\nConnection: close\r\n\r\n" % count)
        got = answer(sock)
    interim = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    assert got.startswith(interim * 16 + status_line)
    ended = {200: "complete", 502: "upstream_malformed"}
    record = plain.record(path=f"/interim/{count}")
    assert record["ended"] == ended[record["status"]]


BODILESS = [
    pytest.param(b"HEAD", b"/length", b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\nX-A: 1\r\n\r\n", id="head"),
    pytest.param(b"GET", b"/204", b"HTTP/1.1 204 No Content\r\n\r\n", id="204"),
    pytest.param(b"GET", b"/304", b'HTTP/1.1 304 Not Modified\r\nETag: "a"\r\nContent-Length: 1000\r\n\r\n', id="304"),
    pytest.param(
        b"HEAD", b"/304", b'HTTP/1.1 304 Not Modified\r\nETag: "a"\r\nContent-Length: 1000\r\n\r\n', id="h304"
    ),
]


@pytest.mark.parametrize(("method", "path", "expected"), BODILESS)
def test_an_answer_without_a_body_ends_with_its_head(plain: Tap, method: bytes, path: bytes, expected: bytes) -> None:
    """Both connections go on: what follows is answered, through the same one."""
    with plain.connect() as sock:
        for _ in range(3):
            sock.sendall(method + b" " + path + b" HTTP/1.1\r\nHost: e\r\n\r\n")
            assert read_until(sock, b"\r\n\r\n") == expected
        sock.sendall(GET)
        assert read_until(sock, GET).startswith(b"HTTP/1.1 200 OK\r\n")


def test_trailers_pass_in_both_directions(plain: Tap) -> None:
    body = b"3;ext=1\r\nabc\r\n0\r\nX-Sum: 1\r\nx-sum: 2\r\n\r\n"
    with plain.connect() as sock:
        sock.sendall(
            b"POST /trailers HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n" + body
        )
        assert read_until(sock, b"\r\n\r\n") + read_until(sock, b"x-sum: 2\r\n\r\n") == (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body
        )


FORWARDED = [
    b"X-Forwarded-For: 203.0.113.9, 10.0.0.1",
    b"X-Forwarded-For: not an address",
    b"x-forwarded-host: 127.0.0.1:1",
    b"X-Forwarded-Proto: https",
    b"X-Forwarded-Port: 1",
    b"X-Real-IP: 203.0.113.9",
    b'Forwarded: for="[2001:db8::1]";host=other.example;proto=https',
    b"Via: 1.1 somebody",
    b"Max-Forwards: 0",
]


def test_forwarded_fields_are_relayed_as_they_came_and_never_acted_on(plain: Tap) -> None:
    request = b"\r\n".join([b"GET /forwarded HTTP/1.1", b"Host: e", *FORWARDED, b"", b""])
    with plain.connect() as sock:
        sock.sendall(request)
        got = read_until(sock, b"Max-Forwards: 0\r\n\r\n")
    assert got.partition(b"\r\n\r\n")[2] == request
    record = plain.record(path="/forwarded")
    assert record["upstream"]["peer"] == status(plain)["upstream"].removeprefix("http://")
    assert "203.0.113.9" not in str(record)
