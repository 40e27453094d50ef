"""Runs a scenario that has a setting of its own: its parts, its load, what is then known, the conclusion.

Rules here: as much as was measured by an interruption is concluded on, and marked. The client's loop is this process's.
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Final

from tapproxy import __version__
from tapproxy.core.record import Record
from tapproxy.core.sample import Sample
from tapproxy.diagnose import causes, pairing
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.rule import Target
from tapproxy.load import compare, plan, sender
from tapproxy.simulate.scenarios import evidence, truths
from tapproxy.simulate.scenarios.conclusion import timelines
from tapproxy.simulate.scenarios.interrupt import Interrupted, Progress, unless
from tapproxy.simulate.scenarios.line import MODEL, Line, running
from tapproxy.simulate.scenarios.parts import End, Engine, Link, Load, Nginx, Part, Relay, Scenario, Setting, Tap
from tapproxy.store import read_records
from tapproxy.wire.fetch import Client

CLEAN: Final = "clean"
# Told, and an answer not streamed: what the engine refuses to have together.
_NOT_STREAMED: Final = (("stream", False), ("stream_options", None))
Counted = Callable[[int, int], None]


async def play(scenario: Scenario, setting: Setting, enough: asyncio.Event, progress: Progress) -> dict[str, Any]:
    """The result of one scenario. Raises Interrupted where nothing was measured, and as ``line.running`` does."""
    names = ("nginx" if any(isinstance(part, Nginx) for part in setting.path) else "tap", CLEAN)
    samples: list[Sample] = []
    async with AsyncExitStack() as stack:
        progress(f"{scenario.name}: starting its parts", 0, 0)
        line = await unless(enough, stack.enter_async_context(running(setting, names)))
        sampler = None
        if setting.sampled and setting.path[-1].end is End.HERE:
            url, pid = f"http://{line.engine_address}", line.engine.pid if setting.host and line.engine else None
            sampler, held = await evidence.sampling(url, pid, evidence.OFTEN_S)
            stack.push_async_callback(sampler.stop)
        results = await _load(setting.load, line, enough, lambda done, of: progress(scenario.name, done, of))
        if sampler is not None:
            # One more reading after the last request: a counter's rise is known between two of them.
            await sampler.once()
            await sampler.stop()
            samples += held.samples
        progress(f"{scenario.name}: reading the records", 0, 0)
        # The taps flush on their way out.
        await line.stop()
        if all(result.slot.warmup for result in results):
            raise Interrupted
        return _conclude(scenario, setting, line, results, samples, names[0])


async def _load(load: Load, line: Line, enough: asyncio.Event, progress: Counted) -> list[sender.Result]:
    """The results so far when it is enough, else all of them."""
    slots = slots_of(load, list(line.urls))
    results: list[sender.Result] = []
    clients = {
        path: Client(url, timeout_s=load.timeout_s, fresh=load.fresh, ca_file=line.certificates.get(path))
        for path, url in line.urls.items()
    }
    busy = asyncio.ensure_future(_busy(load.busy_ms, load.busy_every_ms)) if load.busy_ms else None
    ask = sender.Ask(model=MODEL, ignore_eos=True, extra=() if load.stream else _NOT_STREAMED)
    progress(0, len(slots))
    sending = sender.run(
        slots,
        clients,
        concurrency=load.concurrency,
        ask=ask,
        on_progress=lambda _: progress(len(results), len(slots)),
        into=results,
    )
    try:
        await unless(enough, sending)
    except Interrupted:
        pass
    finally:
        if busy is not None:
            busy.cancel()
        for client in clients.values():
            await client.close()
    return results


async def _busy(busy_ms: float, every_ms: float) -> None:
    """Takes the event loop for itself, so long of every so long."""
    while True:
        until_s = time.monotonic() + busy_ms / 1000
        while time.monotonic() < until_s:
            pass
        await asyncio.sleep((every_ms - busy_ms) / 1000)


def slots_of(load: Load, paths: Sequence[str]) -> list[plan.Slot]:
    """The requests in the order in which they are sent: in each round every path has the same one."""
    chance = random.Random(load.seed)
    slots: list[plan.Slot] = []
    for turn in range(load.warmup + load.requests):
        text = plan.words(chance, max(1, load.prompts[turn % len(load.prompts)] - plan.PREFIX_WORDS))
        for path in chance.sample(list(paths), len(paths)):
            slots.append(
                plan.Slot(
                    len(slots),
                    turn,
                    path,
                    text,
                    load.tokens[turn % len(load.tokens)],
                    load.gap_ms / len(paths) * chance.uniform(0.5, 1.5),
                    warmup=turn < load.warmup,
                    prefix=plan.words(chance, plan.PREFIX_WORDS),
                )
            )
    return slots


def _conclude(
    scenario: Scenario,
    setting: Setting,
    line: Line,
    results: Sequence[sender.Result],
    samples: Sequence[Sample],
    name: str,
) -> dict[str, Any]:
    client = {path: [r.record for r in results if r.slot.path == path and not r.slot.warmup] for path in line.urls}
    taps = {
        tap: _of_these([record for home in homes for record in read_records(home)], client[name])
        for tap, homes in line.taps.items()
    }
    if setting.other_boot:
        for number, record in enumerate(taps.get("inner", ())):
            record.boot_id = "another-host"
            # A clock that keeps its pace would be found out by the requests that both taps saw.
            record.t0_mono_ns += 7 * number % 11 * 1_000_000_000
    verdict = causes.verdict(
        client=client[name] if setting.client else (),
        outer=taps.get("outer", taps.get("tap", [])),
        inner=taps.get("inner", ()),
        direct=not any(isinstance(part, Nginx) for part in setting.path) and "inner" not in taps,
        evidence=Evidence.of([*samples, *_beside(setting, line, results)]),
        target=Target(_ns(setting.ttft_target_ms), _ns(setting.tpot_target_ms)),
    )
    holds = _holds_ns(taps.get("outer") or client[name], taps.get("inner", ()))
    paths = compare.summarise(results, holds_ns={name: holds})
    for path, summary in paths.items():
        summary["route"] = route(setting.path if path == name else setting.clean)
    done = sum(not result.slot.warmup for result in results)
    wanted = setting.load.requests * len(line.urls)
    staged_ms = truths.staged_ms(setting.truth, line.truth, client[name], client.get(CLEAN, ()))
    return {
        **verdict,
        "scenario": _scenario(scenario, setting, line, staged_ms),
        "paths": paths,
        "budget_path": name,
        "timelines": {path: timelines(client[path]) for path in paths},
        "environment": {
            "tapproxy": __version__,
            "nginx": None if line.nginx is None else line.nginx.version,
            "python": platform.python_version(),
            "kernel": f"{platform.system()} {platform.release()}",
            "cpus": os.cpu_count(),
            "client_stamps": results[0].record.stamps.source,
        },
        "requests": {"done": done, "wanted": wanted},
        "interrupted": done < wanted,
        "next": None,
        "notes": []
        if done == wanted
        else [f"Interrupted: {done} of {wanted} requests had ended; these are their figures."],
    }


def _beside(setting: Setting, line: Line, results: Sequence[sender.Result]) -> list[Sample]:
    """What is said of the engine's card and of its start."""
    found = [] if setting.startup is None else [evidence.of_startup(setting.startup, line.directory)]
    engine = setting.path[-1]
    rows = truths.read(line.truth)
    if setting.card is not None and isinstance(engine, Engine) and rows:
        began_ns = min(row["arrival_ns"] + row["scheduled_ns"] for row in rows)
        from_ns = began_ns + int(engine.flags["slow_after_ms"]) * 1_000_000
        to_ns = from_ns + int(engine.flags["slow_for_ms"]) * 1_000_000
        until_ns = max(result.record.t0_mono_ns + (result.record.upstream.end or 0) for result in results)
        found += evidence.of_card(setting.card, (from_ns, to_ns), until_ns, line.directory)
    return found


def _ns(ms: float | None) -> int | None:
    return None if ms is None else round(ms * 1e6)


def _of_these(tap: Sequence[Record], requests: Sequence[Record]) -> list[Record]:
    """What a tap saw of these requests, by the id that the load client gave them."""
    ids = {record.request_id for record in requests}
    return [record for record in tap if record.request_id in ids]


def _holds_ns(near: Sequence[Record], far: Sequence[Record]) -> list[int] | None:
    holds = [pairing.hold_ns(pair).values_ns for pair in pairing.pair(near, far).pairs]
    known = [value for values in holds if values is not None for value in values]
    return known or None


def _scenario(scenario: Scenario, setting: Setting, line: Line, staged_ms: float | None) -> dict[str, Any]:
    load, truth = setting.load, setting.truth
    engine = "a simulated engine"
    where = "on loopback" if setting.link is None else link_words(setting.link)
    proxy = f"nginx {line.nginx.version}, " if line.nginx is not None else ""
    return {
        "command": "demo",
        "name": scenario.name,
        "title": scenario.title,
        "staged": scenario.staged,
        "also": list(scenario.also),
        "effect": None if truth is None else {"metric": truth.metric, "ms": staged_ms, "how": truth.how},
        "setting": [
            f"{proxy}{engine}; {where}.",
            f"{load.requests} requests on each of {len(line.urls)} paths, one every {load.gap_ms:g} ms on average, "
            f"{_of(load.prompts)} words in, {_of(load.tokens)} tokens out.",
        ],
    }


def link_words(link: Link) -> str:
    """The link in words."""
    lost = f", {100 * link.lost_share:g} % of the packets lost" if link.lost_share else ""
    return f"a link of {link.delay_ms:g} ms each way{lost}, between network namespaces"


def route(parts: Sequence[Part]) -> str:
    """A path in words: client → … → engine."""
    return " → ".join(["client", *(_word(part) for part in parts)])


def _word(part: Part) -> str:
    if isinstance(part, Tap):
        return f"{part.name} tap"
    if isinstance(part, Relay):
        return "relay"
    return "nginx" if isinstance(part, Nginx) else "engine"


def _of(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
