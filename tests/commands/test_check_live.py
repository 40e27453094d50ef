"""`tapproxy check --live`: the contract's keys, predicted beside measured, before the patch and after it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from tapproxy.cli import run
from tapproxy.nginx.sandbox import data_dir, find_nginx
from tests.nginx.hostile import whole
from tests.nginx.live import ALL

pytestmark = pytest.mark.skipif(not ALL, reason="no nginx here")
BAD = data_dir() / "bad" / "buffering-on.conf"
ONE = ("--path", "/v1/chat/completions")


def test_the_json_has_what_the_contract_names(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert run(["check", str(BAD), *ONE, "--live", "--json", str(out)]) == 1
    found: dict[str, Any] = json.loads(out.read_text())
    assert found["nginx_version"] == found["live"]["nginx"]["version"] == find_nginx().version
    (path,) = found["paths"]
    client = path["clients"]["tls_http1"]
    assert client["streaming"] == "held"
    measured = client["measured"]
    assert measured.keys() >= {"hold_ms", "ttft_added_ms", "header_delay_ms", "cut", "upstream_reused"}
    assert measured["hold_ms"].keys() == {"p50", "max"}
    assert (measured["streaming"], measured["agrees"], measured["cut"]) == ("held", True, False)
    # TLS gathers 16 kB: all of the standard load comes at its end, the header with it.
    assert measured["hold_ms"]["max"] > 600
    assert measured["header_delay_ms"] > 700
    assert measured["ttft_added_ms"] > 600
    assert measured["upstream_reused"] is True
    assert (path["not_run"], found["live"]["not_run"]) == ([], [])
    assert "access_log" in found["live"]["ignored"]


def test_a_patch_that_is_written_is_what_is_judged(tmp_path: Path) -> None:
    file, out = tmp_path / "nginx.conf", tmp_path / "out.json"
    file.write_text(BAD.read_text())
    assert run(["check", str(file), *ONE, "--live", "--fix", "--write", "--json", str(out)]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    measured = [
        document["paths"][0]["clients"]["tls_http1"]["measured"]["streaming"]
        for document in (found["before_fix"], found)
    ]
    assert measured == ["held", "streams"]
    assert "proxy_buffering off;" in file.read_text()
    assert found["written"] == [{"file": str(file), "backup": f"{file}.orig"}]


def test_fix_prints_the_patch_and_the_proof_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(BAD), *ONE, "--live", "--fix"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("--- a/")
    assert "+            proxy_buffering off;" in captured.out
    assert "measured" not in captured.out
    before, after = (
        line for line in captured.err.splitlines() if " measured " in f" {line.strip()} " and "hold" in line
    )
    assert before.strip().startswith("tls_http1  measured held, as predicted; hold ")
    assert after.strip().startswith("patched: tls_http1  measured streams, as predicted; hold ")


def test_the_patched_configuration_is_in_the_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    run(["check", str(BAD), *ONE, "--live", "--fix", "--json", "-"])
    found = json.loads(capsys.readouterr().out)
    after = found["after_fix"]["paths"][0]["clients"]["tls_http1"]
    assert (after["streaming"], after["measured"]["streaming"]) == ("streams", "streams")
    assert after["measured"]["hold_ms"]["max"] < found["paths"][0]["clients"]["tls_http1"]["measured"]["hold_ms"]["p50"]
    assert not [one for one in found["after_fix"]["findings"] if one["severity"] == "error"]


def test_a_healthy_file_is_measured_as_healthy_and_the_text_says_what_was_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(whole(location="proxy_buffering off; proxy_read_timeout 600s; mirror /m;"))
    run(["check", str(file), "--path", "/a", "--path", "/b", "--live"])
    text = capsys.readouterr().out
    assert "    /a /b\n    http1      measured streams, as predicted; hold " in text
    assert f"  not run: mirror /m; ({file}:4): it sends every prompt to a second upstream\n" in text


def test_where_nothing_is_proxied_nothing_could_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(whole(target="location / { return 204; }"))
    assert run(["check", str(file), *ONE, "--live"]) == 3
    assert "not measured: nothing is proxied here: answered here: return 204" in capsys.readouterr().out


def test_a_kind_of_client_that_is_redirected_is_not_run_and_the_others_are(tmp_path: Path) -> None:
    file, out = tmp_path / "nginx.conf", tmp_path / "out.json"
    file.write_text(
        "events {} http { server { listen 80; listen 443 ssl; ssl_certificate c; ssl_certificate_key k;"
        ' if ($scheme = "http") { return 301 https://$host$request_uri; }'
        " location / { proxy_pass http://127.0.0.1:8000; proxy_buffering off; } } }"
    )
    assert run(["check", str(file), *ONE, "--live", "--json", str(out)]) == 0
    clients = json.loads(out.read_text())["paths"][0]["clients"]
    assert clients["http1"]["streaming"] == "fails"
    assert clients["http1"]["measured"] is None
    assert clients["http1"]["not_measured"].startswith(
        "this kind of client is not run apart: answered here: return 301"
    )
    assert clients["tls_http1"]["measured"]["streaming"] == "streams"
    assert clients["tls_http1"]["measured"]["agrees"] is True


def test_ctrl_c_ends_nginx_and_keeps_what_was_measured(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(whole(location="proxy_buffering off;"))
    temporary = Path(tempfile.mkdtemp())
    temporary.chmod(0o711)  # the user that nginx runs as passes through
    with subprocess.Popen(
        [sys.executable, "-m", "tapproxy.cli", "check", str(file), *ONE, "--live"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    ) as process:
        deadline = time.monotonic() + 10
        while not list(temporary.glob("tapproxy-nginx-*/nginx.pid")) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        text, _ = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "not measured: interrupted" in text
    temporary.rmdir()  # nothing is left in it


def test_what_a_killed_check_left_goes_with_the_next(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text(whole(location="proxy_buffering off;"))
    temporary = Path(tempfile.mkdtemp())
    temporary.chmod(0o711)  # the user that nginx runs as passes through
    command = [sys.executable, "-m", "tapproxy.cli", "check", str(file), *ONE, "--live"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment) as process:
        deadline = time.monotonic() + 20
        while not list(temporary.glob("tapproxy-nginx-*/nginx.pid")) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    assert list(temporary.glob("tapproxy-nginx-*"))
    done = subprocess.run(command, stdout=subprocess.DEVNULL, env=environment, timeout=60)
    assert done.returncode == 0
    temporary.rmdir()  # nothing is left in it
