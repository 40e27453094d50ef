"""Asks: the key from the tap's admin port, the streams through the proxy, and what the tap saw of them.

Rules here: the key goes to the two addresses the operator named and into no text. An answer that the tap did not write
ends the probe at once: nothing that could cost an engine time is sent twice. Every wait is bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import orjson

from tapproxy.core.address import parse_upstream
from tapproxy.core.errors import ConfigError, MeasureError
from tapproxy.core.probing import KEY_FIELD, Plan
from tapproxy.probe import plans
from tapproxy.probe.observe import Observed, observe
from tapproxy.wire.fetch import Client, Fetched
from tapproxy.wire.fetch_h2 import H2Client
from tapproxy.wire.origin import authority
from tapproxy.wire.stamps import boot_id

_ADMIN_S: Final = 15.0
_REPORTS_S: Final = 3.0
_TARGET: Final = "/api/probe"
# Beyond its own duration, what a stream may take: a rate limit stretches it.
_GRACE_S: Final = 12.0


@dataclass(frozen=True, slots=True)
class Clocks:
    """Whether tap and client read one clock, and how that is known."""

    common: bool
    why: str

    @classmethod
    def compare(cls, theirs: dict[str, Any], before_ns: int, after_ns: int, own_boot_id: str | None) -> Clocks:
        """From the tap's answer: the name of its kernel's run, and its monotonic clock, read between our two reads."""
        name, mono_ns = theirs.get("boot_id"), theirs.get("mono_ns")
        if name is None or own_boot_id is None:
            return cls(False, "a platform does not name its kernel's run, so nobody knows whether the clocks are one")
        if name != own_boot_id:
            return cls(False, "the tap runs on another host (its kernel was started at another time)")
        if not isinstance(mono_ns, int) or not before_ns <= mono_ns <= after_ns:
            return cls(False, "the tap runs on this host, in a time namespace of its own")
        return cls(True, f"one host: the same boot id, and its clock read within {(after_ns - before_ns) / 1e6:.1f} ms")


@dataclass(slots=True)
class Desk:
    """The tap's admin port."""

    url: str
    token: str | None
    insecure: bool = False
    ca_file: Path | None = None
    key: str = field(default="", repr=False)
    about: dict[str, Any] = field(default_factory=dict)
    clocks: Clocks = Clocks(False, "not compared")
    # Claims nothing that needs a common clock, also where there is one.
    ignore_clock: bool = False

    async def open(self, expires_s: float) -> None:
        """Gets a key. Raises MeasureError where the tap gives none, and says why."""
        before_ns = time.monotonic_ns()
        document = await self._ask("POST", {"expires_s": expires_s})
        after_ns = time.monotonic_ns()
        self.key = document.pop("key")
        self.about = document
        self.clocks = Clocks.compare(document, before_ns, after_ns, boot_id())
        if self.ignore_clock:
            self.clocks = Clocks(False, "not used, as asked")

    async def attach(self, streams: Sequence[Observed]) -> None:
        """Gives each stream the tap's report of it; waits a little for those that have not ended there."""
        deadline = time.monotonic() + _REPORTS_S
        missing = {one.plan.id: one for one in streams if one.tap is None}
        while missing:
            for report in (await self._ask("GET"))["streams"]:
                one = missing.pop(report["id"], None)
                if one is not None:
                    one.tap = report
            if not missing or time.monotonic() > deadline:
                return
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Ends the key; silent where the tap is gone or has ended it already."""
        if self.key:
            try:
                await self._ask("DELETE")
            except MeasureError:
                pass
            self.key = ""

    async def _ask(self, method: str, document: dict[str, Any] | None = None) -> dict[str, Any]:
        headers = [(b"Content-Type", b"application/json")]
        if self.token is not None:
            headers.append((b"Authorization", b"Bearer " + self.token.encode("latin-1")))
        if self.key:
            headers.append((KEY_FIELD, self.key.encode()))
        client = Client(self.url, insecure=self.insecure, ca_file=self.ca_file, timeout_s=_ADMIN_S)
        try:
            fetched = await client.fetch(method, _TARGET, headers, orjson.dumps(document) if document else b"")
        finally:
            await client.close()
        if fetched.error is not None:
            hint = "has the tap ended meanwhile?" if self.key else "is it a tap's --admin?"
            raise MeasureError(f"the tap's admin port {self.url} cannot be asked: {fetched.error}; {hint}")
        answer = _document(fetched.body)
        if fetched.status == 200 and answer is not None:
            return answer
        raise MeasureError(f"the tap's admin port {self.url} answers {fetched.status}: {_said(fetched, answer)}")


def _document(body: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _said(fetched: Fetched, answer: dict[str, Any] | None) -> str:
    if fetched.status == 401:
        return "it wants its token: give --token, or TAPPROXY_ADMIN_TOKEN"
    if answer is not None and isinstance(answer.get("error"), str):
        return str(answer["error"])
    return "that is no tap's answer; does this address lead to the --admin port of `tapproxy serve --allow-probe`?"


@dataclass(frozen=True, slots=True)
class Via:
    """The proxy as its clients reach it."""

    url: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...] = ()
    insecure: bool = False
    ca_file: Path | None = None

    @property
    def authority(self) -> str:
        """What its Host field is."""
        return authority(parse_upstream(self.url, "--via"))

    @property
    def tls(self) -> bool:
        """Whether clients speak TLS to it, and so perhaps HTTP/2."""
        return self.url.startswith("https:")

    def client(self, *, h2: bool, timeout_s: float) -> Client | H2Client:
        """A client with no connection yet."""
        make = H2Client if h2 else Client
        return make(self.url, insecure=self.insecure, ca_file=self.ca_file, timeout_s=timeout_s)


class Asker:
    """Sends a probe's requests through the proxy, for one kind of client."""

    def __init__(self, via: Via, desk: Desk, kind: str, *, h2: bool) -> None:
        self.via = via
        self.desk = desk
        self.kind = kind
        self.h2 = h2
        self._number = 0

    def headers(self, *, gzip: bool) -> list[tuple[bytes, bytes]]:
        """The fields of a request, the key among them."""
        return [
            (b"Content-Type", b"application/json"),
            (b"Accept", b"text/event-stream"),
            (b"Accept-Encoding", b"gzip" if gzip else b"identity"),
            (b"User-Agent", b"tapproxy-probe"),
            (b"X-Probe-Kept", b"as it was"),
            (KEY_FIELD, self.desk.key.encode()),
            *self.via.headers,
        ]

    def _named(self, plan: Plan) -> Plan:
        """The plan under an id of its own: the tap's reports are told apart by it."""
        self._number += 1
        return replace(plan, id=f"{self.kind}-{self._number}-{plan.id}")

    async def ask(
        self,
        name: str,
        plan: Plan,
        client: Client | H2Client | None = None,
        *,
        gzip: bool = False,
        slowly: int = 0,
        enough: int | None = None,
        timeout_s: float | None = None,
    ) -> Observed:
        """One stream, on a connection of its own unless ``client`` is given. ``slowly``: pieces of a slow upload."""
        plan = self._named(plan)
        limit_s = plan.duration_ns / 1e9 + _GRACE_S if timeout_s is None else timeout_s
        own = client is None
        fetcher = client or self.via.client(h2=self.h2, timeout_s=limit_s)
        body = plan.body(pad_bytes=slowly * plans.UPLOAD_PIECE_BYTES)
        first, pieces = body[:256], []
        if slowly:
            rest = body[256:]
            step = -(-len(rest) // slowly)
            pieces = [(plans.UPLOAD_PAUSE_S, rest[at : at + step]) for at in range(0, len(rest), step)]
        seen = None if enough is None else _Counter(enough)
        try:
            fetched = await fetcher.fetch(
                "POST",
                self.via.path,
                self.headers(gzip=gzip),
                first if slowly else body,
                slowly=pieces,
                enough=seen,
            )
        finally:
            if own:
                await fetcher.close()
        return observe(name, plan, fetched)

    async def cell(self, cell: plans.Cell) -> Observed:
        """One stream of the matrix, on a fresh connection."""
        return await self.ask(cell.name, cell.plan("m"), gzip=cell.gzip)


class _Counter:
    """Says when so many events have come."""

    def __init__(self, events: int) -> None:
        self._left = events

    def __call__(self, fetched: Fetched) -> bool:
        self._left -= fetched.reads[-1].body.count(b'"sent_ns"')
        return self._left <= 0


def split_url(url: str, path: str | None) -> tuple[str, str]:
    """The origin and the path of --via and --path. Raises ConfigError where both or neither make sense."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return url, path or "/v1/chat/completions"
    host, slash, tail = rest.partition("/")
    if slash and tail:
        if path is not None:
            raise ConfigError(f"--via has a path, /{tail}, and --path is given: give the path once")
        return f"{scheme}://{host}", "/" + tail
    if path is not None and not path.startswith("/"):
        raise ConfigError(f"--path {path!r} is no path: it begins with a slash, as in /v1/chat/completions")
    return f"{scheme}://{host}", path or "/v1/chat/completions"
