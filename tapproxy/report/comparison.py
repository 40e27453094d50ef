"""A comparison as lines of text, a hundred columns at most: paths, differences, what stands against them, the verdict.

Takes the ``tapproxy.comparison/1`` object and says what is there. Rules here: nothing is computed; unknown is a dash;
a sign is explained on the screen it stands on; what engines and headers wrote has its control characters taken out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Protocol

from tapproxy.report.console import clean
from tapproxy.report.figures import UNKNOWN, at, milliseconds, number, quantity, share, wanted

WIDTH: Final = 100
_NAME: Final = 14
# Heading, the key of its summary, the percentile; each in a column of ``_FIGURE``.
_COLUMNS: Final = (
    ("TTFT", "ttft_ms", "p50"),
    ("TTFT", "ttft_ms", "p95"),
    ("TTFT", "ttft_ms", "p99"),
    ("TPOT", "tpot_ms", "p50"),
    ("ICL", "icl_ms", "p50"),
    ("ICL", "icl_ms", "p99"),
    ("E2E", "e2e_ms", "p50"),
    ("E2E", "e2e_ms", "p95"),
)
_FIGURE: Final = 8
_COMPARED: Final = (
    ("TTFT", "ttft_ms"),
    ("TTFVT", "ttfvt_ms"),
    ("ICL", "icl_ms"),
    ("TPOT", "tpot_ms"),
    ("E2E", "e2e_ms"),
)
_PERCENTILES: Final = ("p50", "p90", "p95", "p99")
_CELL: Final = 23
# Facts of a cause on the screen; the JSON has all of them.
_MOST_FACTS: Final = 4


class HasDict(Protocol):
    """What ``load.compare.judge`` returns, as far as it is needed here."""

    def to_dict(self) -> dict[str, Any]: ...


def lines(comparison: HasDict | Mapping[str, Any]) -> list[str]:
    """The whole screen, without colour."""
    result = comparison if isinstance(comparison, Mapping) else comparison.to_dict()
    blocks = (
        _title(result),
        _paths(result),
        _sampled(result),
        _differences(result),
        _objectives(result),
        _earlier(result),
        _against(result),
        _verdict(result),
        _notes(result),
    )
    out: list[str] = []
    for block in blocks:
        found = list(block)
        if found:
            out += ["", *found] if out else found
    return out


def _title(result: Mapping[str, Any]) -> Iterator[str]:
    scenario = at(result, "scenario") or {}
    words = [f"tapproxy compare · {clean(scenario.get('name', ''))}"]
    words += [
        f"{label} {quantity(scenario[key], unit)}"
        for label, key, unit in (
            ("at", "rate", "requests/s"),
            ("with", "concurrency", "at once"),
            ("for", "duration_s", "s"),
        )
        if scenario.get(key) is not None
    ]
    if at(result, "run"):
        words.append(f"run {clean(result['run'])}")
    yield from _wrapped(", ".join(words))


def _paths(result: Mapping[str, Any]) -> Iterator[str]:
    paths = at(result, "paths") or {}
    if not paths:
        return
    over = "in ms".ljust(_NAME) + "requests".rjust(9) + "failed".rjust(7)
    under = "path".ljust(_NAME) + "".rjust(16)
    last = None
    for title, _, percentile in _COLUMNS:
        over += (title if title != last else "").rjust(_FIGURE)
        under += percentile.upper().rjust(_FIGURE)
        last = title
    yield (over + "tok/s".rjust(6)).rstrip()
    yield under.rstrip()
    for name, path in paths.items():
        failed = sum((at(path, "errors") or {}).values())
        line = _fit(name, _NAME) + quantity(at(path, "requests"), None).rjust(9) + quantity(failed, None).rjust(7)
        for _, key, percentile in _COLUMNS:
            line += number(at(path, key, percentile)).rjust(_FIGURE)
        rate = at(path, "output_tokens_per_s")
        yield line + ("–" if rate is None else f"{rate:.0f}").rjust(6)
    if any(at(path, "latency_from") == "scheduled" for path in paths.values()):
        yield "TTFT and E2E from the scheduled time; from the sending:"
        for name, path in paths.items():
            sent = at(path, "from_sent") or {}
            yield (
                f"  {_fit(name, _NAME)} TTFT P50 {milliseconds(at(sent, 'ttft_ms', 'p50'))}, "
                f"E2E P50 {milliseconds(at(sent, 'e2e_ms', 'p50'))}, "
                f"sent late P50 {milliseconds(at(path, 'late_ms', 'p50'))}"
            )
    for name, path in paths.items():
        connect = at(path, "connect_ms") or {}
        if any(connect.get(key) is not None for key in ("dns", "tcp", "tls")):
            parts = [f"{key.upper()} {milliseconds(connect.get(key))}" for key in ("dns", "tcp", "tls")]
            yield f"{_fit(name, _NAME)} {', '.join(parts)}; reused {share(connect.get('reused_share'))}"


def _sampled(result: Mapping[str, Any]) -> Iterator[str]:
    """Whose pages were read meanwhile."""
    for page in at(result, "sampled") or ():
        if page.get("samples"):
            whose = " ".join(clean(page[key]) for key in ("engine", "version") if page.get(key))
            said = f"sampled {clean(page['source'])}: {page['samples']} readings of {whose or page['kind']}"
            yield from _wrapped(said)


def _differences(result: Mapping[str, Any]) -> Iterator[str]:
    found = at(result, "differences") or {}
    base = next(iter(at(result, "paths") or {}), "")
    signs = False
    for name, metrics in found.items():
        yield f"{_fit(name, 30).rstrip()} less {_fit(base, 30).rstrip()}, in ms [95 % interval]"
        yield ("".ljust(6) + "".join(percentile.upper().rjust(_CELL) for percentile in _PERCENTILES)).rstrip()
        for title, key in _COMPARED:
            cells = [_cell(at(metrics, key, percentile)) for percentile in _PERCENTILES]
            signs = signs or any(cell.endswith("*") for cell in cells)
            if any(cell.strip() != UNKNOWN for cell in cells):
                yield (title.ljust(6) + "".join(cell.rjust(_CELL) for cell in cells)).rstrip()
    if not found:
        return
    if signs:
        yield from _wrapped(
            "* a difference: P50 of TTFT decides by itself, the rest is corrected for its number (Holm)"
        )
    else:
        yield "none of these is called a difference"
    if at(result, "floor_ms") is not None:
        yield f"floor (baseline against itself, P50 of TTFT): {milliseconds(result['floor_ms'])}"


def _cell(each: Mapping[str, Any] | None) -> str:
    if each is None or each.get("difference") is None:
        return UNKNOWN + "  "
    interval = each.get("ci95")
    ends = "" if interval is None else f" [{number(interval[0])}, {number(interval[1])}]"
    return f"{number(each['difference'], signed=True)}{ends}" + (" *" if each.get("significant") else "  ")


def _objectives(result: Mapping[str, Any]) -> Iterator[str]:
    asked = at(result, "slo")
    if not asked:
        return
    limits = ", ".join(f"{metric.upper()} ≤ {milliseconds(each.get('limit_ms'))}" for metric, each in asked.items())
    yield from _wrapped(f"objectives: {limits}")
    for name, path in (at(result, "paths") or {}).items():
        goodput = at(path, "goodput")
        yield (
            f"  {_fit(name, _NAME)} attainment {share(at(path, 'attainment'))}, "
            f"goodput {quantity(goodput, 'requests/s')}"
        )
        for metric, shown in (at(path, "early_stopping", "server") or {}).items():
            yield from _wrapped(f"    {_shown(metric, shown)}")


def _shown(metric: str, shown: Mapping[str, Any]) -> str:
    head = (
        f"{metric.upper()} {shown['percentile']} ≤ {milliseconds(shown['target_ms'])}: "
        f"{quantity(shown.get('over'), None)} of {quantity(shown.get('n'), None)} over"
    )
    if shown.get("passes"):
        return head + ", shown (99 % sure)"
    need = shown.get("need")
    return head + (f", not shown: it takes {need} more within target" if need else ", not shown")


def _earlier(result: Mapping[str, Any]) -> Iterator[str]:
    beside = at(result, "baseline")
    if not beside:
        return
    yield f"against run {clean(beside.get('run', ''))}"
    for name, path in (beside.get("paths") or {}).items():
        yield from _wrapped(f"  {_fit(name, _NAME)} {clean(path.get('called', ''))}")


def _against(result: Mapping[str, Any]) -> Iterator[str]:
    reasons = at(result, "incomparable_because") or []
    if reasons:
        yield "these do not compare:"
    for reason in reasons:
        yield from _wrapped(f"  - {clean(reason)}", "    ")


def _verdict(result: Mapping[str, Any]) -> Iterator[str]:
    verdict = at(result, "verdict") or {}
    yield f"verdict: {clean(verdict.get('verdict', 'not_measured')).replace('_', ' ')}"
    for cause in verdict.get("causes") or []:
        where = f" on {clean(cause['path'])}" if cause.get("path") else ""
        effect = at(cause, "effect_ms", "p50")
        cost = (
            ""
            if effect is None
            else f": {clean(cause.get('metric') or '').upper()} {milliseconds(effect, signed=True)}"
        )
        yield from _wrapped(f"  {clean(cause.get('cause', ''))}{where}{cost}")
        if cause.get("cause") != "measurement.not_comparable":
            for fact in (cause.get("evidence") or [])[:_MOST_FACTS]:
                yield from _wrapped(f"    {_fact(fact)}", "      ")
        yield from _wrapped(f"    {clean(cause.get('advice') or '')}", "    ")


def _fact(fact: Mapping[str, Any]) -> str:
    if fact.get("value") is None:
        return clean(fact.get("what", ""))
    count = f" (n={quantity(fact['n'], None)})" if fact.get("n") is not None else ""
    return f"{clean(fact.get('what', ''))}: {quantity(fact['value'], clean(fact.get('unit') or ''))}{count}"


def _notes(result: Mapping[str, Any]) -> Iterator[str]:
    notes: Sequence[str] = [*(at(result, "notes") or []), *(at(result, "verdict", "trust", "warnings") or [])]
    for note in notes:
        yield from _wrapped(clean(note), "  ")
    paths = at(result, "paths") or {}
    for percentile in ("p95", "p99"):
        missing = [count for path in paths.values() if (count := wanted(at(path, "ttft_ms"), percentile))]
        if missing:
            more = max(missing)
            yield f"{UNKNOWN} under {percentile.upper()}: too few requests; {more} more on each path would give it"


def _fit(name: object, width: int) -> str:
    """A name in its column: one that is too long ends in an ellipsis."""
    text = clean(name)
    return (text if len(text) < width else text[: width - 2] + "…").ljust(width)


def _wrapped(text: str, indent: str | None = None) -> list[str]:
    lead = text[: len(text) - len(text.lstrip())]
    return (
        textwrap.wrap(text, WIDTH, subsequent_indent=lead + "  " if indent is None else indent, drop_whitespace=True)
        or []
    )
