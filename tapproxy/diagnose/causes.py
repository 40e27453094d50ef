"""Why it is slow: rules over a view, each with its evidence, its threshold and the rivals that it rejected.

Rules here:
* A cause is a row of ``RULES``: its name, what must have been seen for it to be judged at all, the judgement, the
  advice. What a vantage could not see is neither healthy nor guilty: it is named as not observable.
* Every threshold is a constant with its reason, and is printed with the number that crossed it.
* Medians and shares decide, never a maximum: one late event on a busy machine accuses nobody.
* Too few requests: no verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tapproxy.core import stats
from tapproxy.core.record import Record
from tapproxy.diagnose import hop
from tapproxy.diagnose.budget import Links, budget, measure_links, not_observable
from tapproxy.diagnose.shapes import BUFFERED, COMPRESSED, RATE_LIMITED, SLOW_CLIENT, Shape, shape_of
from tapproxy.diagnose.view import Crossed, View, icl_ns, look, token_events, ttft_ns

SCHEMA: Final = "tapproxy.verdict/1"
