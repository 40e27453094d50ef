"""What each printed number means: name, formula, unit. The page prints this table under its figures."""

from __future__ import annotations

DEFINITIONS: tuple[tuple[str, str, str], ...] = (
    ("TTFT", "first token event on any channel − the client starts to send (TTFT@client)", "ms"),
    ("inter-chunk", "gap between a token event and the one before; 0 when one read held both", "ms"),
    ("end to end", "the last token or finish event − the client starts to send", "ms"),
    ("TPOT", "(t_last − t_first) / (n − tokens in the first token event); n from the engine's own usage", "ms"),
    (
        "hold",
        "per event: arrival at the tap before the proxy's client − that event's bytes handed to the kernel by the tap"
        " behind the proxy. What the hop itself takes at its quickest (the floor) is in it and never subtracted",
        "ms",
    ),
    (
        "forward delay",
        "per event: handed to the kernel for the client − user-space time of the read that held it",
        "ms",
    ),
    ("the tap's added TTFT", "P50 of TTFT over path tap − P50 of TTFT over path direct, same load, interleaved", "ms"),
    ("tokens/s", "output tokens of all requests of a path / the time in which they ran", "1/s"),
    ("failed", "requests that did not end complete with a 2xx status; they have no latency", "requests"),
    ("P50, P95", "nearest rank on observed values; a dash where MLPerf's early stopping asks for more samples", ""),
    (
        "budget",
        "mean of the requests in a band around the percentile; the stages and unexplained add up to the total",
        "ms",
    ),
)
