"""The same metrics for parts of the requests: by length of prompt and answer, by streaming, by model, by path.

Rules here: a dimension that all requests share is left out; a request without the number that sorts it is in a class
of its own, ``unknown``; a percentile with too few requests is None, and ``need`` says how many more it wants. Start of
all latencies: the request's first byte at the outermost tap.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from tapproxy.core import metrics, stats
from tapproxy.core.record import Record
from tapproxy.diagnose.measures import e2e_ns, known

# A class begins at each of these. Short chat, a page, a long document, a book: what prefill and cache tell apart.
PROMPT_TOKENS: Final = (0, 256, 1024, 4096, 16384, 65536)
# A label, a paragraph, a page, an essay: what decode adds up over.
OUTPUT_TOKENS: Final = (0, 32, 128, 512, 2048)
# Values of a dimension that are shown one by one; the rest is one class.
VALUES_MOST: Final = 12
UNKNOWN: Final = "unknown"
PERCENTILES: Final = {"p50": 0.5, "p95": 0.95}


def length_class(tokens: int | None, bounds: Sequence[int]) -> str:
    """``0 to 255``, …, ``65536 and more``."""
    if tokens is None:
        return UNKNOWN
    number = max(index for index, bound in enumerate(bounds) if bound <= max(0, tokens))
    if number + 1 == len(bounds):
        return f"{bounds[number]} and more"
    return f"{bounds[number]} to {bounds[number + 1] - 1}"


def _mode(record: Record) -> str:
    return UNKNOWN if record.stream is None else "stream" if record.stream else "whole answer"


DIMENSIONS: Final[dict[str, Callable[[Record], str]]] = {
    "prompt_tokens": lambda record: length_class(record.usage.prompt_tokens, PROMPT_TOKENS),
    "output_tokens": lambda record: length_class(record.usage.completion_tokens, OUTPUT_TOKENS),
    "mode": _mode,
    "model": lambda record: record.model or UNKNOWN,
    "path": lambda record: (record.path or UNKNOWN).partition("?")[0],
}
# In the order of their classes rather than by size.
_ORDERED: Final = {"prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS}


def slices(records: Sequence[Record]) -> dict[str, list[dict[str, Any]]]:
    """Dimension → its classes, each with ``n``, ``failed`` and its percentiles. Void records are nowhere."""
    good = [record for record in records if record.void is None]
    found = {}
    for name, sort in DIMENSIONS.items():
        classes = _classes(good, name, sort)
        if len(classes) > 1:
            found[name] = [_entry(label, members) for label, members in classes]
    return found


def _classes(records: Iterable[Record], name: str, sort: Callable[[Record], str]) -> list[tuple[str, list[Record]]]:
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[sort(record)].append(record)
    bounds = _ORDERED.get(name)
    if bounds is not None:
        order = [length_class(bound, bounds) for bound in bounds] + [UNKNOWN]
        return [(label, groups[label]) for label in order if label in groups]
    by_size = sorted(groups.items(), key=lambda each: (-len(each[1]), each[0]))
    shown, rest = by_size[:VALUES_MOST], by_size[VALUES_MOST:]
    if rest:
        shown.append((f"{len(rest)} others", [record for _, members in rest for record in members]))
    return shown


def _entry(label: str, records: Sequence[Record]) -> dict[str, Any]:
    good = [record for record in records if metrics.ended_ok(record)]
    return {
        "class": label,
        "n": len(records),
        "failed": len(records) - len(good),
        "ttft_ms": percentiles(known(map(metrics.ttft_ns, good))),
        "tpot_ms": percentiles([value for record in good if (value := metrics.tpot_ns(record)) is not None]),
        "e2e_ms": percentiles([e2e_ns(record) for record in good if record.upstream.end is not None]),
    }


def percentiles(values_ns: Sequence[float]) -> dict[str, Any]:
    """``p50`` and ``p95`` in ms, ``n``, and ``need``: how many more requests those want that are None."""
    out: dict[str, Any] = {}
    need = {}
    for name, p in PERCENTILES.items():
        more = stats.need(p, len(values_ns))
        value = None if more else stats.percentile(values_ns, p)
        out[name] = None if value is None else round(value / 1e6, 3)
        if more:
            need[name] = more
    return {**out, "n": len(values_ns), "need": need}
