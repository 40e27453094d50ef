"""What is read beside a scenario's path while it runs: the engine's metrics page."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Final

from tapproxy.core.sample import Sample, SampleKind
from tapproxy.wire.fetch import Client
from tapproxy.wire.stamps import boot_id

INTERVAL_S: Final = 0.25
_LINE: Final = re.compile(r"^([a-z_:]+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_PAGE: Final = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage_share",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "output_tokens",
    "vllm:request_success_total": "finished",
    "vllm:spec_decode_num_drafts_total": "spec_drafts",
    "vllm:spec_decode_num_draft_tokens_total": "spec_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "spec_accepted_tokens",
    "process_start_time_seconds": "process_start_s",
    "process_cpu_seconds_total": "process_cpu_s",
    **{
        f"{name}_{part}": f"{own}_{part}"
        for part in ("sum", "count")
        for name, own in {
            "vllm:time_to_first_token_seconds": "ttft_s",
            "vllm:inter_token_latency_seconds": "itl_s",
            "vllm:request_time_per_output_token_seconds": "tpot_s",
            "vllm:e2e_request_latency_seconds": "e2e_s",
            "vllm:request_queue_time_seconds": "queue_s",
            "vllm:request_prefill_time_seconds": "prefill_s",
            "vllm:request_decode_time_seconds": "decode_s",
            "vllm:request_inference_time_seconds": "inference_s",
            "vllm:iteration_tokens_total": "step_tokens",
            "vllm:request_prompt_tokens": "prompt_length_tokens",
            "vllm:request_generation_tokens": "output_length_tokens",
        }.items()
    },
}


def of_page(text: str, source: str) -> Sample:
    """One reading of the simulator's page."""
    values: dict[str, float] = {}
    for name, value in _LINE.findall(text):
        if name in _PAGE:
            values[_PAGE[name]] = values.get(_PAGE[name], 0.0) + float(value)
    return Sample(
        SampleKind.ENGINE,
        source,
        time.monotonic_ns(),
        time.time_ns(),
        boot_id(),
        values=values,
        facts={"engine": "vllm"},
    )


async def watch(url: str, into: list[Sample]) -> None:
    """Reads the page until cancelled."""
    client = Client(url, timeout_s=5.0)
    try:
        while True:
            fetched = await client.fetch("GET", "/metrics")
            if fetched.error is None:
                into.append(of_page(fetched.body.decode(), f"{url}/metrics"))
            await asyncio.sleep(INTERVAL_S)
    finally:
        await client.close()
