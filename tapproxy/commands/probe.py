"""``tapproxy probe``: measures a deployed proxy between here and a tap, with a calibrated stream.

The tap answers the probe's requests itself, so no engine time is used; what the proxy does to the stream shows in the
difference between the tap's stamps and ours.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from tapproxy.commands import output
from tapproxy.config import parse_duration
from tapproxy.core.address import parse_upstream
from tapproxy.core.errors import ConfigError, MeasureError
from tapproxy.core.probing import Framing
from tapproxy.probe.asking import Desk, Via, split_url
from tapproxy.probe.conclude import conclude
from tapproxy.probe.result import document
from tapproxy.probe.run import Measured, Settings
from tapproxy.probe.run import probe as run_probe
from tapproxy.report import console

_PROFILES = {"vllm": Framing.CHUNKED, "sglang": Framing.CHUNKED, "generic": Framing.AS_ASKED}
_EXITS = {"healthy": 0, "degraded": 1, "not_measured": 3}
_LONGEST_IDLE_S = 600.0


def probe(
    via: Annotated[str, typer.Option(metavar="URL", help="The proxy, as its clients reach it: http(s)://HOST[:PORT].")],
    tap: Annotated[
        str, typer.Option(metavar="ADMIN_URL", help="The admin port of the tap behind it (`serve --allow-probe`).")
    ],
    token: Annotated[
        str | None, typer.Option(help="The tap's admin token; better in TAPPROXY_ADMIN_TOKEN, which nobody can list.")
    ] = None,
    path: Annotated[
        str | None, typer.Option(metavar="URI", help="The path that leads to the tap. [default: /v1/chat/completions]")
    ] = None,
    idle: Annotated[
        str, typer.Option(metavar="SECONDS", help="How long a silence to try, beside the rest; 0: none.")
    ] = "90",
    header: Annotated[
        list[str] | None,
        typer.Option(metavar="'NAME: VALUE'", help="A field the proxy wants, such as Authorization; repeatable."),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not verify the proxy's certificate.")] = False,
    ca_file: Annotated[Path | None, typer.Option("--ca", help="CA certificates that verify it.")] = None,
    upstream_profile: Annotated[
        str,
        typer.Option(
            metavar="NAME", help=f"How the engine answers HTTP/1.0: {', '.join(_PROFILES)} (generic: without chunks)."
        ),
    ] = "vllm",
    no_h2: Annotated[bool, typer.Option("--no-h2", help="Measure HTTP/1.1 clients only.")] = False,
    no_common_clock: Annotated[
        bool,
        typer.Option("--no-common-clock", help="Claim only what needs no common clock, also where there is one."),
    ] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout.")
    ] = None,
) -> None:
    """Measure what a deployed proxy does to a stream: hold and its mechanism, compression, cuts, rewriting.

    The tap behind the proxy answers with a calibrated stream, so no engine time is used. It has to be started with
    `tapproxy serve --allow-probe`. Takes about fifteen seconds, or as long as --idle.
    """
    url, target = split_url(via, path)
    for address, flag in ((url, "--via"), (tap.rstrip("/"), "--tap")):
        if parse_upstream(address, flag).scheme == "unix":
            raise ConfigError(f"{flag} is {address!r}: expected http://HOST:PORT or https://HOST:PORT")
    if upstream_profile not in _PROFILES:
        raise ConfigError(f"--upstream-profile is {upstream_profile!r}: expected one of {', '.join(_PROFILES)}")
    idle_s = parse_duration(idle, "--idle")
    if idle_s > _LONGEST_IDLE_S:
        raise ConfigError(f"--idle is {idle}: expected at most {_LONGEST_IDLE_S:g} seconds")
    console.refuse_unwritable("--json", json_file)
    proxy = Via(url, target, tuple(_field(text) for text in header or ()), insecure, ca_file)
    desk = Desk(
        tap.rstrip("/"),
        token or os.environ.get("TAPPROXY_ADMIN_TOKEN"),
        insecure,
        ca_file,
        ignore_clock=no_common_clock,
    )
    settings = Settings(idle_s, _PROFILES[upstream_profile], h2=not no_h2)
    measured: list[Measured] = []
    interrupted, broken_off = False, ""
    with console.Progress() as progress:
        try:
            asyncio.run(run_probe(proxy, desk, settings, lambda what: progress.show(what, 0, 0), measured))
        except KeyboardInterrupt:
            if not measured:
                raise
            interrupted = True
        except MeasureError as error:
            if not measured:
                raise
            broken_off = str(error)
    conclusion = conclude(measured, desk.clocks)
    if broken_off:
        conclusion.warnings.append(f"broken off, and what was measured until then is shown: {broken_off}")
    if interrupted:
        conclusion.warnings.append("interrupted: what was measured until then is shown, the silence is not part of it")
    shown = document(proxy, desk, settings, measured, conclusion)
    output.write(shown, json_file, {}, lambda: typer.echo(text(shown)))
    if interrupted:
        typer.echo("tapproxy: interrupted", err=True)
    if broken_off:
        typer.echo(f"tapproxy: {broken_off}", err=True)
    code = _EXITS[conclusion.verdict]
    # What was not measured makes nothing healthy; what was found stays found.
    raise typer.Exit(130 if interrupted else code or 3 if broken_off else code)


def _field(text: str) -> tuple[bytes, bytes]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or any(letter in text for letter in "\r\n\0") or not text.isascii():
        # Its value may be a credential: it is not repeated.
        raise ConfigError("--header is no field: expected 'NAME: VALUE' in plain characters")
    return name.strip().encode(), value.strip().encode()


def _amount(value: float, unit: str) -> str:
    """A number with its unit; a share as percent."""
    return f"{value * 100:.0f} %" if unit == "share" else f"{value:g} {unit}".rstrip()


def text(shown: dict[str, Any]) -> str:
    """The result for a terminal."""
    about = shown["probe"]
    lines = [f"{shown['verdict'].upper()}  {about['via']}{about['path']} -> tap {about['tap']}"]
    for kind, client in shown["clients"].items():
        mechanism = f" ({client['mechanism']})" if client["mechanism"] else ""
        lines.append(f"  {kind:<10} {client['streaming'] or 'not measured'}{mechanism}: {client['why']}")
        lines += _streams(client)
    for cause in shown["causes"]:
        lines += ["", f"{cause['severity']}: {cause['cause']} ({cause['mechanism']})  [{', '.join(cause['clients'])}]"]
        lines.append(f"  {cause['summary']}")
        for item in cause["evidence"]:
            unit, limit = item["unit"], item["threshold"]
            threshold = "" if limit is None else f"  (threshold {_amount(limit, unit if unit == 'share' else '')})"
            lines.append(f"    {item['what']}: {_amount(item['value'], unit)}{threshold}")
        lines += [f"    not {item['cause']}: {item['because']}" for item in cause["rejected"]]
        lines.append(f"  to do: {cause['advice']}")
    advised = {cause["advice"] for cause in shown["causes"]}
    if shown["findings"]:
        lines.append("")
    for finding in shown["findings"]:
        lines.append(f"{finding['severity']}: {finding['rule']}: {finding['summary']}")
        # Where a cause says the same, it has said what to do.
        if finding["severity"] != "info" and finding["advice"] and finding["advice"] not in advised:
            advised.add(finding["advice"])
            lines.append(f"  to do: {finding['advice']}")
    for kind, client in shown["clients"].items():
        lines += _rewriting(kind, client["rewriting"])
    lines += [f"note: {warning}" for warning in shown["trust"]["warnings"]]
    if not about["clock"]["common"]:
        lines.append(f"clock: not common: {about['clock']['why']}")
    return "\n".join(console.clean(line) for line in lines)


def _streams(client: dict[str, Any]) -> list[str]:
    return [
        f"    {one['name']:<12} {one['event_bytes']:>5} B / {one['interval_ms']:>4.0f} ms"
        f"  hold P50 {one['hold_ms']['p50']:>8.1f} ms, max {one['hold_ms']['max']:>8.1f} ms"
        f"  {one['events']} events in {one['bursts']} bursts"
        for one in client["streams"]
    ]


def _rewriting(kind: str, rewriting: dict[str, Any]) -> list[str]:
    lines = []
    for direction in ("request", "answer"):
        one = rewriting[direction]
        if one is None:
            continue
        parts = [f"HTTP/{one['http']['sent']} became HTTP/{one['http']['received']}"] if (
            one["http"]["sent"] != one["http"]["received"]
        ) else []  # fmt: skip
        parts += [f"+{name}: {value}" for name, value in one["added"].items()]
        parts += [f"-{name}" for name in one["removed"]]
        parts += [f"{name}: {was['sent']} became {was['received']}" for name, was in one["changed"].items()]
        if parts:
            lines.append(f"{kind} {direction} fields: {'; '.join(parts)}")
    return lines
