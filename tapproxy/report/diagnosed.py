"""What a diagnosis tells beside the verdict, as blocks of text that the screen and the page both print.

Rules here: nothing is computed; every string that somebody else wrote is made harmless here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tapproxy.report.console import clean
from tapproxy.report.figures import at, milliseconds, number, percentage, quantity, share

# Of the signals that one flag turns on.
_SIGNALS_MOST: Final = 6
_SLICES: Final = {
    "prompt_tokens": "tokens of the prompt",
    "output_tokens": "tokens of the answer",
    "mode": "mode",
    "model": "model",
    "path": "path",
}
# State of a limit → (sign, tone, word).
_STATES: Final = {
    "met": ("✓", "good", "met"),
    "missed": ("✗", "bad", "missed"),
    "too_few": ("?", "unsure", "too few to say"),
}
_GAUGES: Final = {"running": "running", "waiting": "waiting", "kv_usage_share": "KV"}
_NOW: Final = {
    "running": ("running", ""),
    "waiting": ("waiting", ""),
    "kv_usage_share": ("KV cache", "share"),
    "preemptions": ("preemptions", ""),
    "finished": ("finished", ""),
    "ttft_s": ("TTFT", "s"),
    "queue_s": ("queue", "s"),
    "prefill_s": ("prefill", "s"),
    "tpot_s": ("TPOT", "s"),
}


@dataclass(frozen=True, slots=True)
class Line:
    """A sentence; ``tone``: good, bad, unsure or nothing."""

    text: str
    tone: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """A row's name and figures. ``over``: it stands over all columns. ``bar``: 0 to 1, where there is one."""

    name: str
    cells: tuple[str, ...] = ()
    over: str = ""
    bar: float | None = None


@dataclass(slots=True)
class Block:
    """A title with sentences, or with a table under ``heads``."""

    title: str
    note: str = ""
    lines: list[Line] = field(default_factory=list)
    heads: tuple[str, ...] = ()
    rows: list[Row] = field(default_factory=list)


def tables(result: Mapping[str, Any]) -> list[Block]:
    """The blocks that have something to say, in their order."""
    blocks = (
        _objectives(result),
        _slices(result),
        Block("Growth with length", lines=[Line(clean(f["says"])) for f in (at(result, "fits") or {}).values() if f]),
        _timeline(result),
        _engine_now(result),
        Block("The proxy's own log", lines=[Line(text) for text in _witness(result)]),
        Block("What stood beside the records", lines=[Line(text) for text in _evidence(result)]),
        Block("What the taps changed", lines=[Line(text) for text in _presence(result)]),
    )
    return [block for block in blocks if block.lines or block.rows]


def _objectives(result: Mapping[str, Any]) -> Block:
    """Each limit of each objective, with the counts that decide it."""
    block = Block("Objectives")
    for entry in at(result, "slo") or []:
        for limit in entry.get("limits") or []:
            sign, tone, word = _STATES.get(str(limit.get("state")), _STATES["too_few"])
            text = (
                f"{sign} {word}  {clean(entry.get('for', ''))}: {clean(limit.get('metric', '')).upper()} within "
                f"{milliseconds(limit.get('limit_ms'))} for {percentage(limit.get('share'))} of requests: it was for "
                f"{percentage(limit.get('within_share'))} "
                f"(n={quantity(limit.get('n'), None)}, {quantity(limit.get('over'), None)} over)"
            )
            text += f"; {limit['need']} more within it would show it" if limit.get("need") else ""
            text += f"; without a number: {limit['unknown']}" if limit.get("unknown") else ""
            block.lines.append(Line(text, tone))
        if entry.get("unsorted"):
            block.lines.append(Line(f"without a token count, and so in no length class: {entry['unsorted']}"))
    return block


def _slices(result: Mapping[str, Any]) -> Block:
    """The same metrics for parts of the requests."""
    heads = ("", "n", "failed", "TTFT P50", "P95", "TPOT P50", "P95", "E2E P50", "P95")
    block = Block("By kind of request", "in ms; a dash: too few requests for it, or no usage to count by", heads=heads)
    for dimension, classes in (at(result, "slices") or {}).items():
        title = _SLICES.get(dimension, clean(dimension))
        block.rows.append(Row(title, over=title))
        for entry in classes:
            figures = [number(at(entry, key, p)) for key in ("ttft_ms", "tpot_ms", "e2e_ms") for p in ("p50", "p95")]
            counts = (quantity(entry.get("n"), None), quantity(entry.get("failed"), None))
            block.rows.append(Row(clean(entry.get("class", "")), (*counts, *figures)))
    return block


def _timeline(result: Mapping[str, Any]) -> Block:
    """Bins and marks in one table, in time order."""
    found = at(result, "timeline")
    if not found:
        return Block("Over time")
    bins, marks = found["bins"], list(found["marks"])
    gauges = [name for name in _GAUGES if any(each.get(name) is not None for each in bins)]
    day = len({each["from"][:10] for each in bins}) > 1
    heads = ("from (UTC)", "requests/s", "failed", "TTFT P50", "P95", "TPOT P50", *(_GAUGES[name] for name in gauges))
    note = f"a line each {found['bin_s']} s, in ms; what changed stands between"
    block = Block("Over time", note, heads=heads)
    middles = [at(each, "ttft_ms", "p50") for each in bins]
    most = max((ms for ms in middles if ms is not None), default=0) or 1
    for each, middle in zip(bins, middles, strict=True):
        while marks and marks[0]["t_unix_ns"] <= each["t_unix_ns"]:
            block.rows.append(_mark(marks.pop(0), day))
        cells = (
            number(each["rate_per_s"]),
            quantity(each["failed"], None) if each["failed"] else "",
            number(middle),
            number(at(each, "ttft_ms", "p95")),
            number(at(each, "tpot_ms", "p50")),
            *(share(each[name]) if name.endswith("_share") else number(each[name]) for name in gauges),
        )
        block.rows.append(Row(_clock(each["from"], day), cells, bar=(middle or 0) / most))
    block.rows += [_mark(mark, day) for mark in marks]
    return block


def _clock(iso: str, day: bool) -> str:
    return clean(iso if day else iso[11:].rstrip("Z"))


def _mark(mark: Mapping[str, Any], day: bool) -> Row:
    at_time = _clock(mark["at"], day)
    return Row(at_time, over=f"→ {at_time} {clean(mark['kind'])}: {clean(mark['what'])}")


def _engine_now(result: Mapping[str, Any]) -> Block:
    """Pages that were read by this command: of now, and so beside the verdict."""
    note = "of now and not of then: no cause rests on it (serve --engine-metrics samples while requests run)"
    block = Block("The engine as it is now", note)
    for page in at(result, "engine_now") or []:
        values = page.get("values") or {}
        shown = [
            f"{title} {milliseconds(1000 * values[name]) if unit == 's' else quantity(values[name], unit)}"
            for name, (title, unit) in _NOW.items()
            if name in values
        ]
        name = _engine_name(page.get("facts") or {})
        block.lines.append(Line(f"{name} at {clean(page.get('source', ''))}: {', '.join(shown) or 'it tells nothing'}"))
    return block


def _engine_name(facts: Mapping[str, Any]) -> str:
    return clean(" ".join(str(facts[name]) for name in ("engine", "version") if facts.get(name)) or "engine unknown")


def _evidence(result: Mapping[str, Any]) -> Iterator[str]:
    """What was read beside the records, and what of it is turned off."""
    found = at(result, "evidence") or {}
    for source, page in (found.get("engines") or {}).items():
        # Of failures that last, not every one is kept: their number would mislead.
        failed = ", and readings that failed" if page.get("failed") else ""
        yield f"{_engine_name(page)} at {clean(source)}: {_readings(page.get('readings'))}{failed}"
        ways: dict[str, list[str]] = {}
        for signal, way in (page.get("absent") or {}).items():
            ways.setdefault(clean(way), []).append(clean(signal))
        for way, signals in ways.items():
            more = " …" if len(signals) > _SIGNALS_MOST else ""
            yield f"{', '.join(signals[:_SIGNALS_MOST])}{more}: {way}"
    for kind in ("hosts", "gpus"):
        for source, count in (found.get(kind) or {}).items():
            yield f"{clean(source)}: {_readings(count)}"
    if found.get("spans"):
        yield f"spans: {quantity(found['spans'], None)}"


def _witness(result: Mapping[str, Any]) -> Iterator[str]:
    """What the log of the proxy adds, and whether it agrees with the taps."""
    found = at(result, "witness")
    if not found:
        return
    by = ", ".join(f"{quantity(count, None)} by {clean(key)}" for key, count in (found.get("by") or {}).items())
    yield (
        f"{quantity(found.get('joined'), None)} of {quantity(found.get('rows'), None)} lines are of these requests"
        f"{f' ({by})' if by else ''}; ambiguous: {quantity(found.get('ambiguous'), None)}"
    )
    for key, title in _WITNESSED.items():
        if found.get(key) is not None:
            yield f"{title}: {milliseconds(found[key])} at P50"
    if found.get("retried"):
        yield f"tried more than one upstream: {quantity(found['retried'], None)}"
    for each in found.get("agreements") or []:
        if each.get("n"):
            yield (
                f"{clean(each.get('what', ''))}: tap − log {milliseconds(each.get('difference_ms'), signed=True)} "
                f"± {milliseconds(each.get('bound_ms'))} at P50; n={quantity(each.get('n'), None)}, "
                f"{quantity(each.get('disagree'), None)} beyond that"
            )


_WITNESSED: Final = {
    "connect_ms": "connecting to an upstream",
    "header_ms": "until the upstream's head",
    "around_ms": "in the proxy beside its upstreams",
    "retry_ms": "spent on upstreams that failed",
}


def _readings(count: int | None) -> str:
    return f"{quantity(count, None)} reading{'' if count == 1 else 's'}"


def _presence(result: Mapping[str, Any]) -> Iterator[str]:
    for item in at(result, "presence") or []:
        of = quantity(item.get("requests"), None)
        yield f"{clean(item.get('tap', ''))}: {clean(item.get('what', ''))} (n={of})"
