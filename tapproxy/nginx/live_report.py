"""What a live check measured, as the JSON of a client and as a line beside its prediction."""

from __future__ import annotations

from typing import Any

from tapproxy.nginx.live_far import RTT_MS, Far
from tapproxy.nginx.live_stream import HELD_P50_MS, Stream, rounded
from tapproxy.nginx.live_streams import Abort, Measured


def streaming_of(measured: Measured) -> str:
    """The contract's word for what was measured: a stream that was cut, also in a pause, fails."""
    return "fails" if measured.cut else measured.main.streaming


def agrees(predicted: str, measured: Measured) -> bool | None:
    """Whether the prediction held; None where it said that it depends."""
    return None if predicted == "depends" else predicted == streaming_of(measured)


def measured_to_dict(measured: Measured, far: Far | None, predicted: str) -> dict[str, Any]:
    """``measured`` of the contract, and what else the streams showed."""
    main = measured.main
    large = measured.large_event
    shown: dict[str, Any] = {
        "hold_ms": {"p50": rounded(main.hold_p50_ms), "max": rounded(main.hold_max_ms)},
        "ttft_added_ms": rounded(main.ttft_added_ms),
        "header_delay_ms": rounded(main.header_delay_ms),
        "cut": measured.cut,
        "upstream_reused": measured.upstream_reused,
        "streaming": streaming_of(measured),
        "agrees": agrees(predicted, measured),
        "status": main.status,
        "error": main.error,
        "coalesced": rounded(main.coalesced),
        "content_encoding": main.encoding,
        "upstream_method": main.seen.method,
        "upstream_http": main.seen.http_version,
        "request_body_arrived": main.seen.body_bytes > 0,
        "runs": measured.runs,
        "streams": {
            "without_gzip": measured.without_gzip.to_dict(),
            "short": measured.short.to_dict(),
            "over_16_kb": measured.over_16_kb.to_dict(),
            "reused_connection": measured.reused_connection.to_dict(),
            "large_event": {**large.to_dict(), "large_event_hold_ms": rounded(_hold_of(large, 3))},
            "large_prompt": measured.large_prompt.to_dict(),
            "engine_dies": {**measured.engine_dies.to_dict(), "client_is_told": measured.engine_dies.error is not None},
        },
        "abort": {"decode": _abort(measured.abort_decode), "prefill": _abort(measured.abort_prefill)},
    }
    if measured.silence is not None:
        shown["streams"]["silence"] = {**measured.silence.to_dict(), "silence_ms": measured.silence_ms}
    if far is not None:
        shown["streams"][f"rtt_{RTT_MS}_ms"] = far.first.to_dict()
        if far.second is not None:
            shown["streams"][f"rtt_{RTT_MS}_ms_second_request"] = far.second.to_dict()
        shown["nagle"] = nagle(measured, far)
    return shown


def nagle(measured: Measured, far: Far) -> bool | None:
    """Whether the link adds a hold that loopback has not; None where the stream is held or fails anyway."""
    if measured.main.streaming not in ("streams", "late_header") or far.first.hold_p50_ms is None:
        return None
    return far.first.hold_p50_ms >= HELD_P50_MS


def _hold_of(stream: Stream, number: int) -> float | None:
    return stream.hold_ms[number] if len(stream.hold_ms) > number else None


def _abort(found: Abort | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {"reached_upstream": found.reached_ms is not None, "after_ms": rounded(found.reached_ms)}


def client_line(kind: str, predicted: str, shown: dict[str, Any] | None, why_not: str | None) -> str:
    """One line of the text output: predicted, measured, and whether they agree."""
    if shown is None:
        return f"{kind:<10} not measured: {why_not}"
    verdict = {True: "as predicted", False: f"NOT AS PREDICTED ({predicted})", None: f"predicted: {predicted}"}
    hold = shown["hold_ms"]
    parts = [f"{kind:<10} measured {shown['streaming']}, {verdict[shown['agrees']]}"]
    if shown["status"] != 200:
        parts.append(f"status {shown['status']}" if shown["status"] else str(shown["error"]))
    else:
        parts.append(f"hold {_ms(hold['p50'])} p50, {_ms(hold['max'])} max")
        parts.append(f"header {_ms(shown['header_delay_ms'])} late")
        parts.append(f"TTFT +{_ms(shown['ttft_added_ms'])}")
    if shown["cut"]:
        silence = shown["streams"].get("silence")
        parts.append(f"cut in a silence of {silence['silence_ms']} ms" if silence else "cut")
    parts += _remarks(shown)
    return "; ".join(parts)


def _remarks(shown: dict[str, Any]) -> list[str]:
    """What the other streams showed, where it is not the same."""
    streams, remarks = shown["streams"], []
    if streams["without_gzip"]["streaming"] != shown["streaming"] and not shown["cut"]:
        remarks.append(f"without Accept-Encoding: gzip it {_verb(streams['without_gzip']['streaming'])}")
    late = streams["large_event"]["large_event_hold_ms"]
    if late is not None and late >= 100 and shown["streaming"] != "held":
        remarks.append(f"an event of 5 kB waits {_ms(late)}, as long as the pause after it")
    if streams["large_prompt"]["status"] not in (200, shown["status"]):
        remarks.append(f"a prompt of 2 MB gets {streams['large_prompt']['status'] or streams['large_prompt']['error']}")
    if shown["upstream_method"] not in ("POST", None):
        remarks.append(f"the engine is asked with {shown['upstream_method']}")
    elif not shown["request_body_arrived"] and shown["status"] == 200:
        remarks.append("the engine gets no prompt")
    if streams["engine_dies"]["status"] == 200 and not streams["engine_dies"]["client_is_told"]:
        remarks.append("where the engine dies, the client's answer ends as if it were whole")
    for phase, found in shown["abort"].items():
        if found is not None and not found["reached_upstream"]:
            remarks.append(f"a client that leaves during {phase} does not stop the engine within 1 s")
    if shown.get("nagle"):
        held = streams[f"rtt_{RTT_MS}_ms"]["hold_ms"]["p50"]
        remarks.append(f"at {RTT_MS} ms RTT events wait {_ms(held)} more (Nagle)")
    return remarks


def _verb(streaming: str) -> str:
    return {"streams": "streams", "late_header": "streams (late header)", "held": "is held"}.get(streaming, "fails")


def _ms(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1f} ms"
