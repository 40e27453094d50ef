"""``tapproxy simulate``: the simulated engine on its own. Parses, calls; the engine is ``tapproxy.simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tapproxy.core.errors import ConfigError, MeasureError
from tapproxy.simulate.config import SimConfig, SimConfigError
from tapproxy.simulate.run import CannotListen, run

_MODEL, _WIRE, _FAULTS = "The engine's timing", "On the wire", "Faults"


def simulate(
    listen: Annotated[str, typer.Option(help="HOST:PORT; port 0 takes a free one.")] = "127.0.0.1:8000",
    model: Annotated[str, typer.Option(help="Name of the model that is served.")] = "sim",
    seed: Annotated[int, typer.Option(help="Of the words in the answers.")] = 1,
    output_tokens: Annotated[
        int, typer.Option(help="Where an answer ends by itself, unless the request says ignore_eos.")
    ] = 128,
    max_model_len: Annotated[int, typer.Option(help="Most tokens of prompt and answer together.")] = 16_384,
    max_num_seqs: Annotated[int, typer.Option(rich_help_panel=_MODEL, help="Most sequences in a step.")] = 64,
    max_num_batched_tokens: Annotated[
        int, typer.Option(rich_help_panel=_MODEL, help="Most tokens in a step (chunked prefill).")
    ] = 2048,
    prefill_tokens_per_s: Annotated[int, typer.Option(rich_help_panel=_MODEL, help="Prefill rate.")] = 20_000,
    prefill_overhead_us: Annotated[
        int, typer.Option(rich_help_panel=_MODEL, help="Added to a step that holds any prefill.")
    ] = 3_000,
    decode_base_us: Annotated[
        int, typer.Option(rich_help_panel=_MODEL, help="Added to a step that holds any decode.")
    ] = 12_000,
    decode_per_seq_us: Annotated[
        int, typer.Option(rich_help_panel=_MODEL, help="Added for each decoding sequence.")
    ] = 100,
    kv_blocks: Annotated[
        int, typer.Option(rich_help_panel=_MODEL, help="KV cache, in blocks of 16 tokens; full: preemption.")
    ] = 4096,
    frontend_us_per_token: Annotated[
        float, typer.Option(rich_help_panel=_MODEL, help="Template and tokeniser, before the queue, serial.")
    ] = 0.0,
    spec_tokens: Annotated[
        int, typer.Option(rich_help_panel=_MODEL, help="Drafted per decode (speculative decoding); 0: off.")
    ] = 0,
    spec_acceptance: Annotated[
        float, typer.Option(rich_help_panel=_MODEL, help="Chance that a drafted token is kept.")
    ] = 0.7,
    cold_requests: Annotated[
        int, typer.Option(rich_help_panel=_MODEL, help="So many first sequences are slow by --cold-ms.")
    ] = 0,
    cold_ms: Annotated[int, typer.Option(rich_help_panel=_MODEL, help="See --cold-requests.")] = 0,
    stall_every: Annotated[
        int, typer.Option(rich_help_panel=_MODEL, help="Every so many steps one is longer by --stall-ms.")
    ] = 0,
    stall_ms: Annotated[int, typer.Option(rich_help_panel=_MODEL, help="See --stall-every.")] = 0,
    step_cpu_us: Annotated[
        int, typer.Option(rich_help_panel=_MODEL, help="Processor time that each step takes of this process.")
    ] = 0,
    slow_after_ms: Annotated[
        int, typer.Option(rich_help_panel=_MODEL, help="Steps are slower from so long after the first.")
    ] = 0,
    slow_for_ms: Annotated[int, typer.Option(rich_help_panel=_MODEL, help="For so long; 0: never.")] = 0,
    slow_percent: Annotated[int, typer.Option(rich_help_panel=_MODEL, help="Their time, 100: as ever.")] = 100,
    ttft_us: Annotated[
        int | None, typer.Option(rich_help_panel=_MODEL, help="Fixed schedule instead of the model: TTFT.")
    ] = None,
    itl_us: Annotated[
        int | None, typer.Option(rich_help_panel=_MODEL, help="Fixed schedule instead of the model: ITL.")
    ] = None,
    keep_alive_timeout: Annotated[
        float, typer.Option(rich_help_panel=_WIRE, help="Seconds until an idle connection is closed.")
    ] = 5.0,
    http10: Annotated[
        str, typer.Option(rich_help_panel=_WIRE, help="Answer HTTP/1.0 'chunked' (as vLLM) or by 'close'.")
    ] = "chunked",
    x_accel_buffering: Annotated[
        str | None, typer.Option(rich_help_panel=_WIRE, help="Send X-Accel-Buffering with this value.")
    ] = None,
    request_id_headers: Annotated[
        bool, typer.Option("--request-id-headers", rich_help_panel=_WIRE, help="Send X-Request-Id back.")
    ] = False,
    per_request_metrics: Annotated[
        bool, typer.Option("--per-request-metrics", rich_help_panel=_WIRE, help="Timings in the usage event.")
    ] = False,
    stamps: Annotated[
        bool,
        typer.Option("--stamps", rich_help_panel=_WIRE, help="sim_sent_ns in every event: when it was sent."),
    ] = False,
    event_bytes: Annotated[
        int | None, typer.Option(rich_help_panel=_WIRE, help="Pad events with text to about this size.")
    ] = None,
    bundle: Annotated[int, typer.Option(rich_help_panel=_WIRE, help="Tokens per event.")] = 1,
    synthetic_stream: Annotated[
        bool,
        typer.Option("--synthetic-stream", rich_help_panel=_FAULTS, help="All events at the end, in one go."),
    ] = False,
    fault: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_FAULTS,
            help="reset-after=N, close-after=N, stall-after=N:SECONDS, error-event-after=N or status=CODE;"
            " N counts events. The header X-Sim-Fault says it for one request.",
        ),
    ] = None,
    fault_every: Annotated[
        int, typer.Option(rich_help_panel=_FAULTS, help="Of so many requests one has the fault; 1: all.")
    ] = 1,
    replay: Annotated[
        Path | None,
        typer.Option(rich_help_panel=_FAULTS, help="Answer every request with this raw HTTP response."),
    ] = None,
    replay_gap_us: Annotated[int, typer.Option(rich_help_panel=_FAULTS, help="Between the writes of a replay.")] = 1000,
    truth: Annotated[
        Path | None, typer.Option(help="Append the model's own times of each finished request here, as JSON lines.")
    ] = None,
) -> None:
    """The simulated engine on its own: OpenAI routes, /metrics, known timing, injected faults."""
    try:
        status = run(
            SimConfig(
                listen=listen,
                model=model,
                seed=seed,
                output_tokens=output_tokens,
                max_model_len=max_model_len,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                prefill_tokens_per_s=prefill_tokens_per_s,
                prefill_overhead_us=prefill_overhead_us,
                decode_base_us=decode_base_us,
                decode_per_seq_us=decode_per_seq_us,
                kv_blocks=kv_blocks,
                frontend_us_per_token=frontend_us_per_token,
                spec_tokens=spec_tokens,
                spec_acceptance=spec_acceptance,
                cold_requests=cold_requests,
                cold_ms=cold_ms,
                stall_every=stall_every,
                stall_ms=stall_ms,
                ttft_us=ttft_us,
                itl_us=itl_us,
                keep_alive_timeout_s=keep_alive_timeout,
                http10=http10,
                x_accel_buffering=x_accel_buffering,
                request_id_headers=request_id_headers,
                per_request_metrics=per_request_metrics,
                stamps=stamps,
                event_bytes=event_bytes,
                bundle=bundle,
                synthetic_stream=synthetic_stream,
                fault=fault,
                fault_every=fault_every,
                replay=replay,
                replay_gap_us=replay_gap_us,
                step_cpu_us=step_cpu_us,
                slow_after_ms=slow_after_ms,
                slow_for_ms=slow_for_ms,
                slow_percent=slow_percent,
                truth=truth,
            )
        )
    except SimConfigError as error:
        raise ConfigError(str(error)) from None
    except CannotListen as error:
        raise MeasureError(str(error)) from None
    if status:
        raise typer.Exit(status)
