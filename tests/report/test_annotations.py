"""Findings as GitHub's workflow commands and as SARIF: exact text, and nothing that breaks out of its field."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapproxy.core.findings import Finding
from tapproxy.report.annotations import github, sarif

BASE = Path("/repo")
REST = "%0A800 ms%0Ato do: off"
TEXT = f"held{REST}"


def finding(**changes: object) -> Finding:
    values: dict[str, object] = {
        "rule": "buffering-on",
        "severity": "error",
        "summary": "held",
        "evidence": "800 ms",
        "advice": "off",
        "file": "/repo/conf/nginx.conf",
        "line": 7,
    }
    return Finding(**{**values, **changes})  # type: ignore[arg-type]  # a table of plain values


@pytest.mark.parametrize(
    ("changes", "column", "line"),
    [
        ({}, 3, f"::error file=conf/nginx.conf,line=7,col=3,title=buffering-on::{TEXT}"),
        ({"severity": "warning"}, None, f"::warning file=conf/nginx.conf,line=7,title=buffering-on::{TEXT}"),
        ({"severity": "info"}, 1, f"::notice file=conf/nginx.conf,line=7,col=1,title=buffering-on::{TEXT}"),
        ({"file": "/repo/a,b:c%.conf"}, None,
         f"::error file=a%2Cb%3Ac%25.conf,line=7,title=buffering-on::{TEXT}"),
        ({"summary": "x\r\n::set-output name=a::b"}, None,
         f"::error file=conf/nginx.conf,line=7,title=buffering-on::x%0D%0A::set-output name=a::b{REST}"),
        ({"file": "conf/n.conf"}, None, f"::error file=conf/n.conf,line=7,title=buffering-on::{TEXT}"),
        ({"file": "/etc/nginx/n.conf"}, None,
         f"::error file=/etc/nginx/n.conf,line=7,title=buffering-on::{TEXT}"),
        ({"file": None, "line": None}, None, f"::error title=buffering-on::{TEXT}"),
    ],
    ids=["error", "warning", "info", "escaped-file", "escaped-text", "relative", "outside", "no-file"],
)  # fmt: skip
def test_a_workflow_command_is_one_line(changes: dict[str, object], column: int | None, line: str) -> None:
    assert github([finding(**changes)], [column], base=BASE) == [line]


def test_a_sarif_log_has_what_the_standard_requires() -> None:
    found = [finding(), finding(rule="new", severity="info", file="/etc/n x.conf", line=None), finding(file=None)]
    log = sarif(found, [4, None, None], rules={"other": "o", "buffering-on": "held"}, base=BASE)
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    assert run["tool"]["driver"]["name"] == "tapproxy"
    assert [one["id"] for one in run["tool"]["driver"]["rules"]] == ["other", "buffering-on"]
    assert run["originalUriBaseIds"] == {"SRCROOT": {"uri": "file:///repo/"}}
    first, second, third = run["results"]
    assert first == {
        "ruleId": "buffering-on",
        "ruleIndex": 1,
        "level": "error",
        "message": {"text": "held\n800 ms\nto do: off"},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": "conf/nginx.conf", "uriBaseId": "SRCROOT"},
                    "region": {"startLine": 7, "startColumn": 4},
                }
            }
        ],
    }
    assert (second["level"], "ruleIndex" in second) == ("note", False)
    place = second["locations"][0]["physicalLocation"]
    assert place == {"artifactLocation": {"uri": "file:///etc/n%20x.conf"}, "region": {"startLine": 1}}
    assert "locations" not in third
