"""Side by side in one run: nginx unbuffered, HAProxy and the tap under the same streamed load. Prints a table.

    python tests/bench/proxies.py [--scenarios L32,L512,T,R] [--rounds 3] [--curve] [--json FILE] [--tap 'FLAGS']

A C simulator sends the events, each with its own send stamp, and a C client receives them (ssesim.c, sseload.c; needs
gcc). The proxy has core 0, all of its processes; simulator and client share core 1. Every variant runs every scenario
in turn, ``--rounds`` times over; medians, and ratios to nginx. CPU time is the scheduler's, of the process and its
children. Loopback only. It gates nothing: machines differ, ratios less so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROXY_CORE, LOAD_CORE = "0", "1"


@dataclass(frozen=True)
class Scenario:
    """What the client asks for: streams at once, the simulator's query, seconds measured and of warm-up."""

    streams: int
    query: str
    seconds: float
    warmup: float
    flags: str = ""


SCENARIOS = {
    "L32": Scenario(32, "tokens=256&itl_us=25000&ttft_us=20000", 3, 1),
    "L512": Scenario(512, "tokens=256&itl_us=25000&ttft_us=20000", 3, 1.5, "-r 1"),
    "K40": Scenario(1024, "tokens=256&itl_us=25000&ttft_us=20000", 3, 2, "-r 1.2"),
    "K45": Scenario(1152, "tokens=256&itl_us=25000&ttft_us=20000", 3, 2, "-r 1.2"),
    "M2000": Scenario(2000, "tokens=12&itl_us=1000000&ttft_us=100000", 5, 4, "-r 3"),
    "T": Scenario(32, "tokens=8&itl_us=10000&ttft_us=20000", 4, 1),
    "R": Scenario(8, "tokens=1&itl_us=0&ttft_us=0", 3, 0.5),
    "BIG": Scenario(32, "tokens=2000&itl_us=0&ttft_us=0", 3, 1, "-r 0.1 -x"),
}
# Is an event as cheap in a long stream as in a short one, and among many streams as among few?
CURVE = {
    **{
        f"{n} events": Scenario(64, f"tokens={n}&itl_us=5000&ttft_us=5000", 4, 1, "-r 0.5") for n in (100, 1000, 10_000)
    },
    **{f"{n} streams": Scenario(n, "tokens=256&itl_us=40000&ttft_us=20000", 4, 2, "-r 1") for n in (1, 64, 512, 2000)},
}
NGINX = """daemon off; worker_processes 1; pid {d}/nginx.pid; error_log {d}/nginx.err warn;
events {{ worker_connections 16384; }}
http {{ access_log off; client_body_temp_path {d}/b; proxy_temp_path {d}/p; fastcgi_temp_path {d}/f;
  uwsgi_temp_path {d}/u; scgi_temp_path {d}/s; keepalive_requests 1000000; keepalive_timeout 300;
  upstream sim {{ server 127.0.0.1:{u}; keepalive 4096; keepalive_requests 1000000; }}
  server {{ listen 127.0.0.1:{l} backlog=4096; location / {{ proxy_pass http://sim; proxy_http_version 1.1;
    proxy_set_header Connection ""; proxy_set_header Host $host; proxy_buffering off;
    proxy_request_buffering off; proxy_read_timeout 300; }} }} }}
"""
HAPROXY = """global
  nbthread 1
  maxconn 8000
defaults
  mode http
  option http-no-delay
  timeout connect 5s
  timeout client 300s
  timeout server 300s
  http-reuse always
frontend f
  bind 127.0.0.1:{l} backlog 4096
  default_backend b
backend b
  server s 127.0.0.1:{u} pool-max-conn -1
"""
# column → (key, digits)
COLUMNS = {
    "events/s": ("events_per_s", 0),
    "µs/event": ("cpu_us_per_event", 1),
    "× nginx": ("ratio", 2),
    "µs/request": ("cpu_us_per_request", 0),
    "p50 µs": ("p50_us", 0),
    "p99 µs": ("p99_us", 0),
    "TTFT µs": ("ttft_p50_us", 0),
    "MiB": ("rss_mib", 1),
    "KiB/stream": ("kib_per_stream", 1),
    "errors": ("errors", 0),
}


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        for file in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                todo += [int(word) for word in file.read_text().split()]
            except OSError:
                continue
    return found


def cpu_us(pid: int) -> float:
    total_ns = 0
    for one in tree(pid):
        for file in Path(f"/proc/{one}/task").glob("*/schedstat"):
            try:
                total_ns += int(file.read_text().split()[0])
            except OSError:
                continue
    return total_ns / 1e3


def settle(pid: int) -> None:
    """Waits until the process uses less than a hundredth of a core, ten seconds at most."""
    for _ in range(20):
        before_us = cpu_us(pid)
        time.sleep(0.5)
        if cpu_us(pid) - before_us < 5_000:
            return


def rss_mib(pid: int) -> float:
    kib = 0
    for one in tree(pid):
        try:
            match = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{one}/status").read_text())
        except OSError:
            continue
        kib += int(match.group(1)) if match else 0
    return kib / 1024


def wait_for(port: int, process: subprocess.Popen[Any]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.05)
            continue
        return
    raise SystemExit(f"nothing listens on port {port}: {process.args}")


@contextmanager
def running(command: list[str], port: int, log: Path) -> Iterator[subprocess.Popen[Any]]:
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=log.parent)
    try:
        wait_for(port, process)
        yield process
    finally:
        pids = tree(process.pid)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            pass
        for pid in reversed(pids):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:
                continue
        process.wait()


def measure(load: Path, port: int, proxy: subprocess.Popen[Any] | None, scenario: Scenario) -> dict[str, float | None]:
    """One scenario over one variant, once the proxy has done with the one before."""
    if proxy is not None:
        settle(proxy.pid)
    cpu_before, rss_before = (cpu_us(proxy.pid), rss_mib(proxy.pid)) if proxy else (0.0, 0.0)
    url = f"http://127.0.0.1:{port}/v1/chat/completions?{scenario.query}"
    client = subprocess.Popen(
        [
            *("taskset", "-c", LOAD_CORE, str(load), "-u", url, "-c", str(scenario.streams)),
            *("-d", str(scenario.seconds), "-w", str(scenario.warmup), *scenario.flags.split()),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    time.sleep(scenario.warmup + scenario.seconds - 0.4)
    rss = rss_mib(proxy.pid) if proxy else None
    out = json.loads(client.communicate(timeout=40)[0])
    used = cpu_us(proxy.pid) - cpu_before if proxy else None
    events, requests = out.get("all_events") or 0, out.get("all_reqs") or 0
    latency, ttft = out.get("lat_us") or {}, out.get("ttft_us") or {}
    return {
        "events_per_s": out.get("events_per_s"),
        "cpu_us_per_event": used / events if used and events else None,
        "cpu_us_per_request": used / requests if used and requests else None,
        "p50_us": latency.get("p50"),
        "p99_us": latency.get("p99"),
        "ttft_p50_us": ttft.get("p50"),
        "rss_mib": rss,
        "kib_per_stream": (rss - rss_before) * 1024 / scenario.streams if rss is not None else None,
        "errors": out.get("errors"),
    }


def variants(work: Path, listen: int, upstream: int, tap_flags: str) -> dict[str, list[str] | None]:
    (work / "nginx.conf").write_text(NGINX.format(d=work, u=upstream, l=listen))
    (work / "haproxy.cfg").write_text(HAPROXY.format(u=upstream, l=listen))
    found: dict[str, list[str] | None] = {"direct": None}
    if shutil.which("nginx"):
        found["nginx"] = ["nginx", "-c", str(work / "nginx.conf")]
    if shutil.which("haproxy"):
        found["haproxy"] = ["haproxy", "-f", str(work / "haproxy.cfg"), "-q"]
    found["tapproxy"] = [
        *(sys.executable, "-m", "tapproxy.cli", "serve", "--upstream", f"http://127.0.0.1:{upstream}"),
        *("--listen", f"127.0.0.1:{listen}", "--admin", "127.0.0.1:0", "--data", str(work / "records")),
        *shlex.split(tap_flags),
    ]
    return found


def show(name: str, scenario: Scenario, rows: dict[str, list[dict[str, float | None]]]) -> None:
    def median(variant: str, key: str) -> float | None:
        values = [row[key] for row in rows[variant] if row[key] is not None]
        return statistics.median(v for v in values if v is not None) if values else None

    base = median("nginx", "cpu_us_per_event") if "nginx" in rows else None
    print(f"\n{name}: {scenario.streams} streams, {scenario.query}")
    print(f"{'':10}" + "".join(f"{column:>11}" for column in COLUMNS))
    for variant in rows:
        cells = []
        for key, digits in COLUMNS.values():
            value = median(variant, "cpu_us_per_event" if key == "ratio" else key)
            if key == "ratio":
                value = value / base if value and base else None
            cells.append("–" if value is None else f"{value:.{digits}f}")
        print(f"{variant:10}" + "".join(f"{cell:>11}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", default="L32,L512,T,R")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--curve", action="store_true", help="cost per event over stream length and number of streams")
    parser.add_argument("--skip", default="", help="variants to leave out")
    parser.add_argument("--tap", default="", metavar="FLAGS", help="more flags for `tapproxy serve`")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    chosen = CURVE if options.curve else {name: SCENARIOS[name] for name in options.scenarios.split(",")}
    work = Path(tempfile.mkdtemp(prefix="tapproxy-bench-"))
    work.chmod(0o755)
    try:
        for tool in ("ssesim", "sseload"):
            subprocess.run(["gcc", "-O2", "-w", "-o", work / tool, HERE / f"{tool}.c", "-lm"], check=True)
        upstream, listen = 21000, 21100
        candidates = variants(work, listen, upstream, options.tap)
        for name in filter(None, options.skip.split(",")):
            candidates.pop(name, None)
        rows: dict[str, dict[str, list[dict[str, float | None]]]] = {
            name: {variant: [] for variant in candidates} for name in chosen
        }
        simulator = ["taskset", "-c", LOAD_CORE, str(work / "ssesim"), "-p", str(upstream), "-S", "131072", "-q"]
        with running(simulator, upstream, work / "sim.log"):
            for _ in range(options.rounds):
                for variant, command in candidates.items():
                    if command is None:
                        for name, scenario in chosen.items():
                            rows[name][variant].append(measure(work / "sseload", upstream, None, scenario))
                        continue
                    pinned = ["taskset", "-c", PROXY_CORE, *command]
                    with running(pinned, listen, work / f"{variant}.log") as proxy:
                        time.sleep(0.7)
                        for name, scenario in chosen.items():
                            rows[name][variant].append(measure(work / "sseload", listen, proxy, scenario))
        for name, scenario in chosen.items():
            show(name, scenario, rows[name])
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1))
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
