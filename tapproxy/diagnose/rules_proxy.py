"""The rules that blame the proxy. Each judges in a module of its own; here stand the rows.

Rules here: every threshold is a constant with its reason, where it is judged, and is printed with the number held
against it. Medians and shares decide, never a maximum: one late event on a busy machine accuses nobody. An advice is
one change, what to expect of it, what it may cost, and how to verify it.
"""

from __future__ import annotations

from typing import Final

from tapproxy.diagnose import behind, connections, holding, retries, timeouts, uploads
from tapproxy.diagnose.rule import Rule

RULES: Final = (
    Rule(
        "proxy.response_buffering",
        "proxy",
        "hop",
        lambda case: holding.response_buffering(case.view, case.shapes, case.links),
        "Turn the proxy's response buffering off for the streaming paths.",
    ),
    Rule(
        "proxy.response_buffering",
        "proxy",
        "path",
        lambda case: behind.response_buffering(case.view),
        "Turn the proxy's response buffering off for the streaming paths.",
    ),
    Rule(
        "proxy.compression",
        "proxy",
        "hop",
        lambda case: holding.compression(case.view, case.shapes, case.links),
        "Take text/event-stream out of what the proxy compresses (nginx: gzip_types, or `gzip off;` in the location), "
        "and set `proxy_buffering off;`: unbuffered, nginx flushes the compressor with every event. Tokens "
        "then come as "
        "the engine sends them; the answers take some seven times the bytes, which is next to nothing at a token's "
        "pace. Verify: the same load, and time to the first token before and after the hop agree.",
    ),
    Rule(
        "proxy.rate_limit",
        "proxy",
        "hop",
        lambda case: holding.rate_limit(case.view, case.shapes),
        "Lift the proxy's bandwidth limit on the streaming paths (nginx: limit_rate, proxy_limit_rate). "
        "Answers then end "
        "when the engine ends them; a limit against abuse belongs on requests, not on bytes. Verify: the bytes "
        "a second behind the hop follow those before it.",
    ),
    Rule(
        "proxy.timeout",
        "proxy",
        "records",
        lambda case: timeouts.proxy_timeout(case.view),
        "Set the proxy's read timeout above the longest silence of the engine, prefill and queueing included.",
    ),
    Rule(
        "proxy.retry",
        "proxy",
        "records",
        lambda case: retries.proxy_retry(case.view),
        "The proxy sends a failed request again: the client waits for both, and the engine may work twice. Leave POST "
        "out of what is sent again (nginx: no `non_idempotent`, and no `timeout` or `http_5xx`, in "
        "proxy_next_upstream), "
        "and mend what fails first. Clients then see the failures that were hidden, at once; send again there, with a "
        "pause that grows. Verify: as many requests behind the proxy as before it.",
    ),
    Rule(
        "proxy.connection_reuse",
        "proxy",
        "records",
        lambda case: connections.missed_reuse(case.view, case.links),
        "Let the proxy keep its connections (nginx before 1.29.7: an upstream block with `keepalive 32;`, "
        '`proxy_http_version 1.1;` and `proxy_set_header Connection "";`; for clients `keepalive_timeout 75s;`). Each '
        "request then saves a connection and its handshake; idle connections cost some memory at both ends, and must "
        "be kept for less time than the engine keeps them (uvicorn: 5 s), or a POST meets a closed one. Verify: nearly "
        "all requests come over connections that carried others before.",
    ),
    Rule(
        "proxy.request_buffering",
        "proxy",
        "path",
        lambda case: uploads.request_buffering(case.view, case.links),
        "Let the proxy pass requests on as they come (nginx: `proxy_request_buffering off;`), or keep them in memory "
        "(`client_body_buffer_size 1m;`) so that none goes through a file. The first token comes earlier by what the "
        "second sending took. Unbuffered, a request that has begun cannot be sent to another replica. Verify: last "
        "byte in and last byte out of the proxy agree, with prompts of the same size.",
    ),
)
