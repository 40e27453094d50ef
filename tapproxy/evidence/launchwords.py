"""The phrases and the settings of engines' start-up logs, as tables: a new engine or version is a row here.

Rules here: a pattern's groups are numbers of signals, in order; a signal that begins with ``_`` is only of use for
another one. A later line wins, unless the table of what is combined says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

_N: Final = r"([\d,]+(?:\.\d+)?)"

# Engine → a phrase that only it has.
ENGINES: Final = (
    (
        "vllm",
        re.compile(r"vLLM API server version|LLM engine \(v|Initializing an? (?:V\d )?LLM engine|\[api_utils\.py:"),
    ),
    ("vllm", re.compile(r"GPU KV cache size: [\d,]+ tokens|# (?:GPU|CPU|TPU|cuda) blocks: \d")),
    ("sglang", re.compile(r"server_args=ServerArgs\(|\bsglang\b.*launch|KV Cache is allocated\. #tokens")),
    ("llama.cpp", re.compile(r"\bllama_(?:context|new_context_with_model|kv_cache\w*): |^(?:srv|main)\b.*load_model")),
    ("tgi", re.compile(r"text_generation_(?:launcher|router)\b")),
)
# A start begins; what an earlier one in the same log said is over.
BEGINS: Final = re.compile(
    r"vLLM API server version|non-default args: |server_args=ServerArgs\(|text_generation_launcher: Args \{"
    r"|(?:^|I )build: \d+ \(|system_info: n_threads"
)
READY: Final = re.compile(
    r"Application startup complete|Uvicorn running on|The server is fired up|server is listening on"
    r"|HTTP server listening|text_generation_router: .*Connected|router/src/server\.rs.*Connected"
)
# What users sent may stand in such a line.
OF_USERS: Final = re.compile(r"Received request|\bprompt: ?['\"]|prompt_token_ids|HTTP/1\.[01]\"")

_CHUNKED: Final = {"chunked_prefill": 1.0}
# Phrase → what each of its groups is. A signal without a group has its value here.
_ROWS: Final[tuple[tuple[str, tuple[str, ...], dict[str, float]], ...]] = (
    (rf"(?:GPU|CPU|TPU|XPU|HPU) KV cache size: {_N} tokens", ("kv_cache_tokens",), {}),
    (rf"Maximum concurrency for {_N} tokens per request: {_N}x", ("max_model_len", "kv_cache_requests"), {}),
    (rf"# (?:GPU|cuda) blocks: {_N}", ("_blocks",), {}),
    (rf"Chunked prefill is enabled with max_num_batched_tokens={_N}", ("max_num_batched_tokens",), _CHUNKED),
    (r"[Cc]hunked prefill is (?:disabled|not supported)|[Dd]isabling chunked prefill", (), {"chunked_prefill": 0}),
    (rf"Using max model len {_N}", ("max_model_len",), {}),
    (rf"Loading weights took {_N} s", ("load_s",), {}),
    (rf"Model loading took {_N} Gi?B(?: memory)? and {_N} s", ("_", "load_s"), {}),
    (rf"Loading model weights took {_N} GB", ("_",), {}),
    (rf"Graph capturing finished in {_N} sec", ("capture_s",), {"cuda_graphs": 1}),
    (r"Capturing (?:CUDA|cudagraph)[\w ,()]*?(?:graph|shapes)", (), {"cuda_graphs": 1}),
    (r"Enforce eager set|CUDA graph is not supported|Cudagraph is disabled", (), {"cuda_graphs": 0}),
    (rf"torch\.compile takes {_N} s in total", ("compile_s",), {}),
    (rf"init engine \(.*?\) took {_N} s", ("init_s",), {}),
    (rf"Tensor parallel size \({_N}\) exceeds available GPUs \({_N}\)", ("tensor_parallel", "gpus"), {}),
    (r"not supported on more than two PCIe-only GPUs", (), {"nvlink": 0}),
    # SGLang
    (rf"KV Cache is allocated\. .*?#tokens: {_N}", ("_allocated",), {}),
    (rf"\bmax_total_num_tokens={_N}", ("kv_cache_tokens",), {}),
    (rf"\bcontext_len={_N}", ("max_model_len",), {}),
    (rf"\bmax_running_requests={_N}", ("max_num_seqs",), {}),
    (rf"Load weight end\. elapsed={_N} s", ("load_s",), {}),
    (rf"Capture (?:\w+ )?cuda graph end\. (?:Time elapsed: |elapsed=){_N} s", ("capture_s",), {"cuda_graphs": 1}),
    # llama.cpp
    (rf"llama_(?:context|new_context_with_model|init_from_model): n_ctx +(?:= ){_N}", ("kv_cache_tokens",), {}),
    (rf"llama_\w+: n_ctx_(?:per_)?seq +(?:= ){_N}", ("max_model_len",), {}),
    (rf"llama_\w+: n_batch +(?:= ){_N}", ("max_num_batched_tokens",), {}),
    (rf"llama_\w+: n_seq_max +(?:= ){_N}", ("max_num_seqs",), {}),
    (rf"initializing slots, n_slots = {_N}", ("max_num_seqs",), {}),
    (rf"new slot,? n_ctx(?:_slot)? = {_N}", ("max_model_len",), {}),
    (rf"-> Slot \d+ - max context: {_N}", ("max_model_len",), {}),
    # TGI
    (rf"Setting max batch total tokens to {_N}", ("kv_cache_tokens",), {}),
    (r"Using prefix caching = [Tt]rue", (), {"prefix_caching": 1}),
    (r"Using prefix caching = [Ff]alse", (), {"prefix_caching": 0}),
    (r"Cuda Graphs are enabled|Using default cuda graphs", (), {"cuda_graphs": 1}),
    (r"Cuda Graphs are disabled", (), {"cuda_graphs": 0}),
)
PHRASES: Final = tuple((re.compile(pattern), groups, fixed) for pattern, groups, fixed in _ROWS)
# Phrase → fact, of its first group.
WORDS: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (re.compile(r"vLLM API server version v?(\d[\w.+-]*)"), "version"),
    (re.compile(r"LLM engine \(v(\d[\w.+-]*)\)"), "version"),
    (re.compile(r"[█▄▀ ] version v?(\d+\.[\w.+-]*)\s*$"), "version"),
    (re.compile(r"(?:^|I )build: (\d+) \("), "version"),
    (re.compile(r"offloaded (\d+/\d+) layers to GPU"), "offloaded_layers"),
    (re.compile(r"\bUsing (\w+) backend\b"), "attention"),
)
# Where the settings stand in a line.
SETTINGS: Final = re.compile(
    r"non-default args: \{|args: Namespace\(|with config: (?:VllmConfig\()?|server_args=ServerArgs\(|Args \{"
)


def _same(value: float) -> float:
    return value


def _not(value: float) -> float:
    return 0.0 if value else 1.0


# Setting → signal, and how its number is read. Later ones of one line win: what is resolved follows what was asked.
NUMBERS: Final[tuple[tuple[str, str, Callable[[float], float]], ...]] = (
    ("max_model_len", "max_model_len", _same),
    ("max_seq_len", "max_model_len", _same),
    ("context_length", "max_model_len", _same),
    ("max_total_tokens", "max_model_len", _same),
    ("max_num_seqs", "max_num_seqs", _same),
    ("max_running_requests", "max_num_seqs", _same),
    ("max_batch_size", "max_num_seqs", _same),
    ("max_num_batched_tokens", "max_num_batched_tokens", _same),
    ("max_batch_prefill_tokens", "max_num_batched_tokens", _same),
    ("chunked_prefill_size", "_chunk", _same),
    ("max_prefill_tokens", "_prefill", _same),
    ("tensor_parallel_size", "tensor_parallel", _same),
    ("tp_size", "tensor_parallel", _same),
    ("num_shard", "tensor_parallel", _same),
    ("pipeline_parallel_size", "pipeline_parallel", _same),
    ("pp_size", "pipeline_parallel", _same),
    ("data_parallel_size", "data_parallel", _same),
    ("dp_size", "data_parallel", _same),
    ("nnodes", "nodes", _same),
    ("api_server_count", "api_servers", _same),
    ("stream_interval", "stream_interval", _same),
    ("num_scheduler_steps", "scheduler_steps", _same),
    ("gpu_memory_utilization", "gpu_memory_utilization", _same),
    ("mem_fraction_static", "gpu_memory_utilization", _same),
    ("cuda_memory_fraction", "gpu_memory_utilization", _same),
    ("enable_chunked_prefill", "chunked_prefill", _same),
    ("chunked_prefill_enabled", "chunked_prefill", _same),
    ("enable_prefix_caching", "prefix_caching", _same),
    ("disable_radix_cache", "prefix_caching", _not),
    ("enforce_eager", "cuda_graphs", _not),
    ("disable_cuda_graph", "cuda_graphs", _not),
    ("block_size", "_block_tokens", _same),
    ("speculative_num_draft_tokens", "speculative_tokens", _same),
)
# Setting → fact. Its value is a word; anything that could hold more is not taken.
FACTS: Final = {
    "model": "model",
    "model_path": "model",
    "model_id": "model",
    "served_model_name": "served_model",
    "dtype": "dtype",
    "quantization": "quantization",
    "kv_cache_dtype": "kv_cache_dtype",
    "device_config": "device",
    "device": "device",
    "distributed_executor_backend": "executor",
    "speculative_algorithm": "speculative",
    "scheduling_policy": "scheduling_policy",
    "schedule_policy": "scheduling_policy",
}
WORD: Final = re.compile(r"[\w.+-]+(?:/[\w.+-]+)*|(?:/[\w.+-]+)+")
METHOD: Final = re.compile(r"\bmethod['\"]?[:=] ?['\"](\w+)")
DRAFT_TOKENS: Final = re.compile(r"\bnum_spec(?:ulative)?_tokens['\"]?[:=] ?(\d+)")
GRAPH_MODE: Final = re.compile(r"cudagraph_mode['\"]?[:=] ?[<'\"]?(?:CUDAGraphMode\.)?([A-Z_]+)")
# Of several lines of one signal: each rank says what it found; the scheduler keeps to the smallest, and waits for the
# slowest. (Engines side by side, data parallel, each have a cache of their own.)
COMBINED: Final[dict[str, Callable[[float, float], float]]] = {
    "kv_cache_tokens": min, "_blocks": min, "_allocated": min, "load_s": max, "capture_s": max, "compile_s": max,
}  # fmt: skip
