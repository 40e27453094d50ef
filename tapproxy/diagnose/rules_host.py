"""The rules that blame a GPU or the host that the engine runs on. Each judges in a module of its own.

Rules here: every threshold is a constant with its reason, where it is judged, and is printed with the number held
against it. A tight host or a shared card that nothing pays for is worth knowing, and makes nobody ill.
"""

from __future__ import annotations

from typing import Final

from tapproxy.diagnose import gpu, host, launch
from tapproxy.diagnose.rule import Rule

RULES: Final[tuple[Rule, ...]] = (
    Rule(
        "gpu.throttled",
        "engine.decode",
        "path",
        gpu.throttled,
        "Let the card keep its clock: look at cooling and airflow first where the reason is heat, at the power limit "
        "(nvidia-smi -q -d POWER, PERFORMANCE) where it is power. Expect token pace to rise with the clock, prefill "
        "most; a higher power limit costs power and heat. Verify: SM clock under the same load, and TPOT beside it.",
    ),
    Rule(
        "gpu.contention",
        "engine.decode",
        "path",
        launch.any_of(gpu.contention, launch.sliced_card),
        "Give the engine the card alone: move the other process (training, a second model, a notebook) to another one. "
        "Expect an even token pace; the other work needs a place. Verify: nvidia-smi lists one process, and ICL P95 "
        "under the same load.",
    ),
    Rule(
        "host.cpu",
        "engine.frontend",
        "path",
        host.cpu,
        "Give the engine cores of its own: raise its CPU limit, or move other work off the host (2 + N physical cores "
        "for N GPUs are the least vLLM wants). Expect first tokens and gaps to fall by the time it stood waiting; "
        "adding GPUs does nothing. Verify: time ready without a core, and TTFT P95, before and after.",
    ),
)
