"""What the simulated engine is told at start. Every problem is one sentence, raised before anything listens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tapproxy.simulate.engine import BLOCK_TOKENS, EngineConfig
from tapproxy.simulate.faults import Fault, parse_fault


class SimConfigError(ValueError):
    """A setting that cannot be; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class SimConfig:
    listen: str = "127.0.0.1:8000"
    model: str = "sim"
    seed: int = 1
    # How long answers are, and what fits.
    output_tokens: int = 128  # where the model ends by itself, unless told ignore_eos
    max_model_len: int = 16_384
    # The batching model (engine.py).
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    prefill_tokens_per_s: int = 20_000
    prefill_overhead_us: int = 3_000
    decode_base_us: int = 12_000
    decode_per_seq_us: int = 100
    kv_blocks: int = 4096
    frontend_us_per_token: float = 0.0
    spec_tokens: int = 0
    spec_acceptance: float = 0.7
    cold_requests: int = 0
    cold_ms: int = 0
    stall_every: int = 0
    stall_ms: int = 0
    step_cpu_us: int = 0
    slow_after_ms: int = 0
    slow_for_ms: int = 0
    slow_percent: int = 100
    # A schedule instead of the model, for every request; both or one.
    ttft_us: int | None = None
    itl_us: int | None = None
    # The wire.
    keep_alive_timeout_s: float = 5.0
    http10: str = "chunked"  # as vLLM; "close": close-delimited
    x_accel_buffering: str | None = None
    request_id_headers: bool = False
    per_request_metrics: bool = False
    stamps: bool = False
    event_bytes: int | None = None
    bundle: int = 1
    synthetic_stream: bool = False
    fault: str | None = None
    fault_every: int = 1  # of so many requests one has it
    # A captured answer instead of an engine.
    replay: Path | None = None
    replay_gap_us: int = 1000
    # A JSON line for each finished request, with the model's own times.
    truth: Path | None = None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise SimConfigError(f"{flag(name)} is {value}; it must be at least {least}.")
        if not 0 <= self.spec_acceptance <= 1:
            raise SimConfigError(f"--spec-acceptance is {self.spec_acceptance}; it must be from 0 to 1.")
        if self.http10 not in ("chunked", "close"):
            raise SimConfigError(f"--http10 is {self.http10!r}; it must be 'chunked' or 'close'.")
        if self.x_accel_buffering is not None and not self.x_accel_buffering.isalnum():
            raise SimConfigError(f"--x-accel-buffering is {self.x_accel_buffering!r}; it must be 'no' or 'yes'.")
        if not self.model:
            raise SimConfigError("--model is empty; it must name the model that is served.")
        room = self.kv_blocks * BLOCK_TOKENS
        if room < self.max_model_len:
            raise SimConfigError(
                f"--kv-blocks {self.kv_blocks} holds {room} tokens, fewer than --max-model-len"
                f" {self.max_model_len}; raise the one or lower the other."
            )
        self.address()
        self.parsed_fault()

    def address(self) -> tuple[str, int]:
        """Host and port of ``listen``; IPv6 hosts stand in brackets; port 0 takes a free one."""
        host, colon, port = self.listen.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            colon = ""
        if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise SimConfigError(f"--listen is {self.listen!r}; it must be HOST:PORT, like 127.0.0.1:8000.")
        return host, int(port)

    def parsed_fault(self) -> Fault | None:
        if self.fault is None:
            return None
        try:
            return parse_fault(self.fault)
        except ValueError as error:
            raise SimConfigError(f"--fault: {error}") from None

    def engine(self) -> EngineConfig:
        return EngineConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            prefill_overhead_ns=self.prefill_overhead_us * 1000,
            decode_base_ns=self.decode_base_us * 1000,
            decode_per_seq_ns=self.decode_per_seq_us * 1000,
            kv_blocks=self.kv_blocks,
            spec_tokens=self.spec_tokens,
            spec_acceptance=self.spec_acceptance,
            cold_requests=self.cold_requests,
            cold_ns=self.cold_ms * 1_000_000,
            stall_every=self.stall_every,
            stall_ns=self.stall_ms * 1_000_000,
            slow_after_ns=self.slow_after_ms * 1_000_000,
            slow_for_ns=self.slow_for_ms * 1_000_000,
            slow_percent=self.slow_percent,
            seed=self.seed,
        )


_LEAST: dict[str, int] = {
    "output_tokens": 1,
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "prefill_tokens_per_s": 1,
    "prefill_overhead_us": 0,
    "decode_base_us": 0,
    "decode_per_seq_us": 0,
    "kv_blocks": 1,
    "frontend_us_per_token": 0,
    "spec_tokens": 0,
    "cold_requests": 0,
    "cold_ms": 0,
    "stall_every": 0,
    "stall_ms": 0,
    "step_cpu_us": 0,
    "slow_after_ms": 0,
    "slow_for_ms": 0,
    "slow_percent": 100,
    "ttft_us": 0,
    "itl_us": 0,
    "keep_alive_timeout_s": 0,
    "event_bytes": 1,
    "bundle": 1,
    "fault_every": 1,
    "replay_gap_us": 0,
}


def flag(name: str) -> str:
    """The flag of a field. Its unit stays where it is a rate's, and goes where the flag is uvicorn's own."""
    return "--" + name.replace("_timeout_s", "_timeout").replace("_", "-")
