"""The rules that blame the engine. Each judges in a module of its own; here stand the rows.

Rules here: every threshold is a constant with its reason, where it is judged, and is printed with the number held
against it. Medians and shares decide, never a maximum: one late event on a busy machine accuses nobody.
"""

from __future__ import annotations

from typing import Final

from tapproxy.diagnose import engine
from tapproxy.diagnose.rule import Rule

RULES: Final = (
    Rule(
        "engine.errors",
        "engine",
        "engine answers",
        lambda case: engine.errors(case.view),
        "Look at the engine's log for the requests named; latency of the others is not the first problem.",
    ),
    Rule(
        "engine.synthetic_stream",
        "engine.decode",
        "engine",
        lambda case: engine.synthetic_stream(case.view),
        "The answer is generated first and streamed afterwards. Look for what collects it: a gateway in front of the "
        "engine, an output parser, guardrails, or a server that only imitates streaming.",
    ),
    Rule(
        "engine.bundling",
        "engine.decode",
        "engine",
        lambda case: engine.bundling(case.view),
        "Several tokens come at a time from the engine itself. Look at its stream interval (vLLM --stream-interval, "
        "SGLang --stream-interval), at speculative decoding, and at whether its API process has a core to itself.",
    ),
)
