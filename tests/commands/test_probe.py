"""`tapproxy probe`: wrong usage in a sentence, the text of a result, and what is concluded from what was measured."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tapproxy.commands import probe as command
from tapproxy.core.errors import MeasureError
from tapproxy.probe import plans
from tapproxy.probe.asking import Clocks, Desk, Via
from tapproxy.probe.conclude import Conclusion, conclude
from tapproxy.probe.result import document
from tapproxy.probe.run import Measured, Settings
from tapproxy.probe.shape import shape
from tests.probe import streams
from tests.probe.streams import Proxy

COMMON = Clocks(True, "one host")
TAP = ("--tap", "http://127.0.0.1:9001")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("--via", "127.0.0.1:80", *TAP), "--via is '127.0.0.1:80', which has no scheme", id="no_scheme"),
        pytest.param(
            ("--via", "http://h", "--tap", "http://h/x"), "--tap is 'http://h/x', which has a path", id="path"
        ),
        pytest.param(("--via", "http://h/a", "--path", "/b", *TAP), "give the path once", id="two_paths"),
        pytest.param(("--via", "http://h", "--path", "b", *TAP), "it begins with a slash", id="no_slash"),
        pytest.param(("--via", "http://h", "--idle", "an hour", *TAP), "--idle is 'an hour'", id="no_duration"),
        pytest.param(("--via", "http://h", "--idle", "2h", *TAP), "expected at most 600 seconds", id="too_long"),
        pytest.param(("--via", "http://h", "--header", "secret", *TAP), "--header is no field", id="no_field"),
        pytest.param(
            ("--via", "http://h", "--upstream-profile", "x", *TAP), "expected one of vllm, sglang", id="profile"
        ),
        pytest.param(("--via", "unix:/run/x", *TAP), "expected http://HOST:PORT", id="socket"),
        pytest.param(("--via", "http://h", "--json", "/no/x", *TAP), "--json '/no/x' cannot be written", id="json"),
        pytest.param(("--via", "http://h"), "Missing option '--tap'", id="no_tap"),
    ],
)
def test_wrong_usage_is_a_sentence_and_2(arguments: tuple[str, ...], said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tapproxy.cli", "probe", *arguments], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert said in done.stderr
    assert "secret" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_tap_that_does_not_answer_is_3() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tapproxy.cli", "probe", "--via", "http://127.0.0.1:9", "--tap", "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 3
    assert done.stderr.startswith("tapproxy: the tap's admin port http://127.0.0.1:9 cannot be asked: connect: ")


def measured(proxy: Proxy, gzip: Proxy | None = None, **more: Any) -> Measured:
    """All streams through that proxy; with ``gzip`` the compressed ones through that."""
    out = Measured("http1")
    for cell in (*plans.IDENTITY, *plans.GZIP):
        packed = cell.gzip and gzip is not None
        one = streams.delivered(cell, gzip if packed and gzip is not None else proxy)
        one.encoding = "gzip" if packed else None
        out.cells.append(one)
        found = shape(one)
        assert found is not None
        out.shapes[cell.name] = found
    for key, value in more.items():
        setattr(out, key, value)
    return out


def test_a_file_that_takes_nothing_does_not_take_the_result_along(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def ran(via: Via, desk: Desk, settings: Settings, say: object, out: list[Measured]) -> None:
        desk.clocks = COMMON
        out.append(measured(streams.direct))

    monkeypatch.setattr(command, "run_probe", ran)
    with pytest.raises(MeasureError, match="measured, but '/dev/full' cannot be written: No space left on device"):
        command.probe("http://127.0.0.1:80", TAP[1], json_file="/dev/full")
    assert capsys.readouterr().out.startswith("HEALTHY  http://127.0.0.1:80/v1/chat/completions -> tap ")


def said(conclusion: Conclusion) -> list[tuple[str, str, str]]:
    return [(one["severity"], one["cause"], one["mechanism"]) for one in conclusion.causes]


def test_a_healthy_proxy_has_no_cause_and_no_finding() -> None:
    found = conclude([measured(streams.direct)], COMMON)
    assert (found.verdict, found.causes, found.findings, found.warnings) == ("healthy", [], [], [])


def test_compression_is_named_where_only_compressed_streams_are_held() -> None:
    found = conclude([measured(streams.direct, streams.full)], COMMON)
    assert (found.verdict, said(found)) == ("degraded", [("error", "proxy.compression", "gzip")])
    flushed = conclude([measured(streams.direct, streams.direct)], COMMON)
    assert (flushed.verdict, said(flushed)) == ("healthy", [])
    assert [one.rule for one in flushed.findings] == ["gzip-sse"]
    both = conclude([measured(streams.quanta(4096), streams.full)], COMMON)
    assert said(both) == [("error", "proxy.response_buffering", "quanta_4k")]


@pytest.mark.parametrize(
    ("after_s", "severity", "verdict"),
    [(5.0, "error", "degraded"), (30.0, "warning", "healthy"), (60.0, "info", "healthy")],
)
def test_a_cut_weighs_by_how_soon_it_comes(after_s: float, severity: str, verdict: str) -> None:
    cut = {"cut": True, "after_s": after_s, "waited_s": 90.0, "side": "tap", "client_saw": "x", "silent": False}
    found = conclude([measured(streams.direct, silence={"quiet-first": cut, "quiet-middle": cut})], COMMON)
    assert found.verdict == verdict
    assert [(one.rule, one.severity) for one in found.findings] == [("read-timeout-too-short", severity)]
    assert said(found) == ([] if severity == "info" else [(severity, "proxy.timeout", "read_timeout")])


def test_what_has_no_pattern_is_not_claimed_and_not_healthy() -> None:
    cells = measured(streams.direct)
    for name in ("small", "middle"):
        cells.shapes[name] = streams.shapes([plans.SMALL], streams.timer(60, one_shot=True))[0]
    found = conclude([cells], COMMON)
    assert (found.verdict, found.causes) == ("not_measured", [])
    assert "no pattern that names a mechanism: no claim" in found.warnings[0]


def test_too_few_streams_are_not_measured() -> None:
    few = measured(streams.direct)
    for cell in plans.IDENTITY[:3]:
        few.void[cell.name] = "the tap itself sent late"
        del few.shapes[cell.name]
    found = conclude([few], COMMON)
    assert found.verdict == "not_measured"
    assert found.clients[0].streaming is None
    assert found.clients[0].why == "2 of 5 streams say something, 3 are needed"


def test_an_abort_that_is_late_and_a_head_that_waits_are_warnings() -> None:
    late = {"reached": True, "after_ms": 900.0, "events_sent_for_nobody": 45, "how": "one clock", "threshold_ms": 500}
    one = measured(streams.direct, abort=late)
    for cell in one.cells:
        cell.fetched.head_ns = cell.events[0].arrived_ns
    found = conclude([one], COMMON)
    assert found.verdict == "healthy"
    assert found.clients[0].streaming == "late_header"
    assert [(item.rule, item.severity) for item in found.findings] == [
        ("header-late", "warning"),
        ("ignore-client-abort", "warning"),
    ]


@pytest.mark.parametrize(
    ("server", "severity", "advice"),
    [
        ("nginx/1.31.3", "warning", "proxy_ignore_client_abort"),
        ("Apache", "info", "SSE comments"),
        ("", "warning", "abortonclose"),
    ],
    ids=["nginx", "apache", "haproxy"],
)
def test_an_abort_before_the_first_event_that_is_not_passed_on_is_told(server: str, severity: str, advice: str) -> None:
    late = {"reached": True, "after_ms": 1521.0, "events_sent_for_nobody": 2, "how": "one clock", "threshold_ms": 500}
    one = measured(streams.direct, abort_first=late)
    for cell in one.cells:
        cell.fetched.headers.append((b"Server", server.encode()))
    found = conclude([one], COMMON)
    assert found.verdict == "healthy"
    (finding,) = found.findings
    assert (finding.rule, finding.severity) == ("ignore-client-abort", severity)
    assert finding.summary == (
        "http1: a client that leaves before the first event is noticed upstream only when events are sent to it "
        "(2 of them): its queue and prefill go on for nobody"
    )
    assert advice in finding.advice


def test_streams_that_are_refused_together_are_a_finding_with_its_advice() -> None:
    one = measured(streams.direct, refused=[503, 503, 429])
    found = conclude([one], COMMON)
    assert found.verdict == "healthy"
    assert [(item.rule, item.severity) for item in found.findings] == [("limit-conn-streams", "warning")]
    via = Via("http://127.0.0.1:80", "/v1/chat/completions")
    shown = command.text(document(via, Desk("http://h", None, clocks=COMMON), Settings(0.0), [one], found))
    assert "limit-conn-streams: http1: 3 of 7 streams at one time were refused (429 and 503)\n  to do: Allow" in shown


def test_the_text_says_verdict_cause_evidence_rivals_and_what_to_do() -> None:
    one = measured(streams.quanta(16384))
    desk = Desk("http://127.0.0.1:9001", None, about={"tap": "inner", "workers": 2}, clocks=COMMON)
    via = Via("http://127.0.0.1:80", "/v1/chat/completions")
    shown = command.text(document(via, desk, Settings(90.0), [one], conclude([one], COMMON)))
    assert shown.startswith("DEGRADED  http://127.0.0.1:80/v1/chat/completions -> tap inner\n")
    for part in (
        "http1      held (quanta_16k): bytes are passed on when about 16 KiB have come together, at every rate",
        "error: proxy.response_buffering (quanta_16k)  [http1]",
        "(threshold 1.35)",
        "    not timer: events waited up to ",
        "  to do: Turn response buffering off for this path.",
    ):
        assert part in shown


def test_a_share_is_shown_as_percent_in_the_text_and_as_a_fraction_in_the_document() -> None:
    one = measured(streams.one_late(4_000))
    shown = document(
        Via("http://127.0.0.1:80", "/x"), Desk("http://h", None, clocks=COMMON), Settings(0.0), [one],
        conclude([one], COMMON),
    )  # fmt: skip
    (fact,) = [item for cause in shown["causes"] for item in cause["evidence"] if item["unit"] == "share"]
    assert (fact["value"], fact["threshold"]) == (1.0, 0.8)
    assert "    large: events that came with the next one: 100 %  (threshold 80 %)\n" in command.text(shown)


def test_without_a_common_clock_the_same_mechanism_is_found_and_it_is_said() -> None:
    apart = Clocks(False, "the tap runs on another host")
    found = conclude([measured(streams.quanta(16384))], apart)
    assert said(found) == [("error", "proxy.response_buffering", "quanta_16k")]
    assert found.warnings == [
        "no common clock (the tap runs on another host): only gaps, order and round trips are claimed"
    ]


def test_a_report_that_is_missing_voids_its_stream() -> None:
    one = measured(streams.direct)
    one.void["small"] = "the tap has no report of it"
    found = conclude([one], COMMON)
    assert found.warnings == ["http1: the stream small is void: the tap has no report of it"]
