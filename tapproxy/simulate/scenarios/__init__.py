"""Stages a path with one known fault, runs a load over it and over its healthy neighbours, and draws the conclusion.

    direct   client → engine
    tap      client → inner tap → engine
    nginx    client → outer tap → nginx as the scenario has it → inner tap → engine
    fixed    client → outer tap → that nginx with the patch of `check --fix` → inner tap → engine

A scenario with a setting of its own runs over the path that it describes instead (``parts``, ``line``, ``play``).

Puts parts together, as commands do. A run that is cut short keeps what was measured by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from tapproxy.load import plan, sender
from tapproxy.simulate.scenarios import evidence
from tapproxy.simulate.scenarios.catalogue import DEFAULT, ROUTES, SCENARIOS, Workload
from tapproxy.simulate.scenarios.conclusion import conclude, effects
from tapproxy.simulate.scenarios.interrupt import Interrupted, Progress, unless
from tapproxy.simulate.scenarios.line import Skipped
from tapproxy.simulate.scenarios.parts import Scenario, Setting
from tapproxy.simulate.scenarios.play import play
from tapproxy.simulate.scenarios.stage import MODEL, Stage, staged
from tapproxy.store import read_records
from tapproxy.wire.fetch import Client

__all__ = [
    "DEFAULT",
    "SCENARIOS",
    "Interrupted",
    "Progress",
    "Scenario",
    "Skipped",
    "Workload",
    "batches",
    "effects",
    "failed",
    "run",
    "skipped",
]


def _with_requests(setting: Setting, requests: int | None) -> Setting:
    return setting if requests is None else replace(setting, load=replace(setting.load, requests=requests))


def batches(chosen: Sequence[Scenario]) -> list[list[Scenario]]:
    """In the order in which they are run: two at a time of those that take little of a machine and disturb nobody, the
    rest alone."""
    quiet = [scenario for scenario in chosen if is_quiet(scenario)]
    pairs = {id(pair[0]): pair for pair in (quiet[i : i + 2] for i in range(0, len(quiet), 2))}
    second = {id(pair[1]) for pair in pairs.values() if len(pair) > 1}
    return [pairs.get(id(scenario), [scenario]) for scenario in chosen if id(scenario) not in second]


def is_quiet(scenario: Scenario) -> bool:
    """An engine and a tap, on their own, with a client that only waits."""
    setting = scenario.setting
    if setting is None or len(setting.path) != 2 or setting.link is not None or setting.dns_ms is not None:
        return False
    return not (setting.hogs or setting.host or setting.load.busy_ms)


def skipped(scenario: Scenario, because: str) -> dict[str, Any]:
    """What stands in a result's place where this host does not allow the scenario."""
    return {"skipped": scenario.name, "because": because, "interrupted": False}


def failed(scenario: Scenario, because: str) -> dict[str, Any]:
    """What stands in a result's place where the scenario could not be measured: nothing was named."""
    entry: dict[str, Any] = {
        "scenario": scenario.name,
        "staged": scenario.staged,
        "named": None,
        "effect_staged_ms": None,
        "effect_measured_ms": None,
        "also": [],
        "ok": False,
        "because": because,
    }
    return {"entry": entry, "interrupted": False}


async def run(scenario: Scenario, requests: int | None, enough: asyncio.Event, progress: Progress) -> dict[str, Any]:
    """One scenario from start to conclusion: the verdict of the contract, with what the report shows beside it.

    ``requests``: on each path, instead of as many as the scenario has. ``enough`` cuts it short: what was measured by
    then is concluded on, and marked. Raises Interrupted where that is nothing, Skipped where this host does not allow
    it, MeasureError or ConfigError where the stage could not be set.
    """
    if scenario.setting is not None:
        return await play(scenario, _with_requests(scenario.setting, requests), enough, progress)
    workload = Workload() if requests is None else Workload(requests=requests)
    async with AsyncExitStack() as stack:
        progress(f"{scenario.name}: starting the engine, nginx and the taps", 0, 0)
        stage = await unless(enough, stack.enter_async_context(staged(scenario, workload)))
        sampler, held = await evidence.sampling(stage.urls["direct"])
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
        await unless(
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
