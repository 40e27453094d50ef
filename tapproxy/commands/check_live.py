"""`tapproxy check --live`: what was predicted, measured on a real nginx; with `--fix`, before the patch and after it.

Rules here: the user's file is never run; ``nginx.live`` generates what is. The patch is applied in memory only.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tapproxy.nginx import fix
from tapproxy.nginx.checker import Examination
from tapproxy.nginx.live import Live, client_result, prove
from tapproxy.nginx.live_report import client_line
from tapproxy.nginx.predict import predict
from tapproxy.nginx.sandbox import Nginx
from tapproxy.report import console

Again = Callable[[dict[str, str]], Examination]


@dataclass(frozen=True, slots=True)
class Proof:
    """The live check of a configuration, and of the patched one where there is a patch to prove."""

    before: Live
    examination: Examination
    after: Live | None = None
    patched: Examination | None = None

    @property
    def interrupted(self) -> bool:
        """Whether the operator stopped it."""
        return self.before.interrupted or (self.after is not None and self.after.interrupted)

    def now(self, *, written: bool) -> Live:
        """What holds of the files as they are: the patched ones where the patch was written."""
        return self.after if written and self.after is not None else self.before

    def add_to(self, document: dict[str, Any], *, written: bool) -> None:
        """What was measured, beside the predictions.

        ``after_fix`` is the same document of the patched files; where these were written, the document is theirs, and
        ``before_fix`` is of the files as they were.
        """
        if written and self.after is not None and self.patched is not None:
            before = self.examination.to_dict()
            self.before.add_to(before, self.examination)
            document["before_fix"] = {key: before[key] for key in ("paths", "findings", "live")}
            self.after.add_to(document, self.patched)
            return
        self.before.add_to(document, self.examination)
        if self.after is not None and self.patched is not None:
            after = self.patched.to_dict()
            self.after.add_to(after, self.patched)
            document["after_fix"] = {key: after[key] for key in ("paths", "findings", "live")}


def run_live(examination: Examination, nginx: Nginx, again: Again | None) -> Proof:
    """Measures; ``again`` examines the files with other texts, where the patch is to be proved too."""
    with console.Progress() as progress:
        return asyncio.run(_run(examination, nginx, again, lambda what: progress.show(what, 0, 0)))


async def _run(examination: Examination, nginx: Nginx, again: Again | None, show: Callable[[str], None]) -> Proof:
    enough = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        # Only asks for the end: nginx is stopped and its directory removed, and what was measured is printed.
        asyncio.get_running_loop().add_signal_handler(number, enough.set)
    before = await prove(examination, nginx, progress=show, enough=enough)
    if again is None or not examination.edits or enough.is_set():
        return Proof(before, examination)
    patched = again(fix.applied(examination.texts, examination.edits))
    after = await prove(patched, nginx, progress=lambda what: show(f"patched: {what}"), enough=enough)
    return Proof(before, examination, after, patched)


def lines(proof: Proof) -> list[str]:
    """The text: one block a place, one line a kind of client, and what was not run."""
    live = proof.before
    out = [f"measured on nginx {live.nginx.version} ({live.nginx.path}), a generated configuration on loopback:"]
    groups: dict[tuple[str, ...], list[str]] = {}
    for index, checked in enumerate(proof.examination.paths):
        place = checked.to_dict()
        head = f"server {place['server']} ({place['file']}:{place['line']})"
        groups.setdefault((head, *_clients(proof, index)), []).append(checked.path)
    for (head, *block), paths in groups.items():
        out += [f"  {head}", f"    {' '.join(paths)}", *(f"    {line}" for line in block)]
    if not groups:
        out.append("  nothing: no path of these files leads anywhere that could be run")
    out += [f"  not run: {one.directive} ({one.file}:{one.line}): {one.because}" for one in live.not_run]
    out += [f"  note: {note}" for note in live.notes]
    if proof.interrupted:
        out.append("  interrupted: what was measured until then is above")
    return out


def _clients(proof: Proof, index: int) -> list[str]:
    checked, trial = proof.examination.paths[index], proof.before.paths[index]
    out = []
    for kind, outcome in checked.clients.items():
        found = client_result(trial, kind, outcome)
        out.append(client_line(kind, outcome.streaming, found["measured"], found["not_measured"]))
        if proof.after is not None and proof.patched is not None and index < len(proof.patched.paths):
            later = proof.patched.paths[index].clients[kind]
            fixed = client_result(proof.after.paths[index], kind, later)
            out.append(f"  patched: {client_line(kind, later.streaming, fixed['measured'], fixed['not_measured'])}")
    out += [f"  note: {note}" for note in trial.notes]
    for hop, fallback in zip(checked.fallbacks, proof.before.fallbacks[index], strict=True):
        location = hop.route.scope.location
        name = " ".join(location.args) if location else "the server"
        for kind in fallback.clients:
            outcome = predict(hop, kind)
            found = client_result(fallback, kind, outcome)
            out.append(f"  fallback {name}: {client_line(kind, outcome.streaming, found['measured'], None)}")
    return out
