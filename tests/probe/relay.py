"""A proxy of the test's own making, for what no proxy at hand does: ``relay.py PORT UPSTREAM_PORT MODE``.

It carries bytes both ways and holds the answer's: ``tick:50`` passes on every 50 ms what has come, ``quanta:8192`` when
so many bytes have, ``full`` at the answer's end, ``deaf`` at once, but goes on reading when its client has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

END = b"0\r\n\r\n"


class Relay:
    """One connection."""

    def __init__(self, upstream_port: int, mode: str) -> None:
        self.upstream_port = upstream_port
        self.mode, _, size = mode.partition(":")
        self.size = int(size or 0)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream_port)
        down = asyncio.ensure_future(self.down(up_reader, writer))
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                up_writer.write(data)
                await up_writer.drain()
        if self.mode != "deaf":
            down.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await down
        for one in (up_writer, writer):
            one.close()

    async def down(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting = bytearray()
        ticking = asyncio.ensure_future(self.tick(waiting, writer)) if self.mode == "tick" else None
        try:
            while data := await reader.read(65536):
                waiting += data
                ended = waiting.endswith(END)
                if self.mode == "quanta":
                    whole = len(waiting) if ended else len(waiting) // self.size * self.size
                    self.send(waiting, whole, writer)
                elif self.mode == "deaf" or ended:
                    self.send(waiting, len(waiting), writer)
        finally:
            if ticking is not None:
                ticking.cancel()

    def send(self, waiting: bytearray, size: int, writer: asyncio.StreamWriter) -> None:
        if size and not writer.is_closing():
            writer.write(bytes(waiting[:size]))
        del waiting[:size]

    async def tick(self, waiting: bytearray, writer: asyncio.StreamWriter) -> None:
        while True:
            await asyncio.sleep(self.size / 1000)
            self.send(waiting, len(waiting), writer)


async def main(port: int, upstream_port: int, mode: str) -> None:
    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await Relay(upstream_port, mode).serve(reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
