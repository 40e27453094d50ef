"""What the lines between the vantages take by themselves.

Rules here: a transmission time is half of a round trip that the kernel measured, and never more than the fastest
crossing of the run: a smoothed round trip holds the peer's delayed acknowledgements, which nothing waits for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tapproxy.core.record import DownstreamPart, Record, UpstreamPart
from tapproxy.diagnose.measures import token_events
from tapproxy.diagnose.pairing import incomparable
from tapproxy.diagnose.view import View, usable_records


@dataclass(frozen=True, slots=True)
class Links:
    """Transmission times of a run. ``near``, ``far``: between the proxy and the taps around it, one way, in each
    direction; ``engine``: round trip of the innermost tap to the engine; ``client``: to and fro between load
    client and outer tap. None: nothing tells. The ``rtt`` are as the kernel has them, for showing."""

    near_request_ns: int | None
    near_response_ns: int | None
    far_request_ns: int | None
    far_response_ns: int | None
    engine_ns: int | None
    near_rtt_ns: int | None = None
    far_rtt_ns: int | None = None
    engine_rtt_ns: int | None = None
    client_ns: int | None = None

    @property
    def proxy_trip_ns(self) -> int | None:
        """To and fro between the nearer vantage and the proxy."""
        if self.near_request_ns is None or self.near_response_ns is None:
            return None
        return self.near_request_ns + self.near_response_ns

    @property
    def client_side_ns(self) -> int | None:
        """All network before the proxy."""
        return _sum(self.client_ns, self.proxy_trip_ns)

    @property
    def engine_side_ns(self) -> int | None:
        """All network behind the proxy."""
        return _sum(self.far_request_ns, self.far_response_ns, self.engine_ns)


def measure_links(view: View) -> Links:
    """What the kernel's round trips and the fastest crossings of the run say of transmission."""
    crossings = [
        (near, chain.inner)
        for chain in view.usable
        if (near := chain.near()) is not None and chain.inner is not None and incomparable(near, chain.inner) is None
    ]
    request_floor = _least(
        far.t0_mono_ns - near.t0_mono_ns - near.upstream.write_start
        for near, far in crossings
        if near.upstream.write_start is not None
    )
    nears = [near for near, _ in crossings] or usable_records(view.outer or view.client)
    near_rtt_ns = _least(_round_trip_ns(near.upstream) for near in nears)
    far_rtt_ns = _least(_round_trip_ns(far.downstream) for _, far in crossings)
    near_ns, far_ns = _half(near_rtt_ns), _half(far_rtt_ns)
    head_floor = _least(
        record.upstream.head - record.upstream.write_start
        for record in view.engine_side
        if record.upstream.head is not None and record.upstream.write_start is not None
    )
    engine_ns = _least(_round_trip_ns(record.upstream) for record in view.engine_side)
    near_request, near_response = _capped(near_ns, request_floor), _capped(near_ns, view.floor_ns)
    return Links(
        near_request_ns=near_request,
        near_response_ns=near_response,
        far_request_ns=_capped(far_ns, _less(request_floor, near_request)),
        far_response_ns=_capped(far_ns, _less(view.floor_ns, near_response)),
        engine_ns=_capped(engine_ns, head_floor),
        near_rtt_ns=near_rtt_ns,
        far_rtt_ns=far_rtt_ns,
        engine_rtt_ns=engine_ns,
        client_ns=_client_trip_ns(view),
    )


def _client_trip_ns(view: View) -> int | None:
    """The fastest way in and the fastest way out between load client and outer tap."""
    pairs = [
        (chain.client, chain.outer)
        for chain in view.usable
        if chain.client is not None and chain.outer is not None and incomparable(chain.client, chain.outer) is None
    ]
    way_in = _least(outer.t0_mono_ns - client.t0_mono_ns for client, outer in pairs)
    # The last token as well as the first: a client that reads all at once has only that one without a wait.
    way_out = _least(
        client.t0_mono_ns + client.events.arrived[a] - outer.t0_mono_ns - sent_ns
        for client, outer in pairs
        for a, b in _ends(client, outer)
        if (sent_ns := outer.events.sent[b]) is not None
    )
    if way_in is None or way_out is None:
        return None
    # Whichever end has the line on its socket; a client that reads slowly makes no line longer.
    ends = (_least(map(_round_trip_ns, parts)) for parts in _parts(pairs))
    trips = [trip for trip in ends if trip is not None]
    return _capped(max(0, way_in) + max(0, way_out), max(trips, default=None))


def _parts(pairs: Sequence[tuple[Record, Record]]) -> tuple[list[UpstreamPart], list[DownstreamPart]]:
    return [client.upstream for client, _ in pairs], [outer.downstream for _, outer in pairs]


def _ends(near: Record, far: Record) -> list[tuple[int, int]]:
    """(index, index) of the first token and, where both saw as many, of the last."""
    nears, fars = token_events(near), token_events(far)
    if not nears or not fars:
        return []
    return [(nears[0], fars[0])] + ([(nears[-1], fars[-1])] if len(nears) == len(fars) else [])


def _least(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return min(known) if known else None


def _sum(*values: int | None) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _round_trip_ns(part: UpstreamPart | DownstreamPart) -> int | None:
    """The least the kernel saw where it tells, since delayed acknowledgements are no distance."""
    return part.min_rtt_ns if part.min_rtt_ns is not None else part.rtt_ns


def _half(value: int | None) -> int | None:
    return None if value is None else value // 2


def _less(value: int | None, other: int | None) -> int | None:
    return None if value is None else value - (other or 0)


def _capped(value: int | None, limit: int | None) -> int | None:
    """``value``, but no more than ``limit`` where that is known, and never below 0."""
    if value is None:
        return None
    return max(0, value if limit is None else min(value, limit))
