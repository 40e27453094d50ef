"""`tapproxy compare` from outside: what it refuses, sends, keeps, and how it ends."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trustme

from tapproxy.diagnose.evidence import Evidence
from tapproxy.load.runs import Register
from tests.e2e.helpers import Engine, engine, until_quiet
from tests.harness import Peer, Upstream, tap

_WAIT_S = 60.0
_ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "OPENAI_API_KEY"}


def compare(
    directory: Path,
    *arguments: str,
    environment: dict[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs it in a directory of its own."""
    return subprocess.run(
        [sys.executable, "-m", "tapproxy.cli", "compare", *arguments],
        capture_output=True,
        text=True,
        timeout=_WAIT_S,
        cwd=directory,
        stdin=subprocess.DEVNULL,
        env={**_ENVIRONMENT, "NO_COLOR": "1", **(environment or {})},
        preexec_fn=before,
    )


def kept_runs(directory: Path) -> list[str]:
    """The register's, without what it hides."""
    return [path.name for path in (directory / "tapproxy-data" / "runs").iterdir() if not path.name.startswith(".")]


@pytest.fixture(scope="module")
def sim() -> Iterator[Engine]:
    with engine("--ttft-us", "3000", "--itl-us", "500") as running:
        yield running


class Recorder:
    """An engine of an unknown make that answers at once and keeps what it was asked."""

    def __init__(self, *, refuses: str | None = None, tokenizes: bool = False) -> None:
        self.refuses = refuses
        self.tokenizes = tokenizes
        self.asked: list[tuple[float, bytes, dict[str, Any]]] = []
        self.connections_of: list[int] = []
        self.lock = threading.Lock()

    def __call__(self, peer: Peer) -> None:
        while True:
            head, body = peer.request()
            target = head.split(b" ", 2)[1]
            if not target.endswith(b"/completions"):
                self._side(peer, target, body)
                continue
            document = json.loads(body)
            if self.refuses is not None and self.refuses in document:
                self._answer(peer, 400, b'{"error": {"message": "unknown field"}}')
                continue
            with self.lock:
                self.asked.append((time.monotonic(), head, document))
                self.connections_of.append(id(peer))
            events = [
                {"choices": [{"index": 0, "delta": {"content": "a"}, "text": "a", "finish_reason": None}]},
                {"choices": [{"index": 0, "delta": {"content": "b"}, "text": "b", "finish_reason": "length"}]},
                {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}},
            ]
            data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
            peer.send(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                + b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
            )

    def _side(self, peer: Peer, target: bytes, body: bytes) -> None:
        if target == b"/v1/models":
            self._answer(peer, 200, b'{"object": "list", "data": [{"id": "mine", "owned_by": "me"}]}')
        elif target == b"/tokenize" and self.tokenizes:
            count = 2 * len(json.loads(body)["prompt"].split(" "))
            self._answer(peer, 200, json.dumps({"count": count}).encode())
        else:
            self._answer(peer, 404, b"{}")

    @staticmethod
    def _answer(peer: Peer, status: int, body: bytes) -> None:
        head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        peer.send(head % (status, len(body)) + body)

    @property
    def prompts(self) -> list[str]:
        return [
            document["messages"][0]["content"] if "messages" in document else document["prompt"]
            for _, _, document in self.asked
        ]


@contextmanager
def recorder(**more: Any) -> Iterator[tuple[Recorder, str]]:
    script = Recorder(**more)
    with Upstream(script) as upstream:
        yield script, upstream.url
    assert upstream.failures == []


FEW = ("--requests", "4", "--warmup", "1", "--max-tokens", "3")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Missing argument"),
        (["http://127.0.0.1:1"], "expected NAME=URL"),
        (["a=http://u:secret@h"], "user name or password"),
        (["a=URL", "a=URL"], "given twice"),
        (["a=URL", "--scenario", "burst"], "expected one of single-stream, server, offline, concurrency"),
        (["a=URL", "--scenario", "server"], "wants --rate"),
        (["a=URL", "--rate", "0"], "--rate is 0"),
        (["a=URL", "--rate", "nan"], "--rate is nan"),
        (["a=URL", "--rate", "2", "--concurrency", "3"], "belongs to --scenario concurrency"),
        (["a=URL", "--requests", "0"], "--requests is 0"),
        (["a=URL", "--requests", "3", "--duration", "3s"], "keep one"),
        (["a=URL", "--scenario", "offline", "--duration", "3s"], "means nothing"),
        (["a=URL", "--duration", "soon"], "--duration is 'soon'"),
        (["a=URL", "--prompts", "/nonexistent"], "cannot be read"),
        (["a=URL", "--prompt-tokens", "3"], "too short"),
        (["a=URL", "--sweep", "prompt-tokens=64,3"], "too short"),
        (["a=URL", "--sweep", "colour=1,2"], "--sweep is"),
        (["a=URL", "--sweep", "concurrency=1.5"], "whole numbers"),
        (["a=URL", "--rate-steps", "1,x"], "--rate-steps"),
        (["a=URL", "--find-rate"], "wants --slo"),
        (["a=URL", "--slo", "speed"], "--slo"),
        (["a=URL", "--api", "grpc"], "--api is"),
        (["a=URL", "--header", "Authorization secret"], "--header is no field"),
        (["a=URL", "--body", "[1]"], "--body is no JSON object"),
        (["a=URL", "--body", '{"stream": false}'], "what is compared are streams"),
        (["a=URL", "--processes", "2"], "single-stream sends one at a time"),
        (["a=URL", "--baseline", "nothing"], "nothing"),
        (["a=URL", "--json", "/nonexistent/x.json"], "cannot be written"),
        (["a=URL", "--data", "FILE"], "cannot be kept"),
        (["a=https://127.0.0.1:1", "--ca", "/nonexistent"], "certificates"),
        (["a=URL", "--tokenizer", "/nonexistent"], "--tokenizer"),
        (["a=URL", "--replay", "/nonexistent"], "nonexistent"),
        (["a=URL", "--plan", "FILE"], "no plan"),
        (["a=URL", "--engine-metrics", "127.0.0.1:8000"], "--engine-metrics is '127.0.0.1:8000', which has no scheme"),
        (["a=URL", "--sample-interval", "0s"], "--sample-interval is 0s: expected 100ms to 1h"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_sentence_and_exit_2(tmp_path: Path, sim: Engine, arguments: list[str], said: str) -> None:
    (tmp_path / "plan.json").write_text("{}")
    given = [arg.replace("URL", sim.url).replace("FILE", str(tmp_path / "plan.json")) for arg in arguments]
    done = compare(tmp_path, *given)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "tapproxy-data").exists()


def test_a_path_that_nobody_answers_on_is_exit_3(tmp_path: Path, sim: Engine) -> None:
    done = compare(tmp_path, f"a={sim.url}", "b=http://127.0.0.1:1", *FEW)
    assert done.returncode == 3
    assert "the path b (http://127.0.0.1:1) cannot be reached" in done.stderr


def test_no_fact_of_the_surroundings_is_told_twice(tmp_path: Path, sim: Engine) -> None:
    done = compare(tmp_path, f"a={sim.url}", *FEW, "--json", "-")
    around = json.loads(done.stdout)["environment"]
    # Twice, and one change between two runs would count as two.
    assert {"tapproxy", "model", "client_stamps", "host", "gpu", "paths"} == around.keys()
    assert around.keys().isdisjoint(around["host"])


def test_the_engines_pages_are_sampled_into_the_run(tmp_path: Path, sim: Engine) -> None:
    pages = ["--engine-metrics", sim.url, "--engine-metrics", "http://127.0.0.1:9/metrics"]
    done = compare(tmp_path, f"a={sim.url}", *FEW, *pages, "--sample-interval", "100ms", "--json", "-")
    found = json.loads(done.stdout)
    good, bad = sorted(found["sampled"], key=lambda page: page["failed"])
    assert (good["source"], good["engine"], good["version"]) == (f"{sim.url}/metrics", "vLLM", "0.32.0")
    assert (good["failed"], bad["samples"]) == (0, 0)
    assert any(note.startswith("http://127.0.0.1:9/metrics gave no sample in ") for note in found["notes"])
    kept = Register(tmp_path / "tapproxy-data").load(found["run"]).trial()
    engine = Evidence.of(kept.samples).engines[good["source"]]
    # The first reading comes before the first request, the last after the last one.
    assert engine.rise("finished") == found["paths"]["a"]["requests"] + 1  # the warm-up
    assert (engine.mean_of("ttft_s") or 0) > 0


def test_counts_are_per_path_and_the_result_is_the_contracts(tmp_path: Path, sim: Engine) -> None:
    done = compare(tmp_path, f"direct={sim.url}", f"again={sim.url}/v1", "--json", "-", "--requests", "12", *FEW[2:])
    assert done.returncode in (0, 3), done.stderr
    found = json.loads(done.stdout)
    assert found["schema"] == "tapproxy.comparison/1"
    assert {name: path["requests"] for name, path in found["paths"].items()} == {"direct": 12, "again": 12}
    assert kept_runs(tmp_path) == [found["run"]]


@pytest.mark.parametrize(
    "scenario",
    [
        pytest.param((), id="single-stream"),
        pytest.param(("--rate", "100"), id="server"),
        pytest.param(("--scenario", "offline"), id="offline"),
        pytest.param(("--concurrency", "3"), id="concurrency"),
        pytest.param(("--concurrency", "3", "--processes", "2"), id="two processes"),
    ],
)
def test_every_scenario_sends_what_was_asked_and_no_more(tmp_path: Path, scenario: tuple[str, ...]) -> None:
    with recorder() as (one, first), recorder() as (other, second):
        done = compare(tmp_path, f"a={first}", f"b={second}", *FEW, "--requests", "8", *scenario)
    assert done.returncode in (0, 3), done.stderr
    assert (len(one.asked), len(other.asked)) == (9, 9)
    for asked in (one, other):
        for _, head, document in asked.asked:
            assert document["model"] == "mine"
            assert (document["max_tokens"], document["stream"]) == (3, True)
            assert document["stream_options"] == {"include_usage": True}
            assert b"accept-encoding" not in head.lower()
    # The same prompts after prefixes that no two share.
    endings = [sorted(prompt.split(" ", 8)[8] for prompt in asked.prompts) for asked in (one, other)]
    assert endings[0] == endings[1]
    prefixes = [" ".join(prompt.split(" ")[:8]) for asked in (one, other) for prompt in asked.prompts]
    assert len(set(prefixes)) == len(prefixes)


def test_two_runs_of_one_seed_share_no_prefix_and_the_same_text(tmp_path: Path) -> None:
    with recorder() as (asked, url):
        for _ in range(2):
            assert compare(tmp_path, f"a={url}", *FEW).returncode in (0, 3)
    prompts = asked.prompts
    assert [prompt.split(" ", 8)[8] for prompt in prompts[:5]] == [prompt.split(" ", 8)[8] for prompt in prompts[5:]]
    assert len({" ".join(prompt.split(" ")[:8]) for prompt in prompts}) == 10


def test_ignore_eos_is_left_out_where_the_engine_refuses_it(tmp_path: Path) -> None:
    with recorder(refuses="ignore_eos") as (asked, url):
        done = compare(tmp_path, f"a={url}", *FEW, "--json", "-")
    assert len(asked.asked) == 5
    assert all("ignore_eos" not in document for _, _, document in asked.asked)
    assert json.loads(done.stdout)["paths"]["a"]["errors"]["status"] == 0


def test_ignore_eos_is_asked_for_where_it_is_taken(tmp_path: Path) -> None:
    with recorder() as (asked, url):
        compare(tmp_path, f"a={url}", *FEW)
        assert all(document["ignore_eos"] is True for _, _, document in asked.asked)
        compare(tmp_path, f"a={url}", *FEW, "--no-ignore-eos")
        assert all("ignore_eos" not in document for _, _, document in asked.asked[5:])


@pytest.mark.parametrize("from_environment", [True, False])
def test_the_key_reaches_the_engine_and_nothing_that_is_kept(tmp_path: Path, from_environment: bool) -> None:
    key = "sk-very-secret"
    with recorder() as (asked, url):
        arguments = [f"a={url}", *FEW, "--header", "X-Tenant: t1", "--json", "out.json", "--plan", "plan.json"]
        if from_environment:
            done = compare(tmp_path, *arguments, environment={"OPENAI_API_KEY": key})
        else:
            done = compare(tmp_path, *arguments, "--api-key", key)
    assert done.returncode in (0, 3), done.stderr
    for _, head, _ in asked.asked:
        assert b"\r\nAuthorization: Bearer sk-very-secret\r\n" in head
        assert b"\r\nX-Tenant: t1\r\n" in head
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(kept) >= 4
    assert not [path for path in kept if key.encode() in path.read_bytes()]


def test_connections_are_kept_unless_fresh_ones_are_wanted(tmp_path: Path) -> None:
    with recorder() as (asked, url):
        compare(tmp_path, f"a={url}", *FEW)
        assert len(set(asked.connections_of)) == 1
    with recorder() as (asked, url):
        done = compare(tmp_path, f"a={url}", *FEW, "--fresh-connections", "--json", "-")
        assert json.loads(done.stdout)["paths"]["a"]["connect_ms"]["reused_share"] == 0


def test_tls_is_verified_and_its_handshake_is_told(tmp_path: Path, sim: Engine) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    flags = ("--tls-cert", str(tmp_path / "cert.pem"), "--tls-key", str(tmp_path / "key.pem"))
    with tap(tmp_path / "tap", sim.url, *flags) as between:
        url = f"tls={between.url.replace('http', 'https')}"
        refused = compare(tmp_path, f"direct={sim.url}", url, *FEW)
        trusted = compare(
            tmp_path, f"direct={sim.url}", url, *FEW, "--ca", "ca.pem", "--fresh-connections", "--json", "-"
        )
        careless = compare(tmp_path, url, *FEW, "--insecure")
    assert refused.returncode == 3
    assert "the path tls" in refused.stderr
    assert "certificate" in refused.stderr
    assert trusted.returncode in (0, 1, 3), trusted.stderr
    paths = json.loads(trusted.stdout)["paths"]
    assert paths["direct"]["connect_ms"]["tls"] is None
    assert paths["tls"]["connect_ms"]["tls"] > 0
    assert paths["tls"]["connect_ms"]["reused_share"] == 0
    assert careless.returncode in (0, 3), careless.stderr


def test_a_completion_is_asked_for_as_one(tmp_path: Path) -> None:
    with recorder() as (asked, url):
        done = compare(tmp_path, f"a={url}", *FEW, "--api", "completions", "--body", '{"temperature": 0.5}')
    assert done.returncode in (0, 3), done.stderr
    for _, head, document in asked.asked:
        assert head.startswith(b"POST /v1/completions ")
        assert isinstance(document["prompt"], str)
        assert "messages" not in document
        assert document["temperature"] == 0.5


def test_prompts_come_from_the_file_and_stay_out_of_the_register(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"messages": [{"role": "user", "content": "private question"}]}\n' * 3)
    with recorder() as (asked, url):
        done = compare(tmp_path, f"a={url}", *FEW, "--prompts", "p.jsonl")
    assert done.returncode in (0, 3), done.stderr
    assert all(prompt.endswith(" private question") for prompt in asked.prompts)
    kept = [path for path in (tmp_path / "tapproxy-data").rglob("*") if path.is_file()]
    assert not [path for path in kept if b"private" in path.read_bytes()]


def test_made_up_prompts_have_the_length_that_the_engine_counts(tmp_path: Path) -> None:
    with recorder(tokenizes=True) as (asked, url):
        done = compare(tmp_path, f"a={url}", *FEW, "--prompt-tokens", "60", "--plan", "plan.json")
    assert done.returncode in (0, 3), done.stderr
    assert {len(prompt.split(" ")) for prompt in asked.prompts} == {30}
    assert "the engine's /tokenize" in json.loads((tmp_path / "plan.json").read_text())["about"]["prompts"]


def test_without_a_tokenizer_it_is_said_that_lengths_are_estimated(tmp_path: Path) -> None:
    with recorder() as (_, url):
        compare(tmp_path, f"a={url}", *FEW, "--plan", "plan.json")
    assert "estimated" in json.loads((tmp_path / "plan.json").read_text())["about"]["prompts"]


def test_a_plan_that_was_written_is_sent_again(tmp_path: Path) -> None:
    with recorder() as (asked, url):
        first = compare(tmp_path, f"a={url}", *FEW, "--rate", "50", "--plan", "plan.json")
        before = (tmp_path / "plan.json").read_bytes()
        second = compare(tmp_path, f"a={url}", "--plan", "plan.json", "--json", "-")
        other = compare(tmp_path, f"b={url}", "--plan", "plan.json")
    assert first.returncode in (0, 3), first.stderr
    assert second.returncode in (0, 3), second.stderr
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "plan.json").read_bytes() == before
    gaps = [later[0] - earlier[0] for earlier, later in zip(asked.asked[1:4], asked.asked[2:5], strict=True)]
    again = [later[0] - earlier[0] for earlier, later in zip(asked.asked[6:9], asked.asked[7:10], strict=True)]
    assert again == pytest.approx(gaps, abs=0.02)
    assert other.returncode == 2
    assert "is for the paths a" in other.stderr


def test_a_sweep_is_a_row_of_comparisons(tmp_path: Path) -> None:
    with recorder() as (asked, url):
        done = compare(
            tmp_path, f"a={url}", *FEW, "--sweep", "output-tokens=2,5", "--sweep", "concurrency=1,2", "--json", "-"
        )
    assert done.returncode in (0, 3), done.stderr
    found = json.loads(done.stdout)
    assert [point["setting"] for point in found["points"]] == [
        {"output-tokens": tokens, "concurrency": clients} for tokens in (2, 5) for clients in (1, 2)
    ]
    assert [document["max_tokens"] for _, _, document in asked.asked] == [2] * 10 + [5] * 10
    assert len(kept_runs(tmp_path)) == 4


@pytest.mark.long
def test_the_highest_rate_that_meets_the_objectives_is_found(tmp_path: Path) -> None:
    # One request at a time, 20 ms each: at 50 a second it is full, and TTFT from the scheduled time runs away.
    flags = ("--max-num-seqs", "1", "--prefill-overhead-us", "20000", "--prefill-tokens-per-s", "1000000")

    def attempt() -> str | None:
        with engine(*flags) as slow:
            done = compare(
                tmp_path,
                *(f"a={slow.url}", "--find-rate", "--slo", "ttft:p90=200ms", "--rate", "20", "--requests", "60"),
                *("--warmup", "1", "--max-tokens", "1", "--json", "-", "--data", str(tmp_path / f"{slow.port}")),
            )
        assert done.returncode in (0, 3), done.stderr
        found = json.loads(done.stdout)["find_rate"]["a"]
        tried = {each["rate"]: each["met"] for each in found["tried"]}
        runs = [path for path in (tmp_path / f"{slow.port}" / "runs").iterdir() if not path.name.startswith(".")]
        assert len(tried) <= len(runs) <= len(tried) + 1
        if found["rate"] is None or found["missed"] is None:
            return f"could not be told: {found}"  # a busy machine voids a step
        assert done.returncode == 0, done.stderr
        assert tried[found["rate"]] is True
        assert tried[found["missed"]] is False
        return None if 20 <= found["rate"] < found["missed"] <= 100 else f"found {found}"

    until_quiet(attempt)


def test_a_result_that_cannot_be_kept_is_shown_all_the_same(tmp_path: Path) -> None:
    def full() -> None:
        # No file of ours may grow beyond that: as on a full disk, requests.jsonl is cut in the middle.
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))

    with recorder() as (_, url):
        done = compare(tmp_path, f"a={url}", *FEW, "--sweep", "output-tokens=2,5", "--json", "-", before=full)
    assert done.returncode == 3
    assert len(json.loads(done.stdout)["points"]) == 2
    assert done.stderr.count("cannot be kept in 'tapproxy-data/runs': File too large") == 1
    assert "Traceback" not in done.stderr
    assert [path.name for path in (tmp_path / "tapproxy-data/runs").iterdir()] == [".key"]


def test_too_few_requests_to_show_the_objectives_are_refused(tmp_path: Path, sim: Engine) -> None:
    done = compare(tmp_path, f"a={sim.url}", "--find-rate", "--slo", "ttft=100ms", "--requests", "100")
    assert done.returncode == 2
    assert "takes at least 459 at every rate" in done.stderr


def test_recorded_traffic_is_sent_again_with_its_gaps_and_lengths(tmp_path: Path) -> None:
    records = [
        {
            "schema": "tapproxy.record/1",
            "id": str(number),
            "tap": "inner",
            "method": "POST",
            "path": "/v1/chat/completions",
            "t0_unix_ns": 1_000_000_000_000 + number * 150_000_000,
            "usage": {"prompt_tokens": 20, "completion_tokens": 4 + number, "cached_tokens": None},
        }
        for number in range(4)
    ]
    (tmp_path / "taps").mkdir()
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "taps" / "records-20260101T000000Z-1.jsonl").write_text(lines)
    with recorder() as (asked, url):
        done = compare(tmp_path, f"a={url}", "--replay", "taps", "--warmup", "0")
    assert done.returncode in (0, 3), done.stderr
    assert [document["max_tokens"] for _, _, document in asked.asked] == [4, 5, 6, 7]
    assert {len(prompt.split(" ")) for prompt in asked.prompts} == {20}
    gaps = [later[0] - earlier[0] for earlier, later in zip(asked.asked, asked.asked[1:], strict=False)]
    assert gaps == pytest.approx([0.15] * 3, abs=0.05)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_ctrl_c_keeps_what_was_measured_and_exits_130(tmp_path: Path, sim: Engine, processes: str) -> None:
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "tapproxy.cli", "compare", f"a={sim.url}", f"b={sim.url}", "--rate", "50"),
            *("--requests", "3000", "--warmup", "1", "--max-tokens", "3", "--processes", processes, "--json", "-"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=_ENVIRONMENT,
    )
    wait_for_load(sim)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=_WAIT_S)
    assert process.returncode == 130, stderr
    assert "interrupted" in stderr
    found = json.loads(stdout)
    assert 20 <= found["paths"]["a"]["requests"] < 3000
    assert kept_runs(tmp_path) == [found["run"]]


def wait_for_load(sim: Engine, least: int = 10) -> None:
    """Until the engine is being asked."""

    def asked() -> int:
        page = urllib.request.urlopen(f"{sim.url}/metrics", timeout=5).read().decode()
        counts = re.findall(r'^http_requests_total\{handler="/v1/chat/completions".*\} ([0-9.]+)$', page, re.MULTILINE)
        return round(sum(map(float, counts)))

    before = asked()
    deadline = time.monotonic() + 20
    while asked() < before + least:
        assert time.monotonic() < deadline, "the load did not begin"
        time.sleep(0.05)


def test_interrupted_before_anything_was_measured_it_says_so(tmp_path: Path) -> None:
    hang = threading.Event()

    def script(peer: Peer) -> None:
        peer.request()
        hang.wait(_WAIT_S)

    with Upstream(script) as upstream:
        process = subprocess.Popen(
            [sys.executable, "-m", "tapproxy.cli", "compare", f"a={upstream.url}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=_ENVIRONMENT,
        )
        deadline = time.monotonic() + 20
        while not upstream.connections and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=_WAIT_S)
        hang.set()
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr
