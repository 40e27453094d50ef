"""Staged engines on virtual time: one for every cause that an engine, its cards or its host can have; healthy ones.

Each is a function of a seed and gives what a verdict is asked with, and beside it the truth of what was injected.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tapproxy.core.sample import Sample
from tapproxy.core.stats import percentile
from tapproxy.diagnose.causes import verdict
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.rule import Target
from tests.diagnose.virtual import MS, Run, closed, launch, poisson, readings, serve

# When what changes in a run changes, in ms.
LATE: Final = 30_000


@dataclass(slots=True)
class Staged:
    """A run, what stood beside it, and what was injected: ``effect_ms`` at P50 of the requests hit, where known."""

    run: Run
    beside: Sequence[Sample] = ()
    target: Target = field(default_factory=Target)
    effect_ms: float | None = None

    def verdict(self, *, evidence: bool = True) -> dict[str, Any]:
        found = Evidence.of([*self.run.samples, *self.beside]) if evidence else None
        return verdict(inner=self.run.records, evidence=found, target=self.target)


Stage = Callable[[int], Staged]


def p50_ms(values_ns: Sequence[float]) -> float:
    """Nearest rank."""
    return (percentile(values_ns, 0.5) or 0) / MS


# -- the engine's causes -----------------------------------------------------------------------------------


def queue_closed(seed: int) -> Staged:
    """Sixteen at once, and four may run."""
    run = serve(closed(16, 150, seed), seed=seed, max_num_seqs=4)
    return Staged(run, effect_ms=p50_ms(run.queue_ns()))


def queue_open(seed: int) -> Staged:
    """More comes than four at a time can finish."""
    run = serve(poisson(8, 150, seed), seed=seed, max_num_seqs=4)
    return Staged(run, effect_ms=p50_ms(run.queue_ns()))


def limit_low(seed: int) -> Staged:
    """The same, and the start-up log tells the limit, while the KV cache is nearly empty."""
    staged = queue_closed(seed)
    staged.beside = [launch(max_num_seqs=4)]
    return staged


def mixed_batches(seed: int) -> Staged:
    """A step may hold sixteen thousand tokens, and decodes wait for the prompts in it."""
    run = serve(
        poisson(1.2, 120, seed, prompt=8000, output=200), seed=seed, max_num_batched_tokens=16384, kv_blocks=32_000
    )
    return Staged(run, [launch(max_num_batched_tokens=16384)])


def kv_full(seed: int) -> Staged:
    """Nine thousand tokens of room for twenty-four prompts of a thousand."""
    run = serve(closed(24, 150, seed, prompt=1000, output=100), seed=seed, kv_blocks=600, max_model_len=4096)
    return Staged(run, effect_ms=p50_ms(run.queue_ns()))


def preempted(seed: int) -> Staged:
    """Prompts fit, their answers do not."""
    load = closed(10, 150, seed, prompt=200, output=lambda chance: chance.randint(300, 500))
    return Staged(serve(load, seed=seed, kv_blocks=257, max_model_len=4096))


def stalls(seed: int) -> Staged:
    """Every sixtieth step takes 400 ms longer."""
    return Staged(serve(poisson(4, 150, seed), seed=seed, stall_every=60, stall_ms=400), effect_ms=400)


def cold(seed: int) -> Staged:
    """The first twelve requests take 800 ms longer."""
    run = serve(closed(1, 100, seed), seed=seed, cold_requests=12, cold_ms=800, started_s=60)
    return Staged(run, effect_ms=800)


def long_blocks_short(seed: int) -> Staged:
    """One prompt in sixteen has twelve thousand tokens, the others a hundred."""

    def prompt(chance: random.Random) -> int:
        return 12_000 if chance.random() < 1 / 16 else 100

    return Staged(serve(poisson(4, 250, seed, prompt=prompt), seed=seed))


def prefill_slower(seed: int) -> Staged:
    """From the middle of the run on prefill takes four times as long: 300 ms more for 2,000 tokens."""
    changes = [(90_000.0, {"prefill_tokens_per_s": 5000})]
    return Staged(serve(poisson(0.8, 150, seed, prompt=2000), seed=seed, changes=changes), effect_ms=300)


def steps_held_up(seed: int) -> Staged:
    """Every other five seconds a step takes 392 ms longer, whatever is in it; prompts are all alike."""
    slow, fast = {"decode_base_ns": 400 * MS}, {"decode_base_ns": 8 * MS}
    changes = [(5000.0 * part, slow if part % 2 else fast) for part in range(1, 40)]
    load = poisson(2.5, 200, seed, prompt=300, output=6)
    return Staged(serve(load, seed=seed, decode_base_us=8000, changes=changes), effect_ms=392)


def prefill_over_target(seed: int) -> Staged:
    """300 ms were asked for, and the prompts take longer."""
    load = poisson(0.7, 120, seed, prompt=lambda chance: chance.randint(6000, 12_000))
    return Staged(serve(load, seed=seed), target=Target(ttft_ns=300 * MS))


def tokenizer(seed: int) -> Staged:
    """0.1 ms a prompt token in the API process."""
    load = poisson(3, 150, seed, prompt=lambda chance: chance.randint(100, 3000))
    run = serve(load, seed=seed, frontend_us_per_token=100)
    return Staged(run, effect_ms=p50_ms(run.frontend_ns()))


def tokenizer_counted(seed: int) -> Staged:
    """The same, told by the page's means alone."""
    load = poisson(3, 150, seed, prompt=lambda chance: chance.randint(100, 3000))
    run = serve(load, seed=seed, told=False, frontend_us_per_token=100)
    return Staged(run, effect_ms=p50_ms(run.frontend_ns()))


def decode_over_target(seed: int) -> Staged:
    """A token every 60 ms where 30 were asked for."""
    return Staged(serve(poisson(2, 120, seed), seed=seed, decode_base_us=60_000), target=Target(tpot_ns=30 * MS))


def decode_slower(seed: int) -> Staged:
    """From 30 s on a decode step takes 18 ms more, at the same arrivals."""
    changes = [(float(LATE), {"decode_base_ns": 30 * MS})]
    return Staged(serve(poisson(4, 220, seed), seed=seed, changes=changes), effect_ms=18)


def drafts_in_vain(seed: int) -> Staged:
    return Staged(serve(poisson(3, 120, seed), seed=seed, spec_tokens=4, spec_acceptance=0.2))


def bundles(seed: int) -> Staged:
    return Staged(serve(poisson(3, 120, seed), seed=seed, bundle=4))


# -- cards and hosts ---------------------------------------------------------------------------------------


def hot_card(seed: int) -> Staged:
    staged = decode_slower(seed)
    staged.beside = readings("gpu", staged.run, lambda ms: card(hot=ms > LATE))
    return staged


def shared_card(seed: int) -> Staged:
    staged = decode_slower(seed)
    staged.beside = readings("gpu", staged.run, lambda ms: card(others=int(ms > LATE)))
    return staged


def short_host(seed: int) -> Staged:
    """From 30 s on the engine's group is stopped for 40 % of the time."""
    staged = decode_slower(seed)
    staged.beside = readings("host", staged.run, lambda ms: host(stopped_ms=0.4 * max(0.0, ms - LATE), at_ms=ms))
    return staged


def card(*, hot: bool = False, others: int = 0) -> dict[str, float]:
    """A card at work."""
    return {
        "gpu_busy_share": 0.95,
        "sm_clock_mhz": 900.0 if hot else 1900.0,
        "sm_clock_max_mhz": 1980.0,
        "temperature_c": 88.0 if hot else 61.0,
        "throttled_thermal": float(hot),
        "other_processes": float(others),
    }


def host(*, at_ms: float, stopped_ms: float = 0.0, run_queue: float = 1.0, cores_used: float = 0.5) -> dict[str, float]:
    """Eight cores, and an engine on them."""
    return {
        "cores": 8.0,
        "physical_cores": 8.0,
        "run_queue": run_queue,
        # Of periods of 100 ms, as many ran out as the time that the group was stopped for.
        "cgroup_periods": at_ms // 100,
        "cgroup_throttled_periods": stopped_ms // 100,
        "engine_busiest_cpu_s": cores_used * at_ms / 1000,
    }


STAGED: Final[list[tuple[str, Stage]]] = [
    ("engine.queue", queue_closed),
    ("engine.queue", queue_open),
    ("engine.batching", limit_low),
    ("engine.batching", mixed_batches),
    ("engine.kv_cache", kv_full),
    ("engine.preemption", preempted),
    ("engine.stall", stalls),
    ("engine.cold_start", cold),
    ("engine.prefill", long_blocks_short),
    ("engine.prefill", prefill_slower),
    ("engine.prefill", prefill_over_target),
    ("engine.prefill", steps_held_up),
    ("engine.tokenizer", tokenizer),
    ("engine.tokenizer", tokenizer_counted),
    ("engine.decode", decode_over_target),
    ("engine.decode", decode_slower),
    ("engine.spec_decode", drafts_in_vain),
    ("engine.bundling", bundles),
    ("gpu.throttled", hot_card),
    ("gpu.contention", shared_card),
    ("host.cpu", short_host),
    ("engine.unattributed", lambda seed: untold(queue_closed(seed))),
]


def untold(staged: Staged) -> Staged:
    """The same run with the engine's own words taken away: its times in the records, and its page."""
    for record in staged.run.records:
        record.engine = type(record.engine)()
    staged.run.samples, staged.beside = [], ()
    return staged


# -- healthy engines ---------------------------------------------------------------------------------------


def low_load(seed: int) -> Staged:
    return Staged(serve(poisson(1, 120, seed), seed=seed))


def one_by_one(seed: int) -> Staged:
    return Staged(serve(closed(1, 80, seed), seed=seed))


def high_load(seed: int) -> Staged:
    return Staged(serve(poisson(25, 300, seed, output=lambda chance: chance.randint(16, 128)), seed=seed))


def many_at_once(seed: int) -> Staged:
    return Staged(serve(closed(48, 250, seed), seed=seed))


def slow_but_steady(seed: int) -> Staged:
    load = poisson(0.5, 100, seed, prompt=lambda chance: chance.randint(50, 800))
    return Staged(serve(load, seed=seed, decode_base_us=90_000, prefill_tokens_per_s=1000))


def long_by_design(seed: int) -> Staged:
    return Staged(serve(poisson(1, 120, seed, prompt=6000), seed=seed))


def long_and_varied(seed: int) -> Staged:
    return Staged(serve(poisson(1, 120, seed, prompt=lambda chance: chance.randint(1000, 9000)), seed=seed))


def chatty_mix(seed: int) -> Staged:
    """Lengths as traffic has them: most short, some long, none outlandish."""

    def prompt(chance: random.Random) -> int:
        return max(8, min(3000, round(chance.lognormvariate(5.3, 0.9))))

    def output(chance: random.Random) -> int:
        return max(4, min(400, round(chance.lognormvariate(4.2, 0.8))))

    return Staged(serve(poisson(6, 250, seed, prompt=prompt, output=output), seed=seed))


def rising_load(seed: int) -> Staged:
    """Twice the arrivals in the second half: busier is no slower engine."""
    quiet, busy = poisson(4, 120, seed), poisson(12, 200, seed + 1000)
    last_ms = quiet.requests[-1].at_ms
    later = [type(one)(one.at_ms + last_ms, one.prompt, one.output) for one in busy.requests]
    return Staged(serve(type(quiet)([*quiet.requests, *later]), seed=seed))


def good_drafts(seed: int) -> Staged:
    return Staged(serve(poisson(3, 120, seed), seed=seed, spec_tokens=3, spec_acceptance=0.8))


def busy_machine(seed: int) -> Staged:
    """Tokens reach the tap some ms late, now and then."""
    return Staged(serve(poisson(6, 150, seed), seed=seed, noise_ms=3))


def cool_card_and_host(seed: int) -> Staged:
    staged = high_load(seed)
    cards = readings("gpu", staged.run, lambda _: card())
    hosts = readings("host", staged.run, lambda ms: host(at_ms=ms, cores_used=0.97, run_queue=3))
    staged.beside = [*cards, *hosts, launch(max_num_seqs=64, max_num_batched_tokens=2048, chunked_prefill=1)]
    return staged


HEALTHY: Final[list[Stage]] = [
    low_load,
    one_by_one,
    high_load,
    many_at_once,
    slow_but_steady,
    long_by_design,
    long_and_varied,
    chatty_mix,
    rising_load,
    good_drafts,
    busy_machine,
    cool_card_and_host,
]
