"""Prediction and measurement side by side: a text as it stands, and the one that --live makes of it.

What differs is measured again, alone and three times over, before it counts: a busy machine delays and never speeds up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from tapproxy.core.errors import MeasureError
from tapproxy.nginx.live_config import LISTEN, NotMeasurableError, plan
from tapproxy.nginx.live_stream import Stream
from tapproxy.nginx.predict import Outcome
from tapproxy.nginx.sandbox import Nginx
from tests.nginx.random_configs import Drawn
from tests.nginx.truth import Place

AT_ONCE = 5


@dataclass(frozen=True)
class Verdict:
    """One kind of client of one text: what was said and what was seen. ``live``: with --live's own text, or None."""

    drawn: Drawn
    nginx: str
    profile: str
    kind: str
    predicted: str
    why: str
    measured: str
    live: str | None
    figures: str

    @property
    def wrong(self) -> bool:
        return self.predicted not in ("depends", self.measured)

    @property
    def live_differs(self) -> bool:
        return self.live is not None and self.live != self.measured

    def __str__(self) -> str:
        return (
            f"seed {self.drawn.seed} {' '.join(self.drawn.facts)} nginx {self.nginx} {self.profile} {self.kind}: "
            f"predicted {self.predicted} ({self.why}), measured {self.measured}, live {self.live}; {self.figures}"
        )


def _middle(streams: list[Stream]) -> Stream:
    # The verdict that most of them have, the first where all differ.
    said = [one.streaming for one in streams]
    return streams[said.index(max(said, key=said.count))]


def _figures(streams: Iterable[Stream]) -> str:
    parts = []
    for one in streams:
        hold = f"{median(one.hold_ms):.1f}/{max(one.hold_ms):.1f}" if one.hold_ms else "none"
        parts.append(f"[{one.status} hold {hold} header {one.header_delay_ms and round(one.header_delay_ms, 1)} "
                     f"{one.error or ''}]")  # fmt: skip
    return " ".join(parts)


async def compare(drawn: Drawn, nginx: Nginx, profile: str, *, times: int = 1, live: bool = True) -> list[Verdict]:
    """The verdict for each kind of client. A text that nginx refuses is one that fails."""
    with Place(drawn.text, drawn.includes) as place:
        checked = place.examine(nginx, profile, drawn.facts)
        path = checked.paths[0]
        outcomes: dict[str, Outcome] = path.clients
        made = None
        if live and not checked.trees[0].problems:
            try:
                listens = {kind: "h2c" if kind == "h2" and path.hop.plain_h2 else kind for kind in outcomes}
                made = plan(checked.trees[0], path.hop, tuple(listens.values()))
            except NotMeasurableError:
                made = None
        try:
            found = await place.run(nginx, profile, outcomes, facts=drawn.facts, times=times)
        except MeasureError as refused:
            said = next(iter(outcomes.values()))
            return [
                Verdict(drawn, nginx.version, profile, "all", said.streaming, said.why, "fails", None, str(refused))
            ]
    by_live: dict[str, str] = {}
    if made is not None and not made.not_run:
        text = made.text.replace("@HOST@", "127.0.0.1")
        for kind, name in made.listens.items():
            assert kind in LISTEN
            text = text.replace(f"@{name}@", f"@{kind.removesuffix('c').upper()}@")
        with Place(text) as place:
            streams = await place.run(nginx, profile, outcomes, facts=drawn.facts, times=times)
            by_live = {kind: _middle(several).streaming for kind, several in streams.items()}
    return [
        Verdict(
            drawn, nginx.version, profile, kind, outcome.streaming, outcome.why, _middle(found[kind]).streaming,
            by_live.get(kind), _figures(found[kind]),
        )
        for kind, outcome in outcomes.items()
    ]  # fmt: skip


async def compare_all(
    drawn: Iterable[Drawn], versions: Iterable[Nginx], profiles: Iterable[str], *, live: bool = True
) -> list[Verdict]:
    """Everything against everything; what differs is measured again, alone."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(each: Drawn, nginx: Nginx, profile: str) -> list[Verdict]:
        async with places:
            return await compare(each, nginx, profile, live=live)

    works = [(each, nginx, profile) for each in drawn for nginx in versions for profile in profiles]
    first = await asyncio.gather(*(one(*work) for work in works))
    result: list[Verdict] = []
    for work, verdicts in zip(works, first, strict=True):
        if any(verdict.wrong or verdict.live_differs for verdict in verdicts):
            verdicts = await compare(*work, times=3, live=live)
        result += verdicts
    return result
