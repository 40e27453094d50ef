"""What an engine was started with, held against what it is asked to do.

Rules here: a setting that can hurt is worth knowing (severity ``info``) until a measurement shows that it does: then
the rule that measured it says so, with the setting in its evidence. Only what a start-up log or a page told is judged.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean
from typing import Final

from tapproxy.diagnose.facts import Fact, Named
from tapproxy.diagnose.pressure import capacity_tokens, launched_capacity
from tapproxy.diagnose.rule import Case

# Little's law over the run gives the mean; peaks are above it, so that the mean itself must not fit.
FITS: Final = 1.0


def unchunked(case: Case) -> Named | None:
    """Without chunked prefill a step must hold a whole prompt (latency_tree 2)."""
    evidence = case.evidence
    chunked, step = evidence.launched("chunked_prefill"), evidence.launched("max_num_batched_tokens")
    longest = evidence.launched("max_model_len")
    if chunked != 0:
        return None
    facts = [Fact("chunked prefill (1 on, 0 off)", 0, "", 1)]
    too_small = step is not None and longest is not None and step <= longest
    if step is not None:
        facts.append(Fact("tokens a step may hold", int(step), "tokens", 1, _whole(longest)))
    advice = (
        "Turn chunked prefill on: without it a step computes a prompt as a whole and decodes wait for it"
        + (", and max_num_batched_tokens must exceed max_model_len. " if too_small else ". ")
        + "Expect even token pace while prompts come; TTFT of long prompts may rise a little. Verify: ICL P95 and TTFT."
    )
    return _info(facts, "warning" if too_small else "info", advice, "engine.decode")


def small_cache(case: Case) -> Named | None:
    """The KV cache holds fewer requests of the usual size than are in flight (latency_tree, launch facts)."""
    sizes = [
        one.record.usage.prompt_tokens + one.record.usage.completion_tokens
        for one in case.requests
        if one.record.usage.prompt_tokens is not None and one.record.usage.completion_tokens is not None
    ]
    holds = _capacity(case)
    if not sizes or holds is None:
        return None
    room = holds / max(1.0, fmean(sizes))
    at_once = fmean(one.in_flight + 1 for one in case.requests)
    if at_once * FITS <= room:
        return None
    facts = [
        Fact("KV cache", int(holds), "tokens", 1),
        Fact("a request's prompt and output, mean", round(fmean(sizes)), "tokens", len(sizes)),
        Fact("requests that fit", round(room, 1), "requests", len(sizes)),
        Fact("requests in flight, mean", round(at_once, 1), "requests", len(case.requests), round(room, 1)),
    ]
    advice = (
        "More is in flight than the KV cache holds at the usual size: cap max_tokens, shorten contexts or raise "
        "gpu_memory_utilization before raising any limit of concurrency. Verify: KV usage and preemptions at peak."
    )
    return _info(facts, "info", advice, "engine.queue")


def far_parallel(case: Case) -> Named | None:
    """Tensor parallelism over more cards than the host has, or over PCIe (latency_tree 7)."""
    parallel, nvlink = case.evidence.launched("tensor_parallel"), case.evidence.launched("nvlink")
    cards = case.evidence.launched("gpus")
    if parallel is None or parallel < 2:
        return None
    facts = [Fact("tensor parallelism", int(parallel), "GPUs", 1, _whole(cards))]
    if cards is not None and parallel > cards:
        advice = (
            f"Each decode step crosses hosts: keep tensor parallelism to the {int(cards)} GPUs of one host and put "
            "pipeline parallelism across hosts. Expect lower TPOT; throughput of a single stream may fall. Verify: "
            "TPOT at the same concurrency, both ways."
        )
        return _info(facts, "warning", advice, "engine.decode")
    if nvlink == 0:
        facts.append(Fact("NVLink between the cards (1 yes, 0 no)", 0, "", 1))
        advice = (
            "Each decode step crosses PCIe: try pipeline parallelism inside the host, or a model that fits one card. "
            "Expect lower TPOT at high concurrency. Verify: `nvidia-smi topo -m`, and TPOT at the same load, both ways."
        )
        return _info(facts, "info", advice, "engine.decode")
    return None


def sliced_card(case: Case) -> Named | None:
    """The card is shared out (MIG): its memory and compute are a part of it."""
    on = case.evidence.launched("mig_enabled") == 1 or any(
        series.latest("mig") == 1 for series in case.evidence.gpus.values()
    )
    if not on:
        return None
    advice = (
        "The card is divided (MIG): compute and memory bandwidth are a slice's. Compare with the slice's numbers, not "
        "the card's; a larger slice or a whole card raises both. Verify: `nvidia-smi -L`."
    )
    return _info([Fact("MIG (1 on, 0 off)", 1, "", 1)], "info", advice, "engine.decode")


def any_of(*judges: Callable[[Case], Named | None]) -> Callable[[Case], Named | None]:
    """The first of them that says something; a measurement stands before a setting."""

    def judge(case: Case) -> Named | None:
        return next((named for one in judges if (named := one(case)) is not None), None)

    return judge


def _capacity(case: Case) -> float | None:
    if not case.evidence.engines:
        return launched_capacity(case.evidence)
    known = [capacity_tokens(series, case.evidence) for series in case.evidence.engines.values()]
    # Several replicas share what is in flight.
    return sum(each for each in known if each is not None) or None


def _info(facts: list[Fact], severity: str, advice: str, stage: str) -> Named:
    return Named(facts, None, 0.6, "warning" if severity == "warning" else "info", advice=advice, stage=stage)


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
