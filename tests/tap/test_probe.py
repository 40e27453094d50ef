"""``serve --allow-probe``: what bears a live key is answered by the tap, and nothing else is touched."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tapproxy.core.probing import Framing, Part, Plan
from tapproxy.nginx.sandbox import make_certificate
from tests.faults.lab import children, client_tls, wait_until
from tests.harness import DONE, SSE_HEAD, Peer, Tap, Upstream, read_until, tap

MS = 1_000_000
PLAN = Plan("p", (Part(5, 230, 2 * MS),))
HALF_MINUTE = {"expires_s": 30}


def admin(
    running: Tap, method: str, document: Any = None, key: str | None = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    """/api/probe of the admin port."""
    request = urllib.request.Request(
        f"http://{running.admin[0]}:{running.admin[1]}/api/probe",
        method=method,
        data=None if document is None else json.dumps(document).encode(),
        headers={"Content-Type": "application/json", **({"X-Tapproxy-Probe": key} if key else {}), **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def key_of(running: Tap) -> str:
    status, document = admin(running, "POST", HALF_MINUTE)
    assert status == 200, document
    return str(document["key"])


def request(key: str, plan: Plan = PLAN, *, version: str = "1.1", field: str = "X-Tapproxy-Probe") -> bytes:
    body = plan.body()
    return (
        f"POST /v1/chat/completions HTTP/{version}\r\nHost: t\r\nAuthorization: Bearer engine-key\r\n"
        f"{field}: {key}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode() + body


def ask(running: Tap, wire: bytes, until: bytes = b"0\r\n\r\n") -> bytes:
    with running.connect() as sock:
        sock.sendall(wire)
        return read_until(sock, until)


def reports(running: Tap, key: str, count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    def there() -> bool:
        found[:] = admin(running, "GET", key=key)[1]["streams"]
        return len(found) >= count

    wait_until(there, f"{count} reports")
    assert len(found) == count
    return found


def forwarded(peer: Peer) -> None:
    """An engine that says that it was asked."""
    while True:
        peer.request()
        peer.send(SSE_HEAD)
        peer.event(b"engine")
        peer.send(DONE)


def test_a_request_with_the_key_is_answered_here_and_one_without_it_there(tmp_path: Path) -> None:
    with Upstream(forwarded) as upstream, tap(tmp_path, upstream.url, "--allow-probe") as running:
        key = key_of(running)
        answer = ask(running, request(key))
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"x-tapproxy-stream: p\r\n" in answer
        assert answer.count(b'"sent_ns":') == 5
        assert upstream.connections == 0
        for other in (request("wrong"), request(key, field="X-Other"), request(key[:-1]), request("")):
            assert b"engine" in ask(running, other)
        (report,) = reports(running, key, 1)
        assert report["ended"] == "complete"
        assert [int(part.split(b"}")[0].split(b",")[0]) for part in answer.split(b'"sent_ns":')[1:]] == report[
            "sent_ns"
        ]
        fields = {name.lower(): value for name, value in report["fields"]}
        assert fields["x-tapproxy-probe"] == fields["authorization"] == "(not shown)"
        assert report["http"] == "1.1"
        # Four of the engine's, none of the tap's.
        assert {record["path"] for record in running.records(4)} == {"/v1/chat/completions"}
        wait_until(lambda: json.loads(running.admin_get("/api/status"))["handled"] >= 4, "the status is renewed")
        assert json.loads(running.admin_get("/api/status"))["handled"] == 4
        assert "tapproxy-probe" not in running.admin_get("/metrics")


def test_without_the_flag_there_is_no_key_and_no_difference(tmp_path: Path) -> None:
    with Upstream(forwarded) as upstream, tap(tmp_path, upstream.url) as running:
        status, document = admin(running, "POST", HALF_MINUTE)
        assert status == 403
        assert "--allow-probe" in document["error"]
        assert b"engine" in ask(running, request("anything"))


@pytest.mark.parametrize("workers", [2, 3])
def test_every_worker_knows_the_key_before_it_is_told(tmp_path: Path, workers: int) -> None:
    """Fresh connections go to whichever worker takes them: each answers every time, from the first moment on."""
    with (
        Upstream(forwarded) as upstream,
        tap(tmp_path, upstream.url, "--allow-probe", "--workers", str(workers)) as running,
    ):
        seen = set()
        for _ in range(4):
            key = key_of(running)
            for _ in range(12):
                assert b"x-tapproxy-stream: p" in ask(running, request(key))
            seen |= {report["worker"] for report in reports(running, key, 12)}
            assert admin(running, "DELETE", key=key)[0] == 200
        assert upstream.connections == 0
        assert len(seen) > 1


def test_a_worker_that_is_started_again_knows_the_key(tmp_path: Path) -> None:
    with Upstream(forwarded) as upstream, tap(tmp_path, upstream.url, "--allow-probe") as running:
        key = key_of(running)
        (worker,) = children(running.process.pid)
        subprocess.run(["kill", "-KILL", str(worker)], check=True)
        wait_until(lambda: children(running.process.pid) not in ([], [worker]), "another worker")
        wait_until(lambda: json.loads(running.admin_get("/api/status"))["ready"], "it takes requests")
        assert b"x-tapproxy-stream: p" in ask(running, request(key))
        assert upstream.connections == 0


def test_a_key_ends_by_being_taken_back_and_by_its_time(tmp_path: Path) -> None:
    with Upstream(forwarded) as upstream, tap(tmp_path, upstream.url, "--allow-probe") as running:
        key = key_of(running)
        assert admin(running, "DELETE", key=key) == (200, {"ended": True})
        assert admin(running, "GET", key=key)[0] == 404
        wait_until(lambda: b"engine" in ask(running, request(key)), "the worker has heard of it")
        status, short = admin(running, "POST", {"expires_s": 0.3})
        assert status == 200
        time.sleep(0.4)
        assert b"engine" in ask(running, request(short["key"]))
        assert admin(running, "GET", key=short["key"])[0] == 404


@pytest.mark.parametrize(
    ("document", "headers", "status"),
    [
        pytest.param({"expires_s": 0}, {}, 400, id="no_time"),
        pytest.param({"expires_s": 1e9}, {}, 400, id="for_ever"),
        pytest.param({"expires_s": "x"}, {}, 400, id="no_number"),
        pytest.param([], {}, 400, id="no_object"),
        pytest.param({}, {"Content-Type": "text/plain"}, 415, id="what_a_page_can_send"),
    ],
)
def test_the_desk_refuses_what_makes_no_sense(desk: Tap, document: Any, headers: dict[str, str], status: int) -> None:
    assert admin(desk, "POST", document, **headers)[0] == status


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with tap(tmp_path_factory.mktemp("desk"), "http://127.0.0.1:9", "--allow-probe") as running:
        yield running


def test_sixteen_probes_at_a_time_and_no_more(tmp_path: Path) -> None:
    with tap(tmp_path, "http://127.0.0.1:9", "--allow-probe") as running:
        keys = [key_of(running) for _ in range(16)]
        assert admin(running, "POST", HALF_MINUTE)[0] == 429
        assert admin(running, "DELETE", key=keys[0])[0] == 200
        assert len({*keys, key_of(running)}) == 17


def test_the_admin_token_guards_the_desk(tmp_path: Path) -> None:
    with tap(tmp_path, "http://127.0.0.1:9", "--allow-probe", "--admin-token", "t0ken") as running:
        guarded = urllib.request.Request(
            f"http://{running.admin[0]}:{running.admin[1]}/api/probe", b"{}", method="POST"
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(guarded, timeout=10)
        refused.value.close()
        assert refused.value.code == 401
        assert admin(running, "POST", HALF_MINUTE, Authorization="Bearer t0ken")[0] == 200


def test_the_key_is_in_one_answer_and_nowhere_else(tmp_path: Path) -> None:
    """Not in records, metrics, status, reports, logs, nor in what the workers are told."""
    with tap(tmp_path / "data", "http://127.0.0.1:9", "--allow-probe", "--workers", "2") as running:
        key = key_of(running)
        ask(running, request(key))
        ask(running, b"GET /x HTTP/1.1\r\nHost: t\r\n\r\n", b"}}\n")
        shown = [json.dumps(reports(running, key, 1))]
        shown += [running.admin_get(path) for path in ("/metrics", "/api/status", "/api/records", "/")]
        for pid in [running.process.pid, *children(running.process.pid)]:
            shown.append(Path(f"/proc/{pid}/cmdline").read_text())
            shown.append(Path(f"/proc/{pid}/environ").read_text())
        running.process.terminate()
        out, err = running.process.communicate(timeout=20)
        shown += [out, err, *(file.read_text() for file in (tmp_path / "data").glob("*"))]
        assert not [text for text in shown if key in text]


def test_an_http10_request_gets_chunks_as_from_vllm_or_none_as_asked(tmp_path: Path) -> None:
    with tap(tmp_path, "http://127.0.0.1:9", "--allow-probe") as running:
        key = key_of(running)
        chunked = ask(running, request(key, version="1.0"))
        assert b"transfer-encoding: chunked\r\n" in chunked
        assert b"connection: close\r\n" in chunked
        plain = ask(
            running, request(key, Plan("q", PLAN.parts, framing=Framing.AS_ASKED), version="1.0"), b"[DONE]\n\n"
        )
        assert b"transfer-encoding" not in plain
        body = plain.partition(b"\r\n\r\n")[2]
        assert body.startswith(b"data: {")
        assert len(body) == 5 * 230 + len(b"data: [DONE]\n\n")
        assert [report["http"] for report in reports(running, key, 2)] == ["1.0", "1.0"]


def test_a_client_that_leaves_is_reported_with_its_time(tmp_path: Path) -> None:
    with tap(tmp_path, "http://127.0.0.1:9", "--allow-probe") as running:
        key = key_of(running)
        with running.connect() as sock:
            sock.sendall(request(key, Plan("long", (Part(100, 230, 50 * MS),))))
            read_until(sock, b"sent_ns")
        left_ns = time.monotonic_ns()
        (report,) = reports(running, key, 1)
        assert report["ended"] == "left"
        assert abs(report["end_ns"] - left_ns) < 500 * MS
        assert len(report["sent_ns"]) < 100


def test_a_slow_upload_is_dated_from_its_first_byte(tmp_path: Path) -> None:
    with tap(tmp_path, "http://127.0.0.1:9", "--allow-probe") as running:
        key = key_of(running)
        wire = request(key)
        with running.connect() as sock:
            sock.sendall(wire[:-20])
            time.sleep(0.2)
            sock.sendall(wire[-20:])
            read_until(sock, b"0\r\n\r\n")
        (report,) = reports(running, key, 1)
        assert report["body_end_ns"] - report["body_first_ns"] > 150 * MS
        assert report["body_bytes"] == len(PLAN.body())
        assert len(report["body_reads"]) == 2


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"not json", id="no_json"),
        pytest.param(b"{}", id="no_plan"),
        pytest.param(b'{"probe":{"id":"../x","parts":[[1,230,0]]}}', id="an_id_of_odd_characters"),
        pytest.param(b'{"probe":{"id":"x","parts":[[100000,230,0]]}}', id="too_many_events"),
        pytest.param(b'{"probe":{"id":"x","parts":[[5000,60000,0]]}}', id="too_many_bytes"),
        pytest.param(b'{"probe":{"id":"x","parts":[[10,230,699000000000]]}}', id="too_long"),
        pytest.param(b'{"probe":{"id":"x","parts":[]}}', id="nothing"),
        pytest.param(b'{"probe":{"id":"x","parts":[[1,230,0]],"framing":"none"}}', id="no_framing"),
    ],
)
def test_a_plan_beyond_reason_is_refused_and_goes_nowhere(desk: Tap, body: bytes) -> None:
    _, document = admin(desk, "POST", {"expires_s": 5})
    head = f"POST / HTTP/1.1\r\nHost: t\r\nX-Tapproxy-Probe: {document['key']}\r\nContent-Length: {len(body)}\r\n\r\n"
    answer = ask(desk, head.encode() + body, b"}}\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    (report,) = reports(desk, document["key"], 1)
    assert report["ended"] == "bad_request"
    assert admin(desk, "DELETE", key=document["key"])[0] == 200


def test_a_stream_in_progress_ends_with_the_tap(tmp_path: Path) -> None:
    """Within the grace period it goes on; then it is cut, and the tap ends in good order."""
    with tap(tmp_path, "http://127.0.0.1:9", "--allow-probe", "--shutdown-grace", "1s") as running:
        key = key_of(running)
        with running.connect() as sock:
            sock.sendall(request(key, Plan("long", (Part(3, 230, 60_000 * MS),))))
            read_until(sock, b"sent_ns")
            running.process.terminate()
            assert running.process.wait(20) == 0


def test_keep_alive_carries_one_stream_after_the_other(tmp_path: Path) -> None:
    with tap(tmp_path, "http://127.0.0.1:9", "--allow-probe") as running:
        key = key_of(running)
        with running.connect() as sock:
            for _ in range(3):
                sock.sendall(request(key))
                assert b"x-tapproxy-stream: p" in read_until(sock, b"0\r\n\r\n")
        assert len({report["connection"] for report in reports(running, key, 3)}) == 1


def test_with_tls_on_the_listener_too(tmp_path: Path) -> None:
    certificate, private = make_certificate(tmp_path)
    flags = ("--allow-probe", "--tls-cert", str(certificate), "--tls-key", str(private))
    with tap(tmp_path / "data", "http://127.0.0.1:9", *flags) as running:
        key = key_of(running)
        with client_tls(certificate).wrap_socket(running.connect(), server_hostname="localhost") as sock:
            sock.sendall(request(key))
            assert read_until(sock, b"0\r\n\r\n").count(b'"sent_ns":') == 5


def test_with_acknowledgements_stamped_too(tmp_path: Path) -> None:
    """The connection is of another class then; a probe's answer leaves it as it found it."""
    with Upstream(forwarded) as upstream, tap(tmp_path, upstream.url, "--allow-probe", "--ack-stamps") as running:
        key = key_of(running)
        with running.connect() as sock:
            for _ in range(2):
                sock.sendall(request(key))
                assert b"x-tapproxy-stream: p" in read_until(sock, b"0\r\n\r\n")
                sock.sendall(request("none"))
                assert b"engine" in read_until(sock, b"0\r\n\r\n")
        records = running.records(2)
        assert [record["ended"] for record in records] == ["complete", "complete"]
        assert all(None not in record["events"]["acked"] for record in records)


def test_more_streams_than_a_probe_has_are_refused_and_go_nowhere(tmp_path: Path) -> None:
    with (
        Upstream(forwarded) as upstream,
        tap(tmp_path, upstream.url, "--allow-probe", "--shutdown-grace", "1s") as running,
        contextlib.ExitStack() as stack,
    ):
        key = key_of(running)
        for number in range(64):
            sock = stack.enter_context(running.connect())
            sock.sendall(request(key, Plan(f"s{number}", (Part(2, 230, 60_000 * MS),))))
            read_until(sock, b"sent_ns")
        assert ask(running, request(key), b"}}\n").startswith(b"HTTP/1.1 503 ")
        assert upstream.connections == 0
        assert b"engine" in ask(running, request("none"))
