"""One run of a comparison: what is known of the paths, the load over them, and the run as data.

Rules here: the first request over each path goes alone, and what it shows is settled before the rest is sent (is
``ignore_eos`` taken?); every path is asked the same way; told to stop, what has ended by then is kept. Nothing is
judged here.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from tapproxy.core import metrics
from tapproxy.core.errors import MeasureError
from tapproxy.load import facts, watch
from tapproxy.load.crew import Crew
from tapproxy.load.driver import Driver, Lane, OnResult
from tapproxy.load.path import Path, Transport
from tapproxy.load.plan import SALTS
from tapproxy.load.planning import Kind, Phase, Plan
from tapproxy.load.sender import Ask, Result
from tapproxy.load.trial import Asked, PathFacts, Trial
from tapproxy.load.watch import Vitals

# Engines that do not know the field say so with one of these.
_REFUSED: Final = (400, 422)
_UNKNOWN_SPACING_NS: Final = 2_000_000


@dataclass(frozen=True, slots=True)
class Settings:
    """How a run is sent. ``ignore_eos`` None: where the engine takes it."""

    paths: tuple[Path, ...]
    transport: Transport = field(default_factory=Transport)
    api: str = "chat"
    model: str | None = None
    headers: facts.Headers = ()
    accept_encoding: str | None = None
    ignore_eos: bool | None = None
    extra: tuple[tuple[str, object], ...] = ()
    processes: int = 1


class _Executor(Protocol):
    """Sends phases: this process itself, or several."""

    async def run(self, phase: Phase, asks: Mapping[str, Ask]) -> None: ...

    def vitals(self) -> list[Vitals]: ...


async def known(settings: Settings) -> dict[str, facts.Known]:
    """The facts of every path. Raises MeasureError for one that nobody answers on."""
    return {path.name: await facts.before(path, settings.transport, settings.headers) for path in settings.paths}


def model_of(settings: Settings, found: Mapping[str, facts.Known]) -> str | None:
    """The model that is asked for: the one that was said, else the first one that the baseline serves."""
    if settings.model is not None:
        return settings.model
    models = found[settings.paths[0].name].facts.models
    return models[0] if models else None


async def run(
    settings: Settings,
    plan: Plan,
    asked: Asked,
    found: Mapping[str, facts.Known],
    enough: asyncio.Event,
    on_result: OnResult,
    *,
    floor: Plan | None = None,
) -> Trial:
    """Sends a plan and returns the run as data. ``enough`` ends it early.

    ``floor``: a plan for the paths ``A`` and ``B``, sent afterwards over the baseline's URL. Raises MeasureError
    where nothing at all was measured.
    """
    started_ns = time.time_ns()
    names = {path.name for path in settings.paths}
    if not {slot.path for phase in plan.phases for slot in phase.slots} <= names:
        raise MeasureError("the plan is for other paths than these")
    salt = random.SystemRandom().randrange(SALTS)
    load = _Sending(settings, model_of(settings, found), salt, enough)
    results: list[Result] = []

    def keep(result: Result) -> None:
        results.append(result)
        on_result(result)

    ignore_eos = settings.ignore_eos
    if ignore_eos is None:
        engines = {each.facts.engine for each in found.values()}
        ignore_eos = True if engines <= facts.TAKES_IGNORE_EOS else None
    vitals, ignore_eos = await load.send(plan, settings.paths, ignore_eos, keep)
    floor_results: list[Result] | None = None
    if floor is not None and not enough.is_set():
        floor_results = []
        base = settings.paths[0]
        again = tuple(replace(base, name=name) for name in floor.paths)
        # Its own places in the cache: the prompts are the run's own.
        load.salt = (salt + 1 + random.SystemRandom().randrange(SALTS - 1)) % SALTS
        await load.send(floor, again, ignore_eos, floor_results.append)
        floor_results.sort(key=lambda result: result.slot.index)
    results.sort(key=lambda result: result.slot.index)
    if all(result.slot.warmup for result in results):
        raise MeasureError("nothing was measured" + (": interrupted too early" if enough.is_set() else ""))
    for path in settings.paths:
        with suppress(MeasureError):
            await facts.after(found[path.name], path, settings.transport, settings.headers)
    return Trial(
        id=_new_id(started_ns),
        started_unix_ns=started_ns,
        asked=replace(asked, ignore_eos=ignore_eos, fresh_connections=settings.transport.fresh),
        paths={path.name: _with_cold(found[path.name].facts, path.name, results) for path in settings.paths},
        results=results,
        client=watch.facts(vitals, results),
        floor=floor_results,
        interrupted=enough.is_set(),
        notes=watch.standstills(vitals),
        environment={"model": model_of(settings, found), "client_stamps": results[0].record.stamps.source},
    )


class _Sending:
    """Sends plans, each with clients of its own."""

    def __init__(self, settings: Settings, model: str | None, salt: int, enough: asyncio.Event) -> None:
        self._settings = settings
        self._model = model
        self.salt = salt
        self._enough = enough

    async def send(
        self, plan: Plan, paths: Sequence[Path], ignore_eos: bool | None, keep: OnResult
    ) -> tuple[list[Vitals], bool]:
        """The plan's phases. ``ignore_eos`` None: as the first phase shows. Returns what was decided."""
        seen: list[Result] = []
        took_ns: dict[str, int] = {}

        def note(result: Result) -> None:
            seen.append(result)

        def kept(result: Result) -> None:
            e2e_ns = None if result.failure is not None else metrics.e2e_ns(result.record)
            if e2e_ns is not None:
                took_ns.setdefault(result.slot.path, e2e_ns)
            keep(result)

        phases = list(plan.phases)
        alone = bool(phases) and all(slot.warmup for slot in phases[0].slots) and phases[0].endless is None
        async with AsyncExitStack() as stack:
            executor = await self._executor(stack, paths, lambda result: (note if trying else kept)(result))
            trying = ignore_eos is None and alone
            if trying:
                await self._phase(executor, phases[0], self._asks(paths, True))
                ignore_eos = not any(result.record.status in _REFUSED for result in seen)
                trying = False
                if ignore_eos:
                    for result in seen:
                        kept(result)
                    phases = phases[1:]
            for phase in phases:
                await self._phase(executor, _spaced(phase, took_ns), self._asks(paths, bool(ignore_eos)))
            return executor.vitals(), bool(ignore_eos)

    async def _phase(self, executor: _Executor, phase: Phase, asks: Mapping[str, Ask]) -> None:
        """One phase, or as much of it as comes before it is enough."""
        if self._enough.is_set():
            return
        sending = asyncio.ensure_future(executor.run(phase, asks))
        told = asyncio.ensure_future(self._enough.wait())
        try:
            await asyncio.wait({sending, told}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending
        finally:
            told.cancel()

    async def _executor(self, stack: AsyncExitStack, paths: Sequence[Path], keep: OnResult) -> _Executor:
        settings = self._settings
        if settings.processes > 1:
            crew = Crew(settings.processes, settings.transport, tuple(paths), keep)
            stack.push_async_callback(crew.close)
            await crew.start()
            return _Many(crew)
        clients = {path.name: settings.transport.client(path) for path in paths}
        for client in clients.values():
            stack.push_async_callback(client.close)
        alone = _One(clients, keep)
        stack.callback(alone.driver.close)
        return alone

    def _asks(self, paths: Sequence[Path], ignore_eos: bool) -> dict[str, Ask]:
        settings = self._settings
        return {
            path.name: Ask(
                model=self._model,
                target=path.api_target(settings.api),
                headers=settings.headers,
                accept_encoding=settings.accept_encoding,
                ignore_eos=ignore_eos,
                api=settings.api,
                salt=self.salt,
                extra=settings.extra,
            )
            for path in paths
        }


def _spaced(phase: Phase, took_ns: Mapping[str, int]) -> Phase:
    """A closed loop whose clients begin one after the other, over the time of one request as far as it is known."""
    if phase.kind is not Kind.CLOSED or phase.width < 2:
        return phase
    paths = [slot.path for slot in phase.slots] or list(phase.endless.paths if phase.endless else ())
    known = [took_ns[path] for path in paths[:1] if path in took_ns]
    return replace(phase, spacing_ns=known[0] // phase.width if known else _UNKNOWN_SPACING_NS)


class _One:
    """This process."""

    def __init__(self, clients: Mapping[str, Any], keep: OnResult) -> None:
        self._clients = clients
        self._lanes: dict[str, Lane] = {}
        self.driver = Driver(self._lanes, keep)

    async def run(self, phase: Phase, asks: Mapping[str, Ask]) -> None:
        self._lanes.update({path: Lane(self._clients[path], ask) for path, ask in asks.items()})
        await self.driver.run(phase)

    def vitals(self) -> list[Vitals]:
        return [self.driver.vitals]


class _Many:
    """A crew."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    async def run(self, phase: Phase, asks: Mapping[str, Ask]) -> None:
        await self._crew.run(phase, asks)

    def vitals(self) -> list[Vitals]:
        return self._crew.vitals


def _with_cold(known: PathFacts, path: str, results: Sequence[Result]) -> PathFacts:
    first = min(
        (result for result in results if result.slot.path == path),
        key=lambda result: result.record.t0_mono_ns,
        default=None,
    )
    if first is not None and first.failure is None:
        known.cold_ttft_ns = metrics.ttft_ns(first.record)
    return known


def _new_id(started_unix_ns: int) -> str:
    """Sorts by time, and no two are the same."""
    at = datetime.fromtimestamp(started_unix_ns / 1e9, UTC)
    return f"{at:%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
