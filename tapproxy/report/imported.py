"""The terminal text of an import: how the tool's numbers differ, how it was joined, both views side by side.

Rules here: nothing is computed; at most 100 columns; text that another tool or a client wrote is made harmless.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Final

from tapproxy.report.console import clean

_WIDTH: Final = 100
_TOOLS: Final = {"vllm-bench": "vllm bench serve", "aiperf": "aiperf", "guidellm": "guidellm"}
_NAMES: Final = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "E2E"}


def lines(result: Mapping[str, Any], rows: int = 10) -> list[str]:
    """The whole text, a line each. ``rows``: so many single requests are listed for each tap."""
    return [*_head(result), *_definitions(result), *_taps(result, rows)]


def _head(result: Mapping[str, Any]) -> Iterator[str]:
    tool = _TOOLS.get(result["tool"], result["tool"])
    version = f" {clean(result['version'])}" if result["version"] else ""
    yield f"{tool}{version}: {len(result['requests'])} requests in {len(result['runs'])} run(s)"
    for run in result["runs"]:
        rest = "".join(f", {run[name]} {name}" for name in ("failed", "warmup") if run[name])
        yield from _wrapped(f"{clean(run['label'])}: {run['requests']} requests{rest}", "  ")
    for note in (*result["notes"], *result["observed"]):
        yield from _wrapped(clean(note), "  ")


def _definitions(result: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield "Where its numbers differ from ours"
    for row in result["definitions"]:
        yield from _wrapped(f"{row['metric'].upper():<6} theirs   {row['theirs']}", "  ", 18)
        yield from _wrapped(f"{'':<6} ours     {row['ours']}", "  ", 18)
        yield from _wrapped(f"{'':<6} aligned  {row['aligned']}", "  ", 18)


def _taps(result: Mapping[str, Any], rows: int) -> Iterator[str]:
    if not result["taps"]:
        yield ""
        yield from _wrapped(
            "No records to join: give the directory of a tap that the load went through with --data", ""
        )
    for name, tap in result["taps"].items():
        yield ""
        yield from _tap(name, tap)
        listed = [request for request in result["requests"] if name in request["taps"]]
        yield from _requests(name, listed, rows)


def _tap(name: str, tap: Mapping[str, Any]) -> Iterator[str]:
    found = ", ".join(f"{number} {sure}" for sure, number in tap["joined"].items() if number) or "none"
    by = ", ".join(f"{number} by {key.replace('_', ' ')}" for key, number in tap["by"].items())
    yield from _wrapped(
        f"At tap {clean(name)} ({tap['records']} records): joined {found}"
        + (f" ({by})" if by else "")
        + (f"; {tap['not_joined']} not joined" if tap["not_joined"] else ""),
        "",
    )
    summary = tap["summary"]
    if summary["void"]:
        yield from _wrapped(f"{summary['void']} of them are void at the tap and in no sum", "  ")
    if not summary["requests"]:
        return
    head = f"ms, {summary['requests']} requests"
    yield f"  {head:<20}" + "".join(f"{each:>18}" for each in ("as told", "aligned", "at the tap", "|difference|"))
    yield f"  {'':<20}" + f"{'p50':>9}{'p99':>9}" * 4
    for key, title in _NAMES.items():
        cells = [summary[key][each] for each in ("told", "aligned", "tap", "absolute_difference")]
        numbers = "".join(f"{_number(cell['p50']):>9}{_number(cell['p99']):>9}" for cell in cells)
        yield f"  {title:<20}{numbers}"
    yield from _wrapped(f"difference: client − tap, {' or '.join(summary['difference_from'])}", "  ")
    before, after = summary["before_tap_ms"], summary["after_tap_ms"]
    if before["n"]:
        yield from _wrapped(
            f"Of the client's TTFT {_number(before['p50'])} ms (p50) lie before the first byte at the tap, "
            f"{_number(after['p50'])} ms after the tap had sent the first token",
            "  ",
        )


def _requests(name: str, listed: list[Mapping[str, Any]], rows: int) -> Iterator[str]:
    if not listed or rows < 1:
        return
    yield f"  {'request':<24}{'sure':<9}{'by':<13}{'TTFT client':>12}{'tap':>10}{'TPOT client':>13}{'tap':>10}"
    for request in listed[:rows]:
        view = request["taps"][name]
        client, tap = view["client_aligned"], view["tap"]
        title = clean(request["request_id"] or f"#{request['index']}")
        yield (
            f"  {title[:23]:<24}{view['sure']:<9}{view['by']:<13}"
            f"{_number(client['ttft_ms']):>12}{_number(tap['ttft_ms']):>10}"
            f"{_number(client['tpot_ms']):>13}{_number(tap['tpot_ms']):>10}"
        )
    if len(listed) > rows:
        yield f"  … {len(listed) - rows} more: --rows, or --json for everything"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _wrapped(text: str, indent: str, hanging: int = 2) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=indent,
        subsequent_indent=indent + " " * (hanging - len(indent) if hanging > 2 else 2),
    )
