"""What changed between two kept runs: in the settings, and in the numbers.

Rules here: a setting that one of the two does not know is no change, and is said apart. What changed alike on several
paths is one change; what the engine reports otherwise after its flags or its version changed follows from that. With
more than one change nobody can tell which of them did it, and that is said aloud.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

SCHEMA: Final = "tapproxy.rundiff/1"
PERCENTILES: Final = ("p50", "p90", "p95", "p99")
LATENCIES: Final = ("ttft_ms", "ttfvt_ms", "tpot_ms", "icl_ms", "itl_ms", "e2e_ms")
_DIGEST: Final = "prompts (digest)"
_PROMPTS_FROM: Final = frozenset(
    ("seed", "prompts", "requests", "duration_s", "warmup", "rate", "concurrency", "scenario")
)
_FLAGS: Final = "engine.flags."
_REPORTED: Final = "engine.settings."
# A path's own fact → the environment's name of the same.
_SAME: Final = {"engine_version": "engine.version", "engine": "engine.name"}
_SINGLE: Final = ("output_tokens_per_s", "goodput", "attainment")
# Facts of a path that are outcomes of the run and no settings of it.
_OUTCOMES: Final = frozenset(("prefix_cache_hits", "prefix_cache_queries", "cold_ttft_ns"))


class Run(Protocol):
    """What is needed of ``runs.Kept``."""

    @property
    def id(self) -> str: ...
    @property
    def version(self) -> str | None: ...
    @property
    def asked(self) -> dict[str, Any]: ...
    @property
    def paths(self) -> dict[str, Any]: ...
    @property
    def prompts_digest(self) -> str | None: ...
    @property
    def environment(self) -> dict[str, Any]: ...
    @property
    def comparison(self) -> dict[str, Any]: ...


def diff(one: Run, other: Run) -> dict[str, Any]:
    """The object that `runs diff` writes."""
    found = settings(one, other)
    return {
        "schema": SCHEMA,
        "a": one.id,
        "b": other.id,
        "settings": found.changed,
        "known_in_one_only": found.unknown,
        "may_follow": found.following,
        "said": said(found.changed),
        "numbers": {name: numbers(one, other, name) for name in _paths(one) if name in _paths(other)},
        "paths_in_a_only": [name for name in _paths(one) if name not in _paths(other)],
        "paths_in_b_only": [name for name in _paths(other) if name not in _paths(one)],
    }


def said(changed: list[dict[str, Any]]) -> str:
    """What the number of changes means."""
    if not changed:
        return "no setting that is known changed: what differs in the numbers is the runs' own spread, or unknown"
    names = ", ".join(each["setting"] for each in changed)
    if len(changed) == 1:
        return f"one setting changed: {names}"
    return f"{len(changed)} settings changed ({names}): which of them did it cannot be told; change one thing at a time"


@dataclass(slots=True)
class Settings:
    """Each a list of ``{"setting", "paths", "a", "b"}``.

    ``unknown``: known of one run only. ``following``: what may have come of a change that is counted.
    """

    changed: list[dict[str, Any]]
    unknown: list[dict[str, Any]]
    following: list[dict[str, Any]]


def settings(one: Run, other: Run) -> Settings:
    """What was set otherwise in ``other``."""
    before, after = dict(_settings(one)), dict(_settings(other))
    shared = set(_paths(one)) & set(_paths(other))
    changed: dict[tuple[str, str, str], dict[str, Any]] = {}
    unknown: list[dict[str, Any]] = []
    for key in dict.fromkeys((*before, *after)):
        path, setting = key
        if path is not None and path not in shared:
            continue  # the path itself came or went, which is said by its name
        a, b = before.get(key), after.get(key)
        if a == b:
            continue
        # A flag that was not given is known not to have been, where the other flags are known.
        # Of what was asked None is "not set", which is known.
        known = key[0] is None and setting.partition(".")[0] in one.asked.keys() & other.asked.keys()
        if (a is None or b is None) and not known and not _is_flag(setting, before if a is None else after, path):
            unknown.append({"setting": setting, "paths": [path] if path else [], "a": a, "b": b})
            continue
        entry = changed.setdefault((setting, repr(a), repr(b)), {"setting": setting, "paths": [], "a": a, "b": b})
        if path is not None:
            entry["paths"].append(path)
    return _sorted(list(changed.values()), unknown)


def _sorted(changed: list[dict[str, Any]], unknown: list[dict[str, Any]]) -> Settings:
    causes = [each for each in changed if each["setting"].startswith((_FLAGS, "engine.version"))]
    reasons = {path for each in causes for path in each["paths"]}
    # The engine may be reached over several paths, and its process seen behind one of them only.
    follow = [each for each in changed if each["setting"].startswith(_REPORTED) and reasons]
    # Other prompts come of another seed, number or source, where one of those changed.
    if any(each["setting"] in _PROMPTS_FROM for each in changed):
        follow += [each for each in changed if each["setting"] == _DIGEST]
    return Settings(
        [each for each in changed if each not in follow],
        [each for each in unknown if not (reasons and each["setting"].startswith(_REPORTED))],
        follow,
    )


def _is_flag(setting: str, known: Mapping[tuple[str | None, str], Any], path: str | None) -> bool:
    return setting.startswith(_FLAGS) and any(key[0] == path and key[1].startswith(_FLAGS) for key in known)


def _settings(run: Run) -> Iterator[tuple[tuple[str | None, str], Any]]:
    """((path or None, name), value) of everything that was set, and not measured."""
    yield (None, "tapproxy"), run.version
    for key, value in _flat(run.asked):
        yield (None, key), value
    yield (None, _DIGEST), run.prompts_digest
    for key, value in _flat({key: value for key, value in run.environment.items() if key != "paths"}):
        if key != "tapproxy":
            yield (None, key), value
    for name in _paths(run):
        facts = {key: value for key, value in run.paths[name].items() if key not in _OUTCOMES}
        around = run.environment.get("paths")
        seen = around.get(name) if isinstance(around, Mapping) else None
        found = {_SAME.get(key, key): value for key, value in _flat(facts)}
        found |= {key: value for key, value in _flat(seen or {}) if value is not None}
        if found.get("nginx.version") is not None:
            found.pop("server", None)  # says the same
        for key, value in found.items():
            yield (name, key), value


def _flat(value: Mapping[str, Any], head: str = "") -> Iterator[tuple[str, Any]]:
    for key, each in value.items():
        if isinstance(each, Mapping):
            yield from _flat(each, f"{head}{key}.")
        else:
            yield f"{head}{key}", each


def _paths(run: Run) -> list[str]:
    return [name for name, facts in run.paths.items() if isinstance(facts, Mapping)]


def numbers(one: Run, other: Run, path: str) -> dict[str, Any]:
    """Per metric and percentile ``{"a", "b", "change", "percent"}`` of one path; None where a run has none."""
    a, b = of_path(one, path), of_path(other, path)
    out: dict[str, Any] = {}
    for metric in LATENCIES:
        of_a, of_b = a.get(metric), b.get(metric)
        if isinstance(of_a, Mapping) and isinstance(of_b, Mapping):
            out[metric] = {each: change(of_a.get(each), of_b.get(each)) for each in PERCENTILES}
    for metric in _SINGLE:
        if metric in a or metric in b:
            out[metric] = change(a.get(metric), b.get(metric))
    out["requests"] = change(a.get("requests"), b.get("requests"))
    out["error_share"] = change(error_share(a), error_share(b))
    return out


def of_path(run: Run, path: str) -> Mapping[str, Any]:
    """What the run's comparison says of one path; empty where it says nothing."""
    paths = run.comparison.get("paths")
    found = paths.get(path) if isinstance(paths, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def failed(result: Mapping[str, Any]) -> int | None:
    """How many requests of a path's result failed."""
    errors = result.get("errors")
    counts = [each for each in errors.values() if isinstance(each, int)] if isinstance(errors, Mapping) else None
    return None if counts is None else sum(counts)


def error_share(result: Mapping[str, Any]) -> float | None:
    """Failed requests / requests."""
    asked, lost = result.get("requests"), failed(result)
    return lost / asked if isinstance(asked, int) and asked and lost is not None else None


def change(a: Any, b: Any) -> dict[str, float | None]:
    """From one number to another; the percentage is None where it would be of nothing."""
    if not isinstance(a, int | float) or not isinstance(b, int | float):
        known = [each if isinstance(each, int | float) else None for each in (a, b)]
        return {"a": known[0], "b": known[1], "change": None, "percent": None}
    return {"a": a, "b": b, "change": b - a, "percent": 100 * (b - a) / a if a else None}
