"""What is known of a path beside its answers."""

from __future__ import annotations

import asyncio
from pathlib import Path as File

import orjson
import pytest

from tapproxy.core.errors import MeasureError
from tapproxy.load import facts
from tapproxy.load.path import Transport, parse
from tapproxy.load.trial import PathFacts
from tests.harness import Peer, Upstream

PAGE = b"""# HELP vllm:prefix_cache_queries_total Prefix cache queries.
vllm:prefix_cache_queries_total{engine="0",model_name="m"} %d.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 1.0
vllm:prefix_cache_queries_created{engine="0",model_name="m"} 1.79e+09
vllm:prefix_cache_hits_total{engine="0",model_name="m"} %d.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 7.0
"""


class Engine:
    """Answers from a table; what is not in it is 404."""

    def __init__(self, table: dict[str, bytes]) -> None:
        self.table = table

    def __call__(self, peer: Peer) -> None:
        while True:
            head, _ = peer.request()
            target = head.split(b" ", 2)[1].decode()
            body = self.table.get(target)
            status = b"404 Not Found" if body is None else b"200 OK"
            body = body or b"{}"
            peer.send(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))


def models(owner: str) -> bytes:
    return orjson.dumps({"object": "list", "data": [{"id": "m", "owned_by": owner}, {"id": "n"}]})


def known(table: dict[str, bytes], prefix: str = "") -> PathFacts:
    with Upstream(Engine({prefix + target: body for target, body in table.items()})) as upstream:
        (path,) = parse([f"a={upstream.url}{prefix}"])
        return asyncio.run(facts.before(path, Transport(), ())).facts


@pytest.mark.parametrize(
    ("table", "engine", "version"),
    [
        pytest.param({"/v1/models": models("vllm"), "/version": b'{"version": "0.32.0"}'}, "vLLM", "0.32.0", id="vLLM"),
        pytest.param(
            {"/v1/models": models("sglang"), "/get_server_info": b'{"version": "0.5.23"}'},
            "SGLang",
            "0.5.23",
            id="SGLang",
        ),
        pytest.param({"/metrics": PAGE % (1, 0)}, "vLLM", None, id="by its metrics alone"),
        pytest.param({"/v1/models": models("me"), "/version": b'{"version": "9"}'}, None, None, id="nobody knows"),
        pytest.param({}, None, None, id="nothing told"),
        pytest.param({"/v1/models": b"[1", "/metrics": b"\xff"}, None, None, id="nothing that can be read"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "/openai"])
def test_the_engine_says_what_it_is(
    table: dict[str, bytes], engine: str | None, version: str | None, prefix: str
) -> None:
    found = known(table, prefix)
    assert (found.engine, found.engine_version) == (engine, version)
    assert found.models == (["m", "n"] if b'"m"' in table.get("/v1/models", b"") else None)


def test_the_caches_counters_are_what_they_gained_over_all_engines() -> None:
    engine = Engine({"/metrics": PAGE % (100, 40)})
    with Upstream(engine) as upstream:
        (path,) = parse([f"a={upstream.url}"])

        async def story(later: bytes) -> PathFacts:
            engine.table["/metrics"] = PAGE % (100, 40)
            before = await facts.before(path, Transport(), ())
            engine.table["/metrics"] = later
            await facts.after(before, path, Transport(), ())
            return before.facts

        found = asyncio.run(story(PAGE % (600, 45)))
        assert (found.prefix_cache_queries, found.prefix_cache_hits) == (500, 5)
        # Started anew meanwhile: nothing is known.
        found = asyncio.run(story(PAGE % (3, 1)))
        assert (found.prefix_cache_queries, found.prefix_cache_hits) == (None, None)


def test_nobody_there_is_an_error_with_the_paths_name(tmp_path: File) -> None:
    (path,) = parse([f"gone=unix:{tmp_path}/engine.sock"])
    with pytest.raises(MeasureError, match="the path gone"):
        asyncio.run(facts.before(path, Transport(), ()))
