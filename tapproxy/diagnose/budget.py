"""Where the time went: TTFT and TPOT split over the stages of the path, per percentile band.

Rules here:
* Every stage is a difference of two stamps on one clock, a round trip the kernel measured, or a time the engine
  told. No stage is what the others leave: that is ``unexplained``, and it is printed.
* A stage nobody could see from here is null and named in ``not_observable``. The undivided ``engine`` is absent where
  its parts are told, and a band with too few requests has no stages at all: neither is a stage that could not be seen.
* The stages that are there and ``unexplained`` add up to the total exactly. Inside these are integers of ns;
  ``_exact_ms`` turns all of a budget into ms at once.
* A budget of a percentile is the mean composition of the requests in a band around it, never of one request.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

from tapproxy.core import metrics, stats
from tapproxy.core.record import Record
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.figures import DECODE, Figure, inside, kept_to_the_end
from tapproxy.diagnose.figures import PARTS as ENGINE_PARTS
from tapproxy.diagnose.links import Links
from tapproxy.diagnose.measures import first_token
from tapproxy.diagnose.moved import crossing_bound_ns, drift_between
from tapproxy.diagnose.pairing import incomparable
from tapproxy.diagnose.told import Told, mean_tpot_ns, told
from tapproxy.diagnose.view import Chain, View

TTFT_STAGES: Final = (
    "client",
    "network.downstream",
    "tls",
    "proxy",
    "tap",
    "network.upstream",
    "engine",
    *ENGINE_PARTS,
)
TPOT_STAGES: Final = ("client", "network.downstream", "proxy", "tap", "engine.decode")
STAGES: Final = (*TTFT_STAGES, DECODE)

# Name: (percentile, from rank share, to rank share).
BANDS: Final[dict[str, tuple[float, float, float]]] = {"p50": (0.5, 0.4, 0.6), "p95": (0.95, 0.9, 1.0)}
# A thousandth of a ms, rounded to a power of two: every number of a budget is then an exact binary fraction, and sums
# of them come out exact in any program, in any order.
_QUANTA_PER_MS: Final = 1024


@dataclass(slots=True)
class Part:
    """One stage of one request. ``bound_ns``: how far it may be off, None where that is not known."""

    ns: int = 0
    bound_ns: int | None = 0
    sources: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Split:
    """One request's total and what of it is covered."""

    total_ns: int
    parts: dict[str, Part] = field(default_factory=dict)

    def add(self, stage: str, ns: int, source: str, bound_ns: int | None = 0) -> None:
        part = self.parts.setdefault(stage, Part())
        part.ns += ns
        part.bound_ns = None if bound_ns is None or part.bound_ns is None else part.bound_ns + bound_ns
        if source not in part.sources:
            part.sources.append(source)

    def widen(self, stage: str, bound_ns: int) -> None:
        """The stage, where there is one, may be off by so much more."""
        part = self.parts.get(stage)
        if part is not None and part.bound_ns is not None:
            part.bound_ns += bound_ns


def budget(view: View, links: Links, evidence: Evidence | None = None) -> dict[str, Any]:
    """The ``budget`` object of the contract. ``evidence`` covers the requests' time."""
    known = told(view, links, evidence or Evidence())
    engine_tpot = None if view.inner or view.direct else mean_tpot_ns(evidence or Evidence())
    where = view.outermost or "nowhere"
    # A mean of all requests may stand for the middle of them; for the slowest only what is sure of each does.
    # What rests on no mean is the same for both, and split once.
    ttft, tpot = (
        {True: _known(splits)}
        for splits in (
            (split_ttft(chain, view, links, known, estimated=True) for chain in view.usable),
            (split_tpot(chain, view, engine_tpot) for chain in view.usable),
        )
    )
    if known.estimates:
        ttft[False] = _known(split_ttft(chain, view, links, known, estimated=False) for chain in view.usable)
    if engine_tpot is not None:
        tpot[False] = _known(split_tpot(chain, view) for chain in view.usable)
    out: dict[str, Any] = {"ttft": {}, "tpot": {}}
    for name in BANDS:
        estimated = name == "p50"
        out["ttft"][name] = _band(ttft.get(estimated, ttft[True]), TTFT_STAGES, name, f"TTFT@{where}")
        out["tpot"][name] = _band(tpot.get(estimated, tpot[True]), TPOT_STAGES, name, f"TPOT@{where}")
    return out


def _known(splits: Iterable[Split | None]) -> list[Split]:
    """Those that there are."""
    return [split for split in splits if split is not None]


def not_observable(found: dict[str, Any]) -> list[str]:
    """The stages that some band of a budget has as null, or that none knows, in path order."""
    bands = [band for metric in found.values() for band in metric.values()]
    parts = [(stage, part) for band in bands for stage, part in band["stages"].items()]
    seen = {stage for stage, part in parts if part is not None}
    unseen = {stage for stage, part in parts if part is None}
    if any(part in seen for part in ENGINE_PARTS):
        seen.add("engine")
    return [stage for stage in STAGES if stage in unseen or stage not in seen]


def split_ttft(chain: Chain, view: View, links: Links, known: Told, *, estimated: bool) -> Split | None:
    """One request's TTFT at its outermost vantage. None where it has no first token there.

    ``estimated``: what is known of the engine only as a mean over several requests counts as well.
    """
    seen = [("client", chain.client), ("outer", chain.outer), ("inner", chain.inner)]
    there = [(name, record) for name, record in seen if record is not None]
    first = there[0][1]
    index = first_token(first)
    if index is None:
        return None
    split = Split(first.events.arrived[index])
    if first is chain.client:
        split.add("tls", 0, "handshakes of the client end before its first request byte (c0)")
    for (name, record), (next_name, following) in pairwise(there):
        if name != "client":
            _inside_request(split, name, record)
        if incomparable(record, following) is not None:
            return split
        _across_request(split, name, record, following, next_name == "inner", links)
    name, last = there[-1]
    if name != "client":
        _inside_request(split, name, last)
    _engine(split, name, last, view, links, known.of(last, estimated=estimated))
    _response(split, there, links)
    both_ways = all(first_token(record) is not None for _, record in there)
    for (_, record), (next_name, following) in pairwise(there):
        bound_ns = crossing_bound_ns(record, following, split.total_ns, both_ways=both_ways)
        split.widen("proxy" if next_name == "inner" else "network.downstream", bound_ns)
    return split


def split_tpot(chain: Chain, view: View, engine_tpot: tuple[float, str] | None = None) -> Split | None:
    """One request's TPOT at its outermost vantage. Stages are signed: a hop that puts events together lowers it.

    ``engine_tpot``: the engine's mean (ns, source), for a vantage that does not see the engine itself.
    """
    seen = [("client", chain.client), ("outer", chain.outer), ("inner", chain.inner)]
    # A tap that could see no events (an encoded body) drops out: the hop then reaches to the next one that could.
    there = [(name, record) for name, record in seen if record is not None and first_token(record) is not None]
    total_ns = _tpot_ns(chain.seen()[0], "arrived")
    if total_ns is None:
        return None
    split = Split(total_ns)
    name, last = there[-1]
    last_ns = _tpot_ns(last, "arrived")
    if (own := _decode_told(last)) is not None:
        split.add(DECODE, *own)
    elif last_ns is not None and (name == "inner" or view.direct):
        split.add(DECODE, last_ns, f"TPOT on arrival at the {_vantage(name)}; constant network time drops out")
    elif engine_tpot is not None:
        split.add(DECODE, round(engine_tpot[0]), engine_tpot[1], None)
    for (near_name, near), (far_name, far) in pairwise([*there, ("", None)]):
        arrived_ns, sent_ns = _tpot_ns(near, "arrived"), _tpot_ns(near, "sent")
        if near_name != "client" and arrived_ns is not None and sent_ns is not None:
            # A full client buffer delays what is sent: that time is the client's, not the tap's.
            stalled = near is not None and near.downstream.stalled_ns > 0
            source = f"TPOT sent − TPOT arrived at the {_vantage(near_name)}"
            split.add("tap", 0 if stalled else sent_ns - arrived_ns, source)
            split.add(
                "client", sent_ns - arrived_ns if stalled else 0, source + ", of streams whose client's buffer was full"
            )
        far_sent_ns = _tpot_ns(far, "sent")
        if near is None or far is None or arrived_ns is None or far_sent_ns is None:
            continue
        stage = "proxy" if far_name == "inner" else "network.downstream"
        source = f"TPOT arrived at the {_vantage(near_name)} − TPOT sent by the {_vantage(far_name)}"
        split.add(stage, arrived_ns - far_sent_ns, source, drift_between(near, far, total_ns))
    return split


def _inside_request(split: Split, name: str, tap: Record) -> None:
    """From the tap's first request byte in to its first one out."""
    start_ns = tap.upstream.write_start
    if start_ns is None:
        return
    ready_ns = tap.request.head or 0
    if tap.request.body_end is not None and tap.upstream.wanted is not None:
        # As in metrics.tap_overhead_ns: a body that was there first was waited for.
        ready_ns = max(ready_ns, tap.request.body_end if tap.request.body_end <= tap.upstream.wanted else 0)
    ready_ns = min(ready_ns, start_ns)
    split.add("client", ready_ns, f"request under way, {_vantage(name)}")
    connecting_ns = tls_ns = 0
    if tap.upstream.reused is False and tap.upstream.wanted is not None and tap.upstream.acquired is not None:
        connecting_ns = tap.upstream.acquired - tap.upstream.wanted
        tls_ns = min(tap.upstream.tls or 0, connecting_ns)
        network = "network.downstream" if name == "outer" else "network.upstream"
        split.add(network, connecting_ns - tls_ns, f"connecting, {_vantage(name)}")
    split.add("tls", tls_ns, f"handshake with the upstream, {_vantage(name)}")
    # What is left of a pooled connection's wait is the tap's own queue.
    split.add("tap", start_ns - ready_ns - connecting_ns, f"request handling, {_vantage(name)}")


def _across_request(split: Split, name: str, near: Record, far: Record, is_proxy: bool, links: Links) -> None:
    """From the nearer vantage's first request byte out to the farther one's first byte in."""
    if near.upstream.write_start is None:
        return
    out_ns = near.t0_mono_ns + near.upstream.write_start
    hop_ns = far.t0_mono_ns - out_ns
    # While the nearer side was still being given the request, nobody behind it could be waited for.
    given_ns = near.upstream.write_end if name == "client" else near.request.body_end
    upload_ns = 0
    if given_ns is not None:
        upload_ns = max(0, min(near.t0_mono_ns + given_ns - out_ns, hop_ns))
    split.add("client", upload_ns, f"request body under way, {_vantage(name)}")
    _hop(split, hop_ns - upload_ns, is_proxy, links.near_request_ns, links.far_request_ns, "request")


def _engine(split: Split, name: str, last: Record, view: View, links: Links, known: Mapping[str, Figure]) -> None:
    """From the innermost vantage's first request byte out to its first token in."""
    kept = bool(known) and kept_to_the_end(last, last.engine.decode_ns)
    for stage, figure in known.items():
        # What it told of this request's decode counts, not what its page makes of all of them as well.
        if stage != DECODE or not kept:
            split.add(stage, figure.ns, figure.source, figure.bound_ns)
    if kept:
        decode_ns = last.engine.decode_ns or 0
        source = f"told by the engine ({last.engine.source or 'source unknown'}): the tokens came when all were made"
        split.add(DECODE, decode_ns, source)
    if name != "inner" and not view.direct:
        if links.proxy_trip_ns is not None:
            split.add("network.downstream", links.proxy_trip_ns, "round trip to the proxy", links.proxy_trip_ns)
        return
    if view.direct and name != "inner":
        split.add("proxy", 0, "no proxy in this path")
    spent = inside(last, links, is_client=name == "client")
    if spent is None:
        return
    split.add("client", spent.upload_ns, f"request body under way, {_vantage(name)}")
    if spent.trip_ns is not None:
        source = "least round trip to the engine (TCP_INFO)"
        split.add("network.upstream", spent.trip_ns, source, spent.trip_ns)
    if not known:
        source = f"request out to first token in at the {_vantage(name)}"
        split.add("engine", spent.rest_ns, source, links.engine_ns)


def _decode_told(last: Record) -> tuple[int, str] | None:
    """The engine's own time an output token; not where the tokens were kept back: what counts then is how they came."""
    decode_ns, tokens = last.engine.decode_ns, last.usage.completion_tokens
    if decode_ns is None or tokens is None or tokens < 2 or kept_to_the_end(last, last.engine.decode_ns):
        return None
    return round(decode_ns / (tokens - 1)), f"told by the engine ({last.engine.source or 'source unknown'})"


def _response(split: Split, there: Sequence[tuple[str, Record]], links: Links) -> None:
    """From the first token's arrival at the innermost vantage to that at the outermost."""
    # A tap that could see no events (an encoded body) drops out: the hop then reaches to the next one that could.
    able = [(name, record, index) for name, record in there if (index := first_token(record)) is not None]
    # The outermost vantage's clock stops at its arrival: its own forwarding is not in the total.
    for name, record, index in able[1:]:
        sent_ns = record.events.sent[index]
        if sent_ns is None:
            return
        split.add("tap", sent_ns - record.events.arrived[index], f"first token in to out, {_vantage(name)}")
    for (_, near, near_index), (far_name, far, far_index) in pairwise(able):
        sent_ns = far.events.sent[far_index]
        if sent_ns is None:
            return
        hop_ns = near.t0_mono_ns + near.events.arrived[near_index] - far.t0_mono_ns - sent_ns
        _hop(split, hop_ns, far_name == "inner", links.near_response_ns, links.far_response_ns, "first token")


def _hop(split: Split, hop_ns: int, is_proxy: bool, near_ns: int | None, far_ns: int | None, what: str) -> None:
    if not is_proxy:
        split.add("network.downstream", hop_ns, f"{what}, between client and outer tap")
        return
    trips_ns = 0
    for stage, one_way_ns, where in (
        ("network.downstream", near_ns, "proxy's client side"),
        ("network.upstream", far_ns, "proxy's engine side"),
    ):
        if one_way_ns is not None:
            part_ns = max(0, min(one_way_ns, hop_ns - trips_ns))
            split.add(stage, part_ns, f"half of the least round trip at the {where}", part_ns)
            trips_ns += part_ns
    # Unknown round trips leave transmission in: the bound then is the whole of it.
    bound_ns = trips_ns if near_ns is not None and far_ns is not None else None
    split.add("proxy", hop_ns - trips_ns, f"hold of the {what} between the taps, less transmission", bound_ns)


def _band(splits: Sequence[Split], stages: Sequence[str], name: str, metric: str) -> dict[str, Any]:
    share, low, high = BANDS[name]
    # Only requests seen alike can be averaged; the largest such group speaks, and says how many it left out.
    groups: dict[frozenset[str], list[Split]] = defaultdict(list)
    for split in splits:
        groups[frozenset(split.parts)].append(split)
    alike = max(groups.values(), key=lambda group: (len(group), len(group[0].parts)), default=[])
    alike = sorted(alike, key=lambda split: split.total_ns)
    left_out = len(splits) - len(alike)
    need = stats.need(share, len(alike))
    text = f"P{low * 100:.0f} to P{high * 100:.0f} of {metric}"
    if need:
        out: dict[str, Any] = {"total_ms": None, "stages": {}, "unexplained_ms": None, "requests": len(alike)}
        return {**out, "band": text, "left_out": left_out, "need": need}
    first, last = int(low * len(alike)), max(int(low * len(alike)) + 1, -(-int(high * 100) * len(alike) // 100))
    chosen = alike[first:last]
    order = [stage for stage in (*stages, DECODE) if stage in chosen[0].parts]
    order = list(dict.fromkeys(order))
    sums = [sum(split.parts[stage].ns for split in chosen) for stage in order]
    total = sum(split.total_ns for split in chosen)
    total_ms, *parts_ms, rest_ms = _exact_ms([*sums, total - sum(sums)], len(chosen))
    in_parts = any(stage in chosen[0].parts for stage in ENGINE_PARTS)
    found: dict[str, Any] = {stage: None for stage in stages if not (in_parts and stage == "engine")}
    for stage, ms in zip(order, parts_ms, strict=True):
        found[stage] = {"ms": ms, "bound_ms": _bound_ms(chosen, stage), "source": _sources(chosen, stage)}
    out = {"total_ms": total_ms, "stages": found, "unexplained_ms": rest_ms, "requests": len(chosen)}
    return {**out, "band": text, "left_out": left_out, "need": 0}


def _exact_ms(sums_ns: Sequence[int], count: int) -> list[float]:
    """[total, part, part, …] in ms: means of integer sums, rounded at the running total so that they add up."""
    marks = [0]
    running_ns = 0
    for sum_ns in sums_ns:
        running_ns += sum_ns
        # Round half up, in integers.
        marks.append((2 * running_ns * _QUANTA_PER_MS + count * 1_000_000) // (2 * count * 1_000_000))
    return [marks[-1] / _QUANTA_PER_MS, *((b - a) / _QUANTA_PER_MS for a, b in pairwise(marks))]


def _bound_ms(splits: Sequence[Split], stage: str) -> float | None:
    """A mean is off by no more than the mean of what each may be off by."""
    bounds = [split.parts[stage].bound_ns for split in splits]
    known = [bound for bound in bounds if bound is not None]
    return round(sum(known) / len(known) / 1e6, 3) if known and len(known) == len(bounds) else None


def _sources(splits: Sequence[Split], stage: str) -> str:
    counted = Counter(source for split in splits for source in split.parts[stage].sources)
    return "; ".join(counted)


def _tpot_ns(record: Record | None, side: metrics.Side) -> int | None:
    if record is None:
        return None
    value = metrics.tpot_ns(record, side)
    return None if value is None else round(value)


def _vantage(name: str) -> str:
    return "load client" if name == "client" else f"{name} tap"
