"""How the tools' numbers differ from ours: printed whenever their results are read.

One row a metric: what the tool means by it, what we mean, and what is done so that both can stand side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tapproxy.load.importers.imported import Tool


@dataclass(frozen=True, slots=True)
class Difference:
    """One metric that the tool defines otherwise, or measures from elsewhere."""

    metric: str
    theirs: str
    ours: str
    aligned: str


_START = Difference(
    "start",
    "before the connection is there: waiting for one and opening it are in TTFT and E2E",
    "the tap's clock starts with the first byte of the request that reaches it (TTFT@tap)",
    "on one monotonic clock its times are counted from the tap's start as well; what lies before is shown apart",
)

DIFFERENCES: Final[dict[Tool, tuple[Difference, ...]]] = {
    Tool.VLLM_BENCH: (
        Difference(
            "ttft",
            "first chunk with choices; before 0.33 with openai-chat that is the role event, which holds no token",
            "first token event (token, reasoning, tool)",
            "its chunks are matched to the tap's events, and the first token event's time is taken",
        ),
        Difference(
            "itl",
            "gap between chunks, and role event → first token is one of them; a chunk may hold several tokens",
            "ITL only where the tokens of every event are known, else ICL (gaps between token events)",
            "gaps are read as arrival times of chunks, and never called ITL",
        ),
        Difference(
            "tpot",
            "(E2E − TTFT) / (n − 1), with its TTFT: our TPOT (legacy)",
            "(t_last − t_first) / (n − k1), k1 the tokens of the first token event",
            "recomputed by our formula from its chunk times",
        ),
        Difference(
            "stamps",
            "when its one event loop came to the chunk: chunks of one read follow one another by microseconds",
            "when the bytes were handed to the kernel for the client (sent), before that when they arrived",
            "nothing: a busy client is late, and that is shown as after the tap",
        ),
        _START,
    ),
    Tool.AIPERF: (
        Difference(
            "ttft",
            "first chunk with text in it (reasoning too): a held-back empty delta is passed over",
            "first token event; an empty delta that is not the role event is a token whose text is held back",
            "matched to the tap's events where the numbers of chunks agree, else taken as it is",
        ),
        Difference(
            "tpot",
            "inter_token_latency = (request latency − TTFT) / (n − 1), or n − first chunk's tokens with "
            "--per-chunk-usage",
            "TPOT = (t_last − t_first) / (n − k1)",
            "its inter_token_latency stands in our column TPOT, recomputed with k1 where the tap knows it",
        ),
        Difference(
            "stamps",
            "once per read: chunks of one read share a stamp",
            "arrived: the same; sent: per write",
            "nothing to do",
        ),
        Difference(
            "e2e",
            "request_latency ends at the last chunk it kept: with text, in some versions the usage chunk",
            "ends at the later of last token event and finish event",
            "its last chunk: earlier than ours where the finish event is a token of its own (as TPOT is)",
        ),
        _START,
    ),
    Tool.GUIDELLM: (
        Difference(
            "tpot",
            "time_per_output_token includes TTFT: (last token − start) / n; before 0.4 (last − first) / n",
            "(t_last − t_first) / (n − k1)",
            "its inter_token_latency, (last − first) / (n − 1), is our TPOT: recomputed with k1 where the tap knows it",
        ),
        Difference(
            "ttft",
            "first chunk with text in it; reasoning is counted from 0.6 on",
            "first token event (token, reasoning, tool)",
            "taken as it is: it keeps no time of single chunks",
        ),
        Difference(
            "e2e",
            "request_latency ends with the stream, after the usage event and [DONE]",
            "ends at the later of last token event and finish event",
            "its last chunk with text − start: earlier than ours where the finish event is a token of its own "
            "(as TPOT is)",
        ),
        Difference(
            "clock",
            "wall clock, read in each of its processes",
            "one monotonic clock",
            "a step of the wall clock during the run spoils its numbers and cannot be seen in them",
        ),
        _START,
    ),
}
