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
from tapproxy.nginx.checker import DEFAULT_PATHS, CheckedPath, Examination, examine, unreadable
from tapproxy.nginx.directives import NEWEST_KNOWN, Build
from tapproxy.nginx.excerpt import Excerpt, excerpt
from tapproxy.nginx.fix import write as write_fix
from tapproxy.nginx.live import nginx_for
from tapproxy.nginx.model import Unreadable
from tapproxy.nginx.predict import PROFILES, upstream_of
from tapproxy.nginx.rules import SUMMARIES
from tapproxy.nginx.sandbox import Nginx, find_all, nginx_on_path
from tapproxy.report import console
from tapproxy.report.annotations import github, sarif

_FORMATS = ("text", "json", "github", "sarif")
# What a directive or parameter that came with a later version, or went with one, is said to be.
_OF_ANOTHER_VERSION = "(nginx has it since"
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
        bool,
        typer.Option(
            "--fix",
            help="Print a patch for patch -p1, with the true text of the lines it changes; the findings go to stderr.",
        ),
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="With --fix: change the files, keeping each as FILE.orig, and check again.")
    ] = False,
    live: Annotated[
        bool,
        typer.Option(
            "--live",
            help="Measure it too, on a real nginx on loopback that runs a configuration generated from its settings; "
            "with --fix the patched one as well.",
        ),
    ] = False,
    format_: Annotated[str, typer.Option("--format", metavar="FORMAT", help=f"One of {', '.join(_FORMATS)}.")] = "text",
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout.")
    ] = None,
) -> None:
    """Check nginx configuration for what breaks streaming: predictions per client, findings, patches."""
    _refuse_what_makes_no_sense(format_=format_, fix=fix, write=write)
    for uri in path or ():
        if not uri.startswith("/"):
            raise ConfigError(f"--path {uri!r} is no path: it begins with a slash, as in {DEFAULT_PATHS[0]}")
    for one in files:
        if one.is_dir():
            raise ConfigError(f"{str(one)!r} is a directory: name the files to check, as in {one}/*.conf")
    console.refuse_unwritable("--json", json_file)
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

    def examined() -> Examination:
        try:
            return again()
        except Unreadable as error:
            return unreadable(error, version)

    result = examined()
    proof = None
    if runs is not None and result.unread is None:
        proof = check_live.run_live(result, runs, (lambda texts: again(texts=texts)) if fix else None)
    patch = (result.patch or "") if fix else None
    changed: list[tuple[str, str]] = []
    if write and result.unread is None:
        changed = write_fix(result.texts, result.edits)
        result = examined()
    shown = {**result.to_dict(), "nginx_version_from": source, "upstream_profile": upstream_profile}
    if fix:
        shown |= {"patch": patch or None, "written": [{"file": file, "backup": old} for file, old in changed]}
    if proof is not None:
        proof.add_to(shown, written=bool(changed))
    about = f"{source}, engine profile {upstream_profile}"
    if nginx_version is None and any(_OF_ANOTHER_VERSION in one.evidence for one in result.findings):
        result.notes.append(f"checked as nginx {version}; for the one that serves say --nginx-version")
    said = _text(result, about, check_live.lines(proof) if proof else [])
    if json_file is not None and json_file != "-":
        _write(json_file, shown)
    with console.writing(f"the result is in {json_file}" if json_file not in (None, "-") else ""):
        if json_file == "-" or format_ == "json":
            # As bytes: JSON is UTF-8, whatever the terminal's encoding.
            typer.echo(orjson.dumps(shown, option=orjson.OPT_INDENT_2))
        elif format_ != "text":
            typer.echo(_annotations(result, format_), nl=False)
            if patch and not changed:
                typer.echo("tapproxy: --fix: the patch is printed with --format text, and is in --json", err=True)
        elif result.unread is not None and not result.texts:
            pass  # its sentence goes to standard error
        elif patch is not None:
            # As bytes too: a patch with another letter in its context does not apply.
            typer.echo(patch.encode(), nl=False)
            for file, backup in changed:
                typer.echo(_CONTROL.sub("�", f"changed {file}; as it was: {backup}"), err=True)
            typer.echo(said, err=True)
        else:
            typer.echo(said)
    if result.unread is not None:
        raise result.unread
    if proof is not None and proof.interrupted:
        raise typer.Exit(130)
    if any(one.severity == "error" for one in result.findings) or (
        proof is not None and proof.now(written=bool(changed)).broken
    ):
        raise typer.Exit(1)
    if proof is not None and not proof.before.measured:
        raise typer.Exit(3)  # nothing was measured, and the text says why


def _refuse_what_makes_no_sense(*, format_: str, fix: bool, write: bool) -> None:
    if write and not fix:
        raise ConfigError("--write changes files as --fix would: say --fix --write")
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


def _annotations(result: Examination, format_: str) -> bytes:
    """The findings for another program, as bytes: both formats are UTF-8, whatever the terminal's encoding."""
    findings, base = result.findings, _base(result.files)
    columns = [None if seen is None else seen.column for seen in (excerpt(result.texts, one) for one in findings)]
    if format_ == "github":
        return "".join(f"{line}\n" for line in github(findings, columns, base=base)).encode()
    log = sarif(findings, columns, rules=SUMMARIES, base=base)
    return orjson.dumps(log, option=orjson.OPT_INDENT_2) + b"\n"


def _base(files: list[str]) -> Path:
    """What paths are told relative to: the directory of the run (a checkout), or that of files outside of it."""
    here = Path.cwd()
    first = Path(files[0]).absolute() if files else here
    return here if first.is_relative_to(here) else first.parent


def _text(result: Examination, about: str, measured: list[str]) -> str:
    lines = [f"nginx {result.nginx_version} ({about})"]
    lines += [f"note: {note}" for note in result.notes]
    for group in _alike(result.paths):
        lines += ["", *_path_lines(group)]
    if measured:
        lines += ["", *measured]
    told: set[str] = set()
    for finding in result.findings:
        lines += ["", *_finding_lines(finding, excerpt(result.texts, finding), told)]
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


def _finding_lines(finding: Finding, seen: Excerpt | None, told: set[str]) -> list[str]:
    """As a compiler says it: place, what, the line of the file, and why. ``told``: the patches that stand above."""
    place = f"{finding.file}:{finding.line}" + (f":{seen.column}" if seen else "")
    lines = [f"{place}: {finding.severity}: {finding.summary} [{finding.rule}]"]
    if seen is not None:
        number = f"{finding.line}"
        lines += [f"  {number} | {seen.text}", f"  {' ' * len(number)} | {seen.marks}"]
    elif finding.directive:
        lines.append(f"  {finding.directive}")
    if finding.context is not None:  # an include is named without the block that it stands in
        lines.append(f"  in: {finding.context}")
    lines += [
        f"  why: {finding.evidence}",
        f"  to do: {finding.advice}",
    ]
    if finding.patch in told:
        lines.append("    (by the same patch as above)")
    elif finding.patch:
        told.add(finding.patch)
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
