"""What engines say of themselves, read from their saved pages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import orjson
import pytest

from tapproxy.load import environment
from tapproxy.load.environment import Page
from tests.e2e.helpers import engine

METRICS = b"""# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{_resolved="True",block_size="128",cache_dtype="auto",engine="0",kv_cache_layout="None",\
num_gpu_blocks="8192",enable_prefix_caching="True"} 1.0
vllm:num_requests_running{engine="0"} 3.0
"""


def pages(server: str = "uvicorn", **bodies: object) -> dict[str, Page]:
    out: dict[str, Page] = {}
    for name, body in bodies.items():
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        out["/" + name.replace("__", "/")] = (200, {"server": server}, data)
    return out


MODELS = {"data": [{"id": "tiny", "owned_by": "vllm", "root": "/srv/tiny", "max_model_len": 2048}]}


def test_vllm_tells_its_version_its_model_and_its_cache() -> None:
    found = environment.told(pages(version={"version": "0.32.0"}, v1__models=MODELS, metrics=METRICS))
    assert found == {
        "engine": {
            "name": "vLLM",
            "version": "0.32.0",
            "settings": {
                "cache.block_size": "128",
                "cache.cache_dtype": "auto",
                "cache.enable_prefix_caching": "True",
                "tiny.max_model_len": 2048,
                "tiny.root": "/srv/tiny",
            },
        },
        "models": ["tiny"],
        "server": "uvicorn",
        "via": None,
    }


@pytest.mark.parametrize(
    ("seen", "name", "version", "settings"),
    [
        pytest.param(
            pages(
                server_info={
                    "tokenizer_path": "m",
                    "mem_fraction_static": 0.8,
                    "version": "0.5.23",
                    "api_key": "sk-secret-0123456789",
                    "random_seed": 42,
                    "internal_states": [{"last_gen_throughput": 1.0}],
                }
            ),
            "SGLang",
            "0.5.23",
            {"tokenizer_path": "m", "mem_fraction_static": 0.8, "api_key": "…"},
            id="SGLang",
        ),
        pytest.param(
            pages(
                props={"default_generation_settings": {}, "build_info": "b1", "total_slots": 4, "chat_template": "x"}
            ),
            "llama.cpp",
            "b1",
            {"build_info": "b1", "total_slots": 4},
            id="llama.cpp",
        ),
        pytest.param(
            pages(info={"max_concurrent_requests": 8, "version": "3.0"}),
            "TGI",
            "3.0",
            {"max_concurrent_requests": 8},
            id="TGI",
        ),
        pytest.param({}, None, None, None, id="nobody"),
        pytest.param(pages(version=b"not JSON", v1__models=[1]), None, None, None, id="something else"),
    ],
)
def test_other_engines(
    seen: Mapping[str, Page], name: str | None, version: str | None, settings: Mapping[str, object] | None
) -> None:
    found = environment.told(seen)["engine"]
    assert (found["name"], found["version"], found["settings"]) == (name, version, settings)


def test_a_running_engine_is_asked() -> None:
    with engine("--model", "sim") as running:
        found = asyncio.run(environment.ask(running.url + "/v1"))
    assert found["models"] == ["sim"]


def test_nobody_there_is_told_by_nothing() -> None:
    found = asyncio.run(environment.ask("http://127.0.0.1:9"))
    assert (found["models"], found["engine"]["name"]) == (None, None)
