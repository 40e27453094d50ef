"""What a run shows from where its taps stood: requests joined over the vantages, sorted into usable and not.

Rules here: nothing is blamed and nothing is dropped unseen; every record that the rules may not use is counted with
its reason. ``inner`` is the tap next to the engine, ``outer`` the one before the proxy, ``client`` the load client's
own records; ``direct`` says that nothing stands between the innermost of them and the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from tapproxy.core.record import Ended, Record
from tapproxy.diagnose import hop
from tapproxy.diagnose.clock import Clock
from tapproxy.diagnose.hop import HopStream
from tapproxy.diagnose.moved import Clocks, align, bound_between
from tapproxy.diagnose.pairing import Pair, Pairing, content_encoding, floor_ns, hold_ns, pair, untrusted

# An event that arrives earlier than it was sent: the sender was put aside between writing and looking at the clock.
_EARLY_NS: Final = 1_000_000
# Neither the path's fault nor a measurement: somebody left, or the tap itself said no.
_CUT: Final = frozenset({Ended.CLIENT_ABORTED, Ended.SHUTDOWN, Ended.REJECTED})
_FAILED: Final = {
    Ended.UPSTREAM_ABORTED: "truncated",
    Ended.UPSTREAM_MALFORMED: "connect",
    Ended.UPSTREAM_UNREACHABLE: "connect",
    Ended.TIMEOUT: "timeout",
}


@dataclass(frozen=True, slots=True)
class Chain:
    """One request at up to three vantages, outermost first: load client, outer tap, inner tap."""

    client: Record | None = None
    outer: Record | None = None
    inner: Record | None = None

    def seen(self) -> list[Record]:
        """The records there are, outermost first."""
        return [record for record in (self.client, self.outer, self.inner) if record is not None]

    def near(self) -> Record | None:
        """The nearer side of the proxy hop: the outer tap, or the client where that tap could see no events."""
        if self.outer is not None and (self.outer.events.kind or self.client is None):
            return self.outer
        return self.client


@dataclass(frozen=True, slots=True)
class Crossed:
    """A stream seen on both sides of the proxy hop."""

    near: Record
    far: Record
    hop: HopStream


@dataclass(slots=True)
class View:
    """The run. ``usable`` chains have a good record at every vantage that saw the request.

    Records of several hosts stand on the outermost one's clock (``clocks``), and ``hold_bound_ns`` is how far all holds
    together may be off for that. ``retried``: a request and the tries that came of it behind the next vantage.
    """

    client: Sequence[Record]
    outer: Sequence[Record]
    inner: Sequence[Record]
    direct: bool
    chains: list[Chain] = field(default_factory=list)
    usable: list[Chain] = field(default_factory=list)
    crossed: list[Crossed] = field(default_factory=list)
    floor_ns: int | None = None
    incomparable: Counter[str] = field(default_factory=Counter)
    standing: Counter[str] = field(default_factory=Counter)
    unpaired: int = 0
    held_events: int = 0
    negative_holds: int = 0
    clocks: Clocks = field(default_factory=Clocks)
    hold_bound_ns: int = 0
    ambiguous: int = 0
    retried: list[tuple[Record, list[Record]]] = field(default_factory=list)
    # Nearly every rule asks for it, and it does not change.
    _engine_side: list[Record] | None = field(default=None, init=False, repr=False)

    @property
    def clock(self) -> Clock | None:
        """Of the clocks of two hosts, the one that most requests stand behind; None where there is one host."""
        return max(self.clocks.clocks, key=lambda each: each.pairs, default=None)

    @property
    def two_sided(self) -> bool:
        """Whether the proxy hop is meant to be seen from both sides."""
        return bool(self.inner) and bool(self.outer or self.client)

    @property
    def outermost(self) -> str | None:
        """The vantage whose requests are explained: its name in ``TTFT@…``."""
        for name, records in (("client", self.client), ("tap(outer)", self.outer), ("tap(inner)", self.inner)):
            if records:
                return name
        return None

    @property
    def engine_side(self) -> list[Record]:
        """The usable records of the vantage next to the engine, where one is."""
        if self._engine_side is None:
            records = self.inner or ((self.outer or self.client) if self.direct else ())
            self._engine_side = usable_records(records)
        return self._engine_side


def look(client: Sequence[Record], outer: Sequence[Record], inner: Sequence[Record], *, direct: bool = False) -> View:
    """Joins and sorts; see the classes above."""
    clocks = align([records for records in (client, outer, inner) if records])
    client, outer, inner = (clocks.records(records) for records in (client, outer, inner))
    view = View(client, outer, inner, direct, clocks=clocks)
    view.chains, pairings = _chains(view)
    view.retried = [each for pairing in pairings for each in pairing.retried]
    view.ambiguous = sum(pairing.ambiguous for pairing in pairings)
    # What a proxy tried in vain is no record that lost its partner.
    tries = {id(each) for _, several in view.retried for each in several}
    for pairing in pairings:
        view.unpaired += len(pairing.unpaired_outer) + sum(id(far) not in tries for far in pairing.unpaired_inner)
    view.standing = Counter(standing(record) for record in (*client, *outer, *inner))
    good = {id(record) for record in (*client, *outer, *inner) if standing(record) == "ok"}
    view.usable = [chain for chain in view.chains if all(id(record) in good for record in chain.seen())]
    if view.two_sided:
        _cross(view)
    return view


def standing(record: Record) -> str:
    """``ok``, ``void``, ``cut``, or ``failed: <class>`` with the classes of definitions.md."""
    return "void" if untrusted(record) is not None else outcome(record)


def outcome(record: Record) -> str:
    """How it ended, whether or not its times may be used: ``ok``, ``cut`` or ``failed: <class>``."""
    if record.status is not None and record.status >= 400:
        return "failed: status"
    if record.ended in _FAILED:
        return f"failed: {_FAILED[Ended(record.ended)]}"
    if record.ended in _CUT:
        return "cut"
    if "error" in record.events.kind:
        return "failed: error event"
    return "ok"


def usable_records(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if standing(record) == "ok"]


def _chains(view: View) -> tuple[list[Chain], list[Pairing]]:
    """One chain for each record of the outermost vantage given, and the pairings between neighbours."""
    named = (("client", view.client), ("outer", view.outer), ("inner", view.inner))
    present = [(name, records) for name, records in named if records]
    if not present:
        return [], []
    rows: list[dict[str, Record]] = [{present[0][0]: record} for record in present[0][1]]
    pairings = []
    for (near_name, near), (far_name, far) in pairwise(present):
        pairing = pair(near, far, slack_ns=view.clocks.slack_ns(far))
        pairings.append(pairing)
        partner = {id(each.outer): each.inner for each in pairing.pairs}
        for row in rows:
            seen = row.get(near_name)
            if seen is not None and id(seen) in partner:
                row[far_name] = partner[id(seen)]
    return [Chain(**row) for row in rows], pairings


def _cross(view: View) -> None:
    holds = []
    for chain in view.chains:
        near, far = chain.near(), chain.inner
        if near is None or far is None:
            continue
        bound_ns = bound_between(near, far)
        hold = hold_ns(Pair(near, far, "chain"), bound_ns)
        if hold.values_ns is None:
            view.incomparable[view.clocks.reason(near, far) or hold.reason or "unknown"] += 1
            continue
        if standing(near) != "ok" or standing(far) != "ok":
            continue
        stream = hop.stream(near, far, hold)
        if stream is None:
            continue
        holds.append(hold)
        view.held_events += len(hold.values_ns)
        view.negative_holds += sum(value < -_EARLY_NS - bound_ns for value in hold.values_ns)
        view.hold_bound_ns = max(view.hold_bound_ns, bound_ns)
        view.crossed.append(Crossed(near, far, stream))
    view.floor_ns = floor_ns(holds)


def compressed_in_hop(near: Record, far: Record) -> str | None:
    """The content coding that the hop added, or None."""
    coding = content_encoding(near)
    return coding if coding is not None and coding != content_encoding(far) else None
