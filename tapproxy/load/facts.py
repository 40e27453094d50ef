"""What can be known of a path beside its answers: models, the engine and its version, its prefix cache's counters.

Asked over the path itself, before and after the load. What is not told is None; only a path that cannot be connected
to is an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from tapproxy.core.errors import MeasureError
from tapproxy.load.path import Path, Transport
from tapproxy.load.trial import PathFacts
from tapproxy.wire.fetch import Client

Headers = tuple[tuple[bytes, bytes], ...]
# What an engine calls itself in /v1/models (``owned_by``) and how its metrics begin.
_OWNERS: Final = {"vllm": "vLLM", "sglang": "SGLang", "llamacpp": "llama.cpp", "library": "Ollama"}
_METRICS: Final = {b"vllm:": "vLLM", b"sglang:": "SGLang", b"tgi_": "TGI", b"llamacpp:": "llama.cpp"}
# These take ``ignore_eos`` in an OpenAI request.
TAKES_IGNORE_EOS: Final = frozenset(("vLLM", "SGLang"))
_HITS: Final = re.compile(rb"^vllm:(?:gpu_)?prefix_cache_hits(?:_total)?(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)
_QUERIES: Final = re.compile(
    rb"^vllm:(?:gpu_)?prefix_cache_queries(?:_total)?(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE
)
_TIMEOUT_S: Final = 10.0


@dataclass(slots=True)
class Known:
    """The facts of one path, and its cache counters as they stood before the load."""

    facts: PathFacts
    hits: float | None = None
    queries: float | None = None


async def before(path: Path, transport: Transport, headers: Headers) -> Known:
    """Raises MeasureError where nobody answers there."""
    client = _client(path, transport)
    try:
        models = await client.fetch("GET", path.target("/v1/models"), list(headers))
        if models.error is not None and models.error.startswith("connect:"):
            raise MeasureError(f"the path {path.name} ({path.url}) cannot be reached: {models.error}")
        facts = PathFacts(url=path.url)
        said = json_object(models.body) if models.error is None and models.status == 200 else {}
        entries = served(said)
        facts.models = [entry["id"] for entry in entries] if isinstance(said.get("data"), list) else None
        page = await _get(client, path, "/metrics", headers)
        facts.engine = engine_of(entries, page)
        if facts.engine == "vLLM":
            facts.engine_version = _version(await _get(client, path, "/version", headers))
        elif facts.engine == "SGLang":
            facts.engine_version = _version(await _get(client, path, "/get_server_info", headers))
        return Known(facts, _sum(_HITS, page), _sum(_QUERIES, page))
    finally:
        await client.close()


async def after(known: Known, path: Path, transport: Transport, headers: Headers) -> None:
    """Fills in what the counters gained meanwhile."""
    if known.hits is None and known.queries is None:
        return
    client = _client(path, transport)
    try:
        page = await _get(client, path, "/metrics", headers)
    finally:
        await client.close()
    known.facts.prefix_cache_hits = _gained(known.hits, _sum(_HITS, page))
    known.facts.prefix_cache_queries = _gained(known.queries, _sum(_QUERIES, page))


def _client(path: Path, transport: Transport) -> Client:
    return Client(path.origin, insecure=transport.insecure, ca_file=transport.ca_file, timeout_s=_TIMEOUT_S)


async def _get(client: Client, path: Path, what: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    fetched = await client.fetch("GET", path.target(what), list(headers))
    return fetched.body if fetched.error is None and fetched.status == 200 else b""


def _version(data: bytes) -> str | None:
    said = json_object(data).get("version")
    return said if isinstance(said, str) else None


def json_object(data: bytes) -> dict[str, Any]:
    """A page's JSON object; empty where it is none."""
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def served(models: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of /v1/models that name a model."""
    data = models.get("data")
    entries = data if isinstance(data, list) else []
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]


def engine_of(models: Sequence[Mapping[str, Any]], page: bytes) -> str | None:
    """What the engine is called, by the owner of its models, else by how its metrics begin."""
    owners = {str(entry.get("owned_by")) for entry in models}
    for owner, name in _OWNERS.items():
        if owner in owners:
            return name
    for start, name in _METRICS.items():
        if page.startswith(start) or b"\n" + start in page:
            return name
    return None


def _sum(pattern: re.Pattern[bytes], page: bytes) -> float | None:
    """Over all label sets; None where there is none."""
    values = [float(match[1]) for match in pattern.finditer(page)]
    return sum(values) if values else None


def _gained(earlier: float | None, later: float | None) -> float | None:
    # A counter that fell belongs to an engine that was started anew.
    return None if earlier is None or later is None or later < earlier else later - earlier
