"""What a probe asks of a tap: the plan of one calibrated stream, and the words both sides use for it.

Rules here: a plan is small text in a request's body, which no proxy rewrites; it is bounded, whoever wrote it; a key
never appears in one. The answer's size and the time of each of its events follow from the plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import orjson

# The request field that bears the key, and the field of an answer that says who wrote it (the plan's id, no secret).
KEY_FIELD: Final = b"x-tapproxy-probe"
ANSWER_FIELD: Final = b"x-tapproxy-stream"
MODEL: Final = "tapproxy-probe"
# What every answer has beside that, before a proxy rewrites it.
ANSWER_FIELDS: Final = ((b"server", b"tapproxy-probe"), (b"content-type", b"text/event-stream; charset=utf-8"))
# What stands in the place of a credential.
HIDDEN: Final = "(not shown)"

LEAST_EVENT_BYTES: Final = 200
_MOST_EVENT_BYTES: Final = 64 * 1024
_MOST_EVENTS: Final = 5_000
_MOST_BYTES: Final = 4 * 1024 * 1024
_MOST_DURATION_NS: Final = 700 * 10**9
_MOST_PARTS: Final = 16
_ID: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
# Wide: a proxy adds fields of its operator's making, and nothing is lost with a value.
_SECRET_NAME: Final = re.compile(rb"auth|cookie|credential|key|passw|secret|token", re.IGNORECASE)


class Framing(StrEnum):
    """How the answer is delimited: in chunks whatever was asked (vLLM, SGLang), or as the request's version has it.

    As asked: an HTTP/1.0 request gets an answer that the connection's end ends.
    """

    CHUNKED = "chunked"
    AS_ASKED = "as_asked"


class StreamEnd(StrEnum):
    """How one calibrated stream ended, as the tap saw it."""

    COMPLETE = "complete"
    LEFT = "left"
    BAD_REQUEST = "bad_request"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class Part:
    """Some events of one size, each sent ``interval_ns`` after the one before it."""

    events: int
    event_bytes: int
    interval_ns: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One stream: the head at once, the first event ``first_ns`` after it, then part after part.

    ``unbuffered``: whether the answer asks for X-Accel-Buffering: no, which engines such as vLLM do not.
    """

    id: str
    parts: tuple[Part, ...]
    first_ns: int = 0
    framing: Framing = Framing.CHUNKED
    unbuffered: bool = False

    def body(self, pad_bytes: int = 0) -> bytes:
        """The request's body that asks for it, with ``pad_bytes`` more in it. An engine that got it would refuse it."""
        asked = {
            "id": self.id,
            "parts": [[part.events, part.event_bytes, part.interval_ns] for part in self.parts],
            "first_ns": self.first_ns,
            "framing": self.framing,
            "unbuffered": self.unbuffered,
        }
        return orjson.dumps(
            {"model": MODEL, "stream": True, "max_tokens": 1, "probe": asked}
            | ({"pad": "x" * pad_bytes} if pad_bytes else {})
        )

    @classmethod
    def of_body(cls, body: bytes) -> Plan:
        """Raises ValueError, which says what is wrong, where the body asks for no stream or one beyond reason."""
        document = orjson.loads(body)
        asked = document.get("probe") if isinstance(document, dict) else None
        if not isinstance(asked, dict):
            raise ValueError("the body asks for no calibrated stream")
        plan_id, parts = asked.get("id"), asked.get("parts")
        if not isinstance(plan_id, str) or _ID.fullmatch(plan_id) is None:
            raise ValueError("the plan has no id of plain characters")
        if not isinstance(parts, list) or not 1 <= len(parts) <= _MOST_PARTS:
            raise ValueError(f"the plan has no list of 1 to {_MOST_PARTS} parts")
        plan = cls(
            plan_id,
            tuple(_part(item) for item in parts),
            _whole(asked.get("first_ns", 0), "first_ns", 0, _MOST_DURATION_NS),
            Framing(asked.get("framing", Framing.CHUNKED)),
            asked.get("unbuffered") is True,
        )
        for what, value, most in (
            ("events", plan.events, _MOST_EVENTS),
            ("bytes", plan.size_bytes, _MOST_BYTES),
            ("duration", plan.duration_ns, _MOST_DURATION_NS),
        ):
            if value > most:
                raise ValueError(f"the plan's {what} add up to {value}: at most {most}")
        return plan

    @property
    def events(self) -> int:
        """How many events it has."""
        return sum(part.events for part in self.parts)

    @property
    def size_bytes(self) -> int:
        """The bytes of its events."""
        return sum(part.events * part.event_bytes for part in self.parts)

    @property
    def duration_ns(self) -> int:
        """From the head to the last event."""
        return self.due_ns()[-1]

    def chunked(self, http: str) -> bool:
        """Whether a request of this version (1.0 or 1.1) is answered in chunks."""
        return self.framing is Framing.CHUNKED or http != "1.0"

    def due_ns(self) -> list[int]:
        """When each event is to be sent, from the head on."""
        out: list[int] = []
        at_ns = self.first_ns
        for part in self.parts:
            for _ in range(part.events):
                at_ns += part.interval_ns if out else 0
                out.append(at_ns)
        return out

    def sizes_bytes(self) -> list[int]:
        """The bytes of each event."""
        return [part.event_bytes for part in self.parts for _ in range(part.events)]


def shown(name: bytes, value: bytes) -> str:
    """A field's value as it may be shown: not where its name says that it may be a credential."""
    return HIDDEN if name.lower() == KEY_FIELD or _SECRET_NAME.search(name) else value.decode("latin-1")


def _part(item: Any) -> Part:
    if not isinstance(item, list) or len(item) != 3:
        raise ValueError("a part is no list of events, bytes and interval")
    return Part(
        _whole(item[0], "events", 1, _MOST_EVENTS),
        _whole(item[1], "event_bytes", LEAST_EVENT_BYTES, _MOST_EVENT_BYTES),
        _whole(item[2], "interval_ns", 0, _MOST_DURATION_NS),
    )


def _whole(value: Any, name: str, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} is {value!r:.40}: expected {least} to {most}")
    return value
