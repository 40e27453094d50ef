"""`tapproxy check`: what an nginx configuration does to a stream, without running it.

Rules here: it reads files and prints; nginx is never given the files (``--live`` runs a configuration of its own, see
``check_live``). Text
from a configuration is stripped of control characters before it reaches a terminal.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from tapproxy.commands import check_live
from tapproxy.core.errors import ConfigError
from tapproxy.core.findings import Finding
from tapproxy.nginx.checker import DEFAULT_PATHS, CheckedPath, Examination, examine
from tapproxy.nginx.directives import NEWEST_KNOWN, Build
from tapproxy.nginx.live import nginx_for
from tapproxy.nginx.predict import PROFILES, upstream_of
from tapproxy.nginx.sandbox import Nginx, find_all, nginx_on_path
from tapproxy.report import console

_FORMATS = ("text", "json", "github", "sarif")
_LATER_FORMATS = ("github", "sarif")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def check(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="nginx configuration: a whole nginx.conf, or a fragment.")
    ],
    server: Annotated[str | None, typer.Option(metavar="NAME", help="Only what answers this Host.")] = None,
    path: Annotated[
        list[str] | None, typer.Option(metavar="URI", help="The path to follow; repeatable. Default: the API paths.")
    ] = None,
    nginx_version: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="As 1.31.3. Default: the nginx on PATH, else the newest known."),
    ] = None,
    upstream_profile: Annotated[
        str, typer.Option(metavar="NAME", help=f"How the engine answers: {', '.join(PROFILES)}.")
    ] = "vllm",
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="A fact about its answers: x-accel-buffering=no, framing=close; repeatable."
        ),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Print a patch (for patch -p1), and the findings on stderr.")
    ] = False,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Measure it too, on a real nginx on loopback that runs a configuration generated from its settings; "
            "with --fix the patched one as well.",
        ),
    ] = False,
    format_: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="text or json (github and sarif: not in this version).")
    ] = "text",
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout.")
    ] = None,
) -> None:
    """Check nginx configuration for what breaks streaming: predictions per client, findings, patches."""
    _refuse_what_is_not_there(format_)
    for one in path or ():
        if not one.startswith("/"):
            raise ConfigError(f"--path {one!r} is no path: it begins with a slash, as in {DEFAULT_PATHS[0]}")
    runs = nginx_for(nginx_version) if live else None
    version, source, build = _nginx(nginx_version) if runs is None else _run_by(runs, nginx_version)
    again = partial(
        examine,
        files,
        nginx_version=version,
        paths=tuple(path) if path else DEFAULT_PATHS,
        server=server,
        upstream=upstream_of(upstream_profile, upstream or ()),
        build=build,
    )
    result = again()
    shown = {**result.to_dict(), "nginx_version_from": source, "upstream_profile": upstream_profile}
    proof = None
    if runs is not None:
        proof = check_live.run_live(result, runs, (lambda texts: again(texts=texts)) if fix else None)
        proof.add_to(shown)
    said = _text(result, f"{source}, engine profile {upstream_profile}", check_live.lines(proof) if proof else [])
    if json_file is not None and json_file != "-":
        _write(json_file, shown)
    with console.writing(f"the result is in {json_file}" if json_file not in (None, "-") else ""):
        if json_file == "-" or format_ == "json":
            # As bytes: JSON is UTF-8, whatever the terminal's encoding.
            typer.echo(orjson.dumps(shown, option=orjson.OPT_INDENT_2))
        elif fix:
            # As bytes too: a patch with another letter in its context does not apply.
            typer.echo((result.patch or "").encode(), nl=False)
            typer.echo(said, err=True)
        else:
            typer.echo(said)
    if proof is not None and proof.interrupted:
        raise typer.Exit(130)
    if any(one.severity == "error" for one in result.findings) or (proof is not None and proof.before.broken):
        raise typer.Exit(1)
    if proof is not None and not proof.before.measured:
        raise typer.Exit(3)  # nothing was measured, and the text says why


def _refuse_what_is_not_there(format_: str) -> None:
    if format_ in _LATER_FORMATS:
        raise ConfigError(f"--format {format_} is not available in this version: use text or json")
    if format_ not in _FORMATS:
        raise ConfigError(f"--format is {format_!r}: expected one of {', '.join(_FORMATS)}")


def _nginx(wanted: str | None) -> tuple[str, str, Build | None]:
    """The version to check for, where it comes from, and its modules where such a binary is at hand."""
    if wanted is not None:
        build = next((one.build for one in find_all() if one.version == wanted), None)
        return wanted, "--nginx-version", build
    here = nginx_on_path()
    if here is not None:
        return here.version, "the nginx on PATH", here.build
    return NEWEST_KNOWN, "the newest known, since no nginx is on PATH", None


def _run_by(runs: Nginx, wanted: str | None) -> tuple[str, str, Build | None]:
    """What is predicted is for the nginx that is run."""
    return runs.version, "--nginx-version" if wanted else f"the nginx that is run, {runs.path}", runs.build


def _write(target: str, shown: dict[str, Any]) -> None:
    try:
        Path(target).write_bytes(orjson.dumps(shown, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json {target!r} cannot be written: {error.strerror}") from None


def _text(result: Examination, about: str, measured: list[str]) -> str:
    lines = [f"nginx {result.nginx_version} ({about})"]
    lines += [f"note: {note}" for note in result.notes]
    for group in _alike(result.paths):
        lines += ["", *_path_lines(group)]
    if measured:
        lines += ["", *measured]
    for finding in result.findings:
        lines += ["", *_finding_lines(finding)]
    lines += ["", _summary(result.findings)]
    return _CONTROL.sub("�", "\n".join(lines))


def _alike(paths: list[CheckedPath]) -> list[list[CheckedPath]]:
    """Paths that end in the same place the same way, together."""
    groups: dict[tuple[Any, ...], list[CheckedPath]] = {}
    for one in paths:
        place = one.to_dict()
        key = (id(one.server), place["file"], place["line"], place["location"], tuple(one.clients.items()))
        groups.setdefault(key, []).append(one)
    return list(groups.values())


def _path_lines(group: list[CheckedPath]) -> list[str]:
    place = group[0].to_dict()
    where = f"location {place['location']}" if place["location"] else "no location"
    target = f" -> {place['proxy_pass']}" if place["proxy_pass"] else ""
    lines = [
        f"server {place['server']}, {where} ({place['file']}:{place['line']}){target}",
        f"  {' '.join(one.path for one in group)}",
    ]
    for kind, outcome in group[0].clients.items():
        mechanism = f" ({outcome.mechanism})" if outcome.mechanism else ""
        lines.append(f"  {kind:<10} {outcome.streaming}{mechanism}: {outcome.why}")
    return [*lines, *(f"  note: {note}" for note in place["notes"])]


def _finding_lines(finding: Finding) -> list[str]:
    lines = [
        f"{finding.severity}: {finding.rule}  {finding.file}:{finding.line}",
        f"  {finding.summary}",
        f"  {finding.directive or ''}  [{finding.context or 'main'}]",
        f"  {finding.evidence}",
        f"  to do: {finding.advice}",
    ]
    if finding.patch:
        lines += [f"    {line}" for line in finding.patch.splitlines()]
    return lines


def _summary(findings: list[Finding]) -> str:
    if not findings:
        return "nothing to report"
    counts = [
        (severity, sum(one.severity == severity for one in findings)) for severity in ("error", "warning", "info")
    ]
    return ", ".join(
        f"{number} {severity}{'s' if number > 1 and severity != 'info' else ''}"
        for severity, number in counts
        if number
    )
