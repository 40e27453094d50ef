"""Stages a path with one known fault, runs a load over it and over its healthy neighbours, and draws the conclusion.

    direct   client → engine
    tap      client → inner tap → engine
    nginx    client → outer tap → nginx as the scenario has it → inner tap → engine
    fixed    client → outer tap → that nginx with the patch of `check --fix` → inner tap → engine

Puts parts together, as commands do. A run that is cut short keeps what was measured by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Any, Final, TypeVar

from tapproxy import sources
from tapproxy.load import plan, sender
from tapproxy.sampling import Held, Sampler
from tapproxy.simulate.scenarios.catalogue import DEFAULT, ROUTES, SCENARIOS, Scenario, Workload
from tapproxy.simulate.scenarios.conclusion import conclude, effects
from tapproxy.simulate.scenarios.stage import MODEL, Stage, staged
from tapproxy.store import read_records
from tapproxy.wire.fetch import Client
from tapproxy.wire.stamps import boot_id

__all__ = ["DEFAULT", "SCENARIOS", "Interrupted", "Progress", "Scenario", "Workload", "effects", "run"]

T = TypeVar("T")
# The engine's page takes a millisecond of its process: often enough for runs of a few seconds, and no load of its own.
SAMPLE_INTERVAL_S: Final = 0.5
# (what is being done, how much of it is done, of how much)
Progress = Callable[[str, int, int], None]


class Interrupted(Exception):
    """Told to stop before anything was measured."""


async def run(scenario: Scenario, workload: Workload, enough: asyncio.Event, progress: Progress) -> dict[str, Any]:
    """One scenario from start to conclusion: the verdict of the contract, with what the report shows beside it.

    ``enough`` cuts it short: what was measured by then is concluded on, and marked. Raises Interrupted where that
    is nothing, MeasureError or ConfigError where the stage could not be set.
    """
    async with AsyncExitStack() as stack:
        progress(f"{scenario.name}: starting the engine, nginx and the taps", 0, 0)
        stage = await _unless(enough, stack.enter_async_context(staged(scenario, workload)))
        sampler, held = await _sampling(stage)
        stack.push_async_callback(sampler.stop)
        results = await _load(stage, workload, enough, lambda done, of: progress(scenario.name, done, of))
        # One more reading after the last request: a counter's rise is known between two of them.
        await sampler.once()
        await sampler.stop()
        progress(f"{scenario.name}: reading the records", 0, 0)
        # The taps flush on their way out.
        await stage.stop()
        if all(result.slot.warmup for result in results):
            raise Interrupted
        taps = {name: list(read_records(directory)) for name, directory in stage.records.items()}
        return conclude(scenario, workload, stage, results, taps, held.samples)


async def _sampling(stage: Stage) -> tuple[Sampler, Held]:
    """The engine's page, read once before the load and then at the interval."""
    held = Held(boot_id=boot_id())
    pages = sources.pages((f"{stage.urls['direct']}/metrics",))
    sampler = Sampler(pages, held, SAMPLE_INTERVAL_S, lambda _: None, sparing=False)
    await sampler.once()
    sampler.start()
    return sampler, held


async def _unless(enough: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Awaits ``work`` unless told that it is enough; then its clean-up is waited for, and Interrupted raised."""
    task, told = asyncio.ensure_future(work), asyncio.ensure_future(enough.wait())
    try:
        await asyncio.wait({task, told}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if task.cancelled():
            raise Interrupted
        return task.result()
    finally:
        told.cancel()


async def _load(
    stage: Stage, workload: Workload, enough: asyncio.Event, progress: Callable[[int, int], None]
) -> list[sender.Result]:
    """The results so far when it is enough, else all of them."""
    paths = [path for path in ROUTES if path in stage.urls]
    slots = plan.interleaved(
        paths,
        workload.requests,
        workload.seed,
        prompt_tokens=workload.prompt_tokens,
        max_tokens=workload.tokens,
        gap_ms=workload.gap_ms,
        warmup=workload.warmup,
    )
    results: list[sender.Result] = []
    clients = {path: Client(stage.urls[path], timeout_s=30.0) for path in paths}
    progress(0, len(slots))
    try:
        await _unless(
            enough,
            sender.run(
                slots,
                clients,
                concurrency=workload.concurrency,
                ask=sender.Ask(model=MODEL, ignore_eos=True),
                on_progress=lambda _: progress(len(results), len(slots)),
                into=results,
            ),
        )
    except Interrupted:
        pass
    finally:
        for client in clients.values():
            await client.close()
    return results
