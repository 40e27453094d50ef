"""Runs a comparison, or a row of them (a sweep, steps of the rate, the search for the highest), one after the other.

Puts the parts of ``load`` together: facts of the paths, prompts, plan, sending, judging, keeping. A row that cannot go
on keeps what it has.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import orjson

from tapproxy.commands import environment
from tapproxy.commands.compare_progress import ProgressLine, Tally
from tapproxy.commands.compare_prompts import Prompts, gather
from tapproxy.core import stats
from tapproxy.core.address import shown
from tapproxy.core.errors import ConfigError, MeasureError
from tapproxy.core.sample import Sample
from tapproxy.load import planfile, planning, session
from tapproxy.load import prompts as prompts_
from tapproxy.load import replay as replay_
from tapproxy.load.compare import judge
from tapproxy.load.facts import Known
from tapproxy.load.planning import FLOOR_PATHS, Load, Plan
from tapproxy.load.runs import Register
from tapproxy.load.search import RateSearch
from tapproxy.load.session import Settings
from tapproxy.load.slo import Slo
from tapproxy.load.trial import Asked, Scenario, Trial
from tapproxy.sampling import Held, Sampler, Source
from tapproxy.store import read_records
from tapproxy.wire.stamps import boot_id

Written = TypeVar("Written")


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for on the command line, beside the paths."""

    load: Load
    prompts: Prompts
    sweeps: list[tuple[str, list[float]]]
    find_rate: bool = False
    plan: Path | None = None
    replay: Path | None = None
    floor: bool = False
    slo: Slo | None = None
    engine_metrics: tuple[str, ...] = ()
    sample_interval_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Point:
    """One comparison of a row. ``swept``: the settings that are its own."""

    load: Load
    prompt_tokens: int
    swept: dict[str, float] = field(default_factory=dict)
    # Of the search for a rate: one path at a time.
    only: str | None = None


@dataclass(slots=True)
class Done:
    """A point that was measured."""

    point: Point
    trial: Trial
    comparison: Any
    kept: Path | None = None


@dataclass(slots=True)
class Outcome:
    """All that came of it. ``rates``: of the search, path → the object that is shown."""

    row: bool
    done: list[Done] = field(default_factory=list)
    interrupted: bool = False
    # Why the rest of a row was not measured.
    stopped: str | None = None
    # What of the measured could not be written, in sentences.
    unkept: list[str] = field(default_factory=list)
    rates: dict[str, dict[str, Any]] | None = None


def points(options: Options) -> list[Point]:
    """The comparisons of a row, one where nothing is swept. Raises ConfigError for what does not go together."""
    given = options.plan is not None and options.plan.exists()
    row = bool(options.sweeps) or options.find_rate
    if row and (options.plan is not None or options.replay is not None):
        raise ConfigError("a row of comparisons has a plan for each: leave --plan and --replay out, or the row")
    if options.plan is not None and options.replay is not None and given:
        raise ConfigError("--plan and --replay are both given, and each says what to send: keep one of them")
    if options.find_rate:
        return [_search_point(options)]
    if not row:
        return [Point(options.load, options.prompts.tokens)]
    out = []
    for values in product(*(values for _, values in options.sweeps)):
        swept = dict(zip((name for name, _ in options.sweeps), values, strict=True))
        if "prompt-tokens" in swept:
            prompts_.refuse_too_short(int(swept["prompt-tokens"]))
        out.append(_swept(options, swept))
    return out


def _swept(options: Options, swept: dict[str, float]) -> Point:
    load, tokens = options.load, options.prompts.tokens
    for name, value in swept.items():
        if name == "prompt-tokens":
            tokens = int(value)
        elif name == "output-tokens":
            load = replace(load, max_tokens=int(value))
        elif name == "concurrency":
            load = replace(load, concurrency=int(value))
        else:
            load = replace(load, rate=value)
    return Point(load, tokens, swept)


def _search_point(options: Options) -> Point:
    if options.slo is None:
        raise ConfigError("--find-rate wants --slo: the objectives that the rate has to meet, as ttft=500ms")
    if options.load.scenario is not Scenario.SERVER:
        raise ConfigError(f"--find-rate belongs to --scenario server, not to {options.load.scenario}")
    if options.load.requests is None:
        raise ConfigError("--find-rate wants --requests: as many decide at every rate")
    least = least_requests(options.slo)
    if options.load.requests < least:
        raise ConfigError(
            f"--requests is {options.load.requests}: to show these objectives takes at least {least} at every rate"
            " (or ask for less of them, as ttft:p90=500ms)"
        )
    if options.floor:
        raise ConfigError("--find-rate sends over one path at a time: --floor means nothing there")
    return Point(replace(options.load, rate=options.load.rate or 1.0), options.prompts.tokens)


class Runner:
    """Runs points. Make it, then ``run`` on an event loop."""

    def __init__(self, settings: Settings, options: Options, register: Register, baseline: Trial | None) -> None:
        self._settings = settings
        self._options = options
        self._register = register
        self._baseline = baseline
        self._enough = asyncio.Event()
        self._line = ProgressLine()
        self._unkept: list[str] = []
        # Engines, nginx, GPU, host: asked once, before anything is sent.
        self._environment: dict[str, Any] | None = None

    async def run(self, todo: Sequence[Point]) -> Outcome:
        """All of them, or those before it was enough. Raises MeasureError where not even the first was measured."""
        loop = asyncio.get_running_loop()
        for ends in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(ends, self._enough.set)
        row = len(todo) > 1 or bool(self._options.sweeps) or self._options.find_rate
        outcome = Outcome(row, unkept=self._unkept)
        with self._line:
            try:
                if self._options.find_rate:
                    await self._find(todo[0], outcome)
                else:
                    for number, point in enumerate(todo, 1):
                        label = f"{number}/{len(todo)} {_named(point)}" if len(todo) > 1 else ""
                        outcome.done.append(await self._point(point, label))
                        if self._enough.is_set():
                            break
            except (ConfigError, MeasureError) as error:
                if self._enough.is_set() and not outcome.done:
                    raise KeyboardInterrupt from None
                if not outcome.done:
                    raise
                outcome.stopped = str(error)
        outcome.interrupted = self._enough.is_set()
        return outcome

    async def _find(self, point: Point, outcome: Outcome) -> None:
        assert self._options.slo is not None
        outcome.rates = {}
        for path in self._settings.paths:
            search = RateSearch(point.load.rate or 1.0)
            tried: list[dict[str, Any]] = []
            shown = outcome.rates[path.name] = {"rate": None, "missed": None, "tried": tried}
            while (rate := search.next_rate()) is not None and not self._enough.is_set():
                swept = {"rate": rate}
                step = replace(point, load=replace(point.load, rate=rate), swept=swept, only=path.name)
                done = await self._point(step, f"{path.name} at {rate:.4g}/s")
                outcome.done.append(done)
                met = _met(done, path.name)
                if done.trial.interrupted or met is None:
                    break
                search.tell(rate, met)
                tried.append({"rate": rate, "met": met, "run": done.trial.id})
                shown |= {"rate": search.best, "missed": search.worst}
            if self._enough.is_set():
                break

    async def _point(self, point: Point, label: str) -> Done:
        options, settings = self._options, self._settings
        if point.only is not None:
            settings = replace(settings, paths=tuple(path for path in settings.paths if path.name == point.only))
        known = await self._unless(session.known(settings))
        plan, about = await self._unless(self._plan(point, settings, known))
        floor = self._floor(point, plan, options) if options.floor else None
        fresh = options.plan is not None and not options.plan.exists()
        if fresh and plan.count is not None:
            self._save(plan)
        in_order: dict[str, list[int]] = {path.name: [] for path in settings.paths}
        self._line.tally = Tally(label, plan.count, _duration_s(point.load, settings), ttft_ns=in_order)
        if self._environment is None:
            self._environment = await self._unless(self._surroundings())
        async with self._sampled() as held:
            trial = await session.run(settings, plan, about, known, self._enough, self._line.add, floor=floor)
        trial.samples = held.samples
        trial.notes += _unsampled(options.engine_metrics, held.samples)
        trial.environment |= self._environment
        if fresh and plan.count is None:
            self._despite(lambda: self._save(plan, trial))
        trial.asked.swept.update(point.swept)
        comparison = judge(trial, options.slo, self._baseline)
        # What a file's prompts say is the operator's; made-up ones are nobody's.
        texts = options.prompts.file is None and not (options.plan is not None and not fresh)
        sent = planfile.to_dict(plan, [result.slot for result in trial.results], texts=texts)
        kept = self._despite(lambda: self._register.keep(trial, comparison.to_dict(), sent))
        return Done(point, trial, comparison, kept)

    @asynccontextmanager
    async def _sampled(self) -> AsyncIterator[Held]:
        """The engines' pages while the load runs, from before its first request until after its last."""
        held = Held(boot_id=boot_id())
        sampler = Sampler(self._pages(), held, self._options.sample_interval_s, lambda _: None, sparing=False)
        await sampler.once()
        sampler.start()
        try:
            yield held
            await sampler.once()
        finally:
            await sampler.stop()

    def _pages(self) -> Sequence[Source]:
        """The readers of the pages; their HTTP client takes a tenth of a second to load."""
        if not self._options.engine_metrics:
            return ()
        from tapproxy import sources

        transport = self._settings.transport
        return sources.pages(self._options.engine_metrics, insecure=transport.insecure, ca_file=transport.ca_file)

    def _despite(self, write: Callable[[], Written]) -> Written | None:
        """Writes what was measured; where that fails, the result is shown all the same, and why it is not kept."""
        try:
            return write()
        except ConfigError as error:
            if str(error) not in self._unkept:
                self._unkept.append(str(error))
            return None

    async def _surroundings(self) -> dict[str, Any]:
        transport = self._settings.transport
        return await environment.gather(
            {path.name: path.url for path in self._settings.paths},
            self._settings.headers,
            insecure=transport.insecure,
            ca_file=None if transport.ca_file is None else str(transport.ca_file),
        )

    async def _unless(self, work: Any) -> Any:
        """Awaits it, unless told to stop: nothing was measured then."""
        task = asyncio.ensure_future(work)
        told = asyncio.ensure_future(self._enough.wait())
        try:
            await asyncio.wait({task, told}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                raise MeasureError("interrupted before anything was measured")
            return task.result()
        finally:
            told.cancel()

    async def _plan(self, point: Point, settings: Settings, known: dict[str, Known]) -> tuple[Plan, Asked]:
        options = self._options
        names = [path.name for path in settings.paths]
        if options.plan is not None and options.plan.exists():
            plan = planfile.read(options.plan)
            if set(plan.paths) != set(names):
                raise ConfigError(
                    f"--plan {options.plan} is for the paths {', '.join(plan.paths)}: these are {', '.join(names)}"
                )
            return plan, _asked(plan, settings, str(plan.about.get("prompts") or f"plan:{options.plan.name}"))
        if options.replay is not None:
            recorded = replay_.arrivals(read_records(options.replay), point.load.max_tokens)
            if point.load.requests is not None:
                recorded = recorded[: point.load.requests]
            plan = replay_.plan(recorded, names, point.load.seed, point.load.warmup)
            plan.about.update(
                {"requests": len(recorded), "rate": replay_.rate(recorded), "warmup": point.load.warmup}
                | {"seed": point.load.seed, "max_tokens": point.load.max_tokens}
            )
            said = f"replay:{len(recorded)} recorded requests, lengths as recorded (words for tokens)"
            return replace(plan, about={**plan.about, "prompts": said}), _asked(plan, settings, said)
        found, said = await gather(point.load, point.prompt_tokens, options.prompts, settings, known)
        plan = planning.make(point.load, names, found)
        plan.about["prompts"] = said
        return plan, _asked(plan, settings, said)

    def _floor(self, point: Point, plan: Plan, options: Options) -> Plan:
        if plan.count is None:
            raise ConfigError("--floor wants --requests: its second arm is as long as the first")
        if len(plan.paths) > 1 or options.plan is not None or options.replay is not None:
            return planning.twice(plan)
        prompts = [
            prompts_.Prompt(slot.prompt, slot.messages, slot.prompt_tokens, slot.max_tokens)
            for phase in plan.phases
            for slot in phase.slots
        ]
        return planning.make(point.load, FLOOR_PATHS, prompts)

    def _save(self, plan: Plan, trial: Trial | None = None) -> None:
        assert self._options.plan is not None
        sent = None if trial is None else [result.slot for result in trial.results]
        try:
            # Prompts may be somebody's own.
            self._options.plan.touch(mode=0o600)
            self._options.plan.write_bytes(orjson.dumps(planfile.to_dict(plan, sent)) + b"\n")
        except OSError as error:
            raise ConfigError(f"--plan {str(self._options.plan)!r} cannot be written: {error.strerror}") from None


def _unsampled(pages: Sequence[str], samples: Sequence[Sample]) -> Iterator[str]:
    """A note for each page of which most readings failed."""
    for page in map(shown, pages):
        of_page = [sample for sample in samples if sample.source == page]
        problems = [sample.problem for sample in of_page if sample.problem is not None]
        if 2 * len(problems) > len(of_page):
            yield f"{page} gave no sample in {len(problems)} of {len(of_page)} readings: {problems[-1]}"


def _asked(plan: Plan, settings: Settings, prompts: str) -> Asked:
    about = plan.about
    measured = [slot for phase in plan.phases for slot in phase.slots if not slot.warmup]
    requests = len(measured) // max(1, len(plan.paths)) if plan.count is not None else None
    concurrency = about.get("concurrency")
    if concurrency is None and plan.scenario is Scenario.CONCURRENCY:
        concurrency = max(phase.width for phase in plan.phases)
    return Asked(
        scenario=plan.scenario,
        api=settings.api,
        requests=requests if about.get("duration_s") is None else None,
        duration_s=about.get("duration_s"),
        rate=about.get("rate"),
        concurrency=concurrency,
        warmup=int(about.get("warmup") or 0),
        max_tokens=int(about.get("max_tokens") or max((slot.max_tokens for slot in measured), default=0)),
        seed=int(about.get("seed") or 0),
        ignore_eos=False,
        fresh_connections=settings.transport.fresh,
        prompts=prompts,
    )


def _duration_s(load: Load, settings: Settings) -> float | None:
    """How long the whole takes, where the clock ends it: closed loops give every path its time in turn."""
    if load.duration_s is None:
        return None
    return load.duration_s * (len(settings.paths) if load.scenario is Scenario.CONCURRENCY else 1)


def _met(done: Done, path: str) -> bool | None:
    """Whether every objective was shown to be met at this rate; None where it cannot be told."""
    if done.trial.client.saturated:
        return None
    found = done.comparison.to_dict()["paths"].get(path) or {}
    answers = [each["passes"] for each in ((found.get("early_stopping") or {}).get("server") or {}).values()]
    if not answers or None in answers:
        return None
    return all(answers)


def least_requests(slo: Slo, over: int = 0) -> int:
    """How many requests show the objectives at the least, where so many of them are over."""
    return max((stats.least_n(each.percentile, over) for each in slo.objectives), default=1)


def _named(point: Point) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in point.swept.items())


def settings_of(outcome: Outcome) -> Iterator[tuple[str, Done]]:
    """Each measured point with the words for its settings."""
    for done in outcome.done:
        yield _named(done.point), done
