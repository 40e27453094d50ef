"""Secrets pass through a tap, in every place a message has, and nothing that it writes or shows holds one.

Each test secret is a word of its own (``CANARY…``), so that a leak names the place it came from. What is stored on
purpose (ids, the model's name, the path, the values of the allow-listed response fields) bears none.
"""

from __future__ import annotations

import base64
import json
import os
import re
import resource
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.lab import children, wait_until, written
from tests.harness import SSE_HEAD, Peer, Tap, Upstream, answer, read_until, tap

PLACES: list[str] = []


def secret(place: str) -> str:
    """The secret of a place."""
    if place not in PLACES:
        PLACES.append(place)
    return f"CANARY{PLACES.index(place):02d}secret"


def line(name: str, value: str = "{}", place: str = "") -> str:
    """A field line with a secret in its value."""
    return f"{name}: {value.format(secret(place or 'field ' + name))}\r\n"


BASIC = base64.b64encode(f"user:{secret('basic password')}".encode()).decode()
CREDENTIALS = "".join(
    [
        line("Authorization", "Bearer {}"),
        f"Authorization: Basic {BASIC}\r\n",
        line("Cookie", "session={}; theme=dark"),
        line("Proxy-Authorization", "Bearer {}"),
        line("X-API-Key"),
        line("api-key"),
        line("X-Amz-Security-Token"),
        line("X-Anything"),
        line("Referer", "https://host/?token={}"),
        line("User-Agent", "curl/8 ({})"),
        line("From", "{}@example"),
        line("Forwarded", "for=a;by={}"),
        line("X-Forwarded-For", "{}"),
        line("Accept", "text/plain;key={}"),
        line("traceparent", "00-{}-00f067aa0ba902b7-01"),
        line("tracestate", "vendor={}"),
        line("X-Request-Id", "\x80{}", "request id that is no text"),
        f"X-{secret('name of a field')}: 1\r\n",
        f"Connection: X-{secret('nominated field')}\r\n",
        f"X-{secret('nominated field')}: {secret('value of a nominated field')}\r\n",
    ]
)


def post(target: str, body: str, fields: str = "") -> bytes:
    data = body.encode()
    framing = f"Connection: close\r\nContent-Length: {len(data)}\r\n"
    return f"POST {target} HTTP/1.1\r\nHost: engine\r\n{fields}{framing}\r\n".encode("latin-1") + data


CHAT = json.dumps(
    {
        "model": "m",
        "stream": True,
        "user": secret("body: user"),
        "api_key": secret("body: api_key"),
        "messages": [{"role": "user", "content": secret("prompt")}],
        "tools": [{"type": "function", "function": {"name": secret("tool's name")}}],
        secret("body: name of a member"): 1,
    }
)
# What is sent, and to which script; each gets a connection of its own.
REQUESTS: list[bytes] = [
    post("/stream?api_key=" + secret("query"), CHAT, CREDENTIALS),
    post("/stream?" + secret("query without a name"), CHAT),
    post(f"http://engine/error?key={secret('query of an absolute target')}", CHAT),
    post(f"http://engine?key={secret('query right after the authority')}", CHAT),
    post("/error", "{" + secret("body that is no JSON")),
    post("/error", "key=" + secret("form")),
    post("/plain", CHAT.replace("true", "false")),
    post("/malformed", CHAT),
    post("/garbage", CHAT),
    post("/surplus", CHAT),
    post("/cut", CHAT),
    post("/badchunk", CHAT),
    # Refused by the tap.
    f"GET http://user:{secret('userinfo')}@engine/ HTTP/1.1\r\nHost: engine\r\n\r\n".encode(),
    f"GET http://{secret('other authority')}/ HTTP/1.1\r\nHost: engine\r\n\r\n".encode(),
    f"CONNECT {secret('CONNECT target')}:443 HTTP/1.1\r\nHost: engine\r\n\r\n".encode(),
    f"GET / HTTP/1.1\r\nHost: {secret('Host')}\x80\r\n\r\n".encode("latin-1"),
    f"GET / HTTP/1.1\r\nHost: engine\r\nAuthorization {secret('field line without a colon')}\r\n\r\n".encode(),
    f"GET / HTTP/1.1\r\nHost: engine\r\nAuthorization: {secret('bare CR')}\r\r\n\r\n".encode(),
    f"GET / HTTP/1.1\r\nHost: engine\r\nAuthorization: a\r\n {secret('folded line')}\r\n\r\n".encode(),
    f"{secret('request line')} is no request\r\n\r\n".encode(),
    f"GET /?{secret('version')} HTTP/3.1\r\nHost: engine\r\n\r\n".encode(),
    f"GET / HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: {secret('transfer coding')}\r\n\r\n".encode(),
    f"GET / HTTP/1.1\r\nHost: e\r\nContent-Length: {secret('content length')}\r\n\r\n".encode(),
    f"GET /?ws={secret('websocket')} HTTP/1.1\r\nHost: e\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n".encode(),
    f"POST /stream HTTP/1.1\r\nHost: e\r\nTransfer-Encoding: chunked\r\n\r\n{secret('chunk size')}\r\n".encode(),
    (
        "POST /chunked HTTP/1.1\r\nHost: e\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        f"2;key={secret('chunk extension')}\r\n{{}}\r\n0\r\nX-Key: {secret('request trailer')}\r\n\r\n"
    ).encode(),
]


def script(peer: Peer) -> None:
    """Answers that hold secrets in every place an answer has."""
    head = peer.head()
    path = re.match(rb"\S+ (?:http://[^/? ]*)?(/\w*)?", head)
    assert path is not None
    if path[1] == b"/chunked":
        while not peer.buffer.endswith(b"\r\n\r\n"):
            peer._fill()
    ANSWERS.get((path[1] or b"/").decode(), ANSWERS["/error"])(peer)


def said(value: object) -> str:
    """One event."""
    return f"data: {json.dumps(value)}\n\n"


def stream(peer: Peer) -> None:
    peer.send(f"HTTP/1.1 103 Early Hints\r\nLink: </a?{secret('interim field')}>\r\n\r\n".encode())
    fields = line("Set-Cookie", "s={}; HttpOnly") + line("Location", "/?t={}") + line("WWW-Authenticate", "Bearer {}")
    peer.send(f"HTTP/1.1 200 {secret('reason phrase')}\r\n{fields}".encode() + SSE_HEAD.partition(b"\r\n")[2])
    delta = {"content": secret("completion")}
    call = {"tool_calls": [{"function": {"arguments": secret("call")}}]}
    for event in (
        f": {secret('comment')}\n\n",
        f"event: {secret('event type')}\nid: {secret('event id')}\ndata: {{}}\n\n",
        said({"id": "chatcmpl-1", "choices": [{"index": 0, "delta": delta}]}),
        said({"choices": [{"index": 0, "delta": call}]}),
        f"data: {secret('event that is no JSON')} is no JSON\n\n",
        said({"error": {"message": secret("error event"), "code": 500}}),
        "data: [DONE]\n\n",
    ):
        peer.send(b"%x;k=%s\r\n%s\r\n" % (len(event), secret("answer's extension").encode(), event.encode()))
    peer.send(f"0\r\nX-Key: {secret('answer trailer')}\r\n\r\n".encode())


def whole(status: str, value: object) -> bytes:
    text = json.dumps(value)
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


ANSWERS: dict[str, Callable[[Peer], None]] = {
    "/stream": stream,
    "/error": lambda peer: peer.send(whole("401 No", {"error": {"message": f"bad key {secret('error body')}"}})),
    "/plain": lambda peer: peer.send(
        whole("200 OK", {"id": "chatcmpl-2", "choices": [{"message": {"content": secret("plain completion")}}]})
    ),
    "/malformed": lambda peer: peer.send(f"HTTP/1.1 200 OK\r\nX {secret('malformed answer field')}\r\n\r\n".encode()),
    "/garbage": lambda peer: peer.send(f"220 {secret('banner')} ESMTP\r\n\r\n".encode()),
    "/surplus": lambda peer: peer.send(whole("200 OK", {}) + secret("surplus").encode()),
    "/cut": lambda peer: peer.send(f"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n{secret('cut body')}".encode()),
    "/badchunk": lambda peer: peer.send(SSE_HEAD + f"{secret('chunk size of an answer')}\r\n".encode()),
    "/chunked": lambda peer: peer.send(whole("200 OK", {})),
}


@dataclass(frozen=True)
class Shown:
    """Everything a tap wrote and showed, by where it stood; and what the clients got."""

    texts: dict[str, str]
    records: int
    answers: str


def admin_texts(running: Tap) -> Iterator[tuple[str, str]]:
    """Every page of the admin port, asked for with a secret; and what it says to requests that hold one."""
    ids = [record["id"] for record in json.loads(running.admin_get("/api/records"))["records"]]
    pages = ["/metrics", "/", "/style.css", "/api/records?limit=1000", "/api/status", "/healthz", "/readyz"]
    pages += [f"/api/records/{record_id}" for record_id in ids]
    pages += [f"/api/records/{secret('admin: id')}", f"/{secret('admin: path')}", f"/?{secret('admin: query')}"]
    for page in pages:
        request = urllib.request.Request(f"http://{running.admin[0]}:{running.admin[1]}{page}")
        request.add_header("Authorization", f"Bearer {secret('admin: authorization')}")
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                yield page.replace("CANARY", ""), f"{response.headers}{response.read().decode()}"
        except urllib.error.HTTPError as error:
            with error:
                yield f"error {error.code}", error.read().decode()


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Shown:
    directory = tmp_path_factory.mktemp("tap")
    answers = b""
    with Upstream(script) as upstream, tap(directory, upstream.url, "--pair-key", secret("pair key")) as running:
        for request in REQUESTS:
            with running.connect() as sock:
                sock.sendall(request)
                answers += answer(sock)
        wait_until(lambda: len(written(directory)) >= len(REQUESTS), "a record of each request")
        texts = dict(admin_texts(running))
        running.process.send_signal(signal.SIGTERM)
        texts["stdout"], texts["stderr"] = running.process.communicate(timeout=20)
    assert not upstream.failures
    for file in directory.rglob("*"):
        if file.is_file():
            texts[str(file.relative_to(directory))] = file.read_bytes().decode("latin-1")
    return Shown(texts, len(written(directory)), answers.decode("latin-1"))


def test_every_request_left_a_record(shown: Shown) -> None:
    assert shown.records == len(REQUESTS)


def test_the_secrets_of_the_answers_reached_the_clients(shown: Shown) -> None:
    """Else nothing would be proved: what the tap did not pass on it had little chance to keep."""
    relayed = ["reason phrase", "field Set-Cookie", "interim field", "completion", "call", "comment", "error event"]
    relayed += ["event that is no JSON", "answer trailer", "answer's extension", "error body", "cut body"]
    assert [place for place in relayed if secret(place) not in shown.answers] == []
    # What the upstream wrote into a head that was not accepted goes no further.
    assert [place for place in ("malformed answer field", "banner", "surplus") if secret(place) in shown.answers] == []


def test_no_secret_is_written_or_shown(shown: Shown) -> None:
    assert len(PLACES) >= 40
    words = {place: secret(place) for place in PLACES} | {"Basic": BASIC}
    leaks = [(where, place) for where, text in shown.texts.items() for place, word in words.items() if word in text]
    assert leaks == []


# -- characters that speak to a terminal or a browser

# ESC, NUL, DEL, CR and LF, a C1 control (CSI), a mark that turns the direction of writing, a separator of lines.
ODD = ["\x1b[31m", "\x00", "\x7f", "\r\n", "\x9b31m", "\u202e", "\u2028"]
_ODD_CHARACTERS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def test_no_control_character_of_a_name_or_an_id_is_written_or_shown(tmp_path: Path) -> None:
    """Not in the record file either: `less -R` and `tail -f` show it to a terminal. JSON's own escapes are text."""

    def odd_answer(peer: Peer) -> None:
        _, body = peer.request()
        odd = json.loads(body)["odd"]
        data = {"id": f"chatcmpl-{odd}", "model": f"m{odd}", "choices": [{"index": 0, "delta": {"content": "a"}}]}
        event = f"data: {json.dumps(data, ensure_ascii=False)}\n\ndata: [DONE]\n\n".encode()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Request-Id: a\x9b\r\nServer: \x9bs\r\n")
        peer.send(b"Content-Length: %d\r\n\r\n%s" % (len(event), event))

    with Upstream(odd_answer) as upstream, tap(tmp_path, upstream.url) as running:
        for odd in ODD:
            for document in ({"model": f"m{odd}", "odd": odd}, {"odd": odd}):
                with running.connect() as sock:
                    sock.sendall(post("/%1b%5b31m%0a", json.dumps(document, ensure_ascii=False)))
                    assert b"[DONE]" in answer(sock)
        wait_until(lambda: len(written(tmp_path)) == 2 * len(ODD), "a record of each")
        texts = dict(admin_texts(running))
        running.process.send_signal(signal.SIGTERM)
        texts["stdout"], texts["stderr"] = running.process.communicate(timeout=20)
    for file in tmp_path.iterdir():
        texts[file.name] = file.read_bytes().decode()
    records = written(tmp_path)
    assert len(records) == 2 * len(ODD)
    assert all(record["model"].startswith("m") and record["response_id"].startswith("chatcmpl-") for record in records)
    found = {where: characters for where, text in texts.items() if (characters := _ODD_CHARACTERS.findall(text))}
    assert found == {}


def test_many_model_names_make_few_series(tmp_path: Path) -> None:
    """Ten thousand of them are tried on the exporter alone; here some hundreds come all the way."""

    def named(peer: Peer) -> None:
        while True:
            _, body = peer.request()
            event = b'data: {"model":"%s","choices":[{"index":0,"delta":{"content":"a"}}],' % body[10:20]
            event += b'"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
            peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(event))
            peer.send(event)

    count = 300
    with Upstream(named) as upstream, tap(tmp_path, upstream.url) as running:
        with running.connect() as sock:
            for number in range(count):
                body = b'{"model":"model-%04d","stream":true}' % number
                sock.sendall(b"POST /%d HTTP/1.1\r\nHost: e\r\nContent-Length: %d\r\n\r\n" % (number, len(body)) + body)
                read_until(sock, b"[DONE]\n\n")
        wait_until(lambda: len(written(tmp_path)) == count, "all records")
        page = running.admin_get("/metrics")
    series = [found for found in page.splitlines() if 'model="' in found]
    assert 20 < len(series) < 100
    assert 'model="other"' in page
    assert 'path="' not in page


# -- who may read


def test_the_files_are_the_users_alone_whatever_the_umask(tmp_path: Path) -> None:
    data = tmp_path / "data"
    before = os.umask(0)
    try:
        with Upstream(script) as upstream, tap(tmp_path / "unused", upstream.url, "--data", str(data)) as running:
            with running.connect() as sock:
                sock.sendall(post("/plain", CHAT))
                answer(sock)
            wait_until(lambda: written(data), "a record")
            running.process.send_signal(signal.SIGHUP)
            assert data.stat().st_mode & 0o7777 == 0o700
            assert [file.stat().st_mode & 0o7777 for file in data.iterdir()] == [0o600]
            # Secrets of the command line are not handed on in one.
            for pid in children(running.process.pid):
                assert secret("pair key").encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
    finally:
        os.umask(before)


def test_a_worker_that_crashes_dumps_no_core(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if hard == 0:
        pytest.skip("no process may dump core here")
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        with Upstream(script) as upstream, tap(tmp_path, upstream.url) as running:
            for pid in (running.process.pid, *children(running.process.pid)):
                assert resource.prlimit(pid, resource.RLIMIT_CORE)[0] == 0
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
