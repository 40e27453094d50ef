"""The rules that blame the engine. Each judges in a module of its own; here stand the rows.

Rules here: every threshold is a constant with its reason, where it is judged, and is printed with the number held
against it. Medians and shares decide, never a maximum: one late event on a busy machine accuses nobody.
"""

from __future__ import annotations

from typing import Final

from tapproxy.diagnose import (
    engine,
    engine_decode,
    engine_frontend,
    engine_gaps,
    engine_prefill,
    engine_queue,
    engine_rest,
    engine_start,
    launch,
)
from tapproxy.diagnose.rule import Rule

RULES: Final = (
    Rule(
        "engine.errors",
        "engine",
        "engine answers",
        lambda case: engine.errors(case.view),
        "Look at the engine's log at the times of these requests (their ids are in the records): out of memory, a "
        "crash of a worker, a refused length. Mend that first; latency of the others is not the first problem. Verify "
        "with the same load: no answers of 5xx, none cut short.",
    ),
    Rule(
        "engine.synthetic_stream",
        "engine.decode",
        "engine",
        lambda case: engine.synthetic_stream(case.view),
        "The answer is generated first and streamed afterwards. Look for what collects it: a gateway in front of the "
        "engine, an output parser, guardrails, or a server that only imitates streaming. Take it out of one route: "
        "TTFT should fall to the prefill; what it checked is then unchecked. Verify: tokens come all "
        "along the answer's time.",
    ),
    Rule(
        "engine.bundling",
        "engine.decode",
        "engine",
        lambda case: engine.bundling(case.view, drafts=engine_decode.kept_share(case) is not None),
        "Several tokens come at a time from the engine itself. Where it speculates, that is what it does. Else set its "
        "stream interval to 1 (vLLM and SGLang --stream-interval), or give its API process a core to itself. Expect a "
        "token an event at the same pace overall; more events cost CPU in the API process and everywhere behind it. "
        "Verify: tokens an event, and E2E.",
    ),
    Rule(
        "engine.cold_start",
        "engine.prefill",
        "path",
        engine_start.cold_start,
        "Send a few requests of the usual length after each start, before traffic comes (a readiness probe that "
        "generates a token does it). The first real requests then take what the later ones take; a start lasts longer "
        "by those requests. Verify: restart, warm, and compare the first twenty TTFTs with the later median.",
    ),
    Rule(
        "engine.batching",
        "engine.queue",
        "path",
        launch.any_of(engine_queue.limit_too_low, engine_prefill.mixed_batches, launch.unchunked),
        "Raise the limit of running requests by half (vLLM --max-num-seqs, SGLang --max-running-requests): requests "
        "wait while the KV cache has room. Expect less queue time and more throughput; it may cost token pace, since a "
        "step carries more sequences, and preemptions once the cache fills. Verify with the same load: queue time, ICL "
        "P95, preemptions.",
    ),
    Rule(
        "engine.kv_cache",
        "engine.queue",
        "path",
        launch.any_of(engine_queue.kv_cache, launch.small_cache),
        "Give the KV cache more room: raise gpu_memory_utilization by a few points (vLLM), or shorten contexts and cap "
        "max_tokens so that each request holds less. Expect less waiting at the same load; memory set aside for it is "
        "missing elsewhere (CUDA graphs, activations). KV in lower precision only with a quality test. Do not add "
        "concurrency. Verify: KV usage and waiting under the same load.",
    ),
    Rule(
        "engine.queue",
        "engine.queue",
        "path",
        engine_queue.queue,
        "More comes than the engine carries. Add a replica, or cap max_tokens and set a limit of concurrency with "
        "timeouts in front of it, so that late answers are refused instead of retried. Expect TTFT to fall by the "
        "queue time; a limit costs refusals at peaks. A higher limit alone moves the wait into the engine. Verify with "
        "the same arrivals: requests waiting, queue time P95, completion rate.",
    ),
    Rule(
        "engine.preemption",
        "engine.decode",
        "engine",
        engine_gaps.preemption,
        "Let fewer requests share the KV cache: lower the limit of running requests (vLLM --max-num-seqs) to what ran "
        "before preemptions began, or raise gpu_memory_utilization. Expect the long gaps to go, and more waiting "
        "before the first token instead. Verify: preemptions a minute, ICL P99 and throughput under the same load.",
    ),
    Rule(
        "engine.stall",
        "engine.decode",
        "engine",
        engine_gaps.stall,
        "Look at what the engine's process did at these moments: garbage collection, a reload, a blocking log or disk "
        "write, another process on the host or card. Take one of them away and repeat the load; profile the engine "
        "(py-spy dump in a gap) where none is found. Verify: gaps beyond ten medians, counted again.",
    ),
    Rule(
        "engine.prefill",
        "engine.prefill",
        "path",
        engine_prefill.prefill,
        "Keep long prompts from holding up the others: chunked prefill on, with fewer tokens a step (vLLM "
        "--max-num-batched-tokens), or an entry and a quota of their own. Expect the TTFT of the short ones to fall to "
        "what it is at other times; the long ones wait longer. Verify with the same mix: TTFT by prompt length.",
    ),
    Rule(
        "engine.tokenizer",
        "engine.frontend",
        "path",
        engine_frontend.tokenizer,
        "Give the engine's API process a core to itself, or more API processes (vLLM --api-server-count), and keep the "
        "prompt's constant parts (tool schemas, templates) short. Expect TTFT to fall by the frontend time; each "
        "process takes a core. `tapproxy tokens` tells what template and tokenising take on this host. Verify: "
        "frontend time against prompt tokens, before and after.",
    ),
    Rule(
        "engine.spec_decode",
        "engine.decode",
        "path",
        engine_decode.spec_decode,
        "Measure with speculation off under the same load, and keep it only where TPOT is lower with it. Or draft "
        "fewer tokens (num_speculative_tokens): fewer are thrown away. Off frees compute and memory for the batch; "
        "answers that repeat their prompt lose its gain. Verify: TPOT and throughput with it on and off, at low and "
        "at high concurrency.",
    ),
    Rule(
        "engine.decode",
        "engine.decode",
        "engine",
        launch.any_of(engine_decode.decode, launch.far_parallel),
        "Find what became slower, or what a step spends: compare engine version, model revision and quantisation with "
        "the last good run, then batch size (fewer sequences a step: lower TPOT, less throughput), then tensor "
        "parallelism inside the node. One of them at a time, with the same load. Verify: TPOT P50 and P95 at the same "
        "concurrency.",
        ("gpu.", "host.", "engine.stall", "engine.preemption", "engine.batching", "engine.spec_decode"),
    ),
    Rule(
        "engine.unattributed",
        "engine",
        "engine",
        engine_rest.unattributed,
        "Have the engine tell its parts, and measure again.",
        ("gpu.", "host.", "engine."),
    ),
)
