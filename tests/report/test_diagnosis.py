"""A diagnosis on the screen: every line, and nothing a stranger wrote gets through."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tapproxy.report import diagnosis, html
from tapproxy.report.diagnosed import tables


def screen(result: dict[str, Any], *, width: int = 100, encoding: str = "utf-8") -> str:
    raw = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="replace")
    diagnosis.show(result, Console(file=raw, width=width, color_system=None))
    raw.seek(0)
    return "\n".join(line.rstrip() for line in raw.read().splitlines())


def make() -> dict[str, Any]:
    def part(ms: float, bound: float | None, source: str) -> dict[str, Any]:
        return {"ms": ms, "bound_ms": bound, "source": source}

    stages = {
        "network.downstream": None,
        "tap": part(0.25, 0.0, "request handling, inner tap"),
        "engine.queue": part(312.0, 12.5, "told by the engine (span)"),
        "engine.prefill": part(80.0, 0.0, "told by the engine (span)"),
    }
    return {
        "schema": "tapproxy.verdict/1",
        "verdict": "degraded",
        "scenario": {"command": "diagnose", "name": "tap", "title": "40 requests", "setting": ["tap next to it."]},
        "window": {"requests": 40},
        "not_observable": ["network.downstream", "proxy"],
        "causes": [
            {
                "cause": "engine.queue",
                "stage": "engine.queue",
                "severity": "error",
                "confidence": 0.9,
                "metric": "ttft",
                "effect_ms": {"p50": 312.0, "p95": None},
                "share": 0.78,
                "evidence": [
                    {"what": "requests waiting, mean", "value": 41, "unit": "requests", "n": 60, "threshold": 1},
                    {"what": "queue time, of TTFT", "value": 78.0, "unit": "%", "n": 40, "threshold": 30.0},
                ],
                "rejected": [{"cause": "engine.kv_cache", "because": "KV usage is 41.0 % while requests wait"}],
                "advice": "Add a replica.",
                "fix": None,
            },
            {"cause": "host.cpu", "severity": "info", "metric": "ttft", "effect_ms": {"p50": None}, "share": None},
            {"cause": "tap.overhead", "severity": "info", "metric": "icl", "effect_ms": {"p50": 1.5}, "share": 0.05},
        ],
        "budget": {
            "ttft": {
                "p50": {
                    "total_ms": 400.0,
                    "stages": stages,
                    "unexplained_ms": 7.75,
                    "requests": 8,
                    "band": "P40 to P60 of TTFT@tap(inner)",
                    "need": 0,
                },
                "p95": {"total_ms": None, "stages": {}, "unexplained_ms": None, "requests": 40, "need": 90},
            }
        },
        "trust": {"ok": True, "warnings": ["2 of 42 records are void and left out"]},
        "presence": [{"tap": "tap", "what": "a pool for all clients", "requests": 40}],
        "notes": [],
        "slo": [
            {
                "for": "all requests",
                "state": "missed",
                "unsorted": 0,
                "limits": [
                    {
                        "metric": "ttft",
                        "limit_ms": 200.0,
                        "share": 0.95,
                        "n": 40,
                        "over": 30,
                        "within_share": 0.25,
                        "unknown": 0,
                        "state": "missed",
                        "need": None,
                    }
                ],
            }
        ],
    }


SCREEN = """\
tapproxy diagnose · tap: 40 requests
tap next to it.

✗ DEGRADED  engine.queue  TTFT +312 ms at P50, 78 % of it

engine.queue  error, stage engine.queue, confidence 90 %
  · requests waiting, mean: 41 requests (threshold 1 requests, n=60)
  · queue time, of TTFT: 78 % (threshold 30 %, n=40)
  not engine.kv_cache: KV usage is 41.0 % while requests wait
  → Add a replica.

host.cpu  info, confidence –

also tap.overhead: ICL +1.5 ms at P50, 5 % of it

Where TTFT goes
  stage           P50 ms     ±  share  P95 ms  known from
  tap               0.25  0.00    0 %       –  request handling, inner tap
  engine.queue       312  12.5   78 %       –  told by the engine (span)
  engine.prefill    80.0  0.00   20 %       –  told by the engine (span)
  unexplained        7.8          2 %       –  what the evidence does not cover
  total              400                    –  P50: mean of 8 requests, P40 to P60 of TTFT@tap(inner); P95: 90
                                               more requests would give it

Not observable from here: network.downstream, proxy

Objectives
  ✗ missed  all requests: TTFT within 200 ms for 95 % of requests: it was for 25 % (n=40, 30 over)

What the taps changed
  · tap: a pool for all clients (n=40)

What to know of these numbers
  · 2 of 42 records are void and left out"""


def test_the_screen_line_by_line() -> None:
    assert screen(make(), width=110) == SCREEN


def test_numbers_that_are_doubtful_say_so() -> None:
    result = make()
    result["trust"]["ok"] = False
    assert "What to know of these numbers  the numbers are doubtful" in screen(result)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_the_signs_gets_others(encoding: str) -> None:
    text = screen(make(), encoding=encoding)
    assert "x DEGRADED" in text


def test_the_time_line_has_its_marks_where_they_happened() -> None:
    def each(minute: int, p50: float | None, **gauges: float) -> dict[str, Any]:
        figures = {"p50": p50, "p95": None}
        return {
            "from": f"2026-11-29T20:{minute:02d}:00Z",
            "t_unix_ns": minute * 60 * 10**9,
            "requests": 60,
            "failed": minute % 2,
            "rate_per_s": 1.0,
            "ttft_ms": figures,
            "tpot_ms": figures,
            "running": gauges.get("running"),
            "waiting": None,
            "kv_usage_share": gauges.get("kv"),
        }

    result = make()
    result["timeline"] = {
        "bin_s": 60,
        "bins": [each(1, 100.0, running=3, kv=0.5), each(2, 50.0), each(3, None)],
        "marks": [
            {"at": "2026-11-29T20:02:00Z", "t_unix_ns": 120 * 10**9, "kind": "traffic", "what": "1 → 5 a second"},
            {"at": "2026-11-29T20:03:30Z", "t_unix_ns": 210 * 10**9, "kind": "silence", "what": "none \x1b[31m"},
        ],
    }
    text = screen(result)
    found = text[text.index("Over time") : text.index("What the taps")].strip().splitlines()
    assert found == [
        "Over time  a line each 60 s, in ms; what changed stands between",
        "  from (UTC)  requests/s  failed  TTFT P50  P95  TPOT P50  running    KV",
        "  20:01:00           1.0       1       100    –       100      3.0  50 %  ████████████████████████",
        "  → 20:02:00 traffic: 1 → 5 a second",
        "  20:02:00           1.0              50.0    –      50.0        –     –  ████████████",
        "  20:03:00           1.0       1         –    –         –        –     –",
        "  → 20:03:30 silence: none �[31m",
    ]
    assert "\x1b" not in html.render(result)


def test_what_strangers_wrote_moves_no_cursor_and_no_tag() -> None:
    result = make()
    result["evidence"] = {
        "engines": {"http://h/<script>": {"engine": "v\x1b[2J", "readings": 1, "failed": 0, "absent": {"x": "<b>\x07"}}}
    }
    result["slices"] = {"model": [{"class": "<img src=x>\x1b[1m", "n": 1, "failed": 0}]}
    text, page = screen(result), html.render(result)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "<img src=x>" not in page
    assert "http://h/<script>" not in page
    assert "1 reading" in text


def test_a_demo_has_none_of_these_blocks() -> None:
    assert tables({"verdict": "healthy", "paths": {}}) == []


def test_a_page_that_could_not_see_the_proxy_claims_no_more_than_it_saw() -> None:
    result = make() | {"verdict": "healthy", "causes": []}
    assert "Nothing that could be seen from here holds the stream" in html.render(result)
    result["not_observable"] = []
    assert "Nothing on the way holds the stream" in html.render(result)
