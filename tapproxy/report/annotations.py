"""Findings for other programs: GitHub's workflow commands, and SARIF 2.1.0.

Rules here: nothing is computed; a path is written relative to the directory of the run, as both formats want it, and
what cannot be relative is an absolute one. Text of a configuration never leaves the field it is put in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tapproxy import __version__
from tapproxy.core.findings import Finding

_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_GITHUB_COMMAND = {"error": "error", "warning": "warning", "info": "notice"}
_SARIF_LEVEL = {"error": "error", "warning": "warning", "info": "note"}


def github(findings: Sequence[Finding], columns: Sequence[int | None], *, base: Path) -> list[str]:
    """One workflow command a finding: ``::error file=nginx.conf,line=3,title=buffering-on::...``."""
    lines = []
    for finding, column in zip(findings, columns, strict=True):
        place: dict[str, str] = {}
        if finding.file is not None:
            place["file"] = _relative(finding.file, base)[0]
            place["line"] = str(finding.line or 1)
            if column is not None:
                place["col"] = str(column)
        place["title"] = finding.rule
        properties = ",".join(f"{name}={_property(value)}" for name, value in place.items())
        lines.append(f"::{_GITHUB_COMMAND[finding.severity]} {properties}::{_data(_message(finding))}")
    return lines


def _message(finding: Finding) -> str:
    return f"{finding.summary}\n{finding.evidence}\nto do: {finding.advice}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _relative(file: str, base: Path) -> tuple[str, bool]:
    """The file below ``base`` with forward slashes, and whether it is below it."""
    path = Path(file) if Path(file).is_absolute() else base / file
    for candidate in (path, path.resolve()):
        if candidate.is_relative_to(base) and ".." not in candidate.parts:
            return candidate.relative_to(base).as_posix(), True
    return path.resolve().as_posix(), False


def sarif(
    findings: Sequence[Finding], columns: Sequence[int | None], *, rules: Mapping[str, str], base: Path
) -> dict[str, Any]:
    """A SARIF 2.1.0 log with one run. ``rules`` are all rules that ran: slug and what each says."""
    ids = list(rules)
    driver = {
        "name": "tapproxy",
        "version": __version__,
        "rules": [{"id": slug, "shortDescription": {"text": text}} for slug, text in rules.items()],
    }
    return {
        "$schema": _SARIF_SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "columnKind": "unicodeCodePoints",
                "originalUriBaseIds": {"SRCROOT": {"uri": _directory(base)}},
                "results": [
                    _result(finding, column, ids, base) for finding, column in zip(findings, columns, strict=True)
                ],
            }
        ],
    }


def _directory(base: Path) -> str:
    uri = base.as_uri()
    return uri if uri.endswith("/") else uri + "/"


def _result(finding: Finding, column: int | None, ids: list[str], base: Path) -> dict[str, Any]:
    result: dict[str, Any] = {
        "ruleId": finding.rule,
        "level": _SARIF_LEVEL[finding.severity],
        "message": {"text": _message(finding)},
    }
    if finding.rule in ids:
        result["ruleIndex"] = ids.index(finding.rule)
    if finding.file is not None:
        name, below = _relative(finding.file, base)
        artifact = {"uri": quote(name), "uriBaseId": "SRCROOT"} if below else {"uri": Path(name).as_uri()}
        region = {"startLine": finding.line or 1} | ({} if column is None else {"startColumn": column})
        result["locations"] = [{"physicalLocation": {"artifactLocation": artifact, "region": region}}]
    return result
