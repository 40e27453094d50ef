"""Deployed proxies whose behaviour is known, what the probe has to say of each, and how several are probed at once."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import Tap
from tests.probe import proxies
from tests.probe.proxies import Proxy

ROOT = Path(__file__).resolve().parents[2]
PROBE_S = 150.0
Start = Callable[[Path, int], AbstractContextManager[Proxy]]


@dataclass(frozen=True, slots=True)
class Case:
    """One proxy. ``errors`` and ``warnings``: the causes, as (cause, mechanism). ``clients``: streaming by kind."""

    name: str
    needs: str
    start: Start
    clients: dict[str, str]
    errors: tuple[tuple[str, str], ...] = ()
    warnings: tuple[tuple[str, str], ...] = ()
    # Findings that have to be among those told, and that belong to no cause.
    findings: tuple[str, ...] = ()
    flags: tuple[str, ...] = ("--idle", "3")


def _nginx(location: str = "", **more: Any) -> Start:
    return lambda directory, port: proxies.nginx(directory, port, location, **more)


def _relay(mode: str) -> Start:
    return lambda directory, port: proxies.relay(directory, port, mode)


def _haproxy(lines: str = "", **more: Any) -> Start:
    return lambda directory, port: proxies.haproxy(directory, port, lines, **more)


def _apache(lines: str = "", modules: tuple[str, ...] = ()) -> Start:
    return lambda directory, port: proxies.apache(directory, port, lines, modules)


def _caddy(lines: str = "", proxy_lines: str = "", **more: Any) -> Start:
    return lambda directory, port: proxies.caddy(directory, port, lines, proxy_lines, **more)


HAPROXY_GZIP = "  filter compression\n  compression algo gzip\n  compression type text/event-stream"
LATE = ("proxy.response_buffering", "one_event_late")

# HAProxy without abortonclose, and Apache, learn that a client has left by writing to it: with the first event.
DEAF = ("ignore-client-abort",)

CASES = (
    # --- healthy
    Case("nginx-off", "nginx", _nginx("proxy_buffering off;"), {"http1": "streams"}),
    Case(
        "nginx-keepalive",
        "nginx",
        _nginx(
            'proxy_buffering off; proxy_http_version 1.1; proxy_set_header Connection "";', upstream="keepalive 8;"
        ),
        {"http1": "streams"},
    ),
    Case("nginx-off-tls", "nginx", _nginx("proxy_buffering off;", tls=True), {"tls_http1": "streams"}),
    Case("nginx-gzip-off", "nginx", _nginx("proxy_buffering off; gzip on; gzip_types *;"), {"http1": "streams"},
         findings=("gzip-sse",)),
    Case("haproxy-no-delay", "haproxy", _haproxy("  option http-no-delay"), {"http1": "streams"}, findings=DEAF),
    Case("haproxy-abortonclose", "haproxy", _haproxy("  option http-no-delay\n  option abortonclose"),
         {"http1": "streams"}),
    Case("haproxy-tls", "haproxy", _haproxy(tls=True), {"tls_http1": "streams", "h2": "streams"}, findings=DEAF),
    Case("apache", "apache2", _apache(), {"http1": "streams"}, findings=DEAF),
    Case("apache-deflate", "apache2", _apache("SetOutputFilter DEFLATE", ("filter", "deflate")), {"http1": "streams"},
         findings=(*DEAF, "gzip-sse")),
    Case("caddy", "caddy", _caddy(), {"http1": "streams"}),
    Case("caddy-tls", "caddy", _caddy(tls=True), {"tls_http1": "streams", "h2": "streams"}),
    # --- streams, with a cost in some cases
    Case("nginx-default", "nginx", _nginx(), {"http1": "late_header"}, warnings=(LATE,), findings=("header-late",)),
    Case("nginx-deaf", "nginx", _nginx("proxy_buffering off; proxy_ignore_client_abort on;"), {"http1": "streams"},
         findings=DEAF),
    Case("nginx-deaf-h2", "nginx",
         _nginx("proxy_buffering off; proxy_ignore_client_abort on;", tls=True, h2=True),
         {"tls_http1": "streams"}, findings=DEAF),
    # --- ill
    Case("nginx-default-generic", "nginx", _nginx("proxy_http_version 1.0;"), {"http1": "held"},
         errors=(("proxy.response_buffering", "quanta_4k"),),
         flags=("--idle", "3", "--upstream-profile", "generic")),
    Case("nginx-default-tls", "nginx", _nginx(tls=True), {"tls_http1": "held"},
         errors=(("proxy.response_buffering", "quanta_16k"),), flags=("--idle", "3", "--no-h2")),
    Case("nginx-default-h2", "nginx", _nginx("proxy_http_version 1.1;", tls=True, h2=True),
         {"tls_http1": "held", "h2": "late_header"},
         errors=(("proxy.response_buffering", "quanta_16k"),), warnings=(LATE,)),
    Case("nginx-tls-8k", "nginx", _nginx(tls=True, server="ssl_buffer_size 8k;"), {"tls_http1": "held"},
         errors=(("proxy.response_buffering", "quanta_8k"),), flags=("--idle", "3", "--no-h2")),
    Case("nginx-gzip", "nginx", _nginx("gzip on; gzip_types *;"), {"http1": "late_header"},
         errors=(("proxy.compression", "gzip"),), warnings=(LATE,)),
    Case("nginx-limit", "nginx", _nginx("limit_rate 10k;"), {"http1": "held"},
         errors=(("proxy.rate_limit", "rate_limit"),)),
    Case("nginx-cut", "nginx", _nginx("proxy_buffering off; proxy_read_timeout 2s;"), {"http1": "streams"},
         errors=(("proxy.timeout", "read_timeout"),)),
    Case("haproxy", "haproxy", _haproxy(), {"http1": "held"},
         errors=(("proxy.response_buffering", "timer"),), findings=DEAF),
    Case("haproxy-gzip", "haproxy", _haproxy("  option http-no-delay\n" + HAPROXY_GZIP), {"http1": "streams"},
         errors=(("proxy.compression", "gzip"),), findings=DEAF),
    Case("haproxy-cut", "haproxy", _haproxy("  option http-no-delay", server_timeout="2s"), {"http1": "streams"},
         errors=(("proxy.timeout", "read_timeout"),), findings=DEAF),
    Case("apache-ratelimit", "apache2",
         _apache("SetOutputFilter RATE_LIMIT\nSetEnv rate-limit 10", ("env", "ratelimit")), {"http1": "held"},
         errors=(("proxy.rate_limit", "rate_limit"),), findings=DEAF),
    Case("apache-cut", "apache2", _apache("ProxyTimeout 2"), {"http1": "streams"},
         errors=(("proxy.timeout", "read_timeout"),), findings=DEAF),
    Case("caddy-gzip", "caddy", _caddy("encode gzip"), {"http1": "streams"}, errors=(("proxy.compression", "gzip"),)),
    # --- what none of these does
    Case("relay-tick", "python3", _relay("tick:50"), {"http1": "held"},
         errors=(("proxy.response_buffering", "timer"),)),
    Case("relay-8k", "python3", _relay("quanta:8192"), {"http1": "held"},
         errors=(("proxy.response_buffering", "quanta_8k"),)),
    Case("relay-full", "python3", _relay("full"), {"http1": "held"}, errors=(("proxy.response_buffering", "full"),)),
    Case("relay-deaf", "python3", _relay("deaf"), {"http1": "streams"}, findings=DEAF),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one probe said."""

    code: int
    document: dict[str, Any]
    stderr: str


def available(case: Case) -> bool:
    return proxies.find(case.needs) is not None


def run(case: Case, running: Tap, directory: Path) -> Outcome:
    """Starts the proxy and probes it."""
    directory.mkdir(parents=True)
    with case.start(directory, running.data[1]) as proxy:
        return probe(proxy.url, running, *case.flags)


def probe(url: str, running: Tap, *flags: str) -> Outcome:
    """`tapproxy probe --json -` on a proxy in front of this tap."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tapproxy.cli", "probe", "--via", url, "--insecure", "--json", "-"),
            *("--tap", f"http://{running.admin[0]}:{running.admin[1]}", *flags),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=PROBE_S,
        env={**os.environ, "NO_COLOR": "1"},
    )
    document: dict[str, Any] = {}
    with contextlib.suppress(ValueError):
        document = json.loads(done.stdout)
    return Outcome(done.returncode, document, done.stderr)


def run_all(cases: Sequence[Case], running: Tap, directory: Path, *, at_once: int) -> dict[str, Outcome]:
    """Several proxies at the same time, each in a directory of its own."""
    with ThreadPoolExecutor(at_once) as pool:
        started = {case.name: pool.submit(run, case, running, directory / case.name) for case in cases}
        return {name: one.result() for name, one in started.items()}


def wrongs(case: Case, outcome: Outcome) -> list[str]:
    """What is not as it should be; nothing where all is right."""
    document = outcome.document
    if not document:
        return [f"no result: {outcome.stderr}"]
    found = []
    said = {(cause["severity"], cause["cause"], cause["mechanism"]) for cause in document["causes"]}
    wanted = {("error", *one) for one in case.errors} | {("warning", *one) for one in case.warnings}
    if said != wanted:
        found.append(f"causes {sorted(said)} in place of {sorted(wanted)}")
    clients = {kind: client["streaming"] for kind, client in document["clients"].items()}
    for kind, streaming in case.clients.items():
        if clients.get(kind) != streaming:
            found.append(f"{kind} {clients.get(kind)} in place of {streaming}")
    verdict, code = ("degraded", 1) if case.errors else ("healthy", 0)
    if (document["verdict"], outcome.code) != (verdict, code):
        found.append(f"{document['verdict']} and exit {outcome.code} in place of {verdict} and {code}")
    told = {finding["rule"] for finding in document["findings"]}
    found += [f"{rule} is not told" for rule in case.findings if rule not in told]
    if "ignore-client-abort" in told and "ignore-client-abort" not in case.findings:
        found += [item["summary"] for item in document["findings"] if item["rule"] == "ignore-client-abort"]
    if found:
        found += document["trust"]["warnings"] + [
            f"{kind}: {one['name']} P50 {one['hold_ms']['p50']} max {one['hold_ms']['max']} in {one['bursts']} bursts"
            for kind, client in document["clients"].items()
            for one in client["streams"]
        ]
    return found
