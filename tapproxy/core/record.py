"""The record: one exchange, one JSON object, one line (contract, "Record").

Rules here: times are integer nanoseconds relative to ``t0_mono_ns``; unknown is None, never 0; nothing a client
or an engine wrote is kept beyond ids, the model's name and the allow-listed header values. No slots here: orjson writes
an object from its ``__dict__`` in a fifth of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar

from tapproxy.core import shape

SCHEMA = "tapproxy.record/1"


class Ended(StrEnum):
    """How an exchange ended; set once, the first end wins."""

    COMPLETE = "complete"
    CLIENT_ABORTED = "client_aborted"
    UPSTREAM_ABORTED = "upstream_aborted"
    UPSTREAM_MALFORMED = "upstream_malformed"
    UPSTREAM_UNREACHABLE = "upstream_unreachable"
    TIMEOUT = "timeout"
    REJECTED = "rejected"
    SHUTDOWN = "shutdown"


@dataclass
class RequestPart:
    """The request as the tap read it. ``head``: head complete; ``body_end``: r1.

    ``connection_requests``: how many requests its connection had carried, this one included (1: it was opened for it).
    ``keep_alive``: whether the client lets that connection be used again.
    ``proxy_marks``: what of its head only a proxy writes, by name and never by value; empty where nothing was found,
    which is no proof that there was none.
    """

    bytes: int = 0
    head: int | None = None
    body_end: int | None = None
    fingerprint: str | None = None
    connection_requests: int | None = None
    keep_alive: bool | None = None
    proxy_marks: list[str] | None = None


@dataclass
class UpstreamPart:
    """The upstream side. ``wanted``..``end`` are q0, q1, w0, w1, h, first body byte, e of definitions.md.

    ``dns``, ``connect``, ``tls`` are durations in ns, None on a reused connection. ``rtt_ns`` is TCP's smoothed round
    trip, which delayed acknowledgements inflate; ``min_rtt_ns`` is the least it saw, the network's own share.
    ``retransmits`` of the request; ``segments`` of the answer that came, ``disordered`` of them out of their order.
    """

    peer: str | None = None
    reused: bool | None = None
    wanted: int | None = None
    acquired: int | None = None
    dns: int | None = None
    connect: int | None = None
    tls: int | None = None
    write_start: int | None = None
    write_end: int | None = None
    head: int | None = None
    first_byte: int | None = None
    end: int | None = None
    bytes: int = 0
    rtt_ns: int | None = None
    min_rtt_ns: int | None = None
    retransmits: int | None = None
    segments: int | None = None
    disordered: int | None = None


@dataclass
class DownstreamPart:
    """The client side. ``end`` is f. ``stalled_ns``: reading upstream was paused since the client's buffer was full.

    ``segments`` with data of the answer sent, ``retransmits`` of them again, by the time its last byte was written.
    """

    head: int | None = None
    first_byte: int | None = None
    end: int | None = None
    bytes: int = 0
    stalled_ns: int = 0
    unsent_max_bytes: int = 0
    rtt_ns: int | None = None
    min_rtt_ns: int | None = None
    retransmits: int | None = None
    segments: int | None = None


@dataclass
class Events:
    """Parallel lists, one entry an SSE event (or comment). ``sent`` is None where the event never left."""

    # For ``AckedEvents`` to fill; no key of the record without it.
    acked: ClassVar[list[int | None] | None] = None

    kind: list[str] = field(default_factory=list)
    end_offset: list[int] = field(default_factory=list)
    arrived: list[int] = field(default_factory=list)
    read_at: list[int] = field(default_factory=list)
    sent: list[int | None] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    tokens: list[int | None] = field(default_factory=list)


@dataclass
class AckedEvents(Events):
    """Events with the client's acknowledgements (beyond the contract; only with ``serve --ack-stamps``).

    ``acked``: when the acknowledgement of the event's last byte by the client's kernel reached this host. An upper
    bound: one acknowledgement may cover several writes, and kernels may hold it back up to 40 ms. On loopback it is
    some µs before ``sent``, since the bytes are acknowledged within the call that hands them over. None: unknown.
    """

    acked: list[int | None] = field(default_factory=list)  # type: ignore[misc]  # fills the class's None

    @classmethod
    def of(cls, events: Events, acked: list[int | None]) -> AckedEvents:
        """The same events, with their acknowledgements."""
        return cls(**{item.name: getattr(events, item.name) for item in fields(events)}, acked=acked)


@dataclass
class StampsPart:
    """Where ``arrived`` comes from: ``kernel`` or ``user``; ``clock_step`` voids kernel stamps.

    ``acks``: the client's acknowledgements were stamped (``events.acked``).
    """

    source: str = "user"
    clock_step: bool = False
    acks: bool = False


@dataclass
class UsagePart:
    """The engine's own token counts."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass
class EnginePart:
    """What the engine says of this request's stages, in ns, and where it said so (``response.metrics``, …)."""

    source: str | None = None
    frontend_ns: int | None = None
    queue_ns: int | None = None
    prefill_ns: int | None = None
    decode_ns: int | None = None


# Response header fields whose values are stored. An allow-list: everything else may be a secret.
STORED_HEADERS = (
    "content-type",
    "x-accel-buffering",
    "cache-control",
    "content-encoding",
    "transfer-encoding",
    "server",
    "via",
)


@dataclass
class Record:
    """One exchange as its tap saw it; see the contract for every key. orjson writes it as it is, in this order."""

    # By a factory, so that it is in the ``__dict__`` as the rest is.
    schema: str = field(default_factory=lambda: SCHEMA, init=False)
    id: str
    tap: str
    worker: int = 0
    request_id: str | None = None
    response_id: str | None = None
    trace_id: str | None = None
    t0_unix_ns: int = 0
    t0_mono_ns: int = 0
    boot_id: str | None = None
    client_http: str | None = None
    method: str | None = None
    path: str | None = None
    model: str | None = None
    stream: bool | None = None
    status: int | None = None
    ended: str = Ended.COMPLETE
    request: RequestPart = field(default_factory=RequestPart)
    upstream: UpstreamPart = field(default_factory=UpstreamPart)
    downstream: DownstreamPart = field(default_factory=DownstreamPart)
    events: Events = field(default_factory=Events)
    stamps: StampsPart = field(default_factory=StampsPart)
    usage: UsagePart = field(default_factory=UsagePart)
    engine: EnginePart = field(default_factory=EnginePart)
    headers: dict[str, str | None] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    altered: list[str] = field(default_factory=list)
    void: str | None = None
    # Beyond the contract: one sentence of why it ended so, how often a JSON event could not be read, and how many
    # events came after the last that is kept (a million).
    reason: str | None = None
    unread_events: int = 0
    unlogged_events: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of the contract, ``schema`` first."""
        out: dict[str, Any] = {}
        for name in _TOP:
            value = getattr(self, name)
            part = _PARTS.get(name)
            out[name] = value if part is None else {item.name: getattr(value, item.name) for item in fields(value)}
        return out

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Record:
        """Reads a stored object. Unknown keys are skipped (a later writer), missing ones keep their default.

        Raises ValueError where ``schema`` is not a record's, ``id`` is absent, or a value is of another type than its
        field.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"not a record: schema is {data.get('schema')!r}, expected {SCHEMA!r}")
        if not isinstance(data.get("id"), str):
            raise ValueError("not a record: it has no id")
        values: dict[str, Any] = {}
        for name in _TOP:
            if name not in data or name == "schema":
                continue
            part = _PARTS.get(name)
            if part is None:
                values[name] = data[name]
            else:
                given = data[name] or {}
                values[name] = part[0](**{key: given[key] for key in part[1] if key in given})
                if name == "events" and given.get("acked") is not None:
                    values[name] = AckedEvents.of(values[name], given["acked"])
        values.setdefault("tap", "")
        made = cls(**values)
        made._check()
        return made

    def _check(self) -> None:
        """Raises ValueError where a value is none of its field, or the lists of events are not parallel."""
        if self.t0_unix_ns is None or self.t0_mono_ns is None:
            raise ValueError("not a record: it has no time")
        for name in _CHECKED:
            part: Any = self if name is None else getattr(self, name)
            for wrong in shape.repair(part, _TABLES[type(part)]):
                raise ValueError(f"not a record: its {wrong if name is None else f'{name}.{wrong}'} is of another type")
        if len({len(getattr(self.events, item.name)) for item in fields(self.events)}) > 1:
            raise ValueError("not a record: its lists of events are not of one length")


_PARTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    name: (part, tuple(f.name for f in fields(part)))
    for name, part in {
        "request": RequestPart,
        "upstream": UpstreamPart,
        "downstream": DownstreamPart,
        "events": Events,
        "stamps": StampsPart,
        "usage": UsagePart,
        "engine": EnginePart,
    }.items()
}
_TOP: tuple[str, ...] = tuple(f.name for f in fields(Record))
# None: the record itself.
_CHECKED: tuple[str | None, ...] = (None, *_PARTS)
_TABLES: dict[Any, tuple[shape.Checked, ...]] = {
    part: tuple(check for check in shape.table(part) if check.name not in _PARTS)
    for part in (Record, AckedEvents, *(part for part, _ in _PARTS.values()))
}
