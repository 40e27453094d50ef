"""The catalogue: every rule, and the findings that it makes of a path or of a whole configuration.

Rules here: a rule lives in the module of its subject and is listed once; each has a file in nginx/bad that it must fire
on, and is silent on nginx/streaming.conf.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from tapproxy.core.findings import Finding
from tapproxy.nginx import (
    fix,
    rules_buffering,
    rules_cache,
    rules_compression,
    rules_connections,
    rules_limits,
    rules_locations,
    rules_replicas,
    rules_requests,
    rules_timeouts,
    rules_upstream,
    rules_xab,
)
from tapproxy.nginx.model import Tree, label
from tapproxy.nginx.rule import Flaw, Hit, Rule, TreeRule, View
from tapproxy.nginx.source import CREDENTIAL, Directive

RULES: tuple[Rule, ...] = (
    *rules_buffering.RULES,
    *rules_locations.RULES,
    *rules_xab.RULES,
    *rules_compression.RULES,
    *rules_upstream.RULES,
    *rules_replicas.RULES,
    *rules_timeouts.RULES,
    *rules_requests.RULES,
    *rules_cache.RULES,
    *rules_limits.RULES,
    *rules_connections.RULES,
)
TREE_RULES: tuple[TreeRule, ...] = rules_limits.TREE_RULES
# Found while the files are read, so they have no finder.
CONFIG_INVALID = "config-invalid"
INCLUDE_MATCHES_NOTHING = "include-matches-nothing"
SUMMARIES: Mapping[str, str] = {
    **{one.slug: one.summary for one in RULES},
    **{one.slug: one.summary for one in TREE_RULES},
    CONFIG_INVALID: "nginx does not start with this configuration",
    INCLUDE_MATCHES_NOTHING: "an include matches no file, which nginx accepts in silence",
}
# Letters of a statement that are shown: a map or a list of names can be a megabyte.
_LONG = 400


def path_flaws(view: View, *, only_by_path: bool = False) -> Iterator[Flaw]:
    """What the rules have to say about one hop; ``only_by_path`` where the place was asked for another path."""
    for rule in RULES:
        if only_by_path and not rule.by_path:
            continue
        for hit in rule.find(view):
            yield _flaw(rule, hit, view.texts, view.scope.context, _inherited(view, hit.at))


def _inherited(view: View, at: Directive) -> str:
    """The level a value comes from, where that is not the serving location; a block is no value."""
    if at.block is not None:
        return ""
    for level in view.scope.levels[1:]:
        if at in (level.block or ()):
            return f" (set at the level of {label(level)})"
    return ""


def _quoted(one: Directive, texts: Mapping[str, str]) -> str:
    """The statement as it is written, on one line; a credential is not shown."""
    written = " ".join(texts.get(one.file, "")[one.start : one.end].split())
    return _clipped(one.text if not written or CREDENTIAL.search(written) else written)


def _clipped(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]} ..."


def _flaw(rule: Rule | TreeRule, hit: Hit, texts: Mapping[str, str], context: str | None, level: str = "") -> Flaw:
    return Flaw(
        Finding(
            rule=rule.slug,
            severity=hit.severity or rule.severity,
            summary=rule.summary,
            evidence=hit.evidence + level,
            advice=hit.advice or rule.advice,
            file=hit.at.file,
            line=hit.at.line,
            directive=_quoted(hit.at, texts),
            context=context,
        ),
        hit.edits,
    )


def with_patches(flaws: Iterable[Flaw], texts: Mapping[str, str]) -> list[Flaw]:
    """The flaws with the patch of each. Apart from finding them, since the same is found on many paths."""
    return [replace(one, finding=replace(one.finding, patch=fix.unified(texts, one.edits))) for one in flaws]


def file_flaws(tree: Tree) -> Iterator[Flaw]:
    """What can be said about the files before any path is followed."""
    for problem in tree.problems:
        yield Flaw(
            Finding(
                rule=CONFIG_INVALID,
                severity="error",
                summary=SUMMARIES[CONFIG_INVALID],
                evidence=_clipped(problem.text),
                advice="correct it, and run nginx -t on the machine that serves",
                file=problem.file,
                line=problem.line,
                directive=_clipped(problem.directive) or None,
                context=problem.context,
            )
        )
    for include in tree.empty_includes:
        yield Flaw(
            Finding(
                rule=INCLUDE_MATCHES_NOTHING,
                severity="warning",
                summary=SUMMARIES[INCLUDE_MATCHES_NOTHING],
                evidence=f"no file for {include.args[0]}: what it was to set is not set",
                advice="correct the path, or remove the include",
                file=include.file,
                line=include.line,
                directive=include.text,
            )
        )
    for rule in TREE_RULES:
        for hit in rule.find(tree):
            yield _flaw(rule, hit, tree.texts, None)
