"""One load process: takes a job and its phases from stdin, sends its part, hands the results to stdout.

It ends when its stdin does, in the middle of a phase too: then what has ended is handed over first.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import sys
from contextlib import suppress
from typing import Any

import uvloop

from tapproxy.load.crew import LENGTH, Job
from tapproxy.load.driver import Driver, Lane


def many_files() -> None:
    """As many open connections as the system allows this process."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _run() -> None:
    many_files()
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 30)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    # Nobody but us writes there: what a library prints must not be read as a result.
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(what: object) -> None:
        data = pickle.dumps(what, protocol=pickle.HIGHEST_PROTOCOL)
        out.write(LENGTH.pack(len(data)) + data)
        out.flush()

    async def hear() -> Any:
        try:
            size = LENGTH.unpack(await reader.readexactly(LENGTH.size))[0]
            return pickle.loads(await reader.readexactly(size))
        except asyncio.IncompleteReadError:
            return None

    job: Job | None = await hear()
    if job is None:
        return
    clients = {path.name: job.transport.client(path) for path in job.paths}
    lanes: dict[str, Lane] = {}
    driver = Driver(lanes, say, part=job.part, of=job.of)
    try:
        told = asyncio.ensure_future(hear())
        while (news := await told) is not None:
            phase, asks, start_ns = news
            lanes.update({path: Lane(clients[path], ask) for path, ask in asks.items()})
            told = asyncio.ensure_future(hear())
            sending = asyncio.ensure_future(driver.run(phase, start_ns))
            await asyncio.wait({told, sending}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending
            say(driver.vitals)
    finally:
        driver.close()
        for client in clients.values():
            await client.close()


def main() -> None:
    """Until stdin ends."""
    with suppress(KeyboardInterrupt, BrokenPipeError), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run())


if __name__ == "__main__":
    main()
