"""Free loopback ports for an nginx that is about to start."""

from __future__ import annotations

import contextlib
import socket


def bound(port: int, host: str = "127.0.0.1") -> socket.socket:
    """A socket on this port (0: any that is free) that does not listen yet. Raises OSError."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


class HeldPorts:
    """Free ports, kept from being given to others until their owner listens.

    Bound but not listening, with SO_REUSEADDR: the kernel hands such a port to nobody who asks for any, and lets
    nginx (which sets the same option) bind it.
    """

    def __init__(self, count: int, host: str = "127.0.0.1") -> None:
        """Raises OSError where the host has no more ports."""
        self._held = contextlib.ExitStack()
        self.numbers: list[int] = []
        for _ in range(count):
            each = self._held.enter_context(bound(0, host))
            self.numbers.append(each.getsockname()[1])

    def __enter__(self) -> HeldPorts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets them go."""
        self._held.close()
