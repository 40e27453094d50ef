"""The rules that blame the network, the client or the tap itself. Each judges in a module of its own.

Rules here: every threshold is a constant with its reason, where it is judged, and is printed with the number held
against it. Medians and shares decide, never a maximum: one late event on a busy machine accuses nobody.
"""

from __future__ import annotations

from typing import Final

from tapproxy.diagnose import holding, line
from tapproxy.diagnose.rule import Rule

RULES: Final = (
    Rule(
        "client.slow_reader",
        "client",
        "path",
        lambda case: holding.slow_reader(case.view),
        "The client, or the network to it, takes the answer more slowly than it comes. Read the stream in a loop of "
        "its own, do less work per event, or look at the client's link.",
    ),
    Rule(
        "network.downstream",
        "network.downstream",
        "path",
        lambda case: line.downstream(case.view, case.links),
        "The distance itself costs this. Serve from nearer by, keep connections open, and do not book it as inference.",
    ),
    Rule(
        "network.upstream",
        "network.upstream",
        "path",
        lambda case: line.upstream(case.view, case.links),
        "The proxy and the engine are far apart. Put them next to each other, or keep connections between them open.",
    ),
    Rule(
        "tap.overhead",
        "tap",
        "path",
        lambda case: line.tap_overhead(case.view),
        "tapproxy itself takes a noticeable part. Give it a core of its own, use --workers, or sample fewer streams.",
    ),
)
