"""What each printed number means: name, formula, unit. The page prints this table under its figures."""

from __future__ import annotations

from typing import Final

from tapproxy.core.metrics import METRICS


def _metric(shown: str, name: str, more: str = "") -> tuple[str, str, str]:
    return shown, METRICS[name].formula + more, METRICS[name].unit


DEFINITIONS: Final[tuple[tuple[str, str, str], ...]] = (
    _metric("TTFT", "ttft", "; start: the client has its connection and begins to send (TTFT@client)"),
    _metric("inter-chunk", "icl"),
    _metric("end to end", "e2e", "; same start"),
    _metric("TPOT", "tpot"),
    (
        "hold",
        "per event: its arrival at the tap before the proxy − its bytes handed to the kernel by the tap behind the"
        " proxy; what the hop takes at its quickest (the floor) is in it and never subtracted",
        "ms",
    ),
    _metric("forward delay", "forward_delay"),
    (
        "the tap's added TTFT",
        "P50 of TTFT over path tap − P50 of TTFT over path direct, same load in the same minutes",
        "ms",
    ),
    ("tokens/s", "output tokens of a path's whole answers / the time in which it had a request under way", "1/s"),
    ("failed", "requests without a whole answer of status 2xx; they have no latency", "requests"),
    (
        "P50, P95",
        "nearest rank on observed values; a dash where MLPerf's early stopping asks for more. It assumes independent"
        " requests, and queueing breaks that",
        "",
    ),
    (
        "budget",
        "mean of the requests in a band around the percentile; its stages and unexplained add up to the total; ± is"
        " how far a stage may be off",
        "ms",
    ),
)

_AT_THE_TAP: Final = "; start: the request's first byte at the tap that clients reach first (TTFT@tap)"
# Of a diagnosis, which has no client of its own and no path to compare with.
DIAGNOSED: Final[tuple[tuple[str, str, str], ...]] = (
    _metric("TTFT", "ttft", _AT_THE_TAP),
    _metric("E2E", "e2e", "; same start"),
    _metric("TPOT", "tpot"),
    *(each for each in DEFINITIONS if each[0] in ("hold", "forward delay", "P50, P95", "budget")),
    ("unexplained", "what of the total no stage was told or seen to take; no stage is what the others leave", "ms"),
)
