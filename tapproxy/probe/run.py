"""Runs a probe: the matrix in waves, the silence beside it, and once more what looked held.

Rules here: what is not sure to come from the tap ends the probe after one request. Streams of a wave go together,
a few, as a deployed proxy is used to. A stream that looks held is asked for a second time, and only what is held twice
counts: one bad moment of a busy machine is no mechanism.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tapproxy.core.errors import MeasureError
from tapproxy.core.probing import KEY_FIELD, Framing
from tapproxy.probe import plans, sides
from tapproxy.probe.asking import Asker, Desk, Via
from tapproxy.probe.observe import Observed
from tapproxy.probe.shape import Shape, sound, void_reason
from tapproxy.wire.fetch import Fetched
from tapproxy.wire.fetch_h2 import NOT_OFFERED

Say = Callable[[str], None]
_TOO_MANY: Final = frozenset({429, 503})
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_UNKNOWN: Final = (
    f"the request went elsewhere, or the proxy took the field {KEY_FIELD.decode()} out; is --tap the tap behind this "
    "proxy, and does --path lead to it?"
)
_CREDENTIAL: Final = "what its clients send, with --header 'Authorization: Bearer KEY' or the like"
_NOBODY_BEHIND: Final = (
    "the proxy has no answer from what it passes requests to: is the tap running, and does the proxy lead to its data "
    "port?"
)
_ELSEWHERE: Final = {
    400: "the proxy calls the request wrong: does it speak TLS on this port (--via https://)?",
    401: f"give {_CREDENTIAL}",
    403: f"it is refused: give {_CREDENTIAL}; is a POST on this path allowed from here?",
    407: f"give {_CREDENTIAL}",
    405: "the proxy takes no POST on this path: name the one that leads to the tap with --path",
    429: "the proxy limits how often it is asked: wait, or let this address through",
    502: _NOBODY_BEHIND,
    503: _NOBODY_BEHIND,
    504: _NOBODY_BEHIND,
}
# What OpenSSL says → what to do.
_CONNECT_HINTS: Final = (
    ("certificate is not trusted", "; give its certificate, or that of its authority, with --ca, or say --insecure"),
    ("WRONG_VERSION_NUMBER", "; it speaks no TLS on this port: --via http://?"),
)
# The key outlives the longest silence by this.
_MARGIN_S: Final = 240.0
_ABORT_S: Final = 1.0
_BETWEEN_S: Final = 0.1


@dataclass(slots=True)
class Measured:
    """All that was measured for one kind of client: http1, tls_http1 or h2."""

    kind: str
    cells: list[Observed] = field(default_factory=list)
    again: dict[str, Observed] = field(default_factory=dict)
    extra: dict[str, Observed] = field(default_factory=dict)
    reused: Observed | None = None
    shapes: dict[str, Shape] = field(default_factory=dict)
    void: dict[str, str] = field(default_factory=dict)
    # What the proxy answered in the tap's place where several streams came together; one by one was tried after it.
    refused: list[int] = field(default_factory=list)
    abort: dict[str, Any] | None = None
    abort_first: dict[str, Any] | None = None
    upload: dict[str, Any] | None = None
    reuse: dict[str, Any] | None = None
    silence: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    request_fields: sides.Rewriting | None = None
    answer_fields: sides.Rewriting | None = None
    # Why this kind of client could not be measured.
    trouble: str | None = None

    def of(self, cells: Sequence[plans.Cell]) -> list[Observed]:
        """The streams of these cells that say something."""
        names = {cell.name for cell in cells}
        return [one for one in self.cells if one.name in names and one.name not in self.void]

    def header_delay_ms(self) -> float | None:
        """By how much the head waited for the first event, in the streams whose events no look-ahead holds."""
        return sides.header_delay_ms(self.of((plans.SMALL_FAST, plans.SMALL, plans.SMALL_SLOW, plans.MIDDLE)))


@dataclass(frozen=True, slots=True)
class Settings:
    """What the operator chose. ``framing``: how the engine that the tap stands for answers HTTP/1.0."""

    idle_s: float
    framing: Framing = Framing.CHUNKED
    h2: bool = True


async def probe(via: Via, desk: Desk, settings: Settings, say: Say, out: list[Measured]) -> None:
    """Measures every kind of client; each is in ``out`` when it is done, so that an interrupted probe keeps it.

    Raises MeasureError where the tap is not reached through this proxy.
    """
    await desk.open(settings.idle_s + _MARGIN_S)
    try:
        first = Asker(via, desk, "tls_http1" if via.tls else "http1", h2=False)
        say("asking for a first stream")
        await _check(first, desk)
        kinds = [first, *([Asker(via, desk, "h2", h2=True)] if via.tls and settings.h2 else [])]
        quiet = asyncio.ensure_future(_silences(kinds, settings, desk))
        try:
            for one in kinds:
                out.append(await _client(one, desk, settings, say))
            if not quiet.done():
                say(f"waiting for the end of {settings.idle_s:g} s of silence")
            for done, found in zip(out, await quiet, strict=True):
                done.silence = found
        finally:
            quiet.cancel()
    finally:
        await desk.close()


async def _check(asker: Asker, desk: Desk) -> None:
    """One short stream, which has to come from this tap."""
    one = await asker.ask("first", plans.SHORT)
    url = asker.via.url + asker.via.path
    if one.fetched.error is not None and one.fetched.head_ns is None:
        hint = next((words for sign, words in _CONNECT_HINTS if sign in one.fetched.error), "")
        raise MeasureError(f"{url} does not answer: {one.fetched.error}{hint}")
    await desk.attach([one])
    if one.answered_by_tap:
        return
    if one.tap is not None:
        raise MeasureError(
            f"{url} reaches the tap, and answers {one.fetched.status} in its place"
            + (f" ({one.fetched.error})" if one.fetched.error else "")
        )
    raise MeasureError(f"{url} answers {one.fetched.status}, and not from this tap: {_elsewhere(one.fetched)}")


def _elsewhere(fetched: Fetched) -> str:
    """What an answer that is not the tap's asks for."""
    location = next((value for name, value in fetched.headers if name.lower() == b"location"), b"")
    if fetched.status in _REDIRECTS and location:
        where = location.decode("ascii", "backslashreplace")
        return f"it redirects to {where}: give as --via and --path where clients end up"
    return _ELSEWHERE.get(fetched.status or 0, _UNKNOWN)


async def _client(asker: Asker, desk: Desk, settings: Settings, say: Say) -> Measured:
    """The whole matrix for one kind of client."""
    out = Measured(asker.kind)
    framed = [replace(cell, framing=settings.framing) for cell in (*plans.IDENTITY, *plans.GZIP)]
    say(f"{out.kind}: streams of five sizes and rates")
    out.cells = list(await asyncio.gather(*(asker.cell(cell) for cell in framed)))
    await desk.attach(out.cells)
    if any(one.fetched.error == NOT_OFFERED for one in out.cells):
        out.trouble = NOT_OFFERED
        return out
    _shape(out)
    spoiled = [cell for cell in framed if cell.name in out.void]
    if spoiled:
        statuses = [one.fetched.status for one in out.cells if not one.answered_by_tap]
        out.refused = [status for status in statuses if status in _TOO_MANY]
        # One after the other: the machine may be busy, or the proxy may allow few connections at a time.
        say(f"{out.kind}: once more what failed or came too late from the tap")
        fresh = {cell.name: await asker.cell(cell) for cell in spoiled}
        await desk.attach(list(fresh.values()))
        out.cells = [fresh.get(one.name, one) for one in out.cells]
        out.void.clear()
        _shape(out)
    say(f"{out.kind}: uploads, aborts, reuse")
    old = settings.framing is Framing.CHUNKED and any(one.tap and one.tap["http"] == "1.0" for one in out.cells)
    await _beside(asker, desk, out, plans.CLOSE if old else ())
    held = [cell for cell in framed if cell.name in out.shapes and out.shapes[cell.name].held]
    if held:
        say(f"{out.kind}: once more what was late")
        *again, unbuffered = await asyncio.gather(*(asker.cell(cell) for cell in (*held, plans.UNBUFFERED)))
        out.again = {one.name: one for one in again}
        out.extra[unbuffered.name] = unbuffered
        await desk.attach([*again, unbuffered])
        _keep_what_stays(out)
    return out


def _shape(out: Measured) -> None:
    for one in out.cells:
        found = sound(one)
        if found is not None:
            out.shapes[one.name] = found
        else:
            out.void[one.name] = void_reason(one) or (
                f"{len(one.events)} of {one.plan.events} events came ({one.fetched.error or 'too few'})"
            )


def _keep_what_stays(out: Measured) -> None:
    """Of two measurements of one stream the quieter counts: a mechanism acts every time."""
    for name, one in out.again.items():
        second = sound(one)
        if second is None:
            del out.shapes[name]
            out.void[name] = f"late once, and the second time {void_reason(one) or 'too little came'}"
        elif second.p50_ms < out.shapes[name].p50_ms and not second.held:
            out.shapes[name] = second
            out.cells = [one if cell.name == name else cell for cell in out.cells]


async def _beside(asker: Asker, desk: Desk, out: Measured, more: Sequence[plans.Cell]) -> None:
    """Abort, upload and reuse, at the same time; ``more``: as an engine that answers HTTP/1.0 without chunks."""

    async def reused() -> list[Observed]:
        client = asker.via.client(h2=asker.h2, timeout_s=15.0)
        try:
            found = []
            for number in range(3):
                found.append(await asker.ask(f"reuse-{number}", plans.SHORT, client))
                # A proxy puts its upstream connection back after the answer has gone on; who asks faster is early.
                await asyncio.sleep(_BETWEEN_S)
            return [*found, await asker.ask("reused", plans.REUSED.plan("m"), client)]
        finally:
            await client.close()

    (gone, early, slow, chain), found = await asyncio.gather(
        asyncio.gather(
            asker.ask("abort", plans.ABORT, enough=plans.ABORT_AFTER, timeout_s=_ABORT_S),
            asker.ask("abort-first", plans.ABORT_FIRST, timeout_s=_ABORT_S),
            asker.ask("upload", plans.SHORT, slowly=plans.UPLOAD_PIECES),
            reused(),
        ),
        asyncio.gather(*(asker.cell(cell) for cell in more)),
    )
    await desk.attach([gone, early, slow, *chain, *found])
    out.extra |= {one.name: one for one in found}
    out.abort = sides.abort(gone, desk.clocks)
    out.abort_first = sides.abort_first(early, desk.clocks)
    if sides.deaf(out.abort_first):
        # Once more, alone: the machine may have been busy.
        early = await asker.ask("abort-first", plans.ABORT_FIRST, timeout_s=_ABORT_S)
        await desk.attach([early])
        second = sides.abort_first(early, desk.clocks)
        out.abort_first = second if second is None or not sides.deaf(second) else out.abort_first
    out.upload = sides.upload(slow)
    out.reuse = sides.reuse(chain)
    out.reused = chain[-1]
    plain = out.cells[1]
    out.request_fields = sides.request_rewriting(
        plain, asker.headers(gzip=False), asker.via.authority, len(plain.plan.body()), asker.via.headers
    )
    out.answer_fields = sides.answer_rewriting(plain)


async def _silences(kinds: Sequence[Asker], settings: Settings, desk: Desk) -> list[dict[str, dict[str, Any] | None]]:
    """Silence before the first event and in the middle, for every kind of client, all at the same time."""
    if settings.idle_s <= 0:
        return [{} for _ in kinds]
    quiet_ns = round(settings.idle_s * 1e9)
    asked = [
        (number, asker.ask(name, plans.silence(name, settings.idle_s, after=after)))
        for number, asker in enumerate(kinds)
        for name, after in (("quiet-first", 0), ("quiet-middle", 3))
    ]
    found = await asyncio.gather(*(one for _, one in asked))
    await desk.attach(found)
    out: list[dict[str, dict[str, Any] | None]] = [{} for _ in kinds]
    for (number, _), one in zip(asked, found, strict=True):
        out[number][one.name] = sides.silence(one, quiet_ns)
    return out
