"""What reading one event costs: cutting it out, orjson, its kind, and the arrays. No sockets.

    python tests/bench/bench_sse.py

Prints nanoseconds per event of 230 bytes, the best of several runs (the machine's noise only adds).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import orjson

from tapproxy.core.deltas import DeltaReader
from tapproxy.core.eventlog import EventLog
from tapproxy.core.sse import SseParser

EVENTS = 32_000
RUNS = 7


def chat_event(content: str) -> bytes:
    """An event as vLLM sends it."""
    choice = {"index": 0, "delta": {"content": content}, "logprobs": None, "finish_reason": None, "token_ids": None}
    value = {
        "id": "chatcmpl-b50b758057028d4d",
        "object": "chat.completion.chunk",
        "created": 1795951453,
        "model": "tiny",
        "choices": [choice],
    }
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def best_ns(run: Callable[[], None]) -> float:
    """Nanoseconds per event of the quickest run."""
    best = float("inf")
    for _ in range(RUNS):
        started = time.perf_counter_ns()
        run()
        best = min(best, time.perf_counter_ns() - started)
    return best / EVENTS


def main() -> None:
    event = chat_event(" unless")
    event = chat_event(" unless" + "s" * (230 - len(event)))
    body = event[6:-2]
    print(f"event of {len(event)} bytes; ns per event, best of {RUNS}")

    def only_json() -> None:
        for _ in range(EVENTS):
            orjson.loads(body)

    print(f"  orjson alone            {best_ns(only_json):8.0f}")
    for per_call in (1, 32):
        piece, calls = event * per_call, EVENTS // per_call

        def only_split(piece: bytes = piece, calls: int = calls) -> None:
            parser = SseParser()
            for _ in range(calls):
                parser.feed(piece)

        def split_and_kind(piece: bytes = piece, calls: int = calls) -> None:
            parser, reader = SseParser(), DeltaReader()
            for _ in range(calls):
                for item in parser.feed(piece):
                    reader.feed(item)

        def log(piece: bytes = piece, calls: int = calls) -> None:
            events = EventLog()
            for at in range(calls):
                events.add_read(piece, at, at, at)
            events.flush()

        print(f"  {per_call:2d} a call: split          {best_ns(only_split):8.0f}")
        print(f"  {per_call:2d} a call: split, kind    {best_ns(split_and_kind):8.0f}")
        print(f"  {per_call:2d} a read: EventLog, all  {best_ns(log):8.0f}")


if __name__ == "__main__":
    main()
