"""An engine's metrics page → a Sample of kind ``engine``.

Rules here: what the page has under a name of the table is taken, summed over its label sets, and nothing is computed
from two values. Several engines behind one page (data parallel, several models) count together: requests, tokens and
seconds are summed, of the shares of the KV cache the greatest is taken; ``names`` says which was done. What is not on
the page is absent, with how to turn it on, and never 0. A page whose ``vllm:`` names are a router's is no engine's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import Final

from tapproxy.core.sample import ROUTER_NAME, Sample, SampleKind
from tapproxy.evidence import exposition, versions
from tapproxy.evidence.exposition import Labels, Page
from tapproxy.evidence.names import (
    COPIES,
    ENGINES,
    HIDDEN,
    MARKERS,
    MISSING,
    MODELS,
    ROUTER,
    ROWS,
    SIGNALS_OF_ENGINES,
    WANTED,
    Engine,
    Fold,
    Row,
)

_ROUTER_ABSENT: Final = (
    "absent: a router answers here under vLLM's names; give the engine's own page to --engine-metrics"
)
_ROUTER_LABEL: Final = "server"
_ENGINE_LABELS: Final = ("engine", "model_name")
_FOLDS: Final[Mapping[Fold, Callable[[Sequence[float]], float]]] = {
    Fold.SUM: sum,
    Fold.MAX: max,
    Fold.MIN: min,
    Fold.MEAN: fmean,
}
# Names and models come from the page, which is not ours.
_MOST_TEXT: Final = 200
_MOST_MODELS: Final = 4

Series = Mapping[str, Mapping[Labels, float]]


def read(
    text: bytes, source: str, t_mono_ns: int, t_unix_ns: int, *, told: str | None = None, whole: bool = True
) -> Sample:
    """The sample of one page as it came.

    ``told``: the version, where the engine says it elsewhere. ``whole``: the page is known to have come to its end.
    """
    sample = Sample(SampleKind.ENGINE, source, t_mono_ns, t_unix_ns)
    page = exposition.read(text, WANTED, whole=whole)
    if page.problem is not None:
        sample.problem = page.problem
        return sample
    series, routed = _without_router(page)
    found = _engines(series)
    if not found:
        if routed:
            sample.facts["engine"] = ROUTER_NAME
            sample.absent = dict.fromkeys(SIGNALS_OF_ENGINES, _ROUTER_ABSENT)
        else:
            sample.problem = _unknown(page)
        return sample
    engine = found[0]
    complete = not _any_begins(series, ("ray_",))
    version = versions.guess(engine, _plain(series), told, complete=complete)
    sample.facts = _facts(found, series, version, told)
    rows = [row for each in found for row in ROWS if row.engine is each]
    for signal in SIGNALS_OF_ENGINES:
        _take(sample, signal, [row for row in rows if row.signal == signal], series)
        if signal not in sample.names:
            sample.absent[signal] = "absent: " + _why_absent(engine, signal, version, page)
    return sample


def _without_router(page: Page) -> tuple[Series, bool]:
    """The series that are not a router's, and whether any were."""
    kept: dict[str, dict[Labels, float]] = {}
    routed = False
    for name, series in page.series.items():
        if name in ROUTER:
            routed = True
            continue
        own = {labels: value for labels, value in series.items() if not (name.startswith("vllm:") and _routers(labels))}
        routed = routed or len(own) < len(series)
        if own:
            kept[name] = own
    return kept, routed


def _routers(labels: Labels) -> bool:
    names = {name for name, _ in labels}
    return _ROUTER_LABEL in names and not names.intersection(_ENGINE_LABELS)


def _engines(series: Series) -> list[Engine]:
    """Whose names are there: the engine itself first, then servers around it."""
    found = [engine for engine, about in ENGINES.items() if about.begins and _any_begins(series, about.begins)]
    # Names without a prefix are anybody's, where another engine is there.
    return found or [engine for engine, about in ENGINES.items() if any(mark in series for mark in about.marks)]


def _any_begins(series: Series, begins: tuple[str, ...]) -> bool:
    return any(name.startswith(begins) for name in series)


def _unknown(page: Page) -> str:
    names = list(page.series) or page.others
    some = f" (its names are such as {', '.join(names[:3])})" if names else ""
    known = ", ".join(ENGINES)
    return f"the page has no name of an engine that is known here{some}: expected the metrics page of {known}"


def _plain(series: Series) -> frozenset[str]:
    """The names as an engine outside Ray has them."""
    markers = {marker.name.replace("vllm:", "ray_vllm_"): marker.name for marker in MARKERS}
    return frozenset(
        markers.get(name, "vllm:" + name.removeprefix("ray_vllm_") if name.startswith("ray_vllm_") else name)
        for name in series
    )


def _facts(found: Sequence[Engine], series: Series, version: versions.Range, told: str | None) -> dict[str, str]:
    engine = found[0]
    facts = {"engine": str(engine)}
    text = told[:_MOST_TEXT] if told else str(version)
    if text != "unknown":
        facts |= {"version": text, "version_from": "the engine" if told else "its metric names"}
    if len(found) > 1:
        facts["within"] = ", ".join(found[1:])
    elif engine is Engine.VLLM and _any_begins(series, ("ray_vllm_",)):
        facts["within"] = str(Engine.RAY_SERVE)
    own = [labels for name, each in series.items() if name.startswith(ENGINES[engine].begins or "") for labels in each]
    models = sorted({value for labels in own for name, value in labels if name in MODELS and value})
    if models:
        facts["model"] = ", ".join(models[:_MOST_MODELS])[:_MOST_TEXT]
    if engine is Engine.VLLM:
        facts["generation"] = "V1" if any(name == "engine" for labels in own for name, _ in labels) else "V0"
    facts["ttft_from"] = versions.ttft_from(engine, version)
    facts |= _cache_facts(series)
    return facts


def _cache_facts(series: Series) -> dict[str, str]:
    """What vLLM tells of its cache's settings, as labels."""
    for name in ("vllm:cache_config_info", "ray_vllm_cache_config_info", "vllm:cache_config"):
        for labels in series.get(name, {}):
            told = dict(labels)
            wanted = (("prefix_caching", "enable_prefix_caching"), ("kv_dtype", "cache_dtype"))
            return {fact: told[label][:_MOST_TEXT] for fact, label in wanted if told.get(label, "None") != "None"}
    return {}


def _take(sample: Sample, signal: str, rows: Sequence[Row], series: Series) -> None:
    """The first row whose every part is there."""
    for row in rows:
        values: dict[str, float] = {}
        read_as = ""
        for suffix, names, factor in row.parts():
            name = next((name for name in names if name in series), None)
            part = [] if name is None else _values(row, series[name])
            if name is None or not part:
                break
            values[f"{signal}{suffix}"] = _FOLDS[row.fold](part) * factor
            read_as = read_as or _shown(row, name, suffix, len(part))
        else:
            if row.least is None or min(values.values()) >= row.least:
                sample.values |= values
                sample.names[signal] = read_as
                return


def _shown(row: Row, name: str, suffix: str, sets: int) -> str:
    shown = row.name if suffix and row.count is None else name
    if row.label is not None:
        shown += f" (label {row.label})"
    return shown if sets == 1 else f"{shown} ({row.fold} of {sets})"


def _values(row: Row, series: Mapping[Labels, float]) -> list[float]:
    """One value for each label set that counts for itself."""
    apart: dict[Labels, float] = {}
    for labels, value in series.items():
        told = dict(labels)
        if not _fits(row, told):
            continue
        number = value if row.label is None else _number(told.get(row.label))
        if number is None:
            continue
        key = tuple((name, text) for name, text in labels if name not in COPIES)
        # Copies of one thing hardly differ; where they were read at different moments the later one is further on.
        apart[key] = (
            max(apart.get(key, number), number) if row.fold is not Fold.MIN else min(apart.get(key, number), number)
        )
    return list(apart.values())


def _fits(row: Row, labels: Mapping[str, str]) -> bool:
    only = all(labels.get(name) in values for name, values in (row.only or {}).items())
    return only and not any(labels.get(name) in values for name, values in (row.but or {}).items())


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _why_absent(engine: Engine, signal: str, version: versions.Range, page: Page) -> str:
    own = [row for row in ROWS if row.engine is engine and row.signal == signal and not row.name.startswith("ray_")]
    own = own or [row for row in ROWS if row.engine is engine and row.signal == signal]
    broken = next((name for row in own for name in _names(row) if name in page.not_finite), None)
    if broken is not None:
        return f"{broken} is there and is not a number"
    for name, hidden_in, first, last, flag in HIDDEN:
        low, high = versions.parse(first), versions.parse(last)
        if (name, hidden_in) == (engine, signal) and low and high and version.least and low <= version.least <= high:
            return flag
    given = MISSING.get((engine, signal))
    if not own:
        return given or f"{engine} has no such metric"
    starts = [versions.parse(row.since) for row in own]
    first_of_all = None if None in starts else min(start for start in starts if start is not None)
    if first_of_all is not None and version.before(first_of_all):
        return f"{engine} has it from {'.'.join(map(str, first_of_all))} on"
    ends = [versions.parse(row.until) for row in own]
    last_of_all = None if None in ends else max(end for end in ends if end is not None)
    if last_of_all is not None and version.least is not None and version.least > last_of_all:
        return f"{engine} has had no such metric since {'.'.join(map(str, last_of_all))}"
    return given or ENGINES[engine].default


def _names(row: Row) -> Iterator[str]:
    for _, names, _ in row.parts():
        yield from names
