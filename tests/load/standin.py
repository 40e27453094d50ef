"""A trial without sockets: an engine's statistics, answered in memory.

Times have what real ones have: a load that drifts and that both paths share (an autoregressive process over the
rounds), and noise of each request's own that resembles its neighbour's a little. Seeded; the plan is the real one's
shape: rounds that alternate in random order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from tapproxy.core.record import Events, Record, RequestPart, UpstreamPart, UsagePart
from tapproxy.load.plan import Slot
from tapproxy.load.sender import Result
from tapproxy.load.trial import Asked, ClientFacts, PathFacts, Scenario, Trial

MS = 1_000_000


def answer(
    index: int,
    path: str,
    turn: int,
    *,
    ttft_ms: float = 40,
    gap_ms: float = 10,
    tokens: int = 6,
    failure: str | None = None,
    status: int = 200,
    start_ms: float | None = None,
    due_ms: float | None = None,
    reads: Sequence[int] | None = None,
    streamed: bool = True,
    warmup: bool = False,
    finish: str | None = "length",
    prompt_tokens: int | None = 64,
    completion_tokens: int | None = -1,
    cached: int | None = None,
    request_bytes: int = 500,
    model: str = "m",
    void: str | None = None,
    headers: dict[str, str | None] | None = None,
    **upstream: Any,
) -> Result:
    """One result. ``completion_tokens`` −1: as many as there are token events; ``reads``: the read of each event."""
    kinds = ["token"] * tokens if streamed and failure is None else []
    arrived = [round((ttft_ms + gap_ms * step) * MS) for step in range(len(kinds))]
    if reads is not None:
        # What one read brought, one stamp dates: that of its last event.
        last = dict(zip(reads, arrived, strict=True))
        arrived = [last[read] for read in reads]
    end = arrived[-1] if arrived else round(ttft_ms * MS)
    record = Record(
        id=f"{path}-{index}",
        tap=f"client:{path}",
        request_id=f"request-{index}",
        t0_unix_ns=1_700_000_000 * 10**9,
        t0_mono_ns=round((1000 * index if start_ms is None else start_ms) * MS),
        path="/v1/chat/completions",
        model=model,
        status=status,
        request=RequestPart(bytes=request_bytes),
        upstream=UpstreamPart(**{"reused": True, "end": end, **upstream}),
        events=Events(
            kinds,
            list(range(1, len(kinds) + 1)),
            arrived,
            list(arrived),
            [None] * len(kinds),
            list(range(len(kinds)) if reads is None else reads),
            [None] * len(kinds),
        ),
        usage=UsagePart(prompt_tokens, tokens if completion_tokens == -1 else completion_tokens, cached)
        if failure is None
        else UsagePart(),
        headers=headers or {"content-type": "text/event-stream" if streamed else "application/json"},
        void=void,
    )
    due_ns = None if due_ms is None else round(due_ms * MS)
    slot = Slot(index, turn, path, "", tokens, warmup=warmup)
    return Result(slot, record, failure, due_ns=due_ns, finish_reason=finish if failure is None else None)


def asked(**changes: Any) -> Asked:
    """The settings of a run of one request after the other."""
    given: dict[str, Any] = {
        "scenario": Scenario.SINGLE_STREAM,
        "api": "chat",
        "requests": 200,
        "duration_s": None,
        "rate": None,
        "concurrency": None,
        "warmup": 2,
        "max_tokens": 6,
        "seed": 1,
        "ignore_eos": True,
        "fresh_connections": False,
        "prompts": "synthetic:64 tokens",
    }
    return Asked(**{**given, **changes})


def trial(results: Sequence[Result], *, floor: list[Result] | None = None, **changes: Any) -> Trial:
    """A trial of those results; ``paths``, ``client``, … replace what it has, the rest goes to ``asked``."""
    # The first is the baseline: "direct" before "other".
    names = sorted({result.slot.path for result in results})
    parts = {key: changes.pop(key) for key in ("paths", "client", "id", "interrupted", "notes") if key in changes}
    given: dict[str, Any] = {
        "id": "run",
        "started_unix_ns": 1_700_000_000 * 10**9,
        "paths": {name: PathFacts(f"http://127.0.0.1/{name}") for name in names},
        "client": ClientFacts(),
        **parts,
    }
    return Trial(asked=asked(**changes), results=list(results), floor=floor, **given)


def rounds(
    count: int, seed: int, *, paths: Sequence[str] = ("direct", "other"), order: str = "random"
) -> list[tuple[int, str, int]]:
    """(index, path, round) of requests that alternate; ``order`` "fixed": always the first path first."""
    chance = random.Random(seed)
    out = []
    for turn in range(count):
        for path in paths if order == "fixed" else chance.sample(list(paths), len(paths)):
            out.append((len(out), path, turn))
    return out


def drifting(
    count: int,
    seed: int,
    *,
    added_ms: float = 0.0,
    mean_ms: float = 40.0,
    spread_ms: float = 10.0,
    shared: float = 0.5,
    shared_memory: float = 0.9,
    own_memory: float = 0.2,
    change: Callable[[str, int], dict[str, Any]] = lambda path, turn: {},
    paths: Sequence[str] = ("direct", "other"),
) -> list[Result]:
    """``count`` rounds of TTFT ``mean_ms`` ± ``spread_ms``, of whose variance ``shared`` drifts with both paths."""
    chance = random.Random(f"{seed}/times")
    drift = _memory(chance, shared_memory)
    own = {path: _memory(chance, own_memory) for path in paths}
    shared_now: dict[int, float] = {}
    results = []
    for index, path, turn in rounds(count, seed, paths=paths):
        if turn not in shared_now:
            shared_now[turn] = next(drift)
        noise = shared**0.5 * shared_now[turn] + (1 - shared) ** 0.5 * next(own[path])
        ttft_ms = max(0.5, mean_ms + spread_ms * noise) + (added_ms if path != paths[0] else 0.0)
        gap_ms = max(0.1, chance.gauss(10, 1))
        results.append(answer(index, path, turn, **{"ttft_ms": ttft_ms, "gap_ms": gap_ms, **change(path, turn)}))
    return results


def _memory(chance: random.Random, rho: float) -> Any:
    """A stationary autoregressive process of variance 1."""
    value = chance.gauss(0, 1)
    while True:
        yield value
        value = rho * value + (1 - rho * rho) ** 0.5 * chance.gauss(0, 1)
