"""The terminal text of the register: its list, one run, and what changed between two.

Rules here: nothing is computed; at most 100 columns; names that somebody chose are made harmless.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from tapproxy.report.console import clean

_WIDTH: Final = 100
_LATENCIES: Final = {"ttft_ms": "TTFT", "ttfvt_ms": "TTFVT", "tpot_ms": "TPOT", "icl_ms": "ICL", "e2e_ms": "E2E"}
_SINGLE: Final = {
    "output_tokens_per_s": "output tokens/s",
    "goodput": "goodput",
    "attainment": "attainment",
    "error_share": "error share",
    "requests": "requests",
}


def listing(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each run."""
    if not runs:
        return ["no runs are kept there: `tapproxy compare` keeps each one it makes"]
    width = max(24, *(len(run["id"]) for run in runs)) if runs else 24
    out = [f"{'run':<{width}}  {'began (UTC)':<19}  {'scenario':<13}  {'requests':>8}  {'verdict':<12}  paths"[:_WIDTH]]
    for run in runs:
        if run["problem"] is not None:
            out += _wrapped(f"{clean(run['id'])}  cannot be read: {clean(run['problem'])}")
            continue
        requests = "–" if run["requests"] is None else str(run["requests"])
        line = f"{clean(run['id']):<{width}}  {_when(run['started_unix_ns'])}  {clean(run['scenario'] or '–'):<13}  "
        line += f"{requests:>8}  {clean(run['verdict'] or '–'):<12}  "
        out.append((line + clean(", ".join(run["paths"])))[:_WIDTH].rstrip())
    return out


def one(run: Mapping[str, Any]) -> list[str]:
    """Everything that is known of one run but its single requests."""
    return list(_one(run))


def _one(run: Mapping[str, Any]) -> Iterator[str]:
    interrupted = "  (interrupted)" if run["interrupted"] else ""
    yield f"{clean(run['id'])}  {_when(run['started_unix_ns'])} UTC, tapproxy {clean(run['tapproxy'])}{interrupted}"
    yield ""
    yield "Asked"
    yield from _table(run["asked"])
    for name, facts in run["paths"].items():
        yield ""
        yield f"Path {clean(name)}"
        yield from _table(facts)
        around = run["environment"].get("paths")
        yield from _table(around.get(name) or {} if isinstance(around, Mapping) else {})
    rest = {key: value for key, value in run["environment"].items() if key != "paths"}
    if rest:
        yield ""
        yield "Environment"
        yield from _table(rest)
    paths = run["comparison"].get("paths")
    for name, result in paths.items() if isinstance(paths, Mapping) else ():
        yield ""
        yield f"Result of {clean(name)}"
        for key, title in _LATENCIES.items():
            if isinstance(result.get(key), Mapping):
                cells = "".join(f"  {p} {_number(result[key].get(p))}" for p in ("p50", "p90", "p95", "p99"))
                yield f"  {title:<16}{cells}  ms"
        for key, title in _SINGLE.items():
            if isinstance(result.get(key), int | float):
                yield f"  {title:<16}  {_number(result[key])}"
    for note in run["notes"]:
        yield from _wrapped(f"note: {clean(note)}")


def difference(diff: Mapping[str, Any]) -> list[str]:
    """What changed between two runs."""
    return list(_difference(diff))


def _difference(diff: Mapping[str, Any]) -> Iterator[str]:
    yield f"{clean(diff['a'])} → {clean(diff['b'])}"
    yield ""
    yield from _wrapped(clean(diff["said"]))
    for entry in diff["settings"]:
        of = f" ({', '.join(map(clean, entry['paths']))})" if entry["paths"] else ""
        yield from _wrapped(f"{clean(entry['setting'])}{of}: {_value(entry['a'])} → {_value(entry['b'])}", "  ")
    if diff["known_in_one_only"]:
        names = ", ".join(clean(entry["setting"]) for entry in diff["known_in_one_only"])
        yield from _wrapped(f"known of one of the two only, so it may have changed as well: {names}")
    if diff["may_follow"]:
        names = ", ".join(clean(entry["setting"]) for entry in diff["may_follow"])
        yield from _wrapped(f"different as well, which may follow from that: {names}")
    for side, key in (("first", "paths_in_a_only"), ("second", "paths_in_b_only")):
        if diff[key]:
            yield f"only in the {side}: {clean(', '.join(diff[key]))}"
    for name, numbers in diff["numbers"].items():
        yield ""
        yield f"Path {clean(name)}"
        yield f"  {'':<22}{'before':>12}{'after':>12}{'change':>12}"
        for metric, title in _LATENCIES.items():
            for percentile, change in numbers.get(metric, {}).items():
                if change["a"] is not None or change["b"] is not None:
                    yield _changed(f"{title} {percentile} (ms)", change)
        for metric, title in _SINGLE.items():
            change = numbers.get(metric)
            if change is not None and (change["a"] is not None or change["b"] is not None):
                yield _changed(title, change)


def _changed(title: str, change: Mapping[str, Any]) -> str:
    percent = "" if change["percent"] is None else f"  {change['percent']:+.1f} %"
    moved = "–" if change["change"] is None else f"{change['change']:+.2f}"
    return f"  {title:<22}{_number(change['a']):>12}{_number(change['b']):>12}{moved:>12}{percent}"


def _table(value: Mapping[str, Any], head: str = "") -> Iterator[str]:
    for key, each in value.items():
        if isinstance(each, Mapping):
            yield from _table(each, f"{head}{key}.")
        elif each not in (None, [], {}):
            yield from _wrapped(f"{clean(head + str(key)):<28} {_value(each)}", "  ", 31)


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_value, value)) or "none"
    return "unknown" if value is None else clean(value)


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return "–"
    return str(value) if isinstance(value, int) else f"{value:.2f}"


def _when(unix_ns: int) -> str:
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _wrapped(text: str, indent: str = "", hanging: int = 4) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=" " * hanging)
