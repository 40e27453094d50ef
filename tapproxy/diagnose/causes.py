"""Why it is slow: the table of causes, and the verdict.

Rules here:
* A cause is a row of a table (rules_*.py): its name, its stage, what must have been seen before it is judged at all,
  the judgement, the advice. What a vantage could not see is neither healthy nor guilty: it is named not observable.
* Every threshold is a constant with its reason, and is printed with the number held against it.
* Medians and shares decide, never a maximum: one late event on a busy machine accuses nobody.
* A cause of severity info is told and makes no verdict: degraded is for errors, warnings and troubles nobody names.
* Too few requests: no verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from tapproxy.core import stats
from tapproxy.core.record import Record
from tapproxy.diagnose import behind, engine, rules_engine, rules_host, rules_path, rules_proxy, timeouts
from tapproxy.diagnose.budget import budget, not_observable
from tapproxy.diagnose.clock import sure
from tapproxy.diagnose.evidence import Evidence
from tapproxy.diagnose.facts import Fact, Named, ms
from tapproxy.diagnose.links import measure_links
from tapproxy.diagnose.measures import e2e_ns
from tapproxy.diagnose.moved import evidence_on_home
from tapproxy.diagnose.rule import SEEN, Case, Rule, Target
from tapproxy.diagnose.served import served
from tapproxy.diagnose.shapes import HELD_NS, sort_streams
from tapproxy.diagnose.vantage import UNSEEN, lone_tap
from tapproxy.diagnose.view import View, look

SCHEMA: Final = "tapproxy.verdict/1"
# The least for an estimate of a median by MLPerf's early stopping (definitions.md): below it there is no verdict.
LEAST_REQUESTS: Final = stats.least_n(0.5, 1)
# A stage that no rule names is still not healthy when it takes a fifth of TTFT, and more than a person notices.
UNNAMED_SHARE: Final = 0.2
UNNAMED_MS: Final = 10.0
# With more than half of TTFT unexplained, nothing that was seen says that the path is well.
UNEXPLAINED_SHARE: Final = 0.5
# One in a hundred (latency_tree, engine.errors); and at least two, so that one reset does not fail a run.
FAILED_SHARE: Final = 0.01
FAILED_LEAST: Final = 2
# Refused requests are their senders' affair; more than these are told, since they are no answers that were timed.
REFUSED_SHARE: Final = 0.05
# On a machine of two busy cores one event in two hundred is stamped late by its sender; clocks that disagree, or
# requests that were mixed up, show in far more.
EARLY_SHARE: Final = 0.05
# So much of the records unusable, and the rest may be another population.
DOUBTFUL_SHARE: Final = 0.2
# A distance can't be mended: where it costs about as much as something that can, that goes first.
DISTANCES: Final = frozenset(("network.upstream", "network.downstream"))
DISTANCE_WEIGHT: Final = 0.8
# With one of these the run is void, and nothing that is judged by times is named beside it. Failures are counted.
VOID_CAUSES: Final = frozenset(("client.saturated", "tap.saturated"))
COUNTED_CAUSES: Final = frozenset(("engine.errors",))


# Where the effects do not decide, in this order.
RULES: Final = (*rules_proxy.RULES, *rules_engine.RULES, *rules_host.RULES, *rules_path.RULES)


def verdict(
    *,
    client: Sequence[Record] = (),
    outer: Sequence[Record] = (),
    inner: Sequence[Record] = (),
    direct: bool = False,
    evidence: Evidence | None = None,
    target: Target | None = None,
) -> dict[str, Any]:
    """The contract's verdict on the requests of one path.

    ``client``: the load client's records, ``outer``: those of the tap before the proxy, ``inner``: those of the tap
    next to the engine; leave out what there is none of. ``direct``: nothing stands between the innermost of them and
    the engine, so that what it sees is the engine's doing. ``evidence``: what stood beside them. ``target``: what
    latency was asked of the run; without it a steady engine is never called slow.
    """
    view = look(client, outer, inner, direct=direct)
    links = measure_links(view)
    beside = _during(view, evidence_on_home(evidence or Evidence(), view.clocks))
    found = budget(view, links, beside)
    case = Case(view, links, sort_streams(view), found, beside, served(view, links.engine_ns), target or Target())
    causes = [named.to_dict(rule.cause, rule.stage, rule.advice) for rule, named in _judged(case)]
    void = [cause for cause in causes if cause["cause"] in VOID_CAUSES]
    hidden = any(cause["cause"] == "proxy.retry" for cause in causes)
    total_ms = found["ttft"]["p50"]["total_ms"]
    counted = [cause for cause in causes if cause["cause"] in COUNTED_CAUSES]
    causes = sorted([*void, *counted] if void else causes, key=lambda cause: _badness(cause, total_ms, hidden=hidden))
    unseen, lone = not_observable(found), lone_tap(view)
    if lone is not None:
        unseen += [stage for stage in UNSEEN if stage not in unseen]
    if view.two_sided and SEEN["hop"](view) < LEAST_REQUESTS and "proxy" not in unseen:
        unseen.append("proxy")
    # Answers that nobody streamed have no events to compare, and need none.
    whole = any(cause["cause"] == "client.not_streaming" for cause in causes)
    measuring = [each for each in _measuring(view) if not (whole and each[0] == "measurement.not_comparable")]
    troubles = [] if void else _unnamed(found, causes) + _failures(view, causes)
    doubts = _doubts(view) + [_obstacle(named) for _, named, _ in measuring]
    doubts += [f"{cause['cause']}: the run is void, whoever measured was late itself" for cause in void]
    open_behind = behind.unseen(view, found) if len(view.usable) >= LEAST_REQUESTS else []
    warnings = [*troubles, *doubts, *_silences(view, found), *open_behind, *([] if lone is None else [lone.warning])]
    # What is only worth knowing makes nothing ill.
    if void:
        word = "degraded" if counted else "not_measured"
    elif troubles or any(cause["severity"] != "info" for cause in causes):
        word = "degraded"
    elif measuring or _mostly_unexplained(found) or open_behind or (lone is not None and lone.behind_proxy):
        word = "not_measured"
    else:
        word = "healthy"
    return {
        "schema": SCHEMA,
        "verdict": word,
        "not_observable": unseen,
        "causes": [
            *(cause for cause in causes if cause["severity"] != "info"),
            *(named.to_dict(cause, None, advice) for cause, named, advice in measuring),
        ],
        # Causes of severity info: nobody is accused by them.
        "worth_knowing": [cause for cause in causes if cause["severity"] == "info"],
        "budget": found,
        "clocks": [each.to_dict() for each in view.clocks.clocks],
        "trust": {"ok": not doubts, "warnings": warnings},
    }


def _judged(case: Case) -> list[tuple[Rule, Named]]:
    """What the rules say. Those that stand back for others are asked when these have spoken."""
    found: list[tuple[Rule, Named]] = []
    for rule in sorted(RULES, key=lambda rule: bool(rule.unless)):
        named_before = [before.cause for before, named in found if named.severity != "info"]
        if SEEN[rule.needs](case.view) < LEAST_REQUESTS or any(name.startswith(rule.unless) for name in named_before):
            continue
        named = rule.judge(case)
        if named is not None:
            found.append((rule, named))
    return found


def _during(view: View, evidence: Evidence) -> Evidence:
    """The evidence of the requests' own time."""
    records = [*view.client, *view.outer, *view.inner]
    if not records:
        return evidence
    from_ns = min(record.t0_mono_ns for record in records)
    to_ns = max(record.t0_mono_ns + e2e_ns(record) for record in records)
    return evidence.window(from_ns, to_ns, records[0].boot_id)


def _badness(cause: dict[str, Any], ttft_ms: float | None, *, hidden: bool) -> tuple[int, float, float]:
    """What breaks answers first, then by the share it has in what it slows; what is only worth knowing last.

    ``hidden``: a proxy sends again what the engine failed, so that its errors reach the clients as waiting.
    """
    effect, share, severity = cause["effect_ms"]["p50"], cause["share"], cause["severity"]
    if effect is not None and share is None and ttft_ms:
        share = min(1.0, effect / ttft_ms)
    if cause["cause"] in DISTANCES and share is not None:
        share *= DISTANCE_WEIGHT
    if severity == "info":
        rank = 3
    elif effect is None:
        rank = 0 if severity == "error" and not (hidden and cause["cause"] == "engine.errors") else 2
    else:
        rank = 1
    return (rank, -(share or 0.0), -(effect or 0.0))


def _measuring(view: View) -> list[tuple[str, Named, str]]:
    """What stands in the way of a verdict."""
    usable, needed = len(view.usable), LEAST_REQUESTS
    if usable < needed:
        return [_too_few("requests measured", usable)]
    if not view.two_sided:
        return []
    crossed = SEEN["hop"](view)
    if crossed >= needed:
        return []
    if sum(view.incomparable.values()) < needed - crossed:
        return [_too_few("requests seen on both sides of the proxy", crossed)]
    facts = [Fact(reason, count, "requests", count) for reason, count in view.incomparable.most_common()]
    advice = (
        "Both taps must see the same requests, with clocks that do not step; on two hosts the clocks are compared by "
        "the requests that both saw, answered, in both directions."
    )
    return [("measurement.not_comparable", Named(facts, None, 1.0, "warning"), advice)]


def _too_few(what: str, count: int) -> tuple[str, Named, str]:
    more = stats.need(0.5, count)
    fact = Fact(what, count, "requests", count, LEAST_REQUESTS)
    advice = f"Send {more} more request{'s' if more != 1 else ''}: a median wants {LEAST_REQUESTS}."
    return ("measurement.too_few_samples", Named([fact], None, 1.0, "warning"), advice)


def _obstacle(named: Named) -> str:
    """What stands in the way, as a warning: numbers that are not to be trusted never stand without a reason."""
    fact = named.facts[0]
    if fact.threshold is None:
        return f"{fact.value} requests cannot be compared between the taps: {fact.what}"
    return f"{fact.value} {fact.what}: a verdict needs {fact.threshold}"


def _unnamed(found: dict[str, Any], causes: Sequence[dict[str, Any]]) -> list[str]:
    """Stages that take much and that no rule names. The engine's own are its work, not a trouble, and a request that
    its client takes long to send is nobody's."""
    band = found["ttft"]["p50"]
    named = {cause["stage"] for cause in causes if cause["severity"] != "info"}
    if any(cause["cause"] == "proxy.connection_reuse" and cause["severity"] != "info" for cause in causes):
        # Its cost is that of the handshakes too.
        named.add("tls")
    out = []
    for stage in ("tls", "proxy"):
        part = band["stages"].get(stage)
        if part is None or stage in named:
            continue
        sure_ms = part["ms"] - (part["bound_ms"] or 0)
        if sure_ms >= UNNAMED_MS and sure_ms >= UNNAMED_SHARE * band["total_ms"]:
            out.append(
                f"{stage} takes {part['ms']:.1f} of {band['total_ms']:.1f} ms of TTFT at P50 and no rule names why "
                f"({part['source']})"
            )
    return out


def _failures(view: View, causes: Sequence[dict[str, Any]]) -> list[str]:
    """Failed requests that no cause explains."""
    if any(cause["cause"] == "engine.errors" for cause in causes):
        return []
    standings = engine.standings(view.client or view.outer or view.inner)
    failed = {name: count for name, count in standings.items() if name.startswith("failed")}
    counted = sum(failed.values()) + standings["ok"]
    # An answer that was cut at the limit is counted on one side only: as failed before the proxy.
    total = sum(failed.values()) - sum(_explained(view, cause) for cause in causes)
    if counted < LEAST_REQUESTS or total < max(FAILED_LEAST, FAILED_SHARE * counted):
        return []
    words = ", ".join(f"{name.removeprefix('failed: ')} {count}" for name, count in sorted(failed.items()))
    return [f"{total} of {counted} requests failed ({words}) and no rule names why"]


def _explained(view: View, cause: dict[str, Any]) -> int:
    """How many failed requests this cause accounts for."""
    if cause["cause"] == "proxy.timeout":
        return timeouts.cut_by_proxy(view)
    if cause["cause"] == "proxy.connection_reuse" and cause["metric"] is None:
        return int(cause["evidence"][0]["value"])
    return 0


def _mostly_unexplained(found: dict[str, Any]) -> bool:
    band = found["ttft"]["p50"]
    total_ms, rest_ms = band["total_ms"], band["unexplained_ms"]
    return total_ms is None or abs(rest_ms) > UNEXPLAINED_SHARE * total_ms


def _doubts(view: View) -> list[str]:
    """What makes the numbers doubtful."""
    records = view.standing.total()
    out = []
    if view.standing["void"]:
        share = view.standing["void"] / records
        text = f"{view.standing['void']} of {records} records are void and left out"
        out += [text] if share > DOUBTFUL_SHARE else []
    if view.unpaired > DOUBTFUL_SHARE * records:
        out.append(f"{view.unpaired} of {records} records could not be paired with certainty and are left out")
    if view.negative_holds > EARLY_SHARE * view.held_events:
        out.append(
            f"{view.negative_holds} of {view.held_events} events arrived more than 1 ms before they were sent: "
            "clocks or pairing are wrong"
        )
    return out


def _silences(view: View, found: dict[str, Any]) -> list[str]:
    """What is left out or not seen, without making the rest doubtful."""
    records = view.standing.total()
    out = []
    if not records:
        return ["there are no records"]
    if 0 < view.standing["void"] <= DOUBTFUL_SHARE * records:
        out.append(f"{view.standing['void']} of {records} records are void and left out")
    if 0 < view.unpaired <= DOUBTFUL_SHARE * records:
        out.append(f"{view.unpaired} of {records} records could not be paired with certainty and are left out")
    if view.ambiguous:
        out.append(
            f"{view.ambiguous} requests were not joined: nothing but their body names them, and it was sent several "
            "times at once (a client's X-Request-Id would tell them apart)"
        )
    if view.standing["cut"]:
        out.append(f"{view.standing['cut']} records of requests that were cut short (by client or tap) are left out")
    refused = Counter(
        record.status for record in view.client or view.outer or view.inner if 400 <= (record.status or 0) < 500
    )
    if refused.total() > REFUSED_SHARE * records:
        words = ", ".join(f"{status}: {count}" for status, count in refused.most_common(3))
        out.append(
            f"{refused.total()} of {records} requests were refused (status {words}): what they asked for was not "
            "taken, and they are left out"
        )
    if len(view.usable) >= LEAST_REQUESTS and _mostly_unexplained(found):
        out.append("more than half of TTFT is explained by nothing that was seen from here: no word on health")
    floor_ns = sure(view.floor_ns, view.hold_bound_ns)
    if view.crossed and floor_ns is not None and floor_ns > HELD_NS:
        out.append(
            f"every event takes at least {ms(floor_ns)} ms across the hop: a constant delay, which is no buffering"
        )
    return out + [each.sentence() for each in view.clocks.clocks]
