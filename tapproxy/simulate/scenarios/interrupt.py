"""Told that it is enough: work is cut short, cleaned up, and what was measured is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
# (what is being done, how much of it is done, of how much)
Progress = Callable[[str, int, int], None]


class Interrupted(Exception):
    """Told to stop before anything was measured."""


async def unless(enough: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Awaits ``work`` unless told that it is enough; then its clean-up is waited for, and Interrupted raised."""
    task, told = asyncio.ensure_future(work), asyncio.ensure_future(enough.wait())
    try:
        await asyncio.wait({task, told}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
        if task.cancelled():
            raise Interrupted
        return task.result()
    finally:
        told.cancel()
