"""What `tapproxy check` predicts for nginx with every default, against what the simulated engine's stream shows there.

The engine decides: one that answers HTTP/1.0 in chunks (vLLM, SGLang) streams through an old nginx with plain
defaults, and one that closes is held there. A checker that does not know the engine calls a healthy path held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tapproxy.nginx.checker import examine
from tapproxy.nginx.predict import upstream_of
from tapproxy.nginx.sandbox import Nginx, find_all, make_certificate, render_demo
from tests.e2e.helpers import engine
from tests.e2e.test_nginx_same import ENGINES, before, shape

PROFILES = {"chunked": "vllm", "close": "generic"}
ALL = find_all()


@pytest.fixture(scope="module", params=ENGINES)
def running(request: pytest.FixtureRequest) -> Iterator[tuple[str, int]]:
    """The kind of engine and its port."""
    kind = str(request.param)
    with engine(*ENGINES[kind]) as found:
        yield kind, found.port


@pytest.mark.skipif(not ALL, reason="no nginx here")
@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("nginx", ALL, ids=[nginx.version for nginx in ALL])
def test_nginx_with_every_default_does_what_is_predicted(
    nginx: Nginx, tls: bool, running: tuple[str, int], tmp_path: Path
) -> None:
    kind, port = running
    cert, key = make_certificate(tmp_path)
    file = tmp_path / "nginx.conf"
    file.write_text(
        render_demo(
            "default", listen_port=8080, upstream_port=port, cert=cert, key=key, directory=tmp_path, tls=tls,
            version=nginx.version,
        )
    )  # fmt: skip
    result = examine([file], nginx_version=nginx.version, upstream=upstream_of(PROFILES[kind]), build=nginx.build)
    predicted = result.paths[0].clients["tls_http1" if tls else "http1"].streaming
    assert predicted in ("late_header", "held")

    async def measured() -> bool:
        async with before(nginx, port, tls=tls, certificates=tmp_path) as listening:
            return (await shape(listening, tls=tls)).streams

    assert asyncio.run(measured()) == (predicted == "late_header")
    assert ("buffering-on" in {one.rule for one in result.findings}) == (predicted == "held")


def test_an_old_nginx_with_plain_defaults_is_not_called_held_before_vllm(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    file.write_text("events {}\nhttp { server { listen 80; location / { proxy_pass http://127.0.0.1:8000; } } }\n")
    for profile, expected in (("vllm", "late_header"), ("sglang", "late_header"), ("generic", "held")):
        result = examine([file], nginx_version="1.22.1", upstream=upstream_of(profile))
        assert {one.clients["http1"].streaming for one in result.paths} == {expected}
