"""The rules that blame the network, the client or the tap itself. Each judges in a module of its own.

Rules here: every threshold is a constant with its reason, where it is judged, and is printed with the number held
against it. Medians and shares decide, never a maximum: one late event on a busy machine accuses nobody. An advice is
one change, what to expect of it, what it may cost, and how to verify it.
"""

from __future__ import annotations

from typing import Final

from tapproxy.diagnose import connections, holding, line, loss, nagle, saturation, streaming
from tapproxy.diagnose.rule import Rule

RULES: Final = (
    Rule(
        "client.saturated",
        "client",
        "records",
        lambda case: saturation.client_saturated(case.view),
        "The load client itself was late, so that its numbers are its own: send less, or from more processes, on a "
        "machine with cores to spare. Nothing else is judged from this run. Verify: its reading keeps up with the "
        "arrivals, and the same load gives the same numbers twice.",
    ),
    Rule(
        "tap.saturated",
        "tap",
        "records",
        lambda case: saturation.tap_saturated(case.view),
        "The tap was not let run in time, so that its stamps say more of it than of the path. Give it a core "
        "of its own "
        "(--workers N where one is full), or send less through it. Nothing else is judged from this run. Verify: no "
        "record is void, and loop lag in its metrics stays below a tenth of the time between tokens.",
    ),
    Rule(
        "client.slow_reader",
        "client",
        "path",
        lambda case: holding.slow_reader(case.view),
        "The client, or the network to it, takes the answer more slowly than it comes. Read the stream in a loop of "
        "its own, do less work per event, or look at the client's link. Answers then end as the engine ends them; the "
        "client needs room for what it has not worked on yet. Verify: the tap is not paused for that client any more.",
    ),
    Rule(
        "client.not_streaming",
        "client",
        "path",
        lambda case: streaming.not_streaming(case.view, case.evidence),
        'The client waits for whole answers. Ask for `"stream": true` and work on each event as it comes: the first '
        "words then show when the engine has them, and the whole takes as long as before. It costs an event per token "
        "to read, and proxies on the way must not buffer. Verify: time to the first token at the client is the "
        "engine's. Where nobody reads along (batch jobs), leave it as it is.",
    ),
    Rule(
        "network.downstream",
        "network.downstream",
        "path",
        lambda case: line.downstream(case.view, case.links, loss.network_loss(case.view, case.evidence)),
        "The distance itself costs this. Serve from nearer by, keep connections open, and do not book it as inference. "
        "A point of presence in between saves the handshakes, not the round trip. Verify: the least round trip of the "
        "client's connections.",
    ),
    Rule(
        "network.upstream",
        "network.upstream",
        "path",
        lambda case: line.upstream(case.view, case.links, loss.network_loss(case.view, case.evidence)),
        "The proxy and the engine are far apart. Put them next to each other, or keep connections between them open: "
        "each new one costs a round trip more. Verify: the least round trip of the connections to the engine.",
    ),
    Rule(
        "network.loss",
        "network.downstream",
        "path",
        lambda case: loss.network_loss(case.view, case.evidence),
        "Segments are lost on this line, and all that follows waits for them. Look at the line where they are counted: "
        "a full queue (shape the traffic, or more bandwidth), a wrong MTU, a bad link. A congestion control that reads "
        "loss less as a sign of congestion (BBR) shortens the waits but not the loss. Verify: segments sent again "
        "(ss -ti, nstat TcpRetransSegs) stay below 0.5 %, and P99 comes down to a few times P50.",
    ),
    Rule(
        "network.nagle",
        "network.downstream",
        "hop",
        lambda case: nagle.nagle(case.view, case.shapes),
        "Set TCP_NODELAY where the proxy sends (nginx: `proxy_buffering off;`, which sets it for streams; `tcp_nodelay "
        "on;` is its default and does not reach the first answer of a buffered connection). Each token then "
        "leaves when "
        "it is there; it costs a packet per token, which was the aim. Verify: over the same distance the gaps between "
        "tokens are the engine's. On loopback it does not show.",
    ),
    Rule(
        "dns.slow",
        "network.downstream",
        "path",
        lambda case: connections.slow_dns(case.view),
        "Look names up less often, or nearer by: a caching resolver on the host (nscd, systemd-resolved, unbound), a "
        "name with fewer search domains (a dot at its end, ndots:1), or connections that are kept. Each new connection "
        "then saves the look-up; a cached address is stale for as long as its TTL. Verify: `dig` answers within 1 ms "
        "the second time.",
    ),
    Rule(
        "tls.handshake",
        "tls",
        "path",
        lambda case: connections.slow_tls(case.view),
        "The handshake takes long each time. Use TLS 1.3 with session resumption and an ECDSA certificate, leave out "
        "look-ups on the way (OCSP without stapling), and see that whoever ends TLS has a core free. Each new "
        "connection then saves it; resumption needs keys shared between replicas. Verify: `openssl s_time -connect "
        "HOST:443` on both sides of whatever ends TLS.",
    ),
    Rule(
        "tap.overhead",
        "tap",
        "path",
        lambda case: line.tap_overhead(case.view),
        "tapproxy itself takes a noticeable part. Give it a core of its own, use --workers, or sample fewer streams. "
        "What it takes is then gone from every number here, and is no loss to anybody without the tap. Verify: its own "
        "part of TTFT and its delay of an event, in the evidence.",
    ),
)
