"""A result as one HTML file that needs nothing else: no network, no other file, and no script to be read.

Same content as the terminal's screen, with every figure's formula and an interactive plot. Rules here: nothing is
computed; names, models, advice and all other text of a result are untrusted, so the template escapes everything
(autoescape, no ``safe``), the data of the plot is JSON in an inert block, and the page's own policy lets only the two
scripts run whose hashes it names, and nothing be loaded.
"""

from __future__ import annotations

import base64
import hashlib
import html
import os
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tapproxy.report import timeline
from tapproxy.report.console import clean
from tapproxy.report.definitions import DEFINITIONS, DIAGNOSED
from tapproxy.report.diagnosed import tables
from tapproxy.report.figures import at, milliseconds, number, quantity, share, wanted
from tapproxy.report.judgement import diff_lines, measured_again

# Requests of a path drawn in the plot beside the typical one: enough to see the spread, few enough to stay quick.
PLOTTED_REQUESTS = 12

_WORDS = {"healthy": ("✓", "healthy"), "degraded": ("✗", "degraded"), "not_measured": ("?", "not measured")}
_METRICS = (
    ("TTFT", "ttft_ms"),
    ("inter-chunk", "icl_ms"),
    ("end to end", "e2e_ms"),
    ("hold", "hold_ms"),
)
# By whether the proxy's part could not be seen.
_HEALTHY = {False: "Nothing on the way holds the stream", True: "Nothing that could be seen from here holds the stream"}
_BUDGETS = (("ttft", "TTFT"), ("tpot", "TPOT"))
_DASHES = ("solid", "dash", "solid", "dot", "dashdot", "longdash")


def write(result: Mapping[str, Any], path: Path) -> None:
    """Writes the page; a reader never sees half of it, and an interrupted write leaves nothing."""
    text = render(result)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def render(result: Mapping[str, Any]) -> str:
    """The page as text."""
    environment = Environment(
        loader=PackageLoader("tapproxy.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    scripts = {"plotly": _plotly(), "plot": _own("plot.js")}
    policy = "; ".join(
        (
            "default-src 'none'",
            "script-src " + " ".join(_hash(text) for text in scripts.values()),
            # plotly writes its own style rules; no text of a result stands in a style.
            "style-src 'unsafe-inline'",
            "img-src data: blob:",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    return environment.get_template("page.html").render(
        page=_page(result),
        plot=_plot(result),
        css=Markup(_own("page.css")),
        policy=policy,
        scripts={name: Markup(text) for name, text in scripts.items()},
    )


@cache
def _own(name: str) -> str:
    return files("tapproxy.report").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def _plotly() -> str:
    """plotly ships its script; taken as a file, since importing plotly's Python part costs a second."""
    text = files("plotly").joinpath("package_data", "plotly.min.js").read_text(encoding="utf-8")
    if "</script" in text.lower() or "<!--" in text:
        raise ValueError("this plotly.min.js cannot stand inside a script element")
    return text


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _page(result: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the template prints, as text already."""
    verdict = str(at(result, "verdict") or "not_measured")
    sign, word = _WORDS.get(verdict, _WORDS["not_measured"])
    scenario = at(result, "scenario") or {}
    budgets = _budgets(result)
    shown = {name for budget in budgets for name in budget["unseen"]}
    return {
        "title": f"tapproxy {clean(scenario.get('command', 'demo'))}: {clean(scenario.get('name', ''))}",
        "subtitle": clean(scenario.get("title", "")),
        "setting": [clean(line) for line in scenario.get("setting", [])],
        "verdict": {"key": verdict if verdict in _WORDS else "not_measured", "sign": sign, "word": word},
        "causes": [_cause(c) for key in ("causes", "worth_knowing") for c in at(result, key) or []],
        "paths": _paths(result),
        "strips": _strips(result),
        "budgets": budgets,
        "budget_path": clean(at(result, "budget_path") or ""),
        "not_observable": [stage for s in at(result, "not_observable") or [] if (stage := clean(s)) not in shown],
        "tap": _tap(at(result, "tap")),
        "notes": [clean(n) for n in (at(result, "notes") or []) + (at(result, "trust", "warnings") or [])],
        "environment": [
            (clean(k).replace("_", " "), clean(v))
            for k, v in (at(result, "environment") or {}).items()
            if v is not None
        ],
        "healthy": _HEALTHY["proxy" in (at(result, "not_observable") or [])],
        "tables": tables(result),
        "definitions": DIAGNOSED if scenario.get("command") == "diagnose" else DEFINITIONS,
    }


def _cause(cause: Mapping[str, Any]) -> dict[str, Any]:
    fix = cause.get("fix") or {}
    return {
        "name": clean(cause.get("cause", "")),
        "severity": clean(cause.get("severity", "")),
        "effect": [
            (p.upper(), milliseconds(at(cause, "effect_ms", p), signed=True))
            for p in ("p50", "p95")
            if at(cause, "effect_ms", p) is not None
        ],
        "metric": clean(cause.get("metric") or "").upper(),
        "share": share(cause.get("share")),
        "confidence": share(cause.get("confidence")),
        "evidence": [
            {
                "what": clean(item.get("what", "")),
                "value": quantity(item.get("value"), clean(item.get("unit") or "")),
                "n": quantity(item.get("n"), None),
                "threshold": quantity(item.get("threshold"), clean(item.get("unit") or "")),
            }
            for item in cause.get("evidence") or []
        ],
        "rejected": [
            (clean(item.get("cause", "")), clean(item.get("because", ""))) for item in cause.get("rejected") or []
        ],
        "advice": _prose(cause.get("advice") or ""),
        "where": clean(fix.get("file") or "") + (f":{fix['line']}" if fix.get("line") else ""),
        "measured": measured_again(fix),
        "diff": [(_diff_kind(line), clean(line)) for line in diff_lines(fix.get("diff") or "")],
    }


def _prose(text: str) -> list[tuple[bool, str]]:
    """(is it code, text): what stands between backticks is code."""
    parts = clean(text).split("`")
    if len(parts) % 2 == 0:  # one backtick without its other
        return [(False, "`".join(parts))]
    return [(index % 2 == 1, part) for index, part in enumerate(parts) if part]


def _diff_kind(line: str) -> str:
    return {"+": "added", "-": "removed"}.get(line[:1], "same")


def _paths(result: Mapping[str, Any]) -> dict[str, Any] | None:
    paths = at(result, "paths")
    if not paths:
        return None
    rows = []
    missing = []
    for name, path in paths.items():
        errors = at(path, "errors")
        failed = sum(errors.values()) if isinstance(errors, Mapping) else errors
        missing.append(wanted(at(path, "ttft_ms"), "p95"))
        rows.append(
            {
                "name": clean(name),
                "route": clean(at(path, "route") or ""),
                "marked": name == at(result, "budget_path"),
                "figures": [number(at(path, key, p)) for _, key in _METRICS for p in ("p50", "p95")],
                "rate": number(at(path, "output_tokens_per_s")),
                "requests": quantity(at(path, "requests"), None),
                "failed": quantity(failed, None),
            }
        )
    return {
        "metrics": [title for title, _ in _METRICS],
        "rows": rows,
        "need": max((m for m in missing if m), default=0),
    }


def _strips(result: Mapping[str, Any]) -> dict[str, Any] | None:
    lines = timeline.typical(result)
    if not lines:
        return None
    axis = timeline.axis([t for t_ms in lines.values() for t in t_ms[-1:]])
    percent = 100 / axis.span_ms
    rows = []
    for name, t_ms in lines.items():
        marks, gaps, previous = [], [], 0.0
        for group in timeline.groups(t_ms):
            gap = group.start_ms - previous
            if gap * percent > 8:
                # On a narrow screen a short gap has room for its number only.
                nothing = " of nothing" if gap * percent > 25 else ""
                then = f", then {group.events}{' at once' if nothing else ''}" if group.burst else ""
                gaps.append(
                    (f"{previous * percent:.2f}", f"{gap * percent:.2f}", f"{milliseconds(gap)}{nothing}{then}")
                )
            marks.append((f"{group.start_ms * percent * 10:.1f}", group.burst, group.events))
            previous = group.end_ms
        rows.append(
            {
                "name": clean(name),
                "marked": name == at(result, "budget_path"),
                "single": "".join(f"M{x} 5V27" for x, burst, _ in marks if not burst),
                "bursts": [x for x, burst, _ in marks if burst],
                "gaps": gaps,
                "says": f"{clean(name)}: {len(t_ms)} events in {len(marks)} arrivals",
            }
        )
    ticks = [(f"{t * percent:.2f}", f"{t:g}") for t in axis.ticks_ms]
    return {"rows": rows, "ticks": ticks}


def _budgets(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    out = []
    for key, title in _BUDGETS:
        median, tail = at(result, "budget", key, "p50"), at(result, "budget", key, "p95")
        stages = at(median, "stages") or at(tail, "stages")
        if not stages:
            continue
        values = {name: (at(median, "stages", name), at(tail, "stages", name)) for name in stages}
        bars = _bars([at(m, "ms") or 0 for m, _ in values.values()])
        rows = [
            {
                "name": clean(name),
                "p50": number(at(m, "ms")),
                "p95": number(at(t, "ms")),
                "bound": number(at(m, "bound_ms")),
                "source": clean(at(m, "source") or at(t, "source") or "not observable from here"),
                "bar": bar,
            }
            for bar, (name, (m, t)) in zip(bars["rows"], values.items(), strict=True)
        ]
        out.append(
            {
                "title": title,
                "rows": rows,
                "zero": bars["zero"],
                "unseen": [clean(name) for name, (m, t) in values.items() if m is None and t is None],
                "unexplained": (number(at(median, "unexplained_ms")), number(at(tail, "unexplained_ms"))),
                "total": (number(at(median, "total_ms")), number(at(tail, "total_ms"))),
                "requests": " and ".join(
                    quantity(at(band, "requests"), None) for band in (median, tail) if at(band, "total_ms") is not None
                ),
            }
        )
    return out


def _bars(values: Sequence[float]) -> dict[str, Any]:
    """Where bars stand on an axis of 100: negative ones end at ``zero``, which is None where there are none."""
    most, least = max((0.0, *values)), min((0.0, *values))
    scale = 100 / ((most - least) or 1)
    rows = [
        {"x": f"{(min(0, value) - least) * scale:.1f}", "width": f"{abs(value) * scale:.1f}", "negative": value < 0}
        for value in values
    ]
    return {"zero": f"{-least * scale:.1f}" if round(-least * scale, 1) > 0 else None, "rows": rows}


def _tap(tap: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if not tap:
        return None
    within = at(tap, "within_limit")
    return {
        "added": milliseconds(at(tap, "added_ttft_ms", "p50"), signed=True),
        "added_n": quantity(at(tap, "added_ttft_ms", "n"), None),
        "delay": [milliseconds(at(tap, "forward_delay_ms", p)) for p in ("p50", "p95", "p99")],
        "delay_n": quantity(at(tap, "forward_delay_ms", "n"), None),
        "limit": quantity(at(tap, "limit_ms"), "ms"),
        "within": within,
    }


def _plot(result: Mapping[str, Any]) -> dict[str, Any]:
    """What plot.js draws: per path the typical request and a sample of the others, as (ms, events so far)."""
    series = []
    for index, (name, requests) in enumerate((at(result, "timelines") or {}).items()):
        typical = next((r for r in requests if r.get("typical")), requests[0] if requests else None)
        if typical is None:
            continue
        others = [r for r in requests if r is not typical]
        step = max(1, -(-len(others) // PLOTTED_REQUESTS))
        series.append(
            {
                # plotly reads markup in names: escaped here, since it decodes entities and nothing else comes through.
                "name": html.escape(clean(name)),
                "typical": _rounded(typical["t_ms"]),
                "others": [_rounded(r["t_ms"]) for r in others[::step]],
                "dash": _DASHES[index % len(_DASHES)],
            }
        )
    return {"series": series}


def _rounded(t_ms: Sequence[float]) -> list[float]:
    return [round(t, 2) for t in t_ms]
