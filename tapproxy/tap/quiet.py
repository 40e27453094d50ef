"""uvicorn's server in a process that keeps its signals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn


class QuietServer(uvicorn.Server):
    """Leaves signals to whoever runs it: a worker, or the parent."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
