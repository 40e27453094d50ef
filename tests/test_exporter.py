"""The admin port: what is counted, what is shown, and to whom."""

from __future__ import annotations

import asyncio
import base64
import re
import time
from dataclasses import fields
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_fd_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_fd_to_metric_families

from tapproxy import __version__
from tapproxy.core import metrics
from tapproxy.core.record import Ended, Record
from tapproxy.core.tally import Tally
from tapproxy.exporter import Exporter, admin_app

MS = 1_000_000
GOLDEN = Path(__file__).resolve().parent / "data" / "exporter" / "metrics.txt"


def record(record_id: str = "01A", **values: Any) -> Record:
    """Head at 1 ms, role at 100 ms, tokens at 150, 160, 160 (one read), usage and the end at 170; every event is
    read 0.1 ms after it arrived and sent 0.2 ms after that."""
    one = Record(id=record_id, tap="tap", t0_unix_ns=1_767_225_600 * 10**9)
    one.method, one.path, one.model, one.stream, one.status = "POST", "/v1/chat/completions", "m", True, 200
    one.request.bytes, one.request.body_end = 500, 2 * MS
    one.upstream.wanted, one.upstream.acquired, one.upstream.connect = 2 * MS, 5 * MS, 2 * MS
    one.upstream.write_start, one.upstream.write_end = 5 * MS, 6 * MS
    one.upstream.first_byte, one.upstream.end, one.upstream.bytes = 100 * MS, 171 * MS, 900
    one.downstream.first_byte, one.downstream.end, one.downstream.bytes = 100 * MS + 300_000, 172 * MS, 900
    one.usage.prompt_tokens, one.usage.completion_tokens = 7, 4
    events = one.events
    for kind, arrived_ms, read, tokens in (
        ("role", 100, 0, 0),
        ("reasoning", 150, 1, 1),
        ("token", 160, 2, 1),
        ("token", 160, 2, 2),
        ("usage", 170, 3, 0),
        ("done", 170, 3, 0),
    ):
        events.kind.append(kind)
        events.end_offset.append(100 * (1 + len(events.end_offset)))
        events.arrived.append(arrived_ms * MS)
        events.read_at.append(arrived_ms * MS + 100_000)
        events.sent.append(arrived_ms * MS + 300_000)
        events.read.append(read)
        events.tokens.append(tokens)
    for name, value in values.items():
        setattr(one, name, value)
    return one


def samples(exporter: Exporter, status: dict[str, Any] | None = None) -> dict[str, float]:
    """The page as `name{label="value"}` → number, without buckets."""
    text = exporter.render(status or {})[0].decode()
    lines = (line.rpartition(" ") for line in text.splitlines() if line[0] != "#" and "_bucket{" not in line)
    return {name: float(value) for name, _, value in lines}


def observed(*records: Record) -> dict[str, float]:
    exporter = Exporter()
    for one in records:
        exporter.observe(one)
    return samples(exporter)


# --- counting ---


def test_the_page_for_one_record_is_this_text() -> None:
    exporter = Exporter("inner")
    exporter.observe(record(findings=["x-accel-buffering-missing"]))
    status: dict[str, Any] = {
        "in_flight": 2,
        "connections": 3,
        "loop_lag_ns": 4 * MS,
        "workers_alive": 1,
        "worker_restarts": 0,
    }
    status |= {"outbox_lost": 5, "store": {"written": 6, "lost": 7, "removed": 8}}
    body, content_type = exporter.render(status)
    assert content_type.startswith("text/plain; version=")
    text = body.decode().replace(f'version="{__version__}"', 'version="VERSION"')
    assert text == GOLDEN.read_text()


def test_every_figure_of_a_stream_is_counted() -> None:
    found = observed(record())
    assert found['tapproxy_requests_total{ended="complete",status_class="2xx",stream="true"}'] == 1
    for kind, upstream_ms in (("byte", 100), ("chunk", 100), ("token", 150), ("visible", 160)):
        for side, later in (("upstream", 0), ("downstream", 0.0003)):
            name = f'tapproxy_ttft_seconds_sum{{kind="{kind}",side="{side}"}}'
            assert found[name] == pytest.approx(upstream_ms / 1000 + later), name
    assert found['tapproxy_request_duration_seconds_sum{side="upstream"}'] == pytest.approx(0.160)
    assert found['tapproxy_chunk_interval_seconds_count{side="upstream"}'] == 2
    assert found['tapproxy_chunk_interval_seconds_sum{side="upstream"}'] == pytest.approx(0.010)
    assert found["tapproxy_chunk_queueing_seconds_count"] == 6
    assert found["tapproxy_chunk_queueing_seconds_sum"] == pytest.approx(6 * 0.0001)
    assert found["tapproxy_chunk_forward_delay_seconds_sum"] == pytest.approx(6 * 0.0002)
    assert found["tapproxy_events_per_read_count"] == 2
    assert found["tapproxy_events_per_read_sum"] == 3
    assert found["tapproxy_tokens_per_event_sum"] == 4
    assert found['tapproxy_tokens_total{model="m",type="completion"}'] == 4
    assert found['tapproxy_upload_seconds_sum{side="downstream"}'] == pytest.approx(0.002)
    assert found['tapproxy_upload_seconds_sum{side="upstream"}'] == pytest.approx(0.001)
    assert found['tapproxy_connect_seconds_sum{phase="tcp"}'] == pytest.approx(0.002)
    assert found["tapproxy_pool_wait_seconds_sum"] == pytest.approx(0.001)
    assert found["tapproxy_request_bytes_total"] == 500
    assert found['tapproxy_response_bytes_total{side="downstream"}'] == 900


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("role", "token", "reasoning", "tool", "finish", "usage", "comment")), st.integers(0, 9)
        ),
        max_size=30,
    ),
    st.integers(0, 5),
)
def test_what_is_counted_is_what_the_definitions_say(events: list[tuple[str, int]], unsent: int) -> None:
    one = Record(id="a", tap="tap", stream=True, status=200)
    one.upstream.end, one.downstream.end = 900, 910
    at = 100
    for number, (kind, gap) in enumerate(events):
        at += gap
        one.events.kind.append(kind)
        one.events.arrived.append(at)
        one.events.read_at.append(at + 1)
        one.events.sent.append(at + 3 if number < len(events) - unsent else None)
        one.events.read.append(number if gap else max(0, number - 1))
        one.events.tokens.append(None)
    found = observed(one)
    tokens = metrics.ttft_ns(one, "arrived") is not None
    expected: dict[str, list[int | None]] = {
        "tapproxy_chunk_queueing_seconds": [*metrics.queueing_ns(one)],
        "tapproxy_chunk_forward_delay_seconds": [*metrics.forward_delay_ns(one)],
    }
    sides: list[tuple[str, metrics.Side]] = [("upstream", "arrived"), ("downstream", "sent")]
    for label, side in sides:
        expected |= {
            f'tapproxy_ttft_seconds{{kind="chunk",side="{label}"}}': [metrics.ttfc_ns(one, side)],
            f'tapproxy_ttft_seconds{{kind="token",side="{label}"}}': [metrics.ttft_ns(one, side)],
            f'tapproxy_ttft_seconds{{kind="visible",side="{label}"}}': [metrics.ttfvt_ns(one, side)],
            f'tapproxy_chunk_interval_seconds{{side="{label}"}}': [*metrics.icl_ns(one, side)],
        }
        if tokens and not unsent:
            expected[f'tapproxy_request_duration_seconds{{side="{label}"}}'] = [metrics.e2e_ns(one, side)]
    for name, values in expected.items():
        known = [value for value in values if value is not None]
        base, brace, labels = name.partition("{")
        assert found.get(f"{base}_count{brace}{labels}", 0) == len(known), name
        assert found.get(f"{base}_sum{brace}{labels}", 0) == pytest.approx(sum(known) / 1e9), name


def test_a_plain_answer_lasts_until_its_end() -> None:
    plain = record(stream=False, events=Record("", "").events)
    found = observed(plain)
    assert found['tapproxy_request_duration_seconds_sum{side="upstream"}'] == pytest.approx(0.171)
    assert found['tapproxy_ttft_seconds_count{kind="byte",side="upstream"}'] == 1
    assert 'tapproxy_ttft_seconds_count{kind="token",side="upstream"}' not in found


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"status": 503}, id="error_status"),
        pytest.param({"status": None, "ended": Ended.UPSTREAM_UNREACHABLE}, id="no_status"),
        pytest.param({"ended": Ended.CLIENT_ABORTED}, id="client_left"),
    ],
)
def test_a_request_that_failed_has_no_latency_but_its_events_are_the_hops(values: dict[str, Any]) -> None:
    found = observed(record(**values))
    assert not [name for name in found if "ttft" in name or "duration" in name]
    assert found["tapproxy_chunk_forward_delay_seconds_count"] == 6


def test_an_error_event_is_a_failure() -> None:
    failed = record()
    failed.events.kind[-1] = "error"
    assert not [name for name in observed(failed) if "ttft" in name]


def test_events_that_never_left_have_no_forward_delay() -> None:
    cut = record(ended=Ended.CLIENT_ABORTED)
    cut.events.sent[3:] = [None, None, None]
    found = observed(cut)
    assert found["tapproxy_chunk_forward_delay_seconds_count"] == 3
    assert found['tapproxy_chunk_interval_seconds_count{side="downstream"}'] == 1
    assert found['tapproxy_chunk_interval_seconds_count{side="upstream"}'] == 2


def test_a_void_record_counts_as_a_request_and_not_in_any_time() -> None:
    found = observed(record(void="loop_lag"))
    assert found['tapproxy_records_void_total{reason="loop_lag"}'] == 1
    assert found['tapproxy_requests_total{ended="complete",status_class="2xx",stream="true"}'] == 1
    assert not [name for name in found if name.endswith("_count") or "_count{" in name]


def test_what_is_unknown_is_not_counted() -> None:
    bare = Record(id="a", tap="tap", ended=Ended.REJECTED)
    found = observed(bare)
    assert found['tapproxy_requests_total{ended="rejected",status_class="none",stream="unknown"}'] == 1
    assert not [name for name in found if "_count{" in name or name.endswith("_count")]


@pytest.mark.parametrize("broken", [{"events": None}, {"status": "200"}, {"usage": None}, {"upstream": "?"}])
def test_a_record_of_another_shape_is_counted_and_harms_nothing(broken: dict[str, Any]) -> None:
    assert observed(record(**broken), record())["tapproxy_records_unreadable_total"] == 1


def test_ten_thousand_models_are_twenty_and_other() -> None:
    exporter = Exporter()
    for number in range(10_000):
        exporter.observe(record(model=f"model-{number}"))
    found = samples(exporter)
    assert len([name for name in found if "model=" in name]) < 100
    assert found['tapproxy_model_ttft_seconds_count{model="model-0"}'] == 1
    assert found['tapproxy_model_ttft_seconds_count{model="other"}'] == 9_980


def test_a_models_name_cannot_break_the_page() -> None:
    name = 'a"} 1\ntapproxy_in_flight 99\n\\' + "x" * 1000
    exporter = Exporter()
    exporter.observe(record(model=name))
    families = {family.name: family for family in text_fd_to_metric_families(StringIO(exporter.render({})[0].decode()))}
    assert {sample.labels["model"] for sample in families["tapproxy_model_ttft_seconds"].samples} == {name[:128]}
    assert "tapproxy_in_flight" not in families


def test_openmetrics_is_given_where_it_is_asked_for() -> None:
    exporter = Exporter()
    exporter.observe(record())
    body, content_type = exporter.render({"in_flight": 1}, "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    families = parse_openmetrics(StringIO(body.decode()))  # type: ignore[no-untyped-call]  # theirs has no types
    assert "tapproxy_in_flight" in {family.name for family in families}


def test_samples_are_counted_by_kind() -> None:
    status = {"samples": {"kept": {"host": 3, "engine": 2}, "failed": {"gpu": 4}, "store": {"lost": 1}}}
    body = Exporter().render(status)[0].decode()
    for line in (
        'tapproxy_samples_total{kind="engine"} 2.0',
        'tapproxy_samples_total{kind="host"} 3.0',
        'tapproxy_samples_failed_total{kind="gpu"} 4.0',
        "tapproxy_samples_lost_total 1.0",
    ):
        assert f"\n{line}\n" in body
    assert "tapproxy_samples" not in Exporter().render({})[0].decode()


def test_two_exporters_share_nothing() -> None:
    one, other = Exporter(), Exporter()
    one.observe(record())
    assert not [name for name in samples(other) if "ttft" in name]


def test_counting_is_cheap() -> None:
    long = record()
    for item in fields(long.events):
        values = getattr(long.events, item.name)
        values[2:2] = values[2:3] * 94
    tally = Tally()
    best_ns = 10**9
    for _ in range(200):
        began_ns = time.perf_counter_ns()
        tally.count(long)
        best_ns = min(best_ns, time.perf_counter_ns() - began_ns)
    # About 20 µs for 100 events; the bound leaves room for a slow machine, not for one look-up a value.
    assert best_ns < 400_000


def test_what_two_workers_counted_adds_up_to_what_one_would_have() -> None:
    records = [record(str(n), model=f"model-{n % 30}", void="steal" if n % 7 == 0 else None) for n in range(60)]
    whole, parts = Exporter(), Exporter()
    workers = [Tally(), Tally()]
    for number, one in enumerate(records):
        whole.observe(one)
        workers[number % 2].count(one)
        parts.keep(orjson.dumps(one))
        if number % 9 == 8:
            parts.tally.add(orjson.loads(orjson.dumps(workers[number % 2].dump())))
            workers[number % 2] = Tally()
    for worker in workers:
        parts.tally.add(worker.dump())
    assert _sums(samples(parts)) == _sums(samples(whole))
    assert len([name for name in samples(parts) if "model=" in name]) < 100


def _sums(found: dict[str, float]) -> dict[str, float]:
    """Which models keep their name depends on the order they come in: their sum does not."""
    out: dict[str, float] = {}
    for name, value in found.items():
        name = re.sub(r'model="[^"]*"', "", name)
        out[name] = round(out.get(name, 0) + value, 9)
    return out


# --- the ring ---


def test_the_last_records_are_kept_newest_first() -> None:
    exporter = Exporter()
    for number in range(1003):
        exporter.observe(record(str(number)))
    kept = exporter.recent()
    assert (len(kept), orjson.loads(kept[0].line)["id"], orjson.loads(kept[-1].line)["id"]) == (1000, "1002", "3")


@pytest.mark.parametrize("key", ["id", "request_id", "response_id", "trace_id"])
def test_a_record_is_found_by_any_of_its_ids(key: str) -> None:
    exporter = Exporter()
    exporter.observe(record(**{key: "wanted"}) if key != "id" else record("wanted"))
    exporter.observe(record("other"))
    assert len(exporter.recent(any_id="wanted")) == 1
    assert exporter.recent(any_id="unknown") == []


# --- the pages ---


def get(
    path: str,
    *,
    exporter: Exporter | None = None,
    token: str | None = None,
    ready: bool = True,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    host: str = "127.0.0.1:9001",
) -> httpx.Response:
    app = admin_app(exporter or Exporter(), lambda: {"in_flight": 3, "upstream": "http://u"}, lambda: ready, token)

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(ask())


def filled(**values: Any) -> Exporter:
    exporter = Exporter()
    for name in ("01A", "01B"):
        exporter.observe(record(name, request_id=f"r-{name}", **values))
    return exporter


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/", "text/html; charset=utf-8"),
        ("/style.css", "text/css; charset=utf-8"),
        ("/metrics", "text/plain"),
        ("/healthz", "text/plain; charset=utf-8"),
        ("/readyz", "text/plain; charset=utf-8"),
        ("/api/records", "application/json"),
        ("/api/records/01A", "application/json"),
        ("/api/status", "application/json"),
    ],
)
def test_each_page_answers_with_the_security_headers(path: str, content_type: str) -> None:
    answer = get(path, exporter=filled())
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith(content_type)
    assert answer.headers["content-security-policy"].startswith("default-src 'self'")
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-store"


def test_not_ready_is_503_and_still_alive() -> None:
    assert get("/readyz", ready=False).status_code == 503
    assert get("/healthz", ready=False).status_code == 200


def test_records_come_newest_first_and_as_many_as_asked_for() -> None:
    def shown(query: str) -> list[str]:
        return [one["id"] for one in get(f"/api/records{query}", exporter=filled()).json()["records"]]

    assert shown("") == ["01B", "01A"]
    assert shown("?limit=1") == ["01B"]
    assert shown("?id=r-01A") == ["01A"]
    assert shown("?id=none") == []


@pytest.mark.parametrize("limit", ["0", "-1", "x", "1001", "٣", "1" * 99])
def test_a_limit_that_is_none_is_refused(limit: str) -> None:
    answer = get(f"/api/records?limit={limit}")
    assert (answer.status_code, answer.json()["error"][-18:]) == (400, "expected 1 to 1000")


def test_an_unknown_record_is_404() -> None:
    assert get("/api/records/none").status_code == 404


def test_the_status_is_shown_with_the_version() -> None:
    assert get("/api/status").json() == {"version": __version__, "name": "tap", "in_flight": 3, "upstream": "http://u"}


@pytest.mark.parametrize("path", ["/", "/metrics", "/api/records", "/api/status", "/nothing"])
@pytest.mark.parametrize(
    "authorization",
    [None, "Bearer wrong", "Bearer ", "Bearer s3cre", "s3cret", "Basic czNjcmV0", "Basic !!"],
)
def test_without_the_token_only_health_answers(path: str, authorization: str | None) -> None:
    headers = {"authorization": authorization} if authorization else None
    answer = get(path, token="s3cret", headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "authorization",
    ["Bearer s3cret", "bearer s3cret", "Basic " + base64.b64encode(b"any:s3cret").decode()],
)
def test_with_the_token_everything_answers(authorization: str) -> None:
    headers = {"authorization": authorization}
    assert get("/metrics", token="s3cret", headers=headers, host="tap.example.org").status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_health_needs_no_token(path: str) -> None:
    assert get(path, token="s3cret").status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:9001", 200), ("localhost:9001", 200), ("[::1]:9001", 200), ("tap", 200), ("evil.example.org", 403)],
)
def test_without_a_token_a_foreign_name_is_refused(host: str, status: int) -> None:
    assert get("/api/records", host=host).status_code == status


def test_what_others_wrote_is_escaped() -> None:
    evil = "<script>alert(1)</script>"
    answer = get("/", exporter=filled(model=evil, path=f"/{evil}"))
    assert evil not in answer.text
    assert "&lt;script&gt;" in answer.text
    assert "<script" not in answer.text


def test_the_page_lists_exchanges() -> None:
    text = get("/", exporter=filled()).text
    assert (
        "<tr><td>2026-01-01 00:00:00</td><td>01B</td><td>POST</td><td>/v1/chat/completions</td><td>m</td><td>200</td>"
        "<td>complete</td><td>150.3</td><td>160.3</td><td>6</td><td></td></tr>"
    ) in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(method: str) -> None:
    assert get("/api/records", method=method).status_code == 405
