"""Scenarios of what carries the bytes: the network, the client, the taps, the measurement. Data only."""

from __future__ import annotations

from typing import Final

from tapproxy.simulate.scenarios.parts import (
    End,
    Engine,
    Known,
    Link,
    Load,
    Nginx,
    Relay,
    Scenario,
    Setting,
    Tap,
    Truth,
)

_DOOR: Final = Relay(leads_to=End.NEAR)
# Before the link and behind it: everything there is on loopback of its own.
_NEAR_NGINX: Final = (Tap("outer", end=End.NEAR), Nginx(end=End.NEAR))

SCENARIOS: Final = (
    Scenario(
        "far-client",
        "a client 40 ms away from the proxy and its engine",
        "network.downstream",
        setting=Setting(
            (_DOOR, Tap("outer", end=End.FAR), Nginx(end=End.FAR), Tap("inner", end=End.FAR), Engine(end=End.FAR)),
            Load(30, gap_ms=100, tokens=(12,)),
            Truth(Known.GIVEN, "ttft", "to and fro: 2 × 40 ms", ms=80.0),
            link=Link(40.0),
        ),
    ),
    Scenario(
        "far-engine",
        "an engine 40 ms away from its proxy",
        "network.upstream",
        setting=Setting(
            (_DOOR, *_NEAR_NGINX, Tap("inner", end=End.NEAR), Engine(end=End.FAR)),
            Load(30, gap_ms=100, tokens=(12,)),
            Truth(Known.GIVEN, "ttft", "to and fro: 2 × 40 ms", ms=80.0),
            link=Link(40.0),
        ),
    ),
    Scenario(
        "loss",
        "a line to the client that loses three packets in a hundred",
        "network.loss",
        setting=Setting(
            (_DOOR, Tap("outer", end=End.FAR), Nginx(end=End.FAR), Tap("inner", end=End.FAR), Engine(end=End.FAR)),
            Load(60, gap_ms=80, tokens=(40,)),
            link=Link(5.0, lost_share=0.03),
        ),
    ),
    Scenario(
        "nagle",
        "nginx without tcp_nodelay, 30 ms away from its client",
        "network.nagle",
        setting=Setting(
            (
                _DOOR,
                Tap("outer", end=End.NEAR),
                Nginx(end=End.FAR, http=("tcp_nodelay off;",)),
                Tap("inner", end=End.FAR),
                Engine(end=End.FAR),
            ),
            Load(30, gap_ms=100, tokens=(40,)),
            link=Link(30.0),
        ),
    ),
    Scenario(
        "dns",
        "an engine by name, and a name server that takes 150 ms each time",
        "dns.slow",
        setting=Setting(
            (Tap("tap", ("--mirror-connections",), upstream_name="engine.test"), Engine()),
            Load(30, gap_ms=100, tokens=(12,), fresh=True),
            Truth(Known.GIVEN, "ttft", "the name server's 150 ms", ms=150.0),
            dns_ms=150.0,
        ),
    ),
    Scenario(
        "tls-handshake",
        "nginx whose TLS handshakes take 300 ms, and every request pays one",
        "tls.handshake",
        setting=Setting(
            (
                Tap("outer", ("--mirror-connections",)),
                Relay({"response_first_ms": 300.0}),
                Nginx(tls=True),
                Tap("inner"),
                Engine(),
            ),
            Load(30, gap_ms=100, tokens=(12,), fresh=True),
            Truth(Known.GIVEN, "ttft", "the first bytes of the terminator come 300 ms late", ms=300.0),
        ),
    ),
    Scenario(
        "slow-reader",
        "a client that reads 1.5 MB a second of answers that come faster",
        "client.slow_reader",
        setting=Setting(
            (
                Relay({"response_bytes_per_s": 1_500_000, "window_bytes": 65536, "receive_bytes": 16384}),
                Tap("outer"),
                Nginx(),
                Tap("inner"),
                Engine({"event_bytes": 64_000}),
            ),
            Load(13, warmup=2, gap_ms=300, tokens=(110,)),
        ),
    ),
    Scenario(
        "saturated-client",
        "a load client whose own event loop is busy four fifths of the time",
        "client.saturated",
        setting=Setting(
            (Tap("tap"), Engine()),
            Load(40, gap_ms=80, tokens=(24,), busy_ms=80.0, busy_every_ms=100.0),
        ),
    ),
    Scenario(
        "not-streaming",
        "a client that asks for the whole answer at once",
        "client.not_streaming",
        setting=Setting(
            (Tap("tap"), Engine()),
            Load(30, gap_ms=80, tokens=(60,), stream=False),
            Truth(Known.ENGINE, "ttft", "the engine's own log: from its first to its last token", of="decode"),
        ),
    ),
    Scenario(
        "tap-overhead",
        "a tap that stands still for 12 of every 20 ms, as under a quota",
        "tap.overhead",
        setting=Setting(
            (Tap("outer", stopped_ms=12.0, every_ms=20.0), Nginx(), Tap("inner"), Engine()),
            Load(40, gap_ms=90, tokens=(24,)),
        ),
    ),
    Scenario(
        "tap-saturated",
        "a tap that stands still for 300 of every 400 ms",
        "tap.saturated",
        setting=Setting(
            (Tap("outer", stopped_ms=300.0, every_ms=400.0), Nginx(), Tap("inner"), Engine()),
            Load(40, gap_ms=100, tokens=(24,)),
        ),
    ),
    Scenario(
        "two-hosts",
        "two taps on two hosts (made up), one of whose clocks jumps by seconds all the time",
        "measurement.not_comparable",
        setting=Setting(
            (Tap("outer"), Nginx("default", tls=True), Tap("inner"), Engine()),
            Load(30, gap_ms=60),
            client=False,
            other_boot=True,
        ),
    ),
    Scenario(
        "too-few",
        "six requests",
        "measurement.too_few_samples",
        setting=Setting((Tap("tap"), Engine()), Load(6, gap_ms=60)),
    ),
)
