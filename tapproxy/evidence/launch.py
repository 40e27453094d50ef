"""What an engine said when it started: its limits, the room it found for the KV cache, how it was built and set.

Rules here: phrases and settings are tables; a line that is in none is nothing. A name that is not in the table is not
looked at, so that no key and no prompt comes along. Reading stops counting when the engine is ready, since later
lines may hold what its users sent; of several starts in one log the last one is told. A log is never an error.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tapproxy.core.sample import Sample, SampleKind
from tapproxy.evidence import settings
from tapproxy.evidence.settings import number, plain

_MOST_BYTES: Final = 64 << 20
_MOST_LINE: Final = 1 << 18
_ANSI: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_N: Final = r"([\d,]+(?:\.\d+)?)"
# vLLM's block of its cache on a GPU, where neither it nor the log says another.
_BLOCK_TOKENS: Final = 16

# Engine → a phrase that only it has.
_ENGINES: Final = (
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
_BEGINS: Final = re.compile(
    r"vLLM API server version|non-default args: |server_args=ServerArgs\(|text_generation_launcher: Args \{"
    r"|(?:^|I )build: \d+ \(|system_info: n_threads"
)
_READY: Final = re.compile(
    r"Application startup complete|Uvicorn running on|The server is fired up|server is listening on"
    r"|HTTP server listening|text_generation_router: .*Connected|router/src/server\.rs.*Connected"
)
# What users sent may stand in such a line.
_OF_USERS: Final = re.compile(r"Received request|\bprompt: ?['\"]|prompt_token_ids|HTTP/1\.[01]\"")

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
_PHRASES: Final = tuple((re.compile(pattern), groups, fixed) for pattern, groups, fixed in _ROWS)
# Phrase → fact, of its first group.
_WORDS: Final[tuple[tuple[re.Pattern[str], str], ...]] = (
    (re.compile(r"vLLM API server version v?(\d[\w.+-]*)"), "version"),
    (re.compile(r"LLM engine \(v(\d[\w.+-]*)\)"), "version"),
    (re.compile(r"[█▄▀ ] version v?(\d+\.[\w.+-]*)\s*$"), "version"),
    (re.compile(r"(?:^|I )build: (\d+) \("), "version"),
    (re.compile(r"offloaded (\d+/\d+) layers to GPU"), "offloaded_layers"),
    (re.compile(r"\bUsing (\w+) backend\b"), "attention"),
)
# Where the settings stand in a line.
_SETTINGS: Final = re.compile(
    r"non-default args: \{|args: Namespace\(|with config: (?:VllmConfig\()?|server_args=ServerArgs\(|Args \{"
)


def _same(value: float) -> float:
    return value


def _not(value: float) -> float:
    return 0.0 if value else 1.0


def _positive(value: float) -> float:
    return 1.0 if value > 0 else 0.0


# Setting → signal, and how its number is read. Later ones of one line win: what is resolved follows what was asked.
_NUMBERS: Final[tuple[tuple[str, str, Callable[[float], float]], ...]] = (
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
_FACTS: Final = {
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
_WORD: Final = re.compile(r"[\w.+-]+(?:/[\w.+-]+)*|(?:/[\w.+-]+)+")
_METHOD: Final = re.compile(r"\bmethod['\"]?[:=] ?['\"](\w+)")
_DRAFT_TOKENS: Final = re.compile(r"\bnum_spec(?:ulative)?_tokens['\"]?[:=] ?(\d+)")
_GRAPH_MODE: Final = re.compile(r"cudagraph_mode['\"]?[:=] ?[<'\"]?(?:CUDAGraphMode\.)?([A-Z_]+)")
# Of several lines of one signal: each rank says what it found; the scheduler keeps to the smallest, and waits for the
# slowest. (Engines side by side, data parallel, each have a cache of their own.)
_COMBINED: Final[dict[str, Callable[[float, float], float]]] = {
    "kv_cache_tokens": min, "_blocks": min, "_allocated": min, "load_s": max, "capture_s": max, "compile_s": max,
}  # fmt: skip
_EXPECTED: Final = ("kv_cache_tokens", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
_NOT_TOLD: Final = "the start-up log does not tell it: engines print some settings only where they were set"


def read(
    path: Path,
    *,
    boot_id: str | None = None,
    now_ns: Callable[[], int] = time.monotonic_ns,
    unix_ns: Callable[[], int] = time.time_ns,
    most_bytes: int = _MOST_BYTES,
) -> Sample:
    """One sample of a start-up log; its times are those of this reading. Never raises: ``problem`` says why not."""
    sample = Sample(SampleKind.LAUNCH, f"log {path.name}", 0, 0, boot_id)
    try:
        with path.open("rb") as file:
            reading = _Reading()
            for line in _lines(file.read, most_bytes):
                reading.line(line)
            reading.tell(sample)
            if file.read(1):
                sample.facts["cut"] = f"only its first {most_bytes >> 20} MiB were read"
    except OSError as error:
        sample.problem = f"the engine's log {path.name} cannot be read: {error.strerror}"
    sample.t_mono_ns, sample.t_unix_ns = now_ns(), unix_ns()
    return sample


def _lines(read_bytes: Callable[[int], bytes], most_bytes: int) -> Iterator[str]:
    """Without colours; what a progress bar wrote over is a line of its own."""
    rest, size = b"", 0
    while size < most_bytes and (piece := read_bytes(min(1 << 20, most_bytes - size))):
        size += len(piece)
        *whole, rest = re.split(rb"[\r\n]", rest + piece)
        for line in whole:
            yield _clean(line)
        rest = rest[:_MOST_LINE]
    yield _clean(rest)


def _clean(line: bytes) -> str:
    return _ANSI.sub("", line[:_MOST_LINE].decode("utf-8", "replace"))


class _Reading:
    """What the lines have said so far."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}
        self._facts: dict[str, str] = {}
        self._engine: str | None = None
        self._starts = 0
        self._complete = False  # this start has said more than its settings
        self._ready = False
        self._open: list[str] = []  # the lines of a settings text that is not closed yet

    def line(self, line: str) -> None:
        if not line or _OF_USERS.search(line):
            return
        if self._open:
            self._open.append(line.strip())
            if line.startswith("}") or len(self._open) > 500:
                text, self._open = " ".join(self._open), []
                self._settings(text)
            return
        if _BEGINS.search(line):
            self._begin()
        if self._ready:
            return
        self._engine = self._engine or next((name for name, phrase in _ENGINES if phrase.search(line)), None)
        found = _SETTINGS.search(line)
        self._words(line if found is None else line[: found.start()])
        if found is not None:
            if line.rstrip().endswith("{"):
                self._open = [line[found.end() :]]
            else:
                self._settings(line[found.end() :])
            return
        self._phrases(line)
        self._ready = self._ready or _READY.search(line) is not None

    def _begin(self) -> None:
        """Several lines of one start begin it; only what says more than its settings makes the next one another."""
        if self._complete or self._ready:
            self._values.clear()
            self._facts.clear()
            self._complete = self._ready = False
        elif self._starts:
            return
        self._starts += 1

    def _phrases(self, line: str) -> None:
        for pattern, groups, fixed in _PHRASES:
            match = pattern.search(line)
            if match is None:
                continue
            self._complete = True
            self._values.update(fixed)
            for signal, text in zip(groups, match.groups(), strict=True):
                value = number(text)
                if value is not None:
                    self._put(signal, value)

    def _words(self, line: str) -> None:
        for pattern, fact in _WORDS:
            match = pattern.search(line)
            if match is not None:
                self._facts[fact] = match[1]

    def _put(self, signal: str, value: float) -> None:
        combine = _COMBINED.get(signal)
        known = self._values.get(signal)
        self._values[signal] = value if combine is None or known is None else combine(known, value)

    def _settings(self, text: str) -> None:
        found = settings.pairs(text)
        for name, signal, as_read in _NUMBERS:
            value = number(plain(found.get(name, "")))
            if value is not None:
                self._values[signal] = as_read(value)
        for name, fact in _FACTS.items():
            word = plain(found.get(name, "").strip("[]"))
            if word is not None and len(word) <= 200 and _WORD.fullmatch(word):
                self._facts[fact] = word
        self._speculation(found.get("speculative_config", ""))
        mode = _GRAPH_MODE.search(found.get("compilation_config", ""))
        if mode is not None and found.get("enforce_eager") != "True":
            self._values["cuda_graphs"] = 0.0 if mode[1] == "NONE" else 1.0

    def _speculation(self, text: str) -> None:
        if plain(text) is None:
            return
        method = _METHOD.search(text)
        self._facts["speculative"] = method[1] if method is not None else "draft_model"
        tokens = _DRAFT_TOKENS.search(text)
        if tokens is not None:
            self._values["speculative_tokens"] = float(tokens[1])

    def tell(self, sample: Sample) -> None:
        """Puts everything into the sample, with what follows from two of them."""
        values = dict(self._values)
        self._derive(values)
        sample.values = {signal: value for signal, value in values.items() if not signal.startswith("_")}
        sample.facts |= self._facts
        if self._engine is not None:
            sample.facts["engine"] = self._engine
        if self._starts > 1:
            sample.facts["starts"] = f"{self._starts} starts are in the log: the last one is told"
        if not sample.values and "version" not in sample.facts:
            sample.problem = (
                f"{sample.source} holds no line of a start that is known (vLLM, SGLang, llama.cpp, TGI): give the"
                " engine's own output from its start on, at log level INFO"
            )
            return
        sample.absent.update(dict.fromkeys((each for each in _EXPECTED if each not in sample.values), _NOT_TOLD))

    def _derive(self, values: dict[str, float]) -> None:
        if "_allocated" in values:  # of the pools that SGLang allocates, its last line names the one that bounds it
            values.setdefault("kv_cache_tokens", values["_allocated"])
        blocks = values.get("_blocks")
        if blocks is not None and "kv_cache_tokens" not in values:
            values["kv_cache_tokens"] = blocks * values.get("_block_tokens", _BLOCK_TOKENS)
        chunk = values.get("_chunk")
        if chunk is not None:  # SGLang: -1 is off, and then the prefill's own limit bounds a batch
            values["chunked_prefill"] = _positive(chunk)
            bound = chunk if chunk > 0 else values.get("_prefill")
            if bound is not None:
                values["max_num_batched_tokens"] = bound
        # An engine that says its tensor parallelism says the others where they are not 1.
        if "tensor_parallel" in values and self._facts.get("device", "cuda") not in ("cpu", "tpu"):
            values["gpus"] = (
                values["tensor_parallel"] * values.get("pipeline_parallel", 1.0) * values.get("data_parallel", 1.0)
            )
