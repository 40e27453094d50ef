"""The desk for probes: gives out one-time keys, makes every worker know them, keeps what the workers tell of streams.

    POST   /api/probe   {"expires_s": 300}            → the key, once every worker knows it
    GET    /api/probe   with X-Tapproxy-Probe: KEY    → what the tap saw of that key's requests so far
    DELETE /api/probe   with X-Tapproxy-Probe: KEY    → ends it, and forgets what it kept

Rules here: a key is in one answer and nowhere else; kept and handed to workers is its SHA-256, which opens nothing. It
stands in a field and never in a URL, which servers log. What is kept is bounded, and goes with the key.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson

from tapproxy.core.probing import KEY_FIELD

_LONGEST_S: Final = 900.0
_USUAL_S: Final = 300.0
_MOST_KEYS: Final = 16
_MOST_REPORTS: Final = 256
# How long a worker that is being started may take to know a key.
_KNOWN_S: Final = 10.0
# A page in the operator's browser cannot send this type to another origin without asking for leave first.
_CONTENT_TYPE: Final = "application/json"

Answer = tuple[int, dict[str, Any]]


@dataclass(slots=True)
class _Key:
    """One key that was given out."""

    expires_ns: int
    known_by: set[int] = field(default_factory=set)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    reports: list[dict[str, Any]] = field(default_factory=list)
    dropped: int = 0


class ProbeDesk:
    """The parent's side of --allow-probe. ``tell`` hands lines to every worker; ``boot_id`` names our clock."""

    def __init__(self, name: str, workers: int, tell: Callable[[str], None], boot_id: str | None) -> None:
        self._name = name
        self._workers = workers
        self._tell = tell
        self._boot_id = boot_id
        self._by_digest: dict[str, _Key] = {}

    async def answer(self, method: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """The status and the document that answer a request for /api/probe."""
        self._expire()
        if method == "POST":
            if headers.get("content-type", "").partition(";")[0].strip().lower() != _CONTENT_TYPE:
                return 415, {"error": f"expected Content-Type: {_CONTENT_TYPE}"}
            return await self._give(body)
        digest = hashlib.sha256(headers.get(KEY_FIELD.decode(), "").encode("latin-1", "replace")).hexdigest()
        key = self._by_digest.get(digest)
        if key is None:
            return 404, {"error": "no such key: it was never given out, has expired, or its probe has ended"}
        if method == "DELETE":
            del self._by_digest[digest]
            self._tell(_line(digest, None))
            return 200, {"ended": True}
        return 200, {"streams": key.reports, "dropped": key.dropped, **self._clock()}

    async def _give(self, body: bytes) -> Answer:
        try:
            document = orjson.loads(body or b"{}")
            expires_s = document.get("expires_s", _USUAL_S)
            if isinstance(expires_s, bool) or not 0 < expires_s <= _LONGEST_S:
                raise ValueError
        except (ValueError, AttributeError, TypeError):
            return 400, {"error": f"expected a JSON object, with expires_s above 0 and at most {_LONGEST_S:g}"}
        if len(self._by_digest) >= _MOST_KEYS:
            return 429, {"error": f"{_MOST_KEYS} probes are under way: wait for one to end"}
        secret = secrets.token_urlsafe(32)
        digest = hashlib.sha256(secret.encode()).hexdigest()
        key = _Key(time.monotonic_ns() + int(expires_s * 1e9))
        self._by_digest[digest] = key
        self._tell(_line(digest, key.expires_ns))
        try:
            async with asyncio.timeout(_KNOWN_S):
                # A worker that was not ready is told when it is; one that died is replaced by one that knows.
                while len(key.known_by) < self._workers:
                    key.news.clear()
                    await key.news.wait()
        except TimeoutError:
            # Its time may have run out as well.
            self._by_digest.pop(digest, None)
            self._tell(_line(digest, None))
            missing = self._workers - len(key.known_by)
            return 503, {"error": f"{missing} of {self._workers} workers did not take the key in {_KNOWN_S:g} s"}
        return 200, {
            "key": secret,
            "field": KEY_FIELD.decode(),
            "expires_s": expires_s,
            "tap": self._name,
            "workers": self._workers,
            **self._clock(),
        }

    def _clock(self) -> dict[str, Any]:
        """What tells a probe whether this host's clock is its own."""
        return {"boot_id": self._boot_id, "mono_ns": time.monotonic_ns()}

    def keys(self) -> str:
        """All live keys, as lines for a worker that starts."""
        self._expire()
        return "".join(_line(digest, key.expires_ns) for digest, key in self._by_digest.items())

    def worker_said(self, message: dict[str, Any]) -> None:
        """What a worker tells of a key: that it knows it, or a stream's report."""
        key = self._by_digest.get(message["digest"])
        if key is None:
            return
        if "known_by" in message:
            key.known_by.add(message["known_by"])
            key.news.set()
        elif len(key.reports) < _MOST_REPORTS:
            key.reports.append(message["report"])
        else:
            key.dropped += 1

    def _expire(self) -> None:
        now_ns = time.monotonic_ns()
        for digest in [digest for digest, key in self._by_digest.items() if key.expires_ns < now_ns]:
            del self._by_digest[digest]


def _line(digest: str, expires_ns: int | None) -> str:
    return orjson.dumps({"digest": digest, "expires_ns": expires_ns}).decode() + "\n"
