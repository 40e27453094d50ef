"""The verdict of a comparison: what spoils it, what the paths did to the stream, and whether one is slower.

Rules here:
* What spoils the numbers comes before what they say: a void run or one that does not compare calls nothing else a
  difference.
* The client alone sees this: a cause inside the engine or the network is only named where nothing else explains it.
* A difference that nobody would notice makes no path ill, however sure it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tapproxy.core import stats
from tapproxy.load import shapes
from tapproxy.load.arms import IN_BLOCKS, Arm, Start, median
from tapproxy.load.comparability import ERRORS_LEAST, ERRORS_SHARE
from tapproxy.load.differences import DECIDES, Differences
from tapproxy.load.shapes import Seen, Shape
from tapproxy.load.trial import Trial

SCHEMA: Final = "tapproxy.verdict/1"
EXIT_CODES: Final[Mapping[str, int]] = {"healthy": 0, "degraded": 1, "not_measured": 3}
# A path that is surely slower by so much is not healthy, though no rule names why: a fifth of TTFT, and more than a
# person notices (the same as the diagnosis of a tap holds against a stage).
SLOWER_SHARE: Final = 0.2
SLOWER_MS: Final = 10.0
# A round trip explains a difference when it is half of it.
EXPLAINS_SHARE: Final = 0.5
# latency_tree, proxy.connection_reuse: paid on more than half of the requests; and more than a LAN's round trip.
PAID_SHARE: Final = 0.5
PAID_NS: Final = 1_000_000
# What a client sees nothing of. (The proxy it sees by comparing paths.)
NOT_OBSERVABLE: Final = (
    "tls",
    "tap",
    "network.upstream",
    "engine",
    "engine.frontend",
    "engine.queue",
    "engine.prefill",
    "engine.decode",
)


@dataclass(frozen=True, slots=True)
class Judged:
    """All that the rules look at."""

    trial: Trial
    arms: dict[str, Arm]
    differences: Mapping[str, Differences]
    incomparable_because: Sequence[str]
    shapes: Mapping[str, Seen]

    @property
    def baseline(self) -> Arm:
        """The first path."""
        return next(iter(self.arms.values()))

    @property
    def others(self) -> list[Arm]:
        """All but the first."""
        return list(self.arms.values())[1:]


def conclude(
    trial: Trial, arms: dict[str, Arm], found: Mapping[str, Differences], incomparable_because: Sequence[str]
) -> dict[str, Any]:
    """The verdict of the contract."""
    judged = Judged(trial, arms, found, incomparable_because, {name: shapes.look(arm) for name, arm in arms.items()})
    causes = [cause for rule in _RULES for cause in rule(judged)]
    order = ("error", "warning", "info")
    causes.sort(key=lambda cause: (cause["cause"].startswith("measurement."), order.index(cause["severity"])))
    slower = list(_slower(judged))
    warnings = _warnings(judged)
    # Void before all else; then what is wrong; then what is missing.
    missing = [cause for cause in causes if cause["cause"] == "measurement.too_few_samples"]
    if trial.client.saturated or _nothing_came(judged):
        word = "not_measured"
    elif len(causes) > len(missing) or slower:
        word = "degraded"
    else:
        word = "not_measured" if missing else "healthy"
    return {
        "schema": SCHEMA,
        "verdict": word,
        "not_observable": [*(["proxy"] if len(arms) < 2 else []), *NOT_OBSERVABLE],
        "causes": causes,
        "budget": None,
        "trust": {
            "ok": not (trial.client.saturated or incomparable_because or missing),
            "warnings": [*slower, *warnings],
        },
    }


def _cause(
    cause: str,
    stage: str | None,
    evidence: Sequence[Mapping[str, Any]],
    advice: str,
    *,
    severity: str = "error",
    confidence: float,
    metric: str | None = None,
    path: str | None = None,
    effect_ms: Mapping[str, float | None] | None = None,
    share: float | None = None,
    rejected: Sequence[tuple[str, str]] = (),
) -> dict[str, Any]:
    return {
        "cause": cause,
        "stage": stage,
        "severity": severity,
        "confidence": confidence,
        "metric": metric,
        "path": path,
        "effect_ms": dict(effect_ms or {"p50": None, "p95": None}),
        "share": share,
        "evidence": list(evidence),
        "rejected": [{"cause": rival, "because": because} for rival, because in rejected],
        "advice": advice,
        "fix": None,
    }


def _fact(what: str, value: float | None, unit: str, n: int | None, threshold: float | None = None) -> dict[str, Any]:
    return {"what": what, "value": value, "unit": unit, "n": n, "threshold": threshold}


def _saturated(judged: Judged) -> Iterator[dict[str, Any]]:
    client = judged.trial.client
    if not client.saturated:
        return
    facts = [
        _fact(what, None if value is None else value * scale, unit, None)
        for what, value, scale, unit in (
            ("event loop late, P99", client.loop_lag_p99_ns, 1e-6, "ms"),
            ("event loop late, most", client.loop_lag_max_ns, 1e-6, "ms"),
            ("sent after it was due, P99", client.late_p99_ns, 1e-6, "ms"),
            ("CPU of one core", client.cpu_share, 100, "%"),
        )
        if value is not None
    ]
    yield _cause(
        "client.saturated",
        "client",
        [_fact(client.why or "the client could not keep up", None, "", None), *facts],
        "These numbers are the client's own: they are void. Send less at once, give --processes, or the client a "
        "machine of its own.",
        confidence=1.0,
    )


def _not_comparable(judged: Judged) -> Iterator[dict[str, Any]]:
    if judged.incomparable_because:
        yield _cause(
            "measurement.not_comparable",
            None,
            [_fact(reason, None, "", None) for reason in judged.incomparable_because],
            "Make what is named the same on every path, and run again; until then no number here is a difference.",
            confidence=1.0,
        )


def _too_few(judged: Judged) -> Iterator[dict[str, Any]]:
    """No median of TTFT, or no interval of the difference: nothing was compared."""
    least = stats.least_n(0.5, 1)
    for arm in judged.arms.values():
        count = len(arm.values("ttft_ms"))
        seen = judged.shapes[arm.name].shape
        if count < least and seen is not Shape.NOT_A_STREAM and arm.failures < max(1, len(arm.results) / 2):
            more = stats.need(0.5, count)
            yield _cause(
                "measurement.too_few_samples",
                None,
                [_fact(f"requests with a TTFT on {arm.name}", count, "requests", count, least)],
                f"Send {more} more request{'s' if more != 1 else ''} over each path: a median wants {least}.",
                severity="warning",
                confidence=1.0,
                path=arm.name,
            )
            return
    metric, percentile = DECIDES
    for name, found in judged.differences.items():
        each = found[metric][percentile]
        if each.difference_ms is None and each.units < least and judged.shapes[name].shape is Shape.STREAMED:
            yield _cause(
                "measurement.too_few_samples",
                None,
                [_fact(f"requests answered on both {judged.baseline.name} and {name}", each.units, "", None, least)],
                "The paths answered different requests: give more of them.",
                severity="warning",
                confidence=1.0,
                path=name,
            )
        elif each.difference_ms is not None and each.ci95_ms is None:
            yield _cause(
                "measurement.too_few_samples",
                None,
                [_fact(f"blocks of {name} beside blocks of {judged.baseline.name}", each.units, "blocks", None, 2)],
                "One block of each path says nothing of how much blocks differ by themselves: give more requests, so "
                "that there are several.",
                severity="warning",
                confidence=1.0,
                path=name,
            )


def _errors(judged: Judged) -> Iterator[dict[str, Any]]:
    """Failures on the baseline: of the path with the least in it. Those of one path only are in not_comparable."""
    arm = judged.baseline
    share = arm.failure_share
    if share is None or arm.failures < ERRORS_LEAST or share < ERRORS_SHARE:
        return
    facts = [_fact("requests that failed", round(100 * share, 1), "%", len(arm.results), 100 * ERRORS_SHARE)]
    facts += [_fact(name, count, "requests", len(arm.results)) for name, count in sorted(arm.failed.items())]
    yield _cause(
        "engine.errors",
        "engine",
        facts,
        f"Look at the engine's log for what {arm.name} was answered; latency of the others is not the first problem.",
        confidence=0.7,
        path=arm.name,
    )


def _not_streaming(judged: Judged) -> Iterator[dict[str, Any]]:
    for arm in judged.arms.values():
        seen = judged.shapes[arm.name]
        if seen.shape is not Shape.NOT_A_STREAM:
            continue
        kinds = sorted({str(r.record.headers.get("content-type")).partition(";")[0] for r in arm.good})
        asked = "a stream was asked for" if judged.trial.asked.stream else "no stream was asked for"
        yield _cause(
            "client.not_streaming",
            "client",
            [
                _fact(f"answers of {arm.name} that are no event stream", round(100 * seen.share, 1), "%", seen.answers),
                _fact(f"{asked}; the answers are {', '.join(kinds)}", None, "", seen.answers),
            ],
            "Ask with `stream: true`, and look for what takes it out of the request on this path: the first token is "
            "seen only when the last one is.",
            confidence=0.9,
            metric="ttft",
            path=arm.name,
            rejected=[("proxy.response_buffering", "a held stream is still an event stream; this answer is none")],
        )


def _held(judged: Judged) -> Iterator[dict[str, Any]]:
    """Streams that come at the end, or in lumps, on one path and not on another; or at the end on all of them."""
    streaming = [arm for arm in judged.arms.values() if judged.shapes[arm.name].shape is Shape.STREAMED]
    for arm in judged.arms.values():
        seen = judged.shapes[arm.name]
        if seen.shape is Shape.AT_THE_END and not streaming:
            # Nobody shows that the engine streams: the path nearest to it is the one to say so.
            if arm is judged.baseline:
                yield _synthetic(judged, arm, seen, 0.7, "error")
        elif seen.shape is Shape.AT_THE_END or (seen.shape is Shape.LUMPED and streaming):
            reference = streaming[0]
            if seen.shape is Shape.LUMPED and not shapes.tokens_apart(reference):
                continue
            yield from _held_against(judged, arm, seen, reference)


def _held_against(judged: Judged, arm: Arm, seen: Seen, reference: Arm) -> Iterator[dict[str, Any]]:
    ours, theirs = list(arm.streams), list(reference.streams)
    hop = shapes.shows_a_hop(ours, theirs)
    compressed = all(record.headers.get("content-encoding") for record in ours) and not any(
        record.headers.get("content-encoding") for record in theirs
    )
    facts = [
        _fact(
            f"answers of {arm.name} whose tokens came {_HOW[seen.shape]}",
            round(100 * seen.share, 1),
            "%",
            seen.answers,
            100 * shapes.ANSWERS_SHARE,
        ),
        _fact(
            f"token events that came in one read with the one before, {arm.name}",
            None if seen.lumped is None else round(100 * seen.lumped, 1),
            "%",
            seen.answers,
        ),
        _fact(
            f"the same on {reference.name}, where the engine streams",
            None if (lumped := judged.shapes[reference.name].lumped) is None else round(100 * lumped, 1),
            "%",
            judged.shapes[reference.name].answers,
        ),
    ]
    if hop is not None:
        facts.append(_fact(f"a hop in between: {hop}", None, "", len(ours)))
    a, b = median(arm.values("ttft_ms")), median(reference.values("ttft_ms"))
    effect = None if a is None or b is None else (a - b) / 1e6
    share = None if effect is None or not a else round(max(0.0, min(1.0, effect / (a / 1e6))), 3)
    sure = hop is not None or seen.shape is Shape.LUMPED
    yield _cause(
        "proxy.compression" if compressed else "proxy.response_buffering",
        "proxy",
        facts,
        "Take text/event-stream out of what the proxy compresses on this path."
        if compressed
        else "Turn response buffering off on this path (nginx: `proxy_buffering off;`), or what collects the answer.",
        confidence=0.9 if sure else 0.6,
        metric="ttft",
        path=arm.name,
        effect_ms={"p50": effect, "p95": None},
        share=share,
        rejected=[("engine.synthetic_stream", f"the engine streams on {reference.name}")] if sure else (),
    )
    if not sure:
        # The same picture from here: something without a trace that makes the answer first and then streams it.
        yield _synthetic(judged, arm, seen, 0.3, "warning")


_HOW: Final = {Shape.AT_THE_END: "all at the end", Shape.LUMPED: "in lumps"}


def _synthetic(judged: Judged, arm: Arm, seen: Seen, confidence: float, severity: str) -> dict[str, Any]:
    return _cause(
        "engine.synthetic_stream",
        "engine.decode",
        [
            _fact(
                f"answers of {arm.name} whose tokens came all at the end",
                round(100 * seen.share, 1),
                "%",
                seen.answers,
                100 * shapes.ANSWERS_SHARE,
            )
        ],
        "The answer is generated first and streamed afterwards, or something before the engine holds it all: a tap "
        "next to the engine tells which.",
        severity=severity,
        confidence=confidence,
        metric="ttft",
        path=arm.name,
    )


def _reconnecting(judged: Judged) -> Iterator[dict[str, Any]]:
    """A path that has to be connected to for most requests, where another keeps its connections."""
    if judged.trial.asked.fresh_connections:
        return
    kept = [arm for arm in judged.arms.values() if (_reused(arm) or 0) > PAID_SHARE]
    for arm in judged.arms.values():
        share = _reused(arm)
        paid_ns = _paid_ns(arm)
        if not kept or share is None or share >= PAID_SHARE or paid_ns is None or paid_ns < PAID_NS:
            continue
        yield _cause(
            "proxy.connection_reuse",
            "proxy",
            [
                _fact(
                    f"requests of {arm.name} on a new connection",
                    round(100 * (1 - share), 1),
                    "%",
                    len(arm.results),
                    100 * PAID_SHARE,
                ),
                _fact("DNS, TCP and TLS of one, P50", paid_ns / 1e6, "ms", len(arm.results), PAID_NS / 1e6),
            ],
            "The connection is closed after each answer: let it be kept open (nginx: keepalive_timeout, "
            "keepalive_requests).",
            severity="warning",
            confidence=0.8,
            path=arm.name,
        )


def _reused(arm: Arm) -> float | None:
    known = [r.record.upstream.reused for r in arm.results if r.record.upstream.reused is not None]
    return sum(known) / len(known) if known else None


def _paid_ns(arm: Arm) -> float | None:
    parts = [result.record.upstream for result in arm.results if result.record.upstream.reused is False]
    return median([(part.dns or 0) + (part.connect or 0) + (part.tls or 0) for part in parts])


def _distance(judged: Judged) -> Iterator[dict[str, Any]]:
    """A difference in TTFT that the round trip to the other end explains."""
    for arm in judged.others:
        each = judged.differences[arm.name][DECIDES[0]][DECIDES[1]]
        ours, theirs = _round_trip_ns(arm), _round_trip_ns(judged.baseline)
        if not each.significant or each.difference_ms is None or each.ci95_ms is None or ours is None or theirs is None:
            continue
        farther_ms = (ours - theirs) / 1e6
        if each.ci95_ms[0] < SLOWER_MS or farther_ms < EXPLAINS_SHARE * each.difference_ms:
            continue
        yield _cause(
            "network.downstream",
            "network.downstream",
            [
                _fact(f"least round trip to {arm.name}, P50", ours / 1e6, "ms", len(arm.good)),
                _fact(f"the same to {judged.baseline.name}", theirs / 1e6, "ms", len(judged.baseline.good)),
            ],
            "The distance itself costs this. Serve from nearer by, and do not book it as inference.",
            severity="warning",
            confidence=0.8,
            metric="ttft",
            path=arm.name,
            effect_ms={"p50": farther_ms, "p95": None},
        )


def _round_trip_ns(arm: Arm) -> float | None:
    return median([r.record.upstream.min_rtt_ns for r in arm.good if r.record.upstream.min_rtt_ns is not None])


_RULES: Final[tuple[Callable[[Judged], Iterator[dict[str, Any]]], ...]] = (
    _saturated,
    _not_comparable,
    _not_streaming,
    _held,
    _errors,
    _reconnecting,
    _distance,
    _too_few,
)


def _slower(judged: Judged) -> Iterator[str]:
    """Paths that are surely and noticeably slower to the first token."""
    base = median(judged.baseline.values("ttft_ms"))
    for name, found in judged.differences.items():
        each = found[DECIDES[0]][DECIDES[1]]
        if not each.significant or each.ci95_ms is None or base is None:
            continue
        least = each.ci95_ms[0]
        if least >= SLOWER_MS and least >= SLOWER_SHARE * base / 1e6:
            yield (
                f"{name} is {each.difference_ms:.1f} ms slower to the first token at P50 than {judged.baseline.name} "
                f"(95 %: {each.ci95_ms[0]:.1f} to {each.ci95_ms[1]:.1f} ms)"
            )


def _nothing_came(judged: Judged) -> bool:
    """No answer on any path."""
    return not any(arm.good for arm in judged.arms.values())


def _warnings(judged: Judged) -> list[str]:
    """What to know before believing the numbers."""
    trial = judged.trial
    out = []
    if _nothing_came(judged):
        out.append("no request was answered on any path")
    if trial.interrupted:
        out.append("interrupted: these are the figures of the requests that had ended")
    for arm in judged.arms.values():
        if arm.void:
            out.append(f"{arm.void} answers of {arm.name} are void (their stamps cannot be trusted) and left out")
    if trial.asked.scenario in IN_BLOCKS and judged.others:
        out.append("whole blocks alternate: the interval is of blocks, and few blocks make it wide")
    if trial.asked.scenario == "server":
        out.append("early stopping assumes independent requests, which a queue breaks")
        if judged.baseline.start is Start.SENT:
            out.append("requests without a due time: latency is from the sending, not from the schedule")
    metric, percentile = DECIDES
    for name, found in judged.differences.items():
        each = found[metric][percentile]
        if each.excludes_zero and not each.above_floor:
            out.append(
                f"{name}: {each.difference_ms:.2f} ms at P50 of TTFT lies below the floor of {each.floor_ms:.2f} ms, "
                "which the baseline shows against itself: not called a difference"
            )
    good = [result for arm in judged.arms.values() for result in arm.good]
    if good and all(result.record.usage.completion_tokens is None for result in good):
        out.append("no TPOT: the engine gives no usage (stream_options.include_usage); inter-chunk latency is shown")
    return out
