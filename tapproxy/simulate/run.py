"""Runs the server as a process: one line when it listens, and an end at once on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys

import uvloop

from tapproxy.simulate.app import load_recording, serve
from tapproxy.simulate.config import SimConfig


class CannotListen(Exception):
    """The address is taken or not ours; the message is one sentence for the operator."""


def run(config: SimConfig) -> int:
    """Returns the exit status when told to end: 130 after Ctrl-C. Raises SimConfigError or CannotListen."""
    load_recording(config)  # a bad file is said before anything listens
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_until_told(config))


async def _until_told(config: SimConfig) -> int:
    loop = asyncio.get_running_loop()
    host, _ = config.address()
    shown = f"[{host}]" if ":" in host else host

    def ready(port: int) -> None:
        sys.stdout.write(f"listening on {shown}:{port}\n")
        sys.stdout.flush()

    task = asyncio.ensure_future(serve(config, ready))
    told: list[signal.Signals] = []

    def end(number: signal.Signals) -> None:
        told.append(number)
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    except OSError as error:
        raise CannotListen(f"cannot listen on {config.listen}: {error.strerror or error}.") from None
    return 130 if signal.SIGINT in told else 0
