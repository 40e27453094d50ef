"""What one exchange shows by itself, in words that say for whom it matters."""

from __future__ import annotations

import pytest

from tapproxy.core import spot
from tapproxy.core.record import Record


def streamed(client_http: str = "1.1", **headers: str | None) -> Record:
    fields = {"content-type": "text/event-stream", "server": "uvicorn", **headers}
    return Record(id="x", tap="inner", status=200, stream=True, client_http=client_http, headers=fields)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        # vLLM and SGLang behind any nginx: section 0 of the measurements.
        pytest.param(
            streamed(**{"transfer-encoding": "chunked"}),
            ["plain HTTP/1.1 and to HTTP/2 clients", "HTTP/1.1 clients over TLS get nothing until 16 kB"],
            id="chunked",
        ),
        pytest.param(
            streamed("1.0", **{"transfer-encoding": "chunked"}),
            ["it is chunked", "of any version"],
            id="chunked_to_1.0",
        ),
        pytest.param(
            streamed("1.0"), ["asked for in HTTP/1.0", "before 1.29.7", "4 kB at a time"], id="closing_to_1.0"
        ),
        pytest.param(streamed(), ["it is not chunked", "4 kB at a time", "TLS 16 kB"], id="closing"),
    ],
)
def test_a_missing_accel_field_says_for_which_clients_it_matters(record: Record, words: list[str]) -> None:
    (found,) = [one for one in spot.findings(record) if one.rule == "x-accel-buffering-missing"]
    assert found.severity == "info"
    assert found.evidence.startswith("text/event-stream from uvicorn without X-Accel-Buffering; it is ")
    for one in words:
        assert one in found.evidence
    assert "`X-Accel-Buffering: no`, which overrides it" in found.advice


@pytest.mark.parametrize(
    "headers",
    [{"x-accel-buffering": "no"}, {"x-accel-buffering": "yes"}, {"content-type": "application/json"}],
    ids=["no", "yes", "no_stream"],
)
def test_an_engine_that_says_so_and_a_plain_answer_lack_nothing(headers: dict[str, str]) -> None:
    assert "x-accel-buffering-missing" not in spot.rules(streamed(**headers))
