"""Runs for the register, in plain numbers: the TTFT of each request as told, then a token every 10 ms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tapproxy.core.record import Events, Record, RequestPart, UpstreamPart, UsagePart
from tapproxy.load.plan import Slot
from tapproxy.load.sender import Result
from tapproxy.load.trial import Asked, ClientFacts, PathFacts, Scenario, Trial

MS = 1_000_000
PROMPT = "the prompt that nobody may keep"


def record(number: int, ttft_ms: float, tokens: int = 4) -> Record:
    at = [round(ttft_ms * MS) + 10 * MS * i for i in range(tokens)]
    return Record(
        id=f"r{number}",
        tap="client:direct",
        request_id=f"id-{number}",
        t0_unix_ns=1_000_000_000_000 + number,
        t0_mono_ns=5_000 * MS * number,
        status=200,
        request=RequestPart(bytes=10),
        upstream=UpstreamPart(end=at[-1] + MS),
        events=Events(
            kind=["token"] * tokens,
            end_offset=list(range(tokens)),
            arrived=at,
            read_at=at,
            sent=[None] * tokens,
            read=list(range(tokens)),
            tokens=[1] * tokens,
        ),
        usage=UsagePart(prompt_tokens=8, completion_tokens=tokens),
    )


def results(ttfts_ms: Sequence[float], path: str = "direct", failed: int = 0, tokens: int = 4) -> list[Result]:
    """One result for each TTFT; the last ``failed`` of them are errors."""
    out = []
    for number, ttft_ms in enumerate(ttfts_ms):
        lost = number >= len(ttfts_ms) - failed
        slot = Slot(number, number, path, PROMPT, 16)
        out.append(
            Result(slot, record(number, ttft_ms, tokens), "status" if lost else None, "status 500" if lost else None)
        )
    return out


def asked(**changed: Any) -> Asked:
    settings: dict[str, Any] = {
        "scenario": Scenario.SINGLE_STREAM,
        "api": "chat",
        "requests": 40,
        "duration_s": None,
        "rate": None,
        "concurrency": None,
        "warmup": 0,
        "max_tokens": 16,
        "seed": 1,
        "ignore_eos": True,
        "fresh_connections": False,
        "prompts": "synthetic:64 tokens",
    }
    return Asked(**(settings | changed))


def trial(
    run_id: str,
    ttfts_ms: Sequence[float] = (),
    *,
    failed: int = 0,
    tokens: int = 4,
    environment: Mapping[str, Any] | None = None,
    started_unix_ns: int = 1_700_000_000 * 1_000_000_000,
    facts: PathFacts | None = None,
    client: ClientFacts | None = None,
    **changed: Any,
) -> Trial:
    return Trial(
        id=run_id,
        started_unix_ns=started_unix_ns,
        asked=asked(**changed),
        paths={
            "direct": facts or PathFacts("http://127.0.0.1:8000", models=["m"], engine="vLLM", engine_version="0.32")
        },
        results=results(ttfts_ms, failed=failed, tokens=tokens),
        client=client or ClientFacts(),
        environment=dict(environment or {}),
    )


def comparison(
    requests: int = 40, *, failed: int = 0, tokens_per_s: float | None = 100.0, ttft_p50: float | None = 40.0
) -> dict[str, Any]:
    return {
        "schema": "tapproxy.comparison/1",
        "floor_ms": 0.5,
        "paths": {
            "direct": {
                "requests": requests,
                "errors": {"connect": 0, "status": failed},
                "ttft_ms": {"p50": ttft_p50, "p90": None, "p95": None, "p99": None},
                "output_tokens_per_s": tokens_per_s,
                "goodput": None,
            }
        },
        "verdict": {"verdict": "healthy"},
    }
