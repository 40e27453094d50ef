"""`tapproxy diagnose`: a directory in, a verdict out, and nothing left unsaid."""

from __future__ import annotations

import io
import os
import re
import shutil
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any

import orjson
import pytest
from rich.console import Console

from tapproxy.cli import run
from tapproxy.commands import diagnose_data
from tapproxy.commands.diagnose_data import Wanted, load, moment_ns
from tapproxy.core.errors import ConfigError
from tapproxy.core.record import Record
from tapproxy.core.sample import Sample, SampleKind
from tapproxy.report import diagnosis
from tests.diagnose.make import MS, SECOND, Proxy, buffer_of, even, page, passes, record, sums, taps

NOW = 1_700_000_000 * SECOND


def write(directory: Path, records: Sequence[Record], *, pid: int = 1, begun: str = "20231114T220000.000000Z") -> Path:
    directory.mkdir(exist_ok=True)
    file = directory / f"records-{begun}-{pid}.jsonl"
    file.write_bytes(b"".join(orjson.dumps(record.to_dict()) + b"\n" for record in records))
    return file


def write_samples(directory: Path, samples: Sequence[Sample]) -> None:
    text = b"".join(orjson.dumps(sample.to_dict()) + b"\n" for sample in samples)
    (directory / "samples-20231114T220000.000000Z-1.jsonl").write_bytes(text)


def dated(records: Sequence[Record]) -> list[Record]:
    """On the wall clock as on the monotonic one, from ``NOW`` on."""
    for each in records:
        each.t0_unix_ns, each.model = NOW + each.t0_mono_ns, "m"
        each.headers["server"] = "nginx" if each.tap == "outer" else "uvicorn"
    return list(records)


def two(proxy: Proxy, requests: int = 20) -> list[Record]:
    outer, inner = taps(proxy, requests=requests)
    return dated([*outer, *inner])


def diagnosed(tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "out.json"
    code = run(["diagnose", "--data", str(tmp_path / "data"), "--json", str(out), *flags])
    return code, orjson.loads(out.read_bytes())


# --- the command


def test_two_taps_around_a_buffer_name_it_and_exit_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "data", two(buffer_of(4096)))
    code, result = diagnosed(tmp_path)
    assert (code, result["schema"], result["verdict"]) == (1, "tapproxy.verdict/1", "degraded")
    assert result["causes"][0]["cause"] == "proxy.response_buffering"
    assert (result["taps"]["outer"], result["taps"]["inner"]) == ("outer", "inner")
    shown = capsys.readouterr().out
    assert "DEGRADED  proxy.response_buffering" in shown
    # The verdict stands before everything else.
    assert shown.index("DEGRADED") < shown.index("hold of an event") < shown.index("Where TTFT goes")


def test_a_healthy_path_exits_with_0(tmp_path: Path) -> None:
    write(tmp_path / "data", two(passes))
    assert diagnosed(tmp_path)[0] == 0


def test_taps_in_directories_of_their_own_are_one_path(tmp_path: Path) -> None:
    records = two(buffer_of(4096))
    write(tmp_path / "data", [r for r in records if r.tap == "inner"])
    write(tmp_path / "more", [r for r in records if r.tap == "outer"])
    code, result = diagnosed(tmp_path, "--data", str(tmp_path / "more"))
    assert (code, result["taps"]["outer"]) == (1, "outer")


def test_two_taps_of_one_name_are_told_apart_by_their_directories(tmp_path: Path) -> None:
    records = two(passes)
    inner, outer = ([r for r in records if r.tap == name] for name in ("inner", "outer"))
    for each in records:
        each.tap = "tap"
    write(tmp_path / "data", inner)
    write(tmp_path / "front", outer)
    _, result = diagnosed(tmp_path, "--data", str(tmp_path / "front"))
    assert (result["taps"]["outer"], result["taps"]["inner"]) == ("tap@front", "tap@data")


def test_too_few_requests_exit_with_3_and_say_how_many_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "data", two(passes, requests=5))
    code, result = diagnosed(tmp_path)
    assert (code, result["verdict"]) == (3, "not_measured")
    assert "Send 6 more requests" in capsys.readouterr().out


def test_decode_steps_that_cross_pcie_are_worth_knowing(tmp_path: Path) -> None:
    write(tmp_path / "data", two(passes))
    log, matrix = tmp_path / "engine.log", tmp_path / "topo.txt"
    log.write_text("INFO 11-29 20:00:00 [api_server.py:1] non-default args: {'tensor_parallel_size': 2}\n")
    matrix.write_text("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tSYS\t0-23\nGPU1\tSYS\t X \t24-47\n")
    code, result = diagnosed(tmp_path, "--engine-log", str(log), "--gpu-topo", str(matrix))
    (told,) = result["worth_knowing"]
    assert (code, result["causes"], told["cause"], told["stage"]) == (0, [], "engine.decode", "engine.decode")
    assert "crosses PCIe" in told["advice"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "/nonesuch/dir"], "cannot be read: No such file"),
        (["--since", "yesterday"], "--since 'yesterday' is no time"),
        (["--since", "10m", "--until", "1h"], "--since 10m is not before --until 1h"),
        (["--engine", "localhost"], "--engine is no address"),
        (["--engine", "http://127.0.0.1:9/metrics", "--sample-interval", "1h"], "between 100ms and 10m"),
        (["--engine-log", "/nonesuch/log"], "--engine-log '/nonesuch/log' cannot be read"),
        (["--gpu-log", "/nonesuch/log"], "--gpu-log '/nonesuch/log' cannot be read"),
        (["--gpu-topo", "/nonesuch/log"], "--gpu-topo '/nonesuch/log' cannot be read"),
        (["--gpu-topo", __file__], "--gpu-topo test_diagnose.py: "),
        (["--config", "/nonesuch/toml"], "cannot be read"),
        (["--outer", "nobody"], "--outer 'nobody' has no records here"),
        (["--html", "-"], "--html does not write to stdout"),
        (["--json", "/nonesuch/file"], "--json '/nonesuch/file' cannot be written"),
        (["--json", "same", "--html", "same"], "--json and --html are both 'same'"),
    ],
)
def test_a_mistake_is_one_sentence_and_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    write(tmp_path / "data", two(passes))
    data = [] if "--data" in flags else ["--data", str(tmp_path / "data")]
    assert run(["diagnose", *data, *flags]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert message in told.err
    assert told.err.count("\n") == 1


def test_json_on_stdout_is_json_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "data", two(passes))
    assert run(["diagnose", "--data", str(tmp_path / "data"), "--json", "-"]) == 0
    assert orjson.loads(capsys.readouterr().out)["verdict"] == "healthy"


def test_a_page_can_be_had_of_it(tmp_path: Path) -> None:
    write(tmp_path / "data", two(buffer_of(4096)))
    diagnosed(tmp_path, "--html", str(tmp_path / "page.html"), "--timeline")
    text = (tmp_path / "page.html").read_text()
    assert "tapproxy diagnose" in text
    assert "Where TTFT goes" in text
    assert "What the taps changed" in text
    assert "Over time" in text
    assert "Line(" not in text
    assert "Row(" not in text


def test_only_what_was_asked_for_is_judged(tmp_path: Path) -> None:
    records = two(passes, requests=40)
    for each in records:
        number = int(each.id.rpartition("-")[2])
        each.model, each.path = ("m", "/v1/a?key=secret") if number < 25 else ("n", "/v1/b")
    write(tmp_path / "data", records)
    assert diagnosed(tmp_path, "--model", "m")[1]["window"]["requests"] == 25
    assert diagnosed(tmp_path, "--path", "/v1/b")[1]["window"]["requests"] == 15
    late = moment(NOW + 205 * SECOND)
    assert diagnosed(tmp_path, "--since", late)[1]["window"]["requests"] == 20
    assert diagnosed(tmp_path, "--until", late)[1]["window"]["requests"] == 20
    result = diagnosed(tmp_path)[1]
    assert "secret" not in orjson.dumps(result).decode()


def moment(unix_ns: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(unix_ns / 1e9))


def test_a_missed_objective_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "data", two(passes))
    file = tmp_path / "t.toml"
    file.write_text('[[slo]]\nttft = "50ms"\npercentile = 50\n')
    code, result = diagnosed(tmp_path, "--config", str(file))
    assert (code, result["slo"][0]["state"]) == (1, "missed")
    assert "✗ missed  all requests: TTFT within 50.0 ms for 50 % of requests: it was for 0 %" in capsys.readouterr().out


def test_what_was_sampled_then_divides_the_engine(tmp_path: Path) -> None:
    records = dated([record("tap", even(10, 100), number=n, t0=round((n + 0.1) * SECOND)) for n in range(20)])
    write(tmp_path / "data", records)
    samples = [page(n, **sums(n, 0.06 * n, 0.03 * n)) for n in range(21)]
    for sample in samples:
        sample.t_unix_ns = NOW + sample.t_mono_ns
    write_samples(tmp_path / "data", samples)
    _, result = diagnosed(tmp_path)
    stages = result["budget"]["ttft"]["p50"]["stages"]
    assert (round(stages["engine.queue"]["ms"]), round(stages["engine.prefill"]["ms"])) == (60, 30)
    assert result["evidence"]["engines"]["http://127.0.0.1:8000/metrics"]["readings"] == 21


def test_what_could_never_be_read_is_said_with_its_reason(tmp_path: Path) -> None:
    write(tmp_path / "data", two(passes))
    gone = page(2)
    gone.problem = "it answers with status 404"
    host = Sample("host", "host vm", 2 * SECOND, NOW + 2 * SECOND, gone.boot_id, facts={"engine_lost": "no process 7"})
    gone.t_unix_ns = NOW + 2 * SECOND
    write_samples(tmp_path / "data", [gone, host])
    _, result = diagnosed(tmp_path)
    assert f"{gone.source} was never read: it answers with status 404" in result["notes"]
    assert "host vm: no process 7" in result["notes"]


def test_a_span_that_was_kept_divides_its_request(tmp_path: Path) -> None:
    records = dated([record("tap", even(10, 100), number=n, t0=n * SECOND) for n in range(20)])
    write(tmp_path / "data", records)
    spans = [
        Sample(
            SampleKind.SPAN,
            "otlp",
            n * SECOND,
            NOW + n * SECOND,
            values={"queue_ns": 40 * MS, "prefill_ns": 50 * MS, "ttft_ns": 95 * MS},
            facts={"request_id": f"chatcmpl-{n}", "span_id": f"{n}", "trace_id": f"{n}"},
        )
        for n in range(20)
    ]
    write_samples(tmp_path / "data", spans)
    stages = diagnosed(tmp_path)[1]["budget"]["ttft"]["p50"]["stages"]
    told = {name: round(part["ms"]) for name, part in stages.items() if part and name.startswith("engine")}
    assert told == {"engine.frontend": 5, "engine.queue": 40, "engine.prefill": 50}


# --- the engine as it is now


class Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        text = (
            b"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 3.0\nvllm:num_requests_waiting 41.0\n"
        )
        self.send_response(200 if self.path == "/metrics" else 404)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Quiet."""


def test_a_page_read_now_is_shown_and_no_cause_rests_on_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "data", two(passes))
    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        code, result = diagnosed(tmp_path, "--engine", url, "--sample-interval", "100ms")
        server.shutdown()
    assert (code, result["causes"]) == (0, [])
    assert result["engine_now"][0]["values"]["waiting"] == 41
    assert result["budget"]["ttft"]["p50"]["stages"]["engine.queue"] is None
    assert "of now and not of then" in re.sub(r"\s+", " ", capsys.readouterr().out)


def test_a_page_that_cannot_be_read_now_is_said_and_gone_on_without(tmp_path: Path) -> None:
    write(tmp_path / "data", two(passes))
    code, result = diagnosed(tmp_path, "--engine", "http://u:secret@127.0.0.1:9/metrics", "--sample-interval", "100ms")
    assert code == 0
    assert any("could not be read" in note for note in result["notes"])
    assert "secret" not in orjson.dumps(result).decode()


# --- what is read


def test_ages_and_dates_are_times() -> None:
    assert moment_ns("10m", "--since", 700 * SECOND) == 100 * SECOND
    assert moment_ns("2d", "--since", 700 * SECOND) == 0
    assert moment_ns("1970-01-01T00:01:00Z", "--since") == 60 * SECOND
    with pytest.raises(ConfigError, match="--until '10' is no time"):
        moment_ns("10", "--until")


def test_torn_and_broken_lines_are_counted(tmp_path: Path) -> None:
    file = write(tmp_path / "data", two(passes))
    file.write_bytes(b"{}\n" + file.read_bytes() + b'{"schema": "tapprox')
    found = load([tmp_path / "data"], Wanted())
    assert (found.records, found.skipped, found.torn) == (40, 2, 1)
    assert "2 lines could not be read" in found.notes()[0]


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        (None, "tap", True),
        (None, "t0_mono_ns", None),
        (None, "path", ["/v1"]),
        (None, "headers", "none"),
        (None, "altered", [{}]),
        ("request", "head", "soon"),
        ("request", "proxy_marks", True),
        ("upstream", "write_end", 1e300),
        ("upstream", "peer", []),
        ("downstream", "bytes", 1 << 63),
        ("events", "kind", None),
        ("events", "read", {}),
        ("events", "tokens", [1]),
        ("events", "arrived", ["now"] * 40),
    ],
)
def test_a_line_of_other_types_is_a_broken_line_and_takes_no_verdict_along(
    tmp_path: Path, part: str | None, key: str, value: object
) -> None:
    records = [each.to_dict() for each in two(passes)]
    (records[5] if part is None else records[5][part])[key] = value
    (tmp_path / "data").mkdir()
    lines = b"".join(orjson.dumps(each) + b"\n" for each in records)
    (tmp_path / "data" / "records-20231114T220000.000000Z-1.jsonl").write_bytes(lines)
    code, result = diagnosed(tmp_path)
    assert (code, result["window"]["left_out"]["unreadable"]) == (0, 1)


def test_a_null_that_may_not_be_is_what_was_never_counted(tmp_path: Path) -> None:
    records = [each.to_dict() for each in two(passes)]
    for each in records:
        each["downstream"]["stalled_ns"] = each["downstream"]["unsent_max_bytes"] = None
        each["headers"] = each["findings"] = each["altered"] = None
    (tmp_path / "data").mkdir()
    lines = b"".join(orjson.dumps(each) + b"\n" for each in records)
    (tmp_path / "data" / "records-20231114T220000.000000Z-1.jsonl").write_bytes(lines)
    found = load([tmp_path / "data"], Wanted())
    assert (found.records, found.skipped, found.taps["outer"][0].downstream.stalled_ns) == (40, 0, 0)


def test_what_stands_there_twice_counts_once(tmp_path: Path) -> None:
    """A directory named twice is one; a copy of it is left out, and said."""
    write(tmp_path / "data", two(passes))
    write_samples(tmp_path / "data", [page(1), page(100)])
    copy = shutil.copytree(tmp_path / "data", tmp_path / "copy")
    found = load([tmp_path / "data", tmp_path / "copy" / ".." / "data"], Wanted())
    assert (found.records, found.twice) == (40, 0)
    found = load([tmp_path / "data", copy], Wanted(since_ns=NOW))
    assert (found.records, found.twice, sorted(found.taps)) == (40, 40, ["inner", "outer"])
    assert "40 records stand there twice" in found.notes()[0]


def test_what_asks_for_no_answer_is_set_aside(tmp_path: Path) -> None:
    records = two(passes)
    records[0].method, records[1].path = "GET", "/v1/embeddings"
    write(tmp_path / "data", records)
    found = load([tmp_path / "data"], Wanted())
    assert (found.records, found.aside) == (38, 2)


def test_the_newest_are_taken_and_the_older_counted(tmp_path: Path) -> None:
    records = dated([record("tap", even(3), number=n, t0=n * SECOND) for n in range(30)])
    old = write(tmp_path / "data", records[:20])
    new = write(tmp_path / "data", records[20:], begun="20231114T230000.000000Z")
    os.utime(old, ns=(NOW + 20 * SECOND, NOW + 20 * SECOND))
    os.utime(new, ns=(NOW + 30 * SECOND, NOW + 30 * SECOND))
    found = load([tmp_path / "data"], Wanted(newest=5))
    assert [each.id for each in found.taps["tap"]] == [f"tap-{n}" for n in range(25, 30)]
    # Five of the newer file and all of the older one, which was not even parsed.
    assert found.older == 25
    assert "25 older records are left out" in found.notes()[0]


def test_many_events_are_a_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnose_data, "EVENTS_MOST", 100)
    write(tmp_path / "data", dated([record("tap", even(10), number=n, t0=n * SECOND) for n in range(30)]))
    found = load([tmp_path / "data"], Wanted())
    assert (found.records, found.older) == (10, 20)


def test_a_file_last_written_before_the_time_asked_for_is_not_opened(tmp_path: Path) -> None:
    file = write(tmp_path / "data", two(passes))
    file.write_bytes(b"no record\n")
    os.utime(file, ns=(NOW, NOW))
    found = load([tmp_path / "data"], Wanted(since_ns=NOW + SECOND))
    assert found.skipped == 0
    assert found.notes() == ["1 file of records was last written before the time that was asked for"]


def test_samples_of_the_requests_time_are_taken_and_thinned_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnose_data, "SAMPLES_MOST", 100)
    write(tmp_path / "data", dated([record("tap", even(3), number=n, t0=n * 100 * SECOND) for n in range(30)]))
    samples = [page(n, finished=n) for n in range(-1000, 4000)]
    for sample in samples:
        sample.t_unix_ns = NOW + sample.t_mono_ns
    write_samples(tmp_path / "data", samples)
    found = load([tmp_path / "data"], Wanted())
    times = [sample.t_mono_ns // SECOND for sample in found.samples]
    # 60 s before the first request to 60 s after the last, evenly.
    assert -60 <= times[0] < 0
    assert 2900 < times[-1] <= 2960
    assert len(times) <= 100
    assert len({b - a for a, b in pairwise(times)}) == 1
    assert found.thinned == 3021 - len(times)


# --- what the proxy itself logged


FORMAT = "$msec $request_time $upstream_connect_time $upstream_header_time $upstream_response_time $request_id"


def test_the_proxys_log_is_a_third_witness(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = two(passes)
    write(tmp_path / "data", records)
    lines = []
    for near in (each for each in records if each.tap == "outer"):
        end_ns = near.upstream.end or 0
        ended_s = (near.t0_unix_ns + end_ns) / 1e9
        lines.append(f"{ended_s:.3f} {end_ns / 1e9:.3f} 0.000 0.001 {end_ns / 1e9:.3f} {near.request_id}\n")
    log = tmp_path / "access.log"
    log.write_text("".join(lines))
    code, result = diagnosed(tmp_path, "--nginx-log", str(log), "--nginx-log-format", FORMAT)
    assert (code, result["witness"]["joined"], result["witness"]["by"]) == (0, 20, {"request_id": 20})
    assert "20 of 20 lines are of these requests (20 by request_id)" in capsys.readouterr().out


def test_a_format_without_a_log_is_a_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "data", two(passes))
    assert run(["diagnose", "--data", str(tmp_path / "data"), "--nginx-log-format", FORMAT]) == 2
    assert "name that with --nginx-log FILE" in capsys.readouterr().err


def test_what_is_only_worth_knowing_is_no_headline() -> None:
    info = {"cause": "host.cpu", "severity": "info", "effect_ms": {"p50": None, "p95": None}, "advice": "…"}
    screen = io.StringIO()
    diagnosis.show({"verdict": "healthy", "causes": [info]}, Console(width=100, file=screen))
    lines = [line.strip() for line in screen.getvalue().splitlines()]
    assert [line for line in lines if line.endswith("HEALTHY")]
    assert [line for line in lines if line.startswith("host.cpu  info")]
