"""What a run says: the paths, their differences, whether they compare, the verdict (``tapproxy.comparison/1``).

Puts together what ``summary``, ``differences``, ``comparability``, ``conclusion`` and ``earlier`` find. Rules here:
differences of a run that does not compare, or whose client was saturated, are shown and never called significant.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from tapproxy.core.sample import taken
from tapproxy.load import earlier, summary
from tapproxy.load.arms import COMPARED, IN_BLOCKS, Arm, arms, split, start_of
from tapproxy.load.comparability import between_arms
from tapproxy.load.conclusion import EXIT_CODES, conclude
from tapproxy.load.differences import DECIDES, PERCENTILES, Differences, decide, differences, shown
from tapproxy.load.sender import Result
from tapproxy.load.slo import Slo
from tapproxy.load.trial import Trial

SCHEMA: Final = "tapproxy.comparison/1"


@dataclass(frozen=True, slots=True)
class Comparison:
    """A judged run. ``verdict``: the contract's object."""

    trial: Trial
    paths: dict[str, dict[str, Any]]
    differences: dict[str, Differences]
    floor: Differences | None
    incomparable_because: list[str]
    verdict: dict[str, Any]
    slo: Slo | None = None
    # Beside an earlier run; see ``load.earlier``.
    baseline: dict[str, Any] | None = None

    @property
    def comparable(self) -> bool:
        """Whether nothing stands against comparing."""
        return not self.incomparable_because

    @property
    def exit_code(self) -> int:
        """0 healthy, 1 degraded or not comparable, 3 could not be measured."""
        return EXIT_CODES[self.verdict["verdict"]]

    @property
    def floor_ms(self) -> float | None:
        """What the baseline shows against itself at the P50 of TTFT; None without ``--floor``."""
        if self.floor is None:
            return None
        interval = self.floor[DECIDES[0]][DECIDES[1]].ci95_ms
        return None if interval is None else max(abs(end) for end in interval)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of the contract."""
        trial = self.trial
        asked = asdict(trial.asked)
        return {
            "schema": SCHEMA,
            "run": trial.id,
            "started_unix_ns": trial.started_unix_ns,
            "scenario": {"name": str(trial.asked.scenario), **{**asked, "scenario": str(trial.asked.scenario)}},
            "paths": self.paths,
            "differences": {path: shown(found) for path, found in self.differences.items()},
            "floor_ms": self.floor_ms,
            "floor": None if self.floor is None else shown(self.floor),
            "comparable": self.comparable,
            "incomparable_because": list(self.incomparable_because),
            "verdict": self.verdict,
            "slo": None if self.slo is None else self.slo.to_dict(),
            "baseline": self.baseline,
            "client": asdict(trial.client),
            "interrupted": trial.interrupted,
            "notes": list(trial.notes),
            "environment": trial.environment,
            "sampled": taken(trial.samples),
        }


def judge(trial: Trial, slo: Slo | None = None, baseline: Trial | None = None) -> Comparison:
    """Judges a run. ``baseline``: an earlier run to hold it against, path by path of the same name."""
    found = arms(trial)
    in_blocks = trial.asked.scenario in IN_BLOCKS
    first, *others = found.values()
    tests = max(1, len(others)) * len(COMPARED) * len(PERCENTILES)
    drawn = {
        arm.name: differences(first, arm, in_blocks=in_blocks, seed=trial.asked.seed, tests=tests) for arm in others
    }
    floor = _floor(trial, in_blocks)
    reasons = between_arms(trial, found)
    decided = decide(drawn, floor, allowed=not reasons and not trial.client.saturated)
    beside = None if baseline is None else earlier.beside(trial, baseline, found, slo)
    if beside is not None:
        reasons = reasons + [f"against run {beside['run']}: {reason}" for reason in beside["incomparable_because"]]
    return Comparison(
        trial=trial,
        paths={name: summary.compared_object(arm, trial.asked.scenario, slo) for name, arm in found.items()},
        differences=decided,
        floor=floor,
        incomparable_because=reasons,
        verdict=conclude(trial, found, decided, reasons),
        slo=slo,
        baseline=beside,
    )


def _floor(trial: Trial, in_blocks: bool) -> Differences | None:
    """The baseline's URL against itself, under the same load."""
    if not trial.floor:
        return None
    found = split(trial.floor, ())
    if len(found) != 2:
        return None
    start = start_of(trial.asked.scenario, trial.floor)
    one, other = (Arm(name, results, start) for name, results in found.items())
    return differences(one, other, in_blocks=in_blocks, seed=trial.asked.seed)


def summarise(
    results: Iterable[Result], *, holds_ns: Mapping[str, Sequence[int] | None] | None = None
) -> dict[str, dict[str, Any]]:
    """One object for each path, in the order the paths first appear in the plan; latency is from the sending.

    ``holds_ns``: per path the hold of every event, where a tap behind the hop let it be paired.
    """
    return summary.summarise(split(results, ()), holds_ns)
