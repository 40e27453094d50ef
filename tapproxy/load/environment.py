"""What the engine behind a path says of itself: name, version, model, and what it was started with.

Rules here: only GETs, only of what is there for that; what an engine does not tell is None. A flag that holds a secret
is left out. The reading of answers is apart from the asking, so that saved answers can be read as well.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from tapproxy.load.facts import engine_of, json_object, served
from tapproxy.load.redact import LEFT_OUT, Redactor, is_secret
from tapproxy.wire.fetch import Client, Fetched

_TIMEOUT_S: Final = 3.0
# Where engines tell, in this order: vLLM; llama.cpp; TGI; SGLang, and vLLM in its development mode.
PAGES: Final = ("/version", "/v1/models", "/props", "/info", "/server_info", "/get_server_info", "/metrics")
_CACHE_CONFIG: Final = re.compile(rb"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL: Final = re.compile(rb'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')
# What changes from start to start, or from moment to moment, without anybody having set it.
_NO_SETTINGS: Final = re.compile(
    r"(internal_states?|random_seed|launch_ts|uptime|status|load|port|pid|nccl|engine|version|last_.*|.*throughput.*)\Z"
)
_MOST_SETTINGS: Final = 400
# Of vLLM's cache: what came of the settings and of the memory that was free.
_OUTCOMES: Final = re.compile(r"(_.*|num_[gc]pu_blocks|kv_cache_(size_tokens|max_concurrency)|engine)\Z")


async def ask(
    url: str, headers: Sequence[tuple[bytes, bytes]] = (), *, insecure: bool = False, ca_file: str | None = None
) -> dict[str, Any]:
    """Asks the engine that answers at ``url``; None for what it does not tell. Raises ConfigError for a wrong URL."""
    parts = urlsplit(url)
    client = Client(
        f"{parts.scheme}://{parts.netloc}", insecure=insecure, ca_file=ca_file, connect_timeout_s=_TIMEOUT_S
    )
    base = parts.path.rstrip("/").removesuffix("/v1")
    pages: dict[str, Fetched] = {}
    try:
        for page in PAGES:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    pages[page] = await client.fetch("GET", base + page, list(headers))
            except TimeoutError:
                continue
            if pages[page].error is not None and pages[page].status is None:
                break  # nobody there: the other pages would take as long
    finally:
        await client.close()
    return told({page: (found.status, _headers(found), found.body) for page, found in pages.items()})


def _headers(fetched: Fetched) -> dict[str, str]:
    return {name.lower().decode("ascii", "replace"): value.decode("latin-1") for name, value in fetched.headers}


Page = tuple[int | None, Mapping[str, str], bytes]


def told(pages: Mapping[str, Page]) -> dict[str, Any]:
    """``{"engine": {"name", "version", "settings"}, "models", "server", "via"}`` of the pages that were had."""
    found = {page: json_object(body) for page, (status, _, body) in pages.items() if status == 200}
    models = served(found.get("/v1/models", {}))
    status, _, body = pages.get("/metrics", (None, {}, b""))
    metrics = body if status == 200 else b""
    settings = {**_of_info(found), **_of_metrics(metrics), **_of_models(models)}
    first = next((headers for status, headers, _ in pages.values() if status is not None), {})
    return {
        "engine": {
            "name": engine_of(models, metrics) or _by_pages(found),
            "version": _version(found),
            "settings": dict(list(settings.items())[:_MOST_SETTINGS]) or None,
        },
        "models": [each["id"] for each in models] or None,
        "server": first.get("server"),
        "via": first.get("via"),
    }


def _by_pages(found: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Where neither the models' owner nor the metrics tell."""
    if "default_generation_settings" in found.get("/props", {}):
        return "llama.cpp"
    if "max_concurrent_requests" in found.get("/info", {}):
        return "TGI"
    if "tokenizer_path" in found.get("/server_info", {}) or "tokenizer_path" in found.get("/get_server_info", {}):
        return "SGLang"
    return None


def _version(found: Mapping[str, Mapping[str, Any]]) -> str | None:
    for page, key in (
        ("/version", "version"),
        ("/props", "build_info"),
        ("/info", "version"),
        ("/server_info", "version"),
        ("/get_server_info", "version"),
    ):
        value = found.get(page, {}).get(key)
        if isinstance(value, str) and value:
            return value
    return None


def _of_info(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The flags themselves, where the engine tells them (SGLang's server_args, TGI's and llama.cpp's limits)."""
    redact = Redactor()
    out: dict[str, Any] = {}
    for page in ("/props", "/info", "/server_info", "/get_server_info"):
        for key, value in found.get(page, {}).items():
            if _NO_SETTINGS.match(key) or not isinstance(value, str | int | float | bool) or key == "chat_template":
                continue
            out[key] = LEFT_OUT if is_secret(key) else redact.value(value)
    return out


def _of_metrics(page: bytes) -> dict[str, Any]:
    """vLLM tells the settings of its cache as labels of a metric."""
    line = _CACHE_CONFIG.search(page)
    if line is None:
        return {}
    labels = {match[1].decode(): match[2].decode("utf-8", "replace") for match in _LABEL.finditer(line[1])}
    return {f"cache.{name}": value for name, value in labels.items() if value != "None" and not _OUTCOMES.match(name)}


def _of_models(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    keys = ("max_model_len", "root")
    return {f"{each['id']}.{key}": each[key] for each in models for key in keys if isinstance(each.get(key), str | int)}
