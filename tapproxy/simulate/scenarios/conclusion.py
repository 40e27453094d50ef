"""From the results of a run and the records of its taps to what the report shows. Every number comes from elsewhere:
load, diagnose and core compute, this module says of what.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tapproxy import __version__
from tapproxy.core import metrics, stats
from tapproxy.core.findings import Finding
from tapproxy.core.record import Record
from tapproxy.core.sample import Sample, taken
from tapproxy.diagnose import causes, pairing
from tapproxy.diagnose.evidence import Evidence
from tapproxy.load import compare, sender
from tapproxy.simulate.scenarios.catalogue import ROUTES, Workload
from tapproxy.simulate.scenarios.parts import Scenario
from tapproxy.simulate.scenarios.stage import Stage

# What a tap may add at P50 before the report says so itself.
TAP_LIMIT_MS: Final = 1.0
# An effect is measured right when it is that near to what was put in.
AGREE_SHARE: Final = 0.05
AGREE_MS: Final = 3.0
NEXT: Final = (
    "Your own: `tapproxy check FILE` reads an nginx configuration, `tapproxy serve --upstream URL` taps an engine."
)
# Its lines before and after: number, and how many where that is not 1.
_HUNK: Final = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
# Cause → the rules of the static check that explain it, the surest first.
EXPLAINS: Final[Mapping[str, tuple[str, ...]]] = {
    "proxy.response_buffering": ("buffering-on", "xab-ignored", "buffering-on-latent"),
    "proxy.compression": ("gzip-buffers-sse",),
}


def conclude(
    scenario: Scenario,
    workload: Workload,
    stage: Stage,
    results: Sequence[sender.Result],
    taps: Mapping[str, Sequence[Record]],
    samples: Sequence[Sample] = (),
) -> dict[str, Any]:
    client = {path: [r.record for r in results if r.slot.path == path and not r.slot.warmup] for path in stage.urls}
    inner = {path: _of_these(taps["inner"], records) for path, records in client.items()}
    outer = {path: _of_these(taps[f"outer-{path}"], client[path]) for path in ("nginx", "fixed")}
    # Where the proxy encoded the body, no tap before it sees events: the client, who decoded it, stands in.
    holds = {path: _holds_ns(outer[path], inner[path]) or _holds_ns(client[path], inner[path]) for path in outer}
    found = compare.summarise(results, holds_ns=holds)
    paths = {path: found[path] for path in ROUTES if path in found}
    for path, summary in paths.items():
        summary["route"] = ROUTES[path].format(nginx=scenario.route)
    verdict = causes.verdict(
        client=client["nginx"], outer=outer["nginx"], inner=inner["nginx"], evidence=Evidence.of(samples)
    )
    for cause in verdict["causes"]:
        cause["fix"] = (
            None
            if stage.examined is None
            else (_fix(cause["cause"], stage.examined.findings, stage.examined.patch, paths))
        )
    done = sum(not result.slot.warmup for result in results)
    wanted = workload.requests * len(stage.urls)
    return {
        **verdict,
        "scenario": _scenario(scenario, workload, stage),
        "paths": paths,
        "budget_path": "nginx",
        "tap": _tap_cost(paths, inner["tap"]),
        "timelines": {path: timelines(client[path]) for path in paths},
        "environment": _environment(stage, results),
        "sampled": taken(samples),
        "requests": {"done": done, "wanted": wanted},
        "interrupted": done < wanted,
        "next": NEXT,
        "notes": []
        if done == wanted
        else [f"Interrupted: {done} of {wanted} requests had ended; these are their figures."],
    }


def _of_these(tap: Sequence[Record], requests: Sequence[Record]) -> list[Record]:
    """What a tap saw of these requests, by the id that the load client gave them."""
    ids = {record.request_id for record in requests}
    return [record for record in tap if record.request_id in ids]


def _holds_ns(outer: Sequence[Record], inner: Sequence[Record]) -> list[int] | None:
    """The hold of every paired event, None where nothing could be paired."""
    holds = [pairing.hold_ns(pair).values_ns for pair in pairing.pair(outer, inner).pairs]
    known = [value for values in holds if values is not None for value in values]
    return known or None


def _fix(
    cause: str, findings: Sequence[Finding], patch: str | None, paths: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any] | None:
    """The change of configuration against a cause, where the check found a rule that explains it.

    ``diff`` is all of the patch that path ``fixed`` runs with, ``measured`` what came of it; ``line`` is the first that
    it touches; ``finding`` says where the fault itself stands.
    """
    for finding in findings:
        if finding.rule in EXPLAINS.get(cause, ()) and finding.patch is not None and patch is not None:
            return {
                "file": finding.file,
                "line": _first_changed_line(patch),
                "diff": patch,
                "finding": {"rule": finding.rule, "line": finding.line, "directive": finding.directive},
                "measured": _before_and_after(paths),
            }
    return None


def _before_and_after(paths: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """The same load without the change and with it; None where either path has no figures."""
    before, after = paths.get("nginx"), paths.get("fixed")
    if before is None or after is None:
        return None
    return {
        "path": "fixed",
        **{
            metric: {
                when: {percentile: (path.get(metric) or {}).get(percentile) for percentile in ("p50", "p95")}
                for when, path in (("before", before), ("after", after))
            }
            for metric in ("ttft_ms", "hold_ms")
        },
    }


def _first_changed_line(diff: str) -> int | None:
    """The number that the first removed or added line has in its file: a removed one's before, an added one's after."""
    before = after = 0
    for line in diff.splitlines():
        hunk = _HUNK.match(line)
        if hunk is not None:
            # A count of 0 numbers the line before the change.
            before, after = (int(hunk[i]) + (hunk[i + 1] == "0") for i in (1, 3))
        elif before and line[:1] in ("-", "+"):
            return before if line[0] == "-" else after
        elif before:
            before, after = before + 1, after + 1
    return None


def _tap_cost(paths: Mapping[str, Mapping[str, Any]], records: Sequence[Record]) -> dict[str, Any]:
    """What the inner tap added to path ``tap``: TTFT against ``direct``, and its forward delay, event by event."""
    tap, direct = (paths.get(name, {}).get("ttft_ms") or {} for name in ("tap", "direct"))
    with_tap, without = tap.get("p50"), direct.get("p50")
    added = None if with_tap is None or without is None else with_tap - without
    delay = stats.summary([value for record in records for value in metrics.forward_delay_ns(record)])
    figures = [added, delay["p50"]]
    return {
        "added_ttft_ms": {"p50": added, "n": min(tap.get("n") or 0, direct.get("n") or 0)},
        "forward_delay_ms": delay,
        "limit_ms": TAP_LIMIT_MS,
        "within_limit": None if None in figures else max(figures) < TAP_LIMIT_MS,
    }


def timelines(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Arrival times of each whole answer; the one whose TTFT is the median is marked as typical."""
    whole = [(ttft, record) for record in records if (ttft := metrics.ttft_ns(record)) is not None]
    middle = stats.percentile([ttft for ttft, _ in whole], 0.5) if whole else None
    typical = next((record for ttft, record in whole if ttft == middle), None)
    return [{"t_ms": [ns / 1e6 for ns in record.events.arrived], "typical": record is typical} for _, record in whole]


def _scenario(scenario: Scenario, workload: Workload, stage: Stage) -> dict[str, Any]:
    paths = len(stage.urls)
    return {
        "command": "demo",
        "name": scenario.name,
        "title": scenario.title,
        "staged": scenario.staged,
        "setting": [
            f"nginx {stage.nginx.version} with TLS, HTTP/1.1 clients, a simulated engine; all on loopback.",
            f"{workload.requests} requests on each of {paths} paths in random turns, one every {workload.gap_ms:g} ms;"
            f" {workload.tokens} tokens, one every {workload.interval_ms} ms.",
        ],
    }


def _environment(stage: Stage, results: Sequence[sender.Result]) -> dict[str, Any]:
    return {
        "tapproxy": __version__,
        "nginx": stage.nginx.version,
        "python": platform.python_version(),
        "kernel": f"{platform.system()} {platform.release()}",
        "cpus": os.cpu_count(),
        "client_stamps": results[0].record.stamps.source,
    }


def effects(result: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of ``scenarios/1``: what was staged beside what the verdict says of it, at P50.

    Staged effect: what the scenario knows that it put in; without that, TTFT over path ``nginx`` − over ``direct``,
    from the clients alone. The verdict's comes from the taps' records.
    """
    scenario = result["scenario"]
    found = [cause for cause in result["causes"] if cause["severity"] != "info"]
    first = found[0] if found else None
    named = result["verdict"] if first is None else first["cause"]
    metric, staged_ms = _staged(result)
    measured_ms = None if first is None else first["effect_ms"]["p50"]
    also = [cause["cause"] for cause in found[1:]]
    entry = {
        "scenario": scenario["name"],
        "staged": scenario["staged"],
        "named": named,
        "effect_staged_ms": staged_ms,
        "effect_measured_ms": measured_ms,
        "also": also,
        "metric": metric,
        "metric_measured": None if first is None else first["metric"],
        "also_staged": list(scenario.get("also", ())),
        "unexplained_ms": _unexplained_ms(result),
    }
    entry["ok"] = named == scenario["staged"] and set(entry["also_staged"]) <= set(also) and _agree(entry)
    return entry


def _unexplained_ms(result: Mapping[str, Any]) -> float | None:
    """What the budget of TTFT leaves over at P50."""
    band = result.get("budget", {}).get("ttft", {}).get("p50")
    return None if band is None else band["unexplained_ms"]


def _staged(result: Mapping[str, Any]) -> tuple[str | None, float | None]:
    scenario = result["scenario"]
    if "effect" in scenario:
        effect = scenario["effect"]
        return (None, None) if effect is None else (effect["metric"], effect["ms"])
    if scenario["staged"] == "healthy":
        return None, None
    through, direct = (result["paths"][path]["ttft_ms"]["p50"] for path in ("nginx", "direct"))
    return "ttft", None if through is None or direct is None else round(through - direct, 3)


def _agree(entry: Mapping[str, Any]) -> bool:
    """Within 5 % or 3 ms of what was put in; where that has no figure, there is nothing to disagree with."""
    staged_ms, measured_ms = entry["effect_staged_ms"], entry["effect_measured_ms"]
    if staged_ms is None:
        return True
    if measured_ms is None or entry["metric"] != entry["metric_measured"]:
        return False
    return bool(abs(measured_ms - staged_ms) <= max(AGREE_MS, AGREE_SHARE * abs(staged_ms)))
