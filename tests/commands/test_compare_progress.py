"""The line that is shown while a comparison runs."""

from __future__ import annotations

import asyncio
import io

import pytest

from tapproxy.commands.compare_progress import ProgressLine, Tally
from tapproxy.core.record import Events, Record
from tapproxy.load.plan import Slot
from tapproxy.load.sender import Result

MS = 1_000_000
S = 1_000_000_000


def result(path: str, ttft_ms: int, failure: str | None = None, *, warmup: bool = False) -> Result:
    at = [ttft_ms * MS]
    events = Events(["token"], [1], at, at, [None], [0], [None])
    return Result(Slot(0, 0, path, "", 1, warmup=warmup), Record(id="x", tap="t", events=events), failure)


def tally(total: int | None, duration_s: float | None = None) -> Tally:
    return Tally("", total, duration_s, started_ns=0, ttft_ns={"direct": [], "nginx": []})


def test_it_tells_rate_time_left_errors_and_the_middle_of_each_path() -> None:
    found = tally(12)
    for ttft_ms in (30, 10, 20):
        found.add(result("direct", ttft_ms))
    found.add(result("direct", 999, warmup=True))
    found.add(result("nginx", 50))
    found.add(result("nginx", 1, failure="status"))
    assert found.text(3 * S) == "[######------]  6/12  2.0/s  ETA 0:03  1 error  TTFT P50 direct 20.0, nginx 50.0 ms"


@pytest.mark.parametrize(
    ("found", "at_s", "text"),
    [
        pytest.param(
            tally(None, 100.0), 25, "[###---------]  0 requests  0.0/s  ETA 1:15  0 errors", id="by the clock"
        ),
        pytest.param(tally(5), 1, "[------------]  0/5  0.0/s  0 errors", id="nothing yet"),
        pytest.param(tally(None), 1, "0 requests  0.0/s  0 errors", id="no end known"),
    ],
)
def test_what_is_not_known_is_not_shown(found: Tally, at_s: int, text: str) -> None:
    assert found.text(at_s * S) == text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), True), (io.StringIO(), False)], ids=["terminal", "pipe"])
def test_it_is_drawn_on_a_terminal_and_taken_away_again(stream: io.StringIO, shown: bool) -> None:
    async def story() -> None:
        with ProgressLine(stream, lambda: 40) as line:
            line.tally = tally(12)
            line.add(result("direct", 30))
            line._draw() if shown else None

    asyncio.run(story())
    if not shown:
        assert stream.getvalue() == ""
        return
    drawn = stream.getvalue().split("\r")[1]
    assert drawn.removesuffix("\x1b[K").startswith("[#-----------]  1/12")
    assert len(drawn.removesuffix("\x1b[K")) <= 39
    assert stream.getvalue().endswith("\r\x1b[K")
