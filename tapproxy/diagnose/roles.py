"""Which tap stood where: next to the engine, before a proxy, or one on each side of it.

Rules here: a role is what the operator said, else what the records show, and the reason is told with it. Two taps that
saw no request in common stand side by side and are never diagnosed as one path.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tapproxy.core.errors import ConfigError
from tapproxy.core.record import Record

# Names that proxies give themselves in ``server``; each is a whole word of it, in any case.
PROXIES: Final = frozenset(
    (
        *("nginx", "openresty", "tengine", "envoy", "istio-envoy", "caddy", "apache", "httpd", "haproxy", "traefik"),
        *("cloudflare", "cloudfront", "awselb", "varnish", "litespeed", "kong", "gws", "squid", "akamaighost"),
    )
)
# The servers that engines answer with: uvicorn is vLLM's, SGLang's, llama-cpp-python's and Ray Serve's.
ENGINES: Final = frozenset(("uvicorn", "llama.cpp", "granian", "hypercorn", "tritonserver", "triton", "hyper"))
# Of the answers that name a server; a proxy's own error pages are a few among many of the engine's.
MOST: Final = 0.5
# Of the requests that two taps share: one that a client sent twice may look turned around.
AGREE: Final = 0.9
# Enough to know the order of two taps.
JOINED_MOST: Final = 1000


class Upstream(StrEnum):
    """What stands behind a single tap."""

    ENGINE = "engine"
    PROXY = "proxy"


@dataclass(frozen=True, slots=True)
class Roles:
    """Names of taps; None where none stood there. ``why``: one sentence; ``doubt``: what could make it wrong."""

    outer: str | None
    inner: str | None
    why: str
    doubt: str | None = None


def assign(
    taps: Mapping[str, Sequence[Record]],
    *,
    outer: str | None = None,
    inner: str | None = None,
    upstream_is: Upstream | None = None,
    engines: Iterable[str] = (),
) -> Roles:
    """The roles of the taps that have records. ``engines``: HOST:PORT of the engines whose own pages were read.

    Raises ConfigError, with what to say, where neither the operator nor the records tell.
    """
    for flag, name in (("--outer", outer), ("--inner", inner)):
        if name is not None and name not in taps:
            raise ConfigError(f"{flag} {name!r} has no records here; there are records of {_names(taps)}")
    if outer is not None and outer == inner:
        raise ConfigError(f"--outer and --inner are both {outer!r}: name two taps, or leave both out")
    if outer is not None or inner is not None:
        return _named(taps, outer, inner)
    if len(taps) == 1:
        name, records = next(iter(taps.items()))
        return _single(name, records, upstream_is, frozenset(engines))
    if len(taps) == 2:
        return _two(taps)
    raise ConfigError(
        f"there are records of {len(taps)} taps ({_names(taps)}): say which stand around the proxy, "
        "with --outer NAME --inner NAME, or which one is meant, with either of them"
    )


def _named(taps: Mapping[str, Sequence[Record]], outer: str | None, inner: str | None) -> Roles:
    left = [name for name in taps if name not in (outer, inner)]
    beside = f"; the records of {', '.join(left)} are left out" if left else ""
    if outer is not None and inner is not None:
        return Roles(outer, inner, f"{outer} before the proxy and {inner} behind it, as you said{beside}")
    if inner is not None:
        return Roles(None, inner, f"{inner} next to the engine, as you said{beside}")
    return Roles(outer, None, f"{outer} before a proxy, as you said{beside}")


def _single(name: str, records: Sequence[Record], told: Upstream | None, engines: frozenset[str]) -> Roles:
    if told is Upstream.ENGINE:
        return Roles(None, name, f"{name} next to the engine, as you said")
    if told is Upstream.PROXY:
        return Roles(name, None, f"{name} before a proxy, as you said")
    seen = Counter(kind for record in records if (kind := _behind(record)) is not None)
    named = seen[Upstream.ENGINE] + seen[Upstream.PROXY]
    if named and seen[Upstream.PROXY] >= MOST * named:
        word = _commonest(records, Upstream.PROXY)
        return Roles(name, None, f"{name} before a proxy: {seen[Upstream.PROXY]} of its answers name {word}")
    peers = {record.upstream.peer for record in records if record.upstream.peer}
    if peers and peers <= engines:
        return Roles(None, name, f"{name} next to the engine: it forwards to {_list(peers)}, whose metrics were read")
    hidden = "a proxy that leaves the engine's header fields as they are (HAProxy, Traefik) would not show: say "
    hidden += "--upstream-is proxy if one stands there"
    if named:
        word = _commonest(records, Upstream.ENGINE)
        why = f"{name} next to the engine: {seen[Upstream.ENGINE]} of its answers name {word}, and no proxy"
        return Roles(None, name, why, hidden)
    at = f" ({_list(peers)})" if peers else ""
    return Roles(None, name, f"{name} next to its upstream{at}, taken for the engine: no answer names a server", hidden)


def _behind(record: Record) -> Upstream | None:
    """What the answer's header fields say of whoever sent it."""
    if record.headers.get("via"):
        return Upstream.PROXY
    words = _words(record.headers.get("server"))
    if words & PROXIES:
        return Upstream.PROXY
    return Upstream.ENGINE if words & ENGINES else None


def _words(server: str | None) -> frozenset[str]:
    return frozenset(re.findall(r"[a-z][a-z.-]*[a-z]", (server or "").lower()))


def _commonest(records: Sequence[Record], kind: Upstream) -> str:
    named = Counter(
        record.headers.get("server") or f"a hop in Via ({record.headers.get('via')})"
        for record in records
        if _behind(record) is kind
    )
    return named.most_common(1)[0][0]


def _two(taps: Mapping[str, Sequence[Record]]) -> Roles:
    (first, one), (second, other) = taps.items()
    joined = _joined(one, other)
    if not joined:
        raise ConfigError(
            f"the taps {first} and {second} saw no request in common, so they do not stand on one path: diagnose them "
            f"one at a time, with --inner {first} or --inner {second} (or name both, where ids are missing)"
        )
    before = [earlier for a, b in joined if (earlier := _encloses(a, b)) is not None]
    votes = sum(before)
    if before and votes >= AGREE * len(before):
        return Roles(first, second, _order(first, second, votes, len(before)))
    if before and votes <= (1 - AGREE) * len(before):
        return Roles(second, first, _order(second, first, len(before) - votes, len(before)))
    raise ConfigError(
        f"which of the taps {first} and {second} stands before the other cannot be told from the times of the "
        f"{len(joined)} requests both saw: say it with --outer NAME --inner NAME"
    )


def _order(outer: str, inner: str, votes: int, total: int) -> str:
    return f"{outer} before the proxy and {inner} behind it: {votes} of {total} requests began there first"


_KEYS: Final[tuple[Callable[[Record], str | None], ...]] = (
    lambda record: record.response_id,
    lambda record: record.request_id,
    lambda record: record.trace_id,
    lambda record: record.request.fingerprint,
)


def _joined(one: Sequence[Record], other: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Requests both saw, by the strongest key that joins any; only values that each side has once."""
    for key in _KEYS:
        near, far = _unique(one, key), _unique(other, key)
        found = [(record, far[value]) for value, record in near.items() if value in far]
        if found:
            return found[:JOINED_MOST]
    return []


def _unique(records: Sequence[Record], key: Callable[[Record], str | None]) -> dict[str, Record]:
    counted = Counter(value for record in records if (value := key(record)) is not None)
    return {value: record for record in records if (value := key(record)) is not None and counted[value] == 1}


def _encloses(a: Record, b: Record) -> bool | None:
    """Whether ``a`` stood before ``b``: it began first, or, on two clocks, its exchange lasted longer."""
    if a.boot_id is not None and a.boot_id == b.boot_id:
        return None if a.t0_mono_ns == b.t0_mono_ns else a.t0_mono_ns < b.t0_mono_ns
    # Whoever stands before the proxy asks before it does, and has the answer after it has.
    ends = a.upstream.end, b.upstream.end
    if ends[0] is None or ends[1] is None or ends[0] == ends[1]:
        return None
    return ends[0] > ends[1]


def _names(taps: Mapping[str, Sequence[Record]]) -> str:
    return ", ".join(f"{name} ({len(records)})" for name, records in taps.items()) or "no tap"


def _list(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
