"""The card: clocks held down, and others that use it.

Rules here: utilisation proves nothing, high or low: it only says whether a reading was taken under work. What a card
shows is a trouble when it lasts through the window; what it cost is read from the streams, by comparing the tokens of
those times with the tokens of the others, and is left open where there are no others.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Final

from tapproxy.core.sample import Sample
from tapproxy.diagnose import periods
from tapproxy.diagnose.facts import Fact, Named, percent
from tapproxy.diagnose.rule import Case

# Under work: an idle card lowers its clock by itself.
BUSY_SHARE: Final = 0.5
# latency_tree, gpu.throttled: of its own maximum.
CLOCK_SHARE: Final = 0.8
# Through the window: in half of the readings under work, and never fewer than three.
LASTING_SHARE: Final = 0.5
READINGS_LEAST: Final = 3
# A part of the run is enough where the streams show what it cost.
PART_SHARE: Final = 0.1
# Who is on the card and does nothing (a display server, an idle notebook) costs nobody a tenth.
OTHERS_WORK_SHARE: Final = 0.1
# A card that works while the engine has nothing to run works for another.
OTHERS_BUSY_SHARE: Final = 0.3
_REASONS: Final = ("throttled_thermal", "throttled_power", "throttled")


def throttled(case: Case) -> Named | None:
    """The card is held back: by heat, by power, or with its clock far below its maximum."""
    for source, series in case.evidence.gpus.items():
        readings = [sample for sample in series.samples if _is_busy(sample)]
        if len(readings) < READINGS_LEAST:
            continue
        slow = [sample for sample in readings if _is_slow(sample)]
        braked = [sample for sample in readings if _is_braked(sample)]
        bad = slow if len(slow) >= len(braked) else braked
        share = len(bad) / len(readings)
        cost = periods.compare(case, series, _is_slow if bad is slow else _is_braked)
        if share < PART_SHARE or (share < LASTING_SHARE and cost is None):
            continue
        facts = [
            Fact(
                f"readings under work with a throttle reason, {source}",
                percent(len(braked) / len(readings)),
                "%",
                len(readings),
                percent(LASTING_SHARE),
            ),
            Fact(
                "readings under work with the SM clock below 80 % of its maximum",
                percent(len(slow) / len(readings)),
                "%",
                len(readings),
                percent(LASTING_SHARE),
            ),
            *_middles(readings, ("sm_clock_mhz", "sm_clock_max_mhz", "temperature_c", "power_w", "power_limit_w")),
        ]
        others = [sample.values["other_processes"] for sample in readings if "other_processes" in sample.values]
        working = [sample for sample in readings if _is_shared(sample)]
        rejected = [("gpu.contention", "no other process works on the card")] if others and not working else []
        if cost is not None:
            return cost.named(facts, 0.85, [*rejected, ("engine.decode", "the pace fell with the clock")])
        # A card at its power limit says so all day; with its clock up that is how it works.
        held_back = len(slow) >= LASTING_SHARE * len(readings) or _is_hot(braked)
        return Named(facts, "tpot", 0.7, "warning" if held_back else "info", rejected=rejected)
    return None


def contention(case: Case) -> Named | None:
    """Another process works on the card. One that is only there has memory of it, and no time."""
    for source, series in case.evidence.gpus.items():
        readings = [sample for sample in series.samples if "other_processes" in sample.values]
        if len(readings) < READINGS_LEAST:
            continue
        shared = [sample for sample in readings if _is_shared(sample)]
        share = len(shared) / len(readings)
        if share < PART_SHARE:
            continue
        cost = periods.compare(case, series, _is_shared)
        idle = _busy_for_others(case, readings)
        what = f"readings with another process {'at work ' * _is_told(shared)}on the card, {source}"
        facts = [Fact(what, percent(share), "%", len(readings), percent(LASTING_SHARE))]
        facts += _middles(shared, ("other_processes", "other_busy_share", "gpu_busy_share", "gpu_memory_used_bytes"))
        if idle is not None:
            what = "card at work while the engine had nothing to run"
            facts.append(Fact(what, percent(idle), "%", None, percent(OTHERS_BUSY_SHARE)))
        slow = [sample for sample in readings if _is_slow(sample)]
        because = f"the SM clock is below 80 % of its maximum in {len(slow)} of {len(readings)} readings"
        rejected = [("gpu.throttled", because)]
        if cost is not None:
            return cost.named(facts, 0.85, rejected)
        if max(idle or 0.0, share * _others_busy(shared)) >= OTHERS_BUSY_SHARE:
            return Named(facts, "tpot", 0.7, "warning", rejected=rejected)
        if share >= LASTING_SHARE:
            return Named(facts, "tpot", 0.4, "info", rejected=rejected)
    return None


def _is_busy(sample: Sample) -> bool:
    return sample.values.get("gpu_busy_share", 0.0) >= BUSY_SHARE


def _is_slow(sample: Sample) -> bool:
    clock, most = sample.values.get("sm_clock_mhz"), sample.values.get("sm_clock_max_mhz")
    return _is_busy(sample) and clock is not None and bool(most) and clock < CLOCK_SHARE * (most or 0)


def _is_braked(sample: Sample) -> bool:
    return _is_busy(sample) and any(sample.values.get(name) == 1 for name in _REASONS)


def _is_hot(samples: Sequence[Sample]) -> bool:
    hot = sum(sample.values.get("throttled_thermal") == 1 for sample in samples)
    return bool(samples) and hot >= LASTING_SHARE * len(samples)


def _is_shared(sample: Sample) -> bool:
    """Where nothing tells whether the others work, that they are there."""
    others, work = sample.values.get("other_processes", 0), sample.values.get("other_busy_share")
    return others >= 1 and (work is None or work >= OTHERS_WORK_SHARE)


def _is_told(shared: Sequence[Sample]) -> bool:
    return all("other_busy_share" in sample.values for sample in shared)


def _others_busy(shared: Sequence[Sample]) -> float:
    """How busy the others kept the card, mean over these readings; 0 where nothing tells."""
    told = [sample.values["other_busy_share"] for sample in shared if "other_busy_share" in sample.values]
    return fmean(told) if told else 0.0


def _busy_for_others(case: Case, readings: Sequence[Sample]) -> float | None:
    """The share of readings at work among those in which the engine ran nothing, by its own page on either side."""
    idle = []
    for reading in readings:
        around = [series.window(reading.t_mono_ns, reading.t_mono_ns) for series in case.evidence.engines.values()]
        running = [value for series in around for value in series.values("running")]
        if running and max(running) == 0 and "gpu_busy_share" in reading.values:
            idle.append(reading)
    return sum(map(_is_busy, idle)) / len(idle) if len(idle) >= READINGS_LEAST else None


def _middles(samples: Sequence[Sample], signals: Sequence[str]) -> list[Fact]:
    return periods.medians(samples, signals)
