"""Records with plain numbers: an engine that sends a token every 20 ms, two taps, and what a proxy between them does.

Every request starts a second after the one before, at t = 1 s, 2 s, …; the taps add 0.1 ms each; the way between two
neighbours takes 0.2 ms. Everything is on one boot's clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tapproxy.core.record import DownstreamPart, Events, Record, RequestPart, StampsPart, UpstreamPart, UsagePart
from tapproxy.core.sample import Sample, SampleKind

MS = 1_000_000
SECOND = 1000 * MS
BOOT = "boot-1"
# Sending times in, (arrival times, read of each) out.
Proxy = Callable[[Sequence[int], int], tuple[list[int], list[int]]]


def record(
    tap: str,
    arrived: Sequence[int],
    *,
    number: int = 0,
    t0: int = 0,
    sent: Sequence[int | None] | None = None,
    reads: Sequence[int] | None = None,
    kinds: Sequence[str] | None = None,
    size: int = 210,
    tokens: int = 1,
    boot: str | None = BOOT,
) -> Record:
    """A whole answer whose token events arrive at ``arrived`` (ns from t0), then ``[DONE]`` with the last."""
    count = len(arrived)
    kind = list(kinds) if kinds is not None else ["token"] * count
    leaves: list[int | None] = [at + MS // 10 for at in arrived] if sent is None else list(sent)
    return Record(
        id=f"{tap}-{number}",
        tap=tap,
        request_id=f"req-{number}",
        response_id=f"chatcmpl-{number}",
        t0_unix_ns=t0,
        t0_mono_ns=t0,
        boot_id=boot,
        method="POST",
        path="/v1/chat/completions",
        stream=True,
        status=200,
        request=RequestPart(bytes=100, head=0, body_end=0, fingerprint=f"hmac-sha256:{number}"),
        upstream=UpstreamPart(
            reused=True,
            wanted=0,
            acquired=0,
            write_start=MS // 10,
            write_end=MS // 10,
            head=MS,
            first_byte=arrived[0] if count else None,
            end=arrived[-1] if count else MS,
            bytes=count * size,
            rtt_ns=MS // 20,
            retransmits=0,
        ),
        downstream=DownstreamPart(
            head=MS,
            first_byte=leaves[0] if count else None,
            end=leaves[-1] if count else MS,
            bytes=count * size,
            rtt_ns=MS // 20,
        ),
        events=Events(
            kind=kind,
            end_offset=[size * (index + 1) for index in range(count)],
            arrived=list(arrived),
            read_at=list(arrived),
            sent=leaves,
            read=list(reads) if reads is not None else list(range(count)),
            tokens=[tokens] * count,
        ),
        stamps=StampsPart(source="kernel"),
        usage=UsagePart(prompt_tokens=64, completion_tokens=count * tokens),
        headers={"content-type": "text/event-stream", "content-encoding": None},
    )


def even(count: int = 40, first_ms: float = 100, gap_ms: float = 20) -> list[int]:
    """Arrivals at the inner tap, ns from its t0."""
    return [round((first_ms + gap_ms * index) * MS) for index in range(count)]


def taps(
    proxy: Proxy,
    *,
    requests: int = 12,
    engine: Sequence[int] | None = None,
    reads: Sequence[int] | None = None,
    size: int = 210,
    tokens: int = 1,
) -> tuple[list[Record], list[Record]]:
    """(outer, inner) records of ``requests`` answers that crossed the proxy."""
    times = even() if engine is None else engine
    outer, inner = [], []
    for number in range(requests):
        t0 = (number + 1) * 10_000 * MS
        # Outer reads at t0, writes 0.1 ms later; inner reads 0.2 ms after that.
        inner_t0 = t0 + 3 * MS // 10
        far = record("inner", times, number=number, t0=inner_t0, reads=reads, size=size, tokens=tokens)
        leaves = [inner_t0 - t0 + at + MS // 10 for at in times]
        arrived, near_reads = proxy(leaves, size)
        near = record("outer", arrived, number=number, t0=t0, reads=near_reads, size=size, tokens=tokens)
        outer.append(near)
        inner.append(far)
    return outer, inner


def client_of(outer: Sequence[Record], path: str = "nginx") -> list[Record]:
    """The load client's records: it writes 0.2 ms before the outer tap reads, and reads 0.2 ms after it sent."""
    out = []
    for number, near in enumerate(outer):
        way = MS // 5
        arrived = [way + (at or 0) + way for at in near.events.sent]
        seen = record(f"client:{path}", arrived, number=number, t0=near.t0_mono_ns - way, sent=[None] * len(arrived))
        seen.upstream.write_start = seen.upstream.write_end = 0
        seen.request.body_end = seen.request.head = None
        seen.events.end_offset = list(near.events.end_offset)
        out.append(seen)
    return out


def passes(leaves: Sequence[int], size: int) -> tuple[list[int], list[int]]:
    """Every event 0.2 ms after it was sent."""
    return [at + MS // 5 for at in leaves], list(range(len(leaves)))


def busy(leaves: Sequence[int], size: int) -> tuple[list[int], list[int]]:
    """A loaded machine: 0.2 to 4 ms, and two hiccups of 30 ms that put an event to its next one."""
    arrived = [at + MS // 5 + (index * 7 % 5) * MS * 19 // 20 for index, at in enumerate(leaves)]
    for index in (5, 25):
        arrived[index] = leaves[index] + 30 * MS
        arrived[index + 1] = max(arrived[index + 1], arrived[index])
    return arrived, list(range(len(leaves)))


def noisy(proxy: Proxy, seed: int) -> Proxy:
    """The same on a loaded machine: 5 % of the events later by some ms, one in a hundred by 30, none overtaken."""
    chance = random.Random(seed)

    def noise(leaves: Sequence[int], size: int) -> tuple[list[int], list[int]]:
        clean, reads = proxy(leaves, size)
        arrived: list[int] = []
        for at in clean:
            more = round(chance.expovariate(1) * 1.5 * MS) + (30 * MS if chance.random() < 0.01 else 0)
            arrived.append(max(at + more, arrived[-1] if arrived else 0))
        return arrived, reads

    return noise


def late_by(ms: float) -> Proxy:
    """Every event later by the same."""
    return lambda leaves, size: ([at + round(ms * MS) for at in leaves], list(range(len(leaves))))


def buffer_of(quantum_bytes: int) -> Proxy:
    """Events wait until so many bytes are there, or the end."""

    def proxy(leaves: Sequence[int], size: int) -> tuple[list[int], list[int]]:
        arrived: list[int] = []
        reads: list[int] = []
        released, waiting = 0, 0
        for at in leaves:
            waiting += 1
            while size * (len(arrived) + waiting) - released >= quantum_bytes:
                # What is whole by then; the rest of a cut event goes with the next release.
                released += quantum_bytes
                whole = released // size - len(arrived)
                reads += [reads[-1] + 1 if reads else 0] * whole
                arrived += [at + MS // 5] * whole
                waiting -= whole
        last = leaves[-1] + MS // 5
        reads += [reads[-1] + 1 if reads else 0] * waiting
        arrived += [last] * waiting
        return arrived, reads

    return proxy


def all_at_the_end(leaves: Sequence[int], size: int) -> tuple[list[int], list[int]]:
    return [leaves[-1] + MS // 5] * len(leaves), [0] * len(leaves)


def every(ms: int) -> Proxy:
    """A batch timer."""

    def proxy(leaves: Sequence[int], size: int) -> tuple[list[int], list[int]]:
        arrived = [-(-at // (ms * MS)) * ms * MS for at in leaves]
        return arrived, [sorted(set(arrived)).index(at) for at in arrived]

    return proxy


def one_event_late(leaves: Sequence[int], size: int) -> tuple[list[int], list[int]]:
    return [at + MS // 5 for at in [*leaves[1:], leaves[-1]]], list(range(len(leaves)))


def limited_to(bytes_per_s: int) -> Proxy:
    def proxy(leaves: Sequence[int], size: int) -> tuple[list[int], list[int]]:
        step = size * 1_000_000_000 // bytes_per_s
        arrived: list[int] = []
        for at in leaves:
            arrived.append(max(at + MS // 5, arrived[-1] + step if arrived else 0))
        return arrived, list(range(len(arrived)))

    return proxy


def limited_in_lumps(bytes_per_s: int) -> Proxy:
    """As nginx limits: what a second allows at once, then a pause until it is paid for."""

    def proxy(leaves: Sequence[int], size: int) -> tuple[list[int], list[int]]:
        arrived: list[int] = []
        reads: list[int] = []
        at = leaves[0] + 1000 * MS
        while len(arrived) < len(leaves):
            ready = sum(leaf <= at for leaf in leaves) - len(arrived)
            lump = max(1, min(ready, bytes_per_s // size, len(leaves) - len(arrived)))
            arrived += [at] * lump
            reads += [(reads[-1] + 1) if reads else 0] * lump
            at += lump * size * 1000 * MS // bytes_per_s
        return arrived, reads

    return proxy


def page(at_s: float, **values: float) -> Sample:
    """A reading of the engine's metrics."""
    return Sample(
        kind=SampleKind.ENGINE,
        source="http://127.0.0.1:8000/metrics",
        t_mono_ns=round(at_s * SECOND),
        t_unix_ns=round(at_s * SECOND),
        boot_id=BOOT,
        values=values,
    )


def sums(count: float, queue_s: float, prefill_s: float, ttft_s: float | None = None) -> dict[str, float]:
    """Cumulative sums of ``count`` requests."""
    out = {"queue_s_sum": queue_s, "queue_s_count": count, "prefill_s_sum": prefill_s, "prefill_s_count": count}
    return out if ttft_s is None else {**out, "ttft_s_sum": ttft_s, "ttft_s_count": count}
