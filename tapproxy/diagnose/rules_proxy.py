"""The rules that blame the proxy. Each judges in a module of its own; here stand the rows.

Rules here: every threshold is a constant with its reason, where it is judged, and is printed with the number held
against it. Medians and shares decide, never a maximum: one late event on a busy machine accuses nobody.
"""

from __future__ import annotations

from typing import Final

from tapproxy.diagnose import holding
from tapproxy.diagnose.rule import Rule

RULES: Final = (
    Rule(
        "proxy.response_buffering",
        "proxy",
        "hop",
        lambda case: holding.response_buffering(case.view, case.shapes, case.links),
        "Turn the proxy's response buffering off for the streaming paths.",
    ),
    Rule(
        "proxy.compression",
        "proxy",
        "hop",
        lambda case: holding.compression(case.view, case.shapes, case.links),
        "Take text/event-stream out of what the proxy compresses (nginx: gzip_types, or `gzip off;` in the location), "
        "and set `proxy_buffering off;`: unbuffered, nginx flushes the compressor with every event.",
    ),
    Rule(
        "proxy.rate_limit",
        "proxy",
        "hop",
        lambda case: holding.rate_limit(case.view, case.shapes),
        "Lift the proxy's bandwidth limit on the streaming paths (nginx: limit_rate, proxy_limit_rate).",
    ),
)
