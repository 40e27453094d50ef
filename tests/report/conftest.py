"""A result as ``demo`` makes one, with plain numbers: 100 tokens, one each 15 ms, nginx hands on 73 at once."""

from __future__ import annotations

from typing import Any

import pytest

TOKENS = 100
FIRST_MS = 45.0
GAP_MS = 15.0


def steady(added_ms: float) -> list[float]:
    return [FIRST_MS + added_ms + GAP_MS * i for i in range(TOKENS)]


def held(batch: int) -> list[float]:
    """What a full TLS buffer does: the first ``batch`` come with the last of them, the rest at the end."""
    sent = steady(0.6)
    return [sent[min(len(sent), (i // batch + 1) * batch) - 1] + 0.5 for i in range(TOKENS)]


def summary(p50: float | None, p95: float | None, n: int = 130) -> dict[str, Any]:
    return {"p50": p50, "p90": None, "p95": p95, "p99": None, "mean": p50, "n": n, "need": {"p99": 532}}


def path(ttft: tuple[float, float], icl: tuple[float, float], e2e: tuple[float, float]) -> dict[str, Any]:
    return {
        "requests": 130,
        "errors": {},
        "ttft_ms": summary(*ttft),
        "icl_ms": summary(*icl, n=12870),
        "e2e_ms": summary(*e2e),
        "output_tokens_per_s": 810.0,
        "hold_ms": None,
        "route": "client → engine",
    }


def make_result() -> dict[str, Any]:
    nginx = path((1126.2, 1131.9), (0.0, 0.04), (1531.0, 1536.0))
    nginx["hold_ms"] = summary(548.1, 1065.0, n=13000)
    nginx["route"] = "client → outer tap → nginx (TLS) → inner tap → engine"
    fixed = path((46.1, 48.4), (15.0, 15.6), (1531.9, 1538.1))
    fixed["hold_ms"] = summary(0.21, 0.44, n=13000)
    stage = {"bound_ms": 0.0, "source": "paired taps"}
    return {
        "schema": "tapproxy.verdict/1",
        "verdict": "degraded",
        "headline": "nginx collects the answer: the first token arrives 1 081 ms late, then 73 tokens at once.",
        "not_observable": ["network.downstream"],
        "causes": [
            {
                "cause": "proxy.response_buffering",
                "stage": "proxy",
                "severity": "error",
                "confidence": 0.97,
                "metric": "ttft",
                "effect_ms": {"p50": 1080.6, "p95": 1084.2},
                "share": 0.96,
                "evidence": [
                    {"what": "hold per event, P50", "value": 548.1, "unit": "ms", "n": 13000, "threshold": 5.0},
                    {"what": "events in one read, most", "value": 73, "unit": "events", "n": 130, "threshold": 8},
                    {"what": "inter-chunk P50, before nginx", "value": 15.0, "unit": "ms", "n": 12870},
                    {"what": "inter-chunk P50, after nginx", "value": 0.0, "unit": "ms", "n": 12870},
                ],
                "rejected": [
                    {"cause": "network.downstream", "because": "loopback, no retransmit"},
                    {"cause": "engine.bundling", "because": "the inner tap saw one event a read"},
                ],
                "advice": "Set `proxy_buffering off;` in the location that serves the stream.",
                "fix": {
                    "file": "nginx/demo-default.conf",
                    "line": 21,
                    "diff": (
                        "--- a/nginx/demo-default.conf\n+++ b/nginx/demo-default.conf\n@@ -20,3 +20,4 @@\n"
                        "         location / {\n             proxy_pass http://127.0.0.1:8000;\n"
                        "+            proxy_buffering off;\n         }\n"
                    ),
                },
            }
        ],
        "budget_path": "nginx",
        "budget": {
            "ttft": {
                "p50": {
                    "total_ms": 1126.2,
                    "requests": 13,
                    "unexplained_ms": 0.3,
                    "stages": {
                        "client": {"ms": 0.2, **stage},
                        "network.downstream": None,
                        "tls": {"ms": 0.9, **stage},
                        "proxy": {"ms": 1079.7, **stage},
                        "tap": {"ms": 0.2, **stage},
                        "network.upstream": {"ms": 0.1, **stage},
                        "engine.frontend": {"ms": 1.1, "bound_ms": 0.0, "source": "response.metrics"},
                        "engine.queue": {"ms": 3.7, "bound_ms": 0.0, "source": "response.metrics"},
                        "engine.prefill": {"ms": 40.0, "bound_ms": 0.0, "source": "response.metrics"},
                    },
                }
            },
            "tpot": {"p50": {}, "p95": {}},
        },
        "trust": {"ok": True, "warnings": []},
        "paths": {
            "direct": path((45.2, 47.0), (15.0, 15.2), (1530.2, 1535.0)),
            "tap": path((45.5, 47.6), (15.0, 15.3), (1530.8, 1535.5)),
            "nginx": nginx,
            "fixed": fixed,
        },
        "timelines": {
            "direct": [{"t_ms": steady(0.2), "typical": True}],
            "tap": [{"t_ms": steady(0.5), "typical": True}],
            "nginx": [{"t_ms": held(73), "typical": True}],
            "fixed": [{"t_ms": steady(1.1), "typical": True}],
        },
        "tap": {
            "added_ttft_ms": {"p50": 0.31, "p95": 0.6, "n": 130},
            "forward_delay_ms": {"p50": 0.09, "p95": 0.21, "n": 13000},
            "limit_ms": 1.0,
            "within_limit": True,
        },
        "scenario": {
            "name": "buffering",
            "command": "demo",
            "staged": "proxy.response_buffering",
            "title": "nginx with proxy_pass and nothing else",
            "setting": [
                "nginx 1.22.1 with TLS, HTTP/1.1 clients, simulated engine, all on this machine's loopback.",
                "130 requests on each of 4 paths, in random turns; 100 tokens, one every 15 ms; 40 at a time.",
            ],
        },
        "environment": {"tapproxy": "0.1.0", "nginx": "1.22.1", "python": "3.11.7", "kernel": "6.18", "cpus": 2},
        "notes": [],
        "next": "Your own: `tapproxy check FILE` reads an nginx configuration.",
    }


@pytest.fixture
def result() -> dict[str, Any]:
    return make_result()
