"""What the ordinary suite measures live for one nginx and some files, for all of them.

pytest -o addopts= tests/full/test_live_long.py
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tapproxy.nginx.checker import examine
from tapproxy.nginx.live import Live, prove
from tapproxy.nginx.sandbox import Nginx
from tests.nginx.corpus import CASES
from tests.nginx.hostile import HOSTILE, whole
from tests.nginx.live import ALL, label
from tests.nginx.test_live import NEWEST, healthy_in_every_stream, measured, proved
from tests.nginx.test_live_hostile import opens_nothing

pytestmark = pytest.mark.skipif(not ALL, reason="no nginx here")


@pytest.mark.parametrize("nginx", ALL, ids=label)
def test_a_healthy_location_shows_it_in_every_stream(nginx: Nginx, tmp_path: Path) -> None:
    healthy_in_every_stream(nginx, tmp_path)


def test_old_nginx_with_plain_defaults_streams_what_vllm_sends_and_holds_what_closes(tmp_path: Path) -> None:
    nginx = next((one for one in ALL if one.version == "1.22.1"), None)
    if nginx is None:
        pytest.skip("no nginx 1.22.1 here")
    vllm, generic = (measured(whole(), tmp_path, nginx, profile=name) for name in ("vllm", "generic"))
    assert (vllm["streaming"], vllm["upstream_http"], vllm["agrees"]) == ("late_header", "1.0", True)
    assert (generic["streaming"], generic["upstream_http"], generic["agrees"]) == ("held", "1.0", True)
    # A crash behind HTTP/1.0 without chunks looks like the end.
    assert vllm["streams"]["engine_dies"]["client_is_told"] is True
    assert generic["streams"]["engine_dies"]["client_is_told"] is False


def test_one_listener_streams_to_http2_and_holds_http1(tmp_path: Path) -> None:
    assert NEWEST is not None
    (case,) = [one for one in CASES if one.name == "a05_default_h2"]
    found = case.examine(case.write(tmp_path), NEWEST.version)
    clients = proved(found, NEWEST)["paths"][0]["clients"]
    assert {kind: one["measured"]["streaming"] for kind, one in clients.items()} == {
        "tls_http1": "held",
        "h2": "late_header",
    }


def test_what_has_been_measured_is_kept_when_somebody_stops_it(tmp_path: Path) -> None:
    file = tmp_path / "nginx.conf"
    two = (("/", ""), ("/b", "gzip on;"))
    file.write_text(
        whole(target=" ".join(f"location {at} {{ proxy_pass http://127.0.0.1:9; {extra} }}" for at, extra in two))
    )
    found = examine([file], nginx_version=ALL[0].version, paths=["/a", "/b"])

    async def stopped() -> Live:
        enough = asyncio.Event()
        return await prove(
            found, ALL[0], far=False, progress=lambda what: enough.set() if "(2 of 2)" in what else None, enough=enough
        )

    live = asyncio.run(stopped())
    assert live.interrupted
    assert [bool(one.clients) for one in live.paths] == [True, False]
    assert live.paths[1].because == "interrupted"


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_runs_opens_nothing_of_a_hostile_file_and_listens_on_loopback_only(text: str, tmp_path: Path) -> None:
    opens_nothing(text, tmp_path)
