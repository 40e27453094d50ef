"""The load client against the simulated engine's truth: TTFT, TPOT and E2E of every scenario, and a client that stands
still for a second.

The engine writes into every event when it sent it, on the clock of this host, so the true times of each request are
known whatever else the machine does. What must hold for every request is asserted on every run; how near the client
comes depends on what else runs, so the best of three counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import uvloop

from tapproxy.core import metrics
from tapproxy.load import planning, session
from tapproxy.load.path import Path, Transport, parse
from tapproxy.load.planning import Load
from tapproxy.load.prompts import Prompt
from tapproxy.load.sender import Result
from tapproxy.load.session import Settings
from tapproxy.load.trial import Asked, Scenario, Trial
from tapproxy.wire.fetch import Client, Fetched
from tests.e2e.helpers import Engine, engine, percentile, until_quiet

MS = 1_000_000
TOKENS, ITL_MS, TTFT_MS = 20, 10, 30
ERROR_P50_NS, ERROR_P99_NS = 500_000, 3 * MS
# Reading the offset between the two clocks of the stamps is that exact.
BRACKET_NS = 100_000
_SENT = re.compile(rb'"sim_sent_ns": ?(\d+)')


class KeepingClient(Client):
    """Keeps the body of every answer by the id it was asked with."""

    kept: dict[str, Fetched]

    async def fetch(self, method: str, target: str, headers: Any = None, body: bytes = b"", **more: Any) -> Fetched:
        fetched = await super().fetch(method, target, headers, body, **more)
        identity = dict(headers or ()).get(b"X-Request-Id")
        if identity is not None:
            self.kept[identity.decode()] = fetched
        return fetched


@dataclass(frozen=True)
class Keeping(Transport):
    """Makes such clients; ``kept`` is shared."""

    kept: Any = None

    def client(self, path: Path) -> Client:
        client = KeepingClient(path.origin, timeout_s=self.timeout_s)
        client.kept = self.kept
        return client


LOADS = {
    "single-stream": Load(Scenario.SINGLE_STREAM, 20, warmup=1),
    "server": Load(Scenario.SERVER, 150, rate=70.0, warmup=20),
    "offline": Load(Scenario.OFFLINE, 64, warmup=1),
    "concurrency": Load(Scenario.CONCURRENCY, 160, concurrency=32, warmup=33, blocks=1),
}


@pytest.fixture(scope="module")
def sim() -> Iterator[Engine]:
    with engine("--ttft-us", str(TTFT_MS * 1000), "--itl-us", str(ITL_MS * 1000), "--stamps") as running:
        yield running


def run(settings: Settings, load: Load) -> Trial:
    async def story() -> Trial:
        known = await session.known(settings)
        names = [path.name for path in settings.paths]
        plan = planning.make(load, names, [Prompt("Please say something.")])
        asked = Asked(load.scenario, "chat", load.requests, None, load.rate, load.concurrency, 0, 1, 1, True, False, "")
        return await session.run(settings, plan, asked, known, asyncio.Event(), lambda _: None)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(story(), 60))


def truth_ns(result: Result, fetched: Fetched) -> tuple[int, float, int]:
    """TTFT, TPOT and E2E as the engine sent them, from the first byte of the request."""
    sent = [int(value) for value in _SENT.findall(fetched.body)]
    # The role event, the tokens, usage; [DONE] bears no stamp.
    assert len(sent) == 1 + TOKENS + 1
    first, last = sent[1] - result.record.t0_mono_ns, sent[TOKENS] - result.record.t0_mono_ns
    return first, (last - first) / (TOKENS - 1), last


# Two of the four in every run: the one with a schedule and the one with streams side by side.
OFTEN = ("server", "concurrency")


@pytest.mark.parametrize(
    "load",
    [pytest.param(load, id=name, marks=() if name in OFTEN else pytest.mark.long) for name, load in LOADS.items()],
)
def test_ttft_tpot_and_e2e_are_the_engines_own(sim: Engine, load: Load) -> None:
    def attempt() -> str | None:
        kept: dict[str, Fetched] = {}
        paths = tuple(parse([f"a={sim.url}", f"b={sim.url}"]))
        trial = run(Settings(paths=paths, transport=Keeping(kept=kept)), replace(load, max_tokens=TOKENS))
        measured = [result for result in trial.results if not result.slot.warmup]
        assert len(measured) == 2 * (load.requests or 0)
        errors: dict[str, list[float]] = {"ttft": [], "tpot": [], "e2e": []}
        for result in measured:
            assert result.failure is None
            record = result.record
            assert record.stamps.source == "kernel"
            truth = truth_ns(result, kept[str(record.request_id)])
            found = (metrics.ttft_ns(record), metrics.tpot_ns(record), metrics.e2e_ns(record))
            for name, real, seen in zip(errors, truth, found, strict=True):
                assert seen is not None
                errors[name].append(seen - real)
        # Nothing arrives before it was sent.
        assert min(errors["ttft"] + errors["e2e"]) >= -BRACKET_NS
        return "; ".join(trouble(errors)) or None

    until_quiet(attempt)


def trouble(errors: dict[str, list[float]]) -> Iterator[str]:
    for name, values in errors.items():
        sizes = [abs(value) for value in values]
        p50_ns, p99_ns = percentile(sizes, 50), percentile(sizes, 99)
        if p50_ns > ERROR_P50_NS or p99_ns > ERROR_P99_NS:
            yield f"{name}: p50 {p50_ns / MS:.3f} ms, p99 {p99_ns / MS:.3f} ms"


@pytest.mark.long
def test_several_processes_measure_the_same(sim: Engine) -> None:
    settings = Settings(paths=tuple(parse([f"a={sim.url}"])), processes=2)
    load = Load(Scenario.SERVER, 100, rate=60.0, warmup=5, max_tokens=TOKENS)

    def attempt() -> str | None:
        trial = run(settings, load)
        assert [result.slot.index for result in trial.results] == list(range(105))
        assert trial.client.processes == 2
        ttft = [metrics.ttft_ns(r.record) or 0 for r in trial.results if r.failure is None and not r.slot.warmup]
        assert len(ttft) == 100
        late = percentile([value / MS - TTFT_MS for value in ttft], 50)
        return None if late < 1.0 else f"TTFT is {late:.2f} ms over the engine's"

    until_quiet(attempt)


_STOPPED = """
import asyncio, json, sys, uvloop
from tapproxy.core import metrics
from tests.e2e.test_compare_truth import *
trial = run(Settings(paths=tuple(parse(["a=" + sys.argv[1]]))),
            Load(Scenario.SERVER, 200, rate=50.0, warmup=1, max_tokens=2))
measured = [r for r in trial.results if not r.slot.warmup]
json.dump({"requests": [[r.due_ns, r.record.t0_mono_ns, metrics.ttft_ns(r.record)] for r in measured],
           "notes": trial.notes, "saturated": trial.client.saturated}, sys.stdout)
"""


def test_a_client_that_stands_still_for_a_second_shows_it_in_the_latency_from_the_scheduled_time(sim: Engine) -> None:
    def attempt() -> str | None:
        process = subprocess.Popen(
            [sys.executable, "-c", _STOPPED, sim.url], stdout=subprocess.PIPE, text=True, cwd=os.getcwd()
        )
        time.sleep(2.5)
        os.kill(process.pid, signal.SIGSTOP)
        from_ns = time.monotonic_ns()
        time.sleep(1)
        to_ns = time.monotonic_ns()
        os.kill(process.pid, signal.SIGCONT)
        stdout, _ = process.communicate(timeout=60)
        found = json.loads(stdout)
        stood = [each for each in found["requests"] if from_ns + 20 * MS < each[0] < to_ns - 20 * MS]
        others = [each for each in found["requests"] if not from_ns - 20 * MS < each[0] < to_ns + 300 * MS]
        assert len(found["requests"]) == 200
        # 50 a second, for a second.
        assert 20 < len(stood) < 80, len(stood)
        assert any("not let run" in note for note in found["notes"])
        # What was to be sent meanwhile was sent when the second was over, and not a moment earlier.
        assert all(sent_ns >= to_ns - 20 * MS for _, sent_ns, _ in stood)
        off_ms = [abs(sent_ns - to_ns) / MS for _, sent_ns, _ in stood]
        # From the scheduled time: the rest of the second more than from the send.
        grown_ms = [(sent_ns - due_ns) / MS - (to_ns - due_ns) / MS for due_ns, sent_ns, _ in stood]
        usual_ms = percentile([(sent_ns - due_ns) / MS for due_ns, sent_ns, _ in others], 50)
        if percentile(off_ms, 95) > 60 or percentile(grown_ms, 50) > 40 or usual_ms > 2 or found["saturated"]:
            return f"sent {percentile(off_ms, 95):.1f} ms after the second, others {usual_ms:.2f} ms late"
        return None

    until_quiet(attempt)
