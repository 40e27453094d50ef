"""What a scenario is made of, as data: the parts of a path, the load over it, and the truth that was put in.

Rules here: nothing is started. A path is a row of parts, from the client's side to the engine; each part knows no more
than its own settings, and whoever starts it tells it where the next one listens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tapproxy.nginx.sandbox import Kind

# What a setting of the simulated engine or of the relay may be.
Value = str | int | float | bool

HEALTHY: Final = "healthy"
NOT_MEASURED: Final = "not_measured"


class End(StrEnum):
    """Where a part runs: on this host's network, or at either end of the scenario's link."""

    HERE = "here"
    NEAR = "near"
    FAR = "far"


@dataclass(frozen=True, slots=True)
class Engine:
    """The simulated engine. ``flags``: settings of ``SimConfig``. ``cores``: the only ones that it may run on."""

    flags: Mapping[str, Value] = field(default_factory=dict)
    end: End = End.HERE
    cores: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Tap:
    """A tap. ``name``: ``outer`` before a proxy, ``inner`` next to the engine; several may have one name.

    ``stopped_ms`` of every ``every_ms`` its processes stand still, as a container's CPU quota makes them.
    ``engine``: it samples what stands beside the engine.
    """

    name: str
    flags: tuple[str, ...] = ()
    end: End = End.HERE
    stopped_ms: float = 0.0
    every_ms: float = 0.0
    cores: tuple[int, ...] = ()
    # The name by which the next part is looked up, instead of its address.
    upstream_name: str | None = None


@dataclass(frozen=True, slots=True)
class Nginx:
    """A real nginx. ``http`` and ``location``: lines for these blocks; one of the same name as a line of the template
    takes its place, and a name with ``-`` before it takes that line out. ``backup``: a path to a second upstream, which
    nginx asks when the first fails."""

    kind: Kind = "recommended"
    http: tuple[str, ...] = ()
    location: tuple[str, ...] = ()
    tls: bool = False
    end: End = End.HERE
    backup: tuple[Part, ...] = ()
    upstream_keepalive: bool = True


@dataclass(frozen=True, slots=True)
class Relay:
    """Our relay. ``settings`` of ``RelayConfig``. ``leads_to``: it connects from there, and listens at ``end``."""

    settings: Mapping[str, Value] = field(default_factory=dict)
    end: End = End.HERE
    leads_to: End | None = None


Part = Engine | Tap | Nginx | Relay


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two network namespaces: one way so late, so many of the packets lost."""

    delay_ms: float
    lost_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Load:
    """The requests. ``prompts`` and ``tokens`` (words of the prompt, tokens of the answer) are taken in turn.

    ``gap_ms``: between the starts of two requests, on average: drawn evenly from half of it to one and a half, so that
    nothing periodic is met in step. ``busy_ms`` of every ``busy_every_ms`` the client's own event loop is at work with
    something else.
    """

    requests: int = 40
    warmup: int = 4
    gap_ms: float = 60.0
    concurrency: int = 64
    prompts: tuple[int, ...] = (24,)
    tokens: tuple[int, ...] = (24,)
    fresh: bool = False
    stream: bool = True
    busy_ms: float = 0.0
    busy_every_ms: float = 0.0
    timeout_s: float = 30.0
    seed: int = 1


class Known(StrEnum):
    """Where the truth of what was put in comes from; never from a tap."""

    GIVEN = "given"  # a number that follows from the settings
    ENGINE = "engine"  # the simulator's own log of each request
    CLEAN = "clean"  # the client's figures on this path − those on the same path without the fault


@dataclass(frozen=True, slots=True)
class Truth:
    """The effect that was put in, at P50 of the requests, on ``metric``.

    ``ms``: GIVEN. ``of``: a column of ``truths.COLUMNS``, for ENGINE, and ``less_ms`` is taken from it. ``how``: in
    words, for the list.
    """

    known: Known
    metric: str
    how: str
    ms: float | None = None
    of: str | None = None
    less_ms: float = 0.0


class Card(StrEnum):
    """What is said of a card that is not there, in the engine's slow window; the engine's own slowness is real."""

    HOT = "hot"  # a log as nvidia-smi writes it: the clock far down, for heat
    SHARED = "shared"  # readings as the driver gives them: another process is on it


@dataclass(frozen=True, slots=True)
class Setting:
    """The rest of a scenario: what runs, what is sent over it, what is then known.

    ``path``: client to engine. ``clean``: the same without the fault, to the same engine, where the truth needs it.
    ``sampled``: the engine's metrics page is read while it runs, and with ``host`` its process and this host.
    ``told``: the engine tells the parts of each request. ``client``: the load client's own records are looked at too.
    ``hogs``: a busy program on each of these cores. ``ttft_target_ms`` …: what was asked of the run.
    """

    path: tuple[Part, ...]
    load: Load = field(default_factory=Load)
    truth: Truth | None = None
    clean: tuple[Part, ...] = ()
    link: Link | None = None
    sampled: bool = True
    host: bool = False
    told: bool = True
    client: bool = True
    card: Card | None = None
    hogs: tuple[int, ...] = ()
    ttft_target_ms: float | None = None
    tpot_target_ms: float | None = None
    # The lines of a start-up log, as the engine would have written them.
    startup: str | None = None
    # Look-ups by name take so long, where a part looks one up.
    dns_ms: float | None = None
    # The inner tap's records are altered before they are judged, as if they came from a host whose clock jumps.
    other_boot: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """One staged path. ``staged`` is the cause a verdict must name first, or ``healthy``, or ``not_measured``;
    ``also``: what else it must name.

    Without a ``setting`` it runs over the paths of ``ROUTES``; then ``http_lines`` go into nginx's http block, beside
    what its template has.
    """

    name: str
    title: str
    staged: str
    nginx: Kind = "recommended"
    route: str = ""
    http_lines: tuple[str, ...] = ()
    setting: Setting | None = None
    also: tuple[str, ...] = ()
