"""``tapproxy compare``: the same load over every path, and what can be said of the difference.

Reads the options, runs one comparison or a row of them, and hands the results to whoever judges, keeps and prints.
stdout carries the result and nothing else; progress goes to stderr, on a terminal. Ctrl-C ends the load, and what was
measured by then is judged and kept.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
import uvloop

from tapproxy.commands.compare_points import Options, Runner, least_requests, points
from tapproxy.commands.compare_prompts import Prompts
from tapproxy.commands.compare_shown import show
from tapproxy.config import parse_duration, read_interval, read_pages
from tapproxy.core.address import quote
from tapproxy.core.errors import ConfigError
from tapproxy.load import path as paths_
from tapproxy.load.planning import Arrivals, Load
from tapproxy.load.runs import Register
from tapproxy.load.session import Settings
from tapproxy.load.slo import parse_slo
from tapproxy.load.trial import Scenario
from tapproxy.load.worker import many_files
from tapproxy.report import console

_APIS = ("chat", "completions")
_REQUESTS = 100
_WARMUP = 10


def compare(
    paths: Annotated[
        list[str], typer.Argument(metavar="NAME=URL...", help="The ways to the engine; the first is the baseline.")
    ],
    scenario: Annotated[
        str | None,
        typer.Option(
            help="single-stream: one at a time. server: Poisson arrivals at --rate. offline: all at once."
            " concurrency: --concurrency at once. [default: what the other options imply, else single-stream]"
        ),
    ] = None,
    requests: Annotated[int | None, typer.Option(help=f"Requests on each path. [default: {_REQUESTS}]")] = None,
    duration: Annotated[
        str | None, typer.Option(metavar="TIME", help="Instead of --requests: how long, on each path; 30s, 2m.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="server: requests per second on each path.")] = None,
    rate_steps: Annotated[
        str | None, typer.Option(metavar="R,R,...", help="server at one rate after the other.")
    ] = None,
    find_rate: Annotated[
        bool, typer.Option("--find-rate", help="server: the highest rate on each path that meets --slo.")
    ] = False,
    concurrency: Annotated[int | None, typer.Option(help="concurrency: requests at once on each path.")] = None,
    warmup: Annotated[int, typer.Option(help="Requests on each path that are sent before and not counted.")] = _WARMUP,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="The longest answer, in tokens.")] = 128,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts: JSONL of OpenAI messages, or ShareGPT.")
    ] = None,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="Without --prompts: made-up prompts of this many tokens. [default: 64]")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Counts them by its tokenizer.json. [default: the engine's /tokenize, else estimated]"
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WHAT=N,N,...",
            help="One comparison for each value of prompt-tokens, output-tokens, concurrency or rate; repeatable.",
        ),
    ] = None,
    arrivals: Annotated[str, typer.Option(help="server: poisson or constant.")] = "poisson",
    blocks: Annotated[
        int | None, typer.Option(help="offline, concurrency: into how many blocks each path's requests are cut.")
    ] = None,
    seed: Annotated[int, typer.Option(help="One seed gives one plan.")] = 1,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Send this plan; where there is no such file yet, write it there."),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Recorded traffic: its arrivals and lengths, over each path in turn."),
    ] = None,
    slo: Annotated[
        str | None, typer.Option(metavar="METRIC=LIMIT,...", help="Objectives, such as ttft=500ms,tpot=50ms.")
    ] = None,
    api: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    model: Annotated[str | None, typer.Option(help="[default: the first that the baseline serves]")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Better in OPENAI_API_KEY, which nobody can list.", show_default=False)
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="'NAME: VALUE'", help="A field of every request; repeatable.")
    ] = None,
    body: Annotated[
        str | None, typer.Option(metavar="JSON", help="An object that is merged into every request's body.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not verify certificates.")] = False,
    ca_file: Annotated[Path | None, typer.Option("--ca", help="CA certificates that verify them.")] = None,
    accept_encoding: Annotated[
        str | None,
        typer.Option(help="Offer these encodings, as browsers and SDKs do: 'gzip, deflate'. [default: none]"),
    ] = None,
    fresh_connections: Annotated[
        bool, typer.Option("--fresh-connections", help="A new connection for every request.")
    ] = False,
    ignore_eos: Annotated[
        bool | None,
        typer.Option(
            "--ignore-eos/--no-ignore-eos", help="Answers of full length. [default: where the engine takes it]"
        ),
    ] = None,
    timeout: Annotated[str, typer.Option(metavar="TIME", help="The longest a request may take.")] = "600s",
    floor: Annotated[
        bool, typer.Option("--floor", help="Measure the baseline against itself as well: what is no difference.")
    ] = False,
    processes: Annotated[int, typer.Option(min=1, max=256, help="Send from this many processes.")] = 1,
    baseline: Annotated[
        str | None, typer.Option(metavar="ID", help="Compare with this earlier run (see tapproxy runs list).")
    ] = None,
    engine_metrics: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Sample the engine's metrics page meanwhile, into the run; repeatable."),
    ] = None,
    sample_interval: Annotated[str, typer.Option(metavar="TIME", help="How often.")] = "1s",
    data: Annotated[Path, typer.Option(metavar="DIR", help="Where runs are kept, in DIR/runs.")] = Path(
        "tapproxy-data"
    ),
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - is stdout.")
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the requests as CSV.")] = None,
    parquet_file: Annotated[
        Path | None, typer.Option("--parquet", metavar="FILE", help="Write the requests as Parquet.")
    ] = None,
) -> None:
    """Send the same load over every path, and say what differs, by how much and how surely.

    Counts and rates are per path. Requests over the paths alternate in random order (offline and concurrency: in
    whole blocks), each with a prompt that no cache knows.
    """
    if api not in _APIS:
        raise ConfigError(f"--api is {quote(api)}: expected {' or '.join(_APIS)}")
    if arrivals not in tuple(Arrivals):
        raise ConfigError(f"--arrivals is {quote(arrivals)}: expected {' or '.join(Arrivals)}")
    for flag, file in (("--csv", csv_file), ("--parquet", parquet_file)):
        console.refuse_unwritable(flag, file)
    console.refuse_unwritable("--json", json_file)
    found = paths_.parse(paths)
    settings = Settings(
        paths=tuple(found),
        transport=paths_.Transport(insecure, ca_file, _positive(timeout, "--timeout"), fresh_connections),
        api=api,
        model=model,
        headers=_headers(header or [], api_key or os.environ.get("OPENAI_API_KEY")),
        accept_encoding=_encodings(accept_encoding),
        ignore_eos=ignore_eos,
        extra=_extra(body),
        processes=processes,
    )
    for each in found:
        settings.transport.client(each)  # a CA file that cannot be read is said now
    objectives = None if slo is None else parse_slo(slo)
    many = _many(rate_steps, find_rate, sweep or [])
    chosen = _scenario(scenario, rate, concurrency, many, find_rate)
    # A search that could be failed by one slow request in a hundred would find nothing: some may be over.
    usual = max(_REQUESTS, least_requests(objectives, over=2)) if find_rate and objectives is not None else _REQUESTS
    load = Load(
        scenario=chosen,
        requests=requests if requests is not None or duration is not None or replay is not None else usual,
        duration_s=None if duration is None else _positive(duration, "--duration"),
        rate=rate,
        concurrency=concurrency,
        warmup=warmup,
        max_tokens=max_tokens,
        seed=seed,
        blocks=blocks,
        arrivals=Arrivals(arrivals),
    )
    if requests is not None and requests < 1:
        raise ConfigError(f"--requests is {requests}: expected at least 1")
    if duration is not None and requests is not None:
        raise ConfigError("--requests and --duration are both given: keep one of them")
    if processes > 1 and chosen is Scenario.SINGLE_STREAM and plan is None and replay is None:
        raise ConfigError("--processes is more than 1 and single-stream sends one at a time: choose another scenario")
    if prompts is not None and (prompt_tokens is not None or any(name == "prompt-tokens" for name, _ in many)):
        raise ConfigError("--prompts has prompts of its own lengths: leave --prompt-tokens out, or --prompts")
    source = Prompts(prompts, prompt_tokens or 64, tokenizer)
    options = Options(load, source, many, find_rate, plan, replay, floor, objectives)
    watched = read_pages(engine_metrics or [], "--engine-metrics")
    options = replace(
        options, engine_metrics=watched, sample_interval_s=read_interval(sample_interval, "--sample-interval")
    )
    register = Register(data)
    register.refuse_unwritable()
    earlier = None if baseline is None else register.load(baseline).trial()
    many_files()
    todo = points(options)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        runner = Runner(settings, options, register, earlier)
        outcome = loop.run(runner.run(todo))
    raise typer.Exit(show(outcome, json_file, csv_file, parquet_file))


def _scenario(
    text: str | None,
    rate: float | None,
    concurrency: int | None,
    many: list[tuple[str, list[float]]],
    find_rate: bool,
) -> Scenario:
    swept = [name for name, _ in many]
    if text is None:
        if rate is not None or "rate" in swept or find_rate:
            return Scenario.SERVER
        return Scenario.CONCURRENCY if concurrency is not None or "concurrency" in swept else Scenario.SINGLE_STREAM
    try:
        return Scenario(text)
    except ValueError:
        raise ConfigError(f"--scenario is {quote(text)}: expected one of {', '.join(Scenario)}") from None


_SWEEPS = ("prompt-tokens", "output-tokens", "concurrency", "rate")


def _many(rate_steps: str | None, find_rate: bool, sweeps: list[str]) -> list[tuple[str, list[float]]]:
    out: list[tuple[str, list[float]]] = []
    if rate_steps is not None:
        out.append(("rate", _numbers("--rate-steps", rate_steps)))
    for text in sweeps:
        name, equals, values = text.partition("=")
        if not equals or name not in _SWEEPS:
            raise ConfigError(f"--sweep is {quote(text)}: expected WHAT=N,N,... with {', '.join(_SWEEPS)}")
        out.append((name, _numbers(f"--sweep {name}", values)))
    names = [name for name, _ in out]
    if len(set(names)) < len(names):
        raise ConfigError(f"{names[-1]} is swept twice: give all its values at once")
    if find_rate and "rate" in names:
        raise ConfigError("--find-rate chooses the rates itself: leave the rate's steps out")
    if find_rate and names:
        raise ConfigError("--find-rate goes with no --sweep: run it once for each value")
    return out


def _numbers(flag: str, text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    whole = "rate" in flag or all(value == int(value) for value in values if abs(value) < 1e15)
    if not values or any(not 0 < value < 1e9 for value in values) or not whole:
        kind = "numbers" if "rate" in flag else "whole numbers"
        raise ConfigError(f"{flag} is {quote(text)}: expected {kind} above 0, with commas between them")
    return values


def _positive(text: str, flag: str) -> float:
    seconds = parse_duration(text, flag)
    if seconds <= 0:
        raise ConfigError(f"{flag} is {quote(text)}: expected a time above 0, such as 30s")
    return seconds


def _headers(texts: list[str], key: str | None) -> tuple[tuple[bytes, bytes], ...]:
    out = []
    for text in texts:
        name, colon, value = text.partition(":")
        bad = any(letter in text for letter in "\r\n\0") or not text.isascii() or " " in name.strip()
        if not colon or not name.strip() or bad:
            # Its value may be a credential: it is not repeated.
            raise ConfigError("--header is no field: expected 'NAME: VALUE' in plain characters")
        out.append((name.strip().encode(), value.strip().encode()))
    if key is not None and not any(name.lower() == b"authorization" for name, _ in out):
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError("the API key holds a space or a strange character: expected printable ASCII")
        out.append((b"Authorization", b"Bearer " + key.encode()))
    return tuple(out)


def _encodings(text: str | None) -> str | None:
    if text is not None and (not text.isascii() or not text.isprintable()):
        raise ConfigError("--accept-encoding is no field value: expected something like 'gzip, deflate'")
    return text or None


def _extra(text: str | None) -> tuple[tuple[str, object], ...]:
    if text is None:
        return ()
    try:
        value: Any = orjson.loads(text)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError("--body is no JSON object: expected something like '{\"temperature\": 0.7}'")
    if value.get("stream") is False:
        raise ConfigError("--body asks for an answer in one piece: what is compared are streams")
    return tuple(value.items())
