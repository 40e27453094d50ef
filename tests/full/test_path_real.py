"""Faults of a real nginx between two real taps, each named first, and nothing else that is ill.

load client → outer tap → nginx as the case has it → inner tap(s) → simulated engine(s)
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tapproxy.core.record import Record
from tapproxy.diagnose.causes import verdict
from tapproxy.load import plan, sender
from tapproxy.nginx import sandbox
from tapproxy.nginx.ports import HeldPorts
from tapproxy.simulate import child
from tapproxy.store import read_records
from tapproxy.wire.fetch import Client

try:
    NGINX = sandbox.find_nginx()
except Exception:  # no nginx: nothing to prove here
    pytest.skip("needs an nginx", allow_module_level=True)

_ENGINE: Final = re.compile(r"listening on (\S+):(\d+)")
_TAP: Final = re.compile(r"data on (\S+):(\d+), admin on (\S+)")
_CONFIG: Final = """
worker_processes 1;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    client_max_body_size 64m;
    client_body_temp_path {home}/tmp/body; proxy_temp_path {home}/tmp/proxy; fastcgi_temp_path {home}/tmp/fastcgi;
    uwsgi_temp_path {home}/tmp/uwsgi; scgi_temp_path {home}/tmp/scgi;
    upstream engines {{ {servers} {upstream} }}
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://engines; proxy_buffering off; {location} }}
    }}
}}
"""
_KEEPS: Final = 'proxy_http_version 1.1; proxy_set_header Connection "";'


class Path2:
    """What runs. ``taps``: the directory of each tap's records."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.url = ""
        self.taps: dict[str, Path] = {}
        self.children: list[child.Child] = []
        self.nginx = sandbox.RunningNginx()

    async def tap(self, name: str, upstream: str) -> int:
        self.taps[name] = self.home / f"{name}-{len(self.taps)}"
        role = name.partition("-")[0]
        flags = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--name", role, "--pair-key", "12" * 16]
        words = ["-m", "tapproxy.cli", "serve", "--upstream", upstream, "--data", str(self.taps[name]), *flags]
        return await self.start(f"tap {name}", [*words, "--shutdown-grace", "1s"], _TAP)

    async def engine(self, flags: Sequence[str]) -> int:
        words = ["-m", "tapproxy.simulate", "--listen", "127.0.0.1:0", "--model", "sim", *flags]
        return await self.start("the engine", words, _ENGINE)

    async def start(self, name: str, words: Sequence[str], ready: re.Pattern[str]) -> int:
        started, found = await child.start(name, words, ready)
        self.children.append(started)
        return int(found[2])

    async def stop(self) -> None:
        await asyncio.gather(*(each.stop() for each in self.children), self.nginx.stop())
        self.children = []


@asynccontextmanager
async def standing(
    engines: Sequence[Sequence[str]], servers: str, upstream: str, location: str
) -> AsyncIterator[Path2]:
    home = Path(tempfile.mkdtemp(prefix="tapproxy-test-"))
    os.chmod(home, 0o711)
    path = Path2(home)
    try:
        ports = []
        for number, flags in enumerate(engines):
            ports.append(await path.tap(f"inner-{number}", f"http://127.0.0.1:{await path.engine(flags)}"))
        with HeldPorts(1) as held:
            (port,) = held.numbers
            nginx_home = home / "nginx"
            nginx_home.mkdir(mode=0o700)
            text = _CONFIG.format(
                home=nginx_home, servers=servers.format(*ports), upstream=upstream, port=port, location=location
            )
            await path.nginx.start(NGINX, text, nginx_home)
        path.url = f"http://127.0.0.1:{await path.tap('outer', f'http://127.0.0.1:{port}')}"
        yield path
    finally:
        await path.stop()
        shutil.rmtree(home, ignore_errors=True)


def measured(
    engines: Sequence[Sequence[str]],
    *,
    servers: str = "server 127.0.0.1:{0};",
    upstream: str = "keepalive 32;",
    location: str = _KEEPS,
    requests: int = 24,
    tokens: int = 12,
    prompt_tokens: int = 32,
    outer: bool = True,
) -> dict[str, Any]:
    """The verdict on a load over this path."""

    async def run() -> dict[str, Any]:
        async with standing(engines, servers, upstream, location) as path:
            slots = plan.interleaved(
                ["nginx"], requests, 1, prompt_tokens=prompt_tokens, max_tokens=tokens, gap_ms=90.0, warmup=2
            )
            client = Client(path.url, timeout_s=30.0)
            ask = sender.Ask(model="sim", ignore_eos=True)
            try:
                results = await sender.run(slots, {"nginx": client}, concurrency=32, ask=ask)
            finally:
                await client.close()
            homes = dict(path.taps)
            await path.stop()
            counted = [result.record for result in results if not result.slot.warmup]
            ids = {record.request_id for record in counted}
            seen: dict[str, list[Record]] = {"outer": [], "inner": []}
            for name, directory in homes.items():
                records = [record for record in read_records(directory) if record.request_id in ids]
                seen[name.partition("-")[0]] += records
            return verdict(client=counted, **seen) if outer else verdict(inner=seen["inner"])

    return asyncio.run(run())


def ill(found: dict[str, Any]) -> list[str]:
    return [cause["cause"] for cause in found["causes"] if cause["severity"] != "info"]


_PACE: Final = ("--ttft-us", "40000", "--itl-us", "10000")


def test_an_nginx_that_streams_and_keeps_its_connections_is_healthy() -> None:
    found = measured([_PACE])
    assert (found["verdict"], found["causes"]) == ("healthy", []), found["trust"]


def test_a_read_timeout_is_named_with_the_silence_that_it_allowed() -> None:
    found = measured(
        [(*_PACE, "--fault", "stall-after=6:3")], location=_KEEPS + "proxy_read_timeout 1s;", tokens=20, requests=16
    )
    assert ill(found)[0] == "proxy.timeout", found
    # nginx gives up as much as 300 ms early.
    assert 650 <= found["causes"][0]["effect_ms"]["p50"] <= 1050


def test_a_post_that_is_sent_again_is_named_with_the_time_between() -> None:
    broken = ("--ttft-us", "200000", "--itl-us", "10000", "--fault", "status=503")
    found = measured(
        [broken, _PACE],
        # The second is asked only where the first has failed; the first is never counted out.
        servers="server 127.0.0.1:{0} max_fails=0; server 127.0.0.1:{1} backup;",
        location=_KEEPS + "proxy_next_upstream error timeout http_503 non_idempotent;",
    )
    assert ill(found)[0] == "proxy.retry", found
    assert found["causes"][0]["evidence"][0]["value"] == 100.0


def test_http_1_0_with_a_connection_a_request_is_told_and_no_illness() -> None:
    found = measured([_PACE], upstream="", location="")
    assert (found["verdict"], ill(found)) == ("healthy", []), found["trust"]
    assert [cause["cause"] for cause in found["causes"]] == ["proxy.connection_reuse"]


def test_long_prompts_that_nginx_collects_are_healthy() -> None:
    wide = ("--max-model-len", "200000", "--kv-blocks", "50000", "--ttft-us", "60000", "--itl-us", "10000")
    found = measured([wide], prompt_tokens=60_000, requests=16)
    assert (found["verdict"], ill(found)) == ("healthy", []), found


@pytest.mark.parametrize("location", ["", _KEEPS], ids=["HTTP/1.0", "HTTP/1.1, nothing forwarded"])
@pytest.mark.parametrize("buffering", ["on", "off"])
def test_a_tap_alone_behind_nginx_is_no_word_on_health(location: str, buffering: str) -> None:
    more = location + ("" if buffering == "off" else "gzip on; gzip_types text/event-stream;")
    found = measured([_PACE], location=more, outer=False)
    assert (found["verdict"], found["causes"]) == ("not_measured", []), found["trust"]
    assert {"proxy", "network.downstream"} <= set(found["not_observable"])
