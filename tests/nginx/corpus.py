"""The corpus: configurations that were run on nginx 1.22.1 and 1.31.3, with what was measured and what a checker
ought to say. The engine of the corpus is the profile ``generic`` with the headers that a case names."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapproxy.nginx.checker import Examination, examine
from tapproxy.nginx.directives import Build
from tapproxy.nginx.predict import Upstream, upstream_of
from tapproxy.nginx.sandbox import parse_build

DATA = Path(__file__).parents[1] / "data" / "nginx"
VERSIONS = ("1.22.1", "1.31.3")
KINDS = {"h1": "http1", "tls": "tls_http1", "h2": "h2"}
PORTS = {
    "__LISTEN_PORT__": "18080",
    "__LISTEN2_PORT__": "18081",
    "__UPSTREAM_PORT__": "18000",
    "__UPSTREAM2_PORT__": "18001",
    "__UPSTREAM_TLS_PORT__": "18443",
    "__DEAD_PORT__": "18009",
}


def build(version: str) -> Build:
    """The modules of the nginx that the corpus was measured with."""
    found = parse_build(Path("nginx"), (DATA / "builds" / f"{version}.txt").read_text())
    assert found is not None
    assert found.version == version
    return found.build


@dataclass(frozen=True)
class Case:
    """One configuration and its truth."""

    name: str
    truth: dict[str, Any]

    @property
    def kind(self) -> str:
        return KINDS[self.truth["request"]["client"]]

    @property
    def upstream(self) -> Upstream:
        sent = self.truth["upstream"]
        facts = [
            f"{name}={value}"
            for name, value in sent.get("headers", [])
            if name.lower() in ("x-accel-buffering", "content-encoding")
        ]
        if "ctype" in sent:
            facts.append(f"content-type={sent['ctype']}")
        if sent.get("gzip") in ("sync", "nosync-accept"):
            facts.append("content-encoding=gzip")
        return upstream_of("generic", facts)

    def expected(self, version: str) -> dict[str, dict[str, Any]]:
        return {one["slug"]: one for one in self.truth["expected_findings"] if version in one["nginx"]}

    def forbidden(self, version: str) -> set[str]:
        return set(self.truth["must_not_report"].get(version, []))

    def write(self, directory: Path) -> Path:
        """The configuration with its includes in ``directory``, ports filled in."""
        includes = DATA / f"{self.name}.files"
        if includes.is_dir():
            shutil.copytree(includes, directory, dirs_exist_ok=True)
        text = (DATA / f"{self.name}.conf").read_text().replace("__DIR__", str(directory))
        for name, value in PORTS.items():
            text = text.replace(name, value)
        file = directory / "nginx.conf"
        file.write_text(text)
        return file

    def examine(self, file: Path, version: str) -> Examination:
        return examine(
            [file],
            nginx_version=version,
            paths=[self.truth["request"]["path"]],
            upstream=self.upstream,
            build=build(version),
        )


CASES = [Case(file.stem, json.loads(file.read_text())) for file in sorted(DATA.glob("*.json"))]
